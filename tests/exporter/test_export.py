"""`export_bundle`: deterministic, atomic, self-contained, and clear about what it refuses."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from dflash_deploy.bundle.errors import CheckpointError, DflashError, OutputError, PairError, UnsupportedError
from dflash_deploy.bundle.manifest import Verify, manifest_from_bundle
from dflash_deploy.bundle.tensors import DType
from dflash_deploy.cli import cli
from dflash_deploy.exporter import export as export_module
from dflash_deploy.exporter import families, source_files
from dflash_deploy.exporter.checkpoint import Checkpoint, checkpoint_from_source
from dflash_deploy.exporter.export import export_bundle
from originals import tiny_target, zlab_draft


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny random target and DFlash2 draft on disk."""
    folder = tmp_path_factory.mktemp("pair")
    model = tiny_target(3, folder / "target", num_hidden_layers=3)
    zlab_draft(3, folder / "draft", target=model.config, dflash2=True)
    return folder / "target", folder / "draft"


@pytest.fixture(scope="module")
def bundle(pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Their bundle."""
    output = tmp_path_factory.mktemp("out") / "bundle"
    export_bundle(str(pair[0]), str(pair[1]), output, DType.FLOAT32)
    return output


def digest(folder: Path) -> dict[str, bytes]:
    """Name and content of every file."""
    return {
        p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()
    }


def fail_after(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Make the export fail in the middle, after the first graph and its weights were written."""
    real = export_module.graph_from_module
    calls = []

    def failing(*args: object, **kwargs: object) -> object:
        calls.append(1)
        if len(calls) > 1:
            raise error
        return real(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(export_module, "graph_from_module", failing)


def test_second_export_is_identical_and_replaces_the_first(pair: tuple[Path, Path], bundle: Path) -> None:
    before = digest(bundle)
    export_bundle(str(pair[0]), str(pair[1]), bundle, DType.FLOAT32)
    assert digest(bundle) == before
    assert [p.name for p in bundle.parent.iterdir()] == [bundle.name], "nothing temporary is left"


@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.BFLOAT16])
def test_sources_are_read_once_and_their_hashes_are_those_of_the_files(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: DType
) -> None:
    real, sizes = source_files._read, []

    def counted(path: Path, offset: int, size: int, **options: Any) -> Any:
        sizes.append(size)
        return real(path, offset, size, **options)

    monkeypatch.setattr(source_files, "_read", counted)
    output = tmp_path / "out"
    manifest = export_bundle(str(pair[0]), str(pair[1]), output, dtype)
    total = 0
    for name, folder in zip(("target", "draft"), pair, strict=True):
        files = manifest.provenance[name].files
        assert set(files) == {"config.json", "model.safetensors"}
        for file, info in files.items():
            data = (folder / file).read_bytes()
            assert (info.bytes, info.sha256) == (len(data), hashlib.sha256(data).hexdigest())
            total += len(data)
    assert sum(sizes) == total
    manifest_from_bundle(output, Verify.HASHES)


def test_bundle_is_self_contained(bundle: Path, pair: tuple[Path, Path], tmp_path: Path) -> None:
    for path in bundle.rglob("*"):
        assert not path.is_symlink()
        content = path.read_bytes()
        assert str(pair[0].parent).encode() not in content, path
        assert str(Path.cwd()).encode() not in content, path
    moved = tmp_path / "other depth" / "bündel mit leerzeichen"
    shutil.copytree(bundle, moved)
    manifest_from_bundle(moved, Verify.HASHES)
    for name in ("target", "draft", "conv", "selector"):
        onnx.checker.check_model(str(moved / f"{name}.onnx"))


def test_promised_axes_are_symbolic_and_versions_as_stated(bundle: Path) -> None:
    manifest = manifest_from_bundle(bundle)
    for info in manifest.graphs.values():
        graph = onnx.load(bundle / info.file, load_external_data=False)
        assert graph.ir_version == info.ir_version
        assert {o.domain: o.version for o in graph.opset_import}[""] == info.opset
        for values, tensors in ((graph.graph.input, info.io.inputs), (graph.graph.output, info.io.outputs)):
            assert [v.name for v in values] == [t.name for t in tensors]
            for value, tensor in zip(values, tensors, strict=True):
                axes = [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]
                assert tuple(axes) == tensor.axes, value.name


def test_shared_weights_are_stored_once(bundle: Path) -> None:
    places = []
    for name in ("target", "draft"):
        graph = onnx.load(bundle / f"{name}.onnx", load_external_data=False).graph
        places.append(
            {i.name: {e.key: e.value for e in i.external_data} for i in graph.initializer if i.external_data}
        )
    shared = set(places[0]) & set(places[1])
    assert "target.embed_tokens.weight" in shared
    assert all(places[0][name] == places[1][name] for name in shared)
    used = {(p["offset"], p["length"]) for graph in places for p in graph.values()}
    total = sum(int(length) for _, length in used)
    assert (bundle / "weights.bin").stat().st_size < total + 4096 * len(used)


@pytest.mark.parametrize(
    "error", [RuntimeError("boom"), KeyboardInterrupt(), OSError(28, "No space left on device")]
)
def test_failed_export_leaves_the_previous_bundle(
    pair: tuple[Path, Path], bundle: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    before = digest(bundle)
    fail_after(monkeypatch, error)
    expected = OutputError if isinstance(error, OSError) else type(error)
    with pytest.raises(expected):
        export_bundle(str(pair[0]), str(pair[1]), bundle, DType.FLOAT32)
    assert digest(bundle) == before
    assert [p.name for p in bundle.parent.iterdir()] == [bundle.name]


def test_full_disk_is_refused_before_the_first_byte(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(export_module.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(OutputError, match="GB free, expected at least"):
        export_bundle(str(pair[0]), str(pair[1]), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_on_a_full_disk_says_all_and_fails(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    arguments = [
        "export",
        "--target",
        str(pair[0]),
        "--draft",
        str(pair[1]),
        "--output",
        str(tmp_path / "out"),
    ]
    result = CliRunner().invoke(cli, [*arguments, "--dry-run"])
    assert result.exit_code == OutputError.exit_code
    assert "NOT ENOUGH" in result.stdout
    assert "GB free, expected at least" in result.stderr


def test_a_wrong_draft_is_found_before_a_target_is_opened(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = []

    def open_it(source: str) -> Checkpoint:
        opened.append(source)
        return checkpoint_from_source(source)

    monkeypatch.setattr(families, "checkpoint_from_source", open_it)
    with pytest.raises(CheckpointError):
        export_bundle(str(pair[0]), str(tmp_path / "missing"), tmp_path / "out")
    assert opened == [str(tmp_path / "missing")]


def refused(kind: type[DflashError], match: str, target: Path, draft: Path, tmp_path: Path) -> None:
    """Expect an error and nothing written."""
    output = tmp_path / "out"
    with pytest.raises(kind, match=match):
        export_bundle(str(target), str(draft), output)
    assert not output.exists()


def edited(folder: Path, copy: Path, **changes: object) -> Path:
    """Copy a checkpoint with other values in config.json; None removes a key."""
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text())
    for key, value in changes.items():
        place = config["dflash_config"] if key in config.get("dflash_config", {}) else config
        if value is None:
            place.pop(key, None)
        else:
            place[key] = value
    (copy / "config.json").write_text(json.dumps(config))
    return copy


def test_bad_sources_are_refused_with_nothing_written(pair: tuple[Path, Path], tmp_path: Path) -> None:
    target, draft = pair
    refused(CheckpointError, "does not exist", tmp_path / "nothing", draft, tmp_path)
    refused(CheckpointError, "no file", tmp_path / "nothing.gguf", draft, tmp_path)
    empty = tmp_path / "empty"
    empty.mkdir()
    refused(CheckpointError, r"no config\.json", empty, draft, tmp_path)
    refused(
        CheckpointError, "rms_norm_eps", edited(target, tmp_path / "a", rms_norm_eps=None), draft, tmp_path
    )
    refused(
        UnsupportedError, "model_type", edited(target, tmp_path / "b", model_type="mamba"), draft, tmp_path
    )
    refused(UnsupportedError, "new_option", edited(target, tmp_path / "c", new_option=1), draft, tmp_path)
    far = edited(draft, tmp_path / "d", target_layer_ids=[0, 99])
    refused(CheckpointError, "target_layer_ids: got 99", target, far, tmp_path)
    refused(CheckpointError, "got a DFlash draft", draft, draft, tmp_path)
    wide = edited(draft, tmp_path / "e")
    other = tmp_path / "other"
    tiny_target(4, other, num_hidden_layers=3, hidden_size=40, head_dim=8)
    refused(PairError, "hidden", other, wide, tmp_path)


def test_damaged_weights_are_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    target, draft = pair
    cut = edited(target, tmp_path / "cut")
    weights = cut / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    refused(CheckpointError, "not a whole safetensors file", cut, draft, tmp_path)
    pickled = edited(target, tmp_path / "pickled")
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    refused(UnsupportedError, "pickled weights", pickled, draft, tmp_path)
    missing = edited(target, tmp_path / "missing", num_hidden_layers=4)
    refused((CheckpointError, PairError), "missing|layers", missing, draft, tmp_path)  # type: ignore[arg-type]


@pytest.mark.parametrize("side", ["target", "draft"])
def test_a_number_that_is_none_is_refused_by_the_tensors_name(
    pair: tuple[Path, Path], tmp_path: Path, side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No graph is traced once it is known; of either, whatever else goes on, with nothing left behind."""
    sources = {"target": pair[0], "draft": pair[1]}
    broken = tmp_path / side
    shutil.copytree(sources[side], broken)
    tensors = load_file(broken / "model.safetensors")
    name = next(name for name in tensors if name.endswith("layers.1.mlp.up_proj.weight"))
    tensors[name][3, 3] = torch.nan
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    traced = []
    real = export_module.graph_from_module

    def counted(build: Any, io: Any, **options: Any) -> Any:
        traced.append(io)
        return real(build, io, **options)

    monkeypatch.setattr(export_module, "graph_from_module", counted)
    refused(
        CheckpointError,
        rf"{side}: {name}: holds NaN or infinity",
        *(broken if side == one else sources[one] for one in sources),
        tmp_path,
    )
    assert len(traced) <= {"target": 1, "draft": 2}[side]
    assert [path.name for path in tmp_path.iterdir()] == [side]


def test_max_length_beyond_the_target_is_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="max_length: got 999999"):
        export_bundle(str(pair[0]), str(pair[1]), tmp_path / "out", max_length=999999)


def test_foreign_directory_is_not_overwritten(pair: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "mine.txt").write_text("keep")
    with pytest.raises(OutputError, match="other content"):
        export_bundle(str(pair[0]), str(pair[1]), tmp_path / "letters")
    assert (tmp_path / "letters" / "mine.txt").read_text() == "keep"
