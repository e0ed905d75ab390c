"""A toy pair that runs without any inference engine, and drafts that are as good or bad as a test wants.

The target's choice behind a row is a hash of every token before it, read from its cache: a wrong slot, a
wrong length or a row left over from somewhere else changes the output. Its features carry the tokens, so the
draft knows the sequence only from the features it was given, and an oracle draft proposes what the target
will choose only if all of them arrived at their places.

The engines are strict: they check every shape against the limits, spoil an output when the next pass over
the same cache begins, and compute a lone row a little differently, as real ones do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dflash_deploy.bundle.errors import EngineError
from dflash_deploy.bundle.limits import ShapeLimits
from dflash_deploy.bundle.manifest import (
    SCHEMA_VERSION,
    DraftInfo,
    GraphInfo,
    Manifest,
    ProposalLaw,
    TargetInfo,
    TokenizerInfo,
)
from dflash_deploy.bundle.tensors import (
    ANCHOR,
    BLOCK_IDS,
    BLOCK_ROWS,
    CONTEXT_ROWS,
    DRAFT,
    DRAFT_LOGITS,
    FEATURES,
    GREEDY_IDS,
    INPUT_IDS,
    KV,
    LOGIT_ROWS,
    LOGIT_SUMS,
    LOGITS,
    PROPOSALS,
    ROWS,
    SLOTS,
    START,
    TARGET,
    WANTED_ROWS,
    CacheShape,
    DType,
    draft_io,
    target_io,
)
from dflash_deploy.runtime.decoder import Decoder, Settings
from dflash_deploy.runtime.engine import DeviceTensor, resolve_axes

VOCAB = 97
BLOCK = 8
MASK = VOCAB  # inside the padded embedding, outside the vocabulary
FEATURE_SIZE = 2
UNWRITTEN = 0.0


def hash_of(tokens: Sequence[int]) -> int:
    value = 17
    for token in tokens:
        value = (value * 31 + token + 7) % 1_000_003
    return value


def choice(tokens: Sequence[int], lone: bool = False) -> int:
    """The greedy choice behind `tokens`. One in eleven is a near tie, and a lone row sees the other side."""
    value = hash_of(tokens)
    return (value + 1) % VOCAB if lone and value % 11 == 0 else value % VOCAB


def logits_of(tokens: Sequence[int]) -> np.ndarray:
    """Logits behind `tokens`, [VOCAB] float32; the greedy choice is the largest."""
    value = hash_of(tokens)
    logits = ((value * np.arange(3, VOCAB + 3)) % 1009).astype(np.float32) / 300.0
    logits[choice(tokens)] = 4.0
    return logits


def greedy(prompt: Sequence[int], count: int) -> list[int]:
    """What plain decoding gives."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(choice(tokens))
    return tokens[len(prompt) :]


def toy_manifest(
    block_size: int = BLOCK, first_proposal_row: int = 1, max_length: int = 400, stops: tuple[int, ...] = ()
) -> Manifest:
    cache = CacheShape(1, 1, 1, DType.FLOAT32)
    proposals = block_size - first_proposal_row
    graphs = {
        TARGET: GraphInfo("target.onnx", 24, 11, target_io(cache, VOCAB, FEATURE_SIZE)),
        DRAFT: GraphInfo(
            "draft.onnx", 24, 11, draft_io(cache, FEATURE_SIZE, block_size, proposals, VOCAB, None)
        ),
    }
    return Manifest(
        schema_version=SCHEMA_VERSION,
        name="toy",
        dtype=DType.FLOAT32,
        float32_parts=(),
        max_length=max_length,
        slack_slots=block_size,
        target=TargetInfo("toy", 2, 4, VOCAB, VOCAB + 1, cache),
        draft=DraftInfo(
            "toy",
            "toy",
            1,
            1,
            block_size,
            first_proposal_row,
            MASK,
            (0,),
            cache,
            VOCAB,
            proposal_law=ProposalLaw.ROWS,
        ),
        stop_token_ids=stops,
        tokenizer=TokenizerInfo(),
        graphs=graphs,
        provenance={},
        exported_with={},
        files={},
    )


class ToyTensor:
    def __init__(self, values: np.ndarray):
        self.values = values
        self.shape = values.shape

    def to_host(self) -> np.ndarray:
        return self.values


@dataclass(eq=False)
class ToyCache:
    """Tokens are the keys and values: [batch, capacity]."""

    runner: object
    capacity: int
    batch: int
    tokens: np.ndarray
    given_out: list[ToyTensor] = field(default_factory=list)

    def slots_for(self, looked: int, needed: int) -> int:
        assert needed >= looked
        return looked

    def save(self, lane: int, slots: int) -> tuple[np.ndarray, ...]:
        return (self.tokens[None, lane, :slots, None].copy(),)

    def load(self, lane: int, saved: tuple[np.ndarray, ...]) -> None:
        (part,) = saved
        self.tokens[lane, : part.shape[1]] = part[0, :, 0]

    def spoil(self) -> None:
        for tensor in self.given_out:
            tensor.values[...] = -99
        self.given_out.clear()


class ToyRunner:
    """Checks what every engine may rely on; the subclass computes."""

    def __init__(self, manifest: Manifest, graph: str):
        self.info = manifest.graphs[graph]
        self.limits: ShapeLimits | None = None
        self.limits_planned = ShapeLimits.from_manifest(manifest)
        self.effective: Mapping[str, object] = {"engine": "toy", "provider": "toy", "threads": 1}
        self.calls: list[dict[str, int]] = []
        self.caches = 0
        self.closed = False

    def new_cache(self, capacity: int, batch: int = 1) -> ToyCache:
        assert 2 <= capacity <= self.limits_planned.capacity
        self.caches += 1
        return ToyCache(self, capacity, batch, np.full((batch, capacity), UNWRITTEN))

    def run(
        self, cache: Any, inputs: Mapping[str, Any], wanted: Sequence[str], lanes: range | None = None
    ) -> list[DeviceTensor]:
        if self.closed:
            raise EngineError("closed")
        assert cache.runner is self
        cache.spoil()
        lanes = range(cache.batch) if lanes is None else lanes
        assert 0 <= lanes.start < lanes.stop <= cache.batch
        sizes = resolve_axes(
            self.info.io, {n: v.shape for n, v in inputs.items()}, {"batch": len(lanes), "capacity": 0}
        )
        assert {i.name for i in self.info.io.inputs if "past_" not in i.name} == set(inputs)
        self.calls.append(sizes)
        limits, rows = self.limits_planned, sizes[ROWS if ROWS in sizes else CONTEXT_ROWS]
        assert 1 <= rows <= limits.rows
        assert 1 <= sizes[KV] <= cache.capacity
        assert sizes.get(LOGIT_ROWS, 1) <= limits.logit_rows
        starts = inputs[START]
        assert (starts >= 0).all()
        assert (starts + rows <= sizes[KV]).all(), "a row looks at slots that it was not given"
        np.testing.assert_array_equal(inputs[SLOTS], np.arange(sizes[KV]))
        host = {n: (v if isinstance(v, np.ndarray) else v.to_host()).copy() for n, v in inputs.items()}
        self.before(sizes)
        several = len(lanes) > 1
        parts = []
        for row, lane in enumerate(lanes):
            own = {n: v if n == SLOTS else v[row : row + 1] for n, v in host.items()}
            parts.append(self.compute(cache.tokens[lane], own, int(starts[row]), rows, several))
        outputs = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        self.after(outputs)
        given = [ToyTensor(outputs[name]) for name in wanted]
        cache.given_out += given
        return [*given]

    def before(self, sizes: dict[str, int]) -> None:
        """Called with the sizes of every pass; may fail."""

    def after(self, outputs: dict[str, np.ndarray]) -> None:
        """Called with what every pass gives; may spoil it or fail."""

    def compute(
        self, tokens: np.ndarray, inputs: dict, start: int, rows: int, several: bool
    ) -> dict[str, np.ndarray]:
        """One lane's part of a pass: `tokens` [capacity] is its cache; `several` if it has company."""
        raise NotImplementedError

    def close(self) -> None:
        self.closed = True


class ToyTarget(ToyRunner):
    def __init__(self, manifest: Manifest, fail_at: int | None = None, with_logits: bool = False):
        super().__init__(manifest, TARGET)
        self.fail_at = fail_at
        self.with_logits = with_logits

    def before(self, sizes: dict[str, int]) -> None:
        if self.fail_at is not None and len(self.calls) > self.fail_at:
            raise EngineError("target broke")

    def compute(
        self, tokens: np.ndarray, inputs: dict, start: int, rows: int, several: bool
    ) -> dict[str, np.ndarray]:
        ids, wanted = inputs[INPUT_IDS][0], inputs[WANTED_ROWS][0]
        assert (ids >= 0).all()
        assert (ids <= VOCAB).all()
        assert (wanted >= 0).all()
        assert (wanted < rows).all()
        tokens[start : start + rows] = ids
        lone = rows == 1 or (len(wanted) == 1 and not several)
        seen = [int(t) for t in tokens[: start + rows]]
        chosen = [choice(seen[: start + row + 1], lone) for row in wanted]
        positions = np.arange(start, start + rows)
        return {
            GREEDY_IDS: np.array([chosen], np.int64),
            LOGITS: np.stack([logits_of(seen[: start + row + 1]) for row in wanted])[None]
            if self.with_logits
            else np.zeros((1, len(wanted), 0), np.float32),
            FEATURES: np.stack([ids.astype(np.float32), positions.astype(np.float32)], -1)[None],
        }


Spoiler = Callable[[int, int], bool]
"""(position of the proposed token, index of the proposal) -> whether the proposal is spoilt."""


def never(position: int, index: int) -> bool:
    """Never spoilt: the oracle."""
    return False


def always(position: int, index: int) -> bool:
    return True


def sometimes(position: int, index: int) -> bool:
    return hash_of([position]) % 3 == 0


def at_slot(slot: int) -> Spoiler:
    return lambda position, index: index == slot


class ToyDraft(ToyRunner):
    """Knows the future, as far as its context goes, and spoils what `spoiler` says.

    `fault` is called with the number of the call and the outputs, to break either.
    """

    def __init__(
        self,
        manifest: Manifest,
        spoiler: Spoiler = never,
        fault: Callable[[int, dict[str, np.ndarray]], None] | None = None,
        with_logits: bool = False,
    ):
        super().__init__(manifest, DRAFT)
        self.with_logits = with_logits
        self.draft = manifest.draft
        self.spoiler = spoiler
        self.fault = fault

    def after(self, outputs: dict[str, np.ndarray]) -> None:
        if self.fault is not None:
            self.fault(len(self.calls), outputs)

    def compute(
        self, tokens: np.ndarray, inputs: dict, start: int, rows: int, several: bool
    ) -> dict[str, np.ndarray]:
        anchor, block = int(inputs[ANCHOR][0]), inputs[BLOCK_IDS][0]
        block_rows, features = int(inputs[BLOCK_ROWS][0]), inputs[FEATURES][0]
        if several:  # a lane may take no part: then no row is context
            assert start <= anchor <= start + rows
        else:
            assert start < anchor <= start + rows, "a round adds context, and all of it was computed"
        assert 1 <= block_rows <= self.draft.block_size
        assert (block[1:] == MASK).all()
        # Rows at or behind the anchor are padding; the others stand where they belong.
        real = anchor - start
        np.testing.assert_array_equal(features[:real, 1], np.arange(start, anchor))
        tokens[start : start + rows] = features[:, 0]
        sequence = [int(t) for t in tokens[:anchor]] + [int(block[0])]
        ids = np.full((1, self.draft.proposals), -7, np.int64)  # behind the block: nothing
        sums = np.full((1, self.draft.proposals), np.nan)
        logits = np.full((1, self.draft.proposals, VOCAB), np.nan, np.float32)
        for index in range(block_rows - self.draft.first_proposal_row):
            if self.with_logits:
                logits[0, index] = logits_of(sequence)
            token = choice(sequence)
            if self.spoiler(anchor + 1 + index, index):
                token = (token + 1) % VOCAB
            ids[0, index], sums[0, index] = token, 1.0
            sequence.append(token)
        return {PROPOSALS: ids, LOGIT_SUMS: sums, DRAFT_LOGITS: logits}


class ToyDecoder(Decoder):
    def __init__(
        self, manifest: Manifest, target: ToyTarget, draft: ToyDraft, codec: Any, settings: Settings
    ):
        super().__init__(manifest, target, draft, codec, settings)
        self.toy_target, self.toy_draft = target, draft


def toy_decoder(
    spoiler: Spoiler = never,
    fault: Callable[[int, dict[str, np.ndarray]], None] | None = None,
    block_size: int = BLOCK,
    first_proposal_row: int = 1,
    verify_rows: int | None = None,
    exact: bool = True,
    max_length: int = 400,
    stops: tuple[int, ...] = (),
    fail_at: int | None = None,
    codec: Any = None,
    with_logits: bool = False,
) -> ToyDecoder:
    """A decoder over the toy pair."""
    manifest = toy_manifest(block_size, first_proposal_row, max_length, stops)
    target = ToyTarget(manifest, fail_at, with_logits)
    draft = ToyDraft(manifest, spoiler, fault, with_logits)
    rows = manifest.draft.proposals + 1 if verify_rows is None else verify_rows
    return ToyDecoder(manifest, target, draft, codec, Settings(rows, exact, max_length))


def expected_lengths(
    prompt: Sequence[int],
    output: Sequence[int],
    max_new_tokens: int,
    spoiler: Spoiler,
    verify_rows: int,
    proposals: int = BLOCK - 1,
) -> list[int]:
    """Acceptance lengths by counting, for an output that may have been cut by a stop id.

    An oracle that continues its own wrong token is wrong from there on, so the first spoilt slot decides.
    """
    lengths, done = [], 1
    while done < len(output):
        position = len(prompt) + done - 1  # of the anchor
        left = max_new_tokens - done
        verified = min(proposals, left, verify_rows - 1, max(left - 1, 0))
        good = 0
        while good < verified and not spoiler(position + 1 + good, good):
            good += 1
        length = min(good + 1, len(output) - done)
        lengths.append(length)
        done += length
    return lengths
