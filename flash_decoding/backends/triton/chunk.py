"""The chunk kernel: the unfinished softmax of every query against one split of the keys.

    s = q k^T scale log2(e)    m = max s    p = 2^(s - m)    l = sum p    acc = p v

Grid: (sequence, KV head and tile of rows, flattened; split). The G query heads of a KV head and their Lq
tokens are the rows of one matrix product, so K and V are read from memory once. A program walks its split BLOCK_N keys
at a time and stores (acc, m, l), m in base 2; reduce.py merges the splits. With a single split it stores the finished
out and lse instead. A split without keys stores acc = 0, m = -inf, l = 0, which weighs nothing in the merge.
"""

import triton
import triton.language as tl
from torch import Tensor

from flash_decoding.backends.triton.launch import launch, variant
from flash_decoding.backends.triton.online_softmax import finish_softmax, update_softmax
from flash_decoding.backends.triton.scores import transform_scores
from flash_decoding.backends.triton.tile_io import address, load_rows, matmul, split_range, visible_range
from flash_decoding.problem import Problem
from flash_decoding.split_plan import Plan
from flash_decoding.workspace import Partial


@triton.jit(
    do_not_specialize=["key_mask_step_b", "key_mask_step_n", "kv_len", "Hkv", "rows", "num_splits", "split_size"],
    do_not_specialize_on_alignment=["kv_lens_ptr", "kv_start_ptr", "key_mask_ptr", "lse_ptr", "m_ptr", "l_ptr"],
)
def _chunk_kernel(
    q_ptr, q_stride,  # [B, Hq, Lq, D]; strides without the last, contiguous axis, here and below
    k_ptr, k_stride,  # [B, Hkv, N, D]
    v_ptr, v_stride,  # [B, Hkv, N, Dv]
    kv_lens_ptr, kv_start_ptr,  # [B]; None: the whole cache
    key_mask_ptr, key_mask_step_b, key_mask_step_n,  # [B, N] bool; None: every key is visible
    out_ptr, out_stride,  # [B, Hq, Lq, Dv], written when there is one split
    lse_ptr,  # [B, Hq, Lq] float32, likewise; None: not wanted
    acc_ptr, m_ptr, l_ptr,  # [num_splits, B, Hq, Lq(, Dv)] float32; None: one split
    scale, kv_len, Hkv, rows, num_splits, split_size,
    G: tl.constexpr, Lq: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """One program: one sequence, one split, one KV head with BLOCK_M of its query rows."""
    row_tiles: tl.constexpr = (G * Lq + BLOCK_M - 1) // BLOCK_M
    pid, split = tl.program_id(0), tl.program_id(1)
    row_tile, h_kv, b = pid % row_tiles, pid // row_tiles % Hkv, (pid // (row_tiles * Hkv)).to(tl.int64)
    first, last = visible_range(kv_lens_ptr, kv_start_ptr, b, kv_len)
    start, stop = split_range(first, last, split, num_splits, split_size, BLOCK_N)

    row, d, dv = row_tile * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    h_q, t = h_kv * G + row // Lq, row % Lq
    in_row = row < G * Lq
    q_at = address(q_ptr, q_stride, (b, h_q.to(tl.int64)[:, None], t[:, None], d[None, :]))
    q = tl.load(q_at, mask=in_row[:, None] & (d < D)[None, :], other=0.0)  # [M, D]
    k_ptr = address(k_ptr, (k_stride[0], k_stride[1]), (b, h_kv.to(tl.int64)))
    v_ptr = address(v_ptr, (v_stride[0], v_stride[1]), (b, h_kv.to(tl.int64)))
    if key_mask_ptr is not None:
        key_mask_ptr += b * key_mask_step_b

    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    whole = start + (stop - start) // BLOCK_N * BLOCK_N
    for n in range(start, whole, BLOCK_N):
        m, l, acc = _fold_tile(
            m, l, acc, q, k_ptr, k_stride[2], v_ptr, v_stride[2], key_mask_ptr, key_mask_step_n, n, stop, scale,
            False, D, DV, BLOCK_N, BLOCK_D, BLOCK_DV,
        )  # fmt: skip
    if whole < stop:
        m, l, acc = _fold_tile(
            m, l, acc, q, k_ptr, k_stride[2], v_ptr, v_stride[2], key_mask_ptr, key_mask_step_n, whole, stop, scale,
            True, D, DV, BLOCK_N, BLOCK_D, BLOCK_DV,
        )  # fmt: skip

    at_row = (b * (Hkv * G) + h_q) * Lq + t
    in_rd = in_row[:, None] & (dv < DV)[None, :]
    if acc_ptr is None:
        norm, lse = finish_softmax(m, l)
        out_at = address(out_ptr, out_stride, (b, h_q.to(tl.int64)[:, None], t[:, None], dv[None, :]))
        tl.store(out_at, (acc * norm[:, None]).to(out_ptr.dtype.element_ty), mask=in_rd)
        if lse_ptr is not None:
            tl.store(lse_ptr + at_row, lse, mask=in_row)
    else:
        at_row += split.to(tl.int64) * rows
        tl.store(acc_ptr + at_row[:, None] * DV + dv[None, :], acc, mask=in_rd)
        tl.store(m_ptr + at_row, m, mask=in_row)
        tl.store(l_ptr + at_row, l, mask=in_row)


@triton.jit
def _fold_tile(
    m, l, acc, q, k_ptr, k_stride, v_ptr, v_stride, key_mask_ptr, key_mask_step_n, first, stop, scale,
    PARTIAL: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Fold the keys from `first` on into the state; only a PARTIAL tile looks at `stop`."""
    n = first + tl.arange(0, BLOCK_N)
    in_n = None
    if PARTIAL:
        in_n = n < stop
    if key_mask_ptr is not None:
        # The value of a masked key may be NaN, which a weight of zero does not remove: it is masked on load too.
        in_n = tl.load(key_mask_ptr + n.to(tl.int64) * key_mask_step_n, mask=n < stop, other=0) != 0
    k = load_rows(k_ptr, k_stride, n, in_n, D, BLOCK_D)  # [N, D]
    v = load_rows(v_ptr, v_stride, n, in_n, DV, BLOCK_DV)  # [N, Dv]
    s = transform_scores(matmul(q, tl.trans(k)), scale)  # [M, N]
    if in_n is not None:
        s = tl.where(in_n[None, :], s, float("-inf"))
    return update_softmax(m, l, acc, s, v)


def launch_chunk(problem: Problem, plan: Plan, partial: Partial | None, out: Tensor, lse: Tensor | None) -> None:
    """Fill partial, or out and lse when it is None; nothing is allocated or chosen here."""
    p, tile = problem, plan.tile
    lens, start, mask = p.kv_lens, p.kv_start, p.key_mask
    strides = p.q.stride()[:3], p.k.stride()[:3], p.v.stride()[:3], out.stride()[:3]
    acc, m, l = (None, None, None) if partial is None else partial
    key = (
        variant((p.q, p.k, p.v, out), strides), p.q.dtype, lens is None or lens.dtype, start is None or start.dtype,
        mask is None or mask.stride(0) < 2**31, partial is None, lse is None, plan.split_size is None,
    )  # fmt: skip
    launch(
        _chunk_kernel,
        key,
        (p.batch * p.heads_kv * -(-p.group * p.q_len // tile.block_m), plan.num_splits),
        (
            p.q, strides[0], p.k, strides[1], p.v, strides[2], lens, start,
            mask, *((0, 0) if mask is None else mask.stride()),
            out, strides[3], lse if partial is None else None, acc, m, l,
            p.scale, p.kv_len, p.heads_kv, p.batch * p.heads_q * p.q_len, plan.num_splits, plan.split_size,
        ),
        (p.group, p.q_len, p.head_dim, p.value_dim, tile.block_m, tile.block_n, tile.block_d, tile.block_dv),
        (tile.num_warps, tile.num_stages),
    )  # fmt: skip
