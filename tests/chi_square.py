"""Pearson's chi-square test, written out: no package for it is among the test requirements."""

from __future__ import annotations

import math
from collections.abc import Sequence

MIN_EXPECTED = 5.0  # the usual bound below which the statistic is not chi-square distributed


def chi_square(counts: Sequence[int], probs: Sequence[float]) -> float:
    """The p-value of counts under a law.

    Outcomes expected fewer than `MIN_EXPECTED` times are put together. One that is impossible and happened
    gives 0.
    """
    total = sum(counts)
    assert abs(sum(probs) - 1.0) < 1e-9
    cells: list[tuple[float, float]] = []
    rest = [0.0, 0.0]
    for count, prob in zip(counts, probs, strict=True):
        if prob == 0.0 and count:
            return 0.0
        if prob * total >= MIN_EXPECTED:
            cells.append((count, prob * total))
        else:
            rest = [rest[0] + count, rest[1] + prob * total]
    if rest[1] >= MIN_EXPECTED or not cells:
        cells.append((rest[0], rest[1]))
    elif rest[1] > 0.0:
        rarest = min(range(len(cells)), key=lambda index: cells[index][1])
        cells[rarest] = (cells[rarest][0] + rest[0], cells[rarest][1] + rest[1])
    if len(cells) == 1:
        return 1.0
    statistic = sum((count - expected) ** 2 / expected for count, expected in cells)
    return upper_gamma((len(cells) - 1) / 2.0, statistic / 2.0)


def upper_gamma(a: float, x: float) -> float:
    """The regularised upper incomplete gamma function Q(a, x); a series, or a continued fraction (Lentz)."""
    if x <= 0.0:
        return 1.0
    scale = math.exp(a * math.log(x) - x - math.lgamma(a))
    if x < a + 1.0:
        term = total = 1.0 / a
        n = a
        while abs(term) > abs(total) * 1e-16:
            n += 1.0
            term *= x / n
            total += term
        return max(0.0, 1.0 - scale * total)
    b = x + 1.0 - a
    c, d = 1e300, 1.0 / b
    fraction = d
    for i in range(1, 100_000):
        an = -i * (i - a)
        b += 2.0
        d = 1.0 / (an * d + b)
        c = b + an / c
        fraction *= c * d
        if abs(c * d - 1.0) < 1e-15:
            break
    return scale * fraction
