"""`export_bundle`: two checkpoints in, one bundle out."""

from __future__ import annotations

import importlib.metadata
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import onnx_ir as ir
import torch
from torch import nn

from ..bundle import tensors as t
from ..bundle.errors import OutputError, field_error
from ..bundle.files import atomic_directory, sha256_from_file
from ..bundle.manifest import (
    SCHEMA_VERSION,
    ConvInfo,
    DraftInfo,
    FileInfo,
    GraphInfo,
    Manifest,
    Provenance,
    SelectorInfo,
    TargetInfo,
    manifest_to_file,
)
from ..bundle.tensors import CacheShape, DType, GraphIO, TensorInfo
from . import passes
from .checkpoint import Checkpoint, checkpoint_from_source
from .drafts.formats import draft_from_checkpoint
from .drafts.mask_row import check_embedding_copy, mask_row_from_checkpoint
from .drafts.names import MASK_EMBEDDING
from .drafts.spec import DraftSpec
from .modules.layers import RopeSet
from .modules.ops import IR_VERSION, OPSET
from .pairing import check_pair
from .progress import NullProgress, Progress
from .targets.families import target_from_checkpoint
from .targets.spec import TargetSpec
from .tokenizer import tokenizer_to_bundle
from .trace import TORCH_DTYPES, graph_from_module
from .weights import WEIGHT_FILE, Placed, WeightWriter

_EXPORTED_WITH = ("torch", "transformers", "onnx", "onnx-ir", "onnxscript", "safetensors", "gguf")
_FLOAT32_PARTS = ("residual", "norms", "rope", "softmax", "fc", "conv", "selector", "logits")


@dataclass(frozen=True)
class Pair:
    """A target and its draft, parsed and found to belong together."""

    target_checkpoint: Checkpoint
    draft_checkpoint: Checkpoint
    target: TargetSpec
    draft: DraftSpec
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class _GraphPlan:
    """How one graph is made: its module, its interface, and where its parameters come from."""

    name: str
    build: Callable[[], nn.Module]
    io: GraphIO
    caches: int = 0
    stages: tuple[str, ...] = ()
    kernel_size: int | None = None
    constants: tuple[tuple[str, np.ndarray], ...] = ()
    prefix: str = "draft."


def pair_from_sources(target: str, draft: str) -> Pair:
    """Open both checkpoints and check that they fit; reads no weights.

    Raises:
        CheckpointError, UnsupportedError, PairError: see there.
    """
    target_checkpoint, draft_checkpoint = checkpoint_from_source(target), checkpoint_from_source(draft)
    target_spec = target_from_checkpoint(target_checkpoint)
    draft_spec = draft_from_checkpoint(draft_checkpoint)
    warnings = check_pair(draft_spec, target_spec)
    return Pair(target_checkpoint, draft_checkpoint, target_spec, draft_spec, tuple(warnings))


def export_bundle(
    target: str,
    draft: str,
    output: Path,
    dtype: DType = DType.FLOAT32,
    max_length: int | None = None,
    progress: Progress | None = None,
) -> Manifest:
    """Export a target and its draft to a bundle at `output`.

    Args:
        target: folder, .gguf file or hub id.
        draft: folder or hub id.
        output: directory to make, or an earlier bundle, which is replaced when the new one is whole.
        dtype: element type of weights and caches.
        max_length: longest sequence in tokens; default: what the target's config says.
        progress: is told about stages and bytes.

    Raises:
        CheckpointError, UnsupportedError, PairError: nothing was written.
        OutputError: the output cannot be written; an earlier bundle is as it was.
    """
    progress = progress or NullProgress()
    with progress.stage("read configs"):
        pair = pair_from_sources(target, draft)
        limit = pair.target.max_position_embeddings
        length = limit if max_length is None else max_length
        if not 2 <= length <= limit:
            raise field_error(
                OutputError, "max_length", length, f"2 <= length <= {limit}, the target's max_position_embeddings"
            )
    if pair.draft.learned_mask:
        with progress.stage("compare embeddings"):
            embedding = pair.target_checkpoint.read(dict(pair.target.tensors)["embed_tokens.weight"])
            check_embedding_copy(pair.draft_checkpoint, pair.draft, embedding)
    with atomic_directory(Path(output)) as work:
        _check_space(pair, dtype, work)
        plans = _plans(pair, dtype)
        graphs: dict[str, GraphInfo] = {}
        with WeightWriter(work) as writer:
            for plan in plans:
                with progress.stage(f"trace {plan.name}"):
                    model = graph_from_module(
                        plan.build, plan.io, caches=plan.caches, stages=plan.stages, kernel_size=plan.kernel_size
                    )
                with progress.stage(f"write {plan.name}"):
                    places = _write_weights(model, plan, pair, writer, progress)
                    _inline_constants(model, plan)
                    passes.external_weights(model, places)
                    file = f"{plan.name}.onnx"
                    ir.save(model, work / file)
                graphs[plan.name] = GraphInfo(
                    file=file,
                    opset=OPSET,
                    ir_version=IR_VERSION,
                    io=plan.io,
                    stages=tuple(t.STAGE + s for s in plan.stages),
                    weights=(WEIGHT_FILE,) if places else (),
                )
        with progress.stage("write tokenizer"):
            tokenizer = tokenizer_to_bundle(pair.target_checkpoint, work)
        with progress.stage("hash files"):
            provenance = {
                "target": _provenance(pair.target_checkpoint, pair.target.checkpoint_dtype, progress),
                "draft": _provenance(pair.draft_checkpoint, pair.draft.checkpoint_dtype, progress),
            }
            files = {
                path.relative_to(work).as_posix(): FileInfo(
                    path.stat().st_size, sha256_from_file(path, progress.advance)
                )
                for path in sorted(work.rglob("*"))
                if path.is_file()
            }
        target_info, draft_info = _infos(pair, dtype)
        manifest = Manifest(
            schema_version=SCHEMA_VERSION,
            name=f"{pair.target_checkpoint.name} + {pair.draft_checkpoint.name}",
            dtype=dtype,
            float32_parts=() if dtype is DType.FLOAT32 else _FLOAT32_PARTS,
            max_length=length,
            slack_slots=pair.draft.block_size + 1,
            target=target_info,
            draft=draft_info,
            stop_token_ids=pair.target.stop_token_ids,
            tokenizer=replace(tokenizer, bos_token_id=pair.target.bos_token_id),
            graphs=graphs,
            provenance=provenance,
            exported_with=_versions(),
            files=files,
        )
        manifest.check()
        manifest_to_file(manifest, work)
    return manifest


def _infos(pair: Pair, dtype: DType) -> tuple[TargetInfo, DraftInfo]:
    target, draft = pair.target, pair.draft
    target_info = TargetInfo(
        family=target.family,
        hidden_size=target.hidden_size,
        num_layers=target.num_layers,
        vocab_size=target.vocab_size,
        embedding_rows=target.embedding_rows,
        cache=CacheShape(target.num_layers, target.num_kv_heads, target.head_dim, dtype),
    )
    draft_info = DraftInfo(
        family=draft.family.value,
        format=draft.format.value,
        hidden_size=draft.hidden_size,
        num_layers=len(draft.layers),
        block_size=draft.block_size,
        first_proposal_row=draft.first_proposal_row,
        mask_token_id=draft.mask_token_id,
        taps=draft.taps,
        cache=CacheShape(len(draft.layers), draft.num_kv_heads, draft.head_dim, dtype),
        draft_vocab_size=draft.draft_vocab_size or draft.vocab_size,
        conv=None if draft.conv is None else ConvInfo(draft.conv.kernel_size, draft.conv.group_size),
        selector=None if draft.selector is None else SelectorInfo(draft.selector.rank, draft.selector.top_k),
    )
    return target_info, draft_info


def _plans(pair: Pair, dtype: DType) -> list[_GraphPlan]:
    from .modules.draft import DraftModule
    from .modules.selector import Selector
    from .modules.standalone import ConvAlone

    target, draft = pair.target, pair.draft
    target_info, draft_info = _infos(pair, dtype)
    torch_dtype = TORCH_DTYPES[dtype]
    feature_size = len(draft.taps) * target.hidden_size
    draft_vocab = draft_info.draft_vocab_size
    target_ropes = RopeSet.from_specs([target.rope])
    draft_ropes = RopeSet.from_specs(draft.ropes)

    def build_target() -> nn.Module:
        from .modules.target import TargetModule

        return TargetModule(target, draft.taps, target_ropes, torch_dtype)

    def build_draft() -> nn.Module:
        return DraftModule(draft, target.embedding_rows, target.tied, draft_ropes, torch_dtype)

    stages = ["context", *(f"layer.{i}" for i in range(len(draft.layers))), "hidden"]
    if draft.selector is not None:
        stages.append("logits")
    plans = [
        _GraphPlan(
            t.TARGET,
            build_target,
            t.target_io(target_info.cache, target.vocab_size, feature_size),
            caches=2 * target.num_layers,
            constants=tuple(target_ropes.constants.items()),
            prefix="target.",
        ),
        _GraphPlan(
            t.DRAFT,
            build_draft,
            t.draft_io(
                draft_info.cache,
                feature_size,
                draft.block_size,
                draft.proposals,
                draft_vocab,
                None if draft.selector is None else draft.selector.top_k,
            ),
            caches=2 * len(draft.layers),
            stages=tuple(stages),
            kernel_size=None if draft.conv is None else draft.conv.kernel_size,
            constants=tuple(draft_ropes.constants.items()),
        ),
    ]
    if draft.conv is not None:
        conv = draft.conv
        groups = draft.hidden_size // conv.group_size
        plans.append(
            _GraphPlan(
                t.CONV,
                lambda: ConvAlone(draft.block_size, conv.group_size),
                GraphIO(
                    (
                        TensorInfo(t.HIDDEN, DType.FLOAT32, (t.BATCH, t.ROWS, draft.hidden_size)),
                        TensorInfo(t.DELTA, DType.FLOAT32, (t.BATCH, t.ROWS, conv.kernel_size, groups)),
                        TensorInfo(t.BASE, DType.FLOAT32, (conv.kernel_size, draft.hidden_size)),
                    ),
                    (TensorInfo(t.OUTPUT, DType.FLOAT32, (t.BATCH, t.ROWS, draft.hidden_size)),),
                ),
                kernel_size=conv.kernel_size,
            )
        )
    if draft.selector is not None:
        selector, rows, k = draft.selector, draft.proposals, draft.selector.top_k
        plans.append(
            _GraphPlan(
                t.SELECTOR,
                lambda: Selector(selector, draft.vocab_size, draft.hidden_size),
                GraphIO(
                    (
                        TensorInfo(t.HIDDEN, DType.FLOAT32, (t.BATCH, rows, draft.hidden_size)),
                        TensorInfo(t.UNARY_LOGITS, DType.FLOAT32, (t.BATCH, rows, draft.vocab_size)),
                        TensorInfo(t.ANCHOR_IDS, DType.INT64, (t.BATCH,)),
                    ),
                    (
                        TensorInfo(t.PROPOSALS, DType.INT64, (t.BATCH, rows)),
                        TensorInfo(t.CANDIDATES, DType.INT64, (t.BATCH, rows, k)),
                        TensorInfo(t.EDGE_SCORES, DType.FLOAT32, (t.BATCH, rows, k, k)),
                    ),
                ),
                prefix="draft.candidate_selector.",
            )
        )
    return plans


def _write_weights(
    model: ir.Model, plan: _GraphPlan, pair: Pair, writer: WeightWriter, progress: Progress
) -> dict[str, Placed]:
    """Write the weights a graph names, if no graph did before; give each its place."""
    readers = {
        "target.": (pair.target_checkpoint, dict(pair.target.tensors)),
        "draft.": (pair.draft_checkpoint, dict(pair.draft.tensors)),
    }
    constants = dict(plan.constants)
    places: dict[str, Placed] = {}
    for name, value in model.graph.initializers.items():
        key = name if name.startswith("target.") else plan.prefix + name
        side = "target." if key.startswith("target.") else "draft."
        checkpoint, tensors = readers[side]
        canonical = key.removeprefix(side)
        if name in constants or canonical not in tensors:
            continue
        assert value.dtype is not None and value.shape is not None
        shape = tuple(int(n) for n in value.shape if isinstance(n, int))
        torch_dtype = _TORCH_OF_IR[value.dtype]
        if key == "draft." + MASK_EMBEDDING:
            load = partial(mask_row_from_checkpoint, pair.draft_checkpoint, pair.draft)
        else:
            load = partial(checkpoint.read, tensors[canonical])
        placed, written = writer.add(key, torch_dtype, shape, load)
        places[name] = placed
        progress.advance(written)
    return places


_TORCH_OF_IR = {
    ir.DataType.FLOAT: torch.float32,
    ir.DataType.FLOAT16: torch.float16,
    ir.DataType.BFLOAT16: torch.bfloat16,
    ir.DataType.INT64: torch.int64,
}


def _inline_constants(model: ir.Model, plan: _GraphPlan) -> None:
    for name, array in plan.constants:
        model.graph.initializers[name].const_value = ir.tensor(array, name=name)


def _provenance(checkpoint: Checkpoint, dtype: str, progress: Progress) -> Provenance:
    files = {
        path.name: FileInfo(path.stat().st_size, sha256_from_file(path, progress.advance))
        for path in checkpoint.files()
    }
    note = ""
    if checkpoint.format == "gguf":
        note = f"the weights are the dequantised ones ({getattr(checkpoint, 'quantisation', '')})"
    return Provenance(checkpoint.format, checkpoint.name, dtype, files, note)


def _versions() -> dict[str, str]:
    from .. import __version__

    versions = {"dflash-deploy": __version__}
    for package in _EXPORTED_WITH:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _check_space(pair: Pair, dtype: DType, directory: Path) -> None:
    """Refuse before the first byte if the weights cannot fit."""

    def numbers(checkpoint: Checkpoint, names: Sequence[tuple[str, str]]) -> int:
        return sum(int(np.prod(checkpoint.tensors[stored].shape)) for _, stored in names)

    need = dtype.bytes * (
        numbers(pair.target_checkpoint, pair.target.tensors) + numbers(pair.draft_checkpoint, pair.draft.tensors)
    )
    free = shutil.disk_usage(directory).free
    if need > free:
        raise OutputError(
            f"output: got {free / 1e9:.2f} GB free, expected at least {need / 1e9:.2f} GB; choose another disk"
        )
