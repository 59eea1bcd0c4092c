"""Inputs, checks and CPU timing; the CUDA graph part needs a GPU."""

from __future__ import annotations

import math
import time

import pytest
import torch

from flash_decoding import flash_decode, reference
from flash_decoding.bench import read_floor
from flash_decoding.bench.read_floor import Floor, measure_floor
from flash_decoding.bench.timing import (
    Inputs,
    Method,
    Timed,
    capture,
    count_copies,
    error_limit,
    make_inputs,
    max_abs_err,
    reference_by_head,
    time_cpu,
    time_graph,
)
from flash_decoding.bench.workloads import Case, Shape

SMALL = Case("x", "x", Shape(2, 6, 2, 77, 32), "float32", "cpu")


@pytest.mark.parametrize(
    ("kv_bytes", "free_bytes", "copies"),
    [
        (1_000_000, 10**11, 400),  # rotated until 400 MB
        (537_000_000, 10**11, 2),  # never fewer than two
        (1_000_000_000, 3_500_000_000, 1),  # less memory: one, in three layouts
        (1_000_000_000, 2_000_000_000, 0),  # it does not fit
    ],
)
def test_count_copies(kv_bytes: int, free_bytes: int, copies: int):
    assert count_copies(kv_bytes, free_bytes, Method()) == copies


def test_inputs_differ_between_copies_and_repeat_between_runs():
    first, second = make_inputs(SMALL, 2, seed=3)
    again = make_inputs(SMALL, 1, seed=3)[0]
    assert not torch.equal(first.k, second.k)
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
    assert first.q.shape == (2, 6, 1, 32)
    assert first.k.shape == first.v.shape == (2, 2, 77, 32)


def test_reference_by_head_is_the_reference():
    inputs = make_inputs(SMALL, 1, seed=0)[0]
    torch.testing.assert_close(reference_by_head(inputs), reference(*inputs), rtol=0, atol=1e-14)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_error_limit_passes_the_rounded_result_and_no_lost_tile(dtype: str):
    case = Case("x", "x", Shape(1, 4, 2, 512, 64), dtype, "cpu")
    q, k, v = make_inputs(case, 1, seed=0)[0]
    want = reference_by_head(Inputs(q, k, v))
    limit = error_limit(dtype, want)
    assert max_abs_err(want.to(q.dtype), want) <= limit
    assert max_abs_err(flash_decode(q, k[:, :, :-64], v[:, :, :-64]), want) > limit


def test_a_nan_never_passes():
    want = torch.zeros(2)
    assert max_abs_err(torch.tensor([0.0, math.nan]), want) == math.inf


def test_time_cpu_calls_each_copy_and_reports_the_median():
    called: list[int] = []

    def make(at: int):
        def call() -> None:
            called.append(at)
            time.sleep(0.001 * (at + 1))

        return call

    timed = time_cpu([make(0), make(1), make(2)], Method(cpu_repeats=3, cpu_us=0))
    assert called == [0, 1, 2, 0]  # the first is the warm-up
    assert len(timed.repeats) == 3
    assert timed.median == sorted(timed.repeats)[1] >= 2000
    assert timed.spread == max(timed.repeats) - min(timed.repeats)


def test_cpu_floor_counts_both_arrays():
    case = Case("x", "x", Shape(1, 1, 1, 4096, 64), "float32", "cpu")
    floor = measure_floor(make_inputs(case, 2, seed=0), Method())
    assert floor.bytes == case.kv_bytes
    assert floor.us > 0
    assert floor.gb_per_s == pytest.approx(case.kv_bytes / floor.us / 1e3)
    assert "threads" in floor.setting


def test_cpu_floor_is_a_median_as_our_times_are(monkeypatch):
    times = {1: Timed(30.0, 50.0, [10.0, 30.0, 60.0]), 2: Timed(20.0, 9.0, [15.0, 20.0, 24.0])}
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(read_floor, "_make_cpu_read", lambda copy, threads: threads)
    monkeypatch.setattr(read_floor, "time_cpu", lambda calls, method: times[calls[0]])
    # The smallest repeat of all belongs to one thread; the smallest median is that of two.
    assert measure_floor(make_inputs(SMALL, 2, seed=0), Method()) == Floor(
        2 * 2 * 2 * 77 * 32 * 4, 20.0, "numba, 2 threads"
    )


def test_floor_bandwidth():
    assert Floor(bytes=4_000_000, us=1000.0, setting="").gb_per_s == pytest.approx(4.0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_graph_time_and_floor_on_a_gpu():
    case = Case("x", "x", Shape(1, 8, 8, 8192, 128), "bfloat16")
    method = Method(rotated_bytes=100_000_000)
    copies = make_inputs(case, 3, seed=0)
    floor = measure_floor(copies, method)
    graph, outs = capture([lambda q=q, k=k, v=v: flash_decode(q, k, v) for q, k, v in copies])
    timed = time_graph(graph, len(copies), method)
    assert max_abs_err(outs[-1], reference_by_head(copies[-1])) <= error_limit("bfloat16", outs[-1].double())
    assert 0.9 * floor.us < timed.median < 20 * floor.us
