"""Layers that repeat are traced once, and the trace of a whole model does not get longer by them.

Tracing costs a second or two a layer, and for a deep model it costs more than that to have caches and
parameters of every layer among the inputs of a trace. The layers of a model differ in little but these. So
a model's forward says `Layered.run_layers`: in the trace of the model all its layers are one node, which
takes what they share. `trace.graph_from_module` makes a call for each layer of it, which takes the layer's
own caches and parameters too, traces each kind of layer by itself, and puts the kind's nodes in the place
of every call.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
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
        make: makes a layer of the kind. Its forward takes `inputs` and gives its first one and the caches,
            updated.
        inputs: what goes through all layers, the layer's caches, and what layers share. Every axis of a flat
            one is in another one, too.
    """

    make: Callable[[], nn.Module]
    inputs: tuple[InputInfo, ...]


@dataclass(frozen=True)
class LayerCall:
    """A layer that a forward wants to be run.

    Attributes:
        kind: which of `Layered.functions` it is.
        shared: the last of its inputs.
    """

    kind: str
    shared: Sequence[Tensor]


@dataclass(frozen=True)
class Step:
    """A layer of the one node.

    Attributes:
        kind: which of `Layered.functions` it is.
        shared: which inputs of the node it takes.
        output: which output of the node is what the layer gives, if it is one.
    """

    kind: str
    shared: tuple[int, ...]
    output: int | None


class Layered(nn.Module):
    """A module whose forward runs layers.

    Attributes:
        functions: the kinds of layers.
        layers: the layers themselves, for their parameters.
        steps: the layers that forward ran last.
    """

    functions: Mapping[str, LayerFunction]
    layers: nn.ModuleList
    steps: tuple[Step, ...]

    def run_layers(self, x: Tensor, calls: Sequence[LayerCall], wanted: Collection[int]) -> dict[int, Tensor]:
        """Run layers one after another, each with its own caches and parameters.

        Args:
            x: what the first one begins with.
            calls: the layers.
            wanted: which of them; each one more makes tracing longer.

        Returns:
            What the wanted layers give, of the shape of `x`.
        """
        inputs, steps = [x], []
        places: dict[int, int] = {}
        outputs = {layer: place for place, layer in enumerate(sorted(wanted))}
        for layer, call in enumerate(calls):
            for tensor in call.shared:
                if id(tensor) not in places:
                    places[id(tensor)] = len(inputs)
                    inputs.append(tensor)
            shared = tuple(places[id(tensor)] for tensor in call.shared)
            steps.append(Step(call.kind, shared, outputs.get(layer)))
        self.steps = tuple(steps)
        count = len(outputs)
        given = symbolic_multi_out(
            f"{DOMAIN}::Layers", inputs, dtypes=[x.dtype] * count, shapes=[x.shape] * count, version=1
        )
        return dict(zip(outputs, given, strict=True))


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
