"""Layers that repeat are traced once: in the trace of the whole model each is one node, a call.

Tracing costs a second or two a layer, and the layers of a model differ in little but their weights. So a
model's forward says `Layered.call` instead of calling a layer; `trace.graph_from_module` traces each kind of
layer by itself and puts its nodes in the place of every call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.onnx.ops import symbolic_multi_out

from ...bundle.tensors import Axis

DOMAIN = "dflash.layers"  # of the calls; no node of it is left in a graph


@dataclass(frozen=True)
class InputInfo:
    """Dtype and axes of what a module takes. Of a flat one, a call passes the first two axes as one."""

    dtype: torch.dtype
    axes: tuple[Axis, ...]
    flat: bool = False


@dataclass(frozen=True)
class LayerFunction:
    """A kind of layer: what differs between two layers of a kind is their weights.

    Attributes:
        make: makes a layer of the kind.
        inputs: what the layer's forward takes. Every axis of a flat one is in another one, too.
    """

    make: Callable[[], nn.Module]
    inputs: tuple[InputInfo, ...]


class Layered(nn.Module):
    """A module whose forward calls layers."""

    functions: Mapping[str, LayerFunction]

    def call(
        self,
        kind: str,
        layer: nn.Module,
        inputs: Sequence[Tensor],
        like: Sequence[Tensor],
    ) -> Sequence[Tensor]:
        """Call a layer.

        Args:
            kind: which of `functions` it is.
            layer: whose weights are meant.
            inputs: see `LayerFunction`.
            like: tensors of the outputs' dtypes and shapes.

        Returns:
            The layer's outputs.
        """
        return symbolic_multi_out(
            f"{DOMAIN}::{kind}",
            (*inputs, *layer.parameters()),
            dtypes=[x.dtype for x in like],
            shapes=[x.shape for x in like],
            version=1,
        )


class LayerAlone(nn.Module):
    """A layer to be traced by itself.

    The tracer cannot be told that an axis is the product of two others. So a flat input comes in with its
    axes apart, and is flattened here by a Reshape, which `layer_function` takes out again.
    """

    def __init__(self, function: LayerFunction) -> None:
        """Make the layer."""
        super().__init__()
        self.layer, self.inputs = function.make(), function.inputs

    def forward(self, inputs: list[Tensor]) -> tuple[Tensor, ...]:
        """Run the layer."""
        outputs: tuple[Tensor, ...] = self.layer(
            *(
                x.reshape(-1, x.shape[-1]) if info.flat else x
                for x, info in zip(inputs, self.inputs, strict=True)
            )
        )
        return outputs
