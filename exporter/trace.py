"""From a deployment module to an ONNX graph, without its weights.

Modules are traced on fake tensors: no weight is read, so the cost of a trace is the graph. The graph's
weights are names until `passes.external_weights` gives them their places in the weight file.
"""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import onnx_ir as ir
import torch
from onnx_ir.passes.common import RemoveUnusedNodesPass
from onnx_ir.tensor_adapters import from_torch_dtype
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim

from ..bundle.tensors import BATCH, CAPACITY, MOST_SLOTS, STAGE, Axis, DType, GraphIO
from ..plugins.grouped_dynamic_conv import DOMAIN
from ..plugins.onnx_function import add_function
from ..plugins.torch_op import translation_table
from . import passes
from .layer_function import calls_from_node, function_from_graph, without_reshape
from .modules.layer_calls import InputInfo, LayerAlone, Layered, LayerFunction
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
        interface: the graph's inputs and outputs in order. The module's forward takes and gives all but the
            last `caches` of each, which its layers take and give.
        caches: number of cache tensors.
        stages: names of further values that forward returns behind the outputs. They become named values
            inside the graph (`bundle.tensors.STAGE` + name), not outputs.
        kernel_size: number of taps if the graph holds ``dflash::GroupedDynamicConv``.

    Returns:
        The model. Initialisers carry the module's parameter names and no data.
    """
    traced = interface.inputs[: len(interface.inputs) - caches]
    given = interface.outputs[: len(interface.outputs) - caches]
    with FakeTensorMode():
        module = build().eval()
        layers = list(module.layers) if isinstance(module, Layered) else []
        if layers:
            del module.layers  # their parameters need not be traced
        model = _exported(
            module,
            [InputInfo(TORCH_DTYPES[info.dtype], info.axes) for info in traced],
            [info.name for info in traced],
            [info.name for info in given] + [STAGE + stage for stage in stages],
        )
    if isinstance(module, Layered):
        _run_layers(model, module, layers, interface, caches)
    model.ir_version = IR_VERSION
    passes.strip_metadata(model)
    passes.set_interface(model, interface, len(stages))
    passes.share_sizes(model, model.graph.inputs)
    if kernel_size is not None:
        add_function(model, kernel_size, OPSET)
    else:
        model.opset_imports.pop(DOMAIN, None)
    passes.tidy(model)
    return model


def _run_layers(
    model: ir.Model, module: Layered, layers: Sequence[nn.Module], interface: GraphIO, caches: int
) -> None:
    """Put the layers' nodes in the place of the one node that stands for them.

    Args:
        model: changed in place.
        module: what was traced.
        layers: its layers.
        interface: see `graph_from_module`.
        caches: likewise.
    """
    graph = model.graph
    first = len(interface.inputs) - caches
    old = [_value(info.name, TORCH_DTYPES[info.dtype], info.axes) for info in interface.inputs[first:]]
    graph.inputs.extend(old)
    parameters = []
    for index, layer in enumerate(layers):
        own = [(f"layers.{index}.{name}", p) for name, p in layer.named_parameters()]
        parameters.append([_value(name, p.dtype, tuple(p.shape)) for name, p in own])
        graph.initializers.update({str(value.name): value for value in parameters[-1]})
    new = calls_from_node(graph, module.steps, old, parameters)
    first = len(interface.outputs) - caches
    for info, value in zip(interface.outputs[first:], new, strict=True):
        value.name = info.name
    graph.outputs[first:first] = new
    for kind in dict.fromkeys(step.kind for step in module.steps):
        function = _layer_function(kind, module.functions[kind])
        model.functions[function.identifier()] = function
    passes.inline_functions(model)


def _value(name: str, dtype: torch.dtype, axes: Sequence[Axis]) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(from_torch_dtype(dtype)), shape=ir.Shape(axes))


def _layer_function(kind: str, function: LayerFunction) -> ir.Function:
    """Trace a layer by itself; the function takes what a call passes: inputs, then parameters."""
    with FakeTensorMode():
        module = LayerAlone(function).eval()
        model = _exported(module, [list(function.inputs)])
        parameters = [name for name, _ in module.named_parameters()]
    traced = list(zip(model.graph.inputs, function.inputs, strict=True))
    passes.share_sizes(model, [value for value, info in traced if not info.flat])
    RemoveUnusedNodesPass()(model)
    inputs = [without_reshape(value) if info.flat else value for value, info in traced]
    return function_from_graph(kind, model.graph, inputs, parameters)


def _exported(
    module: nn.Module,
    inputs: Sequence[InputInfo | list[InputInfo]],
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
) -> ir.Model:
    """Export a module that was made on the fake tensors that are on.

    Args:
        module: the module.
        inputs: dtype and axes of what its forward takes, one by one or in lists.
        input_names: of the graph's inputs.
        output_names: of its outputs.
    """
    sizes = _example_sizes([info for x in inputs for info in (x if isinstance(x, list) else [x])])
    dims = {name: Dim(name, min=1, max=MOST_SLOTS) for name in sizes}

    def example(info: InputInfo) -> torch.Tensor:
        shape = [sizes[a] if isinstance(a, str) else a for a in info.axes]
        return torch.zeros(shape, dtype=info.dtype)

    def dynamic(info: InputInfo) -> dict[int, Any]:
        return {i: dims[a] for i, a in enumerate(info.axes) if isinstance(a, str)}

    def each(function: Callable[[InputInfo], Any]) -> tuple[Any, ...]:
        return tuple([function(i) for i in x] if isinstance(x, list) else function(x) for x in inputs)

    with _quiet(), _no_collection():
        program = torch.onnx.export(
            module,
            each(example),
            dynamic_shapes=each(dynamic),
            input_names=input_names,
            output_names=output_names,
            custom_translation_table=translation_table(),
            opset_version=OPSET,
            dynamo=True,
            optimize=False,
            verbose=False,
        )
    assert program is not None
    return program.model


def _example_sizes(infos: Sequence[InputInfo]) -> dict[str, int]:
    names: list[str] = []
    for info in infos:
        names += [a for a in info.axes if isinstance(a, str) and a not in names]
    sizes = dict(zip(names, _EXAMPLES, strict=False))
    if CAPACITY in sizes:
        sizes[CAPACITY] = 19  # above every kv: a cache is never shorter than what is looked at
    assert len(sizes) == len(names) and sizes.get(BATCH, 3) > 1
    return sizes


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Look for no garbage: a tracer's many objects are all in use, and looking takes a sixth of its time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


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
