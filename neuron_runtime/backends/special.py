"""Error functions for arrays, computed in float64.

For z >= 0, erfc(z) = t exp(-z^2 + f(t)) with t = 2 / (z + 2); f is a smooth function on (0, 1],
here a Chebyshev series in 2t - 1 fitted to log(erfcx(z) / t) (relative error below 1e-12).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.polynomial import chebyshev

from neuron_runtime.compiler.ir import Array

_SERIES = np.array(
    [
        -0.6513268598908547,
        0.64196979235649,
        0.019476473204185628,
        -0.009561514786808653,
        -0.0009465953444820525,
        0.00036683949785289676,
        4.25233248068948e-05,
        -2.0278578112572145e-05,
        -1.6242900045820692e-06,
        1.303655835604901e-06,
        1.56264418190851e-08,
        -8.523809588704935e-08,
        6.529054326696316e-09,
        5.059343450059015e-09,
        -9.913641643577693e-10,
        -2.273650958896578e-10,
        9.646789763549422e-11,
        2.3940643270153913e-12,
        -6.8859727175130654e-12,
        8.94601137201651e-13,
        3.1308124384728937e-13,
        -1.1262254959044556e-13,
        3.9409394692748384e-16,
        7.226535147822522e-15,
        -1.5792830618031934e-15,
    ]
)
_SMALL = 0.5  # below it erf is computed from its own series, which keeps the relative precision


def _erfc_positive(z: Array) -> Array:
    t = 2.0 / (z + 2.0)
    result: Array = t * np.exp(-z * z + chebyshev.chebval(2.0 * t - 1.0, _SERIES))
    return result


def _erf_small(x: Array) -> Array:
    """Maclaurin series 2/sqrt(pi) sum (-1)^n x^(2n+1) / (n! (2n+1))."""
    square = x * x
    total: Array = np.zeros_like(x)
    for n in range(14, -1, -1):
        total = total * square + (-1.0) ** n / (math.factorial(n) * (2 * n + 1))
    result: Array = 2.0 / math.sqrt(math.pi) * x * total
    return result


def erfc(x: Array) -> Array:
    """Complementary error function, float64."""
    wide: Array = np.asarray(x, np.float64)
    size = np.abs(wide)
    tail = _erfc_positive(np.minimum(size, 40.0))
    result: Array = np.where(wide < 0, 2.0 - tail, tail)
    return np.where(np.isnan(wide), wide, result)


def erf(x: Array) -> Array:
    """Error function, float64."""
    wide: Array = np.asarray(x, np.float64)
    size = np.abs(wide)
    large = np.copysign(1.0 - _erfc_positive(np.minimum(size, 40.0)), wide)
    small = _erf_small(np.clip(wide, -_SMALL, _SMALL))
    result: Array = np.where(size < _SMALL, small, large)
    return np.where(np.isnan(wide), wide, result)


def erf_inv(y: Array) -> Array:
    """Inverse of erf on (-1, 1): Winitzki's estimate refined by Halley steps; float64."""
    wide: Array = np.asarray(y, np.float64)
    inside = np.clip(wide, -1 + 1e-16, 1 - 1e-16)
    log = np.log1p(-inside * inside)
    a = 0.147
    first = 2 / (math.pi * a) + log / 2
    x: Array = np.copysign(np.sqrt(np.sqrt(first * first - log / a) - first), inside)
    for _ in range(3):
        # Far from 0 the complement keeps the precision that erf(x) - y would lose.
        error = np.where(
            np.abs(inside) < 0.5,
            erf(x) - inside,
            np.copysign((1.0 - np.abs(inside)) - _erfc_positive(np.abs(x)), inside),
        )
        step = error / (2.0 / math.sqrt(math.pi) * np.exp(-x * x))
        x = x - step / (1.0 + x * step)
    edge: Any = np.where(np.abs(wide) > 1, np.nan, np.copysign(np.inf, wide))
    return np.where(np.abs(wide) < 1, x, edge)
