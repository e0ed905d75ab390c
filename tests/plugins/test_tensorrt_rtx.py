"""TensorRT-RTX parses and builds a graph with the op from its function body; no GPU is needed."""

from __future__ import annotations

import pytest

from .conv_cases import Case
from .test_onnx_function import model_proto

trt = pytest.importorskip("tensorrt_rtx")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("kernel_size", [1, 2, 4])
def test_builds_an_engine(kernel_size, dtype):
    case = Case(8, kernel_size, 48, 16, 1, 8, dtype, 0)
    logger = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(logger)
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, logger)
    parsed = parser.parse(model_proto(case).SerializeToString())
    assert parsed, [str(parser.get_error(i)) for i in range(parser.num_errors)]

    profile = builder.create_optimization_profile()
    for name, tail in (("hidden", (48,)), ("delta", (kernel_size, 3))):
        profile.set_shape(name, (1, 1, *tail), (1, 8, *tail), (4, 16, *tail))
    config = builder.create_builder_config()
    config.add_optimization_profile(profile)
    engine = builder.build_serialized_network(network, config)
    assert engine is not None
    assert engine.nbytes > 0
