"""A target and drafts of a few tokens, the exact law of what they must commit, and samples of it.

The target's logits depend on the two tokens before, so the law of the first tokens can be written down by
going through all of them. That is done here with loops over lists, and shares nothing with the package.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from chi_square import chi_square
from dflash_deploy.runtime.choose import Chooser, Proposed
from dflash_deploy.runtime.law import Law
from dflash_deploy.runtime.sampling import Sampling

V, P, K = 5, 3, 3  # vocabulary, proposals, candidates
PROMPT = (0, 1)
LENGTH = 4  # tokens whose law is looked at

_rng = np.random.default_rng(2024)
TARGET = (_rng.normal(size=(V, V, V)) * 1.5).astype(np.float32)  # [token before last, last, token]
# A draft knows the anchor alone, and is right in part: its rows go along the target's likely path.
_path = np.array(
    [
        list(itertools.accumulate(range(P), lambda t, _: int(TARGET[0, t].argmax()), initial=a))
        for a in range(V)
    ]
)  # [anchor, row]
ROWS = (TARGET[0, _path[:, :P]] + _rng.normal(size=(V, P, V))).astype(np.float32)  # [anchor, row, token]
CANDIDATES = np.argsort(-ROWS, axis=2)[:, :, [2, 0, 1]]  # [anchor, row, candidate], in no order of id
EDGES = (np.take_along_axis(ROWS, CANDIDATES, 2)[:, :, None] + _rng.normal(size=(V, P, K, K))).astype(
    np.float32
)  # [anchor, row, candidate before, candidate]
EDGES[:, 0] = EDGES[:, 0, :1]
FIXED = ROWS.argmax(2)  # [anchor, row]

FILTERS = {
    "none": Sampling(),
    "top_k": Sampling(top_k=3),
    "top_p": Sampling(top_p=0.8),
    "min_p": Sampling(min_p=0.15),
    "penalties": Sampling(
        repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3, logit_bias={1: 0.7, 4: -0.4}
    ),
}
TEMPERATURES = (0.3, 0.7, 1.0, 1.5)


class MemoChooser(Chooser):
    """Makes each law once: a law depends on the row and, with penalties, on the tokens before it."""

    def __init__(self, sampling: Sampling, laws: dict[object, Law | None], **options: object) -> None:
        super().__init__(sampling, PROMPT, V, (), **options)  # type: ignore[arg-type]
        self._laws = laws
        self._output: tuple[int, ...] = ()

    def commit(self, ids):
        super().commit(ids)
        self._output += tuple(ids)

    def _law(self, row, ids, prefix, index):
        tokens = self._output + tuple(prefix) if self.sampling.has_penalties else ()
        key = (row.tobytes(), None if ids is None else ids.tobytes(), tokens)
        if key not in self._laws:
            self._laws[key] = super()._law(row, ids, prefix, index)
        return self._laws[key]


Draft = Callable[[Chooser, int], Proposed]


def rows(chooser: Chooser, anchor: int) -> Proposed:
    return chooser.propose_rows(ROWS[anchor])


def candidates(chooser: Chooser, anchor: int) -> Proposed:
    return chooser.propose_candidates(CANDIDATES[anchor], EDGES[anchor])


def fixed(chooser: Chooser, anchor: int) -> Proposed:
    return chooser.propose_fixed(FIXED[anchor].tolist())


FAMILIES: dict[str, Draft] = {"rows": rows, "candidates": candidates, "fixed": fixed}


def first_tokens(chooser: Chooser, draft: Draft) -> tuple[int, ...]:
    """Rounds until enough tokens are committed; of the last round, all are."""
    tokens = list(PROMPT)
    while len(tokens) < len(PROMPT) + LENGTH:
        proposed = draft(chooser, tokens[-1])
        path = [*tokens[-2:], *proposed.ids]
        got = chooser.accept(proposed, TARGET[path[:-1], path[1:]], 99)
        chooser.commit(got.ids)
        tokens += got.ids
    return tuple(tokens[len(PROMPT) : len(PROMPT) + LENGTH])


def sample(
    sampling: Sampling, draft: Draft, draws: int, seed: int, chooser: type[MemoChooser] = MemoChooser
) -> Counter[tuple[int, ...]]:
    """Outcomes of that many requests, each with its own seed."""
    laws: dict[object, Law | None] = {}
    return Counter(
        first_tokens(chooser(replace(sampling, seed=seed + number), laws), draft) for number in range(draws)
    )


def exact_law(sampling: Sampling) -> dict[tuple[int, ...], float]:
    """Probability of each outcome when the target is sampled token by token."""
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        law = {
            (*before, token): prob * share
            for before, prob in law.items()
            for token, share in enumerate(_row_law(sampling, before))
        }
    return law


def _row_law(s: Sampling, output: Sequence[int]) -> list[float]:
    before = [*PROMPT, *output]
    scores = [float(x) for x in TARGET[before[-2], before[-1]]]
    for token in range(V):
        scores[token] += s.logit_bias.get(token, 0.0)
        if token in before:
            scores[token] *= s.repetition_penalty if scores[token] < 0 else 1 / s.repetition_penalty
        count = list(output).count(token)
        scores[token] -= s.frequency_penalty * count + (s.presence_penalty if count else 0.0)
    best_first = sorted(range(V), key=lambda token: -scores[token])[: s.top_k]
    weights = {token: math.exp(scores[token] / s.temperature) for token in best_first}
    total, mass, kept = sum(weights.values()), 0.0, {}
    for token in best_first:
        if mass < s.top_p and weights[token] >= s.min_p * weights[best_first[0]]:
            kept[token] = weights[token]
        mass += weights[token] / total
    return [kept.get(token, 0.0) / sum(kept.values()) for token in range(V)]


def p_value(outcomes: Counter[tuple[int, ...]], sampling: Sampling) -> float:
    """How well outcomes fit the exact law: joint, and each position alone, Bonferroni over the five."""
    law = exact_law(sampling)
    ps = [chi_square([outcomes[outcome] for outcome in law], list(law.values()))]
    for position in range(LENGTH):
        counts, probs = [0] * V, [0.0] * V
        for outcome, prob in law.items():
            counts[outcome[position]] += outcomes[outcome]
            probs[outcome[position]] += prob
        ps.append(chi_square(counts, probs))
    return min(1.0, len(ps) * min(ps))
