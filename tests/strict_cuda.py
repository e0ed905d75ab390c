"""A strict stand-in for the part of `cuda.bindings.runtime` that the package calls. It has no GPU.

"Device memory" is NumPy memory at real addresses. A stream is a queue: nothing on it happens before somebody
waits, so a result that is read too early, or page-locked memory that is written too early, shows. Memory is
handed out full of NaN and ruined when it is freed. What real CUDA leaves undefined is a `Violation` here, and
no `except Exception` catches it.

Names, parameters and enumerations are the real package's; `test_strict_stand_ins.py` compares them.
"""

# ruff: noqa: N802, N803, N815 - the names are CUDA's

from __future__ import annotations

import bisect
import ctypes
import functools
import inspect
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from cuda.bindings import runtime as real

ALIGNMENT = 256
_OK = real.cudaError_t.cudaSuccess


class Violation(BaseException):
    """Something that real CUDA or TensorRT would punish with anything."""


@dataclass
class Allocation:
    """Memory that is, or was, allocated."""

    address: int
    bytes: int
    pinned: bool
    memory: np.ndarray
    live: bool = True


@dataclass
class Node:
    """One piece of work on a stream. `check` runs whenever it is put on a stream, also by a replay."""

    name: str
    work: Callable[[], None]
    check: Callable[[], None] = lambda: None


@dataclass
class Stream:
    queue: list[Node] = field(default_factory=list)
    captured: list[Node] | None = None
    invalid: bool = False
    thread: int = 0


@dataclass
class Executable:
    nodes: list[Node]
    live: bool = True


def _one_at_a_time(kind: type) -> type:
    """CUDA may be called by several threads; so may its stand-in."""
    for name, value in list(vars(kind).items()):
        if name.startswith("cuda") and inspect.isfunction(value):

            def locked(self: Any, *args: Any, _call: Any = value, **kwargs: Any) -> Any:
                with self.lock:
                    return _call(self, *args, **kwargs)

            setattr(kind, name, functools.wraps(value)(locked))
    return kind


@_one_at_a_time
class StrictCuda:
    """Stands in for the module.

    Attributes:
        total_bytes: memory of the device.
        faults: functions that fail: name to the error they return from now on.
        calls: how often each function was called.
        moved: bytes copied, by direction.
        allocations: all that ever were.
    """

    cudaError_t = real.cudaError_t
    cudaMemcpyKind = real.cudaMemcpyKind
    cudaStreamCaptureMode = real.cudaStreamCaptureMode
    cudaStreamNonBlocking = real.cudaStreamNonBlocking
    cudaEventDisableTiming = real.cudaEventDisableTiming

    def __init__(self, total_bytes: int = 1 << 30):
        self.total_bytes = total_bytes
        self.faults: dict[str, Any] = {}
        self.calls: Counter[str] = Counter()
        self.moved: Counter[str] = Counter()
        self.allocations: list[Allocation] = []
        self.streams: dict[int, Stream] = {}
        self.events: dict[int, Node | None] = {}
        self.graphs: dict[int, list[Node]] = {}
        self.executables: dict[int, Executable] = {}
        self.lock = threading.RLock()
        self._next = 1

    # Of the stand-in itself.

    @property
    def live(self) -> list[Allocation]:
        return [a for a in self.allocations if a.live]

    def find(self, address: int) -> Allocation | None:
        """The allocation, dead or alive, in which an address lies."""
        ordered = sorted(self.allocations, key=lambda a: a.address)
        index = bisect.bisect_right([a.address for a in ordered], address) - 1
        if index >= 0 and address < ordered[index].address + ordered[index].bytes:
            return ordered[index]
        return None

    def memory(self, address: int, size: int, what: str, pinned: bool = False) -> np.ndarray:
        """The bytes at an address, which has to lie in a live allocation that is large enough."""
        found = self.find(address)
        if found is None:
            raise Violation(f"{what}: {address:#x} lies in no allocation")
        if not found.live:
            raise Violation(f"{what}: {address:#x} was freed")
        if found.pinned is not pinned:
            raise Violation(f"{what}: {address:#x} is {'host' if found.pinned else 'device'} memory")
        offset = address - found.address
        if offset + size > found.bytes:
            raise Violation(f"{what}: {size} bytes at {offset} overrun an allocation of {found.bytes}")
        return found.memory[offset : offset + size]

    def stream(self, handle: Any) -> Stream:
        found = self.streams.get(int(handle))
        if found is None:
            raise Violation(f"stream {int(handle)} does not exist; work on the default stream waits for all")
        return found

    def put(self, handle: Any, node: Node) -> None:
        """Put work on a stream, or into the capture that is under way."""
        stream = self.stream(handle)
        node.check()
        if stream.captured is not None and stream.thread != threading.get_ident():
            raise Violation(f"{node.name}: another thread's work lands in a capture")
        (stream.queue if stream.captured is None else stream.captured).append(node)

    def run(self, until: Node | None = None) -> None:
        """Do the work on all streams, or up to a piece of it."""
        for stream in self.streams.values():
            while stream.queue:
                node = stream.queue.pop(0)
                node.work()
                if node is until:
                    return

    def _begin(self, name: str, *, waits: bool = False) -> Any:
        """Count a call; gives the error it has to fail with, if any."""
        self.calls[name] += 1
        if waits:
            for stream in self.streams.values():
                if stream.captured is not None and stream.thread == threading.get_ident():
                    raise Violation(f"{name}: waits or allocates while a pass is captured")
        return self.faults.get(name)

    def _handle(self) -> int:
        self._next += 1
        return self._next

    def _allocate(self, size: int, pinned: bool) -> int:
        raw = np.full(size + 2 * ALIGNMENT, 0xFF, np.uint8)  # NaN in every float type, -1 in integers
        skip = -raw.ctypes.data % ALIGNMENT
        memory = raw[skip : skip + size]
        self.allocations.append(Allocation(memory.ctypes.data, size, pinned, memory))
        return memory.ctypes.data

    def _release(self, address: int, pinned: bool) -> None:
        found = next((a for a in self.live if a.address == address and a.pinned is pinned), None)
        if found is None:
            raise Violation(f"free: {address:#x} is no live allocation of its kind")
        if any(stream.queue for stream in self.streams.values()):
            raise Violation("free: work is pending that may use it; whether CUDA waits then is not promised")
        found.memory[:] = 0xEE
        found.live = False

    # Of the module.

    def cudaSetDevice(self, device):
        error = self._begin("cudaSetDevice")
        return (error or (_OK if device == 0 else real.cudaError_t.cudaErrorInvalidDevice),)

    def cudaMalloc(self, size):
        error = self._begin("cudaMalloc", waits=True)
        used = sum(a.bytes for a in self.live if not a.pinned)
        if error is None and used + size > self.total_bytes:
            error = real.cudaError_t.cudaErrorMemoryAllocation
        return (error, None) if error is not None else (_OK, self._allocate(size, pinned=False))

    def cudaFree(self, devPtr):
        error = self._begin("cudaFree", waits=True)
        self._release(devPtr, pinned=False)
        return (error or _OK,)

    def cudaMallocHost(self, size):
        error = self._begin("cudaMallocHost", waits=True)
        return (error, None) if error is not None else (_OK, self._allocate(size, pinned=True))

    def cudaFreeHost(self, ptr):
        error = self._begin("cudaFreeHost", waits=True)
        self._release(ptr, pinned=True)
        return (error or _OK,)

    def cudaMemGetInfo(self):
        self._begin("cudaMemGetInfo")
        return _OK, self.total_bytes - sum(a.bytes for a in self.live if not a.pinned), self.total_bytes

    def cudaMemcpyAsync(self, dst, src, count, kind, stream):
        return self.cudaMemcpy2DAsync(dst, count, src, count, count, 1, kind, stream)

    def cudaMemcpy2DAsync(self, dst, dpitch, src, spitch, width, height, kind, stream):
        error = self._begin("cudaMemcpy2DAsync" if height > 1 else "cudaMemcpyAsync")
        if error is not None:
            return (error,)
        if width > min(dpitch, spitch) or width < 1 or height < 1:
            raise Violation(f"copy of {height} rows of {width} bytes, pitches {dpitch} and {spitch}")
        up = kind == real.cudaMemcpyKind.cudaMemcpyHostToDevice
        if not up and kind != real.cudaMemcpyKind.cudaMemcpyDeviceToHost:
            raise Violation(f"copy: kind {kind} is not one that the package has use for")
        host, device, span = (src, dst, dpitch) if up else (dst, src, spitch)
        host_pitch = spitch if up else dpitch
        size = (height - 1) * span + width
        host_size = (height - 1) * host_pitch + width
        pinned = self.find(host)
        if self.find(device) is None:
            raise Violation(f"copy: {device:#x} is not on the device")
        kept: list[np.ndarray] = []

        def rows(memory: np.ndarray, pitch: int) -> list[np.ndarray]:
            return [memory[row * pitch : row * pitch + width] for row in range(height)]

        def host_memory() -> np.ndarray:
            if pinned is not None:
                return self.memory(host, host_size, "copy", pinned=True)
            return np.frombuffer((ctypes.c_uint8 * host_size).from_address(host), np.uint8)

        def work() -> None:
            self.moved["up" if up else "down"] += width * height
            there = self.memory(device, size, "copy")
            here = kept[0] if kept else host_memory()
            for one, other in zip(rows(there, span), rows(here, host_pitch), strict=True):
                if up:
                    one[:] = other
                else:
                    other[:] = one

        def check() -> None:
            self.memory(device, size, "copy")
            if pinned is not None:
                self.memory(host, host_size, "copy", pinned=True)

        if pinned is None and self.stream(stream).captured is not None:
            raise Violation("copy: pageable memory in a capture")
        if pinned is None and up:  # CUDA has read pageable memory when the call returns
            kept.append(host_memory().copy())
        self.put(stream, Node("copy", work, check))
        if pinned is None and not up:  # and has written it
            self.run()
        return (_OK,)

    def cudaMemsetAsync(self, devPtr, value, count, stream):
        error = self._begin("cudaMemsetAsync")

        def work() -> None:
            self.memory(devPtr, count, "memset")[:] = value

        def check() -> None:
            if count < 1:
                raise Violation("memset: of nothing")
            self.memory(devPtr, count, "memset")

        self.put(stream, Node("memset", work, check))
        return (error or _OK,)

    def cudaStreamCreateWithFlags(self, flags):
        error = self._begin("cudaStreamCreateWithFlags", waits=True)
        if error is not None:
            return error, None
        handle = self._handle()
        self.streams[handle] = Stream()
        return _OK, real.cudaStream_t(handle)

    def cudaStreamDestroy(self, stream):
        self._begin("cudaStreamDestroy", waits=True)
        self.run()
        del self.streams[int(stream)]
        return (_OK,)

    def cudaStreamSynchronize(self, stream):
        error = self._begin("cudaStreamSynchronize", waits=True)
        self.stream(stream)
        self.run()
        return (error or _OK,)

    def cudaEventCreateWithFlags(self, flags):
        self._begin("cudaEventCreateWithFlags")
        handle = self._handle()
        self.events[handle] = None
        return _OK, real.cudaEvent_t(handle)

    def cudaEventRecord(self, event, stream):
        error = self._begin("cudaEventRecord", waits=True)
        node = Node("event", lambda: None)
        self.put(stream, node)
        self.events[int(event)] = node
        return (error or _OK,)

    def cudaEventSynchronize(self, event):
        error = self._begin("cudaEventSynchronize", waits=True)
        node = self.events[int(event)]
        if any(node is waiting for s in self.streams.values() for waiting in s.queue):
            self.run(until=node)
        return (error or _OK,)

    def cudaEventDestroy(self, event):
        self._begin("cudaEventDestroy")
        del self.events[int(event)]
        return (_OK,)

    def cudaStreamBeginCapture(self, stream, mode):
        error = self._begin("cudaStreamBeginCapture", waits=True)
        if error is not None:
            return (error,)
        if mode != real.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal:
            raise Violation("capture: forbids other threads to allocate while it lasts")
        found = self.stream(stream)
        found.captured, found.invalid, found.thread = [], False, threading.get_ident()
        return (_OK,)

    def cudaStreamEndCapture(self, stream):
        error = self._begin("cudaStreamEndCapture")
        found = self.stream(stream)
        if found.captured is None:
            raise Violation("capture: was not begun")
        nodes, found.captured = found.captured, None
        if error is None and found.invalid:
            error = real.cudaError_t.cudaErrorStreamCaptureInvalidated
        if error is not None:
            return error, None
        handle = self._handle()
        self.graphs[handle] = nodes
        return _OK, real.cudaGraph_t(handle)

    def cudaGraphDestroy(self, graph):
        self._begin("cudaGraphDestroy")
        del self.graphs[int(graph)]
        return (_OK,)

    def cudaGraphInstantiate(self, graph, flags):
        error = self._begin("cudaGraphInstantiate", waits=True)
        if error is not None:
            return error, None
        handle = self._handle()
        self.executables[handle] = Executable(list(self.graphs[int(graph)]))
        return _OK, real.cudaGraphExec_t(handle)

    def cudaGraphLaunch(self, graphExec, stream):
        error = self._begin("cudaGraphLaunch")
        found = self.executables[int(graphExec)]
        for node in found.nodes:
            node.check()

            def work(node: Node = node) -> None:
                if not found.live:
                    raise Violation("replay: the graph was destroyed before it ran")
                node.check()
                node.work()

            self.put(stream, Node(f"replayed {node.name}", work))
        return (error or _OK,)

    def cudaGraphExecDestroy(self, graphExec):
        self._begin("cudaGraphExecDestroy", waits=True)
        self.executables.pop(int(graphExec)).live = False
        return (_OK,)

    def cudaGetLastError(self):
        self._begin("cudaGetLastError")
        return (_OK,)

    def cudaGetErrorName(self, error):
        self._begin("cudaGetErrorName")
        return real.cudaGetErrorName(error)

    def cudaGetErrorString(self, error):
        self._begin("cudaGetErrorString")
        return real.cudaGetErrorString(error)
