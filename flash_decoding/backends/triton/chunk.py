"""The chunk kernel: the unfinished softmax of every query against one split of the keys.

    s = transform(q k^T)    m = max s    p = 2^(s - m)    l = sum p    acc = p v

Grid: (sequence, KV head and tile of rows, flattened; split), or one program per piece of pieces.py. The G query heads
of a KV head and their Lq tokens are the rows of one matrix product, so K and V are read from memory once. Up to eight
rows are the columns of TURNED products instead, scores [N, M] = k q^T and acc [Dv, M] = v^T p, since tensor cores
multiply 16 rows by 8 columns. A program walks its split BLOCK_N keys at a time and stores (acc, m, l), m in base 2;
reduce.py merges the splits. With a single split it stores the finished out and lse instead. A split without keys stores
m = -inf, l = 0, which weighs nothing in the merge.

Dense and paged caches differ in locate_rows() alone, score options in transform_scores(), masks that differ by query
row in sees(). An argument that is None is off and costs nothing: it is compiled away.
"""

import math
from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from flash_decoding.backends.triton.codes import (
    LEAST_SCALE,
    column_of,
    finish_values,
    has_scale_pairs,
    load_queries,
    locate_scales,
    multiply_keys,
    scale_queries,
    scales_per_key,
    weigh_values,
    widen,
    words_of,
    zero_acc,
)
from flash_decoding.backends.triton.launch import capability, launch, may_overlap, variant
from flash_decoding.backends.triton.online_softmax import finish_softmax, weigh_scores
from flash_decoding.backends.triton.pieces import find_piece, note_slots
from flash_decoding.backends.triton.scores import sees, transform_scores
from flash_decoding.backends.triton.tile_io import (
    address,
    by_column,
    by_row,
    load_rows,
    locate_rows,
    prefetch_rows,
    split_range,
    visible_range,
)
from flash_decoding.problem import Problem
from flash_decoding.quantization import CodeFormat
from flash_decoding.split_plan import Plan, Tile
from flash_decoding.workspace import Partial

# Bytes that a program needs for keys wider than 256 whose 4-bit codes have several scales in a part.
_WIDE_GROUPS_MEMORY = 144 * 1024


@triton.jit(
    do_not_specialize=[
        "block_table_step", "key_mask_step_b", "key_mask_step_n", "tree_step_b", "tree_step_t", "tree_step_n",
        "window", "kv_len", "B", "Hkv", "num_splits", "split_size", "at_once",
    ],
    do_not_specialize_on_alignment=[
        "block_table_ptr", "kv_lens_ptr", "kv_start_ptr", "q_lens_ptr", "key_mask_ptr", "tree_mask_ptr", "alibi_ptr",
        "sinks_ptr", "lse_ptr", "m_ptr", "l_ptr", "k_scale_ptr", "v_scale_ptr",
    ],
)  # fmt: skip
def _chunk_kernel(
    q_ptr, q_stride,  # [B, Hq, Lq, D]; strides without the last, contiguous axis, here and below
    k_ptr, k_stride,  # [B, Hkv, N, D], or pages [pages, Hkv, PAGE_SIZE, D]; of codes, words of 16 bits
    v_ptr, v_stride,  # likewise, Dv wide; stride None: as k's
    k_scale_ptr, k_scale_stride,  # as Problem has them; None: 1
    v_scale_ptr, v_scale_stride,
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
    K_FORM: tl.constexpr, V_FORM: tl.constexpr,  # CodeFormat; None: 16 or 32 bits, as q
    FP8_CONVERT: tl.constexpr,  # whether the device has an instruction for e4m3
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, REST_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    NUM_WARPS: tl.constexpr,
    TURNED: tl.constexpr,  # whether tiles of scores are [N, M] and acc is [Dv, M]
    K_STEP: tl.constexpr, V_STEP: tl.constexpr,  # from key to key, in 32 bits; 0: the stride has it
    PREFETCH: tl.constexpr,  # whether the first tile, rows end to end, is asked for while the queries are on their way
    EARLY_REDUCE: tl.constexpr,  # whether the reduce kernel may start, and wait, when all programs have started
):  # fmt: skip
    """One program: one sequence, one split, one KV head with BLOCK_M of its query rows."""
    if EARLY_REDUCE:
        tl.extra.cuda.gdc_launch_dependents()
    if v_stride is None:
        v_stride = k_stride
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

    row = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    h_q, t = h_kv * G + row // Lq, row % Lq
    in_row, in_token = row < G * Lq, (row < G * Lq) & (t < q_len)
    q_at = address(q_ptr, q_stride, (b, h_q.to(tl.int64)[:, None], t[:, None]))
    q = load_queries(q_at, in_token, 0, D, BLOCK_D, K_FORM)  # parts of [M, D]
    if REST_D > 0:
        q = q + load_queries(q_at, in_token, BLOCK_D, D, REST_D, K_FORM)
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
    IS_PAGED: tl.constexpr = block_table_ptr is not None
    if k_scale_ptr is not None:
        k_scale_ptr = locate_scales(k_scale_ptr, k_scale_stride, b, h_kv, K_FORM, IS_PAGED)
    if v_scale_ptr is not None:
        v_scale_ptr = locate_scales(v_scale_ptr, v_scale_stride, b, h_kv, V_FORM, IS_PAGED)
    q_sums = ()
    if K_FORM is not None:
        q, scale, q_sums = scale_queries(q, scale, k_scale_ptr, D, BLOCK_D, REST_D, K_FORM, TURNED)

    if PREFETCH:
        # What loads keys and values waits for the queries first, which take as long to come.
        first_stop = tl.minimum(start + BLOCK_N, stop)
        prefetch_rows(k_ptr, start, first_stop, D)
        prefetch_rows(v_ptr, start, first_stop, DV)
    cache = (k_ptr, k_stride, v_ptr, v_stride, block_table_ptr, key_mask_ptr, key_mask_step_n)
    scales = (q_sums, k_scale_ptr, k_scale_stride, v_scale_ptr, v_scale_stride)
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
    acc = zero_acc(BLOCK_M, BLOCK_DV, DV, V_FORM, NUM_WARPS, TURNED)
    unit = tl.full([], LEAST_SCALE, tl.float32)
    whole = start + (stop - start) // BLOCK_N * BLOCK_N
    for n in range(start, whole, BLOCK_N):
        m, l, acc, unit = _fold_tile(
            m, l, acc, unit, q, slopes, tokens, cache, scales, options, n, stop, False, BY_ROW, CAUSAL, ONE_PAGE,
            PAGE_SIZE, V_IN_K, K_FORM, V_FORM, FP8_CONVERT, Lq, D, DV, BLOCK_N, BLOCK_D, REST_D, BLOCK_DV, TURNED,
            K_STEP, V_STEP,
        )  # fmt: skip
    if whole < stop:
        m, l, acc, unit = _fold_tile(
            m, l, acc, unit, q, slopes, tokens, cache, scales, options, whole, stop, True, BY_ROW, CAUSAL, ONE_PAGE,
            PAGE_SIZE, V_IN_K, K_FORM, V_FORM, FP8_CONVERT, Lq, D, DV, BLOCK_N, BLOCK_D, REST_D, BLOCK_DV, TURNED,
            K_STEP, V_STEP,
        )  # fmt: skip

    at_row = at + row
    if V_FORM is not None:
        acc = finish_values(acc, unit, v_scale_ptr, DV, V_FORM, TURNED)
    WORDS: tl.constexpr = words_of(DV, V_FORM)
    word = tl.arange(0, BLOCK_DV)
    in_rd = by_row(in_row, TURNED) & by_column(word < WORDS, TURNED)
    if acc_ptr is None:
        sink = None
        if sinks_ptr is not None:
            sink = tl.load(sinks_ptr + h_q, mask=in_row, other=0.0)
        norm, lse = finish_softmax(m, l, sink)
        for i in tl.static_range(len(acc)):
            dv = column_of(word, i, DV, V_FORM)
            index = (b, by_row(h_q.to(tl.int64), TURNED), by_row(t, TURNED), by_column(dv, TURNED))
            values = (acc[i] * by_row(norm, TURNED)).to(out_ptr.dtype.element_ty)
            tl.store(address(out_ptr, out_stride, index), values, mask=in_rd)
        if lse_ptr is not None:
            tl.store(lse_ptr + at_row, lse, mask=in_row)
    else:
        if split_size is not None:
            # Splits of a fixed size may be many and mostly empty; the merge does not read the acc of an empty one.
            in_rd = by_row(in_row, TURNED) & by_column(word < tl.where(start < stop, WORDS, 0), TURNED)
        for i in tl.static_range(len(acc)):
            dv = column_of(word, i, DV, V_FORM)
            tl.store(acc_ptr + by_row(at_row, TURNED) * DV + by_column(dv, TURNED), acc[i], mask=in_rd)
        tl.store(m_ptr + at_row, m, mask=in_row)
        tl.store(l_ptr + at_row, l, mask=in_row)


@triton.jit
def _fold_tile(
    m, l, acc, unit, q, slopes, tokens, cache, scales, options, first, stop,
    PARTIAL: tl.constexpr, BY_ROW: tl.constexpr, CAUSAL: tl.constexpr, ONE_PAGE: tl.constexpr,
    PAGE_SIZE: tl.constexpr, V_IN_K: tl.constexpr, K_FORM: tl.constexpr, V_FORM: tl.constexpr,
    FP8_CONVERT: tl.constexpr, Lq: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, REST_D: tl.constexpr, BLOCK_DV: tl.constexpr, TURNED: tl.constexpr,
    K_STEP: tl.constexpr, V_STEP: tl.constexpr,
):  # fmt: skip
    """Fold the keys from `first` on into the state; only a PARTIAL tile looks at `stop`.

    q [M, D], m and l [M]; k [N, D]; s and p [M, N], v [N, Dv], acc [M, Dv], if TURNED [N, M], [Dv, N] and [Dv, M].
    """
    t, in_token, first_new = tokens
    k_ptr, k_stride, v_ptr, v_stride, block_table_ptr, key_mask_ptr, key_mask_step_n = cache
    q_sums, k_scale_ptr, k_scale_stride, v_scale_ptr, v_scale_stride = scales
    scale, softcap, window, tree_mask_ptr, tree_step_t, tree_step_n = options
    n = first + tl.arange(0, BLOCK_N)
    in_n = None
    if PARTIAL:
        in_n = n < stop
    if key_mask_ptr is not None:
        # The value of a masked key may be NaN, which a weight of zero does not remove: it is masked on load too.
        in_n = tl.load(key_mask_ptr + n.to(tl.int64) * key_mask_step_n, mask=n < stop, other=0) != 0

    where = locate_rows(block_table_ptr, n, first, in_n, PAGE_SIZE, ONE_PAGE)
    k_words = load_rows(k_ptr, k_stride, where, in_n, K_STEP, 0, words_of(D, K_FORM), BLOCK_D, False)
    if V_IN_K:
        v_words = k_words
    else:
        v_words = load_rows(v_ptr, v_stride, where, in_n, V_STEP, 0, words_of(DV, V_FORM), BLOCK_DV, TURNED)
    k = widen(k_words, K_FORM, FP8_CONVERT)
    if REST_D > 0:
        rest = load_rows(k_ptr, k_stride, where, in_n, K_STEP, BLOCK_D, words_of(D, K_FORM), REST_D, False)
        k = k + widen(rest, K_FORM, FP8_CONVERT)
    k_scales = (k_scale_ptr, k_scale_stride, where)
    s = multiply_keys(q, q_sums, k, k_scales, in_n, D, BLOCK_D, K_FORM, TURNED)

    own = first_new + t
    s = transform_scores(s, scale, softcap, slopes, own, n, TURNED)
    if in_n is not None:
        s = tl.where(by_column(in_n, TURNED), s, float("-inf"))
    if BY_ROW:
        seen = sees(n, own, t, in_token, tree_mask_ptr, tree_step_t, tree_step_n, first_new, window, CAUSAL, Lq, TURNED)
        s = tl.where(seen, s, float("-inf"))
    m, alpha, p = weigh_scores(m, s, TURNED)
    v = widen(v_words, V_FORM, FP8_CONVERT)
    v_scales = (v_scale_ptr, v_scale_stride, where)
    acc, unit = weigh_values(acc, unit, alpha, p, v, v_scales, in_n, DV, V_FORM, TURNED)
    # After acc: with the sum before it heads of 256 spill on sm_90 (Triton 3.9).
    l = l * alpha + tl.sum(p, 0 if TURNED else 1)
    return m, l, acc, unit


def launch_chunk(problem: Problem, plan: Plan, partial: Partial | None, out: Tensor, lse: Tensor | None) -> None:
    """Fill partial, or out and lse when it is None; nothing is allocated or chosen here. Codes come as view_words()."""
    p, tile = problem, plan.tile
    strides = p.q.stride()[:3], p.k.stride()[:3], p.v.stride()[:3], out.stride()[:3]
    k_form, v_form = (None, None) if p.kv_format is None else (p.kv_format.k, p.kv_format.v)
    k_codes, v_codes = (None if x is None else x.codes for x in (k_form, v_form))
    turned = is_turned(tile, p.q.dtype)
    v_in_k = (
        not turned
        and tile.block_dv == tile.block_d == p.v.shape[3] <= p.k.shape[3]
        and p.v.data_ptr() == p.k.data_ptr()
        and strides[1] == strides[2]
        and k_codes == v_codes
    )
    problems = p.batch * p.heads_kv * -(-p.group * p.q_len // tile.block_m)
    table, mask, tree, scales = p.block_table, p.key_mask, p.tree_mask, (p.k_scale, p.v_scale)
    arrays = (table, p.kv_lens, p.kv_start, p.q_lens, mask, tree, p.alibi_slopes, p.sinks, *scales)
    scale_strides = tuple([_row_strides(x) for x in scales])
    acc, m, l = (None, None, None) if partial is None else partial
    steps = tuple([fixed_step(x, p.page_size or tile.block_n) for x in (p.k, p.v)])
    prefetches = (
        turned and p.kv_format is None and p.page_size is None and are_end_to_end(p.k, p.v)
        and capability(p.q.device.index) >= (9, 0)
    )  # fmt: skip
    # Equal strides are worked with once.
    v_stride = None if strides[1] == strides[2] and steps[0] == steps[1] else strides[2]
    key = (
        variant((p.q, p.k, p.v, out), strides), p.q.dtype, tuple([x if x is None else x.dtype for x in arrays]),
        p.softcap is None, p.window is None, partial is None, lse is None, plan.split_size is None,
        plan.at_once is None, v_stride is None,
        any(x is not None and max(x.stride()) >= 2**31 for x in (table, mask, tree)),
        None if p.kv_format is None else variant((), scale_strides),
    )  # fmt: skip
    launch(
        _chunk_kernel,
        key,
        (problems, plan.num_splits) if plan.at_once is None else (plan.count_pieces(problems), 1),
        (
            p.q, strides[0], p.k, strides[1], p.v, v_stride, p.k_scale, scale_strides[0], p.v_scale, scale_strides[1],
            table, 0 if table is None else table.stride(0), p.kv_lens, p.kv_start, p.q_lens,
            mask, *((0, 0) if mask is None else mask.stride()), tree, *((0, 0, 0) if tree is None else tree.stride()),
            p.alibi_slopes, p.sinks if partial is None else None,
            out, strides[3], lse if partial is None else None, acc, m, l,
            p.scale, p.softcap, None if p.window is None else min(p.window, p.kv_len), p.kv_len, p.batch, p.heads_kv,
            plan.num_splits, plan.split_size, plan.at_once,
        ),
        (
            p.group, p.q_len, p.head_dim, p.value_dim, p.causal, p.page_size, v_in_k, k_form, v_form,
            "fp8_e4m3" in (k_codes, v_codes) and capability(p.q.device.index) >= (8, 9),
            tile.block_m, tile.block_n, tile.block_d, tile.rest_d, tile.block_dv, tile.num_warps,
            turned, *steps, prefetches, partial is not None and may_overlap(p.q.device.index),
        ),
        (tile.num_warps, tile.num_stages),
    )  # fmt: skip


def view_words(problem: Problem) -> Problem:
    """The problem as the kernel loads it: codes as words of 16 bits, pairs of float16 scales as words of 32."""
    p, words = problem, {}
    if p.kv_format is None:
        return p
    for name, form in (("k", p.kv_format.k), ("v", p.kv_format.v)):
        codes, scale = getattr(p, name), getattr(p, f"{name}_scale")
        if form is not None and codes.dtype != torch.int16:
            width = p.head_dim if name == "k" else p.value_dim
            words[name] = codes.view(torch.int16)
            if has_scale_pairs(width, form) and _fits(scale, 2):
                words[f"{name}_scale"] = scale.view(torch.int32)
    return p._replace(**words)


def find_word_errors(problem: Problem, shared_memory: float) -> Iterator[Exception]:
    """Quantised caches that view_words() or a program cannot take."""
    p = problem
    sides = (("k", p.k, p.kv_format.k, p.head_dim), ("v", p.v, p.kv_format.v, p.value_dim)) if p.kv_format else ()
    for name, codes, form, width in sides:
        if form is None:
            continue
        if not _fits(codes, 2):
            where = "an odd one" if codes.data_ptr() % 2 else f"strides {list(codes.stride())}"
            yield ValueError(f"{name} must have codes at an even address and with even strides on a GPU, got {where}")
        yield from find_group_errors(name, form, width, shared_memory)


def find_group_errors(name: str, form: CodeFormat | None, width: int, shared_memory: float) -> Iterator[ValueError]:
    """Groups of a side so wide for which a program has too little memory; shared_memory: its bytes on the device."""
    if scales_per_key(width, form) == math.inf and width > 256 and shared_memory < _WIDE_GROUPS_MEMORY:
        assert form is not None, "it has scales"
        yield ValueError(
            f"{name} must have groups of at least {width // 4} elements, or be at most 256 wide, on a GPU with "
            f"{shared_memory} bytes of shared memory per program, got groups of {form.group} and {width}"
        )


def _fits(x: Tensor, count: int) -> bool:
    """Whether every row of x begins where words of so many elements may begin."""
    return x.data_ptr() % (count * x.element_size()) == 0 and all(step % count == 0 for step in x.stride()[:-1])


def _row_strides(scale: Tensor | None) -> tuple[int, ...]:
    """Strides of [B, Hkv, N] of scales per token or group, and of [Hkv] of those per channel."""
    if scale is None or scale.ndim < 2:
        return 0, 0, 0
    return (0, scale.stride(0), 0) if scale.ndim == 2 else scale.stride()[:3]


def is_turned(tile: Tile, dtype: torch.dtype) -> bool:
    """Whether query rows are the columns of the products; exact float32 uses no tensor cores."""
    return tile.block_m < 16 and dtype != torch.float32


def fixed_step(x: Tensor, slots: int) -> int:
    """Elements from key to key, where a cache of this kind always has so many and offsets fit into 32 bits; else 0."""
    width, step = x.shape[3], x.stride(2)
    return step if step in (width, x.shape[1] * width) and slots * step < 2**31 else 0


def are_end_to_end(*caches: Tensor) -> bool:
    """Whether the keys of a head follow each other without gaps, 16 bytes at a time."""
    return all(x.stride(2) == x.shape[3] and x.shape[3] * x.element_size() % 16 == 0 for x in caches)
