"""Whether ONNX Runtime adds int8 products right on this processor, found out by adding some.

Where a processor has no VNNI instructions, ONNX Runtime by default adds neighbouring products of unsigned and
signed bytes in 16 bits, and cuts off what does not fit. A setting has it make the weights unsigned when a
session is opened, which is exact, and slower where the default is exact as well.
"""

from __future__ import annotations

import threading
from typing import Any

KEY = "session.x64quantprecision"
AS_IT_IS, UNSIGNED = "0", "1"
"""What the key may say: weights as they are, or made unsigned where the library takes that to be needed."""

CHANNELS, OUTPUTS, ZERO, WEIGHT = 64, 32, 128, 127
# MatMulIntegerToFloat of rows [R, CHANNELS], zero point ZERO, and weights [CHANNELS, OUTPUTS], all WEIGHT;
# scales are 1; opset 21, IR 10. The largest sums there are.
_PRODUCT = bytes.fromhex(
    "080a3ac7120a4d0a04726f77730a067765696768740a04737465700a067363616c65730a047a65726f120473756d7322"
    "144d61744d756c496e7465676572546f466c6f61743a0d636f6d2e6d6963726f736f66741201702a9110084008201003"
    "42067765696768744a8010"
    + "7f" * (CHANNELS * OUTPUTS)
    + "2a0e10014204737465704a040000803f2a8f010820100142067363616c65734a8001"
    + "0000803f" * OUTPUTS
    + "2a0b100242047a65726f4a01805a170a04726f7773120f0a0d080212090a031201520a02084062170a0473756d73120f"
    "0a0d080112090a031201520a02082042040a00101542110a0d636f6d2e6d6963726f736f66741001"
)
_MOST_ROWS = 5

_known: dict[str, str | None] = {}
_finding = threading.Lock()


def exact_setting(ort: Any) -> str | None:
    """Find out, once in a process, what `KEY` has to say for int8 sums to be exact on this processor.

    Args:
        ort: the onnxruntime module.

    Returns:
        `AS_IT_IS` if that is exact, else `UNSIGNED` if that is, else None.
    """
    version = str(ort.__version__)
    with _finding:
        if version not in _known:
            _known[version] = next((s for s in (AS_IT_IS, UNSIGNED) if adds_right(ort, s)), None)
        return _known[version]


def adds_right(ort: Any, setting: str) -> bool:
    """Add the largest products for 1 to 5 rows, zeros of the activations and their largest value."""
    import numpy as np  # it comes with onnxruntime, and whoever reads a manifest alone needs neither

    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.add_session_config_entry(KEY, setting)
    try:
        session = ort.InferenceSession(_PRODUCT, options, providers=["CPUExecutionProvider"])
    except Exception:  # a build without this operator; onnxruntime's exceptions have no common base
        return False
    for rows in range(1, _MOST_ROWS + 1):
        for activation in (0, 255):
            given = np.full((rows, CHANNELS), activation, np.uint8)
            (sums,) = session.run(None, {"rows": given})
            if not np.all(sums == float((activation - ZERO) * WEIGHT * CHANNELS)):
                return False
    return True
