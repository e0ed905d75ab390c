"""The Triton kernel: its numerics in the interpreter, its compilation for GPUs that are not here."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

pytest.importorskip("triton")
from dflash_deploy.bundle.errors import EngineBuildError, OpError
from dflash_deploy.plugins.grouped_dynamic_conv import ConvSpec
from dflash_deploy.plugins.triton_compile import CAPABILITIES, _own_arguments, compile_ptx
from dflash_deploy.plugins.triton_kernel import Tile
from dflash_deploy.plugins.triton_launch import grouped_dynamic_conv_triton
from verified_page import run_from_text, verified_page

from .conv_cases import ISOLATION_CASES, NUMPY_DTYPES, Case, assert_close, assert_isolated, cases

HERE = Path(__file__).parent


def interpret(jobs, folder: Path):
    """Run (hidden, delta, base, block_size, group_size, whole) jobs in one process of the interpreter."""
    packed = []
    for *arrays, block, group, whole in jobs:
        bits = [a.view(np.int16) if a.dtype == ml_dtypes.bfloat16 else a for a in arrays]
        packed.append((*bits, block, group, whole))
    jobs_file, results_file = folder / "jobs.pickle", folder / "results.pickle"
    jobs_file.write_bytes(pickle.dumps(packed))
    done = subprocess.run(
        [sys.executable, HERE / "interpret_triton.py", jobs_file, results_file],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return [
        r.view(ml_dtypes.bfloat16) if r.dtype == np.int16 else r
        for r in pickle.loads(results_file.read_bytes())
    ]


def strided_inputs():
    """Views that share their rows with other data, and a batch that is not the outer axis in memory."""
    rng = np.random.default_rng(0)
    wide = rng.standard_normal((3, 9, 20)).astype(np.float32)
    projection = rng.standard_normal((3, 9, 2, 2, 3)).astype(np.float32)
    base = rng.standard_normal((12, 2)).astype(np.float32).T
    yield wide[..., 5:17], projection[:, :, 1], base
    yield wide.transpose(1, 0, 2)[..., 2:14], projection.transpose(1, 0, 2, 3, 4)[:, :, 0], base


def test_numerics_in_the_interpreter(tmp_path):
    # Half precision differs from float32 by its loads and its last rounding only: a third of it is run here,
    # the rest below.
    todo = [
        (case, case.draw()) for i, case in enumerate(cases()) if case.dtype == "float32" or not i // 3 % 3
    ]
    strided = [(Case(4, 2, 12, 4, *x[0].shape[:2], "float32", 0), x) for x in strided_inputs()]
    todo += strided
    # Every 15th with the kernel's own tiles, which take one program per row here, and so more time.
    jobs = [
        (*inputs, case.block_size, case.group_size, bool(i % 15)) for i, (case, inputs) in enumerate(todo)
    ]
    # Then what `assert_isolated` asks for, in its order.
    for case in ISOLATION_CASES:
        inputs = case.draw()
        jobs.append((*inputs, case.block_size, case.group_size, True))
        for j in range(case.rows):
            hidden = inputs[0].copy()
            hidden[0, j] = np.nan
            jobs.append((hidden, *inputs[1:], case.block_size, case.group_size, True))
    results = interpret(jobs, tmp_path)
    assert {case.dtype for case, _ in todo} == set(NUMPY_DTYPES)
    for (case, inputs), got in zip(todo, results, strict=False):
        assert_close("triton", case, got, inputs)
    isolation = iter(results[len(todo) :])
    for case in ISOLATION_CASES:
        assert_isolated(lambda *_: next(isolation), case, np.nan)
    assert next(isolation, None) is None


@pytest.mark.slow
def test_the_rest_of_half_precision(tmp_path):
    """With the test above: the very cases that the ONNX function is tested with."""
    todo = [
        (case, case.draw())
        for i, case in enumerate(cases(("float32", "float16", "bfloat16")))
        if case.dtype != "float32" and i // 3 % 3
    ]
    results = interpret([(*inputs, c.block_size, c.group_size, True) for c, inputs in todo], tmp_path)
    assert len(todo) > 100
    for (case, inputs), got in zip(todo, results, strict=True):
        assert_close("triton", case, got, inputs)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_compiles_for_each_gpu(capability, dtype):
    spec = ConvSpec(hidden_size=4096, kernel_size=2, block_size=16, group_size=16)
    kernel = compile_ptx(capability, dtype, spec=spec)
    assert f".target sm_{capability}" in kernel.ptx
    assert f".entry {kernel.name}" in kernel.ptx
    # What makes it fast: whole 16-byte accesses, no shared memory, no spills, few registers.
    assert "ld.global.v4.b32" in kernel.ptx
    assert "st.global.v4.b32" in kernel.ptx
    assert "bar.sync" not in kernel.ptx
    assert kernel.shared_bytes == 0
    assert kernel.spill_bytes == 0
    assert 0 < kernel.registers <= 64


def test_odd_sizes_compile():
    for channels, group_size in ((37, 1), (60, 15), (1100, 550)):
        kernel = compile_ptx(90, spec=ConvSpec(channels, 4, 8, group_size))
        assert kernel.spill_bytes == 0


def test_tiles_cover_and_fill():
    for channels, group_size in ((576, 16), (4096, 4096), (37, 1), (60, 15), (7, 7)):
        spec = ConvSpec(channels, 2, 8, group_size)
        for rows in (1, 8, 513, 1 << 20):
            tile = Tile.for_shape(spec, rows)
            for size in (tile.rows, tile.groups, tile.within, tile.warps):
                assert size & (size - 1) == 0
            assert tile.groups * tile.within <= 256
            assert 1 <= tile.warps <= 4


def test_launcher_refuses_misfits():
    hidden, delta, base = torch.ones(2, 8, 12), torch.ones(2, 8, 2, 3), torch.ones(2, 12)
    with pytest.raises(OpError, match="out: got "):
        grouped_dynamic_conv_triton(
            hidden, delta, base, block_size=8, group_size=4, out=torch.empty(2, 12, 8).mT
        )
    with pytest.raises(OpError, match="delta dtype"):
        grouped_dynamic_conv_triton(hidden, delta.half(), base, block_size=8, group_size=4)
    with pytest.raises(OpError, match="base"):
        grouped_dynamic_conv_triton(hidden, delta, base.T, block_size=8, group_size=4)
    assert grouped_dynamic_conv_triton(
        hidden[:, :0], delta[:, :0], base, block_size=8, group_size=4
    ).shape == (2, 0, 12)


def test_gpu_script_runs_its_checks_without_the_package_installed(tmp_path):
    script = HERE.parents[1] / "benchmarks" / "gpu_kernel.py"
    report, record = tmp_path / "kernel.json", tmp_path / "2027-01-02.json"
    done = subprocess.run(
        [sys.executable, script, "--device", "cpu", "--seconds", "1", "--json", report, "--record", record],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    numbers = json.loads(report.read_text())
    assert numbers["checks"]["cases"] >= 1
    assert numbers["checks"]["failures"] == []
    run = run_from_text(record.read_text(), record.name)
    assert (run.part, run.device, run.passed, run.changed()) == ("conv-kernel", "interpreter", True, [])
    assert run.figures["cases"] == numbers["checks"]["cases"]
    assert "## The Triton kernel on an interpreter" in verified_page([run])


@pytest.mark.slow
def test_registers_are_as_the_page_on_engines_says():
    script = HERE.parents[1] / "benchmarks" / "gpu_kernel.py"
    done = subprocess.run([sys.executable, script, "--resources"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    head, _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines())
    table = [dict(zip(head, row, strict=True)) for row in rows]
    assert {row["sm"] for row in table} == {str(c) for c in CAPABILITIES}
    assert {row["spilled bytes"] for row in table} == {"0"}
    large = [int(r["registers"]) for r in table if r["H, group"] == "4096, 16" and r["rows of a tile"] == "4"]
    page = (HERE.parents[1] / "docs" / "engines.md").read_text(encoding="utf-8")
    assert f"takes {min(large)} to {max(large)} registers a thread" in page


def test_arguments_that_are_missing_or_used_behind_our_own_are_refused():
    own = ", ".join(f".param .u64 k_{i}" for i in range(11))
    body = "\n)\n{ ld.param.b64 %rd1, [k_10]; }"
    kept = _own_arguments(f".entry k({own}, .param .u64 k_11{body}", "k")
    assert "k_10" in kept
    assert "k_11" not in kept
    with pytest.raises(EngineBuildError, match=r"got 12 arguments and uses of \.param .* k_11, expected 11"):
        _own_arguments(f".entry k({own}, .param .u64 k_11{body.replace('k_10', 'k_11')}", "k")
    with pytest.raises(EngineBuildError, match="got 1 arguments, expected 11"):
        _own_arguments(f".entry k(.param .u64 k_0{body}", "k")
