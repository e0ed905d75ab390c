"""Random pairs over every option of both published formats, each against the package that defines it.

A seed draws a target family with all its options and a draft with all its options. The bundle is compared
stage by stage and over whole generations, which makes well over six rounds with uneven acceptance.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir
import pytest
from transformers import PreTrainedModel

from dflash_deploy.bundle.tensors import INPUT_IDS, DType, GraphIO
from dflash_deploy.exporter import export as export_module
from dflash_deploy.exporter.export import export_bundle
from dflash_deploy.exporter.parity.run import parity_report
from originals import speculators_draft, tiny_target, zlab_draft

CONFIGS = 64
TARGETS = ("llama", "qwen2", "qwen3")
TAPS = ([0], [1, 0], [0, 1], [2, 0, 1])
# One or two layers: a layer more costs seconds of tracing and shows nothing new.
FULL, SLIDING = "full_attention", "sliding_attention"
LAYERS = ([FULL], [SLIDING], [SLIDING, FULL], [FULL, SLIDING], [SLIDING, SLIDING])
WINDOWS = (3, 8, 20)
PROMPTS = [
    "one",
    "a prompt that is longer than a window of twenty, so that sliding layers forget its beginning",
]


@dataclass(frozen=True)
class Targets:
    """A few targets and their traced graphs: tracing them for each draft would take most of the time."""

    folder: Path
    models: dict[str, PreTrainedModel]
    graphs: dict[tuple[str, tuple[int, ...]], ir.Model]


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Targets:
    folder = tmp_path_factory.mktemp("targets")
    models = {
        family: tiny_target(seed, folder / family, family, num_hidden_layers=4, max_position_embeddings=256)
        for seed, family in enumerate(TARGETS)
    }
    return Targets(folder, models, {})


def check_pair(
    targets: Targets,
    make: Callable[..., object],
    taps_key: str,
    first_id: int,
    seed: int,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Make a draft for one of the targets, export the pair, and compare it with its originals."""
    family, taps = TARGETS[seed % len(TARGETS)], TAPS[seed % len(TAPS)]
    make(
        seed,
        folder / "draft",
        target=targets.models[family].config,
        **{taps_key: [t + first_id for t in taps]},
    )
    real = export_module.graph_from_module

    def remembered(build: Callable[[], object], io: GraphIO, **options: object) -> ir.Model:
        if io.inputs[0].name != INPUT_IDS:
            return real(build, io, **options)  # type: ignore[arg-type]
        key = (family, tuple(taps))
        if key not in targets.graphs:
            targets.graphs[key] = real(build, io, **options)  # type: ignore[arg-type]
        return targets.graphs[key].clone()

    monkeypatch.setattr(export_module, "graph_from_module", remembered)
    sources = str(targets.folder / family), str(folder / "draft")
    export_bundle(*sources, folder / "bundle", DType.FLOAT32)
    report = parity_report(folder / "bundle", *sources, PROMPTS, new_tokens=24)
    assert report.passed, "\n".join(report.lines())


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 100 + CONFIGS))
def test_zlab(targets: Targets, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_pair(targets, zlab_draft, "target_layer_ids", 0, seed, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 100 + CONFIGS))
def test_speculators(targets: Targets, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_pair(targets, speculators_draft, "aux_hidden_state_layer_ids", 1, seed, tmp_path, monkeypatch)
