"""Manifests that say something else of graphs than the files do: refused when they are opened, by field."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import onnx
import pytest

from damaged_bundle import copied, sealed
from dflash_deploy.bundle.errors import BundleError
from dflash_deploy.bundle.labels import labels
from dflash_deploy.bundle.manifest import Manifest, manifest_from_bundle
from dflash_deploy.bundle.tensors import DRAFT, TARGET
from dflash_deploy.bundle.tuned import ALONE, GROUP_HEADS, MERGE_HEADS, TOGETHER, WHOLE_CACHE
from dflash_deploy.exporter.quantize.bundle import quantize_bundle
from dflash_deploy.runtime.decoder import Decoder
from dflash_deploy.runtime.service import Service


@pytest.fixture
def whole(tiny_bundle) -> Path:
    return tiny_bundle("dflash2-grouped").bundle


@pytest.fixture
def bundle(whole, tmp_path) -> Path:
    return copied(whole, tmp_path / "bundle")


def changed(manifest: Manifest, name: str, change: Callable[[tuple[str, ...]], tuple[str, ...]]) -> dict:
    """The manifest's part with other passes of a tuned graph."""
    graph = manifest.tuned[name]
    return {"tuned": {**manifest.tuned, name: replace(graph, passes=change(graph.passes))}}


def whole_cache_of_the_portable(manifest: Manifest) -> dict:
    target = replace(manifest.graphs[TARGET], passes=(WHOLE_CACHE,))
    return {"graphs": {**manifest.graphs, TARGET: target}, "tuned": {}}


LIES: list[tuple[Callable[[Manifest], dict], str]] = [
    (
        lambda m: changed(m, ALONE, lambda _: ()),
        r"tuned.target.cpu.passes: got \[\], expected some of ",
    ),
    (
        lambda m: changed(m, ALONE, lambda done: (*done, GROUP_HEADS)),
        r"tuned.target.cpu.passes: got \[.*'group-heads'\], expected group-heads in target.cpu-batch and ",
    ),
    (
        lambda m: changed(m, TOGETHER, lambda done: done[:-1]),
        r"tuned.target.cpu-batch.passes: got \[.*\], expected group-heads in target.cpu-batch and ",
    ),
    (
        lambda m: changed(m, ALONE, lambda done: (MERGE_HEADS, *done)),
        r"tuned.target.cpu.passes: got \['merge-heads', .*\], expected \['.*'\], what was done to target",
    ),
    (
        lambda m: changed(m, ALONE, lambda _: (MERGE_HEADS,)),
        r"tuned.target.cpu.passes: got \['merge-heads'\], expected \[.*'whole-cache'.*\], what was done to ",
    ),
    (
        whole_cache_of_the_portable,
        r"graphs.target.passes: got \['whole-cache'\], expected none of those that only tuned graphs have",
    ),
]


@pytest.mark.parametrize(("lie", "message"), LIES)
def test_passes_that_were_not_done_are_refused(bundle, lie, message):
    sealed(bundle, **lie(manifest_from_bundle(bundle)))
    with pytest.raises(BundleError, match="^manifest.json: " + message):
        Decoder.open(bundle)


@pytest.mark.parametrize(
    ("here", "there", "message"),
    [
        (ALONE, TOGETHER, r"tuned.target.cpu.file: got 'target.cpu.onnx', expected a file with the graph "),
        (ALONE, TARGET, r"tuned.target.cpu.file: .* and in this one is target;"),
        (DRAFT, ALONE, r"graphs.draft.file: got 'draft.onnx', .* and in this one is target.cpu;"),
    ],
)
def test_another_graph_in_the_file_is_refused(bundle, here, there, message):
    shutil.copyfile(bundle / f"{there}.onnx", bundle / f"{here}.onnx")
    sealed(bundle, **({"tuned": {}} if here == DRAFT else {}))  # so that it is this file that is loaded
    with pytest.raises(BundleError, match="^manifest.json: " + message):
        Decoder.open(bundle)


def test_two_tuned_graphs_in_each_others_place_are_refused(bundle):
    one, other = bundle / f"{ALONE}.onnx", bundle / f"{TOGETHER}.onnx"
    aside = one.rename(bundle.parent / "aside")
    other.rename(one)
    aside.rename(other)
    sealed(bundle)
    for opened, field in ((Decoder, ALONE), (Service, TOGETHER)):
        with pytest.raises(BundleError, match=rf"^manifest.json: tuned.{field}.file: got '{field}.onnx'"):
            opened.open(bundle)


def test_a_bundle_from_before_there_were_labels_is_refused(bundle):
    path = bundle / f"{ALONE}.onnx"
    model = onnx.load(path, load_external_data=False)
    del model.metadata_props[:]
    onnx.save(model, path)
    sealed(bundle)
    with pytest.raises(BundleError, match=r"^target.cpu.onnx: its metadata does not say which graph it is"):
        Decoder.open(bundle)


@pytest.mark.parametrize("bits", [None, 8])
def test_every_graph_of_a_bundle_has_its_labels(whole, tmp_path, bits):
    bundle = whole
    if bits is not None:
        ids = [token % 100 for token in range(512)]
        bundle = tmp_path / "rounded"
        quantize_bundle(whole, bundle, ids, max_perplexity_ratio=9.0, bits=bits, draft_vocabulary=64)
    manifest = manifest_from_bundle(bundle)
    for name, info in {**manifest.graphs, **manifest.tuned}.items():
        model = onnx.load(bundle / info.file, load_external_data=False)
        assert {entry.key: entry.value for entry in model.metadata_props} == labels(name, info.passes)
    Decoder.open(bundle, threads=1).close()
