"""Tuned graphs: the bits of the portable graph, whatever the shapes; and what is refused of a manifest."""

from dataclasses import replace

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from dflash_deploy.bundle import tensors as t
from dflash_deploy.bundle.errors import BundleError
from dflash_deploy.bundle.manifest import check_manifest, manifest_from_bundle
from dflash_deploy.bundle.tensors import DType
from dflash_deploy.bundle.tuned import (
    ALONE,
    DRAFT_ALONE,
    GROUP_HEADS,
    MERGE_HEADS,
    OPEN_ATTENTION,
    OPEN_CONV,
    TOGETHER,
    WHOLE_CACHE,
    least_rows,
    portable,
)
from dflash_deploy.exporter.bundle_graphs import DraftGraph, TargetGraph
from dflash_deploy.exporter.quantize.bundle import quantize_bundle
from dflash_deploy.exporter.tune.bundle import tuned_graphs
from dflash_deploy.runtime.decoder import Decoder
from dflash_deploy.runtime.service import Service, ServiceSettings
from dflash_deploy.runtime.stats import Mode
from originals import tiny_target
from target_cases import graph_alone, options
from tiny_bundles import TARGET

CAPACITY = 96
RANDOM = np.random.default_rng(3)


@pytest.fixture(scope="module", params=["float32", "int8"])
def bundle(request, tiny_bundle, tmp_path_factory):
    pair = tiny_bundle("dflash2-grouped")
    if request.param == "float32":
        return pair.bundle
    ids = RANDOM.integers(0, TARGET["vocab_size"], 512).tolist()
    output = tmp_path_factory.mktemp("int8") / "bundle"
    quantize_bundle(pair.bundle, output, ids, max_perplexity_ratio=1.2)
    return output


@pytest.fixture(scope="module")
def graphs(bundle):
    manifest = manifest_from_bundle(bundle)
    return {
        "portable": TargetGraph(bundle, manifest),
        **{
            name: TargetGraph(bundle, manifest, info)
            for name, info in manifest.tuned.items()
            if portable(name) == t.TARGET
        },
    }


def prompts(batch: int, rows: int) -> np.ndarray:
    return RANDOM.integers(0, TARGET["vocab_size"], (batch, rows))


def stored(model):
    """Names and places of the weights outside."""
    return {(x.name, tuple(map(str, x.external_data))) for x in model.graph.initializer if x.external_data}


def test_what_was_done_is_said(bundle):
    manifest = manifest_from_bundle(bundle)
    rounded = manifest.quantization is not None
    first = ("smooth", "int8", MERGE_HEADS) if rounded else ()
    assert manifest.tuned[ALONE].passes == (*first, WHOLE_CACHE, OPEN_ATTENTION)
    assert manifest.tuned[TOGETHER].passes == (*first, WHOLE_CACHE, OPEN_ATTENTION, GROUP_HEADS)
    first = ("smooth", "int8", OPEN_CONV, MERGE_HEADS) if rounded else (OPEN_CONV,)
    assert manifest.tuned[DRAFT_ALONE].passes == first
    for name, info in manifest.tuned.items():
        model = onnx.load(bundle / info.file, load_external_data=False)
        kinds = [node.op_type for node in model.graph.node]
        if portable(name) == t.TARGET:
            assert not {"Slice", "Attention"} & set(kinds)
            assert kinds.count("Softmax") == manifest.target.num_layers
        else:
            assert "GroupedDynamicConv" not in kinds
            assert not model.functions
        names = [node.name for node in model.graph.node]
        assert len(set(names)) == len(names)
        onnx.checker.check_model(str(bundle / info.file), full_check=not rounded)
        weights = stored(model)
        made_from = manifest.graphs[portable(name)]
        assert weights <= stored(onnx.load(bundle / made_from.file, load_external_data=False))


@pytest.mark.parametrize("name", [ALONE, TOGETHER])
@pytest.mark.parametrize("batch", [1, 2, 5])
@pytest.mark.parametrize("rows", [2, 3, 8, 31])
def test_bits_are_those_of_the_portable_graph(graphs, name, batch, rows):
    """A prompt, then more rows behind starts that differ; caches too, and in caches of any length."""
    first, second = prompts(batch, 40), prompts(batch, rows)
    starts = RANDOM.integers(1, 41, batch)
    outputs = {}
    for key, capacity in (("portable", CAPACITY), (name, CAPACITY), (name, 71)):
        graph = graphs[key]
        graph.reset(capacity, batch)
        graph.run(first, 0)
        outputs[key, capacity] = graph.run(second, starts), graph._past
    expected, caches = outputs.pop(("portable", CAPACITY))
    for (_, capacity), (got, kept) in outputs.items():
        assert expected.keys() == got.keys()
        for output in expected:
            np.testing.assert_array_equal(got[output], expected[output])
        for past, cache in kept.items():
            np.testing.assert_array_equal(cache, caches[past][:, :, :capacity])


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("rows", [1, 4, 20])
def test_the_draft_gives_the_bits_of_the_portable_one(bundle, batch, rows):
    """Two rounds, blocks of several lengths among them; the stages too, and the caches."""
    manifest = manifest_from_bundle(bundle)
    width = len(manifest.draft.taps) * manifest.target.hidden_size
    graphs = [DraftGraph(bundle, manifest), DraftGraph(bundle, manifest, manifest.tuned[DRAFT_ALONE])]
    ends = RANDOM.integers(1, rows + 1, batch)
    rounds = [
        (RANDOM.standard_normal((batch, rows, width), np.float32), np.zeros(batch, int), ends),
        (RANDOM.standard_normal((batch, 3, width), np.float32), ends, ends + 2),
    ]
    for graph in graphs:
        graph.reset(CAPACITY, batch)
    for features, start, anchor in rounds:
        asked = RANDOM.integers(1, manifest.draft.block_size + 1, batch)
        expected, got = (graph.run(features, start, anchor, anchor % 7, asked) for graph in graphs)
        assert expected.keys() == got.keys()
        assert {t.PROPOSALS, "stage.hidden"} <= expected.keys()
        for output in expected:
            np.testing.assert_array_equal(got[output], expected[output])
    for past, cache in graphs[0]._past.items():
        np.testing.assert_array_equal(graphs[1]._past[past], cache)


@pytest.mark.parametrize("batch", [2, 3, 16])
def test_grouped_a_lone_row_of_several_requests_has_the_bits_of_one_in_company(graphs, batch):
    first, second = prompts(batch, 40), prompts(batch, 4)
    starts = RANDOM.integers(1, 41, batch)
    graph = graphs[TOGETHER]
    found = []
    for rows in (1, 4):
        graph.reset(CAPACITY, batch)
        graph.run(first, 0)
        found.append(graph.run(second[:, :rows], starts))
    for output in (t.LOGITS, t.FEATURES, t.GREEDY_IDS):
        np.testing.assert_array_equal(found[0][output], found[1][output][:, :1])


def test_how_many_rows_a_pass_needs():
    assert least_rows((), 1) == least_rows((), 9) == 2
    assert least_rows((WHOLE_CACHE, GROUP_HEADS), 1) == 2
    assert least_rows((WHOLE_CACHE, GROUP_HEADS), 2) == 1
    assert least_rows((), 1, exact=False) == 1


@pytest.mark.parametrize(
    ("family", "config", "expected"),
    [
        ("llama", {"num_key_value_heads": 4}, [ALONE]),  # no two heads share keys
        (
            "gemma2",
            {"attn_logit_softcapping": 30.0},
            [ALONE],
        ),  # softcap: no Attention node
        ("gemma3_text", {}, [ALONE, TOGETHER]),  # two masks
        ("qwen3", {}, [ALONE, TOGETHER]),
    ],
)
def test_families(family, config, expected, tmp_path):
    drawn = options(family, 0, 3) | {"num_attention_heads": 4, "num_key_value_heads": 2, **config}
    tiny_target(31, tmp_path / "target", family, **drawn)
    spec, untuned = graph_alone(tmp_path / "target", tmp_path / "graph")
    info, cache = untuned._graph.info, untuned._cache
    tuned = tuned_graphs(tmp_path / "graph", info, cache, _draft_without_work(tmp_path / "graph", info))
    assert list(tuned) == expected
    ids, more = (RANDOM.integers(0, spec.vocab_size, (2, rows)) for rows in (30, 5))
    found = []
    for graph in (untuned, *(_alone(tmp_path / "graph", one, cache) for one in tuned.values())):
        graph.reset(CAPACITY, 2)
        graph.run(ids, 0)
        found.append(graph.run(more, [30, 11]))
    for got in found[1:]:
        for output in (t.LOGITS, t.FEATURES):
            np.testing.assert_array_equal(got[output], found[0][output])
    assert spec.num_layers == 3


def _draft_without_work(folder, like):
    """A graph in which no pass of the draft's finds anything."""
    value = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1])
    graph = onnx.helper.make_graph([], "draft", [value], [value])
    onnx.save(onnx.helper.make_model(graph), folder / "draft.onnx")
    return replace(like, file="draft.onnx", passes=())


def _alone(folder, info, cache):
    graph = TargetGraph.__new__(TargetGraph)
    super(TargetGraph, graph).__init__(folder, info, cache)
    graph._whole = True
    return graph


def test_a_dtype_that_the_cpu_does_not_compute_is_not_tuned(bundle, tmp_path):
    manifest = manifest_from_bundle(bundle)
    cache = replace(manifest.target.cache, dtype=DType.BFLOAT16)
    assert tuned_graphs(tmp_path, manifest.graphs[t.TARGET], cache, manifest.graphs[t.DRAFT]) == {}
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tuned: {"target.gpu": tuned[ALONE]}, r"tuned: got 'target.gpu', expected one of target.cpu"),
        (
            lambda tuned: {ALONE: replace(tuned[ALONE], passes=("polish",))},
            r"tuned.target.cpu.passes: got .*'polish'.* expected some of",
        ),
        (
            lambda tuned: {ALONE: replace(tuned[ALONE], io=t.GraphIO((), ()))},
            r"tuned.target.cpu.io: got .* expected that of the target's graph",
        ),
        (
            lambda tuned: {ALONE: replace(tuned[ALONE], file="target.cpu-batch.onnx")},
            r"tuned.target.cpu.file: got 'target.cpu-batch.onnx', expected target.cpu.onnx",
        ),
    ],
)
def test_a_manifest_that_says_something_else_is_refused(bundle, change, message):
    manifest = manifest_from_bundle(bundle)
    with pytest.raises(BundleError, match=message):
        check_manifest(replace(manifest, tuned=change(dict(manifest.tuned))))


def test_alone_and_together_the_runtime_gives_the_tokens_of_the_portable_graph(bundle):
    """Answers of several lengths, so that caches grow and shrink while others are in them."""
    asked = [
        (prompts(1, rows)[0].tolist(), new) for rows, new in ((3, 60), (40, 8), (9, 50), (30, 20), (2, 9))
    ]
    manifest = manifest_from_bundle(bundle)
    untuned = replace(manifest, tuned={})

    def answers(decoder, mode):
        return [decoder.generate(prompt, new, mode=mode).ids for prompt, new in asked]

    with Decoder.open(bundle, threads=1, verify_rows=4) as decoder:
        assert WHOLE_CACHE in decoder.runners[0].info.passes
        got = {mode: answers(decoder, mode) for mode in Mode}
    with _opened(bundle, untuned) as decoder:
        assert decoder.runners[0].info.passes == manifest.graphs[t.TARGET].passes
        expected = answers(decoder, Mode.PLAIN)
    assert got[Mode.PLAIN] == got[Mode.SPECULATIVE] == expected
    for rows in (1, 4):
        settings = ServiceSettings(max_requests=3, verify_rows=rows)
        with Service.open(bundle, settings, threads=1) as service:
            assert GROUP_HEADS in service.decoder.runners[0].info.passes
            tickets = [service.submit(prompt, new) for prompt, new in asked]
            assert [ticket.result().ids for ticket in tickets] == expected


def _opened(bundle, manifest):
    from dflash_deploy.runtime.backends import runners_from_bundle
    from dflash_deploy.runtime.decoder import Settings

    target, draft = runners_from_bundle(bundle, manifest, threads=1)
    return Decoder(manifest, target, draft, None, Settings(4, True, manifest.max_length))


def test_the_graph_is_changed_and_nothing_is_lost_if_a_pass_meets_something_else(bundle):
    """A graph whose caches are not cut is left alone by the pass that removes the cuts."""
    from dflash_deploy.exporter.tune.whole_cache import whole_cache

    manifest = manifest_from_bundle(bundle)
    model = ir.load(bundle / manifest.tuned[ALONE].file)
    before = len(list(model.graph))
    assert not whole_cache(model, manifest.target.cache)
    assert len(list(model.graph)) == before
