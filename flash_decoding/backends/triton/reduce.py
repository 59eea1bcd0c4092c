"""The reduce kernel: merge partial softmaxes over disjoint keys into out and lse. One kernel serves every level.

    M = max m_i    w_i = 2^(m_i - M)    out = sum w_i acc_i / sum w_i l_i    lse = (M + log2 sum w_i l_i) / log2(e)

Grid: (query row, slice of Dv). A program reads m and l of all splits, BLOCK_S at a time, and its slice of their acc,
which is read once; slicing keeps enough programs in flight when there are few rows. The first slice writes the lse.
Rows without a key become out = 0 and lse = -inf. Attention sinks enter the denominator here, once. With
SKIP_EMPTY the acc of splits without keys, which the chunk kernel then leaves unwritten, is not read.

After a chunk kernel, and where the device can, its programs are already there when that ends: they start as soon as all
programs of the chunk kernel have, and wait.

What is merged besides the splits of one call:
- splits of a prefix that the whole batch shares. They lie behind the batch's own in the same arrays, their rows in
  another order: [shared_splits, groups, Hq, shared_len], where the groups hold the tokens of all sequences end to end.
  Tokens that are not there, of sequences without keys or past q_lens, do not see the prefix either.
- partials of several calls, [B, Hq, Lq] each: splits that lie further apart. With l_out_ptr the result is one more.
- finished states, where l_ptr is None: acc is their out, of any type, m their lse in its own base, and l is 1. A
  program has whole rows then, and stores when it has read them, so out and lse may take the place of a state.
"""

import math
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from flash_decoding.backends.triton.launch import launch, may_overlap, variant
from flash_decoding.backends.triton.online_softmax import finish_softmax, fold_partials
from flash_decoding.backends.triton.pieces import find_slots
from flash_decoding.backends.triton.scores import LOG2_E
from flash_decoding.backends.triton.tile_io import address, visible_range
from flash_decoding.problem import Problem
from flash_decoding.split_plan import Plan, next_power_of_2
from flash_decoding.workspace import Partial

# Columns per program: few rows, as with one KV head and many splits, would otherwise leave most processors idle. Many
# rows keep them busy, and then fewer programs look up fewer lengths.
SLICE, WIDE_SLICE, MANY_ROWS = 32, 128, 1024
# Elements of finished states that a program works on at a time, and per warp.
_STATE_ELEMENTS, _WARP_ELEMENTS = 2048, 512


class SharedSplits(NamedTuple):
    """The splits of a shared prefix, [num_splits, groups, Hq, group_len], which lie behind the batch's own."""

    num_splits: int
    groups: int
    group_len: int


@triton.jit(
    do_not_specialize=[
        "kv_len", "window", "B", "Hq", "rows", "num_splits", "shared_at", "shared_splits", "shared_rows",
        "shared_len",
    ],
    do_not_specialize_on_alignment=[
        "m_ptr", "l_ptr", "lse_ptr", "l_out_ptr", "sinks_ptr", "kv_lens_ptr", "kv_start_ptr", "q_lens_ptr",
    ],
)  # fmt: skip
def _reduce_kernel(
    acc_ptr, m_ptr, l_ptr,  # [num_splits, B, Hq, Lq(, Dv)] float32, of pieces [slots, rows(, Dv)]; l None: finished
                            # states, acc of any type
    out_ptr, out_stride,  # [B, Hq, Lq, Dv]; strides without the last, contiguous axis
    lse_ptr,  # [B, Hq, Lq] float32; None: not wanted
    l_out_ptr,  # likewise; not None: the result stays unfinished, out is its acc and lse its m
    sinks_ptr,  # [Hq] float32; None: off
    kv_lens_ptr, kv_start_ptr, q_lens_ptr, kv_len, window,  # which keys are seen; None where nobody needs to know
    B, Hq, rows, num_splits,
    acc_step,  # from one state to the next, as rows is for m; None: rows * Dv
    shared_at, shared_splits, shared_rows, shared_len,  # the splits of a shared prefix; None: there is none
    G: tl.constexpr, Lq: tl.constexpr, BLOCK_M: tl.constexpr, IN_PIECES: tl.constexpr,
    SKIP_EMPTY: tl.constexpr, NATURAL: tl.constexpr,
    DV: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_DV: tl.constexpr,
    EARLY: tl.constexpr,  # whether it starts while the chunk kernel runs, for whose end it waits then
    EARLY_NEXT: tl.constexpr,  # whether the kernel behind it may start, and wait, when all programs have started
):  # fmt: skip
    """One program: one query row, BLOCK_DV columns of its output."""
    row = tl.program_id(0).to(tl.int64)
    dv = tl.program_id(1) * BLOCK_DV + tl.arange(0, BLOCK_DV)
    UNIT: tl.constexpr = LOG2_E if NATURAL else 1.0

    b, h_q, t = row // (Hq * Lq), row // Lq % Hq, row % Lq
    at, step, splits = row, rows, num_splits
    if IN_PIECES:
        row_tiles: tl.constexpr = (G * Lq + BLOCK_M - 1) // BLOCK_M
        lens = (kv_lens_ptr, kv_start_ptr, q_lens_ptr, kv_len, window)
        first_key, last_key, _, _ = visible_range(lens, b, Lq)
        heads, row_kv, step = Hq // G * row_tiles, h_q % G * Lq + t, min(G * Lq, BLOCK_M)
        problem = b * heads + h_q // G * row_tiles + row_kv // BLOCK_M
    if EARLY_NEXT:
        tl.extra.cuda.gdc_launch_dependents()
    if EARLY:
        # Before it only lengths are read. The chunk kernel does not write them, and it has itself waited for whatever
        # came before it, since it does not start early.
        tl.extra.cuda.gdc_wait()
    if IN_PIECES:
        slot, splits = find_slots(m_ptr, problem, B * heads, num_splits, last_key > first_key, step)
        at = slot.to(tl.int64) * step + row_kv % BLOCK_M
    m, l = float("-inf"), 0.0
    acc = tl.zeros([BLOCK_DV], tl.float32)
    m, l, acc = _fold_splits(
        m, l, acc, acc_ptr, m_ptr, l_ptr, at, step, acc_step, splits, dv, UNIT, SKIP_EMPTY, DV, BLOCK_S
    )
    if shared_splits is not None:
        seen = tl.load(kv_lens_ptr + b) > 0
        if q_lens_ptr is not None:
            seen &= t < tl.load(q_lens_ptr + b)
        token = b * Lq + t
        first = shared_at.to(tl.int64) + (token // shared_len * Hq + h_q) * shared_len + token % shared_len
        m, l, acc = _fold_splits(
            m, l, acc, acc_ptr, m_ptr, l_ptr, first, shared_rows, None, tl.where(seen, shared_splits, 0), dv, UNIT,
            False, DV, BLOCK_S,
        )  # fmt: skip

    if l_out_ptr is None:
        sink = None
        if sinks_ptr is not None:
            sink = tl.load(sinks_ptr + h_q)
        norm, lse = finish_softmax(m, l, sink)
    else:
        norm, lse = 1.0, m
    if l_ptr is None:
        lse = m + tl.log2(l) / UNIT  # -inf where l is 0; a lone state's comes out as it was
        tl.debug_barrier()  # no warp writes in place what another has yet to read
    tl.store(address(out_ptr, out_stride, (b, h_q, t, dv)), (acc * norm).to(out_ptr.dtype.element_ty), mask=dv < DV)
    if lse_ptr is not None:
        if tl.program_id(1) == 0:
            tl.store(lse_ptr + row, lse)
            if l_out_ptr is not None:
                tl.store(l_out_ptr + row, l)


@triton.jit
def _fold_splits(
    m_all, l_all, out, acc_ptr, m_ptr, l_ptr, row, rows, acc_step, num_splits, dv,
    UNIT: tl.constexpr, SKIP_EMPTY: tl.constexpr, DV: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Fold row `row` of all splits into the state; one unit of m is UNIT in base 2."""
    in_dv = dv < DV
    for first in range(0, num_splits, BLOCK_S):
        split = first + tl.arange(0, BLOCK_S)
        in_split = split < num_splits
        at = split.to(tl.int64) * rows + row
        m = tl.load(m_ptr + at, mask=in_split, other=float("-inf"))
        if l_ptr is None:
            m = tl.where(m == float("inf"), float("-inf"), m)  # both conventions of empty are in use
            l = tl.where(m == float("-inf"), 0.0, 1.0)
        else:
            l = tl.load(l_ptr + at, mask=in_split, other=0.0)
        if SKIP_EMPTY:
            in_split = l > 0.0
        acc_at = at * DV
        if acc_step is not None:
            acc_at = split.to(tl.int64) * acc_step + row * DV
        acc = tl.load(acc_ptr + acc_at[:, None] + dv[None, :], mask=in_split[:, None] & in_dv[None, :], other=0.0)
        m_all, l_all, out = fold_partials(m_all, l_all, out, m, l, acc, UNIT)
    return m_all, l_all, out


def block_of_splits(num_splits: int, split_size: int | None = None) -> tuple[int, int]:
    """Splits at a time, and warps. Few distinct sizes, so that a growing cache meets few compilations.

    With a fixed split_size always the same: the order of the sum, and so its bits, must not depend on the capacity.
    """
    if split_size is not None:
        return 32, 1
    return (8, 1) if num_splits <= 8 else (32, 1) if num_splits <= 32 else (128, 4)


def launch_reduce(
    problem: Problem, plan: Plan, partial: Partial, out: Tensor, lse: Tensor | None, shared: SharedSplits | None = None,
    l: Tensor | None = None,
) -> None:  # fmt: skip
    """Merge partial into out and, if it is not None, lse; nothing is allocated or chosen here.

    With l the result stays unfinished: out becomes its acc and lse its m.
    """
    p, stride = problem, out.stride()[:3]
    rows, ragged = p.batch * p.heads_q * p.q_len, plan.at_once is not None
    block_dv = min(WIDE_SLICE if ragged and rows >= MANY_ROWS else SLICE, next_power_of_2(p.value_dim))
    block_s, num_warps = block_of_splits(plan.num_splits, plan.split_size)
    if ragged:
        block_s, num_warps = 8, 1  # most problems have few splits
    lens: tuple[Tensor | None, ...] = (p.kv_lens, p.kv_start, p.q_lens) if ragged else (None, None, None)
    more: tuple[int | None, ...] = (None, None, None, None)
    if shared is not None:
        lens = (p.kv_lens, lens[1], p.q_lens)
        own = plan.partial_shape(p.batch, p.heads_kv, p.group, p.q_len) or (rows,)
        more = math.prod(own), shared.num_splits, shared.groups * p.heads_q * shared.group_len, shared.group_len
        block_s, num_warps = max((block_s, num_warps), block_of_splits(shared.num_splits))
    window = None if p.window is None or not ragged else min(p.window, p.kv_len)
    early = may_overlap(out.device.index)
    launch(
        _reduce_kernel,
        (
            variant((out,), (stride,)), out.dtype, lse is None, l is None, p.sinks is None, window is None,
            shared is None,
            *[x if x is None else x.dtype for x in lens],
        ),
        (rows, -(-p.value_dim // block_dv)),
        (
            partial.acc, partial.m, partial.l, out, stride, lse, l, p.sinks, *lens, p.kv_len, window,
            p.batch, p.heads_q, rows, plan.num_splits, None, *more,
        ),
        (
            *((p.group, p.q_len, plan.tile.block_m) if ragged else (1, p.q_len, 1)), ragged,
            plan.split_size is not None, None, p.value_dim, block_s, block_dv, early,
            early and l is not None,
        ),
        (num_warps, 1),
        early=early,
    )  # fmt: skip


def launch_partials(partial: Partial, out: Tensor, lse: Tensor | None, l: Tensor | None, sinks: Tensor | None) -> None:
    """Merge partials [S, B, Hq, Lq(, Dv)], each contiguous, into out [B, Hq, Lq, Dv] and, if it is not None, lse.

    With l the result stays unfinished: out becomes its acc, lse its m. They may not be parts of partial.
    """
    count, batch, heads_q, q_len, width = partial.acc.shape
    rows, stride = batch * heads_q * q_len, out.stride()[:3]
    steps = partial.acc.stride(0), partial.m.stride(0)
    block_dv = min(WIDE_SLICE if rows >= MANY_ROWS else SLICE, next_power_of_2(width))
    block_s, num_warps = block_of_splits(count)
    launch(
        _reduce_kernel,
        (
            variant((partial.acc, out), (stride,)), out.dtype, lse is None, l is None, sinks is None,
            variant((), (steps,)),
        ),
        (rows, -(-width // block_dv)),
        (
            *partial, out, stride, lse, l, sinks, None, None, None, 0, None, batch, heads_q, steps[1], count,
            steps[0], None, None, None, None,
        ),
        (1, q_len, 1, False, True, None, width, block_s, block_dv, False, False),
        (num_warps, 1),
    )  # fmt: skip


def block_of_states(count: int, width: int) -> tuple[int, int, int]:
    """Finished states at a time, columns (all of them), and warps."""
    block_dv = next_power_of_2(width)
    block_s = min(next_power_of_2(count), max(_STATE_ELEMENTS // block_dv, 1), 32)
    return block_s, block_dv, min(max(block_s * block_dv // _WARP_ELEMENTS, 1), 16)


def launch_merge(
    outs: Tensor, lses: Tensor, steps: tuple[int, int], count: int, natural: bool, out: Tensor, lse: Tensor
) -> None:
    """Merge finished states into out [rows, width] and lse [rows].

    Args:
        outs: the first state, [rows, width] and contiguous like all of them; the others follow every steps[0] elements.
        lses: likewise [rows], every steps[1] elements.
        natural: whether the logarithms are natural or binary.
    """
    rows, width = out.shape
    block_s, block_dv, num_warps = block_of_states(count, width)
    stride = (out.stride(0), 0, 0)
    step = steps[0]
    launch(
        _reduce_kernel,
        (
            variant((outs, out), (stride,)), outs.dtype, out.dtype, step % 16 == 0, step == 1,
            *[-(2**31) <= x < 2**31 for x in steps],
        ),
        (rows, 1),
        (
            outs, lses, None, out, stride, lse, None, None, None, None, None, 0, None, rows, 1, steps[1], count,
            step, None, None, None, None,
        ),
        (1, 1, 1, False, True, natural, width, block_s, block_dv, False, False),
        (num_warps, 1),
        fp_fusion=False,  # or two states would merge to other bits the other way round
    )  # fmt: skip
