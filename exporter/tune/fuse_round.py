"""One graph for a whole round: verify, accept, draft the next block.

The target verifies the anchor and the proposals behind it, the graph itself finds how many of them stand, and
the draft takes the features where they are and proposes the next block. A round is one call, and what comes
back is a handful of integers for each request. It is for greedy decoding; the prompt is still read, and the
first block drafted, by the two graphs that it is made of.

The operators are those of the two graphs and standard ones, and the weights stay where they are: what both
graphs use is stored once.

Shapes: B batch, R rows, Q block rows, P proposals.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from ...bundle import tensors as t
from ...bundle.manifest import DraftInfo, GraphInfo, TargetInfo
from ...bundle.round_graph import ACCEPTED, ROUND, VERIFY_ROWS, of_model, own_axes, round_io
from ..nodes import constant
from ..passes.set_interface import set_interface
from ..save_graph import graph_to_file

_GLUE = "round"
_SHARED_AXES = {t.LOGIT_ROWS: t.ROWS, t.CONTEXT_ROWS: t.ROWS}
_NAME = re.compile(r"[A-Za-z_]\w*")


def round_to_bundle(
    directory: Path, graphs: Mapping[str, GraphInfo], target: TargetInfo, draft: DraftInfo
) -> GraphInfo:
    """Write the graph of a round beside the target's and the draft's, over the same weights.

    Args:
        directory: the bundle.
        graphs: its portable graphs.
        target: the manifest's.
        draft: the manifest's.
    """
    parts = graphs[t.TARGET], graphs[t.DRAFT]
    verify, block = (ir.load(directory / part.file) for part in parts)
    model = fuse_round(verify, block, target, draft)
    passes = tuple(dict.fromkeys(step for part in parts for step in part.passes))
    return GraphInfo(
        file=graph_to_file(model, directory, ROUND, passes),
        opset=max(part.opset for part in parts),
        ir_version=max(part.ir_version for part in parts),
        io=round_io(target.cache, draft.cache, draft.proposals),
        stages=(),
        weights=tuple(dict.fromkeys(file for part in parts for file in part.weights)),
        passes=passes,
    )


def fuse_round(target: ir.Model, draft: ir.Model, target_info: TargetInfo, draft_info: DraftInfo) -> ir.Model:
    """Make one graph of both; `bundle.round_graph` has its inputs and outputs.

    Args:
        target: the bundle's target graph, portable or tuned; where it looks at whole caches
            (`bundle.tuned.WHOLE_CACHE`), its slots are as many as its caches have. Not changed.
        draft: its draft graph. Not changed.
        target_info: the manifest's.
        draft_info: the manifest's.
    """
    fused, joining = target.clone(), draft.clone()
    graph = fused.graph
    verify, block = _Model(fused, t.TARGET), _Model(joining, t.DRAFT)
    _join(fused, joining)

    rows = _Nodes(graph)
    ids, start = verify.inputs[t.INPUT_IDS], verify.inputs[t.START]
    verify_rows = _integers(VERIFY_ROWS, (t.BATCH,))
    # Every row's choice is wanted.
    row = rows("Range", rows.number(0), rows.length(ids), rows.number(1))  # [R]
    wanted = rows("Expand", row, rows("Shape", ids))  # [B, R]
    verify.inputs.pop(t.WANTED_ROWS).replace_all_uses_with(wanted)
    # A proposal stands if all before it do, and the row before it chose it. Behind the last one none does.
    greedy = verify.outputs[t.GREEDY_IDS]  # [B, R]
    last = rows("Sub", rows.length(ids), rows.number(1))
    behind = rows("Min", rows("Add", row, rows.number(1)), last)  # [R]: the row behind each
    differs = rows("Not", rows("Equal", greedy, rows("Gather", ids, behind, axis=1)))
    most = rows("Sub", rows("Unsqueeze", verify_rows, rows.numbers(1)), rows.number(1))  # [B, 1]
    ends = rows("Or", differs, rows("GreaterOrEqual", row, most))  # [B, R]
    first = rows("Where", ends, row, last)
    accepted = rows("ReduceMin", first, rows.numbers(1), keepdims=0)  # [B]
    # The next anchor, and the block behind it. A choice that failed is no row of the embedding.
    anchor = rows("GatherElements", greedy, rows("Unsqueeze", accepted, rows.numbers(1)), axis=1)  # [B, 1]
    leads = constant(graph, f"{_GLUE}.leads", np.arange(draft_info.block_size)[None] == 0)  # [1, Q]
    mask = rows.number(draft_info.mask_token_id)
    block_ids = rows("Where", leads, rows("Max", anchor, rows.number(0)), mask)  # [B, Q]
    for name, value in {
        t.FEATURES: verify.outputs[t.FEATURES],
        t.START: start,
        t.ANCHOR: rows("Add", rows("Add", start, accepted), rows.number(1)),
        t.BLOCK_IDS: block_ids,
    }.items():
        block.inputs.pop(name).replace_all_uses_with(value)

    accepted.name, accepted.dtype, accepted.shape = ACCEPTED, ir.DataType.INT64, ir.Shape([t.BATCH])
    io = round_io(target_info.cache, draft_info.cache, draft_info.proposals)
    inputs = {**_named(verify.inputs, io), **_named(block.inputs, io), VERIFY_ROWS: verify_rows}
    outputs = {**_named(verify.outputs, io), **_named(block.outputs, io), ACCEPTED: accepted}
    graph.inputs[:] = [inputs[info.name] for info in io.inputs]
    graph.outputs[:] = [outputs[info.name] for info in io.outputs]
    set_interface(fused, io, 0)
    graph.extend(rows.made)
    common.RemoveUnusedNodesPass()(fused)
    _name_for_each_product(graph)
    common.TopologicalSortPass()(fused)
    for index, node in enumerate(graph):
        node.name = f"{node.op_type}.{index}"
    return fused


def _name_for_each_product(graph: ir.Graph) -> None:
    """Let no two integer products have a weight of one name; the second name is for the same bytes.

    Where ONNX Runtime makes such weights unsigned (`bundle.ort_exact`), it fails to do so
    twice for one name.
    """
    taken: set[ir.Value] = set()
    for node in graph:
        if node.op_type != "MatMulIntegerToFloat" or (weight := node.inputs[1]) is None:
            continue
        if weight not in taken:
            taken.add(weight)
            continue
        again = ir.Value(
            name=f"{_GLUE}.{weight.name}",
            shape=weight.shape,
            type=weight.type,
            const_value=weight.const_value,
        )
        graph.register_initializer(again)
        node.replace_input_with(1, again)


class _Model:
    """One of the two, with names that the other has not got.

    Attributes:
        inputs: by the name in the model's own graph.
        outputs: likewise.
    """

    def __init__(self, model: ir.Model, name: str):
        graph, own = model.graph, {**_SHARED_AXES, **own_axes(name)}
        self.inputs = {str(value.name): value for value in graph.inputs}
        self.outputs = {str(value.name): value for value in graph.outputs}
        for node in graph.all_nodes():
            for value in node.outputs:
                value.shape = _with_axes(value.shape, own)
                value.name = f"{name}/{value.name}"
        for called, value in (*self.inputs.items(), *self.outputs.items()):
            value.shape = _with_axes(value.shape, own)
            value.name = of_model(name, called)
        graph.inputs.clear()
        graph.outputs.clear()


class _Nodes:
    """Makes the nodes between both models; `made` are all so far."""

    def __init__(self, graph: ir.Graph):
        self.made: list[ir.Node] = []
        self._graph = graph

    def __call__(self, op: str, *inputs: ir.Value, **attributes: Any) -> ir.Value:
        node = ir.node(op, inputs, attributes)
        node.outputs[0].name = f"{_GLUE}/{op}.{len(self.made)}"
        self.made.append(node)
        return node.outputs[0]

    def number(self, value: int) -> ir.Value:
        """A scalar."""
        return constant(self._graph, f"{_GLUE}.{value}", np.array(value, np.int64))

    def numbers(self, value: int) -> ir.Value:
        """A list of one number."""
        return constant(self._graph, f"{_GLUE}.{value}.list", np.array([value], np.int64))

    def length(self, ids: ir.Value) -> ir.Value:
        """R of [B, R], as a scalar."""
        return self("Gather", self("Shape", ids), self.number(1))


def _join(into: ir.Model, model: ir.Model) -> None:
    """Move all of one model's content into another; initialisers that are the same become one."""
    graph, known = model.graph, into.graph.initializers
    nodes = list(graph)
    for name in list(graph.initializers):
        value = graph.initializers.pop(name)
        same, tensor = known.get(name), value.const_value
        if same is None:
            into.graph.register_initializer(value)
        elif _same(same.const_value, tensor):
            value.replace_all_uses_with(same)
        else:  # a small constant: weights of a bundle have one place each
            assert tensor is not None and not isinstance(tensor, ir.ExternalTensor), name
            value.replace_all_uses_with(constant(into.graph, f"{t.DRAFT}/{name}", tensor.numpy()))
    graph.remove(nodes)
    into.graph.extend(nodes)
    into.functions.update(model.functions)
    for domain, version in model.opset_imports.items():
        into.opset_imports[domain] = max(version, into.opset_imports.get(domain, 0))
    into.ir_version = max(into.ir_version, model.ir_version)


def _same(one: ir.TensorProtocol | None, other: ir.TensorProtocol | None) -> bool:
    """Whether both are one place in the weight file, or the same numbers inside the graphs."""
    if one is None or other is None or (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    places = [
        (str(tensor.location), tensor.offset, tensor.length)
        for tensor in (one, other)
        if isinstance(tensor, ir.ExternalTensor)
    ]
    if places:
        return len(places) == 2 and places[0] == places[1]
    return one.tobytes() == other.tobytes()


def _with_axes(shape: ir.Shape | None, names: Mapping[str, str]) -> ir.Shape | None:
    """A shape with other names of axes, also where they are part of a term (``kv + 8``)."""
    if shape is None:
        return None
    return ir.Shape(
        [
            dim if isinstance(dim, int) else _NAME.sub(lambda found: names.get(found[0], found[0]), str(dim))
            for dim in shape
        ]
    )


def _integers(name: str, axes: tuple[str, ...]) -> ir.Value:
    return ir.Value(name=name, shape=ir.Shape(axes), type=ir.TensorType(ir.DataType.INT64))


def _named(values: Mapping[str, ir.Value], io: t.GraphIO) -> dict[str, ir.Value]:
    """Values of one model by their name in the fused graph; a name that only one model needs stands alone."""
    alone = {info.name for info in (*io.inputs, *io.outputs)}
    for name, value in values.items():
        if name in alone:
            value.name = name
    return {str(value.name): value for value in values.values()}
