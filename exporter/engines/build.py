"""`build_engines`: a bundle's graphs in, engines in the bundle out, whole or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ...bundle.engines import DIRECTORY
from ...bundle.errors import OutputError
from ...bundle.files import safe_path
from ...bundle.gpu import cuda_devices
from ...bundle.manifest import (
    MANIFEST,
    EngineInfo,
    FileInfo,
    Manifest,
    Verify,
    check_files,
    check_manifest,
    file_info,
    manifest_alone,
    manifest_to_file,
)
from ..progress import NullProgress, Progress
from .backends import backend_from_name, check_installed
from .job import Done, Job, Note, Step
from .options import BuildOptions
from .plan import BuildPlan, EnginePlan, plan_engines
from .process import engine_from_job

logger = logging.getLogger(__name__)

_WORK_PREFIX, _WORK_SUFFIX = ".engines.", ".partial"
_SUFFIX = ".engine"


def build_engines(
    bundle: Path,
    backend: str,
    compute_capabilities: Sequence[str] = (),
    graphs: Sequence[str] = (),
    progress: Progress | None = None,
    *,
    options: BuildOptions | None = None,
) -> Manifest:
    """Build engines into a bundle; those of the same graph and backend are replaced.

    Args:
        bundle: the bundle's directory.
        backend: ``tensorrt-rtx`` or ``tensorrt``.
        compute_capabilities: GPU generations, e.g. ``8.9``; empty takes the backend's own choice.
        graphs: names of graphs; empty takes target and draft.
        progress: is told about stages.
        options: limits and the rest.

    Returns:
        The bundle's new manifest.

    Raises:
        BundleError: the bundle is missing or damaged.
        ProviderError: the backend is not here, or cannot do what was asked for.
        RequestError: a limit is out of range, or a graph is not in the bundle.
        EngineBuildError: an engine cannot be built.
        OutputError: the bundle cannot be written.
        In every case, and on an interrupt, the bundle is as it was.
    """
    bundle = Path(os.path.abspath(bundle))
    progress = progress or NullProgress()
    options = options or BuildOptions()
    check_installed(backend_from_name(backend))
    manifest = manifest_alone(bundle)
    with _sole_builder(bundle), _work_directory(bundle) as work:
        with progress.stage("read graphs"):
            plan = plan_engines(bundle, manifest, backend, compute_capabilities, graphs, options)
            check_files(manifest, bundle, Verify.HASHES, _sources(manifest, plan))
        _check_space(plan, work)
        built: dict[str, tuple[EngineInfo, Path]] = {}
        for engine in plan.engines:
            name = plan.names()[engine.graph]
            with progress.stage(f"build {name}"):
                output = work / name
                done = _build(bundle, manifest, plan, engine, options, work, output, progress)
            built[name] = (_info(manifest, plan, engine, done), output)
        with progress.stage("write bundle"):
            return _install(bundle, manifest, built)


def _sources(manifest: Manifest, plan: BuildPlan) -> list[str]:
    """The files that the engines are built from."""
    graphs = [manifest.graphs[engine.graph] for engine in plan.engines]
    return list(dict.fromkeys(file for graph in graphs for file in (graph.file, *graph.weights)))


def _build(
    bundle: Path,
    manifest: Manifest,
    plan: BuildPlan,
    engine: EnginePlan,
    options: BuildOptions,
    work: Path,
    output: Path,
    progress: Progress,
) -> Done:
    name = plan.names()[engine.graph]
    graph_file = work / f"{engine.graph}.onnx"
    graph_file.write_bytes(engine.source.data)
    cache = options.timing_cache
    job = Job(
        backend=plan.backend.name,
        graph_file=str(graph_file),
        beside=str(safe_path(bundle, manifest.graphs[engine.graph].file)),
        output=str(output),
        profiles=engine.shapes,
        compute_capabilities=plan.compute_capabilities,
        precision=manifest.dtype,
        flags=options.flags(),
        workspace_bytes=options.workspace_bytes,
        timing_cache=None if cache is None else os.path.abspath(cache),
        verbosity=options.verbosity,
        plugin=engine.source.plugin,
    )

    def listen(message: Step | Note) -> None:
        if isinstance(message, Note):
            logger.warning("%s: %s", name, message.text)
        else:
            progress.detail(message.text)

    return engine_from_job(name, job, work / "log", listen)


def _info(manifest: Manifest, plan: BuildPlan, engine: EnginePlan, done: Done) -> EngineInfo:
    graph = manifest.graphs[engine.graph]
    generations = plan.compute_capabilities
    if not generations:  # it fits the GPU that built it
        generations = tuple(gpu.compute_capability for gpu in cuda_devices()[0][:1])
    return EngineInfo(
        graph=engine.graph,
        backend=plan.backend.name,
        version=done.version,
        file="",  # it is called after its content, see _install
        precision=manifest.dtype.value,
        compute_capabilities=generations,
        graph_sha256=manifest.files[graph.file].sha256,
        profiles=engine.profiles,
        limits=plan.limits,
        weights_sha256={file: manifest.files[file].sha256 for file in graph.weights},
        flags=done.flags,
        plugin=engine.source.plugin,
    )


def _install(bundle: Path, manifest: Manifest, built: Mapping[str, tuple[EngineInfo, Path]]) -> Manifest:
    """Move engines into the bundle, then the manifest, then remove what it no longer names.

    An engine's file is called after its content: a new one stands beside the one it replaces until the new
    manifest is there, so that the bundle holds at every moment.
    """
    engines, files = dict(manifest.engines), dict(manifest.files)
    moves: dict[Path, Path] = {}
    try:
        for name, (info, path) in built.items():
            content = file_info(path)
            file = f"{DIRECTORY}/{name}.{content.sha256[:12]}{_SUFFIX}"
            old = engines.get(name)
            if old is not None:
                files.pop(old.file, None)
            engines[name] = replace(info, file=file)
            files[file] = content
            moves[path] = bundle / file
        changed = replace(manifest, engines=engines, files=_kept(files, engines, manifest))
        check_manifest(changed)
        if manifest_alone(bundle) != manifest:
            raise OutputError(f"{MANIFEST}: was changed while the engines were built; build them again")
        directory = bundle / DIRECTORY
        with _new_files(directory, [path for path in moves.values() if not path.exists()]):
            directory.mkdir(exist_ok=True)
            for path, final in moves.items():
                os.replace(path, final)
            manifest_to_file(changed, bundle)
    except OSError as cause:
        raise OutputError(
            f"output: writing into {bundle} failed: {cause.strerror or cause}; the bundle is as it was"
        ) from cause
    named = {bundle / file for file in changed.files}
    for path in directory.glob(f"*{_SUFFIX}"):
        if path not in named:
            path.unlink(missing_ok=True)
    return changed


def _kept(
    files: dict[str, FileInfo], engines: dict[str, EngineInfo], manifest: Manifest
) -> dict[str, FileInfo]:
    """Files of the new manifest in a stable order; engines that another key still names stay."""
    for engine in engines.values():
        if engine.file not in files:
            files[engine.file] = manifest.files[engine.file]
    return {name: files[name] for name in sorted(files)}


@contextlib.contextmanager
def _new_files(directory: Path, files: Sequence[Path]) -> Iterator[None]:
    """Remove files, and the directory if it was not there, if the block does not end well."""
    existed = directory.is_dir()
    try:
        yield
    except BaseException:
        for path in files:
            path.unlink(missing_ok=True)
        if not existed:
            with contextlib.suppress(OSError):
                directory.rmdir()
        raise


@contextlib.contextmanager
def _sole_builder(bundle: Path) -> Iterator[None]:
    """Let one process build in a bundle at a time."""
    handle = os.open(bundle, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as cause:
            raise OutputError(
                f"output: another process is building engines in {bundle}; wait for it"
            ) from cause
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def _work_directory(bundle: Path) -> Iterator[Path]:
    """A directory on the bundle's own disk, gone afterwards; what a killed build left is removed, too."""
    for left in bundle.glob(f"{_WORK_PREFIX}*{_WORK_SUFFIX}"):
        shutil.rmtree(left, ignore_errors=True)
    try:
        work = Path(tempfile.mkdtemp(prefix=_WORK_PREFIX, suffix=_WORK_SUFFIX, dir=bundle))
    except OSError as cause:
        raise OutputError(
            f"output: cannot write into {bundle}: {cause.strerror}; engines are written into the bundle"
        ) from cause
    try:
        yield work
    except OSError as cause:
        raise OutputError(
            f"output: writing into {bundle} failed: {cause.strerror or cause}; the bundle is as it was"
        ) from cause
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _check_space(plan: BuildPlan, work: Path) -> None:
    """Refuse before the first build if the engines cannot fit."""
    need = sum(engine.estimate.engine_bytes for engine in plan.engines)
    free = shutil.disk_usage(work).free
    if need > free:
        raise OutputError(
            f"output: got {free / 1e9:.2f} GB free, expected at least {need / 1e9:.2f} GB for the engines; "
            "make room"
        )
