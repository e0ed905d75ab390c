"""Step 2 on a CPU: go on training a draft with what collect.py stored."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from draft import Draft
from stored import Batch, Order, Stored
from subset import Subset, losses
from train import optimisers_for, pick_anchors, save_state


@dataclass(frozen=True)
class FinetuneConfig:
    seconds: float  # of processor time: a process that is stopped for a while loses nothing
    sequences: int = 12  # per step
    anchors: int = 96  # per sequence
    learning_rate: float = 6e-4
    warmup_steps: int = 30
    easy: float = 0.25  # share of the easy tokens where blocks start, once they are marked
    gamma: float = 3.0  # row i of a block is kept with probability exp(-i / gamma)
    hard: float = 0.5  # share of the token that came in the mixture; the rest is the target's law
    frequent: int = 6144  # tokens that are always in the loss
    dtype: torch.dtype = torch.bfloat16  # of matrix products
    checkpoint_s: float = 600.0
    log_every: int = 20
    part: int = 0  # of `parts` processes that share the data
    parts: int = 1


def step_loss(draft: Draft, embedding: torch.Tensor, frequent: torch.Tensor, batch: Batch,
              c: FinetuneConfig) -> dict[str, torch.Tensor]:  # fmt: skip
    """As train.step_loss, with rows drawn by their weight instead of weighted, and stored targets."""
    ids, length = batch.ids, batch.ids.shape[1]
    anchors, used = pick_anchors(batch.starts, batch.lengths, length, c.anchors, batch.hard, c.easy)
    with torch.autocast("cpu", torch.bfloat16, c.dtype == torch.bfloat16):
        hidden = draft(batch.features.to(c.dtype), ids, anchors, embedding)  # [B, A, N - 1, H]
    ahead = torch.arange(1, draft.block)
    label_at = anchors[:, :, None] + ahead
    kept = torch.rand(label_at.shape) < torch.exp(-(ahead - 1) / c.gamma)
    kept &= used[:, :, None] & (label_at < batch.lengths[:, None, None])
    sequence, _, row = kept.nonzero(as_tuple=True)
    at = label_at[kept]
    labels, previous = ids[sequence, at], ids[sequence, at - 1]
    subset = Subset(frequent, labels, embedding.shape[0])
    unary, pairs, right = losses(
        draft.candidate_selector, hidden[kept].float(), embedding.to(c.dtype), subset, labels, previous,
        batch.best[sequence, at - 1], batch.chances[sequence, at - 1], c.hard, draft.top_k,
    )  # fmt: skip
    rows = max(len(at), 1)
    return {
        "loss": (unary + pairs) / rows,
        "unary": unary.detach() / rows,
        "selector": pairs.detach() / rows,
        "right": right[row == 0].float().mean(),
        "anchors": used.sum(),
    }


class Meter:
    """Means of the losses and the rate since the start, for a progress line."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = {}
        self.steps = self.anchors = 0
        self.processor_s = time.process_time()

    def add(self, parts: dict[str, torch.Tensor]) -> None:
        self.steps += 1
        self.anchors += int(parts["anchors"])
        for name in ("unary", "selector", "right"):
            self.sums[name] = self.sums.get(name, 0.0) + float(parts[name])

    def line(self) -> str:
        """The means since the last line. The rate counts processor time: a core may be shared."""
        means = " ".join(f"{name} {value / self.steps:.4f}" for name, value in self.sums.items())
        rate = self.anchors / (time.process_time() - self.processor_s)
        self.sums, self.steps = {}, 0
        return f"{means} anchors {self.anchors}, {rate:.0f} per core second"


def finetune(draft: Draft, embedding: torch.Tensor, data: Stored, c: FinetuneConfig,
             state_path: Path, at_checkpoint: Callable[[int, float], None]) -> None:  # fmt: skip
    """Train for `c.seconds` in all; a state at `state_path` is taken up."""
    optimisers = optimisers_for(draft, c.learning_rate)
    step, began = 0, time.process_time()
    if state_path.exists():
        state = torch.load(state_path, weights_only=True)
        draft.load_state_dict(state["draft"])
        for optimiser, saved in zip(optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)
        step, began = state["step"], time.process_time() - state["elapsed"]

    def save() -> None:
        elapsed = time.process_time() - began
        save_state(state_path, draft, optimisers, step, elapsed)
        at_checkpoint(step, elapsed)

    frequent = data.frequent(c.frequent, embedding.shape[0])
    order = Order(data, c.sequences, seed=step + 1000 * c.part, part=c.part, parts=c.parts)
    saved_at, meter = time.time(), Meter()
    while (progress := (time.process_time() - began) / c.seconds) < 1:
        rate = min(1.0, (step + 1) / c.warmup_steps) * 0.5 * (1 + math.cos(math.pi * progress))
        for optimiser in optimisers:
            optimiser.zero_grad(set_to_none=True)
            for group in optimiser.param_groups:
                group["lr"] = c.learning_rate * max(rate, 0.01)
        parts = step_loss(draft, embedding, frequent, order.next(), c)
        parts["loss"].backward()
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        for optimiser in optimisers:
            optimiser.step()
        step += 1
        meter.add(parts)
        if step % c.log_every == 0:
            seconds = time.process_time() - began
            print(f"train {seconds:.0f}s step {step} round {order.rounds} {meter.line()}", flush=True)
        if time.time() - saved_at > c.checkpoint_s:
            save()
            saved_at = time.time()
    save()
