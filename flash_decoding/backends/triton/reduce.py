"""The reduce kernel: merge the unfinished softmax (acc, m, l) of all splits into out and lse.

    M = max m_i    w_i = 2^(m_i - M)    out = sum w_i acc_i / sum w_i l_i    lse = (M + log2 sum w_i l_i) / log2(e)

Grid: (query row, slice of Dv). A program reads m and l of all splits, BLOCK_S at a time, and its slice of their acc,
which is read once; slicing keeps enough programs in flight when there are few rows. The first slice writes the lse.
Rows without a key become out = 0 and lse = -inf. Attention sinks enter the denominator here, once. With
SKIP_EMPTY the acc of splits without keys, which the chunk kernel then leaves unwritten, is not read.
"""

import triton
import triton.language as tl
from torch import Tensor

from flash_decoding.backends.triton.launch import launch, variant
from flash_decoding.backends.triton.online_softmax import finish_softmax, finite_or_zero
from flash_decoding.backends.triton.tile_io import address
from flash_decoding.problem import Problem
from flash_decoding.split_plan import Plan, next_power_of_2
from flash_decoding.workspace import Partial

# Columns per program: few rows, as with one KV head and many splits, would otherwise leave most processors idle.
SLICE = 32


@triton.jit(
    do_not_specialize=["Hq", "rows", "num_splits"],
    do_not_specialize_on_alignment=["m_ptr", "l_ptr", "lse_ptr", "sinks_ptr"],
)
def _reduce_kernel(
    acc_ptr, m_ptr, l_ptr,  # [num_splits, B, Hq, Lq(, Dv)] float32
    out_ptr, out_stride,  # [B, Hq, Lq, Dv]; strides without the last, contiguous axis
    lse_ptr,  # [B, Hq, Lq] float32; None: not wanted
    sinks_ptr,  # [Hq] float32; None: off
    Hq, rows, num_splits,
    Lq: tl.constexpr, SKIP_EMPTY: tl.constexpr, DV: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """One program: one query row, BLOCK_DV columns of its output."""
    row = tl.program_id(0).to(tl.int64)
    dv = tl.program_id(1) * BLOCK_DV + tl.arange(0, BLOCK_DV)
    in_dv = dv < DV

    m_all, l_all = float("-inf"), 0.0
    out = tl.zeros([BLOCK_DV], tl.float32)
    for first in range(0, num_splits, BLOCK_S):
        split = first + tl.arange(0, BLOCK_S)
        in_split = split < num_splits
        at = split.to(tl.int64) * rows + row
        m = tl.load(m_ptr + at, mask=in_split, other=float("-inf"))
        l = tl.load(l_ptr + at, mask=in_split, other=0.0)
        if SKIP_EMPTY:
            in_split = l > 0.0
        acc = tl.load(acc_ptr + at[:, None] * DV + dv[None, :], mask=in_split[:, None] & in_dv[None, :], other=0.0)

        m_new = tl.maximum(m_all, tl.max(m, 0))
        m_ref = finite_or_zero(m_new)
        alpha, w = tl.exp2(m_all - m_ref), tl.exp2(m - m_ref)
        out = out * alpha + tl.sum(w[:, None] * acc, 0)
        m_all, l_all = m_new, l_all * alpha + tl.sum(w * l, 0)

    b, h_q, t = row // (Hq * Lq), row // Lq % Hq, row % Lq
    sink = None
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + h_q)
    norm, lse = finish_softmax(m_all, l_all, sink)
    tl.store(address(out_ptr, out_stride, (b, h_q, t, dv)), (out * norm).to(out_ptr.dtype.element_ty), mask=in_dv)
    if lse_ptr is not None:
        if tl.program_id(1) == 0:
            tl.store(lse_ptr + row, lse)


def block_of_splits(num_splits: int, split_size: int | None = None) -> tuple[int, int]:
    """Splits at a time, and warps. Few distinct sizes, so that a growing cache meets few compilations.

    With a fixed split_size always the same: the order of the sum, and so its bits, must not depend on the capacity.
    """
    if split_size is not None:
        return 32, 1
    return (8, 1) if num_splits <= 8 else (32, 1) if num_splits <= 32 else (128, 4)


def launch_reduce(problem: Problem, plan: Plan, partial: Partial, out: Tensor, lse: Tensor | None) -> None:
    """Merge partial into out and, if it is not None, lse; nothing is allocated or chosen here."""
    p, stride = problem, out.stride()[:3]
    block_dv = min(SLICE, next_power_of_2(p.value_dim))
    rows = p.batch * p.heads_q * p.q_len
    block_s, num_warps = block_of_splits(plan.num_splits, plan.split_size)
    launch(
        _reduce_kernel,
        (variant((out,), (stride,)), out.dtype, lse is None, p.sinks is None),
        (rows, -(-p.value_dim // block_dv)),
        (partial.acc, partial.m, partial.l, out, stride, lse, p.sinks, p.heads_q, rows, plan.num_splits),
        (p.q_len, plan.split_size is not None, p.value_dim, block_s, block_dv),
        (num_warps, 1),
    )
