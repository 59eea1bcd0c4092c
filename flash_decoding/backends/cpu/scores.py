"""What happens to a score between the dot product and the softmax, and to the softmax: every score option is here.

    s = log2(e) * (softcap * tanh(scale * (q . k) / softcap) - slope * |own position - key|)

Scores are kept in base 2, so that the softmax is made of exp2 alone. A sink enters the denominator when a row is
finished, once: it has no value and belongs to no split.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from flash_decoding.backends.cpu.simd import (
    FLOAT32,
    LANES,
    absolute,
    add,
    copy_sign,
    div,
    exp2,
    fma,
    inner,
    lanes_max,
    load,
    load_float,
    mul,
    splat,
    store,
    sub,
    where_less,
)

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)
NO_SCORE = np.float32(-np.inf)

# (tanh(x) - x) / x**3 on |x| < 0.625 in powers of x**2, highest first (Cephes, tanhf: relative error of tanh 1e-7).
_TANH = (-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1)
_TANH_SMALL = 0.625


class ScoreOptions(NamedTuple):
    """The options of one call as plain numbers; 0 where an option is off."""

    factor: float  # makes a dot product a base 2 score or, with a soft cap, the argument of tanh
    softcap: float  # in base 2
    slopes: int  # address of [heads_q] float32
    sinks: int  # address of [heads_q] float32


def make_options(scale: float, softcap: float | None, slopes: int, sinks: int) -> ScoreOptions:
    """Options from the natural scale and cap."""
    if softcap is None:
        return ScoreOptions(scale * LOG2_E, 0.0, slopes, sinks)
    # Beyond these a float32 cannot tell the cap from none or from zero, and its inverse might overflow.
    softcap = min(max(softcap, 1e-30), 1e30)
    return ScoreOptions(scale / softcap, softcap * LOG2_E, slopes, sinks)


@inner
def transform_scores(dots, options):
    """A vector of dot products to a vector of base 2 scores, all but what depends on the query row."""
    s = scaled(dots, options.factor)
    if options.softcap != 0.0:
        s = scaled(tanh(s), options.softcap)
    return s


@inner
def add_bias(options, head, own, tile, s):
    """ALiBi of one query row for the keys of a tile; own is the row's position, counted from tile.begin like tile.n."""
    slope = np.float64(load_float(options.slopes + 4 * head)) * LOG2_E
    here = splat(np.float32(own))
    for i in range(0, tile.size, LANES):
        distance = absolute(sub(load(tile.n + 4 * i, FLOAT32), here))
        store(s + 4 * i, sub(load(s + 4 * i, FLOAT32), scaled(distance, slope)), FLOAT32)


@inner
def scaled(x, factor):
    """x times a float64."""
    # One float32 factor would be wrong by up to 6e-8 of every score, in the same direction: what it lacks is added.
    rounded = np.float32(factor)
    missing = np.float32(factor - rounded)
    return fma(x, splat(rounded), mul(x, splat(missing)))


@inner
def tanh(x):
    """tanh(x) to some units in the last place; no intermediate result can overflow where it counts."""
    size = absolute(x)
    e = exp2(mul(size, splat(np.float32(-2.0 * LOG2_E))))
    one = splat(np.float32(1.0))
    large = copy_sign(sub(one, div(add(e, e), add(one, e))), x)
    square = mul(x, x)
    power = splat(np.float32(_TANH[0]))
    for i in range(1, len(_TANH)):
        power = fma(power, square, splat(np.float32(_TANH[i])))
    small = fma(mul(power, square), x, x)
    return where_less(size, splat(np.float32(_TANH_SMALL)), small, large)


@inner
def finite_base(m):
    """What to subtract from the scores: the maximum, or 0 where no score is above -inf, for -inf - -inf is NaN."""
    return np.float32(0.0) if m == NO_SCORE else m


@inner
def weight(s, m):
    """exp2(s - m) of two scalars; 0 for s = -inf."""
    return lanes_max(exp2(splat(s - finite_base(m))))


@inner
def divisor(options, head, m, l):
    """What to divide acc by: l and the weight of the head's sink; a row without keys keeps its zeros."""
    if l == 0.0:
        return np.float32(1.0)
    if options.sinks != 0:
        l += 2.0 ** (load_float(options.sinks + 4 * head) * LOG2_E - m)
    return np.float32(l)


@inner
def natural_lse(m, l):
    """ln(l * 2**m), l in float64, rounded once; -inf where no key was seen."""
    return NO_SCORE if l == 0.0 else np.float32(m * LN_2 + math.log(l))
