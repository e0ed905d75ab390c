"""Simple pairs, exported once a session, and what the seed program computes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from dflash_deploy.bundle.manifest import Manifest, manifest_from_bundle
from dflash_deploy.bundle.tensors import DType
from dflash_deploy.exporter.bundle_graphs import DraftGraph, TargetGraph
from dflash_deploy.exporter.export import export_bundle
from dflash_deploy.exporter.simple.seed import seed_checkpoints
from toy_simple import toy_checkpoints

DATA = Path(__file__).parents[2] / "data" / "simple_seed.npz"


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


class SimpleBundle:
    """A bundle, the checkpoints it came from, and its graphs. Tests must not change it."""

    def __init__(self, folder: Path, target: Path, draft: Path, dtype: DType = DType.FLOAT32) -> None:
        self.target, self.draft = target, draft
        self.path = folder / "bundle"
        self.manifest: Manifest = export_bundle(str(target), str(draft), self.path, dtype)
        assert manifest_from_bundle(self.path) == self.manifest
        self.target_graph = TargetGraph(self.path, self.manifest)
        self.draft_graph = DraftGraph(self.path, self.manifest)

    def features(self, ids: np.ndarray) -> np.ndarray:
        """State behind each of the tokens [N] alone: [N, 1, H]."""
        return self.target_graph.run(ids[:, None], 0)["features"]

    def propose(self, previous: np.ndarray, anchors: np.ndarray) -> dict[str, np.ndarray]:
        """One round for each (token before the anchor, anchor), both [N]: the draft graph's outputs."""
        block = self.manifest.draft.block_size
        return self.draft_graph.run(self.features(previous), 0, 1, anchors, block)


@pytest.fixture(scope="session")
def seed_bundle(tmp_path_factory: pytest.TempPathFactory) -> SimpleBundle:
    """The seed program's pair in float32."""
    folder = tmp_path_factory.mktemp("seed")
    return SimpleBundle(folder, *seed_checkpoints(folder))


@pytest.fixture(scope="session")
def toy_bundle(tmp_path_factory: pytest.TempPathFactory) -> SimpleBundle:
    """The pair of `toy_simple` in float32."""
    folder = tmp_path_factory.mktemp("toy")
    return SimpleBundle(folder, *toy_checkpoints(folder))


@pytest.fixture(scope="session")
def half_bundle(toy_bundle: SimpleBundle, tmp_path_factory: pytest.TempPathFactory) -> SimpleBundle:
    """The pair of `toy_simple` in float16."""
    folder = tmp_path_factory.mktemp("half")
    return SimpleBundle(folder, toy_bundle.target, toy_bundle.draft, DType.FLOAT16)


@dataclass(frozen=True)
class SeedProgram:
    """What the seed program computed; see `seed_program`."""

    arrays: dict[str, np.ndarray]

    def __getitem__(self, name: str) -> np.ndarray:
        array = self.arrays[name]
        return array.astype(np.int64) if array.dtype == np.int16 else array

    def prompts(self) -> list[np.ndarray]:
        """The prompts of the target's arrays, each [S]."""
        return np.split(self["target.ids"], self["target.lengths"].cumsum()[:-1])


@pytest.fixture(scope="session")
def seed_program() -> SeedProgram:
    """Results of the seed program itself, run in float64 and stored.

    They were made by executing the program's text from its first docstring on, with `numpy.random.choice`
    replaced by the argmax of the probabilities it is given, and with `DFlashDraftModel.forward` recording
    its calls. Everything else is the program's own code: `TargetModel.forward`, `vanilla_generate`, and
    `DFlashDecoder._block_diffusion_draft`, whose last forward (it only gives q) is left out here.

        target.*                        several prompts, one after the other: ``ids`` and ``lengths``, and of
                                        all rows the ``hidden`` [rows, 64] and ``logits`` [rows, 1000]
        greedy.prompts, greedy.outputs  [24, 5] and [24, 20]: the vanilla baseline
        draft.*                         single forwards: ``hidden`` [5, 64] (target's state plus the anchor's
                                        embedding), ``blocks`` [5, 8], ``logits`` [5, 8, 1000]; the first
                                        four are both steps of the first two rounds below
        trace.prev, trace.anchor        [48]: rounds, by the token before the anchor and the anchor
        trace.blocks.{n}                with n denoising steps: the block before each step and at the end,
                                        [rounds, steps + 1, 8]
        trace.confidence.{n}            probability of the likeliest token, [rounds, steps, 8]
        sha256.{target,draft}.{name}    of the bytes of the program's arrays, in float64
    """
    with np.load(DATA) as stored:
        return SeedProgram(dict(stored))
