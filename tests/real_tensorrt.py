"""NVIDIA's own Python bindings of TensorRT, without TensorRT: ``import tensorrt`` works, building does not.

The bindings are a wheel of their own. Their classes and all of `tensorrt.plugin` are real; the libraries
behind them are not on the package index, and stand empty here: three libraries, made with the C compiler,
that have the names and functions which the bindings ask for, and give null for everything.

What the library itself would bring is stood in for: the plugin registry, which here keeps creators by name,
version and namespace; the parser's way from a node to a plugin; and the builder's expressions over sizes,
which here are evaluated. Each stands in for no more than what the bindings' C++ declares.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

LIBRARIES = ("libnvonnxparser.so.11", "libnvinfer_plugin.so.11", "libnvinfer.so.11")
FUNCTIONS = (
    "createInferBuilder_INTERNAL",
    "createInferRefitter_INTERNAL",
    "createInferRuntime_INTERNAL",
    "createNvOnnxParserRefitter_INTERNAL",
    "createNvOnnxParser_INTERNAL",
    "getBuilderPluginRegistry",
    "getInferLibVersion",
    "getNvOnnxParserVersion",
    "getPluginRegistry",
    "initLibNvInferPlugins",
)


def missing() -> str:
    """What this machine lacks, or nothing."""
    if importlib.util.find_spec("tensorrt_bindings") is None:
        return "the wheel tensorrt-cu13-bindings is not installed"
    return "" if shutil.which("cc") else "there is no C compiler (cc)"


def load() -> Any:
    """Import the bindings as ``tensorrt``; once, in a process that does nothing else."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "empty.c"
        source.write_text("".join(f"void *{name}(void) {{ return 0; }}\n" for name in FUNCTIONS))
        for name in LIBRARIES:
            library = Path(folder) / name
            subprocess.run(
                ["cc", "-shared", "-fPIC", f"-Wl,-soname,{name}", source, "-o", library], check=True
            )
            ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)  # found by its name from now on
        bindings = importlib.import_module("tensorrt_bindings")
    # As NVIDIA's package `tensorrt` does: the bindings under the name that users import.
    sys.modules["tensorrt"] = bindings
    registry = Registry()
    bindings.get_plugin_registry = lambda: registry
    bindings.IDimensionExpr = Size
    bindings.ISymExpr = object
    bindings.DimsExprs = lambda rank: [None] * rank
    return bindings


class Registry:
    """Plugin creators."""

    def __init__(self) -> None:
        self.creators: dict[tuple[str, str, str], Any] = {}

    def register_creator(self, creator: Any, namespace: str) -> bool:
        key = (creator.name, creator.plugin_version, namespace)
        assert creator.plugin_namespace == namespace
        assert key not in self.creators
        self.creators[key] = creator
        return True

    def get_creator(self, name: str, version: str, namespace: str) -> Any:
        return self.creators.get((name, version, namespace))


class Size:
    """A size that TensorRT knows when the engine runs: a number, a name, or an operation on two others."""

    def __init__(self, operation: Any, *parts: Any) -> None:
        self.operation = operation
        self.parts = parts

    def is_constant(self) -> bool:
        return self.operation == "constant"

    def get_constant_value(self) -> int:
        assert self.is_constant()
        return self.parts[0]

    def value(self, sizes: dict[str, int]) -> int:
        """Evaluate, in the 32 bits that an argument of a kernel has."""
        if self.operation == "constant":
            value = self.parts[0]
        elif self.operation == "name":
            value = sizes[self.parts[0]]
        else:
            first, second = (part.value(sizes) for part in self.parts)
            value = {
                "SUM": lambda: first + second,
                "SUB": lambda: first - second,
                "PROD": lambda: first * second,
                "FLOOR_DIV": lambda: first // second,
                "CEIL_DIV": lambda: -(-first // second),
            }[self.operation.name]()
        assert -(2**31) <= value < 2**31
        return value


class Builder:
    """What makes sizes: `trt.IExprBuilder`."""

    def constant(self, value: int) -> Size:
        assert isinstance(value, int)
        return Size("constant", value)

    def operation(self, operation: Any, first: Size, second: Size) -> Size:
        assert isinstance(first, Size) and isinstance(second, Size)
        return Size(operation, first, second)


class Arguments:
    """What receives the numbers of a kernel: `trt.ISymExprs`."""

    def __init__(self) -> None:
        self.values: list[Any] = []

    @property
    def nbSymExprs(self) -> int:  # noqa: N802 - the bindings' name
        return len(self.values)

    @nbSymExprs.setter
    def nbSymExprs(self, count: int) -> None:  # noqa: N802
        self.values = [None] * count

    def __setitem__(self, index: int, value: Any) -> None:
        self.values[index] = value


def ask_plugin(calls: list[dict[str, Any]], capability: int, folder: Path) -> dict[str, Any]:
    """Run `call_plugin.py` in a process of its own; `folder` is for its files."""
    asked, answered = folder / "asked.json", folder / "answered.json"
    asked.write_text(json.dumps({"capability": capability, "calls": calls}))
    script = Path(__file__).with_name("call_plugin.py")
    done = subprocess.run([sys.executable, script, asked, answered], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(answered.read_text())
