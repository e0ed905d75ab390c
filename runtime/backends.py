"""From a bundle to the two runners of a decoder, over the library that the user chose."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from ..bundle.errors import ProviderError, RequestError, field_error
from ..bundle.limits import ShapeLimits
from ..bundle.manifest import Manifest
from ..bundle.ort_exact import exact_setting
from ..bundle.tensors import DRAFT, TARGET
from ..bundle.tuned import ALONE, DRAFT_ALONE, TOGETHER
from .engine import GraphRunner

ONNXRUNTIME = "onnxruntime"
BACKENDS = (ONNXRUNTIME, "tensorrt", "tensorrt-rtx")
"""The graphs as they are, or the engines that were built from them."""


def runners_from_bundle(
    directory: Path,
    manifest: Manifest,
    backend: str = ONNXRUNTIME,
    provider: str = "cpu",
    threads: int | None = None,
    *,
    needed: ShapeLimits | None = None,
    together: bool = False,
) -> tuple[GraphRunner, GraphRunner]:
    """Load target and draft.

    Args:
        directory: the bundle.
        manifest: the bundle's.
        backend: one of `BACKENDS`.
        provider: where ONNX Runtime computes, a key of `ort_engine.PROVIDERS`. Engines know no other place
            than the GPU, and with them it has to be the default.
        threads: threads of a pass on the CPU; see `ort_engine.effective_threads`.
        needed: shapes that engines have to cover; None takes what they were built for, see
            `GraphRunner.limits`.
        together: whether most passes will be for several requests.

    Returns:
        The runners of the target and of the draft. Nothing is left open if either fails.

    Raises:
        ProviderError: the backend or provider is not there, it adds int8 products wrong, or an engine was not
            built for this machine.
        BundleError: there is no engine, it is stale, or a file cannot be read.
        RequestError: `threads` is out of range, or an option says nothing to this backend.
        EngineError: an engine cannot be loaded.
    """
    if backend not in BACKENDS:
        raise field_error(ProviderError, "backend", backend, "one of " + ", ".join(BACKENDS))
    if backend == ONNXRUNTIME:
        from .ort_cache import onnxruntime
        from .ort_engine import check_provider, runner_from_onnx

        check_provider(provider, manifest.dtype)  # before any weight is read
        if manifest.is_rounded() and provider != "cpu":
            raise ProviderError(
                f"provider {provider}: int8 and int4 weights are for the CPU; use a float32 or float16 bundle"
            )

        if manifest.is_rounded() and exact_setting(onnxruntime()) is None:
            raise ProviderError(
                "provider cpu: this onnxruntime does not add int8 products right on this processor, so this "
                "bundle's tokens would not be those it was checked with; use the float32 one"
            )
        tuned = manifest.tuned if provider == "cpu" else {}
        names = {TARGET: TOGETHER if together else ALONE, DRAFT: DRAFT_ALONE}

        def load(graph: str) -> GraphRunner:
            info = tuned.get(names[graph], manifest.graphs[graph])
            return runner_from_onnx(directory, info, provider, threads)

    else:
        if provider != "cpu":
            raise RequestError(
                f"provider: got {provider!r}, but --backend {backend} runs engines on the GPU and asks no "
                f"provider; leave it out, or use --backend {ONNXRUNTIME}"
            )
        if threads is not None:
            raise RequestError(
                f"threads: got {threads}, but --backend {backend} computes nothing on the CPU; leave it out"
            )
        from .trt_engine import runner_from_engine

        def load(graph: str) -> GraphRunner:
            return runner_from_engine(directory, manifest, graph, backend, needed=needed)

    with ThreadPoolExecutor(1) as thread:
        # ONNX Runtime makes a session in one thread, and most machines have two. A GPU has one queue.
        ahead = thread.submit(load, DRAFT) if backend == ONNXRUNTIME and provider == "cpu" else None
        try:
            target = load(TARGET)
            try:
                return target, load(DRAFT) if ahead is None else ahead.result()
            except BaseException:
                target.close()
                raise
        except BaseException:
            if ahead is not None:
                ahead.add_done_callback(_close)  # at once, or as soon as it is there
            raise


def _close(loaded: Future[GraphRunner]) -> None:
    if loaded.exception() is None:
        loaded.result().close()
