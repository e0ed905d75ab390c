"""Memory of ONNX Runtime's graphs: caches that are updated in place, and the buffers of passes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..bundle.errors import EngineError, ProviderError
from ..bundle.limits import KV_BUCKET, round_up
from ..bundle.tensors import BATCH, CAPACITY, DType, TensorInfo
from .dtypes import NUMPY
from .engine import HostArray, SavedLane

Bound = dict[str, tuple[int, tuple[int, ...]]]

ONNX_TYPES = {
    DType.FLOAT32: 1,
    DType.FLOAT16: 10,
    DType.BFLOAT16: 16,
    DType.INT64: 7,
}  # onnx.TensorProto's numbers


class Block:
    """Memory on the device: one allocation that tensors of several shapes are views of, one at a time."""

    def __init__(self, dtype: DType, elements: int, device: str):
        ort = onnxruntime()
        self.dtype = dtype
        self.elements = elements
        self.device = device
        if device == "cpu":
            # The memory is NumPy's own. A page that nobody touches takes none.
            self.host: NDArray[Any] | None = np.zeros(elements, NUMPY[dtype])
            self.value = None
            self.address = self.host.ctypes.data
            return
        self.host = None
        self.value = ort.OrtValue.ortvalue_from_shape_and_type((elements,), ONNX_TYPES[dtype], device, 0)
        self.address = self.value.data_ptr()
        self.write(np.zeros(elements, NUMPY[dtype]))

    def read(self) -> NDArray[Any]:
        """All elements in host memory: the memory itself on the CPU, a copy elsewhere."""
        if self.host is not None:
            return self.host
        copied = np.empty(self.elements, NUMPY[self.dtype])
        self._as_value(copied).update_inplace(self.value)
        return copied

    def write(self, data: NDArray[Any]) -> None:
        """Set the first elements; on a device the others become zero."""
        if self.host is not None:
            self.host[: data.size] = data
            return
        whole = np.zeros(self.elements, NUMPY[self.dtype])
        whole[: data.size] = data
        assert self.value is not None
        self.value.update_inplace(self._as_value(whole))

    def _as_value(self, array: NDArray[Any]) -> Any:
        return onnxruntime().OrtValue.ortvalue_from_numpy_with_onnx_type(array, ONNX_TYPES[self.dtype])


class OrtTensor:
    """A tensor in the memory of a cache: `engine.DeviceTensor`."""

    def __init__(self, block: Block, shape: tuple[int, ...]):
        self.block = block
        self.shape = shape
        self._size = math.prod(shape)

    def to_host(self) -> NDArray[Any]:
        """See `engine.DeviceTensor`."""
        return self.block.read()[: self._size].reshape(self.shape)

    def fill(self, data: HostArray) -> None:
        """Copy host values into the tensor."""
        self.block.write(data.reshape(-1))


class OrtCache:
    """Caches of one graph and the buffers of its passes: `engine.KVCache`. Made by `OrtRunner.new_cache`.

    Attributes:
        slots: what the cache tensors hold now: `capacity`, or as few as are needed if the graph looks at all
            of them (`bundle.tuned.WHOLE_CACHE`).
        tensors: the caches, by past_* name.
        buffers: memory of the other inputs and outputs by name, large enough for the largest so far.
        bindings: for each range of lanes and set of outputs what ONNX Runtime was told, and the address and
            shape it points at by name.
    """

    def __init__(
        self,
        runner: object,
        infos: tuple[TensorInfo, ...],
        capacity: int,
        batch: int,
        device: str,
        whole: bool,
    ):
        """Allocate the caches.

        Args:
            runner: whose graph they belong to.
            infos: the past_* inputs.
            capacity: most slots of a lane.
            batch: lanes.
            device: see `Block`.
            whole: whether the graph looks at all slots; on the CPU only.
        """
        self.runner = runner
        self.capacity = capacity
        self.batch = batch
        self._infos, self._device, self._whole = infos, device, whole
        self.slots = capacity
        self.tensors = {info.name: self._tensor(info, capacity) for info in infos}
        self.buffers: dict[str, Block] = {}
        self.bindings: dict[tuple[int, int, tuple[str, ...]], tuple[Any, Bound]] = {}
        if whole:  # the memory of all slots could be had; a page that nobody touched took none
            self._resize(min(KV_BUCKET, capacity), kept=0)

    def slots_for(self, looked: int, needed: int) -> int:
        """See `engine.KVCache`."""
        if not self._whole:
            return looked
        least = min(round_up(needed, KV_BUCKET), self.capacity)
        if needed > self.slots:
            self._resize(self._grown(needed), kept=self.slots)
        elif 2 * least <= self.slots:
            self._resize(least, kept=least)
        return self.slots

    def save(self, lane: int, slots: int) -> SavedLane:
        """See `engine.KVCache`."""
        return tuple(tensor.to_host()[lane, :, :slots].copy() for tensor in self.tensors.values())

    def load(self, lane: int, saved: SavedLane) -> None:
        """See `engine.KVCache`."""
        most = max((part.shape[1] for part in saved), default=0)
        if most > self.slots:
            self._resize(self._grown(most), kept=self.slots)
        for tensor, part in zip(self.tensors.values(), saved, strict=True):
            whole = tensor.to_host()
            whole[lane, :, : part.shape[1]] = part
            if tensor.block.host is None:
                tensor.block.write(whole.reshape(-1))

    def _tensor(self, info: TensorInfo, slots: int) -> OrtTensor:
        sizes = {BATCH: self.batch, CAPACITY: slots}
        shape = tuple(sizes[axis] if isinstance(axis, str) else axis for axis in info.axes)
        return OrtTensor(Block(info.dtype, math.prod(shape), self._device), shape)

    def _grown(self, slots: int) -> int:
        """Some more than needed, the more the longer, so that growing stays cheap: all lanes are copied."""
        return min(round_up(slots, max(KV_BUCKET, round_up(slots // 8, KV_BUCKET))), self.capacity)

    def _resize(self, slots: int, kept: int) -> None:
        """Make the caches longer or shorter; of each lane the first `kept` slots stay.

        Raises:
            EngineError: there is no memory; the caches are as they were.
        """
        made = {}
        try:
            for info in self._infos:
                new = made[info.name] = self._tensor(info, slots)
                if kept:
                    new.to_host()[:, :, :kept] = self.tensors[info.name].to_host()[:, :, :kept]
        except MemoryError as cause:
            raise EngineError(
                f"caches: no memory for {self.batch} x {slots} slots; lower max_new_tokens, max_length or "
                "the number of requests at once"
            ) from cause
        self.tensors, self.slots = made, slots
        self.bindings.clear()  # the memory moved


def onnxruntime() -> Any:
    """The module.

    Raises:
        ProviderError: it is not installed.
    """
    try:
        import onnxruntime
    except ImportError as cause:
        raise ProviderError(
            "onnxruntime: not installed; pip install 'dflash-deploy[cpu]', or [cuda] for an NVIDIA GPU"
        ) from cause
    return onnxruntime
