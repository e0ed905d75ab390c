"""A simple target and a simple draft in deployment form; plain torch, so they run eagerly too.

Shapes: B batch, S rows, W wanted rows, T context rows, Q block rows, H hidden size, V vocabulary. Rows are
flat in products, [B * Q, H], so that each is one Gemm.

Precision: large matrices have the export dtype; hidden states, logits and what is small are float32.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..modules.greedy import greedy_ids
from .spec import SimpleDraftSpec, SimpleTargetSpec


def _parameter(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """[R, inputs] @ [inputs, outputs] in the weight's dtype; the result is in the dtype of x."""
    return (x.to(weight.dtype) @ weight).to(x.dtype)


class SimpleTarget(nn.Module):
    """The whole target; see `bundle.tensors.target_io`. It has no cache, since no row sees another."""

    def __init__(self, spec: SimpleTargetSpec, dtype: torch.dtype):
        super().__init__()
        h, v = spec.hidden_size, spec.vocab_size
        self.token_embed = _parameter(v, h, dtype=dtype)
        self.layers = nn.ParameterList(_parameter(h, h, dtype=dtype) for _ in range(spec.num_layers))
        self.lm_head = _parameter(h, v, dtype=dtype)

    def forward(
        self, input_ids: Tensor, start: Tensor, slots: Tensor, wanted_rows: Tensor
    ) -> tuple[Tensor, ...]:
        """Run one pass: greedy_ids [B, W], logits [B, W, V], features [B, S, H]."""
        del start, slots  # a row depends neither on its position nor on what came before
        batch, rows = input_ids.shape
        x = _embed(input_ids.reshape(-1), self.token_embed)  # [B * S, H]
        for index, weight in enumerate(self.layers):
            x = _product(torch.relu(x) if index else x, weight)
        wanted = (torch.arange(batch)[:, None] * rows + wanted_rows).reshape(-1)  # [B * W]
        logits = _product(x.index_select(0, wanted), self.lm_head)
        logits = logits.reshape(batch, wanted_rows.shape[1], -1)
        return greedy_ids(logits), logits, x.reshape(batch, rows, -1)


class SimpleDraft(nn.Module):
    """The whole draft, all denoising steps in one call; see `bundle.tensors.draft_io`.

    It has no cache: of the context it uses the last row, the target's state before the anchor. The block is
    always whole: a shorter one is the first rows of it, as the seed program cuts its output.

    ``draft_logits`` row q is what the step computed that chose the token of row q, so that the proposal is
    its argmax.
    """

    def __init__(self, spec: SimpleDraftSpec, dtype: torch.dtype):
        super().__init__()
        self.spec = spec
        h, v, q = spec.hidden_size, spec.vocab_size, spec.block_size
        self.target = nn.ParameterDict({"token_embed": _parameter(v, h, dtype=dtype)})
        self.W_proj = _parameter(h, h)
        self.W_block = _parameter(2 * h, h, dtype=dtype)
        self.W_mix = _parameter(q, q)
        self.pos_embed = _parameter(q, h)
        self.lm_head = _parameter(h, v, dtype=dtype)
        self.token_embed = _parameter(v, h, dtype=dtype)

    def forward(
        self,
        features: Tensor,
        start: Tensor,
        anchor: Tensor,
        block_ids: Tensor,
        block_rows: Tensor,
        slots: Tensor,
    ) -> tuple[Tensor, ...]:
        """Run one round: proposals [B, Q], logit_sums [B, Q], draft_logits [B, Q, V], then the stages.

        Stages: each step's logits [B, Q, V].
        """
        del block_rows, slots
        batch, rows, _ = features.shape
        last = torch.arange(batch) * rows + (anchor - start - 1)  # [B]
        hidden = features.reshape(batch * rows, -1).index_select(0, last)  # [B, H]
        hidden = hidden + _embed(block_ids[:, 0], self.target["token_embed"])
        block, logits, steps = self.denoise(hidden)
        return (block, logits.sum(-1), logits, *steps)

    def denoise(self, hidden: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Choose the tokens of a block, the surest first.

        In each step as many masked positions as the schedule says take their likeliest token; those go
        first whose likeliest token is the most probable, the earlier position on a tie.

        Args:
            hidden: [B, H], the target's state before the anchor plus the anchor's embedding.

        Returns:
            The tokens [B, Q], the logits they were chosen from [B, Q, V], and those of each step.
        """
        spec = self.spec
        batch, size = hidden.shape[0], spec.block_size
        block = torch.full((batch, size), spec.mask_token_id, dtype=torch.int64)
        masked = torch.ones((batch, size), dtype=torch.bool)
        place = torch.arange(size)
        earlier = (place[None, :] < place[:, None])[None]  # [1, Q, Q]: column before row
        steps: list[Tensor] = []
        choices: list[Tensor] = []
        for count in spec.unmask_counts:
            logits = self.logits(hidden, block)  # [B, Q, V]
            shifted = logits - logits.amax(-1, keepdim=True)
            sure = 1.0 / shifted.exp().sum(-1)  # [B, Q]: the probability of the likeliest token
            mine, theirs = sure[:, :, None], sure[:, None, :]
            ahead = (theirs > mine) | ((theirs == mine) & earlier)
            rank = (ahead & masked[:, None, :]).to(torch.float32).sum(-1)  # [B, Q]
            # A NaN is ahead of nobody and nobody ahead of it: it is chosen, and seen in the sums.
            chosen = masked & (rank < count)
            block = torch.where(chosen, logits.argmax(-1), block)
            masked = masked & ~chosen
            steps.append(logits)
            choices.append(chosen)
        kept = steps[0]
        for logits, chosen in zip(steps[1:], choices[1:], strict=True):
            kept = torch.where(chosen[..., None], logits, kept)
        return block, kept, steps

    def logits(self, hidden: Tensor, block: Tensor) -> Tensor:
        """One forward: hidden [B, H], block [B, Q] of tokens and masks -> [B, Q, V]."""
        batch, size = block.shape
        width = self.spec.hidden_size
        # The rows of W_block are for the context, which all positions share, and then for the tokens.
        context = _product(hidden @ self.W_proj, self.W_block[:width])  # [B, H]
        tokens = _embed(block.reshape(-1), self.token_embed).reshape(batch, size, -1) + self.pos_embed
        rows = _product(tokens.reshape(batch * size, -1), self.W_block[width:])  # [B * Q, H]
        x = self.W_mix @ (rows.reshape(batch, size, -1) + context[:, None])  # [B, Q, H]
        logits = _product(torch.relu(x).reshape(batch * size, -1), self.lm_head)
        return logits.reshape(batch, size, -1)


def _embed(ids: Tensor, table: Tensor) -> Tensor:
    """[R] -> [R, H]; half precision becomes float32."""
    rows = F.embedding(ids, table)
    return rows if rows.dtype is torch.float64 else rows.to(torch.float32)
