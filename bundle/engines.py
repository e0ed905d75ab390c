"""Whether a built engine belongs to this bundle and to this machine, found out before any library sees it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .errors import BundleError, ProviderError, field_error
from .files import safe_path
from .limits import ShapeLimits
from .manifest import EngineInfo, Manifest, Verify, check_files

DIRECTORY = "engines"
"""Where engines are in a bundle."""
PLUGIN = "dflash::GroupedDynamicConv 1"
"""The plugin that an engine of TensorRT may have: its name and version.

TensorRT stores the plugin's kernel in the engine, so nothing has to be registered where the engine is loaded.
"""


def engine_name(graph: str, backend: str) -> str:
    """The key of an engine in the manifest; a graph has one engine a backend."""
    return f"{graph}.{backend}"


@dataclass(frozen=True)
class Library:
    """An engine library as it is on this machine.

    Attributes:
        backend: ``tensorrt`` or ``tensorrt-rtx``.
        version: to the last part; an engine fits one version only.
        compute_capability: of the GPU to run on; None if there is none to compare with.
        plugin: name and version of the plugin that engines may have, as in `EngineInfo.plugin`.
    """

    backend: str
    version: str
    compute_capability: str | None = None
    plugin: str | None = PLUGIN


def check_engine(manifest: Manifest, graph: str, library: Library) -> EngineInfo:
    """Find the engine of a graph and check that it is neither stale nor foreign. Reads no file.

    Args:
        manifest: the bundle's.
        graph: name of the graph.
        library: what would load the engine.

    Raises:
        BundleError: there is none, or its graph or weights were changed after it was built.
        ProviderError: it was built by another library or version, for another GPU, or with another plugin.
    """
    name = engine_name(graph, library.backend)
    build = f"run `dflash build-engine` with --backend {library.backend}"
    info = manifest.engines.get(name)
    if info is None:
        raise field_error(
            BundleError, "engines", sorted(manifest.engines), f"an engine named {name!r}", build
        )

    def same(what: str, got: object, expected: object, kind: type[BundleError] | type[ProviderError]) -> None:
        if got != expected:
            raise field_error(kind, f"engine {name}: {what}", got, repr(expected), build)

    same("graph", info.graph, graph, BundleError)
    same("precision", info.precision, manifest.dtype.value, BundleError)
    file = manifest.graphs[graph].file
    same(f"SHA-256 of {file}", info.graph_sha256, manifest.files[file].sha256, BundleError)
    for file in manifest.graphs[graph].weights:
        same(f"SHA-256 of {file}", info.weights_sha256.get(file), manifest.files[file].sha256, BundleError)
    same("backend", info.backend, library.backend, ProviderError)
    same("version", info.version, library.version, ProviderError)
    if info.plugin is not None:
        same("plugin", info.plugin, library.plugin, ProviderError)
    here = library.compute_capability
    if here is not None and here not in info.compute_capabilities:
        raise field_error(
            ProviderError,
            f"engine {name}: compute capability",
            ", ".join(info.compute_capabilities) or "none",
            f"{here}, that of this GPU",
            build,
        )
    return info


def read_engine(directory: Path, manifest: Manifest, info: EngineInfo) -> bytes:
    """Read an engine's file, checked against the manifest.

    Raises:
        BundleError: it is missing or not what was built; both values are named.
    """
    check_files(manifest, directory, Verify.HASHES, (info.file,))
    return safe_path(directory, info.file).read_bytes()


def check_limits(info: EngineInfo, needed: ShapeLimits) -> None:
    """Check that an engine covers what a decoder will ask for.

    Raises:
        ProviderError: it was built for less; the limit is named with both values.
    """
    for what in ("max_length", "rows", "logit_rows", "batch"):
        got, least = getattr(info.limits, what), getattr(needed, what)
        if got < least:
            name = engine_name(info.graph, info.backend)
            raise field_error(
                ProviderError,
                f"engine {name}: {what}",
                got,
                f">= {least}",
                "ask for less, or build it again with larger limits",
            )
