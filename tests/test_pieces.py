"""Pieces of a ragged batch: which program has which, where its partial goes, and that there is room for all."""

from collections import defaultdict
from typing import NamedTuple

import numpy as np
import pytest
import torch
from conftest import TRITON_TARGETS
from helpers import DTYPES, LOOSE, decode_and_check, describe
from hypothesis import given, settings
from hypothesis import strategies as st
from paging import to_pages

pytest.importorskip("triton")

import triton
from triton import language as tl

from flash_decoding.backends.triton.pieces import find_piece, find_slots, note_slots
from flash_decoding.backends.triton.tile_io import split_range, visible_range
from flash_decoding.split_plan import choose_plan

BLOCK_N = 16


ROWS = 3  # of a problem, in scratch


class Piece(NamedTuple):
    """What the kernel found for a program."""

    b: int
    head: int
    number: int
    count: int
    slot: int
    start: int
    stop: int


@triton.jit(do_not_specialize=["B", "heads", "at_once", "pieces"])
def _list_pieces(
    found_ptr, m_ptr, kv_lens_ptr, kv_start_ptr, kv_len, B, heads, at_once, pieces, BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    lens = (kv_lens_ptr, kv_start_ptr, None, kv_len, None)
    b, head, number, count, slot = find_piece(pid, lens, B, heads, at_once, pieces, 1, BLOCK)
    if (count > 0) & (number == 0):
        note_slots(m_ptr, b * heads + head, B * heads, pieces, slot, count, TOKENS)
    first, last, _, _ = visible_range(lens, b, 1)
    start, stop = split_range(first, last, number, tl.maximum(count, 1), None, BLOCK)
    found_ptr += pid * 7
    tl.store(found_ptr, b)
    tl.store(found_ptr + 1, head)
    tl.store(found_ptr + 2, number)
    tl.store(found_ptr + 3, count)
    tl.store(found_ptr + 4, slot)
    tl.store(found_ptr + 5, start)
    tl.store(found_ptr + 6, stop)


@triton.jit(do_not_specialize=["problems", "pieces"])
def _list_slots(found_ptr, m_ptr, has_keys_ptr, problems, pieces, TOKENS: tl.constexpr):
    pid = tl.program_id(0)
    has_keys = tl.load(has_keys_ptr + pid) != 0
    slot, count = find_slots(m_ptr, pid, problems, pieces, has_keys, TOKENS)
    tl.store(found_ptr + 2 * pid, slot)
    tl.store(found_ptr + 2 * pid + 1, count)


def list_pieces(programs, device, kv_lens, kv_start, capacity, batch, heads, at_once, pieces):
    """What the first programs find, and then (first slot, slots) of every problem; scratch starts as NaN."""
    arrays = [x if x is None else x.to(device) for x in (kv_lens, kv_start)]
    problems = batch * heads
    m = torch.full(((pieces + problems) * ROWS + 2 * problems,), float("nan"), device=device)
    found = torch.full((programs, 7), -1, dtype=torch.int32, device=device)
    _list_pieces[(programs,)](found, m, *arrays, capacity, batch, heads, at_once, pieces, BLOCK_N, ROWS)
    has_keys = (kv_lens > (0 if kv_start is None else kv_start)).repeat_interleave(heads).to(device, torch.int32)
    slots = torch.full((problems, 2), -1, dtype=torch.int32, device=device)
    _list_slots[(problems,)](slots, m, has_keys, problems, pieces, ROWS)
    return [Piece(*row) for row in found.tolist()], [tuple(row) for row in slots.tolist()]


def test_divisions_in_floating_point_are_exact():
    """As pieces.py does them, on either side of every multiple up to 2^20 tiles, with 1 / x up to 2 units in error."""
    step = np.float32(2**-23)
    for limit in [*range(1, 300), *range(300, 2**20, 997), 2**20]:
        multiples = np.arange(1, 2**20 // limit + 1, max(2**20 // limit // 500, 1)) * limit
        tiles = np.unique(np.concatenate([[0, 1], multiples - 1, multiples, np.minimum(multiples + 1, 2**20)]))
        for error in (-2, 0, 2):
            inverse = np.float32(1 + 2**-21) / np.float32(limit) * (1 + error * step)
            whole = (tiles.astype(np.float32) * inverse).astype(np.int32)
            assert np.array_equal(whole, tiles // limit), limit


def draw_lengths(batch, capacity):
    """Of few sequences, the first and last among them: some hold all keys, some a few, and many end inside a tile."""
    lens = torch.zeros(batch, dtype=torch.int32)
    some = torch.cat([torch.randperm(batch - 4)[:12] + 2, torch.tensor([0, batch - 2, batch - 1])])
    lens[some] = torch.randint(1, capacity // 8, some.shape, dtype=torch.int32)
    lens[some[:3]], lens[some[-2]] = torch.randint(1, capacity, (3,), dtype=torch.int32), capacity
    return lens


def limit_tiles(tiles, heads, at_once, pieces):
    """The rule, in integers: (tiles of the largest piece, pieces of every problem of each sequence)."""

    def cut(limit):
        return [-(-n // limit) for n in tiles]

    even = max(-(-sum(tiles) * heads // at_once), 1)
    if len(tiles) * heads <= at_once:
        for i in range(16):
            limit = even + i * -(-even // 15)
            if sum(cut(limit)) * heads <= at_once:
                return limit, cut(limit)
    share = max(-(-sum(tiles) * heads // pieces), 1)
    return share + share // 4, cut(share + share // 4)


@pytest.mark.interpreter
@pytest.mark.parametrize("target", TRITON_TARGETS)
@pytest.mark.parametrize(
    ("batch", "heads", "at_once", "pieces", "side_by_side", "starts"),
    [
        (5, 3, 12, 30, False, True),
        (5, 3, 36, 36, True, False),
        (130, 1, 12, 30, False, False),
        (130, 1, 40, 40, True, True),
    ],
)
def test_pieces_hold_every_tile_once(target, batch, heads, at_once, pieces, side_by_side, starts):
    capacity = 40 * BLOCK_N
    kv_lens = draw_lengths(batch, capacity)
    kv_start = (torch.rand(batch) * kv_lens * 0.3).to(torch.int32) if starts else None
    first = [0] * batch if kv_start is None else kv_start.tolist()
    tiles = [-(-(n - m) // BLOCK_N) for n, m in zip(kv_lens.tolist(), first, strict=True)]
    limit, counts = limit_tiles(tiles, heads, at_once, pieces)
    total = sum(counts) * heads
    assert (total <= at_once) is side_by_side, "the case is of the kind that it should be"

    programs, slots = list_pieces(total + 3, target.device, kv_lens, kv_start, capacity, batch, heads, at_once, pieces)
    found, beyond = programs[:total], programs[total:]
    assert all(piece.count > 0 for piece in found)
    assert all(piece.count == 0 for piece in beyond)
    assert sorted(piece.slot for piece in found) == list(range(total)), "each has its own, and none is left out"
    by_problem = defaultdict(list)
    for piece in sorted(found, key=lambda piece: piece.slot):
        by_problem[piece.b, piece.head].append(piece)
    assert by_problem.keys() == {(b, head) for b in range(batch) for head in range(heads) if tiles[b]}
    assert slots == [
        (by_problem[b, head][0].slot if tiles[b] else 0, counts[b]) for b in range(batch) for head in range(heads)
    ]
    for (b, _), mine in by_problem.items():
        slot, count = mine[0].slot, counts[b]
        assert [(piece.number, piece.slot) for piece in mine] == [(i, slot + i) for i in range(count)]
        assert {piece.count for piece in mine} == {count}
        # One begins where the one before ends, at a whole tile.
        assert [piece.start for piece in mine] == [first[b], *[piece.stop for piece in mine[:-1]]]
        assert mine[-1].stop == kv_lens[b]
        assert all(piece.start < piece.stop and (piece.start - first[b]) % BLOCK_N == 0 for piece in mine)

    sizes = [-(-(piece.stop - piece.start) // BLOCK_N) for piece in found]
    assert max(sizes) <= limit
    large = [2 * tiles[piece.b] >= limit for piece in found]
    assert large == sorted(large, reverse=True), "long sequences come first"
    assert set(large) == {True, False}, "there are some of both kinds"


@pytest.mark.interpreter
@pytest.mark.parametrize("target", TRITON_TARGETS)
@pytest.mark.parametrize("batch", [1, 130])
def test_without_keys_there_are_no_pieces(target, batch):
    kv_lens = torch.zeros(batch, dtype=torch.int32)
    found, slots = list_pieces(4, target.device, kv_lens, None, 640, batch, 2, 4, 8)
    assert {piece.count for piece in found} == {0}
    assert set(slots) == {(0, 0)}


@settings(max_examples=300, deadline=None)
@given(
    lengths=st.lists(st.floats(0, 1) | st.sampled_from([0.0, 1.0]), min_size=2, max_size=60),
    capacity=st.integers(9, 400), heads_kv=st.integers(1, 16), group=st.integers(1, 40), q_len=st.integers(1, 8),
    processors=st.integers(1, 200), head_dim=st.sampled_from([64, 128, 256, 576]), paged=st.booleans(),
)  # fmt: skip
def test_scratch_holds_the_pieces_of_any_lengths(
    lengths, capacity, heads_kv, group, q_len, processors, head_dim, paged
):  # fmt: skip
    """By the rule in integers, to which the tests above hold the kernels."""
    sizes = dict(batch=len(lengths), heads_kv=heads_kv, group=group, q_len=q_len, head_dim=head_dim)
    sizes |= dict(value_dim=head_dim, element_size=2, processors=processors, paged=paged, ragged=True)
    tile = choose_plan(kv_len=0, **sizes).tile
    plan = choose_plan(kv_len=capacity * tile.block_n, **sizes)
    assert plan.at_once is not None
    assert plan.at_once <= plan.num_splits
    heads = heads_kv * -(-group * q_len // tile.block_m)
    rows, tokens = plan.partial_shape(len(lengths), heads_kv, group, q_len)
    problems = len(lengths) * heads
    assert rows * tokens >= (plan.num_splits + problems) * tokens + 2 * problems, "a place each, and the table"
    assert tokens == min(group * q_len, tile.block_m)
    tiles = [round(length * capacity) for length in lengths]
    _, counts = limit_tiles(tiles, heads, plan.at_once, plan.num_splits)
    assert sum(counts) * heads <= plan.count_pieces(problems), "a program each, see launch_chunk()"
    assert all((count > 0) == (n > 0) for count, n in zip(counts, tiles, strict=True))


@pytest.mark.interpreter
@pytest.mark.parametrize("target", TRITON_TARGETS)
@pytest.mark.parametrize(
    ("dtype", "batch", "heads_kv", "group", "q_len", "capacity", "page_size", "options"),
    [
        (DTYPES[-1], 3, 2, 3, 1, 200, None, "starts"),
        (DTYPES[-1], 3, 2, 3, 1, 200, None, "window"),
        (DTYPES[-1], 5, 1, 2, 1, 150, 16, ""),
        (DTYPES[-1], 5, 1, 2, 1, 150, 16, "starts"),
        (DTYPES[-1], 2, 1, 20, 4, 140, None, ""),  # two tiles of rows, the second one partly filled
        (torch.float32, 3, 1, 3, 4, 130, 8, "starts"),  # likewise
        (torch.float32, 3, 1, 3, 4, 130, None, "window"),
    ],
    ids=describe,
)
def test_results(target, plans_in_pieces, dtype, batch, heads_kv, group, q_len, capacity, page_size, options):
    q = torch.randn(batch, heads_kv * group, q_len, 32)
    k, v = torch.randn(batch, heads_kv, capacity, 32), torch.randn(batch, heads_kv, capacity, 16)
    kv_lens = torch.randint(0, capacity + 1, (batch,), dtype=torch.int32)
    kv_lens[0], kv_lens[-1] = capacity, 0
    arrays = {"kv_lens": kv_lens, "sinks": torch.randn(heads_kv * group)}
    if options == "starts":
        arrays |= {"kv_start": kv_lens // 3, "q_lens": torch.randint(0, q_len + 1, (batch,), dtype=torch.int32)}
        arrays["q_lens"][0] = q_len
    if page_size:
        k, v, arrays["block_table"] = to_pages(k, v, page_size, kv_lens)
    else:
        hidden = torch.arange(capacity) >= kv_lens[:, None]
        k, v = (x.masked_fill(hidden[:, None, :, None], float("nan")) for x in (k, v))
    q, k, v = (x.to(target.device, dtype) for x in (q, k, v))
    arrays = {name: x.to(target.device) for name, x in arrays.items()}
    window = 30 if options == "window" else None
    decode_and_check(target, q, k, v, atol=4 * LOOSE[dtype], window=window, **arrays)
    (plan,) = plans_in_pieces
    assert plan.at_once, "the batch is cut into pieces"
    assert q_len == 1 or group * q_len > plan.tile.block_m
