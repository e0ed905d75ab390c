"""The two flavours of TensorRT that build engines."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass

from ...bundle.errors import ProviderError, field_error

TENSORRT = "tensorrt"
TENSORRT_RTX = "tensorrt-rtx"


@dataclass(frozen=True)
class Backend:
    """One flavour.

    Attributes:
        name: as the user writes it.
        module: the Python package that drives it.
        extra: the extra of this package that installs it.
        generations: compute capabilities that may be asked for; empty where an engine fits the GPU that
            builds it.
        by_default: those taken when none is asked for.
        timing_cache: whether it measures kernels while building, and can keep what it measured.
        one_profile: whether kernels are compiled at run time for the shapes that occur, so that one
            profile is enough.
        plugins: whether it takes operators from outside.
    """

    name: str
    module: str
    extra: str
    generations: tuple[str, ...]
    by_default: tuple[str, ...]
    timing_cache: bool
    one_profile: bool
    plugins: bool


BACKENDS = {
    TENSORRT_RTX: Backend(
        TENSORRT_RTX,
        "tensorrt_rtx",
        "rtx",
        ("7.5", "8.0", "8.6", "8.9", "12.0", "12.1"),
        # 7.5 has to be asked for: it has no float32 matrix product, which every draft needs.
        ("8.0", "8.6", "8.9", "12.0", "12.1"),
        timing_cache=False,
        one_profile=True,
        plugins=False,
    ),
    TENSORRT: Backend(
        TENSORRT, "tensorrt", "tensorrt", (), (), timing_cache=True, one_profile=False, plugins=True
    ),
}


def backend_from_name(name: str) -> Backend:
    """Find a backend.

    Raises:
        ProviderError: there is none of that name.
    """
    backend = BACKENDS.get(name)
    if backend is None:
        raise field_error(ProviderError, "backend", name, "one of " + ", ".join(BACKENDS))
    return backend


def check_installed(backend: Backend) -> None:
    """Check that a backend's packages are there; loads none of them.

    Raises:
        ProviderError: one is not.
    """
    for package in (backend.module, "polygraphy"):
        if importlib.util.find_spec(package) is None:
            raise ProviderError(
                f"backend {backend.name}: {package} is not installed; "
                f"pip install 'dflash-deploy[{backend.extra}]'"
            )


def check_generations(backend: Backend, asked: Sequence[str]) -> tuple[str, ...]:
    """The compute capabilities to build for: those asked for, each once, or the backend's own choice.

    Raises:
        ProviderError: the backend cannot build for one of them.
    """
    if asked and not backend.generations:
        raise ProviderError(
            f"compute capability: got {', '.join(asked)}, but {backend.name} builds for the GPU of the "
            f"machine it runs on; leave the option out, or use --backend {TENSORRT_RTX}"
        )
    for generation in asked:
        if generation not in backend.generations:
            raise field_error(
                ProviderError,
                "compute capability",
                generation,
                f"one of {', '.join(backend.generations)}, the generations that {backend.name} builds for",
            )
    chosen = asked or backend.by_default
    return tuple(g for g in backend.generations if g in chosen)
