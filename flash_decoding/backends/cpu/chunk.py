"""Attention of the query rows of one KV head over one split of the keys.

    s = scale * log2(e) * (q . k),   m = max s,   l = sum 2**(s - m),   acc = sum 2**(s - m) v

A unit of work is one (sequence, KV head, split). It walks its keys in tiles of TILE: each tile is read from memory
once and used by all the query rows of the KV head, four at a time; the first four prefetch what is ahead. The rows are
ordered by token, then by head, so that four rows are of few tokens, which see about the same keys. Only keys that some
row sees enter a tile, by address, so nothing else is ever loaded and pages cost one look-up per tile and page. A split
without a key leaves acc = 0, m = -inf, l = 0. The thread that finishes the last split of a (sequence, KV head) merges
them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from flash_decoding.backends.cpu.int4 import (
    Groups,
    add_code_values,
    list_group_scales,
    order_as_codes,
    order_as_elements,
    scale_bytes,
    score_codes,
    sum_runs,
)
from flash_decoding.backends.cpu.masks import find_reach, hide_keys, hides, is_listed, overlaps
from flash_decoding.backends.cpu.packing import make_packer, make_reader
from flash_decoding.backends.cpu.reduce import merge_row, vector_offset
from flash_decoding.backends.cpu.scores import (
    NO_SCORE,
    ScoreOptions,
    add_bias,
    divisor,
    finite_base,
    natural_lse,
    transform_scores,
    weight,
)
from flash_decoding.backends.cpu.simd import (
    FLOAT32,
    LANES,
    add,
    address_of,
    at_most,
    div,
    element_bytes,
    exp2,
    fetch_add,
    fma_outer,
    holds_codes,
    holds_fp8,
    holds_pairs,
    inner,
    lanes_max,
    lanes_sum,
    load,
    load_addresses,
    load_block,
    load_double,
    load_each,
    load_first_each,
    load_float,
    load_int32,
    load_int64,
    load_second_each,
    load_shares,
    maximum,
    mul,
    mul_rows,
    one_per_line,
    places,
    prefetch_each,
    splat,
    splat_each,
    store,
    store_block,
    store_double,
    store_float,
    store_int64,
    store_shares,
    sub,
    sum_each,
    unit,
    vectors_per_line,
    zeros_outer,
)

# Keys per tile: 64 costs 10 % more at D = 128, 32 costs 30 % (Zen 5, float32 and bfloat16).
TILE = 128
# Rows are prefetched into the first-level cache, so many bytes ahead of their use divided by the bytes of an element:
# 8 KB in float32, 16 KB in the others. Half as many cost 5 % in float32 and as much again cost 5 %; in bfloat16 half as
# many cost 6 %. A whole tile ahead, into the second-level cache, costs 15 to 25 % in float32 (Zen 5, D = 128).
BYTES_AHEAD = 32768
MOST_AHEAD = 64
LIST = TILE + MOST_AHEAD + LANES
# Tuples stand for sizes known to the compiler: as many query rows, keys or columns as they have entries.
# Rows times keys, and four rows times columns, make LANES accumulators, which fill half of the registers.
FOUR_ROWS = (0, 1, 2, 3)
ONE_ROW = (0,)
KEYS_OF_FOUR_ROWS = tuple(range(LANES // 4))
KEYS_OF_ONE_ROW = tuple(range(LANES))
COLUMNS = tuple(range(LANES // 4))
PAIRS = tuple(range(LANES // 8))


class View(NamedTuple):
    """Address and strides of a [batch, heads, length, width] array, in bytes; of a paged cache, batch means pages."""

    base: int
    batch: int
    head: int
    token: int


class Sequence(NamedTuple):
    """Address, stride in bytes and element size of a [batch] integer array; base 0 where there is none."""

    base: int
    step: int
    size: int


class Call(NamedTuple):
    """One call as plain numbers; an address of 0 stands for an array that is not there.

    Behind it lie a counter of units and, where there are several splits, one of splits per (sequence, KV head).
    """

    q: View
    k: View
    v: View
    out: View
    lse: int
    partial_acc: int
    partial_m: int
    partial_l: int
    kv_lens: Sequence
    kv_start: Sequence
    q_lens: Sequence
    block_table: View  # [batch, pages]: only batch and token are strides
    key_mask: View  # [batch, keys], likewise
    tree_mask: View  # [batch, query tokens, new tokens]
    k_scale: View  # of codes, float32; a stride is 0 where scales are shared
    v_scale: View
    channels: View  # [1, heads, 1, head_dim] float32, by which q is multiplied
    k_groups: Groups
    v_groups: Groups
    causal: int  # 1 or 0; 0 with a tree_mask, which takes its place
    window: int  # kv_len where there is none
    batch: int
    heads_q: int
    heads_kv: int
    q_len: int
    kv_len: int
    page_size: int  # without pages at least kv_len
    head_dim: int
    value_dim: int
    num_splits: int
    split_size: int  # 0: share tiles of block_n keys out evenly
    block_n: int
    score: ScoreOptions


PACKER = make_packer(Call)
SIZE = PACKER.size
read_call = make_reader(Call)


class Scratch(NamedTuple):
    """Addresses of one thread's working memory; rows are padded to whole vectors and to whole blocks of rows."""

    q: int  # [rows, q_row bytes] float32
    q_row: int
    acc: int  # [rows, acc_row bytes] float32
    acc_row: int
    s: int  # [4, TILE] float32
    m: int  # [rows] float32
    l: int  # [rows] float64
    alpha: int  # [4] float32
    k: int  # [2, LIST] int64 addresses of the visible keys, of this tile and the next
    v: int  # [2, LIST] int64, their values
    n: int  # [2, TILE] float32, their positions
    k_scale: int  # [2, TILE] float32, or what int4.list_group_scales() makes
    v_scale: int
    sums: int  # [rows, runs, LANES] float32, see int4.sum_runs()
    line: int  # [head_dim or value_dim] float32
    weights: int  # [num_splits] float32


class KeyTile(NamedTuple):
    """The visible ones of the keys from begin to end; the last entries are repeated to fill a vector."""

    begin: int
    end: int
    size: int
    k: int  # address of [size] int64 addresses, behind which those of the next tile begin
    v: int
    n: int  # address of [size] float32, positions counted from begin: small, so exact
    k_scale: int  # address of [size] float32, or of what int4.list_group_scales() makes
    v_scale: int


class Block(NamedTuple):
    """Four query rows, or one, and the tokens from the first row's to that of the last that counts."""

    row: int
    first: int
    last: int


@inner
def whole(n, step):
    """n rounded up to a multiple of step."""
    return (n + step - 1) // step * step


@inner
def cut_scratch(base, call):
    """The parts of scratch memory that begins at base, and where it ends."""
    rows = whole(call.heads_q // call.heads_kv * call.q_len, 4)
    q_row = 4 * whole(call.head_dim, LANES)
    acc_row = 4 * whole(call.value_dim, LANES * len(COLUMNS))
    q = base
    acc = q + rows * q_row
    s = acc + rows * acc_row
    k = s + 4 * TILE * 4
    v = k + 16 * LIST
    n = v + 16 * LIST
    l = n + 8 * TILE
    m = l + 8 * rows
    alpha = m + 4 * rows
    k_scale = alpha + 16
    v_scale = k_scale + 2 * TILE * listed_bytes(call.k_groups)
    sums = v_scale + 2 * TILE * listed_bytes(call.v_groups)
    line = sums + rows * sums_bytes(call)
    weights = line + 4 * max(call.head_dim, call.value_dim)
    end = weights + 4 * call.num_splits
    return Scratch(q, q_row, acc, acc_row, s, m, l, alpha, k, v, n, k_scale, v_scale, sums, line, weights), end


@inner
def listed_bytes(groups):
    """Bytes of scratch for the scales of one key."""
    return max(4, scale_bytes(groups))


@inner
def sums_bytes(call):
    """Bytes of scratch for the sums of one row of q."""
    return 4 * LANES * call.k_groups.runs


@inner
def token_of(call, row):
    """The query token of a row."""
    return row // (call.heads_q // call.heads_kv)


@inner
def head_of(call, h_kv, row):
    """The query head of a row."""
    group = call.heads_q // call.heads_kv
    return h_kv * group + row % group


@inner
def split_range(call, reach, split):
    """First key and end of a split."""
    first, last = reach.first, reach.last
    if call.split_size > 0:
        begin, end = split * call.split_size, (split + 1) * call.split_size
    else:
        tiles = (last - first + call.block_n - 1) // call.block_n
        begin = split * tiles // call.num_splits * call.block_n
        end = (split + 1) * tiles // call.num_splits * call.block_n
    return min(first + begin, last), min(first + end, last)


@inner
def load_queries(call, kind, k_kind, scratch, b, h_kv, rows):
    """Widen the query rows of a KV head into scratch, zero where padded to a whole block."""
    scales = address_of(call.channels, 0, h_kv, 0)
    for row in range(whole(rows, 4)):
        base = address_of(call.q, b, head_of(call, h_kv, row), token_of(call, row))
        for i in range(scratch.q_row // (4 * LANES)):
            place = scratch.q + row * scratch.q_row + 4 * LANES * i
            if row >= rows:
                store(place, splat(np.float32(0.0)), FLOAT32)
                continue
            d = vector_offset(i, call.head_dim)
            x = load(base + d * element_bytes(kind), kind)
            if call.channels.base != 0:
                x = mul(x, load(scales + 4 * d, FLOAT32))
            store(place, x, FLOAT32)
            for lane in range(i * LANES - d):  # the elements that the vector before has already
                store_float(place + 4 * lane, np.float32(0.0))
        if holds_pairs(k_kind):
            q = scratch.q + row * scratch.q_row
            order_as_codes(q, scratch.line, call.head_dim)
            sum_runs(q, call.k_groups, scratch.sums + row * sums_bytes(call))


@inner
def clear_row(scratch, row):
    """The softmax of a row that has seen no key."""
    for i in range(scratch.acc_row // (4 * LANES)):
        store(scratch.acc + row * scratch.acc_row + 4 * LANES * i, splat(np.float32(0.0)), FLOAT32)
    store_float(scratch.m + 4 * row, NO_SCORE)
    store_double(scratch.l + 8 * row, 0.0)


@inner
def page_of(call, b, n):
    """The page of key n of a sequence; a dense cache is one page per sequence."""
    if call.block_table.base == 0:
        return b
    return load_int32(address_of(call.block_table, b, 0, n // call.page_size))


@inner
def list_scales(view, groups, kind, page, h_kv, row, place):
    """The scales of one row of keys or values, as score_tile() and add_values() want them."""
    scales = address_of(view, page, h_kv, row)
    if holds_pairs(kind):
        list_group_scales(scales, groups, place)
    elif holds_codes(kind):
        scale = load_float(scales) if view.base != 0 else np.float32(1.0)
        store_float(place, scale * unit(kind))


@inner
def find_keys(call, k_kind, v_kind, scratch, slot, reach, h_kv, begin, end):
    """The visible ones of at most TILE keys, listed in a slot of scratch."""
    keys = scratch.k + slot * 8 * LIST
    values = scratch.v + slot * 8 * LIST
    positions = scratch.n + slot * 4 * TILE
    k_step, v_step = listed_bytes(call.k_groups), listed_bytes(call.v_groups)
    k_scales, v_scales = scratch.k_scale + slot * TILE * k_step, scratch.v_scale + slot * TILE * v_step
    count, page_end = 0, begin
    while page_end < end:
        n = page_end
        page = page_of(call, reach.b, n)
        page_begin = n // call.page_size * call.page_size
        page_end = min(page_begin + call.page_size, end)
        k = address_of(call.k, page, h_kv, -page_begin)
        v = address_of(call.v, page, h_kv, -page_begin)
        for n in range(n, page_end):  # noqa: B020, it goes on from n
            store_int64(keys + 8 * count, k + n * call.k.token)
            store_int64(values + 8 * count, v + n * call.v.token)
            store_float(positions + 4 * count, np.float32(n - begin))
            if is_listed(call, reach, n):
                row = n - page_begin
                list_scales(call.k_scale, call.k_groups, k_kind, page, h_kv, row, k_scales + k_step * count)
                list_scales(call.v_scale, call.v_groups, v_kind, page, h_kv, row, v_scales + v_step * count)
                count += 1
    if count > 0:
        for i in range(count, whole(count, LANES)):
            store_int64(keys + 8 * i, load_int64(keys + 8 * (count - 1)))
            store_float(positions + 4 * i, load_float(positions + 4 * (count - 1)))
    return KeyTile(begin, end, count, keys, values, positions, k_scales, v_scales)


@inner
def keys_ahead(width, kind):
    """How many keys ahead to prefetch rows of this width."""
    size = element_bytes(kind)
    if holds_pairs(kind):
        width //= 2
    return min(max(BYTES_AHEAD // (width * size * size), 4), MOST_AHEAD)


@inner
def join_lists(call, k_kind, v_kind, tile, ahead):
    """List the first keys of the tile ahead behind those of a tile, for the prefetches; how many are listed then."""
    more = min(ahead.size, max(keys_ahead(call.head_dim, k_kind), keys_ahead(call.value_dim, v_kind)) + LANES)
    for i in range(more):
        store_int64(tile.k + 8 * (tile.size + i), load_int64(ahead.k + 8 * i))
        store_int64(tile.v + 8 * (tile.size + i), load_int64(ahead.v + 8 * i))
    return tile.size + more


@inner
def score_tile(call, kind, scratch, tile, listed, row, rows, width):
    """s [rows, tile.size] in base 2, `width` keys at a time, and -inf from there to the next whole vector."""
    q = places(scratch.q + row * scratch.q_row, scratch.q_row, rows)
    sums = places(scratch.sums + row * sums_bytes(call), sums_bytes(call), rows)
    s = places(scratch.s, 4 * TILE, rows)
    ahead = keys_ahead(call.head_dim, kind)
    for n in range(0, tile.size, len(width)):
        k = load_addresses(tile.k + 8 * n, width)
        k_ahead = load_addresses(tile.k + 8 * (n + ahead), width)
        fetching = row == 0 and n + ahead + len(width) <= listed
        if holds_pairs(kind):
            scales = tile.k_scale + scale_bytes(call.k_groups) * n
            scores = score_codes(kind, call.k_groups, q, sums, k, k_ahead, fetching, scales, width)
        else:
            dots = zeros_outer(rows, width)
            wide = call.head_dim // (2 * LANES) if holds_fp8(kind) else 0
            for i in range(wide):
                at = 2 * LANES * i
                if fetching and 2 * i % vectors_per_line(kind) == 0:
                    prefetch_each(k_ahead, at)
                dots = fma_outer(load_each(q, 8 * LANES * i, FLOAT32), load_first_each(k, at, kind), dots)
                dots = fma_outer(load_each(q, 8 * LANES * i + 4 * LANES, FLOAT32), load_second_each(k, at, kind), dots)
            for i in range(2 * wide, scratch.q_row // (4 * LANES)):
                at = vector_offset(i, call.head_dim) * element_bytes(kind)
                if fetching and i % vectors_per_line(kind) == 0:
                    prefetch_each(k_ahead, at)
                dots = fma_outer(load_each(q, 4 * LANES * i, FLOAT32), load_each(k, at, kind), dots)
            scores = sum_each(dots)
        if holds_codes(kind) and not holds_pairs(kind):
            scores = mul(scores, load_shares(tile.k_scale + 4 * n, rows))
        store_shares(s, 4 * n, transform_scores(scores, call.score))
    for r in range(len(rows)):
        for n in range(tile.size, whole(tile.size, LANES)):
            store_float(scratch.s + 4 * (r * TILE + n), NO_SCORE)


@inner
def adjust_scores(call, scratch, tile, reach, h_kv, block, rows):
    """What depends on the query row: its bias, and -inf for the keys that it does not see."""
    hiding = hides(call, reach, block.first, block.last, tile)
    if not hiding and call.score.slopes == 0:
        return
    for r in range(len(rows)):
        token = min(token_of(call, block.row + r), block.last)  # rows of padding count as the last token
        s = scratch.s + 4 * TILE * r
        if call.score.slopes != 0:
            head = head_of(call, h_kv, block.row + r)
            add_bias(call.score, head, reach.origin + token - tile.begin, tile, s)
        if hiding:
            hide_keys(call, reach, token, tile, s)


@inner
def weigh_tile(v_kind, scratch, tile, row, rows):
    """Scores to weights p = 2**(s - m) in place; updates m and l and leaves alpha, by which older sums shrink.

    Where values are codes with a scale for each row of them, p is multiplied by it.
    """
    for r in range(len(rows)):
        s = scratch.s + 4 * TILE * r
        top = splat(NO_SCORE)
        for n in range(0, tile.size, LANES):
            top = maximum(load(s + 4 * n, FLOAT32), top)
        m_old = load_float(scratch.m + 4 * (row + r))
        m = max(m_old, lanes_max(top))
        base = splat(finite_base(m))
        total = splat(np.float32(0.0))
        for n in range(0, tile.size, LANES):
            p = exp2(sub(load(s + 4 * n, FLOAT32), base))
            total = add(total, p)
            if holds_codes(v_kind) and not holds_pairs(v_kind):
                p = mul(p, load(tile.v_scale + 4 * n, FLOAT32))
            store(s + 4 * n, p, FLOAT32)
        alpha = weight(m_old, m)
        store_float(scratch.m + 4 * (row + r), m)
        l = scratch.l + 8 * (row + r)
        store_double(l, load_double(l) * alpha + lanes_sum(total))
        store_float(scratch.alpha + 4 * r, alpha)


@inner
def add_wide_values(kind, tile, p, alpha, acc_rows, listed, ahead, end, pairs):
    """add_values() for fp8 codes, whose columns up to `end` are loaded two at a time."""
    for i in range(0, end, 2 * len(pairs)):
        in_v = places(LANES * i, 2 * LANES, pairs)
        in_first, in_second = places(4 * LANES * i, 8 * LANES, pairs), places(4 * LANES * (i + 1), 8 * LANES, pairs)
        first, second = (
            mul_rows(alpha, load_block(acc_rows, in_first)),
            mul_rows(alpha, load_block(acc_rows, in_second)),
        )
        for n in range(tile.size):
            if n + ahead < listed:
                prefetch_each(one_per_line(in_v, kind), load_int64(tile.v + 8 * (n + ahead)))
            v, weights = load_int64(tile.v + 8 * n), splat_each(p, 4 * n)
            first = fma_outer(weights, load_first_each(in_v, v, kind), first)
            second = fma_outer(weights, load_second_each(in_v, v, kind), second)
        store_block(acc_rows, in_first, first)
        store_block(acc_rows, in_second, second)


@inner
def add_values(call, kind, scratch, tile, listed, row, rows, columns):
    """acc = alpha * acc + p v, some columns of vectors at a time, held in registers over the keys of the tile."""
    p = places(scratch.s, 4 * TILE, rows)
    alpha = splat_each(places(scratch.alpha, 4, rows), 0)
    acc_rows = places(scratch.acc + row * scratch.acc_row, scratch.acc_row, rows)
    step = LANES * element_bytes(kind)
    ahead = keys_ahead(call.value_dim, kind)
    if holds_pairs(kind):
        listed = listed if row == 0 else 0
        add_code_values(kind, call.v_groups, tile, p, alpha, acc_rows, listed, ahead, columns)
        return
    wide = call.value_dim // (len(columns) * LANES) * len(columns) if holds_fp8(kind) else 0
    if wide > 0:
        add_wide_values(kind, tile, p, alpha, acc_rows, listed if row == 0 else 0, ahead, wide, PAIRS)
    for i in range(wide, (call.value_dim + LANES - 1) // LANES, len(columns)):
        in_acc = places(4 * LANES * i, 4 * LANES, columns)
        in_v = at_most(places(step * i, step, columns), (call.value_dim - LANES) * element_bytes(kind))
        acc = mul_rows(alpha, load_block(acc_rows, in_acc))
        for n in range(tile.size):
            if row == 0 and n + ahead < listed:
                prefetch_each(one_per_line(in_v, kind), load_int64(tile.v + 8 * (n + ahead)))
            acc = fma_outer(splat_each(p, 4 * n), load_each(in_v, load_int64(tile.v + 8 * n), kind), acc)
        store_block(acc_rows, in_acc, acc)


@inner
def attend_tile(call, k_kind, v_kind, scratch, tile, listed, reach, h_kv, block, rows, width):
    """Fold the keys of a tile into some query rows; the first rows prefetch."""
    score_tile(call, k_kind, scratch, tile, listed, block.row, rows, width)
    adjust_scores(call, scratch, tile, reach, h_kv, block, rows)
    weigh_tile(v_kind, scratch, tile, block.row, rows)
    add_values(call, v_kind, scratch, tile, listed, block.row, rows, COLUMNS)


@inner
def store_row(base, kind, scratch, row, value_dim, l):
    """acc / l of one row to memory."""
    for i in range((value_dim + LANES - 1) // LANES):
        acc = load(scratch.acc + row * scratch.acc_row + 4 * LANES * i, FLOAT32)
        store(base + vector_offset(i, value_dim) * element_bytes(kind), div(acc, splat(l)), kind)


@inner
def store_state(call, kind, v_kind, scratch, b, h_kv, split, rows):
    """Leave the partial softmax of all rows, or finish them if it is not wanted; only the first `rows` count."""
    for row in range(call.heads_q // call.heads_kv * call.q_len):
        head, token = head_of(call, h_kv, row), token_of(call, row)
        # A row that saw no key may have added its zero weight times a value that is not finite.
        if row >= rows or load_double(scratch.l + 8 * row) == 0.0:
            clear_row(scratch, row)
        if holds_pairs(v_kind):
            order_as_elements(scratch.acc + row * scratch.acc_row, scratch.line, call.value_dim)
        # Rounded as partials are: a row's bits must not tell whether its cache could have held more splits.
        m, l = load_float(scratch.m + 4 * row), np.float64(np.float32(load_double(scratch.l + 8 * row)))
        index = (b * call.heads_q + head) * call.q_len + token
        if call.partial_acc == 0:
            out = address_of(call.out, b, head, token)
            store_row(out, kind, scratch, row, call.value_dim, divisor(call.score, head, m, l))
            if call.lse != 0:
                store_float(call.lse + 4 * index, natural_lse(m, l))
        else:
            index += split * call.batch * call.heads_q * call.q_len
            acc = call.partial_acc + 4 * index * call.value_dim
            store_row(acc, FLOAT32, scratch, row, call.value_dim, np.float32(1.0))
            store_float(call.partial_m + 4 * index, m)
            store_float(call.partial_l + 4 * index, np.float32(l))


@inner
def attend_split(call, kind, k_kind, v_kind, scratch, b, h_kv, split):
    """One unit of work."""
    reach = find_reach(call, b)
    rows = call.heads_q // call.heads_kv * reach.tokens
    load_queries(call, kind, k_kind, scratch, b, h_kv, rows)
    for row in range(whole(rows, 4)):
        clear_row(scratch, row)
    begin, end = split_range(call, reach, split)
    slot, ahead = 0, find_keys(call, k_kind, v_kind, scratch, 0, reach, h_kv, begin, min(begin + TILE, end))
    for n in range(begin, end, TILE):
        slot, tile = 1 - slot, ahead
        ahead = find_keys(call, k_kind, v_kind, scratch, slot, reach, h_kv, n + TILE, min(n + 2 * TILE, end))
        if tile.size == 0:
            continue
        listed = join_lists(call, k_kind, v_kind, tile, ahead)
        for row in range(0, rows, 4):
            block = Block(row, token_of(call, row), token_of(call, min(row + 3, rows - 1)))
            if not overlaps(call, reach, block.first, block.last, tile):
                continue
            if rows - row == 1:
                attend_tile(call, k_kind, v_kind, scratch, tile, listed, reach, h_kv, block, ONE_ROW, KEYS_OF_ONE_ROW)
            else:
                attend_tile(
                    call, k_kind, v_kind, scratch, tile, listed, reach, h_kv, block, FOUR_ROWS, KEYS_OF_FOUR_ROWS
                )
    store_state(call, kind, v_kind, scratch, b, h_kv, split, rows)


def make_kernel(stamp: str, cache: bool) -> Callable[..., Any]:
    """The entry point. Numba keys its cache on this file and on captured constants: stamp covers the others."""

    @njit(nogil=True, cache=cache)
    def decode_units(record, kind, k_kind, v_kind):
        """Take units until none is left; any number of threads may run it on the same record."""
        stamp  # noqa: B018, captured by being named
        call, counters = read_call(record), record + SIZE
        if call.batch == 0:  # nor sizes to divide by
            return np.uint8(0)
        memory = np.empty(cut_scratch(0, call)[1] + 64, np.uint8)
        scratch = cut_scratch(whole(memory.ctypes.data, 64), call)[0]
        rows = call.heads_q // call.heads_kv * call.q_len
        while True:
            unit = fetch_add(counters, 1)
            problem, split = unit // call.num_splits, unit % call.num_splits
            if problem >= call.batch * call.heads_kv:
                return memory[0]  # a use after the last unit, or memory would be freed before the first
            b, h_kv = problem // call.heads_kv, problem % call.heads_kv
            attend_split(call, kind, k_kind, v_kind, scratch, b, h_kv, split)
            merges = call.num_splits > 1 and call.out.base != 0
            if merges and fetch_add(counters + 8 + 8 * problem, 1) == call.num_splits - 1:
                for row in range(rows):
                    merge_row(call, kind, head_of(call, h_kv, row), token_of(call, row), b, scratch.weights)

    return decode_units
