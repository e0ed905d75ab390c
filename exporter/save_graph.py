"""`graph_to_file`: the one place where a bundle's graphs are written, each labelled with what it is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx_ir as ir

from ..bundle.labels import labels
from ..bundle.manifest import graph_file


def graph_to_file(model: ir.Model, directory: Path, name: str, passes: Sequence[str] = ()) -> str:
    """Write a graph into a bundle; weights that it has outside are neither read nor written.

    Args:
        model: the graph; it gets the labels.
        directory: the bundle.
        name: the graph's key in the manifest.
        passes: what was done to it, as the manifest will say.

    Returns:
        The file's name.
    """
    model.metadata_props.update(labels(name, passes))
    file = graph_file(name)
    ir.save(model, directory / file)
    return file
