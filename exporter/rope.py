"""Rotary position embedding as data: which frequencies, and by what the tables are scaled."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..bundle.errors import CheckpointError, UnsupportedError, field_error

if TYPE_CHECKING:
    import torch


class RopeKind(enum.Enum):
    """The rope_type names of transformers that are supported."""

    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"


@dataclass(frozen=True)
class RopeSpec:
    """One RoPE. `parameters` are the kind's own numbers under transformers' names, sorted by name."""

    kind: RopeKind
    theta: float
    head_dim: int
    max_position_embeddings: int
    parameters: tuple[tuple[str, float | int | bool], ...] = ()


# The numbers each kind needs and may have (transformers.modeling_rope_utils).
NEEDED: dict[RopeKind, tuple[str, ...]] = {
    RopeKind.DEFAULT: (),
    RopeKind.LINEAR: ("factor",),
    RopeKind.LLAMA3: ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    RopeKind.YARN: ("factor", "original_max_position_embeddings"),
}
OPTIONAL: dict[RopeKind, tuple[str, ...]] = {
    RopeKind.YARN: ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")
}
ORIGINAL_LENGTH = "original_max_position_embeddings"
# What transformers adds beside per-layer-type entries when it saves them; it decides nothing.
_BESIDE_LAYER_TYPES = {"rope_type", "rope_theta"}


def rope_from_config(config: Mapping[str, Any], where: str, layer_type: str | None = None) -> RopeSpec:
    """Read the RoPE of a transformers config, of the older or the newer generation.

    Older: ``rope_theta`` beside ``rope_scaling`` (null, or a dict with ``type`` or ``rope_type``).
    Newer: ``rope_parameters``, flat or one dict for each layer type. A theta may stand in the dict, beside
    it, or both if they agree; there is no default for it.

    Args:
        config: the dict that holds the RoPE keys, ``max_position_embeddings`` and ``head_dim`` (or
            ``hidden_size`` and ``num_attention_heads``).
        where: the name of that dict for messages, e.g. ``draft/config.json``.
        layer_type: which entry of per-layer-type parameters; None: they must all mean the same.

    Raises:
        CheckpointError: a value is missing, of a wrong type, or two places contradict each other.
        UnsupportedError: a rope_type, a key or a partial rotation that is not implemented.
    """
    dicts = {
        key: _entry(config[key], f"{where}: {key}", layer_type)
        for key in ("rope_parameters", "rope_scaling")
        if config.get(key)
    }
    if len({_meaning(values) for _, values in dicts.values()}) > 1:
        raise field_error(
            CheckpointError,
            f"{where}: rope_scaling",
            config["rope_scaling"],
            f"the same as rope_parameters {config['rope_parameters']!r}",
            "remove one of the two",
        )
    thetas = {f"{path}.rope_theta": v["rope_theta"] for path, v in dicts.values() if "rope_theta" in v}
    if config.get("rope_theta") is not None:
        thetas[f"{where}: rope_theta"] = config["rope_theta"]
    if not thetas:
        raise CheckpointError(
            f"{where}: rope_theta: missing, expected it there or in rope_parameters; there is no safe default"
        )
    for path, theta in thetas.items():
        _number(theta, path)
    if len(set(thetas.values())) > 1:
        raise CheckpointError(
            "rope_theta: got "
            + ", ".join(f"{theta} ({path})" for path, theta in thetas.items())
            + ", expected one value; remove the wrong one"
        )
    path, values = next(iter(dicts.values()), (f"{where}: rope_parameters", {}))
    for place, factor in (
        (f"{where}: partial_rotary_factor", config.get("partial_rotary_factor")),
        (f"{path}.partial_rotary_factor", values.get("partial_rotary_factor")),
    ):
        if factor is not None and factor != 1:
            raise field_error(UnsupportedError, place, factor, "1 (the whole head rotates)")
    longest = _whole(config.get("max_position_embeddings"), f"{where}: max_position_embeddings")
    kind = _kind(values, path)
    return RopeSpec(
        kind,
        float(next(iter(thetas.values()))),
        _head_dim(config, where),
        longest,
        _parameters(kind, values, path, config, where, longest),
    )


def _entry(value: object, path: str, layer_type: str | None) -> tuple[str, dict[str, Any]]:
    """The dict that applies, without nulls, and its path."""
    if not isinstance(value, dict):
        raise field_error(CheckpointError, path, value, "an object or null")
    nested = {name: entry for name, entry in value.items() if isinstance(entry, dict)}
    if not nested:
        return path, {name: x for name, x in value.items() if x is not None}
    unknown = sorted(set(value) - set(nested) - _BESIDE_LAYER_TYPES)
    if unknown:
        raise field_error(UnsupportedError, f"{path}.{unknown[0]}", value[unknown[0]], "only layer types")
    if layer_type is None:
        layer_type = next(iter(nested))
        if len({(_meaning(entry), repr(entry.get("rope_theta"))) for entry in nested.values()}) > 1:
            raise field_error(UnsupportedError, path, value, "the same RoPE for every layer type")
    if layer_type not in nested:
        raise field_error(CheckpointError, path, sorted(nested), f"an entry for {layer_type!r}")
    return f"{path}.{layer_type}", {name: x for name, x in nested[layer_type].items() if x is not None}


def _meaning(values: Mapping[str, Any]) -> str:
    """Equal for dicts that say the same, theta aside."""
    rest = {k: v for k, v in values.items() if k not in ("type", "rope_type", "rope_theta") and v is not None}
    rest = {k: float(v) if isinstance(v, int) else v for k, v in rest.items()}
    return repr((values.get("rope_type", values.get("type", "default")), sorted(rest.items())))


def _kind(values: Mapping[str, Any], path: str) -> RopeKind:
    names = {str(values[key]) for key in ("rope_type", "type") if key in values} or {"default"}
    if len(names) > 1:
        raise field_error(
            CheckpointError, f"{path}.type", values["type"], f"its rope_type {values['rope_type']!r}"
        )
    try:
        return RopeKind(name := names.pop())
    except ValueError:
        raise field_error(
            UnsupportedError, f"{path}.rope_type", name, "one of " + ", ".join(k.value for k in RopeKind)
        ) from None


def _parameters(
    kind: RopeKind, values: Mapping[str, Any], path: str, config: Mapping[str, Any], where: str, longest: int
) -> tuple[tuple[str, float | int | bool], ...]:
    known = (*NEEDED[kind], *OPTIONAL.get(kind, ()))
    unknown = sorted(set(values) - set(known) - {"rope_type", "type", "rope_theta", "partial_rotary_factor"})
    if unknown:
        raise field_error(
            UnsupportedError,
            f"{path}.{unknown[0]}",
            values[unknown[0]],
            f"no such key for rope_type {kind.value!r} (known: {', '.join(known) or 'none'})",
        )
    found = {name: values[name] for name in known if name in values}
    if ORIGINAL_LENGTH in known:
        beside = config.get(ORIGINAL_LENGTH)
        if beside is not None and found.get(ORIGINAL_LENGTH, beside) != beside:
            raise field_error(
                CheckpointError,
                f"{path}.{ORIGINAL_LENGTH}",
                found[ORIGINAL_LENGTH],
                f"{where}: {ORIGINAL_LENGTH} {beside!r}",
            )
        # transformers' own rule: without it, the scaling starts from the config's longest position.
        found.setdefault(ORIGINAL_LENGTH, longest if beside is None else beside)
    for name in NEEDED[kind]:
        if name not in found:
            raise CheckpointError(f"{path}.{name}: missing, expected a number for rope_type {kind.value!r}")
    for name, value in found.items():
        if name == "truncate":
            if not isinstance(value, bool):
                raise field_error(CheckpointError, f"{path}.{name}", value, "true or false")
        else:
            _number(value, f"{path}.{name}")
    return tuple(sorted(found.items()))


def _head_dim(config: Mapping[str, Any], where: str) -> int:
    head_dim = config.get("head_dim")
    if head_dim is None:
        hidden = _whole(config.get("hidden_size"), f"{where}: hidden_size")
        head_dim = hidden // _whole(config.get("num_attention_heads"), f"{where}: num_attention_heads")
    if _whole(head_dim, f"{where}: head_dim") % 2:
        raise field_error(CheckpointError, f"{where}: head_dim", head_dim, "an even number")
    return int(head_dim)


def _number(value: object, path: str) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value < math.inf:  # type: ignore[operator]
        raise field_error(CheckpointError, path, value, "a number > 0")


def _whole(value: object, path: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise field_error(CheckpointError, path, value, "a whole number >= 1")
    return value


def rope_tables(spec: RopeSpec) -> tuple[torch.Tensor, float]:
    """Compute the inverse frequencies and the factor of the cos and sin tables.

    All but the default's numbers come from transformers itself (`Qwen3RotaryEmbedding`, which takes them from
    `ROPE_INIT_FUNCTIONS`), the code that both originals run. Importing its models takes longer than writing
    a small model's weights.

    Returns:
        inv_freq: float32 [head_dim / 2], radians for each position;
        attention_scaling: cos and sin are multiplied by it.
    """
    if spec.kind is RopeKind.DEFAULT:
        import torch

        exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.float32) / spec.head_dim
        return 1.0 / spec.theta**exponents, 1.0
    from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    config = Qwen3Config(
        hidden_size=spec.head_dim,
        num_attention_heads=1,
        head_dim=spec.head_dim,
        num_hidden_layers=1,
        max_position_embeddings=spec.max_position_embeddings,
        rope_parameters={"rope_type": spec.kind.value, "rope_theta": spec.theta, **dict(spec.parameters)},
    )
    rope = Qwen3RotaryEmbedding(config)
    return rope.inv_freq.detach().float(), float(rope.attention_scaling)
