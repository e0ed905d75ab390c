"""Listening to an original while it computes: outputs of its modules, and its convolutions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from .originals import ConvCall, to_numpy


@contextlib.contextmanager
def outputs_of(modules: Mapping[str, nn.Module]) -> Iterator[dict[str, torch.Tensor]]:
    """Collect the last output of each module under its name."""
    found: dict[str, torch.Tensor] = {}

    def listen(name: str) -> Any:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            found[name] = output[0] if isinstance(output, tuple) else output

        return hook

    handles = [module.register_forward_hook(listen(name)) for name, module in modules.items()]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def convolutions_of(layers: nn.ModuleList) -> Iterator[list[ConvCall]]:
    """Collect the convolutions of layers with ``attention_conv`` and ``mlp_conv``; batch 1.

    Both packages give a conv the methods ``prepare(hidden) -> (output, delta of finish)`` and
    ``finish(hidden, delta)``, which are called without the module's forward: they are wrapped instead.
    """
    calls: list[ConvCall] = []
    convs = [getattr(layer, name, None) for layer in layers for name in ("attention_conv", "mlp_conv")]
    live: list[Any] = [conv for conv in convs if conv is not None]

    def wrap(conv: Any) -> None:
        prepare, finish = conv.prepare, conv.finish

        def on_prepare(hidden: torch.Tensor) -> Any:
            with outputs_of({"kernels": conv.kernel_projection}) as seen:
                output, delta = prepare(hidden)
            kernels = seen["kernels"].view(*hidden.shape[:-1], 2, conv.kernel_size, -1)
            calls.append(_call(hidden, kernels[..., 0, :, :], conv.base_kernel[0], output))
            return output, delta

        def on_finish(hidden: torch.Tensor, delta: torch.Tensor) -> Any:
            output = finish(hidden, delta)
            calls.append(_call(hidden, delta, conv.base_kernel[1], output))
            return output

        conv.prepare, conv.finish = on_prepare, on_finish

    for conv in live:
        wrap(conv)
    try:
        yield calls
    finally:
        for conv in live:
            del conv.prepare, conv.finish


def _call(hidden: torch.Tensor, delta: torch.Tensor, base: torch.Tensor, output: torch.Tensor) -> ConvCall:
    return ConvCall(to_numpy(hidden[0]), to_numpy(delta[0]), to_numpy(base), to_numpy(output[0]))
