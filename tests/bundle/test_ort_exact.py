"""Int8 sums, tried on the processor at hand."""

import types

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import numpy_helper

from dflash_deploy.bundle import ort_exact
from dflash_deploy.bundle.errors import ProviderError
from dflash_deploy.bundle.tensors import DType
from dflash_deploy.runtime import backends


@pytest.fixture(autouse=True)
def _unknown(monkeypatch):
    monkeypatch.setattr(ort_exact, "_known", {})


def test_the_product_has_the_largest_weights():
    model = onnx.load_from_string(ort_exact._PRODUCT)
    onnx.checker.check_model(model)
    (node,) = model.graph.node
    assert (node.op_type, node.domain) == ("MatMulIntegerToFloat", "com.microsoft")
    stored = {i.name: numpy_helper.to_array(i) for i in model.graph.initializer}
    expected = np.full((ort_exact.CHANNELS, ort_exact.OUTPUTS), ort_exact.WEIGHT, np.int8)
    np.testing.assert_array_equal(stored["weight"], expected)
    assert stored["weight"].dtype == np.int8
    assert stored["zero"] == ort_exact.ZERO
    assert stored["zero"].dtype == np.uint8


def test_unsigned_weights_are_exact_here_and_the_setting_found_is_too():
    assert ort_exact.adds_right(ort, ort_exact.UNSIGNED)
    found = ort_exact.exact_setting(ort)
    assert found is not None
    assert ort_exact.adds_right(ort, found)


class _Session:
    """Sums as a processor without VNNI gives them: pairs of products within 16 bits."""

    def __init__(self, _model, options, providers):
        assert providers == ["CPUExecutionProvider"]
        self._cut_off = options.entries[ort_exact.KEY] in _Session.cut_off

    def run(self, _, feeds):
        rows = feeds["rows"].astype(np.int64)
        pairs = rows.reshape(len(rows), -1, 2).sum(2) * ort_exact.WEIGHT
        if self._cut_off:
            pairs = pairs.clip(-(2**15), 2**15 - 1)
        sums = pairs.sum(1) - ort_exact.ZERO * ort_exact.WEIGHT * rows.shape[1]
        return [np.repeat(sums[:, None], ort_exact.OUTPUTS, 1).astype(np.float32)]


class _Options:
    def __init__(self):
        self.entries = {}

    def add_session_config_entry(self, key, value):
        self.entries[key] = value


@pytest.mark.parametrize(
    ("cut_off", "found"),
    [((), ort_exact.AS_IT_IS), (("0",), ort_exact.UNSIGNED), (("0", "1"), None)],
)
def test_a_processor_that_cuts_sums_off(cut_off, found, monkeypatch):
    monkeypatch.setattr(_Session, "cut_off", cut_off, raising=False)
    library = types.SimpleNamespace(__version__="0", SessionOptions=_Options, InferenceSession=_Session)
    assert ort_exact.exact_setting(library) == found
    monkeypatch.setattr(_Session, "cut_off", ("0", "1"), raising=False)
    assert ort_exact.exact_setting(library) == found, "asked once a process"


def test_a_library_without_the_operator_adds_nothing_right():
    def fails(*_, **__):
        raise RuntimeError("no such operator")

    library = types.SimpleNamespace(__version__="0", SessionOptions=_Options, InferenceSession=fails)
    assert ort_exact.exact_setting(library) is None


def test_a_rounded_bundle_is_refused_where_no_setting_is_exact(monkeypatch, tmp_path):
    monkeypatch.setattr(backends, "exact_setting", lambda _: None)
    manifest = types.SimpleNamespace(quantization=object(), dtype=DType.FLOAT32, is_rounded=lambda: True)
    with pytest.raises(ProviderError, match=r"does not add int8 products right .* use the float32 one"):
        backends.runners_from_bundle(tmp_path, manifest)
