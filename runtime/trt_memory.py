"""Memory of the passes over one engine: caches, inputs and outputs, laid out once for the largest pass.

An `Arena` is one allocation on the device and one of page-locked host memory. What lies where does not depend
on the shapes of a pass, so addresses stay as they are, and captured passes hold. An arena whose cache was
dropped is kept and given to the next request: no allocation, and the same addresses again.

    device   | host inputs | small outputs | other outputs | caches |
    pinned   | host inputs | small outputs |

Host inputs (ids, lengths) go up in one copy, the small outputs that are wanted come down in one.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..bundle.errors import EngineError
from ..bundle.limits import round_up
from ..bundle.tensors import BATCH, FEATURES, SLOTS, DType, GraphIO, TensorInfo, present
from .cuda_device import ALIGNMENT, Device, Memory
from .dtypes import NUMPY
from .engine import SavedLane

Shape = tuple[int, ...]
Copy = tuple[int, int]
"""Offset in the arena and size in bytes of what one copy moves."""

SMALL_BYTES = 1 << 14
"""An output up to this size is fetched with the pass, if it is wanted; a larger one only when it is read."""


def tensor_shape(info: TensorInfo, sizes: Mapping[str, int]) -> Shape:
    """The shape of a tensor with named axes."""
    return tuple(sizes[axis] if isinstance(axis, str) else axis for axis in info.axes)


@dataclass(frozen=True)
class Layout:
    """Where every tensor of a graph lies in an arena. Offsets are multiples of `ALIGNMENT`.

    Attributes:
        offsets: of each tensor by name; the outputs that update caches lie where the caches do.
        staged: inputs that come from the host with every pass.
        small: outputs that are fetched with the pass.
        caches: inputs that are caches, with their shapes.
        pinned_bytes: size of what lies in page-locked memory, too: the staged inputs and the small outputs.
        caches_at: offset of the first cache.
        bytes: size of all.
    """

    offsets: dict[str, int]
    staged: frozenset[str]
    small: frozenset[str]
    caches: dict[str, tuple[TensorInfo, Shape]]
    pinned_bytes: int
    caches_at: int
    bytes: int


def plan_layout(io: GraphIO, largest: Mapping[str, int]) -> Layout:
    """Lay out the tensors of a graph.

    Args:
        io: its interface.
        largest: the largest size of every named axis.
    """
    size = {t.name: math.prod(tensor_shape(t, largest)) * t.dtype.bytes for t in (*io.inputs, *io.outputs)}
    caches = [t for t in io.inputs if present(t.name) != t.name]
    updates = {present(t.name) for t in caches}
    # The values of `slots` are always 0, 1, 2, ...: the runner has them once, for all.
    staged = [
        t.name for t in io.inputs if t.dtype is DType.INT64 and present(t.name) == t.name and t.name != SLOTS
    ]
    outputs = [t.name for t in io.outputs if t.name not in updates]
    # Features go to the draft: they are fetched only when somebody reads them.
    small = [name for name in outputs if size[name] <= SMALL_BYTES and name != FEATURES]
    large = [name for name in outputs if name not in small]
    offsets: dict[str, int] = {}

    def place(names: Sequence[str], start: int) -> int:
        for name in sorted(names, key=lambda name: size[name]):  # a copy spans few bytes
            offsets[name] = start
            start = round_up(start + size[name], ALIGNMENT)
        return start

    pinned = place(small, place(staged, 0))
    caches_at = end = place(large, pinned)
    for tensor in caches:
        offsets[tensor.name] = offsets[present(tensor.name)] = end
        end = round_up(end + size[tensor.name], ALIGNMENT)
    return Layout(
        offsets,
        frozenset(staged),
        frozenset(small),
        {t.name: (t, tensor_shape(t, largest)) for t in caches},
        pinned,
        caches_at,
        end,
    )


class Arena:
    """The memory of one cache. Used by one request, or one batch of them, at a time."""

    def __init__(self, device: Device, layout: Layout, batch: int, purpose: str):
        self.layout = layout
        self.batch = batch
        self._device = device
        self.memory = device.allocate(layout.bytes, purpose)
        try:
            self.pinned = device.allocate_pinned(layout.pinned_bytes)
        except EngineError:
            device.discard(self.memory)
            raise
        self.host = self.pinned.view()
        self.event = device.new_event()
        self.more: dict[str, Memory] = {}

    def address(self, name: str) -> int:
        """Where a tensor lies on the device."""
        return self.memory.address + self.layout.offsets[name]

    def stage(self, name: str, values: NDArray[Any]) -> int:
        """Put the values of an input into page-locked memory; returns the offset behind them."""
        offset = self.layout.offsets[name]
        part = self.host[offset : offset + values.nbytes].view(values.dtype)
        part[:] = values.reshape(-1)
        return offset + values.nbytes

    def elsewhere(self, name: str, most: int) -> int:
        """Memory for an input that usually lies in another arena and comes from the host now.

        Args:
            name: of the input.
            most: what it may grow to, in bytes.
        """
        memory = self.more.get(name)
        if memory is None:
            memory = self.more[name] = self._device.allocate(most, f"the input {name}")
        return memory.address

    def discard(self) -> None:
        """Free everything some time later."""
        for memory in (self.memory, self.pinned, *self.more.values()):
            self._device.discard(memory)
        self._device.discard_event(self.event)


class Pool:
    """Arenas of one runner that nobody uses. Caches give theirs back when they are dropped, at any moment."""

    def __init__(self) -> None:
        self._idle: deque[Arena] = deque()
        self._closed = False

    def take(self, batch: int) -> Arena | None:
        """An idle arena for that many lanes."""
        for arena in tuple(self._idle):
            if arena.batch == batch:
                try:
                    self._idle.remove(arena)
                except ValueError:  # another thread took it
                    continue
                return arena
        return None

    def give_back(self, arena: Arena) -> None:
        """Keep an arena for the next request; after `close` let it go."""
        self._idle.append(arena)
        if self._closed:
            self.drain()

    def drain(self) -> bool:
        """Let go of all idle arenas; whether there were any."""
        drained = False
        while self._idle:
            try:
                arena = self._idle.popleft()
            except IndexError:  # another thread was quicker
                break
            arena.discard()
            drained = True
        return drained

    def close(self) -> None:
        """Let go of all idle arenas, and of each that is still in use as soon as it is given back."""
        self._closed = True
        self.drain()


class TrtTensor:
    """An output in an arena: `engine.DeviceTensor`."""

    def __init__(self, cache: TrtCache, info: TensorInfo, shape: Shape, fetched: bool):
        self.cache = cache  # keeps the memory alive
        self.info = info
        self.shape = shape
        self.address = cache.arena.address(info.name)
        self._fetched = fetched

    def to_host(self) -> NDArray[Any]:
        """See `engine.DeviceTensor`."""
        arena, device = self.cache.arena, self.cache.device
        dtype = NUMPY[self.info.dtype]
        if self._fetched:  # it came down behind the pass
            device.wait(arena.event)
            offset = arena.layout.offsets[self.info.name]
            size = math.prod(self.shape) * dtype.itemsize
            return arena.host[offset : offset + size].view(dtype).reshape(self.shape).copy()
        values = np.empty(self.shape, dtype)
        with device.lock:
            device.download(values.ctypes.data, self.address, values.nbytes)
            device.record(arena.event)
        device.wait(arena.event)
        return values


class TrtCache:
    """Caches of one graph and the buffers of its passes: `engine.KVCache`. Made by `TrtRunner.new_cache`."""

    def __init__(self, runner: object, device: Device, pool: Pool, arena: Arena, capacity: int):
        self.runner = runner
        self.device = device
        self.arena = arena
        self.capacity = capacity
        self.batch = arena.batch
        weakref.finalize(self, pool.give_back, arena).atexit = False
        layout = arena.layout
        if layout.caches:
            device.clear(arena.memory.address + layout.caches_at, layout.bytes - layout.caches_at)

    def slots_for(self, looked: int, needed: int) -> int:  # noqa: ARG002 - engines look at what they are told
        """See `engine.KVCache`."""
        return looked

    def save(self, lane: int, slots: int) -> SavedLane:
        """See `engine.KVCache`."""
        saved = []
        with self.device.lock:
            for info, shape in self.arena.layout.caches.values():
                _, heads, capacity, width = self._checked(shape, lane, slots)
                rows = np.empty((heads, slots, width), NUMPY[info.dtype])
                if rows.size:
                    self.device.download_rows(rows, *self._rows(info, shape, lane, capacity * width))
                saved.append(rows)
            self.device.record(self.arena.event)
        self.device.wait(self.arena.event)
        return tuple(saved)

    def load(self, lane: int, saved: SavedLane) -> None:
        """See `engine.KVCache`."""
        caches = self.arena.layout.caches
        if len(saved) != len(caches):
            raise ValueError(f"saved: got {len(saved)} tensors, expected {len(caches)}")
        kept = []  # until the copies are done
        with self.device.lock:
            for (info, shape), part in zip(caches.values(), saved, strict=True):
                _, heads, capacity, width = self._checked(shape, lane, part.shape[1])
                if (part.shape[0], part.shape[2], part.dtype) != (heads, width, NUMPY[info.dtype]):
                    raise ValueError(f"{info.name}: got {part.dtype} {part.shape}, saved from another graph")
                rows = np.ascontiguousarray(part)
                kept.append(rows)
                if rows.size:
                    self.device.upload_rows(*self._rows(info, shape, lane, capacity * width), rows)
            self.device.record(self.arena.event)
        self.device.wait(self.arena.event)

    def _checked(self, shape: Shape, lane: int, slots: int) -> Shape:
        if not (0 <= lane < self.batch and 0 <= slots <= self.capacity):
            raise ValueError(f"lane {lane}, {slots} slots: expected < {self.batch}, <= {self.capacity}")
        return shape

    def _rows(self, info: TensorInfo, shape: Shape, lane: int, elements: int) -> Copy:
        """Address of the first head of a lane, and bytes from one head to the next."""
        lane_bytes = math.prod(shape[1:]) * info.dtype.bytes
        return self.arena.address(info.name) + lane * lane_bytes, elements * info.dtype.bytes


def largest_axes(profiles: Mapping[str, Mapping[str, tuple[int, int, int]]], batch: int) -> dict[str, int]:
    """The largest size of every axis in any profile, for a number of lanes."""
    largest = {axis: max(r[axis][2] for r in profiles.values()) for axis in next(iter(profiles.values()))}
    return {**largest, BATCH: batch}
