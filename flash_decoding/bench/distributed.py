"""The suite `distributed`: one cache over the first 1, 2, 4, ... ranks of a run under torchrun.

Every rank makes its shards, and rank 0 the whole cache from the same seeds, which it decodes alone: what scaling is
measured against. A step on several ranks is checked against float64 first. It is timed inside of a CUDA graph over
rotated copies, all ranks replaying it equally often, and the slowest rank's time counts. What the step takes longer
than the decoding of a shard alone is called communication; the merge is part of it. Where states don't travel by an
all-gather, the step with one is timed too.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flash_decoding.api import flash_decode
from flash_decoding.bench.measure import free_bytes
from flash_decoding.bench.peers import OURS
from flash_decoding.bench.read_floor import measure_floor
from flash_decoding.bench.results import OK, Row, describe_environment, empty_row
from flash_decoding.bench.timing import Inputs, Method, Timed, check_output, reference_by_head
from flash_decoding.bench.workloads import Case, Shape
from flash_decoding.distributed import context_parallel_decode

SUITE = "distributed"
# What no rank may wait longer for another: a lost rank is an error then.
TIMEOUT = timedelta(minutes=5)
SHAPES = {
    "cuda": [Shape(1, 32, 8, n, 128) for n in (131072, 1048576, 4194304)],
    "cpu": [Shape(1, 32, 8, n, 128) for n in (4096, 16384)],
}
# Copies of the whole cache on rank 0, of the shards, and what the float64 reference of one head takes besides.
_WHOLE_COPIES, _REFERENCE_COPIES = 2, 1.5


def under_torchrun() -> bool:
    """Whether torchrun, or whoever sets the same variables, started this process."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def choose_cases(shapes: Sequence[Shape], dtype: str | None, device: str) -> list[Case]:
    """The shapes as cases of the suite; none given: those of the device."""
    dtype = dtype or ("bfloat16" if device == "cuda" else "float32")
    return [Case(SUITE, str(shape), shape, dtype, device) for shape in shapes or SHAPES[device]]


@contextlib.contextmanager
def process_group(device: str) -> Iterator[int]:
    """The default group for a device, NCCL or gloo, ended afterwards; yields this process's rank."""
    if device == "cuda":
        local = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(local)
        dist.init_process_group("nccl", timeout=TIMEOUT, device_id=local)
    else:
        torch.set_num_threads(max(1, torch.get_num_threads() // int(os.environ["WORLD_SIZE"])))
        dist.init_process_group("gloo", timeout=TIMEOUT)
    yield dist.get_rank()
    # After an error the process ends, and torchrun the others: to end the group in order would wait for them.
    dist.barrier()
    dist.destroy_process_group()


def run(cases: Sequence[Case], method: Method) -> Iterator[tuple[str, Any]]:
    """("environment", dict) once, then ("row", Row) for every case and number of ranks; the same on every rank."""
    yield (
        "environment",
        describe_environment()
        | {
            "processes": dist.get_world_size(),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cases[0].device == "cuda" else None,
        },
    )
    counts = [2**i for i in range(1, dist.get_world_size().bit_length()) if 2**i <= dist.get_world_size()]
    if dist.get_world_size() not in counts:
        counts.append(dist.get_world_size())
    groups = {ranks: dist.new_group(list(range(ranks)), timeout=TIMEOUT) for ranks in counts}
    for case in cases:
        us_one = _measure_one(case, method)
        for ranks, group in groups.items():
            yield "row", _measure_ranks(case, ranks, group, method, us_one)
            if case.device == "cuda":
                torch.cuda.empty_cache()


def _measure_one(case: Case, method: Method) -> Timed | None:
    """Rank 0 alone with the whole cache; None on every rank where that does not fit."""
    free = _least_over_ranks(free_bytes(case.device), case.device)
    if case.kv_bytes * (_WHOLE_COPIES + _REFERENCE_COPIES) > 0.9 * free:
        return None
    timed = None
    if dist.get_rank() == 0:
        copies = [_make_shard(case, 1, 0, copy, method.seed) for copy in range(_count_copies(case.kv_bytes, method))]
        calls = [lambda x=x: flash_decode(*x) for x in copies]
        timed = _time_alone(calls, case.device, method)
    _meet(case.device)
    return timed


def _measure_ranks(case: Case, ranks: int, group: dist.ProcessGroup, method: Method, us_one: Timed | None) -> Row:
    """The row of one number of ranks. Ranks outside of the group wait."""
    row: Row = empty_row(replace(case, name=f"{case.name}-r{ranks}"), OURS, OK)
    row["ranks"], row["variant"] = ranks, None
    if dist.get_rank() < ranks:
        try:
            row |= _measure_in_group(case, ranks, group, method)
        except (RuntimeError, ValueError) as error:
            # Which rank fails first is nobody's choice; the others end at the timeout.
            raise RuntimeError(f"{row['case']}: {error}") from error
    _meet(case.device)
    if us_one is not None:
        us = row["us_graph"] or row["us_eager"]
        row |= {"us_one": round(us_one.median, 3), "us_one_spread": round(us_one.spread, 3)}
        if us is not None:
            row["speedup"] = round(us_one.median / us, 4)
    else:
        row |= {"us_one": None, "us_one_spread": None, "speedup": None}
    return row


def _measure_in_group(case: Case, ranks: int, group: dist.ProcessGroup, method: Method) -> Row:
    rank = dist.get_rank()
    count = _count_copies(case.kv_bytes // ranks, method)
    copies = [_make_shard(case, ranks, rank, copy, method.seed) for copy in range(count)]
    steps = [lambda x=x: context_parallel_decode(*x, group=group) for x in copies]
    gathered = [lambda x=x: context_parallel_decode(*x, group=group, communicate="all_gather") for x in copies]
    shards = [lambda x=x: flash_decode(*x) for x in copies]
    error = _check(case, ranks, group, steps[0](), method)
    found: Row = {"max_abs_err": error}
    pending: Any = context_parallel_decode(*copies[0], group=group, async_op=True)
    pending.wait()
    found["variant"] = pending.communicate
    if case.device == "cuda":
        graph = _capture(steps)
        timed = _time_together(graph.replay, len(steps), group, case.device, method)
        alone = _time_together(_capture(shards).replay, len(shards), group, case.device, method)
        found["us_graph"], found["us_graph_spread"] = round(timed.median, 3), round(timed.spread, 3)
        found["us_graph_repeats"] = [round(us, 3) for us in timed.repeats]
        found["us_all_gather"] = found["us_graph"]
        if found["variant"] != "all_gather":
            by_nccl = _time_together(_capture(gathered).replay, len(gathered), group, case.device, method)
            found["us_all_gather"] = round(by_nccl.median, 3)
        found["read_floor_us"] = round(measure_floor(copies, method, case.kv_bytes // ranks).us, 3)
    else:
        timed = _time_together(lambda: [step() for step in steps], len(steps), group, case.device, method)
        alone = _time_together(lambda: [shard() for shard in shards], len(shards), group, case.device, method)
    eager = timed
    if case.device == "cuda":
        eager = _time_together(lambda: [step() for step in steps], len(steps), group, case.device, method)
    found["us_eager"], found["us_eager_spread"] = round(eager.median, 3), round(eager.spread, 3)
    found["us_eager_repeats"] = [round(us, 3) for us in eager.repeats]
    found["us_shard"] = round(alone.median, 3)
    found["us_communication"] = round(timed.median - alone.median, 3)
    found["communication_share"] = round(1 - alone.median / timed.median, 4)
    return found


def _make_shard(case: Case, ranks: int, rank: int, copy: int, seed: int) -> Inputs:
    """The shard of a rank, a part of the whole: that is made of 1 / ranks-sized pieces, each from a seed of its own."""
    s, dtype = case.shape, getattr(torch, case.dtype)
    pieces = _pieces(s.kv_len)
    first, last = rank * pieces // ranks, (rank + 1) * pieces // ranks
    generator = torch.Generator(case.device)

    def draw(number: int, *sizes: int) -> Tensor:
        generator.manual_seed(hash((seed, copy, number)) % 2**31)
        return torch.randn(sizes, generator=generator, device=case.device, dtype=dtype)

    q = draw(-1, s.batch, s.heads_q, 1, s.head_dim)
    length = s.kv_len // pieces
    k, v = (torch.empty((s.batch, s.heads_kv, length * (last - first), s.head_dim), device=case.device, dtype=dtype)
            for _ in range(2))  # fmt: skip
    for piece in range(first, last):
        at = slice((piece - first) * length, (piece - first + 1) * length)
        for which, x in enumerate((k, v)):
            x[:, :, at] = draw(2 * piece + which, s.batch, s.heads_kv, length, s.head_dim)
    return Inputs(q, k, v)


def _pieces(kv_len: int) -> int:
    """Into how many equal pieces the whole is cut, so that every number of ranks gets whole ones."""
    return next(count for count in (64, 32, 16, 8, 4, 2, 1) if kv_len % count == 0)


def _check(case: Case, ranks: int, group: dist.ProcessGroup, out: Any, method: Method) -> float:
    """The error of a step, which every rank in the group must have computed alike; raises on all if it is wrong."""
    parts = [torch.empty_like(out) for _ in range(ranks)]
    dist.all_gather(parts, out, group=group)
    wrong, error = "", 0.0
    if any(not torch.equal(part, out) for part in parts):
        wrong = "the ranks don't agree on the result"
    elif dist.get_rank() == 0:
        whole = _make_shard(case, 1, 0, 0, method.seed)
        error, said = check_output(out, reference_by_head(case, whole), case.dtype)
        wrong = said or ""
    said_by_rank_0: list[Any] = [(wrong, error)]
    dist.broadcast_object_list(said_by_rank_0, src=0, group=group)
    wrong, error = said_by_rank_0[0]
    if wrong:
        raise RuntimeError(f"wrong: {wrong}")
    return error


def _count_copies(cache_bytes: int, method: Method) -> int:
    return max(method.min_copies, -(-method.rotated_bytes // max(cache_bytes, 1))) if cache_bytes > 2**20 else 8


def _capture(calls: Sequence[Callable[[], Any]]) -> torch.cuda.CUDAGraph:
    """One CUDA graph of all calls in turn."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # The group's own thread looks at events meanwhile, which a capture of all threads forbids.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for call in calls:
            call()
    return graph


def _time_together(
    replay: Callable[[], Any], calls: int, group: dist.ProcessGroup, device: str, method: Method
) -> Timed:
    """Time of one call, all ranks of the group starting together and as often; the slowest rank's counts."""
    replay()
    _synchronise(device)
    first = _slowest(_elapsed_us(replay, 1, group, device), group, device)
    wanted_us = method.graph_us_per_repeat * 3 if device == "cuda" else method.cpu_us / method.cpu_repeats
    times = max(3, min(100, round(wanted_us / max(first, 1.0))))  # the same on all ranks, as `first` is
    us = [
        _slowest(_elapsed_us(replay, times, group, device), group, device) / calls / times
        for _ in range(method.graph_repeats)
    ]
    return Timed(statistics.median(us), max(us) - min(us), us)


def _time_alone(calls: Sequence[Callable[[], Any]], device: str, method: Method) -> Timed:
    """The same for this process alone."""
    replay: Callable[[], Any] = _capture(calls).replay if device == "cuda" else lambda: [call() for call in calls]
    replay()
    first = _elapsed_us(replay, 1, None, device)
    wanted_us = method.graph_us_per_repeat * 3 if device == "cuda" else method.cpu_us / method.cpu_repeats
    times = max(3, min(100, round(wanted_us / max(first, 1.0))))
    us = [_elapsed_us(replay, times, None, device) / len(calls) / times for _ in range(method.graph_repeats)]
    return Timed(statistics.median(us), max(us) - min(us), us)


def _elapsed_us(replay: Callable[[], Any], times: int, group: dist.ProcessGroup | None, device: str) -> float:
    """Time of so many replays; the ranks of a group begin at the same moment."""
    if group is not None:
        dist.barrier(group=group)
    _synchronise(device)
    if device == "cuda":
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(times):
            replay()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) * 1e3
    begin = time.perf_counter()
    for _ in range(times):
        replay()
    return (time.perf_counter() - begin) * 1e6


def _slowest(us: float, group: dist.ProcessGroup, device: str) -> float:
    slowest = torch.tensor([us], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
    return slowest.item()


def _least_over_ranks(count: int, device: str) -> int:
    least = torch.tensor([count], dtype=torch.int64, device=device)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    return int(least.item())


def _meet(device: str) -> None:
    """Wait for all ranks."""
    _synchronise(device)
    dist.barrier()


def _synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
