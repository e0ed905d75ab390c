"""The family of a dense transformer target with a DFlash or DFlash2 draft."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from ..bundle import tensors as t
from ..bundle.manifest import ConvInfo, DraftInfo, ProposalLaw, SelectorInfo, TargetInfo
from ..bundle.tensors import CacheShape, DType, GraphIO, TensorInfo
from .checkpoint import Checkpoint
from .drafts.formats import draft_from_checkpoint
from .drafts.mask_row import check_embedding_copy, mask_row_from_checkpoint
from .drafts.names import MASK_EMBEDDING
from .drafts.spec import ConvSpec, DraftSpec, SelectorSpec
from .modules.layers import RopeSet
from .pairing import check_pair
from .plan import TARGET_PREFIX, ExportPlan, GraphPlan, Side
from .progress import Progress
from .targets.families import target_from_checkpoint
from .targets.spec import NormWeight, TargetSpec
from .targets.tensors import norm_names
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
        return target_side(self.target_checkpoint, self.target_spec)

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
                check_embedding_copy(
                    self.draft_checkpoint,
                    self.draft_spec,
                    self.target_checkpoint,
                    dict(self.target_spec.tensors)[_EMBEDDING],
                )

    def plan(self, dtype: DType) -> ExportPlan:
        """Plan a graph for the target, one for the draft, and one for each of its DFlash2 parts."""
        target, draft = self.target_spec, self.draft_spec
        target_info, draft_info = _infos(target, draft, dtype)
        graphs = [target_graph(target, draft.taps, dtype), _draft_graph(target, draft, draft_info, dtype)]
        if draft.conv is not None:
            graphs.append(_conv_graph(draft, draft.conv))
        if draft.selector is not None:
            graphs.append(_selector_graph(draft, draft.selector))
        return ExportPlan(target_info, draft_info, tuple(graphs), FLOAT32_PARTS)


def target_side(checkpoint: Checkpoint, spec: TargetSpec) -> Side:
    """A target's checkpoint, and how its parameters are read."""
    tensors, loads = dict(spec.tensors), {}
    if spec.norm_weight is NormWeight.ABOVE_ONE:
        loads = {name: partial(_above_one, checkpoint, tensors[name]) for name in norm_names(spec)}
    return Side(checkpoint, tensors, spec.checkpoint_dtype, loads)


def _above_one(checkpoint: Checkpoint, stored: str) -> Tensor:
    """A norm's factor, in the precision in which the original adds."""
    return checkpoint.read(stored).to(torch.float32) + 1.0


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
        cache=_target_cache(target, dtype),
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
        proposal_law=_proposal_law(draft),
    )
    return target_info, draft_info


def _proposal_law(draft: DraftSpec) -> ProposalLaw:
    if draft.selector is not None:
        return ProposalLaw.CANDIDATES
    # A reduced vocabulary's logits are about other ids than the target's.
    return ProposalLaw.ROWS if draft.draft_vocab_size is None else ProposalLaw.FIXED


def _target_cache(target: TargetSpec, dtype: DType) -> CacheShape:
    return CacheShape(target.num_layers, target.num_kv_heads, target.head_dim, dtype)


def target_graph(target: TargetSpec, taps: tuple[int, ...], dtype: DType) -> GraphPlan:
    """Plan the target's graph; its features are the outputs of the layers `taps`."""
    ropes = RopeSet.from_specs([layer.rope for layer in target.layers])

    def build() -> nn.Module:
        from .modules.target import TargetModule

        return TargetModule(target, taps, ropes, TORCH_DTYPES[dtype])

    return GraphPlan(
        t.TARGET,
        build,
        t.target_io(_target_cache(target, dtype), target.vocab_size, len(taps) * target.hidden_size),
        caches=2 * target.num_layers,
        constants=tuple(ropes.constants.items()),
        prefix=TARGET_PREFIX,
    )


def _draft_graph(target: TargetSpec, draft: DraftSpec, info: DraftInfo, dtype: DType) -> GraphPlan:
    ropes = RopeSet.from_specs(draft.ropes)

    def build() -> nn.Module:
        from .modules.draft import DraftModule

        return DraftModule(draft, target.embedding_rows, target.tied, ropes, TORCH_DTYPES[dtype])

    stages = ["context", *(f"layer.{i}" for i in range(len(draft.layers))), "hidden"]
    if draft.selector is not None:
        stages.append("logits")
    return GraphPlan(
        t.DRAFT,
        build,
        t.draft_io(
            info.cache,
            len(draft.taps) * target.hidden_size,
            draft.block_size,
            draft.proposals,
            info.draft_vocab_size,
            None if draft.selector is None else draft.selector.top_k,
        ),
        caches=2 * len(draft.layers),
        stages=tuple(stages),
        kernel_size=None if draft.conv is None else draft.conv.kernel_size,
        constants=tuple(ropes.constants.items()),
    )


def _conv_graph(draft: DraftSpec, conv: ConvSpec) -> GraphPlan:
    def build() -> nn.Module:
        from .modules.standalone import ConvAlone

        return ConvAlone(draft.block_size, conv.group_size)

    groups = draft.hidden_size // conv.group_size
    rows = TensorInfo(t.HIDDEN, DType.FLOAT32, (t.BATCH, t.ROWS, draft.hidden_size))
    delta = TensorInfo(t.DELTA, DType.FLOAT32, (t.BATCH, t.ROWS, conv.kernel_size, groups))
    base = TensorInfo(t.BASE, DType.FLOAT32, (conv.kernel_size, draft.hidden_size))
    out = TensorInfo(t.OUTPUT, DType.FLOAT32, rows.axes)
    return GraphPlan(t.CONV, build, GraphIO((rows, delta, base), (out,)), kernel_size=conv.kernel_size)


def _selector_graph(draft: DraftSpec, selector: SelectorSpec) -> GraphPlan:
    def build() -> nn.Module:
        from .modules.selector import Selector

        return Selector(selector, draft.vocab_size, draft.hidden_size)

    rows, k = draft.proposals, selector.top_k
    inputs = (
        TensorInfo(t.HIDDEN, DType.FLOAT32, (t.BATCH, rows, draft.hidden_size)),
        TensorInfo(t.UNARY_LOGITS, DType.FLOAT32, (t.BATCH, rows, draft.vocab_size)),
        TensorInfo(t.ANCHOR_IDS, DType.INT64, (t.BATCH,)),
    )
    outputs = (
        TensorInfo(t.PROPOSALS, DType.INT64, (t.BATCH, rows)),
        TensorInfo(t.CANDIDATES, DType.INT64, (t.BATCH, rows, k)),
        TensorInfo(t.EDGE_SCORES, DType.FLOAT32, (t.BATCH, rows, k, k)),
    )
    return GraphPlan(t.SELECTOR, build, GraphIO(inputs, outputs), prefix="draft.candidate_selector.")
