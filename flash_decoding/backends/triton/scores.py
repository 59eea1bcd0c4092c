"""What happens to a raw score between q k^T and the softmax."""

import math

import triton
import triton.language as tl

LOG2_E = tl.constexpr(math.log2(math.e))


@triton.jit
def transform_scores(s, scale):
    """Scale in float32, after the product, and change to base 2."""
    return s * (scale * LOG2_E)
