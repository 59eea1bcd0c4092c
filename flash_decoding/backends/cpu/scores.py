"""What happens to a score between the dot product and the softmax: one place for every score option.

Scores leave here in base 2, s = scale * log2(e) * (q . k), so that the softmax is made of exp2 alone.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from flash_decoding.backends.cpu.simd import exp2, fma, inner, lanes_max, mul, splat

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)
NO_SCORE = np.float32(-np.inf)


class ScoreOptions(NamedTuple):
    """The options of one call; each field is a plain number."""

    factor: float  # scale * log2(e) to float64 precision


@inner
def transform_scores(dots, options):
    """A vector of dot products to a vector of base 2 scores."""
    # One float32 factor would be wrong by up to 6e-8 of every score, in the same direction: what it lacks is added.
    factor = np.float32(options.factor)
    missing = np.float32(options.factor - factor)
    return fma(dots, splat(factor), mul(dots, splat(missing)))


@inner
def finite_base(m):
    """What to subtract from the scores: the maximum, or 0 where no score is above -inf, for -inf - -inf is NaN."""
    return np.float32(0.0) if m == NO_SCORE else m


@inner
def weight(s, m):
    """exp2(s - m) of two scalars; 0 for s = -inf."""
    return lanes_max(exp2(splat(s - finite_base(m))))


@inner
def natural_lse(m, l):
    """ln(l * 2**m), l in float64, rounded once; -inf where no key was seen."""
    return NO_SCORE if l == 0.0 else np.float32(m * LN_2 + math.log(l))
