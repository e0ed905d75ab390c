"""TensorRT and TensorRT-RTX behind `engine.GraphRunner`: a pass is one copy up, one launch, one copy down.

trt_library     the Python module, its messages, from a bundle to a loaded engine
trt_interface   whether the engine is what the manifest says
trt_plan        from shapes to a profile
trt_memory      caches, inputs and outputs
trt_contexts    execution contexts, and passes on the stream
trt_graphs      captured passes
cuda_device     memory, stream, events
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..bundle.engines import engine_name
from ..bundle.errors import EngineError
from ..bundle.limits import ShapeLimits
from ..bundle.manifest import EngineInfo, GraphInfo, Manifest
from ..bundle.tensors import SLOTS, present
from .cuda_device import ALIGNMENT, Device, shared_device
from .dtypes import NUMPY
from .engine import DeviceTensor, HostArray, KVCache
from .trt_contexts import LOWER, Contexts
from .trt_graphs import CudaGraphs
from .trt_library import TrtLibrary, shared_library
from .trt_memory import Arena, Pool, Shape, TrtCache, TrtTensor, largest_axes, plan_layout, tensor_shape
from .trt_plan import PassPlan, plan_pass

_MOST_PLANS = 1024


def runner_from_engine(
    directory: Path,
    manifest: Manifest,
    graph: str,
    backend: str,
    *,
    cuda_graphs: CudaGraphs = CudaGraphs.ON,
    needed: ShapeLimits | None = None,
) -> TrtRunner:
    """Load the engine that was built from a graph.

    Args:
        directory: the bundle.
        manifest: the bundle's.
        graph: name of the graph.
        backend: ``tensorrt`` or ``tensorrt-rtx``.
        cuda_graphs: whether rounds are captured.
        needed: shapes it has to cover; None takes what it was built for.

    Raises:
        ProviderError: there is no GPU, no library or no cuda-python, or the engine is not for them.
        BundleError: there is no engine, or it is stale or damaged.
        EngineError: it cannot be loaded, or there is no memory for it.
    """
    device = shared_device()
    library = shared_library(backend)
    built, engine = library.load(Path(directory), manifest, graph, needed)
    return TrtRunner(library, device, engine, manifest.graphs[graph], built, cuda_graphs)


class TrtRunner:
    """One graph as an engine: `engine.GraphRunner`.

    Attributes:
        info: see `engine.GraphRunner`.
        effective: see `engine.GraphRunner`.
        limits: see `engine.GraphRunner`.
        graphs: the captured passes.
    """

    def __init__(
        self,
        library: TrtLibrary,
        device: Device,
        engine: Any,
        info: GraphInfo,
        built: EngineInfo,
        cuda_graphs: CudaGraphs,
    ):
        self.info = info
        self.limits: ShapeLimits | None = built.limits
        self._built = built
        self._name = engine_name(built.graph, built.backend)
        self._device = device
        self._caches = tuple(t.name for t in info.io.inputs if present(t.name) != t.name)
        self._inputs = {t.name: t for t in info.io.inputs if t.name not in self._caches}
        self._outputs = {t.name: t for t in info.io.outputs}
        self._pool = Pool()
        self._plans: dict[tuple[Shape, ...], PassPlan] = {}
        with device.lock:
            self._contexts = Contexts(library, device, engine, info.io, built, cuda_graphs)
            self.graphs = self._contexts.graphs
            numbers = np.arange(built.limits.capacity, dtype=np.int64)
            self._slots = device.allocate(numbers.nbytes, f"slot numbers of engine {self._name}")
            device.upload(self._slots.address, numbers.ctypes.data, numbers.nbytes)
            device.synchronize()
        self.effective: Mapping[str, object] = {
            "engine": built.backend,
            "engine_version": library.version,
            "provider": "cuda",
            "providers": [device.gpu.name],
            "threads": None,
            "cuda_graphs": self.graphs.mode.value,
            "profiles": list(built.profiles),
            "flags": [flag.value for flag in built.flags],
        }

    def new_cache(self, capacity: int, batch: int = 1) -> TrtCache:
        """See `engine.GraphRunner`. An engine's caches have one size; `limits` says which."""
        self._check_open()
        limits = self._built.limits
        if capacity != limits.capacity or not 1 <= batch <= limits.batch:
            raise EngineError(
                f"engine {self._name}: got a cache of {batch} x {capacity} slots, expected at most "
                f"{limits.batch} x exactly {limits.capacity}, which it was built for; build it again with "
                "larger limits"
            )
        arena = self._pool.take(batch) or self._new_arena(batch)
        return TrtCache(self, self._device, self._pool, arena, capacity)

    def run(
        self,
        cache: KVCache,
        inputs: Mapping[str, HostArray | DeviceTensor],
        wanted: Sequence[str],
        lanes: range | None = None,
    ) -> list[DeviceTensor]:
        """See `engine.GraphRunner`."""
        self._check_open()
        if not isinstance(cache, TrtCache) or cache.runner is not self:
            raise ValueError("cache: was made by another runner")
        lanes = range(cache.batch) if lanes is None else lanes
        if not (lanes.step == 1 and 0 <= lanes.start < lanes.stop <= cache.batch):
            raise ValueError(f"lanes: got {lanes}, expected neighbours among {cache.batch}")
        if inputs.keys() != self._inputs.keys():
            raise ValueError(f"inputs: got {sorted(inputs)}, expected {sorted(self._inputs)}")
        plan = self._plan(inputs, cache, len(lanes))
        if not wanted and not self._caches:
            return []  # nothing to fill and nothing to give: the simple family's draft keeps no context
        arena = cache.arena
        self._device.wait(arena.event)  # page-locked memory is free again once the last pass has read it
        staged, elsewhere, uploads = self._stage(arena, inputs)
        # All that addresses and shapes depend on: where the arena lies, what of it, and what lies elsewhere.
        shapes = tuple(plan.inputs[name] for name in self._inputs)
        key = (plan.profile, shapes, arena.memory.address, arena.batch, lanes.start)
        with self._device.lock:
            self._check_open()
            try:
                if staged:
                    self._device.upload(arena.memory.address, arena.pinned.address, staged)
                for address, values in uploads:
                    self._device.upload(address, values.ctypes.data, values.nbytes)
                self._contexts.put(
                    plan,
                    (*key, *elsewhere.values()),
                    lambda: {**self._addresses(arena, lanes.start), **elsewhere},
                )
                self._fetch(arena, plan, wanted)
            finally:  # what was put on the stream before a failure reads page-locked memory, too
                with contextlib.suppress(EngineError):
                    self._device.record(arena.event)
        if uploads:
            self._device.wait(arena.event)  # the arrays are the caller's
        small = arena.layout.small
        return [TrtTensor(cache, self._outputs[name], plan.outputs[name], name in small) for name in wanted]

    def close(self) -> None:
        """See `engine.GraphRunner`."""
        with self._device.lock:
            if self._contexts.closed:
                return
            self._device.synchronize()
            self._contexts.close()
            self._pool.close()
            self._device.discard(self._slots)
            self._device.collect()

    # Parts of a pass.

    def _plan(self, inputs: Mapping[str, HostArray | DeviceTensor], cache: TrtCache, lanes: int) -> PassPlan:
        shapes = {name: tuple(value.shape) for name, value in inputs.items()}
        key = (*(shapes[name] for name in self._inputs), (lanes,))
        found = self._plans.get(key)
        if found is None:
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            found = plan_pass(self.info.io, self._built, shapes, lanes, cache.capacity)
            self._plans[key] = found
        return found

    def _stage(
        self, arena: Arena, inputs: Mapping[str, HostArray | DeviceTensor]
    ) -> tuple[int, dict[str, int], list[tuple[int, HostArray]]]:
        """Put host inputs into page-locked memory.

        Returns:
            How many bytes of it go up; where inputs lie that are not in their place in the arena; and arrays
            that go up by themselves, with their addresses.
        """
        staged, elsewhere = 0, {}
        uploads: list[tuple[int, HostArray]] = []
        for name, value in inputs.items():
            if name == SLOTS:
                elsewhere[name] = self._slots.address
            elif isinstance(value, TrtTensor) and value.cache.device is self._device:
                elsewhere[name] = value.address
            elif isinstance(value, np.ndarray):
                values = np.ascontiguousarray(value, NUMPY[self._inputs[name].dtype])
                if name in arena.layout.staged:
                    staged = max(staged, arena.stage(name, values))
                else:  # features, when they do not come from the target's engine
                    elsewhere[name] = arena.elsewhere(name, self._most_bytes(name, arena.batch))
                    uploads.append((elsewhere[name], values))
            else:
                raise ValueError(f"input {name}: got a tensor of another engine or device")
        return staged, elsewhere, uploads

    def _addresses(self, arena: Arena, lane: int) -> dict[str, int]:
        """Where every tensor lies in an arena, seen from a lane on."""
        found = {name: arena.address(name) for name in arena.layout.offsets}
        for name, (tensor, shape) in arena.layout.caches.items():
            offset = lane * math.prod(shape[1:]) * tensor.dtype.bytes
            if offset % ALIGNMENT:
                raise EngineError(
                    f"engine {self._name}: lane {lane} of {name} would begin at byte {offset}, expected a "
                    f"multiple of {ALIGNMENT}; build the engine again, capacities are rounded for this now"
                )
            found[name] = found[present(name)] = arena.address(name) + offset
        return found

    def _fetch(self, arena: Arena, plan: PassPlan, wanted: Sequence[str]) -> None:
        """Put one copy of the small outputs that are wanted on the stream."""
        small = [name for name in wanted if name in arena.layout.small]
        if small:
            offsets = arena.layout.offsets
            first = min(offsets[name] for name in small)
            sizes = {n: math.prod(plan.outputs[n]) * self._outputs[n].dtype.bytes for n in small}
            end = max(offsets[name] + sizes[name] for name in small)
            self._device.download(arena.pinned.address + first, arena.memory.address + first, end - first)

    # Memory.

    def _new_arena(self, batch: int) -> Arena:
        layout = plan_layout(self.info.io, largest_axes(self._built.profiles, batch))
        purpose = f"{batch} x {self._built.limits.capacity} slots of engine {self._name}; {LOWER}"
        try:
            return Arena(self._device, layout, batch, purpose)
        except EngineError:
            if not self._pool.drain():
                raise
        return Arena(self._device, layout, batch, purpose)

    def _most_bytes(self, name: str, batch: int) -> int:
        tensor = self._inputs[name]
        return math.prod(tensor_shape(tensor, largest_axes(self._built.profiles, batch))) * tensor.dtype.bytes

    def _check_open(self) -> None:
        if self._contexts.closed:
            raise EngineError(f"engine {self._name}: is closed; open the bundle again")
