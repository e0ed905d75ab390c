"""The optional graph of a whole round: verify, accept, draft the next block; its inputs and outputs.

``input_ids`` are the anchor and the proposals behind it; rows at or behind ``verify_rows`` (at least 1, at
most R) are padding. ``start`` is the anchor's position, and must be how much the draft has taken in. Both
models' ``slots`` and caches are as in their own graphs: they reach to ``start + R`` at least. ``block_rows``
are the rows of the next block that count.

``accepted`` is how many proposals stand, ``verify_rows - 1`` at most. The next anchor is
``greedy_ids[b, accepted[b]]``, at position ``start + accepted + 1``; -1 says that it could not be chosen, and
then ``proposals`` and the draft's caches mean nothing.

Shapes: B batch, R rows.
"""

from __future__ import annotations

from . import tensors as t

ROUND = "round"
"""Its key in the manifest."""
VERIFY_ROWS = "verify_rows"
ACCEPTED = "accepted"


def of_model(model: str, name: str) -> str:
    """Name of an input or output that both models have: ``draft.past_key.0``.

    Args:
        model: `TARGET` or `DRAFT`.
        name: what it is called in the model's own graph.
    """
    return f"{model}.{name}"


def own_axes(model: str) -> dict[str, str]:
    """Axes that are called the same in both models' graphs, and may differ in size: what they are called."""
    return {axis: f"{model}_{axis}" for axis in (t.KV, t.CAPACITY)}


def round_io(target: t.CacheShape, draft: t.CacheShape, proposals: int) -> t.GraphIO:
    """Inputs and outputs.

    Args:
        target: its caches.
        draft: its caches.
        proposals: of a block.
    """
    each_row, each_proposal = (t.BATCH, t.ROWS), (t.BATCH, proposals)

    def renamed(model: str, infos: tuple[t.TensorInfo, ...]) -> tuple[t.TensorInfo, ...]:
        own = own_axes(model)
        return tuple(
            t.TensorInfo(
                of_model(model, info.name),
                info.dtype,
                tuple(own.get(axis, axis) if isinstance(axis, str) else axis for axis in info.axes),
            )
            for info in infos
        )

    slots = (t.TensorInfo(t.SLOTS, t.DType.INT64, (t.KV,)),)
    return t.GraphIO(
        inputs=(
            t.TensorInfo(t.INPUT_IDS, t.DType.INT64, each_row),
            t.TensorInfo(VERIFY_ROWS, t.DType.INT64, (t.BATCH,)),
            t.TensorInfo(t.START, t.DType.INT64, (t.BATCH,)),
            t.TensorInfo(t.BLOCK_ROWS, t.DType.INT64, (t.BATCH,)),
            *renamed(t.TARGET, slots),
            *renamed(t.DRAFT, slots),
            *renamed(t.TARGET, target.inputs()),
            *renamed(t.DRAFT, draft.inputs()),
        ),
        outputs=(
            t.TensorInfo(t.GREEDY_IDS, t.DType.INT64, each_row),
            t.TensorInfo(ACCEPTED, t.DType.INT64, (t.BATCH,)),
            t.TensorInfo(t.PROPOSALS, t.DType.INT64, each_proposal),
            t.TensorInfo(t.LOGIT_SUMS, t.DType.FLOAT32, each_proposal),
            *renamed(t.TARGET, target.outputs()),
            *renamed(t.DRAFT, draft.outputs()),
        ),
    )
