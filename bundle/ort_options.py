"""Settings that every ONNX Runtime session over a bundle's graphs needs, whoever opens it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from . import ort_exact

SPIN_US = 50
"""How long an idle thread of a pass looks for work before it sleeps. Long enough for the gaps between two
operators; onnxruntime's own, longer time makes a pass several times slower where other processes use the
cores, and keeps the draft's threads busy while the target computes."""

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
    options.add_session_config_entry(ort_exact.KEY, ort_exact.exact_setting(ort) or ort_exact.UNSIGNED)
    options.add_session_config_entry("session.intra_op.spin_duration_us", str(SPIN_US))
    if threads is not None:
        options.intra_op_num_threads = threads
    if weights is not None:
        options.add_session_config_entry(WEIGHTS_FOLDER, str(weights))
    return options
