"""From a deployment module to an ONNX graph, without its weights.

Modules are traced on fake tensors: no weight is read, so the cost of a trace is the graph. The graph's
weights are names until `passes.external_weights` gives them their places in the weight file.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import onnx_ir as ir
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim

from ..bundle.tensors import BATCH, STAGE, DType, GraphIO, TensorInfo
from ..plugins.grouped_dynamic_conv import DOMAIN
from ..plugins.onnx_function import add_function
from ..plugins.torch_op import translation_table
from . import passes
from .modules.ops import IR_VERSION, OPSET

TORCH_DTYPES = {
    DType.FLOAT32: torch.float32,
    DType.FLOAT16: torch.float16,
    DType.BFLOAT16: torch.bfloat16,
    DType.INT64: torch.int64,
}

# Example sizes of symbolic axes: distinct, no 0 or 1, so that none is specialised or mistaken for another.
_EXAMPLES = (3, 7, 5, 13, 11, 17)


def graph_from_module(
    build: Callable[[], nn.Module],
    interface: GraphIO,
    *,
    caches: int = 0,
    stages: Sequence[str] = (),
    kernel_size: int | None = None,
) -> ir.Model:
    """Trace a module to ONNX.

    Args:
        build: makes the module; called under fake tensors.
        interface: the graph's inputs and outputs in order. The last `caches` inputs are handed to the
            module's forward as one list.
        caches: number of cache tensors.
        stages: names of further values that forward returns behind the outputs. They become named values
            inside the graph (`bundle.tensors.STAGE` + name), not outputs.
        kernel_size: number of taps if the graph holds ``dflash::GroupedDynamicConv``.

    Returns:
        The model. Initialisers carry the module's parameter names and no data.
    """
    axes = _symbols(interface)
    plain = interface.inputs[: len(interface.inputs) - caches]
    cached = interface.inputs[len(interface.inputs) - caches :]
    dims = {name: Dim(name, min=1, max=1 << 24) for name in axes}

    def shape(info: TensorInfo) -> tuple[int, ...]:
        return tuple(axes[a] if isinstance(a, str) else a for a in info.axes)

    def dynamic(info: TensorInfo) -> dict[int, Any]:
        return {i: dims[a] for i, a in enumerate(info.axes) if isinstance(a, str)}

    def example(info: TensorInfo) -> torch.Tensor:
        return torch.zeros(shape(info), dtype=TORCH_DTYPES[info.dtype])

    with FakeTensorMode():
        module = build().eval()
        inputs: list[Any] = [example(info) for info in plain]
        shapes: list[Any] = [dynamic(info) for info in plain]
        if caches:
            inputs.append([example(info) for info in cached])
            shapes.append([dynamic(info) for info in cached])
        with _quiet():
            program = torch.onnx.export(
                module,
                tuple(inputs),
                dynamic_shapes=tuple(shapes),
                input_names=[info.name for info in interface.inputs],
                output_names=[info.name for info in interface.outputs] + [STAGE + s for s in stages],
                custom_translation_table=translation_table(),
                opset_version=OPSET,
                dynamo=True,
                optimize=False,
                verbose=False,
            )
    assert program is not None
    model = program.model
    model.ir_version = IR_VERSION
    passes.strip_metadata(model)
    passes.set_interface(model, interface, len(stages))
    if kernel_size is not None:
        add_function(model, kernel_size, OPSET)
    else:
        model.opset_imports.pop(DOMAIN, None)
    passes.tidy(model)
    return model


def _symbols(interface: GraphIO) -> dict[str, int]:
    names: list[str] = []
    for info in interface.inputs:
        names += [a for a in info.axes if isinstance(a, str) and a not in names]
    sizes = dict(zip(names, _EXAMPLES, strict=False))
    if "capacity" in sizes:
        sizes["capacity"] = 19  # above every kv: a cache is never shorter than what is looked at
    assert len(sizes) == len(names) and sizes.get(BATCH, 3) > 1
    return sizes


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the tracer's notes (missing torchvision, renamed axes) from the user's screen."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
