"""The optimisation profiles of an engine: which sizes each axis of a graph may take in which phase.

A pure function of the manifest and the limits. The builder plans with it, the runtime finds the profile of
a pass with it, and neither knows more about shapes than what stands here and in `limits`.

    graph    phase     asks for
    target   plain     a lone row, or two where one is padded; its logits
    target   verify    anchor and proposals, fewer at the end of the budget; logits of all
    target   prefill   a part of the prompt, the first one over an empty cache; logits of the last row
    draft    round     context rows of one verify pass, and a block
    draft    prefill   context rows of one part of the prompt, or of some plain rounds, and a block
    round    round     both: the rows of one verify pass, and a block

Several requests are one pass: its rows are those of the longest, on each axis.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence

from .errors import EngineError
from .limits import EXACT_ROWS, KV_BUCKET, ShapeLimits
from .manifest import Manifest
from .round_graph import ROUND, own_axes
from .tensors import (
    BATCH,
    CAPACITY,
    CONTEXT_ROWS,
    DRAFT,
    KV,
    LOGIT_ROWS,
    ROWS,
    TARGET,
    GraphIO,
    TensorInfo,
)

Range = tuple[int, int, int]
"""Least, typical and largest size of an axis."""
Ranges = dict[str, Range]
"""The range of every named axis of a graph."""
Profiles = dict[str, Ranges]
"""Ranges by the profile's name, in the engine's order."""
Shape = tuple[int, ...]

TYPICAL_KV = 1024
"""Slots that kernels are chosen for. Long enough to be worth tuning, short of what most requests reach."""

_TUNED = ("verify", "round")
"""The phases of a round: what a single profile is tuned for."""


class ProfileSet(enum.Enum):
    """How many profiles an engine gets.

    PHASES has one a phase, tuned for its typical size; the build takes that many times as long. ONE covers
    all phases and is tuned for the rounds of the loop; enough where kernels are compiled at run time for
    the shapes that occur.
    """

    PHASES = "phases"
    ONE = "one"


def plan_profiles(
    manifest: Manifest, graph: str, limits: ShapeLimits, profile_set: ProfileSet = ProfileSet.PHASES
) -> Profiles:
    """Plan the profiles of a graph: every shape the loop asks for within `limits` lies in one of them.

    Profiles come in the order in which `profile_for` prefers them.
    """
    verify, rows, capacity = limits.logit_rows, limits.rows, limits.capacity
    common: Ranges = {
        BATCH: (1, limits.batch, limits.batch),
        CAPACITY: (capacity, capacity, capacity),
        KV: (min(KV_BUCKET, capacity), min(TYPICAL_KV, capacity), capacity),
    }
    common |= {own: common[axis] for model in (TARGET, DRAFT) for axis, own in own_axes(model).items()}
    round_rows, prompt_rows = _up_to(verify), _up_to(rows)
    phases: dict[str, Ranges]
    if graph == TARGET:
        phases = {
            "plain": {ROWS: _up_to(EXACT_ROWS), LOGIT_ROWS: _up_to(EXACT_ROWS)},
            "verify": {ROWS: round_rows, LOGIT_ROWS: round_rows},
            "prefill": {ROWS: prompt_rows, LOGIT_ROWS: _up_to(EXACT_ROWS)},
        }
    elif graph == DRAFT:
        phases = {"round": {CONTEXT_ROWS: round_rows}, "prefill": {CONTEXT_ROWS: prompt_rows}}
    elif graph == ROUND:
        phases = {"round": {ROWS: round_rows}}
    else:  # conv and selector by themselves: whole blocks
        phases = {"block": {ROWS: _up_to(manifest.draft.block_size)}}
    axes = named_axes(manifest.graphs[graph].io.inputs)
    planned = {name: {axis: (common | own)[axis] for axis in axes} for name, own in phases.items()}
    if profile_set is ProfileSet.ONE:
        tuned = next((planned[name] for name in _TUNED if name in planned), None)
        return {"all": _envelope(list(planned.values()), tuned)}
    profiles: Profiles = {}
    for name, ranges in planned.items():
        if ranges not in profiles.values():
            profiles[name] = ranges
    return profiles


def named_axes(tensors: Sequence[TensorInfo]) -> tuple[str, ...]:
    """Every named axis of some tensors, once, in order."""
    return tuple(dict.fromkeys(axis for tensor in tensors for axis in tensor.axes if isinstance(axis, str)))


def fixed_axes(profiles: Profiles) -> dict[str, int]:
    """Axes that have one size in all profiles: the engine is built for that size alone."""
    found: dict[str, set[int]] = {}
    for ranges in profiles.values():
        for axis, sizes in ranges.items():
            found.setdefault(axis, set()).update(sizes)
    return {axis: min(sizes) for axis, sizes in found.items() if len(sizes) == 1}


def input_shapes(io: GraphIO, ranges: Ranges) -> dict[str, tuple[Shape, Shape, Shape]]:
    """Least, typical and largest shape of every input under one profile."""

    def shape(tensor: TensorInfo, index: int) -> Shape:
        return tuple(ranges[axis][index] if isinstance(axis, str) else axis for axis in tensor.axes)

    return {t.name: (shape(t, 0), shape(t, 1), shape(t, 2)) for t in io.inputs}


def profile_for(profiles: Profiles, sizes: Mapping[str, int]) -> str:
    """Find the profile of a pass, the first that fits.

    Args:
        profiles: what the engine was built with.
        sizes: the size of every named axis.

    Raises:
        EngineError: none fits; the message names the axis, its size and the largest range.
    """
    for name, ranges in profiles.items():
        if all(least <= sizes[axis] <= largest for axis, (least, _, largest) in ranges.items()):
            return name
    whole = _envelope(list(profiles.values()), None)
    for axis, (least, _, largest) in whole.items():
        if not least <= sizes[axis] <= largest:
            raise EngineError(
                f"{axis}: got {sizes[axis]}, expected {least} to {largest}, which the engine was built for; "
                "ask for less, or build it again with larger limits"
            )
    raise EngineError(
        f"shapes: got {dict(sizes)}, which no profile of the engine covers ({', '.join(profiles)}); "
        "build it again with `--profiles one`"
    )


def _up_to(largest: int) -> Range:
    """From a lone row to `largest`, which is what engines are tuned for."""
    return (1, largest, largest)


def _envelope(several: Sequence[Ranges], tuned: Ranges | None) -> Ranges:
    tuned = several[0] if tuned is None else tuned
    return {
        axis: (min(r[axis][0] for r in several), typical, max(r[axis][2] for r in several))
        for axis, (_, typical, _) in tuned.items()
    }
