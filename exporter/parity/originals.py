"""The PyTorch originals: targets of transformers, and what every draft's original must be able to do.

Everything runs in float32 on the CPU, without TF32. Shapes: S sequence, H hidden size, V vocabulary, A anchor
position, Q block rows, P proposals, k candidates, N choices.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from ...bundle.errors import CheckpointError, ProviderError
from ..checkpoint import Checkpoint
from ..drafts.formats import draft_from_checkpoint
from ..drafts.spec import DraftFormat

Array = NDArray[Any]

# Format -> module with `load(checkpoint, target) -> DraftOriginal`.
ORIGINALS = {
    DraftFormat.ZLAB: "zlab",
    DraftFormat.SPECULATORS: "speculators",
}


@dataclass(frozen=True)
class TargetRun:
    """One pass over a whole sequence.

    Attributes:
        layers: output of every decoder layer before the final norm, each [S, H].
        logits: [S, V].
    """

    layers: tuple[Array, ...]
    logits: Array

    def features(self, taps: Sequence[int]) -> Array:
        """The tapped outputs side by side, [S, taps * H]."""
        return np.concatenate([self.layers[tap] for tap in taps], axis=-1)


class TargetOriginal:
    """A causal language model of transformers."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Load it.

        Raises:
            CheckpointError: transformers cannot read it.
        """
        from transformers import AutoModelForCausalLM, GenerationConfig

        first = checkpoint.files()[0]
        options = {"gguf_file": first.name} if checkpoint.format == "gguf" else {}
        try:
            with quiet_transformers():
                self.model: Any = AutoModelForCausalLM.from_pretrained(
                    str(first.parent.absolute()),
                    dtype=torch.float32,
                    attn_implementation=_attention(checkpoint),
                    local_files_only=True,
                    **options,
                ).eval()
        except Exception as cause:  # damaged files make it raise anything
            raise CheckpointError(f"{checkpoint.name}: transformers cannot load it ({cause})") from cause
        # Greedy, and nothing that a checkpoint's own settings may add to it.
        self.model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)

    def run(self, ids: Sequence[int]) -> TargetRun:
        """Run one pass over a sequence, without a cache."""
        before_norm: list[torch.Tensor] = []
        hook = self.model.get_decoder().norm.register_forward_pre_hook(
            lambda _, args: before_norm.append(args[0])
        )
        try:
            with torch.inference_mode():
                output = self.model(
                    torch.tensor([list(ids)]), output_hidden_states=True, use_cache=False, return_dict=True
                )
        finally:
            hook.remove()
        # transformers gives the last layer's output behind the final norm, all others as they are.
        layers = (*output.hidden_states[1:-1], before_norm[0])
        return TargetRun(tuple(layer[0].numpy() for layer in layers), output.logits[0].float().numpy())

    def greedy(self, prompt: Sequence[int], new_tokens: int) -> list[int]:
        """Exactly `new_tokens` tokens of transformers' greedy decoding; stop ids do not end it."""
        with torch.inference_mode(), quiet_transformers():
            ids = torch.tensor([list(prompt)])
            out = self.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens)
        continuation: list[int] = out[0, len(prompt) :].tolist()
        return continuation


def _attention(checkpoint: Checkpoint) -> str:
    """The implementation of attention that computes what the config says: torch's own knows no soft cap."""
    return "eager" if checkpoint.config.get("attn_logit_softcapping") else "sdpa"


@dataclass(frozen=True)
class Question:
    """A round to be asked of a draft: the block's place, its first token, and how many rows it has."""

    anchor: int
    anchor_id: int
    rows: int


@dataclass(frozen=True)
class ConvCall:
    """One convolution of the original: hidden [Q, H], delta [Q, K, G], base [K, H], output [Q, H]."""

    hidden: Array
    delta: Array
    base: Array
    output: Array


@dataclass(frozen=True)
class DraftRun:
    """What the original computed in a round.

    Attributes:
        context: fc and its norm over all context rows, [A, H].
        layers: block rows behind every layer, each [Q, H].
        hidden: proposal rows behind the final norm, [P, H].
        logits: [P, V of the draft].
        proposals: target ids, [P].
        candidates: [P, k] for a draft with a selector.
        convs: the convolutions, in the order they were computed.
    """

    context: Array
    layers: tuple[Array, ...]
    hidden: Array
    logits: Array
    proposals: Array
    candidates: Array | None = None
    convs: tuple[ConvCall, ...] = ()


@dataclass(frozen=True)
class Generated:
    """A generation: its new tokens, and how many each round added. The first token belongs to no round."""

    ids: list[int]
    lengths: list[int]


class DraftOriginal(Protocol):
    """A draft as its own package computes it. One implementation for each format."""

    taps: tuple[int, ...]
    block_size: int
    mask_token_id: int
    first_proposal_row: int
    shortest_block: int
    """Fewest rows a block may have; `block_size` where the package knows no shorter blocks."""
    package: str

    def run(self, features: Array, question: Question) -> DraftRun:
        """Compute one round from scratch.

        Args:
            features: [S, F] of a whole sequence; rows at or behind the anchor are not looked at.
            question: the round.
        """

    def scores(self, run: DraftRun, slot: int, previous: Sequence[int]) -> tuple[Array, Array]:
        """Score the choices of one slot.

        Args:
            run: what `run` gave.
            slot: which proposal, 0..P-1.
            previous: tokens that may stand in front of it, [n].

        Returns:
            The choices as target ids, [N], and their scores behind each of `previous`, [n, N], up to a
            constant in each row.
        """

    def generate(self, prompt: Sequence[int], new_tokens: int, stops: Sequence[int]) -> Generated | None:
        """Decode with the package's own loop; None if it has none."""


def draft_original(checkpoint: Checkpoint, target: TargetOriginal) -> DraftOriginal:
    """Load a draft's original, whatever its format.

    Raises:
        ProviderError: the package that defines it is not installed.
        CheckpointError: it cannot read the checkpoint.
    """
    spec = draft_from_checkpoint(checkpoint)
    module = importlib.import_module(f".{ORIGINALS[spec.format]}", __package__)
    draft: DraftOriginal = module.load(checkpoint, spec, target)
    return draft


def import_original(module: str, distribution: str) -> Any:
    """Import an original's package.

    Raises:
        ProviderError: it is not installed, or cannot be imported, with what to install.
    """
    try:
        return importlib.import_module(module)
    except ImportError as cause:
        raise ProviderError(
            f"{module}: the draft's original cannot be imported ({cause}); pip install --no-deps "
            f"{distribution} && pip install 'dflash-deploy[parity]' (and then dflash-deploy again: both have "
            "a console script named dflash)"
        ) from cause


def versions(*packages: str) -> dict[str, str]:
    """Installed versions of the packages that compute the reference."""
    return {package: importlib.metadata.version(package) for package in packages}


def to_numpy(tensor: torch.Tensor) -> Array:
    """A copy in float32, or in int64 for ids."""
    detached = tensor.detach()
    return (detached.float() if detached.is_floating_point() else detached.long()).numpy().copy()


@contextlib.contextmanager
def reference_precision() -> Iterator[None]:
    """Full float32 products, whatever the process had set."""
    precision = torch.get_float32_matmul_precision()
    tf32 = torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.allow_tf32 = tf32


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep transformers' notes and bars from the user's screen."""
    from transformers import modeling_gguf_pytorch_utils
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        # Reading a GGUF file shows a bar that no setting turns off.
        with patched(modeling_gguf_pytorch_utils, tqdm=lambda items, **_: items):
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


@contextlib.contextmanager
def patched(module: Any, **values: Any) -> Iterator[None]:
    """Replace attributes of a module for a while."""
    saved = {name: getattr(module, name) for name in values}
    for name, value in values.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in saved.items():
            setattr(module, name, value)
