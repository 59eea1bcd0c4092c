"""Inputs, the tolerance, and the one comparison that every numerical test uses."""

import os

import pytest
import torch

from flash_decoding import flash_decode, quantize_kv, reference
from flash_decoding.backends import find_backend_errors

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
if os.environ.get("TRITON_INTERPRET") == "1":
    DTYPES.remove(torch.bfloat16)  # Triton's interpreter rounds to bfloat16 by cutting bits off
# Against float64, times max(1, largest visible |v|): far looser than the bound below, for tests at extreme inputs.
LOOSE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def make_inputs(batch, heads_q, heads_kv, kv_len, head_dim, dtype, device, *, value_dim=None, layout="bhnd"):
    """Random q, k, v in a layout."""
    shapes = (
        (batch, heads_q, 1, head_dim),
        (batch, heads_kv, kv_len, head_dim),
        (batch, heads_kv, kv_len, value_dim or head_dim),
    )
    q, k, v = (torch.randn(shape, device=device).to(dtype) for shape in shapes)
    return (q, k, v) if layout == "bhnd" else tuple(x.transpose(1, 2).contiguous() for x in (q, k, v))


def max_error(x, want):
    """Largest absolute difference; infinite where one of them is not finite and the other differs."""
    difference = (x.double() - want.double()).abs()
    difference[x.double() == want.double()] = 0.0  # equal infinities
    return difference.nan_to_num(nan=float("inf")).max().item() if difference.numel() else 0.0


def tolerance(q, k, v, want, **options):
    """The contract: 1.5 times what SDPA loses on the same inputs, or one last place of the largest output."""
    loss = sdpa_error(q, k, v, want, **options)
    largest = want.abs().max().item() if want.numel() else 0.0
    ulp = torch.finfo(q.dtype).eps * 2.0 ** torch.tensor(max(largest, 1e-30)).log2().floor().item()
    return max(1.5 * loss, ulp)


def sdpa_error(
    q, k, v, want, *, layout="bhnd", kv_lens=None, kv_start=None, block_table=None, key_mask=None, scale=None, **rest
):  # fmt: skip
    """What SDPA loses on one token per sequence; 0 where it has no such option, which leaves one last place."""
    if any(x is not None for x in rest.values()) or block_table is not None:
        return 0.0  # also with codes
    if layout == "bnhd":
        q, k, v, want = (x.transpose(1, 2) for x in (q, k, v, want))
    n = torch.arange(k.shape[2], device=q.device)
    seen = torch.ones(q.shape[0], k.shape[2], dtype=torch.bool, device=q.device)
    if kv_lens is not None:
        seen &= n < kv_lens[:, None]
    if kv_start is not None:
        seen &= n >= kv_start[:, None]
    if key_mask is not None:
        seen &= key_mask
    group = q.shape[1] // k.shape[1]
    k, v = (x.masked_fill(~seen[:, None, :, None], 0.0).repeat_interleave(group, dim=1) for x in (k, v))
    sdpa = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None, None, :], scale=scale)
    rows = seen.any(dim=1)  # SDPA gives NaN for a row without keys
    return max_error(sdpa[rows], want[rows])


def assert_matches(out, lse, q, k, v, *, atol=None, **options):
    """out and lse are those of the reference, within the contract's tolerance or the given one; empty rows exactly."""
    want, want_lse = reference(q, k, v, return_lse=True, **options)
    assert out.shape == want.shape
    assert out.dtype == q.dtype
    bound = tolerance(q, k, v, want, **options) if atol is None else atol
    error = max_error(out, want)
    assert error <= bound, f"out is off by {error:.3g}, allowed {bound:.3g}"
    if lse is not None:
        assert lse.dtype == torch.float32
        assert lse.shape == want_lse.shape
        empty = want_lse == -torch.inf
        assert torch.equal(lse == -torch.inf, empty), "a row without keys has lse -inf, and no other"
        lse_error = (lse.double() - want_lse)[~empty].abs()
        assert bool((lse_error <= 1e-3 + 1e-6 * want_lse[~empty].abs()).all()), f"lse is off by {lse_error.max():.3g}"
        rows = empty if options.get("layout", "bhnd") == "bhnd" else empty.transpose(1, 2)
        assert bool((out[rows] == 0).all()), "a row without keys has out 0"


def quantized(k, v, kv_format, *, layout="bhnd", **scales):
    """(k, v, options): codes, and the three options that go with them."""
    cache = quantize_kv(k, v, kv_format, layout=layout, **scales)
    return cache.k, cache.v, {"kv_format": cache.kv_format, "k_scale": cache.k_scale, "v_scale": cache.v_scale}


def skip_where_codes_are_refused(target, dtype):
    """Skip what a backend says that it does not do with codes; test_errors.py holds that it says so."""
    for error in find_backend_errors(target.backend, torch.device(target.device), dtype):
        pytest.skip(str(error))


def decode_and_check(target, q, k, v, *, atol=None, plan=None, **options):
    """flash_decode(...) with lse, held against the reference; plan holds num_splits or split_size."""
    out, lse = flash_decode(q, k, v, return_lse=True, backend=target.backend, **(plan or {}), **options)
    if atol is None and target == ("triton", "cpu"):
        # The interpreter adds float32 numbers one after the other, in an order that no GPU has.
        atol = LOOSE[q.dtype] * max(1.0, v.abs().max().item() if v.numel() else 1.0)
    assert_matches(out, lse, q, k, v, atol=atol, **options)
    return out, lse


def assert_refused(result, *words: str, after: int = 0) -> None:
    """Exit code 2, and one sentence on stderr that holds the words, after so many lines of progress."""
    assert result.exit_code == 2
    lines = result.stderr.strip().splitlines()
    assert len(lines) == after + 1, result.stderr
    assert lines[-1].startswith("flash-decoding: ")
    for word in words:
        assert word in lines[-1]


def describe(x):
    """Readable test ids: dtypes without their prefix, dicts and tuples short."""
    if isinstance(x, torch.dtype):
        return str(x).removeprefix("torch.")
    if isinstance(x, dict):
        return "-".join(f"{key}{value}" for key, value in x.items()) or "auto"
    return None
