"""Who runs when, which run counts, and where tokens differ."""

from __future__ import annotations

import pytest

from dflash_deploy.bench.figures import differences, first_difference, way_figures
from dflash_deploy.bench.measure import WARM_UP_TOKENS, Sample, Task, interleave, median_sample


class Recorded:
    """A way that writes down when it is run; each run takes a millisecond a token longer than the last."""

    def __init__(self, name: str, diary: list):
        self.name = name
        self.diary = diary
        self.runs = 0

    def run(self, task: Task) -> Sample:
        self.diary.append((self.name, task))
        self.runs += 1
        return Sample((1,) * task.new_tokens, 1, 10.0, 10.0 + self.runs * task.new_tokens)


def test_ways_take_turns_prompt_by_prompt():
    diary: list = []
    ways = [Recorded(name, diary) for name in "abc"]
    tasks = [Task((number,), 20) for number in range(2)]
    told = []
    found = interleave(ways, tasks, 2, lambda *done: told.append(done))
    warm, runs = diary[:3], diary[3:]
    assert warm == [(name, Task((0,), WARM_UP_TOKENS)) for name in "abc"]
    assert "".join(name for name, _ in runs) == "abcbcabcacab"
    assert [task for _, task in runs[::3]] == [tasks[0], tasks[1], tasks[0], tasks[1]]
    assert told == [(done, 12) for done in range(1, 13)]
    assert {name: list(map(len, of_way)) for name, of_way in found.items()} == {
        "a": [2, 2],
        "b": [2, 2],
        "c": [2, 2],
    }


@pytest.mark.parametrize(
    ("times", "median"), [([3.0], 3.0), ([9.0, 1.0, 4.0], 4.0), ([4.0, 8.0, 1.0, 2.0], 2.0)]
)
def test_the_median_run_counts(times, median):
    assert median_sample([Sample((1,), 1, 0.5, total) for total in times]).total_ms == median


def test_rates_leave_the_first_tokens_and_their_time_out():
    runs = [[Sample((1, 2, 3, 4, 5), 2, 100.0, 130.0)], [Sample((1, 2, 3), 1, 50.0, 60.0)]]
    figures = way_figures(runs)
    assert figures["tokens_per_s"] == pytest.approx(1000 * (3 + 2) / (30 + 10))
    assert figures["end_to_end_tokens_per_s"] == pytest.approx(1000 * 8 / 190)
    assert figures["first_token_ms"] == 75.0
    assert figures["tokens"] == 8
    assert figures["tokens_per_s_by_repeat"] == [figures["tokens_per_s"]]
    assert "verify_ms" not in figures  # another program does not tell


def test_where_tokens_differ():
    assert first_difference([1, 2, 3], [1, 2, 3]) == -1
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == first_difference([1, 2, 3], [1, 2]) == 2
    same, other, short = (Sample(ids, 1, 0.0, 1.0) for ids in ((1, 2, 3), (1, 2, 4), (1,)))
    found = differences([[same, same], [same, other], [short]], [[same], [same], [same]])
    assert found == {"prompts": 2, "first_token": 1, "first_tokens": [None, 2, 1]}
    assert differences([[same]], [[same]]) == {"prompts": 0, "first_token": None, "first_tokens": [None]}
