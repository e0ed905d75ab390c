"""The graph of a whole round in a bundle: written on request, proved, rounded with the others, built from."""

import json

import numpy as np
import onnx
import pytest
from click.testing import CliRunner

from damaged_bundle import copied, sealed
from dflash_deploy.bundle.errors import BundleError
from dflash_deploy.bundle.limits import ShapeLimits
from dflash_deploy.bundle.manifest import MANIFEST, manifest_alone, manifest_from_bundle
from dflash_deploy.bundle.profiles import ProfileSet, plan_profiles
from dflash_deploy.bundle.round_graph import ACCEPTED, ROUND, VERIFY_ROWS
from dflash_deploy.bundle.tensors import DRAFT, TARGET
from dflash_deploy.cli import cli
from dflash_deploy.exporter.export import export_bundle
from dflash_deploy.exporter.parity.run import parity_report
from dflash_deploy.exporter.quantize.bundle import quantize_bundle
from dflash_deploy.runtime.decoder import Decoder
from tiny_bundles import TARGET as TINY

PROMPTS = ["Why is the sky blue?"]
IDS = np.random.default_rng(5).integers(0, TINY["vocab_size"], 512).tolist()


@pytest.fixture(scope="module")
def pair(tiny_bundle, tmp_path_factory):
    """A pair, and its bundle with the graph."""
    sources = tiny_bundle("dflash2")
    bundle = tmp_path_factory.mktemp("round") / "bundle"
    export_bundle(str(sources.target), str(sources.draft), bundle, round_graph=True)
    return sources, bundle


def test_it_is_there_if_asked_for_and_nothing_else_changes(pair):
    sources, bundle = pair
    plain, made = manifest_from_bundle(sources.bundle), manifest_from_bundle(bundle)
    assert ROUND not in plain.graphs
    assert {name: info for name, info in made.graphs.items() if name != ROUND} == plain.graphs
    assert made.files["weights.bin"] == plain.files["weights.bin"]  # each weight once
    io = made.graphs[ROUND].io
    assert {VERIFY_ROWS, ACCEPTED} <= {tensor.name for tensor in (*io.inputs, *io.outputs)}
    with Decoder.open(bundle, threads=1) as decoder, Decoder.open(sources.bundle, threads=1) as other:
        assert decoder.generate(IDS[:9], 20).ids == other.generate(IDS[:9], 20).ids


def test_parity_compares_it(pair):
    sources, bundle = pair
    report = parity_report(bundle, str(sources.target), str(sources.draft), PROMPTS, new_tokens=16)
    (stage,) = [stage for stage in report.stages if stage.name == ROUND]
    assert stage.passed
    assert stage.samples > 0


def test_a_round_that_computes_something_else_is_named(pair, tmp_path):
    sources, bundle = pair
    broken = copied(bundle, tmp_path / "broken")
    model = onnx.load(broken / "round.onnx", load_external_data=False)
    (least,) = [node for node in model.graph.node if node.output[0] == ACCEPTED]
    assert least.op_type == "ReduceMin"
    least.op_type = "ReduceMax"
    onnx.save(model, broken / "round.onnx")
    report = parity_report(sealed(broken), str(sources.target), str(sources.draft), PROMPTS, new_tokens=16)
    assert [stage.name for stage in report.stages if not stage.passed] == [ROUND]


def test_it_is_rounded_with_the_others(pair, tmp_path):
    _, bundle = pair
    made = quantize_bundle(bundle, tmp_path / "int8", IDS, max_perplexity_ratio=3.0, draft_vocabulary=40)
    assert made.graphs[ROUND].passes == tuple(
        dict.fromkeys((*made.graphs[TARGET].passes, *made.graphs[DRAFT].passes))
    )
    assert manifest_from_bundle(tmp_path / "int8").graphs[ROUND] == made.graphs[ROUND]


def test_its_interface_is_checked(pair, tmp_path):
    _, bundle = pair
    copy = copied(bundle, tmp_path / "copy")
    data = json.loads((copy / MANIFEST).read_text())
    data["graphs"][ROUND]["io"]["inputs"][0]["name"] = "ids"
    (copy / MANIFEST).write_text(json.dumps(data))
    with pytest.raises(BundleError, match=r"graphs\.round\.io\.inputs"):
        manifest_alone(copy)


def test_an_engine_of_it_is_planned_for_the_rows_of_rounds(pair):
    _, bundle = pair
    manifest = manifest_alone(bundle)
    limits = ShapeLimits(max_length=64, capacity=73, rows=32, logit_rows=4, batch=2)
    (ranges,) = plan_profiles(manifest, ROUND, limits, ProfileSet.ONE).values()
    assert ranges["rows"] == (1, 4, 4)
    assert ranges["target_kv"] == ranges["draft_kv"] == (64, 73, 73)
    assert ranges["target_capacity"] == ranges["draft_capacity"] == (73, 73, 73)


def test_command(pair, tmp_path):
    sources, bundle = pair
    command = ["export", "--target", str(sources.target), "--draft", str(sources.draft), "--round-graph"]
    run = CliRunner().invoke(cli, [*command, "--output", str(tmp_path / "b")])
    assert run.exit_code == 0, run.output
    assert manifest_from_bundle(tmp_path / "b").graphs == manifest_from_bundle(bundle).graphs
