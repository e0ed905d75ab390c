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
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim

from ..bundle.tensors import BATCH, CAPACITY, MOST_SLOTS, STAGE, DType, GraphIO
from ..plugins.grouped_dynamic_conv import DOMAIN
from ..plugins.onnx_function import add_function
from ..plugins.torch_op import translation_table
from . import passes
from .layer_function import function_from_graph, without_reshape
from .modules.layer_calls import DOMAIN as CALLS
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
        interface: the graph's inputs and outputs in order. The last `caches` inputs are handed to the
            module's forward as one list.
        caches: number of cache tensors.
        stages: names of further values that forward returns behind the outputs. They become named values
            inside the graph (`bundle.tensors.STAGE` + name), not outputs.
        kernel_size: number of taps if the graph holds ``dflash::GroupedDynamicConv``.

    Returns:
        The model. Initialisers carry the module's parameter names and no data.
    """
    infos = [InputInfo(TORCH_DTYPES[info.dtype], info.axes) for info in interface.inputs]
    plain = len(infos) - caches
    with FakeTensorMode():
        module = build().eval()
        groups: list[InputInfo | list[InputInfo]] = [*infos[:plain], *([infos[plain:]] if caches else [])]
        names = [info.name for info in interface.inputs]
        outputs = [info.name for info in interface.outputs] + [STAGE + s for s in stages]
        model = _exported(module, groups, names, outputs)
    if isinstance(module, Layered):
        for kind in dict.fromkeys(node.op_type for node in model.graph if node.domain == CALLS):
            function = _layer_function(kind, module.functions[kind])
            model.functions[function.identifier()] = function
        passes.inline_functions(model)
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
