"""Passes captured in CUDA graphs: one launch instead of one for every kernel.

A graph repeats a pass with the addresses and shapes it was captured with, so only passes that come again are
captured: rounds, whose rows are always as many and which look at one of few lengths (`trt_plan.kv_bucket`).

Each graph has an execution context of its own. TensorRT's manual allows no change to the context that a graph
was captured from, not even its shapes; contexts that share an engine share its weights, and they all use the
runner's working memory, for they run one after another.
"""

from __future__ import annotations

import enum
import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from .cuda_device import CaptureError, Device

logger = logging.getLogger(__name__)


class CudaGraphs(enum.Enum):
    """Whether rounds are captured."""

    OFF = "off"
    ON = "on"


CAPTURE_AT = 2
"""A pass is captured when it comes this many times: preparing a graph costs more than a pass."""
MOST_GRAPHS = 32
"""Graphs kept for each engine; the one that was not used for the longest time goes first."""
_MOST_COUNTED = 4096


@dataclass
class _Captured:
    executable: Any
    context: Any  # must live, and stay as it is, as long as the graph does


class GraphStore:
    """The captured passes of one runner.

    Attributes:
        mode: whether it was asked for.
        problem: why nothing is captured any more; None while it works.
        captures: passes captured so far.
        replays: passes replayed so far.
    """

    def __init__(self, device: Device, name: str, mode: CudaGraphs):
        self._device = device
        self._name = name
        self.mode = mode
        self._kept: OrderedDict[Hashable, _Captured] = OrderedDict()
        self._seen: dict[Hashable, int] = {}
        self.problem: str | None = None
        self.captures = 0
        self.replays = 0

    @property
    def active(self) -> bool:
        """Whether passes are captured and replayed."""
        return self.mode is CudaGraphs.ON and self.problem is None

    def replay(self, key: Hashable) -> bool:
        """Put a pass on the stream if it is captured; says whether it was. The lock is held."""
        found = self._kept.get(key)
        if found is None:
            return False
        self._kept.move_to_end(key)
        self._device.replay(found.executable)
        self.replays += 1
        return True

    def due(self, key: Hashable) -> bool:
        """Count a pass that is not captured; says whether it has come often enough."""
        if len(self._seen) >= _MOST_COUNTED:
            self._seen.clear()
        self._seen[key] = self._seen.get(key, 0) + 1
        return self._seen[key] >= CAPTURE_AT

    def capture(self, key: Hashable, context: Any, enqueue: Callable[[], None]) -> None:
        """Capture a pass that has just been run in its own context. The lock is held.

        If it fails, a warning says so, once, and passes are run without graphs from then on.
        """
        try:
            asked = getattr(context, "is_stream_capturable", None)  # TensorRT-RTX knows beforehand
            if asked is not None and not asked(self._device.stream):
                raise CaptureError("the library says that its passes cannot be captured")
            executable = self._device.capture(enqueue)
        except CaptureError as cause:
            self.give_up(str(cause))
            return
        self._seen.pop(key, None)
        self._kept[key] = _Captured(executable, context)
        self.captures += 1
        if len(self._kept) > MOST_GRAPHS:
            self._device.synchronize()
            self._device.forget(self._kept.popitem(last=False)[1].executable)

    def give_up(self, reason: str) -> None:
        """Capture nothing from now on, and say why."""
        self.problem = reason
        logger.warning("engine %s: runs without CUDA graphs, which is slower (%s)", self._name, reason)

    def clear(self) -> None:
        """Forget all captured passes. The lock is held and the stream empty."""
        while self._kept:
            self._device.forget(self._kept.popitem()[1].executable)
        self._seen.clear()
