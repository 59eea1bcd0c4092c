"""The chunk kernel: the unfinished softmax of every query against one split of the keys.

    s = transform(q k^T)    m = max s    p = 2^(s - m)    l = sum p    acc = p v

Grid: (sequence, KV head and tile of rows, flattened; split), or one program per piece of pieces.py. The G query heads
of a KV head and their Lq tokens are the rows of one matrix product, so K and V are read from memory once. A program
walks its split BLOCK_N keys at a time and stores (acc, m, l), m in base 2; reduce.py merges the splits. With a single
split it stores the finished out and lse instead. A split without keys stores m = -inf, l = 0, which weighs nothing in
the merge.

Dense and paged caches differ in locate_rows() alone, score options in transform_scores(), masks that differ by query
row in sees(). An argument that is None is off and costs nothing: it is compiled away.
"""

import triton
import triton.language as tl
from torch import Tensor

from flash_decoding.backends.triton.launch import launch, variant
from flash_decoding.backends.triton.online_softmax import finish_softmax, update_softmax
from flash_decoding.backends.triton.pieces import find_piece, note_slots
from flash_decoding.backends.triton.scores import sees, transform_scores
from flash_decoding.backends.triton.tile_io import (
    address,
    load_rows,
    locate_rows,
    matmul,
    split_range,
    visible_range,
)
from flash_decoding.problem import Problem
from flash_decoding.split_plan import Plan
from flash_decoding.workspace import Partial


@triton.jit(
    do_not_specialize=[
        "block_table_step", "key_mask_step_b", "key_mask_step_n", "tree_step_b", "tree_step_t", "tree_step_n",
        "window", "kv_len", "B", "Hkv", "num_splits", "split_size", "at_once",
    ],
    do_not_specialize_on_alignment=[
        "block_table_ptr", "kv_lens_ptr", "kv_start_ptr", "q_lens_ptr", "key_mask_ptr", "tree_mask_ptr", "alibi_ptr",
        "sinks_ptr", "lse_ptr", "m_ptr", "l_ptr",
    ],
)  # fmt: skip
def _chunk_kernel(
    q_ptr, q_stride,  # [B, Hq, Lq, D]; strides without the last, contiguous axis, here and below
    k_ptr, k_stride,  # [B, Hkv, N, D], or pages [pages, Hkv, PAGE_SIZE, D]
    v_ptr, v_stride,  # likewise, Dv wide
    block_table_ptr, block_table_step,  # [B, max_pages]; None: a dense cache
    kv_lens_ptr, kv_start_ptr, q_lens_ptr,  # [B]; None: the whole cache, from its first key, all Lq tokens
    key_mask_ptr, key_mask_step_b, key_mask_step_n,  # [B, N] bool; None: every key is visible
    tree_mask_ptr, tree_step_b, tree_step_t, tree_step_n,  # [B, Lq, Lq] bool; None: causal, if CAUSAL
    alibi_ptr, sinks_ptr,  # [Hq] float32; None: off
    out_ptr, out_stride,  # [B, Hq, Lq, Dv], written when there is one split
    lse_ptr,  # [B, Hq, Lq] float32, likewise; None: not wanted
    acc_ptr, m_ptr, l_ptr,  # [num_splits, B, Hq, Lq(, Dv)] float32, of pieces [slots, rows(, Dv)]; None: one split
    scale, softcap, window, kv_len, B, Hkv, num_splits, split_size, at_once,
    G: tl.constexpr, Lq: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, CAUSAL: tl.constexpr,
    PAGE_SIZE: tl.constexpr, V_IN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, REST_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """One program: one sequence, one split, one KV head with BLOCK_M of its query rows."""
    row_tiles: tl.constexpr = (G * Lq + BLOCK_M - 1) // BLOCK_M
    lens = (kv_lens_ptr, kv_start_ptr, q_lens_ptr, kv_len, window)
    pid, split, splits = tl.program_id(0), tl.program_id(1), num_splits
    if at_once is not None:
        b, head, split, splits, slot = find_piece(pid, lens, B, Hkv * row_tiles, at_once, num_splits, Lq, BLOCK_N)
        if splits == 0:
            return
        if split == 0:
            heads = Hkv * row_tiles
            note_slots(m_ptr, b * heads + head, B * heads, num_splits, slot, splits, min(G * Lq, BLOCK_M))
        row_tile, h_kv, b = head % row_tiles, head // row_tiles, b.to(tl.int64)
        # Where in scratch row 0 would be: a piece has the rows of its tile only.
        at = slot.to(tl.int64) * min(G * Lq, BLOCK_M) - row_tile * BLOCK_M
    else:
        row_tile, h_kv, b = pid % row_tiles, pid // row_tiles % Hkv, (pid // (row_tiles * Hkv)).to(tl.int64)
        at = ((split.to(tl.int64) * B + b) * Hkv + h_kv) * (G * Lq)
    first, last, kv_len, q_len = visible_range(lens, b, Lq)
    start, stop = split_range(first, last, split, splits, split_size, BLOCK_N)

    row, d, dv = row_tile * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    h_q, t = h_kv * G + row // Lq, row % Lq
    in_row, in_token = row < G * Lq, (row < G * Lq) & (t < q_len)
    q_at = address(q_ptr, q_stride, (b, h_q.to(tl.int64)[:, None], t[:, None]))
    q = tl.load(q_at + d[None, :], mask=in_token[:, None] & (d < D)[None, :], other=0.0)  # [M, D]
    q_rest = None
    if REST_D > 0:
        d = BLOCK_D + tl.arange(0, REST_D)
        q_rest = tl.load(q_at + d[None, :], mask=in_token[:, None] & (d < D)[None, :], other=0.0)
    slopes = None
    if alibi_ptr is not None:
        slopes = tl.load(alibi_ptr + h_q, mask=in_row, other=0.0)
    k_ptr += h_kv.to(tl.int64) * k_stride[1]
    v_ptr += h_kv.to(tl.int64) * v_stride[1]
    if block_table_ptr is None:
        k_ptr += b * k_stride[0]
        v_ptr += b * v_stride[0]
    else:
        block_table_ptr += b * block_table_step
    if key_mask_ptr is not None:
        key_mask_ptr += b * key_mask_step_b
    if tree_mask_ptr is not None:
        tree_mask_ptr += b * tree_step_b

    cache = (k_ptr, k_stride, v_ptr, v_stride, block_table_ptr, key_mask_ptr, key_mask_step_n)
    tokens = (t, in_token, kv_len - q_len)
    options = (scale, softcap, window, tree_mask_ptr, tree_step_t, tree_step_n)
    # Whole tiles of a page need one look-up each, if tiles start where pages do.
    ONE_PAGE: tl.constexpr = (
        PAGE_SIZE is not None and PAGE_SIZE % BLOCK_N == 0 and kv_start_ptr is None and window is None
        and split_size is None
    )  # fmt: skip
    # A single token of every sequence sees the whole range; otherwise rows differ.
    BY_ROW: tl.constexpr = Lq > 1 or q_lens_ptr is not None or tree_mask_ptr is not None

    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    whole = start + (stop - start) // BLOCK_N * BLOCK_N
    for n in range(start, whole, BLOCK_N):
        m, l, acc = _fold_tile(
            m, l, acc, q, q_rest, slopes, tokens, cache, options, n, stop, False, BY_ROW, CAUSAL, ONE_PAGE, PAGE_SIZE,
            V_IN_K, Lq, D, DV, BLOCK_N, BLOCK_D, REST_D, BLOCK_DV,
        )  # fmt: skip
    if whole < stop:
        m, l, acc = _fold_tile(
            m, l, acc, q, q_rest, slopes, tokens, cache, options, whole, stop, True, BY_ROW, CAUSAL, ONE_PAGE,
            PAGE_SIZE, V_IN_K, Lq, D, DV, BLOCK_N, BLOCK_D, REST_D, BLOCK_DV,
        )  # fmt: skip

    at_row = at + row
    in_rd = in_row[:, None] & (dv < DV)[None, :]
    if acc_ptr is None:
        sink = None
        if sinks_ptr is not None:
            sink = tl.load(sinks_ptr + h_q, mask=in_row, other=0.0)
        norm, lse = finish_softmax(m, l, sink)
        out_at = address(out_ptr, out_stride, (b, h_q.to(tl.int64)[:, None], t[:, None], dv[None, :]))
        tl.store(out_at, (acc * norm[:, None]).to(out_ptr.dtype.element_ty), mask=in_rd)
        if lse_ptr is not None:
            tl.store(lse_ptr + at_row, lse, mask=in_row)
    else:
        if split_size is not None:
            # Splits of a fixed size may be many and mostly empty; the merge does not read the acc of an empty one.
            in_rd = in_row[:, None] & (dv < tl.where(start < stop, DV, 0))[None, :]
        tl.store(acc_ptr + at_row[:, None] * DV + dv[None, :], acc, mask=in_rd)
        tl.store(m_ptr + at_row, m, mask=in_row)
        tl.store(l_ptr + at_row, l, mask=in_row)


@triton.jit
def _fold_tile(
    m, l, acc, q, q_rest, slopes, tokens, cache, options, first, stop,
    PARTIAL: tl.constexpr, BY_ROW: tl.constexpr, CAUSAL: tl.constexpr, ONE_PAGE: tl.constexpr,
    PAGE_SIZE: tl.constexpr, V_IN_K: tl.constexpr, Lq: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, REST_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Fold the keys from `first` on into the state; only a PARTIAL tile looks at `stop`."""
    t, in_token, first_new = tokens
    k_ptr, k_stride, v_ptr, v_stride, block_table_ptr, key_mask_ptr, key_mask_step_n = cache
    scale, softcap, window, tree_mask_ptr, tree_step_t, tree_step_n = options
    n = first + tl.arange(0, BLOCK_N)
    in_n = None
    if PARTIAL:
        in_n = n < stop
    if key_mask_ptr is not None:
        # The value of a masked key may be NaN, which a weight of zero does not remove: it is masked on load too.
        in_n = tl.load(key_mask_ptr + n.to(tl.int64) * key_mask_step_n, mask=n < stop, other=0) != 0

    page, slot = locate_rows(block_table_ptr, n, first, in_n, PAGE_SIZE, ONE_PAGE)
    k = load_rows(k_ptr, k_stride, page, slot, in_n, 0, D, BLOCK_D)  # [N, D]
    if V_IN_K:
        v = k
    else:
        v = load_rows(v_ptr, v_stride, page, slot, in_n, 0, DV, BLOCK_DV)  # [N, Dv]
    s = matmul(q, tl.trans(k))  # [M, N]
    if REST_D > 0:
        s += matmul(q_rest, tl.trans(load_rows(k_ptr, k_stride, page, slot, in_n, BLOCK_D, D, REST_D)))

    own = first_new + t
    s = transform_scores(s, scale, softcap, slopes, own, n)
    if in_n is not None:
        s = tl.where(in_n[None, :], s, float("-inf"))
    if BY_ROW:
        seen = sees(n, own, t, in_token, tree_mask_ptr, tree_step_t, tree_step_n, first_new, window, CAUSAL, Lq)
        s = tl.where(seen, s, float("-inf"))
    return update_softmax(m, l, acc, s, v)


def launch_chunk(problem: Problem, plan: Plan, partial: Partial | None, out: Tensor, lse: Tensor | None) -> None:
    """Fill partial, or out and lse when it is None; nothing is allocated or chosen here."""
    p, tile = problem, plan.tile
    strides = p.q.stride()[:3], p.k.stride()[:3], p.v.stride()[:3], out.stride()[:3]
    v_in_k = (
        tile.block_dv == tile.block_d == p.value_dim <= p.head_dim
        and p.v.data_ptr() == p.k.data_ptr()
        and strides[1] == strides[2]
    )
    problems = p.batch * p.heads_kv * -(-p.group * p.q_len // tile.block_m)
    table, mask, tree = p.block_table, p.key_mask, p.tree_mask
    arrays = (table, p.kv_lens, p.kv_start, p.q_lens, mask, tree, p.alibi_slopes, p.sinks)
    acc, m, l = (None, None, None) if partial is None else partial
    key = (
        variant((p.q, p.k, p.v, out), strides), p.q.dtype, tuple([x if x is None else x.dtype for x in arrays]),
        p.softcap is None, p.window is None, partial is None, lse is None, plan.split_size is None,
        plan.at_once is None,
        any(x is not None and max(x.stride()) >= 2**31 for x in (table, mask, tree)),
    )  # fmt: skip
    launch(
        _chunk_kernel,
        key,
        (problems, plan.num_splits) if plan.at_once is None else (plan.count_pieces(problems), 1),
        (
            p.q, strides[0], p.k, strides[1], p.v, strides[2],
            table, 0 if table is None else table.stride(0), p.kv_lens, p.kv_start, p.q_lens,
            mask, *((0, 0) if mask is None else mask.stride()), tree, *((0, 0, 0) if tree is None else tree.stride()),
            p.alibi_slopes, p.sinks if partial is None else None,
            out, strides[3], lse if partial is None else None, acc, m, l,
            p.scale, p.softcap, None if p.window is None else min(p.window, p.kv_len), p.kv_len, p.batch, p.heads_kv,
            plan.num_splits, plan.split_size, plan.at_once,
        ),
        (
            p.group, p.q_len, p.head_dim, p.value_dim, p.causal, p.page_size, v_in_k,
            tile.block_m, tile.block_n, tile.block_d, tile.rest_d, tile.block_dv,
        ),
        (tile.num_warps, tile.num_stages),
    )  # fmt: skip
