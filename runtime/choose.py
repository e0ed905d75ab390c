"""The tokens of one request, chosen so that a draft changes their speed and not their law.

A proposal x was drawn from the draft's law q, and the target's law at its place is p. It is accepted with
probability min(1, p(x) / q(x)); if not, a token is drawn from max(p - q, 0), scaled to 1, and the round ends.
What comes out has the law p, whatever q is, as long as q is the law x was really drawn from, given the
proposals before it. So both laws are made in one place, and q travels with the proposal.

Shapes: P proposals, V vocabulary, k candidates of a row.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from ..bundle.errors import EngineError
from .accept import Acceptance, FinishReason
from .law import Ids, Law, Scores, law_from_scores, top_indices
from .penalties import Penalties
from .random_stream import RandomStream, Use
from .sampling import Sampling


class ProposalError(ValueError):
    """The draft's numbers cannot be drawn from. The request can go on without them."""


@dataclass(frozen=True)
class Proposed:
    """Proposals, and the law that each was drawn from given those before it."""

    ids: tuple[int, ...] = ()
    laws: tuple[Law, ...] = ()


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of a token under the target's own law; see `Sampling.logprobs`.

    Attributes:
        id: the token.
        logprob: its natural logarithm of probability.
        best: the most probable tokens and theirs, best first, the lower id first on a tie.
    """

    id: int
    logprob: float
    best: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Accepted(Acceptance):
    """Outcome of one round; rows behind the last token were not looked at and count as not accepted.

    Attributes:
        logprobs: one for each of `ids`, if the request wants them.
    """

    logprobs: tuple[TokenLogprob, ...] = ()


class Chooser:
    """Chooses the tokens of one request.

    Attributes:
        sampling: the settings.
        random: its random numbers; `random.seed` is the seed in use.
        position: number of tokens committed so far: index of the next output token.
    """

    def __init__(
        self,
        sampling: Sampling,
        prompt_ids: Sequence[int],
        vocab_size: int,
        stop_ids: Collection[int],
        min_tokens: int = 0,
    ) -> None:
        """Begin a request.

        Args:
            sampling: the settings, checked.
            prompt_ids: for the repetition penalty.
            vocab_size: V.
            stop_ids: tokens that end the generation; the stop token itself is part of the output.
            min_tokens: no stop token is chosen before that many other tokens.
        """
        self.sampling = sampling
        self.random = RandomStream(sampling.seed)
        self.position = 0
        self._vocab_size = vocab_size
        self._stop_ids = frozenset(stop_ids)
        self._penalties = Penalties(sampling, prompt_ids, vocab_size, stop_ids, min_tokens)

    @property
    def needs_logits(self) -> bool:
        """Whether the next token can be chosen only with logits; else the greedy choices are enough."""
        return self.sampling.needs_logits or self._penalties.bans(self.position)

    def commit(self, ids: Sequence[int]) -> None:
        """Make tokens part of the output: those that were accepted, or the first of them."""
        self._penalties.commit(ids)
        self.position += len(ids)

    def propose_rows(self, logits: Scores) -> Proposed:
        """Draw from a draft's logits, row by row.

        Args:
            logits: [P, V], row i for the i-th token behind the anchor.

        Returns:
            P proposals, or fewer if in a row every token that is possible is banned.

        Raises:
            ProposalError: a row is not finite.
        """
        if logits.ndim != 2 or logits.shape[1] != self._vocab_size:
            raise ValueError(f"draft logits: got {logits.shape}, expected [P, {self._vocab_size}]")
        ids: list[int] = []
        laws: list[Law] = []
        for index, row in enumerate(logits):
            law = self._proposal_law(row, None, ids, index)
            if law is None:
                break
            ids.append(self._draw(law, Use.PROPOSAL, index))
            laws.append(law)
        return Proposed(tuple(ids), tuple(laws))

    def propose_candidates(self, candidates: Ids, edge_scores: Scores) -> Proposed:
        """Draw a path through a draft's candidates, from left to right.

        Args:
            candidates: [P, k], token ids.
            edge_scores: [P, k, k]: [i, j, c] scores candidate c of row i behind candidate j of row i - 1.
                In row 0, where the anchor is before it, all j are the same.

        Returns:
            As `propose_rows`.

        Raises:
            ProposalError: a score is not finite, or candidates are no tokens or not different.
        """
        if candidates.ndim != 2 or edge_scores.shape != (*candidates.shape, candidates.shape[1]):
            raise ValueError(
                f"got candidates {candidates.shape} and edge scores {edge_scores.shape}, "
                "expected [P, k] and [P, k, k]"
            )
        order = candidates.argsort(axis=1)  # laws and ties go by ascending id
        tokens = np.take_along_axis(candidates, order, axis=1)
        self._check_tokens(tokens)
        ids: list[int] = []
        laws: list[Law] = []
        chosen = 0
        for index, by_id in enumerate(order):
            law = self._proposal_law(edge_scores[index, chosen, by_id], tokens[index], ids, index)
            if law is None:
                break
            token = self._draw(law, Use.PROPOSAL, index)
            chosen = int(by_id[tokens[index].searchsorted(token)])
            ids.append(token)
            laws.append(law)
        return Proposed(tuple(ids), tuple(laws))

    def propose_fixed(self, ids: Sequence[int]) -> Proposed:
        """Take proposals of a draft that has no choice: each one's law is a point mass.

        Raises:
            ProposalError: one is no token.
        """
        self._check_tokens(np.array(ids, np.int64).reshape(-1, 1))
        return Proposed(tuple(int(token) for token in ids), tuple(Law.point(token) for token in ids))

    def accept(self, proposed: Proposed, logits: Scores, budget: int) -> Accepted:
        """Choose the round's tokens; commits nothing.

        Rows are looked at as far as they are needed: up to the first rejection, stop token, or the budget.

        Args:
            proposed: made since the last commit.
            logits: [P + 1, V], the target's, behind the anchor and behind each proposal.
            budget: tokens that may still be produced, at least 1.

        Raises:
            EngineError: a row that is needed holds NaN or inf, or no possible token.
        """
        count = len(proposed.ids)
        if logits.shape != (count + 1, self._vocab_size) or budget < 1:
            raise ValueError(
                f"got {count} proposals, logits {logits.shape} and a budget of {budget}; expected logits "
                f"{(count + 1, self._vocab_size)}, and a budget of at least 1"
            )
        ids: list[int] = []
        logprobs: list[TokenLogprob] = []
        accepted, finish = 0, None
        for index in range(min(count + 1, budget)):
            law = self._target_law(logits[index], ids, index)
            token, stands = self._choose(law, proposed, index)
            accepted += stands
            if self.sampling.logprobs is not None:
                logprobs.append(logprob_of(logits[index], token, self.sampling.logprobs))
            ids.append(token)
            if token in self._stop_ids:
                finish = FinishReason.STOP
            if finish is not None or not stands:
                break
        if finish is None and len(ids) == budget:
            finish = FinishReason.LENGTH
        return Accepted(accepted, tuple(ids), finish, tuple(logprobs))

    def _choose(self, target: Law, proposed: Proposed, index: int) -> tuple[int, bool]:
        """The token at a row, and whether it is the proposal."""
        if index == len(proposed.ids):
            return self._draw(target, Use.RESIDUAL, index), False
        token, draft = proposed.ids[index], proposed.laws[index]
        p, q = target.prob(token), draft.prob(token)
        if p >= q or self._uniform(Use.ACCEPTANCE, index) * q < p:
            return token, True
        return target.draw_beyond(draft, self._uniform(Use.RESIDUAL, index)), False

    def _target_law(self, row: Scores, prefix: Sequence[int], index: int) -> Law:
        if not np.isfinite(row.max()):
            raise EngineError(
                f"target logits: row {index} of the round (output token {self.position + index}) has the "
                f"maximum {row.max()}, expected a finite one; the engine overflows or the bundle is damaged: "
                "run `dflash parity`, or export in float32"
            )
        law = self._law(row, None, prefix, index)
        if law is None:
            raise EngineError(
                f"target logits: row {index} of the round allows only stop tokens, but output token "
                f"{self.position + index} must be another; lower min_new_tokens, or have fewer stop tokens"
            )
        return law

    def _proposal_law(self, row: Scores, ids: Ids | None, prefix: Sequence[int], index: int) -> Law | None:
        if not np.isfinite(row.max()):
            raise ProposalError(f"logits of proposal {index + 1} are not finite")
        return self._law(row, ids, prefix, index)

    def _law(self, row: Scores, ids: Ids | None, prefix: Sequence[int], index: int) -> Law | None:
        """The law of a row, the target's or the draft's; None if every token that is possible is banned."""
        scores = self._penalties.apply(row, ids, prefix, self.position + index)
        if scores is not row and scores.max() == -np.inf:
            return None
        s = self.sampling
        return law_from_scores(scores, ids, s.temperature, s.top_k, s.top_p, s.min_p)

    def _draw(self, law: Law, use: Use, index: int) -> int:
        return law.draw(self._uniform(use, index))

    def _uniform(self, use: Use, index: int) -> float:
        return self.random.uniform(use, self.position + index)

    def _check_tokens(self, tokens: Ids) -> None:
        """[P, k], ascending in a row: in the vocabulary, and each once in a row."""
        fits = (tokens >= 0) & (tokens < self._vocab_size)
        fits[:, 1:] &= tokens[:, 1:] > tokens[:, :-1]
        if not fits.all():
            index = int(fits.all(axis=1).argmin())
            raise ProposalError(
                f"tokens of proposal {index + 1} are {tokens[index].tolist()}, expected different ones, "
                f"0 <= id < {self._vocab_size}"
            )


def logprob_of(row: Scores, token: int, best: int) -> TokenLogprob:
    """Log-probability of a token, and of the best ones, under softmax of a row of logits as they are.

    Args:
        row: [V], with a finite maximum.
        token: the token.
        best: how many others, at most V.
    """
    relative = np.subtract(row, row.max(), dtype=np.float64)
    relative -= np.log(np.exp(relative).sum())
    if best == 0:
        return TokenLogprob(token, float(relative[token]), ())
    top = top_indices(relative, best)
    top = top[np.argsort(-relative[top], kind="stable")]
    pairs = zip(top.tolist(), relative[top].tolist(), strict=True)
    return TokenLogprob(token, float(relative[token]), tuple(pairs))
