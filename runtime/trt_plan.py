"""From the shapes of a pass to the profile it runs under, before the library is asked."""

from __future__ import annotations

from dataclasses import dataclass

from ..bundle.engines import engine_name
from ..bundle.errors import EngineError
from ..bundle.limits import KV_BUCKET, round_up
from ..bundle.manifest import EngineInfo
from ..bundle.profiles import profile_for
from ..bundle.tensors import BATCH, CAPACITY, CONTEXT_ROWS, KV, ROWS, GraphIO
from .engine import resolve_axes
from .trt_memory import Shape, tensor_shape

LINEAR_KV = 1024
"""Up to here the slots looked at are a power of two, from here on a multiple of this."""


@dataclass(frozen=True)
class PassPlan:
    """What a pass of some shapes needs.

    Attributes:
        profile: index of the optimisation profile.
        inputs: shape of every input, caches included.
        outputs: shape of every output.
        repeats: whether passes like it come again and again: those of a round do, parts of a prompt do not.
    """

    profile: int
    inputs: dict[str, Shape]
    outputs: dict[str, Shape]
    repeats: bool


def kv_bucket(slots: int, capacity: int) -> int:
    """Slots that an engine looks at in place of `slots`, so that it meets few different shapes.

    What a row does not see weighs nothing, so the result is the same but for rounding. Kernels are chosen,
    compiled or captured for each shape, and that costs more than reading a few slots in vain.
    """
    if slots > LINEAR_KV:
        return min(round_up(slots, LINEAR_KV), capacity)
    size = KV_BUCKET
    while size < slots:
        size *= 2
    return min(size, capacity)


def plan_pass(
    io: GraphIO, built: EngineInfo, shapes: dict[str, Shape], lanes: int, capacity: int
) -> PassPlan:
    """Plan a pass.

    Args:
        io: the graph's interface.
        built: the engine.
        shapes: of the inputs that are not caches.
        lanes: lanes that take part.
        capacity: slots of the caches.

    Raises:
        EngineError: the engine was not built for these shapes; an axis and its range are named.
        ValueError: the shapes contradict each other or the graph. This is a bug of the caller.
    """
    sizes = resolve_axes(io, shapes, {BATCH: lanes, CAPACITY: capacity})
    if sizes.get(KV, capacity) < capacity:
        sizes[KV] = kv_bucket(sizes[KV], capacity)
    try:
        name = profile_for(built.profiles, sizes)
    except EngineError as cause:
        raise EngineError(f"engine {engine_name(built.graph, built.backend)}: {cause}") from cause
    return PassPlan(
        list(built.profiles).index(name),
        {t.name: tensor_shape(t, sizes) for t in io.inputs},
        {t.name: tensor_shape(t, sizes) for t in io.outputs},
        max(sizes.get(ROWS, 0), sizes.get(CONTEXT_ROWS, 0)) <= built.limits.logit_rows,
    )
