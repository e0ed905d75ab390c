"""Graph passes, one per file; each takes an onnx_ir model and changes it in place."""

from .external_weights import external_weights
from .fix_axes import fix_axes
from .inline_functions import inline_functions
from .set_interface import set_interface
from .share_sizes import share_sizes
from .strip_metadata import strip_metadata
from .tidy import tidy

__all__ = [
    "external_weights",
    "fix_axes",
    "inline_functions",
    "set_interface",
    "share_sizes",
    "strip_metadata",
    "tidy",
]
