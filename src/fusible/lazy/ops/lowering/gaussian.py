"""The complementary error function, from which the normal distribution's cumulative one follows: StableHLO has neither."""

from __future__ import annotations

from fusible.lazy import dtypes
from fusible.lazy.ops.lowering.expression import Expression, where

__all__ = ["erfc"]

_SINGLE = (0.16, (
    -0.5631567884439692, 0.5746099146752807, 0.016716265973902765, -0.030146480691590233, -0.0012331609412121738, 0.003870699534396531,
    -0.0002566029381957674, -0.0005728473206665167, 0.000132511746153413, 6.0509105016843684e-05, -2.401771894065779e-05,
))  # fmt: skip
_DOUBLE = (0.06, (
    -0.6312753051775137, 0.6371413976487628, 0.03420257637396789, -0.040649467955096524, -0.005580815015299701, 0.0068107176459089366,
    0.0005317925633542691, -0.0015121401907919234, 0.00011985836588908207, 0.0003360993032331552, -0.00010246470201187788,
    -5.8894020392854196e-05, 4.115442057916591e-05, 3.298060352523671e-06, -1.1286090544388022e-05, 2.6744862312947256e-06,
    1.8966191878014836e-06, -1.272286923947907e-06, -7.3940491915082605e-09, 2.9508689662634036e-07, -1.0360659799302558e-07,
    -2.9330144062424765e-08, 3.099180917621406e-08, -2.667057393866219e-09, -4.122225418941696e-09, 8.146236403433867e-10, 1.778526761702144e-10,
))  # fmt: skip
"""For float32 and float64: the smallest ``t`` of the fit, below which the result underflows, and the coefficients of ``g``: see ``erfc``."""


def erfc(x: Expression) -> Expression:
    """``1 - erf(x)`` of a float32 or float64 tensor, with an absolute error of about 3 epsilons and no cancellation for large ``x``.

    For ``x >= 0``, ``erfc(x) = t * exp(-x**2 + g(u))`` with ``t = 1 / (1 + x / 2)``. ``g`` is smooth: a polynomial interpolates it at Chebyshev
    points of ``t`` from its smallest value to 1, which ``u`` maps to [-1, 1]. For ``x < 0``, ``erfc(x) = 2 - erfc(-x)``.
    """
    x = x.because("compute the complementary error function")
    low, coefficients = _DOUBLE if x.tensor.dtype is dtypes.float64 else _SINGLE
    t = 1 / (abs(x) * 0.5 + 1)
    u = (t - (1 + low) / 2) * (2 / (1 - low))
    g = x.literal(coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        g = g * u + coefficient
    tail = t * (g - x * x).exp()
    return where(x < 0, 2 - tail, tail)
