"""Graph passes, one per file; each takes an onnx_ir model and changes it in place."""

from .external_weights import external_weights
from .set_interface import set_interface
from .strip_metadata import strip_metadata
from .tidy import tidy

__all__ = ["external_weights", "set_interface", "strip_metadata", "tidy"]
