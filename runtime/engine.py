"""What the loop needs from an inference engine. ONNX Runtime fits it now, TensorRT later.

An engine is opened from a graph file and its `GraphInfo` and keeps the weights. Everything else (KV caches,
input and output buffers) lives in a `KVCache` made by it, so that several may be in flight over the same
engine without seeing each other. Requests that are computed together share a cache, with a lane of it each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..bundle.limits import ShapeLimits
from ..bundle.manifest import GraphInfo
from ..bundle.tensors import GraphIO

IntArray = NDArray[np.int64]
HostArray = NDArray[Any]


class DeviceTensor(Protocol):
    """An output that stays where the engine computed it.

    It may be handed to another engine on the same device as an input. The next `run` over the same cache
    may overwrite it.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the axes."""

    def to_host(self) -> NDArray[Any]:
        """Values in host memory; waits for the device. Valid until the next `run` over the same cache."""


SavedLane = tuple[NDArray[Any], ...]
"""The first slots of one lane in host memory: [kv_heads, slots, head_dim] for each cache tensor, in order."""


class KVCache(Protocol):
    """Device memory for one graph: caches, updated in place, and the buffers of the passes over them.

    The batch axis has lanes, one a request. Freed when it is dropped. A new one holds zeros: slots that
    nothing was written to must be finite.
    """

    @property
    def batch(self) -> int:
        """Lanes of every cache tensor."""

    @property
    def capacity(self) -> int:
        """Slots of every cache tensor."""

    def slots_for(self, looked: int, needed: int) -> int:
        """How many slots the next pass looks at.

        Args:
            looked: what the lanes of the pass need.
            needed: what any lane needs, also those that take no part; at least `looked`.

        Returns:
            `looked`, or more from a cache that is always looked at whole: it becomes as long as needed.

        Raises:
            EngineError: there is no memory for a longer cache.
        """

    def save(self, lane: int, slots: int) -> SavedLane:
        """Copy the first `slots` slots of a lane to host memory. Bits are kept."""

    def load(self, lane: int, saved: SavedLane) -> None:
        """Copy what `save` gave into the first slots of a lane, of this or another cache of the graph."""


class GraphRunner(Protocol):
    """One graph, loaded on a device. Safe to use from several threads, one cache in one thread at a time."""

    @property
    def info(self) -> GraphInfo:
        """The graph's part of the manifest."""

    @property
    def effective(self) -> Mapping[str, object]:
        """The settings the engine really runs with: engine, version, providers, threads."""

    @property
    def limits(self) -> ShapeLimits | None:
        """What the engine was built for; None if it takes any shape.

        Caches have exactly `capacity` slots, passes at most that many rows, logit rows and lanes.
        """

    def new_cache(self, capacity: int, batch: int = 1) -> KVCache:
        """Allocate caches with `batch` lanes of `capacity` slots.

        Raises:
            EngineError: the device has not that much memory, or the engine is closed.
        """

    def run(
        self,
        cache: KVCache,
        inputs: Mapping[str, HostArray | DeviceTensor],
        wanted: Sequence[str],
        lanes: range | None = None,
    ) -> list[DeviceTensor]:
        """Run one pass; the caches in `cache` are the graph's past_* inputs and present_* outputs.

        Args:
            cache: made by this runner.
            inputs: every input of the graph that is not a cache. Host arrays are copied before the call
                returns.
            wanted: names of the outputs to give, in the order wanted. Others are not given out.
            lanes: neighbouring lanes that take part; None takes all. The batch axis of inputs and outputs
                has as many rows; the memory of other lanes is not touched.

        Raises:
            EngineError: the engine failed; the cache's content is undefined afterwards.
        """

    def close(self) -> None:
        """Free the weights. Closing twice is harmless."""


def resolve_axes(
    io: GraphIO, shapes: Mapping[str, Sequence[int]], sizes: Mapping[str, int]
) -> dict[str, int]:
    """Find the size of every named axis from the shapes of the inputs given.

    Args:
        io: the graph's interface.
        shapes: shape of each input, by name.
        sizes: axes already known (batch, capacity).

    Raises:
        ValueError: an input is missing or unknown, or two inputs disagree. This is a bug of the caller.
    """
    found = dict(sizes)
    known = {tensor.name: tensor for tensor in io.inputs}
    for name, shape in shapes.items():
        tensor = known.get(name)
        if tensor is None:
            raise ValueError(f"input {name}: unknown, expected one of {sorted(known)}")
        if len(shape) != len(tensor.axes):
            raise ValueError(f"input {name}: got shape {tuple(shape)}, expected axes {tensor.axes}")
        for axis, size in zip(tensor.axes, shape, strict=True):
            expected = found.setdefault(axis, size) if isinstance(axis, str) else axis
            if size != expected:
                raise ValueError(f"input {name}: got shape {tuple(shape)}, expected {axis} = {expected}")
    return found
