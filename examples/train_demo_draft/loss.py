"""The two losses: block logits over the full vocabulary, and the selector over its candidates.

Both compare with a mixture of the target's own distribution and the token that really came.

Shapes: n rows (every proposing row of every anchor), H hidden, V vocabulary, k candidates.
"""

import torch

_GROUP = 48  # divides the vocabulary of 49,152


def top_candidates(logits: torch.Tensor, k: int) -> torch.Tensor:
    """Indices [n, k] of the k largest logits, exactly, in one pass over the vocabulary.

    The k largest lie in the k groups with the largest maxima, so only those are searched.
    """
    grouped = logits.unflatten(-1, (-1, _GROUP))
    groups = grouped.amax(-1).topk(k, -1).indices  # [n, k]
    inside = grouped.gather(1, groups[:, :, None].expand(-1, -1, _GROUP)).flatten(1)
    found = inside.topk(k, -1).indices
    return groups.gather(1, found // _GROUP) * _GROUP + found % _GROUP


class VocabularyLoss(torch.autograd.Function):
    """Weighted cross-entropy of `hidden @ head.T` against a mixture, in slices of rows.

    The head is frozen, so the gradient of `hidden` is made on the spot and no slice's logits
    outlive it: memory stays flat where autograd would hold several [n, V] tensors.
    Returns (loss sum, candidates [n, k], right [n]: the best logit is the label's).
    """

    @staticmethod
    def forward(ctx, hidden, head, probabilities, source, labels, weights, hard, k, slice_rows):
        gradient = torch.empty_like(hidden)
        total = hidden.new_zeros(())
        candidates, right = [], []
        for rows in torch.arange(len(hidden), device="cpu").split(slice_rows):
            part = slice(int(rows[0]), int(rows[-1]) + 1)
            label = labels[part, None]
            logits = hidden[part] @ head.T
            best = top_candidates(logits, k)
            candidates.append(best)
            right.append(logits.gather(1, label)[:, 0] >= logits.gather(1, best[:, :1])[:, 0])
            log_q = logits.log_softmax(-1)
            p = probabilities[source[part]].float().mul_(1 - hard)
            p.scatter_add_(1, label, torch.full_like(label, hard, dtype=p.dtype))
            weight = weights[part]
            total -= (weight * torch.linalg.vecdot(p, log_q)).sum()
            slope = log_q.exp_().sub_(p).mul_(weight[:, None])
            gradient[part] = slope @ head
        ctx.save_for_backward(gradient)
        outputs = total, torch.cat(candidates), torch.cat(right)
        ctx.mark_non_differentiable(*outputs[1:])
        return outputs

    @staticmethod
    def backward(ctx, total_gradient, *_):
        (gradient,) = ctx.saved_tensors
        return gradient * total_gradient, *[None] * 8


def selector_loss(selector, hidden, head, candidates, previous, labels, mixture, weights, hard):
    """Cross-entropy over the candidates, with the true previous token as predecessor.

    A label outside the candidates takes the last place, so that the row still teaches.
    `mixture(candidates)` gives the target's probabilities of the candidates, [n, k].
    """
    hit = candidates == labels[:, None]
    last = torch.where(hit.any(-1), candidates[:, -1], labels)
    candidates = torch.cat([candidates[:, :-1], last[:, None]], 1)
    hit = candidates == labels[:, None]
    unary = torch.einsum("nh,nkh->nk", hidden, head[candidates])
    scores = unary + selector.pair_scores(hidden, previous, candidates)
    soft = mixture(candidates).float()
    soft = soft / soft.sum(-1, keepdim=True).clamp_min(1e-6)
    wanted = (1 - hard) * soft + hard * hit.float()
    return -(weights * (wanted * scores.log_softmax(-1)).sum(-1)).sum()
