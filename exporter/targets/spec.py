"""`TargetSpec`: what a dense decoder-only target computes."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from ..rope import RopeSpec


class NormPlace(enum.Enum):
    """Where a layer normalises.

    Members:
        BEFORE: the input of attention and of the MLP.
        AROUND: their inputs, and their outputs before they are added.
    """

    BEFORE = "before"
    AROUND = "around"


class NormWeight(enum.Enum):
    """What a stored norm weight w stands for.

    Members:
        FACTOR: the factor itself.
        ABOVE_ONE: the factor 1 + w.
    """

    FACTOR = "w"
    ABOVE_ONE = "1 + w"


@dataclass(frozen=True)
class TargetLayer:
    """In what a layer may differ from its neighbours.

    Attributes:
        rope: how its queries and keys are rotated; None: not at all.
        window: how many tokens a row sees, itself included; None: all of its past.
    """

    rope: RopeSpec | None
    window: int | None = None


@dataclass(frozen=True)
class TargetSpec:
    """Everything that decides what a target computes.

    Attributes:
        layers: one for each decoder layer.
        num_layers: how many they are.
        embedding_rows: rows of the input embedding (may exceed the tokenizer's vocabulary).
        vocab_size: rows of the output head.
        tied: the head is the embedding.
        qk_norm: queries and keys are normalised per head before RoPE.
        qkv_bias: q, k and v projections have a bias; `o_bias` and `mlp_bias` likewise.
        attention_scale: the factor on q k^T.
        tensors: checkpoint tensor for each canonical parameter name.
        norm_place: where layers normalise.
        norm_weight: what the checkpoint stores as a norm's weight.
        embedding_scale: what embedding rows are multiplied by. The draft gets the rows as they are.
        attention_softcap: c of c * tanh(x / c) on attention scores.
        logit_softcap: the same on logits.
    """

    family: str
    hidden_size: int
    intermediate_size: int
    layers: tuple[TargetLayer, ...]
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    hidden_act: str
    vocab_size: int
    embedding_rows: int
    tied: bool
    max_position_embeddings: int
    checkpoint_dtype: str
    stop_token_ids: tuple[int, ...]
    bos_token_id: int | None
    attention_scale: float
    qk_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    norm_place: NormPlace = NormPlace.BEFORE
    norm_weight: NormWeight = NormWeight.FACTOR
    embedding_scale: float = 1.0
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    tensors: tuple[tuple[str, str], ...] = ()
