"""docs/support.md, made from the code: constants are read, and options are tried.

Whether an option is supported is found out as `dflash export` does: a tiny config that uses it is parsed,
with the tensors its original would have, and the spec is asked whether the option got there.

    python tests/support_table.py        writes the page
"""

from __future__ import annotations

import copy
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dflash_deploy import cli
from dflash_deploy.bundle.errors import UnsupportedError
from dflash_deploy.bundle.tensors import DType
from dflash_deploy.exporter import transformer_pair
from dflash_deploy.exporter.checkpoint import TensorEntry
from dflash_deploy.exporter.drafts.body import CLASS_DEFAULTS, FULL, SLIDING
from dflash_deploy.exporter.drafts.formats import FORMATS, SPECULATORS_TYPES, ZLAB_ARCHITECTURES, read_draft
from dflash_deploy.exporter.drafts.names import FLOATS, MASK_EMBEDDING
from dflash_deploy.exporter.drafts.spec import DraftFamily, DraftFormat, DraftSpec
from dflash_deploy.exporter.engines.backends import BACKENDS
from dflash_deploy.exporter.gguf_checkpoint import ARCHITECTURES as GGUF_ARCHITECTURES
from dflash_deploy.exporter.modules.activations import ACTIVATION_NAMES
from dflash_deploy.exporter.parity import speculators as speculators_original
from dflash_deploy.exporter.parity import zlab as zlab_original
from dflash_deploy.exporter.rope import NEEDED, OPTIONAL, ORIGINAL_LENGTH, RopeKind
from dflash_deploy.exporter.simple import pair as simple_pair
from dflash_deploy.exporter.simple.checkpoint import DRAFT_TYPE, TARGET_TYPE
from dflash_deploy.exporter.simple.spec import FAMILY, FORMAT
from dflash_deploy.exporter.targets.families import FAMILIES, target_from_checkpoint
from dflash_deploy.exporter.targets.families import REFUSED as REFUSED_TARGETS
from dflash_deploy.exporter.targets.spec import NormPlace, NormWeight, TargetSpec
from dflash_deploy.runtime.ort_engine import PROVIDERS
from shape_checkpoint import ShapeCheckpoint, speculators_shapes, zlab_shapes

PAGE = Path(__file__).parents[1] / "docs" / "support.md"
COMMAND = "python tests/support_table.py"

YES, REFUSED, NOTHING = "yes", "refused", "-"
Answer = bool | str
Changes = Mapping[str, Any]

# ---------------------------------------------------------------- drafts

DEPTH, VOCAB = 6, 100
_BODY: dict[str, Any] = {
    "attention_bias": False,
    "head_dim": 8,
    "hidden_act": "silu",
    "hidden_size": 24,  # not heads * head_dim
    "intermediate_size": 48,
    "layer_types": [FULL, FULL],
    "max_position_embeddings": 512,
    "model_type": "qwen3",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
    "vocab_size": VOCAB,
}
_DFLASH2 = {"conv_kernel_size": 2, "conv_group_size": 4, "selector_rank": 4, "selector_top_k": 8}
_SLIDING = {"layer_types": [SLIDING, SLIDING], "sliding_window": 4, "use_sliding_window": True}
_QUANTISED = {"quantization_config": {"quant_method": "fp8"}}
_ROPES = {
    RopeKind.DEFAULT: {},
    RopeKind.LINEAR: {"factor": 2.0},
    RopeKind.LLAMA3: {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    RopeKind.YARN: {"factor": 4.0, "original_max_position_embeddings": 128},
}


def _rope(kind: RopeKind) -> dict[str, Any]:
    return {"rope_theta": 1e6, "rope_type": kind.value, **_ROPES[kind]}


@dataclass(frozen=True)
class Trial:
    """One option of drafts.

    Attributes:
        name: as the table has it.
        shows: what the spec says: True, False (the family has no such thing), or a text.
        body: changed transformer keys, of both formats.
        zlab: changed keys of a z-lab config, ``...`` deletes.
        speculators: changed keys of a speculators config.
        tensors: further tensors.
    """

    name: str
    shows: Callable[[DraftSpec], Answer]
    body: Changes = field(default_factory=dict)
    zlab: Changes = field(default_factory=dict)
    speculators: Changes = field(default_factory=dict)
    tensors: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


def _both(name: str, key: str, value: Any, shows: Callable[[DraftSpec], Answer]) -> Trial:
    """A key that each format would hold among the draft's own."""
    return Trial(name, shows, zlab={key: value}, speculators={key: value})


TRIALS = (
    Trial("full layers that see the whole block", lambda s: s.layers[0].window is None),
    Trial(
        "full layers, causal in the block",
        lambda s: s.layers[0].causal,
        zlab={"is_causal": True},
        speculators={"is_causal": True},
    ),
    Trial(
        "sliding layers, causal in the block",
        lambda s: s.layers[0].window == 4 and s.layers[0].causal,
        body=_SLIDING,
        speculators={"sliding_window_non_causal": False},
    ),
    Trial(
        "sliding layers that see the whole block",
        lambda s: s.layers[0].window == 4 and not s.layers[0].causal,
        body=_SLIDING,
        zlab={"is_causal": False},
        speculators={"sliding_window_non_causal": True},
    ),
    Trial("a window counts from", lambda s: f"the {s.layers[0].window_origin.value}", body=_SLIDING),
    Trial("attention bias", lambda s: s.attention_bias, body={"attention_bias": True}),
    Trial("MLP bias", lambda s: True, body={"mlp_bias": True}),
    Trial("head size other than hidden / heads", lambda s: s.head_dim != s.hidden_size // s.num_heads),
    *(
        Trial(
            f"RoPE `{kind.value}`",
            lambda s, kind=kind: all(rope.kind is kind for rope in s.ropes),
            body={"rope_parameters": _rope(kind)},
        )
        for kind in RopeKind
    ),
    Trial(
        "RoPE of the older generation: `rope_theta`, `rope_scaling`",
        lambda s: s.ropes[0].kind is RopeKind.LINEAR and s.ropes[0].theta == 5e5,
        body={
            "rope_parameters": ...,
            "rope_theta": 5e5,
            "rope_scaling": {"type": "linear", "factor": 2.0},
        },
    ),
    Trial(
        "RoPE per layer type",
        lambda s: all(rope.theta == 1e6 for rope in s.ropes) and "the sliding layers' one, for all",
        body={
            "rope_parameters": {
                FULL: {"rope_type": "default", "rope_theta": 1e4},
                SLIDING: {"rope_type": "default", "rope_theta": 1e6},
            }
        },
    ),
    Trial(
        "partial rotation",
        lambda s: True,
        body={"rope_parameters": _rope(RopeKind.DEFAULT) | {"partial_rotary_factor": 0.5}},
    ),
    Trial(
        "the target's last layer as a tap",
        lambda s: s.taps[-1] == DEPTH - 1,
        zlab={"target_layer_ids": [1, DEPTH - 1]},
        speculators={"aux_hidden_state_layer_ids": [2, DEPTH]},
    ),
    Trial("taps in any order", lambda s: s.taps == (3, 1)),
    _both("another target hidden size", "target_hidden_size", 48, lambda s: s.target_hidden_size == 48),
    _both(
        "a proposal from the anchor's row", "sample_from_anchor", True, lambda s: s.first_proposal_row == 0
    ),
    Trial(
        "block of 1 with a proposal from the anchor's row",
        lambda s: s.proposals == s.block_size == 1,
        zlab={"sample_from_anchor": True},
        speculators={"block_size": 1, "sample_from_anchor": True, "conv_kernel_size": 1},
    ),
    _both("reduced vocabulary: `d2t`, `t2d`", "draft_vocab_size", 40, lambda s: s.draft_vocab_size == 40),
    _both("`input_embedding_scale`", "input_embedding_scale", 2.5, lambda s: s.input_embedding_scale == 2.5),
    _both("`output_multiplier`", "output_multiplier", 0.196, lambda s: s.output_multiplier == 0.196),
    _both("`final_logit_softcapping`", "final_logit_softcapping", 20.0, lambda s: s.logit_softcap == 20.0),
    Trial(
        "a mask embedding of its own, as a tensor",
        lambda s: s.learned_mask,
        tensors={MASK_EMBEDDING: (_BODY["hidden_size"],)},
    ),
    Trial(
        "a mask embedding of its own, as a row of `embed_tokens`",
        lambda s: s.learned_mask or "passed over",
        tensors={"embed_tokens.weight": (VOCAB, _BODY["hidden_size"])},
    ),
    Trial("grouped dynamic convolutions", lambda s: s.conv is not None),
    Trial("candidate selector", lambda s: s.selector is not None),
    Trial("quantised safetensors", lambda s: True, body=_QUANTISED),
)


def _config(format_: DraftFormat, family: DraftFamily, trial: Trial) -> dict[str, Any]:
    second = family is DraftFamily.DFLASH2
    own: dict[str, Any] = {"block_size": 8, "mask_token_id": 99, **(_DFLASH2 if second else {})}
    body = copy.deepcopy(_BODY)
    _change(body, trial.body)
    if format_ is DraftFormat.ZLAB:
        name = next(name for name, kind in ZLAB_ARCHITECTURES.items() if kind is family)
        top = {"architectures": [name], "num_target_layers": DEPTH, **body}
        own |= {"target_layer_ids": [3, 1]}
        causal = {k: v for k, v in trial.zlab.items() if k == "is_causal"}
        _change(own, {k: v for k, v in trial.zlab.items() if k not in causal})
        return top | causal | {"dflash_config": own}
    kind = next(kind for kind, (of, _) in SPECULATORS_TYPES.items() if of is family)
    own |= {"aux_hidden_state_layer_ids": [4, 2], "draft_vocab_size": VOCAB, "sample_from_anchor": False}
    changes = {k: v for k, v in trial.speculators.items() if second or k not in _DFLASH2}
    _change(own, changes)
    name = SPECULATORS_TYPES[kind][1][0]
    return {"architectures": [name], "speculators_model_type": kind, **own, "transformer_layer_config": body}


def _change(config: dict[str, Any], changes: Changes) -> None:
    for key, value in changes.items():
        if value is ...:
            config.pop(key)
        else:
            config[key] = value


_PLAIN = Trial("", lambda s: True)


def checkpoint_with(format_: DraftFormat, family: DraftFamily, trial: Trial = _PLAIN) -> ShapeCheckpoint:
    """The config, with the tensors that the original makes of it, or of the plain one if it refuses."""
    shapes_of = zlab_shapes if format_ is DraftFormat.ZLAB else speculators_shapes
    config = _config(format_, family, trial)
    try:
        checkpoint = shapes_of(config)
    except Exception:  # the originals raise what they like
        checkpoint = shapes_of(_config(format_, family, _PLAIN))
        checkpoint.config = config
    for name, shape in trial.tensors.items():
        checkpoint.tensors[name] = TensorEntry(name, "bfloat16", shape)
    if "d2t" in checkpoint.tensors:
        marks = torch.zeros(VOCAB, dtype=torch.bool)
        marks[: checkpoint.tensors["d2t"].shape[0]] = True
        checkpoint.put("d2t", torch.zeros(checkpoint.tensors["d2t"].shape, dtype=torch.int64))
        checkpoint.put("t2d", marks)
    return checkpoint


def draft_cell(format_: DraftFormat, family: DraftFamily, trial: Trial) -> str:
    """Try one option on one format and family."""
    own = trial.zlab if format_ is DraftFormat.ZLAB else trial.speculators
    checkpoint = checkpoint_with(format_, family, trial)
    return _cell(lambda: trial.shows(read_draft(checkpoint).spec), (*trial.body, *own, *trial.tensors))


def _cell(ask: Callable[[], Answer], names: Iterable[str]) -> str:
    """What `ask` says; a refusal counts if it is one of the option, which has these names."""
    try:
        answer = ask()
    except UnsupportedError as error:
        if not any(name in str(error) for name in names):
            raise
        return REFUSED
    return answer if isinstance(answer, str) else YES if answer else NOTHING


_COLUMNS = tuple((format_, family) for format_ in FORMATS for family in DraftFamily)


def _draft_tables() -> Iterable[str]:
    yield "## Draft formats and families\n"
    rows = [
        ["z-lab", family.value, f"`architectures` has `{name}`, no `speculators_model_type`"]
        for name, family in ZLAB_ARCHITECTURES.items()
    ]
    rows += [
        [DraftFormat.SPECULATORS.value, family.value, f"`speculators_model_type` is `{kind}`"]
        for kind, (family, _) in SPECULATORS_TYPES.items()
    ]
    rows.append([FORMAT, FAMILY, f"`model_type` is `{DRAFT_TYPE}`, its target's `{TARGET_TYPE}`"])
    originals = {
        "z-lab": f"`{zlab_original.DISTRIBUTION}`: stages, generations",
        "speculators": f"`{speculators_original.DISTRIBUTION}`: stages, and generations in a loop of ours",
        FORMAT: "arrays computed by the seed program, in the tests",
    }
    for row in rows:
        row.append(originals[row[0]])
    yield _table(["format", "family", "recognised by", "proved against"], rows)
    yield _text(
        "The pages [z-lab](formats/zlab.md), [speculators](formats/speculators.md) and "
        "[simple](formats/simple.md) list every field."
    )
    yield "## Draft options\n"
    yield _text(
        f"**{REFUSED}**: by name, before anything is written. **{NOTHING}**: the family has no such thing. "
        "The number of layers, taps and heads, block size, mask id, kernel and group size, rank and top-k "
        "are free, within the bounds on the formats' pages."
    )
    head = ["option", *(f"{format_.value} {family.value}" for format_, family in _COLUMNS)]
    yield _table(head, [[t.name, *(draft_cell(*column, t) for column in _COLUMNS)] for t in TRIALS])
    bodies = {DraftFormat.ZLAB: ["qwen3"], DraftFormat.SPECULATORS: list(CLASS_DEFAULTS)}
    yield _table(
        ["", *(format_.value for format_ in FORMATS)],
        [["`model_type` of the transformer part", *(", ".join(bodies[f]) for f in FORMATS)]],
    )


# ---------------------------------------------------------------- targets


@dataclass(frozen=True)
class TargetTrial:
    """One option of targets: what the spec says of it, and the config keys that ask for it.

    Of several keys a family gets those that its config class has; all, if it has none of them.
    """

    name: str
    shows: Callable[[TargetSpec], Answer]
    config: Changes = field(default_factory=dict)


def _biases(spec: TargetSpec) -> str:
    names = [*("qkv" if spec.qkv_bias else ""), *("o" if spec.o_bias else "")]
    return ", ".join(names) or "none"


_WINDOW = 4
TARGET_TRIALS = (
    TargetTrial("head tied to the embedding", lambda s: s.tied, {"tie_word_embeddings": True}),
    TargetTrial("head of its own", lambda s: not s.tied),
    TargetTrial("norms around attention and MLP", lambda s: s.norm_place is NormPlace.AROUND),
    TargetTrial("norms times 1 + w", lambda s: s.norm_weight is NormWeight.ABOVE_ONE),
    TargetTrial("queries and keys normalised", lambda s: s.qk_norm),
    TargetTrial("biases", _biases),
    TargetTrial("biases with `attention_bias`", _biases, {"attention_bias": True}),
    TargetTrial("MLP bias", lambda s: s.mlp_bias, {"mlp_bias": True}),
    TargetTrial("embedding times sqrt(hidden)", lambda s: s.embedding_scale != 1.0),
    TargetTrial(
        "soft cap on attention scores",
        lambda s: s.attention_softcap == 50.0,
        {"attn_logit_softcapping": 50.0},
    ),
    TargetTrial("soft cap on logits", lambda s: s.logit_softcap == 30.0, {"final_logit_softcapping": 30.0}),
    TargetTrial(
        "sliding layers",
        lambda s: any(layer.window == _WINDOW for layer in s.layers),
        {"use_sliding_window": True, "sliding_window": _WINDOW, "layer_types": [FULL, SLIDING]},
    ),
    *(
        TargetTrial(
            f"RoPE `{kind.value}`",
            lambda s, kind=kind: any(
                layer.rope is not None and layer.rope.kind is kind for layer in s.layers
            ),
            {"rope_parameters": _rope(kind)},
        )
        for kind in RopeKind
    ),
    TargetTrial(
        "partial rotation",
        lambda s: True,
        {"rope_parameters": _rope(RopeKind.DEFAULT) | {"partial_rotary_factor": 0.5}},
    ),
    TargetTrial(
        "layers without RoPE",
        lambda s: any(layer.rope is None for layer in s.layers),
        {"no_rope_layers": [1, 0]},
    ),
    TargetTrial("head size other than hidden / heads", lambda s: s.head_dim != s.hidden_size // s.num_heads),
    TargetTrial("quantised safetensors", lambda s: True, _QUANTISED),
)


def target_cell(family: str, trial: TargetTrial) -> str:
    """Try one option on one target family: a config as transformers saves it, and its model's tensors."""
    from transformers import AutoConfig, AutoModelForCausalLM

    left_out = ("model_type", "layer_types", "attention_bias", "rope_parameters", "hidden_act")
    plain = {key: value for key, value in _BODY.items() if key not in left_out}
    plain |= {"tie_word_embeddings": False, "pad_token_id": None}
    base = AutoConfig.for_model(family, **plain)
    changes = {key: value for key, value in trial.config.items() if hasattr(base, key)} or dict(trial.config)
    rope = getattr(base, "rope_parameters", None) or {}
    if "rope_parameters" in changes and FULL in rope:  # one for each layer type
        changes["rope_parameters"] = dict.fromkeys((FULL, SLIDING), changes["rope_parameters"])
    known = {key: value for key, value in changes.items() if key not in _QUANTISED}
    config = AutoConfig.for_model(family, **plain | known)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        del shapes["lm_head.weight"]
    tensors = {name: TensorEntry(name, "bfloat16", shape) for name, shape in shapes.items()}
    checkpoint = ShapeCheckpoint({**config.to_diff_dict(), **changes}, tensors, name="target")
    return _cell(lambda: trial.shows(target_from_checkpoint(checkpoint)), changes)


def _target_tables() -> Iterable[str]:
    yield "## Targets\n"
    rows = [[t.name, *(target_cell(family, t) for family in FAMILIES)] for t in TARGET_TRIALS]
    read = ["safetensors, single or sharded", *([YES] * len(FAMILIES))]
    gguf = [
        "GGUF, dequantised",
        *(YES if family in GGUF_ARCHITECTURES.values() else REFUSED for family in FAMILIES),
    ]
    yield _table(["option", *FAMILIES], [read, gguf, *rows])
    yield _text(f"A target of `model_type` `{TARGET_TYPE}` goes with drafts of the family `{FAMILY}` alone.")
    yield "Other types are refused, these with the reason:\n"
    reasons: dict[str, list[str]] = {}
    for model_type, why in REFUSED_TARGETS.items():
        reasons.setdefault(why, []).append(model_type)
    yield _table(["because", "`model_type`"], [[why, _names(types)] for why, types in reasons.items()])


# ---------------------------------------------------------------- numbers, dtypes, engines


def _choices(command: str, option: str) -> Sequence[str]:
    parameter = next(p for p in cli.cli.commands[command].params if option in p.opts)
    return parameter.type.choices


def _number_tables() -> Iterable[str]:
    yield "## RoPE\n"
    rows = [[f"`{kind.value}`", _names(NEEDED[kind]), _names(OPTIONAL.get(kind, ()))] for kind in RopeKind]
    yield _table(["kind", "needs", "may have"], rows)
    yield _text(
        f"Targets and drafts alike. The theta must be stated; `{ORIGINAL_LENGTH}` is "
        "`max_position_embeddings` where it is not stated."
    )
    yield "## Activations\n"
    yield _text(f"{_names(ACTIVATION_NAMES)}, in targets and drafts.")
    yield "## Element types\n"
    floats = [dtype for dtype in DType if dtype is not DType.INT64]
    exported = _choices("export", "--dtype")
    rows = [
        [
            dtype.value,
            YES if dtype.value in FLOATS else REFUSED,
            YES if dtype.value in exported else REFUSED,
            *(YES if dtype in provider.dtypes else REFUSED for provider in PROVIDERS.values()),
        ]
        for dtype in floats
    ]
    providers = (f"`--provider {name}`" for name in PROVIDERS)
    yield _table(["", "draft checkpoints", "`export --dtype`", *providers], rows)
    kept = transformer_pair.FLOAT32_PARTS
    yield _text(
        f"In float16 and bfloat16 bundles these parts stay float32: {', '.join(kept)}; of the family "
        f"`{FAMILY}`: {_names(simple_pair.FLOAT32_PARTS)}."
    )


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or NOTHING


def _engine_tables() -> Iterable[str]:
    yield "## ONNX Runtime providers\n"
    rows = [
        [
            f"`{name}`",
            _names(provider.providers),
            "memory of the GPU" if provider.device != "cpu" else "host memory",
        ]
        for name, provider in PROVIDERS.items()
    ]
    yield _table(["`--provider`", "execution providers, the first must start", "caches in"], rows)
    yield "## Engine backends\n"
    rows = [
        [
            f"`{backend.name}`",
            f"`dflash-deploy[{backend.extra}]`",
            ", ".join(backend.generations) or "that of the GPU that builds",
            ", ".join(backend.by_default) or "that of the GPU that builds",
            "no" if not backend.timing_cache else YES,
            "one" if backend.one_profile else "one a phase",
        ]
        for backend in BACKENDS.values()
    ]
    head = ["`--backend`", "install", "compute capabilities", "by default", "timing cache", "profiles"]
    yield _table(head, rows)
    yield _text(
        "What was run where stands in [verified.md](verified.md), how engines are built in "
        "[engines.md](engines.md)."
    )


def _text(text: str) -> str:
    return textwrap.fill(text, 110, break_long_words=False, break_on_hyphens=False) + "\n"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


def support_page() -> str:
    """The whole page."""
    intro = _text(
        f"Made from the code by `{COMMAND}`; a test compares. Options are tried: a cell is what parsing a "
        "config with that option says."
    )
    parts = (_draft_tables(), _target_tables(), _number_tables(), _engine_tables())
    return "\n".join(["# What is supported\n", intro, *(text for part in parts for text in part)])


if __name__ == "__main__":
    PAGE.write_text(support_page(), encoding="utf-8")
    sys.stdout.write(f"wrote {PAGE.name}\n")
