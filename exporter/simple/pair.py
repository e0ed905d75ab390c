"""A simple target and its draft, as `export_bundle` sees them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...bundle import tensors as t
from ...bundle.errors import PairError, field_error
from ...bundle.manifest import DraftInfo, TargetInfo
from ...bundle.tensors import CacheShape, DType
from ..checkpoint import Checkpoint
from ..plan import TARGET_PREFIX, ExportPlan, GraphPlan, Side
from ..progress import Progress
from .checkpoint import DRAFT_TYPE, TARGET_TYPE, draft_from_checkpoint, target_from_checkpoint
from .spec import FAMILY, FORMAT, SimpleDraftSpec, SimpleTargetSpec

if TYPE_CHECKING:
    from torch import nn

FLOAT32_PARTS = ("hidden", "W_proj", "W_mix", "pos_embed", "logits")


@dataclass(frozen=True)
class SimplePair:
    """`plan.Pair` of this family."""

    target: Side
    draft: Side
    target_spec: SimpleTargetSpec
    draft_spec: SimpleDraftSpec
    warnings: tuple[str, ...]

    @property
    def max_length(self) -> int:
        """See `Pair`."""
        return self.target_spec.max_position_embeddings

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """See `Pair`."""
        return self.target_spec.stop_token_ids

    @property
    def bos_token_id(self) -> int | None:
        """See `Pair`."""
        return self.target_spec.bos_token_id

    def check_weights(self, progress: Progress) -> None:
        """See `Pair`; there is nothing to check."""

    def plan(self, dtype: DType) -> ExportPlan:
        """Plan two graphs, both without caches; the one tap is the target's last layer."""
        from ..trace import TORCH_DTYPES
        from .modules import SimpleDraft, SimpleTarget

        target, draft = self.target_spec, self.draft_spec
        no_cache = CacheShape(layers=0, kv_heads=0, head_dim=0, dtype=dtype)
        torch_dtype = TORCH_DTYPES[dtype]

        def build_target() -> nn.Module:
            return SimpleTarget(target, torch_dtype)

        def build_draft() -> nn.Module:
            return SimpleDraft(draft, torch_dtype)

        return ExportPlan(
            target=TargetInfo(
                family=FAMILY,
                hidden_size=target.hidden_size,
                num_layers=target.num_layers,
                vocab_size=target.vocab_size,
                embedding_rows=target.vocab_size,
                cache=no_cache,
            ),
            draft=DraftInfo(
                family=FAMILY,
                format=FORMAT,
                hidden_size=draft.hidden_size,
                num_layers=1,
                block_size=draft.block_size,
                first_proposal_row=0,
                mask_token_id=draft.mask_token_id,
                taps=(target.num_layers - 1,),
                cache=no_cache,
                draft_vocab_size=draft.vocab_size,
            ),
            graphs=(
                GraphPlan(
                    t.TARGET,
                    build_target,
                    t.target_io(no_cache, target.vocab_size, target.hidden_size),
                    prefix=TARGET_PREFIX,
                ),
                GraphPlan(
                    t.DRAFT,
                    build_draft,
                    t.draft_io(
                        no_cache,
                        target.hidden_size,
                        draft.block_size,
                        draft.block_size,
                        draft.vocab_size,
                        top_k=None,
                    ),
                    stages=tuple(f"step.{i}" for i in range(len(draft.unmask_counts))),
                ),
            ),
            float32_parts=FLOAT32_PARTS,
        )


def pair_from_checkpoints(target: Checkpoint, draft: Checkpoint) -> SimplePair:
    """Parse both and check that they fit.

    Raises:
        CheckpointError, UnsupportedError: see `target_from_checkpoint`.
        PairError: the target is of another family or of other sizes.
    """
    model_type = target.config.get("model_type")
    if model_type != TARGET_TYPE:
        raise field_error(
            PairError,
            f"{target.name}: target model_type",
            model_type,
            f"{TARGET_TYPE!r} for a draft of model_type {DRAFT_TYPE!r}",
            "choose the target this draft was made for",
        )
    target_spec, draft_spec = target_from_checkpoint(target), draft_from_checkpoint(draft)
    warnings = check_pair(draft_spec, target_spec)
    return SimplePair(
        Side(target, dict(target_spec.tensors), target_spec.checkpoint_dtype),
        Side(draft, dict(draft_spec.tensors), draft_spec.checkpoint_dtype),
        target_spec,
        draft_spec,
        warnings,
    )


def check_pair(draft: SimpleDraftSpec, target: SimpleTargetSpec) -> tuple[str, ...]:
    """Check that a draft can run on a target by their specs.

    Returns:
        Warnings.

    Raises:
        PairError: names the size that differs.
    """
    for size in ("hidden_size", "vocab_size"):
        got, expected = getattr(draft, size), getattr(target, size)
        if got != expected:
            raise field_error(
                PairError,
                size,
                got,
                f"{expected}, the target's {size}",
                "choose the target this draft was made for",
            )
    if draft.mask_token_id in target.stop_token_ids:
        return (f"mask_token_id: got {draft.mask_token_id}, which is also a stop id",)
    return ()
