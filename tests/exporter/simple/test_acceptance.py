"""Which acceptance keeps the target's law: the seed program's does not, that of a draft without chance does.

Two tokens behind a fixed anchor are drawn often, and their counts compared with the target's law by a
chi-square test. The seed program's draft draws its tokens by chance, over several steps. Its rule then takes
for q what one more forward says of the finished block: not the law that the tokens were drawn from.
Shapes: N draws, Q block rows, V vocabulary, H hidden size.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from toy_simple import BLOCK, MASK, VOCAB, eager_draft, target_states, toy_arrays

DRAWS = 40_000
PREVIOUS, ANCHOR = 6, 8  # here the draft is surest of its second token
SHARPNESS = 0.8  # temperature of the seed program's early steps
CERTAIN = 1e-12  # a p-value below it is no accident
USUAL = 1e-3  # an exact law is rejected once in a thousand seeds: the seeds here are fixed


def laws(logits: np.ndarray) -> np.ndarray:
    """Softmax over the last axis."""
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def draw(rng: np.random.Generator, law: np.ndarray) -> np.ndarray:
    """One token from each row of law [N, V]."""
    return (law.cumsum(-1) < rng.random(len(law))[:, None] * law.sum(-1, keepdims=True)).sum(-1)


def p_value(pairs: np.ndarray, expected: np.ndarray) -> float:
    """Of the counts of pairs [N, 2] under expected [V, V]; cells of fewer than ten are taken together."""
    counts = np.zeros_like(expected)
    np.add.at(counts, (pairs[:, 0], pairs[:, 1]), 1)
    expected = expected * len(pairs)
    rare = expected < 10
    got = np.append(counts[~rare], counts[rare].sum())
    due = np.append(expected[~rare], expected[rare].sum())
    statistic = ((got - due) ** 2 / due).sum()
    return float(torch.special.gammaincc(torch.tensor((len(due) - 1) / 2), torch.tensor(statistic / 2)))


class Toy:
    """The pair's laws, and its draft, eagerly in float64."""

    def __init__(self) -> None:
        target, self.draft = toy_arrays()
        self.hidden, logits = target_states(target)
        self.law = laws(logits)  # [V, V]: of the token behind each token
        self.embedding = target["token_embed"]
        self.expected = self.law[ANCHOR][:, None] * self.law  # [V, V]: of two tokens behind the anchor

    def state(self, previous: int, anchor: int) -> torch.Tensor:
        return torch.from_numpy(self.hidden[previous] + self.embedding[anchor])[None]

    def drawn_blocks(self, rng: np.random.Generator, steps: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Draw blocks [N, Q] as the seed program does.

        Beside them: the laws [N, Q, V] that each token was drawn from, and those that one more forward gives.
        """
        module = eager_draft(self.draft, steps)
        state = self.state(PREVIOUS, ANCHOR).expand(DRAWS, -1)
        block = np.full((DRAWS, BLOCK), MASK)
        masked = np.ones((DRAWS, BLOCK), bool)
        drawn_from = np.zeros((DRAWS, BLOCK, VOCAB))
        for step, count in enumerate(module.spec.unmask_counts):
            law = laws(module.logits(state, torch.from_numpy(block)).numpy())
            confidence = np.where(masked, law.max(-1), -1.0)
            if step < len(module.spec.unmask_counts) - 1:
                law = law ** (1 / SHARPNESS)
                law /= law.sum(-1, keepdims=True)
            order = np.argsort(-confidence, axis=-1, kind="stable")[:, :count]
            chosen = np.zeros_like(masked)
            np.put_along_axis(chosen, order, True, axis=-1)
            for q in range(BLOCK):
                block[:, q] = np.where(chosen[:, q], draw(rng, law[:, q]), block[:, q])
            drawn_from[chosen] = law[chosen]
            masked &= ~chosen
        return block, drawn_from, laws(module.logits(state, torch.from_numpy(block)).numpy())

    def accept_by_ratio(self, rng: np.random.Generator, block: np.ndarray, q: np.ndarray) -> np.ndarray:
        """The first two tokens [N, 2] if a proposal x stays with probability min(1, p(x) / q(x)).

        A rejected one is replaced from what p has over q, and the next token comes from the target.
        """
        last = np.full(DRAWS, ANCHOR)
        alive = np.ones(DRAWS, bool)
        tokens = []
        each = np.arange(DRAWS)
        for row in range(2):
            p, x = self.law[last], block[:, row]
            stays = rng.random(DRAWS) * q[each, row, x] < p[each, x]
            over = np.maximum(p - q[:, row], 0)
            over = np.where(over.sum(-1, keepdims=True) > CERTAIN, over, p)
            proposed = np.where(stays, x, draw(rng, over))
            last = np.where(alive, proposed, draw(rng, p))
            alive &= stays
            tokens.append(last)
        return np.stack(tokens, axis=1)


@pytest.fixture(scope="module")
def toy() -> Toy:
    return Toy()


def test_the_check_itself(toy):
    rng = np.random.default_rng(1)
    first = draw(rng, np.repeat(toy.law[ANCHOR][None], DRAWS, axis=0))
    pairs = np.stack([first, draw(rng, toy.law[first])], axis=1)
    assert p_value(pairs, toy.expected) > USUAL, "the target's own draws pass"
    bent = toy.expected * (1 + 0.2 * np.cos(np.arange(VOCAB)))
    assert p_value(pairs, bent / bent.sum()) < CERTAIN, "a law that is off by a fifth does not"


def test_the_seed_programs_rule_is_biased(toy):
    rng = np.random.default_rng(2)
    block, drawn_from, later = toy.drawn_blocks(rng, steps=2)
    assert p_value(toy.accept_by_ratio(rng, block, later), toy.expected) < CERTAIN
    # Not even the law each token was drawn from mends it: earlier tokens were drawn knowing later ones.
    assert p_value(toy.accept_by_ratio(rng, block, drawn_from), toy.expected) < CERTAIN


def test_in_one_step_only_its_q_is_wrong(toy):
    rng = np.random.default_rng(3)
    block, drawn_from, later = toy.drawn_blocks(rng, steps=1)
    assert p_value(toy.accept_by_ratio(rng, block, later), toy.expected) < CERTAIN
    assert p_value(toy.accept_by_ratio(rng, block, drawn_from), toy.expected) > USUAL


def test_a_draft_without_chance_keeps_the_law(toy, toy_bundle):
    """The exported graphs in the loop: proposals are the graph's, and so is the target's law.

    A proposal x is a point mass, so it stays with probability p(x), and what replaces it is p without x.
    """
    every = np.arange(VOCAB)
    p = laws(toy_bundle.target_graph.run(every[:, None], 0)["logits"][:, 0].astype(np.float64))
    assert np.abs(p - toy.law).max() < 1e-5
    pairs = np.stack(np.meshgrid(every, every, indexing="ij"), axis=-1).reshape(-1, 2)
    rounds = toy_bundle.propose(pairs[:, 0], pairs[:, 1])
    proposals = rounds["proposals"].reshape(VOCAB, VOCAB, BLOCK)

    rng = np.random.default_rng(4)
    each = np.arange(DRAWS)
    previous, anchor = np.full(DRAWS, PREVIOUS), np.full(DRAWS, ANCHOR)
    row = np.zeros(DRAWS, int)  # of the round that each draw is in
    last, tokens, stayed = anchor, [], []
    for _ in range(2):
        x, law = proposals[previous, anchor, row], p[last]
        stays = rng.random(DRAWS) < law[each, x]
        rest = law.copy()
        rest[each, x] = 0.0
        chosen = np.where(stays, x, draw(rng, rest))
        # What was rejected ends the round: the token that replaced it is the next anchor.
        previous = np.where(stays, previous, last)
        anchor = np.where(stays, anchor, chosen)
        row = np.where(stays, row + 1, 0)
        last = chosen
        tokens.append(chosen)
        stayed.append(stays.mean())
    assert p_value(np.stack(tokens, axis=1), toy.expected) > USUAL
    assert min(stayed) > 0.01, "some proposals stay, or nothing was tried"
