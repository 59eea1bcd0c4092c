"""Public cases: quantised caches. Those of quantize_kv() alone are in test_quantization.py."""

import math

import pytest
import torch
from cases import LN, assert_constant, assert_same_bits, decode, int32, zeros_and
from helpers import DTYPES, assert_matches, describe, max_error, quantized, skip_where_codes_are_refused
from paging import to_pages

from flash_decoding import explain

FP8 = torch.float8_e4m3fn
PLANS = [{"num_splits": n} for n in (1, 4)]
SINKS_FORMATS = ["fp8_e4m3", "fp8_e5m2", "int8"]


@pytest.mark.interpreter
@pytest.mark.parametrize("plan", PLANS, ids=describe)
@pytest.mark.parametrize("kv_format", SINKS_FORMATS)
@pytest.mark.parametrize("how", ["dense", "paged", "window", "paged-window", "two-tokens"])
def test_c028_sinks_over_8_bit_caches(target, how, kv_format, plan):
    skip_where_codes_are_refused(target, torch.float16)
    tokens = 2 if how == "two-tokens" else 1
    values = torch.zeros(1, 3, 3, 64)
    values[..., 0] = torch.tensor([1.0, 2.0, 3.0])
    values[..., 1] = torch.tensor([10.0, 20.0, 30.0])
    if kv_format == "fp8_e5m2":
        values[:, :, 2, 1] = 28.0  # 30 has no such code
    q, k, v = zeros_and(values.to(target.device), dtype=torch.float16, tokens=tokens)
    k, v, options = quantized(k, v, kv_format, k_scale=1.0, v_scale=1.0)
    if "window" in how:
        options["window"] = 5
    if "paged" in how:
        options["kv_lens"] = int32([3], target)
        k, v, options["block_table"] = to_pages(k, v, 2, options["kv_lens"])
    sinks = torch.tensor([1.0, 3.0, 6.0], device=target.device).log()
    out, _ = decode(target, q, k, v, sinks=sinks, **options, **plan)
    sums = values[0, 0, :, :2].cumsum(dim=0)
    want = sums[2] / (3 + torch.tensor([[1.0], [3.0], [6.0]]))
    assert max_error(out[0, :, -1, :2].cpu() / want, torch.ones_like(want)) <= torch.finfo(q.dtype).eps
    if tokens == 2:  # the first token sees two keys
        want = sums[1] / (2 + torch.tensor([[1.0], [3.0], [6.0]]))
        assert max_error(out[0, :, 0, :2].cpu() / want, torch.ones_like(want)) <= torch.finfo(q.dtype).eps


@pytest.mark.interpreter
@pytest.mark.parametrize("plan", [{"num_splits": 1}, {"num_splits": 2}, {"split_size": 1}], ids=describe)
@pytest.mark.parametrize("paged", [False, True], ids=["dense", "paged"])
@pytest.mark.parametrize("dtype", DTYPES, ids=describe)
def test_c050_both_scales_count_on_every_path(target, dtype, paged, plan):
    skip_where_codes_are_refused(target, dtype)
    q = torch.zeros(1, 1, 1, 64, dtype=dtype, device=target.device)
    k, v = (torch.zeros(1, 1, 2, 64, device=target.device) for _ in range(2))
    q[..., 0], k[:, :, 0, 0], v[:, :, 0] = 8.0, 2.0, 2.0
    k, v = k.to(FP8), v.to(FP8)
    options = {"k_scale": torch.tensor(0.25, device=target.device), "v_scale": torch.tensor(0.5, device=target.device)}
    if paged:
        options["kv_lens"] = int32([2], target)
        k, v, options["block_table"] = to_pages(k, v, 1, options["kv_lens"])
    out, lse = decode(target, q, k, v, **options, **plan)
    assert_constant(out, lse, math.exp(0.5) / (math.exp(0.5) + 1), LN(math.exp(0.5) + 1), dtype)


@pytest.mark.interpreter
@pytest.mark.parametrize("plan", PLANS, ids=describe)
@pytest.mark.parametrize("codes", [FP8, torch.float8_e5m2, torch.int8], ids=describe)
def test_c051_scales_per_sequence_and_head(target, codes, plan):
    skip_where_codes_are_refused(target, torch.float16)
    v = torch.ones(2, 2, 37, 64, device=target.device)
    q, k, _ = zeros_and(v, heads_q=8, dtype=torch.float16)
    k, v = k.clamp(-3, 3).to(codes), v.to(codes)
    scales = torch.tensor([[0.5, 4.0], [1.0, 2.0]], device=target.device)
    out, lse = decode(target, q, k, v, k_scale=1.0, v_scale=scales[..., None].expand(2, 2, 37), **plan)
    for b in range(2):
        for h in range(2):
            assert_constant(out[b, 4 * h : 4 * h + 4], lse, scales[b, h].item(), LN(37.0), q.dtype)


@pytest.mark.interpreter
@pytest.mark.parametrize("paged", [False, True], ids=["dense", "paged"])
@pytest.mark.parametrize("kv_format", ["fp8_e4m3", "int8"])
def test_c051_scales_of_keys_and_values_per_head(target, kv_format, paged):
    skip_where_codes_are_refused(target, torch.float16)
    q = torch.randn(2, 8, 1, 64, device=target.device).half()
    k, v = (torch.randn(2, 2, 37, 64, device=target.device) for _ in range(2))
    k_scale, v_scale = (torch.tensor(x, device=target.device) for x in ([0.02, 0.05], [0.03, 0.01]))
    k, v, options = quantized(k, v, kv_format, k_scale=k_scale, v_scale=v_scale)
    if paged:
        options["kv_lens"] = int32([37, 20], target)
        k, v, options["block_table"] = to_pages(k, v, 4, options["kv_lens"])
    out, lse = decode(target, q, k, v, **options)
    assert_matches(out, lse, q, k, v, atol=2e-3, **options)


@pytest.mark.interpreter
@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_c053_whatever_form_a_scale_comes_in(target, name):
    skip_where_codes_are_refused(target, torch.float16)
    q = torch.randn(2, 8, 1, 64, device=target.device).half()
    k, v = (torch.randn(2, 2, 50, 64, device=target.device).to(FP8) for _ in range(2))
    half = torch.full((2,), 0.5, device=target.device)
    want = decode(target, q, k, v, **{name: half})
    for scale in (0.5, torch.tensor(0.5), half[:1], half[0]):
        assert_same_bits(decode(target, q, k, v, **{name: scale}), want)
    by_token = decode(target, q, k, v, **{name: half[:, None, None].expand(2, 2, 50)})
    assert max_error(by_token[0], want[0]) < 1e-3, "multiplied elsewhere, so rounded elsewhere"
    assert_same_bits(decode(target, q, k, v, **{name: None}), decode(target, q, k, v, **{name: 1.0}))
    assert max_error(decode(target, q, k, v)[0], want[0]) > 1e-2
    for scale in ("0.5", [0.5], True, half.repeat(2), half.half(), half[None], half.double()):
        assert explain(q, k, v, backend=target.backend, **{name: scale})
        with pytest.raises((TypeError, ValueError), match=name):
            decode(target, q, k, v, **{name: scale})
