"""What is committed has the target's law, whatever the draft is: chi-square on the first four tokens.

Seeds are fixed, so a result stays what it is until the code changes. The bound is Bonferroni's: all cells
together raise a false alarm with probability 1e-3, so each cell's p-value must be at least `THRESHOLD`. The
negative controls make one mistake each and must fall below the same bound, with far fewer draws.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from chi_square import chi_square, upper_gamma
from dflash_deploy.runtime.choose import Chooser, Proposed
from dflash_deploy.runtime.law import Law
from dflash_deploy.runtime.random_stream import RandomStream, Use
from dflash_deploy.runtime.sampling import Sampling
from law_cases import (
    CANDIDATES,
    EDGES,
    FAMILIES,
    FILTERS,
    PROMPT,
    ROWS,
    TEMPERATURES,
    MemoChooser,
    V,
    candidates,
    exact_law,
    first_tokens,
    fixed,
    p_value,
    rows,
    sample,
)

CELLS = [(t, name, family) for t in TEMPERATURES for name in FILTERS for family in FAMILIES]
THRESHOLD = 1e-3 / len(CELLS)
FAST_CELLS = [
    (0.7, "none", "rows"),
    (1.0, "min_p", "rows"),
    (1.5, "top_p", "candidates"),
    (1.0, "penalties", "candidates"),
    (0.7, "top_k", "fixed"),
]
CONTROL_DRAWS, FAST_DRAWS, SLOW_DRAWS = 2_000, 10_000, 50_000


def cell_p(temperature: float, name: str, family: str, draws: int) -> float:
    sampling = replace(FILTERS[name], temperature=temperature)
    seed = CELLS.index((temperature, name, family)) * 1_000_000
    return p_value(sample(sampling, FAMILIES[family], draws, seed), sampling)


@pytest.mark.parametrize("cell", FAST_CELLS, ids=str)
def test_the_committed_tokens_have_the_targets_law(cell):
    assert cell_p(*cell, FAST_DRAWS) >= THRESHOLD


@pytest.mark.slow
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_the_committed_tokens_have_the_targets_law_everywhere(cell):
    assert cell_p(*cell, SLOW_DRAWS) >= THRESHOLD


# Negative controls: each is wrong in one thing.


class SharedNoise(MemoChooser):
    """Acceptance looks at the number that drew the proposal."""

    def _uniform(self, use, index):
        return super()._uniform(Use.PROPOSAL if use is Use.ACCEPTANCE else use, index)


class NoiseOfTheRow(MemoChooser):
    """Numbers are named by the row in the round and not by the token: each round gets the same ones."""

    def _uniform(self, use, index):
        return self.random.uniform(use, index)


def other_temperature(chooser: Chooser, anchor: int) -> Proposed:
    """Drawn at 0.6 of the temperature that is declared."""
    settings = replace(chooser.sampling, temperature=0.6 * chooser.sampling.temperature)
    drawer = Chooser(settings, PROMPT, V, ())
    drawer.random, drawer.position = chooser.random, chooser.position
    return Proposed(drawer.propose_rows(ROWS[anchor]).ids, rows(chooser, anchor).laws)


def without_edges(chooser: Chooser, anchor: int) -> Proposed:
    """Drawn behind the candidate before, declared as if the first candidate had been before."""
    edges = EDGES[anchor].copy()
    edges[:] = edges[:, :1]
    declared = chooser.propose_candidates(CANDIDATES[anchor], edges)
    return Proposed(candidates(chooser, anchor).ids, declared.laws)


def greedy_as_sampled(chooser: Chooser, anchor: int) -> Proposed:
    """The best token, declared as drawn."""
    return Proposed(fixed(chooser, anchor).ids, rows(chooser, anchor).laws)


def sampled_as_fixed(chooser: Chooser, anchor: int) -> Proposed:
    """Drawn, but declared as the only one that could come."""
    ids = rows(chooser, anchor).ids
    return Proposed(ids, tuple(map(Law.point, ids)))


CONTROLS = {
    "other_temperature": (other_temperature, MemoChooser),
    "without_edges": (without_edges, MemoChooser),
    "greedy_as_sampled": (greedy_as_sampled, MemoChooser),
    "shared_noise_rows": (rows, SharedNoise),
    "shared_noise_candidates": (candidates, SharedNoise),
    "noise_of_the_row": (rows, NoiseOfTheRow),
}


@pytest.mark.parametrize("name", CONTROLS)
def test_a_mistake_fails_the_same_test(name):
    draft, chooser = CONTROLS[name]
    sampling = Sampling(temperature=1.0)
    assert p_value(sample(sampling, draft, CONTROL_DRAWS, 0, chooser), sampling) < THRESHOLD


def test_a_point_mass_is_right_for_any_proposal_that_does_not_depend_on_the_noise_behind():
    """Not a mistake: given the proposal it is certain, however it was found. It only costs acceptance."""
    sampling = Sampling(temperature=1.0)
    assert p_value(sample(sampling, sampled_as_fixed, CONTROL_DRAWS, 0), sampling) >= THRESHOLD


@pytest.mark.parametrize("family", FAMILIES)
def test_the_laws_are_not_made_up_by_the_memo(family):
    for name, settings in FILTERS.items():
        laws: dict[object, Law | None] = {}
        for seed in range(40):
            sampling = replace(settings, temperature=0.9, seed=seed)
            with_memo = first_tokens(MemoChooser(sampling, laws), FAMILIES[family])
            assert with_memo == first_tokens(Chooser(sampling, PROMPT, V, ()), FAMILIES[family]), name


@pytest.mark.parametrize("family", FAMILIES)
def test_towards_temperature_0_it_becomes_greedy(family):
    greedy = first_tokens(Chooser(Sampling(), PROMPT, V, ()), FAMILIES[family])
    shares = [
        sample(Sampling(temperature=temperature), FAMILIES[family], 300, 0)[greedy] / 300
        for temperature in (1.0, 0.3, 0.1, 0.01)
    ]
    assert shares == sorted(shares)
    assert shares[0] < 0.5
    assert shares[-1] == 1.0


def test_the_exact_law_is_a_law_and_filters_cut_it():
    for name, settings in FILTERS.items():
        law = exact_law(replace(settings, temperature=1.0))
        assert sum(law.values()) == pytest.approx(1.0, abs=1e-12)
        impossible = sum(prob == 0.0 for prob in law.values())
        assert (impossible > 100) is (name in ("top_k", "top_p", "min_p")), name


def test_the_chi_square_test_itself():
    """Against table values, and against outcomes that are right, rare and impossible."""
    for freedom, statistic, expected in [
        (1, 3.841459, 0.05), (10, 18.307038, 0.05), (10, 29.588298, 0.001), (100, 124.342113, 0.05),
        (100, 77.929465, 0.95), (600, 658.093611, 0.05),
    ]:  # fmt: skip
        assert upper_gamma(freedom / 2, statistic / 2) == pytest.approx(expected, rel=1e-5)
    assert chi_square([50, 50], [0.5, 0.5]) == 1.0
    assert chi_square([60, 40], [0.5, 0.5]) == pytest.approx(0.0455, abs=1e-4)
    assert chi_square([99, 0, 1], [0.99, 0.01, 0.0]) == 0.0
    assert chi_square([90, 4, 3, 3], [0.9, 0.04, 0.03, 0.03]) == 1.0


def test_one_stream_gives_one_text():
    stream = RandomStream(None)
    again = Sampling(temperature=1.0, seed=stream.seed)
    texts = {first_tokens(Chooser(again, PROMPT, V, ()), rows) for _ in range(5)}
    assert len(texts) == 1
