"""One GPU through cuda-python: memory, one stream, events and captured graphs. No torch.

Everything that runners put on the device goes through the one stream of `shared_device`, in the order in
which it was put there. So an output of one runner can be another's input without waiting; the host waits for
an event, and only where it reads a result.

Whoever puts work on the stream holds `Device.lock`: a capture records what comes while it lasts, whoever sent
it. The lock is never held while waiting for the GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..bundle.errors import EngineError, ProviderError
from ..bundle.gpu import Gpu, cuda_devices

ALIGNMENT = 256
"""Bytes that TensorRT wants addresses of tensors and of working memory to be multiples of."""

_MODULE = "cuda.bindings.runtime"
_INDEX = 0  # the first device that CUDA shows; CUDA_VISIBLE_DEVICES chooses which one that is


class CaptureError(Exception):
    """A pass could not be captured in a graph. It can still be run."""


@dataclass(frozen=True)
class Memory:
    """An allocation on the device, or a page-locked one in host memory."""

    address: int
    bytes: int
    pinned: bool = False

    def view(self) -> NDArray[np.uint8]:
        """The bytes of page-locked memory, not copied."""
        if not self.pinned:
            raise ValueError("memory: is on the device; copy it to the host")
        buffer = (ctypes.c_uint8 * self.bytes).from_address(self.address)
        return np.ctypeslib.as_array(buffer)


_shared: weakref.WeakValueDictionary[int, Device] = weakref.WeakValueDictionary()
_shared_lock = threading.Lock()


def shared_device() -> Device:
    """The device of this process: all runners that are open at the same time get the same one.

    Raises:
        ProviderError: there is no GPU, no driver, or no cuda-python.
    """
    with _shared_lock:
        device = _shared.get(_INDEX)
        if device is None:
            device = _shared[_INDEX] = Device(_cuda(), first_gpu())
        return device


def first_gpu() -> Gpu:
    """The GPU that engines run on.

    Raises:
        ProviderError: there is none, and why.
    """
    gpus, reason = cuda_devices()
    if not gpus:
        raise ProviderError(
            f"gpu: {reason}, and engines run on an NVIDIA GPU; use --backend onnxruntime on this machine"
        )
    return gpus[_INDEX]


def _cuda() -> Any:
    try:
        return importlib.import_module(_MODULE)
    except ImportError as cause:
        raise ProviderError(
            f"{_MODULE}: cannot be imported ({cause}), and engines need it to run; "
            "pip install 'dflash-deploy[rtx]' (or [tensorrt])"
        ) from cause


class Device:
    """A GPU, its stream, and what is allocated on it.

    Attributes:
        gpu: what it is.
        lock: held by whoever puts work on the stream. May be taken twice by one thread.
        stream: the stream's handle.
    """

    def __init__(self, cuda: Any, gpu: Gpu):
        self._cuda = cuda
        self.gpu = gpu
        self.lock = threading.RLock()
        self._check(cuda.cudaSetDevice(_INDEX), "starting the GPU")
        created = self._check(cuda.cudaStreamCreateWithFlags(cuda.cudaStreamNonBlocking), "making a stream")
        self._stream = created
        self.stream = int(created)
        # What nobody uses any more, with the function that gives it back. It is dropped at any moment, even
        # while a pass is being captured, when nothing may be freed; so it waits here.
        self._garbage: _Garbage = deque()
        weakref.finalize(self, _destroy, cuda, created, self._garbage).atexit = False

    # Memory.

    def allocate(self, size: int, purpose: str) -> Memory:
        """Allocate memory on the device; its content is undefined.

        Args:
            size: in bytes.
            purpose: what for, and what to lower if there is none.

        Raises:
            EngineError: there is not that much.
        """
        with self.lock:
            self.collect()
            error, address = self._cuda.cudaMalloc(max(size, 1))
        if error == self._cuda.cudaError_t.cudaErrorMemoryAllocation:
            self._cuda.cudaGetLastError()  # it is not to be found again by a later call
            raise EngineError(f"no GPU memory: {size / 1e6:.1f} MB are needed for {purpose}{self._free()}")
        return Memory(int(self._check((error, address), "allocating GPU memory")), max(size, 1))

    def allocate_pinned(self, size: int) -> Memory:
        """Allocate page-locked host memory, which copies to and from the device go through."""
        with self.lock:
            address = self._check(self._cuda.cudaMallocHost(max(size, 1)), "allocating page-locked memory")
        return Memory(int(address), max(size, 1), pinned=True)

    def discard(self, memory: Memory) -> None:
        """Free memory some time later. May be called by any thread at any moment, and by a finalizer."""
        self._garbage.append(("cudaFreeHost" if memory.pinned else "cudaFree", memory.address))

    def discard_event(self, event: Any) -> None:
        """Give an event back some time later, as `discard` does."""
        self._garbage.append(("cudaEventDestroy", event))

    def collect(self) -> None:
        """Free what was discarded; waits for the work that was put on the stream before."""
        with self.lock:
            if self._garbage:
                self.synchronize()
            for free, handle in _drain(self._garbage):
                self._check(getattr(self._cuda, free)(handle), "freeing memory")

    def _free(self) -> str:
        error, free, total = self._cuda.cudaMemGetInfo()
        if error != self._cuda.cudaError_t.cudaSuccess:
            return ""
        return f" ({free / 1e6:.1f} of {total / 1e6:.1f} MB are free)"

    # Copies. All are put on the stream.

    def upload(self, address: int, source: int, size: int) -> None:
        """Copy from host memory. Page-locked memory must stay as it is until the stream has come that far."""
        self._copy(address, source, size, self._cuda.cudaMemcpyKind.cudaMemcpyHostToDevice)

    def download(self, target: int, address: int, size: int) -> None:
        """Copy to host memory; wait before reading it."""
        self._copy(target, address, size, self._cuda.cudaMemcpyKind.cudaMemcpyDeviceToHost)

    def _copy(self, target: int, source: int, size: int, kind: Any) -> None:
        with self.lock:
            self._check(
                self._cuda.cudaMemcpyAsync(target, source, size, kind, self._stream), "copying memory"
            )

    def upload_rows(self, address: int, pitch: int, rows: NDArray[Any]) -> None:
        """Copy rows of host memory to rows that are `pitch` bytes apart.

        Args:
            address: of the first row.
            pitch: in bytes.
            rows: contiguous, [rows, ...].
        """
        width = rows.nbytes // rows.shape[0]
        kind = self._cuda.cudaMemcpyKind.cudaMemcpyHostToDevice
        self._copy_rows(address, pitch, rows.ctypes.data, width, width, rows.shape[0], kind)

    def download_rows(self, rows: NDArray[Any], address: int, pitch: int) -> None:
        """Copy rows that are `pitch` bytes apart to contiguous rows of host memory; wait before reading."""
        width = rows.nbytes // rows.shape[0]
        kind = self._cuda.cudaMemcpyKind.cudaMemcpyDeviceToHost
        self._copy_rows(rows.ctypes.data, width, address, pitch, width, rows.shape[0], kind)

    def _copy_rows(
        self, target: int, target_pitch: int, source: int, source_pitch: int, width: int, rows: int, kind: Any
    ) -> None:
        with self.lock:
            self._check(
                self._cuda.cudaMemcpy2DAsync(
                    target, target_pitch, source, source_pitch, width, rows, kind, self._stream
                ),
                "copying memory",
            )

    def clear(self, address: int, size: int) -> None:
        """Set bytes to zero."""
        with self.lock:
            self._check(self._cuda.cudaMemsetAsync(address, 0, size, self._stream), "clearing memory")

    # Waiting.

    def new_event(self) -> Any:
        """An event that nothing is recorded in yet: waiting for it returns at once."""
        flags = self._cuda.cudaEventDisableTiming
        return self._check(self._cuda.cudaEventCreateWithFlags(flags), "making an event")

    def record(self, event: Any) -> None:
        """Let an event stand for the work put on the stream so far."""
        with self.lock:
            self._check(self._cuda.cudaEventRecord(event, self._stream), "recording an event")

    def wait(self, event: Any) -> None:
        """Wait until the stream has come to where the event was recorded."""
        self._check(self._cuda.cudaEventSynchronize(event), "waiting for the GPU")

    def synchronize(self) -> None:
        """Wait until the stream is empty."""
        self._check(self._cuda.cudaStreamSynchronize(self._stream), "waiting for the GPU")

    # Graphs.

    def capture(self, work: Callable[[], None]) -> Any:
        """Record the work that a function puts on the stream, without doing it.

        Args:
            work: must not wait, allocate or free.

        Returns:
            What `replay` takes. Give it back with `forget`.

        Raises:
            CaptureError: it cannot be recorded; the stream is as it was.
        """
        cuda = self._cuda
        mode = cuda.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        with self.lock:
            (error,) = cuda.cudaStreamBeginCapture(self._stream, mode)
            if error != cuda.cudaError_t.cudaSuccess:
                raise CaptureError(self._text(error))
            failure = None
            try:
                work()
            except EngineError as cause:
                failure = cause
            # A capture is ended whatever happened in it, or the stream stays unusable.
            error, graph = cuda.cudaStreamEndCapture(self._stream)
            if failure is not None or error != cuda.cudaError_t.cudaSuccess or not graph:
                cuda.cudaGetLastError()
                if graph:
                    cuda.cudaGraphDestroy(graph)
                raise CaptureError(str(failure) if failure is not None else self._text(error))
            error, executable = cuda.cudaGraphInstantiate(graph, 0)
            cuda.cudaGraphDestroy(graph)
            if error != cuda.cudaError_t.cudaSuccess:
                cuda.cudaGetLastError()
                raise CaptureError(self._text(error))
            return executable

    def replay(self, executable: Any) -> None:
        """Put captured work on the stream."""
        with self.lock:
            self._check(self._cuda.cudaGraphLaunch(executable, self._stream), "replaying a pass")

    def forget(self, executable: Any) -> None:
        """Give captured work back; the stream must have finished with it."""
        with self.lock:
            self._check(self._cuda.cudaGraphExecDestroy(executable), "giving a graph back")

    # Results.

    def _check(self, result: tuple[Any, ...], doing: str) -> Any:
        error, *values = result
        if error != self._cuda.cudaError_t.cudaSuccess:
            raise EngineError(
                f"CUDA failed while {doing}: {self._text(error)}; start the program again if it goes on"
            )
        return values[0] if values else None

    def _text(self, error: Any) -> str:
        name = self._cuda.cudaGetErrorName(error)[1]
        text = self._cuda.cudaGetErrorString(error)[1]
        return f"{name.decode()}, {text.decode()}"


_Garbage = deque[tuple[str, Any]]


def _destroy(cuda: Any, stream: Any, garbage: _Garbage) -> None:
    """Give back what a device that nobody uses any more had; nobody is left to be told of a failure."""
    cuda.cudaStreamSynchronize(stream)
    for free, handle in _drain(garbage):
        getattr(cuda, free)(handle)
    cuda.cudaStreamDestroy(stream)


def _drain(garbage: _Garbage) -> Iterator[tuple[str, Any]]:
    with contextlib.suppress(IndexError):
        while True:
            yield garbage.popleft()
