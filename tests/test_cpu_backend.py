"""What is particular to the CPU backend: vector arithmetic, shapes that straddle its blocks, threads, compiled code."""

import ctypes
import logging
import os
import platform
import subprocess
import sys
import threading
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from helpers import DTYPES, assert_matches, describe, make_inputs, max_error
from numba import njit
from paging import to_pages

from flash_decoding import flash_decode, reference
from flash_decoding.backends import cpu
from flash_decoding.backends.cpu import scores, simd, threads
from flash_decoding.backends.cpu.chunk import TILE
from flash_decoding.backends.cpu.packing import make_packer, make_reader, place
from flash_decoding.backends.cpu.simd import FLOAT32, LANES
from flash_decoding.problem import Call, make_problem

KINDS = {torch.float16: np.int16(0), torch.bfloat16: np.uint16(0)}


@njit
def exp2_all(x, y):
    for i in range(0, x.size, LANES):
        simd.store(y.ctypes.data + 4 * i, simd.exp2(simd.load(x.ctypes.data + 4 * i, FLOAT32)), FLOAT32)


@njit
def tanh_all(x, y):
    for i in range(0, x.size, LANES):
        simd.store(y.ctypes.data + 4 * i, scores.tanh(simd.load(x.ctypes.data + 4 * i, FLOAT32)), FLOAT32)


@njit
def widen_all(x, y, kind):
    for i in range(0, x.size, LANES):
        simd.store(y.ctypes.data + 4 * i, simd.load(x.ctypes.data + 2 * i, kind), FLOAT32)


@njit
def round_all(x, y, kind):
    for i in range(0, x.size, LANES):
        simd.store(y.ctypes.data + 2 * i, simd.load(x.ctypes.data + 4 * i, FLOAT32), kind)


@njit
def sums_of_rows(x, y):
    rows = simd.places(x.ctypes.data, 4 * LANES, tuple_of_lanes)
    simd.store(y.ctypes.data, simd.sum_each(simd.load_each(rows, 0, FLOAT32)), FLOAT32)
    return simd.lanes_sum(simd.load(x.ctypes.data, FLOAT32)), simd.lanes_max(simd.load(x.ctypes.data, FLOAT32))


tuple_of_lanes = tuple(range(LANES))


def exp2(values):
    return map_vectors(exp2_all, values)


def tanh(values):
    return map_vectors(tanh_all, values)


def map_vectors(function, values):
    x = np.resize(np.asarray(values, np.float32), -(-len(values) // LANES) * LANES)
    y = np.empty_like(x)
    function(x, y)
    return y[: len(values)]


# Vector arithmetic.


def test_exp2_is_exact_to_a_rounding():
    x = np.concatenate([np.linspace(-126.0, 0.0, 400_001), np.linspace(-0.51, 0.51, 100_001)]).astype(np.float32)
    error = exp2(x) / np.exp2(x.astype(np.float64)) - 1
    assert np.abs(error).max() < 1.5e-7
    powers = np.arange(-126, 128)
    assert np.array_equal(exp2(powers), np.ldexp(np.float32(1.0), powers))


def test_exp2_of_special_values():
    x = np.array([-np.inf, -1e30, -128.0, -127.0, 0.0, -0.0, np.nan], np.float32)
    assert np.array_equal(exp2(x), np.array([0, 0, 0, 0, 1, 1, np.nan], np.float32), equal_nan=True)


@pytest.mark.parametrize("dtype", KINDS, ids=describe)
def test_every_16_bit_pattern_widens_exactly(dtype):
    bits = np.arange(65536).astype(np.uint16)
    y = np.empty(65536, np.float32)
    widen_all(bits, y, KINDS[dtype])
    want = torch.from_numpy(bits.view(np.int16)).view(dtype).float().numpy()
    assert np.array_equal(np.isnan(y), np.isnan(want))
    number = ~np.isnan(want)
    assert np.array_equal(y[number].view(np.int32), want[number].view(np.int32))  # the sign of zero too


@pytest.mark.parametrize("dtype", KINDS, ids=describe)
def test_stores_round_to_nearest_even(dtype):
    exact = torch.arange(-32768, 32768).to(torch.int16).view(dtype).float()
    exact = exact[exact.isfinite()].sort().values
    halfway = ((exact[1:].double() + exact[:-1].double()) / 2).float()
    tiny = torch.tensor([2.0**-126, 2.0**-149, 2.0**-25, 2.0**-24, 65519.9, 65520.0, 3.4e38, torch.inf, torch.nan])
    bits = torch.randint(-(2**31), 2**31, (200_000,), dtype=torch.int64).to(torch.int32).view(torch.float32)
    x = torch.cat([exact, halfway, halfway.nextafter(torch.tensor(torch.inf)), tiny, -tiny, bits])
    x = torch.cat([x, x.new_zeros(-len(x) % LANES)])
    y = torch.empty(len(x), dtype=torch.int16)
    round_all(x.numpy(), y.numpy(), KINDS[dtype])
    y, want = y.view(dtype), x.to(dtype)
    number = ~x.isnan()
    assert bool(y[~number].isnan().all())
    assert torch.equal(y[number].view(torch.int16), want[number].view(torch.int16))


def test_horizontal_sums_and_maxima():
    x = np.random.default_rng(0).integers(-1000, 1000, (LANES, LANES)).astype(np.float32)
    y = np.empty(LANES, np.float32)
    total, largest = sums_of_rows(x, y)
    assert np.array_equal(y, x.sum(1))
    assert (total, largest) == (x[0].sum(), x[0].max())


# A call's numbers in memory.


class Part(NamedTuple):
    size: int
    share: float


class Whole(NamedTuple):
    first: Part
    count: int
    second: Part


read_whole = make_reader(Whole)


@njit
def numbers_of(record):
    x = read_whole(record)
    return x.first.size, x.first.share, x.count, x.second.size, x.second.share, simd.fetch_add(record + 40, 3)


def test_a_record_reads_back_as_it_was_packed():
    numbers = (-(2**62), 0.1, 2**63 - 1, 0, -np.inf)
    memory = place(make_packer(Whole).pack(*numbers), counters=1)
    assert numbers_of(ctypes.addressof(memory)) == (*numbers, 0)
    assert numbers_of(ctypes.addressof(memory)) == (*numbers, 3)


@njit
def lines(offsets, kind):
    return simd.one_per_line(offsets, kind), simd.vectors_per_line(kind)


def test_vectors_that_share_a_cache_line():
    for kind in (FLOAT32, *KINDS.values()):
        size = LANES * kind.itemsize
        kept, per_line = lines(tuple(range(0, 256, size)), kind)
        assert kept == tuple(range(0, 256, 64))
        assert per_line == 64 // size


# Shapes that straddle vectors, rows and tiles.


def decode_and_check(q, k, v, *, plan=None, atol=None, **options):
    out, lse = flash_decode(q, k, v, return_lse=True, backend="cpu", **(plan or {}), **options)
    assert_matches(out, lse, q, k, v, atol=atol, **options)
    return out, lse


# Whole vectors of 8 and 16, a half vector left over, one block of columns and more.
@pytest.mark.parametrize("dtype", DTYPES, ids=describe)
@pytest.mark.parametrize(
    ("head_dim", "value_dim"), [(16, 256), (24, 40), (40, 24), (72, 80), (80, 72), (96, 120), (120, 96), (256, 16)]
)
def test_widths(head_dim, value_dim, dtype):
    q, k, v = make_inputs(2, 6, 2, TILE + 37, head_dim, dtype, "cpu", value_dim=value_dim)
    decode_and_check(q, k, v, plan={"num_splits": 2})


# Rows are taken four at a time: 5 leaves one alone, 3 and 7 are padded.
@pytest.mark.parametrize("dtype", DTYPES, ids=describe)
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8, 16])
def test_group_sizes(group, dtype):
    decode_and_check(*make_inputs(1, 2 * group, 2, 2 * TILE + 1, 64, dtype, "cpu"))


@pytest.mark.parametrize("kv_len", [1, 2, 15, 16, 17, TILE - 1, TILE, TILE + 1, 2 * TILE + 3])
@pytest.mark.parametrize("plan", [{}, {"num_splits": 3}, {"split_size": 50}], ids=describe)
def test_lengths(kv_len, plan):
    decode_and_check(*make_inputs(2, 5, 1, kv_len, 40, torch.float16, "cpu"), plan=plan)


@pytest.mark.parametrize("integers", [torch.int32, torch.int64], ids=describe)
@pytest.mark.parametrize("num_splits", [1, 7])
def test_empty_splits_and_rows(num_splits, integers):
    q, k, v = make_inputs(5, 4, 2, 300, 64, torch.bfloat16, "cpu")
    kv_lens = torch.tensor([0, 1, 130, 300, 40], dtype=integers)
    kv_start = torch.tensor([0, 0, 129, 5, 60], dtype=integers)
    out, lse = decode_and_check(q, k, v, kv_lens=kv_lens, kv_start=kv_start, plan={"num_splits": num_splits})
    assert bool((out[[0, 4]] == 0).all())
    assert bool((lse[[0, 4]] == -torch.inf).all())


def test_a_cache_without_tokens():
    q, k, v = make_inputs(2, 4, 2, 0, 64, torch.float32, "cpu")
    for plan in ({}, {"num_splits": 4}):
        decode_and_check(q, k, v, plan=plan)


@pytest.mark.parametrize("dtype", DTYPES, ids=describe)
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_masked_keys_may_hold_anything(dtype, poison):
    q, k, v = make_inputs(3, 10, 2, 3 * TILE + 5, 72, dtype, "cpu")
    key_mask = torch.rand(3, k.shape[2]) < 0.5
    key_mask[1] = False
    key_mask[2, TILE : 2 * TILE] = False
    kv_lens = torch.tensor([2 * TILE + 1, 90, 3 * TILE])
    hidden = ~key_mask | (torch.arange(k.shape[2]) >= kv_lens[:, None])
    clean = [x.masked_fill(hidden[:, None, :, None], 0.0) for x in (k, v)]
    dirty = [x.masked_fill(hidden[:, None, :, None], poison) for x in (k, v)]
    for num_splits in (1, 3):
        options = {"key_mask": key_mask, "kv_lens": kv_lens}
        atol = 1e-6 if dtype == torch.float32 else None
        out, lse = decode_and_check(q, *clean, plan={"num_splits": num_splits}, atol=atol, **options)
        again, lse_again = flash_decode(q, *dirty, return_lse=True, backend="cpu", num_splits=num_splits, **options)
        assert torch.equal(out, again)
        assert torch.equal(lse, lse_again)


def test_a_mask_of_ones_changes_no_bit():
    q, k, v = make_inputs(2, 4, 4, 500, 64, torch.float16, "cpu")
    ones = torch.ones(1, 1, dtype=torch.bool).expand(2, 500)
    assert torch.equal(flash_decode(q, k, v, key_mask=ones), flash_decode(q, k, v))


def test_visible_nan_shows():
    q, k, v = make_inputs(1, 5, 1, 40, 64, torch.float32, "cpu")
    k[0, 0, 7, 3] = torch.nan
    assert bool(flash_decode(q, k, v).isnan().all())


@pytest.mark.parametrize("dtype", DTYPES, ids=describe)
def test_strides_change_no_bit(dtype):
    q, k, v = make_inputs(3, 8, 2, 333, 64, dtype, "cpu")
    want = flash_decode(q, k, v, num_splits=2)
    pool = torch.stack([k, v], dim=3)  # [B, Hkv, N, 2, D]: K and V interleaved
    fused = torch.cat([q, q], dim=2).permute(1, 0, 2, 3)  # [Hq, B, 2, D]
    assert torch.equal(flash_decode(q, *pool.unbind(3), num_splits=2), want)
    assert torch.equal(flash_decode(fused.transpose(0, 1)[:, :, 1:], k, v, num_splits=2), want)
    wide = torch.empty(3, 8, 1, 100).to(dtype)
    flash_decode(q, k, v, num_splits=2, out=wide[..., 20:84])
    assert torch.equal(wide[..., 20:84], want)
    assert bool(wide[..., :20].isnan().all())
    assert bool(wide[..., 84:].isnan().all())


def test_zero_strides_change_no_bit():
    q, k, v = make_inputs(1, 8, 1, 333, 64, torch.float16, "cpu")
    views = q[:, :1].expand(5, 8, 1, 64), k.expand(5, 4, 333, 64), v.expand(5, 4, 333, 64)
    assert torch.equal(flash_decode(*views), flash_decode(*(x.contiguous() for x in views)))


# The options of serving caches.


def random_slopes(heads):
    return torch.rand(heads) * 0.25


def visible_keys(q, k, **options):
    """[B, Lq, N], which keys each token sees: those to whose value the reference gives weight."""
    names = ("kv_lens", "kv_start", "q_lens", "causal", "window", "key_mask", "tree_mask")
    batch, q_len, kv_len = q.shape[0], q.shape[2], k.shape[2]
    one_hot = torch.eye(kv_len, dtype=torch.float64).expand(batch, 1, -1, -1)
    zeros = torch.zeros(batch, 1, q_len, 16), torch.zeros(batch, 1, kv_len, 16)
    return reference(*zeros, one_hot, **{name: options[name] for name in names if name in options})[:, 0] > 0


def serve_and_check(q, k, v, *, plan=None, page_size=None, shared=False, layout="bhnd", poison=torch.nan, **options):
    """One call on a cache, dense or paged, that holds poison wherever no query looks, against the reference on a clean
    one. Arguments are in layout bhnd."""
    kv_len, q_len = k.shape[2], q.shape[2]
    want, want_lse = reference(q, k, v, return_lse=True, **options)
    hidden = ~visible_keys(q, k, **options).any(dim=1)
    if shared:
        hidden = hidden.all(dim=0, keepdim=True).expand_as(hidden)
    dirty = k.masked_fill(hidden[:, None, :, None], poison)
    view = v.data_ptr() == k.data_ptr() and k.numel() > 0
    values = dirty[..., : v.shape[3]] if view else v.masked_fill(hidden[:, None, :, None], poison)
    if page_size is not None:
        ends = options["kv_lens"]
        tokens = options.get("q_lens", torch.full_like(ends, q_len))
        window = options.get("window")
        starts = options.get("kv_start", torch.zeros_like(ends))
        if window is not None:
            starts = torch.maximum(starts, ends - tokens - min(window, kv_len))
        ends = ends.where(tokens > 0, 0)
        dirty, pool, table = to_pages(dirty, values, page_size, ends, starts=starts, shared=shared)
        values = dirty[..., : v.shape[3]] if view else pool
        options = {**options, "block_table": table}
        if "key_mask" in options:
            unused = table.shape[1] * page_size - kv_len
            options["key_mask"] = torch.nn.functional.pad(options["key_mask"], (0, unused), value=True)
    arrays = [q, dirty, values]
    if layout == "bnhd":
        arrays = [x.transpose(1, 2) for x in arrays]
    out, lse = flash_decode(*arrays, layout=layout, return_lse=True, backend="cpu", **(plan or {}), **options)
    out = out if layout == "bhnd" else out.transpose(1, 2)
    largest = max(1.0, v.abs().max().item()) if v.numel() else 1.0
    bound = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}[q.dtype] * largest
    assert max_error(out, want) <= bound
    empty = want_lse == -torch.inf
    assert torch.equal(lse == -torch.inf, empty)
    assert max_error(lse[~empty], want_lse[~empty]) <= 1e-4
    assert bool((out[empty] == 0).all())
    return out, lse


PLANS = [{"num_splits": 1}, {"num_splits": 3}, {"split_size": 100}]
ALONE = {
    "several-tokens": {},
    "not-causal": {"causal": False},
    "window-0": {"window": 0},
    "window-1": {"window": 1},
    "window-140": {"window": 140},
    "window-not-causal": {"window": 20, "causal": False},
    "softcap-small": {"softcap": 0.3},
    "softcap": {"softcap": 30.0},
    "alibi": {"alibi_slopes": torch.linspace(0.001, 0.25, 6)},
    "alibi-not-causal": {"alibi_slopes": torch.linspace(-0.01, 0.25, 6), "causal": False},
    "sinks": {"sinks": torch.tensor([-torch.inf, -3.0, 0.0, 3.0, 12.0, 200.0])},
    "q-lens": {"q_lens": torch.tensor([5, 0, 1])},
    "lens": {"kv_lens": torch.tensor([300, 3, 130], dtype=torch.int32)},  # 3 keys, 5 tokens: two see nothing
    "lens-not-causal": {"kv_lens": torch.tensor([300, 3, 0]), "causal": False},
    "start": {"kv_start": torch.tensor([297, 128, 0])},
}


@pytest.mark.parametrize("plan", PLANS, ids=describe)
@pytest.mark.parametrize("dtype", DTYPES, ids=describe)
@pytest.mark.parametrize("options", ALONE.values(), ids=ALONE)
def test_each_option_alone(options, dtype, plan):
    _, k, v = make_inputs(3, 6, 2, 300, 72, dtype, "cpu")
    q = torch.randn(3, 6, 5, 72).to(dtype)
    serve_and_check(q, k, v, plan=plan, **options)


@pytest.mark.parametrize("plan", PLANS, ids=describe)
@pytest.mark.parametrize("q_len", [1, 2, 16, 64])
def test_trees_of_new_tokens(q_len, plan):
    _, k, v = make_inputs(3, 6, 2, 300, 72, torch.float32, "cpu")
    q = torch.randn(3, 6, q_len, 72)
    tree_mask = torch.rand(3, q_len, q_len) < 0.3
    tree_mask[1, :, q_len // 2 :] = False  # these new keys nobody sees
    serve_and_check(q, k, v, plan=plan, tree_mask=tree_mask)
    serve_and_check(q, k, v, plan=plan, tree_mask=tree_mask.transpose(1, 2), window=2)
    q_lens = torch.tensor([q_len, q_len // 2, 0])
    serve_and_check(q, k, v, plan=plan, tree_mask=tree_mask, q_lens=q_lens, kv_lens=torch.tensor([q_len - 1, 300, 9]))


@pytest.mark.parametrize("page_size", [1, 3, 16, 64, 128, 1000])
@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
@pytest.mark.parametrize("plan", PLANS, ids=describe)
def test_pages(page_size, layout, plan):
    _, k, v = make_inputs(3, 6, 2, 300, 72, torch.float16, "cpu", value_dim=40)
    for q_len, window in ((1, None), (1, 70), (5, 70)):
        q = torch.randn(3, 6, q_len, 72).half()
        options = {"kv_lens": torch.tensor([300, 0, 131]), "plan": plan, "layout": layout}
        if window is not None:
            options["window"] = window
        paged = serve_and_check(q, k, v, page_size=page_size, **options)
        dense = serve_and_check(q, k, v, **options)
        assert torch.equal(paged[0], dense[0])
        assert torch.equal(paged[1], dense[1])


def test_sequences_share_pages():
    _, k, v = make_inputs(1, 4, 2, 300, 64, torch.float32, "cpu")
    q = torch.randn(4, 4, 3, 64)
    kv_lens, kv_start = torch.tensor([300, 64, 65, 2], dtype=torch.int32), torch.tensor([0, 10, 64, 0])
    k, v = k.expand(4, -1, -1, -1), v.expand(4, -1, -1, -1)
    for page_size in (1, 3, 16, 64):
        serve_and_check(q, k, v, kv_lens=kv_lens, kv_start=kv_start, page_size=page_size, shared=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=describe)
@pytest.mark.parametrize("plan", PLANS, ids=describe)
def test_values_that_are_a_view_into_the_keys(dtype, plan):
    k = torch.randn(2, 1, 200, 576).to(dtype)
    kv_lens = torch.tensor([200, 77], dtype=torch.int32)
    for q_len in (1, 2):
        q = torch.randn(2, 16, q_len, 576).to(dtype)
        serve_and_check(q, k, k[..., :512], plan=plan, kv_lens=kv_lens)
        serve_and_check(q, k, k[..., :512], plan=plan, kv_lens=kv_lens, page_size=16)


@pytest.mark.parametrize("dtype", DTYPES, ids=describe)
@pytest.mark.parametrize(("head_dim", "value_dim"), [(192, 128), (320, 264), (576, 16), (16, 512), (568, 504)])
def test_wide_heads(head_dim, value_dim, dtype):
    _, k, v = make_inputs(1, 2, 2, TILE + 3, head_dim, dtype, "cpu", value_dim=value_dim)
    serve_and_check(torch.randn(1, 10, 2, head_dim).to(dtype), k, v, plan={"num_splits": 2})


def test_a_hidden_value_that_is_not_finite_stays_out_of_rows_without_keys():
    _, k, v = make_inputs(1, 4, 1, 3, 64, torch.float32, "cpu")
    v[:, :, 1] = torch.nan
    for num_splits in (1, 2):
        out, lse = flash_decode(torch.randn(1, 4, 4, 64), k, v, num_splits=num_splits, return_lse=True)
        assert bool((out[:, :, 0] == 0).all())
        assert bool((lse[:, :, 0] == -torch.inf).all())
        assert bool(out[:, :, 2:].isnan().all())


def test_rows_of_one_token_are_blind_to_later_keys_that_hold_nan_scores():
    _, k, v = make_inputs(1, 4, 1, 40, 64, torch.float32, "cpu")
    q = torch.randn(1, 4, 2, 64)
    want = flash_decode(q, k, v)
    k[:, :, -1] = torch.nan
    out = flash_decode(q, k, v)
    assert torch.equal(out[:, :, 0], want[:, :, 0])
    assert bool(out[:, :, 1].isnan().all())


@pytest.mark.parametrize("softcap", [1e-40, 1e-30, 1e-3, 1e3, 1e9, 1e30, 1e37])
def test_extreme_soft_caps(softcap):
    _, k, v = make_inputs(1, 4, 2, 50, 64, torch.float32, "cpu")
    serve_and_check(torch.randn(1, 4, 2, 64), k, v, softcap=softcap)


def test_tanh_is_exact_to_some_roundings():
    x = np.concatenate([np.linspace(-12, 12, 400_000), np.geomspace(1e-37, 1.0, 99_999), [0.0]]).astype(np.float32)
    y = tanh(x)
    want = np.tanh(x.astype(np.float64))
    number = want != 0
    assert np.abs(y[number] / want[number] - 1).max() < 2.5e-7
    special = np.array([np.inf, -np.inf, 3e38, np.nan], np.float32)
    assert np.array_equal(tanh(special), np.array([1, -1, 1, np.nan], np.float32), equal_nan=True)


def test_a_window_shortens_the_work():
    _, k, v = make_inputs(1, 4, 1, 300, 64, torch.float32, "cpu")
    q = torch.randn(1, 4, 2, 64)
    problem = make_problem(Call(q, k, v, window=20))
    assert cpu.plan(problem, None, 10).num_splits == 3
    assert cpu.plan(make_problem(Call(q, k, v)), None, 10).num_splits == 30
    assert cpu._elements(problem) == 22 * 128 * 2


# Threads.


@pytest.fixture
def shared(monkeypatch):
    """Even small calls are shared among threads."""
    monkeypatch.setattr(threads, "ELEMENTS_PER_THREAD", 1)


@pytest.fixture
def thread_count():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_the_number_of_threads_changes_no_bit(shared, thread_count):
    q, k, v = make_inputs(2, 8, 2, 1000, 64, torch.float32, "cpu")
    results = []
    for count in (1, 2, 16, 3):
        thread_count(count)
        results.append(flash_decode(q, k, v, num_splits=6, return_lse=True))
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])


def test_many_python_threads_at_once(shared, thread_count):
    thread_count(3)
    inputs = [make_inputs(1, 8, 2, 700 + 50 * i, 64, DTYPES[i % 3], "cpu") for i in range(8)]
    want = [flash_decode(*x, num_splits=4) for x in inputs]
    wrong, barrier = [], threading.Barrier(8)

    def call(i):
        barrier.wait()
        for _ in range(50):
            if not torch.equal(flash_decode(*inputs[i], num_splits=4), want[i]):
                wrong.append(i)

    callers = [threading.Thread(target=call, args=(i,)) for i in range(8)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert wrong == []


def test_an_error_in_a_helper_reaches_the_caller():
    main, together = threading.get_ident(), threading.Barrier(2)

    def work():
        together.wait(timeout=10)
        if threading.get_ident() != main:
            raise MemoryError("no scratch")

    with pytest.raises(MemoryError, match="no scratch"):
        threads.run_shared(work, 2)


def test_every_thread_is_woken():
    everyone, seen = threading.Barrier(13), set()

    def work():
        everyone.wait(timeout=10)
        seen.add(threading.get_ident())

    threads.run_shared(work, 13)
    assert len(seen) == 13


def test_a_pool_that_takes_no_work_leaves_it_to_the_caller(monkeypatch):
    pool = threads.ThreadPoolExecutor(2)
    pool.shutdown()
    monkeypatch.setattr(threads, "_pool", pool)
    monkeypatch.setattr(threads, "_pool_size", 2)
    done = []
    threads.run_shared(lambda: done.append(threading.get_ident()), 2)
    assert done == [threading.get_ident()]


@pytest.mark.parametrize(("elements", "count"), [(0, 1), (599_999, 1), (600_000, 2), (10**9, 5)])
def test_count_threads(elements, count, thread_count):
    thread_count(5)
    assert threads.count_threads(elements) == count


@pytest.mark.parametrize(
    ("batch", "heads_kv", "kv_len", "threads_", "row_blocks", "splits"),
    [
        (1, 8, 8192, 1, 1, 1),
        (1, 8, 8192, 2, 1, 1),
        (1, 1, 8192, 2, 1, 8),
        (1, 3, 8192, 2, 1, 3),
        (1, 1, 600, 2, 1, 2),
        (1, 1, 600, 2, 2, 4),
        (1, 1, 200, 2, 16, 3),
        (1, 1, 0, 2, 1, 1),
        (0, 8, 99, 2, 1, 1),
        (1, 8, 8192, 64, 1, 32),
    ],
)
def test_choose_cpu_splits(batch, heads_kv, kv_len, threads_, row_blocks, splits):
    assert threads.choose_cpu_splits(batch, heads_kv, kv_len, threads_, row_blocks) == splits


# Processes and compiled code.

SCRIPT = """
import os, sys, threading, torch
from flash_decoding import flash_decode, quantize_kv, reference
from flash_decoding.backends import cpu

def inputs(dtype, n):
    torch.manual_seed(n)
    return [torch.randn(*shape).to(dtype) for shape in ((2, 5, 1, 72), (2, 1, n, 72), (2, 1, n, 40))]

def check(dtype, n=3000, tokens=1, **options):
    q, k, v = inputs(dtype, n)
    q = q.expand(-1, -1, tokens, -1)
    error = (flash_decode(q, k, v, num_splits=4, **options) - reference(q, k, v, **options)).abs().max().item()
    assert error < {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype], error

def check_codes(kv_format):
    q, k, v = (torch.randn(2, 5 if n == 1 else 1, n, 96) for n in (1, 300, 300))
    k, v, k_scale, v_scale, kv_format = quantize_kv(k, v, kv_format)
    options = dict(kv_format=kv_format, k_scale=k_scale, v_scale=v_scale)
    error = (flash_decode(q, k, v, **options) - reference(q, k, v, **options)).abs().max().item()
    assert error < 2e-6, error
"""


def start(code, **environment):
    """A fresh interpreter that runs SCRIPT and then the code."""
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT + code],
        env={**os.environ, **environment},
        cwd=Path(__file__).parents[1],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process):
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out.strip()


def test_c066_c067_first_calls_race_in_an_empty_cache(tmp_path):
    code = """
errors = []
def call(i):
    try:
        check(torch.float16, 1000 + i)
    except BaseException as error:
        errors.append(error)
callers = [threading.Thread(target=call, args=(i,)) for i in range(8)]
[x.start() for x in callers]
[x.join() for x in callers]
assert not errors, errors
print(cpu.compile_status()["float16"], cpu.compile_status()["float32"], sep="; ")
"""
    cache = {"NUMBA_CACHE_DIR": str(tmp_path)}
    for text in [finish(process) for process in [start(code, **cache) for _ in range(2)]]:
        assert text.startswith(("compiled", "loaded"))  # the slower process may find the faster one's result
        assert text.endswith("; not loaded")
    assert finish(start(code, **cache)).startswith("loaded from the cache")


def test_a_fork_after_a_parallel_call():
    # The child compares bits only: PyTorch's own parallel operations hang after a fork.
    finish(
        start("""
torch.set_num_threads(2)
x = inputs(torch.float32, 9000)
want = flash_decode(*x, num_splits=4)
for _ in range(3):
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(flash_decode(*x, num_splits=4), want) else 1)
    assert os.waitpid(child, 0)[1] == 0
check(torch.float32, 9000)
""")
    )


def test_a_fork_while_another_thread_compiles(tmp_path):
    finish(
        start(
            """
import threading, time
x = inputs(torch.float32, 100)
thread = threading.Thread(target=flash_decode, args=x)
thread.start()
time.sleep(0.5)
child = os.fork()
if child == 0:
    flash_decode(*x)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
thread.join()
""",
            NUMBA_CACHE_DIR=str(tmp_path),
        )
    )


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="names of x86 processors")
@pytest.mark.parametrize(
    ("name", "features", "lanes"),
    [("haswell", "+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+sse4.2,+popcnt", 8), ("x86-64", "+sse2", 8)],
    ids=["avx2", "sse2"],
)
def test_older_processors(name, features, lanes, tmp_path):
    """No AVX-512, and then neither FMA nor float16 instructions: slower, with right results."""
    code = f"""
from flash_decoding.backends.cpu import simd
assert simd.LANES == {lanes}
check(torch.float16)
check(torch.float16, 500, 5, softcap=3.0, alibi_slopes=torch.rand(5) / 8, sinks=torch.rand(5), window=300)
check_codes("fp8_e4m3:head/int4:group32")
"""
    cache = {"NUMBA_CACHE_DIR": str(tmp_path), "NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": features}
    finish(start(code, **cache))


def test_without_a_writable_cache(monkeypatch):
    made = []

    def make_kernel(stamp, cache):
        made.append(cache)
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return "kernel"

    monkeypatch.setattr(cpu, "make_kernel", make_kernel)
    assert cpu._make_kernel() == "kernel"
    assert made == [True, False]


def test_the_first_call_says_that_it_compiles(monkeypatch, caplog):
    monkeypatch.setattr(cpu, "_status", {})
    with caplog.at_level(logging.INFO, "flash_decoding"):
        flash_decode(*make_inputs(1, 1, 1, 5, 16, torch.float32, "cpu"))
        flash_decode(*make_inputs(1, 1, 1, 6, 16, torch.float32, "cpu"))
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "preparing the CPU kernel for float32",
        "the CPU kernel for float32 is ready",
    ]
