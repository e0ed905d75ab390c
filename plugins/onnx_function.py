"""The ONNX form of ``dflash::GroupedDynamicConv``: its schema and its function body.

With the body in the model, the op runs in plain ONNX Runtime and builds in TensorRT-RTX, neither
of which knows it. The body is written for one number of taps, since they are unrolled.

Legend: L rows, H channels, K taps, G = H / group_size groups, N = L times the leading axes.
"""

from __future__ import annotations

import onnx
import onnx_ir as ir
from onnx import parser

from dflash_deploy.bundle.errors import OpError, field_error
from dflash_deploy.plugins.grouped_dynamic_conv import (
    ATTRIBUTE_NAMES,
    BLOCK_SIZE,
    DOMAIN,
    DTYPES,
    GROUP_SIZE,
    INPUT_NAMES,
    OP_TYPE,
    OPSET_VERSION,
    OUTPUT_NAME,
)

MIN_OPSET = 18  # the first with Split's num_outputs
_ONNX_DTYPES = {"float32": "float"}


def op_schema() -> onnx.defs.OpSchema:
    """Describe the op's inputs, output and attributes to ONNX tools; registers nothing."""
    schema = onnx.defs.OpSchema
    types = [f"tensor({_ONNX_DTYPES.get(dtype, dtype)})" for dtype in DTYPES]
    return schema(
        OP_TYPE,
        DOMAIN,
        OPSET_VERSION,
        doc="Token-conditioned causal convolution within blocks of rows.",
        inputs=[schema.FormalParameter(name, "T") for name in INPUT_NAMES],
        outputs=[schema.FormalParameter(OUTPUT_NAME, "T")],
        type_constraints=[("T", types, "Element type of all inputs and the output.")],
        attributes=[
            schema.Attribute(name, schema.AttrType.INT, name, required=True) for name in ATTRIBUTE_NAMES
        ],
    )


# Where a tap looks past the start of its block it gathers a row of zeros, put behind the last row:
# selecting rows by index keeps NaN where it is, and costs less than selecting elements.
_HEAD = """
<domain: "{domain}", opset_import: ["" : {opset}]>
{op_type} <{block_size}, {group_size}> ({hidden}, {delta}, {base}) => ({output})
{{
    minus_one = Constant <value = int64[1] {{-1}}> ()
    zero = Constant <value = int64 {{0}}> ()
    one = Constant <value = int64 {{1}}> ()
    one_1d = Constant <value = int64[1] {{1}}> ()
    taps_1d = Constant <value = int64[1] {{{taps}}}> ()
    zero_float = Constant <value = float {{0.0}}> ()
    block = Constant <value_int: int = @{block_size}> ()
    group = Constant <value_int: int = @{group_size}> ()
    group_1d = Reshape(group, minus_one)

    base_shape = Concat <axis = 0> (taps_1d, minus_one, group_1d)
    base_float = Cast <to = 1> ({base})
    base_grouped = Reshape(base_float, base_shape)
    groups_1d = Shape <start = 1, end = 2> (base_grouped)
    delta_shape = Concat <axis = 0> (minus_one, taps_1d, groups_1d, one_1d)
    row_shape = Concat <axis = 0> (minus_one, one_1d, groups_1d, group_1d)

    hidden_shape = Shape({hidden})
    hidden_float = Cast <to = 1> ({hidden})
    delta_float = Cast <to = 1> ({delta})
    delta_grouped = Reshape(delta_float, delta_shape)
    {delta_taps} = Split <axis = 1, num_outputs = {taps}> (delta_grouped)
    {base_taps} = Split <axis = 0, num_outputs = {taps}> (base_grouped)
"""
_ROWS = """
    axis = Constant <value = int64 {{-2}}> ()
    axis_1d = Constant <value = int64[1] {{-2}}> ()
    zero_row = Constant <value = int64[2] {{0, 1}}> ()
    rows = Gather(hidden_shape, axis)
    row = Range(zero, rows, one)
    position = Mod(row, block)
    padded = Pad(hidden_float, zero_row, zero_float, axis_1d)
"""
_SHIFT = """
    tap_{t} = Constant <value = int64 {{{t}}}> ()
    before_{t} = Sub(row, tap_{t})
    inside_{t} = GreaterOrEqual(position, tap_{t})
    source_{t} = Where(inside_{t}, before_{t}, rows)
    earlier_{t} = Gather <axis = -2> (padded, source_{t})
"""
_TERM = """
    rows_{t} = Reshape({source}, row_shape)
    coefficient_{t} = Add(base_{t}, delta_{t})
    term_{t} = Mul(rows_{t}, coefficient_{t})
"""
_ADD = """
    sum_{t} = Add({previous}, term_{t})
"""
_TAIL = """
    output_float = Reshape({last}, hidden_shape)
    {output} = CastLike(output_float, {hidden})
}}
"""


def function_proto(kernel_size: int, opset: int) -> onnx.FunctionProto:
    """Write the op as an ONNX function of standard ops.

    Inputs hidden [..., L, H], delta [..., L, K, G] and base [K, H], float32, float16 or bfloat16;
    all axes but K may be symbolic; rank 2 or more. Computes what
    `dflash_deploy.plugins.grouped_dynamic_conv` defines, in float32.

    Args:
        kernel_size: number of taps K.
        opset: version of the default ONNX domain to use, that of the model.

    Raises:
        OpError: `kernel_size` is below 1 or `opset` is below `MIN_OPSET`.
    """
    if kernel_size < 1:
        raise field_error(OpError, "kernel_size", kernel_size, ">= 1", "give the draft's taps")
    if opset < MIN_OPSET:
        raise field_error(OpError, "opset", opset, f">= {MIN_OPSET}", "export with a newer ONNX opset")
    hidden, delta, base = INPUT_NAMES
    taps = range(kernel_size)
    names = {
        "domain": DOMAIN,
        "op_type": OP_TYPE,
        "opset": opset,
        "taps": kernel_size,
        BLOCK_SIZE: BLOCK_SIZE,
        GROUP_SIZE: GROUP_SIZE,
        "hidden": hidden,
        "delta": delta,
        "base": base,
        "output": OUTPUT_NAME,
        "delta_taps": ", ".join(f"delta_{t}" for t in taps),
        "base_taps": ", ".join(f"base_{t}" for t in taps),
    }
    text = _HEAD.format(**names)
    if kernel_size > 1:
        text += _ROWS.format(**names)
    total = "term_0"
    for t in taps:
        if t:
            text += _SHIFT.format(t=t)
        text += _TERM.format(t=t, source=f"earlier_{t}" if t else "hidden_float")
        if t:
            text += _ADD.format(t=t, previous=total)
            total = f"sum_{t}"
    text += _TAIL.format(last=total, **names)
    return parser.parse_function(text)


def add_function(model: ir.Model, kernel_size: int, opset: int) -> None:
    """Give `model` the body of the op, so that engines that do not know it run it.

    Adds the function and the imports of its domains to the model, in place; adding the same one
    again changes nothing.

    Args:
        model: holds nodes ``dflash::GroupedDynamicConv`` of `kernel_size` taps.
        kernel_size: number of taps K of all of these nodes.
        opset: version of the default ONNX domain, that of the model.

    Raises:
        OpError: `kernel_size` or `opset` is out of range, differs from what the model imports, or
            the model already holds the function for another number of taps.
    """
    function = ir.serde.deserialize_function(function_proto(kernel_size, opset))
    imported = model.opset_imports.setdefault("", opset)
    if imported != opset:
        raise field_error(OpError, "opset", opset, f"{imported}, the model's", "pass the opset of the model")
    known = model.functions.get(function.identifier())
    if known is not None and ir.to_proto(known) != ir.to_proto(function):
        raise field_error(
            OpError,
            "kernel_size",
            kernel_size,
            "that of the function the model already holds",
            "use one kernel size per model",
        )
    model.functions[function.identifier()] = function
    model.opset_imports[DOMAIN] = OPSET_VERSION
