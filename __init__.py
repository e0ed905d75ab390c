"""DFlash drafts for deployment: export a pair to a bundle, prove it, build engines, run without torch.

The public names are imported on first use, so importing this package costs nothing.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .bundle.errors import DflashError as DflashError
    from .bundle.manifest import Manifest as Manifest
    from .runtime.decoder import Decoder as Decoder

# onnxruntime's own builds for Linux (from 1.29 on) tell their maker about models and machines, which is
# decided when the library is imported. A value that the user set stands.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

__version__ = "0.1.0"

_LAZY = {
    "Decoder": "runtime.decoder",
    "DflashError": "bundle.errors",
    "Manifest": "bundle.manifest",
}

__all__ = ["Decoder", "DflashError", "Manifest", "__version__"]


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
