"""What happens to a raw score between q k^T and the softmax, and which query row may see which key."""

import math

import triton
import triton.language as tl

LOG2_E = tl.constexpr(math.log2(math.e))


@triton.jit
def transform_scores(s, scale, softcap, slopes, own, n):
    """Scale, cap, bias by distance, in float32 after the product; change to base 2. An option that is None is off.

    The scale is a number or [M, 1].
    """
    if softcap is None and slopes is None:
        s = s * (scale * LOG2_E)
    else:
        s = s * scale
        if softcap is not None:
            s = softcap_scores(s, softcap)
        if slopes is not None:
            s = s - slopes[:, None] * tl.abs(own[:, None] - n[None, :]).to(tl.float32)
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
    n, own, t, in_row, tree_ptr, tree_step_t, tree_step_n, first_new, window, CAUSAL: tl.constexpr, Lq: tl.constexpr
):
    """Which query row may see which key, [M, N]; own is each row's position, the new tokens start at first_new."""
    seen = in_row[:, None] & (n >= 0)[None, :]
    if tree_ptr is not None:
        new = n - first_new
        is_new = (new >= 0) & (new < Lq)
        at = tree_ptr + t[:, None] * tree_step_t + new[None, :] * tree_step_n
        seen &= (new < 0)[None, :] | (tl.load(at, mask=in_row[:, None] & is_new[None, :], other=0) != 0)
    elif CAUSAL:
        seen &= n[None, :] <= own[:, None]
    if window is not None:
        seen &= n[None, :] >= (own - window)[:, None]
    return seen
