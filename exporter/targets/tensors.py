"""A target's parameters: their names, shapes, and the tensors that hold them."""

from __future__ import annotations

import dataclasses

from ...bundle.errors import CheckpointError, field_error
from ..checkpoint import Checkpoint
from .reading import HEAD
from .spec import NormPlace, TargetSpec

_NORMS = {
    NormPlace.BEFORE: ("input_layernorm", "post_attention_layernorm"),
    NormPlace.AROUND: (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
}
_UNUSED = "rotary_emb.inv_freq"  # old checkpoints store what the config says


def with_tensors(spec: TargetSpec, checkpoint: Checkpoint) -> TargetSpec:
    """Find every tensor, check its shape, and refuse tensors that nothing uses.

    Raises:
        CheckpointError: a tensor is missing, spare, or of another shape.
    """
    names: dict[str, str] = {}
    for canonical, shape in _shapes(spec).items():
        stored = canonical if canonical == HEAD else f"model.{canonical}"
        entry = checkpoint.tensors.get(stored)
        if entry is None:
            raise CheckpointError(f"{checkpoint.name}: tensor {stored!r} is missing, expected shape {shape}")
        if entry.shape != shape:
            raise field_error(
                CheckpointError, f"{checkpoint.name}: tensor {stored!r}", entry.shape, str(shape)
            )
        names[canonical] = stored
    spare = sorted(
        name
        for name in set(checkpoint.tensors) - set(names.values())
        if not name.endswith(_UNUSED) and not (spec.tied and name == HEAD)
    )
    if spare:
        raise CheckpointError(
            f"{checkpoint.name}: got a tensor {spare[0]!r} (and {len(spare) - 1} more) that {spec.family} "
            "does not use, expected none; is model_type right?"
        )
    return dataclasses.replace(spec, tensors=tuple(sorted(names.items())))


def norm_names(spec: TargetSpec) -> tuple[str, ...]:
    """Canonical names of all norm weights."""
    return tuple(name for name in _shapes(spec) if name.endswith("norm.weight"))


def _shapes(spec: TargetSpec) -> dict[str, tuple[int, ...]]:
    h, i = spec.hidden_size, spec.intermediate_size
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    projections = {
        "self_attn.q_proj": (q, h, spec.qkv_bias),
        "self_attn.k_proj": (kv, h, spec.qkv_bias),
        "self_attn.v_proj": (kv, h, spec.qkv_bias),
        "self_attn.o_proj": (h, q, spec.o_bias),
        "mlp.gate_proj": (i, h, spec.mlp_bias),
        "mlp.up_proj": (i, h, spec.mlp_bias),
        "mlp.down_proj": (h, i, spec.mlp_bias),
    }
    norms = dict.fromkeys(_NORMS[spec.norm_place], (h,))
    if spec.qk_norm:
        norms |= dict.fromkeys(("self_attn.q_norm", "self_attn.k_norm"), (spec.head_dim,))
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (spec.embedding_rows, h),
        "norm.weight": (h,),
    }
    if not spec.tied:
        shapes[HEAD] = (spec.vocab_size, h)
    for layer in range(spec.num_layers):
        prefix = f"layers.{layer}."
        for name, (rows, columns, bias) in projections.items():
            shapes[f"{prefix}{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{prefix}{name}.bias"] = (rows,)
        shapes |= {f"{prefix}{name}.weight": shape for name, shape in norms.items()}
    return shapes
