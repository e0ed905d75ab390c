"""TensorRT behind the engine protocol, over strict stand-ins for the library and for CUDA."""

from __future__ import annotations

import gc
import logging
import math
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_deploy.bundle.errors import EngineError
from dflash_deploy.bundle.manifest import EngineFlag, Manifest, manifest_from_bundle
from dflash_deploy.bundle.tensors import DRAFT, TARGET, CacheShape, DType, draft_io, target_io
from dflash_deploy.runtime import trt_graphs
from dflash_deploy.runtime.decoder import Decoder, Settings
from dflash_deploy.runtime.ort_engine import runner_from_onnx
from dflash_deploy.runtime.stats import Mode
from dflash_deploy.runtime.trt_engine import TrtRunner, runner_from_engine
from dflash_deploy.runtime.trt_graphs import CudaGraphs
from dflash_deploy.runtime.trt_memory import plan_layout, tensor_shape
from dflash_deploy.runtime.trt_plan import kv_bucket
from strict_cuda import Violation, real
from strict_tensorrt import DynamicShapesKernelSpecializationStrategy, World, installed, strict_build
from toy_onnx import BLOCK, HIDDEN, VOCAB, write_bundle

BACKENDS = ("tensorrt-rtx", "tensorrt")
PROMPT = [5, 9, 2, 30, 31, 9]


@pytest.fixture(params=BACKENDS)
def world(request):
    with installed(World(request.param)) as world:
        yield world


@pytest.fixture
def rtx():
    with installed(World()) as world:
        yield world


class Setup:
    """A toy bundle with engines for the stand-in, and its runners."""

    def __init__(self, folder: Path, world: World, dtype: DType = DType.FLOAT32, **build: Any):
        self.folder = folder
        self.world = world
        write_bundle(folder, dtype)
        self.manifest: Manifest = strict_build(folder, manifest_from_bundle(folder), world.backend, **build)

    def runner(self, graph: str = TARGET, graphs: CudaGraphs = CudaGraphs.ON) -> TrtRunner:
        return runner_from_engine(self.folder, self.manifest, graph, self.world.backend, cuda_graphs=graphs)

    def decoder(self, graphs: CudaGraphs = CudaGraphs.ON) -> Decoder:
        return self._decoder(self.runner(TARGET, graphs), self.runner(DRAFT, graphs))

    def reference(self) -> Decoder:
        """The same over ONNX Runtime."""
        graphs = self.manifest.graphs
        return self._decoder(
            *(runner_from_onnx(self.folder, graphs[name], threads=1) for name in (TARGET, DRAFT))
        )

    def _decoder(self, target: Any, draft: Any) -> Decoder:
        settings = Settings(self.manifest.draft.proposals + 1, True, self.manifest.max_length)
        return Decoder(self.manifest, target, draft, None, settings)


def inputs(ids: list[list[int]], starts: list[int], kv: int = 64) -> dict[str, np.ndarray]:
    """Inputs of a target pass: ids [lanes, rows], starts [lanes]."""
    rows = np.arange(len(ids[0]), dtype=np.int64)
    return {
        "input_ids": np.array(ids, np.int64),
        "start": np.array(starts, np.int64),
        "slots": np.arange(kv, dtype=np.int64),
        "wanted_rows": np.tile(rows, (len(ids), 1)),
    }


def prompts(count: int) -> list[list[int]]:
    return [np.random.default_rng(seed).integers(0, VOCAB, 1 + 3 * seed).tolist() for seed in range(count)]


# Whole generations.


@pytest.mark.parametrize("graphs", CudaGraphs)
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.FLOAT16])
def test_generations_are_those_of_onnx_runtime(tmp_path, world, dtype, graphs):
    setup = Setup(tmp_path, world, dtype, max_prompt=16)
    with setup.decoder(graphs) as decoder, setup.reference() as reference:
        for prompt in prompts(6):
            expected = reference.generate(prompt, 50)
            for mode in Mode:
                got = decoder.generate(prompt, 50, mode=mode)
                assert got.ids == expected.ids
                assert got.stats.draft_failures == 0
        assert got.stats.rounds
        target = decoder._target
        assert (target.graphs.replays > 0) == (graphs is CudaGraphs.ON)
        assert decoder.effective["engine"] == world.backend
    assert world.passes[TARGET] > 50
    assert world.passes[DRAFT] > 50


def test_context_to_its_very_end(tmp_path, world):
    """C03: prompt and output up to exactly what the engine was built for, the last block pending."""
    setup = Setup(tmp_path, world, max_prompt=16)
    most = setup.manifest.max_length
    with setup.decoder() as decoder, setup.reference() as reference:
        for size in (1, 16, 17, most - BLOCK, most - 1):
            prompt = (PROMPT * 40)[:size]
            got = decoder.generate(prompt, most)
            assert got.ids == reference.generate(prompt, most).ids
            assert size + len(got.ids) == most


def test_streams_in_turn_and_in_threads(tmp_path, world):
    setup = Setup(tmp_path, world, max_prompt=16)
    with setup.decoder() as decoder, setup.reference() as reference:
        expected = [reference.generate(p, 30).ids for p in prompts(6)]
        streams = [decoder.stream(p, 30) for p in prompts(6)]
        got: list[list[int]] = [[] for _ in streams]
        for _ in range(31):
            for index, stream in enumerate(streams):
                got[index] += next(stream, type("", (), {"ids": ()})).ids
        assert [tuple(ids) for ids in got] == expected
        del streams, stream
        with ThreadPoolExecutor(4) as pool:
            for _ in range(3):
                assert list(pool.map(lambda p: decoder.generate(p, 30).ids, prompts(6))) == expected


# Passes.


def reference_logits(setup: Setup, ids: list[list[int]], starts: list[int], cache: Any = None) -> np.ndarray:
    runner = runner_from_onnx(setup.folder, setup.manifest.graphs[TARGET], threads=1)
    (logits,) = runner.run(runner.new_cache(136, len(ids)), inputs(ids, starts), ["logits"])
    return logits.to_host().copy()


def test_outputs_come_in_the_order_wanted(tmp_path, world):
    setup = Setup(tmp_path, world)
    runner = setup.runner()
    cache = runner.new_cache(runner.limits.capacity)
    features, greedy, logits = runner.run(
        cache, inputs([PROMPT[:3]], [0]), ["features", "greedy_ids", "logits"]
    )
    assert (features.shape, greedy.shape, logits.shape) == ((1, 3, HIDDEN), (1, 3), (1, 3, VOCAB))
    expected = reference_logits(setup, [PROMPT[:3]], [0])
    np.testing.assert_array_equal(logits.to_host(), expected)
    np.testing.assert_array_equal(greedy.to_host(), expected.argmax(-1))
    assert runner.run(cache, inputs([PROMPT[:3]], [0]), []) == []
    runner.close()


def test_lanes_give_the_bits_of_single_requests(tmp_path, world):
    """Ragged starts, neighbours only; lanes that take no part keep their memory."""
    setup = Setup(tmp_path, world, batch=5)
    runner = setup.runner()
    capacity = runner.limits.capacity
    together, alone = runner.new_cache(capacity, 5), {}
    begun = {1: [3, 4, 5, 6], 2: [9, 8], 3: [1, 2, 3, 4, 5, 6, 7, 8]}
    for lane, prompt in begun.items():
        cache = runner.new_cache(capacity)
        runner.run(cache, inputs([prompt[:4]], [0]), ["greedy_ids"])
        (logits,) = runner.run(cache, inputs([[11, 12, lane]], [len(prompt[:4])]), ["logits"])
        alone[lane] = logits.to_host()
        runner.run(together, inputs([prompt[:4]], [0]), ["features"], range(lane, lane + 1))
    for _ in range(4):  # the later ones are replayed
        features, logits = runner.run(
            together,
            inputs([[11, 12, lane] for lane in begun], [len(p[:4]) for p in begun.values()]),
            ["features", "logits"],
            range(1, 4),
        )
        assert (features.shape, logits.shape[:2]) == ((3, 3, HIDDEN), (3, 3))
        for row, lane in enumerate(begun):
            np.testing.assert_array_equal(logits.to_host()[row], alone[lane][0])
    assert runner.graphs.replays
    for lane in (0, 4):
        assert not any(part.any() for part in together.save(lane, capacity))
    for lanes in (range(4, 6), range(2, 2), range(0, 4, 2)):
        with pytest.raises(ValueError, match="lanes: got"):
            runner.run(together, inputs([[1, 2]], [0]), ["logits"], lanes)
    runner.close()


def test_lanes_are_saved_and_loaded(tmp_path, world):
    setup = Setup(tmp_path, world, batch=3)
    runner = setup.runner()
    cache, other = (runner.new_cache(runner.limits.capacity, lanes) for lanes in (2, 3))
    runner.run(cache, inputs([[3, 4, 5]], [0]), ["greedy_ids"], range(1, 2))
    saved = cache.save(1, 3)
    assert [part.shape for part in saved] == [(1, 3, HIDDEN)] * 2
    assert saved[0].any()
    (expected,) = runner.run(cache, inputs([[7, 8]], [3]), ["logits"], range(1, 2))
    other.load(2, saved)
    (logits,) = runner.run(other, inputs([[7, 8]], [3]), ["logits"], range(2, 3))
    np.testing.assert_array_equal(logits.to_host(), expected.to_host())
    assert [part.shape for part in cache.save(0, 0)] == [(1, 0, HIDDEN)] * 2
    other.load(0, cache.save(0, 0))
    with pytest.raises(ValueError, match="lane 3"):
        other.save(3, 1)
    with pytest.raises(ValueError, match="saved from another graph"):
        other.load(0, tuple(part.astype(np.float64) for part in saved))
    runner.close()


def test_features_from_the_host_and_from_the_target(tmp_path, world):
    setup = Setup(tmp_path, world)
    target, draft = setup.runner(TARGET), setup.runner(DRAFT)
    cache = target.new_cache(target.limits.capacity)
    (features,) = target.run(cache, inputs([PROMPT[:4]], [0]), ["features"])
    rest = {
        "start": np.array([0]),
        "anchor_position": np.array([4]),
        "block_ids": np.array([[7, 3, 3, 3]]),
        "block_rows": np.array([4]),
        "slots": np.arange(64),
    }
    kept = features.to_host()
    for source in (features, kept):
        proposals, sums = draft.run(
            draft.new_cache(draft.limits.capacity), {"features": source, **rest}, ["proposals", "logit_sums"]
        )
        assert np.isfinite(sums.to_host()).all()
        if source is features:
            expected = proposals.to_host()
        np.testing.assert_array_equal(proposals.to_host(), expected)
    with pytest.raises(ValueError, match="another engine or device"):
        draft.run(
            draft.new_cache(draft.limits.capacity), {"features": object_like(kept), **rest}, ["proposals"]
        )
    for runner in (target, draft):
        runner.close()


class object_like:  # noqa: N801 - a tensor of some other engine
    def __init__(self, values: np.ndarray):
        self.shape = values.shape


# Memory and traffic.


def test_a_greedy_round_moves_ids_and_lengths_only(tmp_path, world):
    setup = Setup(tmp_path, world, max_prompt=16)
    with setup.decoder() as decoder:
        decoder.generate(PROMPT, 30)
        before = Counter(world.cuda.calls)
        moved = [Counter(world.cuda.moved)]
        moved += (Counter(world.cuda.moved) for _ in decoder.stream(PROMPT, 40))
        between = [(new["up"] - old["up"], new["down"] - old["down"]) for old, new in pairwise(moved)]
        rounds = between[1:]  # the prompt comes first
        # Target: start, wanted rows, ids. Draft: start, anchor, block rows, ids. Back: ids; proposals, sums.
        up, down = (2 * 256 + 8 * BLOCK) + (3 * 256 + 8 * BLOCK), 8 * BLOCK + (256 + 8 * (BLOCK - 1))
        assert len(rounds) > 10
        assert set(rounds[:-3]) == {(up, down)}
        assert max(rounds) == (up, down), "shorter blocks at the end of the budget move less"
        calls = world.cuda.calls - before
        assert calls["cudaMalloc"] == calls["cudaMallocHost"] == 0, "a request has the memory of the last one"
        assert calls["cudaMemcpyAsync"] <= 4 * (len(rounds) + 1)


def test_the_traffic_that_the_documentation_counts():
    """docs/engines.md: the demo's pair, a block of 8."""
    cache, block, features = CacheShape(1, 1, 64, DType.FLOAT16), 8, 64
    sizes = {"batch": 1, "rows": 512, "context_rows": 512, "logit_rows": 8, "capacity": 640, "kv": 640}
    target = plan_layout(target_io(cache, 49152, features), sizes)
    draft = plan_layout(draft_io(cache, features, block, block - 1, 49152, 16), sizes)
    assert target.offsets["input_ids"] + 8 * block == 576
    assert target.offsets["greedy_ids"] + 8 * block - target.offsets["greedy_ids"] == 64
    assert draft.offsets["block_ids"] + 8 * block == 832
    assert draft.offsets["proposals"] + 8 * 7 - draft.offsets["logit_sums"] == 312
    assert "logits" not in target.small
    assert "features" not in target.small
    assert target.staged == {"input_ids", "start", "wanted_rows"}
    for layout in (target, draft):
        assert all(offset % 256 == 0 for offset in layout.offsets.values())


@given(rows=st.integers(1, 64), batch=st.integers(1, 5), heads=st.integers(1, 3), vocab=st.integers(1, 3000))
@settings(max_examples=60, deadline=None)
def test_no_two_tensors_share_memory(rows, batch, heads, vocab):
    """But for a cache and its update."""
    io = target_io(CacheShape(2, heads, 8, DType.FLOAT16), vocab, 24)
    sizes = {"batch": batch, "rows": rows, "logit_rows": min(rows, 8), "capacity": 80, "kv": 80}
    layout = plan_layout(io, sizes)
    spans = sorted(
        (layout.offsets[t.name], math.prod(tensor_shape(t, sizes)) * t.dtype.bytes)
        for t in (*io.inputs, *(o for o in io.outputs if not o.name.startswith("present")))
        if t.name in layout.offsets
    )
    for (start, size), (following, _) in pairwise(spans):
        assert start + size <= following
    assert spans[-1][0] + spans[-1][1] <= layout.bytes
    for name in (*layout.staged, *layout.small):
        assert layout.offsets[name] < layout.pinned_bytes <= layout.caches_at


def test_memory_is_reused_and_given_back(tmp_path, world):
    setup = Setup(tmp_path, world, max_prompt=16)
    decoder = setup.decoder()
    first = decoder.generate(PROMPT, 20).ids
    held = len(world.cuda.live)
    for _ in range(5):
        assert decoder.generate(PROMPT, 20).ids == first
    assert len(world.cuda.live) == held
    running = decoder.stream(PROMPT, 20)
    next(running)
    decoder.close()
    decoder.close()
    with pytest.raises(EngineError, match="is closed; open the bundle again"):
        list(running)
    with pytest.raises(EngineError, match="is closed"):
        decoder.generate(PROMPT, 20)
    del running, decoder
    gc.collect()
    assert world.cuda.live == []
    assert not (world.cuda.streams or world.cuda.events or world.cuda.executables or world.cuda.graphs)


def test_a_new_cache_holds_zeros_where_an_old_one_was(tmp_path, world):
    setup = Setup(tmp_path, world)
    runner = setup.runner()
    cache = runner.new_cache(runner.limits.capacity)
    runner.run(cache, inputs([PROMPT[:4]], [0]), ["greedy_ids"])
    address = cache.arena.memory.address
    del cache
    cache = runner.new_cache(runner.limits.capacity)
    assert cache.arena.memory.address == address
    assert not any(part.any() for part in cache.save(0, cache.capacity))
    runner.close()


def test_a_cache_outlives_its_runner(tmp_path, world):
    runner = Setup(tmp_path, world).runner()
    cache = runner.new_cache(runner.limits.capacity)
    runner.run(cache, inputs([PROMPT[:4]], [0]), ["greedy_ids"])
    runner.close()
    assert cache.save(0, 4)[0].any()
    del runner, cache
    gc.collect()
    assert world.cuda.live == []


# Captured passes.


@given(slots=st.integers(1, 40000), capacity=st.integers(1, 40000))
def test_few_lengths_are_looked_at(slots, capacity):
    slots = min(slots, capacity)
    size = kv_bucket(slots, capacity)
    assert slots <= size <= capacity
    assert size == capacity or (size % 1024 == 0 or size in (64, 128, 256, 512))
    assert kv_bucket(size, capacity) == size
    assert size <= max(64, 2 * slots)


def repeat(runner: TrtRunner, times: int, cache: Any = None) -> list[np.ndarray]:
    cache = cache or runner.new_cache(runner.limits.capacity)
    found = []
    for start in range(times):
        (logits,) = runner.run(cache, inputs([[start, start + 1]], [start]), ["logits"])
        found.append(logits.to_host())
    return found


def test_the_second_pass_is_captured_and_the_third_replayed(tmp_path, world):
    setup = Setup(tmp_path, world)
    plain, runner = setup.runner(graphs=CudaGraphs.OFF), setup.runner()
    for got, expected in zip(repeat(runner, 6), repeat(plain, 6), strict=True):
        np.testing.assert_array_equal(got, expected)
    assert (runner.graphs.captures, runner.graphs.replays) == (1, 4)
    assert (plain.graphs.captures, plain.graphs.replays) == (0, 0)
    assert world.cuda.calls["cudaGraphLaunch"] == 4
    # Prompts are not captured, however often the same length comes.
    cache = runner.new_cache(runner.limits.capacity)
    for _ in range(4):
        ids = inputs([PROMPT], [0]) | {"wanted_rows": np.array([[0, 1]])}
        runner.run(cache, ids, ["greedy_ids"])
    assert runner.graphs.captures == 1
    for one in (plain, runner):
        one.close()


def test_captured_passes_are_bounded(tmp_path, rtx, monkeypatch):
    monkeypatch.setattr(trt_graphs, "MOST_GRAPHS", 3)
    runner = Setup(tmp_path, rtx, batch=6).runner()
    cache = runner.new_cache(runner.limits.capacity, 6)
    for lane in range(6):  # each lane's answer depends on what it holds
        runner.run(cache, inputs([[lane, 7 * lane, 3]], [0]), [], range(lane, lane + 1))

    def answer(lane: int) -> list[float]:
        (logits,) = runner.run(cache, inputs([[5, 1]], [3]), ["logits"], range(lane, lane + 1))
        return logits.to_host().ravel().tolist()

    expected = [answer(lane) for lane in range(6)]
    assert len({tuple(one) for one in expected}) == 6
    for _ in range(3):
        for lane in range(6):
            assert answer(lane) == expected[lane]
            assert answer(lane) == expected[lane]
            assert len(rtx.cuda.executables) <= 3
    assert runner.graphs.replays
    assert rtx.cuda.graphs == {}
    runner.close()
    assert rtx.cuda.executables == {}


def test_a_captured_pass_that_still_runs_is_not_destroyed(tmp_path, rtx, monkeypatch):
    monkeypatch.setattr(trt_graphs, "MOST_GRAPHS", 1)
    runner = Setup(tmp_path, rtx).runner()
    caches = [runner.new_cache(runner.limits.capacity) for _ in range(2)]
    for turn in (0, 0, 0, 1, 0, 1):  # the last one is captured while the replay before it is pending
        runner.run(caches[turn], inputs([[1, 2]], [0]), [])
    assert (runner.graphs.captures, runner.graphs.replays) == (2, 2)
    runner.close()


def test_captured_passes_read_the_features_they_are_given(tmp_path, rtx):
    """The same draft cache after two targets' caches: the features lie elsewhere."""
    setup = Setup(tmp_path, rtx)
    target, draft = setup.runner(TARGET), setup.runner(DRAFT)
    caches = [target.new_cache(target.limits.capacity) for _ in range(2)]
    sources = [
        target.run(cache, inputs([ids], [0]), ["features"])[0]
        for cache, ids in zip(caches, ([5, 9, 2, 7], [30, 31, 8, 8]), strict=True)
    ]
    rest = {
        "start": np.array([0]),
        "anchor_position": np.array([4]),
        "block_ids": np.array([[7, 3, 3, 3]]),
        "block_rows": np.array([4]),
        "slots": np.arange(64),
    }
    cache = draft.new_cache(draft.limits.capacity)

    def sums(features: Any) -> list[float]:
        (found,) = draft.run(cache, {"features": features, **rest}, ["logit_sums"])
        return found.to_host().ravel().tolist()

    expected = [sums(source.to_host()) for source in sources]
    assert expected[0] != expected[1]
    for turn in (0, 0, 0, 1, 1, 1, 0, 1):
        assert sums(sources[turn]) == expected[turn]
    assert draft.graphs.replays >= 3
    for runner in (target, draft):
        runner.close()


def test_few_shapes_reach_the_library(tmp_path, rtx):
    write_bundle(tmp_path, max_length=600)
    manifest = strict_build(tmp_path, manifest_from_bundle(tmp_path))
    runner = runner_from_engine(tmp_path, manifest, TARGET, "tensorrt-rtx", cuda_graphs=CudaGraphs.OFF)
    cache = runner.new_cache(runner.limits.capacity)
    seen = set()
    for kv in range(64, runner.limits.capacity + 1, 32):
        runner.run(cache, inputs([[1, 2]], [kv - 2], kv), ["greedy_ids"])
        seen |= {context._shapes["slots"] for context in rtx.contexts}
    assert seen == {(64,), (128,), (256,), (512,), (runner.limits.capacity,)}
    runner.close()


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("cudaStreamBeginCapture", "cudaErrorStreamCaptureUnsupported"),
        ("cudaStreamEndCapture", "cudaErrorStreamCaptureInvalidated"),
        ("cudaGraphInstantiate", "cudaErrorMemoryAllocation"),
    ],
)
def test_a_pass_that_cannot_be_captured_is_run(tmp_path, world, caplog, fault, reason):
    setup = Setup(tmp_path, world)
    expected = repeat(setup.runner(graphs=CudaGraphs.OFF), 5)
    world.cuda.faults[fault] = getattr(real.cudaError_t, reason)
    runner = setup.runner()
    with caplog.at_level(logging.WARNING):
        got = repeat(runner, 5)
    np.testing.assert_array_equal(got, expected)
    assert [r.message for r in caplog.records].count(caplog.records[0].message) == len(caplog.records) == 1
    assert "runs without CUDA graphs" in caplog.text
    assert reason in caplog.text
    assert reason in (runner.graphs.problem or "")
    assert not world.cuda.graphs
    runner.close()


@pytest.mark.parametrize("invalid", [True, False], ids=["and breaks the capture", "and records nothing"])
def test_a_library_that_refuses_to_be_captured_is_run(tmp_path, world, caplog, invalid):
    setup = Setup(tmp_path, world)
    runner = setup.runner()
    expected = repeat(setup.runner(graphs=CudaGraphs.OFF), 5)

    def refuse(context: Any, stream_handle: int) -> bool:
        if world.cuda.stream(stream_handle).captured is not None:
            world.cuda.stream(stream_handle).invalid = invalid
            return False
        del world.faults["IExecutionContext.execute_async_v3"]
        try:
            return context.execute_async_v3(stream_handle)
        finally:
            world.faults["IExecutionContext.execute_async_v3"] = refuse

    world.faults["IExecutionContext.execute_async_v3"] = refuse
    np.testing.assert_array_equal(repeat(runner, 5), expected)
    assert "it did not take the pass" in caplog.text
    runner.close()


def test_no_memory_for_a_context_of_its_own(tmp_path, world, caplog):
    setup = Setup(tmp_path, world)
    runner = setup.runner()
    repeat(runner, 1)
    world.faults["ICudaEngine.create_execution_context"] = lambda engine, how: None
    expected = repeat(runner, 5, runner.new_cache(runner.limits.capacity))
    assert len(expected) == 5
    assert "gives no execution context" in caplog.text
    runner.close()


def test_streamed_weights_are_not_captured(tmp_path, world):
    setup = Setup(tmp_path, world, flags=(EngineFlag.WEIGHT_STREAMING,))
    with setup.decoder() as decoder, setup.reference() as reference:
        assert decoder.generate(PROMPT, 40).ids == reference.generate(PROMPT, 40).ids
        assert decoder.effective["cuda_graphs"] == "off"
    assert world.cuda.calls["cudaStreamBeginCapture"] == 0


def test_working_memory_that_grows_drops_what_was_captured(tmp_path, rtx):
    setup = Setup(tmp_path, rtx)
    runner = setup.runner()
    cache = runner.new_cache(runner.limits.capacity)
    expected = repeat(setup.runner(graphs=CudaGraphs.OFF), 4)
    repeat(runner, 3, cache)
    rtx.faults["IExecutionContext.update_device_memory_size_for_shapes"] = lambda context: 1 << 20
    runner.run(cache, inputs([[1, 2, 3]], [0]), ["greedy_ids"])
    assert rtx.cuda.executables == {}
    assert any(a.bytes == 1 << 20 for a in rtx.cuda.live)
    np.testing.assert_array_equal(repeat(runner, 4, cache), expected)
    runner.close()


def test_working_memory_that_grows_for_a_pass_of_its_own(tmp_path, rtx):
    """Kernels compiled for one shape may need more than those for all."""
    setup = Setup(tmp_path, rtx)
    runner = setup.runner()
    expected = repeat(setup.runner(graphs=CudaGraphs.OFF), 4)
    eager = DynamicShapesKernelSpecializationStrategy.EAGER
    rtx.faults["IExecutionContext.update_device_memory_size_for_shapes"] = lambda context: (
        1 << 20 if context._kernels is eager else 1
    )
    np.testing.assert_array_equal(repeat(runner, 4), expected)
    assert runner.graphs.replays == 2
    runner.close()


def test_kernels_are_compiled_for_what_comes_again_and_again(tmp_path, rtx):
    runner = Setup(tmp_path, rtx).runner()
    repeat(runner, 4)
    kernels = DynamicShapesKernelSpecializationStrategy
    assert [context._kernels for context in rtx.contexts] == [kernels.LAZY, kernels.EAGER]
    runner.close()


# Failures of a pass.


def test_a_pass_outside_of_every_profile_is_refused_before_the_call(tmp_path, world):
    """C03: the axis, its size and the range, and nothing was put on the stream."""
    runner = Setup(tmp_path, world, max_prompt=16).runner()
    cache = runner.new_cache(runner.limits.capacity)
    calls = Counter(world.cuda.calls)
    ids = inputs([[1] * 17], [0]) | {"wanted_rows": np.array([[16]])}
    with pytest.raises(EngineError, match=r"engine target\.tensorrt.*rows: got 17, expected 1 to 16.*larger"):
        runner.run(cache, ids, ["greedy_ids"])
    assert world.cuda.calls == calls
    for capacity, batch in ((64, 1), (runner.limits.capacity, 2)):
        with pytest.raises(
            EngineError, match=rf"got a cache of {batch} x {capacity} slots, expected at most 1"
        ):
            runner.new_cache(capacity, batch)
    runner.close()


@pytest.mark.parametrize(
    ("method", "fault", "reason"),
    [
        ("execute_async_v3", lambda *_: False, "it did not take the pass"),
        ("set_input_shape", lambda *_: False, "it takes no input_ids of shape"),
        ("set_tensor_address", lambda *_: False, "it takes no address for"),
        ("set_optimization_profile_async", lambda *_: False, "it does not take its profile number"),
        ("get_tensor_shape", lambda *_: [9, 9], r"greedy_ids would have shape \(9, 9\), expected"),
    ],
)
def test_whatever_the_library_refuses_becomes_ours(tmp_path, world, method, fault, reason):
    runner = Setup(tmp_path, world).runner()
    cache = runner.new_cache(runner.limits.capacity)
    world.faults[f"IExecutionContext.{method}"] = fault
    with pytest.raises(
        EngineError, match=rf"engine target\.{world.backend}: the engine failed \({reason}.*open the"
    ):
        runner.run(cache, inputs([[1, 2]], [0]), ["greedy_ids"])
    del world.faults[f"IExecutionContext.{method}"]
    (greedy,) = runner.run(cache, inputs([[1, 2]], [0]), ["greedy_ids"])
    assert greedy.to_host().shape == (1, 2)
    runner.close()


def test_what_the_library_raises_and_logs_is_in_the_error(tmp_path, world):
    runner = Setup(tmp_path, world).runner()
    cache = runner.new_cache(runner.limits.capacity)

    def fail(context: Any, stream_handle: int) -> bool:
        context._logger.log(1, "IExecutionContext: Myelin error, cudaErrorMemoryAllocation")
        raise RuntimeError("enqueue went wrong")

    world.faults["IExecutionContext.execute_async_v3"] = fail
    expected = r"\(enqueue went wrong; IExecutionContext: Myelin error.*\); close other programs on the GPU"
    with pytest.raises(EngineError, match=expected):
        runner.run(cache, inputs([[1, 2]], [0]), ["greedy_ids"])
    runner.close()


def test_a_failing_draft_engine_does_not_fail_the_request(tmp_path, world):
    setup = Setup(tmp_path, world, max_prompt=16)
    with setup.decoder() as decoder, setup.reference() as reference:
        stream = decoder.stream(PROMPT, 40)
        got = [*next(stream).ids, *next(stream).ids]
        world.faults["IExecutionContext.execute_async_v3"] = _only(world, DRAFT)
        world.cuda.faults["cudaGraphLaunch"] = None
        for chunk in stream:
            got += chunk.ids
        assert tuple(got) == reference.generate(PROMPT, 40).ids
        assert stream.result.stats.draft_failures == 1


def _only(world: World, graph: str) -> Any:
    def fault(context: Any, stream_handle: int) -> bool:
        if context._engine._plan["graph"] == graph:
            return False
        del world.faults["IExecutionContext.execute_async_v3"]
        try:
            return context.execute_async_v3(stream_handle)
        finally:
            world.faults["IExecutionContext.execute_async_v3"] = fault

    return fault


def test_a_failing_gpu(tmp_path, world):
    runner = Setup(tmp_path, world).runner()
    cache = runner.new_cache(runner.limits.capacity)
    (greedy,) = runner.run(cache, inputs([[1, 2]], [0]), ["greedy_ids"])
    world.cuda.faults["cudaEventSynchronize"] = real.cudaError_t.cudaErrorIllegalAddress
    with pytest.raises(
        EngineError, match=r"CUDA failed while waiting for the GPU: cudaErrorIllegalAddress, an ill"
    ):
        greedy.to_host()
    world.cuda.faults.clear()
    world.cuda.faults["cudaMemcpyAsync"] = real.cudaError_t.cudaErrorUnknown
    with pytest.raises(EngineError, match="CUDA failed while copying memory: cudaErrorUnknown"):
        runner.run(cache, inputs([[1, 2]], [0]), ["greedy_ids"])
    world.cuda.faults.clear()
    runner.close()


def test_out_of_memory_says_what_to_lower(tmp_path, world):
    setup = Setup(tmp_path, world)
    runner = setup.runner()
    cache = runner.new_cache(runner.limits.capacity)
    world.cuda.total_bytes = sum(a.bytes for a in world.cuda.live if not a.pinned) + 1000
    expected = r"no GPU memory: .* MB are needed for 1 x 1\d\d slots.*MB are free"
    with pytest.raises(EngineError, match=r"lower the number of requests at once.*--max-context"):
        runner.new_cache(runner.limits.capacity)
    with pytest.raises(EngineError, match=expected):
        runner.new_cache(runner.limits.capacity)
    del cache  # its memory serves the next
    assert runner.new_cache(runner.limits.capacity).batch == 1
    runner.close()


def test_idle_memory_makes_room(tmp_path, world):
    setup = Setup(tmp_path, world, batch=4)
    runner = setup.runner()
    del_me = runner.new_cache(runner.limits.capacity, 2)
    used = sum(a.bytes for a in world.cuda.live if not a.pinned)
    del del_me
    world.cuda.total_bytes = used + 1000
    assert runner.new_cache(runner.limits.capacity, 1).batch == 1
    runner.close()


def test_misuse_is_a_bug(tmp_path, world):
    setup = Setup(tmp_path, world)
    target, draft = setup.runner(TARGET), setup.runner(DRAFT)
    cache = draft.new_cache(draft.limits.capacity)
    with pytest.raises(ValueError, match="made by another runner"):
        target.run(cache, inputs([[1, 2]], [0]), ["greedy_ids"])
    own = target.new_cache(target.limits.capacity)
    with pytest.raises(ValueError, match="inputs: got"):
        target.run(own, {"start": np.array([0])}, ["greedy_ids"])
    for runner in (target, draft):
        runner.close()


# The stand-in itself bites.


def test_the_stand_in_finds_what_real_cuda_would_not_tell(tmp_path, rtx):
    runner = Setup(tmp_path, rtx).runner()
    cache = runner.new_cache(runner.limits.capacity)
    device, arena = cache.device, cache.arena
    with pytest.raises(Violation, match="overrun an allocation"):
        device.download(arena.pinned.address, arena.memory.address + arena.memory.bytes - 8, 16)
    with pytest.raises(Violation, match="not on the device"):
        device.upload(123, arena.pinned.address, 8)
    (greedy,) = runner.run(cache, inputs([[1, 2]], [0]), ["greedy_ids"])
    assert (arena.host[arena.layout.offsets["greedy_ids"] :][:8] == 0xFF).all(), (
        "nothing is there before the wait"
    )
    context = rtx.contexts[0]
    context.set_tensor_address("present_key.0", arena.address("features"))
    with pytest.raises(Violation, match=r"present_key\.0: is not where past_key\.0 is"):
        context.execute_async_v3(device.stream)
    device.synchronize()
    extra = device.allocate(64, "a test")
    device.discard(extra)
    device.collect()
    with pytest.raises(Violation, match="was freed"):
        device.clear(extra.address, 8)
    del greedy
    runner.close()
