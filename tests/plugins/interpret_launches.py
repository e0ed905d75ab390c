"""Launch the Triton kernel on the CPU with given arguments; TRITON_INTERPRET=1 has to be set.

``python interpret_launches.py IN OUT``: IN is a pickled list of (hidden, delta, base, grid, numbers,
constants), NumPy inputs with bfloat16 as its bits; OUT receives the list of results.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import torch
from interpret_triton import array, tensor

from dflash_deploy.plugins.triton_kernel import grouped_dynamic_conv_kernel


def main() -> None:
    results = []
    for *inputs, grid, numbers, constants in pickle.loads(Path(sys.argv[1]).read_bytes()):
        hidden, delta, base = map(tensor, inputs)
        output = torch.full_like(hidden, float("nan"))
        grouped_dynamic_conv_kernel[(grid,)](hidden, delta, base, *numbers, output, **constants)
        results.append(array(output))
    Path(sys.argv[2]).write_bytes(pickle.dumps(results))


if __name__ == "__main__":
    main()
