"""The names, dtypes and axes of every graph's inputs and outputs, written once.

Axis legend: ``batch`` requests; ``rows`` tokens of a request in this pass; ``logit_rows`` rows whose
logits are wanted; ``kv`` cache slots looked at; ``capacity`` slots the cache has; ``context_rows``
new context rows for the draft. Integers are fixed sizes.

How the cache works, for both graphs: row r of a request is written to slot ``start + r``, and its
position is that slot. A row sees the slots up to its own, so slots behind the committed length may hold
anything finite: rolling back is forgetting a number. Only the first ``kv`` slots are looked at, where
``kv`` is the length of the input ``slots`` (always 0, 1, 2, ...): a shape, not a value, so an engine can
plan for it. Each present_* output may be bound to the memory of its past_* input: the update is in place.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

Axis = str | int


class DType(enum.Enum):
    """Element types that occur in graphs."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    INT64 = "int64"

    @property
    def bytes(self) -> int:
        """Size of one element in bytes."""
        return {"float32": 4, "float16": 2, "bfloat16": 2, "int64": 8}[self.value]


@dataclass(frozen=True)
class TensorInfo:
    """One graph input or output."""

    name: str
    dtype: DType
    axes: tuple[Axis, ...]


@dataclass(frozen=True)
class GraphIO:
    """All inputs and outputs of a graph, in order."""

    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]


# Graphs of a bundle.
TARGET = "target"
DRAFT = "draft"
CONV = "conv"
SELECTOR = "selector"

# Axes.
BATCH = "batch"
ROWS = "rows"
LOGIT_ROWS = "logit_rows"
KV = "kv"
CAPACITY = "capacity"
CONTEXT_ROWS = "context_rows"
MOST_SLOTS = 1 << 24  # the largest size of any of them that graphs are made for

# Inputs.
INPUT_IDS = "input_ids"
START = "start"
SLOTS = "slots"
WANTED_ROWS = "wanted_rows"
BLOCK_IDS = "block_ids"
BLOCK_ROWS = "block_rows"
ANCHOR = "anchor_position"

# Outputs.
LOGITS = "logits"
GREEDY_IDS = "greedy_ids"
FEATURES = "features"
PROPOSALS = "proposals"
CANDIDATES = "candidates"
EDGE_SCORES = "edge_scores"
DRAFT_LOGITS = "draft_logits"
LOGIT_SUMS = "logit_sums"

# Conv and selector alone.
HIDDEN = "hidden"
DELTA = "delta"
BASE = "base"
OUTPUT = "output"
UNARY_LOGITS = "unary_logits"
ANCHOR_IDS = "anchor_ids"

# Prefix of the named intermediate values that parity reads.
STAGE = "stage."


def past_key(layer: int) -> str:
    """Name of the key cache input of `layer`."""
    return f"past_key.{layer}"


def past_value(layer: int) -> str:
    """Name of the value cache input of `layer`."""
    return f"past_value.{layer}"


def present(name: str) -> str:
    """Name of the output that updates the cache input `name`."""
    return name.replace("past_", "present_", 1)


@dataclass(frozen=True)
class CacheShape:
    """Sizes of one model's KV cache; one key and one value tensor a layer."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: DType

    def names(self) -> tuple[str, ...]:
        """The past_* names, key and value of each layer in turn."""
        return tuple(n for i in range(self.layers) for n in (past_key(i), past_value(i)))

    def axes(self) -> tuple[Axis, ...]:
        """[batch, kv_heads, capacity, head_dim]."""
        return (BATCH, self.kv_heads, CAPACITY, self.head_dim)

    def bytes(self, batch: int, capacity: int) -> int:
        """Memory of the whole cache in bytes."""
        slots = 2 * self.layers * batch * capacity
        return slots * self.kv_heads * self.head_dim * self.dtype.bytes

    def inputs(self) -> tuple[TensorInfo, ...]:
        """The past_* inputs."""
        return tuple(TensorInfo(name, self.dtype, self.axes()) for name in self.names())

    def outputs(self) -> tuple[TensorInfo, ...]:
        """The present_* outputs."""
        return tuple(TensorInfo(present(name), self.dtype, self.axes()) for name in self.names())


def target_io(cache: CacheShape, vocab_size: int, feature_size: int) -> GraphIO:
    """Inputs and outputs of the target graph; one graph for prefill, verify and plain decoding.

    ``features`` are the tapped layer outputs side by side in the draft's order; ``wanted_rows`` are the
    rows (0-based, within this pass) whose logits are computed; ``greedy_ids`` is their argmax, lowest id
    on a tie, and -1 where a logit is not finite.
    """
    return GraphIO(
        inputs=(
            TensorInfo(INPUT_IDS, DType.INT64, (BATCH, ROWS)),
            TensorInfo(START, DType.INT64, (BATCH,)),
            TensorInfo(SLOTS, DType.INT64, (KV,)),
            TensorInfo(WANTED_ROWS, DType.INT64, (BATCH, LOGIT_ROWS)),
            *cache.inputs(),
        ),
        outputs=(
            TensorInfo(GREEDY_IDS, DType.INT64, (BATCH, LOGIT_ROWS)),
            TensorInfo(LOGITS, DType.FLOAT32, (BATCH, LOGIT_ROWS, vocab_size)),
            TensorInfo(FEATURES, DType.FLOAT32, (BATCH, ROWS, feature_size)),
            *cache.outputs(),
        ),
    )


def draft_io(
    cache: CacheShape,
    feature_size: int,
    block_size: int,
    proposals: int,
    draft_vocab_size: int,
    top_k: int | None,
) -> GraphIO:
    """Inputs and outputs of the draft graph.

    Context row r of ``features`` is the target's row at position ``start + r``; rows at or behind
    ``anchor_position`` are padding: written, never seen, overwritten by the next call. The block's rows
    stand at ``anchor_position + 0 .. block_size - 1``; rows at or behind ``block_rows`` are padding too
    (a shorter block at the end of the budget). ``block_ids`` is the anchor token and then mask tokens.
    ``logit_sums`` is the sum over each proposal row's logits: not finite if any of them is not.
    With a selector (`top_k` given) ``candidates`` holds the top-k ids a row and
    ``edge_scores[b, p, j, c]`` the score of candidate c at row p if candidate j was chosen at row p - 1
    (row 0: j is meaningless, the predecessor is the anchor, all j are equal).
    """
    selection: tuple[TensorInfo, ...] = (
        TensorInfo(DRAFT_LOGITS, DType.FLOAT32, (BATCH, proposals, draft_vocab_size)),
    )
    if top_k is not None:
        selection = (
            TensorInfo(CANDIDATES, DType.INT64, (BATCH, proposals, top_k)),
            TensorInfo(EDGE_SCORES, DType.FLOAT32, (BATCH, proposals, top_k, top_k)),
        )
    return GraphIO(
        inputs=(
            TensorInfo(FEATURES, DType.FLOAT32, (BATCH, CONTEXT_ROWS, feature_size)),
            TensorInfo(START, DType.INT64, (BATCH,)),
            TensorInfo(ANCHOR, DType.INT64, (BATCH,)),
            TensorInfo(BLOCK_IDS, DType.INT64, (BATCH, block_size)),
            TensorInfo(BLOCK_ROWS, DType.INT64, (BATCH,)),
            TensorInfo(SLOTS, DType.INT64, (KV,)),
            *cache.inputs(),
        ),
        outputs=(
            TensorInfo(PROPOSALS, DType.INT64, (BATCH, proposals)),
            TensorInfo(LOGIT_SUMS, DType.FLOAT32, (BATCH, proposals)),
            *selection,
            *cache.outputs(),
        ),
    )
