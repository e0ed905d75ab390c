"""Canonical parameter names of a draft, their shapes, and which tensor of a checkpoint each one is.

Canonical names are z-lab's module paths; a format that stores a tensor under another name says so in its
loader. H hidden size, A heads * head size, K kv heads * head size, D head size, I intermediate size, V
target vocabulary, W draft vocabulary, r selector rank, G hidden size / conv group size, k conv kernel size.

    fc.weight                                              (H, taps * target's H)
    hidden_norm.weight, norm.weight                        (H,)
    layers.{i}.{input,post_attention}_layernorm.weight     (H,)
    layers.{i}.self_attn.{q,k,v,o}_proj.weight             (A, H) (K, H) (K, H) (H, A)
    layers.{i}.self_attn.{q,k,v,o}_proj.bias               (A,) (K,) (K,) (H,), with attention_bias
    layers.{i}.self_attn.{q,k}_norm.weight                 (D,)
    layers.{i}.mlp.{gate,up,down}_proj.weight              (I, H) (I, H) (H, I)
    layers.{i}.{attention,mlp}_conv.base_kernel            (2, k, H), DFlash2
    layers.{i}.{attention,mlp}_conv.kernel_projection.weight  (2 * k * G, H), DFlash2
    candidate_selector.{predecessor,successor}_codebook    (V, r), DFlash2
    candidate_selector.hidden_projection.weight            (r, H), DFlash2
    lm_head.weight, d2t, t2d                               (W, H) (W,) (V,), reduced vocabulary
    mask_embedding                                         (H,), learned mask; see `mask_row`
"""

from __future__ import annotations

from collections.abc import Mapping

from ...bundle.errors import CheckpointError, UnsupportedError, field_error
from ..checkpoint import Checkpoint
from .spec import DraftSpec

FC = "fc.weight"
LM_HEAD = "lm_head.weight"
DRAFT_TO_TARGET = "d2t"
TARGET_TO_DRAFT = "t2d"
MASK_EMBEDDING = "mask_embedding"
CODEBOOKS = ("candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook")

FLOATS = ("float32", "float16", "bfloat16")
_DTYPES = {DRAFT_TO_TARGET: ("int64", "int32"), TARGET_TO_DRAFT: ("bool",)}


def canonical_shapes(spec: DraftSpec) -> dict[str, tuple[int, ...]]:
    """Give the shape of every parameter that a draft like `spec` has, the learned mask aside."""
    h, i = spec.hidden_size, spec.intermediate_size
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        FC: (h, len(spec.taps) * spec.target_hidden_size),
        "hidden_norm.weight": (h,),
        "norm.weight": (h,),
    }
    for layer in range(len(spec.layers)):
        p = f"layers.{layer}"
        shapes |= {
            f"{p}.input_layernorm.weight": (h,),
            f"{p}.post_attention_layernorm.weight": (h,),
            f"{p}.self_attn.q_proj.weight": (q, h),
            f"{p}.self_attn.k_proj.weight": (kv, h),
            f"{p}.self_attn.v_proj.weight": (kv, h),
            f"{p}.self_attn.o_proj.weight": (h, q),
            f"{p}.self_attn.q_norm.weight": (spec.head_dim,),
            f"{p}.self_attn.k_norm.weight": (spec.head_dim,),
            f"{p}.mlp.gate_proj.weight": (i, h),
            f"{p}.mlp.up_proj.weight": (i, h),
            f"{p}.mlp.down_proj.weight": (h, i),
        }
        if spec.attention_bias:
            for name, size in (("q", q), ("k", kv), ("v", kv), ("o", h)):
                shapes[f"{p}.self_attn.{name}_proj.bias"] = (size,)
        if spec.conv is not None:
            kernels = 2 * spec.conv.kernel_size * (h // spec.conv.group_size)
            for side in ("attention", "mlp"):
                shapes[f"{p}.{side}_conv.base_kernel"] = (2, spec.conv.kernel_size, h)
                shapes[f"{p}.{side}_conv.kernel_projection.weight"] = (kernels, h)
    if spec.selector is not None:
        shapes |= dict.fromkeys(CODEBOOKS, (spec.vocab_size, spec.selector.rank))
        shapes["candidate_selector.hidden_projection.weight"] = (spec.selector.rank, h)
    if spec.draft_vocab_size is not None:
        shapes[LM_HEAD] = (spec.draft_vocab_size, h)
        shapes[DRAFT_TO_TARGET] = (spec.draft_vocab_size,)
        shapes[TARGET_TO_DRAFT] = (spec.vocab_size,)
    return shapes


def match_tensors(
    checkpoint: Checkpoint,
    shapes: Mapping[str, tuple[int, ...]],
    aliases: Mapping[str, str],
    elsewhere: Mapping[str, tuple[int, ...]],
    kind: str,
) -> tuple[tuple[str, str], ...]:
    """Find each canonical parameter in a checkpoint, and refuse whatever is left.

    Args:
        checkpoint: only its tensor list is read.
        shapes: canonical name -> shape.
        aliases: canonical name -> another name the format stores it under.
        elsewhere: tensors that are accounted for otherwise -> their shapes.
        kind: what the checkpoint is, for messages.

    Returns:
        (canonical name, checkpoint name), sorted.

    Raises:
        CheckpointError: a tensor is missing, twice there, or of a wrong shape.
        UnsupportedError: a tensor of an element type that is not implemented, or one that nothing uses.
    """
    found: dict[str, str] = {}
    missing: list[str] = []
    for canonical, shape in shapes.items():
        stored = [n for n in (canonical, aliases.get(canonical)) if n is not None and n in checkpoint.tensors]
        if not stored:
            missing.append(canonical)
            continue
        if len(stored) > 1:
            raise CheckpointError(
                f"{checkpoint.name}: tensor {stored[0]!r}: got {stored[1]!r} too, expected one of them; "
                "remove one"
            )
        _check(checkpoint, stored[0], shape, _DTYPES.get(canonical, FLOATS))
        found[canonical] = stored[0]
    if missing:
        raise CheckpointError(
            f"{checkpoint.name}: tensor {missing[0]!r}: missing{_and_more(missing)}, "
            f"expected shape {shapes[missing[0]]} for {kind}; is the checkpoint whole?"
        )
    for name in sorted(set(elsewhere) & set(checkpoint.tensors)):
        _check(checkpoint, name, elsewhere[name], FLOATS)
    spare = sorted(set(checkpoint.tensors) - set(found.values()) - set(elsewhere))
    if spare:
        raise UnsupportedError(
            f"{checkpoint.name}: tensor {spare[0]!r}: got shape {checkpoint.tensors[spare[0]].shape}"
            f"{_and_more(spare)}, expected no such tensor in {kind}; it would change what the draft computes"
        )
    return tuple(sorted(found.items()))


def _check(checkpoint: Checkpoint, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> None:
    entry = checkpoint.tensors[name]
    what = f"{checkpoint.name}: tensor {name!r}"
    if entry.shape != shape:
        raise field_error(CheckpointError, f"{what} shape", entry.shape, f"{shape} by config.json")
    if entry.dtype not in dtypes:
        raise field_error(UnsupportedError, f"{what} dtype", entry.dtype, "one of " + ", ".join(dtypes))


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
