"""Public cases: empty rows, tails, pages, and memory that nobody may see."""

import math

import pytest
import torch
from cases import INTERPRETED, LN, NAN, assert_constant, assert_same_bits, counting, decode, int32
from helpers import LOOSE, assert_matches, decode_and_check, describe, make_inputs, max_error
from paging import to_pages

from flash_decoding import flash_decode

# Empty. That merges of empty states give no NaN either is C001, in test_cases_numbers.py.


@pytest.mark.interpreter
@pytest.mark.parametrize("plan", [{"num_splits": n} for n in (1, 2, 4, 8)] + [{"split_size": 48}], ids=describe)
def test_c002_empty_splits_do_not_poison_the_reduction(target, plan):
    """Scratch is NaN before every test, see conftest.py; here the outputs are as well."""
    q, k, v = make_inputs(3, 4, 2, 256, 64, torch.float16, target.device)
    kv_lens = int32([0, 5, 256], target)
    out, lse = torch.full_like(q, NAN), torch.full((3, 4, 1), NAN, device=target.device)
    decode(target, q, k, v, kv_lens=kv_lens, out=out, lse=lse, **plan)
    assert_matches(out, lse, q, k, v, kv_lens=kv_lens)
    assert bool((out[0] == 0).all())
    assert bool((lse[0] == -math.inf).all())


@pytest.mark.interpreter
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("plan", [{}, {"num_splits": 1}, {"num_splits": 4}, {"split_size": 64}], ids=describe)
def test_c003_a_cache_without_keys(target, plan, causal):
    q = torch.randn(2, 4, 1, 64, device=target.device)
    kv_lens = int32([0, 0], target)
    dense, pool = torch.empty(2, 2, 0, 64, device=target.device), torch.empty(3, 2, 16, 64, device=target.device)
    table = torch.empty(2, 0, dtype=torch.int32, device=target.device)
    for cache, options in (
        (dense, {}),
        (dense, {"kv_lens": kv_lens}),
        (pool, {"kv_lens": kv_lens, "block_table": table}),
    ):
        out, lse = decode(target, q, cache, cache, causal=causal, **plan, **options)
        assert torch.equal(out, torch.zeros_like(q))
        assert torch.equal(lse, torch.full((2, 4, 1), -math.inf, device=target.device))


@pytest.mark.interpreter
@pytest.mark.parametrize("paged", [False, True], ids=["dense", "paged"])
def test_c057_an_empty_batch_launches_nothing(target, paged):
    q, k, v = make_inputs(0, 8, 2, 100, 64, torch.float16, target.device)
    options = {"kv_lens": int32([], target)}
    if paged:
        k = v = torch.randn(5, 2, 16, 64, device=target.device).half()
        options["block_table"] = torch.empty(0, 4, dtype=torch.int32, device=target.device)
    out, lse = decode(target, q, k, v, **options)
    assert (out.shape, out.dtype, out.device) == ((0, 8, 1, 64), torch.float16, q.device)
    assert (lse.shape, lse.dtype, lse.device) == ((0, 8, 1), torch.float32, q.device)
    # What went wrong elsewhere showed in the next, innocent operation.
    assert torch.ones(3, device=target.device).sum().item() == 3
    decode_and_check(target, *make_inputs(1, 8, 2, 100, 64, torch.float16, target.device))


# Tails and pages.


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=describe)
@pytest.mark.parametrize("n", [64, 1, 63, 65, 127, 128, 129])
def test_c004_lanes_past_the_end_of_a_page_stay_out(target, n, dtype):
    q, k, v = counting(256, dtype, target.device)
    v[:, :, n:] = 1000.0
    pools = (x.reshape(2, 1, 128, 64) for x in (k, v))  # pages of 128: the key axis of one head
    table = int32([[0, 1]], target)[:, : -(-n // 128)]
    out, lse = decode(target, q, *pools, block_table=table, kv_lens=int32([n], target))
    assert_constant(out, lse, (n - 1) / 2, LN(n), dtype)
    if n == 64:
        assert max_error(out, torch.full_like(out, 31.5)) <= LOOSE[dtype]


@pytest.mark.interpreter
@pytest.mark.parametrize("plan", [{"num_splits": 1}, {"num_splits": 2}], ids=describe)
@pytest.mark.parametrize("n", [32, 16, 48, 31, 33])
def test_c005_the_length_rules_over_the_page_list(target, n, plan):
    q = torch.randn(1, 4, 1, 64, device=target.device).half()
    k, v = torch.randn(2, 4, 4, 16, 64, device=target.device).half()
    k[3] = q[0] * 50.0 * 8.0 / (q[0] ** 2).sum(-1, keepdim=True)  # logit 50
    v[3] = 1000.0
    needed = -(-n // 16)
    table, kv_lens = int32([[*range(needed), 3]], target), int32([n], target)
    out, lse = decode(target, q, k, v, block_table=table, kv_lens=kv_lens, **plan)
    assert_same_bits((out, lse), decode(target, q, k, v, block_table=table[:, :needed], kv_lens=kv_lens, **plan))
    assert_matches(out, lse, q, k, v, block_table=table, kv_lens=kv_lens, atol=LOOSE[q.dtype] * 5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=describe)
def test_c006_unused_capacity_changes_nothing(target, dtype):
    q, k, v = make_inputs(1, 32, 8, 4096, 128, dtype, target.device)
    kv_lens = int32([1000], target)
    for plan in ({"num_splits": 5}, {"split_size": 256}, {}):
        results = [
            decode(target, q, k[:, :, :n], v[:, :, :n], kv_lens=kv_lens, **plan) for n in (4096, 1000, 1024, 2048)
        ]
        for i, result in enumerate(results):
            assert_matches(*result, q, k[:, :, :1000], v[:, :, :1000])
            for other in results[:i]:
                if plan:
                    assert_same_bits(result, other)
                else:
                    assert max_error(result[0], other[0]) <= 2 * torch.finfo(dtype).eps * other[0].abs().max().item()


@pytest.mark.interpreter
@pytest.mark.parametrize("page_size", [1, 16, 32, 64, 128, 256, 512])
def test_c007_every_page_size(target, page_size):
    _, k, v = make_inputs(3, 8, 2, 70 if INTERPRETED else 700, 128, torch.float16, target.device)
    q = torch.randn(3, 8, 1, 128, device=target.device).half()
    kv_lens = int32([k.shape[2], 16, 1], target)
    k_pool, v_pool, table = to_pages(k, v, page_size, kv_lens)
    for plan in ({}, {"num_splits": 3}):
        out, lse = decode(target, q, k_pool, v_pool, block_table=table, kv_lens=kv_lens, **plan)
        assert_matches(out, lse, q, k, v, kv_lens=kv_lens, atol=LOOSE[q.dtype] * 4 if INTERPRETED else None)
        dense = decode(target, q, k, v, kv_lens=kv_lens, **plan)
        if plan and target.device == "cpu":  # a GPU's tiles have other warps for pages, so only the cuts coincide
            assert_same_bits((out, lse), dense)
        assert max_error(out, dense[0]) <= 2 * LOOSE[q.dtype]
        assert max_error(lse, dense[1]) <= 1e-5


def test_c007_a_page_without_keys_is_refused(target):
    q, pool = torch.zeros(1, 2, 1, 64, device=target.device), torch.zeros(3, 2, 0, 64, device=target.device)
    options = {"block_table": int32([[0]], target), "kv_lens": int32([0], target), "backend": target.backend}
    with pytest.raises(ValueError, match="k must have pages of at least one key, got 0"):
        flash_decode(q, pool, pool, **options)


# Poisoned memory.


@pytest.mark.interpreter
@pytest.mark.parametrize("plan", [{"num_splits": 1}, {"num_splits": 4}], ids=describe)
@pytest.mark.parametrize("lens", [(32, 64, 96, 48), (33, 1, 127, 0)], ids=str)
@pytest.mark.parametrize("paged", [False, True], ids=["dense", "paged"])
def test_c054_nan_past_the_length_changes_no_bit(target, paged, lens, plan):
    heads = 2 if INTERPRETED else 8
    q, k, v = make_inputs(4, heads, heads, 128, 64, torch.bfloat16, target.device)
    kv_lens = int32(lens, target)
    unused = (torch.arange(128, device=target.device) >= kv_lens[:, None])[:, None, :, None]
    k, v = (x.masked_fill(unused, NAN) for x in (k, v))
    options = {"kv_lens": kv_lens, **plan}
    if paged:
        k, v, options["block_table"] = to_pages(k, v, 16, kv_lens)
    dirty = decode(target, q, k, v, **options)
    assert_same_bits(dirty, decode(target, q, k.nan_to_num(0.0), v.nan_to_num(0.0), **options))


@pytest.mark.interpreter
@pytest.mark.parametrize("options", [{"num_splits": 1}, {"num_splits": 4}, {"split_size": 32}, {"window": 20}], ids=str)
@pytest.mark.parametrize("stale", [-1, 2**31 - 1, "num_pages"])
def test_c055_stale_page_ids_are_not_looked_up(target, stale, options):
    """The pools lie between pages of NaN, where -1 and num_pages lead; 2**31 - 1 leads out of memory."""
    q = torch.randn(3, 4, 1, 64, device=target.device).half()
    pools = torch.full((2, 9, 2, 16, 64), NAN, dtype=torch.float16, device=target.device)
    k, v = pools[:, 1:-1]
    k.normal_(), v.normal_()
    kv_lens, needed = int32([33, 1, 16], target), int32([3, 1, 1], target)
    table = torch.randint(7, (3, 8), dtype=torch.int32, device=target.device)
    past = torch.arange(8, device=target.device) >= needed[:, None]
    dirty = table.masked_fill(past, len(k) if stale == "num_pages" else stale)
    want = decode(target, q, k, v, block_table=table, kv_lens=kv_lens, **options)
    assert_same_bits(decode(target, q, k, v, block_table=dirty, kv_lens=kv_lens, **options), want)
    assert_matches(*want, q, k, v, block_table=table, kv_lens=kv_lens, window=options.get("window"), atol=1e-2)


@pytest.mark.parametrize("bad", [-1, 2**31 - 1, 7])
def test_c055_a_needed_page_id_that_names_no_page_is_refused(target, bad):
    """On the CPU always; on a GPU where check=True asks for it, because looking waits for the device."""
    q, pool = torch.randn(3, 4, 1, 64, device=target.device), torch.randn(7, 2, 16, 64, device=target.device)
    table, kv_lens = int32([[0, 1, bad], [2, -1, -1], [3, -1, -1]], target), int32([33, 1, 16], target)
    message = rf"block_table must hold pages from 0 to 6 where kv_lens reaches, got {bad} at \[0, 2\]"
    for check in (True, False) if target.device == "cpu" else (True,):
        with pytest.raises(ValueError, match=message):
            decode(target, q, pool, pool, block_table=table, kv_lens=kv_lens, check=check)
    decode(target, q, pool, pool, block_table=table, kv_lens=kv_lens.clamp(max=32), check=True)
