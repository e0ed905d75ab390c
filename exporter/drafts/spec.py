"""`DraftSpec`: what a draft computes, complete, whatever format it was published in."""

from __future__ import annotations

import enum
from dataclasses import dataclass, fields
from typing import Any

from ..rope import RopeSpec


class DraftFormat(enum.Enum):
    """Who published the checkpoint's layout."""

    ZLAB = "z-lab"
    SPECULATORS = "speculators"


class DraftFamily(enum.Enum):
    """Which network."""

    DFLASH = "dflash"
    DFLASH2 = "dflash2"


class WindowOrigin(enum.Enum):
    """What a sliding window is measured from.

    QUERY: a query at position p sees the keys, of context and block alike, with ``p - key < window`` and,
    unless the layer is causal, ``key - p < window`` (`dflash.model._attention_mask`). So the anchor sees
    window - 1 context rows.

    ANCHOR: every query sees the context keys with ``anchor - key <= window``: the window counts context rows,
    all queries of the block see the same ones, and the block itself is not windowed
    (`speculators.models.dflash.attention.create_anchor_block_mask_mod`).
    """

    QUERY = "query"
    ANCHOR = "anchor"


@dataclass(frozen=True)
class LayerSpec:
    """Attention of one draft layer.

    Attributes:
        window: in tokens, None = all context; its bounds are `WindowOrigin`'s.
        causal: a block row sees the block's rows up to itself, not all of them. Context rows are all older
            than the block.
        window_origin: of no meaning without a window.
    """

    window: int | None
    causal: bool
    window_origin: WindowOrigin = WindowOrigin.QUERY


@dataclass(frozen=True)
class ConvSpec:
    """Grouped dynamic convolutions around attention and MLP of each layer (DFlash2)."""

    kernel_size: int
    group_size: int


@dataclass(frozen=True)
class SelectorSpec:
    """Candidate selector (DFlash2)."""

    rank: int
    top_k: int


@dataclass(frozen=True, kw_only=True)
class DraftSizes:
    """What a draft's transformer takes from the config as it stands there.

    Attributes:
        vocab_size: rows of the target's vocabulary as the draft's config states it.
        pad_token_id: as the draft's config states it; decides nothing, for warnings.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    hidden_act: str
    attention_bias: bool
    vocab_size: int
    max_position_embeddings: int
    pad_token_id: int | None = None

    def sizes(self) -> dict[str, Any]:
        """These fields alone, by name."""
        return {field.name: getattr(self, field.name) for field in fields(DraftSizes)}


@dataclass(frozen=True, kw_only=True)
class DraftSpec(DraftSizes):
    """Everything that decides what a draft computes.

    Attributes:
        taps: 0-based target layers whose outputs are the context features, in the order they are
            concatenated; tap i = output of decoder layer i = Hugging Face ``hidden_states[i + 1]``.
            The value ``num_target_layers`` is not a tap here, and the output of the last layer means the
            state before the target's final norm: a format that feeds another one is refused.
        ropes: one for each layer.
        num_target_layers: depth of the target, where the checkpoint says it.
        first_proposal_row: 1: rows 1.. of the block predict their own position; 0: every row predicts the
            next position (speculators' sample_from_anchor).
        draft_vocab_size: rows of the draft's own head, None = the target's head is used.
        learned_mask: mask slots embed to a row of the draft's own (`drafts/mask_row.py`).
        checkpoint_dtype: of the stored ``fc.weight``.
        tensors: checkpoint tensor for each canonical parameter name (see `drafts/names.py`).
    """

    format: DraftFormat
    family: DraftFamily
    layers: tuple[LayerSpec, ...]
    ropes: tuple[RopeSpec, ...]
    taps: tuple[int, ...]
    num_target_layers: int | None
    target_hidden_size: int
    block_size: int
    first_proposal_row: int
    mask_token_id: int
    draft_vocab_size: int | None
    input_embedding_scale: float
    output_multiplier: float
    logit_softcap: float | None
    conv: ConvSpec | None
    selector: SelectorSpec | None
    learned_mask: bool
    checkpoint_dtype: str
    tensors: tuple[tuple[str, str], ...]

    @property
    def proposals(self) -> int:
        """Tokens proposed a round."""
        return self.block_size - self.first_proposal_row
