"""A bundle's graphs in ONNX Runtime on the CPU, with their stages as outputs.

Deliberately not the runtime: caches are handed in and out as arrays, so a fault in the runtime's binding or
bookkeeping cannot hide one in a graph, nor the other way round. The bundle is only read: stages become
outputs in memory, and the weights are found by their folder.

Shapes: B batch, R rows, W wanted rows, T context rows, Q block rows, C capacity, V vocabulary, F features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ..bundle import tensors as t
from ..bundle.errors import BundleError, EngineError, ProviderError
from ..bundle.files import safe_path
from ..bundle.labels import check_labels
from ..bundle.manifest import GraphInfo, Manifest
from ..bundle.ort_options import session_options
from ..bundle.tuned import WHOLE_CACHE

PROVIDER = "CPUExecutionProvider"
_NUMPY: dict[t.DType, Any] = {
    t.DType.FLOAT32: np.float32,
    t.DType.FLOAT16: np.float16,
    t.DType.INT64: np.int64,
}

Array = NDArray[Any]


def check_dtype(dtype: t.DType) -> None:
    """Refuse what the provider cannot compute, before any weight is read.

    Raises:
        ProviderError: a bfloat16 bundle.
    """
    if dtype not in _NUMPY:
        raise ProviderError(
            f"provider {PROVIDER}: computes no {dtype.value} MatMul, and this bundle is {dtype.value}; "
            "for a check on the CPU export the same pair with --dtype float32 or float16"
        )


class BundleGraph:
    """One graph of a bundle, loaded.

    Attributes:
        info: the graph's part of the manifest.
        names: its outputs, stages included.
    """

    def __init__(self, directory: Path, info: GraphInfo, wanted: Sequence[str] | None = None) -> None:
        """Load it.

        Args:
            directory: the bundle.
            info: the graph's part of the manifest.
            wanted: outputs and stages that are ever asked for; default: all.

        Raises:
            BundleError: it cannot be loaded, is not the graph that the manifest says, or lacks a stage.
        """
        import onnxruntime as ort

        directory = Path(directory).absolute()
        every = (*(o.name for o in info.io.outputs), *info.stages)
        self.info = info
        self.names = every if wanted is None else tuple(name for name in every if name in wanted)
        options = session_options(ort, weights=directory)
        # torch computes in turn with this: threads that wait must not hold the cores.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        path = safe_path(directory, info.file)
        try:
            data = _with_stages(path, info)
            self._session = ort.InferenceSession(data, options, providers=[PROVIDER])
        except BundleError:
            raise
        except Exception as cause:  # neither library's exceptions have a common base
            raise BundleError(
                f"{info.file}: cannot be loaded ({_first_line(cause)}); export again"
            ) from cause

    def run(self, inputs: Mapping[str, Array], wanted: Sequence[str] | None = None) -> dict[str, Array]:
        """Run once.

        Raises:
            EngineError: ONNX Runtime failed.
        """
        names = list(self.names if wanted is None else wanted)
        try:
            return dict(zip(names, self._session.run(names, dict(inputs)), strict=True))
        except Exception as cause:
            raise EngineError(f"{self.info.file}: ONNX Runtime failed ({_first_line(cause)})") from cause


def _with_stages(path: Path, info: GraphInfo) -> bytes:
    """The graph with its stages as outputs; weights stay outside."""
    model = ir.load(path)
    check_labels(info, model.metadata_props)
    if info.stages:
        values = {
            value.name: value for node in model.graph for value in node.outputs if value.name in info.stages
        }
        for name in info.stages:
            if name not in values:
                raise BundleError(
                    f"{info.file}: has no value {name!r}, which the manifest promises; export again"
                )
            values[name].dtype = ir.DataType.FLOAT
            model.graph.outputs.append(values[name])
    data: bytes = ir.to_proto(model).SerializeToString()
    return data


def _first_line(cause: BaseException) -> str:
    lines = str(cause).strip().splitlines()
    return lines[0] if lines else type(cause).__name__


def empty_caches(cache: t.CacheShape, batch: int, capacity: int) -> dict[str, Array]:
    """The past_* inputs of a new request."""
    shape = (batch, cache.kv_heads, capacity, cache.head_dim)
    return {name: np.zeros(shape, _NUMPY[cache.dtype]) for name in cache.names()}


class _Cached:
    """A graph with KV caches; `start` sets a request up."""

    def __init__(self, directory: Path, info: GraphInfo, cache: t.CacheShape) -> None:
        self._graph = BundleGraph(directory, info)
        self._cache = cache
        self._past: dict[str, Array] = {}

    def reset(self, capacity: int, batch: int = 1) -> None:
        """Forget everything; caches with `capacity` slots."""
        self._past = empty_caches(self._cache, batch, capacity)

    @property
    def past(self) -> Mapping[str, Array]:
        """The caches, by past_* name."""
        return self._past

    @property
    def capacity(self) -> int:
        """Slots of the caches."""
        return next(iter(self._past.values())).shape[2]

    def _run(self, inputs: dict[str, Array], wanted: Sequence[str] | None) -> dict[str, Array]:
        presents = [t.present(name) for name in self._past]
        names = (
            [name for name in self._graph.names if name not in presents] if wanted is None else list(wanted)
        )
        outputs = self._graph.run({**inputs, **self._past}, [*names, *presents])
        self._past = {name: outputs.pop(t.present(name)) for name in self._past}
        return outputs


def _ints(values: int | Sequence[int] | Array, batch: int) -> Array:
    array = np.asarray(values, np.int64)
    return np.full(batch, array) if array.ndim == 0 else array


class TargetGraph(_Cached):
    """The target graph of a bundle."""

    def __init__(self, directory: Path, manifest: Manifest, info: GraphInfo | None = None) -> None:
        """Load it, or a tuned one; see `BundleGraph`."""
        info = manifest.graphs[t.TARGET] if info is None else info
        super().__init__(directory, info, manifest.target.cache)
        self._whole = WHOLE_CACHE in info.passes

    def run(
        self,
        ids: Array,
        start: int | Sequence[int] | Array,
        wanted_rows: Sequence[int] | Array | None = None,
        kv: int | None = None,
        wanted: Sequence[str] | None = None,
    ) -> dict[str, Array]:
        """Run one pass.

        Args:
            ids: [B, R].
            start: slot of the first row, one for all or [B].
            wanted_rows: [W] or [B, W]; default: all.
            kv: slots looked at; default: just enough, or all if the graph looks at them.
            wanted: outputs; default: all but the caches.
        """
        ids = np.asarray(ids, np.int64)
        batch, rows = ids.shape
        first = _ints(start, batch)
        if kv is None:
            kv = self.capacity if self._whole else int(first.max()) + rows
        chosen = np.arange(rows) if wanted_rows is None else np.asarray(wanted_rows)
        inputs = {
            t.INPUT_IDS: ids,
            t.START: first,
            t.SLOTS: np.arange(kv, dtype=np.int64),
            t.WANTED_ROWS: np.ascontiguousarray(np.broadcast_to(chosen, (batch, chosen.shape[-1])), np.int64),
        }
        return self._run(inputs, wanted)


class DraftGraph(_Cached):
    """The draft graph of a bundle."""

    def __init__(self, directory: Path, manifest: Manifest, info: GraphInfo | None = None) -> None:
        """Load it, or a tuned one; see `BundleGraph`."""
        info = manifest.graphs[t.DRAFT] if info is None else info
        super().__init__(directory, info, manifest.draft.cache)
        self._info = manifest.draft

    def run(
        self,
        features: Array,
        start: int | Sequence[int] | Array,
        anchor: int | Sequence[int] | Array,
        anchor_ids: int | Sequence[int] | Array,
        block_rows: int | Sequence[int] | Array,
        kv: int | None = None,
        wanted: Sequence[str] | None = None,
    ) -> dict[str, Array]:
        """Run one round.

        Args:
            features: [B, T, F].
            start: position of the first context row, one for all or [B].
            anchor: the anchor's position, likewise.
            anchor_ids: the anchor's token, likewise.
            block_rows: rows of the block that count, likewise.
            kv: slots looked at; default: just enough.
            wanted: outputs and stages; default: all but the caches.
        """
        batch, rows, _ = features.shape
        first = _ints(start, batch)
        block = np.full((batch, self._info.block_size), self._info.mask_token_id, np.int64)
        block[:, 0] = anchor_ids
        inputs = {
            t.FEATURES: np.ascontiguousarray(features, np.float32),
            t.START: first,
            t.ANCHOR: _ints(anchor, batch),
            t.BLOCK_IDS: block,
            t.BLOCK_ROWS: _ints(block_rows, batch),
            t.SLOTS: np.arange(int(first.max()) + rows if kv is None else kv, dtype=np.int64),
        }
        return self._run(inputs, wanted)
