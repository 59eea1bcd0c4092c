"""Public cases: split planning, and the same bits for the same call."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from cases import NAN, assert_same_bits, decode, int32
from helpers import LOOSE, decode_and_check, make_inputs, max_error

from flash_decoding import PagedKVCache, flash_decode, reference

# Split planning. That no setting of an earlier call sticks is C012, in test_cases_processes.py.


def test_c010_the_split_count_does_not_change_the_answer(target):
    q, k, v = make_inputs(1, 16, 8, 4096, 128, torch.bfloat16, target.device)
    lses = [decode_and_check(target, q, k, v)[1]]
    for num_splits in (1, 2, 3, 5, 8, 16, 32, 64, 128):
        lses.append(decode_and_check(target, q, k, v, plan={"num_splits": num_splits})[1])
    lowest, highest = torch.stack(lses).aminmax(dim=0)
    assert max_error(lowest, highest) <= 1e-4


@pytest.mark.interpreter
@pytest.mark.parametrize(("kv_len", "lens"), [(2, [2, 0]), (3, [3, 0]), (17, [17, 2])])
def test_c011_more_splits_than_keys(target, kv_len, lens):
    q, k, v = make_inputs(2, 4, 4, kv_len, 64, torch.float32, target.device)
    kv_lens = int32(lens, target)
    out, lse = decode_and_check(target, q, k, v, kv_lens=kv_lens, plan={"num_splits": 16})
    one, one_lse = decode(target, q, k, v, kv_lens=kv_lens, num_splits=1)
    assert max_error(out, one) <= 1e-6
    assert max_error(lse, one_lse) <= 1e-6


def test_c013_every_step_of_a_growing_paged_cache_is_right(target):
    """600 steps, of which elsewhere one in a hundred came back NaN."""
    steps, dtype = 600, torch.bfloat16
    q = torch.randn(4, 16, steps, 128, device=target.device).to(dtype)
    k, v = torch.randn(2, 4, 8, steps, 128, device=target.device).to(dtype)
    # Query n of a causal pass over all steps sees what the single query of step n sees.
    want = torch.cat([reference(q[b : b + 1], k[b : b + 1], v[b : b + 1]) for b in range(4)])
    cache = PagedKVCache(4 * -(-steps // 16) + 2, 16, 8, 128, dtype=dtype, device=target.device)
    cache.k.fill_(NAN), cache.v.fill_(NAN)
    sequences = [cache.allocate() for _ in range(4)]
    for n in range(steps):
        now = slice(n, n + 1)
        cache.append(sequences, k[:, :, now], v[:, :, now], backend=target.backend)
        lengths = {"block_table": cache.block_table(sequences), "kv_lens": cache.kv_lens(sequences)}
        auto, one = (
            flash_decode(q[:, :, now], cache.k, cache.v, num_splits=num_splits, backend=target.backend, **lengths)
            for num_splits in (None, 1)
        )
        bound = torch.finfo(dtype).eps * want[:, :, now].abs().max().item()
        assert max_error(auto, want[:, :, now]) <= bound, f"{n + 1} keys"
        assert max_error(one, want[:, :, now]) <= bound, f"{n + 1} keys in one split"


# Determinism.


@pytest.mark.parametrize("plan", [{}, {"split_size": 512}], ids=["auto", "split_size512"])
def test_c048_neighbours_in_the_batch(target, plan):
    """No bit with split_size, as promised; with automatic splits no more than rounding."""
    q = torch.randn(32, 32, 1, 128, device=target.device).bfloat16()
    k, v = torch.randn(2, 1, 8, 8000, 128, device=target.device).bfloat16().expand(2, 32, 8, 8000, 128).unbind()
    kv_lens = torch.linspace(100, 8000, 32, device=target.device).int()
    out, lse = decode(target, q, k, v, kv_lens=kv_lens, **plan)
    for b, length in enumerate(kv_lens.tolist()):
        row = slice(b, b + 1)
        for alone in (
            decode(target, q[row], k[row], v[row], kv_lens=kv_lens[row], **plan),
            decode(target, q[row], k[row, :, :length], v[row, :, :length], **plan),
        ):
            if plan:
                assert_same_bits(alone, (out[row], lse[row]))
            else:
                ulp = torch.finfo(q.dtype).eps * out[row].abs().max().item()
                assert max_error(alone[0], out[row]) <= 2 * ulp
                assert max_error(alone[1], lse[row]) <= 1e-4
    assert "the same bits whatever else is in the batch" in " ".join(flash_decode.__doc__.split())


@pytest.mark.interpreter
def test_c048_the_capacity_that_neighbours_ask_for_changes_no_bit(target):
    """A cache as wide as the longest sequence, and one split of a cache as wide as the own."""
    q, k, v = make_inputs(1, 4, 2, 120, 64, torch.float32, target.device)
    options = {"split_size": 64, "sinks": torch.randn(4, device=target.device)}
    for length in (1, 17, 40, 63, 64):
        batched = decode(target, q, k, v, kv_lens=int32([length], target), **options)
        assert_same_bits(decode(target, q, k[:, :, :length], v[:, :, :length], **options), batched)


@pytest.mark.parametrize("num_splits", [None, 16])
@pytest.mark.parametrize("batch", [1, 7])
def test_c049_a_hundred_identical_calls_give_the_same_bits(target, batch, num_splits):
    head_dim = 128 if target.device == "cuda" else 32  # a hundred calls of a few milliseconds
    q, k, v = make_inputs(batch, 4, 1, 65536, head_dim, torch.float16, target.device)
    first = decode(target, q, k, v, num_splits=num_splits)
    assert max_error(first[0], reference(q, k, v)) <= LOOSE[q.dtype]
    stop = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        busy = pool.submit(_keep_busy, target, stop)
        try:
            for _ in range(99):
                assert_same_bits(decode(target, q, k, v, num_splits=num_splits), first)
            assert not busy.done(), "the other work ran all the time"
        finally:
            stop.set()
        busy.result()


def _keep_busy(target, stop):
    """Other work, in a thread of its own and on a GPU on a second stream."""
    if target.device == "cpu":
        inputs = make_inputs(1, 4, 1, 5000, 64, torch.float16, "cpu")
        while not stop.is_set():
            decode(target, *inputs, num_splits=8)
        return
    with torch.cuda.stream(torch.cuda.Stream()):
        x = torch.zeros(2048, 2048, dtype=torch.float16, device="cuda")
        while not stop.is_set():
            x @ x
            torch.cuda.current_stream().synchronize()
