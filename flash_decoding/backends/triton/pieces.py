"""Pieces of a ragged batch, found on the device from the lengths there.

A share is the tiles of the whole batch over a number of pieces. Every problem, (sequence, KV head, tile of rows), is
cut evenly into as many pieces as leave none larger than a share and a quarter: a little more than a share is better
than a small rest. Where one share per program that runs at once cuts the batch into no more pieces than that, all run
from start to end side by side. Otherwise shares are smaller, and a free processor takes the program of the next number:
sequences whose pieces are half a share or more come first, since longest first leaves little to wait for at the end
(R. L. Graham, "Bounds on multiprocessing timing anomalies", 1969). No host needs to know a length, and a captured graph
adapts to every later one.

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
def _cut(tiles, share):
    """Pieces of a problem."""
    return tl.cdiv(tiles, share + share // 4)


@triton.jit
def _share_of_batch(lens, B, heads, at_once, pieces, Lq: tl.constexpr, BLOCK_N: tl.constexpr):
    """Tiles that make one share; heads: problems per sequence."""
    total = tl.zeros([], tl.int32)
    for first_b in range(0, B, _BLOCK_B):
        _, tiles = _tiles_from(first_b, lens, B, Lq, BLOCK_N)
        total += tl.sum(tiles, 0)
    share = tl.maximum(tl.cdiv(total * heads, at_once), 1)
    count = tl.zeros([], tl.int32)
    for first_b in range(0, B, _BLOCK_B):
        _, tiles = _tiles_from(first_b, lens, B, Lq, BLOCK_N)
        count += tl.sum(_cut(tiles, share), 0)
    return tl.where(count * heads <= at_once, share, tl.maximum(tl.cdiv(total * heads, pieces), 1))


@triton.jit
def find_piece(program, lens, B, heads, at_once, pieces, Lq: tl.constexpr, BLOCK_N: tl.constexpr):
    """(b, head, number, count, slot): a program has the piece `number` of `count` of a problem; count 0: none."""
    share = _share_of_batch(lens, B, heads, at_once, pieces, Lq, BLOCK_N)
    large = tl.zeros([], tl.int32)
    for first_b in range(0, B, _BLOCK_B):
        _, tiles = _tiles_from(first_b, lens, B, Lq, BLOCK_N)
        large += tl.sum(tl.where(2 * tiles >= share, _cut(tiles, share), 0), 0)
    is_large = program < large * heads
    index = tl.where(is_large, program, program - large * heads)

    # The sequence is the first with which the pieces of this kind, added up, reach past the index.
    b, before, pieces_before, reached = 0, 0, 0, 0
    for first_b in range(0, B, _BLOCK_B):
        at, tiles = _tiles_from(first_b, lens, B, Lq, BLOCK_N)
        count = _cut(tiles, share)
        of_kind = tl.where((2 * tiles >= share) == is_large, count, 0)
        passed = ((reached + tl.cumsum(of_kind, 0)) * heads <= index) & (at < B)
        b += tl.sum(passed.to(tl.int32), 0)
        before += tl.sum(tl.where(passed, of_kind, 0), 0)
        pieces_before += tl.sum(tl.where(passed, count, 0), 0)
        reached += tl.sum(of_kind, 0)
    exists = b < B
    b = tl.minimum(b, B - 1)
    count = tl.maximum(_cut(_count_tiles(b, lens, Lq, BLOCK_N), share), 1)
    place = index - before * heads
    return b, place // count, place % count, tl.where(exists, count, 0), pieces_before * heads + place


@triton.jit
def find_slots(b, head, lens, B, heads, at_once, pieces, Lq: tl.constexpr, BLOCK_N: tl.constexpr):
    """The first slot of a problem's pieces, and their number."""
    share = _share_of_batch(lens, B, heads, at_once, pieces, Lq, BLOCK_N)
    before = tl.zeros([], tl.int32)
    for first_b in range(0, b, _BLOCK_B):
        at, tiles = _tiles_from(first_b, lens, B, Lq, BLOCK_N)
        before += tl.sum(tl.where(at < b, _cut(tiles, share), 0), 0)
    count = _cut(_count_tiles(b, lens, Lq, BLOCK_N), share)
    return before * heads + head * count, count
