"""`quantize_bundle`: a float32 bundle in, one with fewer bits or a shorter draft's head out."""

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

from ...bundle.errors import BundleError, OutputError, RequestError, UnsupportedError, field_error
from ...bundle.files import atomic_directory, check_writable, safe_path
from ...bundle.manifest import (
    WEIGHT_FILE,
    GraphInfo,
    Manifest,
    QuantizationInfo,
    Verify,
    check_manifest,
    file_info,
    manifest_from_bundle,
    manifest_to_file,
)
from ...bundle.round_graph import ROUND
from ...bundle.tensors import DRAFT, TARGET, DType
from ..progress import NullProgress, Progress
from ..save_graph import graph_to_file
from ..tune.bundle import tuned_graphs
from ..tune.fuse_round import round_to_bundle
from .draft_vocabulary import check_size, likeliest, reduced
from .int4 import BLOCK
from .linear import groups_of, weight_name
from .measure import cut, score, windows
from .rounding import Rounding, calibrated, round_weights
from .store import Weights

_ROWS = "one scale an output; activations in 255 steps, one scale a row"
SCHEMES = {
    8: f"int8 weights, {_ROWS}",
    4: f"int4 weights of the target's layers, {BLOCK} a scale, as are activations; the others int8, {_ROWS}",
}
"""By the bits of the target's layers' weights."""
DRAFT_BITS, FLOAT_BITS = 8, 32
MAX_PERPLEXITY_RATIO = 1.02
_LEAST_TOKENS = 256


def quantize_bundle(
    bundle: Path,
    output: Path,
    text: str | Sequence[int] | None = None,
    max_perplexity_ratio: float = MAX_PERPLEXITY_RATIO,
    progress: Progress | None = None,
    bits: int = 8,
    draft_vocabulary: int | None = None,
    vocabulary_text: str | Sequence[int] | None = None,
    draft_bits: int | None = None,
) -> Manifest:
    """Write a bundle with int8 or int4 weights and check what that does to the target.

    Args:
        bundle: a float32 bundle.
        output: directory to make, or an earlier bundle, which is replaced when the new one is whole.
        text: what to calibrate and check with, in turn, or its token ids; None takes the one that comes
            with this package.
        max_perplexity_ratio: largest perplexity allowed, over that of the float32 target.
        progress: is told about stages.
        bits: of the weights of the target's layers, 8 or 4; the head and the draft have 8. `FLOAT_BITS`
            leaves the target as it is, and so its tokens; it is for a cheaper draft alone.
        draft_vocabulary: tokens among which the draft is to propose; None leaves them all.
        vocabulary_text: a text, or its token ids, in which the likeliest are counted; None takes `text`.
        draft_bits: of the weights of the draft, 8 or, with a target of `FLOAT_BITS`, that; None takes 8 where
            the target is rounded, and `FLOAT_BITS` where it is not.

    Raises:
        BundleError: the bundle is missing or damaged, or is not float32.
        RequestError: a text is too short, or a number is out of range.
        UnsupportedError: there is nothing in it to quantise, or the draft's head is its own.
        OutputError: the result is worse than allowed, or cannot be written; an earlier bundle is as it was.
    """
    progress = progress or NullProgress()
    bundle = Path(bundle)
    output = Path(output)
    check_writable(output)  # before any work
    if output.resolve().is_relative_to(bundle.resolve()):
        raise field_error(OutputError, "output", str(output), "a place outside the bundle that is read")
    draft_bits = _check_bits(bits, draft_bits, draft_vocabulary)
    if not max_perplexity_ratio > 0:
        raise field_error(RequestError, "max_perplexity_ratio", max_perplexity_ratio, "a number > 0")
    if vocabulary_text is not None and draft_vocabulary is None:
        raise field_error(RequestError, "vocabulary_text", "a text", "none without draft_vocabulary")
    with progress.stage("check bundle"):
        manifest = manifest_from_bundle(bundle, Verify.HASHES)
        _check(manifest)
        _check_links(bundle, manifest)
        if bits in SCHEMES or (draft_vocabulary is not None and vocabulary_text is None):
            ids = _tokens(bundle, manifest, text)
        if bits in SCHEMES:
            calibration, check = windows(ids)
        if draft_vocabulary is not None:
            check_size(manifest, draft_vocabulary)
            said = ids if vocabulary_text is None else _tokens(bundle, manifest, vocabulary_text)
    portable = {name: info for name, info in manifest.graphs.items() if name != ROUND}
    models = {name: ir.load(safe_path(bundle, info.file)) for name, info in portable.items()}
    head = _head(models[TARGET])
    groups = groups_of(models[TARGET], head)
    if bits in SCHEMES and not any(head not in group.names for group in groups):
        raise UnsupportedError(
            f"quantize: the target ({manifest.target.family}) has no attention or MLP weights that it knows "
            "by name; only targets of transformers are quantised"
        )
    original = manifest
    if draft_vocabulary is not None:
        with progress.stage("choose the draft's vocabulary"):
            kept = likeliest(bundle, manifest, cut(said), draft_vocabulary)
            manifest = reduced(manifest, models, head, kept)
    roundings: dict[str, Rounding] = {}
    if bits in SCHEMES:
        with progress.stage("calibrate"):
            roundings = dict.fromkeys(
                (TARGET, DRAFT), calibrated(bundle, original, groups, head, calibration, bits)
            )
    elif draft_bits == DRAFT_BITS:
        roundings = {DRAFT: Rounding(head)}
    with atomic_directory(output) as work:
        with progress.stage("write weights"):
            made = _write(bundle, manifest, models, roundings, work)
        if bits in SCHEMES:
            with progress.stage("check quality"):
                info = _quality(bundle, original, work, made, check, ids, SCHEMES[bits])
                _check_quality(info, max_perplexity_ratio, bits)
            made = replace(made, quantization=info)
        check_manifest(made)
        manifest_to_file(made, work)
    return made


def export_quantized(
    target: str,
    draft: str,
    output: Path,
    max_length: int | None = None,
    max_perplexity_ratio: float = MAX_PERPLEXITY_RATIO,
    progress: Progress | None = None,
    bits: int = 8,
    round_graph: bool = False,
) -> Manifest:
    """Export a pair in float32 to a place beside `output`, and quantise that.

    Raises:
        As `export_bundle` and `quantize_bundle`.
    """
    from ..export import export_bundle  # it loads torch, which `quantize_bundle` does without

    output = Path(output)
    check_writable(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as work:
        between = Path(work) / "float32"
        export_bundle(target, draft, between, DType.FLOAT32, max_length, progress, round_graph)
        return quantize_bundle(between, output, None, max_perplexity_ratio, progress, bits)


def _check_bits(bits: int, draft_bits: int | None, draft_vocabulary: int | None) -> int:
    """The bits of the draft's weights."""
    if bits not in (*SCHEMES, FLOAT_BITS):
        raise field_error(RequestError, "bits", bits, f"8, 4 or {FLOAT_BITS}")
    if draft_bits is None:
        draft_bits = FLOAT_BITS if bits == FLOAT_BITS else DRAFT_BITS
    allowed = (DRAFT_BITS, FLOAT_BITS) if bits == FLOAT_BITS else (DRAFT_BITS,)
    if draft_bits not in allowed:
        expected = " or ".join(map(str, allowed))
        raise field_error(RequestError, "draft_bits", draft_bits, f"{expected} beside a target of {bits}")
    if draft_bits == FLOAT_BITS and draft_vocabulary is None:
        raise field_error(
            RequestError,
            "bits",
            bits,
            f"8 or 4, or {FLOAT_BITS} with draft_bits={DRAFT_BITS} or draft_vocabulary",
        )
    return draft_bits


def _check(manifest: Manifest) -> None:
    if manifest.is_rounded():
        raise BundleError("quantize: this bundle is quantised already; give the float32 one")
    if manifest.dtype is not DType.FLOAT32:
        raise field_error(
            BundleError, "quantize: dtype", manifest.dtype.value, "float32", "export with --dtype float32"
        )


def _check_links(bundle: Path, manifest: Manifest) -> None:
    """Refuse what onnx_ir would refuse in the middle of the work: weights that have a second name."""
    for name in dict.fromkeys(file for info in manifest.graphs.values() for file in info.weights):
        if (links := safe_path(bundle, name).stat().st_nlink) > 1:
            raise BundleError(
                f"{name}: got a file with {links} hard links, expected 1; copy the bundle (cp -r)"
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


def _write(
    bundle: Path,
    manifest: Manifest,
    models: dict[str, ir.Model],
    roundings: dict[str, Rounding],
    work: Path,
) -> Manifest:
    """Write all files of the new bundle but its manifest, which is returned; the models are changed."""
    graphs = dict(manifest.graphs)
    with Weights(work) as weights:
        for name, model in models.items():
            info = manifest.graphs[name]
            if name in roundings:
                info = replace(info, passes=(*info.passes, *round_weights(model, roundings[name], weights)))
            graphs[name] = _save(model, name, info, work, weights)
        _copy_others(manifest, bundle, work)
    if ROUND in graphs:
        graphs[ROUND] = round_to_bundle(work, graphs, manifest.target, manifest.draft)
    tuned = tuned_graphs(work, graphs[TARGET], manifest.target.cache, graphs[DRAFT])
    files = {p.relative_to(work).as_posix(): file_info(p) for p in sorted(work.rglob("*")) if p.is_file()}
    return replace(manifest, graphs=graphs, files=files, engines={}, tuned=tuned)


def _save(model: ir.Model, name: str, info: GraphInfo, work: Path, weights: Weights) -> GraphInfo:
    """Write a graph; every weight that it has outside goes to the new file."""
    stored = weights.take(model.graph)
    file = graph_to_file(model, work, name, info.passes)
    return replace(info, file=file, weights=(WEIGHT_FILE,) if stored else ())


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


def _check_quality(info: QuantizationInfo, max_perplexity_ratio: float, bits: int) -> None:
    if not info.perplexity_ratio <= max_perplexity_ratio:
        raise field_error(
            OutputError,
            "perplexity",
            f"{info.perplexity_ratio:.4f} x that of float32",
            f"at most {max_perplexity_ratio}",
            "allow more, or use " + ("the float32 bundle" if bits == 8 else "8 bits"),
        )
