"""What will be built, for which shapes, and what it will cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...bundle.engines import engine_name
from ...bundle.errors import ProviderError, RequestError, field_error
from ...bundle.files import safe_path
from ...bundle.limits import ShapeLimits
from ...bundle.manifest import Manifest
from ...bundle.profiles import Profiles, fixed_axes, input_shapes, plan_profiles
from ...bundle.round_graph import ROUND, own_axes
from ...bundle.tensors import CAPACITY, DRAFT, TARGET, TensorInfo
from .backends import Backend, backend_from_name, check_generations
from .graph import BuildGraph, graph_from_bundle
from .job import Shapes
from .options import BuildOptions, Weights

# Fitted to builds of the demo pair and of tiny pairs with TensorRT-RTX 1.7.
_ENGINE_BYTES = 2_000_000
_ENGINE_NODE_BYTES = 10_500
_HOST_BYTES = 450_000_000
_HOST_WEIGHTS = 3.6  # the network's, the engine's, and what the builder works on
_DEVICE_BYTES = 9_000_000
_DEVICE_HIDDEN_BYTES = 16
_DEVICE_MASK_BYTES = 5


@dataclass(frozen=True)
class Estimate:
    """Costs of one engine.

    Attributes:
        engine_bytes: its file.
        host_bytes: host memory while it is built.
        device_bytes: GPU memory while it runs: weights, caches of the largest batch, working memory.
    """

    engine_bytes: int
    host_bytes: int
    device_bytes: int


@dataclass(frozen=True)
class EnginePlan:
    """One engine to build."""

    graph: str
    profiles: Profiles
    shapes: dict[str, Shapes]
    source: BuildGraph
    estimate: Estimate


@dataclass(frozen=True)
class BuildPlan:
    """All engines of one build."""

    backend: Backend
    compute_capabilities: tuple[str, ...]
    limits: ShapeLimits
    engines: tuple[EnginePlan, ...]

    def names(self) -> dict[str, str]:
        """Name of each engine in the manifest, by graph."""
        return {engine.graph: engine_name(engine.graph, self.backend.name) for engine in self.engines}

    def lines(self, free_bytes: int) -> list[str]:
        """Write the plan for a screen.

        Args:
            free_bytes: free space where the engines go.
        """
        limits = self.limits
        gpus = ", ".join(self.compute_capabilities) or "of this machine's GPU"
        found = [
            f"backend              {self.backend.name}, compute capability {gpus}",
            f"longest sequence     {limits.max_length} tokens, caches of {limits.capacity} slots",
            f"largest pass         {limits.rows} rows, logits of {limits.logit_rows}, batch {limits.batch}",
        ]
        for engine in self.engines:
            found.append(f"{self.names()[engine.graph]}")
            for name, ranges in engine.profiles.items():
                moving = ", ".join(
                    f"{axis} {least}..{largest} (tuned for {typical})"
                    for axis, (least, typical, largest) in ranges.items()
                    if least != largest
                )
                found.append(f"  profile {name:<10} {moving or 'one shape'}")
            if engine.source.plugin is not None:
                found.append(f"  plugin             {engine.source.plugin}")
            cost = engine.estimate
            found += [
                f"  file               about {cost.engine_bytes / 1e6:.0f} MB",
                f"  to build           about {cost.host_bytes / 1e6:.0f} MB of memory",
                f"  to run             about {cost.device_bytes / 1e6:.0f} MB on the GPU",
            ]
        disk = sum(engine.estimate.engine_bytes for engine in self.engines)
        found.append(f"all files            about {disk / 1e6:.0f} MB, {free_bytes / 1e6:.0f} MB free")
        return found


def plan_engines(
    bundle: Path,
    manifest: Manifest,
    backend: str,
    compute_capabilities: Sequence[str],
    graphs: Sequence[str],
    options: BuildOptions,
) -> BuildPlan:
    """Plan a build; writes nothing and loads no library.

    Raises:
        ProviderError: the backend does not do what was asked for.
        RequestError: a graph is not in the bundle, or a limit is out of range.
        BundleError: a graph cannot be read.
    """
    chosen = backend_from_name(backend)
    if manifest.is_rounded():
        raise ProviderError(
            f"backend {backend}: runs no int8 or int4 weights: they are for ONNX Runtime's own operators; "
            "build from the float32 or float16 bundle of the pair"
        )
    generations = check_generations(chosen, compute_capabilities)
    options.check(chosen)
    limits = options.limits(manifest)
    for graph in graphs:
        if graph not in manifest.graphs:
            there = [name for name in manifest.graphs if name in (TARGET, DRAFT, ROUND)]
            remedy = "export with --round-graph" if graph == ROUND else ""
            raise field_error(RequestError, "graph", graph, "one of " + ", ".join(there), remedy)
    engines = []
    for graph in dict.fromkeys(graphs or (TARGET, DRAFT)):
        profiles = plan_profiles(manifest, graph, limits, options.profiles(chosen))
        sizes = fixed_axes(profiles)
        source = graph_from_bundle(safe_path(bundle, manifest.graphs[graph].file), sizes, options.conv)
        io = manifest.graphs[graph].io
        moving = [t.name for t in io.inputs if any(isinstance(a, str) and a not in sizes for a in t.axes)]
        shapes = {
            name: {tensor: s for tensor, s in input_shapes(io, ranges).items() if tensor in moving}
            for name, ranges in profiles.items()
        }
        estimate = _estimate(manifest, graph, limits, profiles, source, options)
        engines.append(EnginePlan(graph, profiles, shapes, source, estimate))
    return BuildPlan(chosen, generations, limits, tuple(engines))


def _estimate(
    manifest: Manifest,
    graph: str,
    limits: ShapeLimits,
    profiles: Profiles,
    source: BuildGraph,
    options: BuildOptions,
) -> Estimate:
    stored = 0 if options.weights is Weights.STRIPPED else source.weights_bytes
    code = len(profiles) * (_ENGINE_BYTES + _ENGINE_NODE_BYTES * source.nodes)
    io = manifest.graphs[graph].io
    largest = {axis: max(r[axis][2] for r in profiles.values()) for axis in next(iter(profiles.values()))}

    def size(tensor: TensorInfo) -> int:
        elements = tensor.dtype.bytes
        for axis in tensor.axes:
            elements *= largest.get(axis, 1) if isinstance(axis, str) else axis
        return elements

    # Caches are updated in place: the outputs that update them take no memory of their own.
    capacities = {CAPACITY, *(own_axes(model)[CAPACITY] for model in (TARGET, DRAFT))}
    tensors = sum(map(size, io.inputs)) + sum(size(t) for t in io.outputs if capacities.isdisjoint(t.axes))
    has_target = graph in (TARGET, ROUND)
    hidden = manifest.target.hidden_size if has_target else manifest.draft.hidden_size
    row = _DEVICE_HIDDEN_BYTES * hidden + (_DEVICE_MASK_BYTES * limits.capacity if has_target else 0)
    working = _DEVICE_BYTES + limits.batch * limits.rows * row
    return Estimate(
        engine_bytes=stored + code,
        host_bytes=_HOST_BYTES + int(_HOST_WEIGHTS * source.weights_bytes),
        device_bytes=source.weights_bytes + tensors + working,
    )
