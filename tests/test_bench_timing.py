"""Inputs, checks and CPU timing; the CUDA graph part needs a GPU."""

from __future__ import annotations

import math
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from flash_decoding import flash_decode, quantize_kv, reference
from flash_decoding.bench import read_floor, timing
from flash_decoding.bench.paging import make_pages
from flash_decoding.bench.read_floor import Floor, ReadSetting, make_read_calls, measure_floor
from flash_decoding.bench.timing import (
    Inputs,
    Method,
    Timed,
    capture,
    check_output,
    count_copies,
    error_limits,
    make_inputs,
    reference_by_head,
    time_cpu,
    time_graph,
)
from flash_decoding.bench.workloads import DENSE, Case, Options, Shape
from flash_decoding.quantization import KVFormat

SMALL = Case("x", "x", Shape(2, 6, 2, 77, 32), "float32", "cpu")


@pytest.mark.parametrize(
    ("kv_len", "window", "free_bytes", "copies"),
    [
        (2_500, None, 10**11, 400),  # 1 MB: rotated until 400 MB
        (1_342_500, None, 10**11, 2),  # 537 MB: never fewer than two
        (2_500_000, None, 3_500_000_000, 1),  # 1 GB, less memory: one, in three layouts
        (2_500_000, None, 2_000_000_000, 0),  # it does not fit
        (250_000, 2_499, 2 * 10**11, 400),  # 1 MB of 100 MB is read: so many caches
        (250_000, 2_499, 10**11, 300),  # fewer, but no L2 cache holds 300 MB
        (250_000, 2_499, 3 * 10**10, 0),  # 90 MB could stay in one
    ],
)
def test_count_copies(kv_len: int, window: int | None, free_bytes: int, copies: int):
    case = Case("x", "x", Shape(1, 1, 1, kv_len, 100), "bfloat16", options=Options(window=window))
    assert count_copies(case, free_bytes, Method()) == copies


def test_inputs_differ_between_copies_and_repeat_between_runs():
    first, second = make_inputs(SMALL, 2, seed=3)
    again = make_inputs(SMALL, 1, seed=3)[0]
    assert not torch.equal(first.k, second.k)
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
    assert first.q.shape == (2, 6, 1, 32)
    assert first.k.shape == first.v.shape == (2, 2, 77, 32)


OPTIONS = (
    DENSE,
    Options(q_len=3),
    Options(window=10),
    Options(q_len=3, page_size=16, kv_lens=(5, 77)),
    Options(page_size=1, window=10),
)


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: str(options) or "dense")
def test_reference_by_head_is_the_reference(options: Options):
    case = replace(SMALL, options=options)
    inputs = make_inputs(case, 1, seed=0)[0]
    arguments = {"window": options.window}
    if options.page_size is not None:
        pages = make_pages(case, options.page_size, inputs.q.device)
        arguments |= {"block_table": pages.table, "kv_lens": pages.lens}
    assert inputs.q.shape == (2, 6, options.q_len, 32)
    torch.testing.assert_close(reference_by_head(case, inputs), reference(*inputs, **arguments), rtol=0, atol=1e-14)


FORMATS = ("fp8", "fp8_e5m2:head", "fp8:token", "int8", "int8:tensor", "int4:group32", "int4:group32+zero")


@pytest.mark.parametrize("options", [DENSE, Options(page_size=16, kv_lens=(5, 77))], ids=["dense", "paged"])
@pytest.mark.parametrize("kv_format", FORMATS)
def test_codes_are_those_of_the_same_numbers_a_few_heads_at_a_time(kv_format: str, options: Options, monkeypatch):
    case = replace(SMALL, dtype="bfloat16", options=options)
    plain = make_inputs(case, 1, seed=0)[0]
    want = quantize_kv(plain.k, plain.v, kv_format)
    monkeypatch.setattr(timing, "_ELEMENTS_AT_ONCE", 3 * case.cache_shape[2] * case.shape.head_dim)
    coded = replace(case, kv_format=kv_format)
    found = make_inputs(coded, 1, seed=0)[0]
    assert torch.equal(found.q, plain.q)
    for name in ("k", "v"):
        codes = getattr(want, name)
        assert getattr(found, name).dtype == codes.dtype
        assert torch.equal(getattr(found, name).view(torch.uint8), codes.view(torch.uint8))
        assert torch.equal(getattr(found, f"{name}_scale"), getattr(want, f"{name}_scale"))
    assert sum(x.numel() for x in found.in_memory()) == coded.cache_bytes


@pytest.mark.parametrize("at_once", [1, 3 * 77 * 32, 1 << 25])  # one head, the three of a KV head, all
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: str(options) or "dense")
@pytest.mark.parametrize("kv_format", FORMATS)
def test_reference_of_codes_is_that_of_their_numbers(kv_format: str, options: Options, at_once: int, monkeypatch):
    case = replace(SMALL, dtype="bfloat16", options=options, kv_format=kv_format)
    inputs = make_inputs(case, 1, seed=0)[0]
    arguments = {"window": options.window, "k_scale": inputs.k_scale, "v_scale": inputs.v_scale}
    if options.page_size is not None:
        pages = make_pages(case, options.page_size, inputs.q.device)
        arguments |= {"block_table": pages.table, "kv_lens": pages.lens}
    want = reference(*inputs, kv_format=KVFormat.parse(kv_format), **arguments)
    monkeypatch.setattr(timing, "_ELEMENTS_AT_ONCE", at_once)
    torch.testing.assert_close(reference_by_head(case, inputs), want, rtol=0, atol=1e-13)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_check_passes_the_rounded_result_and_no_lost_tile(dtype: str):
    case = Case("x", "x", Shape(1, 4, 2, 512, 64), dtype, "cpu")
    q, k, v = make_inputs(case, 1, seed=0)[0]
    want = reference_by_head(case, Inputs(q, k, v))
    error, wrong = check_output(want.to(q.dtype), want, dtype)
    assert 0 < error <= error_limits(dtype, want).item()
    assert wrong is None
    lost = flash_decode(q, k[:, :, :-64], v[:, :, :-64])
    error, wrong = check_output(lost, want, dtype)
    assert wrong is not None
    assert wrong.startswith(f"the largest error is {error:.2e}, allowed is ")


def test_a_short_neighbour_hides_no_lost_tile():
    """One key gives outputs of up to 4, and 4096 keys outputs of less than a tenth: each has a limit of its own."""
    case = Case("x", "x", Shape(2, 4, 2, 4096, 64), "bfloat16", "cpu", Options(page_size=64, kv_lens=(1, 4096)))
    inputs = make_inputs(case, 1, seed=0)[0]
    want, pages = reference_by_head(case, inputs), make_pages(case, 64, inputs.q.device)
    assert check_output(want.bfloat16(), want, "bfloat16")[1] is None
    out = flash_decode(*inputs, block_table=pages.table, kv_lens=pages.lens - torch.tensor([0, 64], dtype=torch.int32))
    error, wrong = check_output(out, want, "bfloat16")
    assert error < error_limits("bfloat16", want)[0]
    assert wrong is not None


def test_a_nan_never_passes():
    want = torch.zeros(2, 1, 1, 2)
    want[0] = 1.0
    out = want.clone()
    out[1, 0, 0, 1] = math.nan
    error, wrong = check_output(out, want, "float32")
    assert error == math.inf
    assert wrong is not None


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


def test_cpu_floor_of_a_part_reads_that_part_alone(monkeypatch):
    read = []
    monkeypatch.setattr(read_floor, "_cpu_reader", lambda: lambda words: read.append(words.nbytes))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    case = Case("x", "x", Shape(1, 1, 1, 4096, 64), "float32", "cpu", Options(window=99))
    assert measure_floor(make_inputs(case, 2, seed=0), Method(cpu_us=0), case.kv_bytes).bytes == case.kv_bytes
    assert set(read) == {case.kv_bytes // 2}


def test_cpu_floor_of_codes_reads_the_scales_too(monkeypatch):
    read = []
    monkeypatch.setattr(read_floor, "_cpu_reader", lambda: lambda words: read.append(words.nbytes))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    for kv_format, nbytes in (("fp8", 4096 * 64), ("int8", 4096 * 68), ("int4", 4096 * 34)):
        case = Case("x", "x", Shape(1, 1, 1, 4096, 64), "float32", "cpu", kv_format=kv_format)
        read.clear()
        assert measure_floor(make_inputs(case, 2, seed=0), Method(cpu_us=0), case.kv_bytes).bytes == case.kv_bytes
        assert set(read) == {nbytes}


def test_gpu_floor_reads_whole_64_bytes(monkeypatch):
    """A single scale behind the codes would else make every load narrower."""
    read = []
    monkeypatch.setitem(
        sys.modules, "flash_decoding.bench.read_kernel",
        SimpleNamespace(launch_read=lambda k, v, *rest: read.append((k.numel(), v.numel()))),
    )  # fmt: skip
    for kv_format in ("fp8", "int8", "int4"):
        case = Case("x", "x", Shape(1, 2, 2, 160, 64), "bfloat16", "cpu", kv_format=kv_format)
        sides = [copy.in_memory() for copy in make_inputs(case, 1, seed=0)]
        make_read_calls(sides, ReadSetting(1024, 4, 1, 1), 132, case.kv_bytes)[0]()
        assert read[-1][0] == read[-1][1] == case.kv_bytes // 128 * 16


def test_cpu_floor_is_a_median_as_our_times_are(monkeypatch):
    times = {1: Timed(30.0, 50.0, [10.0, 30.0, 60.0]), 2: Timed(20.0, 9.0, [15.0, 20.0, 24.0])}
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(read_floor, "_make_cpu_read", lambda copy, threads, kv_bytes: threads)
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
    assert check_output(outs[-1], reference_by_head(case, copies[-1]), "bfloat16")[1] is None
    assert 0.9 * floor.us < timed.median < 20 * floor.us
