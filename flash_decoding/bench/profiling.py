"""One decode step taken apart: each kernel's time and resources, the gaps between them, hardware counters."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from flash_decoding.bench.measure import free_bytes
from flash_decoding.bench.timing import Inputs, Method, Timed, capture, count_copies, make_inputs, time_graph
from flash_decoding.bench.workloads import ITEMSIZE, Case, Shape
from flash_decoding.cost_model import Sizes, Work, chunk_work, reduce_work
from flash_decoding.hardware import Gpu, resident_programs
from flash_decoding.quantization import KVFormat
from flash_decoding.split_plan import Plan, Tile, choose_plan
from flash_decoding.tuning import find_table

KERNELS = {"chunk": "_chunk_kernel", "reduce": "_reduce_kernel"}
# What Nsight Compute is asked for, and what each is called in the table.
COUNTERS = {
    "gpu__time_duration.sum": "time, ns",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "DRAM throughput, % of peak",
    "dram__bytes_read.sum": "DRAM bytes read",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "SM throughput, % of peak",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "achieved occupancy, %",
    "smsp__warps_eligible.avg.per_cycle_active": "eligible warps per scheduler",
    "lts__t_sector_hit_rate.pct": "L2 hit rate, %",
}
NCU_SECONDS = 240


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel as the profiler saw it."""

    kernel: str  # chunk or reduce
    start_us: float
    us: float
    programs: int
    threads: int
    registers: int
    shared_bytes: int
    was_early: bool = False  # there before the kernel in front of it ended; its start and time count from that end


@dataclass(slots=True)
class KernelProfile:
    """A kernel's median time, what it moves and computes, and what it takes of a processor."""

    kernel: str
    us: float
    us_spread: float
    programs: int
    num_warps: int
    registers: int
    shared_bytes: int
    resident: int
    waves: float
    work: Work
    counters: dict[str, float] = field(default_factory=dict)

    @property
    def gb_per_s(self) -> float:
        return self.work.bytes_moved / self.us / 1e3

    @property
    def tflops(self) -> float:
        return self.work.flops / self.us / 1e6


@dataclass(slots=True)
class StepProfile:
    """A decode step: both kernels, the whole in a CUDA graph, and the gaps between launches."""

    case: Case
    num_splits: int
    row_tiles: int  # tiles of query rows per KV head; each reads K and V
    total: Timed
    kernels: list[KernelProfile]
    gap_inside_us: float | None  # end of the chunk kernel to start of the reduce kernel; None: it starts before
    gap_between_us: float | None  # end of a step to start of the next


def plan_of(
    shape: Shape, dtype: str, gpu: Gpu, num_splits: int | None = None, kv_format: KVFormat | None = None
) -> Plan:  # fmt: skip
    """The library's plan for a shape on a GPU, with a cache of dtype or of codes."""
    s = shape
    k_parts, v_parts, scales = 1, 1, 0.0
    if kv_format is not None:
        from flash_decoding.backends.triton.codes import parts_of, scales_per_key

        sides = kv_format.k, kv_format.v
        (k_parts, v_parts), scales = map(parts_of, sides), max(scales_per_key(s.head_dim, side) for side in sides)
    return choose_plan(
        batch=s.batch, heads_kv=s.heads_kv, group=s.group, q_len=1, kv_len=s.kv_len, head_dim=s.head_dim // k_parts,
        value_dim=s.head_dim // v_parts, parts=(k_parts, v_parts), scales=scales, element_size=ITEMSIZE[dtype],
        processors=gpu.processors, shared_memory=gpu.limits.shared_per_program, num_splits=num_splits,
        table=find_table((gpu.device_names or (gpu.name,))[0]),
    )  # fmt: skip


def sizes_of(shape: Shape, dtype: str, tile: Tile, kv_format: KVFormat | None = None) -> Sizes:
    """A shape as the cost model sees it when the chunk kernel works with this tile."""
    s = shape
    return Sizes(
        s.batch, s.heads_q, s.heads_kv, s.kv_len, s.head_dim, s.head_dim, ITEMSIZE[dtype],
        row_tiles=-(-s.group // tile.block_m),
        code_bytes=None if kv_format is None else kv_format.token_bytes(s.head_dim, ITEMSIZE[dtype]),
    )  # fmt: skip


def draw_copies(case: Case, method: Method) -> list[Inputs]:
    """Rotated inputs of a case.

    Raises:
        MemoryError: not even one copy fits.
    """
    copies = count_copies(case, free_bytes("cuda"), method)
    if copies < 1:
        raise MemoryError(f"the cache of {case.name} does not fit into the free memory of the GPU")
    return make_inputs(case, copies, method.seed)


def profile_step(case: Case, gpu: Gpu, num_splits: int | None, method: Method) -> StepProfile:
    """Time a decode step in a CUDA graph, then replay it under the profiler."""
    from flash_decoding import Workspace, flash_decode

    plan = plan_of(case.shape, case.dtype, gpu, num_splits)
    sizes, splits = sizes_of(case.shape, case.dtype, plan.tile), plan.num_splits
    workspace = Workspace()
    calls: list[Any] = [
        partial(flash_decode, *copy, num_splits=num_splits, workspace=workspace) for copy in draw_copies(case, method)
    ]
    with nvtx_ranges():
        calls[0]()
    graph, _ = capture(calls)
    total = time_graph(graph, len(calls), method)
    launches = trace_launches(graph)
    if not launches:
        raise RuntimeError("the profiler recorded no kernel of this library")
    inside, between = find_gaps(launches)
    kernels = summarise(launches, sizes, splits, gpu)
    return StepProfile(case, splits, sizes.row_tiles, total, kernels, inside, between)


def time_step(case: Case, method: Method) -> Timed:
    """The time of a decode step in a CUDA graph, and nothing else."""
    from flash_decoding import Workspace, flash_decode

    workspace = Workspace()
    calls: list[Any] = [partial(flash_decode, *copy, workspace=workspace) for copy in draw_copies(case, method)]
    graph, _ = capture(calls)
    return time_graph(graph, len(calls), method)


@contextlib.contextmanager
def nvtx_ranges() -> Iterator[None]:
    """Every Triton kernel launched inside gets an NVTX range of its name, for Nsight's timelines."""
    from triton import knobs

    def push(metadata: Any) -> None:
        torch.cuda.nvtx.range_push(metadata.get()["name"])

    def pop(metadata: Any) -> None:
        torch.cuda.nvtx.range_pop()

    knobs.runtime.launch_enter_hook.add(push)
    knobs.runtime.launch_exit_hook.add(pop)
    try:
        yield
    finally:
        knobs.runtime.launch_enter_hook.remove(push)
        knobs.runtime.launch_exit_hook.remove(pop)


def trace_launches(graph: torch.cuda.CUDAGraph, replays: int = 3) -> list[Launch]:
    """Replay under PyTorch's profiler and read the kernels back from its trace."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    graph.replay()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(replays):
            graph.replay()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return parse_trace(json.loads(path.read_text()))


def parse_trace(trace: dict[str, Any]) -> list[Launch]:
    """This library's kernels in a chrome trace, in order of time."""
    launches = []
    for event in trace.get("traceEvents", []):
        if event.get("cat") != "kernel":
            continue
        kernel = next((short for short, name in KERNELS.items() if name in event["name"]), None)
        if kernel is None:
            continue
        facts = event["args"]
        programs, threads = 1, 1
        for size in facts["grid"]:
            programs *= size
        for size in facts["block"]:
            threads *= size
        launches.append(
            Launch(
                kernel, float(event["ts"]), float(event["dur"]), programs, threads,
                int(facts["registers per thread"]), int(facts["shared memory"]),
            )
        )  # fmt: skip
    return _without_waiting(sorted(launches, key=lambda launch: launch.start_us))


def _without_waiting(launches: Sequence[Launch]) -> list[Launch]:
    """A reduce kernel that was there early did nothing before the chunk kernel's end: its time begins there."""
    counted: list[Launch] = []
    for launch in launches:
        if launch.kernel == "reduce" and counted and counted[-1].kernel == "chunk":
            ready = counted[-1].start_us + counted[-1].us
            if launch.start_us < ready:
                us = max(launch.start_us + launch.us - ready, 0.0)
                launch = replace(launch, start_us=ready, us=us, was_early=True)
        counted.append(launch)
    return counted


def find_gaps(launches: Sequence[Launch]) -> tuple[float | None, float | None]:
    """Median idle time from chunk to reduce, and from the end of a step to the next chunk."""
    inside, between = [], []
    for before, after in pairwise(launches):
        gap = after.start_us - before.start_us - before.us
        if after.kernel == "reduce":
            if not after.was_early:
                inside.append(gap)
        elif gap < 20:  # longer ones lie between two replays of the graph
            between.append(gap)
    return (statistics.median(inside) if inside else None, statistics.median(between) if between else None)


def summarise(launches: Sequence[Launch], sizes: Sizes, num_splits: int, gpu: Gpu) -> list[KernelProfile]:
    """Both kernels' medians and resources."""
    works = {"chunk": chunk_work(sizes, num_splits), "reduce": reduce_work(sizes, num_splits)}
    profiles = []
    for kernel, work in works.items():
        mine = [launch for launch in launches if launch.kernel == kernel]
        if not mine:
            continue
        times, first = [launch.us for launch in mine], mine[0]
        warps = first.threads // 32
        resident = resident_programs(gpu.limits, first.shared_bytes, warps, first.registers)
        profiles.append(
            KernelProfile(
                kernel, statistics.median(times), max(times) - min(times), first.programs, warps, first.registers,
                first.shared_bytes, resident, first.programs / max(1, resident * gpu.processors), work,
            )
        )  # fmt: skip
    return profiles


def read_counters(case: Case, num_splits: int) -> dict[str, dict[str, float]]:
    """Hardware counters of both kernels from Nsight Compute, by kernel and by the table's names.

    Raises:
        RuntimeError: ncu is not installed, not permitted to read counters, or failed; says which.
    """
    ncu = shutil.which("ncu")
    if ncu is None:
        raise RuntimeError("no hardware counters: ncu (Nsight Compute) is not installed")
    kernels = 2 if num_splits > 1 else 1
    command = [
        ncu, "--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none",
        "--kernel-name", f"regex:{'|'.join(KERNELS.values())}",
        "--launch-skip", str(2 * kernels), "--launch-count", str(kernels), "--metrics", ",".join(COUNTERS),
        sys.executable, "-m", "flash_decoding.bench.profiling", json.dumps(case.to_json()), str(num_splits),
    ]  # fmt: skip
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=NCU_SECONDS)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"no hardware counters: ncu did not finish within {NCU_SECONDS} s") from None
    text = answer.stdout + answer.stderr
    if "ERR_NVGPUCTRPERM" in text:
        raise RuntimeError("no hardware counters: this user may not read them (ERR_NVGPUCTRPERM)")
    counters = parse_counters(answer.stdout)
    if not counters:
        said = [line for line in text.splitlines() if line.startswith("==ERROR==")]
        reason = said[0].removeprefix("==ERROR==").strip() if said else f"ncu ended with status {answer.returncode}"
        raise RuntimeError(f"no hardware counters: {reason}")
    return counters


def parse_counters(text: str) -> dict[str, dict[str, float]]:
    """The counters in ncu's raw CSV page; lines before the table and the line of units are skipped."""
    lines = text.splitlines()
    start = next((at for at, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        return {}
    counters: dict[str, dict[str, float]] = {}
    for row in csv.DictReader(io.StringIO("\n".join(lines[start:]))):
        kernel = next((short for short, name in KERNELS.items() if name in (row.get("Kernel Name") or "")), None)
        if kernel is None:
            continue
        found = counters.setdefault(kernel, {})
        for metric, name in COUNTERS.items():
            with contextlib.suppress(ValueError):
                found[name] = float((row.get(metric) or "").replace(",", ""))
    return counters


def _run_under_ncu(case: Case, num_splits: int) -> None:
    """Three calls; ncu looks at the third."""
    from flash_decoding import flash_decode

    q, k, v = make_inputs(case, 1, seed=0)[0]
    with nvtx_ranges():
        for _ in range(3):
            flash_decode(q, k, v, num_splits=num_splits)
    torch.cuda.synchronize()


if __name__ == "__main__":
    _run_under_ncu(Case.from_json(json.loads(sys.argv[1])), int(sys.argv[2]))
