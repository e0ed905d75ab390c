"""Where a new bundle's weights go: one file, and graphs that point into it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ...bundle.manifest import WEIGHT_FILE
from ..nodes import constant, stored

SMALL_BYTES = 1024
"""What is not larger stays in the graph."""

_PAGE_BYTES = 4096


class Weights:
    """The new weight file; each name once, whichever graphs use it."""

    def __init__(self, work: Path):
        """Start the file in the directory `work`."""
        self._work = work
        self._file = open(work / WEIGHT_FILE, "wb")  # noqa: SIM115 - closed by __exit__
        self._placed: dict[str, ir.ExternalTensor] = {}

    def __enter__(self) -> Weights:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, name: str, array: NDArray[np.generic]) -> ir.ExternalTensor:
        """Store an array, unless one of this name is there."""
        if name not in self._placed:
            offset = self._file.tell() + -self._file.tell() % _PAGE_BYTES
            self._file.write(b"\0" * (offset - self._file.tell()))
            self._file.write(np.ascontiguousarray(array).data)
            self._placed[name] = ir.ExternalTensor(
                WEIGHT_FILE,
                offset,
                array.nbytes,
                ir.DataType.from_numpy(array.dtype),
                shape=ir.Shape(array.shape),
                name=name,
                base_dir=str(self._work),
            )
        return self._placed[name]

    def take(self, graph: ir.Graph) -> bool:
        """Store the weights that a graph uses, and drop its others; whether any of them is in the file."""
        used = {id(value) for node in graph for value in node.inputs}
        stored = False
        for name, value in list(graph.initializers.items()):
            tensor = value.const_value
            if id(value) not in used:
                del graph.initializers[name]
            elif isinstance(tensor, ir.ExternalTensor):
                if tensor.location != WEIGHT_FILE or tensor.base_dir != str(self._work):
                    value.const_value = self.add(name, tensor.numpy())
                stored = True
            elif tensor is not None and tensor.nbytes > SMALL_BYTES:
                value.const_value = self.add(name, tensor.numpy())
                stored = True
        return stored

    def placer(self, graph: ir.Graph) -> Placer:
        """Stores arrays for a graph."""
        return Placer(self, graph)


class Placer:
    """Values of a graph for stored arrays; small ones stay in the graph."""

    def __init__(self, weights: Weights, graph: ir.Graph):
        self._weights = weights
        self._graph = graph

    def __call__(self, name: str, array: NDArray[np.generic]) -> ir.Value:
        """Store an array under a name, once, and give the graph's value for it."""
        if array.nbytes <= SMALL_BYTES or name in self._graph.initializers:
            return constant(self._graph, name, array)
        return stored(self._graph, name, self._weights.add(name, array))
