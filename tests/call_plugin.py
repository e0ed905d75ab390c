"""Ask the plugin for its kernels as TensorRT does while it builds: ``python call_plugin.py IN OUT``.

IN is JSON: `capability` and `calls`, each with the node's `op_type`, `domain` and `attributes`, the `dtype`,
the `shapes` of the three inputs, where a name stands for a size that moves, and `sizes`, a list of what the
names may be. OUT receives for each call the kernels of all tactics and their launches, or what failed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

import real_tensorrt

trt = real_tensorrt.load()

from dflash_deploy.plugins.tensorrt_plugin import register_plugin  # noqa: E402

DTYPES = {
    "float32": trt.DataType.FLOAT,
    "float16": trt.DataType.HALF,
    "bfloat16": trt.DataType.BF16,
    "int32": trt.DataType.INT32,
}


def plugin_from_node(op_type: str, domain: str, attributes: dict[str, Any]) -> Any:
    """Find and make the plugin of a node, as TensorRT's ONNX parser does.

    Its rules: name = op type; version and namespace are attributes, the latter else the node's domain; fields
    are the attributes that the creator names, in its order, an integer as one of 32 bits; `aot` wins over the
    network's flags.
    """
    find = trt.get_plugin_registry().get_creator
    version = attributes.get("plugin_version", "1")
    creator = find(op_type, version, attributes.get("plugin_namespace", "")) or find(op_type, version, domain)
    assert creator is not None, "Plugin not found, are the plugin name, version, and namespace correct?"
    fields = [
        trt.PluginField(f.name, np.array([attributes[f.name]], np.int32), trt.PluginFieldType.INT32)
        for f in creator.field_names
        if f.name in attributes
    ]
    request = trt.QuickPluginCreationRequest.UNKNOWN
    if "aot" in attributes:
        strict = trt.QuickPluginCreationRequest
        request = strict.STRICT_AOT if attributes["aot"] else strict.STRICT_JIT
    collection = trt.PluginFieldCollection(fields)
    return creator.create_plugin(
        op_type, creator.plugin_namespace, collection, trt.TensorRTPhase.BUILD, request
    )


def described(shape: list[Any], dtype: Any) -> Any:
    """A tensor with what the builder knows of it: a size that moves is -1."""
    plain = trt.PluginTensorDesc()
    plain.dims = tuple(-1 if isinstance(size, str) else size for size in shape)
    plain.type = dtype
    plain.format = trt.TensorFormat.LINEAR
    tensor = trt.DynamicPluginTensorDesc()
    tensor.desc = plain
    for bound, size in (("min", 1), ("opt", 8), ("max", 4096)):
        setattr(tensor, bound, tuple(size if isinstance(s, str) else s for s in shape))
    return tensor


def kernels(call: dict[str, Any]) -> list[dict[str, Any]]:
    """Go through a build: types, shapes, combinations, then each tactic's kernel and launch."""
    plugin = plugin_from_node(call["op_type"], call["domain"], call["attributes"])
    assert plugin.get_num_outputs() == 1
    dtype, shapes = DTYPES[call["dtype"]], call["shapes"]
    assert plugin.get_output_data_types([dtype] * 3, [len(shape) for shape in shapes]) == [dtype]
    builder = real_tensorrt.Builder()
    sizes = [
        [real_tensorrt.Size("name" if isinstance(s, str) else "constant", s) for s in shape]
        for shape in shapes
    ]
    (output,) = plugin.get_output_shapes(sizes, [], builder)
    tensors = [described(shape, dtype) for shape in (*shapes, shapes[0])]
    offered = plugin.get_supported_format_combinations(tensors, 3)
    assert [(d.type, d.format) for d in offered] == [(dtype, trt.TensorFormat.LINEAR)] * 4
    plugin.configure_plugin(tensors[:3], tensors[3:])
    made = []
    for tactic in sorted(plugin.get_valid_tactics()):
        plugin.set_tactic(tactic)
        launch, arguments = SimpleNamespace(), real_tensorrt.Arguments()
        plugin.get_launch_params(sizes, tensors, 3, launch, arguments, builder)
        name, ptx = plugin.get_kernel([t.desc for t in tensors[:3]], [tensors[3].desc])
        assert all(a.dtype == trt.PluginArgDataType.INT32 for a in arguments.values)
        made.append(
            {
                "tactic": tactic,
                "name": name,
                "ptx": ptx.decode(),
                "launches": [
                    {
                        "output": [size.value(now) for size in output],
                        "numbers": [argument.expr.value(now) for argument in arguments.values],
                        **{key: value.expr.value(now) for key, value in vars(launch).items()},
                    }
                    for now in call["sizes"]
                ],
            }
        )
    return made


def main() -> None:
    asked = json.loads(Path(sys.argv[1]).read_text())
    told: list[str] = []
    register_plugin(asked["capability"], told.append)
    register_plugin(asked["capability"], told.append)  # as for a second engine in one process
    results: list[Any] = []
    for call in asked["calls"]:
        try:
            results.append({"kernels": kernels(call)})
        except Exception as failure:
            results.append({"failure": str(failure), "told": told.copy()})
        told.clear()
    loaded = sorted({name.split(".")[0] for name in sys.modules} & {"torch", "onnx"})
    Path(sys.argv[2]).write_text(
        json.dumps({"results": results, "loaded": loaded, "version": trt.__version__})
    )


if __name__ == "__main__":
    main()
