"""NumPy's types for the element types of graphs."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..bundle.tensors import DType

NUMPY: dict[DType, np.dtype[Any]] = {
    DType.FLOAT32: np.dtype(np.float32),
    DType.FLOAT16: np.dtype(np.float16),
    DType.BFLOAT16: np.dtype(np.uint16),  # the bits; NumPy has no bfloat16
    DType.INT64: np.dtype(np.int64),
}
