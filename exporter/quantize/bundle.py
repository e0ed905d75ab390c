"""`quantize_bundle`: a float32 bundle in, one with int8 weights for ONNX Runtime out."""

from __future__ import annotations

import hashlib
import importlib.resources
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ...bundle.errors import BundleError, OutputError, RequestError, UnsupportedError, field_error
from ...bundle.files import atomic_directory, check_replaceable, safe_path
from ...bundle.manifest import (
    INT8,
    GraphInfo,
    Manifest,
    QuantizationInfo,
    Verify,
    file_info,
    manifest_from_bundle,
    manifest_to_file,
)
from ...bundle.tensors import DRAFT, TARGET, DType
from ..export import export_bundle
from ..progress import NullProgress, Progress
from ..tune.bundle import tuned_graphs
from ..weights import WEIGHT_FILE
from . import int4
from .int4 import BLOCK
from .int8 import DOMAIN, replace_embedding, replace_group
from .linear import Array, array_of, groups_of, weight_name
from .measure import channel_powers, channel_sizes, score, windows
from .smooth import smoothing_factors

_ROWS = "one scale an output; activations in 255 steps, one scale a row"
SCHEMES = {
    8: f"int8 weights, {_ROWS}",
    4: f"int4 weights of the target's layers, {BLOCK} a scale, as are activations; the others int8, {_ROWS}",
}
"""By the bits of the target's layers' weights."""
MAX_PERPLEXITY_RATIO = 1.02
_LEAST_TOKENS = 256
_PAGE_BYTES = 4096


def quantize_bundle(
    bundle: Path,
    output: Path,
    text: str | Sequence[int] | None = None,
    max_perplexity_ratio: float = MAX_PERPLEXITY_RATIO,
    progress: Progress | None = None,
    bits: int = 8,
) -> Manifest:
    """Write a bundle with int8 or int4 weights and check what that does to the target.

    Args:
        bundle: a float32 bundle.
        output: directory to make, or an earlier bundle, which is replaced when the new one is whole.
        text: what to calibrate and check with, in turn, or its token ids; None takes the one that comes
            with this package.
        max_perplexity_ratio: largest perplexity allowed, over that of the float32 target.
        progress: is told about stages.
        bits: of the weights of the target's layers, 8 or 4; the head and the draft have 8.

    Raises:
        BundleError: the bundle is missing or damaged, or is not float32.
        RequestError: the text is too short.
        UnsupportedError: there is nothing in it to quantise.
        OutputError: the result is worse than allowed, or cannot be written; an earlier bundle is as it was.
    """
    progress = progress or NullProgress()
    bundle = Path(bundle)
    check_replaceable(Path(output))  # before any work
    if Path(output).resolve().is_relative_to(bundle.resolve()):
        raise field_error(OutputError, "output", str(output), "a place outside the bundle that is read")
    if bits not in SCHEMES:
        raise field_error(RequestError, "bits", bits, "8 or 4")
    if not max_perplexity_ratio > 0:
        raise field_error(RequestError, "max_perplexity_ratio", max_perplexity_ratio, "a number > 0")
    with progress.stage("check bundle"):
        manifest = manifest_from_bundle(bundle, Verify.HASHES)
        _check(manifest)
        ids = _tokens(bundle, manifest, text)
        calibration, check = windows(ids)
    models = {name: ir.load(safe_path(bundle, info.file)) for name, info in manifest.graphs.items()}
    head = _head(models[TARGET])
    groups = groups_of(models[TARGET], head)
    if not any(head not in group.names for group in groups):
        raise UnsupportedError(
            f"quantize: the target ({manifest.target.family}) has no attention or MLP weights that it knows "
            "by name; only targets of transformers are quantised"
        )
    with progress.stage("calibrate"):
        smoothed = [group for group in groups if group.norm is not None]
        sizes = channel_sizes(bundle, manifest, [_name(g.source) for g in smoothed], calibration)
        factors = {g.names: smoothing_factors(sizes[_name(g.source)], g.weights()) for g in smoothed}
        of_head = next((found for names, found in factors.items() if head in names), None)
        if of_head is None:
            of_head = np.ones(manifest.target.hidden_size, np.float32)
        powers: dict[tuple[str, ...], Array] = {}
        if bits == 4:
            layers = [group for group in groups if head not in group.names]
            found = channel_powers(bundle, manifest, [_name(g.source) for g in layers], calibration)
            powers = {group.names: found[_name(group.source)] for group in layers}
    with atomic_directory(Path(output)) as work:
        with progress.stage("quantise weights"), _Weights(work) as weights:
            graphs = dict(manifest.graphs)
            for name, model in models.items():
                if name in (TARGET, DRAFT):
                    _quantise(model, head, of_head, factors, powers if name == TARGET else {}, weights)
                graphs[name] = _save(model, manifest.graphs[name], work, weights)
            _copy_others(manifest, bundle, work)
        tuned = tuned_graphs(work, graphs[TARGET], manifest.target.cache)
        files = {p.relative_to(work).as_posix(): file_info(p) for p in sorted(work.rglob("*")) if p.is_file()}
        quantised = replace(manifest, graphs=graphs, files=files, engines={}, tuned=tuned)
        with progress.stage("check quality"):
            info = _quality(bundle, manifest, work, quantised, check, ids, SCHEMES[bits])
            if not info.perplexity_ratio <= max_perplexity_ratio:
                raise field_error(
                    OutputError,
                    "perplexity",
                    f"{info.perplexity_ratio:.4f} x that of float32",
                    f"at most {max_perplexity_ratio}",
                    "allow more, or use " + ("the float32 bundle" if bits == 8 else "8 bits"),
                )
        quantised = replace(quantised, quantization=info)
        quantised.check()
        manifest_to_file(quantised, work)
    return quantised


def export_quantized(
    target: str,
    draft: str,
    output: Path,
    max_length: int | None = None,
    max_perplexity_ratio: float = MAX_PERPLEXITY_RATIO,
    progress: Progress | None = None,
    bits: int = 8,
) -> Manifest:
    """Export a pair in float32 to a place beside `output`, and quantise that.

    Raises:
        As `export_bundle` and `quantize_bundle`.
    """
    output = Path(output)
    check_replaceable(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as work:
        between = Path(work) / "float32"
        export_bundle(target, draft, between, DType.FLOAT32, max_length, progress)
        return quantize_bundle(between, output, None, max_perplexity_ratio, progress, bits)


def _check(manifest: Manifest) -> None:
    if manifest.quantization is not None:
        raise BundleError("quantize: this bundle is quantised already; give the float32 one")
    if manifest.dtype is not DType.FLOAT32:
        raise field_error(
            BundleError, "quantize: dtype", manifest.dtype.value, "float32", "export with --dtype float32"
        )


def _tokens(bundle: Path, manifest: Manifest, text: str | Sequence[int] | None) -> list[int]:
    if text is None:
        text = importlib.resources.files(__package__).joinpath("text.txt").read_text(encoding="utf-8")
    if isinstance(text, str):
        from tokenizers import Tokenizer

        if manifest.tokenizer.file is None:
            raise RequestError("text: the bundle has no tokenizer to read it with; give token ids")
        source = safe_path(bundle, manifest.tokenizer.file).read_text(encoding="utf-8")
        text = Tokenizer.from_str(source).encode(text).ids
    ids = [int(token) for token in text]
    if ids and not 0 <= min(ids) <= max(ids) < manifest.target.embedding_rows:
        raise field_error(
            RequestError, "text", (min(ids), max(ids)), f"0 <= token id < {manifest.target.embedding_rows}"
        )
    if len(ids) < _LEAST_TOKENS:
        raise field_error(
            RequestError, "text", f"{len(ids)} tokens", f">= {_LEAST_TOKENS}", "give a longer text"
        )
    return ids


def _head(model: ir.Model) -> str:
    """Name of the weight whose product is the logits."""
    products = [node for node in model.graph if node.op_type == "Gemm" and node.inputs[1] is not None]
    if not products or products[-1].inputs[1].const_value is None:  # type: ignore[union-attr]
        raise UnsupportedError("quantize: the target's head is no matrix product with a stored weight")
    return weight_name(products[-1])


def _name(value: ir.Value) -> str:
    assert value.name is not None
    return value.name


def _quantise(
    model: ir.Model,
    head: str,
    of_head: Array,
    factors: dict[tuple[str, ...], Array],
    powers: dict[tuple[str, ...], Array],
    weights: _Weights,
) -> None:
    """Round what is worth it; groups in `powers` to four bits, the others to eight."""
    graph = model.graph
    place = weights.placer(graph)
    for group in groups_of(model, head):
        if group.names in powers:
            int4.replace_group(graph, group, group.weights(), powers[group.names], place)
            continue
        chosen = of_head if head in group.names else factors.get(group.names)
        if chosen is None:
            replace_group(graph, group, group.weights(), place)
            continue
        if group.norm is not None:
            value = group.norm.inputs[1]
            smoothed = place(f"{value.name}.smooth", array_of(value) / chosen)  # type: ignore[union-attr]
            group.norm.replace_input_with(1, smoothed)
        else:
            scale = place(f"{head}.unsmooth", (1.0 / chosen).astype(np.float32))
            divided = ir.node("Mul", [group.source, scale])
            graph.insert_before(group.nodes[0], divided)
            group = replace(group, source=divided.outputs[0])
        replace_group(graph, group, [weight * chosen for weight in group.weights()], place)
    for node in list(graph):
        value = node.inputs[0] if node.op_type == "Gather" and not node.domain else None
        if value is not None and value.name == head:
            replace_embedding(graph, node, head, of_head, place)
    model.opset_imports[DOMAIN] = 1


def _save(model: ir.Model, info: GraphInfo, work: Path, weights: _Weights) -> GraphInfo:
    """Write a graph; every weight that it has outside goes to the new file."""
    graph = model.graph
    used = {id(value) for node in graph for value in node.inputs}
    stored = False
    for name in list(graph.initializers):
        value = graph.initializers[name]
        if id(value) not in used:
            del graph.initializers[name]
        elif isinstance(value.const_value, ir.ExternalTensor):
            if value.const_value.location != WEIGHT_FILE or value.const_value.base_dir != str(work):
                value.const_value = weights.add(name, array_of(value))
            stored = True
    passes = info.passes
    if DOMAIN in model.opset_imports:
        kinds = {node.op_type for node in graph}
        passes = (*passes, *(["int4"] if "MatMulNBits" in kinds else []), "smooth", INT8)
    ir.save(model, work / info.file)
    return replace(info, weights=(WEIGHT_FILE,) if stored else (), passes=passes)


def _copy_others(manifest: Manifest, bundle: Path, work: Path) -> None:
    made = {WEIGHT_FILE, *(info.file for info in (*manifest.graphs.values(), *manifest.tuned.values()))}
    made |= {engine.file for engine in manifest.engines.values()}
    for name in set(manifest.files) - made:
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(safe_path(bundle, name), work / name)


def _quality(
    bundle: Path,
    manifest: Manifest,
    work: Path,
    quantised: Manifest,
    check: list[list[int]],
    ids: Sequence[int],
    scheme: str,
) -> QuantizationInfo:
    before, after = score(bundle, manifest, check), score(work, quantised, check)
    return QuantizationInfo(
        scheme=scheme,
        perplexity=float(np.exp(before.surprise.mean())),
        perplexity_ratio=float(np.exp((after.surprise - before.surprise).mean())),
        greedy_agreement=float((after.choices == before.choices).mean()),
        tokens=len(before.surprise),
        ids_sha256=hashlib.sha256(np.array(ids, "<i8").tobytes()).hexdigest(),
    )


class _Weights:
    """The new weight file; each name once, whichever graphs use it."""

    def __init__(self, work: Path):
        self._work = work
        self._file = open(work / WEIGHT_FILE, "wb")  # noqa: SIM115 - closed by __exit__
        self._placed: dict[str, ir.ExternalTensor] = {}

    def __enter__(self) -> _Weights:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, name: str, array: NDArray[np.generic]) -> ir.ExternalTensor:
        """Store an array, unless one of this name is there."""
        if name not in self._placed:
            offset = self._file.tell() + -self._file.tell() % _PAGE_BYTES
            self._file.write(b"\0" * (offset - self._file.tell()))
            self._file.write(np.ascontiguousarray(array).data)
            self._placed[name] = ir.ExternalTensor(
                WEIGHT_FILE,
                offset,
                array.nbytes,
                ir.DataType.from_numpy(array.dtype),
                shape=ir.Shape(array.shape),
                name=name,
                base_dir=str(self._work),
            )
        return self._placed[name]

    def placer(self, graph: ir.Graph) -> _Placer:
        """Stores arrays for a graph."""
        return _Placer(self, graph)


class _Placer:
    """Values of a graph for stored arrays; small ones stay in the graph."""

    def __init__(self, weights: _Weights, graph: ir.Graph):
        self._weights = weights
        self._graph = graph

    def __call__(self, name: str, array: NDArray[np.generic]) -> ir.Value:
        known = self._graph.initializers.get(name)
        if known is not None:
            return known
        tensor: ir.TensorProtocol = ir.tensor(array, name=name)
        if array.nbytes > 1024:
            tensor = self._weights.add(name, array)
        value = ir.Value(
            name=name,
            shape=ir.Shape(array.shape),
            type=ir.TensorType(ir.DataType.from_numpy(array.dtype)),
            const_value=tensor,
        )
        self._graph.register_initializer(value)
        return value
