"""Target and draft over one set of weights and caches, with a lane for each request.

A pass is computed for a range of neighbouring lanes. Lanes inside the range that take no part compute
something that nobody looks at: it is written behind their committed slots, where the next pass of theirs
writes first. So who is computed together with whom is a matter of speed alone.

Shapes: N lanes of a pass, R rows, W rows whose logits are wanted, K slots looked at, F feature size, B block
size, P proposals.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import cast

import numpy as np

from ..bundle.errors import EngineError
from ..bundle.limits import EXACT_ROWS, ShapeLimits
from ..bundle.manifest import DraftInfo, Manifest
from ..bundle.tensors import (
    ANCHOR,
    BLOCK_IDS,
    BLOCK_ROWS,
    CANDIDATES,
    FEATURES,
    GREEDY_IDS,
    INPUT_IDS,
    LOGIT_SUMS,
    LOGITS,
    PROPOSALS,
    SLOTS,
    START,
    WANTED_ROWS,
)
from ..bundle.tuned import least_rows
from .engine import DeviceTensor, GraphRunner, HostArray, KVCache, SavedLane
from .lane import Features, Lane, Saved
from .passes import Drafted, DraftFailure, DraftPass, TargetPass, TargetRows
from .stats import Phase


class Pair:
    """Both models, with caches for some requests. One thread at a time."""

    def __init__(
        self,
        manifest: Manifest,
        target: GraphRunner,
        draft: GraphRunner | None,
        capacity: int,
        lanes: int = 1,
        exact: bool = True,
    ):
        """Allocate the caches.

        Args:
            manifest: the bundle's.
            target: its target.
            draft: its draft; None if no request drafts.
            capacity: slots of each lane.
            lanes: most requests at once.
            exact: see `Settings.exact`.

        Raises:
            EngineError: there is no memory for the caches.
        """
        self._info: DraftInfo = manifest.draft
        self._vocab_size = manifest.target.vocab_size
        self._target, self._draft = target, draft
        self._target_cache = target.new_cache(capacity, lanes)
        self._draft_cache = None if draft is None else draft.new_cache(capacity, lanes)
        self._exact = exact
        self._slots = np.arange(capacity, dtype=np.int64)
        self._highest: dict[int, int] = {}  # slots of each lane that were ever written to
        self.lanes = [Lane(index, capacity) for index in range(lanes)]

    # Passes.

    def run_target(self, work: Sequence[tuple[Lane, TargetPass]]) -> list[TargetRows]:
        """Run one pass of the target.

        Args:
            work: at least one lane, each once. Every lane in their range must have room for the longest of
                the passes.

        Returns:
            What each asked for, in order.

        Raises:
            EngineError: see `GraphRunner.run`. The content of all lanes in the range is undefined.
        """
        lanes = self._range(work)
        self._keep_features(self.lanes)  # the memory that they are in is about to be written to
        rows = max(len(asked.ids) for _, asked in work)
        logit_rows = max(asked.logit_rows for _, asked in work)
        rows = max(rows, least_rows(self._target.info.passes, len(lanes), self._exact))
        if self._exact:
            logit_rows = max(logit_rows, -(-EXACT_ROWS // len(lanes)))
        input_ids = np.zeros((len(lanes), rows), np.int64)
        wanted_rows = np.zeros((len(lanes), logit_rows), np.int64)
        for lane, asked in work:
            ids, row = asked.ids, lane.index - lanes.start
            input_ids[row, : len(ids)] = ids
            input_ids[row, len(ids) :] = ids[-1]
            wanted_rows[row, : asked.logit_rows] = np.arange(len(ids) - asked.logit_rows, len(ids))
            wanted_rows[row, asked.logit_rows :] = len(ids) - 1
        within = [self.lanes[index] for index in lanes]
        inputs: dict[str, HostArray | DeviceTensor] = {
            INPUT_IDS: input_ids,
            START: np.array([lane.target.committed for lane in within], np.int64),
            SLOTS: self._slots[: self._slots_for(within, rows)],
            WANTED_ROWS: wanted_rows,
        }
        self._touch(within, [lane.target.committed + rows for lane in within])
        with_features = any(asked.features for _, asked in work)
        wanted = [GREEDY_IDS]
        if any(asked.logits for _, asked in work):
            wanted.append(LOGITS)
        if with_features:
            wanted.append(FEATURES)
        began = perf_counter()
        outputs = dict(zip(wanted, self._target.run(self._target_cache, inputs, wanted, lanes), strict=True))
        greedy = outputs[GREEDY_IDS].to_host()
        logits = outputs[LOGITS].to_host() if LOGITS in outputs else None
        took_ms = (perf_counter() - began) * 1000.0
        for lane in within:
            lane.seen = outputs.get(FEATURES)
        given = []
        for lane, asked in work:
            row = lane.index - lanes.start
            if lane.recorder is not None:
                lane.recorder.ms[asked.phase] += took_ms
            if asked.features:
                lane.features.append(Features(lane.target.committed, outputs[FEATURES], lanes))
            lane.target.write(len(asked.ids))
            given.append(
                TargetRows(
                    greedy[row, : asked.logit_rows].tolist(),
                    logits[row, : asked.logit_rows] if asked.logits and logits is not None else None,
                )
            )
        return given

    def run_draft(self, work: Sequence[tuple[Lane, DraftPass]]) -> list[Drafted | DraftFailure]:
        """Run the draft; the context of each lane ends at its committed length afterwards.

        It is one pass, unless a lane in the range has no room for the longest context among them.

        Args:
            work: at least one lane, each once.

        Returns:
            What each asked for, in order, or why there is none.
        """
        done: dict[Lane, Drafted | DraftFailure] = {
            lane: DraftFailure(lane.draft_lost) for lane, _ in work if lane.draft_lost is not None
        }
        able = [(lane, asked) for lane, asked in work if lane.draft_lost is None]
        if able and self._fits(able):
            done.update(zip((lane for lane, _ in able), self._draft_pass(able), strict=True))
        else:
            for each in able:
                (drafted,) = self._draft_pass([each])
                if not isinstance(drafted, DraftFailure):  # the next pass overwrites it
                    drafted = {name: rows.copy() for name, rows in drafted.items()}
                done[each[0]] = drafted
        return [done[lane] for lane, _ in work]

    def _draft_pass(self, work: Sequence[tuple[Lane, DraftPass]]) -> list[Drafted | DraftFailure]:
        assert self._draft is not None and self._draft_cache is not None
        wanted = list(dict.fromkeys(name for _, asked in work for name in asked.wanted))
        failure = None
        outputs: dict[str, HostArray] = {}
        within = [lane for lane, _ in work]
        context_rows = 0
        began = perf_counter()
        try:
            lanes, features = self._take_features(work)
            within, context_rows = [self.lanes[index] for index in lanes], features.shape[1]
            inputs = self._draft_inputs(work, lanes, features)
            began = perf_counter()
            given = self._draft.run(self._draft_cache, inputs, wanted, lanes)
            outputs = {name: tensor.to_host() for name, tensor in zip(wanted, given, strict=True)}
        except EngineError as cause:
            failure = DraftFailure(str(cause))
            for lane in within:
                lane.draft_lost = failure.cause
        took_ms = (perf_counter() - began) * 1000.0
        results: list[Drafted | DraftFailure] = []
        for lane, asked in work:
            if lane.recorder is not None:
                lane.recorder.ms[asked.phase] += took_ms
            if failure is not None:
                results.append(failure)
                continue
            row = lane.index - lanes.start
            lane.draft.write(context_rows)
            lane.draft.commit(lane.target.committed - lane.draft.committed)
            results.append(self._checked({name: outputs[name][row, : asked.count] for name in asked.wanted}))
        return results

    def _draft_inputs(
        self, work: Sequence[tuple[Lane, DraftPass]], lanes: range, features: HostArray | DeviceTensor
    ) -> dict[str, HostArray | DeviceTensor]:
        within, context_rows = [self.lanes[index] for index in lanes], features.shape[1]
        starts = np.array([lane.draft.committed for lane in within], np.int64)
        anchors = starts.copy()  # of who takes no part: then no row is context
        block_ids = np.full((len(lanes), self._info.block_size), self._info.mask_token_id, np.int64)
        block_rows = np.ones(len(lanes), np.int64)
        for lane, asked in work:
            row = lane.index - lanes.start
            anchors[row] = lane.target.committed
            if asked.count:
                block_ids[row, 0] = asked.anchor
                block_rows[row] = self._info.first_proposal_row + asked.count
        self._touch(within, [lane.draft.committed + context_rows for lane in within])
        return {
            FEATURES: features,
            START: starts,
            ANCHOR: anchors,
            BLOCK_IDS: block_ids,
            BLOCK_ROWS: block_rows,
            SLOTS: self._slots[: max(lane.draft.kv_for(context_rows) for lane in within)],
        }

    # Lanes.

    def catch_up(self, lane: Lane) -> None:
        """Take what the draft has not seen yet of the committed tokens into its context.

        A failing draft is no error: then it has seen less.
        """
        if lane.features and lane.draft.committed < lane.target.committed:
            self.run_draft([(lane, DraftPass(0, 0, (), Phase.DRAFT))])

    def save(self, lane: Lane) -> Saved:
        """Copy what is committed in a lane, and sound."""
        target = lane.target.committed
        draft = lane.draft.committed if lane.draft_lost is None else 0
        return Saved(
            self._target_cache.save(lane.index, target),
            () if self._draft_cache is None else self._draft_cache.save(lane.index, draft),
            target,
            draft,
        )

    def load(self, lane: Lane, saved: Saved, tokens: int) -> None:
        """Put the first `tokens` tokens of what was saved into a lane that was reset."""

        def first(parts: SavedLane, length: int) -> SavedLane:
            return tuple(part[:, :length] for part in parts)

        target, draft = min(saved.target_length, tokens), min(saved.draft_length, tokens)
        self._touch([lane], [max(target, draft)])
        self._target_cache.load(lane.index, first(saved.target, target))
        if self._draft_cache is not None:
            self._draft_cache.load(lane.index, first(saved.draft, draft))
        lane.target.write(target)
        lane.target.commit(target)
        lane.draft.write(draft)
        lane.draft.commit(draft)

    def swap(self, lane: Lane, free: Lane) -> None:
        """Let a lane and a free one change places; the request keeps its `Lane`, with another index."""
        self._keep_features([lane])
        written = lane.target.written, lane.draft.written
        self._touch([free], [max(written)])
        for cache, length in zip(self._caches(), written, strict=False):
            cache.load(free.index, cache.save(lane.index, length))
        self._zero(lane)
        lane.index, free.index = free.index, lane.index
        self.lanes[lane.index], self.lanes[free.index] = lane, free

    def free(self, lane: Lane) -> None:
        """Make a lane as new; its slots become zero, for a NaN in them would spoil who comes next."""
        self._zero(lane)
        lane.reset()

    def close(self) -> None:
        """Free the caches. Nothing else may be called afterwards."""
        del self._target_cache, self._draft_cache

    # Inside.

    def _slots_for(self, within: Sequence[Lane], rows: int) -> int:
        """Slots that a pass of the target looks at."""
        looked = max(lane.target.kv_for(rows) for lane in within)
        return self._target_cache.slots_for(
            looked, max(looked, *(lane.target.written for lane in self.lanes))
        )

    def _caches(self) -> list[KVCache]:
        return [cache for cache in (self._target_cache, self._draft_cache) if cache is not None]

    def _touch(self, lanes: Sequence[Lane], slots: Sequence[int]) -> None:
        for lane, highest in zip(lanes, slots, strict=True):
            self._highest[lane.index] = max(self._highest.get(lane.index, 0), highest)

    def _zero(self, lane: Lane) -> None:
        slots = self._highest.get(lane.index, 0)
        if slots:
            for cache in self._caches():
                kept = cache.save(lane.index, slots)
                cache.load(lane.index, tuple(np.zeros_like(part) for part in kept))
        self._highest.pop(lane.index, None)

    def _range(self, work: Sequence[tuple[Lane, TargetPass | DraftPass]]) -> range:
        indexes = [lane.index for lane, _ in work]
        return range(min(indexes), max(indexes) + 1)

    def _keep_features(self, lanes: Sequence[Lane]) -> None:
        """Copy features of committed rows out of memory that the next pass overwrites."""
        whole: dict[int, HostArray] = {}
        for lane in lanes:
            for features in lane.features:
                if features.lanes is not None:
                    tensor = cast("DeviceTensor", features.tensor)
                    if id(tensor) not in whole:
                        whole[id(tensor)] = tensor.to_host()
                    rows = lane.target.committed - features.start
                    features.tensor = whole[id(tensor)][lane.index - features.lanes.start, :rows].copy()
                    features.lanes = None

    def _fits(self, work: Sequence[tuple[Lane, DraftPass]]) -> bool:
        """Whether a pass for all of them has room in each lane of the range."""
        if len(work) < 2 or self._in_place(work) is not None:
            return True
        rows = max(lane.target.committed - lane.draft.committed for lane, _ in work)
        within = [self.lanes[index] for index in self._range(work)]
        return all(lane.draft.committed + rows <= lane.draft.capacity for lane in within)

    def _in_place(self, work: Sequence[tuple[Lane, DraftPass]]) -> Features | None:
        """Features where the target's last pass left them, if they are all that is to be taken in, and fit.

        A lane that takes no part gets what stands there too. It must be its own: what a request leaves behind
        may be NaN, which must not get into the lane of the next.
        """
        found = work[0][0].features[0] if work[0][0].features else None
        if found is None or found.lanes is None:
            return None
        whole = all(
            len(lane.features) == 1
            and lane.features[0].tensor is found.tensor
            and lane.features[0].start == lane.draft.committed
            for lane, _ in work
        )
        rows = found.tensor.shape[1]
        own = all(
            lane.seen is found.tensor and lane.draft.committed + rows <= lane.draft.capacity
            for lane in self.lanes[found.lanes.start : found.lanes.stop]
        )
        return found if whole and own else None

    def _take_features(
        self, work: Sequence[tuple[Lane, DraftPass]]
    ) -> tuple[range, HostArray | DeviceTensor]:
        """Features of each lane from the end of the draft's context to the committed length, [N, R, F].

        After a pass of the target over the same lanes they are where that pass left them, and are not moved.
        """
        found = self._in_place(work)
        if found is not None and found.lanes is not None:
            lanes, tensor = found.lanes, found.tensor
        else:
            lanes = self._range(work)
            parts = []
            self._keep_features([lane for lane, _ in work])
            for lane, _ in work:
                if not lane.features or lane.features[0].start != lane.draft.committed:
                    raise ValueError(
                        f"lane {lane.index}: draft context ends at {lane.draft.committed}, the target's "
                        f"features start at {[part.start for part in lane.features]}"
                    )
                parts.append(np.concatenate([part.tensor for part in lane.features]))
            size = max(len(part) for part in parts)
            tensor = np.zeros((len(lanes), size, parts[0].shape[1]), parts[0].dtype)
            for (lane, _), part in zip(work, parts, strict=True):
                tensor[lane.index - lanes.start, : len(part)] = part
        for lane, _ in work:
            lane.features = []
        return lanes, tensor

    def _checked(self, drafted: Drafted) -> Drafted | DraftFailure:
        sums = drafted.get(LOGIT_SUMS)
        if sums is not None and not np.isfinite(sums).all():
            return DraftFailure(f"logits of proposal {int(np.isfinite(sums).argmin()) + 1} are not finite")
        for name in (PROPOSALS, CANDIDATES):
            ids = drafted.get(name)
            if ids is not None and ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < self._vocab_size:
                return DraftFailure(
                    f"{name} {ids.ravel().tolist()[:8]} are not all tokens, 0 <= id < {self._vocab_size}"
                )
        return drafted


def prefill_rows(limits: ShapeLimits | None, default: int) -> int:
    """Most rows of a prompt in one pass."""
    return default if limits is None else min(default, limits.rows)
