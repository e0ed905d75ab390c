"""The stand-ins for TensorRT and CUDA offer what the installed packages offer, under the same names."""

from __future__ import annotations

import enum
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import real_tensorrt
import strict_tensorrt
from dflash_deploy.runtime import cuda_device, trt_library
from strict_cuda import StrictCuda
from strict_tensorrt import ONLY_RTX, RTX_VERSION, SHARED, VERSION, World, installed

real_cuda = pytest.importorskip("cuda.bindings.runtime")
trt = pytest.importorskip("tensorrt_rtx")
CLASSES = [one for one in (*SHARED, *ONLY_RTX) if not issubclass(one, enum.Enum)]
ENUMS = [one for one in (*SHARED, *ONLY_RTX) if issubclass(one, enum.Enum)]


def public(kind: type) -> dict[str, Any]:
    return {name: getattr(kind, name) for name in vars(kind) if not name.startswith("_")}


def parameters(call: Any) -> list[str]:
    return [name for name in inspect.signature(call).parameters if name != "self"]


def documented(call: Any, name: str) -> list[list[str]]:
    return from_docstring(call.__doc__ or "", name)


def from_docstring(text: str, name: str) -> list[list[str]]:
    """Parameter names of every overload, from what pybind11 writes first into the docstring."""
    found = []
    for line in text.splitlines():
        match = re.match(rf"\s*(?:\d+\. )?{name}\((.*)\) -> ", line)
        if match and not match[1].startswith("*args"):
            found.append([n for n in re.findall(r"(\w+): ", match[1]) if n != "self"])
    return found


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_classes_have_real_names_and_parameters(kind):
    real = getattr(trt, kind.__name__)
    for name, value in public(kind).items():
        assert hasattr(real, name), f"{kind.__name__}.{name} does not exist"
        if isinstance(value, property) or not callable(value) or isinstance(value, type):
            continue
        overloads = documented(getattr(real, name), name)
        if parameters(value) == ["args"]:
            continue  # several overloads, told apart by type
        assert parameters(value) in [o[: len(parameters(value))] for o in overloads], (name, overloads)


TENSORRT = """
import json, sys
import real_tensorrt
trt = real_tensorrt.load()
asked = json.load(sys.stdin)
found = {}
for kind, names in asked.items():
    real = getattr(trt, kind, None)
    found[kind] = {name: getattr(getattr(real, name), "__doc__", "") for name in names if hasattr(real, name)}
print(json.dumps([trt.__version__, found]))
"""


@pytest.mark.skipif(bool(real_tensorrt.missing()), reason=real_tensorrt.missing())
def test_tensorrt_has_the_same_names_and_parameters():
    """Of TensorRT there are the bindings without the library: enough to compare names."""
    asked = {kind.__name__: [*public(kind)] for kind in SHARED if not issubclass(kind, enum.Enum)}
    asked |= {kind.__name__: [*kind.__members__] for kind in SHARED if issubclass(kind, enum.Enum)}
    done = subprocess.run(
        [sys.executable, "-c", TENSORRT],
        input=json.dumps(asked),
        env={**os.environ, "PYTHONPATH": str(Path(real_tensorrt.__file__).parent)},
        capture_output=True,
        text=True,
        check=True,
    )
    version, found = json.loads(done.stdout.splitlines()[-1])
    assert version == VERSION
    missing = {f"{kind}.{name}" for kind, names in asked.items() for name in names if name not in found[kind]}
    assert missing == {  # what only TensorRT-RTX has, and the package asks for by `hasattr`
        "Runtime.get_engine_validity",
        "Runtime.engine_header_size",
        "IExecutionContext.is_stream_capturable",
        "IRuntimeConfig.create_runtime_cache",
        "IRuntimeConfig.set_runtime_cache",
        "IRuntimeConfig.dynamic_shapes_kernel_specialization_strategy",
    }
    for kind in CLASSES:
        for name, value in public(kind).items():
            text = found.get(kind.__name__, {}).get(name)
            if not text or not inspect.isfunction(value) or parameters(value) == ["args"]:
                continue
            overloads = [names[: len(parameters(value))] for names in from_docstring(text, name)]
            assert parameters(value) in overloads, (kind, name, text)


def test_contexts_are_made_in_the_two_ways_that_there_are():
    overloads = documented(trt.ICudaEngine.create_execution_context, "create_execution_context")
    assert [names[0] for names in overloads] == ["strategy", "runtime_config"]


@pytest.mark.parametrize("kind", ENUMS, ids=lambda kind: kind.__name__)
def test_enumerations_have_real_members(kind):
    real = getattr(trt, kind.__name__).__members__
    assert set(kind.__members__) <= set(real)
    if issubclass(kind, int):
        assert {name: int(one) for name, one in kind.__members__.items()} == {
            name: int(real[name]) for name in kind.__members__
        }


def test_severities_are_real():
    for one in strict_tensorrt.Severity:
        assert int(getattr(trt.ILogger, one.name)) == one


def test_the_version_is_the_one_that_is_installed():
    assert trt.__version__ == RTX_VERSION


def test_cuda_functions_have_real_names_and_parameters():
    stand_in = {name: value for name, value in vars(StrictCuda).items() if name.startswith("cuda")}
    assert len(stand_in) > 25
    for name, value in stand_in.items():
        real = getattr(real_cuda, name)
        if callable(value) and not isinstance(value, type):
            assert parameters(value) == list(inspect.signature(real).parameters), name
        else:
            assert value is real or value == real


def test_the_package_calls_nothing_else():
    """Every `cuda.` name in the sources is one that the stand-in has, so that a test would have met it."""
    source = inspect.getsource(cuda_device)
    names = set(re.findall(r"\bcuda[A-Z]\w+", source)) - {"cudaMemcpyHostToDevice", "cudaMemcpyDeviceToHost"}
    names -= set(real_cuda.cudaError_t.__members__) | set(real_cuda.cudaStreamCaptureMode.__members__)
    assert names == {name for name in vars(StrictCuda) if name.startswith("cuda")} & names
    assert names


def test_without_a_driver_real_cuda_answers_as_a_driverless_machine_does():
    """What the bindings give on failure: the error and None, which `Device` counts on."""
    if cuda_device.cuda_devices()[0]:
        pytest.skip("this machine has a GPU")
    error, value = real_cuda.cudaMalloc(16)
    assert error != real_cuda.cudaError_t.cudaSuccess
    assert value is None


def test_stand_ins_are_gone_afterwards():
    with installed(World()) as world:
        assert sys.modules["tensorrt_rtx"] is world.module
        assert trt_library.shared_library("tensorrt-rtx").module is world.module
    assert sys.modules["tensorrt_rtx"] is trt
