"""Between the steps on a CPU: the answer tokens that a draft does not foresee, where rounds start.

A round starts at the token that the one before got wrong, so rounds stand at the hard places, and
training does well to look there more often than elsewhere. Hard is a token that the draft misses
although it knows all tokens before it: every walk along the answer has a round that starts there.

Shapes: B conversations, T tokens, H hidden, U tokens that are proposed among.
"""

import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from draft import Draft
from stored import Batch, Stored

_AT_ONCE = 12


@torch.no_grad()
def foreseen(draft: Draft, embedding: torch.Tensor, tokens: torch.Tensor, batch: Batch,
             dtype: torch.dtype) -> torch.Tensor:  # fmt: skip
    """[B, T] bool: the draft's first proposal at the token before, among `tokens` [U], is this token.

    False everywhere but in answers, and at an answer's first token. The rows behind the first
    proposal are left out of the block, which changes little and saves three quarters.
    """
    ids, length = batch.ids, batch.ids.shape[1]
    first = int(batch.starts.min())
    anchors = torch.arange(first, length - 1).expand(len(ids), -1)
    with torch.autocast("cpu", torch.bfloat16, dtype == torch.bfloat16):
        hidden = draft(batch.features.to(dtype), ids, anchors, embedding, block=2)
    hidden = hidden[:, :, 0]  # [B, T - 1 - first, H]
    logits = F.linear(hidden.to(dtype), embedding[tokens].to(dtype)).float()
    values, places = logits.topk(draft.top_k, -1)
    candidates = tokens[places]
    pairs = draft.candidate_selector.pair_scores(
        hidden.flatten(0, 1).float(), ids[:, first:-1].flatten(), candidates.flatten(0, 1)
    )
    best = (values + pairs.view_as(values)).argmax(-1, keepdim=True)
    seen = torch.zeros_like(ids, dtype=torch.bool)
    seen[:, first + 1 :] = candidates.gather(-1, best)[..., 0] == ids[:, first + 1 :]
    at = torch.arange(length)
    return seen & (at > batch.starts[:, None]) & (at < batch.lengths[:, None])


def mark(draft: Draft, embedding: torch.Tensor, data: Stored, dtype: torch.dtype, frequent: int) -> None:
    """Write which tokens are hard as `hard.bin` into each store's folder, a byte for each token."""
    tokens = data.frequent(frequent, embedding.shape[0])
    hard = [np.zeros(len(arrays["text"]), np.uint8) for arrays in data.arrays]
    order = np.argsort(data.length)
    began, answered, missed = time.time(), 0, 0
    for begin in range(0, len(order), _AT_ONCE):
        chosen = order[begin : begin + _AT_ONCE]
        seen = foreseen(draft, embedding, tokens, data.batch(chosen), dtype).numpy()
        for row, index in enumerate(chosen):
            entry = data.entries[index]
            answer = slice(entry["begin"] + entry["start"], entry["begin"] + entry["length"])
            hard[entry["owner"]][answer] = ~seen[row, entry["start"] : entry["length"]]
            answered += answer.stop - answer.start
            missed += int(hard[entry["owner"]][answer].sum())
        if begin // _AT_ONCE % 20 == 0:
            print(f"mark {time.time() - began:.0f}s {begin + len(chosen)} of {len(order)}: "
                  f"{missed / answered:.3f} of {answered} answer tokens are hard", flush=True)  # fmt: skip
    for folder, marks in zip(data.folders, hard, strict=True):
        temporary = Path(folder) / "hard.new"
        marks.tofile(temporary)
        temporary.replace(Path(folder) / "hard.bin")
