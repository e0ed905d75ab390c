"""`generate` and `bench` through the command line: text on standard output, the summary beside it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dflash_deploy.bundle.errors import EngineError
from dflash_deploy.cli import cli
from dflash_deploy.runtime.decoder import Decoder
from toy_engines import toy_decoder


class Codec:
    """Every token is one letter; a prompt's ids are its characters."""

    has_chat_template = False

    def encode_prompt(self, prompt: str, chat: bool, system: str | None) -> list[int]:
        assert not chat
        return [ord(char) % 97 for char in prompt]

    def stream(self) -> Codec:
        return self

    def push(self, ids: tuple[int, ...]) -> str:
        return "".join(chr(97 + i % 26) for i in ids)

    def close(self) -> str:
        return ""


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> dict:
    """Decoders made of toys; gives the settings that the command asked for."""
    asked: dict = {}

    def open_toy(bundle: Path, **settings: object) -> Decoder:
        asked.update(settings, bundle=bundle)
        return toy_decoder(codec=Codec(), fail_at=asked.get("fail_at"))

    monkeypatch.setattr(Decoder, "open", staticmethod(open_toy))
    return asked


def _run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])


def test_the_text_and_nothing_else_is_on_standard_output(toy):
    result = _run("generate", "b", "hello", "--max-new-tokens", 20, "--threads", 2, "--verify-rows", 3)
    assert result.exit_code == 0, result.output
    assert len(result.stdout) == 21
    assert result.stdout.endswith("\n")
    assert result.stderr.startswith("20 tokens (length) | ")
    assert "acceptance length" in result.stderr
    assert toy == {"bundle": Path("b"), "provider": "cpu", "threads": 2, "verify_rows": 3}


def test_plain_decoding_gives_the_same_text(toy):
    plain = _run("generate", "b", "hello", "--max-new-tokens", 30, "--plain")
    assert plain.stdout == _run("generate", "b", "hello", "--max-new-tokens", 30).stdout
    assert "acceptance length" not in plain.stderr


def test_an_engine_that_fails_is_no_fault_of_the_user(toy):
    toy["fail_at"] = 3
    result = _run("generate", "b", "hello", "--max-new-tokens", 90)
    assert result.exit_code == EngineError.exit_code == 1
    assert result.stderr == "dflash: target broke\n"


@pytest.mark.parametrize(
    ("prompt", "message"), [("x" * 400, "length in tokens: got 400, expected at most 399"), ("", "no tokens")]
)
def test_a_prompt_that_cannot_be_served_is_the_users_fault(toy, prompt, message):
    result = _run("generate", "b", prompt)
    assert result.exit_code == 2
    assert message in result.stderr


def _dflash(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dflash_deploy", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ}, check=False)


def test_the_real_pair_answers(demo_bundle):
    prompt = "What is photosynthesis?"
    done = _dflash("generate", demo_bundle, prompt, "--max-new-tokens", 12)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    plain = _dflash("generate", demo_bundle, prompt, "--max-new-tokens", 12, "--plain")
    assert plain.stdout == done.stdout
    empty = _dflash("generate", demo_bundle, " ")
    assert (empty.returncode, empty.stdout) == (2, "")
    assert empty.stderr == "dflash: prompt: got ' ', expected some text\n"


def test_the_real_pair_is_timed(demo_bundle, tmp_path):
    (tmp_path / "prompts.txt").write_text("What is photosynthesis?\n\n")
    report = tmp_path / "bench.json"
    arguments = ("--prompts", tmp_path / "prompts.txt", "--max-new-tokens", 8, "--json", report)
    done = _dflash("bench", demo_bundle, *arguments)
    assert done.returncode == 0, done.stderr
    assert "speculative" in done.stdout
    figures = json.loads(report.read_text(encoding="utf-8"))
    assert figures["tokens_identical"] is True
    assert figures["settings"]["prompts"] == 1
    assert {"speedup", "acceptance_length", "rounds", "threads", "versions"} <= set(figures)
    assert {"tokens_per_s", "verify_ms", "draft_ms"} <= set(figures["plain"]) & set(figures["speculative"])
