"""`export_bundle`: two checkpoints in, one bundle out."""

from __future__ import annotations

import importlib.metadata
import logging
import math
import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import onnx_ir as ir

from ..bundle import tensors as t
from ..bundle.errors import OutputError, field_error
from ..bundle.files import atomic_directory
from ..bundle.manifest import (
    SCHEMA_VERSION,
    WEIGHT_FILE,
    FileInfo,
    GraphInfo,
    Manifest,
    Provenance,
    check_manifest,
    file_info,
    manifest_to_file,
)
from ..bundle.round_graph import ROUND
from ..bundle.tensors import DType
from . import passes
from .families import pair_from_sources
from .modules.ops import IR_VERSION, OPSET
from .plan import DRAFT_PREFIX, TARGET_PREFIX, GraphPlan, Pair, Side
from .progress import NullProgress, Progress
from .save_graph import graph_to_file
from .tokenizer import tokenizer_to_bundle
from .trace import graph_from_module
from .tune.bundle import tuned_graphs
from .tune.fuse_round import round_to_bundle
from .weights import Placed, WeightPlan, WeightWriter

_LOG = logging.getLogger(__name__)
_EXPORTED_WITH = ("torch", "transformers", "onnx", "onnx-ir", "onnxscript", "safetensors", "gguf")


def export_bundle(
    target: str,
    draft: str,
    output: Path,
    dtype: DType = DType.FLOAT32,
    max_length: int | None = None,
    progress: Progress | None = None,
    round_graph: bool = False,
) -> Manifest:
    """Export a target and its draft to a bundle at `output`.

    Args:
        target: folder, .gguf file or hub id.
        draft: folder or hub id.
        output: directory to make, or an earlier bundle, which is replaced when the new one is whole.
        dtype: element type of weights and caches.
        max_length: longest sequence in tokens; default: what the target's config says.
        progress: is told about stages and bytes.
        round_graph: whether to write the graph of a whole round, too; see `bundle.round_graph`.

    Raises:
        CheckpointError, UnsupportedError, PairError: nothing was written.
        OutputError: the output cannot be written; an earlier bundle is as it was.
    """
    progress = progress or NullProgress()
    with progress.stage("read configs"):
        pair = pair_from_sources(target, draft)
        length = checked_length(pair, max_length)
    for warning in pair.warnings:
        _LOG.warning("%s", warning)
    pair.check_weights(progress)
    sides = {"target": pair.target, "draft": pair.draft}
    with atomic_directory(Path(output)) as work:
        need = dtype.bytes * (_numbers(pair.target) + _numbers(pair.draft))
        check_space(need, shutil.disk_usage(work).free)
        bundle = pair.plan(dtype)
        graphs: dict[str, GraphInfo] = {}
        for side in sides.values():
            side.checkpoint.source.start_hashing()
        with WeightWriter(work) as writer:
            place_weights(bundle.graphs, pair, writer)
            for plan in bundle.graphs:
                graphs[plan.name] = graph_to_bundle(plan, pair, work, writer, progress)
            with progress.stage("write weights", writer.bytes):
                writer.finish(progress.advance)
        if round_graph:
            with progress.stage("fuse round"):
                graphs[ROUND] = round_to_bundle(work, graphs, bundle.target, bundle.draft)
        with progress.stage("tune graphs"):
            tuned = tuned_graphs(work, graphs[t.TARGET], bundle.target.cache, graphs[t.DRAFT])
        with progress.stage("write tokenizer"):
            tokenizer = tokenizer_to_bundle(pair.target.checkpoint, work)
        with progress.stage("hash files"):
            sources = {name: _provenance(side) for name, side in sides.items()}
            known = {WEIGHT_FILE: FileInfo(writer.bytes, writer.sha256)}
            paths = {path.relative_to(work).as_posix(): path for path in work.rglob("*") if path.is_file()}
            files = {name: known.get(name) or file_info(path) for name, path in sorted(paths.items())}
        manifest = Manifest(
            schema_version=SCHEMA_VERSION,
            name=f"{pair.target.checkpoint.name} + {pair.draft.checkpoint.name}",
            dtype=dtype,
            float32_parts=() if dtype is DType.FLOAT32 else bundle.float32_parts,
            max_length=length,
            slack_slots=bundle.draft.block_size + 1,
            target=bundle.target,
            draft=bundle.draft,
            stop_token_ids=pair.stop_token_ids,
            tokenizer=replace(tokenizer, bos_token_id=pair.bos_token_id),
            graphs=graphs,
            provenance=sources,
            exported_with=_versions(),
            files=files,
            tuned=tuned,
        )
        check_manifest(manifest)
        manifest_to_file(manifest, work)
    return manifest


def checked_length(pair: Pair, max_length: int | None) -> int:
    """The longest sequence of a bundle.

    Raises:
        OutputError: the target cannot have sequences of `max_length` tokens.
    """
    limit = pair.max_length
    length = limit if max_length is None else max_length
    if not 2 <= length <= limit:
        raise field_error(
            OutputError, "max_length", length, f"2 <= length <= {limit}, the target's max_position_embeddings"
        )
    return length


def graph_to_bundle(
    plan: GraphPlan, pair: Pair, directory: Path, writer: WeightWriter, progress: Progress
) -> GraphInfo:
    """Trace one graph and write it to `directory`, where `writer` writes the weights it names.

    Raises:
        CheckpointError: a weight that was added before is damaged, or does not fit the dtype.
    """
    model, named = graph_with_weights(plan, pair, writer, progress)
    file = graph_to_file(model, directory, plan.name)
    return GraphInfo(
        file=file,
        opset=OPSET,
        ir_version=IR_VERSION,
        io=plan.io,
        stages=tuple(t.STAGE + stage for stage in plan.stages),
        weights=(WEIGHT_FILE,) if named else (),
    )


def graph_with_weights(
    plan: GraphPlan, pair: Pair, weights: WeightPlan, progress: Progress
) -> tuple[ir.Model, bool]:
    """Give the weights of one graph their places, and trace the graph.

    Returns:
        The graph, and whether it names any weights.

    Raises:
        CheckpointError: see `graph_to_bundle`.
    """
    weights.check()  # before a graph is traced in vain
    with progress.stage(f"trace {plan.name}"):
        places = place_weights([plan], pair, weights)[plan.name]
        model = graph_from_module(
            plan.build, plan.io, caches=plan.caches, stages=plan.stages, kernel_size=plan.kernel_size
        )
        assert places.keys() <= model.graph.initializers.keys(), "a weight that the graph does not use"
        _inline_constants(model, plan)
        passes.external_weights(model, places)
    return model, bool(places)


def place_weights(
    plans: Iterable[GraphPlan], pair: Pair, weights: WeightPlan
) -> dict[str, dict[str, Placed]]:
    """Place the parameters of graphs, those that have no place yet in the order in which they are stored.

    So the checkpoints are read from end to end, once, and can be hashed on the way.

    Returns:
        By the graph's name, then by the name that the parameter has in the graph's module.
    """
    sides = {TARGET_PREFIX: pair.target, DRAFT_PREFIX: pair.draft}
    places: dict[str, dict[str, Placed]] = {}
    waiting = []
    for plan in plans:
        places[plan.name] = {}
        constants = dict(plan.constants)
        for name, (dtype, shape) in plan.parameters.items():
            if name in constants:
                continue
            key = name if name.startswith(TARGET_PREFIX) else plan.prefix + name
            prefix = TARGET_PREFIX if key.startswith(TARGET_PREFIX) else DRAFT_PREFIX
            side, canonical = sides[prefix], key.removeprefix(prefix)
            order = (prefix == DRAFT_PREFIX, *side.position(canonical))
            waiting.append((order, plan.name, name, key, dtype, shape, side, canonical))
    for _, graph, name, key, dtype, shape, side, canonical in sorted(waiting, key=lambda entry: entry[0]):
        pieces, source = side.pieces(canonical), side.place(canonical)
        places[graph][name] = weights.add(key, dtype, shape, pieces, source)
    return places


def _inline_constants(model: ir.Model, plan: GraphPlan) -> None:
    for name, array in plan.constants:
        model.graph.initializers[name].const_value = ir.tensor(array, name=name)


def _provenance(side: Side) -> Provenance:
    checkpoint = side.checkpoint
    files = checkpoint.source.finish_hashing()
    note = ""
    if checkpoint.format == "gguf":
        note = f"the weights are the dequantised ones ({getattr(checkpoint, 'quantisation', '')})"
    return Provenance(checkpoint.format, checkpoint.name, side.dtype, files, note)


def _versions() -> dict[str, str]:
    from .. import __version__

    versions = {"dflash-deploy": __version__}
    for package in _EXPORTED_WITH:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def check_space(need: int, free: int) -> None:
    """Refuse before the first byte if what is to be written cannot fit.

    Raises:
        OutputError: `need` bytes are more than `free`.
    """
    if need > free:
        raise OutputError(
            f"output: got {free / 1e9:.2f} GB free, expected at least {need / 1e9:.2f} GB; "
            "choose another disk"
        )


def _numbers(side: Side) -> int:
    """How many numbers the weights are."""
    return sum(math.prod(side.checkpoint.tensors[stored].shape) for stored in side.tensors.values())
