"""flash_decode() on every backend against the float64 reference."""

import pytest
import torch
from helpers import DTYPES, decode_and_check, describe, make_inputs, max_error

from flash_decoding import flash_decode, reference

# Tiles are 8 to 64 keys long: one key, one less than a tile, a tile, one more, a prime, several tiles and a rest.
LENGTHS = [1, 63, 64, 65, 133, 515]


@pytest.mark.interpreter
@pytest.mark.parametrize("kv_len", LENGTHS)
@pytest.mark.parametrize("plan", [{}, {"num_splits": 1}, {"num_splits": 3}, {"split_size": 50}], ids=describe)
def test_lengths_and_plans(target, kv_len, plan):
    q, k, v = make_inputs(2, 6, 2, kv_len, 64, torch.float16, target.device)
    decode_and_check(target, q, k, v, plan=plan)


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", DTYPES, ids=describe)
@pytest.mark.parametrize("group", [1, 3, 5, 7, 8, 16, 40])
def test_group_sizes(target, group, dtype):
    q, k, v = make_inputs(1, 2 * group, 2, 131, 64, dtype, target.device)
    decode_and_check(target, q, k, v, plan={"num_splits": 2})


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", DTYPES, ids=describe)
@pytest.mark.parametrize(
    ("head_dim", "value_dim"),
    [(16, 16), (24, 40), (64, 128), (72, 72), (80, 96), (128, 64), (192, 192), (256, 16), (256, 256)],
)
def test_widths(target, head_dim, value_dim, dtype):
    q, k, v = make_inputs(1, 4, 2, 70, head_dim, dtype, target.device, value_dim=value_dim)
    decode_and_check(target, q, k, v, plan={"num_splits": 2})


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", DTYPES, ids=describe)
@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
def test_layouts_and_ragged_lengths(target, layout, dtype):
    q, k, v = make_inputs(4, 4, 2, 133, 64, dtype, target.device, layout=layout)
    kv_lens = torch.tensor([133, 1, 0, 77], dtype=torch.int32, device=target.device)
    kv_start = torch.tensor([7, 0, 0, 77], dtype=torch.int32, device=target.device)
    key_mask = torch.rand(4, 133, device=target.device) > 0.3
    for options in ({"kv_lens": kv_lens}, {"kv_start": kv_start}, {"kv_lens": kv_lens, "kv_start": kv_start}):
        decode_and_check(target, q, k, v, layout=layout, **options)
        decode_and_check(target, q, k, v, layout=layout, key_mask=key_mask, plan={"num_splits": 3}, **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=describe)
@pytest.mark.parametrize(
    ("batch", "heads_q", "heads_kv", "kv_len", "head_dim"),
    [(1, 32, 8, 4096, 128), (2, 8, 8, 2000, 64), (1, 8, 1, 3001, 128)],
)
def test_serving_shapes(target, batch, heads_q, heads_kv, kv_len, head_dim, dtype):
    decode_and_check(target, *make_inputs(batch, heads_q, heads_kv, kv_len, head_dim, dtype, target.device))


@pytest.mark.interpreter
def test_writes_into_out_and_lse_whatever_the_strides(target):
    q, k, v = make_inputs(2, 4, 2, 100, 64, torch.float16, target.device)
    for plan in ({"num_splits": 1}, {"num_splits": 3}):
        wide = torch.full((2, 4, 3, 80), 7.0, dtype=q.dtype, device=target.device)
        out, lse = wide[:, :, 1:2, 8:72], torch.full((2, 4, 1), 7.0, device=target.device)
        got, got_lse = flash_decode(q, k, v, out=out, lse=lse, return_lse=True, backend=target.backend, **plan)
        assert got is out
        assert got_lse is lse
        want, want_lse = flash_decode(q, k, v, return_lse=True, backend=target.backend, **plan)
        assert torch.equal(out, want)
        assert torch.equal(lse, want_lse)
        wide[:, :, 1:2, 8:72] = 7.0
        assert bool((wide == 7.0).all()), "nothing but out is written"


@pytest.mark.interpreter
@pytest.mark.parametrize("scale", [0.0, -0.3, 1.0, 3])
def test_scale(target, scale):
    decode_and_check(target, *make_inputs(1, 2, 1, 70, 64, torch.float32, target.device), scale=scale)


def test_lengths_outside_the_cache_are_clamped_on_a_gpu(target):
    if target.device == "cpu":
        pytest.skip("the CPU refuses them: see test_errors.py")
    q, k, v = make_inputs(2, 4, 2, 100, 64, torch.float16, target.device)
    kv_lens = torch.tensor([10**9, -5], dtype=torch.int64, device=target.device)
    out, lse = flash_decode(q, k, v, kv_lens=kv_lens, return_lse=True)
    want, want_lse = flash_decode(q, k, v, kv_lens=torch.tensor([100, 0], device=target.device), return_lse=True)
    assert torch.equal(out, want)
    assert torch.equal(lse, want_lse)


def test_the_reference_is_softmax_attention():
    q, k, v = make_inputs(2, 6, 2, 50, 64, torch.float64, "cpu")
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    assert torch.allclose(reference(q, k, v), want, atol=1e-12), "torch's own float64 attention says otherwise"


@pytest.mark.interpreter
def test_values_wider_than_the_keys_of_the_same_storage(target):
    """The tile of K may serve as V only where it holds all of V."""
    storage = torch.randn(1, 1, 40, 64, dtype=torch.float16, device=target.device)
    q = torch.randn(1, 2, 1, 48, dtype=torch.float16, device=target.device)
    decode_and_check(target, q, storage[..., :48], storage, plan={"num_splits": 2})
    decode_and_check(target, torch.randn_like(q).repeat(1, 1, 1, 2)[..., :64], storage, storage)


@pytest.mark.interpreter
@pytest.mark.parametrize("softcap", [0.5, 50.0, 1e4, 1e9])
def test_a_large_soft_cap_is_no_soft_cap(target, softcap):
    q, k, v = make_inputs(1, 4, 2, 70, 64, torch.float32, target.device)
    out, _ = decode_and_check(target, q, k, v, softcap=softcap, atol=3e-6)
    if softcap == 1e9:
        assert max_error(out, flash_decode(q, k, v, backend=target.backend)) < 3e-6
