"""The TensorRT plugin, called by NVIDIA's bindings; what an engine would launch, run in the interpreter."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("triton")
import real_tensorrt
from dflash_deploy.plugins.grouped_dynamic_conv import DOMAIN, OP_TYPE, ConvSpec
from dflash_deploy.plugins.tensorrt_plugin import NODE_ATTRIBUTES
from dflash_deploy.plugins.triton_compile import CAPABILITIES, NUMBERS, READ, compile_ptx
from dflash_deploy.plugins.triton_kernel import Tile

from .conv_cases import Case, assert_close

if real_tensorrt.missing():
    pytest.skip(real_tensorrt.missing(), allow_module_level=True)

HERE = Path(__file__).parent
CASES = (
    Case(16, 2, 64, 16, 2, 19, "float16", 1),
    Case(8, 4, 12, 4, 3, 9, "float32", 2),
    Case(5, 1, 7, 7, 1, 5, "bfloat16", 3),
    Case(1, 1, 12, 1, 2, 3, "bfloat16", 4),
    Case(4, 3, 60, 15, 1, 6, "float16", 5),
)


def call(case: Case, leading: int = 1, **changes) -> dict:
    """One node for the inputs of a case; all axes but the channels' move."""
    names = [f"axis_{i}" for i in range(leading)]
    sizes = {"rows": case.rows, **dict.fromkeys(names, 1)}
    if names:
        sizes[names[-1]] = case.batch
    return {
        "op_type": OP_TYPE,
        "domain": DOMAIN,
        "attributes": {"block_size": case.block_size, "group_size": case.group_size, **NODE_ATTRIBUTES},
        "dtype": case.dtype,
        "shapes": [
            [*names, "rows", case.channels],
            [*names, "rows", case.kernel_size, case.groups],
            [case.kernel_size, case.channels],
        ],
        "sizes": [sizes],
        **changes,
    }


def spec_of(case: Case) -> ConvSpec:
    return ConvSpec(case.channels, case.kernel_size, case.block_size, case.group_size)


def launched(jobs: list[tuple], folder: Path) -> list[np.ndarray]:
    """Run launches in the interpreter, in one process."""
    source, results = folder / "launches.pickle", folder / "results.pickle"
    packed = []
    for *arrays, grid, numbers, constants in jobs:
        bits = [a.view(np.int16) if a.dtype == ml_dtypes.bfloat16 else a for a in arrays]
        packed.append((*bits, grid, numbers, constants))
    source.write_bytes(pickle.dumps(packed))
    done = subprocess.run(
        [sys.executable, HERE / "interpret_launches.py", source, results],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = pickle.loads(results.read_bytes())
    return [r.view(ml_dtypes.bfloat16) if r.dtype == np.int16 else r for r in found]


def test_what_an_engine_launches_computes_the_op(tmp_path):
    answer = real_tensorrt.ask_plugin([call(case) for case in CASES], 90, tmp_path)
    assert answer["loaded"] == [], "a machine that builds engines needs neither torch nor onnx"
    jobs, expected = [], []
    for case, result in zip(CASES, answer["results"], strict=True):
        inputs = case.draw()
        for kernel in result["kernels"]:
            (launch,) = kernel["launches"]
            tile = Tile.of_rows(spec_of(case), kernel["tactic"])
            assert (launch["block_x"], launch["shared_mem"]) == (32 * tile.warps, 0)
            assert [launch[f"{kind}_{axis}"] for kind in ("grid", "block") for axis in "yz"] == [1] * 4
            assert launch["output"] == list(inputs[0].shape)
            jobs.append((*inputs, launch["grid_x"], launch["numbers"], tile.constants(spec_of(case))))
            expected.append((case, inputs))
    assert len(jobs) == 2 * len(CASES), "a kernel for few rows and one for many"
    for (case, inputs), got in zip(expected, launched(jobs, tmp_path), strict=True):
        assert_close("triton", case, got, inputs)


@pytest.mark.parametrize("leading", [0, 1, 2])
def test_sizes_that_move_are_counted_when_the_engine_runs(tmp_path, leading):
    case = CASES[0]
    asked = call(case, leading)
    asked["sizes"] = [{"axis_0": 3, "axis_1": 5, "rows": rows} for rows in (1, 16, 1000)]
    (result,) = real_tensorrt.ask_plugin([asked], 80, tmp_path)["results"]
    copies = (1, 3, 15)[leading]
    for kernel in result["kernels"]:
        tile = Tile.of_rows(spec_of(case), kernel["tactic"])
        for rows, launch in zip((1, 16, 1000), kernel["launches"], strict=True):
            numbers = dict(zip(NUMBERS, launch["numbers"], strict=True))
            assert (numbers["rows"], numbers["length"]) == (rows * copies, rows)
            assert launch["grid_x"] == -(-rows * copies // tile.rows) * tile.programs_across(spec_of(case))


def test_a_node_without_its_namespace_is_found_by_its_domain(tmp_path):
    bare = call(CASES[0])
    for name in ("plugin_namespace", "plugin_version"):
        del bare["attributes"][name]
    stranger = {**bare, "domain": "other"}
    found, lost = real_tensorrt.ask_plugin([bare, stranger], 90, tmp_path)["results"]
    assert len(found["kernels"]) == 2
    assert "Plugin not found" in lost["failure"]


def test_what_fails_in_a_call_is_told(tmp_path):
    wrong = [
        (call(CASES[0], dtype="int32"), "dtype: got 'INT32', expected one of FLOAT, HALF, BF16"),
        (call(replace(CASES[0], group_size=12)), "hidden_size: got 64, expected a multiple of group_size 12"),
        (call(CASES[0], shapes=[["rows", "h"], ["rows", 2, 4], [2, 64]]), "base: got (2, 64), expected"),
    ]
    results = real_tensorrt.ask_plugin([asked for asked, _ in wrong], 90, tmp_path)["results"]
    for (_, message), result in zip(wrong, results, strict=True):
        assert message in result["failure"]
        assert [text.startswith("plugin dflash::GroupedDynamicConv: ") for text in result["told"]] == [True]
        assert message in result["told"][0]


@pytest.mark.parametrize("capability", [*CAPABILITIES, 87])
def test_the_text_is_fit_to_be_kept(capability):
    """What TensorRT gives to the driver: our arguments alone, rounded steps, no file names, old PTX."""
    for dtype in ("float32", "float16", "bfloat16"):
        kernel = compile_ptx(capability, dtype, spec=ConvSpec(4096, 2, 16, 16))
        entry = re.search(rf"\.entry {kernel.name}\(([^)]*)\)\s*\.reqntid (\d+)", kernel.ptx)
        assert entry is not None
        kinds = [line.split()[1] for line in entry[1].strip().splitlines()]
        assert kinds == [".u64"] * len(READ) + [".u32"] * len(NUMBERS) + [".u64"]
        assert int(entry[2]) == kernel.threads
        loads = set(re.findall(r"ld\.param\S*\s+\S+, \[\w+_param_(\d+)\]", kernel.ptx))
        assert loads <= {str(i) for i in range(len(kinds))}
        assert len(loads) == len(kinds), "every argument is read"
        steps = set(re.findall(r"\b((?:mul|add|sub|fma)\.\S*f32\S*)", kernel.ptx))
        assert steps in ({"mul.rn.f32", "add.rn.f32"}, {"mul.rn.f32x2", "add.rn.f32x2"})
        assert (
            ".loc" not in kernel.ptx
            and ".py" not in kernel.ptx
            and "/" not in re.sub(r"//.*", "", kernel.ptx)
        )
        version = tuple(map(int, re.search(r"\.version (\d+)\.(\d+)", kernel.ptx).groups()))
        assert version <= {100: (8, 6), 120: (8, 7)}.get(capability, (8, 0))
