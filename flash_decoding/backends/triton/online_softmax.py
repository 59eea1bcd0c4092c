"""The running softmax of a tile of rows: m (maximum, base 2), l (sum), acc (weighted values)."""

import triton
import triton.language as tl

from flash_decoding.backends.triton.scores import LOG2_E
from flash_decoding.backends.triton.tile_io import by_row


@triton.jit
def weigh_scores(m, s, TURNED: tl.constexpr):
    """The maximum with scores s (base 2), alpha, which rescales l and acc, and the weights p, as s [M, N] or TURNED."""
    m_new = tl.maximum(m, tl.max(s, 0 if TURNED else 1))
    m_ref = finite_or_zero(m_new)
    alpha = tl.exp2(m - m_ref)
    p = tl.exp2(s - by_row(m_ref, TURNED))
    return m_new, alpha, p


@triton.jit
def fold_partials(m_all, l_all, acc_all, m, l, acc, UNIT: tl.constexpr):
    """Fold partials m, l [N] and acc [N, Dv] of one row into its state; one unit of m is UNIT in base 2."""
    m_new = tl.maximum(m_all, tl.max(m, 0))
    m_ref = finite_or_zero(m_new)
    alpha, w = tl.exp2((m_all - m_ref) * UNIT), tl.exp2((m - m_ref) * UNIT)
    return m_new, l_all * alpha + tl.sum(w * l, 0), acc_all * alpha + tl.sum(w[:, None] * acc.to(tl.float32), 0)


@triton.jit
def finite_or_zero(m):
    """m, but 0 where no key was seen: subtracting -inf from -inf would give NaN."""
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit
def finish_softmax(m, l, sink):
    """The factor that turns acc into out, and the natural lse; 0 and -inf where no key was seen.

    A sink, one more logit in the denominator that has no value, counts for out alone; None means none.
    """
    empty = l == 0.0
    l_safe = tl.where(empty, 1.0, l)
    lse = tl.where(empty, float("-inf"), (finite_or_zero(m) + tl.log2(l_safe)) / LOG2_E)
    if sink is not None:
        l_safe += tl.exp2(sink * LOG2_E - finite_or_zero(m))
    return tl.div_rn(1.0, l_safe), lse
