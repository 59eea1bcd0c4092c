"""How a call is checked and timed: rotated inputs, one CUDA graph over all of them, medians with their spread.

Small caches would stay in the L2 cache between repeats, so every timing walks over enough copies of the inputs that
each call finds its own in memory.
"""

from __future__ import annotations

import contextlib
import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from flash_decoding.bench.paging import Pages, make_pages, take_sequence
from flash_decoding.bench.workloads import Case
from flash_decoding.quantization import LARGEST_CODE, CodeFormat, KVFormat, dequantize_kv, quantize_kv
from flash_decoding.reference import reference

Call = Callable[[], Tensor]
# As drawn, as the best variant of a peer so far wants it, and as the next variant wants it.
LAYOUTS_HELD = 3
# Of one side of a cache, while it is quantised or held against float64: the temporaries are several times that.
_ELEMENTS_AT_ONCE = 1 << 25


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
            "max_abs_err": "largest absolute difference from float64 on the stored inputs, codes as the numbers they "
            "stand for, checked before timing",
            "tolerance": "error allowed in each sequence, as a share of its largest output",
        }


@dataclass(frozen=True, slots=True)
class Inputs:
    """One rotated copy of a decode step's arrays; K and V of a paged case are the pools that make_pages() indexes."""

    q: Tensor  # [B, Hq, Lq, D]
    k: Tensor  # [B, Hkv, N, D] or [pages, Hkv, page_size, D], or codes
    v: Tensor  # likewise
    k_scale: Tensor | None = None  # with codes, as CodeFormat has them
    v_scale: Tensor | None = None

    def __iter__(self) -> Iterator[Tensor]:
        """q, k and v, as a function of numbers takes them."""
        return iter((self.q, self.k, self.v))

    def in_memory(self) -> tuple[Tensor, Tensor]:
        """All bytes of the keys and of the values as flat arrays, those of the scales behind those of the codes."""
        return _flat_bytes(self.k, self.k_scale), _flat_bytes(self.v, self.v_scale)


class Timed(NamedTuple):
    """Times of one call in microseconds."""

    median: float
    spread: float
    repeats: list[float]


def count_copies(case: Case, free_bytes: int, method: Method) -> int:
    """How many copies of the inputs to rotate over; 0 when too few fit beside a peer's own copies of them."""
    wanted = max(method.min_copies, -(-method.rotated_bytes // case.kv_bytes))
    fitting = int(0.9 * free_bytes) // (LAYOUTS_HELD * case.cache_bytes)
    return min(wanted, fitting) if fitting >= least_copies(case, method) else 0


def least_copies(case: Case, method: Method) -> int:
    """With fewer copies, calls that read little of a large cache would find it in the L2 cache."""
    return -(-method.rotated_bytes // (4 * case.kv_bytes))


def _flat_bytes(x: Tensor, scale: Tensor | None) -> Tensor:
    """The bytes of contiguous arrays."""
    parts = [part.reshape(-1).view(torch.uint8) for part in (x, scale) if part is not None]
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def make_inputs(case: Case, copies: int, seed: int) -> list[Inputs]:
    """Random copies of the inputs; each has contents of its own. Codes are those of random numbers."""
    s, dtype, form = case.shape, getattr(torch, case.dtype), case.form
    generator = torch.Generator(case.device).manual_seed(seed)

    def draw(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator, device=case.device, dtype=dtype)

    def draw_copy() -> Inputs:
        q = draw(s.batch, s.heads_q, case.options.q_len, s.head_dim)
        k, v = draw(*case.cache_shape), draw(*case.cache_shape)
        if form is None:
            return Inputs(q, k, v)
        (k, k_scale), (v, v_scale) = _quantise(k, form), _quantise(v, form)
        return Inputs(q, k, v, k_scale, v_scale)

    return [draw_copy() for _ in range(copies)]


def _quantise(x: Tensor, form: CodeFormat) -> tuple[Tensor, Tensor]:
    """One side's codes and scales, [B, Hkv, N, D as stored] or in pages: some heads of some sequences at a time."""
    scale = x.abs().amax().float() / LARGEST_CODE[form.codes] if form.scale == "tensor" else None
    # With scales per head or channel, heads must stay in their place.
    heads = x if form.scale in ("head", "channel") else x.flatten(0, 1)[:, None]
    at_once = len(heads) if heads is x else max(1, _ELEMENTS_AT_ONCE // heads[0].numel())
    made = [
        quantize_kv(part, part[:0], KVFormat(form, None), k_scale=scale, check=False) for part in heads.split(at_once)
    ]
    codes = torch.cat([part.k.view(torch.uint8) for part in made]).view(form.dtype)
    if scale is None:
        scales = torch.cat([part.k_scale for part in made if part.k_scale is not None])
        scale = scales if heads is x else scales.view(*x.shape[:3], *scales.shape[3:])
    return codes.view(*x.shape[:3], -1), scale


def reference_by_head(case: Case, inputs: Inputs) -> Tensor:
    """The float64 result [B, Hq, Lq, D], as many heads at a time as have float64 copies that fit, at least one."""
    q, options, group = inputs.q, case.options, case.shape.group
    pages = None if options.page_size is None else make_pages(case, options.page_size, q.device)
    out = torch.empty(q.shape, dtype=torch.float64, device=q.device)
    for b in range(q.shape[0]):
        heads = max(1, _ELEMENTS_AT_ONCE // (case.kv_lens[b] * case.shape.head_dim))
        heads = heads // group * group or 1
        for h in range(0, q.shape[1], heads):
            k, v = _take_numbers(case, inputs, pages, b, slice(h // group, (h + heads - 1) // group + 1))
            some = reference(q[b : b + 1, h : h + heads], k, v, window=options.window)
            assert isinstance(some, Tensor), "reference() returns out alone unless asked for the lse"
            out[b, h : h + heads] = some[0]
    return out


def _take_numbers(case: Case, inputs: Inputs, pages: Pages | None, b: int, heads: slice) -> tuple[Tensor, Tensor]:
    """K and V of some KV heads of sequence b, [1, heads, keys, D]; codes as the float64 numbers that they stand for."""
    k, v = (take_sequence(case, x, pages, b)[:, heads] for x in (inputs.k, inputs.v))
    form = case.form
    if form is None:
        return k, v

    def take(scale: Tensor | None) -> Tensor | None:
        if scale is None or form.scale == "tensor":
            return scale
        return scale[heads] if form.scale in ("head", "channel") else take_sequence(case, scale, pages, b)[:, heads]

    return dequantize_kv(
        k, v, KVFormat(form, form), k_scale=take(inputs.k_scale), v_scale=take(inputs.v_scale), dtype=torch.float64
    )


def tolerance_of(dtype: str) -> float:
    """The error allowed as a share of the largest output: two units in its last place."""
    # float32 sums over many keys, and their order differs: a ten-thousandth is still far below a wrong result.
    return 2 * max(torch.finfo(getattr(torch, dtype)).eps, 2.0**-14)


def error_limits(dtype: str, want: Tensor, tolerance: float | None = None) -> Tensor:
    """Above these, one per sequence, an output is not the rounded result.

    The outputs of a long sequence are far smaller than those of a short one, so one limit for both would let the long
    one lose tiles.

    Args:
        tolerance: of a kernel that computes in less than dtype; None means tolerance_of(dtype).
    """
    return (tolerance or tolerance_of(dtype)) * want.abs().flatten(1).amax(1)


def check_output(out: Tensor, want: Tensor, dtype: str, tolerance: float | None = None) -> tuple[float, str | None]:
    """The largest absolute error of an output, and what is wrong with it, if anything."""
    errors = (out.double() - want).abs().flatten(1).amax(1)
    limits = error_limits(dtype, want, tolerance)
    errors = errors.nan_to_num(nan=math.inf)  # a NaN never passes
    worst = int((errors - limits).argmax())
    wrong = f"the largest error is {errors[worst]:.2e}, allowed is {limits[worst]:.2e}"
    return errors.max().item(), wrong if errors[worst] > limits[worst] else None


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
