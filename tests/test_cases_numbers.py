"""Public cases: the range of numbers, the lse, merging."""

import math

import numpy as np
import pytest
import torch
from cases import LN, NAN, decode, int32, reference_of_large, zeros_and
from helpers import DTYPES, LOOSE, describe, make_inputs, max_error
from paging import to_pages

from flash_decoding import Workspace, flash_decode, merge_states

# Numeric range.


@pytest.mark.interpreter
@pytest.mark.parametrize("num_splits", [1, 4])
def test_c021_scores_of_a_million_do_not_overflow(target, num_splits):
    q = torch.full((1, 2, 1, 128), 300.0, dtype=torch.float16, device=target.device)
    k = torch.full((1, 2, 64, 128), 300.0, dtype=torch.float16, device=target.device)
    v = torch.randn(1, 2, 64, 128, device=target.device).half()
    out, lse = decode(target, q, k, v, num_splits=num_splits)
    assert max_error(out, v.double().mean(2, keepdim=True)) < LOOSE[torch.float16]
    assert max_error(lse, torch.full_like(lse, 1018237.92)) < 0.5


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("dtype", "magnitude", "bound"), [(torch.float16, 100.0, 0.01), (torch.bfloat16, 15000.0, 3.0)], ids=describe
)
@pytest.mark.parametrize("num_splits", [1, 3])
def test_c022_a_real_score_below_any_finite_mask_value(target, num_splits, dtype, magnitude, bound):
    q, k = torch.zeros(1, 1, 1, 64, device=target.device), torch.zeros(1, 1, 64, 64, device=target.device)
    q[..., 0], k[:, :, 0, 0] = -200.0, magnitude
    v = torch.full_like(k, 1000.0)
    v[:, :, 0] = torch.randn(64, device=target.device)
    q, k, v = (x.to(dtype) for x in (q, k, v))
    score = q[0, 0, 0, 0].double() * k[0, 0, 0, 0].double()
    out, lse = decode(target, q, k, v, scale=1.0, kv_lens=int32([1], target), num_splits=num_splits)
    assert torch.equal(out[0, 0, 0], v[0, 0, 0])
    assert abs(lse.item() - score.item()) <= bound


@pytest.mark.interpreter
def test_c023_splits_whose_mass_underflows_weigh_nothing(target):
    q = torch.zeros(1, 4, 1, 64, device=target.device)
    q[..., 0] = 40.0
    k = torch.randn(1, 4, 1024, 64, device=target.device)
    k[..., 0] = torch.randn(1, 4, 1024, device=target.device) / 40
    k[:, :, 777] = 0.0
    k[:, :, 777, 0] = 40.0
    q, k, v = q.half(), k.half(), torch.randn(1, 4, 1024, 64, device=target.device).half()
    out, lse = decode(target, q, k, v, num_splits=8)
    want = v[:, :, 777:778]
    assert bool(((out - want).abs() <= torch.finfo(torch.float16).eps * want.abs()).all())
    assert max_error(lse, torch.full_like(lse, 200.0)) < 1e-3


# LSE and merging.


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", DTYPES, ids=describe)
@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize("paged", [False, True], ids=["dense", "paged"])
def test_c024_the_lse_is_natural_float32_and_unpadded(target, paged, num_splits, dtype):
    def lse_of(q, k, v):
        options = {"num_splits": num_splits}
        if paged:
            options["kv_lens"] = int32([k.shape[2]] * 2, target)
            k, v, options["block_table"] = to_pages(k, v, 4, options["kv_lens"])
        _, lse = decode(target, q, k, v, **options)
        assert lse.shape == (2, 6, 1)
        assert lse.dtype == torch.float32
        return lse

    lse = lse_of(*zeros_and(torch.randn(2, 2, 8, 64, device=target.device), heads_q=6, dtype=dtype))
    assert max_error(lse, torch.full_like(lse, LN(8))) < 1e-5
    q, k, v = make_inputs(2, 6, 2, 16, 64, dtype, target.device)
    scores = q.double() @ k.double().repeat_interleave(3, dim=1).mT / 8.0
    assert max_error(lse_of(q, k, v), torch.logsumexp(scores, dim=-1)) < 1e-5
    assert "natural log of the sum of exp" in " ".join(flash_decode.__doc__.split())


def test_c025_splitting_costs_no_accuracy(target):
    """With values as drawn, and a thousand times as large."""
    # The largest error of one draw of a GPU, which rounds the weights, is a matter of luck.
    draws = 4 if target.device == "cuda" else 1
    mismatch, error = {}, {}
    for seed in range(draws):
        torch.manual_seed(seed)
        q, k, v = make_inputs(2, 32, 8, 16384, 128, torch.bfloat16, target.device)
        for gain in (1.0, 1000.0):
            v = v * gain
            want, _ = reference_of_large(q, k, v)
            for num_splits in (1, 16):
                out, lse = decode(target, q, k, v, num_splits=num_splits)
                assert lse.dtype == torch.float32
                case = gain, num_splits
                mismatch[case] = mismatch.get(case, 0.0) + (out != want.bfloat16()).double().mean().item() / draws
                error[case] = max(error.get(case, 0.0), max_error(out, want))
    for gain in (1.0, 1000.0):
        assert mismatch[gain, 16] <= mismatch[gain, 1] + 0.02
        assert error[gain, 16] <= 1.2 * error[gain, 1]
    workspace = Workspace()
    decode(target, q, k, v, num_splits=16, workspace=workspace)
    assert workspace._buffer.dtype == torch.float32, "of which all partials are views"


@pytest.mark.interpreter
def test_c026_a_long_and_a_short_part_are_weighed_by_their_mass(target):
    v = torch.cat([torch.zeros(1, 2, 64, 64), torch.ones(1, 2, 16, 64)], dim=2).to(target.device)
    q, k, v = zeros_and(v)
    parts = [decode(target, q, k[:, :, a:b], v[:, :, a:b]) for a, b in ((0, 64), (64, 80))]
    out, lse = merge_states(*zip(*parts, strict=True))
    assert max_error(out, torch.full_like(out, 0.2)) < 1e-6
    assert max_error(lse, torch.full_like(lse, LN(80))) < 1e-6
    whole, whole_lse = decode(target, q, k, v)
    assert max_error(out, whole) < 1e-6
    assert max_error(lse, whole_lse) < 1e-6
    # Another library's partial, whose lse comes from float64 NumPy.
    theirs = torch.full_like(parts[0][1], float(np.log(np.exp(np.zeros(64)).sum())))
    mixed, mixed_lse = merge_states([parts[0][0], parts[1][0]], [theirs, parts[1][1]])
    assert max_error(mixed, out) < 1e-6
    assert max_error(mixed_lse, lse) < 1e-6


@pytest.mark.parametrize("dtype", DTYPES, ids=describe)
def test_c001_merging_empty_states_gives_no_nan(target, dtype):
    out_a, out_b = torch.randn(2, 3, 2, 64, device=target.device).to(dtype)
    lse_a, lse_b = (
        torch.tensor([[x, x] for x in column], device=target.device)
        for column in ((-math.inf, 1.5, 0.3), (-math.inf, -math.inf, 2.0))
    )
    for nothing in (0.0, NAN):  # what the output of a state without keys holds does not matter
        out_a[0], out_b[0], out_b[1] = nothing, nothing, nothing
        out, lse = merge_states([out_a, out_b], [lse_a, lse_b])
        assert torch.equal(out[0], torch.zeros_like(out[0]))
        assert bool((lse[0] == -math.inf).all())
        assert torch.equal(out[1], out_a[1])
        assert torch.equal(lse[1], lse_a[1])
        weight = torch.sigmoid(torch.tensor(0.3 - 2.0, dtype=torch.float64)).item()
        assert max_error(out[2], weight * out_a[2].double() + (1 - weight) * out_b[2].double()) < LOOSE[dtype]
        assert max_error(lse[2], torch.full_like(lse[2], math.log(math.exp(0.3) + math.exp(2.0)))) < 1e-6
        assert not bool(out.isnan().any() | lse.isnan().any())
        swapped = merge_states([out_b, out_a], [lse_b, lse_a])
        assert torch.equal(out, swapped[0])
        assert torch.equal(lse, swapped[1])


@pytest.mark.interpreter
@pytest.mark.parametrize("empty", [0.0, NAN], ids=["zero", "nan"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=describe)
def test_c046_shards_without_tokens(target, dtype, empty):
    """Tokens dealt to four shards in turn; what shards without a token of a sequence hold as out does not matter."""
    q, k, v = make_inputs(3, 4, 2, 9, 64, dtype, target.device)
    kv_lens = int32([2, 0, 9], target)
    outs, lses = [], []
    for shard in range(4):
        own = (kv_lens + 3 - shard) // 4
        out, lse = decode(target, q, k[:, :, shard::4], v[:, :, shard::4], kv_lens=own)
        assert torch.equal(lse[:, 0, 0] == -math.inf, own == 0)
        outs.append(out.masked_fill((lse == -math.inf)[..., None], empty))
        lses.append(lse)
    out, lse = merge_states(outs, lses)
    want, want_lse = decode(target, q, k, v, kv_lens=kv_lens)
    assert max_error(out, want) <= (1e-6 if dtype == torch.float32 else LOOSE[dtype])
    assert max_error(lse, want_lse) <= 1e-5
    assert torch.equal(out[1], torch.zeros_like(out[1]))
    assert bool((lse[1] == -math.inf).all())
