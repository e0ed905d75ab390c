"""Settings that every ONNX Runtime session over a bundle's graphs needs, whoever opens it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SPIN_US = 50
"""How long an idle thread of a pass looks for work before it sleeps. Long enough for the gaps between two
operators; onnxruntime's own, longer time makes a pass several times slower where other processes use the
cores, and keeps the draft's threads busy while the target computes."""

EXACT_PRODUCTS = ("session.x64quantprecision", "1")
"""Int8 products whose sums are right. On x86 processors without VNNI instructions ONNX Runtime by default
adds neighbouring products of unsigned and signed bytes in 16 bits, and cuts off what does not fit. With this
it makes the weights unsigned there when a session is opened; on other processors nothing changes."""

WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path"
"""Where a graph that is given as bytes has its weights."""


def session_options(ort: Any, threads: int | None = None, weights: Path | None = None) -> Any:
    """Options of a session.

    Args:
        ort: the onnxruntime module.
        threads: of a pass; None leaves that to ONNX Runtime.
        weights: folder of the weights, for a graph given as bytes.

    Returns:
        An `onnxruntime.SessionOptions`.
    """
    options = ort.SessionOptions()
    options.inter_op_num_threads = 1
    options.log_severity_level = 4  # its errors are raised; it need not print them too
    options.add_session_config_entry(*EXACT_PRODUCTS)
    options.add_session_config_entry("session.intra_op.spin_duration_us", str(SPIN_US))
    if threads is not None:
        options.intra_op_num_threads = threads
    if weights is not None:
        options.add_session_config_entry(WEIGHTS_FOLDER, str(weights))
    return options
