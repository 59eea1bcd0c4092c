"""What happens to a raw score between q k^T and the softmax, and which query row may see which key."""

import math

import triton
import triton.language as tl

from flash_decoding.backends.triton.tile_io import by_column, by_row

LOG2_E = tl.constexpr(math.log2(math.e))


@triton.jit
def transform_scores(s, scale, softcap, slopes, own, n, TURNED: tl.constexpr):
    """Scale, cap, bias by distance, in float32 after the product; change to base 2. An option that is None is off.

    The scale is a number or has one for each row, by_row().
    """
    if softcap is None and slopes is None:
        s = s * (scale * LOG2_E)
    else:
        s = s * scale
        if softcap is not None:
            s = softcap_scores(s, softcap)
        if slopes is not None:
            distance = tl.abs(by_row(own, TURNED) - by_column(n, TURNED))
            s = s - by_row(slopes, TURNED) * distance.to(tl.float32)
        s = s * LOG2_E
    return s


@triton.jit
def softcap_scores(s, cap):
    """cap * tanh(s / cap): exp2 of a non-positive number cannot overflow; near 0, where it cancels, a series."""
    x = s / cap
    e = tl.exp2(tl.abs(x) * (-2.0 * LOG2_E))
    t = (1.0 - e) / (1.0 + e)
    x2 = x * x
    series = x + x * x2 * (x2 * (x2 * (-17.0 / 315.0) + 2.0 / 15.0) - 1.0 / 3.0)
    return tl.where(tl.abs(x) < 0.1, series, tl.where(x < 0, -t, t)) * cap


@triton.jit
def sees(
    n, own, t, in_row, tree_ptr, tree_step_t, tree_step_n, first_new, window,
    CAUSAL: tl.constexpr, Lq: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """Which query row may see which key; own is each row's position, the new tokens start at first_new."""
    seen = by_row(in_row, TURNED) & by_column(n >= 0, TURNED)
    if tree_ptr is not None:
        new = n - first_new
        is_new = (new >= 0) & (new < Lq)
        at = tree_ptr + by_row(t, TURNED) * tree_step_t + by_column(new, TURNED) * tree_step_n
        mask = by_row(in_row, TURNED) & by_column(is_new, TURNED)
        seen &= by_column(new < 0, TURNED) | (tl.load(at, mask=mask, other=0) != 0)
    elif CAUSAL:
        seen &= by_column(n, TURNED) <= by_row(own, TURNED)
    if window is not None:
        seen &= by_column(n, TURNED) >= by_row(own - window, TURNED)
    return seen
