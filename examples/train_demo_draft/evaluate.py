"""Step 3: acceptance length of greedy decoding, simulated on answers that are already known.

One forward of the target gives every context; the draft then proposes at every answer position,
and a walk along the answer counts the rounds that real decoding would have needed.
"""

import torch
from draft import Draft
from target import Llama


@torch.no_grad()
def accepted_everywhere(
    draft: Draft, target: Llama, ids: list[int], start: int, anchors_at_once: int = 64
) -> dict[str, list[int]]:
    """Accepted proposals at each anchor start .. len(ids) - 2, with and without the selector."""
    device = target.device
    row = torch.tensor([ids], device=device)
    padded = torch.nn.functional.pad(row, (0, -len(ids) % 64))  # few shapes; causal, so harmless
    features, _ = target.forward(padded, draft.taps)
    selector = draft.candidate_selector
    accepted: dict[str, list[int]] = {"selector": [], "unary": []}
    for part in torch.arange(start, len(ids) - 1, device=device).split(anchors_at_once):
        with torch.autocast(row.device.type, torch.bfloat16, target.dtype == torch.bfloat16):
            hidden = draft(features, padded, part[None], target.embedding)[0].float()  # [A, N-1, H]
        logits = target.logits(hidden)
        top = logits.topk(draft.top_k, -1)
        previous, path = row[0, part], []
        for place in range(draft.block - 1):
            pair = selector.pair_scores(hidden[:, place], previous, top.indices[:, place])
            best = (top.values[:, place] + pair).argmax(-1, keepdim=True)
            previous = top.indices[:, place].gather(1, best)[:, 0]
            path.append(previous)
        label_at = part[:, None] + torch.arange(1, draft.block, device=device)
        inside = label_at < len(ids)
        labels = row[0, label_at.clamp_max(len(ids) - 1)]
        for name, tokens in (("selector", torch.stack(path, 1)), ("unary", top.indices[..., 0])):
            right = ((tokens == labels) & inside).long().cumprod(1).sum(1)
            accepted[name] += right.tolist()
    return accepted


def rounds_along(accepted: list[int]) -> int:
    """Speculative rounds from the first answer token (already known) to the last."""
    at = rounds = 0
    while at < len(accepted):
        at += accepted[at] + 1
        rounds += 1
    return rounds


def acceptance(draft: Draft, target: Llama, answers: list[tuple[list[int], int]]) -> dict:
    """Mean tokens per round over all answers; an answer is (ids, where it starts)."""
    draft.eval()
    tokens, rounds = 0, {"selector": 0, "unary": 0}
    for ids, start in answers:
        tokens += len(ids) - 1 - start
        for name, accepted in accepted_everywhere(draft, target, ids, start).items():
            rounds[name] += rounds_along(accepted)
    draft.train()
    return {name: round(tokens / max(count, 1), 4) for name, count in rounds.items()} | {
        "tokens": tokens,
        "rounds": rounds["selector"],
    }
