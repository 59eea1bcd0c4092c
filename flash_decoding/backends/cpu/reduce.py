"""Merge partial softmaxes over disjoint keys, exactly.

    M = max m_i,   out = sum 2**(m_i - M) acc_i / sum 2**(m_i - M) l_i,   lse = ln 2 * M + ln(sum 2**(m_i - M) l_i)

in the order of the splits, so that the timing of threads changes no bit. Splits that saw no key have m = -inf and
weigh nothing. A sink joins the sum of the first formula's denominator here, but not the lse.

merge_row() is for the splits of one call, which its threads merge; merge_partials() for those of several calls.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from flash_decoding.backends.cpu.scores import LN_2, LOG2_E, NO_SCORE, divisor, natural_lse, weight
from flash_decoding.backends.cpu.simd import (
    FLOAT32,
    LANES,
    address_of,
    div,
    element_bytes,
    fma,
    inner,
    load,
    load_float,
    splat,
    store,
    store_float,
)
from flash_decoding.workspace import Partial


@inner
def vector_offset(i, width):
    """First element of vector i of a row. The last vector of a row ends with it, and so may overlap the one before."""
    return min(i * LANES, width - LANES)


@inner
def merge_row(call, kind, head, token, b, weights):
    """Merge one query row over all splits; weights is scratch for one float32 per split."""
    rows = call.batch * call.heads_q * call.q_len
    row = (b * call.heads_q + head) * call.q_len + token
    m = NO_SCORE
    for split in range(call.num_splits):
        m = max(m, load_float(call.partial_m + 4 * (split * rows + row)))
    l = 0.0
    for split in range(call.num_splits):
        w = weight(load_float(call.partial_m + 4 * (split * rows + row)), m)
        l += np.float64(w) * load_float(call.partial_l + 4 * (split * rows + row))
        store_float(weights + 4 * split, w)

    out = address_of(call.out, b, head, token)
    total = splat(divisor(call.score, head, m, l))
    for i in range((call.value_dim + LANES - 1) // LANES):
        d = vector_offset(i, call.value_dim)
        acc = splat(np.float32(0.0))
        for split in range(call.num_splits):
            part = load(call.partial_acc + 4 * ((split * rows + row) * call.value_dim + d), FLOAT32)
            acc = fma(splat(load_float(weights + 4 * split)), part, acc)
        store(out + d * element_bytes(kind), div(acc, total), kind)
    if call.lse != 0:
        store_float(call.lse + 4 * row, natural_lse(m, l))


def merge_partials(
    partial: Partial, out: Tensor, lse: Tensor | None, l: Tensor | None = None, *, sinks: Tensor | None = None
) -> None:  # fmt: skip
    """Merge partials [S, B, Hq, Lq(, Dv)] into out [B, Hq, Lq, Dv] of any dtype and, if it is not None, lse.

    With l the result is a partial too, not finished: out becomes its acc, lse its m. They may not be parts of partial.
    """
    acc, m, l_each = partial
    top = m.amax(dim=0)
    shift = top.masked_fill(top == -torch.inf, 0.0)  # -inf - -inf would be NaN
    w = torch.exp2((m - shift).double())
    total = _add_up(w * l_each)
    merged = _add_up(w.to(torch.float32)[..., None] * acc)
    if l is not None:
        assert lse is not None, "it takes m"
        out.copy_(merged)
        lse.copy_(top)
        l.copy_(total)
        return
    if lse is not None:
        lse.copy_(shift.double() * LN_2 + total.log())
    if sinks is not None:
        total = torch.where(total > 0, total + torch.exp2(sinks.double()[:, None] * LOG2_E - shift), total)
    out.copy_(merged / total.masked_fill(total == 0, 1.0)[..., None])


def _add_up(parts: Tensor) -> Tensor:
    """The sum over the first axis, in its order; that of torch.sum() depends on how much else there is."""
    first, *others = parts.unbind()
    total = first.clone()
    for part in others:
        total += part
    return total
