"""Execution contexts of one engine: shapes, addresses and working memory, and the passes put on the stream.

Whoever calls in here holds the device's lock. Every answer of the library is looked at: False and None become
an `EngineError` with what the library logged.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

from ..bundle.engines import engine_name
from ..bundle.errors import EngineError
from ..bundle.manifest import EngineFlag, EngineInfo
from ..bundle.tensors import GraphIO
from .cuda_device import Device, Memory
from .kernel_cache import kernel_file, load_kernels, save_kernels
from .trt_graphs import CudaGraphs, GraphStore
from .trt_interface import check_interface
from .trt_library import TrtLibrary
from .trt_memory import Shape
from .trt_plan import PassPlan

Addresses = Mapping[str, int]


class _Context:
    """An execution context, and what it was told last: the library is told what changes only."""

    def __init__(self, raw: Any):
        self.raw = raw
        self.shapes: dict[str, Shape] = {}
        self.addresses: dict[str, int] = {}


class Contexts:
    """An engine and its contexts: one for each profile, and one for each captured pass.

    Attributes:
        graphs: the captured passes.
    """

    def __init__(
        self,
        library: TrtLibrary,
        device: Device,
        engine: Any,
        io: GraphIO,
        built: EngineInfo,
        cuda_graphs: CudaGraphs,
    ):
        """Take over an engine.

        Raises:
            ProviderError: it is not what the manifest says.
            EngineError: there is no memory for it, or the library refuses something.
        """
        self._library = library
        self._device = device
        self._engine: Any = engine
        self._built = built
        self._name = engine_name(built.graph, built.backend)
        self._contexts: dict[int, _Context] = {}
        self._moving = check_interface(engine, library.module, io, built)
        # A pass that streams weights waits for them, and a graph cannot wait.
        streams = self._guarded(self._stream_weights)
        self.graphs = GraphStore(device, self._name, CudaGraphs.OFF if streams else cuda_graphs)
        self._kernels_file = kernel_file(built, device.gpu.compute_capability)
        self._kernels = self._guarded(self._runtime_cache)
        self._working = self._allocate(self._guarded(self._working_bytes))

    @property
    def closed(self) -> bool:
        """Whether the engine is gone."""
        return self._engine is None

    def close(self) -> None:
        """Give everything back, in the order that the library wants; the stream must be empty."""
        self.graphs.clear()
        self._contexts.clear()
        if self._kernels is not None:
            save_kernels(self._kernels, self._kernels_file)
            self._kernels = None
        self._engine = None
        self._device.discard(self._working)

    def put(self, plan: PassPlan, key: Hashable, addresses: Callable[[], Addresses]) -> None:
        """Put a pass on the stream: replayed, captured now, or as it is.

        Args:
            plan: its shapes.
            key: all that tells its addresses and shapes from those of other passes.
            addresses: gives the address of every tensor, if it is asked.

        Raises:
            EngineError: the library failed.
        """
        if not (self.graphs.active and plan.repeats):
            self._run(self._shared(plan.profile), plan, addresses())
        elif not self.graphs.replay(key):
            if self.graphs.due(key):
                self._run_and_capture(plan, key, addresses())
            else:
                self._run(self._shared(plan.profile), plan, addresses())

    def _run_and_capture(self, plan: PassPlan, key: Hashable, addresses: Addresses) -> None:
        """Run a pass in a context of its own and capture it there."""
        try:
            own = self._new(plan.profile, repeats=True)
        except EngineError as cause:
            self.graphs.give_up(str(cause))
            self._run(self._shared(plan.profile), plan, addresses)
            return
        # The first pass of a shape does what must not be captured: it updates what depends on shapes.
        self._run(own, plan, addresses)
        self.graphs.capture(key, own.raw, lambda: self._enqueue(own))

    def _run(self, context: _Context, plan: PassPlan, addresses: Addresses) -> None:
        """Tell a context the shapes and addresses of a pass, and put it on the stream."""
        self._library.reasons()  # what it said before is about something else
        self._guarded(lambda: self._tell(context, plan, addresses))
        self._enqueue(context)

    def _tell(self, context: _Context, plan: PassPlan, addresses: Addresses) -> None:
        raw, changed = context.raw, False
        for name in self._moving:
            shape = plan.inputs[name]
            if context.shapes.get(name) != shape:
                context.shapes.pop(name, None)
                self._must(raw.set_input_shape(name, shape), f"it takes no {name} of shape {shape}")
                context.shapes[name] = shape
                changed = True
        for name, address in addresses.items():
            if context.addresses.get(name) != address:
                context.addresses.pop(name, None)
                self._must(raw.set_tensor_address(name, address), f"it takes no address for {name}")
                context.addresses[name] = address
        if not changed:
            return
        for name, shape in plan.outputs.items():  # what it will write must fit into the memory it was given
            got = tuple(raw.get_tensor_shape(name))
            if got != shape:
                context.shapes.clear()
                raise self._failed(f"{name} would have shape {got}, expected {shape}")
        need = int(raw.update_device_memory_size_for_shapes())
        if need > self._working.bytes:
            self._grow(need, context)

    def _enqueue(self, context: _Context) -> None:
        done = self._guarded(lambda: context.raw.execute_async_v3(self._device.stream))
        self._must(done, "it did not take the pass")

    # Setting up.

    def _shared(self, profile: int) -> _Context:
        """The context of a profile's passes that are not captured."""
        found = self._contexts.get(profile)
        if found is None:
            found = self._contexts[profile] = self._new(profile, repeats=False)
        return found

    def _new(self, profile: int, *, repeats: bool) -> _Context:
        """Make a context whose profile never changes.

        Args:
            profile: index of the profile.
            repeats: it is for one shape that comes again and again. Where kernels are compiled while running,
                the ones for this shape are compiled at once, and not in the background.
        """
        module = self._library.module
        strategy = module.ExecutionContextAllocationStrategy.USER_MANAGED

        def make() -> Any:
            if self._kernels is None:
                raw = self._engine.create_execution_context(strategy)
            else:
                kernels = module.DynamicShapesKernelSpecializationStrategy
                config = self._engine.create_runtime_config()
                self._must(config, "it gives no runtime configuration")
                config.set_execution_context_allocation_strategy(strategy)
                config.dynamic_shapes_kernel_specialization_strategy = (
                    kernels.EAGER if repeats else kernels.LAZY
                )
                self._must(config.set_runtime_cache(self._kernels), "it takes no runtime cache")
                raw = self._engine.create_execution_context(config)
            self._must(raw is not None, "it gives no execution context")
            self._must(
                raw.set_optimization_profile_async(profile, self._device.stream),
                f"it does not take its profile number {profile}",
            )
            raw.set_device_memory(self._working.address, self._working.bytes)
            return raw

        self._library.reasons()
        return _Context(self._guarded(make))

    def _runtime_cache(self) -> Any:
        """Kernels compiled so far, for all contexts; None where none are compiled while running."""
        if not hasattr(self._library.module, "IRuntimeCache"):
            return None
        cache = self._engine.create_runtime_config().create_runtime_cache()
        self._must(cache is not None, "it gives no runtime cache")
        load_kernels(cache, self._kernels_file)
        return cache

    def _stream_weights(self) -> bool:
        """Let the library decide how many weights stay on the GPU; says whether any do not."""
        if EngineFlag.WEIGHT_STREAMING not in self._built.flags:
            return False
        budget = int(self._engine.get_weight_streaming_automatic_budget())
        self._engine.weight_streaming_budget_v2 = budget
        self._must(
            self._engine.weight_streaming_budget_v2 == budget, f"it keeps no {budget} bytes of weights"
        )
        return budget < int(self._engine.streamable_weights_size)

    def _working_bytes(self) -> int:
        """Working memory of the profile that needs most."""
        size = self._engine.get_device_memory_size_for_profile_v2
        return max(int(size(index)) for index in range(len(self._built.profiles)))

    def _allocate(self, size: int) -> Memory:
        return self._device.allocate(size, f"working memory of engine {self._name}; {LOWER}")

    def _grow(self, need: int, context: _Context) -> None:
        """Get more working memory: a shape needs more than its profile was said to need."""
        self._device.synchronize()
        self.graphs.clear()  # the old address is in them
        self._device.discard(self._working)
        self._working = self._allocate(need)
        for one in (context, *self._contexts.values()):
            one.raw.set_device_memory(self._working.address, self._working.bytes)

    # Errors.

    def _guarded(self, call: Callable[[], Any]) -> Any:
        """Call the library. Bindings raise what they like; here it becomes an `EngineError`."""
        try:
            return call()
        except EngineError:
            raise
        except Exception as cause:
            raise self._failed(str(cause)) from cause

    def _must(self, good: object, reason: str) -> None:
        if not good:
            raise self._failed(reason)

    def _failed(self, reason: str) -> EngineError:
        return self._library.error(
            f"engine {self._name}: the engine failed",
            self._library.reasons(reason),
            "the request is lost; open the bundle again if it goes on",
        )


LOWER = (
    "lower the number of requests at once, or build the engine again with a smaller --max-context, "
    "--max-prompt or --max-batch"
)
