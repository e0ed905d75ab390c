"""What `dflash inspect` says of a bundle, and the warnings it gives."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dflash_deploy.bundle.limits import ShapeLimits
from dflash_deploy.bundle.manifest import EngineInfo, Manifest, TokenizerInfo, file_info, manifest_to_file
from dflash_deploy.bundle.records import record_from_dict, record_to_json
from dflash_deploy.bundle.tuned import ALONE, GROUP_HEADS, TOGETHER, WHOLE_CACHE
from dflash_deploy.runtime import inspect_bundle
from dflash_deploy.runtime.inspect_bundle import describe_bundle, description_lines
from toy_bundle import FILES, toy_bundle


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    return toy_bundle(tmp_path)


def _warnings(directory: Path, manifest: Manifest) -> str:
    manifest_to_file(manifest, directory)
    found = describe_bundle(directory)
    lines = description_lines(found)
    for warning in found["warnings"]:
        assert any(line.startswith("warning") and warning in line for line in lines)
    return "\n".join(found["warnings"])


def _engine(manifest: Manifest, **changes: object) -> Manifest:
    files = {name: info.sha256 for name, info in manifest.files.items()}
    engine = EngineInfo(
        graph="target",
        backend="tensorrt-rtx",
        version="1.0",
        file=FILES[1],
        precision="float16",
        compute_capabilities=("8.9",),
        graph_sha256=files[FILES[0]],
        profiles={},
        limits=ShapeLimits.from_manifest(manifest),
        weights_sha256={FILES[2]: files[FILES[2]]},
    )
    return replace(manifest, engines={"target": replace(engine, **changes)})


def test_a_bundle_is_described(tmp_path, manifest):
    found = describe_bundle(tmp_path)
    assert found["draft"]["taps"] == [0]
    assert found["draft"]["mask_token_id"] == manifest.draft.mask_token_id
    assert found["files"] == {name: info.bytes for name, info in manifest.files.items()}
    assert "precision      float32" in description_lines(found)


def test_graphs_for_the_cpu_are_described(tmp_path, manifest):
    assert describe_bundle(tmp_path)["tuned"] == {}
    assert not any(line.startswith("tuned") for line in description_lines(describe_bundle(tmp_path)))
    target = manifest.graphs["target"]
    done = {ALONE: (WHOLE_CACHE,), TOGETHER: (WHOLE_CACHE, GROUP_HEADS)}
    tuned = {name: replace(target, file=f"{name}.onnx", passes=passes) for name, passes in done.items()}
    for graph in tuned.values():
        (tmp_path / graph.file).write_bytes(b"a graph")
    files = {**manifest.files, **{graph.file: file_info(tmp_path / graph.file) for graph in tuned.values()}}
    manifest_to_file(replace(manifest, tuned=tuned, files=files), tmp_path)
    found = describe_bundle(tmp_path)
    assert {name: (graph["file"], graph["passes"]) for name, graph in found["tuned"].items()} == {
        name: (f"{name}.onnx", list(passes)) for name, passes in done.items()
    }
    alone, together = (line for line in description_lines(found) if line.startswith("tuned graph    "))
    assert alone.endswith(" target.cpu, the target on the CPU, for one request at a time (whole-cache)")
    assert together.endswith(", for several requests in a pass (whole-cache, group-heads)")
    assert json.loads(json.dumps(found)) == found


def test_bfloat16_on_the_cpu_is_warned_of(tmp_path, manifest):
    """Case B07, before anybody waits for the weights."""
    text = record_to_json(manifest).replace('"float32"', '"bfloat16"')
    data = json.loads(text)
    for graph in data["graphs"].values():  # features, sums and logits stay float32
        for tensor in (*graph["io"]["inputs"], *graph["io"]["outputs"]):
            if tensor["dtype"] == "bfloat16" and not tensor["name"].startswith(("past_", "present_")):
                tensor["dtype"] = "float32"
    warnings = _warnings(tmp_path, record_from_dict(Manifest, data, "manifest"))
    assert "bfloat16 does not run on ONNX Runtime's CPU provider" in warnings


def test_a_mask_that_is_a_stop_token_is_warned_of(tmp_path, manifest):
    """Case A03."""
    mask = manifest.draft.mask_token_id
    assert "also a stop token" in _warnings(tmp_path, replace(manifest, stop_token_ids=(mask,)))


def test_no_stop_token_is_warned_of(tmp_path, manifest):
    assert "there is no stop token" in _warnings(tmp_path, replace(manifest, stop_token_ids=()))


def test_a_stale_engine_is_warned_of(tmp_path, manifest, monkeypatch):
    """Case C05."""
    monkeypatch.setattr(inspect_bundle, "_installed", lambda backend: "1.0")
    assert "engine" not in _warnings(tmp_path, _engine(manifest))
    assert "built from another target.onnx" in _warnings(tmp_path, _engine(manifest, graph_sha256="0" * 64))
    stale = _engine(manifest, weights_sha256={FILES[2]: "0" * 64})
    assert "built from another data/weights.bin" in _warnings(tmp_path, stale)
    monkeypatch.setattr(inspect_bundle, "_installed", lambda backend: "2.0")
    assert "built with tensorrt-rtx 1.0, and 2.0 is here" in _warnings(tmp_path, _engine(manifest))


def test_a_bundle_with_a_damaged_tokenizer_is_refused_by_name(tmp_path, manifest):
    from dflash_deploy.bundle.errors import BundleError

    with pytest.raises(BundleError, match=r"target\.onnx: not a tokenizer"):
        _warnings(tmp_path, replace(manifest, tokenizer=TokenizerInfo(FILES[0])))


def test_the_demos_bundle_has_nothing_to_warn_of(demo_bundle):
    found = describe_bundle(demo_bundle)
    assert found["warnings"] == []
    assert found["draft"]["mask_token"] == "<empty_output>"
    assert found["stop_tokens"] == {"2": "<|im_end|>"}
