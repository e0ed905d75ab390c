"""Reference, cases and tolerances that every form of the op is held to.

The reference is written from the definition alone, one output row at a time, and shares no code
with the package.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import ml_dtypes
import numpy as np

NUMPY_DTYPES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}

EXACT = 0  # the float32 steps of `reference`, rounded once to the nearest: not a bit differs
CUT = "cut"  # the same steps, but the one rounding cuts off: within one unit in the last place

# What a result may differ by from `reference`: nothing, a cut, or so many units in the last place of the
# dtype, relative to the sum of the magnitudes of its terms.
TOLERANCES = {
    # The same float32 steps in the same order, then one rounding.
    "torch": {"float32": EXACT, "float16": EXACT, "bfloat16": EXACT},
    "onnx": {"float32": EXACT, "float16": EXACT, "bfloat16": EXACT},
    # Triton's interpreter cuts bfloat16 off where a GPU rounds to the nearest.
    "triton": {"float32": EXACT, "float16": EXACT, "bfloat16": CUT},
    # (base + delta) * x in the same order, but rounded after each step in half precision.
    "speculators": {"float32": 0, "float16": 6, "bfloat16": 6},
    # base * x + delta * x: another order, so one more rounding per tap, in the inputs' dtype.
    "z-lab": {"float32": 6, "float16": 6, "bfloat16": 6},
}


@dataclass(frozen=True)
class Case:
    """Sizes of one comparison."""

    block_size: int
    kernel_size: int
    channels: int
    group_size: int
    batch: int
    rows: int
    dtype: str
    seed: int

    @property
    def groups(self) -> int:
        return self.channels // self.group_size

    def draw(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Draw hidden [B, L, H], delta [B, L, K, G] and base [K, H]."""
        rng = np.random.default_rng(self.seed)
        leading = (self.batch, self.rows)
        shapes = (
            (*leading, self.channels),
            (*leading, self.kernel_size, self.groups),
            (self.kernel_size, self.channels),
        )
        dtype = NUMPY_DTYPES[self.dtype]
        hidden, delta, base = (rng.standard_normal(shape).astype(dtype) for shape in shapes)
        return hidden, delta, base


def cases(dtypes: tuple[str, ...] = tuple(NUMPY_DTYPES)) -> Iterator[Case]:
    """All block and kernel sizes that fit, with one group, one channel per group, and four."""
    grid = itertools.product((1, 2, 5, 8, 16), (1, 2, 4), ((12, (12, 1, 4)), (7, (7, 1))), (1, 3), dtypes)
    for seed, (block, kernel, (channels, group_sizes), batch, dtype) in enumerate(grid):
        if kernel > block:
            continue
        row_counts = (1, 3, block, block + 1, 2 * block + 3)
        for group_size in group_sizes:
            rows = row_counts[(seed + group_size) % len(row_counts)]
            yield Case(block, kernel, channels, group_size, batch, rows, dtype, seed)


def reference(hidden: np.ndarray, delta: np.ndarray, base: np.ndarray, block_size: int) -> np.ndarray:
    """Compute the op in float32 steps (unrounded result), rows counted along axis -2."""
    x, d, b = (a.astype(np.float32) for a in (hidden, delta, base))
    width = x.shape[-1] // d.shape[-1]
    y = np.zeros_like(x)
    for i in range(x.shape[-2]):
        for tap in range(min(b.shape[0], i % block_size + 1)):
            coefficient = b[tap] + np.repeat(d[..., i, tap, :], width, axis=-1)
            y[..., i, :] += coefficient * x[..., i - tap, :]
    return y


def assert_close(form: str, case: Case, got: np.ndarray, inputs: tuple[np.ndarray, ...]) -> None:
    """Compare `got` with the reference of `inputs` within the tolerance of `form`."""
    assert got.dtype == NUMPY_DTYPES[case.dtype], (form, case)
    assert got.shape == inputs[0].shape, (form, case)
    exact = reference(*inputs, case.block_size)
    rounded = exact.astype(got.dtype)
    steps = TOLERANCES[form][case.dtype]
    if steps == CUT:
        unit = np.spacing(np.abs(rounded)).astype(np.float32)
        assert (np.abs(got.astype(np.float32) - exact) < unit).all(), (form, case)
        return
    if steps == EXACT:
        assert np.array_equal(got.astype(np.float32), rounded.astype(np.float32)), (form, case)
        return
    magnitude = reference(*(np.abs(a) for a in inputs), case.block_size)
    bound = steps * float(ml_dtypes.finfo(got.dtype).eps) * magnitude
    assert (np.abs(got.astype(np.float32) - exact) <= bound).all(), (form, case)


def assert_isolated(
    run: Callable[[np.ndarray, np.ndarray, np.ndarray, Case], np.ndarray], case: Case, bad: float
) -> None:
    """Put `bad` into each row of the first sequence in turn; only later rows of its block may change."""
    inputs = case.draw()
    clean = run(*inputs, case)
    for j in range(case.rows):
        hidden = inputs[0].copy()
        hidden[0, j] = bad
        got = run(hidden, *inputs[1:], case)
        reached = np.zeros((case.batch, case.rows), bool)
        end = min(j // case.block_size * case.block_size + case.block_size, j + case.kernel_size, case.rows)
        reached[0, j:end] = True
        assert np.array_equal(got[~reached], clean[~reached]), (j, case)
        assert not np.isfinite(got[0, j].astype(np.float32)).any(), (j, case)


ISOLATION_CASES = (
    Case(5, 4, 12, 4, 2, 13, "float32", 1),
    Case(8, 2, 7, 1, 2, 17, "float16", 2),
    Case(1, 1, 12, 12, 2, 3, "bfloat16", 3),
)
