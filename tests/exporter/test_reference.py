"""The eager DFlash2 parts against speculators' originals, and identity convolutions against DFlash."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from dflash_deploy.bundle import tensors as t
from dflash_deploy.bundle.tensors import DType
from dflash_deploy.exporter.bundle_graphs import BundleGraph, empty_caches
from dflash_deploy.exporter.drafts.spec import SelectorSpec
from dflash_deploy.exporter.export import graph_to_bundle
from dflash_deploy.exporter.families import pair_from_sources
from dflash_deploy.exporter.modules.selector import Selector
from dflash_deploy.exporter.progress import NullProgress
from dflash_deploy.exporter.reference.dflash import DFlashDecoderLayer
from dflash_deploy.exporter.reference.dflash2 import (
    CandidateSelector,
    DFlash2DecoderLayer,
    GroupedDynamicCausalConv,
    grouped_dynamic_conv,
)
from dflash_deploy.exporter.weights import WeightWriter
from originals import randomise, tiny_target, zlab_draft

Config = pytest.importorskip("transformers.models.qwen3.configuration_qwen3").Qwen3Config
v1 = pytest.importorskip("speculators.models.dflash.model_definitions")
v2 = pytest.importorskip("speculators.models.dflash2.model_definitions")

SIZES = {"block_size": 4, "kernel_size": 3, "group_size": 6}
LAYER = {"block_size": 4, "conv_kernel_size": 2, "conv_group_size": 8}
VOCAB, HIDDEN, RANK, TOP_K = 50, 12, 5, 4

# Scores are a handful of products of numbers around one: what another order of summing does to them.
SCORE_TOLERANCE = 1e-6


@pytest.fixture(autouse=True)
def _quick():
    torch.set_num_threads(1)
    with torch.no_grad():
        yield


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def same_weights(ours: torch.nn.Module, original: torch.nn.Module, seed: int = 1) -> None:
    """Give both random weights; the names have to agree."""
    randomise(original, seed)
    ours.load_state_dict(original.state_dict(), strict=True)


def config(**changes: object) -> object:
    options = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
    }
    made = Config(**options | changes)
    made._attn_implementation = "eager"
    return made


# --- the convolution ---


@pytest.mark.parametrize("leading", [(8,), (1, 4), (3, 8), (2, 3, 4), (2, 6)])
def test_conv(leading):
    ours, original = (cls(24, **SIZES) for cls in (GroupedDynamicCausalConv, v2.GroupedDynamicCausalConv))
    same_weights(ours, original)
    x, y = normal(*leading, 24, seed=2), normal(*leading, 24, seed=3)
    prepared, delta = ours.prepare(x)
    expected, expected_delta = original.prepare(x)
    assert torch.equal(prepared, expected)
    assert torch.equal(delta, expected_delta)
    assert torch.equal(ours.finish(y, delta), original.finish(y, delta))


def test_conv_begins_and_resets_as_identity():
    ours = GroupedDynamicCausalConv(24, **SIZES)
    x = normal(2, 8, 24)
    for _ in range(2):
        prepared, delta = ours.prepare(x)
        assert torch.equal(prepared, x) and torch.equal(ours.finish(x, delta), x)
        randomise(ours, 4)
        assert not torch.equal(ours.prepare(x)[0], x)
        ours.reset_parameters()


HIDDEN_ROWS, DELTA, BASE = torch.ones(2, 8, 12), torch.ones(2, 8, 2, 3), torch.ones(2, 12)
MISFITS = {
    "hidden_size": ((HIDDEN_ROWS, DELTA, BASE), {"block_size": 8, "group_size": 5}),
    "kernel_size": ((HIDDEN_ROWS, DELTA, BASE), {"block_size": 1, "group_size": 4}),
    "base": ((HIDDEN_ROWS, DELTA, torch.ones(2, 13)), {"block_size": 8, "group_size": 4}),
    "delta": ((HIDDEN_ROWS, DELTA[:, :7], BASE), {"block_size": 8, "group_size": 4}),
}


@pytest.mark.parametrize("name", MISFITS)
def test_conv_function_refuses_what_the_original_refuses(name):
    tensors, sizes = MISFITS[name]
    with pytest.raises(ValueError, match=r"must|cannot"):
        v2.grouped_dynamic_conv(*tensors, **sizes)
    with pytest.raises(ValueError, match=rf"^{name}: got .*, expected .*; "):
        grouped_dynamic_conv(*tensors, **sizes)


def test_conv_class_refuses_what_the_original_refuses():
    for sizes, name in (
        (SIZES | {"group_size": 5}, "hidden_size"),
        (SIZES | {"kernel_size": 5}, "kernel_size"),
    ):
        with pytest.raises(ValueError, match=name):
            v2.GroupedDynamicCausalConv(24, **sizes)
        with pytest.raises(ValueError, match=rf"^{name}: got .*, expected"):
            GroupedDynamicCausalConv(24, **sizes)
    ours = GroupedDynamicCausalConv(24, **SIZES)
    _, delta = ours.prepare(normal(8, 24))
    with pytest.raises(ValueError, match=r"^delta: got \(8, 3, 4\), expected shape \(4, 3, 4\)"):
        ours.finish(normal(4, 24), delta)


# --- the layer ---


def layer_inputs(context: int, block: int = 4, batch: int = 2) -> dict[str, torch.Tensor]:
    rows = context + block
    angle = torch.arange(rows)[:, None] * 0.7 ** torch.arange(6)[None]
    angle = torch.cat([angle, angle], dim=-1).expand(batch, -1, -1)
    hidden = torch.zeros(batch, 1, block, rows)
    hidden.masked_fill_(normal(batch, 1, block, rows, seed=5) > 0.8, torch.finfo(torch.float32).min)
    hidden[..., context:].diagonal(dim1=-2, dim2=-1).zero_()
    return {
        "hidden_states": normal(batch, block, 32, seed=6),
        "target_hidden": normal(batch, context, 32, seed=7),
        "position_embeddings": (angle.cos(), angle.sin()),
        "attention_mask": hidden,
    }


@pytest.mark.parametrize("context", [0, 1, 9])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attention_bias": True, "num_key_value_heads": 4},
        {"num_key_value_heads": 1, "hidden_act": "gelu_pytorch_tanh"},
    ],
)
def test_layers(context, changes):
    inputs = layer_inputs(context)
    for ours, original in (
        (DFlashDecoderLayer(config(**changes)), v1.Qwen3DFlashDecoderLayer(config(**changes), 0)),
        (
            DFlash2DecoderLayer(config(**changes), **LAYER),
            v2.Qwen3DFlash2DecoderLayer(config(**changes), 0, **LAYER),
        ),
    ):
        same_weights(ours, original)
        for mask in (inputs, inputs | {"attention_mask": None}):
            assert torch.equal(ours(**mask), original(**mask))


def test_half_precision_layers():
    inputs = {
        name: tuple(x.bfloat16() for x in value) if isinstance(value, tuple) else value.bfloat16()
        for name, value in layer_inputs(9).items()
    }
    ours = DFlashDecoderLayer(config())
    original = v1.Qwen3DFlashDecoderLayer(config(), 0)
    same_weights(ours, original)
    assert torch.equal(ours.bfloat16()(**inputs), original.bfloat16()(**inputs))


def test_layer_refuses_what_the_original_refuses():
    for changes, name in (({"conv_group_size": 7}, "hidden_size"), ({"conv_kernel_size": 5}, "kernel_size")):
        with pytest.raises(ValueError, match=name):
            v2.Qwen3DFlash2DecoderLayer(config(), 0, **LAYER | changes)
        with pytest.raises(ValueError, match=rf"^{name}: got"):
            DFlash2DecoderLayer(config(), **LAYER | changes)


def test_identity_convolutions_make_a_dflash_layer():
    inputs = layer_inputs(9)
    plain, layer = DFlashDecoderLayer(config()), DFlash2DecoderLayer(config(), **LAYER)
    randomise(plain, 8)
    layer.load_state_dict(plain.state_dict(), strict=False)
    assert torch.equal(layer(**inputs), plain(**inputs)), "a new layer is one"
    for conv in (layer.attention_conv, layer.mlp_conv):
        randomise(conv, 9)
        assert not torch.equal(layer(**inputs), plain(**inputs)), "either convolution changes it"
        layer.reset_convolutions()
        assert torch.equal(layer(**inputs), plain(**inputs))


# --- the selector ---


def selectors() -> tuple[CandidateSelector, torch.nn.Module]:
    sizes = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "rank": RANK, "top_k": TOP_K}
    ours, original = (cls(**sizes) for cls in (CandidateSelector, v2.CandidateSelector))
    same_weights(ours, original)
    return ours, original


@pytest.mark.parametrize("leading", [(), (3,), (2, 5)])
@pytest.mark.parametrize("int_type", [torch.int64, torch.int32])
def test_selector(leading, int_type):
    ours, original = selectors()
    hidden, logits = normal(*leading, HIDDEN, seed=2), normal(*leading, VOCAB, seed=3)
    draw = torch.Generator().manual_seed(4)
    before = torch.randint(VOCAB, leading, generator=draw, dtype=int_type)
    candidates = torch.randint(VOCAB, (*leading, 7), generator=draw)
    assert torch.equal(ours.context(hidden, before), original.context(hidden, before))
    for name, given in (
        ("transition_scores", (hidden, before, candidates)),
        ("score_candidates", (logits, hidden, before, candidates)),
    ):
        assert torch.equal(getattr(ours, name)(*given), getattr(original, name)(*given)), name
    for top_k in (None, 1, 9, VOCAB):
        got, expected = (x.select(logits, hidden, before, top_k) for x in (ours, original))
        assert got[0].shape == (*leading, top_k or TOP_K)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)), top_k


def test_selector_begins_as_the_original_does():
    sizes = {"vocab_size": 4000, "hidden_size": 600, "rank": 40, "top_k": 4, "initializer_range": 0.3}
    for cls in (CandidateSelector, v2.CandidateSelector):
        for name, weight in cls(**sizes).named_parameters():
            assert abs(weight.std() - 0.3) < 0.01 and abs(weight.mean()) < 0.01, name


def test_selector_refuses_what_the_original_refuses():
    sizes = {"vocab_size": 5, "hidden_size": HIDDEN, "rank": RANK, "top_k": 6}
    with pytest.raises(ValueError, match="top_k"):
        v2.CandidateSelector(**sizes)
    with pytest.raises(ValueError, match=r"^top_k: got 6, expected 1 <= top_k <= 5, the vocab_size"):
        CandidateSelector(**sizes)
    ours, original = selectors()
    given = (normal(VOCAB), normal(HIDDEN), torch.tensor(3), VOCAB + 1)
    with pytest.raises(RuntimeError):
        original.select(*given)
    with pytest.raises(ValueError, match=f"^top_k: got {VOCAB + 1}"):
        ours.select(*given)


def test_deployment_selector_walks_by_these_scores():
    ours, _ = selectors()
    deployed = Selector(SelectorSpec(RANK, TOP_K), VOCAB, HIDDEN)
    deployed.load_state_dict(ours.state_dict(), strict=True)
    hidden, logits, anchors = normal(2, 6, HIDDEN, seed=5), normal(2, 6, VOCAB, seed=6), torch.tensor([3, 11])
    path, candidates, scores = deployed(hidden, logits, anchors)
    previous = anchors
    for row in range(6):
        ids, own = ours.select(logits[:, row], hidden[:, row], previous)
        assert torch.equal(ids, candidates[:, row])
        chosen = ids.gather(1, own.argmax(-1, keepdim=True))[:, 0]
        assert torch.equal(chosen, path[:, row])
        before = candidates[:, row - 1] if row else anchors[:, None].expand(-1, TOP_K)
        for j in range(TOP_K):
            expected = ours.score_candidates(logits[:, row], hidden[:, row], before[:, j], ids)
            assert (scores[:, row, j] - expected).abs().max() < SCORE_TOLERANCE
        previous = chosen


# --- the exported graph ---


def draft_graph(folder: Path, target: Path, draft: Path) -> tuple[BundleGraph, t.CacheShape]:
    """The draft's graph alone: the other graphs of a bundle would only take time here."""
    pair = pair_from_sources(str(target), str(draft))
    plan = pair.plan(DType.FLOAT32)
    folder.mkdir()
    with WeightWriter(folder) as writer:
        (graph,) = (graph for graph in plan.graphs if graph.name == t.DRAFT)
        info = graph_to_bundle(graph, pair, folder, writer, NullProgress())
    return BundleGraph(folder, info), plan.draft.cache


def twins(folder: Path) -> tuple[Path, Path, Path]:
    """A target, a DFlash2 draft whose convolutions are identities, and the DFlash draft it comes from."""
    from safetensors.torch import load_file, save_file

    model = tiny_target(31, folder / "target", hidden_size=32, num_hidden_layers=4)
    zlab_draft(
        31, folder / "dflash2", target=model.config, dflash2=True, num_hidden_layers=1, style_nested=False
    )
    shutil.copytree(folder / "dflash2", folder / "dflash")
    file = "model.safetensors"
    tensors = load_file(folder / "dflash2" / file)
    for name, tensor in tensors.items():
        if name.endswith("base_kernel"):
            tensor.zero_()[:, 0] = 1.0
        elif "kernel_projection" in name:
            tensor.zero_()
    save_file(tensors, folder / "dflash2" / file)
    plain = {n: x for n, x in tensors.items() if "_conv." not in n and "candidate_selector" not in n}
    save_file(plain, folder / "dflash" / file)
    settings = json.loads((folder / "dflash" / "config.json").read_text())
    settings = {n: x for n, x in settings.items() if not n.startswith(("conv_", "selector_"))}
    settings["architectures"] = ["DFlashDraftModel"]
    (folder / "dflash" / "config.json").write_text(json.dumps(settings))
    return folder / "target", folder / "dflash2", folder / "dflash"


def test_identity_convolutions_make_a_dflash_draft_in_the_exported_graph(tmp_path):
    target, *drafts = twins(tmp_path)
    rng = np.random.default_rng(0)
    outputs = []
    for draft in drafts:
        graph, cache = draft_graph(tmp_path / f"{draft.name} graph", target, draft)
        axes = {info.name: info.axes for info in graph.info.io.inputs}
        block, features = axes[t.BLOCK_IDS][1], axes[t.FEATURES][2]
        inputs = {
            t.FEATURES: rng.normal(size=(2, 9, features)).astype(np.float32),
            t.START: np.zeros(2, np.int64),
            t.ANCHOR: np.array([9, 6]),
            t.BLOCK_IDS: rng.integers(0, 100, (2, block)),
            t.BLOCK_ROWS: np.array([block, block - 1]),
            t.SLOTS: np.arange(9),
        }
        outputs.append(graph.run(inputs | empty_caches(cache, 2, 30), graph.info.stages))
        rng = np.random.default_rng(0)  # both get the same
    both, plain = outputs
    assert set(plain) == {"stage.context", "stage.layer.0", "stage.hidden"}
    for name, array in plain.items():
        assert np.array_equal(both[name].reshape(array.shape), array), name
