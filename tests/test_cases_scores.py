"""Public cases: attention sinks and the soft cap."""

import math

import pytest
import torch
from cases import LN, assert_constant, assert_same_bits, counting, decode, int32
from helpers import DTYPES, LOOSE, assert_matches, describe, make_inputs, max_error
from paging import to_pages

from flash_decoding import explain, merge_states

SPLITS = [{"num_splits": n} for n in (1, 2, 3, 4, 8)]

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
@pytest.mark.parametrize("dtype", DTYPES, ids=describe)
@pytest.mark.parametrize("how", ["dense", "paged", "window", "paged-window", "two-tokens"])
def test_c028_sinks_on_every_path(target, how, dtype, plan):
    tokens = 2 if how == "two-tokens" else 1
    q, k, v = three_values(dtype, target.device, heads=3, tokens=tokens)
    sinks = torch.tensor([1.0, 3.0, 6.0], device=target.device).log()
    options = {"window": 5} if "window" in how else {}
    if "paged" in how:
        kv_lens = int32([3], target)
        k, v, table = to_pages(k, v, 2, kv_lens)
        options |= {"block_table": table, "kv_lens": kv_lens}
    out, _ = decode(target, q, k, v, sinks=sinks, **options, **plan)
    bound = max(torch.finfo(dtype).eps, 1e-6)
    want = torch.tensor([[1.5, 15.0], [1.0, 10.0], [2 / 3, 20 / 3]])
    assert max_error(out[0, :, -1, :2].cpu() / want, torch.ones_like(want)) <= bound
    if tokens == 2:  # the first token sees values 1 and 2
        first = torch.tensor([[3.0, 30.0]]) / (2 + torch.tensor([[1.0], [3.0], [6.0]]))
        assert max_error(out[0, :, 0, :2].cpu() / first, torch.ones_like(want)) <= bound


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
@pytest.mark.parametrize("num_splits", [1, 2])
@pytest.mark.parametrize("how", ["length", "window", "causal"])
def test_c031_masked_keys_stay_out_of_a_small_cap(target, how, num_splits):
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
    out, lse = decode(target, q, k, v, softcap=1.0, num_splits=num_splits, **options)
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


@pytest.mark.interpreter
def test_c033_what_a_soft_cap_may_be(target):
    q, k, v = make_inputs(1, 4, 2, 100, 64, torch.float32, target.device)
    q = 20 * q
    off = decode(target, q, k, v)
    for softcap in (None, 0, 0.0):
        assert_same_bits(decode(target, q, k, v, softcap=softcap), off)
    out, lse = decode(target, q, k, v, softcap=5)
    assert max_error(out, off[0]) > 0.05
    assert_matches(out, lse, q, k, v, softcap=5, atol=1e-5)
    assert max_error(decode(target, q, k, v, softcap=1e9)[0], off[0]) <= LOOSE[q.dtype] * v.abs().max().item()
    for softcap in (-1.0, math.nan, math.inf):
        assert explain(q, k, v, softcap=softcap)
        with pytest.raises(ValueError, match="softcap must be"):
            decode(target, q, k, v, softcap=softcap)
