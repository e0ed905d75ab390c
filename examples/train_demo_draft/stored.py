"""What collect.py stored, as batches for the draft."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from collect import STORED_TOKENS


@dataclass(frozen=True)
class Batch:
    """B conversations of at most T tokens; m tokens of the target's distribution are stored."""

    ids: torch.Tensor  # [B, T]
    starts: torch.Tensor  # [B], where the answer starts
    lengths: torch.Tensor  # [B]
    features: torch.Tensor  # [B, T, taps * H] bf16
    best: torch.Tensor  # [B, T, m], ids after each position
    chances: torch.Tensor  # [B, T, m], their probabilities
    hard: torch.Tensor  # [B, T] bool, tokens that a draft did not foresee; all where nothing is marked


class Stored:
    """Conversations in several store folders, which may still be growing."""

    def __init__(self, folders: list[Path], held_out: int = 32):
        """Of each folder's first turns every eighth is held out, `held_out` in all if greedy."""
        self.folders = folders
        self.reserved = set(range(0, 8 * held_out, 8))
        self.refresh()

    def refresh(self) -> None:
        """Look again at what is there."""
        self.entries, self.held_out, self.train, self.arrays = [], [], [], []
        taken: set[int] = set()
        for folder in self.folders:
            index = json.loads((folder / "index.json").read_text())
            width = json.loads((folder / "config.json").read_text())["width"]
            total = index[-1]["begin"] + index[-1]["length"]

            def read(name: str, dtype, columns: int, folder=folder, total=total) -> np.ndarray:
                flat = np.memmap(folder / f"{name}.bin", dtype, "r")
                return flat[: total * columns].reshape(total, columns)

            self.arrays.append(
                {
                    "text": read("text", np.int32, 1)[:, 0],
                    "features": read("features", np.int16, width),
                    "best": read("best", np.uint16, STORED_TOKENS),
                    "chances": read("chances", np.float16, STORED_TOKENS),
                }
            )
            marks = folder / "hard.bin"  # tokens that came after the marking are hard
            known = np.fromfile(marks, np.uint8) if marks.exists() else np.ones(0, np.uint8)
            hard = np.ones(total, np.uint8)
            hard[: len(known)] = known
            self.arrays[-1]["hard"] = hard
            reserved = {i for i, e in enumerate(index) if e["turn"] in self.reserved}
            held = [i for i in sorted(reserved) if not index[i]["sampled"]]
            base, owner = len(self.entries), len(self.arrays) - 1
            self.entries += [entry | {"owner": owner} for entry in index]
            self.held_out += [base + i for i in held]
            taken |= {base + i for i in reserved}
        self.train = np.array([i for i in range(len(self.entries)) if i not in taken])
        self.length = np.array([entry["length"] for entry in self.entries])

    def one(self, index: int) -> tuple[list[int], int]:
        """(ids, where the answer starts)."""
        entry = self.entries[index]
        begin = entry["begin"]
        text = self.arrays[entry["owner"]]["text"]
        return text[begin : begin + entry["length"]].tolist(), entry["start"]

    def frequent(self, count: int, vocab: int) -> torch.Tensor:
        """The `count` most frequent tokens, counted with the target's second thoughts."""
        counts = np.zeros(vocab)
        for arrays in self.arrays:
            counts += np.bincount(arrays["text"], minlength=vocab)
            best, chances = arrays["best"][::7, :8], arrays["chances"][::7, :8]
            counts += np.bincount(best.ravel(), chances.ravel().astype(np.float64), minlength=vocab)
        return torch.from_numpy(np.argsort(-counts)[:count].copy())

    def batch(self, indices) -> Batch:
        entries = [self.entries[i] for i in indices]
        lengths = torch.tensor([entry["length"] for entry in entries])
        longest = -(-int(lengths.max()) // 16) * 16

        def padded(name: str) -> torch.Tensor:
            parts = []
            for entry in entries:
                begin, length = entry["begin"], entry["length"]
                part = self.arrays[entry["owner"]][name][begin : begin + length]
                parts.append(np.pad(part, [(0, longest - length)] + [(0, 0)] * (part.ndim - 1)))
            return torch.from_numpy(np.stack(parts))

        return Batch(
            ids=padded("text").long(),
            starts=torch.tensor([entry["start"] for entry in entries]),
            lengths=lengths,
            features=padded("features").view(torch.bfloat16),
            best=padded("best").to(torch.int64),
            chances=padded("chances").float(),
            hard=padded("hard").bool(),
        )


class Order:
    """Endless batches of similar lengths; a new round takes in what came meanwhile."""

    def __init__(self, data: Stored, size: int, seed: int, part: int = 0, parts: int = 1):
        self.data, self.size, self.part, self.parts = data, size, part, parts
        self.random = np.random.default_rng(seed)
        self.waiting: list[np.ndarray] = []
        self.rounds = 0

    def next(self) -> Batch:
        if not self.waiting:
            self.data.refresh()
            self.rounds += 1
            order = self.random.permutation(self.data.train[self.part :: self.parts])
            pool = self.size * 16
            for begin in range(0, len(order), pool):
                part = order[begin : begin + pool]
                part = part[np.argsort(self.data.length[part])]
                self.waiting += [part[i : i + self.size] for i in range(0, len(part), self.size)]
            self.random.shuffle(self.waiting)
        return self.data.batch(self.waiting.pop())
