"""A stale, foreign or corrupt engine is refused with both values, before any library is asked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dflash_deploy.bundle.engines import (
    PLUGIN,
    Library,
    check_engine,
    check_limits,
    engine_name,
    read_engine,
)
from dflash_deploy.bundle.errors import BundleError, ProviderError
from dflash_deploy.bundle.limits import ShapeLimits
from dflash_deploy.bundle.manifest import (
    EngineFlag,
    EngineInfo,
    FileInfo,
    Manifest,
    file_info,
    manifest_from_bundle,
    manifest_to_file,
)
from dflash_deploy.bundle.profiles import plan_profiles
from dflash_deploy.plugins.grouped_dynamic_conv import DOMAIN, OP_TYPE
from dflash_deploy.plugins.tensorrt_plugin import VERSION
from toy_bundle import FILES, toy_bundle

RTX = Library("tensorrt-rtx", "1.7.1.116", "8.9")
NAME = engine_name("target", RTX.backend)
HASH = "expected '[0-9a-f]{64}'"


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    """A bundle with an engine that fits."""
    plain = toy_bundle(tmp_path)
    file = tmp_path / "engines/target.engine"
    file.parent.mkdir()
    file.write_bytes(b"an engine")
    limits = ShapeLimits.from_manifest(plain)
    info = EngineInfo(
        graph="target",
        backend=RTX.backend,
        version=RTX.version,
        file="engines/target.engine",
        precision="float32",
        compute_capabilities=("8.6", "8.9"),
        graph_sha256=plain.files["target.onnx"].sha256,
        profiles=plan_profiles(plain, "target", limits),
        limits=limits,
        weights_sha256={FILES[2]: plain.files[FILES[2]].sha256},
        flags=(EngineFlag.STRIPPED, EngineFlag.USER_ALLOCATION),
        plugin=PLUGIN,
    )
    made = replace(plain, engines={NAME: info}, files={**plain.files, info.file: file_info(file)})
    manifest_to_file(made, tmp_path)
    return manifest_from_bundle(tmp_path)


def edited(manifest: Manifest, **changes: Any) -> Manifest:
    return replace(manifest, engines={NAME: replace(manifest.engines[NAME], **changes)})


def test_an_engine_that_fits_is_given(manifest, tmp_path):
    info = check_engine(manifest, "target", replace(RTX, plugin=PLUGIN))
    assert info == manifest.engines[NAME]
    assert read_engine(tmp_path, manifest, info) == b"an engine"


def test_everything_about_it_survives_the_disk(manifest):
    info = manifest.engines[NAME]
    assert info.flags == (EngineFlag.STRIPPED, EngineFlag.USER_ALLOCATION)
    assert list(info.profiles) == ["plain", "verify", "prefill"]
    assert info.limits == ShapeLimits.from_manifest(manifest)


@pytest.mark.parametrize(
    ("changes", "kind", "expected"),
    [
        ({"version": "1.6.0.3"}, ProviderError, r"version: got '1\.6\.0\.3', expected '1\.7\.1\.116'"),
        ({"backend": "tensorrt"}, ProviderError, r"backend: got 'tensorrt', expected 'tensorrt-rtx'"),
        (
            {"compute_capabilities": ("8.0", "12.0")},
            ProviderError,
            r"compute capability: got '8\.0, 12\.0', expected 8\.9, that of this GPU",
        ),
        ({"compute_capabilities": ()}, ProviderError, r"compute capability: got 'none', expected 8\.9"),
        (
            {"plugin": "dflash::GroupedDynamicConv 2"},
            ProviderError,
            r"plugin: got 'dflash::GroupedDynamicConv 2', expected 'dflash::GroupedDynamicConv 1'",
        ),
        ({"precision": "float16"}, BundleError, r"precision: got 'float16', expected 'float32'"),
        ({"graph": "draft"}, BundleError, r"graph: got 'draft', expected 'target'"),
        (
            {"graph_sha256": "0" * 64},
            BundleError,
            r"SHA-256 of target\.onnx: got '0{64}', expected '[0-9a-f]{64}'",
        ),
        (
            {"weights_sha256": {}},
            BundleError,
            r"SHA-256 of data/weights\.bin: got None, expected '[0-9a-f]{64}'",
        ),
    ],
)
def test_one_that_does_not_fit_is_refused_with_both_values(manifest, changes, kind, expected):
    with pytest.raises(kind, match=f"engine {NAME}: {expected}.*dflash build-engine"):
        check_engine(edited(manifest, **changes), "target", replace(RTX, plugin=PLUGIN))


def test_a_graph_exported_again_makes_the_engine_stale(manifest):
    files = {**manifest.files, "target.onnx": FileInfo(1, "f" * 64)}
    with pytest.raises(BundleError, match=r"target\.onnx: got '[0-9a-f]{64}', expected 'f{64}'"):
        check_engine(replace(manifest, files=files), "target", RTX)


def test_no_engine_says_how_to_get_one(manifest):
    with pytest.raises(BundleError, match=r"expected an engine named 'draft.tensorrt-rtx'.*build-engine"):
        check_engine(manifest, "draft", RTX)
    with pytest.raises(BundleError, match=r"'target.tensorrt'.*--backend tensorrt"):
        check_engine(manifest, "target", replace(RTX, backend="tensorrt"))


def test_a_plugin_that_is_not_known_is_refused(manifest):
    with pytest.raises(ProviderError, match=r"plugin: got 'dflash::GroupedDynamicConv 1', expected None"):
        check_engine(manifest, "target", replace(RTX, plugin=None))


def test_a_plugin_has_its_kernel_in_the_engine_and_needs_nothing_here(manifest):
    assert check_engine(manifest, "target", RTX).plugin == PLUGIN
    assert f"{DOMAIN}::{OP_TYPE} {VERSION}" == PLUGIN


def test_without_a_gpu_the_generation_is_not_compared(manifest):
    unknown = Library(RTX.backend, RTX.version, None, PLUGIN)
    assert check_engine(manifest, "target", unknown)


@pytest.mark.parametrize("content", [b"an enginE", b"an engine and more", b""])
def test_a_corrupt_engine_is_refused_with_both_values(manifest, tmp_path, content):
    info = manifest.engines[NAME]
    (tmp_path / info.file).write_bytes(content)
    with pytest.raises(BundleError, match=r"engines/target.engine: got .*, expected "):
        read_engine(tmp_path, manifest, info)


@pytest.mark.parametrize("what", ["max_length", "rows", "logit_rows", "batch"])
def test_an_engine_built_for_less_is_refused(manifest, what):
    info = manifest.engines[NAME]
    check_limits(info, info.limits)
    most = getattr(info.limits, what)
    with pytest.raises(ProviderError, match=rf"{what}: got {most}, expected >= {most + 1}.*larger limits"):
        check_limits(info, replace(info.limits, **{what: most + 1}))
