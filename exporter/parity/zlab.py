"""Originals of z-lab's package `dflash`: DFlashDraftModel and DFlash2DraftModel.

Shapes: S sequence, A anchor position, Q block rows, P proposals, H hidden size, F features, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from ...bundle.errors import CheckpointError
from ..checkpoint import Checkpoint
from ..drafts.mask_row import mask_row_from_checkpoint
from ..drafts.spec import DraftFamily, DraftSpec
from .hooks import convolutions_of, outputs_of
from .originals import (
    Array,
    DraftRun,
    Generated,
    Question,
    TargetOriginal,
    import_original,
    patched,
    quiet_transformers,
    to_numpy,
)

DISTRIBUTION = "dflash==0.1.0"
# The package gives no scores, but the law softmax(scores / temperature) over the candidates. A temperature
# above 1 keeps unlikely candidates' probabilities from vanishing.
_SCORE_TEMPERATURE = 16.0


class ZlabDraft:
    """A draft of z-lab, run by z-lab's code; see `DraftOriginal`."""

    package = "dflash"

    def __init__(
        self, module: Any, model: Any, spec: DraftSpec, mask_row: torch.Tensor | None, target: Any
    ) -> None:
        """Hold a loaded model; `module` is ``dflash.model``, `target` the transformers model."""
        self._module, self._model, self._target = module, model, target
        self._mask_row = mask_row
        self._two_stage = spec.family is DraftFamily.DFLASH2
        self._head = module._output_head(target)
        self.taps = tuple(int(tap) for tap in model.target_layer_ids)
        self.block_size = int(model.block_size)
        self.mask_token_id = int(model.mask_token_id)
        self.first_proposal_row = 1
        self.shortest_block = 2

    def run(self, features: Array, question: Question) -> DraftRun:
        """See `DraftOriginal`."""
        model, rows = self._model, question.rows
        context = torch.from_numpy(np.ascontiguousarray(features[None, : question.anchor], np.float32))
        block = torch.full((1, rows), self.mask_token_id)
        block[0, 0] = question.anchor_id
        scale = float(self._module._draft_value(model.config, "input_embedding_scale", 1.0))
        named = {
            "context": model.hidden_norm,
            **{f"layer.{i}": layer for i, layer in enumerate(model.layers)},
        }
        with torch.inference_mode(), self._learned_mask():
            with outputs_of(named) as seen, convolutions_of(model.layers) as convs:
                hidden = model(
                    target_hidden=context,
                    noise_embedding=self._module._raw_input_embeddings(self._target, block, scale),
                    position_ids=torch.arange(question.anchor + rows)[None],
                )[:, 1 - rows :]
            logits = model.compute_logits(hidden, self._head)
            candidates = None
            if self._two_stage:
                proposals, candidates, _ = model.propose(hidden, block[:, 0], self._head, 0.0)
            else:
                proposals = logits.argmax(-1)
        return DraftRun(
            context=to_numpy(seen["context"][0]),
            layers=tuple(to_numpy(seen[f"layer.{i}"][0]) for i in range(len(model.layers))),
            hidden=to_numpy(hidden[0]),
            logits=to_numpy(logits[0]),
            proposals=to_numpy(proposals[0]),
            candidates=None if candidates is None else to_numpy(candidates[0]),
            convs=tuple(convs),
        )

    def scores(self, run: DraftRun, slot: int, previous: Sequence[int]) -> tuple[Array, Array]:
        """See `DraftOriginal`."""
        count = len(previous)
        if not self._two_stage:
            return np.arange(run.logits.shape[-1]), np.repeat(run.logits[slot][None], count, axis=0)
        assert run.candidates is not None
        if not (np.isfinite(run.hidden[slot]).all() and np.isfinite(run.logits[slot]).all()):
            return run.candidates[slot], np.full(
                (count, len(run.candidates[slot])), np.nan
            )  # no law to draw from
        hidden = torch.from_numpy(run.hidden[slot]).expand(count, 1, -1)
        logits = torch.from_numpy(run.logits[slot]).expand(count, 1, -1)
        with (
            torch.inference_mode(),
            torch.random.fork_rng(devices=[]),
        ):  # it draws a path too, which is dropped
            _, candidates, law = self._model.candidate_selector.select(
                hidden, logits, torch.tensor(list(previous)), _SCORE_TEMPERATURE
            )
        return to_numpy(candidates[0, 0]), _SCORE_TEMPERATURE * np.log(to_numpy(law[:, 0]).astype(np.float64))

    def generate(self, prompt: Sequence[int], new_tokens: int, stops: Sequence[int]) -> Generated:
        """Decode with ``dflash_generate``."""
        # It reads a CUDA clock for its statistics, and only the statistics tell the rounds.
        with patched(self._module, _cuda_time=time.perf_counter), self._learned_mask():
            result = self._module.dflash_generate(
                self._model,
                target=self._target,
                input_ids=torch.tensor([list(prompt)]),
                max_new_tokens=new_tokens,
                stop_token_ids=list(stops) or None,
                return_stats=True,
            )
        return Generated(result.output_ids[0, len(prompt) :].tolist(), list(result.acceptance_lengths))

    def _learned_mask(self) -> AbstractContextManager[None]:
        """Mask embeddings that came with the draft, which the package's own code does not know."""
        if self._mask_row is None:
            return patched(self._module)
        row, mask = self._mask_row, self.mask_token_id

        def embed(target: torch.nn.Module, ids: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            rows = F.embedding(ids, target.get_input_embeddings().weight) * scale  # type: ignore[operator]
            return torch.where((ids == mask)[..., None], row, rows)

        return patched(self._module, _raw_input_embeddings=embed)


def load(checkpoint: Checkpoint, spec: DraftSpec, target: TargetOriginal) -> ZlabDraft:
    """Load a z-lab draft; see `originals.draft_original`."""
    module = import_original("dflash.model", DISTRIBUTION)
    kind = module.DFlash2DraftModel if spec.family is DraftFamily.DFLASH2 else module.DFlashDraftModel
    try:
        with quiet_transformers():
            model = kind.from_pretrained(
                str(checkpoint.files()[0].parent.absolute()), dtype=torch.float32, local_files_only=True
            ).eval()
    except Exception as cause:  # damaged files make it raise anything
        raise CheckpointError(f"{checkpoint.name}: dflash cannot load it ({cause})") from cause
    mask_row = mask_row_from_checkpoint(checkpoint, spec).float() if spec.learned_mask else None
    return ZlabDraft(module, model, spec, mask_row, target.model)
