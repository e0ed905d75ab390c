"""`TargetSpec`: what a dense decoder-only target computes."""

from __future__ import annotations

from dataclasses import dataclass

from ..rope import RopeSpec


@dataclass(frozen=True)
class TargetSpec:
    """Everything that decides what a target computes.

    Attributes:
        embedding_rows: rows of the input embedding (may exceed the tokenizer's vocabulary).
        vocab_size: rows of the output head.
        tied: the head is the embedding.
        qk_norm: queries and keys are normalised per head before RoPE.
        qkv_bias: q, k and v projections have a bias; `o_bias` likewise.
        tensors: checkpoint tensor for each canonical parameter name.
    """

    family: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    hidden_act: str
    rope: RopeSpec
    qk_norm: bool
    qkv_bias: bool
    o_bias: bool
    vocab_size: int
    embedding_rows: int
    tied: bool
    max_position_embeddings: int
    checkpoint_dtype: str
    stop_token_ids: tuple[int, ...]
    bos_token_id: int | None
    tensors: tuple[tuple[str, str], ...]
