"""ONNX Runtime behind `engine.GraphRunner`: everything bound in place."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from ..bundle.errors import BundleError, EngineError, ProviderError, field_error
from ..bundle.files import safe_path
from ..bundle.labels import check_labels
from ..bundle.limits import ShapeLimits
from ..bundle.manifest import GraphInfo
from ..bundle.ort_options import session_options
from ..bundle.tensors import BATCH, CAPACITY, DType, TensorInfo, present
from ..bundle.tuned import WHOLE_CACHE
from .checks import check_integer
from .engine import DeviceTensor, HostArray, KVCache, resolve_axes
from .ort_cache import ONNX_TYPES, Block, Bound, OrtCache, OrtTensor, onnxruntime


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

_NOISE = re.compile(r"^.*\[ONNXRuntimeError\] : \d+ : \w+ : ", re.DOTALL)


def check_provider(name: str, dtype: DType) -> Provider:
    """Check that a provider is installed and computes a bundle's dtype, before anything large is read.

    Raises:
        ProviderError: it does not, with the remedy.
    """
    provider = PROVIDERS.get(name) if isinstance(name, str) else None
    if provider is None:
        raise field_error(ProviderError, "provider", name, "one of " + ", ".join(PROVIDERS))
    if dtype not in provider.dtypes:
        raise ProviderError(
            f"provider {name}: computes no {dtype.value}, and this bundle is {dtype.value}; export with "
            "`--dtype float32`, or choose another provider"
        )
    if provider.providers[0] not in onnxruntime().get_available_providers():
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
    return check_integer("threads", threads, f"1 to {most}, the CPUs of this machine", 1, most)


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
        BundleError: the graph cannot be read, or is not the one that `info` describes.
        RequestError: `threads` is not a positive number.
    """
    ort = onnxruntime()
    wanted = check_provider(provider, DType.FLOAT32)
    options = session_options(ort, effective_threads(threads))
    path = safe_path(Path(directory).absolute(), info.file)
    try:
        session = ort.InferenceSession(
            str(path), options, providers=list(wanted.providers), enable_fallback=0
        )
    except Exception as cause:  # onnxruntime's exceptions have no common base
        raise _load_error(info.file, provider, wanted, cause) from cause
    check_labels(info, session.get_modelmeta().custom_metadata_map)
    session.disable_fallback()
    if session.get_providers()[0] != wanted.providers[0]:
        raise _missing(provider, "onnxruntime could not start it and would compute on the CPU")
    return OrtRunner(session, info, provider, wanted.device, options.intra_op_num_threads, ort.__version__)


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

    @property
    def limits(self) -> ShapeLimits | None:
        """See `engine.GraphRunner`: any shape goes."""
        return None

    def new_cache(self, capacity: int, batch: int = 1) -> OrtCache:
        """See `engine.GraphRunner`."""
        self._open_session()
        try:
            return OrtCache(
                self, self._caches, capacity, batch, self._device, WHOLE_CACHE in self.info.passes
            )
        except Exception as cause:  # MemoryError, or onnxruntime's own
            raise EngineError(
                f"{self.info.file}: no memory for {batch} x {capacity} slots ({_first_line(cause)}); "
                "lower max_new_tokens, max_length or the number of requests at once"
            ) from cause

    def run(
        self,
        cache: KVCache,
        inputs: Mapping[str, HostArray | DeviceTensor],
        wanted: Sequence[str],
        lanes: range | None = None,
    ) -> list[DeviceTensor]:
        """See `engine.GraphRunner`."""
        session = self._open_session()
        if not isinstance(cache, OrtCache) or cache.runner is not self:
            raise ValueError("cache: was made by another runner")
        lanes = range(cache.batch) if lanes is None else lanes
        if not (lanes.step == 1 and 0 <= lanes.start < lanes.stop <= cache.batch):
            raise ValueError(f"lanes: got {lanes}, expected neighbours among {cache.batch}")
        sizes = resolve_axes(
            self.info.io,
            {name: value.shape for name, value in inputs.items()},
            {BATCH: len(lanes), CAPACITY: cache.slots},
        )
        if len(inputs) != len(self._inputs):
            raise ValueError(f"inputs: got {sorted(inputs)}, expected {sorted(self._inputs)}")
        if not wanted and not self._caches:
            return []  # nothing to fill and nothing to give: the simple family's draft keeps no context
        try:
            binding, bound = self._binding(session, cache, lanes, tuple(wanted))
            for name, value in inputs.items():
                if isinstance(value, np.ndarray):
                    tensor = self._buffer(cache, self._inputs[name], value.shape)
                    tensor.fill(value)
                else:
                    tensor = cast("OrtTensor", value)
                self._bind(binding.bind_input, bound, name, tensor)
            outputs: list[DeviceTensor] = []
            for name in wanted:
                info = self._outputs[name]
                tensor = self._buffer(cache, info, _shape(info, sizes))
                self._bind(binding.bind_output, bound, name, tensor)
                outputs.append(tensor)
            session.run_with_iobinding(binding)
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

    def _binding(
        self, session: Any, cache: OrtCache, lanes: range, wanted: tuple[str, ...]
    ) -> tuple[Any, Bound]:
        """What ONNX Runtime is told for these lanes: the caches' memory from the first of them on.

        One for every set of outputs: an output that was wanted once stays bound to its memory, which may be
        gone when it is not wanted again.
        """
        key = (lanes.start, lanes.stop, wanted)
        found = cache.bindings.get(key)
        if found is not None:
            return found
        binding = session.io_binding()
        for info in self._caches:
            tensor = cache.tensors[info.name]
            lane_bytes = math.prod(tensor.shape[1:]) * info.dtype.bytes
            place = (
                self._device,
                0,
                ONNX_TYPES[info.dtype],
                (len(lanes), *tensor.shape[1:]),
                tensor.block.address + lanes.start * lane_bytes,
            )
            binding.bind_input(info.name, *place)
            binding.bind_output(present(info.name), *place)  # in place
        cache.bindings[key] = (binding, {})
        return cache.bindings[key]

    def _bind(self, bind: Any, bound: Bound, name: str, tensor: OrtTensor) -> None:
        place = (tensor.block.address, tensor.shape)
        if bound.get(name) != place:
            bind(name, self._device, 0, ONNX_TYPES[tensor.block.dtype], tensor.shape, tensor.block.address)
            bound[name] = place

    def _buffer(self, cache: OrtCache, info: TensorInfo, shape: tuple[int, ...]) -> OrtTensor:
        elements = math.prod(shape)
        block = cache.buffers.get(info.name)
        if block is None or block.elements < elements:
            block = cache.buffers[info.name] = Block(info.dtype, elements, self._device)
        return OrtTensor(block, shape)


def _shape(info: TensorInfo, sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(sizes[axis] if isinstance(axis, str) else axis for axis in info.axes)


def _missing(name: str, why: str) -> ProviderError:
    provider = PROVIDERS[name]
    available = ", ".join(onnxruntime().get_available_providers())
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
