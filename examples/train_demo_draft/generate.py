"""Step 1: conversations by the target itself, many rows at a time.

Each row samples a user turn after a given opening, closes it, and answers. A finished row is
taken out and started again at once: the chat frame's keys stay valid in the cache, so a restart
is one reset of the row's position. All decisions are tensor operations, so one captured CUDA graph
runs a whole step.
"""

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from target import KVCache, Llama

USER, HEADER, ANSWER, DONE = range(4)


@dataclass(frozen=True)
class GenerateConfig:
    rows: int = 2048
    slots: int = 384  # longest conversation, a multiple of 8 (attention's bias alignment)
    budget_s: float = 100.0
    steps_between_harvests: int = 16
    user_temperature: float = 0.9
    answer_temperature: float = 0.7
    sampled_share: float = 0.2  # of the answers; the others are greedy
    min_p: float = 0.03  # sampling ignores tokens below this share of the best token's probability
    bare_share: float = 0.1  # of the rows: no opening at all
    filled_share: float = 0.4  # of the rows: a template filled with a topic
    turn_limits: tuple[int, ...] = (12, 24, 24, 40, 80)  # then a sentence's end closes the turn
    least_answer: int = 12
    seed: int = 0


class Filter:
    """Refuses user turns that repeat an earlier one or contain a text that must stay out."""

    def __init__(self, tokens: dict):
        self.spellings = tokens["spellings"]
        self.keep_out = {self._plain(text) for text in tokens["keep_out"]}
        self.seen: set[tuple[int, ...]] = set()
        self.repeated = self.kept_out = 0

    @staticmethod
    def _plain(spelling: str) -> str:
        return spelling.replace("Ġ", " ").replace("Ċ", " ").strip().lower()

    def accepts(self, turn: tuple[int, ...]) -> bool:
        if turn in self.seen:
            self.repeated += 1
            return False
        self.seen.add(turn)
        # Compared as text: a sampled turn may spell a text with other tokens than the tokenizer.
        text = self._plain("".join(self.spellings[i] for i in turn))
        if any(kept in text for kept in self.keep_out):
            self.kept_out += 1
            return False
        return True


class Rows:
    """The state of all rows, as tensors of length B (`text`: [B, S])."""

    def __init__(self, target: Llama, tokens: dict, config: GenerateConfig):
        device, count = target.device, config.rows
        self.target, self.config = target, config
        self.end = tokens["end_of_turn"]
        self.prefix = tokens["prefix"]
        self.header = torch.tensor(tokens["header"], device=device)
        self.cache = KVCache(target.shape, count, config.slots, device, target.dtype)
        self.sentence_ends = torch.zeros(target.shape.vocab, dtype=torch.bool, device=device)
        self.sentence_ends[tokens["sentence_ends"]] = True
        ints = {"device": device, "dtype": torch.long}
        self.text = torch.zeros(count, config.slots, **ints)
        self.position = torch.zeros(count, **ints)  # of the newest token
        self.given = torch.zeros(count, **ints)  # tokens that are fixed: frame and opening
        self.limit = torch.zeros(count, **ints)
        self.phase = torch.full((count,), DONE, **ints)
        self.turn_end = torch.zeros(count, **ints)
        self.sampled = torch.zeros(count, dtype=torch.bool, device=device)

    def choose(self, logits: torch.Tensor) -> torch.Tensor:
        """Next token [B]: sampled with min-p, or the best one where the temperature is 0."""
        c = self.config
        answer = c.answer_temperature * self.sampled.float()
        temperature = answer.masked_fill(self.phase == USER, c.user_temperature)[:, None]
        floor = logits.amax(-1, keepdim=True) + temperature * float(np.log(c.min_p))
        noise = torch.empty_like(logits).exponential_().clamp_min_(1e-20).log_()
        return (logits - temperature * noise).masked_fill(logits < floor, -torch.inf).argmax(-1)

    @torch.no_grad()
    def step(self) -> None:
        """One token for every row; writes the state in place."""
        last = self.text.gather(1, self.position[:, None])[:, 0]
        choice = self.choose(self.target.decode(last, self.position, self.cache))
        new = (self.position + 1).clamp_max(self.config.slots - 1)
        given = new < self.given
        choice = torch.where(given, self.text.gather(1, new[:, None])[:, 0], choice)

        in_turn = (self.phase == USER) & ~given
        over = new - len(self.prefix) - self.limit
        full = (over >= 32) | ((over >= 0) & self.sentence_ends[last])
        closes = in_turn & (full | (choice <= self.end))  # ids up to `end` are control tokens
        choice = choice.masked_fill(closes, self.end)

        in_header = self.phase == HEADER
        place = (new - self.turn_end - 1).clamp(0, len(self.header) - 1)
        choice = torch.where(in_header, self.header[place], choice)
        header_ends = in_header & (place == len(self.header) - 1)

        in_answer = self.phase == ANSWER
        stops = (in_answer & (choice == self.end)) | (new == self.config.slots - 1)

        done = self.phase == DONE
        new = torch.where(done, self.position, new)
        choice = torch.where(done, last, choice)
        self.text.scatter_(1, new[:, None], choice[:, None])
        self.turn_end.copy_(torch.where(closes, new, self.turn_end))
        self.phase.masked_fill_(closes, HEADER)
        self.phase.masked_fill_(header_ends, ANSWER)
        self.phase.masked_fill_(stops, DONE)
        self.position.copy_(new)

    def restart(self, which: torch.Tensor, openings: list[list[int]], position: int) -> None:
        """Begin new conversations in rows `which`; `position` 0 also fills the frame's cache."""
        c, device = self.config, self.text.device
        text = torch.zeros(len(openings), c.slots, dtype=torch.long)
        for row, opening in enumerate(openings):
            ids = torch.tensor(self.prefix + opening)
            text[row, : len(ids)] = ids
        given = torch.tensor([len(self.prefix) + len(opening) for opening in openings])
        draws = torch.randint(len(c.turn_limits), (len(openings),)).tolist()
        limit = torch.tensor([len(o) + c.turn_limits[d] for o, d in zip(openings, draws, strict=True)])
        sampled = torch.rand(len(openings)) < c.sampled_share
        self.text[which] = text.to(device)
        self.given[which] = given.to(device)
        self.limit[which] = limit.to(device)
        self.sampled[which] = sampled.to(device)
        self.position[which] = position
        self.phase[which] = USER


def captured(step, device: str):
    """`step` as one CUDA graph; 30 tiny layers are otherwise bound by kernel launches."""
    if not device.startswith("cuda"):
        return step
    try:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
    except RuntimeError as error:
        print(f"no CUDA graph, going on without: {error}", flush=True)
        return step
    return graph.replay


def generate(target: Llama, tokens: dict, config: GenerateConfig, out: Path) -> dict:
    """Run for the time budget; write the conversations to `out` (npz) and return a summary."""
    began = time.time()
    rows = Rows(target, tokens, config)
    keep = Filter(tokens)

    chance = np.random.default_rng(config.seed)

    def opening() -> list[int]:
        draw = chance.random()
        if draw < config.bare_share:
            return []
        filled = draw < config.bare_share + config.filled_share
        choices = tokens["filled_openings" if filled else "openings"]
        return choices[chance.integers(len(choices))]

    every = torch.arange(config.rows, device=target.device)
    rows.restart(every, [opening() for _ in range(config.rows)], position=0)
    if target.device.startswith("cuda"):
        print("decode attention:", target.pick_attention(rows.cache), flush=True)
    step = captured(rows.step, target.device)
    texts, lengths, starts, sampled = [], [], [], []
    answer_tokens = steps = 0

    def harvest(which: torch.Tensor) -> None:
        nonlocal answer_tokens
        text = rows.text[which].cpu().numpy()
        ends = (rows.position[which] + 1).tolist()
        turn_ends = rows.turn_end[which].tolist()
        drawn = rows.sampled[which].tolist()
        for index, end in enumerate(ends):
            start = turn_ends[index] + len(rows.header) + 1
            turn = tuple(text[index, len(rows.prefix) : turn_ends[index]].tolist())
            if len(turn) < 2 or end - start < config.least_answer or not keep.accepts(turn):
                continue
            row = np.zeros(config.slots, dtype=np.uint16)
            row[:end] = text[index, :end]
            texts.append(row)
            lengths.append(end)
            starts.append(start)
            sampled.append(drawn[index])
            answer_tokens += end - start

    report = began
    while time.time() - began < config.budget_s:
        for _ in range(config.steps_between_harvests):
            step()
        steps += config.steps_between_harvests
        which = (rows.phase == DONE).nonzero()[:, 0]
        if len(which):
            harvest(which)
            rows.restart(which, [opening() for _ in which], position=len(rows.prefix) - 1)
        if time.time() - report > 10:
            report = time.time()
            rate = steps * config.rows / (report - began)
            print(
                f"generate {report - began:.0f}s conversations {len(texts)} "
                f"answer tokens {answer_tokens} steps {steps} all tokens/s {rate:.0f}",
                flush=True,
            )
    # An answer cut short by the clock is as good a lesson as a finished one.
    unfinished = (rows.phase == ANSWER).nonzero()[:, 0]
    if len(unfinished):
        harvest(unfinished)
    if not texts:
        raise SystemExit("generate: no conversation came to an answer; give more --generate-s")
    np.savez(
        out,
        text=np.stack(texts),
        length=np.array(lengths, dtype=np.int32),
        start=np.array(starts, dtype=np.int32),
        sampled=np.array(sampled),
    )
    seconds = time.time() - began
    return {
        "conversations": len(texts),
        "answer_tokens": answer_tokens,
        "seconds": round(seconds, 1),
        "steps": steps,
        "all_tokens_per_s": round(steps * config.rows / seconds),
        "answer_tokens_per_s": round(answer_tokens / seconds),
        "repeated_turns_dropped": keep.repeated,
        "kept_out_turns_dropped": keep.kept_out,
        "cuda_graph": step is not rows.step and target.device.startswith("cuda"),
    }
