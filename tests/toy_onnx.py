"""A tiny pair as real ONNX graphs that follow `bundle.tensors`, written to a bundle without the exporter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from dflash_deploy.bundle.labels import labels
from dflash_deploy.bundle.manifest import (
    SCHEMA_VERSION,
    DraftInfo,
    GraphInfo,
    Manifest,
    TargetInfo,
    TokenizerInfo,
    file_info,
    manifest_to_file,
)
from dflash_deploy.bundle.tensors import DRAFT, TARGET, CacheShape, DType, GraphIO, draft_io, target_io

VOCAB, HIDDEN, BLOCK, MASK = 40, 8, 4, 3
WEIGHTS = "weights.bin"
_ONNX = {
    DType.FLOAT32: TensorProto.FLOAT,
    DType.FLOAT16: TensorProto.FLOAT16,
    DType.BFLOAT16: TensorProto.BFLOAT16,
    DType.INT64: TensorProto.INT64,
}


def _ints(name: str, *values: int) -> onnx.TensorProto:
    return numpy_helper.from_array(np.array(values, np.int64), name)


def _model(io: GraphIO, nodes: list, initializers: list, functions=(), domains=()) -> onnx.ModelProto:
    def info(tensor):
        return helper.make_tensor_value_info(tensor.name, _ONNX[tensor.dtype], list(tensor.axes))

    constants = [_ints("c0", 0), _ints("c1", 1), _ints("c2", 2), _ints("cm1", -1)]
    constants.append(numpy_helper.from_array(np.array(0, np.int64), "zero"))
    constants.append(numpy_helper.from_array(np.array(1, np.int64), "one"))
    graph = helper.make_graph(
        nodes,
        "toy",
        [info(t) for t in io.inputs],
        [info(t) for t in io.outputs],
        [*constants, *initializers],
    )
    opsets = [helper.make_opsetid("", 24), *[helper.make_opsetid(d, 1) for d in domains]]
    return helper.make_model(graph, opset_imports=opsets, ir_version=11, functions=list(functions))


def _embedding(dtype: DType) -> onnx.TensorProto:
    values = np.random.default_rng(7).standard_normal((VOCAB, HIDDEN)).astype(np.float32)
    return numpy_helper.from_array(
        values.astype(np.float16 if dtype is DType.FLOAT16 else np.float32), "embed"
    )


def target_model(io: GraphIO, dtype: DType = DType.FLOAT32) -> onnx.ModelProto:
    """One attention over token embeddings, and the tied head."""
    node = helper.make_node
    nodes = [
        node("Gather", ["embed", "input_ids"], ["x"]),  # [B, R, H]
        node("Unsqueeze", ["x", "c1"], ["x4"]),
        node("TensorScatter", ["past_key.0", "x4", "start"], ["present_key.0"], axis=2),
        node("TensorScatter", ["past_value.0", "x4", "start"], ["present_value.0"], axis=2),
        node("Shape", ["slots"], ["kv"]),
        node("Slice", ["present_key.0", "c0", "kv", "c2"], ["k"]),
        node("Slice", ["present_value.0", "c0", "kv", "c2"], ["v"]),
        node("Shape", ["input_ids"], ["shape"]),
        node("Gather", ["shape", "one"], ["rows"]),
        node("Range", ["zero", "rows", "one"], ["row"]),
        node("Unsqueeze", ["start", "c1"], ["start2"]),
        node("Add", ["start2", "row"], ["position"]),  # [B, R]
        node("Unsqueeze", ["position", "cm1"], ["position3"]),
        node("LessOrEqual", ["slots", "position3"], ["seen"]),
        node("Unsqueeze", ["seen", "c1"], ["mask"]),  # [B, 1, R, K]
        node("Attention", ["x4", "k", "v", "mask"], ["mixed4"]),
        node("Squeeze", ["mixed4", "c1"], ["mixed"]),
        node("Sub", ["mixed", "x"], ["difference"]),  # a token does not simply repeat itself
        node("Cast", ["difference"], ["features"], to=TensorProto.FLOAT),
        node("Unsqueeze", ["wanted_rows", "cm1"], ["wanted"]),
        node("GatherND", ["difference", "wanted"], ["picked"], batch_dims=1),  # [B, W, H]
        node("Transpose", ["embed"], ["head"], perm=[1, 0]),
        node("MatMul", ["picked", "head"], ["raw_logits"]),
        node("Cast", ["raw_logits"], ["logits"], to=TensorProto.FLOAT),
        node("ArgMax", ["logits"], ["greedy_ids"], axis=-1, keepdims=0),
    ]
    return _model(io, nodes, [_embedding(dtype)])


def draft_model(io: GraphIO, dtype: DType = DType.FLOAT32) -> onnx.ModelProto:
    """The sum of the context's features, less the anchor's embedding times the row."""
    node = helper.make_node
    floats = np.float16 if dtype is DType.FLOAT16 else np.float32
    weight = numpy_helper.from_array(np.arange(1, BLOCK, dtype=floats)[None, :, None], "weight")
    nodes = [
        node("CastLike", ["features", "embed"], ["narrow"]),
        node("Unsqueeze", ["narrow", "c1"], ["f4"]),
        node("TensorScatter", ["past_key.0", "f4", "start"], ["present_key.0"], axis=2),
        node("TensorScatter", ["past_value.0", "f4", "start"], ["present_value.0"], axis=2),
        node("Shape", ["slots"], ["kv"]),
        node("Slice", ["present_key.0", "c0", "kv", "c2"], ["k4"]),
        node("Squeeze", ["k4", "c1"], ["k"]),  # [B, K, H]
        node("Unsqueeze", ["anchor_position", "c1"], ["anchor2"]),
        node("Less", ["slots", "anchor2"], ["seen"]),
        node("CastLike", ["seen", "k"], ["seen_f"]),
        node("Unsqueeze", ["seen_f", "c1"], ["seen3"]),  # [B, 1, K]
        node("MatMul", ["seen3", "k"], ["context"]),  # [B, 1, H]
        node("Slice", ["block_ids", "c0", "c1", "c1"], ["anchor_id"]),
        node("Gather", ["embed", "anchor_id"], ["anchor"]),  # [B, 1, H]
        node("Mul", ["anchor", "weight"], ["scaled"]),
        node("Sub", ["context", "scaled"], ["hidden"]),  # [B, P, H]
        node("Transpose", ["embed"], ["head"], perm=[1, 0]),
        node("MatMul", ["hidden", "head"], ["raw_logits"]),
        node("Cast", ["raw_logits"], ["draft_logits"], to=TensorProto.FLOAT),
        node("ArgMax", ["draft_logits"], ["proposals"], axis=-1, keepdims=0),
        node("ReduceSum", ["draft_logits", "cm1"], ["logit_sums"], keepdims=0),
        # block_rows must be used to stay an input
        node("Identity", ["block_rows"], ["block_rows_seen"]),
    ]
    return _model(io, nodes, [_embedding(dtype), weight])


def write_bundle(directory: Path, dtype: DType = DType.FLOAT32, max_length: int = 120) -> Manifest:
    """Write the pair; the embedding lies in one file that both graphs share."""
    directory.mkdir(parents=True, exist_ok=True)
    cache = CacheShape(1, 1, HIDDEN, dtype)
    ios = {
        TARGET: target_io(cache, VOCAB, HIDDEN),
        DRAFT: draft_io(cache, HIDDEN, BLOCK, BLOCK - 1, VOCAB, None),
    }
    stored = DType.FLOAT32 if dtype is DType.BFLOAT16 else dtype  # never loaded
    for name, build in ((TARGET, target_model), (DRAFT, draft_model)):
        model = build(ios[name], stored)
        onnx.external_data_helper.set_external_data(
            next(i for i in model.graph.initializer if i.name == "embed"), WEIGHTS, offset=0
        )
        embed = next(i for i in model.graph.initializer if i.name == "embed")
        (directory / WEIGHTS).write_bytes(embed.raw_data)
        embed.ClearField("raw_data")
        helper.set_model_props(model, labels(name))
        (directory / f"{name}.onnx").write_bytes(model.SerializeToString())
    graphs = {
        name: GraphInfo(f"{name}.onnx", 24, 11, ios[name], weights=(WEIGHTS,)) for name in (TARGET, DRAFT)
    }
    manifest = Manifest(
        schema_version=SCHEMA_VERSION,
        name="toy",
        dtype=dtype,
        float32_parts=(),
        max_length=max_length,
        slack_slots=BLOCK,
        target=TargetInfo("toy", HIDDEN, 1, VOCAB, VOCAB, cache),
        draft=DraftInfo("toy", "toy", HIDDEN, 1, BLOCK, 1, MASK, (0,), cache, VOCAB),
        stop_token_ids=(),
        tokenizer=TokenizerInfo(),
        graphs=graphs,
        provenance={},
        exported_with={},
        files={},
    )
    return write_manifest(directory, manifest)


def write_manifest(directory: Path, manifest: Manifest) -> Manifest:
    """Write a manifest with the sizes and hashes that the files have now."""
    names = {*(g.file for g in manifest.graphs.values()), WEIGHTS}
    manifest = replace(manifest, files={name: file_info(directory / name) for name in sorted(names)})
    manifest_to_file(manifest, directory)
    return manifest
