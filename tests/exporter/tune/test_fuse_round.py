"""A round as one graph: bit for bit what the separate graphs give, with the loop's own acceptance between."""

from dataclasses import dataclass

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from dflash_deploy.bundle import tensors as t
from dflash_deploy.bundle.manifest import manifest_from_bundle
from dflash_deploy.bundle.ort_options import session_options
from dflash_deploy.bundle.round_graph import ACCEPTED, VERIFY_ROWS, of_model, round_io
from dflash_deploy.bundle.tuned import ALONE
from dflash_deploy.exporter.bundle_graphs import DraftGraph, TargetGraph
from dflash_deploy.exporter.quantize.bundle import quantize_bundle
from dflash_deploy.exporter.tune.fuse_round import fuse_round
from dflash_deploy.runtime.accept import accept_greedy
from tiny_bundles import TARGET

PORTABLE = t.TARGET
SLOTS = 80
PROMPT = 17
INT8 = "dflash2-int8"
CASES = [(name, graph) for name in ("dflash", "dflash2", "speculators") for graph in (PORTABLE, ALONE)]
CASES += [("speculators2", ALONE), (INT8, ALONE)]


@dataclass(frozen=True)
class Fused:
    """A bundle, its two graphs as they are and as one."""

    bundle: object
    manifest: object
    models: tuple[ir.Model, ir.Model]
    model: ir.Model
    session: ort.InferenceSession

    @property
    def graphs(self):
        info = self.target_info
        return TargetGraph(self.bundle, self.manifest, info), DraftGraph(self.bundle, self.manifest)

    @property
    def target_info(self):
        file = self.model.meta["file"]
        infos = (self.manifest.graphs[t.TARGET], *self.manifest.tuned.values())
        return next(info for info in infos if info.file == file)


@pytest.fixture(scope="module")
def fused(tiny_bundle, tmp_path_factory):
    made = {}

    def give(name, graph):
        if (name, graph) not in made:
            made[name, graph] = _fused(_bundle(tiny_bundle, tmp_path_factory, name), graph)
        return made[name, graph]

    return give


def io_of(manifest):
    return round_io(manifest.target.cache, manifest.draft.cache, manifest.draft.proposals)


def _bundle(tiny_bundle, tmp_path_factory, name):
    if name != INT8:
        return tiny_bundle(name).bundle
    ids = np.random.default_rng(3).integers(0, TARGET["vocab_size"], 512).tolist()
    path = tmp_path_factory.mktemp("rounded") / "int8"
    quantize_bundle(tiny_bundle("dflash2").bundle, path, ids, max_perplexity_ratio=1.2)
    return path


def _fused(bundle, graph):
    manifest = manifest_from_bundle(bundle)
    info = manifest.graphs[graph] if graph == PORTABLE else manifest.tuned[graph]
    models = tuple(ir.load(bundle / file) for file in (info.file, manifest.graphs[t.DRAFT].file))
    model = fuse_round(*models, manifest.target, manifest.draft)
    model.meta["file"] = info.file
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), session_options(ort, 1, bundle))
    return Fused(bundle, manifest, models, model, session)


class Rounds:
    """Both forms of a pair behind the same prompts; `round` runs both and compares all that they give."""

    def __init__(self, fused, batch, seed):
        self.fused, self.batch, self.random = fused, batch, np.random.default_rng(seed)
        self.target, self.draft = fused.graphs
        self.target.reset(SLOTS, batch)
        self.draft.reset(SLOTS, batch)
        prompts = self.random.integers(0, TARGET["vocab_size"], (batch, PROMPT))
        self.start = self.random.permutation(np.arange(PROMPT - 8, PROMPT + 1))[:batch]
        given = self.target.run(prompts, 0)
        self.anchor = np.take_along_axis(given[t.GREEDY_IDS], self.start[:, None] - 1, 1)[:, 0]
        self.proposals = self._drafted(given[t.FEATURES], 0, self.start)[t.PROPOSALS]

    def _drafted(self, features, start, anchor, block_rows=None):
        rows = self.fused.manifest.draft.block_size if block_rows is None else block_rows
        return self.draft.run(features, start, anchor, self.anchor, rows)

    def ids(self, rows, standing):
        """Anchors and proposals [B, R], made so that the first `standing` of each lane stand and no more."""
        ids = np.concatenate([self.anchor[:, None], self.proposals[:, : rows - 1]], 1)
        ids = np.pad(ids, ((0, 0), (0, rows - ids.shape[1])))
        kept = self.target._past
        for row in range(rows - 1):
            chosen = self.target.run(ids, self.start)[t.GREEDY_IDS][:, row]
            self.target._past = kept
            other = np.where(ids[:, row + 1] == chosen, (chosen + 1) % TARGET["vocab_size"], ids[:, row + 1])
            ids[:, row + 1] = np.where(
                row < standing, chosen, np.where(row == standing, other, ids[:, row + 1])
            )
        return ids

    def run_fused(self, ids, verify_rows, block_rows):
        """What the fused graph gives behind the caches as they are."""
        inputs = {
            t.INPUT_IDS: ids,
            VERIFY_ROWS: verify_rows,
            t.START: self.start,
            t.BLOCK_ROWS: block_rows,
            of_model(t.TARGET, t.SLOTS): np.arange(SLOTS),
            of_model(t.DRAFT, t.SLOTS): np.arange(int(self.start.max()) + ids.shape[1]),
        }
        for model, graph in ((t.TARGET, self.target), (t.DRAFT, self.draft)):
            inputs |= {of_model(model, name): cache for name, cache in graph._past.items()}
        names = [info.name for info in io_of(self.fused.manifest).outputs]
        return dict(zip(names, self.fused.session.run(names, inputs), strict=True))

    def round(self, rows, standing, verify_rows):
        ids, verify_rows = self.ids(rows, standing), np.asarray(verify_rows)
        draft = self.fused.manifest.draft
        block_rows = self.random.integers(draft.first_proposal_row + 1, draft.block_size + 1, self.batch)
        got = self.run_fused(ids, verify_rows, block_rows)

        given = self.target.run(ids, self.start, kv=SLOTS)
        greedy = given[t.GREEDY_IDS]
        accepted = np.array(
            [
                accept_greedy(ids[b, 1:count].tolist(), greedy[b, :count].tolist(), count, ()).accepted
                for b, count in enumerate(verify_rows)
            ]
        )
        np.testing.assert_array_equal(accepted, np.minimum(standing, verify_rows - 1))
        self.anchor = np.take_along_axis(greedy, accepted[:, None], 1)[:, 0]
        start, self.start = self.start, self.start + accepted + 1
        drafted = self._drafted(given[t.FEATURES], start, self.start, block_rows)
        self.proposals = drafted[t.PROPOSALS]

        np.testing.assert_array_equal(got.pop(ACCEPTED), accepted)
        np.testing.assert_array_equal(got.pop(t.GREEDY_IDS), greedy)
        np.testing.assert_array_equal(got.pop(t.PROPOSALS), drafted[t.PROPOSALS])
        np.testing.assert_array_equal(got.pop(t.LOGIT_SUMS), drafted[t.LOGIT_SUMS])
        for model, graph in ((t.TARGET, self.target), (t.DRAFT, self.draft)):
            for name, cache in graph._past.items():
                np.testing.assert_array_equal(got.pop(of_model(model, t.present(name))), cache)
        assert not got


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(("name", "graph"), CASES)
def test_bits_are_those_of_the_separate_graphs(fused, name, graph, batch):
    """Rounds of several widths, in which none, some and all stand, and lanes whose rows do not all count."""
    rounds = Rounds(fused(name, graph), batch, 5)
    for rows, standing, verify_rows in (
        (4, [0, 1, 3], [4, 4, 4]),
        (4, [3, 0, 2], [4, 4, 4]),
        (2, [1, 1, 0], [2, 2, 2]),
        (4, [3, 3, 1], [3, 1, 4]),
        (3, [2, 0, 2], [2, 3, 1]),
        (4, [2, 3, 0], [4, 2, 2]),
    ):
        rounds.round(rows, np.array(standing[:batch]), verify_rows[:batch])


def test_a_choice_that_failed_comes_out_as_such_and_spoils_no_other_request(fused):
    pair = fused("dflash2", ALONE)
    rounds = Rounds(pair, 3, 7)
    ids, verify, block = rounds.ids(4, np.array([3, 3, 3])), np.full(3, 4), np.full(3, 8)
    sound = rounds.run_fused(ids, verify, block)
    rounds.target._past = {name: cache.copy() for name, cache in rounds.target._past.items()}
    rounds.target._past[t.past_value(0)][1, :, 2] = np.nan
    got = rounds.run_fused(ids, verify, block)
    assert sound[ACCEPTED].tolist() == [3, 3, 3]
    assert got[ACCEPTED].tolist() == [3, 0, 3]
    assert got[t.GREEDY_IDS][1].tolist() == [-1] * 4
    for name in (t.GREEDY_IDS, t.PROPOSALS, t.LOGIT_SUMS):
        np.testing.assert_array_equal(got[name][[0, 2]], sound[name][[0, 2]])


@pytest.mark.parametrize(("name", "graph"), CASES)
def test_weights_are_those_of_both_graphs_each_once_and_every_name_is_used_once(fused, name, graph, tmp_path):
    pair = fused(name, graph)

    def places(model):
        return [
            (str(tensor.location), tensor.offset, tensor.length)
            for value in model.graph.initializers.values()
            if isinstance(tensor := value.const_value, ir.ExternalTensor)
        ]

    found = places(pair.model)
    both = {place for model in pair.models for place in places(model)}
    assert set(found) == both
    products = [node.inputs[1].name for node in pair.model.graph if node.op_type == "MatMulIntegerToFloat"]
    assert len(set(products)) == len(products)  # ONNX Runtime makes each unsigned where it has to
    assert len(found) - len(both) == (1 if products else 0)  # the head, which both multiply by
    assert len(both) < sum(len(places(model)) for model in pair.models)  # the embedding at least
    names = [value.name for node in pair.model.graph.all_nodes() for value in node.outputs]
    names += [value.name for value in pair.model.graph.inputs] + list(pair.model.graph.initializers)
    assert len(set(names)) == len(names)
    kinds = [node.op_type for node in pair.model.graph]
    assert kinds.count("TensorScatter") == sum(
        2 * info.cache.layers for info in (pair.manifest.target, pair.manifest.draft)
    )
    domains = {node.domain for node in pair.model.graph}
    assert domains <= {node.domain for model in pair.models for node in model.graph}


def test_the_graph_is_valid_onnx(fused):
    pair = fused("dflash2", PORTABLE)
    proto = ir.to_proto(pair.model)
    path = pair.bundle / "round.onnx"
    try:
        path.write_bytes(proto.SerializeToString())
        onnx.checker.check_model(str(path), full_check=True)
    finally:
        path.unlink()
    shapes = {
        value.name: [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in (*proto.graph.input, *proto.graph.output)
    }
    assert shapes == {
        info.name: list(info.axes)
        for side in (io_of(pair.manifest).inputs, io_of(pair.manifest).outputs)
        for info in side
    }


def test_the_graphs_that_it_is_made_of_stay_as_they_were(fused):
    pair = fused("dflash2", ALONE)
    for model, file in zip(pair.models, (pair.target_info.file, "draft.onnx"), strict=True):
        unused = ir.to_proto(ir.load(pair.bundle / file)).SerializeToString(deterministic=True)
        assert ir.to_proto(model).SerializeToString(deterministic=True) == unused


def test_tensorrt_rtx_reads_it(fused):
    """The parser alone: building takes a while, and its network is the same as that of both engines."""
    trt = pytest.importorskip("tensorrt_rtx")
    from dflash_deploy.exporter import passes

    pair = fused("dflash2", PORTABLE)
    model = pair.model.clone()
    passes.fix_axes(model, {t.BATCH: 1, **{f"{name}_{t.CAPACITY}": SLOTS for name in (t.TARGET, t.DRAFT)}})
    passes.inline_functions(model)
    logger = trt.Logger(trt.Logger.ERROR)
    network = trt.Builder(logger).create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    data = ir.to_proto(model).SerializeToString()
    parsed = parser.parse(data, str(pair.bundle / "round.onnx"))
    assert parsed, [parser.get_error(i).desc() for i in range(parser.num_errors)]
    outputs = [network.get_output(i).name for i in range(network.num_outputs)]
    assert outputs == [info.name for info in io_of(pair.manifest).outputs]
