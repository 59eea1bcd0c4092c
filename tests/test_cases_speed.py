"""Public cases about time: graphs over rotated inputs, medians, and another try where something else was running.

Run these alone. While other processes use the GPU no time means anything, so under pytest-xdist they are skipped. What
needs no clock, such as the plans behind these times, is tested without a GPU as well.
"""

import gc
import os
import statistics
import time

import pytest
import torch
from cases import int32

from flash_decoding import Workspace, flash_decode
from flash_decoding.backends import load
from flash_decoding.bench.results import empty_row
from flash_decoding.bench.timing import Method, capture, time_eager, time_graph
from flash_decoding.bench.workloads import Case, Shape
from flash_decoding.problem import Call, make_problem
from flash_decoding.split_plan import choose_plan

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
ALONE = pytest.mark.skipif(
    int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1, reason="times need the GPU alone: run without -n"
)
METHOD = Method(graph_us_per_repeat=1000.0)
TRIES = 3
# Streaming multiprocessors and shared memory per program of an RTX 4060, an A100 and an H200.
DEVICES = {"rtx4060": (24, 99 << 10), "a100": (108, 163 << 10), "h200": (132, 227 << 10)}


def timed(test):
    """A test that measures on the GPU."""
    for mark in (pytest.mark.gpu, NEEDS_GPU, ALONE):
        test = mark(test)
    return test


def count_copies(kv_bytes):
    """Copies of the inputs that fill an L2 cache twice, as far as their number stays small."""
    return max(2, min(64, 120_000_000 // kv_bytes))


def draw(*shape):
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")


class Timer:
    """Graphs of calls over rotated inputs, which share one scratch; us() is the median time of a call."""

    def __init__(self):
        self.workspace = Workspace(64 << 20, "cuda")

    def graph(self, inputs, **options):
        """inputs: a list of (q, k, v, arrays); arrays: further keyword arguments of that copy."""
        outs = [torch.zeros_like(q) for q, *_ in inputs]
        calls = [
            lambda q=q, k=k, v=v, arrays=arrays, out=out: flash_decode(
                q, k, v, out=out, workspace=self.workspace, **arrays, **options
            )
            for (q, k, v, arrays), out in zip(inputs, outs, strict=True)
        ]
        return capture(calls)[0], len(calls)

    def us(self, graph):
        return time_graph(*graph, METHOD).median


def assert_within(timer, factor, slow, fast):
    """The graph `slow` takes at most `factor` times as long as the graph `fast`, in the best of a few tries."""
    ratios = []
    for _ in range(TRIES):
        ratios.append(timer.us(slow) / timer.us(fast))
        if ratios[-1] <= factor:
            return
    pytest.fail(f"{min(ratios):.2f} times as long, allowed {factor}; all tries: {[round(x, 2) for x in ratios]}")


# C042: a graph replayed at other lengths than it was captured at. That it is right is in test_cases_serving.py.


@timed
def test_c042_a_graph_captured_at_short_lengths_is_as_fast_at_long_ones():
    k, v = draw(1030, 4, 16, 128), draw(1030, 4, 16, 128)
    table = torch.randperm(1030, device="cuda")[:1024].int().view(2, 512)
    timer, lens = Timer(), torch.tensor([1, 1], dtype=torch.int32, device="cuda")
    inputs = [(draw(2, 16, 1, 128), k, v, {"kv_lens": lens, "block_table": table})] * 10
    early = timer.graph(inputs)
    lens.copy_(torch.tensor([8192, 17]))
    assert_within(timer, 1.3, early, timer.graph(inputs))


# C059: short sequences.


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ragged", [False, True], ids=["dense", "ragged"])
def test_c059_up_to_64_keys_are_one_split_on_every_gpu(device, ragged):
    processors, shared_memory = DEVICES[device]
    for batch in (1, 8, 64):
        for kv_len in (1, 16, 64):
            plan = choose_plan(
                batch=batch, heads_kv=8, group=4, q_len=1, kv_len=kv_len, head_dim=128, value_dim=128, element_size=2,
                processors=processors, shared_memory=shared_memory, ragged=ragged,
            )  # fmt: skip
            assert plan.num_splits == 1


def test_c059_up_to_64_keys_are_one_split(target):
    for batch in (1, 8, 64):
        for kv_len in (16, 64):
            assert automatic_plan(target, batch, 32, 8, kv_len, 128).num_splits == 1


def automatic_plan(target, batch, heads_q, heads_kv, kv_len, head_dim, **options):
    q = torch.zeros(batch, heads_q, 1, head_dim, dtype=torch.bfloat16, device=target.device)
    kv = torch.zeros(1, heads_kv, 1, head_dim, dtype=torch.bfloat16, device=target.device)
    kv = kv.expand(batch, heads_kv, kv_len, head_dim)
    return load(target.backend).plan(make_problem(Call(q, kv, kv, **options)), None, None)


@timed
@pytest.mark.parametrize("kv_len", [16, 64, 128, 256, 512, 1024])
@pytest.mark.parametrize("batch", [1, 8, 64])
def test_c059_automatic_splits_are_as_fast_as_the_best_of_a_sweep(batch, kv_len):
    timer, copies = Timer(), count_copies(4 * batch * 8 * kv_len * 128)
    inputs = [
        (draw(batch, 32, 1, 128), draw(batch, 8, kv_len, 128), draw(batch, 8, kv_len, 128), {}) for _ in range(copies)
    ]
    automatic = timer.graph(inputs)
    sweep = {num_splits: timer.graph(inputs, num_splits=num_splits) for num_splits in (1, 2, 4, 8, 16)}
    for _ in range(TRIES):
        us = timer.us(automatic)
        others = {num_splits: timer.us(graph) for num_splits, graph in sweep.items()}
        if us <= 1.1 * min(others.values()):
            return
    q, k, v, _ = inputs[0]
    chosen = load("triton").plan(make_problem(Call(q, k, v)), None, None).num_splits
    others = {num_splits: round(x, 2) for num_splits, x in others.items()}
    pytest.fail(f"{us:.2f} us with {chosen} splits; us by splits: {others}")


# C060: a large cache with few live keys. A slice of the cache, or of the block table, tells the planner the most keys.


@timed
@pytest.mark.parametrize("paged", [False, True], ids=["dense", "paged"])
@pytest.mark.parametrize("batch", [1, 4])
def test_c060_unused_capacity_costs_little(batch, paged):
    capacity, live, copies = 131072, 512, count_copies(4 * batch * 8 * 512 * 128)
    make = _paged_in_large_caches if paged else _dense_in_large_caches
    large, hinted, small = make(batch, capacity, live, copies)
    timer = Timer()
    base = timer.graph(small)
    assert_within(timer, 1.25, timer.graph(hinted), base)
    assert_within(timer, 2.0, timer.graph(large), base)


def _dense_in_large_caches(batch, capacity, live, copies):
    """The same live keys at the front of a large cache, in a slice of it, and in a cache of their size.

    The large caches of all copies overlap: each begins `live` keys after the one before.
    """
    lens = torch.full((batch,), live, dtype=torch.int32, device="cuda")
    k, v = (draw(batch, 8, capacity + copies * live, 128) for _ in "kv")
    large, hinted, small = [], [], []
    for i in range(copies):
        q = draw(batch, 32, 1, 128)
        keys, values = (x[:, :, i * live : i * live + capacity] for x in (k, v))
        large.append((q, keys, values, {"kv_lens": lens}))
        keys, values = (x[:, :, :live] for x in (keys, values))
        hinted.append((q, keys, values, {"kv_lens": lens}))
        small.append((q, keys.contiguous(), values.contiguous(), {"kv_lens": lens}))
    return large, hinted, small


def _paged_in_large_caches(batch, capacity, live, copies):
    """The same pages through a wide table, a slice of it, and a table of their width."""
    lens = torch.full((batch,), live, dtype=torch.int32, device="cuda")
    width, needed = capacity // 16, live // 16
    k, v = (draw(copies * batch * needed, 8, 16, 128) for _ in "kv")
    pages = torch.randperm(len(k), device="cuda").int().view(copies, batch, needed)
    large, hinted, small = [], [], []
    for own in pages:
        q = draw(batch, 32, 1, 128)
        table = torch.full((batch, width), -1, dtype=torch.int32, device="cuda")
        table[:, :needed] = own
        large.append((q, k, v, {"kv_lens": lens, "block_table": table}))
        hinted.append((q, k, v, {"kv_lens": lens, "block_table": table[:, :needed]}))
        small.append((q, k, v, {"kv_lens": lens, "block_table": own.contiguous()}))
    return large, hinted, small


# C061: what a call costs the host.


def test_c061_the_benchmark_reports_the_host_time_of_a_call():
    assert "us_host" in empty_row(Case("x", "x", Shape(1, 32, 8, 256, 128), "bfloat16"), "x", "ok")
    assert Method().to_json()["us_host"] == "median time the host spends on one plain call"


@timed
@pytest.mark.parametrize(("num_splits", "launches"), [(1, 1), (4, 2), (None, 2)])
def test_c061_warm_calls_launch_few_kernels_and_allocate_nothing(num_splits, launches, record_property):
    """Two thousand calls of a small step: one kernel without splits, two at most with them, and no memory."""
    q, k, v = draw(1, 32, 1, 128), draw(1, 8, 256, 128), draw(1, 8, 256, 128)
    options = {"out": torch.zeros_like(q), "workspace": Workspace(1 << 20, "cuda"), "num_splits": num_splits}

    def call():
        return flash_decode(q, k, v, **options)

    call()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    kernels = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert 1 <= len(kernels) <= launches if num_splits is None else len(kernels) == launches, kernels

    record_property("us_in_a_graph", time_graph(capture([call] * 20)[0], 20, METHOD).median)
    assert two_thousand(call, "allocation.all.allocated", record_property) == 0
    del options["out"]  # then the output is all that is allocated, and it is given back
    call()
    assert two_thousand(call, "allocation.all.current") == 0
    assert two_thousand(call, "reserved_bytes.all.current") == 0


def two_thousand(call, statistic, record_property=None):
    """By how much a statistic of the allocator grows over so many warm calls."""
    before = torch.cuda.memory_stats()[statistic]
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(2000):
        call()
    torch.cuda.synchronize()
    if record_property is not None:
        record_property("us_per_eager_call", (time.perf_counter() - begin) * 1e6 / 2000)
    return torch.cuda.memory_stats()[statistic] - before


@timed
def test_c061_host_time_depends_on_neither_length_nor_batch():
    steps = {
        (batch, kv_len): (draw(batch, 32, 1, 128), draw(batch, 8, kv_len, 128), draw(batch, 8, kv_len, 128))
        for batch, kv_len in ((1, 256), (1, 8192), (8, 256), (64, 1024))
    }
    for _ in range(TRIES):
        host = {}
        for sizes, inputs in steps.items():
            options = {"out": torch.zeros_like(inputs[0]), "num_splits": 4}
            host[sizes] = time_eager([lambda x=inputs, o=options: flash_decode(*x, **o)], 20.0, METHOD)[1].median
        if max(host.values()) <= 1.5 * min(host.values()):
            return
    pytest.fail(f"host time by (batch, length), us: {host}")


# C062: lengths, batches and table widths that change with every step.


def compilations(target):
    """Kernels compiled so far."""
    if target.backend == "cpu":
        return len(load("cpu")._kernel.signatures)
    from flash_decoding.backends.triton.chunk import _chunk_kernel
    from flash_decoding.backends.triton.reduce import _reduce_kernel

    return sum(len(caches[0]) for kernel in (_chunk_kernel, _reduce_kernel) for caches in kernel.device_caches.values())


def growing_calls(device, paged, stride=1):
    """A call per length from 1 to 1200, with batches of 1 to 9 and, in pages of 32, tables 63 to 65 wide."""
    q, k, v = (torch.randn(9, heads, n, 80, device=device).half() for heads, n in ((8, 1), (2, 1200), (2, 1200)))
    pool = torch.randn(100, 2, 32, 80, device=device).half()
    table = torch.randint(100, (9, 65), dtype=torch.int32, device=device)
    for n in range(1, 1201, stride):
        batch, width = 1 + n % 9, 63 + n // 9 % 3
        if paged:
            lens = torch.full((batch,), n, dtype=torch.int32, device=device)
            yield q[:batch], pool, pool, {"kv_lens": lens, "block_table": table[:batch, :width].contiguous()}
        else:
            yield q[:batch], k[:batch, :, :n], v[:batch, :, :n], {}


@pytest.mark.parametrize("paged", [False, True], ids=["dense", "paged"])
def test_c062_changing_sizes_compile_a_bounded_number_of_kernels(target, paged):
    calls = list(growing_calls(target.device, paged, stride=1 if target.device == "cuda" else 7))
    counts, warm_up = [], calls[5 * len(calls) // 6]  # about 1000 keys
    for inputs in ([warm_up], calls, calls[::-1]):
        for q, k, v, arrays in inputs:
            flash_decode(q, k, v, backend=target.backend, **arrays)
        counts.append(compilations(target))
    assert counts[1] - counts[0] <= 8, "after the warm-up"
    assert counts[2] == counts[1], "after the first pass"


@timed
@pytest.mark.parametrize("paged", [False, True], ids=["dense", "paged"])
def test_c062_no_later_call_stalls(paged):
    """Each length's best of two passes after the first, so that a pause of the machine's does not count."""
    calls = list(growing_calls("cuda", paged))
    times = []
    gc.disable()
    try:
        for _ in range(3):
            passed = []
            for q, k, v, arrays in calls:
                torch.cuda.synchronize()
                begin = time.perf_counter()
                flash_decode(q, k, v, **arrays)
                torch.cuda.synchronize()
                passed.append(time.perf_counter() - begin)
            times.append(passed)
    finally:
        gc.enable()
    slowest = max(map(min, times[1], times[2]))
    assert slowest < 5e-3, f"{slowest * 1e3:.2f} ms; the median is {statistics.median(times[2]) * 1e3:.3f} ms"


# C063: sliding windows.


@pytest.mark.parametrize("batch", [1, 2, 16])
def test_c063_a_window_is_planned_like_a_cache_of_its_size(target, batch):
    window = automatic_plan(target, batch, 64, 8, 32768, 64, window=127)
    assert window.num_splits == automatic_plan(target, batch, 64, 8, 128, 64).num_splits
    lens = int32([32768] * batch, target)
    assert automatic_plan(target, batch, 64, 8, 32768, 64, window=127, kv_lens=lens).num_splits <= window.num_splits


@timed
@pytest.mark.parametrize("batch", [1, 2, 16])
def test_c063_a_window_costs_what_it_sees(batch):
    copies = count_copies(4 * batch * 8 * 128 * 64)
    # Each copy's cache ends 128 keys after the one before, so that its window is its own.
    k, v = (draw(batch, 8, 32768 + 128 * copies, 64) for _ in "kv")
    windows, small = [], []
    for i in range(copies):
        q = draw(batch, 64, 1, 64)
        keys, values = (x[:, :, 128 * i : 128 * i + 32768] for x in (k, v))
        windows.append((q, keys, values, {"window": 127}))
        small.append((q, *(x[:, :, -128:].contiguous() for x in (keys, values)), {}))
    timer = Timer()
    assert_within(timer, 1.5, timer.graph(windows), timer.graph(small))
