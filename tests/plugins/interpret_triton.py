"""Run the Triton kernel on the CPU for the tests: ``TRITON_INTERPRET=1 python interpret_triton.py IN OUT``.

IN is a pickled list of (hidden, delta, base, block_size, group_size, whole) NumPy inputs, bfloat16
as its bits; `whole` asks for one program over everything instead of the kernel's own tiles. OUT
receives the list of results.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import numpy as np
import torch

from dflash_deploy.plugins.triton_kernel import Tile
from dflash_deploy.plugins.triton_launch import grouped_dynamic_conv_triton


def tensor(array: np.ndarray) -> torch.Tensor:
    x = torch.from_numpy(array)
    return x.view(torch.bfloat16) if array.dtype == np.int16 else x


def array(x: torch.Tensor) -> np.ndarray:
    return x.view(torch.int16).numpy() if x.dtype == torch.bfloat16 else x.numpy()


def power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


def main() -> None:
    results = []
    for *inputs, block_size, group_size, whole in pickle.loads(Path(sys.argv[1]).read_bytes()):
        hidden, delta, base = map(tensor, inputs)
        rows = hidden.numel() // hidden.shape[-1]
        tile = Tile(power_of_two(rows), power_of_two(delta.shape[-1]), power_of_two(group_size))
        guarded = torch.full((hidden.numel() + 32,), 777.0).to(hidden.dtype)
        out = guarded[16:-16].view(hidden.shape)
        out.fill_(float("nan"))
        grouped_dynamic_conv_triton(
            hidden,
            delta,
            base,
            block_size=block_size,
            group_size=group_size,
            out=out,
            tile=tile if whole else None,
        )
        assert (guarded[:16] == guarded[0]).all()
        assert (guarded[-16:] == guarded[0]).all()
        results.append(array(out.clone()))
    Path(sys.argv[2]).write_bytes(pickle.dumps(results))


if __name__ == "__main__":
    main()
