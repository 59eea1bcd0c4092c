"""Pieces of a ragged batch, found on the device from the lengths there.

Every problem, (sequence, KV head, tile of rows), is cut evenly into as many pieces as leave none larger than a limit,
and a program has one piece. The limit is the smallest of a few for which all pieces run at once, side by side from
start to end: a share of the batch's tiles per program that the device runs at once, or a little more. Where there are
too many problems for that, pieces are smaller, and a free processor takes the program of the next number: sequences
whose pieces are half the limit or more come first, since longest first leaves little to wait for at the end (R. L.
Graham, "Bounds on multiprocessing timing anomalies", 1969). No host needs to know a length, and a captured graph adapts
to every later one.

Scratch holds the pieces of a problem one after the other, problem after problem, whatever the order of the programs.
"""

import triton
import triton.language as tl

from flash_decoding.backends.triton.tile_io import visible_range

# Sequences looked at at a time.
_BLOCK_B = tl.constexpr(128)


@triton.jit
def _count_tiles(b, lens, Lq: tl.constexpr, BLOCK_N: tl.constexpr):
    """Tiles of keys that each of the sequences b sees."""
    first, last, _, _ = visible_range(lens, b, Lq)
    return tl.cdiv(tl.maximum(last - first, 0), BLOCK_N)


@triton.jit
def _tiles_from(first_b, lens, B, Lq: tl.constexpr, BLOCK_N: tl.constexpr):
    """Sequences from first_b on, and the tiles of each; 0 past the last sequence."""
    b = first_b + tl.arange(0, _BLOCK_B)
    return b, tl.where(b < B, _count_tiles(tl.minimum(b, B - 1), lens, Lq, BLOCK_N), 0)


@triton.jit
def _limit_of_batch(lens, B, heads, slots, pieces, Lq: tl.constexpr, BLOCK_N: tl.constexpr):
    """Tiles of the largest piece; heads: problems per sequence."""
    _, tiles = _tiles_from(0, lens, B, Lq, BLOCK_N)
    total = tl.sum(tiles, 0)
    limit = tl.zeros([], tl.int32)
    if B <= _BLOCK_B:  # more sequences have more problems than run at once
        share = tl.maximum(tl.cdiv(total * heads, slots), 1)
        for twentieths in range(0, 9):
            tried = share + share * twentieths // 20
            at_once = tl.sum(tl.cdiv(tiles, tried), 0) * heads <= slots
            limit = tl.where(at_once & (limit == 0), tried, limit)
    else:
        for first_b in range(_BLOCK_B, B, _BLOCK_B):
            _, tiles = _tiles_from(first_b, lens, B, Lq, BLOCK_N)
            total += tl.sum(tiles, 0)
    share = tl.maximum(tl.cdiv(total * heads, pieces), 1)
    # A little more than a share is better than a small rest.
    return tl.where(limit > 0, limit, share + share // 4)


@triton.jit
def find_piece(program, lens, B, heads, slots, pieces, Lq: tl.constexpr, BLOCK_N: tl.constexpr):
    """(b, head, number, count, slot): a program has the piece `number` of `count` of a problem; count 0: none."""
    limit = _limit_of_batch(lens, B, heads, slots, pieces, Lq, BLOCK_N)
    large = tl.zeros([], tl.int32)
    for first_b in range(0, B, _BLOCK_B):
        _, tiles = _tiles_from(first_b, lens, B, Lq, BLOCK_N)
        large += tl.sum(tl.where(2 * tiles >= limit, tl.cdiv(tiles, limit), 0), 0)
    is_large = program < large * heads
    index = tl.where(is_large, program, program - large * heads)

    # The sequence is the first with which the pieces of this kind, added up, reach past the index.
    b, before, slots, reached = 0, 0, 0, 0
    for first_b in range(0, B, _BLOCK_B):
        at, tiles = _tiles_from(first_b, lens, B, Lq, BLOCK_N)
        count = tl.cdiv(tiles, limit)
        of_kind = tl.where((2 * tiles >= limit) == is_large, count, 0)
        passed = ((reached + tl.cumsum(of_kind, 0)) * heads <= index) & (at < B)
        b += tl.sum(passed.to(tl.int32), 0)
        before += tl.sum(tl.where(passed, of_kind, 0), 0)
        slots += tl.sum(tl.where(passed, count, 0), 0)
        reached += tl.sum(of_kind, 0)
    exists = b < B
    b = tl.minimum(b, B - 1)
    count = tl.maximum(tl.cdiv(_count_tiles(b, lens, Lq, BLOCK_N), limit), 1)
    place = index - before * heads
    return b, place // count, place % count, tl.where(exists, count, 0), slots * heads + place


@triton.jit
def find_slots(b, head, lens, B, heads, slots, pieces, Lq: tl.constexpr, BLOCK_N: tl.constexpr):
    """The first slot of a problem's pieces, and their number."""
    limit = _limit_of_batch(lens, B, heads, slots, pieces, Lq, BLOCK_N)
    before = tl.zeros([], tl.int32)
    for first_b in range(0, b, _BLOCK_B):
        at, tiles = _tiles_from(first_b, lens, B, Lq, BLOCK_N)
        before += tl.sum(tl.where(at < b, tl.cdiv(tiles, limit), 0), 0)
    count = tl.cdiv(_count_tiles(b, lens, Lq, BLOCK_N), limit)
    return before * heads + head * count, count
