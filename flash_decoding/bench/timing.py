"""How a call is checked and timed: rotated inputs, one CUDA graph over all of them, medians with their spread.

Small caches would stay in the L2 cache between repeats, so every timing walks over enough copies of the inputs that
each call finds its own in memory.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from flash_decoding.bench.workloads import Case
from flash_decoding.reference import reference

Call = Callable[[], Tensor]
# As drawn, as the best variant of a peer so far wants it, and as the next variant wants it.
LAYOUTS_HELD = 3


@dataclass(frozen=True, slots=True)
class Method:
    """The settings of a measurement; goes into the result file as it is."""

    rotated_bytes: int = 400_000_000  # inputs in all, several times any L2 cache
    min_copies: int = 2
    graph_repeats: int = 7  # timings whose median is reported
    graph_us_per_repeat: float = 4000.0  # at least three replays, more until a timing lasts this long
    eager_repeats: int = 11
    eager_us_per_repeat: float = 10_000.0
    cpu_repeats: int = 7  # at least; more until the timings last this long together
    cpu_us: float = 50_000.0
    seed: int = 0

    def to_json(self) -> dict[str, object]:
        return asdict(self) | {
            "us_graph": "median time of one call inside a CUDA graph over all copies of the inputs",
            "us_graph_spread": "largest minus smallest of the repeats",
            "us_eager": "median wall time of one plain call in a loop, synchronised at the loop's end",
            "us_eager_repeats": "the repeats whose median us_eager is",
            "us_host": "median time the host spends on one plain call",
            "read_floor_us": "best setting's median time of a kernel that only reads as many bytes, same run, "
            "inputs as cold",
            "max_abs_err": "largest absolute difference from float64 on the stored inputs, checked before timing",
        }


class Inputs(NamedTuple):
    """One rotated copy of a decode step's arrays."""

    q: Tensor  # [B, Hq, 1, D]
    k: Tensor  # [B, Hkv, N, D]
    v: Tensor  # [B, Hkv, N, D]


class Timed(NamedTuple):
    """Times of one call in microseconds."""

    median: float
    spread: float
    repeats: list[float]


def count_copies(kv_bytes: int, free_bytes: int, method: Method) -> int:
    """How many copies of the inputs to rotate over; 0 when not even one fits beside a peer's own copies of it."""
    wanted = max(method.min_copies, -(-method.rotated_bytes // kv_bytes))
    fitting = int(0.9 * free_bytes) // (LAYOUTS_HELD * kv_bytes)
    return min(wanted, fitting)


def make_inputs(case: Case, copies: int, seed: int) -> list[Inputs]:
    """Random copies of the inputs; each has contents of its own."""
    s, dtype = case.shape, getattr(torch, case.dtype)
    generator = torch.Generator(case.device).manual_seed(seed)

    def draw(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator, device=case.device, dtype=dtype)

    return [
        Inputs(
            draw(s.batch, s.heads_q, 1, s.head_dim),
            draw(s.batch, s.heads_kv, s.kv_len, s.head_dim),
            draw(s.batch, s.heads_kv, s.kv_len, s.head_dim),
        )
        for _ in range(copies)
    ]


def reference_by_head(inputs: Inputs) -> Tensor:
    """The float64 result [B, Hq, 1, D], one query head at a time so that float64 copies of a large cache fit."""
    q, k, v = inputs
    group = q.shape[1] // k.shape[1]
    out = torch.empty(*q.shape[:3], v.shape[3], dtype=torch.float64, device=q.device)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            h_kv = h // group
            one = reference(q[b : b + 1, h : h + 1], k[b : b + 1, h_kv : h_kv + 1], v[b : b + 1, h_kv : h_kv + 1])
            assert isinstance(one, Tensor), "reference() returns out alone unless asked for the lse"
            out[b, h] = one[0, 0]
    return out


def error_limit(dtype: str, want: Tensor) -> float:
    """Above this, an output is not the rounded result: two units in the last place of the largest output."""
    eps = torch.finfo(getattr(torch, dtype)).eps
    # float32 sums over many keys, and their order differs: a ten-thousandth is still far below a wrong result.
    return 2 * max(eps, 2.0**-14) * want.abs().max().item()


def max_abs_err(out: Tensor, want: Tensor) -> float:
    """Largest absolute difference; infinite when an output is not a number."""
    difference = (out.double() - want).abs().max().item()
    return difference if difference == difference else float("inf")


def capture(calls: Sequence[Call]) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    """One CUDA graph of all the calls in turn, and the outputs that its replays write."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()  # handles, plans and scratch of this stream are made here, not in the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # torch.cuda.graph() would also collect garbage and empty the allocator's cache, each time, for hundreds of graphs.
    with torch.cuda.stream(stream):
        graph.capture_begin()
        try:
            outs = [call() for call in calls]
        except BaseException:
            with contextlib.suppress(RuntimeError):
                graph.capture_end()
            raise
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    return graph, outs


def time_graph(graph: torch.cuda.CUDAGraph, calls: int, method: Method, repeats: int | None = None) -> Timed:
    """Time of one call inside the graph."""
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def replay(times: int) -> float:
        start.record()
        for _ in range(times):
            graph.replay()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) * 1e3 / times

    replay(2)
    replays = max(3, min(100, round(method.graph_us_per_repeat / max(replay(1), 1.0))))
    return _summary([replay(replays) / calls for _ in range(repeats or method.graph_repeats)])


def time_eager(calls: Sequence[Call], us_expected: float, method: Method) -> tuple[Timed, Timed]:
    """Wall time and host time of one plain call. Few calls a repeat, so that the launch queue never fills."""
    batch = max(5, min(50, round(method.eager_us_per_repeat / max(us_expected, 1.0))))
    wall, host = [], []
    at = 0
    collecting = gc.isenabled()
    gc.disable()
    try:
        for repeat in range(method.eager_repeats + 1):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(batch):
                calls[at]()
                at = (at + 1) % len(calls)
            queued = time.perf_counter()
            torch.cuda.synchronize()
            if repeat:  # the first is the warm-up
                wall.append((time.perf_counter() - begin) * 1e6 / batch)
                host.append((queued - begin) * 1e6 / batch)
    finally:
        if collecting:
            gc.enable()
    return _summary(wall), _summary(host)


def time_cpu(calls: Sequence[Callable[[], object]], method: Method) -> Timed:
    """Wall time of one call on the CPU, the rotated copies in turn; short calls are timed more often."""
    begin = time.perf_counter()
    calls[0]()
    warm_up_us = (time.perf_counter() - begin) * 1e6
    repeats = max(method.cpu_repeats, min(100, int(method.cpu_us / max(warm_up_us, 1.0))))
    times = []
    for repeat in range(repeats):
        call = calls[(repeat + 1) % len(calls)]
        begin = time.perf_counter()
        call()
        times.append((time.perf_counter() - begin) * 1e6)
    return _summary(times)


def _summary(times: list[float]) -> Timed:
    return Timed(statistics.median(times), max(times) - min(times), times)
