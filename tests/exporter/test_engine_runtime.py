"""Exported pairs over engines: the tokens of ONNX Runtime, through strict stand-ins for TensorRT and CUDA."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from dflash_deploy.bundle.manifest import manifest_from_bundle
from dflash_deploy.bundle.tensors import DRAFT, TARGET
from dflash_deploy.runtime.decoder import Decoder
from dflash_deploy.runtime.stats import Mode
from strict_tensorrt import World, installed, strict_build
from tiny_bundles import NAMES


@pytest.mark.parametrize("name", [NAMES[0], *(pytest.param(n, marks=pytest.mark.slow) for n in NAMES[1:])])
@pytest.mark.parametrize("backend", ["tensorrt-rtx", "tensorrt"])
def test_tokens_are_those_of_onnx_runtime(tiny_bundle, tmp_path, name, backend):
    bundle = tmp_path / "bundle"
    shutil.copytree(tiny_bundle(name).bundle, bundle)
    manifest = strict_build(bundle, manifest_from_bundle(bundle), backend, max_prompt=32)
    vocabulary = manifest.target.vocab_size
    rows = manifest.draft.proposals + 1  # as many each time: chosen by cost, times would decide what is run
    with installed(World(backend)) as world:
        with (
            Decoder.open(bundle, backend=backend, verify_rows=rows) as decoder,
            Decoder.open(bundle, threads=1, verify_rows=rows) as reference,
        ):
            for seed in range(4):
                prompt = np.random.default_rng(seed).integers(0, vocabulary, 1 + 13 * seed).tolist()
                expected = reference.generate(prompt, 40).ids
                got = decoder.generate(prompt, 40)
                assert got.ids == expected
                assert got.stats.draft_failures == 0
                assert decoder.generate(prompt, 40, mode=Mode.PLAIN).ids == expected
            assert decoder._target.graphs.replays
            assert decoder._draft.graphs.replays
        assert world.passes[TARGET] > world.passes[DRAFT] > 20
        assert world.cuda.live == []
