import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dflash_deploy import cli as command_line
from dflash_deploy.bundle.errors import EngineError, OutputError
from dflash_deploy.bundle.manifest import manifest_from_bundle
from dflash_deploy.cli import cli
from toy_bundle import edit_manifest, toy_bundle


def _run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])


_EXPORT = ("export", "--target", "none", "--draft", "none", "--output", "o")
_QUANTIZE = ("quantize", "none", "--output", "o")


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    directory = tmp_path / "bundle"
    directory.mkdir()
    toy_bundle(directory)
    return directory


def test_help_is_quick():
    """Under 0.3 s: the best of three, for other work may run beside this."""

    def seconds() -> float:
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "dflash_deploy", "--help"], check=True, capture_output=True)
        return time.perf_counter() - start

    assert min(seconds() for _ in range(3)) < 0.3


@pytest.mark.parametrize("name", sorted(cli.commands))
def test_every_command_has_a_help(name):
    result = _run(name, "--help")
    assert result.exit_code == 0
    assert result.output.startswith(f"Usage: cli {name}")


def test_a_bundle_that_is_none_is_the_users_fault(tmp_path):
    for arguments in (["generate", tmp_path, "hi"], ["bench", tmp_path]):
        result = _run(*arguments)
        assert result.exit_code == 2, result.output
        assert "expected a directory made by `dflash export`" in result.stderr
        assert "Traceback" not in result.output


def test_an_edited_manifest_is_the_users_fault(bundle):
    edit_manifest(bundle, lambda data: data["draft"].update(mask_token_id=-1))
    result = _run("inspect", bundle)
    assert result.exit_code == 2
    assert result.stderr.startswith("dflash: manifest.json: draft.mask_token_id: got -1, expected 0 <= id < ")


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (OutputError("output: no space"), 2, "dflash: output: no space\n"),
        (EngineError("engine: broke"), 1, "dflash: engine: broke\n"),
        (KeyboardInterrupt(), 130, "dflash: interrupted\n"),
    ],
)
def test_errors_become_exit_codes(bundle, monkeypatch, error, code, message):
    def fail(*args: object) -> None:
        raise error

    monkeypatch.setattr("dflash_deploy.runtime.inspect_bundle.describe_bundle", fail)
    result = _run("inspect", bundle)
    assert (result.exit_code, result.stderr) == (code, message)


def test_a_bug_keeps_its_traceback(bundle, monkeypatch):
    def fail(*args: object) -> None:
        raise ZeroDivisionError("bug")

    monkeypatch.setattr("dflash_deploy.runtime.inspect_bundle.describe_bundle", fail)
    assert isinstance(_run("inspect", bundle).exception, ZeroDivisionError)


def test_a_missing_extra_says_what_to_install(bundle, monkeypatch):
    def fail(*args: object) -> None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch._C")

    monkeypatch.setattr("dflash_deploy.runtime.inspect_bundle.describe_bundle", fail)
    monkeypatch.setattr(command_line, "_found", lambda package: False)
    result = _run("inspect", bundle)
    assert result.exit_code == 2
    assert (
        "torch: is not installed, and this command needs it; pip install 'dflash-deploy[export]'"
        in result.stderr
    )


@pytest.mark.parametrize("name", ["torch", "our_own_module"])
def test_an_import_that_fails_for_another_reason_is_a_bug(bundle, monkeypatch, name):
    """A broken torch is there, and a module of ours is no extra: both keep their traceback."""

    def fail(*args: object) -> None:
        raise ImportError("broken", name=name)

    monkeypatch.setattr("dflash_deploy.runtime.inspect_bundle.describe_bundle", fail)
    assert isinstance(_run("inspect", bundle).exception, ImportError)


def test_a_missing_file_of_prompts_is_the_users_fault(bundle, tmp_path):
    result = _run("bench", bundle, "--prompts", tmp_path / "none.txt")
    assert result.exit_code == 2
    assert "prompts: " in result.stderr
    (tmp_path / "empty.txt").write_text("\n\n")
    assert (
        "holds none, expected one a line" in _run("bench", bundle, "--prompts", tmp_path / "empty.txt").stderr
    )


def test_a_report_that_cannot_be_written_is_refused_before_the_work(bundle, tmp_path):
    for command in ("bench", "parity"):
        result = _run(command, bundle, "--json", tmp_path / "nowhere" / "report.json")
        assert result.exit_code == 2
        assert "is no directory" in result.stderr


def test_the_options_of_a_build_reach_the_builder(bundle, monkeypatch):
    pytest.importorskip("onnx_ir")
    from dflash_deploy.exporter.engines import build
    from dflash_deploy.exporter.engines.options import BuildOptions, Weights

    asked = []

    def build_engines(*arguments, options):
        asked.append((*arguments[:4], options))
        return manifest_from_bundle(bundle)

    monkeypatch.setattr(build, "build_engines", build_engines)
    rtx = ("build-engine", bundle, "--backend", "tensorrt-rtx")
    assert _run(*rtx).exit_code == 0
    gpus = ("--compute-capability", "8.9", "--compute-capability", "12.0")
    assert _run(*rtx, *gpus, "--graph", "draft", "--workspace-mb", 2, "--weights", "stripped").exit_code == 0
    assert asked == [
        (bundle, "tensorrt-rtx", (), (), BuildOptions()),
        (
            bundle,
            "tensorrt-rtx",
            ("8.9", "12.0"),
            ("draft",),
            BuildOptions(workspace_bytes=2 << 20, weights=Weights.STRIPPED),
        ),
    ]


def test_choices_are_those_of_the_library():
    """Written twice, for `--help` must not import the library: so they are compared here."""
    pytest.importorskip("onnx_ir")
    from dflash_deploy.bundle.round_graph import ROUND
    from dflash_deploy.bundle.tensors import DRAFT, TARGET, DType
    from dflash_deploy.commands import bundles, engines, options
    from dflash_deploy.exporter.engines.backends import BACKENDS
    from dflash_deploy.exporter.engines.options import Conv, Residence, Verbosity, Weights
    from dflash_deploy.runtime.ort_engine import PROVIDERS

    def values(kind):
        return [member.value for member in kind]

    assert set(bundles._DTYPES) == set(values(DType)) - {"int64"}
    assert set(options.BACKENDS) == set(BACKENDS)
    assert set(options.PROVIDERS) == set(PROVIDERS)
    assert set(engines._GRAPHS) == {TARGET, DRAFT, ROUND}
    assert list(engines._WEIGHTS) == values(Weights)
    assert list(engines._RESIDENCES) == values(Residence)
    assert list(engines._VERBOSITIES) == values(Verbosity)
    assert list(engines._CONVS) == values(Conv)


def test_inspect_says_what_would_go_wrong(bundle):
    result = _run("inspect", bundle)
    assert result.exit_code == 0
    assert "\nmask           id " in result.output
    assert "\nwarning        there is no tokenizer" in result.output
    assert json.loads(_run("inspect", bundle, "--json").output)["kind"] == "bundle"
    refused = _run("inspect", bundle, "--target", "another")
    assert refused.exit_code == 2
    assert "is a bundle and holds its target; leave the option out" in refused.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["export", "--target", "no/such/folder", "--draft", "neither/here", "--output", "out"],
        ["export", "--target", "./missing.gguf", "--draft", "x", "--output", "out"],
        ["inspect", "./no-such-thing"],
    ],
)
def test_a_missing_checkpoint_in_a_fresh_process(tmp_path, arguments):
    """The whole way out: exit code 2, one message, no traceback, nothing written."""
    pytest.importorskip("torch")
    done = subprocess.run(
        [sys.executable, "-m", "dflash_deploy", *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "dflash: " in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("bench", "b", "--seed", 0), "--seed: belongs to --prompts random"),
        (("bench", "b", "--prompts", "demo", "--seed", 1), "--seed: belongs to --prompts random"),
        ((*_EXPORT, "--max-perplexity-ratio", 1.02), "--max-perplexity-ratio: belongs to --quantize"),
        ((*_EXPORT, "--quantize", "int8", "--dtype", "float16"), "--quantize int8 rounds float32 weights"),
        (
            (*_EXPORT, "--dry-run", "--quantize", "int4", "--dtype", "float16"),
            "--quantize int4 rounds float32 weights; leave --dtype float16 out",
        ),
        (
            (*_EXPORT, "--dry-run", "--max-perplexity-ratio", 2),
            "--max-perplexity-ratio: belongs to --quantize",
        ),
        (
            (*_QUANTIZE, "--bits", 32, "--draft-vocabulary", 9, "--max-perplexity-ratio", 1.02),
            "--max-perplexity-ratio: --bits 32 leaves the target as it is",
        ),
        (
            (*_QUANTIZE, "--bits", 32, "--draft-bits", 8, "--max-perplexity-ratio", 1.02),
            "--max-perplexity-ratio: --bits 32 leaves the target as it is",
        ),
        ((*_QUANTIZE, "--draft-bits", 32), "--draft-bits 32: belongs to --bits 32"),
    ],
)
def test_options_that_would_be_ignored_are_the_users_fault(arguments, words):
    result = _run(*arguments)
    assert result.exit_code == 2
    assert words in result.stderr


def test_options_at_their_defaults_are_no_fault(bundle):
    """They go on to what is wrong in fact."""
    for arguments in (("bench", bundle, "--prompts", "random", "--seed", 3), (*_EXPORT, "--dry-run")):
        assert "Usage" not in _run(*arguments).stderr


def test_unknown_options_are_the_users_fault():
    assert _run("export", "--nonsense").exit_code == 2
    assert _run("build-engine", "x", "--backend", "cuda").exit_code == 2


@pytest.mark.parametrize("arguments", [("parity", "nowhere"), ("demo", "--output", "taken")])
@pytest.mark.parametrize("chosen", [None, "ACTIVE"])
def test_torch_waits_asleep_unless_told_otherwise(arguments, chosen, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").write_text("a file")
    monkeypatch.setenv("OMP_WAIT_POLICY", "")  # so that what the command sets is undone
    monkeypatch.delenv("OMP_WAIT_POLICY")
    if chosen is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", chosen)
    assert _run(*arguments).exit_code != 0
    assert os.environ["OMP_WAIT_POLICY"] == (chosen or "PASSIVE")
