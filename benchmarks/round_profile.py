"""Where the time of a round goes, and how far it is from what the machine could do.

    python benchmarks/round_profile.py BUNDLE --rows 4 --context 256

Times the verify pass of the target and a pass of the draft over caches of so many slots, first as they are,
then with ONNX Runtime's profiler on, which says which operators the time goes to (it makes passes slower, so
shares are given, not times). The floor is the time of reading the weights of a pass once, at the speed at
which this machine reads memory that is in no cache, and the time of its products at the speed of a large
float32 product.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from dflash_deploy.bench.machine import cpu_name
from dflash_deploy.bundle import tensors as t
from dflash_deploy.bundle.manifest import GraphInfo, Manifest, manifest_from_bundle
from dflash_deploy.bundle.ort_options import session_options
from dflash_deploy.bundle.tuned import ALONE, DRAFT_ALONE
from dflash_deploy.runtime.ort_engine import physical_cores

REPEATS = 40
KINDS = {
    "matrix products": ("Gemm", "MatMul", "FusedMatMul", "MatMulIntegerToFloat", "MatMulNBits"),
    "rounding of rows": ("Abs", "ReduceMax", "Div", "QuantizeLinear"),
    "attention": ("Attention", "Softmax"),
    "caches": ("TensorScatter", "Slice"),
    "norms": ("RMSNormalization",),
    "heads and RoPE": ("Reshape", "Transpose", "Split", "Concat", "RotaryEmbedding"),
    "choice": ("ArgMax", "TopK", "GatherElements", "Gather"),
}


def graph_of(manifest: Manifest, name: str) -> GraphInfo:
    """What the runtime takes for one request on the CPU."""
    return manifest.tuned.get({t.TARGET: ALONE, t.DRAFT: DRAFT_ALONE}[name], manifest.graphs[name])


def inputs_of(manifest: Manifest, name: str, rows: int, context: int) -> dict[str, Any]:
    """What a pass behind so many slots is given; the last rows of them are its own."""
    random, start = np.random.default_rng(0), np.array([context - rows], np.int64)
    if name == t.TARGET:
        ids = random.integers(0, manifest.target.vocab_size, (1, rows))
        wanted = np.arange(rows, dtype=np.int64)[None]
        return {t.INPUT_IDS: ids, t.START: start, t.SLOTS: np.arange(context), t.WANTED_ROWS: wanted}
    draft = manifest.draft
    features = random.standard_normal((1, rows, len(draft.taps) * manifest.target.hidden_size), np.float32)
    block = np.full((1, draft.block_size), draft.mask_token_id, np.int64)
    return {
        t.FEATURES: features,
        t.START: start,
        t.ANCHOR: np.array([context], np.int64),
        t.BLOCK_IDS: block,
        t.BLOCK_ROWS: np.array([draft.block_size], np.int64),
        t.SLOTS: np.arange(context),
    }


def passes(bundle: Path, manifest: Manifest, name: str, rows: int, context: int, prefix: Path | None) -> Any:
    """Milliseconds of each pass, and the session."""
    options = session_options(ort, physical_cores())
    if prefix is not None:
        options.enable_profiling, options.profile_file_prefix = True, str(prefix)
    info = graph_of(manifest, name)
    session = ort.InferenceSession(str(bundle / info.file), options, providers=["CPUExecutionProvider"])
    binding, kept = session.io_binding(), []
    cache = manifest.target.cache if name == t.TARGET else manifest.draft.cache
    for past in cache.names():
        shape = (1, cache.kv_heads, context, cache.head_dim)
        # Written to: zeros that nobody touched are one page, which the processor keeps.
        memory = np.full(shape, 0.01, np.float16 if cache.dtype is t.DType.FLOAT16 else np.float32)
        kept.append(memory)
        for bind, called in ((binding.bind_input, past), (binding.bind_output, t.present(past))):
            bind(called, "cpu", 0, memory.dtype, shape, memory.ctypes.data)
    for called, value in inputs_of(manifest, name, rows, context).items():
        binding.bind_cpu_input(called, np.ascontiguousarray(value))
    for called in (t.GREEDY_IDS, t.FEATURES) if name == t.TARGET else (t.PROPOSALS, t.LOGIT_SUMS):
        binding.bind_output(called, "cpu")
    took = []
    for _ in range(REPEATS):
        began = perf_counter()
        session.run_with_iobinding(binding)
        took.append((perf_counter() - began) * 1000.0)
    del kept
    return took, session


def kinds_of(graph: Any) -> dict[str, str]:
    """Kinds of the nodes whose operator alone does not tell: products of two activations, and masks.

    Args:
        graph: an `onnx_ir.Graph`.

    Returns:
        The kind by the node's name. A product without a weight is attention's if it is in front of or behind
        a softmax, else (a selector's) it belongs to the choice.
    """
    found = {}
    for node in graph:
        if node.op_type in KINDS["matrix products"] and node.inputs[1].const_value is None:
            found[node.name] = "choice"
    for node in graph:
        if node.op_type == "Softmax":
            masked = node.inputs[0].producer()
            above = (
                [value.producer() for value in masked.inputs] if masked.op_type in ("Add", "Where") else []
            )
            for part in (masked, *above, *node.outputs[0].consumers()):
                if part is not None and part.op_type in ("Add", "Where", *KINDS["matrix products"]):
                    found[part.name] = "attention"
    # What masks are made of has numbers of its own: nothing else of a pass chooses between two constants.
    for node in graph:
        if node.op_type == "Where" and all(v.const_value is not None for v in node.inputs[1:]):
            found[node.name] = "attention"
    return found


def shares(profile: str, graph: Any) -> dict[str, float]:
    """Share of each kind of operator in the time of all kernels.

    Args:
        profile: file that ONNX Runtime wrote.
        graph: `onnx_ir.Graph` that was run.
    """
    spent: Counter[str] = Counter()
    own = kinds_of(graph)
    by_op = {op: kind for kind, ops in KINDS.items() for op in ops}
    for event in json.loads(Path(profile).read_text()):
        if event.get("cat") == "Node" and event["name"].endswith("kernel_time"):
            # A node that ONNX Runtime made of one has that one's name and a slash in front of its own.
            name = event["name"].removesuffix("_kernel_time").partition("/")[0]
            spent[own.get(name) or by_op.get(event["args"]["op_name"], "other")] += event["dur"]
    return {kind: round(ms / sum(spent.values()), 3) for kind, ms in spent.most_common()}


def weight_bytes(graph: Any) -> tuple[int, int]:
    """Bytes of the weights of a graph's products, and how many numbers they are."""
    weights = {}
    for node in graph:
        if node.op_type in KINDS["matrix products"]:
            value = node.inputs[1]
            if value is not None and value.const_value is not None:
                weights[value.name] = value.const_value
    return sum(w.nbytes for w in weights.values()), sum(math.prod(w.shape.numpy()) for w in weights.values())


def read_gb_s(threads: int) -> float:
    """How fast this machine reads memory, all threads together."""
    parts = [np.ones(1 << 25, np.float64) for _ in range(threads)]  # 256 MiB each
    with ThreadPoolExecutor(threads) as pool:
        best = math.inf
        for _ in range(5):
            began = perf_counter()
            list(pool.map(np.max, parts))
            best = min(best, perf_counter() - began)
    return sum(part.nbytes for part in parts) / best / 1e9


def product_gflop_s() -> float:
    """Speed of a large float32 product, through ONNX Runtime's own kernels."""
    from onnx import TensorProto, helper

    size, names = 1536, ("a", "b", "c")
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [size, size]) for n in names]
    graph = helper.make_graph([helper.make_node("MatMul", ["a", "b"], ["c"])], "g", values[:2], values[2:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    options = ort.SessionOptions()
    options.intra_op_num_threads = physical_cores()
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    feeds = {n: np.ones((size, size), np.float32) for n in names[:2]}
    best = math.inf
    for _ in range(6):
        began = perf_counter()
        session.run(None, feeds)
        best = min(best, perf_counter() - began)
    return 2 * size**3 / best / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--rows", type=int, default=4, help="rows that are verified")
    parser.add_argument("--context", type=int, default=256, help="slots looked at")
    arguments = parser.parse_args()
    bundle, rows = arguments.bundle.absolute(), arguments.rows
    manifest = manifest_from_bundle(bundle)
    bandwidth, speed = read_gb_s(physical_cores()), product_gflop_s()
    report: dict[str, Any] = {
        "bundle": manifest.name,
        "cpu": cpu_name(),
        "threads": physical_cores(),
        "rows": rows,
        "context": arguments.context,
        "read_gb_s": round(bandwidth, 1),
        "float32_gflop_s": round(speed, 1),
    }
    with tempfile.TemporaryDirectory() as folder:
        for name in (t.TARGET, t.DRAFT):
            took, _ = passes(bundle, manifest, name, rows, arguments.context, None)
            _, session = passes(bundle, manifest, name, rows, arguments.context, Path(folder) / name)
            graph = ir.load(bundle / graph_of(manifest, name).file).graph
            size, numbers = weight_bytes(graph)
            report[name] = {
                "graph": graph_of(manifest, name).file,
                "ms": round(float(np.median(took)), 2),
                "weights_mb": round(size / 1e6, 1),
                "reading_weights_ms": round(size / bandwidth / 1e6, 2),
                "products_ms": round(2 * numbers * rows / speed / 1e6, 2),
                "shares": shares(session.end_profiling(), graph),
            }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
