"""More cases that libraries got wrong in public, about the options of serving caches; see test_cases.py.

Where q = 0, every visible key weighs the same: values that count keys show which were seen.
"""

import math

import pytest
import torch
from helpers import DTYPES, LOOSE, assert_matches, decode_and_check, describe, make_inputs, max_error
from paging import to_pages

from flash_decoding import explain, flash_decode, merge_states

LN = math.log
SPLITS = [{"num_splits": n} for n in (1, 2, 3, 4, 8)]


def counting(kv_len, dtype, device, *, heads=1, tokens=1):
    """q = 0, random k, and values that are their own index."""
    q = torch.zeros(1, heads, tokens, 64, device=device)
    k = torch.randn(1, heads, kv_len, 64, device=device)
    v = torch.arange(kv_len, device=device).float()[:, None].expand(1, heads, kv_len, 64)
    return q.to(dtype), k.to(dtype), v.to(dtype).contiguous()


def decode(target, q, k, v, **options):
    return flash_decode(q, k, v, return_lse=True, backend=target.backend, **options)


def assert_constant(out, lse, value, log_sum, dtype):
    """Every element of out is the value and every lse the logarithm."""
    assert max_error(out, torch.full_like(out, value, dtype=torch.float64)) <= LOOSE[dtype] * max(1.0, abs(value))
    assert max_error(lse, torch.full_like(lse, log_sum, dtype=torch.float64)) <= 1e-3


def int32(values, target):
    return torch.tensor(values, dtype=torch.int32, device=target.device)


# Tails and pages.


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=describe)
@pytest.mark.parametrize("n", [64, 1, 63, 65, 127, 128, 129])
def test_c004_lanes_past_the_end_of_a_page_stay_out(target, n, dtype):
    q, k, v = counting(256, dtype, target.device)
    v[:, :, n:] = 1000.0
    pools = (x.reshape(2, 1, 128, 64) for x in (k, v))  # pages of 128: the key axis of one head
    table = int32([[0, 1]], target)
    out, lse = decode(target, q, *pools, block_table=table, kv_lens=int32([n], target))
    assert_constant(out, lse, (n - 1) / 2, LN(n), dtype)


@pytest.mark.interpreter
@pytest.mark.parametrize("n", [32, 16, 48, 31, 33])
def test_c005_the_length_rules_over_the_page_list(target, n):
    q = torch.randn(1, 4, 1, 64, device=target.device).half()
    k, v = torch.randn(2, 4, 4, 16, 64, device=target.device).half()
    k[3] = q[0] * 50.0 * 8.0 / (q[0] ** 2).sum(-1, keepdim=True)  # logit 50
    v[3] = 1000.0
    needed = -(-n // 16)
    table = int32([[*range(needed), 3]], target)
    plan = {"num_splits": 2, "kv_lens": int32([n], target)}
    out, lse = decode(target, q, k, v, block_table=table, **plan)
    want, want_lse = decode(target, q, k, v, block_table=table[:, :needed], **plan)
    if target.backend == "cpu":
        assert torch.equal(out, want)
        assert torch.equal(lse, want_lse)
    assert_matches(out, lse, q, k, v, block_table=table, kv_lens=plan["kv_lens"], atol=LOOSE[q.dtype] * 5)


@pytest.mark.parametrize("page_size", [1, 16, 32, 64, 128, 256, 512])
def test_c007_every_page_size(target, page_size):
    _, k, v = make_inputs(3, 8, 2, 700, 128, torch.float16, target.device)
    q = torch.randn(3, 8, 1, 128, device=target.device).half()
    kv_lens = int32([700, 16, 1], target)
    k_pool, v_pool, table = to_pages(k, v, page_size, kv_lens)
    out, lse = decode(target, q, k_pool, v_pool, block_table=table, kv_lens=kv_lens)
    assert_matches(out, lse, q, k, v, kv_lens=kv_lens)


# Sinks.


def three_values(dtype, device, heads=1, tokens=1):
    """q = 0 and values (1, 10), (2, 20), (3, 30), padded with zeros."""
    q, k, v = counting(3, dtype, device, heads=heads, tokens=tokens)
    v.zero_()
    v[..., 0] = torch.tensor([1.0, 2.0, 3.0])
    v[..., 1] = torch.tensor([10.0, 20.0, 30.0])
    return q, k, v


@pytest.mark.interpreter
@pytest.mark.parametrize("plan", SPLITS, ids=describe)
@pytest.mark.parametrize("dtype", DTYPES, ids=describe)
def test_c027_a_sink_counts_once_whatever_the_splits(target, dtype, plan):
    q, k, v = three_values(dtype, target.device, heads=4)
    out, lse = decode(target, q, k, v, sinks=torch.zeros(4, device=target.device), **plan)
    assert_constant(out[..., 0], lse, 1.5, LN(3.0), dtype)
    assert_constant(out[..., 1], lse, 15.0, LN(3.0), dtype)


@pytest.mark.interpreter
@pytest.mark.parametrize("plan", SPLITS[::2], ids=describe)
@pytest.mark.parametrize("how", ["dense", "paged", "window", "two-tokens"])
def test_c028_sinks_on_every_path(target, how, plan):
    tokens = 2 if how == "two-tokens" else 1
    q, k, v = three_values(torch.float32, target.device, heads=3, tokens=tokens)
    sinks = torch.tensor([1.0, 3.0, 6.0], device=target.device).log()
    options = {"window": 5} if how == "window" else {}
    if how == "paged":
        kv_lens = int32([3], target)
        k, v, table = to_pages(k, v, 2, kv_lens)
        options = {"block_table": table, "kv_lens": kv_lens}
    out, _ = decode(target, q, k, v, sinks=sinks, **options, **plan)
    want = torch.tensor([[1.5, 15.0], [1.0, 10.0], [2 / 3, 20 / 3]])
    assert max_error(out[0, :, -1, :2].cpu(), want) <= 1e-5
    if tokens == 2:  # the first token sees values 1 and 2
        first = torch.tensor([[3.0, 30.0]]) / (2 + torch.tensor([[1.0], [3.0], [6.0]]))
        assert max_error(out[0, :, 0, :2].cpu(), first) <= 1e-5


@pytest.mark.interpreter
@pytest.mark.parametrize("num_splits", [1, 4])
def test_c029_a_sink_without_keys(target, num_splits):
    q, k, v = make_inputs(2, 4, 2, 4, 64, torch.float32, target.device)
    sinks = torch.full((4,), 1.25, device=target.device)
    kv_lens = int32([0, 4], target)
    out, lse = decode(target, q, k, v, sinks=sinks, kv_lens=kv_lens, num_splits=num_splits)
    assert bool((out[0] == 0).all())
    assert bool((lse[0] == -math.inf).all())
    assert_matches(out, lse, q, k, v, sinks=sinks, kv_lens=kv_lens, atol=1e-5)
    merged, merged_lse = merge_states([out[:1], out[1:]], [lse[:1], lse[1:]])
    assert torch.equal(merged, out[1:])
    assert max_error(merged_lse, lse[1:]) <= 1e-6


@pytest.mark.interpreter
@pytest.mark.parametrize("num_splits", [1, 3])
def test_c030_a_sink_is_neither_scaled_nor_capped(target, num_splits):
    q, k, v = counting(148, torch.float32, target.device)
    sinks = torch.tensor([30.0], device=target.device)
    out, lse = decode(target, q, k, torch.ones_like(v), sinks=sinks, softcap=5.0, num_splits=num_splits)
    want = 148 / (148 + math.exp(30.0))
    assert max_error(out / want, torch.ones_like(out)) <= 1e-5
    assert max_error(lse, torch.full_like(lse, LN(148))) <= 1e-3  # an lse here leaves the sink out


# Soft cap.


@pytest.mark.interpreter
@pytest.mark.parametrize("how", ["length", "window", "causal"])
def test_c031_masked_keys_stay_out_of_a_small_cap(target, how):
    v = torch.ones(1, 1, 8, 64, device=target.device)
    k, q = torch.zeros_like(v), torch.zeros(1, 1, 1, 64, device=target.device)
    options = {}
    if how == "length":
        v[:, :, 4:], options["kv_lens"] = 10000.0, int32([4], target)
    elif how == "window":
        v[:, :, :4], options["window"] = 10000.0, 3
    else:
        k, v, q = k[:, :, :5], v[:, :, :5], q.expand(1, 1, 2, 64)
        v[:, :, 4] = 10000.0
    out, lse = decode(target, q, k, v, softcap=1.0, **options)
    assert bool((out[:, :, 0] == 1).all())
    assert max_error(lse[:, :, 0].cpu(), torch.full((1, 1), LN(4.0))) <= 1e-3


@pytest.mark.interpreter
@pytest.mark.parametrize("logit", [5000.0, 4400.0, 1e6])
def test_c032_large_scores_do_not_overflow_the_cap(target, logit):
    q = torch.zeros(1, 1, 1, 64, dtype=torch.float16, device=target.device)
    q[..., 0] = 200.0
    k = q.repeat(1, 1, 4, 1)
    k[:, :, 3] *= -1
    v = torch.tensor([1.0, 2.0, 3.0, 1000.0], device=target.device).half()[:, None].expand(1, 1, 4, 64).contiguous()
    out, lse = decode(target, q, k, v, softcap=50.0, scale=logit / 40000.0)
    assert_constant(out, lse, 2.0, 50 + LN(3.0), torch.float16)


def test_c033_what_a_soft_cap_may_be(target):
    q, k, v = make_inputs(1, 4, 2, 100, 64, torch.float32, target.device)
    q = 20 * q
    off = decode(target, q, k, v)
    for softcap in (None, 0, 0.0):
        assert all(torch.equal(x, y) for x, y in zip(decode(target, q, k, v, softcap=softcap), off, strict=True))
    out, lse = decode(target, q, k, v, softcap=5)
    assert max_error(out, off[0]) > 0.05
    assert_matches(out, lse, q, k, v, softcap=5, atol=1e-5)
    assert max_error(decode(target, q, k, v, softcap=1e9)[0], off[0]) <= LOOSE[q.dtype] * v.abs().max().item()
    for softcap in (-1.0, math.nan, math.inf):
        assert explain(q, k, v, softcap=softcap)
        with pytest.raises(ValueError, match="softcap must be"):
            decode(target, q, k, v, softcap=softcap)


# Sliding window.


@pytest.mark.interpreter
@pytest.mark.parametrize("num_splits", [1, 3])
def test_c034_a_window_counts_keys_left_of_the_own(target, num_splits):
    q, k, v = counting(100, torch.float16, target.device)
    out, lse = decode(target, q, k, v, window=9, num_splits=num_splits)
    assert_constant(out, lse, 94.5, LN(10.0), torch.float16)


@pytest.mark.parametrize("num_splits", [64, 1, 4, 31])
def test_c035_splits_outside_the_window_leave_no_trace(target, num_splits):
    q, k, v = counting(4096, torch.float32, target.device)
    v[:] = 1000.0
    v[:, :, 3968:] = 1.0
    out, lse = decode(target, q, k, v, window=127, num_splits=num_splits)
    assert bool((out == 1).all())
    assert max_error(lse, torch.full_like(lse, LN(128.0))) <= 1e-3


@pytest.mark.interpreter
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("window", "value"), [(127, 191.5), (128, 191.0)])
def test_c036_the_window_of_one_token_ends_with_the_cache(target, window, value, causal):
    q, k, v = counting(256, torch.float32, target.device)
    out, lse = decode(target, q, k, v, window=window, causal=causal)
    assert_constant(out, lse, value, LN(window + 1), torch.float32)


@pytest.mark.interpreter
def test_c037_windows_at_their_bounds(target):
    q, k, v = make_inputs(1, 4, 2, 50, 64, torch.float16, target.device)
    out, lse = decode(target, q, k, v, window=0)
    assert torch.equal(out, v[:, :, 49:].repeat_interleave(2, dim=1))
    assert_matches(out, lse, q, k, v, window=0, atol=0)
    off = decode(target, q, k, v, num_splits=2)
    for window in (49, 50, 10**9, None):
        again = decode(target, q, k, v, window=window, num_splits=2)
        assert all(torch.equal(x, y) for x, y in zip(again, off, strict=True))
    for window in (1, 48):
        out, lse = decode(target, q, k, v, window=window)
        assert_matches(out, lse, q, k, v, window=window, atol=LOOSE[q.dtype])
    with pytest.raises(ValueError, match="window must be"):
        decode(target, q, k, v, window=-1)


@pytest.mark.parametrize("dtype", DTYPES, ids=describe)
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("tokens", [1, 3])
def test_c038_no_combination_forgets_an_option(target, tokens, window, softcap, dtype):
    for group in (1, 6):
        heads = 2 * group
        _, k, v = make_inputs(2, heads, 2, 70, 64, dtype, target.device)
        q = torch.randn(2, heads, tokens, 64, device=target.device).to(dtype)
        kv_lens = int32([70, 70], target)
        k_pool, v_pool, table = to_pages(k, v, 16, kv_lens)
        for sinks in (None, torch.randn(heads, device=target.device)):
            options = {"window": window, "softcap": softcap, "sinks": sinks}
            bound = LOOSE[dtype] * v.abs().max().item()
            decode_and_check(target, q, k, v, atol=bound, **options)
            out, lse = decode(target, q, k_pool, v_pool, block_table=table, kv_lens=kv_lens, **options)
            assert_matches(out, lse, q, k, v, atol=bound, **options)


# Several query tokens.


@pytest.mark.interpreter
def test_c039_causal_is_aligned_to_the_bottom_right(target):
    q, k, v = counting(5, torch.float32, target.device, tokens=2)
    out, lse = decode(target, q[:, :, :1], k, v)
    assert_constant(out, lse, 2.0, LN(5.0), torch.float32)
    out, lse = decode(target, q, k, v)
    assert_constant(out[:, :, 0], lse[:, :, 0], 1.5, LN(4.0), torch.float32)
    assert_constant(out[:, :, 1], lse[:, :, 1], 2.0, LN(5.0), torch.float32)


@pytest.mark.interpreter
def test_c040_new_tokens_do_not_see_the_future(target):
    q, k, v = counting(40, torch.float32, target.device, tokens=4)
    v[:, :, :37], v[:, :, 37:] = 1.0, 1000.0
    out, lse = decode(target, q, k, v)
    assert bool((out[:, :, 0] == 1).all())
    for r in range(4):
        value = (37 + 1000 * r) / (37 + r)
        assert_constant(out[:, :, r], lse[:, :, r], value, LN(37.0 + r), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=describe)
@pytest.mark.parametrize("extra", ["plain", "window", "sinks"])
def test_c041_several_tokens_are_single_tokens_in_a_row(target, extra, dtype):
    _, k, v = make_inputs(2, 8, 2, 48, 64, dtype, target.device)
    q = torch.randn(2, 8, 4, 64, device=target.device).to(dtype)
    kv_lens = int32([40, 17], target)
    k_pool, v_pool, table = to_pages(k, v, 16, kv_lens)
    options = {"plain": {}, "window": {"window": 8}, "sinks": {"sinks": torch.randn(8, device=target.device)}}[extra]
    out, lse = decode(target, q, k_pool, v_pool, block_table=table, kv_lens=kv_lens, **options)
    for t in range(4):
        single, single_lse = decode(
            target, q[:, :, t : t + 1], k_pool, v_pool, block_table=table, kv_lens=kv_lens - 3 + t, **options
        )
        assert max_error(out[:, :, t : t + 1], single) <= LOOSE[dtype] * max(1.0, v.abs().max().item())
        assert max_error(lse[:, :, t : t + 1], single_lse) <= 1e-3
