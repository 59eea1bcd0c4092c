"""Public cases: sliding windows, several query tokens."""

import pytest
import torch
from cases import INTERPRETED, LN, assert_constant, assert_same_bits, counting, decode, int32
from helpers import DTYPES, LOOSE, assert_matches, decode_and_check, describe, make_inputs, max_error
from paging import to_pages

from flash_decoding import flash_decode

# Sliding window.


@pytest.mark.interpreter
@pytest.mark.parametrize("num_splits", [1, 3])
def test_c034_a_window_counts_keys_left_of_the_own(target, num_splits):
    q, k, v = counting(100, torch.float16, target.device)
    out, lse = decode(target, q, k, v, window=9, num_splits=num_splits)
    assert_constant(out, lse, 94.5, LN(10.0), torch.float16)
    assert "how many keys left of its own position a query sees, itself besides" in flash_decode.__doc__


@pytest.mark.interpreter
@pytest.mark.parametrize("num_splits", [64, 1, 4, 31])
def test_c035_splits_outside_the_window_leave_no_trace(target, num_splits):
    """Scratch is NaN before every test, see conftest.py."""
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
        assert_same_bits(decode(target, q, k, v, window=window, num_splits=2), off)
    for window in (1, 48):
        out, lse = decode(target, q, k, v, window=window)
        assert_matches(out, lse, q, k, v, window=window, atol=LOOSE[q.dtype])
    with pytest.raises(ValueError, match="window must be"):
        decode(target, q, k, v, window=-1)


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", DTYPES, ids=describe)
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("tokens", [1, 3])
def test_c038_no_combination_forgets_an_option(target, tokens, window, softcap, dtype):
    batch = 1 if INTERPRETED else 2
    for group in (1, 6):
        heads = 2 * group
        _, k, v = make_inputs(batch, heads, 2, 70, 64, dtype, target.device)
        q = torch.randn(batch, heads, tokens, 64, device=target.device).to(dtype)
        kv_lens = int32([70] * batch, target)
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


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", [torch.float32, DTYPES[-1]], ids=describe)
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
