"""Several bundles and a program in one run, through the library and the command line."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

import toy_onnx
from dflash_deploy.bench import compare as module
from dflash_deploy.bench.chart import chart_bars, chart_caption, write_chart
from dflash_deploy.bench.compare import compare
from dflash_deploy.bench.opened import BenchSettings
from dflash_deploy.bench.own import Length
from dflash_deploy.bench.peers import PEERS
from dflash_deploy.bench.peers.client import PeerPlace
from dflash_deploy.bench.prompts import PromptSet, RandomPrompts
from dflash_deploy.bench.sweep import _bits, sweep
from dflash_deploy.bench.table import report_parts, sweep_parts
from dflash_deploy.bundle.errors import RequestError
from dflash_deploy.bundle.manifest import file_info, manifest_from_bundle, manifest_to_file
from dflash_deploy.bundle.manifest_records import QuantizationInfo
from dflash_deploy.cli import cli
from dflash_deploy.runtime.decoder import Decoder
from dflash_deploy.runtime.stats import Mode
from text_bundle import write_text_bundle

PROMPTS = PromptSet("some", [[5, 9, 2], [4], [7] * 9], Length.FULL)


@pytest.fixture(scope="module")
def bundles(tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp("bundles")
    for name in ("one", "two"):
        toy_onnx.write_bundle(folder / name)
    return [folder / "one", folder / "two"]


@pytest.fixture(scope="module")
def text_bundle(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("text") / "text"
    write_text_bundle(folder)
    return folder


def printed(parts) -> str:
    file = io.StringIO()
    console = Console(file=file, width=140, markup=False)
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, str))
    return file.getvalue()


def test_bundles_are_compared_with_themselves_and_with_the_first(bundles):
    settings = BenchSettings(max_new_tokens=12, repeats=2, verify_rows=3, threads=1, contexts=(20, 40))
    told = []
    report = compare(bundles, PROMPTS, settings, progress=lambda *done: told.append(done))
    assert json.loads(json.dumps(report)) == report
    assert [bundle["label"] for bundle in report["bundles"]] == ["one", "two"]
    for bundle in report["bundles"]:
        assert bundle["tokens_identical"] is True
        assert bundle["open_ms"] > 0
        assert bundle["speculative"]["tokens"] == 36
        assert bundle["unlike_first_bundle"] == {
            "prompts": 0,
            "first_token": None,
            "first_tokens": [None] * 3,
        }
        assert len(bundle["speculative"]["tokens_per_s_by_repeat"]) == 2
        assert len(bundle["acceptance_by_position"]) == 2
    assert [context["length"] for context in report["context"]] == [20, 40]
    for context in report["context"]:
        assert {b["label"] for b in context["bundles"]} == {"one", "two"}
        assert all(b["plain"]["ms_per_token"] > 0 and b["tokens_identical"] for b in context["bundles"])
    assert told[:2] == [(1, 36), (2, 36)]
    settings_told = report["settings"]
    assert (settings_told["threads"], settings_told["verify_rows"], settings_told["new_tokens"]) == (1, 3, 36)
    text = printed(report_parts(report))
    for words in (
        "3 prompts (some), 12 tokens, 3 rows verified, median of 2",
        "one plain exact",
        "two speculative",
        "the measure",
        "identical to plain",
        "accepted by position: ",
        "behind a context",
        "1 threads",
    ):
        assert words in text, words


def test_a_difference_is_told(bundles, monkeypatch):
    """Shown where it arises: between ways of a bundle, and in the table."""
    report = compare(bundles[:1], PROMPTS, BenchSettings(max_new_tokens=8, threads=1))
    bundle = report["bundles"][0]
    bundle.update(tokens_identical=False, draft_failures=3)
    text = printed(report_parts(report))
    assert "NOT IDENTICAL to plain" in text
    assert "the draft failed 3 times" in text


def test_a_program_decodes_the_same_tokens(bundles, fake_peer, tmp_path):
    settings = BenchSettings(max_new_tokens=10, threads=1)
    alone = compare(bundles[:1], PROMPTS, settings)
    assert alone["peers"] == []
    target = tmp_path / "t.gguf"
    right = {",".join(map(str, ids)): _plain(bundles[0], ids, 10) for ids in PROMPTS.prompts}
    wrong = {**right, "4": [*right["4"][:6], 96, *right["4"][7:]]}
    for tokens, differing, first in ((right, 0, None), (wrong, 1, 6)):
        target.write_text(json.dumps({"tokens": tokens}))
        report = compare(bundles[:1], PROMPTS, settings, ["fake"], PeerPlace(target))
        (peer,) = report["peers"]
        assert (peer["name"], peer["version"], peer["note"]) == ("fake", "1.2", "1 threads, OMP 1")
        unlike = peer["unlike_first_bundle"]
        assert (unlike["prompts"], unlike["first_token"]) == (differing, first)
        assert peer["tokens_per_s"] == pytest.approx(500.0)  # 2 ms a token
        speculative = report["bundles"][0]["speculative"]["tokens_per_s"]
        assert peer["fastest_bundle_over_it"] == pytest.approx(speculative / 500.0)
        expected = "the same" if not differing else "1 of 3 prompts differ, from token 6 on"
        assert expected in printed(report_parts(report))


def _plain(bundle: Path, ids: list[int], tokens: int) -> list[int]:
    with Decoder.open(bundle, threads=1) as decoder:
        return list(decoder.generate(ids, tokens, mode=Mode.PLAIN, stop_token_ids=()).ids)


def test_random_prompts_are_drawn_from_the_vocabulary(bundles):
    report = compare(bundles[:1], RandomPrompts(2, 3), BenchSettings(max_new_tokens=5, threads=1))
    assert report["settings"]["prompts"] == "random (seed 3)"
    assert report["settings"]["new_tokens"] == 10


def test_requests_that_cannot_be(bundles, text_bundle):
    with pytest.raises(RequestError, match="expected each once"):
        compare([bundles[0], bundles[0]], PROMPTS)
    with pytest.raises(RequestError, match="context: got 999"):
        compare(bundles[:1], PROMPTS, BenchSettings(contexts=(999,), threads=1))
    with pytest.raises(RequestError, match="prompts: got none"):
        compare(bundles[:1], PromptSet("none", []), BenchSettings(threads=1))


def test_bundles_of_other_tokens_are_refused(text_bundle, tmp_path):
    other = tmp_path / "other"
    write_text_bundle(other)
    template = other / "chat_template.jinja"
    template.write_text(template.read_text() + "!")
    manifest = manifest_from_bundle(text_bundle)
    files = {**manifest.files, template.name: file_info(template)}
    manifest_to_file(replace(manifest, files=files), other)
    with pytest.raises(RequestError, match="bundles: other has other tokens for these prompts than text"):
        compare([text_bundle, other], PromptSet("some", ["hello"]), BenchSettings(threads=1))


def test_a_sweep_has_a_cell_for_everything(bundles):
    settings = BenchSettings(max_new_tokens=8, threads=1, contexts=(16, 32))
    report = sweep(bundles, PROMPTS, settings, rows=(2, 3))
    cells = report["cells"]
    assert json.loads(json.dumps(report)) == report
    assert [(c["context"], c["bundle"], c["rows"]) for c in cells] == [
        (length, name, rows) for length in (16, 32) for name in ("one", "two") for rows in (2, 3, "adaptive")
    ]
    assert all(cell["tokens_identical"] and cell["tokens_per_s"] > 0 for cell in cells)
    assert all((c["dtype"], c["quantized"], c["bits"]) == ("float32", False, None) for c in cells)
    text = printed(sweep_parts(report))
    assert "one (float32): tokens/s by rows" in text
    assert "identical to plain in all cells" in text
    assert text.count("*\n") + text.count("* ") >= 4
    for name, bits in (("one", 4), ("two", 8)):
        for cell in (cell for cell in cells if cell["bundle"] == name):
            cell.update(quantized=True, bits=bits)
    text = printed(sweep_parts(report))
    assert "one (int4): tokens/s by rows" in text
    assert "two (int8): tokens/s by rows" in text
    cells[0]["tokens_identical"] = False
    assert "NOT IDENTICAL to plain in 1 cells" in printed(sweep_parts(report))
    plain = sweep(bundles[:1], PROMPTS, BenchSettings(max_new_tokens=4, threads=1))["cells"]
    assert {cell["context"] for cell in plain} == {0}
    assert plain[-1]["rows"] == "adaptive"
    for rows, words in (((99,), "rows: got 99, expected 2 to"), ((2, 2), "expected each once")):
        with pytest.raises(RequestError, match=words):
            sweep(bundles[:1], PROMPTS, settings, rows=rows)


@pytest.mark.parametrize(("passes", "bits"), [(("int4", "smooth", "int8"), 4), (("smooth", "int8"), 8)])
def test_a_cell_says_how_many_bits_the_layers_weights_have(bundles, passes, bits):
    manifest = manifest_from_bundle(bundles[0])
    assert _bits(manifest) is None
    target = replace(manifest.graphs["target"], passes=passes)
    rounding = QuantizationInfo("in words", 30.0, 1.01, 0.9, 600, "0" * 64)
    rounded = replace(manifest, quantization=rounding, graphs={**manifest.graphs, "target": target})
    assert _bits(rounded) == bits


@pytest.fixture(scope="module")
def report(bundles) -> dict:
    return compare(bundles, PROMPTS, BenchSettings(max_new_tokens=6, threads=1))


def test_bars_and_caption(report):
    made = {**report, "peers": [{"name": n, "tokens_per_s": v} for n, v in (("slow", 1.0), ("fast", 9.0))]}
    bars = chart_bars(made)
    assert [name for name, _, _ in bars] == [
        "one, plain",
        "one, speculative",
        "two, plain",
        "two, speculative",
        "fast",
        "slow",
    ]
    assert bars[1][1] == report["bundles"][0]["speculative"]["tokens_per_s"]
    assert bars[4][2] == bars[5][2] != bars[0][2]  # programs are grey
    caption = chart_caption(made)
    assert report["cpu"] in caption
    assert "1 threads. 3 prompts (some), 18 tokens in all, greedy, median of 1." in caption


def test_a_chart_is_the_same_twice(report, tmp_path):
    pytest.importorskip("matplotlib")
    files = [tmp_path / name for name in ("a.svg", "b.svg", "a.png", "b.png")]
    for file in files:
        write_chart(report, file)
    a, b, c, d = (file.read_bytes() for file in files)
    assert a == b
    assert c == d
    assert ET.fromstring(a.decode()).tag.endswith("svg")
    assert b"<dc:date>" not in a
    assert c.startswith(b"\x89PNG")


def dflash(*arguments: object):
    return CliRunner().invoke(cli, ["bench", *map(str, arguments)])


def test_the_command_writes_everything(bundles, text_bundle, fake_peer, tmp_path):
    target, prompts = tmp_path / "t.gguf", tmp_path / "p.txt"
    target.write_text("{}")
    prompts.write_text("hello\nthere\n")
    places = ("--json", tmp_path / "r.json")
    run = (text_bundle, "--prompts", prompts, "--limit", 1, "--max-new-tokens", 6, "--threads", 1)
    done = dflash(*run, "--peer", "fake", "--target", target, "--context", "30", *places)
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))
    assert found["settings"]["prompt_count"] == 1
    assert found["settings"]["chat"] is True
    assert [peer["name"] for peer in found["peers"]] == ["fake"]
    assert [context["length"] for context in found["context"]] == [30]
    done = dflash(
        *bundles,
        "--prompts",
        "random",
        "--limit",
        1,
        "--max-new-tokens",
        4,
        "--sweep",
        "--rows",
        "2",
        *places,
    )
    assert done.exit_code == 0, done.output
    assert len(json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))["cells"]) == 4


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--json", "FOLDER"], "is a directory, expected a file"),
        (["--json", "nowhere/r.json"], "is no directory"),
        (["--chart", "FOLDER/c.pdf"], "chart: got .*c.pdf', expected a name that ends in .png or .svg"),
        (["--chart", "nowhere/c.svg"], "is no directory"),
        (["--context", "1,x"], "got '1,x', expected different numbers"),
        (["--context", "5,5"], "expected different numbers"),
        (["--rows", "2"], "--rows: belongs to --sweep"),
        (["--sweep", "--chart", "c.svg"], "--sweep: leave"),
        (["--sweep", "--verify-rows", "3"], "--sweep: leave"),
        (["--target", "t.gguf"], "belong to --peer and --peers"),
        (["--peer", "vllm"], "peer: got 'vllm', expected one of"),
        (["--peer", "fake"], "peer fake: --target is missing"),
    ],
)
def test_the_command_refuses_before_the_work(bundles, fake_peer, tmp_path, monkeypatch, options, words):
    monkeypatch.setattr(module, "open_bundles", lambda *_: pytest.fail("opened"))
    options = [option.replace("FOLDER", str(tmp_path)) for option in options]
    done = dflash(bundles[0], "--prompts", "random", *options)
    assert done.exit_code == 2
    assert re.search(words, done.output), done.output


def test_a_chart_needs_matplotlib(bundles, monkeypatch, tmp_path):
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "matplotlib" else find(name))
    done = dflash(bundles[0], "--chart", tmp_path / "c.png")
    assert done.exit_code == 2
    assert "chart: matplotlib is not installed; pip install 'dflash-deploy[bench]'" in done.output


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_to(bundles, tmp_path):
    tmp_path.chmod(0o500)
    assert "cannot be written to" in dflash(bundles[0], "--json", tmp_path / "r.json").output


def test_help_names_every_program():
    text = " ".join(dflash("--help").output.split())
    assert all(name in text for name in PEERS)
