"""The builder process: TensorRT through Polygraphy's loaders.

It is a process of its own because Polygraphy chooses between the two flavours once, when it is imported;
because TensorRT may abort; and because what it allocates goes back with it. Its standard output belongs to
the messages of `job`, everything that libraries print goes to standard error.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ...bundle.gpu import cuda_devices
from ...bundle.manifest import EngineFlag
from ...bundle.records import record_from_dict
from ...bundle.tensors import DType
from ...plugins.tensorrt_plugin import register_plugin
from .backends import BACKENDS, TENSORRT_RTX, Backend
from .job import Done, Failed, Fault, Job, Message, Note, Step, message_to_line
from .options import Verbosity

RTX_VARIABLE = "POLYGRAPHY_USE_TENSORRT_RTX"
_NO_FUSED_KERNEL = re.compile(r"is_decomposable|not supported by a dedicated kernel")
_NO_DRIVER = re.compile(r"CUDA driver|CUDA initialization|cudaError")
_STEP_SECONDS = 0.1

# What the library says, and what it means to the user.
_HINTS = {
    r"FP32 GEMM is not supported": (
        "compute capability 7.5 has no float32 matrix product, which this graph needs; leave 7.5 out"
    ),
    r"tactics_tiled_layout": (
        "half-precision attention asks for a head size that is a multiple of 8; export with --dtype float32"
    ),
    r"sm_vers_": "an engine without weights is built for one compute capability at a time",
    r"[Oo]ut of memory|OutOfMemory|bad_alloc|MEM_ALLOC": (
        "out of memory; close other programs, or lower --max-context, --max-batch or --workspace-mb"
    ),
}

Send = Callable[[Message], None]


class _Refusal(Exception):  # noqa: N818 - becomes a message, never leaves this process
    def __init__(self, fault: Fault, reasons: Sequence[str]):
        super().__init__(reasons)
        self.failed = Failed(fault, tuple(reasons))


def main() -> None:
    """Read a job, build the engine, say how it went."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def send(message: Message) -> None:
        channel.write(message_to_line(message))
        channel.flush()

    job = record_from_dict(Job, json.load(sys.stdin), "job")
    try:
        send(build(job, send))
    except _Refusal as refusal:
        send(refusal.failed)


def build(job: Job, send: Send) -> Done:
    """Build the engine of a job; attention is fused where a kernel exists."""
    library = _Library(job, send)
    decomposable = job.precision is DType.FLOAT32  # no library has fused kernels for it
    try:
        engine = library.engine(decomposable)
    except _Refusal as refusal:
        if decomposable or not any(map(_NO_FUSED_KERNEL.search, refusal.failed.reasons)):
            raise
        send(Note("there is no fused kernel for this attention; it is built from matrix products"))
        decomposable = True
        engine = library.engine(decomposable)
    Path(job.output).write_bytes(engine)
    flags = [*job.flags]
    if decomposable and library.has_attention:
        flags.append(EngineFlag.DECOMPOSABLE_ATTENTION)
    if library.user_allocation:
        flags.append(EngineFlag.USER_ALLOCATION)
    return Done(library.version, tuple(flags))


class _Library:
    """TensorRT and Polygraphy, loaded for one job."""

    def __init__(self, job: Job, send: Send):
        self.job = job
        self.send = send
        self.backend = BACKENDS[job.backend]
        self.trt = _load(self.backend)
        self.version = str(self.trt.__version__)
        self.log = _log(self.trt, self.backend, job.verbosity)
        if job.plugin is not None:
            register(job.plugin, self.log.errors.append)
        # In TensorRT-RTX the flag keeps the library from allocating during a pass, which would break the
        # capture of a CUDA graph. Streaming weights needs such allocations.
        streamed = EngineFlag.WEIGHT_STREAMING in job.flags
        known = hasattr(self.trt.BuilderFlag, "REQUIRE_USER_ALLOCATION")
        self.user_allocation = self.rtx and known and not streamed
        self.has_attention = False

    @property
    def rtx(self) -> bool:
        return self.backend.name == TENSORRT_RTX

    def engine(self, decomposable: bool) -> Any:
        """Parse and build; gives the serialised engine."""
        from polygraphy.backend.trt import EngineBytesFromNetwork, SetDecomposableAttentions
        from polygraphy.exception import PolygraphyException

        self.log.errors.clear()
        self.send(Step("parse"))
        # The parser stays alive with the network: it holds the weights.
        parsed = self._network()
        try:
            if decomposable:
                parsed = SetDecomposableAttentions(parsed)()
            kinds = {layer.type for layer in parsed[1]}
            self.has_attention = self.trt.LayerType.ATTENTION_INPUT in kinds
            self._clear_timing_cache(parsed[0])
            cache = self.job.timing_cache
            return EngineBytesFromNetwork(parsed, config=self._config(), save_timing_cache=cache)()
        except PolygraphyException as cause:
            raise self._refusal(str(cause)) from cause

    def _network(self) -> Any:
        from polygraphy.backend.trt import CreateNetwork
        from polygraphy.exception import PolygraphyException

        try:
            builder, network = CreateNetwork(strongly_typed=True)()
            parser = self.trt.OnnxParser(network, self.log)
        except (PolygraphyException, TypeError, RuntimeError, AttributeError) as cause:
            # A null from the library arrives as any of these.
            raise self._refusal(str(cause)) from cause
        # The call that takes a path: weights are looked for beside it, never in the working directory.
        parsed = parser.parse(Path(self.job.graph_file).read_bytes(), self.job.beside)
        if not parsed or parser.num_errors:
            errors = parser_errors(parser, self.version)
            raise _Refusal(Fault.GRAPH, errors or self._reasons("the parser gave up"))
        return builder, network, parser

    def _config(self) -> Any:
        from polygraphy.backend.tensorrt_rtx import CreateConfigRTX
        from polygraphy.backend.trt import CreateConfig, PostprocessConfig, Profile

        trt, job = self.trt, self.job
        profiles = []
        for shapes in job.profiles.values():
            profile = Profile()
            for name, (least, typical, largest) in shapes.items():
                profile.add(name, least, typical, largest)
            profiles.append(profile)
        workspace = job.workspace_bytes
        common = {
            "profiles": profiles,
            "memory_pool_limits": None if workspace is None else {trt.MemoryPoolType.WORKSPACE: workspace},
            "strip_plan": EngineFlag.STRIPPED in job.flags,
            "weight_streaming": EngineFlag.WEIGHT_STREAMING in job.flags,
            "progress_monitor": _monitor(trt, self.send),
        }

        def finish(builder: Any, network: Any, config: Any) -> None:  # noqa: ARG001 - Polygraphy's signature
            config.clear_flag(trt.BuilderFlag.TF32)  # float32 means float32: TF32 keeps 10 bits of it
            if self.user_allocation:
                config.set_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)

        if self.rtx:
            generations = [tuple(map(int, g.split("."))) for g in job.compute_capabilities]
            return PostprocessConfig(CreateConfigRTX(compute_capabilities=generations, **common), finish)
        cache = job.timing_cache
        if cache is not None and not Path(cache).exists():
            cache = None
        return PostprocessConfig(CreateConfig(load_timing_cache=cache, **common), finish)

    def _clear_timing_cache(self, builder: Any) -> None:
        """Remove a timing cache that the library does not take."""
        if self.job.timing_cache is None:
            return
        path = Path(self.job.timing_cache)
        if not usable_timing_cache(builder.create_builder_config().create_timing_cache, path):
            self.send(Note(f"{path.name}: is no timing cache for this library; it is written anew"))
            path.unlink()

    def _reasons(self, otherwise: str) -> list[str]:
        return list(dict.fromkeys(self.log.errors)) or [otherwise]

    def _refusal(self, otherwise: str) -> _Refusal:
        reasons = self._reasons(otherwise)
        machine = f"{self.backend.name} {{}} on a machine with an NVIDIA GPU and its driver only"
        if EngineFlag.STRIPPED in self.job.flags and not cuda_devices()[0]:
            hint = machine.format("strips weights") + "; leave --weights stripped out"
            return _Refusal(Fault.MACHINE, [hint, *reasons])
        if not self.rtx and any(map(_NO_DRIVER.search, reasons)):
            return _Refusal(Fault.MACHINE, [machine.format("builds"), *reasons])
        return _Refusal(Fault.GRAPH, with_hints(reasons))


def register(plugin: str, failed: Callable[[str], None]) -> None:
    """Register the plugin, with kernels for the GPU at hand."""
    gpus, reason = cuda_devices()
    if not gpus:
        raise _Refusal(Fault.MACHINE, [f"plugin {plugin}: is compiled for the GPU at hand; {reason}"])
    try:
        register_plugin(int(gpus[0].compute_capability.replace(".", "")), failed)
    except ImportError as cause:
        hint = "pip install triton, or use --conv function"
        raise _Refusal(Fault.MACHINE, [f"plugin {plugin}: {cause}; {hint}"]) from cause


def with_hints(reasons: list[str]) -> list[str]:
    """Put what a reason means to the user before it."""
    hints = [hint for pattern, hint in _HINTS.items() if any(re.search(pattern, text) for text in reasons)]
    return hints + reasons


def parser_errors(parser: Any, version: str) -> list[str]:
    """Write every error of an ONNX parser: the node, its operator and the reason."""
    found = []
    for index in range(parser.num_errors):
        error = parser.get_error(index)
        reason = str(error.desc()).strip()
        if reason == "false":  # a check that can never hold: there is no importer
            reason = f"this operator is not supported by the parser of version {version}"
        elif "Plugin not found" in reason:
            reason = f"neither an operator nor a plugin that version {version} knows"
        name = error.node_name() or f"number {error.node()}"
        found.append(f"node {name} ({error.node_operator() or 'unknown operator'}): {reason}")
    return found


def usable_timing_cache(create: Callable[[bytes], Any], path: Path) -> bool:
    """Whether the library takes a file as its timing cache; one that is not there yet is fine."""
    if not path.exists():
        return True
    try:
        return create(path.read_bytes()) is not None
    except Exception:  # bindings raise what they like; whatever it is, the file is no cache
        return False


def _load(backend: Backend) -> Any:
    """Import the library, and Polygraphy bound to it."""
    wanted = "1" if backend.name == TENSORRT_RTX else "0"
    if os.environ.get(RTX_VARIABLE, "0") != wanted:
        raise AssertionError(f"{RTX_VARIABLE} must be {wanted} before polygraphy is imported")
    try:
        trt = importlib.import_module(backend.module)
        found = bool(trt.__version__ and trt.OnnxParser and trt.Builder)
        polygraphy = importlib.import_module("polygraphy.config")
        importlib.import_module("polygraphy.backend.trt")
    except Exception as cause:  # a package without its libraries fails in many ways
        install = f"pip install 'dflash-deploy[{backend.extra}]'"
        reason = f"backend {backend.name}: {backend.module} cannot be loaded ({cause}); {install}"
        raise _Refusal(Fault.MACHINE, [reason]) from cause
    assert found and (backend.name == TENSORRT_RTX) == polygraphy.USE_TENSORRT_RTX
    return trt


def _log(trt: Any, backend: Backend, verbosity: Verbosity) -> Any:
    """A logger that keeps errors; it becomes Polygraphy's."""
    from polygraphy.backend.trt import util
    from polygraphy.logger import G_LOGGER

    shown, polygraphy_shown = {
        Verbosity.QUIET: (trt.Logger.ERROR, G_LOGGER.CRITICAL),
        Verbosity.INFO: (trt.Logger.INFO, G_LOGGER.INFO),
        Verbosity.VERBOSE: (trt.Logger.VERBOSE, G_LOGGER.VERBOSE),
    }[verbosity]

    class Log(trt.ILogger):  # type: ignore[misc]  # the library has no types
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []

        def log(self, severity: Any, text: str) -> None:
            if int(severity) <= int(trt.Logger.ERROR):
                self.errors.append(text.strip())
            if int(severity) <= int(shown):
                sys.stderr.write(f"{backend.name}: {text}\n")

    G_LOGGER.module_severity = {"": polygraphy_shown}
    log = Log()
    util.TRT_LOGGER = log
    return log


def _monitor(trt: Any, send: Send) -> Any:
    """Tell the parent about the builder's phases, not too often; stop the build if it does not listen."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]  # the library has no types
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.steps: dict[str, int] = {}
            self.told = 0.0
            self.heard = True

        def phase_start(self, phase: str, parent: str | None, steps: int) -> None:  # noqa: ARG002
            self.steps[phase] = steps
            self._tell(phase, 0, time.monotonic())

        def step_complete(self, phase: str, step: int) -> bool:
            now = time.monotonic()
            if now - self.told >= _STEP_SECONDS:
                self._tell(phase, step + 1, now)
            return self.heard

        def phase_finish(self, phase: str) -> None:
            self.steps.pop(phase, None)

        def _tell(self, phase: str, step: int, now: float) -> None:
            self.told = now
            try:
                send(Step(f"{phase} {step}/{self.steps.get(phase, 0)}"))
            except OSError:  # the parent is gone
                self.heard = False

    return Monitor()
