"""DFlash2's candidate selector with the whole path walk.

Counterpart of z-lab's `dflash.model.CandidateSelector.select` and of speculators' `CandidateSelector`.
Shapes: B batch, P proposal rows, k candidates, r rank, V vocabulary, H hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..drafts.spec import SelectorSpec


class Selector(nn.Module):
    """Scores transitions between candidates of neighbouring rows and walks the best path; float32."""

    def __init__(self, spec: SelectorSpec, vocab_size: int, hidden_size: int):
        super().__init__()
        shape = (vocab_size, spec.rank)
        self.top_k = spec.top_k
        self.predecessor_codebook = nn.Parameter(torch.empty(shape), requires_grad=False)
        self.successor_codebook = nn.Parameter(torch.empty(shape), requires_grad=False)
        self.hidden_projection = nn.Linear(hidden_size, spec.rank, bias=False).requires_grad_(False)

    def forward(self, hidden: Tensor, unary: Tensor, anchor_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Choose one candidate a row, left to right from the anchor.

        Args:
            hidden: [B, P, H], the draft's final norm output.
            unary: [B, P, V], the draft's logits.
            anchor_ids: [B].

        Returns:
            The path [B, P], the candidates [B, P, k] (best first, lower id first on a tie), and
            the scores [B, P, k, k] of each candidate (last axis) given each predecessor.
        """
        batch, rows, _ = unary.shape
        top = torch.topk(unary, self.top_k, dim=-1)
        candidates = top.indices  # [B, P, k]
        projected = F.linear(hidden.reshape(-1, hidden.shape[-1]), self.hidden_projection.weight)
        projected = projected.reshape(batch, rows, 1, -1)  # [B, P, 1, r]
        first = anchor_ids[:, None, None].expand(-1, 1, self.top_k)
        previous = torch.cat([first, candidates[:, :-1]], dim=1)  # [B, P, k]
        context = F.embedding(previous, self.predecessor_codebook) * projected  # [B, P, k, r]
        successor = F.embedding(candidates, self.successor_codebook)  # [B, P, k, r]
        scores = top.values[:, :, None, :] + context @ successor.transpose(-1, -2)  # [B, P, k, k]
        best = scores.argmax(-1)  # [B, P, k]: the choice at row p for each choice at row p - 1
        choice = best[:, 0, :1]  # [B, 1]
        choices = [choice]
        for row in range(1, rows):
            choice = best[:, row].gather(1, choice)
            choices.append(choice)
        path = candidates.gather(2, torch.stack(choices, dim=1))[:, :, 0]
        return path, candidates, scores
