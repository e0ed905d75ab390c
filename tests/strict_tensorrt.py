"""A strict stand-in for the part of the modules `tensorrt` and `tensorrt_rtx` that the package calls.

It is not TensorRT: engines are written by `strict_build`, and a pass is computed by ONNX Runtime, in memory
of `strict_cuda`, when the stream is waited for. What it does is check: names, shapes within the profile, an
address for every tensor, in live memory that is large enough and aligned, working memory handed over, caches
updated in place, nothing written twice, and that a context stays as it was when a pass was captured from it.
What the library answers with False or None is answered so; what it leaves undefined is a `Violation`.

Names and parameters are the real ones; `test_strict_stand_ins.py` compares them with the installed package.
"""

from __future__ import annotations

import enum
import functools
import gc
import hashlib
import inspect
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnxruntime
import pytest

from dflash_deploy.bundle.engines import engine_name
from dflash_deploy.bundle.gpu import Gpu
from dflash_deploy.bundle.manifest import EngineFlag, EngineInfo, Manifest, file_info, manifest_to_file
from dflash_deploy.bundle.profiles import ProfileSet, fixed_axes, input_shapes, plan_profiles
from dflash_deploy.bundle.tensors import DRAFT, TARGET, DType, GraphIO, TensorInfo, present
from dflash_deploy.exporter.engines.options import BuildOptions
from dflash_deploy.runtime import cuda_device, trt_library
from strict_cuda import ALIGNMENT, Node, Stream, StrictCuda, Violation

MAGIC = b"STRICT STAND-IN ENGINE\0"
HEADER_BYTES = 64
VERSION = "11.4.0.106"
RTX_VERSION = "1.7.1.116"
CAPABILITY = "8.9"
WORKING_BYTES = 1 << 16
STREAMABLE_BYTES = 1 << 20


class Severity(enum.IntEnum):
    INTERNAL_ERROR = 0
    ERROR = 1
    WARNING = 2
    INFO = 3
    VERBOSE = 4


class TensorIOMode(enum.Enum):
    NONE = 0
    INPUT = 1
    OUTPUT = 2


class TensorLocation(enum.Enum):
    DEVICE = 0
    HOST = 1


class DataType(enum.Enum):
    FLOAT = "float32"
    HALF = "float16"
    BF16 = "bfloat16"
    INT64 = "int64"


class ExecutionContextAllocationStrategy(enum.Enum):
    STATIC = 0
    ON_PROFILE_CHANGE = 1
    USER_MANAGED = 2


class DynamicShapesKernelSpecializationStrategy(enum.Enum):
    LAZY = 0
    EAGER = 1
    NONE = 2


class EngineValidity(enum.IntEnum):
    VALID = 0
    SUBOPTIMAL = 1
    INVALID = 2


class EngineInvalidityDiagnostics(enum.IntFlag):
    VERSION_MISMATCH = 1
    UNSUPPORTED_CC = 2
    OLD_CUDA_DRIVER = 4
    OLD_CUDA_RUNTIME = 8
    INSUFFICIENT_GPU_MEMORY = 16
    MALFORMED_ENGINE = 32
    CUDA_ERROR = 64


class World:
    """What the stand-ins of one test share.

    Attributes:
        backend: which library stands in.
        cuda: the other stand-in.
        module: what `import tensorrt` or `import tensorrt_rtx` gives.
        faults: by ``Class.method``: a function called in place of the method, with its arguments.
        passes: how often ONNX Runtime computed a pass, by graph.
        contexts: execution contexts made.
    """

    def __init__(self, backend: str = "tensorrt-rtx", **cuda: Any):
        self.backend = backend
        self.rtx = backend == "tensorrt-rtx"
        self.version = RTX_VERSION if self.rtx else VERSION
        self.cuda = StrictCuda(**cuda)
        self.faults: dict[str, Callable[..., Any]] = {}
        self.passes: dict[str, int] = {}
        self.contexts: list[IExecutionContext] = []
        self.module = _module(self)


_world: World | None = None


def world() -> World:
    assert _world is not None, "no stand-in is installed"
    return _world


def _faulty(method: Callable[..., Any]) -> Callable[..., Any]:
    """Let a test's fault take the place of a method."""

    @functools.wraps(method)
    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        fault = world().faults.get(method.__qualname__)
        return method(self, *args, **kwargs) if fault is None else fault(self, *args, **kwargs)

    return called


class ILogger:
    INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = Severity
    Severity = Severity

    def __init__(self) -> None:
        self._ready = True

    def log(self, severity, msg):
        raise NotImplementedError


def _log(logger: ILogger, text: str) -> None:
    logger.log(Severity.ERROR, text)


class Runtime:
    __slots__ = ("_logger",)

    def __init__(self, logger):
        if not getattr(logger, "_ready", False):
            raise TypeError("ILogger.__init__() must be called when overriding __init__")
        self._logger = logger

    @property
    def engine_header_size(self) -> int:
        return HEADER_BYTES

    @_faulty
    def get_engine_validity(self, buffer):
        if len(buffer) != HEADER_BYTES or not bytes(buffer).startswith(MAGIC):
            return EngineValidity.INVALID, EngineInvalidityDiagnostics.MALFORMED_ENGINE
        version = bytes(buffer)[len(MAGIC) :].rstrip(b"\0").decode()
        if version != world().version:
            return EngineValidity.INVALID, EngineInvalidityDiagnostics.VERSION_MISMATCH
        return EngineValidity.VALID, EngineInvalidityDiagnostics(0)

    @_faulty
    def deserialize_cuda_engine(self, serialized_engine):
        plan = bytes(serialized_engine)
        if not plan.startswith(MAGIC):
            _log(self._logger, "Serialization assertion magic failed")
            return None
        data = json.loads(plan[HEADER_BYTES:])
        if data["version"] != world().version:
            _log(self._logger, f"version tag does not match: {data['version']} and {world().version}")
            return None
        return ICudaEngine(data, self._logger)


class ICudaEngine:
    __slots__ = ("_budget", "_contexts", "_io", "_logger", "_model", "_plan")

    def __init__(self, plan: dict[str, Any], logger: ILogger):
        self._plan = plan
        self._logger = logger
        self._io = {name: (mode, _tensor(name, *rest)) for name, mode, *rest in plan["tensors"]}
        self._model: str | None = None if plan["stripped"] else plan["model"]
        self._budget = STREAMABLE_BYTES
        self._contexts = 0

    @property
    def num_io_tensors(self):
        return len(self._io)

    @property
    def num_optimization_profiles(self):
        return len(self._plan["profiles"])

    @property
    def refittable(self):
        return self._plan["stripped"]

    def get_tensor_name(self, index):
        return list(self._io)[index]

    def get_tensor_mode(self, name):
        return TensorIOMode[self._io[name][0]] if name in self._io else TensorIOMode.NONE

    def get_tensor_dtype(self, name):
        return DataType(self._io[name][1].dtype.value)

    def get_tensor_location(self, name):
        return TensorLocation.DEVICE

    def get_tensor_shape(self, name):
        return [-1 if isinstance(axis, str) else axis for axis in self._io[name][1].axes]

    def get_tensor_profile_shape(self, name, profile_index):
        return self._plan["profiles"][profile_index][name]

    @_faulty
    def get_aliased_input_tensor(self, name):
        return next((past for past in self._io if present(past) == name != past), None)

    @_faulty
    def get_device_memory_size_for_profile_v2(self, profile_index):
        return WORKING_BYTES + 256 * profile_index

    def get_weight_streaming_automatic_budget(self):
        return STREAMABLE_BYTES // 4

    @property
    def streamable_weights_size(self):
        return STREAMABLE_BYTES if self._plan["streaming"] else 0

    @property
    def weight_streaming_budget_v2(self):
        return self._budget

    @weight_streaming_budget_v2.setter
    def weight_streaming_budget_v2(self, value):
        if self._contexts:
            raise Violation("weight streaming budget: set while there are execution contexts")
        if not self._plan["streaming"]:
            raise Violation("weight streaming budget: the engine was not built for it")
        self._budget = value

    @property
    def _streams(self) -> bool:
        return self._plan["streaming"] and self._budget < STREAMABLE_BYTES

    @_faulty
    def create_runtime_config(self):
        if not world().rtx:
            raise Violation("runtime configuration: TensorRT's own has nothing that the package sets")
        return IRuntimeConfig()

    @_faulty
    def create_execution_context(self, *args):
        (how,) = args
        if isinstance(how, IRuntimeConfig):
            if not world().rtx:
                raise TypeError("create_execution_context(): incompatible function arguments")
            strategy, kernels = how._strategy, how.dynamic_shapes_kernel_specialization_strategy
            cache = how._cache
            if cache is None:
                raise Violation("context: shares no compiled kernels with the others")
        elif isinstance(how, ExecutionContextAllocationStrategy):
            strategy, kernels, cache = how, DynamicShapesKernelSpecializationStrategy.LAZY, None
        else:
            raise TypeError("create_execution_context(): incompatible function arguments")
        if self._plan["user_allocation"] and strategy is not ExecutionContextAllocationStrategy.USER_MANAGED:
            _log(self._logger, "engine was built with REQUIRE_USER_ALLOCATION")
            return None
        self._contexts += 1
        context = (IExecutionContext if world().rtx else _PlainContext)(self, strategy, kernels, cache)
        world().contexts.append(context)
        return context


class IRuntimeCache:
    """Kept kernels are a list of shapes here."""

    __slots__ = ("_shapes",)

    def __init__(self) -> None:
        self._shapes: set[str] = set()

    @_faulty
    def deserialize(self, blob):
        if not bytes(blob).startswith(MAGIC):
            return False
        self._shapes = set(json.loads(bytes(blob)[len(MAGIC) :]))
        return True

    @_faulty
    def serialize(self):
        return memoryview(MAGIC + json.dumps(sorted(self._shapes)).encode())


class IRuntimeConfig:
    __slots__ = ("_cache", "_strategy", "dynamic_shapes_kernel_specialization_strategy")

    def __init__(self) -> None:
        self._strategy = ExecutionContextAllocationStrategy.STATIC
        self._cache: IRuntimeCache | None = None
        self.dynamic_shapes_kernel_specialization_strategy = DynamicShapesKernelSpecializationStrategy.LAZY

    def set_execution_context_allocation_strategy(self, strategy):
        self._strategy = strategy

    def create_runtime_cache(self):
        return IRuntimeCache()

    def set_runtime_cache(self, cache):
        if not isinstance(cache, IRuntimeCache):
            raise TypeError("set_runtime_cache(): incompatible function arguments")
        self._cache = cache
        return True


class IExecutionContext:
    __slots__ = (
        "_addresses", "_cache", "_changes", "_engine", "_kernels", "_logger", "_profile", "_ran", "_shapes",
        "_strategy", "_working",
    )  # fmt: skip

    def __init__(self, engine: ICudaEngine, strategy: Any, kernels: Any, cache: IRuntimeCache | None):
        self._engine = engine
        self._cache = cache
        self._logger = engine._logger
        self._strategy = strategy
        self._kernels = kernels
        self._profile = 0
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        self._working: tuple[int, int] | None = None
        self._changes = 0
        self._ran: dict[str, tuple[int, ...]] | None = None  # shapes of the last pass that really ran

    @_faulty
    def set_optimization_profile_async(self, profile_index, stream_handle):
        world().cuda.stream(stream_handle)
        if not 0 <= profile_index < self._engine.num_optimization_profiles:
            _log(self._logger, f"profile {profile_index} does not exist")
            return False
        self._profile, self._shapes, self._ran = profile_index, {}, None
        self._changes += 1
        return True

    def set_device_memory(self, memory, size):
        if self._strategy is not ExecutionContextAllocationStrategy.USER_MANAGED:
            raise Violation("working memory: the context has its own")
        if memory % ALIGNMENT:
            raise Violation(f"working memory: {memory:#x} is not aligned")
        world().cuda.memory(memory, size, "working memory")
        self._working = (memory, size)
        self._changes += 1

    @_faulty
    def set_input_shape(self, name, shape):
        mode, tensor = self._engine._io[name]
        assert mode == "INPUT"
        if not isinstance(shape, tuple | list) or not all(type(size) is int for size in shape):
            raise TypeError(f"set_input_shape(): incompatible function arguments: {shape}")
        if len(shape) != len(tensor.axes):
            _log(self._logger, f"{name}: rank {len(shape)}, expected {len(tensor.axes)}")
            return False
        least, _, most = self._engine.get_tensor_profile_shape(name, self._profile)
        if not all(low <= size <= high for low, size, high in zip(least, shape, most, strict=True)):
            _log(self._logger, f"{name}: {shape} is outside of profile {self._profile}, {least} to {most}")
            return False
        if self._shapes.get(name) != tuple(shape):
            self._changes += 1
        self._shapes[name] = tuple(shape)
        return True

    @_faulty
    def set_tensor_address(self, name, memory):
        if name not in self._engine._io:
            _log(self._logger, f"{name}: no such tensor")
            return False
        if type(memory) is not int:
            raise TypeError("set_tensor_address(): incompatible function arguments")
        if memory % ALIGNMENT:
            raise Violation(f"{name}: address {memory:#x} is not aligned")
        if self._addresses.get(name) != memory:
            self._changes += 1
        self._addresses[name] = memory
        return True

    @_faulty
    def get_tensor_shape(self, name):
        return list(self._shape(name))

    @_faulty
    def update_device_memory_size_for_shapes(self):
        self._sizes()
        return WORKING_BYTES

    def is_stream_capturable(self, stream):
        world().cuda.stream(stream)
        return not self._engine._streams

    @_faulty
    def execute_async_v3(self, stream_handle):
        stream = world().cuda.stream(stream_handle)
        if self._working is None:
            raise Violation("pass: no working memory was handed over")
        self._sizes()  # every shape has been said
        shapes = {name: self._shape(name) for name in self._engine._io}
        if self._engine._model is None:
            raise Violation("pass: the engine has no weights")
        if stream.captured is not None and not self._may_capture(stream, shapes):
            return False
        if stream.captured is None:
            self._ran = shapes
            if self._cache is not None:
                self._cache._shapes.add(str(shapes))
        addresses, working, changes = dict(self._addresses), self._working, self._changes

        def check() -> None:
            _check_memory(self._engine._io, shapes, addresses, working)
            if stream.captured is None and changes != self._changes and node.name == "captured pass":
                raise Violation("replay: the context is not as it was when the pass was captured")

        def work() -> None:
            check()
            _compute(self._engine._plan["graph"], self._engine._model, self._engine._io, shapes, addresses)
            world().cuda.memory(*working, "working memory")[:] = 0xDD

        node = Node("pass" if stream.captured is None else "captured pass", work, check)
        world().cuda.put(stream_handle, node)
        return True

    def _may_capture(self, stream: Stream, shapes: dict[str, tuple[int, ...]]) -> bool:
        if self._ran != shapes:
            raise Violation("capture: the context has not run these shapes, its updates would be captured")
        if world().rtx and self._kernels is not DynamicShapesKernelSpecializationStrategy.EAGER:
            raise Violation("capture: kernels for these shapes may still be compiling")
        if self._engine._streams:
            _log(self._logger, "operation not permitted when stream is capturing")
            stream.invalid = True
            return False
        return True

    def _sizes(self) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for name, (mode, tensor) in self._engine._io.items():
            if mode != "INPUT" or not any(isinstance(axis, str) for axis in tensor.axes):
                continue
            if name not in self._shapes:
                raise Violation(f"{name}: no shape was set")
            for axis, size in zip(tensor.axes, self._shapes[name], strict=True):
                if isinstance(axis, str) and sizes.setdefault(axis, size) != size:
                    raise Violation(f"{axis}: {sizes[axis]} in one input, {size} in {name}")
        return sizes

    def _shape(self, name: str) -> tuple[int, ...]:
        sizes = self._sizes()
        axes = self._engine._io[name][1].axes
        return tuple(sizes[axis] if isinstance(axis, str) else axis for axis in axes)


class ParserError:
    __slots__ = ("_text",)

    def __init__(self, text: str):
        self._text = text

    def desc(self):
        return self._text


class Refitter:
    __slots__ = ("_engine", "_found", "_logger")

    def __init__(self, engine, logger):
        self._engine, self._logger, self._found = engine, logger, None

    @_faulty
    def get_missing_weights(self):
        return [] if self._found is not None else ["embed_tokens.weight", "norm.weight"]

    @_faulty
    def refit_cuda_engine(self):
        if not self._engine.refittable or self._found is None:
            return False
        self._engine._model = self._found
        return True


class OnnxParserRefitter:
    __slots__ = ("_errors", "_refitter")

    def __init__(self, refitter, logger):
        self._refitter, self._errors = refitter, []

    @property
    def num_errors(self):
        return len(self._errors)

    def get_error(self, index):
        return ParserError(self._errors[index])

    @_faulty
    def refit_from_file(self, model):
        if not Path(model).is_absolute():
            raise Violation("refit: a relative path is looked for in the working directory")
        if model != self._refitter._engine._plan["model"]:
            self._errors.append(f"{model} is another graph")
            return False
        self._refitter._found = model
        return True


SHARED = (
    ILogger, Runtime, ICudaEngine, IExecutionContext, IRuntimeConfig, ParserError, Refitter,
    OnnxParserRefitter, TensorIOMode, TensorLocation, DataType, ExecutionContextAllocationStrategy,
)  # fmt: skip
ONLY_RTX = (
    IRuntimeCache, DynamicShapesKernelSpecializationStrategy, EngineValidity, EngineInvalidityDiagnostics,
)  # fmt: skip


class _PlainRuntime(Runtime):
    """TensorRT's own has no validity check."""

    __slots__ = ()
    get_engine_validity: Any = property()


class _PlainContext(IExecutionContext):
    """Nor can its contexts be asked beforehand whether a pass can be captured."""

    __slots__ = ()
    is_stream_capturable: Any = property()


def _module(found: World) -> Any:
    classes = {one.__name__: one for one in (*SHARED, *(ONLY_RTX if found.rtx else ()))}
    if not found.rtx:
        classes["Runtime"] = _PlainRuntime
    name = "tensorrt_rtx" if found.rtx else "tensorrt"
    return SimpleNamespace(__name__=name, __version__=found.version, **classes)


def _tensor(name: str, dtype: str, axes: list[Any]) -> TensorInfo:
    return TensorInfo(name, DType(dtype), tuple(axes))


def _check_memory(
    io: dict[str, tuple[str, TensorInfo]],
    shapes: dict[str, tuple[int, ...]],
    addresses: dict[str, int],
    working: tuple[int, int],
) -> None:
    """Every tensor lies in live device memory; what is written lies in memory of its own."""
    spans = [("working memory", *working)]
    for name, (mode, tensor) in io.items():
        if name not in addresses:
            raise Violation(f"{name}: no address was set")
        size = math.prod(shapes[name]) * tensor.dtype.bytes
        world().cuda.memory(addresses[name], size, name)
        past = next((p for p in io if present(p) == name != p), None)
        if past is not None:
            if addresses[past] != addresses[name]:
                raise Violation(f"{name}: is not where {past} is")
            continue
        if mode == "OUTPUT" or present(name) != name:
            spans.append((name, addresses[name], size))
    spans.sort(key=lambda span: span[1])
    for (one, start, size), (other, begin, _) in itertools.pairwise(spans):
        if start + size > begin:
            raise Violation(f"{one} and {other} overlap")


@functools.lru_cache(maxsize=32)
def _session(model: str) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


_ELEMENTS = {"float32": 1, "float16": 10, "bfloat16": 16, "int64": 7}


def _compute(
    graph: str,
    model: str,
    io: dict[str, tuple[str, TensorInfo]],
    shapes: dict[str, tuple[int, ...]],
    addresses: dict[str, int],
) -> None:
    session = _session(model)
    binding = session.io_binding()
    for name, (mode, tensor) in io.items():
        bind = binding.bind_input if mode == "INPUT" else binding.bind_output
        bind(name, "cpu", 0, _ELEMENTS[tensor.dtype.value], list(shapes[name]), addresses[name])
    session.run_with_iobinding(binding)
    world().passes[graph] = world().passes.get(graph, 0) + 1


# Building and installing.


def strict_build(
    bundle: Path,
    manifest: Manifest,
    backend: str = "tensorrt-rtx",
    *,
    batch: int = 1,
    max_prompt: int = 512,
    flags: tuple[EngineFlag, ...] = (),
    plugin: str | None = None,
    capability: str = CAPABILITY,
    version: str | None = None,
    graphs: tuple[str, ...] = (TARGET, DRAFT),
) -> Manifest:
    """Write engines for the stand-in into a bundle, as `build_engines` does; gives the new manifest."""
    rtx = backend == "tensorrt-rtx"
    version = version or (RTX_VERSION if rtx else VERSION)
    limits = BuildOptions(max_batch=batch, max_prompt=max_prompt).limits(manifest)
    engines, files = dict(manifest.engines), dict(manifest.files)
    (bundle / "engines").mkdir(exist_ok=True)
    for graph in graphs:
        info = manifest.graphs[graph]
        planned = plan_profiles(manifest, graph, limits, ProfileSet.ONE if rtx else ProfileSet.PHASES)
        io, fixed = info.io, fixed_axes(planned)
        shapes = [input_shapes(io, ranges) for ranges in planned.values()]
        plan = {
            "graph": graph,
            "model": str((bundle / info.file).absolute()),
            "version": version,
            "tensors": [*_described(io, fixed)],
            "profiles": shapes,
            "stripped": EngineFlag.STRIPPED in flags,
            "streaming": EngineFlag.WEIGHT_STREAMING in flags,
            "user_allocation": rtx and EngineFlag.WEIGHT_STREAMING not in flags,
        }
        name = engine_name(graph, backend)
        header = (MAGIC + version.encode()).ljust(HEADER_BYTES, b"\0")
        data = header + json.dumps(plan).encode()
        file = f"engines/{name}.{hashlib.sha256(data).hexdigest()[:12]}.engine"
        (bundle / file).write_bytes(data)
        files[file] = file_info(bundle / file)
        engines[name] = EngineInfo(
            graph=graph,
            backend=backend,
            version=version,
            file=file,
            precision=manifest.dtype.value,
            compute_capabilities=(capability,),
            graph_sha256=manifest.files[info.file].sha256,
            profiles=planned,
            limits=limits,
            weights_sha256={w: manifest.files[w].sha256 for w in info.weights},
            flags=(*flags, *((EngineFlag.USER_ALLOCATION,) if plan["user_allocation"] else ())),
            plugin=plugin,
        )
    changed = replace(manifest, engines=engines, files=files)
    manifest_to_file(changed, bundle)
    return changed


def _described(io: GraphIO, fixed: dict[str, int]) -> Iterator[list[Any]]:
    for mode, tensors in (("INPUT", io.inputs), ("OUTPUT", io.outputs)):
        for tensor in tensors:
            axes = [fixed.get(axis, axis) if isinstance(axis, str) else axis for axis in tensor.axes]
            yield [tensor.name, mode, tensor.dtype.value, axes]


@contextmanager
def installed(found: World) -> Iterator[World]:
    """Let the package find the stand-ins in place of the real modules, and a GPU."""
    global _world
    gpu = Gpu("stand-in GPU", CAPABILITY, found.cuda.total_bytes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, found.module.__name__, found.module)
        patch.setitem(sys.modules, "cuda.bindings.runtime", found.cuda)
        patch.setattr(cuda_device, "cuda_devices", lambda: ((gpu,), "a stand-in"))
        gc.collect()
        assert not cuda_device._shared, "a runner of another test is still open"
        cuda_device._shared.clear()
        trt_library._shared.clear()
        _world = found
        try:
            yield found
        finally:
            gc.collect()
            _world = None
            cuda_device._shared.clear()
            trt_library._shared.clear()


def public_names(kind: type) -> dict[str, Any]:
    """Methods and properties of a stand-in's class, without what is its own."""
    return {
        name: value
        for name, value in inspect.getmembers_static(kind)
        if not name.startswith("_") and (callable(value) or isinstance(value, property))
    }
