"""Laws that need no oracle."""

import pytest
import torch
from helpers import DTYPES, describe, make_inputs, max_error

from flash_decoding import flash_decode, merge_states

pytestmark = pytest.mark.interpreter


def test_chunks_merged_are_the_whole(target):
    q, k, v = make_inputs(2, 4, 2, 150, 64, torch.float32, target.device)
    whole, whole_lse = flash_decode(q, k, v, return_lse=True, backend=target.backend)
    parts = [
        flash_decode(q, k[:, :, a:b], v[:, :, a:b], return_lse=True, backend=target.backend)
        for a, b in ((0, 1), (1, 90), (90, 90), (90, 150))
    ]
    out, lse = merge_states([part[0] for part in parts], [part[1] for part in parts])
    assert max_error(out, whole) < 1e-6
    assert max_error(lse, whole_lse) < 1e-5


def test_a_constant_added_to_all_scores_moves_only_the_lse(target):
    q, k, v = make_inputs(1, 4, 2, 100, 64, torch.float32, target.device)
    shifted = k + 3.0 * q[:, ::2] / (q[:, ::2] ** 2).sum(-1, keepdim=True)
    # Head 2h is the first of KV head h: there the added key component gives every score +3 scale.
    out, lse = flash_decode(q, k, v, scale=0.1, return_lse=True, backend=target.backend)
    moved, moved_lse = flash_decode(q, shifted, v, scale=0.1, return_lse=True, backend=target.backend)
    assert max_error(moved[:, ::2], out[:, ::2]) < 1e-5
    assert max_error(moved_lse[:, ::2], lse[:, ::2] + 0.3) < 1e-5


@pytest.mark.parametrize("dtype", DTYPES, ids=describe)
def test_constant_values_come_back(target, dtype):
    q, k, v = make_inputs(2, 4, 2, 100, 64, dtype, target.device)
    out = flash_decode(q, k, torch.full_like(v, 1.5), backend=target.backend, num_splits=3)
    # The weights and their sum are rounded apart from each other: a few units in the last place.
    assert max_error(out, torch.full_like(out, 1.5)) <= 4 * torch.finfo(dtype).eps


def test_permuting_keys_with_their_values_changes_only_rounding(target):
    q, k, v = make_inputs(1, 4, 2, 130, 64, torch.float32, target.device)
    order = torch.randperm(130, device=target.device)
    out = flash_decode(q, k, v, backend=target.backend)
    assert max_error(flash_decode(q, k[:, :, order], v[:, :, order], backend=target.backend), out) < 1e-6


def test_the_same_call_gives_the_same_bits(target):
    q, k, v = make_inputs(2, 4, 2, 130, 64, torch.float16, target.device)
    first = flash_decode(q, k, v, return_lse=True, backend=target.backend)
    for _ in range(3):
        again = flash_decode(q, k, v, return_lse=True, backend=target.backend)
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


@pytest.mark.parametrize("plan", [{"split_size": 48}, {"num_splits": 3}], ids=describe)
def test_neighbours_in_the_batch_change_no_bit(target, plan):
    q, k, v = make_inputs(3, 4, 2, 130, 64, torch.float16, target.device)
    kv_lens = torch.tensor([130, 17, 99], dtype=torch.int32, device=target.device)
    out, lse = flash_decode(q, k, v, kv_lens=kv_lens, return_lse=True, backend=target.backend, **plan)
    for b in range(3):
        alone = flash_decode(
            q[b : b + 1], k[b : b + 1], v[b : b + 1], kv_lens=kv_lens[b : b + 1], return_lse=True,
            backend=target.backend, **plan,
        )  # fmt: skip
        assert torch.equal(alone[0], out[b : b + 1])
        assert torch.equal(alone[1], lse[b : b + 1])


@pytest.mark.parametrize("dtype", DTYPES, ids=describe)
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_what_nobody_may_see_changes_no_bit(target, dtype, poison):
    q, k, v = make_inputs(3, 4, 2, 140, 64, dtype, target.device)
    kv_lens = torch.tensor([133, 64, 0], dtype=torch.int32, device=target.device)
    kv_start = torch.tensor([5, 0, 0], dtype=torch.int32, device=target.device)
    key_mask = torch.rand(3, 140, device=target.device) > 0.3
    n = torch.arange(140, device=target.device)
    hidden = ~((n < kv_lens[:, None]) & (n >= kv_start[:, None]) & key_mask)[:, None, :, None]
    for plan in ({"num_splits": 1}, {"num_splits": 4}):
        options = dict(
            kv_lens=kv_lens, kv_start=kv_start, key_mask=key_mask, return_lse=True, backend=target.backend, **plan
        )
        clean = flash_decode(q, k.masked_fill(hidden, 0.0), v.masked_fill(hidden, 0.0), **options)
        dirty = flash_decode(q, k.masked_fill(hidden, poison), v.masked_fill(hidden, poison), **options)
        assert all(torch.equal(x, y) for x, y in zip(clean, dirty, strict=True))
