"""What the tests of the public cases (test_cases_*.py) share: inputs in closed form, short forms of calls.

Where q = 0, every visible key weighs the same: values that count keys show which were seen, and the lse counts them.
"""

import math
import os

import pytest
import torch
from helpers import LOOSE, max_error

from flash_decoding import flash_decode, reference
from flash_decoding.bench.timing import capture

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
LN = math.log
NAN = float("nan")


def decode(target, q, k, v, **options):
    """(out, lse) of flash_decode() on the backend of the target."""
    return flash_decode(q, k, v, return_lse=True, backend=target.backend, **options)


def int32(values, target):
    return torch.tensor(values, dtype=torch.int32, device=target.device)


def zeros_and(v, heads_q=None, dtype=torch.float32, tokens=1):
    """q = 0 and k random for values v [B, Hkv, N, Dv]: every visible key weighs the same."""
    batch, heads_kv, kv_len, _ = v.shape
    q = torch.zeros(batch, heads_q or heads_kv, tokens, 64, dtype=dtype, device=v.device)
    return q, torch.randn(batch, heads_kv, kv_len, 64, device=v.device).to(dtype), v.to(dtype).contiguous()


def counting(kv_len, dtype, device, *, batch=1, heads=1, tokens=1):
    """q = 0, k random, and values that are their own index."""
    v = torch.arange(kv_len, device=device).float()[:, None].expand(batch, heads, kv_len, 64)
    return zeros_and(v, dtype=dtype, tokens=tokens)


def dense_of(pool, table):
    """The cache [B, Hkv, N, D] that a pool [pages, Hkv, page_size, D] holds; every table entry must name a page."""
    return pool[table.long()].transpose(1, 2).flatten(2, 3)


def reference_of_large(q, k, v, **options):
    """reference(), (out, lse), without a float64 copy of the cache per query head: the heads of a group pose as tokens.

    For one token per sequence and dense caches.
    """
    grouped = q.reshape(q.shape[0], k.shape[1], -1, q.shape[3])
    out, lse = reference(grouped, k, v, causal=False, return_lse=True, **options)
    return out.flatten(1, 2)[:, :, None], lse.flatten(1, 2)[:, :, None]


def assert_constant(out, lse, value, log_sum, dtype):
    """Every element of out is the value and every lse the logarithm."""
    assert max_error(out, torch.full_like(out, value, dtype=torch.float64)) <= LOOSE[dtype] * max(1.0, abs(value))
    assert max_error(lse, torch.full_like(lse, log_sum, dtype=torch.float64)) <= 1e-3


def assert_same_bits(got, want):
    """Equal tensors one by one; NaN equals nothing."""
    for x, y in zip(got, want, strict=True):
        assert torch.equal(x, y), f"off by {max_error(x, y):.3g}"


def repeatable(target, call):
    """call() as serving repeats it: the replay of a CUDA graph on a GPU, the plain call elsewhere."""
    if target.device != "cuda":
        return call
    graph, _ = capture([call])
    return graph.replay


def forbid_launches(monkeypatch):
    """From here to the end of the test, a call that gets past its checks fails."""
    monkeypatch.setattr("flash_decoding.backends.load", lambda name: pytest.fail(f"backend {name} was reached"))
