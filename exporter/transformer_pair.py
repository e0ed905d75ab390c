"""The family of a dense transformer target with a DFlash or DFlash2 draft."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch import nn

from ..bundle import tensors as t
from ..bundle.manifest import ConvInfo, DraftInfo, SelectorInfo, TargetInfo
from ..bundle.tensors import CacheShape, DType, GraphIO, TensorInfo
from .checkpoint import Checkpoint
from .drafts.formats import draft_from_checkpoint
from .drafts.mask_row import check_embedding_copy, mask_row_from_checkpoint
from .drafts.names import MASK_EMBEDDING
from .drafts.spec import DraftSpec
from .modules.layers import RopeSet
from .pairing import check_pair
from .plan import TARGET_PREFIX, ExportPlan, GraphPlan, Side
from .progress import Progress
from .targets.families import target_from_checkpoint
from .targets.spec import TargetSpec
from .trace import TORCH_DTYPES

FLOAT32_PARTS = ("residual", "norms", "rope", "softmax", "fc", "conv", "selector", "logits")
_EMBEDDING = "embed_tokens.weight"


@dataclass(frozen=True)
class TransformerPair:
    """`plan.Pair` of this family: two checkpoints and what they compute."""

    target_checkpoint: Checkpoint
    draft_checkpoint: Checkpoint
    target_spec: TargetSpec
    draft_spec: DraftSpec
    warnings: tuple[str, ...]

    @property
    def target(self) -> Side:
        """See `Pair`."""
        spec = self.target_spec
        return Side(self.target_checkpoint, dict(spec.tensors), spec.checkpoint_dtype)

    @property
    def draft(self) -> Side:
        """See `Pair`."""
        checkpoint, spec = self.draft_checkpoint, self.draft_spec
        mask = {MASK_EMBEDDING: partial(mask_row_from_checkpoint, checkpoint, spec)}
        return Side(checkpoint, dict(spec.tensors), spec.checkpoint_dtype, mask if spec.learned_mask else {})

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
        """Compare the draft's copy of the embedding, where it has one, with the target's; see `Pair`."""
        if self.draft_spec.learned_mask:
            with progress.stage("compare embeddings"):
                embedding = self.target_checkpoint.read(dict(self.target_spec.tensors)[_EMBEDDING])
                check_embedding_copy(self.draft_checkpoint, self.draft_spec, embedding)

    def plan(self, dtype: DType) -> ExportPlan:
        """Plan a graph for the target, one for the draft, and one for each of its DFlash2 parts."""
        target, draft = _infos(self.target_spec, self.draft_spec, dtype)
        graphs = _graphs(self.target_spec, self.draft_spec, target, draft, dtype)
        return ExportPlan(target, draft, tuple(graphs), FLOAT32_PARTS)


def pair_from_checkpoints(target: Checkpoint, draft: Checkpoint) -> TransformerPair:
    """Parse both and check that they fit.

    Raises:
        CheckpointError, UnsupportedError, PairError: see there.
    """
    target_spec, draft_spec = target_from_checkpoint(target), draft_from_checkpoint(draft)
    return TransformerPair(target, draft, target_spec, draft_spec, check_pair(draft_spec, target_spec))


def _infos(target: TargetSpec, draft: DraftSpec, dtype: DType) -> tuple[TargetInfo, DraftInfo]:
    target_info = TargetInfo(
        family=target.family,
        hidden_size=target.hidden_size,
        num_layers=target.num_layers,
        vocab_size=target.vocab_size,
        embedding_rows=target.embedding_rows,
        cache=CacheShape(target.num_layers, target.num_kv_heads, target.head_dim, dtype),
    )
    draft_info = DraftInfo(
        family=draft.family.value,
        format=draft.format.value,
        hidden_size=draft.hidden_size,
        num_layers=len(draft.layers),
        block_size=draft.block_size,
        first_proposal_row=draft.first_proposal_row,
        mask_token_id=draft.mask_token_id,
        taps=draft.taps,
        cache=CacheShape(len(draft.layers), draft.num_kv_heads, draft.head_dim, dtype),
        draft_vocab_size=draft.draft_vocab_size or draft.vocab_size,
        conv=None if draft.conv is None else ConvInfo(draft.conv.kernel_size, draft.conv.group_size),
        selector=None if draft.selector is None else SelectorInfo(draft.selector.rank, draft.selector.top_k),
    )
    return target_info, draft_info


def _graphs(
    target: TargetSpec, draft: DraftSpec, target_info: TargetInfo, draft_info: DraftInfo, dtype: DType
) -> list[GraphPlan]:
    from .modules.draft import DraftModule
    from .modules.selector import Selector
    from .modules.standalone import ConvAlone

    torch_dtype = TORCH_DTYPES[dtype]
    feature_size = len(draft.taps) * target.hidden_size
    draft_vocab = draft_info.draft_vocab_size
    target_ropes = RopeSet.from_specs([target.rope])
    draft_ropes = RopeSet.from_specs(draft.ropes)

    def build_target() -> nn.Module:
        from .modules.target import TargetModule

        return TargetModule(target, draft.taps, target_ropes, torch_dtype)

    def build_draft() -> nn.Module:
        return DraftModule(draft, target.embedding_rows, target.tied, draft_ropes, torch_dtype)

    stages = ["context", *(f"layer.{i}" for i in range(len(draft.layers))), "hidden"]
    if draft.selector is not None:
        stages.append("logits")
    plans = [
        GraphPlan(
            t.TARGET,
            build_target,
            t.target_io(target_info.cache, target.vocab_size, feature_size),
            caches=2 * target.num_layers,
            constants=tuple(target_ropes.constants.items()),
            prefix=TARGET_PREFIX,
        ),
        GraphPlan(
            t.DRAFT,
            build_draft,
            t.draft_io(
                draft_info.cache,
                feature_size,
                draft.block_size,
                draft.proposals,
                draft_vocab,
                None if draft.selector is None else draft.selector.top_k,
            ),
            caches=2 * len(draft.layers),
            stages=tuple(stages),
            kernel_size=None if draft.conv is None else draft.conv.kernel_size,
            constants=tuple(draft_ropes.constants.items()),
        ),
    ]
    if draft.conv is not None:
        conv = draft.conv
        groups = draft.hidden_size // conv.group_size
        plans.append(
            GraphPlan(
                t.CONV,
                lambda: ConvAlone(draft.block_size, conv.group_size),
                GraphIO(
                    (
                        TensorInfo(t.HIDDEN, DType.FLOAT32, (t.BATCH, t.ROWS, draft.hidden_size)),
                        TensorInfo(t.DELTA, DType.FLOAT32, (t.BATCH, t.ROWS, conv.kernel_size, groups)),
                        TensorInfo(t.BASE, DType.FLOAT32, (conv.kernel_size, draft.hidden_size)),
                    ),
                    (TensorInfo(t.OUTPUT, DType.FLOAT32, (t.BATCH, t.ROWS, draft.hidden_size)),),
                ),
                kernel_size=conv.kernel_size,
            )
        )
    if draft.selector is not None:
        selector, rows, k = draft.selector, draft.proposals, draft.selector.top_k
        plans.append(
            GraphPlan(
                t.SELECTOR,
                lambda: Selector(selector, draft.vocab_size, draft.hidden_size),
                GraphIO(
                    (
                        TensorInfo(t.HIDDEN, DType.FLOAT32, (t.BATCH, rows, draft.hidden_size)),
                        TensorInfo(t.UNARY_LOGITS, DType.FLOAT32, (t.BATCH, rows, draft.vocab_size)),
                        TensorInfo(t.ANCHOR_IDS, DType.INT64, (t.BATCH,)),
                    ),
                    (
                        TensorInfo(t.PROPOSALS, DType.INT64, (t.BATCH, rows)),
                        TensorInfo(t.CANDIDATES, DType.INT64, (t.BATCH, rows, k)),
                        TensorInfo(t.EDGE_SCORES, DType.FLOAT32, (t.BATCH, rows, k, k)),
                    ),
                ),
                prefix="draft.candidate_selector.",
            )
        )
    return plans
