"""Codes of which two lie in a byte, with scales for groups of them.

A row of D codes is D / 2 bytes, W vectors of LANES bytes. With Q = D / 4, bytes 2 j and 2 j + 1 hold the elements j,
j + Q, j + 2 Q and j + 3 Q: of LANES bytes, the lower halves are elements of the first quarter in the even lanes and of
the third in the odd ones, the upper halves elements of the second and of the fourth. Vector x of a row is made of lower
halves for x < W and of upper halves from there on. q and acc have their elements in this order while a split is worked
on. In a run, which is some vectors on end, the even lanes belong to one group and the odd lanes to one group:

    value = scale * (code - zero) = scale * code + shift

so a score is the sum over the runs of scale (q . codes) + shift (sum of q), and values are widened by one fma each.
"""

from __future__ import annotations

from functools import cache
from itertools import groupby
from typing import NamedTuple

import numpy as np

from flash_decoding.backends.cpu.simd import (
    FLOAT32,
    LANES,
    add,
    at_most,
    combine_each,
    divide_each,
    fma_each,
    fma_outer,
    inner,
    load,
    load_block,
    load_codes_each,
    load_each,
    load_float,
    load_half,
    load_int64,
    load_pair_each,
    mul_columns,
    mul_rows,
    one_per_line,
    places,
    prefetch_each,
    splat,
    splat_each,
    store,
    store_block,
    store_float,
    sum_each,
    vectors_per_line,
    zeros_outer,
)

# The code that means 0 where there is no zero point.
_ZERO = np.float32(8.0)


class Groups(NamedTuple):
    """The runs of a row; all 0 where there are no such codes."""

    runs: int
    table: int  # address of [runs, 3] int64: end of the run, group of the even lanes, group of the odd lanes
    zero_points: int  # 1: a zero point follows each scale
    vectors: int  # W


@cache
def find_runs(width: int, group: int) -> np.ndarray:
    """Groups.table for rows of so many elements; kept, because kernels have its address."""
    half, quarter = LANES // 2, width // 4
    vectors = quarter // half

    def groups_of(x: int) -> tuple[int, int]:
        first = x // vectors * quarter + x % vectors * half
        return first // group, (first + 2 * quarter) // group

    ends, runs = 0, []
    for groups, run in groupby(map(groups_of, range(2 * vectors))):
        ends += len(list(run))
        runs.append((ends, *groups))
    return np.array(runs, dtype=np.int64)


@inner
def run_end(groups, r):
    """Behind the last vector of run r."""
    return load_int64(groups.table + 24 * r)


@inner
def scale_bytes(groups):
    """Bytes of scratch for the scales of one row: [runs, 2, 2] float32, scales and shifts of even and odd lanes."""
    return 16 * groups.runs


@inner
def list_group_scales(scales, groups, place):
    """The float16 scales of one row as scale_bytes() has them."""
    step = 2 + 2 * groups.zero_points
    for r in range(groups.runs):
        for lane in range(2):
            group = scales + step * load_int64(groups.table + 24 * r + 8 + 8 * lane)
            scale = load_half(group)
            zero = load_half(group + 2) if groups.zero_points != 0 else _ZERO
            store_float(place + 16 * r + 4 * lane, scale)
            store_float(place + 16 * r + 8 + 4 * lane, -zero * scale)  # exact: the product of two float16 is a float32


@inner
def place_of(quarter, j, vectors):
    """Where element j of a quarter stands among those of the vectors."""
    half = LANES // 2
    return (quarter % 2 * vectors + j // half) * LANES + j % half * 2 + quarter // 2


@inner
def order_as_codes(row, line, width):
    """Bring a row of float32 into the order of the vectors; line is scratch."""
    vectors = width // (2 * LANES)
    for quarter in range(4):
        for j in range(width // 4):
            store_float(line + 4 * place_of(quarter, j, vectors), load_float(row + width * quarter + 4 * j))
    copy(line, row, width)


@inner
def order_as_elements(row, line, width):
    """Undo order_as_codes()."""
    vectors = width // (2 * LANES)
    for quarter in range(4):
        for j in range(width // 4):
            store_float(line + width * quarter + 4 * j, load_float(row + 4 * place_of(quarter, j, vectors)))
    copy(line, row, width)


@inner
def copy(source, target, width):
    """float32, whole vectors."""
    for i in range(0, 4 * width, 4 * LANES):
        store(target + i, load(source + i, FLOAT32), FLOAT32)


@inner
def sum_runs(q, groups, sums):
    """The sum of the vectors of each run of a row, [runs, LANES]."""
    begin = 0
    for r in range(groups.runs):
        end, total = run_end(groups, r), splat(np.float32(0.0))
        for x in range(begin, end):
            total = add(total, load(q + 4 * LANES * x, FLOAT32))
        begin = end
        store(sums + 4 * LANES * r, total, FLOAT32)


@inner
def score_codes(kind, groups, q, sums, k, k_ahead, fetching, scales, width):
    """Dot products of rows of q with keys, one vector; scales: address of those of the first of the keys."""
    step = scale_bytes(groups)
    begin, scores = 0, splat(np.float32(0.0))
    for r in range(groups.runs):
        end, dots = run_end(groups, r), zeros_outer(q, width)
        for x in range(begin, end):
            at = LANES * (x % groups.vectors)
            if fetching and x < groups.vectors and x % vectors_per_line(kind) == 0:
                prefetch_each(k_ahead, at)
            codes = load_codes_each(k, at, places(x // groups.vectors * 4, 0, width))
            dots = fma_outer(load_each(q, 4 * LANES * x, FLOAT32), codes, dots)
        begin = end
        of_run = places(scales + 16 * r, step, width)
        dots = mul_columns(load_pair_each(of_run, 0), dots)
        dots = fma_outer(load_each(sums, 4 * LANES * r, FLOAT32), load_pair_each(of_run, 8), dots)
        scores = add(scores, sum_each(dots))
    return scores


@inner
def add_code_values(kind, groups, tile, p, alpha, acc_rows, listed, ahead, columns):
    """acc = alpha * acc + p v, some columns of vectors at a time; keys up to `listed` are prefetched."""
    step, begin = scale_bytes(groups), 0
    for r in range(groups.runs):
        end = run_end(groups, r)
        for x in range(begin, end, len(columns)):
            # Columns past the end of the run are its last one again.
            vectors = at_most(places(x, 1, columns), end - 1)
            half = divide_each(vectors, groups.vectors)
            in_v, shifts = combine_each(vectors, LANES, half, -LANES * groups.vectors), combine_each(half, 4, half, 0)
            in_acc = combine_each(vectors, 4 * LANES, half, 0)
            acc = mul_rows(alpha, load_block(acc_rows, in_acc))
            for n in range(tile.size):
                if n + ahead < listed:
                    prefetch_each(one_per_line(in_v, kind), load_int64(tile.v + 8 * (n + ahead)))
                scales = places(tile.v_scale + step * n + 16 * r, 0, columns)
                codes = load_codes_each(in_v, load_int64(tile.v + 8 * n), shifts)
                values = fma_each(codes, load_pair_each(scales, 0), load_pair_each(scales, 8))
                acc = fma_outer(splat_each(p, 4 * n), values, acc)
            store_block(acc_rows, in_acc, acc)
        begin = end
