import errno
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dflash_deploy.bundle.errors import BundleError
from dflash_deploy.bundle.limits import ShapeLimits
from dflash_deploy.bundle.manifest import (
    MANIFEST,
    EngineInfo,
    Manifest,
    Verify,
    check_manifest,
    manifest_from_bundle,
    manifest_to_file,
)
from toy_bundle import FILES, edit_manifest, toy_bundle

LIMITS = ShapeLimits(max_length=400, capacity=408, rows=408, logit_rows=8)


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    directory = tmp_path / "bundle"
    directory.mkdir()
    toy_bundle(directory)
    return directory


def test_what_was_written_is_read(tmp_path):
    written = toy_bundle(tmp_path)
    assert manifest_from_bundle(tmp_path) == written


def test_the_same_manifest_gives_the_same_bytes(bundle):
    first = (bundle / MANIFEST).read_bytes()
    manifest_to_file(manifest_from_bundle(bundle), bundle)
    assert (bundle / MANIFEST).read_bytes() == first


def test_writing_a_manifest_leaves_no_other_file(bundle):
    manifest_to_file(manifest_from_bundle(bundle), bundle)
    assert sorted(p.name for p in bundle.iterdir()) == ["data", "draft.onnx", MANIFEST, "target.onnx"]


def _set(*keys: str, value: Any) -> Any:
    def change(data: dict[str, Any]) -> None:
        for key in keys[:-1]:
            data = data[key]
        data[keys[-1]] = value

    return change


def _drop(*keys: str) -> Any:
    def change(data: dict[str, Any]) -> None:
        for key in keys[:-1]:
            data = data[key]
        del data[keys[-1]]

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_set("colour", value=1), r"manifest.json.colour: got 1, expected one of the keys"),
        (_set("draft", "blocksize", value=8), r"manifest.json.draft.blocksize: got 8"),
        (_drop("max_length"), r"manifest.json.max_length: missing"),
        (_drop("draft", "taps"), r"manifest.json.draft.taps: missing"),
        (_set("max_length", value="400"), r"manifest.json.max_length: got '400', expected .* int"),
        (_set("max_length", value=400.0), r"manifest.json.max_length: got 400.0, expected .* int"),
        (_set("max_length", value=True), r"manifest.json.max_length: got True, expected .* int"),
        (_set("name", value=None), r"manifest.json.name: got None, expected .* str"),
        (_set("draft", "taps", value=3), r"manifest.json.draft.taps: got 3, expected a list"),
        (_set("draft", "taps", value=[0, "1"]), r"manifest.json.draft.taps\[1\]: got '1'"),
        (_set("draft", "conv", value=[2, 16]), r"manifest.json.draft.conv: .* expected an object"),
        (_set("files", value=[]), r"manifest.json.files: got \[\], expected an object"),
        (_set("dtype", value="float8"), r"manifest.json.dtype: got 'float8', expected one of 'float32'"),
        (_set("max_length", value=1), r"max_length: got 1, expected 2 <= length"),
        (_set("max_length", value=10**9), r"max_length: got 1000000000, expected 2 <= length <= 16777"),
        (_set("slack_slots", value=0), r"slack_slots: got 0, expected \d to \d"),
        (_set("slack_slots", value=10**6), r"slack_slots: got 1000000, expected \d to \d"),
        (
            _set("target", "embedding_rows", value=10**9),
            r"target.embedding_rows: got 1000000000, expected <= ",
        ),
        (_set("draft", "block_size", value=1), r"block_size: got 1, expected >= 1 row that proposes"),
        (_set("draft", "first_proposal_row", value=2), r"first_proposal_row: got 2, expected 0 or 1"),
        (_set("draft", "tap_convention", value="input of layer i"), r"tap_convention: got"),
        (_set("tokenizer", "bos_token_id", value=-1), r"tokenizer.bos_token_id: got -1, expected 0 <= id"),
        (_set("draft", "taps", value=[]), r"draft.taps: got \(\), expected at least one tap"),
        (_set("draft", "taps", value=[4]), r"draft.taps: got 4, expected 0 <= tap < 4"),
        (_set("draft", "taps", value=[-1]), r"draft.taps: got -1, expected 0 <= tap < 4"),
        (_set("stop_token_ids", value=[10**6]), r"stop_token_ids: got 1000000"),
        (_set("dtype", value="float16"), r"dtype: got 'float16', expected float32"),
        (_set("target", "vocab_size", value=10**6), r"graphs.target.io.outputs: got .*name='logits'"),
        (_set("draft", "block_size", value=3), r"graphs.draft.io.inputs: got .*name='block_ids'"),
        (_set("draft", "taps", value=[0, 1, 2]), r"graphs.target.io.outputs: got .*name='features'"),
        (_set("graphs", "target", "io", "inputs", 0, "name", value="zz"), r"io.inputs: got .*name='zz'"),
        (_drop("graphs", "draft"), r"graphs: got \['target'\], expected a graph named 'draft'"),
        (_drop("files", FILES[2]), r"files: got 'data/weights.bin', expected every file"),
        (_set("schema_version", value=99), r"schema_version: got 99, expected 1; export again"),
        (_drop("schema_version"), r"schema_version: got None, expected 1"),
    ],
)
def test_an_edited_manifest_is_refused_by_name(bundle, change, message):
    edit_manifest(bundle, change)
    with pytest.raises(BundleError, match=message):
        manifest_from_bundle(bundle)


def test_a_mask_id_outside_the_embedding_is_refused(bundle):
    """Case A03: the padded rows count, the tokenizer's vocabulary does not."""
    rows = manifest_from_bundle(bundle).target.embedding_rows
    for value in (-1, rows):
        edit_manifest(bundle, _set("draft", "mask_token_id", value=value))
        with pytest.raises(BundleError, match=rf"mask_token_id: got {value}, expected 0 <= id < {rows}"):
            manifest_from_bundle(bundle)
    edit_manifest(bundle, _set("draft", "mask_token_id", value=rows - 1))
    assert manifest_from_bundle(bundle).draft.mask_token_id == rows - 1 >= 0


@pytest.mark.parametrize("path", ["../outside.bin", "/etc/hostname", "a/../../b", "", ".", "a\\b"])
def test_a_path_outside_the_bundle_is_refused(bundle, path):
    (bundle.parent / "outside.bin").write_bytes(b"x")
    edit_manifest(bundle, lambda data: data["files"].update({path: {"bytes": 1, "sha256": "0" * 64}}))
    with pytest.raises(BundleError, match="expected a relative path inside the bundle"):
        manifest_from_bundle(bundle)


@pytest.mark.parametrize("linked", ["target.onnx", "data"])
def test_a_link_in_a_bundle_is_refused(bundle, linked):
    """Of a file or of a folder on the way to it: both may lead outside."""
    outside = bundle.parent / "outside"
    shutil.move(bundle / linked, outside)
    (bundle / linked).symlink_to(outside)
    with pytest.raises(BundleError, match="is a symbolic link"):
        manifest_from_bundle(bundle)


def test_damaged_files_are_named(bundle):
    """Case B03: missing, truncated, changed; never wrong output."""
    weights = bundle / FILES[2]
    whole = weights.read_bytes()
    weights.unlink()
    with pytest.raises(BundleError, match=r"data/weights.bin: missing from the bundle"):
        manifest_from_bundle(bundle)
    weights.write_bytes(whole[:-1])
    with pytest.raises(BundleError, match=r"data/weights.bin: got 1599 bytes, expected 1600"):
        manifest_from_bundle(bundle, Verify.SIZES)
    weights.write_bytes(whole[:-1] + b"?")
    manifest_from_bundle(bundle, Verify.SIZES)
    with pytest.raises(BundleError, match=r"data/weights.bin: got SHA-256 \w{64}, expected \w{64}"):
        manifest_from_bundle(bundle)


def test_a_bundle_may_move(bundle, tmp_path, monkeypatch):
    """Case B03: other depth, spaces and letters beyond ASCII, other working directory."""
    moved = tmp_path / "ein Ort" / "für Bündel 束"
    moved.parent.mkdir()
    bundle.rename(moved)
    monkeypatch.chdir(moved.parent)
    assert manifest_from_bundle(Path(moved.name)) == manifest_from_bundle(moved)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"manifest.json: is empty; copy the bundle again"),
        (b"\0" * 4096, r"manifest.json: is empty; copy the bundle again"),  # what a crash can leave
        (b"{", r"manifest.json: is no whole JSON .*; copy the bundle again"),
        (b"[" * 10**5, r"manifest.json: is no whole JSON"),
        (b"\xff\xfe", r"manifest.json: is no text in UTF-8; copy the bundle again"),
        (b"[]", r"manifest.json: got 'list', expected an object; export again"),
        (b"null", r"manifest.json: got 'NoneType', expected an object; export again"),
        (b"{}", r"schema_version: got None, expected 1"),
    ],
)
def test_a_manifest_that_is_none_is_refused(bundle, content, message):
    (bundle / MANIFEST).write_bytes(content)
    with pytest.raises(BundleError, match=message):
        manifest_from_bundle(bundle)


def test_no_manifest_says_how_to_get_one(tmp_path):
    with pytest.raises(
        BundleError, match=r"no manifest.json in .*, expected a directory made by `dflash export`"
    ):
        manifest_from_bundle(tmp_path / "nowhere")


def test_an_engine_of_an_unknown_graph_is_refused(bundle):
    manifest = manifest_from_bundle(bundle)
    engine = EngineInfo("encoder", "tensorrt-rtx", "1", FILES[2], "float16", ("8.9",), "0" * 64, {}, LIMITS)
    with pytest.raises(
        BundleError, match=r"engines.x.graph: got 'encoder', expected one of \['draft', 'target'\]"
    ):
        check_manifest(replace(manifest, engines={"x": engine}))


def test_an_engine_survives_writing_and_reading(bundle):
    profile = {"rows": (1, 8, 512)}
    engine = EngineInfo(
        "target", "tensorrt-rtx", "1", FILES[2], "float16", ("8.9",), "0" * 64, {"verify": profile}, LIMITS
    )
    manifest = replace(manifest_from_bundle(bundle), engines={"target": engine})
    manifest_to_file(manifest, bundle)
    assert manifest_from_bundle(bundle) == manifest


def test_every_field_of_the_manifest_is_on_disk(bundle):
    from dataclasses import fields

    data = json.loads((bundle / MANIFEST).read_text(encoding="utf-8"))
    assert list(data) == [f.name for f in fields(Manifest)]


def test_an_unreadable_manifest_is_an_error_for_the_user(bundle, monkeypatch):
    def refuse(path: Path) -> bytes:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)  # root may read whatever its mode is
    with pytest.raises(BundleError, match=r"manifest.json: cannot be read \(Permission denied\); check") as e:
        manifest_from_bundle(bundle)
    assert str(bundle) not in str(e.value)
