"""Remove what depends on the machine or the session: source lines, stack traces, doc strings."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import ClearMetadataAndDocStringPass

from ... import __version__


def strip_metadata(model: ir.Model) -> None:
    """Clear metadata and doc strings of the model and of all in it; set the producer."""
    ClearMetadataAndDocStringPass()(model)
    model.producer_name = "dflash-deploy"
    model.producer_version = __version__
    model.doc_string = None
    model.graph.name = "main"
