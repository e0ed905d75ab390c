"""Step 1 on a CPU: answers to whole user turns, kept with what the draft learns from.

Equal positions instead of a full batch: the rows of a wave start together, so that no mask is
needed, one slice of the cache serves all, and every product is one large bf16 product. Rows that
ended are taken out when enough of them wait. The taps and the target's best tokens come out of the
decoding itself and are stored, so training never runs the target.

Shapes: B rows of a wave, S slots, C tapped values per token (taps * H), k stored tokens.
"""

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from loss import top_candidates
from target import Llama, rotary_table, rotate

STORED_TOKENS = 64


@dataclass(frozen=True)
class CollectConfig:
    rows: int = 256
    slots: int = 224  # longest conversation, chat frame included
    sampled_share: float = 0.2  # of the answers; the others are greedy
    temperature: float = 0.7
    min_p: float = 0.03  # sampling ignores tokens below this share of the best token's probability
    least_answer: int = 4
    seed: int = 0


class Wave:
    """B conversations that grow by one token at a time, all at the same position."""

    def __init__(self, target: Llama, taps: list[int], given: list[list[int]], c: CollectConfig):
        self.target, self.taps, self.config = target, taps, c
        s, count = target.shape, len(given)
        self.given = torch.tensor([len(ids) for ids in given])
        self.text = torch.zeros(count, c.slots, dtype=torch.long)
        for row, ids in enumerate(given):
            self.text[row, : len(ids)] = torch.tensor(ids)
        self.sampled = torch.rand(count) < c.sampled_share
        size = (count, s.kv_heads, c.slots, s.head_dim)
        self.keys = [torch.zeros(size, dtype=target.dtype) for _ in range(s.layers)]
        self.values = [torch.zeros(size, dtype=target.dtype) for _ in range(s.layers)]
        self.features = torch.zeros(count, c.slots, len(taps) * s.hidden, dtype=torch.bfloat16)
        self.best = torch.zeros(count, c.slots, STORED_TOKENS, dtype=torch.int32)
        self.chances = torch.zeros(count, c.slots, STORED_TOKENS, dtype=torch.float16)
        self.head = target.embedding.to(target.dtype)
        self.cos, self.sin = rotary_table(torch.arange(c.slots), s.head_dim, s.theta)

    def hidden_at(self, at: int) -> torch.Tensor:
        """Run the tokens at position `at`; keeps their taps, returns [B, H] after the last norm."""
        target, s = self.target, self.target.shape
        rows, groups = len(self.text), s.heads // s.kv_heads
        x, tapped = target.embedding[self.text[:, at]], []
        for index, layer in enumerate(target.layers):
            hidden = target._norm(x, layer["norm_in"]).to(target.dtype)
            qkv = F.linear(hidden, layer["qkv"]).view(rows, -1, s.head_dim)
            q, k, v = qkv.split([s.heads, s.kv_heads, s.kv_heads], 1)  # [B, heads, D]
            q, k = (rotate(t.float(), self.cos[at], self.sin[at]).to(target.dtype) for t in (q, k))
            self.keys[index][:, :, at], self.values[index][:, :, at] = k, v
            keys, values = self.keys[index][:, :, : at + 1], self.values[index][:, :, : at + 1]
            # The query heads that share a kv head stand in for a longer query: no key is copied.
            mixed = target.attend(q.reshape(rows, s.kv_heads, groups, -1), keys, values, None)
            x = x + F.linear(mixed.reshape(rows, -1), layer["o"])
            x = target._mlp(x, layer)
            if index in self.taps:
                tapped.append(x)
        self.features[:, at] = torch.cat(tapped, -1).to(torch.bfloat16)
        return target._norm(x, target.final_norm)

    def step(self, at: int) -> None:
        """Keep the distribution after position `at` and write the token at `at + 1`."""
        c = self.config
        hidden = self.hidden_at(at)
        if at + 1 < int(self.given.min()):
            return
        rough = F.linear(hidden.to(self.head.dtype), self.head).float()
        best = top_candidates(rough, STORED_TOKENS)
        # The choice is made on fp32 logits: bf16 ones tie too often to have a best token.
        logits = torch.einsum("bh,bkh->bk", hidden, self.target.embedding[best])
        logits, order = logits.sort(-1, descending=True)
        best = best.gather(1, order)
        self.best[:, at] = best.int()
        self.chances[:, at] = (logits - rough.logsumexp(-1, keepdim=True)).exp().half()
        floor = logits[:, :1] + c.temperature * float(np.log(c.min_p))
        noise = -torch.empty_like(logits).exponential_().clamp_min_(1e-20).log_()
        drawn = (logits + c.temperature * noise).masked_fill(logits < floor, -torch.inf).argmax(-1)
        place = torch.where(self.sampled, drawn, 0)[:, None]
        choice = best.gather(1, place)[:, 0]
        self.text[:, at + 1] = torch.where(at + 1 < self.given, self.text[:, at + 1], choice)

    def keep(self, rows: torch.Tensor) -> None:
        """Forget all rows but these."""
        for name in ("text", "given", "sampled", "features", "best", "chances"):
            setattr(self, name, getattr(self, name)[rows])
        self.keys = [x[rows] for x in self.keys]
        self.values = [x[rows] for x in self.values]


class Store:
    """Conversations on disk, appended wave by wave: flat arrays and one index."""

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self.index_path = folder / "index.json"
        self.index = json.loads(self.index_path.read_text()) if self.index_path.exists() else []
        self.paths = {n: folder / f"{n}.bin" for n in ("text", "features", "best", "chances")}

    def add(self, wave: Wave, rows: list[int], ends: list[int], turns: list[int]) -> None:
        """Append conversations; a stop in between leaves bytes that the next `add` cuts off."""
        begin = self.index[-1]["begin"] + self.index[-1]["length"] if self.index else 0
        parts: dict[str, list] = {name: [] for name in self.paths}
        entries = []
        for row, end, turn in zip(rows, ends, turns, strict=True):
            parts["text"].append(wave.text[row, :end].int().numpy())
            parts["features"].append(wave.features[row, :end].view(torch.int16).numpy())
            parts["best"].append(wave.best[row, :end].numpy().astype(np.uint16))
            parts["chances"].append(wave.chances[row, :end].numpy())
            entry = {"begin": begin, "length": end, "start": int(wave.given[row]), "turn": turn}
            entries.append(entry | {"sampled": bool(wave.sampled[row])})
            begin += end
        done = sum(entry["length"] for entry in self.index)
        for name, path in self.paths.items():
            content = np.concatenate(parts[name])
            with path.open("r+b" if path.exists() else "w+b") as file:
                file.truncate(done * content[0].nbytes)
                file.seek(0, 2)
                content.tofile(file)
        self.index += entries
        temporary = self.index_path.with_suffix(".new")
        temporary.write_text(json.dumps(self.index))
        temporary.replace(self.index_path)


def run_wave(wave: Wave, turns: list[int], end_of_turn: int, store: Store) -> int:
    """Answer a wave's turns; returns how many answer tokens were stored."""
    c, tokens = wave.config, 0
    owner = torch.tensor(turns)

    def flush(done: torch.Tensor, ends: torch.Tensor) -> None:
        nonlocal tokens
        good = done[(ends - wave.given[done]) >= c.least_answer]
        lengths = dict(zip(done.tolist(), ends.tolist(), strict=True))
        if len(good):
            chosen = [lengths[row] for row in good.tolist()]
            store.add(wave, good.tolist(), chosen, owner[good].tolist())
            tokens += sum(chosen) - int(wave.given[good].sum())

    ended = torch.zeros(len(turns), dtype=torch.long)  # length of what is complete, else 0
    for at in range(c.slots - 1):
        wave.step(at)
        stops = (at + 1 >= wave.given) & (wave.text[:, at + 1] == end_of_turn) & (ended == 0)
        ended = ended.masked_fill(stops, at + 2)
        waiting = int((ended > 0).sum())
        if waiting * 6 > len(ended):
            done = ended.nonzero()[:, 0]
            flush(done, ended[done])
            left = (ended == 0).nonzero()[:, 0]
            if not len(left):
                return tokens
            wave.keep(left)
            owner, ended = owner[left], ended[left]
    ended = ended.masked_fill(ended == 0, c.slots)
    flush(torch.arange(len(ended)), ended)
    return tokens


@torch.no_grad()
def collect(target: Llama, taps: list[int], turns: list[list[int]], frame: dict, c: CollectConfig,
            folder: Path, budget_s: float) -> None:  # fmt: skip
    """Answer `turns` (ids) in waves until the budget is spent; goes on after stored ones."""
    store = Store(folder)
    width = len(taps) * target.shape.hidden
    (folder / "config.json").write_text(json.dumps(asdict(c) | {"width": width}))
    first = max((entry["turn"] for entry in store.index), default=-1) + 1
    torch.manual_seed(c.seed + first)
    began, total = time.time(), 0
    for begin in range(first, len(turns), c.rows):
        if time.time() - began > budget_s:
            break
        numbers = list(range(begin, min(begin + c.rows, len(turns))))
        given = [frame["prefix"] + turns[n] + [frame["end_of_turn"]] + frame["header"] for n in numbers]
        wave = Wave(target, taps, given, c)
        total += run_wave(wave, numbers, frame["end_of_turn"], store)
        seconds = time.time() - began
        print(f"collect {seconds:.0f}s turns {begin + len(numbers)} conversations {len(store.index)} "
              f"answer tokens {total} per s {total / seconds:.0f}", flush=True)  # fmt: skip
