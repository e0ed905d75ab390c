"""`forecast_export`: what an export would write and need. It reads no weights and writes nothing."""

from __future__ import annotations

import resource
import shutil
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from ..bundle.files import check_writable
from ..bundle.labels import labels
from ..bundle.tensors import DType
from .export import checked_length, graph_with_weights
from .families import pair_from_sources
from .pieces import PIECE_BYTES
from .progress import NullProgress, Progress
from .weights import WeightPlan

_OF_FLOAT32 = "those of the float32 bundle that is rounded; it lies beside the output until that is done"
# Pieces that are read, wait, are checked and converted, and blocks that are hashed and written: as measured.
_PIECES_AT_ONCE = 12
# Only the weights can tell; found while they are written, and the output stays as it was.
_UNSEEN = {
    DType.FLOAT32: "NaN or infinity in a weight",
    DType.FLOAT16: "NaN or infinity in a weight, or a number beyond float16's range (65504)",
    DType.BFLOAT16: "NaN or infinity in a weight",
}


@dataclass(frozen=True)
class Forecast:
    """What an export would do.

    Attributes:
        name: of the bundle.
        dtype: of weights and caches.
        max_length: longest sequence.
        graphs: bytes of each graph's file.
        weights_bytes: of the weight file.
        cache_bytes: of both KV caches for one request of the longest sequence, when it runs.
        free_bytes: on the output's disk.
        peak_memory_bytes: an estimate: this process's peak so far, which traced every graph, and a few pieces
            of a weight.
        warnings: what is legal but costs acceptance.
        unseen: what may still be refused.
    """

    name: str
    dtype: DType
    max_length: int
    graphs: dict[str, int]
    weights_bytes: int
    cache_bytes: int
    free_bytes: int
    peak_memory_bytes: int
    warnings: tuple[str, ...]
    unseen: str

    @property
    def bytes(self) -> int:
        """All that is written; tokenizer, manifest, tuned graphs and that of a round aside."""
        return self.weights_bytes + sum(self.graphs.values())

    def lines(self, rounded: bool = False) -> list[str]:
        """For a screen: one fact a line, names in a column.

        Args:
            rounded: whether the weights are then rounded to int8 or int4.
        """
        enough = "enough" if self.bytes <= self.free_bytes else "NOT ENOUGH: choose another disk"
        rows = [
            ("bundle", f"{self.name}, {self.dtype.value}, at most {self.max_length} tokens"),
            *((f"{name} graph", _size(size)) for name, size in self.graphs.items()),
            ("weights", _size(self.weights_bytes)),
            ("to write", f"{_size(self.bytes)}, and the tokenizer"),
            ("not counted", "graphs tuned for the CPU, and of a round where asked for: some hundred kB each"),
            *([("sizes", _OF_FLOAT32)] if rounded else []),
            ("free on disk", f"{_size(self.free_bytes)}, {enough}"),
            ("peak memory", f"about {_size(self.peak_memory_bytes)}"),
            ("caches", f"{_size(self.cache_bytes)} for one request of the longest sequence, when it runs"),
            *(("warning", warning) for warning in self.warnings),
            ("refused later", f"{self.unseen}: only the export reads the weights"),
        ]
        return [f"{name:<14} {text}" for name, text in rows]


def forecast_export(
    target: str,
    draft: str,
    output: Path,
    dtype: DType = DType.FLOAT32,
    max_length: int | None = None,
    progress: Progress | None = None,
) -> Forecast:
    """Do all of an export but reading and writing weights; see `export_bundle` for the arguments.

    Raises:
        CheckpointError, UnsupportedError, PairError, OutputError: what the export would refuse.
    """
    progress = progress or NullProgress()
    final = Path(output).absolute()
    check_writable(final)
    with progress.stage("read configs"):
        pair = pair_from_sources(target, draft)
        length = checked_length(pair, max_length)
        plan = pair.plan(dtype)
    weights, graphs = WeightPlan(), {}
    for graph in plan.graphs:
        model, _ = graph_with_weights(graph, pair, weights, progress)
        model.metadata_props.update(labels(graph.name))  # as `graph_to_file` does
        graphs[graph.name] = ir.to_proto(model).ByteSize()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Forecast(
        name=f"{pair.target.checkpoint.name} + {pair.draft.checkpoint.name}",
        dtype=dtype,
        max_length=length,
        graphs=graphs,
        weights_bytes=weights.bytes,
        cache_bytes=plan.target.cache.bytes(1, length) + plan.draft.cache.bytes(1, length),
        free_bytes=_free_bytes(final),
        peak_memory_bytes=peak + _PIECES_AT_ONCE * PIECE_BYTES,
        warnings=pair.warnings,
        unseen=_UNSEEN[dtype],
    )


def _free_bytes(path: Path) -> int:
    """On the disk where `path` would be made."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def _size(count: int) -> str:
    """In the largest unit that leaves a number before the point."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"
