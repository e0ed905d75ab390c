"""Step 2: train the draft for a wall-clock budget, with checkpoints to resume from.

The target runs inside the loop: its taps and its distribution cost little beside the draft's own
logits, and nothing has to be stored. Shapes as in draft.py.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from draft import Draft
from loss import VocabularyLoss, selector_loss
from muon import Muon
from target import Llama


@dataclass(frozen=True)
class TrainConfig:
    budget_s: float = 380.0
    sequences: int = 32  # per step
    anchors: int = 96  # per sequence
    learning_rate: float = 2e-3
    warmup_steps: int = 100
    gamma: float = 3.0  # row i of a block weighs exp(-i / gamma)
    hard: float = 0.5  # share of the token that came in the mixture; the rest is the target's law
    slice_rows: int = 4096  # rows whose logits exist at the same time
    checkpoint_s: float = 60.0
    log_every: int = 50
    held_out: int = 64


class Conversations:
    """What `generate.py` wrote, split into training and held-out parts."""

    def __init__(self, path: Path, device: str, held_out: int):
        data = np.load(path)
        order = np.random.default_rng(0).permutation(len(data["length"]))
        # Greedy answers only: the draft is judged on greedy decoding.
        greedy = order[~data["sampled"][order]]
        self.held_out = greedy[: min(held_out, len(greedy) // 4)]
        self.train = np.setdiff1d(order, self.held_out)
        self.length, self.start = data["length"], data["start"]
        self.text = torch.from_numpy(data["text"].astype(np.int32)).to(device)

    def one(self, index: int) -> tuple[list[int], int]:
        """(ids, where the answer starts)."""
        return self.text[index, : self.length[index]].tolist(), int(self.start[index])


class Batches:
    """Endless batches of similar lengths, from a fresh shuffle every time round."""

    def __init__(self, data: Conversations, size: int, seed: int):
        self.data, self.size = data, size
        self.random = np.random.default_rng(seed)
        self.waiting: list[np.ndarray] = []

    def next(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(ids [B, T], answer starts [B], lengths [B])."""
        if not self.waiting:
            order = self.random.permutation(self.data.train)
            pool = self.size * 16
            for begin in range(0, len(order), pool):
                part = order[begin : begin + pool]
                part = part[np.argsort(self.data.length[part])]
                self.waiting += [part[i : i + self.size] for i in range(0, len(part), self.size)]
            self.random.shuffle(self.waiting)
        chosen = self.waiting.pop()
        text = self.data.text
        longest = -(-int(self.data.length[chosen].max()) // 64) * 64  # few distinct shapes
        ids = text[torch.from_numpy(chosen).to(text.device), : min(longest, text.shape[1])].long()
        starts, lengths = (
            torch.from_numpy(x[chosen]).to(text.device) for x in (self.data.start, self.data.length)
        )
        return ids, starts, lengths


def pick_anchors(starts, lengths, length: int, count: int, hard=None, easy: float = 1.0):
    """(anchors [B, A], used [B, A]): distinct answer positions that have a token after them.

    With `hard` [B, T] all the hard positions, or as many as fit, and a share `easy` of the others.
    """
    at = torch.arange(length, device=starts.device)
    fits = (at >= starts[:, None]) & (at < lengths[:, None] - 1)
    if hard is not None:
        fits &= hard | (torch.rand(fits.shape, device=starts.device) < easy)
    order = torch.rand(fits.shape, device=starts.device) + fits
    if starts.device.type == "cpu":  # no anchors that are not used; a GPU would have to wait for this
        count = min(count, max(int(fits.sum(-1).max()), 1))
    anchors = order.topk(min(count, length), -1).indices.sort(-1).values
    return anchors, fits.gather(1, anchors)


def step_loss(draft: Draft, target: Llama, batch, c: TrainConfig) -> dict[str, torch.Tensor]:
    ids, starts, lengths = batch
    device, length = ids.device, ids.shape[1]
    proposals = draft.block - 1
    anchors, used = pick_anchors(starts, lengths, length, c.anchors)
    features, final = target.forward(ids, draft.taps)
    probabilities = target.logits(final).softmax(-1).to(target.dtype).flatten(0, 1)  # [B * T, V]

    with torch.autocast(device.type, torch.bfloat16, enabled=target.dtype == torch.bfloat16):
        hidden = draft(features, ids, anchors, target.embedding)
    hidden = hidden.float().flatten(0, 2)  # [n, H]
    ahead = torch.arange(1, draft.block, device=device)
    label_at = anchors[:, :, None] + ahead  # [B, A, N - 1]
    valid = used[:, :, None] & (label_at < lengths[:, None, None])
    label_at = label_at.clamp_max(length - 1).flatten(1)
    labels = ids.gather(1, label_at).flatten()
    previous = ids.gather(1, label_at - 1).flatten()
    offset = torch.arange(len(ids), device=device)[:, None] * length
    source = (offset + label_at - 1).flatten()  # the row where the target predicts the label
    weights = torch.exp(-(ahead - 1) / c.gamma) * valid
    weights = (weights / weights.sum().clamp_min(1e-6)).flatten()

    unary, candidates, right = VocabularyLoss.apply(
        hidden, target.embedding, probabilities, source, labels, weights, c.hard,
        draft.top_k, c.slice_rows,
    )  # fmt: skip
    pairs = selector_loss(
        draft.candidate_selector, hidden, target.embedding, candidates, previous, labels,
        lambda chosen: probabilities[source[:, None], chosen], weights, c.hard,
    )  # fmt: skip
    right = (right.view(-1, proposals) & valid.view(-1, proposals)).sum(0)
    return {
        "loss": unary + pairs,
        "unary": unary.detach(),
        "selector": pairs.detach(),
        "right_per_row": right / valid.view(-1, proposals).sum(0).clamp_min(1),
        "anchors": used.sum(),
    }


def optimisers_for(draft: Draft, learning_rate: float) -> list[torch.optim.Optimizer]:
    """Muon for matrices; AdamW for codebooks (rows are rarely seen), norms and kernels."""
    matrices, others = [], []
    for name, parameter in draft.named_parameters():
        is_matrix = parameter.dim() == 2 and "codebook" not in name
        (matrices if is_matrix else others).append(parameter)
    adam = torch.optim.AdamW(others, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    return [Muon(matrices, learning_rate), adam]


def save_state(path: Path, draft: Draft, optimisers, step: int, elapsed: float) -> None:
    state = {
        "draft": draft.state_dict(),
        "optimisers": [o.state_dict() for o in optimisers],
        "step": step,
        "elapsed": elapsed,
    }
    torch.save(state, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)  # a stop while writing leaves the old state whole


def train(
    draft: Draft,
    target: Llama,
    data: Conversations,
    c: TrainConfig,
    state_path: Path,
    at_checkpoint: Callable[[int, float], None],
    log: list[dict],
) -> None:
    """Train until the budget is spent; `at_checkpoint(step, elapsed)` saves and evaluates.

    A state from an earlier run at `state_path` is taken up, its spent time included.
    """
    optimisers = optimisers_for(draft, c.learning_rate)
    step, spent = 0, 0.0
    if state_path.exists():
        state = torch.load(state_path, map_location=target.device, weights_only=True)
        draft.load_state_dict(state["draft"])
        for optimiser, saved in zip(optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)
        step, spent = state["step"], state["elapsed"]
        print(f"resumed at step {step}, {spent:.0f}s", flush=True)
    batches = Batches(data, c.sequences, seed=step)
    began = time.time() - spent
    saved_at = spent
    first_step, anchors = step, 0
    while (elapsed := time.time() - began) < c.budget_s:
        progress = elapsed / c.budget_s
        rate = min(1.0, (step + 1) / c.warmup_steps) * 0.5 * (1 + math.cos(math.pi * progress))
        for optimiser in optimisers:
            optimiser.zero_grad(set_to_none=True)
            for group in optimiser.param_groups:
                group["lr"] = c.learning_rate * max(rate, 0.01)
        parts = step_loss(draft, target, batches.next(), c)
        parts["loss"].backward()
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        for optimiser in optimisers:
            optimiser.step()
        step += 1
        anchors = anchors + parts["anchors"]
        if step % c.log_every == 0:  # reading a value waits for the device: not every step
            elapsed = time.time() - began
            entry = {
                "step": step,
                "elapsed_s": round(elapsed, 1),
                "unary": round(float(parts["unary"]), 4),
                "selector": round(float(parts["selector"]), 4),
                "right_per_row": [round(x, 3) for x in parts["right_per_row"].tolist()],
                "anchors_per_s": round(int(anchors) / (elapsed - spent)),
                "steps_per_s": round((step - first_step) / (elapsed - spent), 2),
            }
            log.append(entry)
            print("train", entry, flush=True)
        if elapsed - saved_at > c.checkpoint_s:
            save_state(state_path, draft, optimisers, step, elapsed)
            at_checkpoint(step, elapsed)
            saved_at = time.time() - began
    save_state(state_path, draft, optimisers, step, time.time() - began)
    at_checkpoint(step, time.time() - began)
