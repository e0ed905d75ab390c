"""Int4 bundles: rows by themselves, the same tokens with and without a draft, and a check of the quality."""

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper, numpy_helper

from dflash_deploy.bundle.errors import OutputError, RequestError
from dflash_deploy.bundle.manifest import manifest_from_bundle
from dflash_deploy.bundle.ort_options import session_options
from dflash_deploy.bundle.tensors import DRAFT, TARGET
from dflash_deploy.bundle.tuned import ALONE, GROUP_HEADS, MERGE_HEADS, OPEN_ATTENTION, TOGETHER, WHOLE_CACHE
from dflash_deploy.cli import cli
from dflash_deploy.exporter.quantize.bundle import SCHEMES, quantize_bundle
from dflash_deploy.exporter.quantize.int4 import BLOCK, ZERO, _packed, rounded
from dflash_deploy.runtime.decoder import Decoder
from dflash_deploy.runtime.service import Service, ServiceSettings
from dflash_deploy.runtime.stats import Mode
from tiny_bundles import TARGET as TINY

IDS = np.random.default_rng(5).integers(0, TINY["vocab_size"], 512).tolist()
LOOSE = 3.0  # random weights have no shape that 16 steps could follow


@pytest.fixture(scope="module")
def pair(tiny_bundle):
    return tiny_bundle("dflash2-grouped")


@pytest.fixture(scope="module")
def rounded_bundle(pair, tmp_path_factory):
    output = tmp_path_factory.mktemp("int4") / "bundle"
    quantize_bundle(pair.bundle, output, IDS, LOOSE, bits=4)
    return output


def test_a_weight_on_a_grid_is_kept():
    """Sixteen steps, one of which stands for 0: rounding finds the steps and the scale again."""
    random = np.random.default_rng(1)
    steps = random.integers(0, 16, (6, 3, BLOCK))
    steps[..., :2] = 0, 15  # every block uses its range
    scales = random.uniform(0.01, 2.0, (6, 3)) * random.choice([-1.0, 1.0], (6, 3))
    weight = ((steps - ZERO) * scales[..., None]).reshape(6, -1).astype(np.float32)
    found = rounded(weight)
    np.testing.assert_array_equal(found.steps, steps)
    np.testing.assert_allclose(found.scales, scales, rtol=1e-5)
    np.testing.assert_allclose(found.numbers(weight.shape[1]), weight, rtol=1e-5, atol=1e-6)


def test_rounding_is_no_worse_than_evenly_spaced_steps_and_follows_the_power_of_channels():
    random = np.random.default_rng(2)
    weight = random.standard_normal((16, 70)).astype(np.float32)  # 70: the last block is padded
    weight[3] = 0.0
    power = np.full(70, 1e-3, np.float32)
    power[5] = 100.0
    even, weighted = (rounded(weight, p).numbers(70) for p in (None, power))
    assert np.abs(even - weight).max() <= np.abs(weight).max() / 7
    assert not even[3].any()
    simple = np.abs(even - weight)[:, 5].mean()
    assert np.abs(weighted - weight)[:, 5].mean() < 0.5 * simple
    assert (rounded(weight).steps <= 15).all()


def test_two_numbers_stand_in_a_byte_the_first_one_low():
    assert _packed(np.array([[1, 2, 15, 0]], np.uint8)).tolist() == [[0x21, 0x0F]]


def test_the_product_is_that_of_the_rounded_numbers_and_rows_do_not_see_each_other():
    """The operator itself, as it is used: in any company a row has the same bits, also alone."""
    random = np.random.default_rng(3)
    weight = random.standard_normal((257, 96)).astype(np.float32)
    blocks = rounded(weight)
    stored = {
        "w": _packed(blocks.steps),
        "s": blocks.scales,
    }
    node = helper.make_node(
        "MatMulNBits",
        ["x", "w", "s"],
        ["y"],
        domain="com.microsoft",
        K=96,
        N=257,
        bits=4,
        block_size=BLOCK,
        accuracy_level=4,
    )
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", 96])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows", 257])],
        [numpy_helper.from_array(value, name) for name, value in stored.items()],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
    rows = random.standard_normal((24, 96)).astype(np.float32)
    rows[::5] *= 300.0
    rows[7] = 0.0
    rows[:, 3] *= 50.0
    for threads in (1, 2):
        session = ort.InferenceSession(
            model, session_options(ort, threads), providers=["CPUExecutionProvider"]
        )
        (whole,) = session.run(None, {"x": rows})
        exact = rows @ blocks.numbers(96).T
        assert np.abs(whole - exact).max() <= 0.02 * np.abs(exact).max()  # activations are rounded too
        assert not whole[7].any()
        for count in (2, 3, 5, 8, 16):  # a lone row is never computed alone, see `least_rows`
            for begin in range(0, len(rows) - count + 1, count):
                (part,) = session.run(None, {"x": rows[begin : begin + count]})
                np.testing.assert_array_equal(part, whole[begin : begin + count])


def original(pair):
    return onnx.load(pair.bundle / "target.onnx", load_external_data=False)


def test_what_was_done_is_in_the_manifest(pair, rounded_bundle):
    manifest = manifest_from_bundle(rounded_bundle)
    assert manifest.quantization.scheme == SCHEMES[4]
    assert 0.5 < manifest.quantization.perplexity_ratio <= LOOSE
    assert manifest.graphs[TARGET].passes == ("int4", "smooth", "int8")
    assert manifest.graphs[DRAFT].passes == ("smooth", "int8")
    done = ("int4", "smooth", "int8", MERGE_HEADS, WHOLE_CACHE, OPEN_ATTENTION)
    assert manifest.tuned[ALONE].passes == done
    assert manifest.tuned[TOGETHER].passes == (*done, GROUP_HEADS)
    model = onnx.load(rounded_bundle / "target.onnx", load_external_data=False)
    kinds = [node.op_type for node in model.graph.node]
    assert kinds.count("MatMulNBits") == 4 * manifest.target.num_layers  # qkv, o, gate and up, down
    assert kinds.count("MatMulIntegerToFloat") == 1  # the head
    assert "Gemm" not in kinds
    down = next(x for x in model.graph.initializer if x.name.endswith("layers.0.mlp.down_proj.weight.int4"))
    inputs = next(x for x in original(pair).graph.initializer if x.name.endswith("0.mlp.down_proj.weight"))
    assert down.data_type == TensorProto.UINT8
    assert list(down.dims) == [inputs.dims[0], -(-inputs.dims[1] // BLOCK), BLOCK // 2]


def test_plain_and_speculative_tokens_are_the_same_alone_and_among_others(rounded_bundle):
    random = np.random.default_rng(6)
    asked = [
        (random.integers(0, TINY["vocab_size"], rows).tolist(), new)
        for rows, new in ((3, 60), (40, 30), (9, 50), (30, 20))
    ]
    found = {}
    with Decoder.open(rounded_bundle, threads=1, verify_rows=4) as decoder:
        for mode in Mode:
            found[mode] = [decoder.generate(prompt, new, mode=mode).ids for prompt, new in asked]
    assert found[Mode.PLAIN] == found[Mode.SPECULATIVE]
    for rows in (1, 4):
        settings = ServiceSettings(max_requests=3, verify_rows=rows)
        with Service.open(rounded_bundle, settings, threads=1) as service:
            tickets = [service.submit(prompt, new) for prompt, new in asked]
            assert [ticket.result().ids for ticket in tickets] == found[Mode.PLAIN]


def test_what_is_worse_than_allowed_is_refused_and_the_earlier_bundle_stays(pair, tmp_path):
    output = tmp_path / "bundle"
    quantize_bundle(pair.bundle, output, IDS, LOOSE)
    before = (output / "manifest.json").read_bytes()
    with pytest.raises(OutputError, match=r"perplexity: got '.* x that of float32'.*or use 8 bits"):
        quantize_bundle(pair.bundle, output, IDS, 1e-6, bits=4)
    assert (output / "manifest.json").read_bytes() == before


def test_other_numbers_of_bits_are_refused(pair, tmp_path):
    with pytest.raises(RequestError, match="bits: got 3, expected 8, 4 or 32"):
        quantize_bundle(pair.bundle, tmp_path / "bundle", IDS, bits=3)
    result = CliRunner().invoke(cli, ["quantize", str(pair.bundle), "--output", "x", "--bits", "3"])
    assert result.exit_code == 2
    assert "'3' is not one of '8', '4'" in result.output


@pytest.mark.slow
def test_the_demo_pair(demo_bundle, tmp_path):
    """Too far from float32 for the bound, which has to be widened; the promise holds all the same."""
    from dflash_deploy.demo import demo_prompts

    with pytest.raises(OutputError, match="perplexity"):
        quantize_bundle(demo_bundle, tmp_path / "bundle", bits=4)
    manifest = quantize_bundle(demo_bundle, tmp_path / "bundle", max_perplexity_ratio=1.06, bits=4)
    assert 1.02 < manifest.quantization.perplexity_ratio < 1.06
    with Decoder.open(tmp_path / "bundle") as decoder:
        for prompt in demo_prompts():
            plain, speculative = (decoder.generate(prompt, 128, mode=mode, chat=True).ids for mode in Mode)
            assert plain == speculative


def test_a_bundle_is_not_replaced_by_its_own_rounding(pair):
    before = (pair.bundle / "manifest.json").read_bytes()
    for output in (pair.bundle, pair.bundle / "inside"):
        with pytest.raises(OutputError, match="a place outside the bundle that is read"):
            quantize_bundle(pair.bundle, output, IDS, LOOSE)
    assert (pair.bundle / "manifest.json").read_bytes() == before
