"""The parts of the builder process that need no library."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dflash_deploy.bundle.errors import EngineBuildError
from dflash_deploy.bundle.manifest import EngineFlag
from dflash_deploy.exporter.engines import worker
from dflash_deploy.exporter.engines.backends import BACKENDS
from dflash_deploy.exporter.engines.job import (
    Done,
    Failed,
    Fault,
    Note,
    Step,
    message_from_line,
    message_to_line,
)
from dflash_deploy.exporter.engines.worker import parser_errors, usable_timing_cache, with_hints


@pytest.mark.parametrize(
    "message",
    [
        Step("a\nb"),
        Note("ü"),
        Failed(Fault.MACHINE, ("one", "two\nlines")),
        Done("1.7", (EngineFlag.STRIPPED,)),
    ],
)
def test_a_message_is_one_line_and_comes_back(message):
    line = message_to_line(message)
    assert line.count("\n") == 1
    assert message_from_line(line) == message


@pytest.mark.parametrize(
    "line", ["", "noise", "{}", '{"kind": "Step"}', '{"kind": "Exec", "message": {}}', "[]"]
)
def test_a_line_that_is_no_message_is_refused(line):
    with pytest.raises(EngineBuildError, match="expected a message"):
        message_from_line(line)


def test_a_message_with_other_fields_is_refused():
    with pytest.raises(EngineBuildError, match=r"builder process\.words"):
        message_from_line('{"kind": "Step", "message": {"words": 1}}')


class Parser:
    """A parser with errors as the library gives them."""

    def __init__(self, *errors):
        self.errors = errors
        self.num_errors = len(errors)

    def get_error(self, index):
        desc, name, op = self.errors[index]
        return SimpleNamespace(
            desc=lambda: desc, node_name=lambda: name, node_operator=lambda: op, node=lambda: 40 + index
        )


def test_every_parser_error_is_written():
    parser = Parser(
        ("false", "d", "Det"), ("Assertion failed: no", "", "Loop"), ("Plugin not found, are", "p", "")
    )
    assert parser_errors(parser, "1.7") == [
        "node d (Det): this operator is not supported by the parser of version 1.7",
        "node number 41 (Loop): Assertion failed: no",
        "node p (unknown operator): neither an operator nor a plugin that version 1.7 knows",
    ]


def test_what_the_library_says_is_explained():
    reason = "Myelin: tactics_tiled_layout.cpp:2006: CHECK failed"
    hint, said = with_hints([reason])
    assert "multiple of 8" in hint
    assert said == reason
    assert with_hints(["something else"]) == ["something else"]


class TestTimingCache:
    def test_one_that_is_not_there_is_fine(self, tmp_path):
        assert usable_timing_cache(bytes, tmp_path / "none")

    def test_one_that_the_library_takes_is_kept(self, tmp_path):
        path = tmp_path / "cache"
        path.write_bytes(b"good")
        assert usable_timing_cache(lambda data: data, path)

    def test_one_that_it_does_not_take_is_not(self, tmp_path):
        path = tmp_path / "cache"
        path.write_bytes(b"bad")

        def refuses(data):
            raise RuntimeError("no")

        assert not usable_timing_cache(lambda data: None, path)
        assert not usable_timing_cache(refuses, path)

    def test_a_broken_one_is_removed_and_the_build_goes_on(self, tmp_path):
        path = tmp_path / "a.cache"
        path.write_bytes(b"broken")
        said: list[Any] = []
        config = SimpleNamespace(create_timing_cache=lambda data: None)
        library: Any = object.__new__(worker._Library)
        library.job = SimpleNamespace(timing_cache=str(path))
        library.send = said.append
        library._clear_timing_cache(SimpleNamespace(create_builder_config=lambda: config))
        assert not path.exists()
        assert "written anew" in said[0].text


def test_polygraphy_is_never_bound_to_the_wrong_flavour(monkeypatch):
    monkeypatch.setenv(worker.RTX_VARIABLE, "0")
    with pytest.raises(AssertionError, match="before polygraphy is imported"):
        worker._load(BACKENDS["tensorrt-rtx"])
