"""Originals of the package `speculators`: its DFlashDraftModel and DFlash2DraftModel.

The package trains drafts and does not run them: its forward takes a whole sequence, draws anchors among the
positions that a loss mask allows, and puts a block of mask tokens behind each. With one position allowed and
one anchor asked for, that is one round: the block sees the features before the anchor and itself. Rows behind
the anchor only have to exist; they are zeros that nothing sees. It has no shorter block, and no loop.

Shapes: A anchor position, Q block rows, P proposals, H hidden size, V vocabulary of the draft, k candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ...bundle.errors import CheckpointError
from ..checkpoint import Checkpoint
from ..drafts.spec import DraftFamily, DraftSpec
from .hooks import convolutions_of, outputs_of
from .originals import (
    Array,
    DraftRun,
    Question,
    TargetOriginal,
    import_original,
    quiet_transformers,
    to_numpy,
)

DISTRIBUTION = "speculators==0.9.0"


class SpeculatorsDraft:
    """A draft of speculators, run by its own code; see `DraftOriginal`."""

    package = "speculators"

    def __init__(self, model: Any, spec: DraftSpec) -> None:
        """Hold a loaded model that has the target's embedding and head."""
        config = model.config
        self._model = model
        self._selector = model.candidate_selector if spec.family is DraftFamily.DFLASH2 else None
        self.taps = tuple(int(layer) - 1 for layer in model.target_layer_ids)
        self.block_size = self.shortest_block = int(model.block_size)
        self.mask_token_id = int(model.mask_token_id)
        self.first_proposal_row = 0 if config.sample_from_anchor else 1
        ids = torch.arange(model.draft_vocab_size)
        self._target_ids = ids + model.d2t if model.use_draft_vocab else ids

    def run(self, features: Array, question: Question) -> DraftRun:
        """See `DraftOriginal`."""
        model, anchor = self._model, question.anchor
        length = anchor + self.block_size + 1
        states = torch.zeros(1, length, features.shape[-1])
        states[0, :anchor] = torch.from_numpy(np.ascontiguousarray(features[:anchor], np.float32))
        ids = torch.zeros(1, length, dtype=torch.long)
        ids[0, anchor] = question.anchor_id
        allowed = torch.zeros(1, length, dtype=torch.long)
        allowed[0, anchor] = 1
        named = {"context": model.hidden_norm, **{f"layer.{i}": m for i, m in enumerate(model.layers)}}
        with torch.inference_mode(), outputs_of(named) as seen, convolutions_of(model.layers) as convs:
            hidden, logits, *_ = model._backbone_forward(
                states,
                ids,
                allowed,
                torch.zeros(1, length, model.hidden_size),
                torch.zeros(1, length, dtype=torch.long),
                max_anchors=1,
            )
        run = DraftRun(
            context=to_numpy(seen["context"][0, :anchor]),
            layers=tuple(to_numpy(seen[f"layer.{i}"][0]) for i in range(len(model.layers))),
            hidden=to_numpy(hidden[0, self.first_proposal_row :]),
            logits=to_numpy(logits[0, self.first_proposal_row :]),
            proposals=np.zeros(0, np.int64),
            convs=tuple(convs),
        )
        return self._choose(run, question.anchor_id)

    def _choose(self, run: DraftRun, anchor_id: int) -> DraftRun:
        """Add proposals and candidates: the best choice of each slot behind the one before."""
        path, candidates, previous = [], [], anchor_id
        for slot in range(len(run.logits)):
            ids, scores = self.scores(run, slot, [previous])
            previous = int(ids[scores[0].argmax()])
            path.append(previous)
            candidates.append(ids)
        return DraftRun(
            run.context,
            run.layers,
            run.hidden,
            run.logits,
            np.array(path, np.int64),
            np.stack(candidates) if self._selector is not None else None,
            run.convs,
        )

    def scores(self, run: DraftRun, slot: int, previous: Sequence[int]) -> tuple[Array, Array]:
        """See `DraftOriginal`."""
        count = len(previous)
        if self._selector is None:
            return to_numpy(self._target_ids), np.repeat(run.logits[slot][None], count, axis=0)
        with torch.inference_mode():
            ids, scores = self._selector.select(
                torch.from_numpy(run.logits[slot]).expand(count, -1),
                torch.from_numpy(run.hidden[slot]).expand(count, -1),
                torch.tensor(list(previous)),
            )
        return to_numpy(ids[0]), to_numpy(scores)

    def generate(self, prompt: Sequence[int], new_tokens: int, stops: Sequence[int]) -> None:  # noqa: ARG002
        """None: the package has no loop."""
        return


def load(checkpoint: Checkpoint, spec: DraftSpec, target: TargetOriginal) -> SpeculatorsDraft:
    """Load a speculators draft; see `originals.draft_original`."""
    package = import_original("speculators.model", DISTRIBUTION)
    folder = str(checkpoint.files()[0].parent.absolute())
    try:
        with quiet_transformers():
            config = package.SpeculatorModelConfig.from_pretrained(folder, local_files_only=True)
            config.transformer_layer_config._attn_implementation = "eager"
            # Loading would fetch the target by this name; the one that is here is the one to compare with.
            config.speculators_config.verifier.name_or_path = None
            model = package.SpeculatorModel.from_pretrained(
                folder, config=config, dtype=torch.float32, local_files_only=True
            ).eval()
    except Exception as cause:  # damaged files make it raise anything
        raise CheckpointError(f"{checkpoint.name}: speculators cannot load it ({cause})") from cause
    with torch.no_grad():
        model.embed_tokens.weight.copy_(target.model.get_input_embeddings().weight)
        if not model.use_draft_vocab:
            model.lm_head.weight.copy_(target.model.get_output_embeddings().weight)
    return SpeculatorsDraft(model, spec)
