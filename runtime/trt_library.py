"""A TensorRT library as Python sees it: loaded, listening to its messages, and asked for engines.

TensorRT and TensorRT-RTX have the same interface here; what only one of them has is asked for by `hasattr`.
"""

from __future__ import annotations

import importlib
import logging
import re
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..bundle.engines import Library, check_engine, check_limits, engine_name, read_engine
from ..bundle.errors import EngineError, ProviderError, field_error
from ..bundle.files import safe_path
from ..bundle.limits import ShapeLimits
from ..bundle.manifest import EngineFlag, EngineInfo, Manifest
from .cuda_device import first_gpu
from .engine_load import engine_from_plan

logger = logging.getLogger(__name__)

MODULES = {"tensorrt": ("tensorrt", "tensorrt"), "tensorrt-rtx": ("tensorrt_rtx", "rtx")}
"""Python module and extra of each backend."""

_MOST_MESSAGES = 20
_SHOWN_WEIGHTS = 3
_NO_MEMORY = re.compile(r"out of memory|outofmemory|bad_alloc|cudaErrorMemoryAllocation", re.IGNORECASE)


_shared: weakref.WeakValueDictionary[str, TrtLibrary] = weakref.WeakValueDictionary()
_shared_lock = threading.Lock()


def shared_library(backend: str) -> TrtLibrary:
    """The library of a backend: it wants one logger in a process, and so one Runtime is enough.

    Raises:
        ProviderError: there is no such backend, it is not installed, or does not load.
    """
    with _shared_lock:
        library = _shared.get(backend)
        if library is None:
            library = _shared[backend] = TrtLibrary(backend)
        return library


class TrtLibrary:
    """A loaded library, its Runtime, and the errors that it logged.

    Attributes:
        module: the Python module.
        backend: its name for users.
        version: to the last part.
        log: what the library's objects are made with.
    """

    def __init__(self, backend: str):
        """Load a library.

        Raises:
            ProviderError: there is no such backend, it is not installed, or does not load.
        """
        if backend not in MODULES:
            raise field_error(ProviderError, "backend", backend, "one of " + ", ".join(MODULES))
        name, extra = MODULES[backend]
        install = f"pip install 'dflash-deploy[{extra}]'"
        try:
            self.module = importlib.import_module(name)
            self.version = str(self.module.__version__)
            self._errors: deque[str] = deque(maxlen=_MOST_MESSAGES)
            self.log = _log(self.module, self._errors)
            self.runtime = self.module.Runtime(self.log)
        except Exception as cause:  # a package without its libraries fails in many ways
            raise ProviderError(f"backend {backend}: {name} cannot be loaded ({cause}); {install}") from cause
        self.backend = backend

    def reasons(self, *more: str) -> str:
        """What the library said since the last time, once each, for a message."""
        said = [*more]
        while self._errors:
            said.append(self._errors.popleft())
        return "; ".join(dict.fromkeys(said)) or "it gives no reason"

    def error(self, text: str, reasons: str, otherwise: str) -> EngineError:
        """An error with the library's reasons, and what to do: lower something, or `otherwise`."""
        if _NO_MEMORY.search(reasons):
            otherwise = (
                "close other programs on the GPU, or build the engine with a smaller --max-context, "
                "--max-batch or --max-prompt, or with --residence streamed"
            )
        return EngineError(f"{text} ({reasons}); {otherwise}")

    def load(
        self, directory: Path, manifest: Manifest, graph: str, needed: ShapeLimits | None
    ) -> tuple[EngineInfo, Any]:
        """Find, check and deserialise the engine of a graph; weights that were left out are put in.

        Args:
            directory: the bundle.
            manifest: the bundle's.
            graph: name of the graph.
            needed: shapes it has to cover; None takes what it was built for.

        Raises:
            BundleError: there is none, it is stale, or its file is damaged.
            ProviderError: it is not for this library, its version or this GPU, or covers too little.
            EngineError: the library gives no engine, or does not take the weights.
        """
        name = engine_name(graph, self.backend)
        here = Library(self.backend, self.version, first_gpu().compute_capability)
        info = check_engine(manifest, graph, here)
        if needed is not None:
            check_limits(info, needed)
        plan = read_engine(directory, manifest, info)
        self._errors.clear()
        try:
            engine = engine_from_plan(self.module, self.runtime, plan, info, self._errors)
        except EngineError as cause:
            if _NO_MEMORY.search(str(cause)):
                raise self.error(f"engine {name}: cannot be loaded", str(cause), "") from cause
            raise
        if EngineFlag.STRIPPED in info.flags:
            self._refit(engine, name, safe_path(directory.absolute(), manifest.graphs[graph].file))
        return info, engine

    def _refit(self, engine: Any, name: str, graph_file: Path) -> None:
        """Put the bundle's weights into an engine that was built without.

        The library's own parser reads the graph again, and takes weights by the names of its initialisers.
        The path is absolute, so they are found beside the graph from any working directory.
        """
        module = self.module
        self._errors.clear()
        try:
            refitter = module.Refitter(engine, self.log)
            parser = module.OnnxParserRefitter(refitter, self.log)
            parsed = parser.refit_from_file(str(graph_file))
            said = [str(parser.get_error(index).desc()).strip() for index in range(parser.num_errors)]
            missing = list(refitter.get_missing_weights())
            # The parser may answer no although nothing is missing: it counts weights that the engine has
            # folded into others. Whether the engine is whole is what the refitter says.
            good = not missing and refitter.refit_cuda_engine()
        except Exception as cause:  # bindings raise what they like
            raise self.error(*self._refit_failed(name, graph_file, [str(cause)])) from cause
        if not good:
            if missing:
                shown = ", ".join(missing[:_SHOWN_WEIGHTS])
                said.append(f"{len(missing)} weights are missing, {shown} first")
            raise self.error(*self._refit_failed(name, graph_file, said))
        if not parsed:
            logger.warning("engine %s: refitted, but its parser says: %s", name, self.reasons(*said))

    def _refit_failed(self, name: str, graph_file: Path, said: Sequence[str]) -> tuple[str, str, str]:
        return (
            f"engine {name}: the weights of {graph_file.name} do not go into it",
            self.reasons(*said),
            "build it again with --weights embedded",
        )


def _log(module: Any, errors: deque[str]) -> Any:
    """A logger of the library's kind that keeps errors and hands the rest to Python's logging."""
    levels = {
        int(module.ILogger.WARNING): logging.INFO,  # most are about builds and other people's machines
        int(module.ILogger.INFO): logging.DEBUG,
    }
    error = int(module.ILogger.ERROR)

    class Log(module.ILogger):  # type: ignore[misc]  # the library has no types
        def __init__(self) -> None:
            module.ILogger.__init__(self)

        def log(self, severity: Any, msg: str) -> None:
            if int(severity) <= error:
                errors.append(msg.strip())
            level = levels.get(int(severity))
            if level is not None:
                logger.log(level, "%s", msg)

    return Log()
