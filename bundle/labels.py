"""What the file of a graph says of itself: which graph it is, and what was done to it.

The exporter writes it into the ONNX file's metadata, and the runtime holds it against the manifest when it
loads the file. So a manifest that says something else is refused there, not believed until a pass fails.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .errors import BundleError, field_error
from .manifest import MANIFEST, GraphInfo

NAME = "dflash.graph"
"""Key of the graph's name in its bundle."""

PASSES = "dflash.passes"
"""Key of what was done to the graph, in turn, with commas between."""


def labels(name: str, passes: Sequence[str] = ()) -> dict[str, str]:
    """The metadata of a graph's file.

    Args:
        name: the graph's key in the manifest.
        passes: what was done to it.
    """
    return {NAME: name, PASSES: ",".join(passes)}


def check_labels(info: GraphInfo, found: Mapping[str, str]) -> None:
    """Compare a graph's part of the manifest with the metadata of its file.

    Raises:
        BundleError: they differ, or the file has no such metadata.
    """
    name = found.get(NAME)
    if name is None or PASSES not in found:
        raise BundleError(
            f"{info.file}: its metadata does not say which graph it is ({NAME}, {PASSES}), so an earlier "
            "version or another program made it; export again"
        )
    if name != info.name:
        raise field_error(
            BundleError,
            f"{MANIFEST}: {info.field}.file",
            info.file,
            f"a file with the graph {info.name}, and in this one is {name}",
            "copy the bundle whole or export again",
        )
    done = tuple(filter(None, found[PASSES].split(",")))
    if done != info.passes:
        raise field_error(
            BundleError,
            f"{MANIFEST}: {info.field}.passes",
            list(info.passes),
            f"{list(done)}, what was done to {info.file}",
            "copy the bundle whole or export again",
        )
