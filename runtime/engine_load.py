"""From an engine's bytes to an engine, through whichever TensorRT library the caller has loaded.

`bundle.engines.check_engine` comes first: it needs no library, and finds nearly everything that can be wrong.
Here is what only the library knows; whatever it answers, nobody gets a None.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from ..bundle.engines import engine_name
from ..bundle.errors import EngineError, ProviderError
from ..bundle.manifest import EngineInfo

logger = logging.getLogger(__name__)


def engine_from_plan(
    library: Any, runtime: Any, plan: bytes, info: EngineInfo, messages: Sequence[str] = ()
) -> Any:
    """Deserialise an engine.

    Args:
        library: the module ``tensorrt`` or ``tensorrt_rtx``.
        runtime: its Runtime.
        plan: the engine's bytes, checked by `bundle.engines.read_engine`.
        info: the engine's part of the manifest.
        messages: where the caller's logger collects the library's errors; read after a failure.

    Raises:
        ProviderError: the library says that the engine does not run here.
        EngineError: the library gave no engine.
    """
    name = engine_name(info.graph, info.backend)
    _check_validity(library, runtime, plan, name)
    try:
        engine = runtime.deserialize_cuda_engine(plan)
    except Exception as cause:  # bindings raise what they like
        raise EngineError(_refused(library, info, name, [*messages, str(cause)])) from cause
    if engine is None:
        raise EngineError(_refused(library, info, name, messages))
    return engine


def _check_validity(library: Any, runtime: Any, plan: bytes, name: str) -> None:
    """Ask TensorRT-RTX, which can tell from an engine's head whether it runs here. TensorRT cannot."""
    ask = getattr(runtime, "get_engine_validity", None)
    if ask is None:
        return
    validity, bits = ask(plan[: runtime.engine_header_size])
    reasons = [
        reason.lower().replace("_", " ")
        for reason, bit in library.EngineInvalidityDiagnostics.__members__.items()
        if int(bits) & int(bit)
    ]
    text = ", ".join(reasons) or "it gives no reason; is there a GPU, and a driver that is not too old?"
    if validity == library.EngineValidity.INVALID:
        raise ProviderError(
            f"engine {name}: {library.__name__} {library.__version__} says that it does not run here "
            f"({text}); build it again for this machine, or update the driver"
        )
    if validity != library.EngineValidity.VALID:
        logger.warning("engine %s: runs here, but was not built for this GPU (%s)", name, text)


def _refused(library: Any, info: EngineInfo, name: str, messages: Sequence[str]) -> str:
    text = f"engine {name}: {library.__name__} {library.__version__} gives no engine for {info.file}"
    if messages:
        text += f" ({'; '.join(dict.fromkeys(messages))})"
    if info.plugin is not None:
        plugin, _, version = info.plugin.partition(" ")
        namespace, _, kind = plugin.rpartition("::")
        text += (
            f"; the kernel of its plugin {kind!r}, version {version!r}, namespace {namespace!r}, is in it; "
            f"if {library.__name__} asks for the plugin all the same, build it with --conv function"
        )
    return text + f"; build it again with `dflash build-engine --backend {info.backend}`"
