"""Reading the profiler's trace and Nsight Compute's table; no GPU needed."""

from __future__ import annotations

import subprocess

import pytest

from flash_decoding.bench import profiling
from flash_decoding.bench.profiling import (
    find_gaps,
    parse_counters,
    parse_trace,
    plan_of,
    read_counters,
    sizes_of,
    summarise,
)
from flash_decoding.bench.workloads import Case, Shape
from flash_decoding.hardware import find_gpu

CASE = Case("profile", "x", Shape(1, 32, 8, 8192, 128), "bfloat16")
SIZES = sizes_of(CASE.shape, CASE.dtype, plan_of(CASE.shape, CASE.dtype, find_gpu("h200")).tile)


def event(name: str, start: float, length: float, grid: list[int], **facts) -> dict:
    args = {"grid": grid, "block": [64, 1, 1], "registers per thread": 200, "shared memory": 70_000} | facts
    return {"cat": "kernel", "name": name, "ts": start, "dur": length, "args": args}


TRACE = {
    "traceEvents": [
        {"cat": "cpu_op", "name": "_chunk_kernel", "ts": 0, "dur": 1},
        event("_reduce_kernel", 112.5, 1.5, [32, 4, 1], **{"shared memory": 512}),
        event("_chunk_kernel", 100.0, 12.0, [264, 1, 1]),
        event("void at::native::vectorized_copy()", 90.0, 5.0, [1, 1, 1]),
        event("_chunk_kernel", 115.0, 14.0, [264, 1, 1]),
        event("_reduce_kernel", 129.7, 1.7, [32, 4, 1], **{"shared memory": 512}),
        event("_chunk_kernel", 900.0, 12.5, [264, 1, 1]),
    ]
}


def test_trace_keeps_this_library_s_kernels_in_order():
    launches = parse_trace(TRACE)
    assert [launch.kernel for launch in launches] == ["chunk", "reduce", "chunk", "reduce", "chunk"]
    assert (launches[0].programs, launches[0].threads, launches[0].registers) == (264, 64, 200)


def test_gaps_inside_a_step_and_between_steps():
    inside, between = find_gaps(parse_trace(TRACE))
    assert inside == pytest.approx((0.5 + 0.7) / 2)
    assert between == pytest.approx(1.0)  # not the pause before the next replay


def test_gaps_of_a_single_kernel():
    assert find_gaps(parse_trace(TRACE)[:1]) == (None, None)


def test_a_reduce_kernel_that_starts_early_counts_from_the_end_of_the_chunk_kernel():
    early = [
        event("_chunk_kernel", 100.0, 12.0, [264, 1, 1]),
        event("_reduce_kernel", 103.0, 10.5, [32, 4, 1]),
        event("_chunk_kernel", 115.0, 14.0, [264, 1, 1]),
        event("_reduce_kernel", 118.0, 11.5, [32, 4, 1]),
    ]
    launches = parse_trace({"traceEvents": early})
    assert [(launch.start_us, launch.us) for launch in launches if launch.was_early] == [(112.0, 1.5), (129.0, 0.5)]
    assert find_gaps(launches) == (None, pytest.approx(1.5))
    assert summarise(launches, SIZES, 32, find_gpu("h200"))[1].us == pytest.approx(1.0)


def test_summary_of_both_kernels():
    gpu = find_gpu("h200")
    chunk, reduce = summarise(parse_trace(TRACE), SIZES, 33, gpu)
    assert (chunk.us, chunk.us_spread, chunk.num_warps) == (12.5, 2.0, 2)
    assert chunk.resident == 3  # shared memory allows three, registers five
    assert chunk.waves == pytest.approx(264 / (3 * 132))
    assert chunk.gb_per_s == pytest.approx(chunk.work.bytes_moved / 12.5 / 1e3)
    assert chunk.tflops == pytest.approx(2 * 32 * 8192 * 256 / 12.5 / 1e6)
    assert reduce.work.bytes_moved < chunk.work.bytes_moved / 50


def test_an_unsplit_step_has_one_kernel():
    launches = [launch for launch in parse_trace(TRACE) if launch.kernel == "chunk"]
    assert [kernel.kernel for kernel in summarise(launches, SIZES, 1, find_gpu("h200"))] == ["chunk"]


def test_the_library_s_own_choice_of_splits():
    assert plan_of(CASE.shape, "bfloat16", find_gpu("h200")).num_splits == 32
    assert plan_of(Shape(64, 32, 8, 512, 128), "bfloat16", find_gpu("rtx4060")).num_splits == 1


# Query heads per KV head at, and one beyond, what one program holds: 8 in float32, 64, and 32 beyond D 128.
@pytest.mark.parametrize(
    ("group", "head_dim", "dtype", "row_tiles"),
    [(8, 128, "float32", 1), (9, 128, "float32", 2), (16, 64, "float32", 2), (64, 128, "bfloat16", 1),
     (65, 128, "bfloat16", 2), (32, 256, "float16", 1), (33, 136, "float16", 2)],
)  # fmt: skip
def test_row_tiles_of_the_library_s_tiles(group: int, head_dim: int, dtype: str, row_tiles: int):
    shape = Shape(1, 2 * group, 2, 1000, head_dim)
    assert sizes_of(shape, dtype, plan_of(shape, dtype, find_gpu("h200")).tile).row_tiles == row_tiles


NCU = """==PROF== Connected to process 1
==PROF== Profiling "_chunk_kernel": 0%....100% - 1 pass
"ID","Kernel Name","dram__bytes_read.sum","lts__t_sector_hit_rate.pct","smsp__warps_eligible.avg.per_cycle_active"
"","","byte","%","warp"
"0","_chunk_kernel","33,554,432","1.25","0.4"
"1","_reduce_kernel","540672","88.0","n/a"
"2","other","1","1","1"
"""


def test_counters_of_both_kernels():
    assert parse_counters(NCU) == {
        "chunk": {"DRAM bytes read": 33554432.0, "L2 hit rate, %": 1.25, "eligible warps per scheduler": 0.4},
        "reduce": {"DRAM bytes read": 540672.0, "L2 hit rate, %": 88.0},
    }
    assert parse_counters("==ERROR== nothing") == {}


def test_no_ncu_is_one_sentence(monkeypatch):
    monkeypatch.setattr(profiling.shutil, "which", lambda name: None)
    with pytest.raises(RuntimeError, match=r"ncu \(Nsight Compute\) is not installed"):
        read_counters(CASE, 8)


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission", "this user may not read them"),
        (
            "==ERROR== Failed to initialize the profiler: X\n",
            "no hardware counters: Failed to initialize the profiler: X",
        ),
        ("", "ncu ended with status 3"),
    ],
)
def test_ncu_failures_are_one_sentence(monkeypatch, output: str, message: str):
    monkeypatch.setattr(profiling.shutil, "which", lambda name: "/bin/ncu")
    monkeypatch.setattr(
        profiling.subprocess, "run", lambda *args, **options: subprocess.CompletedProcess(args, 3, output, "")
    )
    with pytest.raises(RuntimeError, match=message):
        read_counters(CASE, 8)


def test_ncu_is_asked_for_each_kernel_once_and_leaves_the_clocks_alone(monkeypatch):
    asked = []

    def answer(command, **options):
        asked.append(command)
        return subprocess.CompletedProcess(command, 0, NCU, "")

    monkeypatch.setattr(profiling.shutil, "which", lambda name: "/bin/ncu")
    monkeypatch.setattr(profiling.subprocess, "run", answer)
    assert read_counters(CASE, 8)["reduce"]["DRAM bytes read"] == 540672
    command = asked[0]
    assert command[command.index("--clock-control") + 1] == "none"
    assert command[command.index("--launch-count") + 1] == "2"
