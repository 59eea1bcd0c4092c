"""Which setting is fastest for which kind of call on the present GPU: the measurement behind `flash-decoding tune`.

A key of the planner's table stands for a few samples: calls of its kind, width, rows and size. Every candidate is timed
on all of them, the best three are then timed in turns with the rule's own plan, so that a drift of the clock meets all
alike, and one enters the table where it is faster than the rule by more than a percent on the geometric mean and slower
by more than that on no sample.
"""

from __future__ import annotations

import contextlib
import json
import math
import multiprocessing
import os
import random
import statistics
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from flash_decoding.bench.timing import Method, capture, check_output, time_graph
from flash_decoding.problem import Call, Problem, make_problem
from flash_decoding.split_plan import (
    KINDS,
    Key,
    Plan,
    Setting,
    Table,
    Tile,
    apply_setting,
    choose_plan,
    choose_tile,
    find_key,
    programs_per_processor,
)
from flash_decoding.tuning import SCHEMA, parse
from flash_decoding.workspace import Workspace

DTYPE = "bfloat16"
ELEMENT_SIZE = 2
LEAST_GAIN = 1.01
FINALISTS = 3
# Compiling ahead takes a process each, with a CUDA context and a small cache.
_COMPILER_BYTES = 1 << 30
# Enough for any variant to compile as it does for the real length.
_SHORT = 256

# What a tile goes through at a time: keys, warps, buffers. What was within 3 % of the best in the sweeps on an H200.
_TILES: dict[tuple[str, int, int], tuple[tuple[int, int, int], ...]] = {
    ("dense", 64, 8): ((32, 1, 3), (64, 1, 2), (64, 1, 3), (128, 2, 2), (128, 1, 1)),
    ("dense", 128, 8): ((64, 2, 3), (32, 1, 3), (64, 2, 2), (64, 1, 2), (128, 2, 2), (64, 4, 3), (128, 4, 2)),
    ("dense", 256, 8): ((32, 2, 3), (32, 4, 3), (32, 4, 2), (64, 4, 2), (32, 1, 2)),
    ("dense", 128, 16): ((64, 4, 3), (128, 4, 2), (64, 2, 2), (64, 4, 2), (32, 1, 3)),
    ("dense", 128, 32): ((64, 8, 3), (64, 4, 3), (64, 4, 2), (128, 8, 2), (32, 4, 3)),
    ("dense", 128, 64): ((64, 8, 3), (64, 8, 2), (64, 4, 2), (128, 8, 2), (32, 4, 3)),
    ("paged", 64, 8): ((32, 1, 3), (32, 1, 2), (64, 1, 2), (64, 2, 2), (128, 2, 2)),
    ("paged", 128, 8): ((64, 2, 2), (128, 4, 2), (128, 2, 2), (64, 1, 2), (32, 1, 2), (32, 1, 3)),
    ("paged", 128, 16): ((128, 4, 2), (64, 4, 2), (64, 2, 2), (32, 1, 2), (32, 1, 3)),
    ("ragged", 64, 8): ((32, 1, 3), (32, 1, 2), (64, 1, 2), (64, 1, 3), (64, 2, 2)),
    ("ragged", 128, 8): ((64, 2, 2), (64, 2, 3), (64, 1, 2), (32, 1, 3), (32, 1, 2)),
    ("ragged-paged", 64, 8): ((32, 1, 3), (32, 1, 2), (64, 1, 2), (64, 2, 2), (64, 2, 1)),
    ("ragged-paged", 128, 8): ((32, 1, 2), (32, 1, 3), (64, 2, 2), (64, 1, 2), (64, 1, 1)),
    ("ragged-paged", 128, 16): ((32, 1, 2), (32, 1, 3), (64, 2, 2), (64, 2, 1), (128, 4, 2)),
}
# The calls of a kind and a number of rows: their capacities follow from the size.
_CALLS: dict[tuple[str, int], tuple[dict[str, int], ...]] = {
    ("dense", 8): (
        {"batch": 1, "heads_q": 32, "heads_kv": 8},
        {"batch": 2, "heads_q": 8, "heads_kv": 8},
        {"batch": 8, "heads_q": 32, "heads_kv": 8},  # for 16, on an H200, the planner has a rule of its own
    ),
    ("dense", 16): (
        {"batch": 1, "heads_q": 64, "heads_kv": 4},
        {"batch": 16, "heads_q": 32, "heads_kv": 8, "q_len": 4},
    ),
    ("dense", 32): (
        {"batch": 1, "heads_q": 64, "heads_kv": 8, "q_len": 4},
        {"batch": 16, "heads_q": 64, "heads_kv": 8, "q_len": 4},
    ),
    ("dense", 64): (
        {"batch": 1, "heads_q": 64, "heads_kv": 1},
        {"batch": 16, "heads_q": 64, "heads_kv": 1},
    ),
    ("paged", 8): (
        {"batch": 1, "heads_q": 32, "heads_kv": 8, "page_size": 16},
        {"batch": 1, "heads_q": 32, "heads_kv": 8, "page_size": 64},
        {"batch": 1, "heads_q": 8, "heads_kv": 8, "page_size": 16},
    ),
    ("paged", 16): (
        {"batch": 1, "heads_q": 64, "heads_kv": 4, "page_size": 16},
        {"batch": 1, "heads_q": 32, "heads_kv": 8, "q_len": 4, "page_size": 64},
    ),
    ("ragged", 8): (
        {"batch": 16, "heads_q": 32, "heads_kv": 8, "spread": 1},
        {"batch": 64, "heads_q": 32, "heads_kv": 8, "spread": 64},
        {"batch": 8, "heads_q": 8, "heads_kv": 8, "spread": 32},
    ),
    ("ragged-paged", 8): (
        {"batch": 16, "heads_q": 32, "heads_kv": 8, "page_size": 16, "spread": 1},
        {"batch": 64, "heads_q": 32, "heads_kv": 8, "page_size": 16, "spread": 64},
        {"batch": 8, "heads_q": 32, "heads_kv": 8, "page_size": 64, "spread": 32},
    ),
    ("ragged-paged", 16): (
        {"batch": 16, "heads_q": 64, "heads_kv": 4, "page_size": 16, "spread": 1},
        {"batch": 64, "heads_q": 32, "heads_kv": 8, "q_len": 4, "page_size": 16, "spread": 64},
    ),
}
# What caches of a size hold: bytes of K and V, by the lower end of the size in MB. Ragged batches that can read little
# are so many short sequences that no setting matters, and those that can read much read far less.
_CAPACITIES = {0: 4 << 20, 6: 16 << 20, 24: 32 << 20, 96: 256 << 20}
_RAGGED_CAPACITIES = {24: 32 << 20, 96: 1 << 30}
# What --quick measures: where most of the time of a model's attention goes.
_QUICK_WIDTHS, _QUICK_ROWS, _QUICK_FROM_MB = (64, 128), 8, 24


@dataclass(frozen=True, slots=True)
class Device:
    """What the planner knows of a GPU."""

    processors: int
    shared_memory: int


@dataclass(frozen=True, slots=True)
class Sample:
    """One call to time."""

    batch: int
    heads_q: int
    heads_kv: int
    kv_len: int  # keys of the longest sequence
    head_dim: int
    q_len: int = 1
    page_size: int | None = None
    spread: int | None = None  # the longest length over the shortest; None: there are no lengths, or they are full

    @property
    def ragged(self) -> bool:
        return self.batch > 1 and (self.spread is not None or self.page_size is not None)

    @property
    def kv_lens(self) -> list[int]:
        """Keys per sequence, evenly spread over the logarithm, in random order."""
        spread = self.spread or 1
        lens = [max(1, round(self.kv_len * spread ** -((i + 0.5) / self.batch))) for i in range(self.batch)]
        random.Random(0).shuffle(lens)
        return lens if spread > 1 else [self.kv_len] * self.batch

    @property
    def key_bytes(self) -> int:
        """Of K and V, per key of one sequence."""
        return self.heads_kv * 2 * self.head_dim * ELEMENT_SIZE

    @property
    def cache_bytes(self) -> int:
        """Of K and V in memory: the whole capacity, or the pages in use."""
        if self.page_size is None:
            return self.batch * self.kv_len * self.key_bytes
        return sum(-(-keys // self.page_size) * self.page_size for keys in self.kv_lens) * self.key_bytes

    @property
    def read_bytes(self) -> int:
        return sum(self.kv_lens) * self.key_bytes

    def __str__(self) -> str:
        parts = [f"b{self.batch}-h{self.heads_q}x{self.heads_kv}-n{self.kv_len}-d{self.head_dim}"]
        parts += [f"lq{self.q_len}"] * (self.q_len > 1)
        parts += [f"page{self.page_size}"] * (self.page_size is not None)
        parts += [f"spread{self.spread}"] * (self.spread is not None)
        return "-".join(parts)


@dataclass(frozen=True, slots=True)
class Target:
    """A key of the table and what is timed for it."""

    key: Key
    samples: tuple[Sample, ...]
    candidates: tuple[Setting, ...]


@dataclass(frozen=True, slots=True)
class Measured:
    """A key's outcome."""

    target: Target
    rule: Tile
    setting: Setting | None  # None: the rule stays
    gain: float  # the rule's time over the setting's, the geometric mean; 1 where the rule stays
    cases: list[dict[str, Any]]


class Timer(Protocol):
    """Times plans on a sample, in microseconds per call."""

    def screen(self, sample: Sample, plans: Sequence[Plan]) -> list[float | None]:
        """A quick time of each; None where the plan does not run or is wrong."""

    def compare(self, sample: Sample, plans: Sequence[Plan]) -> list[list[float]]:
        """Repeated times of each, taken in turns."""


def make_targets(
    device: Device, kinds: Iterable[str] | None = None, widths: Iterable[int] | None = None, quick: bool = False
) -> list[Target]:
    """What there is to measure; None means all."""
    kinds = KINDS if kinds is None else tuple(kinds)
    widths = tuple(widths or (_QUICK_WIDTHS if quick else {width for _, width, _ in _TILES}))
    return [
        _make_target(Key(kind, width, rows, from_mb), capacity, tiles, device)
        for (kind, width, rows), tiles in _TILES.items()
        if kind in kinds and width in widths and not (quick and rows != _QUICK_ROWS)
        for from_mb, capacity in (_RAGGED_CAPACITIES if "ragged" in kind else _CAPACITIES).items()
        if not (quick and from_mb < _QUICK_FROM_MB)
    ]


def tuned_widths() -> list[int]:
    return sorted({width for _, width, _ in _TILES})


def _make_target(key: Key, capacity: int, tiles: Iterable[tuple[int, int, int]], device: Device) -> Target:
    per_key = 2 * key.width * ELEMENT_SIZE
    samples = tuple(
        Sample(**call, kv_len=capacity // (call["batch"] * call["heads_kv"] * per_key), head_dim=key.width)
        for call in _CALLS[key.kind, key.rows]
    )
    rule = rule_tile(samples[0], device)
    candidates = [
        Setting(*one, programs) for one in tiles for programs in _program_counts(rule, one, samples[0], device)
    ]
    return Target(key, samples, tuple(candidates))


def _program_counts(rule: Tile, one: tuple[int, int, int], sample: Sample, device: Device) -> list[int]:
    """Around what the rule would say for this tile; none where its buffers do not fit."""
    tile = apply_setting(rule, Setting(*one, 1), ELEMENT_SIZE, device.shared_memory, sample.page_size is not None)
    if tile.buffers < one[2]:
        return []
    count = programs_per_processor(tile, ELEMENT_SIZE, shared_memory=device.shared_memory)
    return [count, 2 * count, 4 * count] if sample.ragged else [n for n in (count - 1, count, count + 1) if n > 0]


def rule_tile(sample: Sample, device: Device) -> Tile:
    return choose_tile(
        sample.heads_q // sample.heads_kv, sample.q_len, sample.head_dim, sample.head_dim, ELEMENT_SIZE,
        device.shared_memory, paged=sample.page_size is not None, ragged=sample.ragged,
    )  # fmt: skip


def key_of(sample: Sample, device: Device) -> Key:
    """The key under which the planner looks for this call's setting."""
    capacity = sample.batch * sample.kv_len * sample.key_bytes
    return find_key(rule_tile(sample, device), capacity, paged=sample.page_size is not None, ragged=sample.ragged)


def plan_sample(sample: Sample, device: Device, setting: Setting | None = None) -> Plan:
    """The planner's own plan, with this setting in its table or with none."""
    table = None if setting is None else Table({key_of(sample, device): setting})
    return choose_plan(
        batch=sample.batch, heads_kv=sample.heads_kv, group=sample.heads_q // sample.heads_kv, q_len=sample.q_len,
        kv_len=sample.kv_len, head_dim=sample.head_dim, value_dim=sample.head_dim, element_size=ELEMENT_SIZE,
        paged=sample.page_size is not None, ragged=sample.ragged, table=table, **asdict(device),
    )  # fmt: skip


def plans_of(target: Target, device: Device) -> tuple[tuple[Plan, ...], dict[tuple[Plan, ...], Setting]]:
    """The rule's plan of every sample, and the others that the candidates make: several may make the same."""
    rule = tuple(plan_sample(sample, device) for sample in target.samples)
    others: dict[tuple[Plan, ...], Setting] = {}
    for setting in target.candidates:
        others.setdefault(tuple(plan_sample(sample, device, setting) for sample in target.samples), setting)
    others.pop(rule, None)
    return rule, others


def measure(target: Target, device: Device, timer: Timer) -> Measured:
    """Time the candidates of a key and choose."""
    rule, others = plans_of(target, device)
    screened: list[dict[Plan, float | None]] = []
    for i, sample in enumerate(target.samples):
        to_time = list(dict.fromkeys([rule[i], *(plans[i] for plans in others)]))
        screened.append(dict(zip(to_time, timer.screen(sample, to_time), strict=True)))
    usable = [i for i, times in enumerate(screened) if times[rule[i]]]  # a sample may not fit into memory

    def mean_ratio(plans: Sequence[Plan], times: Sequence[Mapping[Plan, float | None]]) -> float:
        """Time over the rule's; infinite for a plan that does not run."""
        ratios = [(times[i][plans[i]] or math.inf) / (times[i][rule[i]] or math.nan) for i in usable]
        return math.exp(statistics.fmean(map(math.log, ratios)))

    finalists = sorted(others, key=lambda plans: mean_ratio(plans, screened))[:FINALISTS] if usable else []
    finalists = [plans for plans in finalists if mean_ratio(plans, screened) < math.inf]
    repeats: list[dict[Plan, list[float]]] = [{} for _ in target.samples]
    for i in usable if finalists else []:
        to_time = list(dict.fromkeys([rule[i], *(plans[i] for plans in finalists)]))
        repeats[i] = dict(zip(to_time, timer.compare(target.samples[i], to_time), strict=True))
    medians = [{plan: statistics.median(times) for plan, times in of_sample.items()} for of_sample in repeats]

    setting, gain = None, 1.0
    for plans in finalists:
        worst = max(medians[i][plans[i]] / medians[i][rule[i]] for i in usable)
        faster = 1 / mean_ratio(plans, medians)
        if faster > max(LEAST_GAIN, gain) and worst <= LEAST_GAIN:
            setting, gain = others[plans], faster
    cases = [_describe_case(*facts) for facts in zip(target.samples, rule, screened, repeats, strict=True)]
    return Measured(target, rule[0].tile, setting, gain, cases)


def _describe_case(
    sample: Sample, rule: Plan, screened: Mapping[Plan, float | None], repeats: Mapping[Plan, Sequence[float]]
) -> dict[str, Any]:
    def row(plan: Plan) -> list[int | None]:
        tile = plan.tile
        return [tile.block_n, tile.num_warps, tile.buffers, plan.num_splits, plan.at_once]

    def rounded(us: float | None) -> float | None:
        return None if us is None else round(us, 3)

    return {
        **{name: value for name, value in asdict(sample).items() if value is not None},
        "read_bytes": sample.read_bytes,
        "rule": row(rule),
        "screened": [[*row(plan), rounded(us)] for plan, us in screened.items()],
        "compared": [[*row(plan), [rounded(us) for us in times]] for plan, times in repeats.items()],
    }


class GpuTimer:
    """Times plans on the present GPU: a CUDA graph over rotated copies of the inputs, so that L2 is cold.

    All samples take their caches from one buffer of random numbers.
    """

    def __init__(self, targets: Sequence[Target], method: Method, device: str = "cuda") -> None:
        self.method = method
        self.faults: list[str] = []
        free = torch.cuda.mem_get_info()[0]
        wanted = max(self._copies(sample) * sample.cache_bytes for target in targets for sample in target.samples)
        generator = torch.Generator(device).manual_seed(method.seed)
        count = min(wanted, int(0.6 * free)) // ELEMENT_SIZE
        self._buffer = torch.randn(count, generator=generator, device=device, dtype=getattr(torch, DTYPE))
        self._workspace = Workspace()
        self._problems = lru_cache(maxsize=8)(self._make_problems)

    def _copies(self, sample: Sample) -> int:
        return max(self.method.min_copies, -(-self.method.rotated_bytes // sample.read_bytes))

    def _make_problems(self, sample: Sample) -> list[Problem]:
        """One call per copy; none where the buffer holds too few for a cold cache."""
        size = sample.cache_bytes // ELEMENT_SIZE
        copies = min(self._copies(sample), self._buffer.numel() // size)
        if copies < self.method.min_copies or 4 * copies * sample.read_bytes < self.method.rotated_bytes:
            return []
        return make_problems(sample, [self._buffer[i * size :][:size] for i in range(copies)])

    def _calls(self, problems: Sequence[Problem], plan: Plan) -> list[Callable[[], Tensor]]:
        out = torch.empty_like(problems[0].q)
        return [make_call(problem, plan, self._workspace, out) for problem in problems]

    def screen(self, sample: Sample, plans: Sequence[Plan]) -> list[float | None]:
        problems = self._problems(sample)
        if not problems:
            self.faults.append(f"{sample} does not fit into the free memory of the GPU")
            return [None] * len(plans)
        times: list[float | None] = []
        want: Tensor | None = None
        for plan in plans:
            calls = self._calls(problems, plan)
            try:
                out = calls[0]().clone()
                graph, _ = capture(calls)
            except Exception as error:  # a tile that needs more shared memory or threads than this GPU has
                if "out of resource" not in str(error):
                    raise
                self.faults.append(f"{sample}, {plan.tile}: {error}")
                times.append(None)
                continue
            want = out.double() if want is None else want
            wrong = check_output(out, want, DTYPE)[1]
            if wrong:
                self.faults.append(f"{sample}, {plan.tile}: {wrong}")
            times.append(None if wrong else time_graph(graph, len(calls), self.method, repeats=2).median)
        return times

    def compare(self, sample: Sample, plans: Sequence[Plan]) -> list[list[float]]:
        problems = self._problems(sample)
        calls = [self._calls(problems, plan) for plan in plans]  # kept, for the graphs write into what they hold
        graphs = [capture(of_plan)[0] for of_plan in calls]
        rounds = [
            [time_graph(graph, len(problems), self.method, repeats=1).median for graph in graphs]
            for _ in range(self.method.graph_repeats)
        ]
        return [list(times) for times in zip(*rounds, strict=True)]


def make_problems(sample: Sample, caches: Sequence[Tensor]) -> list[Problem]:
    """A call per cache, each a flat piece of memory of cache_bytes; q differs from one to the next."""
    s, device, dtype = sample, caches[0].device, caches[0].dtype
    shape, table, lens = (s.batch, s.heads_kv, s.kv_len, s.head_dim), None, None
    if s.page_size is not None:
        counts = [-(-keys // s.page_size) for keys in s.kv_lens]
        order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
        pages = torch.zeros(s.batch, max(counts), dtype=torch.int32)
        for row, own in zip(pages, order.split(counts), strict=True):
            row[: len(own)] = own
        table, shape = pages.to(device), (sum(counts), s.heads_kv, s.page_size, s.head_dim)
    if s.page_size is not None or s.spread is not None:
        lens = torch.tensor(s.kv_lens, dtype=torch.int32, device=device)
    half = math.prod(shape)
    return [
        make_problem(
            Call(
                q=torch.randn(s.batch, s.heads_q, s.q_len, s.head_dim, device=device, dtype=dtype),
                k=cache[:half].view(shape), v=cache[half : 2 * half].view(shape), kv_lens=lens, block_table=table,
            )
        )
        for cache in caches
    ]  # fmt: skip


def make_call(problem: Problem, plan: Plan, workspace: Workspace, out: Tensor) -> Callable[[], Tensor]:
    """The call with this plan: kernels only, everything else is made here."""
    from flash_decoding.backends.triton import decode

    p = problem
    shape = plan.partial_shape(p.batch, p.heads_kv, p.group, p.q_len)
    scratch = None if shape is None else workspace.partial(shape, p.value_dim, p.q.device)

    def call() -> Tensor:
        decode(problem, plan, scratch, out, None)
        return out

    return call


Job = list[tuple[Sample, Plan]]


def compile_jobs(targets: Sequence[Target], device: Device) -> list[Job]:
    """Short calls that together compile every kernel: one job per chunk kernel, with all its reduce kernels."""
    from flash_decoding.backends.triton.reduce import MANY_ROWS, block_of_splits

    jobs: dict[tuple, dict[tuple, tuple[Sample, Plan]]] = {}
    for target in targets:
        rule, others = plans_of(target, device)
        for i, sample in enumerate(target.samples):
            s, group = sample, sample.heads_q // sample.heads_kv
            short = replace(sample, kv_len=min(sample.kv_len, _SHORT))
            for plan in (rule[i], *(plans[i] for plans in others)):
                pieces, split = plan.at_once is not None, plan.num_splits > 1
                chunk = (group, s.q_len, s.head_dim, s.page_size, s.spread is None, plan.tile, pieces, split)
                rows = s.batch * s.heads_q * s.q_len
                reduce = (rows >= MANY_ROWS,) if pieces else block_of_splits(plan.num_splits)
                jobs.setdefault(chunk, {}).setdefault(reduce, (short, plan))
    return [list(calls.values()) for calls in jobs.values()]


def compile_ahead(jobs: Sequence[Job], workers: int, done: Callable[[], None]) -> None:
    """Run the jobs in so many processes, so that this one finds their kernels in Triton's cache on disk."""
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        for _ in as_completed([pool.submit(run_job, job) for job in jobs]):
            done()


def count_compilers(jobs: int) -> int:
    """Processes that the cores and the memory of the GPU are enough for."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, jobs, torch.cuda.mem_get_info()[0] // (2 * _COMPILER_BYTES)))


def run_job(job: Job, device: str = "cuda") -> None:
    workspace = Workspace()
    for sample, plan in job:
        cache = torch.zeros(sample.cache_bytes // ELEMENT_SIZE, dtype=getattr(torch, DTYPE), device=device)
        (problem,) = make_problems(sample, [cache])
        with contextlib.suppress(Exception):  # the timer meets it again, and knows what to say
            make_call(problem, plan, workspace, torch.empty_like(problem.q))()
    if device == "cuda":
        torch.cuda.synchronize()


def describe_method(method: Method) -> dict[str, object]:
    return {
        "dtype": DTYPE,
        "rotated_bytes": method.rotated_bytes,
        "graph_repeats": method.graph_repeats,
        "graph_us_per_repeat": method.graph_us_per_repeat,
        "least_gain": LEAST_GAIN,
        "columns": ["block_n", "num_warps", "buffers", "num_splits", "at_once", "us"],
        "screened": "median of two timings of a CUDA graph over rotated copies of the inputs, us per call",
        "compared": "as many timings as graph_repeats, the plans of a case taking turns; their medians decide",
        "gain": "time of the rule over time of the setting, the geometric mean over the cases",
    }


def write_document(path: Path, gpu: str, run: dict[str, Any], measured: Sequence[Measured]) -> None:
    """Write what was measured; keys of an older file for this GPU that were not measured now stay as they are.

    Args:
        run: environment and method of this run.
    """
    new = [_describe_key(one) for one in measured]
    taken = {tuple(entry[name] for name in Key._fields) for entry in new}
    runs, keys = [run], [entry | {"run": 0} for entry in new]
    for entry, its_run in _older_keys(path, gpu):
        if tuple(entry[name] for name in Key._fields) not in taken:
            if its_run not in runs:
                runs.append(its_run)
            keys.append(entry | {"run": runs.index(its_run)})
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(_dump({"schema": SCHEMA, "gpu": gpu, "runs": runs, "keys": keys}))
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _describe_key(measured: Measured) -> dict[str, Any]:
    tile = measured.rule
    return {
        **measured.target.key._asdict(),
        "run": 0,
        "rule": {"block_n": tile.block_n, "num_warps": tile.num_warps, "buffers": tile.buffers},
        "setting": None if measured.setting is None else asdict(measured.setting),
        "gain": round(measured.gain, 4),
        "cases": measured.cases,
    }


def _older_keys(path: Path, gpu: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The keys of a file that is there, each with its run; none of a file that could not be used."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        parse(document, gpu)
        return [(entry, document["runs"][entry["run"]]) for entry in document["keys"]]
    except (OSError, ValueError, LookupError, TypeError):
        return []


def _dump(document: dict[str, Any]) -> str:
    """JSON with one case per line: readable, and a change shows as the lines that changed."""
    head = json.dumps({name: value for name, value in document.items() if name != "keys"}, indent=1)
    keys = []
    for entry in document["keys"]:
        cases = ",\n".join("    " + json.dumps(case) for case in entry["cases"])
        rest = json.dumps({name: value for name, value in entry.items() if name != "cases"})
        keys.append(f'  {rest[:-1]}, "cases": [\n{cases}\n  ]}}')
    return f'{head[:-2]},\n "keys": [\n' + ",\n".join(keys) + "\n ]\n}\n"
