"""The losses over a part of the vocabulary, in the head's precision: what makes the training fit a CPU.

Both losses of loss.py, with three savings. The logits are those of the most frequent tokens and of
the step's labels only. The target's distribution is its best tokens; the small rest of its
probability is dropped. And the selector reads its candidates' logits out of the same products,
its gradient joining theirs before the one product that goes back to the hidden rows.

Shapes: n rows, H hidden, U tokens of the subset, k candidates, m tokens of the stored distribution.
"""

import torch
import torch.nn.functional as F
from loss import top_candidates

_GROUP = 48  # as in loss.py: the subset's size is a multiple of it


class Subset:
    """Tokens that take part in a step: the frequent ones, the labels, and fillers."""

    def __init__(self, frequent: torch.Tensor, labels: torch.Tensor, vocab: int):
        tokens = torch.cat([frequent, labels]).unique()
        missing = -len(tokens) % _GROUP
        absent = torch.ones(vocab, dtype=torch.bool)
        absent[tokens] = False
        self.tokens = torch.cat([tokens, absent.nonzero()[:missing, 0]])
        self.place = torch.full((vocab,), -1)
        self.place[self.tokens] = torch.arange(len(self.tokens))


class SubsetLoss(torch.autograd.Function):
    """Cross-entropy of `hidden @ head.T`, summed over rows with equal weights.

    hidden [n, H] fp32, head [U, H], labels [n] and best [n, m] as places in the subset (best:
    -1 outside), chances [n, m]. Returns (loss, candidates [n, k], their logits [n, k + 1], right);
    the last column of the logits is the label's.
    """

    @staticmethod
    def forward(ctx, hidden, head, labels, best, chances, hard, k, slice_rows):
        inside = best >= 0
        wanted = (1 - hard) * chances * inside
        best = best.clamp_min(0)
        total = hidden.new_zeros(())
        slopes = torch.empty(len(hidden), len(head), dtype=head.dtype)
        candidates, values = [], []
        for begin in range(0, len(hidden), slice_rows):
            rows = slice(begin, begin + slice_rows)
            label = labels[rows, None]
            logits = F.linear(hidden[rows].to(head.dtype), head).float()
            found = top_candidates(logits, k)
            candidates.append(found)
            values.append(logits.gather(1, torch.cat([found, label], 1)))
            pull = (wanted[rows] * logits.gather(1, best[rows])).sum(-1)
            pull += hard * values[-1][:, -1]
            mass = hard + wanted[rows].sum(-1)
            level = logits.logsumexp(-1)
            total += (mass * level - pull).sum()
            slope = logits.sub_(level[:, None]).exp_().mul_(mass[:, None])
            slope.scatter_add_(1, best[rows], -wanted[rows])
            slope.scatter_add_(1, label, torch.full_like(label, -hard, dtype=slope.dtype))
            slopes[rows] = slope
        candidates, values = torch.cat(candidates), torch.cat(values)
        ctx.save_for_backward(slopes, torch.cat([candidates, labels[:, None]], 1), head)
        right = candidates[:, 0] == labels
        ctx.mark_non_differentiable(candidates, right)
        return total, candidates, values, right

    @staticmethod
    def backward(ctx, total_gradient, _candidates, value_gradient, _right):
        slopes, places, head = ctx.saved_tensors
        slopes.mul_(total_gradient)
        slopes.scatter_add_(1, places, value_gradient.to(slopes.dtype))
        return (slopes @ head).float(), *[None] * 7


def losses(selector, hidden, embedding, subset, labels, previous, best, chances, hard, k=16):
    """(unary loss, selector loss, right [n]), both summed over the rows.

    labels, previous and best are token ids, chances the target's probabilities of `best`.
    """
    head = embedding[subset.tokens]
    label = subset.place[labels]
    place = subset.place[best]
    unary, candidates, values, right = SubsetLoss.apply(
        hidden, head, label, place, chances, hard, k, 512
    )  # fmt: skip
    # A label outside the candidates takes the last place, so that the row still teaches.
    missed = ~(candidates == label[:, None]).any(-1, keepdim=True)
    last = torch.where(missed, label[:, None], candidates[:, -1:])
    value = torch.where(missed, values[:, -1:], values[:, k - 1 : k])
    candidates = torch.cat([candidates[:, :-1], last], 1)
    scores = torch.cat([values[:, : k - 1], value], 1)
    scores = scores + selector.pair_scores(hidden, previous, subset.tokens[candidates])
    soft = torch.einsum("nkm,nm->nk", (candidates[:, :, None] == place[:, None]).float(), chances)
    soft = soft / soft.sum(-1, keepdim=True).clamp_min(1e-6)
    wanted = (1 - hard) * soft + hard * (candidates == label[:, None]).float()
    pairs = -(wanted * scores.log_softmax(-1)).sum()
    return unary, pairs, right
