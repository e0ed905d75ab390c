"""ONNX Runtime behind `engine.GraphRunner`: one IO binding a request, everything bound in place."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from ..bundle.errors import BundleError, EngineError, ProviderError, RequestError, field_error
from ..bundle.files import safe_path
from ..bundle.manifest import GraphInfo
from ..bundle.tensors import BATCH, CAPACITY, DType, TensorInfo, present
from .engine import DeviceTensor, IntArray, KVCache, resolve_axes


@dataclass(frozen=True)
class Provider:
    """An execution provider.

    Attributes:
        providers: what ONNX Runtime is asked for, the wanted one first.
        device: its name for the memory.
        dtypes: bundle dtypes it computes.
        remedy: what to do if it is not there.
    """

    providers: tuple[str, ...]
    device: str
    dtypes: frozenset[DType]
    remedy: str


SPIN_US = 50
"""How long an idle thread of a pass looks for work before it sleeps. Long enough for the gaps between two
operators; onnxruntime's own, longer time makes a pass several times slower where other processes use the
cores, and keeps the draft's threads busy while the target computes."""

_FLOATS = frozenset({DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16})
_CPU, _CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"

PROVIDERS = {
    "cpu": Provider(
        (_CPU,),
        "cpu",
        frozenset({DType.FLOAT32, DType.FLOAT16}),
        "pip install 'dflash-deploy[cpu]'",
    ),
    "cuda": Provider(
        (_CUDA, _CPU),
        "cuda",
        _FLOATS,
        "pip uninstall onnxruntime, then pip install 'dflash-deploy[cuda]', on a machine with an NVIDIA GPU",
    ),
    "tensorrt": Provider(
        ("TensorrtExecutionProvider", _CUDA, _CPU),
        "cuda",
        _FLOATS,
        "pip install 'dflash-deploy[cuda]' and TensorRT's libraries on a machine with an NVIDIA GPU",
    ),
    "tensorrt-rtx": Provider(
        ("NvTensorRTRTXExecutionProvider", _CUDA, _CPU),
        "cuda",
        _FLOATS,
        "install an onnxruntime built with TensorRT-RTX on a machine with an NVIDIA GPU",
    ),
}

_NUMPY: dict[DType, np.dtype[Any]] = {
    DType.FLOAT32: np.dtype(np.float32),
    DType.FLOAT16: np.dtype(np.float16),
    DType.BFLOAT16: np.dtype(np.uint16),  # the bits; NumPy has no bfloat16
    DType.INT64: np.dtype(np.int64),
}
_NOISE = re.compile(r"^.*\[ONNXRuntimeError\] : \d+ : \w+ : ", re.DOTALL)
_ONNX_BFLOAT16 = 16  # onnx.TensorProto.BFLOAT16


def check_provider(name: str, dtype: DType) -> Provider:
    """Check that a provider is installed and computes a bundle's dtype, before anything large is read.

    Raises:
        ProviderError: it does not, with the remedy.
    """
    provider = PROVIDERS.get(name)
    if provider is None:
        raise field_error(ProviderError, "provider", name, "one of " + ", ".join(PROVIDERS))
    if dtype not in provider.dtypes:
        raise ProviderError(
            f"provider {name}: computes no {dtype.value}, and this bundle is {dtype.value}; export with "
            "`--dtype float32`, or choose another provider"
        )
    if provider.providers[0] not in _onnxruntime().get_available_providers():
        raise _missing(name, "this onnxruntime has not got it")
    return provider


def effective_threads(threads: int | None) -> int:
    """Threads of one pass: as asked for, or the physical cores that this process may use.

    Raises:
        RequestError: `threads` is not a number from 1 to the machine's CPUs.
    """
    if threads is None:
        return physical_cores()
    most = os.cpu_count() or 1
    if not 1 <= threads <= most:
        raise field_error(RequestError, "threads", threads, f"1 to {most}, the CPUs of this machine")
    return threads


def physical_cores() -> int:
    """Physical cores among the CPUs this process may use; two hyper-threads of a core count once."""
    try:
        cpus = os.sched_getaffinity(0)
    except AttributeError:  # not on this system
        return os.cpu_count() or 1
    siblings = set()
    for cpu in cpus:
        topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        try:
            siblings.add(topology.read_text(encoding="ascii"))
        except OSError:
            siblings.add(str(cpu))
    return max(1, len(siblings))


def runner_from_onnx(
    directory: Path, info: GraphInfo, provider: str = "cpu", threads: int | None = None
) -> OrtRunner:
    """Load a bundle's graph with ONNX Runtime.

    Args:
        directory: the bundle. Weights beside the graph are found from any working directory.
        info: the graph's part of the manifest.
        provider: a key of `PROVIDERS`.
        threads: see `effective_threads`.

    Raises:
        ProviderError: the provider is not there, does not start, or lacks an operator.
        BundleError: the graph cannot be read.
        RequestError: `threads` is not a positive number.
    """
    ort = _onnxruntime()
    wanted = check_provider(provider, DType.FLOAT32)
    options = ort.SessionOptions()
    options.intra_op_num_threads = effective_threads(threads)
    options.inter_op_num_threads = 1
    options.log_severity_level = 4  # its errors are raised; it need not print them too
    options.add_session_config_entry("session.intra_op.spin_duration_us", str(SPIN_US))
    path = safe_path(Path(directory).absolute(), info.file)
    try:
        session = ort.InferenceSession(
            str(path), options, providers=list(wanted.providers), enable_fallback=0
        )
    except Exception as cause:  # onnxruntime's exceptions have no common base
        raise _load_error(info.file, provider, wanted, cause) from cause
    session.disable_fallback()
    if session.get_providers()[0] != wanted.providers[0]:
        raise _missing(provider, "onnxruntime could not start it and would compute on the CPU")
    return OrtRunner(session, info, provider, wanted.device, options.intra_op_num_threads, ort.__version__)


class OrtTensor:
    """A tensor of ONNX Runtime: `engine.DeviceTensor`."""

    def __init__(self, value: Any, shape: tuple[int, ...], host: NDArray[Any] | None):
        self.value = value
        self.shape = shape
        self._host = host  # the memory itself, on the CPU

    def to_host(self) -> NDArray[Any]:
        """See `engine.DeviceTensor`."""
        return self._host if self._host is not None else cast("NDArray[Any]", self.value.numpy())

    def fill(self, data: IntArray) -> None:
        """Copy host values into the tensor."""
        if self._host is not None:
            np.copyto(self._host, data)
        else:
            self.value.update_inplace(np.ascontiguousarray(data))


class OrtCache:
    """One request's memory: `engine.KVCache`. Made by `OrtRunner.new_cache`.

    Attributes:
        tensors: the caches, by past_* name.
        buffers: memory of the other inputs and outputs, by name and shape.
        bound: which of these the binding points at.
    """

    def __init__(self, runner: OrtRunner, binding: Any, capacity: int, batch: int):
        self.runner = runner
        self.binding = binding
        self.capacity = capacity
        self.batch = batch
        self.tensors: dict[str, OrtTensor] = {}
        self.buffers: dict[tuple[str, tuple[int, ...]], OrtTensor] = {}
        self.bound: dict[str, DeviceTensor] = {}


class OrtRunner:
    """One graph in an ONNX Runtime session: `engine.GraphRunner`."""

    def __init__(self, session: Any, info: GraphInfo, provider: str, device: str, threads: int, version: str):
        self._session = session
        self._device = device
        self.info = info
        cached = {i.name for i in info.io.inputs if present(i.name) != i.name}
        self._caches = tuple(i for i in info.io.inputs if i.name in cached)
        self._inputs = {i.name: i for i in info.io.inputs if i.name not in cached}
        self._outputs = {o.name: o for o in info.io.outputs}
        self.effective: Mapping[str, object] = {
            "engine": "onnxruntime",
            "engine_version": version,
            "provider": provider,
            "providers": session.get_providers(),
            "threads": threads,
        }

    def new_cache(self, capacity: int, batch: int = 1) -> OrtCache:
        """See `engine.GraphRunner`."""
        try:
            binding = self._open_session().io_binding()
            cache = OrtCache(self, binding, capacity, batch)
            for tensor in self._caches:
                memory = self._allocate(tensor, _shape(tensor, {BATCH: batch, CAPACITY: capacity}))
                binding.bind_ortvalue_input(tensor.name, memory.value)
                binding.bind_ortvalue_output(present(tensor.name), memory.value)  # in place
                cache.tensors[tensor.name] = memory
        except EngineError:
            raise
        except Exception as cause:  # MemoryError, or onnxruntime's own
            raise EngineError(
                f"{self.info.file}: no memory for a cache of {capacity} slots ({_first_line(cause)}); "
                "lower max_new_tokens or max_length"
            ) from cause
        return cache

    def run(
        self, cache: KVCache, inputs: Mapping[str, IntArray | DeviceTensor], wanted: Sequence[str]
    ) -> list[DeviceTensor]:
        """See `engine.GraphRunner`."""
        session = self._open_session()
        if not isinstance(cache, OrtCache) or cache.runner is not self:
            raise ValueError("cache: was made by another runner")
        sizes = resolve_axes(
            self.info.io,
            {name: value.shape for name, value in inputs.items()},
            {BATCH: cache.batch, CAPACITY: cache.capacity},
        )
        if len(inputs) != len(self._inputs):
            raise ValueError(f"inputs: got {sorted(inputs)}, expected {sorted(self._inputs)}")
        if not wanted and not self._caches:
            return []  # nothing to fill and nothing to give: the simple family's draft keeps no context
        try:
            for name, value in inputs.items():
                if isinstance(value, np.ndarray):
                    tensor = self._buffer(cache, self._inputs[name], value.shape)
                    tensor.fill(value)
                else:
                    tensor = cast("OrtTensor", value)
                if cache.bound.get(name) is not tensor:
                    cache.binding.bind_ortvalue_input(name, tensor.value)
                    cache.bound[name] = tensor
            outputs: list[DeviceTensor] = []
            for name in wanted:
                info = self._outputs[name]
                tensor = self._buffer(cache, info, _shape(info, sizes))
                if cache.bound.get(name) is not tensor:
                    cache.binding.bind_ortvalue_output(name, tensor.value)
                    cache.bound[name] = tensor
                outputs.append(tensor)
            session.run_with_iobinding(cache.binding)
        except Exception as cause:  # onnxruntime's exceptions have no common base
            raise EngineError(f"{self.info.file}: the engine failed ({_first_line(cause)})") from cause
        return outputs

    def close(self) -> None:
        """See `engine.GraphRunner`."""
        self._session = None

    def _open_session(self) -> Any:
        if self._session is None:
            raise EngineError(f"{self.info.file}: the engine is closed; open the bundle again")
        return self._session

    def _buffer(self, cache: OrtCache, info: TensorInfo, shape: tuple[int, ...]) -> OrtTensor:
        key = (info.name, shape)
        found = cache.buffers.get(key)
        if found is None:
            found = cache.buffers[key] = self._allocate(info, shape)
        return found

    def _allocate(self, info: TensorInfo, shape: tuple[int, ...]) -> OrtTensor:
        """A tensor of zeros on the device."""
        ort = _onnxruntime()
        zeros = np.zeros(shape, _NUMPY[info.dtype])
        if info.dtype is DType.BFLOAT16:
            source = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(zeros, _ONNX_BFLOAT16)
            value = ort.OrtValue.ortvalue_from_shape_and_type(shape, _ONNX_BFLOAT16, self._device, 0)
            value.update_inplace(source)
            return OrtTensor(value, shape, None)
        value = ort.OrtValue.ortvalue_from_numpy(zeros, self._device, 0)
        return OrtTensor(value, shape, zeros if self._device == "cpu" else None)


def _shape(info: TensorInfo, sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(sizes[axis] if isinstance(axis, str) else axis for axis in info.axes)


def _onnxruntime() -> Any:
    try:
        import onnxruntime
    except ImportError as cause:
        raise ProviderError(
            "onnxruntime: not installed; pip install 'dflash-deploy[cpu]', or [cuda] for an NVIDIA GPU"
        ) from cause
    return onnxruntime


def _missing(name: str, why: str) -> ProviderError:
    provider = PROVIDERS[name]
    available = ", ".join(_onnxruntime().get_available_providers())
    return ProviderError(
        f"provider {name}: {provider.providers[0]} is not available ({why}; it has {available}); "
        f"{provider.remedy}"
    )


def _load_error(file: str, name: str, provider: Provider, cause: Exception) -> ProviderError | BundleError:
    kind, text = type(cause).__name__, _first_line(cause)
    if "is not a registered function/op" in text:
        return BundleError(
            f"{file}: uses an operator that neither this onnxruntime nor the file itself defines ({text}); "
            "update onnxruntime, or export again"
        )
    if kind in ("NotImplemented", "EPFail") or provider.providers[0] in str(cause):
        return ProviderError(f"provider {name}: cannot run {file} ({text}); choose another provider or dtype")
    return BundleError(f"{file}: cannot be loaded ({text}); copy the bundle whole or export again")


def _first_line(cause: BaseException) -> str:
    """onnxruntime's own words, without its error codes, signatures and file names before them."""
    lines = _NOISE.sub("", str(cause).strip()).splitlines()
    return lines[0] if lines and lines[0] else type(cause).__name__
