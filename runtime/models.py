"""Target and draft of one request: input arrays, padding, committed lengths, times.

Shapes: R rows of a pass, W rows whose logits are wanted, K slots looked at, B block size, P proposals. The
batch is 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import numpy as np

from ..bundle.errors import EngineError
from ..bundle.limits import EXACT_ROWS
from ..bundle.manifest import DraftInfo
from ..bundle.tensors import (
    ANCHOR,
    BLOCK_IDS,
    BLOCK_ROWS,
    FEATURES,
    GREEDY_IDS,
    INPUT_IDS,
    LOGIT_SUMS,
    PROPOSALS,
    SLOTS,
    START,
    WANTED_ROWS,
)
from .engine import DeviceTensor, GraphRunner, IntArray
from .kv import CacheLength
from .stats import Phase, Recorder


class DraftFailure(Exception):  # noqa: N818 - not an error of the request, which goes on without the draft
    """The draft gave nothing usable."""


class Target:
    """The target model of one request.

    Attributes:
        length: committed length of its cache.
        features: what the last pass computed at the taps, [1, R, F], on the device; None unless asked for.
        features_start: position of the first of these rows.
    """

    def __init__(
        self, runner: GraphRunner, capacity: int, exact: bool, with_features: bool, recorder: Recorder
    ):
        self._runner = runner
        self._cache = runner.new_cache(capacity)
        self._min_rows = EXACT_ROWS if exact else 1
        self._wanted = (GREEDY_IDS, FEATURES) if with_features else (GREEDY_IDS,)
        self._slots = np.arange(capacity, dtype=np.int64)
        self._recorder = recorder
        self.length = CacheLength(capacity)
        self.features: DeviceTensor | None = None
        self.features_start = 0

    def run(self, ids: Sequence[int], logit_rows: int, phase: Phase) -> list[int]:
        """Run one pass over `ids` behind the committed tokens; commits nothing.

        Args:
            ids: R tokens.
            logit_rows: W, how many rows, counted from the last, are wanted.
            phase: where to book the time.

        Returns:
            The greedy choice behind each of the last W rows.

        Raises:
            EngineError: see `GraphRunner.run`.
        """
        rows, start = len(ids), self.length.committed
        padded = max(rows, self._min_rows)
        input_ids = np.empty((1, padded), np.int64)
        input_ids[0, :rows] = ids
        input_ids[0, rows:] = ids[-1]
        wanted = np.empty((1, max(logit_rows, self._min_rows)), np.int64)
        wanted[0, :logit_rows] = np.arange(rows - logit_rows, rows)
        wanted[0, logit_rows:] = rows - 1
        kv = self.length.kv_for(padded)
        inputs: dict[str, IntArray | DeviceTensor] = {
            INPUT_IDS: input_ids,
            START: np.array([start], np.int64),
            SLOTS: self._slots[:kv],
            WANTED_ROWS: wanted,
        }
        began = perf_counter()
        outputs = self._runner.run(self._cache, inputs, self._wanted)
        greedy: list[int] = outputs[0].to_host()[0, :logit_rows].tolist()
        self._recorder.ms[phase] += (perf_counter() - began) * 1000.0
        self.length.write(rows)
        if len(outputs) > 1:
            self.features, self.features_start = outputs[1], start
        return greedy


class Draft:
    """The draft model of one request.

    Attributes:
        length: committed context length: positions whose features the draft has seen.
    """

    def __init__(
        self, runner: GraphRunner, info: DraftInfo, vocab_size: int, capacity: int, recorder: Recorder
    ):
        self._runner = runner
        self._info = info
        self._vocab_size = vocab_size
        self._cache = runner.new_cache(capacity)
        self._slots = np.arange(capacity, dtype=np.int64)
        self._recorder = recorder
        self.length = CacheLength(capacity)

    def absorb(self, target: Target) -> None:
        """Take the target's last pass into the context; proposes nothing. For a prompt in several parts.

        Raises:
            DraftFailure: the engine failed.
        """
        self._run(target, target.length.committed, self._info.mask_token_id, 1, (), Phase.PREFILL)

    def propose(self, target: Target, anchor: int, count: int) -> list[int]:
        """Take the target's last pass into the context and propose tokens behind the anchor.

        Args:
            target: its committed length is the anchor's position; its last pass is where this draft's
                context ends.
            anchor: the token chosen last.
            count: proposals wanted, at most `DraftInfo.proposals`. The block is that much shorter, which
                is not the same as proposing more and dropping some: rows of a block see each other.

        Raises:
            DraftFailure: the engine failed, logits are not finite, or a proposal is no token.
        """
        block_rows = self._info.first_proposal_row + count
        outputs = self._run(
            target, target.length.committed, anchor, block_rows, (PROPOSALS, LOGIT_SUMS), Phase.DRAFT
        )
        proposals, sums = outputs[0][0, :count], outputs[1][0, :count]
        if not np.isfinite(sums).all():
            raise DraftFailure(f"logits of proposal {int(np.isfinite(sums).argmin()) + 1} are not finite")
        ids: list[int] = proposals.tolist()
        if min(ids) < 0 or max(ids) >= self._vocab_size:
            raise DraftFailure(f"proposals {ids} are not all tokens, 0 <= id < {self._vocab_size}")
        return ids

    def _run(
        self,
        target: Target,
        anchor_position: int,
        anchor: int,
        block_rows: int,
        wanted: tuple[str, ...],
        phase: Phase,
    ) -> list[np.ndarray]:
        features, start = target.features, self.length.committed
        if features is None or target.features_start != start:
            raise ValueError(f"draft context ends at {start}, the target's last pass is from elsewhere")
        context_rows = features.shape[1]
        kv = self.length.kv_for(context_rows)
        block_ids = np.full((1, self._info.block_size), self._info.mask_token_id, np.int64)
        block_ids[0, 0] = anchor
        inputs: dict[str, IntArray | DeviceTensor] = {
            FEATURES: features,
            START: np.array([start], np.int64),
            ANCHOR: np.array([anchor_position], np.int64),
            BLOCK_IDS: block_ids,
            BLOCK_ROWS: np.array([block_rows], np.int64),
            SLOTS: self._slots[:kv],
        }
        began = perf_counter()
        try:
            outputs = [output.to_host() for output in self._runner.run(self._cache, inputs, wanted)]
        except EngineError as cause:
            raise DraftFailure(str(cause)) from cause
        finally:
            self._recorder.ms[phase] += (perf_counter() - began) * 1000.0
        self.length.write(context_rows)
        self.length.commit(anchor_position - start)
        return outputs
