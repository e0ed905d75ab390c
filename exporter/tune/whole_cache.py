"""Look at the caches as they are.

The portable graph cuts the first slots out of a cache, which may be longer; on the CPU that is a copy of all
keys and values in every pass. The runtime keeps the caches just long enough instead.
"""

from __future__ import annotations

import onnx_ir as ir

from ...bundle.tensors import CacheShape, present


def whole_cache(model: ir.Model, cache: CacheShape) -> bool:
    """Change the model in place; whether all caches are looked at whole now.

    Args:
        model: a target.
        cache: the caches among its inputs and outputs.
    """
    updated = {present(name) for name in cache.names()}
    cuts = [node for node in model.graph if node.op_type == "Slice" and _name(node.inputs[0]) in updated]
    if {_name(cut.inputs[0]) for cut in cuts} != updated:
        return False
    for cut in cuts:
        source = cut.inputs[0]
        assert source is not None
        cut.outputs[0].replace_all_uses_with(source)
    return True


def _name(value: ir.Value | None) -> str | None:
    return None if value is None else value.name
