"""README and pages: commands exist with their options, links and named files are there, Python compiles."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import pytest

from dflash_deploy.cli import cli

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*/README.md")],
    key=lambda path: path.as_posix(),
)
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
# What a path on somebody's machine begins with.
_MACHINE = re.compile(r"(?<![\w./-])(/(home|root|work|tmp|Users|mnt|opt|usr|var)/|[A-Z]:\\)")
_MADE = re.compile(r"--output demo-output/([\w$-]+)")
_NAMES = ("dflash", "dflash-deploy")


@dataclass(frozen=True)
class Page:
    """A page's text and its parts."""

    path: Path
    text: str

    @property
    def blocks(self) -> list[tuple[str, str]]:
        """Language and text of each fenced block."""
        return _FENCE.findall(self.text)

    @property
    def prose(self) -> str:
        """What is not in a fenced block."""
        return _FENCE.sub("", self.text)

    def lines(self) -> Iterator[str]:
        """Lines of blocks, with those joined that a backslash splits."""
        for _, block in self.blocks:
            yield from block.replace("\\\n", " ").splitlines()


@pytest.fixture(params=PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def page(request: pytest.FixtureRequest) -> Page:
    return Page(request.param, request.param.read_text(encoding="utf-8"))


def check_whole(words: list[str]) -> None:
    """Parse a command as the command line does; what it would do is not done."""
    name, *arguments = words
    command = cli.commands.get(name)
    assert command is not None, f"no such command: {words}"
    try:
        command.make_context(name, list(arguments))
    except click.exceptions.Exit:  # --help
        return
    except click.ClickException as error:
        raise AssertionError(f"{shlex.join(words)}: {error.format_message()}") from error


def check_mention(words: list[str]) -> None:
    """Of a command in running text: it exists, and so does every option named."""
    name, *arguments = words
    command = cli if name.startswith("-") else cli.commands.get(name)
    assert command is not None, f"no such command: {words}"
    context = click.Context(command)
    known = {option for parameter in command.get_params(context) for option in parameter.opts}
    options = {word.partition("=")[0] for word in [name, *arguments] if word.startswith("-")}
    assert options <= known, f"no such option: {words}"


def test_commands_in_blocks(page):
    for line in page.lines():
        line = line.strip().removeprefix("time ")
        words = shlex.split(line, comments=True) if line.split(" ")[0] in _NAMES else []
        if words:
            check_whole([re.sub(r"^\$[a-z]$", "1", word) for word in words[1:]])  # a loop's number


def test_bundles_of_the_demo_are_made_before_they_are_read(page):
    """By `dflash demo`, by a command further up, or on the README if the page sends the reader there."""
    made = {"bundle", "bundle-float16", "simple"}
    if "(../README.md)" in page.text:
        made |= set(_MADE.findall((ROOT / "README.md").read_text(encoding="utf-8")))
    for line in page.text.splitlines():
        made |= set(_MADE.findall(line))
        read = set(re.findall(r"demo-output/([\w$-]+)", line)) - made
        assert not read, line


def test_commands_in_text(page):
    for text in _INLINE.findall(page.prose):
        words = text.split()
        if len(words) > 1 and words[0] in _NAMES:
            check_mention(words[1:])


def test_the_checks_find_what_is_wrong():
    check_whole(["export", "--target", "T", "--draft", "D", "--output", "O", "--dtype", "float16"])
    check_mention(["demo", "--family"])
    for wrong in (["exprot"], ["export", "--target", "T"], ["bench", "B", "--fast"], ["doctor", "B"]):
        with pytest.raises(AssertionError):
            check_whole(wrong)
    with pytest.raises(AssertionError):
        check_mention(["demo", "--famliy"])


def test_extras_and_targets(page):
    """Extras that are told to install, and targets of make."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for listed in re.findall(r"dflash-deploy\[([\w,-]+)\]", page.text):
        assert set(listed.split(",")) <= set(extras["optional-dependencies"]), listed
    rules = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    asked = [*page.lines(), *_INLINE.findall(page.prose)]
    for line in asked:
        if line.startswith("make "):
            assert line.split()[1] in rules, line


def test_links(page):
    for target in re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", page.prose):
        if re.match(r"https?://", target):
            continue
        file, _, anchor = target.partition("#")
        linked = page.path if not file else page.path.parent / file
        assert linked.exists(), target
        assert linked.resolve().is_relative_to(ROOT), target
        if anchor:
            titles = re.findall(r"^#+ (.*)$", linked.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles], (
                target
            )


def test_no_page_knows_a_machine(page):
    found = _MACHINE.search(page.text)
    assert found is None, page.text[found.start() :][:60]


def test_python_compiles_and_its_imports_resolve(page):
    for language, block in page.blocks:
        if language not in ("python", "py"):
            continue
        tree = ast.parse(block)
        compile(tree, page.path.name, "exec")
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for name in node.names:
                    importlib.import_module(name.name)
            if isinstance(node, ast.ImportFrom):
                module = importlib.import_module(node.module)
                for name in node.names:
                    assert hasattr(module, name.name), f"{node.module} has no {name.name}"


@pytest.mark.slow
def test_the_ten_lines_run(demo_bundle, tmp_path, monkeypatch, capsys):
    """README's own program, over the demo's pair."""
    (tmp_path / "demo-output").mkdir()
    (tmp_path / "demo-output" / "bundle").symlink_to(demo_bundle)
    monkeypatch.chdir(tmp_path)
    blocks = Page(ROOT / "README.md", (ROOT / "README.md").read_text(encoding="utf-8")).blocks
    (program,) = [block for language, block in blocks if language == "python"]
    exec(compile(program, "README.md", "exec"), {})
    text = capsys.readouterr().out
    assert "sky" in text
    assert re.search(r"\n\d+ tokens/s, acceptance length \d\.\d\d\n$", text)


# ---------------------------------------------------------------- docs/structure.md

STRUCTURE = ROOT / "docs" / "structure.md"
_ROWS = re.findall(r"^\| (`.*`) \| (.*) \|$", STRUCTURE.read_text(encoding="utf-8"), re.MULTILINE)


def structure_files() -> Iterator[tuple[Path, str]]:
    """What a row of the table names, and what the row says. A bare name stands beside the one before it."""
    for names, text in _ROWS:
        beside = ROOT
        for name in _INLINE.findall(names):
            path = ROOT / name if "/" in name.rstrip("/") or beside is ROOT else beside / name
            beside = path.parent
            yield path, text


def test_the_structure_names_what_is_there():
    named = list(structure_files())
    assert len(named) > 20
    for path, text in named:
        assert path.exists(), path.relative_to(ROOT)
        alone = sum(other == text for _, other in named) == 1
        if (
            path.is_dir() and alone
        ):  # the row is about this folder, and its lower-case names are modules of it
            for word in re.findall(r"`([a-z_0-9]+)`", text):
                assert (path / f"{word}.py").is_file() or (path / word).is_dir(), f"{path.name}/{word}"


def test_the_structure_misses_nothing():
    """Every package, every module that stands directly in the exporter, and the command line have a line."""
    named = {path.resolve() for path, _ in structure_files()}
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    folders = [ROOT.joinpath(*name.split(".")[1:]) for name in settings["tool"]["setuptools"]["packages"][1:]]
    files = [file for file in (ROOT / "exporter").glob("*.py") if file.name != "__init__.py"] + [
        ROOT / "cli.py"
    ]
    covered = [path for path in folders if path != ROOT / "exporter"] + files
    assert not [path.relative_to(ROOT).as_posix() for path in covered if path.resolve() not in named]
