"""The repository's root is the package: what is shipped, what may import what, and at which cost."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import dflash_deploy

ROOT = Path(__file__).parents[2]
NAME = "dflash_deploy"
PACKAGES = ("bench", "bundle", "commands", "demo", "exporter", "plugins", "runtime")
HEAVY = (
    "torch",
    "transformers",
    "onnx",
    "onnxscript",
    "onnx_ir",
    "safetensors",
    "gguf",
    "huggingface_hub.hf_api",
)

# Who may import whom inside the package. `cli` stands above everything, `bench` above what it times.
ALLOWED = {
    "bundle": {"bundle"},
    "plugins": {"plugins", "bundle"},
    "runtime": {"runtime", "plugins", "bundle"},
    "exporter": {"exporter", "plugins", "bundle"},
    "bench": {"bench", "exporter", "runtime", "plugins", "bundle"},
    "demo": {"demo", "bench", "exporter", "runtime", "plugins", "bundle"},
    "commands": {"commands", "demo", "bench", "exporter", "runtime", "plugins", "bundle"},
    "cli": {"commands", "bundle"},
    "__main__": {"cli"},
    "__init__": {"bundle", "runtime"},
}
# Packages that the parts that run a bundle never import, not even lazily.
_PEERS = {"transformers_peer.py", "genai_peer.py", "llama_cpp_peer.py", "checkpoint.py"}  # run elsewhere
FORBIDDEN = {
    "bench": {"torch", "transformers", "onnx", "onnxscript", "onnx_ir", "safetensors", "gguf"},
    "bundle": {"torch", "transformers", "onnx", "onnxscript", "onnx_ir", "safetensors", "gguf", "numpy"},
    "runtime": {"torch", "transformers", "onnx", "onnxscript", "onnx_ir", "safetensors", "gguf"},
}


def _settings() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def _modules() -> list[Path]:
    return [*ROOT.glob("*.py"), *(file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))]


def test_every_package_in_the_tree_is_listed():
    tree = {NAME} | {
        ".".join((NAME, *file.parent.relative_to(ROOT).parts))
        for package in PACKAGES
        for file in (ROOT / package).rglob("__init__.py")
    }
    assert set(_settings()["tool"]["setuptools"]["packages"]) == tree


def test_every_module_is_in_a_package():
    for file in _modules():
        assert (file.parent / "__init__.py").is_file(), file


def test_only_these_modules_stand_at_the_root():
    """Every root module ships; a conftest.py or a scratch file there would, too."""
    assert {file.name for file in ROOT.glob("*.py")} == {"__init__.py", "__main__.py", "cli.py"}


def test_package_data_is_there_and_complete():
    data = _settings()["tool"]["setuptools"]["package-data"]
    for package, files in data.items():
        folder = ROOT.joinpath(*package.split(".")[1:])
        for file in files:
            assert (folder / file).is_file(), file
    shipped = {ROOT / "demo" / file for file in data[f"{NAME}.demo"]}
    assert {
        f for f in (ROOT / "demo").rglob("*") if f.is_file() and f.suffix not in (".py", ".pyc")
    } == shipped


def test_the_version_is_written_once():
    settings = _settings()
    assert "version" in settings["project"]["dynamic"]
    assert settings["tool"]["setuptools"]["dynamic"]["version"] == {"attr": f"{NAME}.__version__"}
    assert dflash_deploy.__version__


def test_both_console_scripts_call_the_same():
    scripts = _settings()["project"]["scripts"]
    assert scripts == dict.fromkeys(("dflash", "dflash-deploy"), f"{NAME}.cli:main")


def test_no_extra_brings_two_onnxruntimes():
    project = _settings()["project"]
    runtimes = [
        extra for extra, needs in project["optional-dependencies"].items() if "onnxruntime" in str(needs)
    ]
    assert runtimes == ["cpu", "cuda"]
    assert "onnxruntime" not in str(project["dependencies"])


def test_pins_have_reasons():
    """Each pin of the development environment has a comment beside it or heads a group that has one."""
    for file in ("dev.txt", "originals.txt"):
        group_has_reason = False
        for line in (ROOT / "requirements" / file).read_text(encoding="utf-8").splitlines():
            requirement, _, reason = line.partition("#")
            if not requirement.strip():
                group_has_reason = (group_has_reason and bool(line.strip())) or len(reason.split()) > 3
                continue
            assert "==" in requirement, line
            group_has_reason = group_has_reason or bool(reason)
            assert group_has_reason, line


def _imports(file: Path) -> list[tuple[str, int]]:
    """Absolute names of everything a file imports, at its top or inside functions."""
    package = [NAME, *file.relative_to(ROOT).parent.parts]
    found = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found += [(f"{module}.{alias.name}", node.lineno) for alias in node.names]
    return found


def _part(file: Path) -> str:
    relative = file.relative_to(ROOT)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


@pytest.mark.parametrize("file", _modules(), ids=lambda file: str(file.relative_to(ROOT)))
def test_imports_go_one_way(file):
    part = _part(file)
    for name, line in _imports(file):
        parts = name.split(".")
        assert parts[0] not in PACKAGES, f"{file}:{line}: {name} works only from the repository's root"
        if parts[0] == NAME and len(parts) > 1 and parts[1] != "__version__":
            assert parts[1] in ALLOWED[part], f"{file}:{line}: {part} imports {name}"
        if file.name == "ort_exact.py" and name == "numpy":
            continue  # in the function that is given onnxruntime, which brings it
        elsewhere = file.parent.name == "peers" and file.name in _PEERS
        assert elsewhere or parts[0] not in FORBIDDEN.get(part, ()), f"{file}:{line}: {part} imports {name}"


def _loaded(code: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        (f"import {NAME}", (*HEAVY, "numpy", "onnxruntime", "click", "tokenizers")),
        (f"import {NAME}.cli", (*HEAVY, "numpy", "onnxruntime", "rich", "tokenizers", "jinja2")),
        (f"import {NAME}.bundle.manifest", (*HEAVY, "numpy", "onnxruntime")),
        (f"import {NAME}.plugins", (*HEAVY, "triton")),
        (f"import {NAME}.demo", (*HEAVY, "numpy", "onnxruntime")),
        *(
            (f"import {NAME}.bench.{'.'.join(file.relative_to(ROOT / 'bench').with_suffix('').parts)}", HEAVY)
            for file in sorted((ROOT / "bench").rglob("*.py"))
            if file.stem != "__init__"
        ),
        *(
            (f"import {NAME}.runtime.{file.stem}", HEAVY)
            for file in sorted((ROOT / "runtime").glob("*.py"))
            if file.stem != "__init__"
        ),
        (f"import {NAME}; {NAME}.Decoder", HEAVY),
        (f"import {NAME}.exporter.quantize.bundle", set(HEAVY) - {"onnx", "onnx_ir"}),
    ],
)
def test_importing_costs_little(code, absent):
    loaded = _loaded(code)
    assert loaded & set(absent) == set()


def test_the_root_gives_its_public_names_lazily():
    for name in dflash_deploy.__all__:
        assert getattr(dflash_deploy, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Encoder'"):
        dflash_deploy.Encoder  # noqa: B018


def test_no_file_names_a_package_index():
    for file in (ROOT / "Makefile", ROOT / "pyproject.toml", *(ROOT / "requirements").iterdir()):
        text = file.read_text(encoding="utf-8")
        assert "index-url" not in text
        assert "://" not in text.replace("https://mypy", ""), file


_PRIVATE = """
import dflash_deploy, onnxruntime, os
from dflash_deploy.runtime.doctor import _TINY_MODEL
onnxruntime.InferenceSession(_TINY_MODEL, providers=["CPUExecutionProvider"])
print(os.environ["ORT_DISABLE_TELEMETRY"])
"""


def _run(code: str, home: Path, **more: str) -> str:
    """Run it as a user would who has this home; onnxruntime says nothing where it sees CI or unit tests."""
    hidden = ("CI", "ORT_RUNNING_UNIT_TESTS", "ORT_DISABLE_TELEMETRY")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment |= {"HOME": str(home), "XDG_CACHE_HOME": str(home / "cache"), **more}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout


def test_onnxruntime_keeps_no_id_of_the_machine_and_tells_nobody(tmp_path):
    """Its telemetry starts by storing an id in the cache folder."""
    assert _run(_PRIVATE, tmp_path) == "1\n"
    assert list(tmp_path.rglob("*")) == []


def test_who_wants_onnxruntimes_telemetry_has_it(tmp_path):
    said = "import dflash_deploy, os; print(os.environ['ORT_DISABLE_TELEMETRY'])"
    assert _run(said, tmp_path, ORT_DISABLE_TELEMETRY="0") == "0\n"
