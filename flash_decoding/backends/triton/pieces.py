"""Pieces of a ragged batch, found on the device from the lengths there.

Every problem, (sequence, KV head, tile of rows), is cut evenly into as many pieces as leave none larger than a limit,
and a program has one piece. The limit is the smallest tried for which all pieces run at once, side by side from start
to end: a share of the batch's tiles per program that the device runs at once, or a little more. Where there are too
many problems for that, pieces are smaller, and a free processor takes the program of the next number: sequences whose
pieces are half the limit or more come first, since longest first leaves little to wait for at the end (R. L. Graham,
"Bounds on multiprocessing timing anomalies", 1969). No host needs to know a length, and a captured graph adapts to
every later one.

Scratch holds the pieces of a problem one after the other, problem after problem, whatever the order of the programs.
Behind them lies a table, the first slot of each problem and how many it has, written by whoever has a first piece: to
look it up costs the many programs of the reduce kernel less than to work it out.
"""

import triton
import triton.language as tl

from flash_decoding.backends.triton.tile_io import visible_range

# Sequences looked at at a time: one a thread.
_BLOCK_B = tl.constexpr(32)
# Limits that are tried, from an even share to twice as much.
_LIMITS = tl.constexpr(16)
_NONE = tl.constexpr(2**31 - 1)


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
def _inverse(divisor):
    """1 / divisor from above, for dividends of at most 2^20: an integer division is many instructions.

    A product with it is too large by less than 2^-20 of itself, of which 2^-21 are meant and the rest is rounding, and
    not too small. So it never reaches an integer that the quotient does not, which is 1 / divisor away at least.
    """
    return (1.0 + 2**-21) / divisor.to(tl.float32)


@triton.jit
def _divide_up(tiles, limit, inverse):
    """ceil(tiles / limit), exact."""
    whole = (tiles.to(tl.float32) * inverse).to(tl.int32)
    return whole + (tiles > whole * limit).to(tl.int32)


@triton.jit
def _limit_of_batch(lens, B, heads, at_once, pieces, Lq: tl.constexpr, BLOCK_N: tl.constexpr):
    """Tiles of the largest piece; heads: problems per sequence."""
    total = tl.zeros([], tl.int32)
    for first_b in range(0, B, _BLOCK_B):
        _, tiles = _tiles_from(first_b, lens, B, Lq, BLOCK_N)
        total += tl.sum(tiles, 0)
    share = tl.maximum(tl.cdiv(total * heads, pieces), 1)
    limit = share + share // 4
    if B * heads <= at_once:
        share = tl.maximum(tl.cdiv(total * heads, at_once), 1)
        tried = share + tl.cdiv(share, _LIMITS - 1) * tl.arange(0, _LIMITS)
        inverse = _inverse(tried)
        count = tl.zeros([_LIMITS], tl.int32)
        for first_b in range(0, B, _BLOCK_B):
            _, tiles = _tiles_from(first_b, lens, B, Lq, BLOCK_N)
            # ceil(n / limit) = floor((n - 1) / limit) + 1
            last = tl.maximum(tiles - 1, 0).to(tl.float32)
            whole = (last[None, :] * inverse[:, None]).to(tl.int32)
            count += tl.sum(whole + (tiles > 0).to(tl.int32)[None, :], 1)
        fitting = tl.min(tl.where(count * heads <= at_once, tried, _NONE), 0)
        limit = tl.where(fitting < _NONE, fitting, limit)
    return limit


@triton.jit
def find_piece(program, lens, B, heads, at_once, pieces, Lq: tl.constexpr, BLOCK_N: tl.constexpr):
    """(b, head, number, count, slot): a program has the piece `number` of `count` of a problem; count 0: none."""
    limit = _limit_of_batch(lens, B, heads, at_once, pieces, Lq, BLOCK_N)
    inverse = _inverse(limit)
    large = tl.zeros([], tl.int32)
    for first_b in range(0, B, _BLOCK_B):
        _, tiles = _tiles_from(first_b, lens, B, Lq, BLOCK_N)
        large += tl.sum(tl.where(2 * tiles >= limit, _divide_up(tiles, limit, inverse), 0), 0)
    is_large = program < large * heads
    index = tl.where(is_large, program, program - large * heads)

    # The sequence is the first with which the pieces of this kind, added up, reach past the index.
    b, before, pieces_before, reached = 0, 0, 0, 0
    for first_b in range(0, B, _BLOCK_B):
        at, tiles = _tiles_from(first_b, lens, B, Lq, BLOCK_N)
        count = _divide_up(tiles, limit, inverse)
        of_kind = tl.where((2 * tiles >= limit) == is_large, count, 0)
        passed = ((reached + tl.cumsum(of_kind, 0)) * heads <= index) & (at < B)
        b += tl.sum(passed.to(tl.int32), 0)
        before += tl.sum(tl.where(passed, of_kind, 0), 0)
        pieces_before += tl.sum(tl.where(passed, count, 0), 0)
        reached += tl.sum(of_kind, 0)
    exists = b < B
    b = tl.minimum(b, B - 1)
    count = tl.maximum(_divide_up(_count_tiles(b, lens, Lq, BLOCK_N), limit, inverse), 1)
    place = index - before * heads
    return b, place // count, place % count, tl.where(exists, count, 0), pieces_before * heads + place


@triton.jit
def _table_entry(m_ptr, problem, problems, pieces, ROWS: tl.constexpr):
    """Where scratch says which slots a problem has: two integers behind the ROWS rows of every slot's m."""
    at = (pieces + problems).to(tl.int64) * ROWS + 2 * problem
    return (m_ptr + at).to(tl.pointer_type(tl.int32), bitcast=True)


@triton.jit
def note_slots(m_ptr, problem, problems, pieces, slot, count, ROWS: tl.constexpr):
    """Leave word for find_slots(): a problem's first slot, and how many it has."""
    entry = _table_entry(m_ptr, problem, problems, pieces, ROWS)
    tl.store(entry, slot)
    tl.store(entry + 1, count)


@triton.jit
def find_slots(m_ptr, problem, problems, pieces, has_keys, ROWS: tl.constexpr):
    """The first slot of a problem's pieces, and their number; of one without keys nobody has left word."""
    entry = _table_entry(m_ptr, problem, problems, pieces, ROWS)
    slot, count = tl.load(entry), tl.load(entry + 1)
    return tl.where(has_keys, slot, 0), tl.where(has_keys, count, 0)
