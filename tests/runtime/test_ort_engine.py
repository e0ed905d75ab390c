"""ONNX Runtime behind the engine protocol, on tiny graphs that follow the contract."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper

from dflash_deploy.bundle.errors import BundleError, EngineError, ProviderError, RequestError
from dflash_deploy.bundle.tensors import DRAFT, TARGET, DType
from dflash_deploy.runtime import ort_engine
from dflash_deploy.runtime.decoder import Decoder
from dflash_deploy.runtime.ort_engine import PROVIDERS, check_provider, effective_threads, runner_from_onnx
from dflash_deploy.runtime.stats import Mode
from toy_onnx import HIDDEN, VOCAB, WEIGHTS, write_bundle, write_manifest

PROMPT = [5, 9, 2, 30, 31, 9]


@pytest.fixture
def bundle(tmp_path):
    write_bundle(tmp_path / "bundle")
    return tmp_path / "bundle"


def target_inputs(ids, start, kv):
    rows = np.arange(len(ids), dtype=np.int64)
    return {
        "input_ids": np.array([ids], np.int64),
        "start": np.array([start], np.int64),
        "slots": np.arange(kv, dtype=np.int64),
        "wanted_rows": rows[None],
    }


# Decoding.


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.FLOAT16])
def test_speculative_equals_plain(tmp_path, dtype):
    write_bundle(tmp_path, dtype)
    with Decoder.open(tmp_path, threads=1, verify_rows=4) as decoder:
        accepted = 0
        for seed in range(12):
            prompt = np.random.default_rng(seed).integers(0, VOCAB, 1 + seed).tolist()
            plain = decoder.generate(prompt, 50, mode=Mode.PLAIN)
            speculative = decoder.generate(prompt, 50)
            assert speculative.ids == plain.ids
            assert speculative.stats.draft_failures == 0
            accepted += speculative.stats.acceptance_length > 1
        assert accepted, "the toy draft is never right: this test proves little"


def test_chunked_rows_and_one_pass_give_the_same_bits(bundle, manifest_of):
    """In place and by slot: three passes write what one pass writes."""
    runner = runner_from_onnx(bundle, manifest_of(bundle).graphs[TARGET], threads=1)
    whole, parts = runner.new_cache(64), runner.new_cache(64)
    (logits,) = runner.run(whole, target_inputs(PROMPT, 0, 64), ["logits"])
    expected = logits.to_host().copy()
    for start in (0, 2, 4):
        (logits,) = runner.run(parts, target_inputs(PROMPT[start : start + 2], start, 16), ["logits"])
        np.testing.assert_array_equal(logits.to_host()[0], expected[0, start : start + 2])
    for name, tensor in whole.tensors.items():
        np.testing.assert_array_equal(tensor.to_host(), parts.tensors[name].to_host())


def test_caches_are_updated_in_place(bundle, manifest_of):
    runner = runner_from_onnx(bundle, manifest_of(bundle).graphs[TARGET], threads=1)
    cache = runner.new_cache(32)
    before = {name: tensor.block.address for name, tensor in cache.tensors.items()}
    assert list(before) == ["past_key.0", "past_value.0"]
    assert all(not tensor.to_host().any() for tensor in cache.tensors.values())
    runner.run(cache, target_inputs([5, 6], 3, 16), ["greedy_ids"])
    memory = cache.tensors["past_key.0"]
    assert memory.block.address == before["past_key.0"]
    written = memory.to_host()[0, 0].any(-1)
    assert written.tolist() == [i in (3, 4) for i in range(32)]
    # What the session calls its output is that memory.
    ((binding, _),) = cache.bindings.values()
    assert {value.data_ptr() for value in binding.get_outputs()} >= set(before.values())


def watch_caches(monkeypatch, decoder):
    """The target's caches as they are made."""
    seen: list[ort_engine.OrtCache] = []
    new_cache = decoder._target.new_cache

    def watched(capacity, batch=1):
        seen.append(new_cache(capacity, batch))
        return seen[-1]

    monkeypatch.setattr(decoder._target, "new_cache", watched)
    return seen


def test_features_reach_the_draft_without_a_copy(bundle, monkeypatch):
    with Decoder.open(bundle, threads=1, verify_rows=4) as decoder:
        caches = watch_caches(monkeypatch, decoder)
        run, seen = decoder._draft.run, []

        def watched(cache, inputs, wanted, lanes=None):
            seen.append(inputs["features"])
            outputs = run(cache, inputs, wanted, lanes)
            bound = {places["features"][0] for _, places in cache.bindings.values()}
            assert inputs["features"].block.address in bound
            return outputs

        monkeypatch.setattr(decoder._draft, "run", watched)
        decoder.generate(PROMPT, 20)
        assert seen
        assert {tensor.block for tensor in seen} == {caches[0].buffers["features"]}


def test_buffers_are_reused(bundle, monkeypatch):
    with Decoder.open(bundle, threads=1, verify_rows=4) as decoder:
        caches = watch_caches(monkeypatch, decoder)
        decoder.generate(PROMPT, 100)
        # One for each input and output that is no cache, as large as the largest pass: prefill's six rows.
        assert {name: block.elements for name, block in caches[0].buffers.items()} == {
            "input_ids": 6,
            "start": 1,
            "slots": 124,
            "wanted_rows": 4,
            "greedy_ids": 4,
            "features": 6 * HIDDEN,
        }


def test_two_caches_of_one_runner_are_apart(bundle, manifest_of):
    runner = runner_from_onnx(bundle, manifest_of(bundle).graphs[TARGET], threads=1)
    one, other = runner.new_cache(32), runner.new_cache(32)
    (a,) = runner.run(one, target_inputs([5, 6], 0, 16), ["logits"])
    (b,) = runner.run(other, target_inputs([7, 8], 0, 16), ["logits"])
    (c,) = runner.run(runner.new_cache(32), target_inputs([5, 6], 0, 16), ["logits"])
    np.testing.assert_array_equal(a.to_host(), c.to_host())
    assert not np.array_equal(a.to_host(), b.to_host())


def lane_inputs(ids, starts, kv):
    """Inputs of a target pass: ids [lanes, rows], starts [lanes]."""
    ids = np.array(ids, np.int64)
    return {
        "input_ids": ids,
        "start": np.array(starts, np.int64),
        "slots": np.arange(kv, dtype=np.int64),
        "wanted_rows": np.tile(np.arange(ids.shape[1], dtype=np.int64), (ids.shape[0], 1)),
    }


def test_lanes_give_the_bits_of_single_requests(bundle, manifest_of):
    """Ragged starts, neighbours only, and lanes that take no part keep their memory."""
    runner = runner_from_onnx(bundle, manifest_of(bundle).graphs[TARGET], threads=1)
    prompts = {1: [3, 4, 5, 6], 2: [9, 8], 3: [1, 2, 3, 4, 5, 6, 7, 8]}
    together, expected = runner.new_cache(64, 5), {}
    for lane, prompt in prompts.items():
        alone = runner.new_cache(64)
        runner.run(alone, target_inputs(prompt, 0, 16), ["greedy_ids"])
        (logits,) = runner.run(alone, target_inputs([11, 12, lane], len(prompt), 16), ["logits"])
        expected[lane] = logits.to_host().copy()
        runner.run(together, lane_inputs([prompt], [0], 16), ["features"], range(lane, lane + 1))
    inputs = lane_inputs([[11, 12, lane] for lane in prompts], [len(p) for p in prompts.values()], 16)
    features, logits = runner.run(together, inputs, ["features", "logits"], range(1, 4))
    assert (features.shape, logits.shape[:2]) == ((3, 3, HIDDEN), (3, 3))
    for row, lane in enumerate(prompts):
        np.testing.assert_array_equal(logits.to_host()[row], expected[lane][0])
    for tensor in together.tensors.values():
        assert not tensor.to_host()[[0, 4]].any()
    for lanes in (range(4, 6), range(2, 2), range(0, 4, 2)):
        with pytest.raises(ValueError, match="lanes: got"):
            runner.run(together, inputs, ["logits"], lanes)


def test_lanes_are_saved_and_loaded(bundle, manifest_of):
    runner = runner_from_onnx(bundle, manifest_of(bundle).graphs[TARGET], threads=1)
    cache, other = runner.new_cache(32, 2), runner.new_cache(48, 3)
    runner.run(cache, target_inputs([3, 4, 5], 0, 16), ["greedy_ids"], range(1, 2))
    (expected,) = runner.run(cache, target_inputs([7, 8], 3, 16), ["logits"], range(1, 2))
    expected = expected.to_host().copy()
    other.load(2, cache.save(1, 3))
    (logits,) = runner.run(other, target_inputs([7, 8], 3, 16), ["logits"], range(2, 3))
    np.testing.assert_array_equal(logits.to_host(), expected)


def test_an_output_is_not_written_when_it_is_no_longer_wanted(bundle, manifest_of):
    """Its memory may be gone by then: another range of lanes needed a larger one."""
    runner = runner_from_onnx(bundle, manifest_of(bundle).graphs[TARGET], threads=1)
    cache = runner.new_cache(32, 2)
    (old,) = runner.run(cache, target_inputs([5, 6], 0, 16), ["logits"], range(1))
    runner.run(cache, lane_inputs([[5, 6], [7, 8]], [0, 0], 16), ["logits"])
    assert cache.buffers["logits"] is not old.block
    old.to_host()[:] = 7.0
    runner.run(cache, target_inputs([9, 9], 0, 16), ["greedy_ids"], range(1))
    assert (old.to_host() == 7.0).all()


def test_outputs_not_wanted_are_not_given(bundle, manifest_of):
    runner = runner_from_onnx(bundle, manifest_of(bundle).graphs[TARGET], threads=1)
    cache = runner.new_cache(32)
    assert len(runner.run(cache, target_inputs([5, 6], 0, 16), ["greedy_ids"])) == 1
    assert "logits" not in cache.buffers
    assert runner.run(cache, target_inputs([5, 6], 0, 16), []) == []
    features, greedy = runner.run(cache, target_inputs([5, 6], 0, 16), ["features", "greedy_ids"])
    assert (features.shape, greedy.shape) == ((1, 2, HIDDEN), (1, 2))


def test_streams_in_threads(bundle):
    with Decoder.open(bundle, threads=1) as decoder:
        prompts = [[i, *PROMPT] for i in range(6)]
        expected = [decoder.generate(prompt, 40).ids for prompt in prompts]
        with ThreadPoolExecutor(6) as pool:
            got = list(pool.map(lambda prompt: decoder.generate(prompt, 40).ids, prompts * 3))
        assert got == expected * 3


# Where it is opened from.


def test_weights_are_found_from_any_directory(bundle, tmp_path, monkeypatch):
    with Decoder.open(bundle, threads=1) as decoder:
        expected = decoder.generate(PROMPT, 20).ids
    monkeypatch.chdir(bundle.parent)
    with Decoder.open("bundle", threads=1) as decoder:
        monkeypatch.chdir(tmp_path)
        assert decoder.generate(PROMPT, 20).ids == expected
    (tmp_path / WEIGHTS).write_bytes(bytes((bundle / WEIGHTS).stat().st_size))  # a decoy
    with Decoder.open(bundle, threads=1) as decoder:
        assert decoder.generate(PROMPT, 20).ids == expected


def test_a_fresh_process_needs_neither_torch_nor_onnx(bundle):
    program = f"""
import sys
import dflash_deploy.runtime.decoder as d
loaded = {{"torch", "transformers", "onnx", "onnxruntime"}} & set(sys.modules)
assert not loaded, loaded
with d.Decoder.open({str(bundle)!r}, threads=1) as decoder:
    print(*decoder.generate({PROMPT}, 20).ids)
loaded = {{"torch", "transformers", "onnx"}} & set(sys.modules)
assert not loaded, loaded
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=bundle.parent)
    assert done.returncode == 0, done.stderr
    with Decoder.open(bundle, threads=1) as decoder:
        assert tuple(map(int, done.stdout.split())) == decoder.generate(PROMPT, 20).ids


def test_sessions_come_and_go(bundle):
    for _ in range(5):
        with Decoder.open(bundle, threads=1) as one, Decoder.open(bundle, threads=1) as other:
            assert one.generate(PROMPT, 5).ids == other.generate(PROMPT, 5).ids


# Providers.


@pytest.mark.parametrize("name", ["cuda", "tensorrt", "tensorrt-rtx"])
def test_a_provider_that_is_not_installed(bundle, name):
    if PROVIDERS[name].providers[0] in onnxruntime.get_available_providers():
        pytest.skip("it is installed here")
    with pytest.raises(ProviderError, match=rf"provider {name}: .*is not available.*install"):
        Decoder.open(bundle, name)


def test_an_unknown_provider(bundle):
    with pytest.raises(ProviderError, match="provider: got 'gpu', expected one of cpu, cuda"):
        Decoder.open(bundle, "gpu")


def test_a_silent_fallback_to_the_cpu_is_an_error(bundle, manifest_of, monkeypatch):
    monkeypatch.setattr(
        onnxruntime, "get_available_providers", lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"]
    )
    with pytest.raises(ProviderError, match="provider cuda"):
        runner_from_onnx(bundle, manifest_of(bundle).graphs[TARGET], "cuda")


def test_bfloat16_on_the_cpu_is_refused_before_weights_are_read(tmp_path):
    write_bundle(tmp_path, DType.BFLOAT16)
    size = (tmp_path / WEIGHTS).stat().st_size
    (tmp_path / WEIGHTS).write_bytes(bytes(size))  # a hash check would find this
    with pytest.raises(ProviderError, match=r"provider cpu: computes no bfloat16.*--dtype float32"):
        Decoder.open(tmp_path)
    with pytest.raises(ProviderError):
        check_provider("cpu", DType.BFLOAT16)


def test_onnxruntime_not_installed(bundle, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(
        ProviderError, match=r"onnxruntime: not installed; pip install 'dflash-deploy\[cpu\]'"
    ):
        Decoder.open(bundle)


# Threads.


def test_threads_are_told(bundle):
    with Decoder.open(bundle, threads=1) as decoder:
        assert decoder.effective["threads"] == 1
        assert decoder.effective["providers"] == ["CPUExecutionProvider"]
        assert decoder.effective["engine_version"] == onnxruntime.__version__
    with Decoder.open(bundle) as decoder:
        assert decoder.effective["threads"] in range(1, len(os.sched_getaffinity(0)) + 1)


@pytest.mark.parametrize("threads", [0, -1, 10**5])
def test_bad_threads(bundle, threads):
    with pytest.raises(
        RequestError, match=rf"threads: got {threads}, expected 1 to \d+, the CPUs of this machine"
    ):
        Decoder.open(bundle, threads=threads)


def test_hyper_threads_of_a_core_count_once(monkeypatch, tmp_path):
    for cpu, siblings in enumerate(["0,2", "1,3", "0,2", "1,3"]):
        path = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        path.parent.mkdir(parents=True)
        path.write_text(siblings)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 9})
    monkeypatch.setattr(ort_engine, "Path", lambda text: tmp_path / text.lstrip("/"))
    assert effective_threads(None) == 3  # cpu 9 tells nothing and counts for itself


# Files that are not what they should be.


def add_custom_op(bundle, define):
    """Put `toy::Same` behind the target's greedy ids, with or without its definition."""
    model = onnx.load(bundle / "target.onnx", load_external_data=False)
    last = next(node for node in model.graph.node if "greedy_ids" in node.output)
    last.output[0] = "chosen"
    model.graph.node.append(helper.make_node("Same", ["chosen"], ["greedy_ids"], domain="toy"))
    model.opset_import.append(helper.make_opsetid("toy", 1))
    if define:
        body = [helper.make_node("Identity", ["x"], ["y"])]
        model.functions.append(
            helper.make_function("toy", "Same", ["x"], ["y"], body, [helper.make_opsetid("", 24)])
        )
    (bundle / "target.onnx").write_bytes(model.SerializeToString())


def test_a_custom_operator_with_its_definition_needs_no_registration(bundle, manifest_of):
    manifest = manifest_of(bundle)
    with Decoder.open(bundle, threads=1) as decoder:
        expected = decoder.generate(PROMPT, 20).ids
    add_custom_op(bundle, define=True)
    write_manifest(bundle, manifest)
    with Decoder.open(bundle, threads=1) as decoder:
        assert decoder.generate(PROMPT, 20).ids == expected


def test_a_custom_operator_without_definition_is_named(bundle, manifest_of):
    manifest = manifest_of(bundle)
    add_custom_op(bundle, define=False)
    with pytest.raises(BundleError, match=r"target\.onnx: uses an operator .*toy.*Same"):
        runner_from_onnx(bundle, manifest.graphs[TARGET])


# Faults at run time.


def test_an_engine_fault_is_an_engine_error_and_passes(bundle, manifest_of):
    runner = runner_from_onnx(bundle, manifest_of(bundle).graphs[TARGET], threads=1)
    cache = runner.new_cache(32)
    with pytest.raises(EngineError, match=r"target\.onnx: the engine failed"):
        runner.run(cache, target_inputs([VOCAB + 5, 1], 0, 16), ["greedy_ids"])
    (good,) = runner.run(runner.new_cache(32), target_inputs([5, 6], 0, 16), ["greedy_ids"])
    assert good.shape == (1, 2)


def test_a_shape_that_the_graph_does_not_have_is_a_bug(bundle, manifest_of):
    runner = runner_from_onnx(bundle, manifest_of(bundle).graphs[TARGET], threads=1)
    cache = runner.new_cache(32)
    inputs = target_inputs([5, 6], 0, 16)
    with pytest.raises(ValueError, match="input nonsense: unknown"):
        runner.run(cache, inputs | {"nonsense": inputs["start"]}, [])
    with pytest.raises(ValueError, match="input start: got shape"):
        runner.run(cache, inputs | {"start": np.zeros(2, np.int64)}, [])
    with pytest.raises(ValueError, match="input slots: got shape"):
        runner.run(cache, inputs | {"slots": np.zeros((2, 2), np.int64)}, [])
    del inputs["start"]
    with pytest.raises(ValueError, match="inputs: got"):
        runner.run(cache, inputs, [])


def test_a_cache_of_another_runner_is_a_bug(bundle, manifest_of):
    graphs = manifest_of(bundle).graphs
    target, draft = (runner_from_onnx(bundle, graphs[name], threads=1) for name in (TARGET, DRAFT))
    with pytest.raises(ValueError, match="another runner"):
        target.run(draft.new_cache(32), target_inputs([5, 6], 0, 16), [])


def test_no_memory(bundle, manifest_of):
    runner = runner_from_onnx(bundle, manifest_of(bundle).graphs[TARGET], threads=1)
    with pytest.raises(EngineError, match=r"no memory for 1 x .* slots"):
        runner.new_cache(1 << 50)


def test_a_closed_engine(bundle):
    decoder = Decoder.open(bundle, threads=1)
    stream = decoder.stream(PROMPT, 9)
    next(stream)
    decoder.close()
    decoder.close()
    with pytest.raises(EngineError, match="closed; open the bundle again"):
        next(stream)
    with pytest.raises(EngineError, match="closed"):
        decoder.stream(PROMPT, 9)


def test_a_bundle_edited_into_nonsense(bundle, manifest_of):
    manifest = manifest_of(bundle)
    for mask in (-1, VOCAB):
        write_manifest(bundle, replace(manifest, draft=replace(manifest.draft, mask_token_id=mask)))
        with pytest.raises(BundleError, match="mask_token_id"):
            Decoder.open(bundle)
