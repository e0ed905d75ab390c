"""What every ONNX Runtime session is opened with."""

import re
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

import dflash_deploy
from dflash_deploy.bundle import ort_exact
from dflash_deploy.bundle.ort_options import SPIN_US, session_options

CHANNELS, OUTPUTS, ZERO = 64, 32, 128


def _product(options):
    """A product with the largest weights there are, each [CHANNELS, OUTPUTS] and one scale an output."""
    weight = np.full((CHANNELS, OUTPUTS), 127, np.int8)
    stored = {
        "weight": weight,
        "step": np.array(1.0, np.float32),
        "scales": np.ones(OUTPUTS, np.float32),
        "zero": np.array(ZERO, np.uint8),
    }
    node = helper.make_node(
        "MatMulIntegerToFloat",
        ["rows", "weight", "step", "scales", "zero"],
        ["sums"],
        domain="com.microsoft",
    )
    graph = helper.make_graph(
        [node],
        "product",
        [helper.make_tensor_value_info("rows", TensorProto.UINT8, ["R", CHANNELS])],
        [helper.make_tensor_value_info("sums", TensorProto.FLOAT, ["R", OUTPUTS])],
        [numpy_helper.from_array(value, name) for name, value in stored.items()],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("activation", [0, 1, 255])
def test_the_largest_int8_sums_are_exact_on_this_processor(rows, activation):
    session = _product(session_options(ort, 1))
    sums = session.run(None, {"rows": np.full((rows, CHANNELS), activation, np.uint8)})[0]
    np.testing.assert_array_equal(sums, float((activation - ZERO) * 127 * CHANNELS))


def test_the_setting_is_the_one_that_was_found(monkeypatch):
    monkeypatch.setattr(ort_exact, "exact_setting", lambda _: ort_exact.AS_IT_IS)
    assert session_options(ort).get_session_config_entry(ort_exact.KEY) == ort_exact.AS_IT_IS
    monkeypatch.setattr(ort_exact, "exact_setting", lambda _: None)
    assert session_options(ort).get_session_config_entry(ort_exact.KEY) == ort_exact.UNSIGNED


def test_options_say_threads_and_where_weights_are(tmp_path):
    options = session_options(ort, 3, tmp_path)
    assert options.intra_op_num_threads == 3
    assert options.get_session_config_entry("session.intra_op.spin_duration_us") == str(SPIN_US)
    folder = options.get_session_config_entry("session.model_external_initializers_file_folder_path")
    assert folder == str(tmp_path)


def test_no_session_over_a_bundle_is_opened_without_them():
    """Sessions of a benchmark of the machine and of `dflash doctor` are over models of their own."""
    root = Path(dflash_deploy.__file__).parent
    own = {"bundle/ort_options.py", "bundle/ort_exact.py", "runtime/doctor.py", "benchmarks/round_profile.py"}
    code = [
        p
        for part in ("bundle", "runtime", "exporter", "bench", "demo", "commands", "benchmarks", "plugins")
        for p in (root / part).rglob("*.py")
    ]
    assert len(code) > 100
    opened = {str(p.relative_to(root)) for p in code if re.search(r"\bSessionOptions\(", p.read_text())}
    assert opened <= own
    assert "bundle/ort_options.py" in opened
