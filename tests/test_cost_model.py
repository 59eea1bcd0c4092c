"""Bytes and FLOPs by hand, and laws of the predicted schedule."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from flash_decoding.bench.workloads import Shape
from flash_decoding.cli.plan import _FoundGpu
from flash_decoding.cost_model import (
    REDUCE_US,
    Machine,
    Sizes,
    chunk_work,
    floor_us,
    kv_bytes,
    partial_bytes,
    predict,
    reduce_work,
    schedule,
    split_lengths,
)

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "nvidia-h200"
LONG = Sizes(batch=2, heads_q=8, heads_kv=8, kv_len=65536, head_dim=128, value_dim=128, itemsize=2)
GROUPED = Sizes(batch=1, heads_q=32, heads_kv=8, kv_len=8192, head_dim=128, value_dim=64, itemsize=2)
H200 = Machine(processors=132, resident=3, gb_per_s=4560.0)


def test_bytes_of_the_article():
    assert kv_bytes(LONG) == 536_870_912
    assert partial_bytes(LONG, 1) == 0
    assert partial_bytes(LONG, 16) == 16 * 16 * 130 * 4


def test_chunk_work_counts_two_products():
    work = chunk_work(GROUPED, num_splits=1)
    assert work.flops == 2 * 32 * 8192 * (128 + 64)
    assert work.bytes_moved == 8 * 8192 * 192 * 2 + 32 * 128 * 2 + 32 * 64 * 2
    # Four query heads share each key: four times the FLOPs per byte of one.
    assert work.intensity == pytest.approx(4, rel=0.01)


def test_every_tile_of_rows_reads_k_and_v_again():
    once = Sizes(1, 128, 8, 8192, 128, 64, 2)
    thrice = replace(once, row_tiles=3)
    assert kv_bytes(thrice) == kv_bytes(once)
    assert chunk_work(thrice, 4).bytes_moved - chunk_work(once, 4).bytes_moved == 2 * kv_bytes(once)
    assert chunk_work(thrice, 4).flops == chunk_work(once, 4).flops
    assert reduce_work(thrice, 4) == reduce_work(once, 4)


def test_tiles_of_rows_are_programs_of_their_own():
    once, twice = (predict(replace(LONG, row_tiles=tiles), 16, 64, H200) for tiles in (1, 2))
    assert (once.programs, twice.programs) == (2 * 8 * 16, 2 * 2 * 8 * 16)
    assert (once.waves, twice.waves) == (1, 2)
    assert twice.floor_us == once.floor_us
    assert twice.reduce_us == once.reduce_us
    read_us = kv_bytes(LONG) / H200.bytes_per_us
    assert twice.chunk_us - once.chunk_us == pytest.approx(read_us, rel=0.02)
    problems = [[span.problem for span in prediction.spans] for prediction in (once, twice)]
    assert sorted(problems[1]) == sorted(2 * problems[0])
    assert all(span.problem == 0 for span in schedule([1.0] * 3, H200, problems=2, row_tiles=3))


def test_reduce_work_is_nothing_without_splits():
    assert reduce_work(GROUPED, 1) == (0, 0)
    assert reduce_work(GROUPED, 1).intensity == 0
    assert reduce_work(GROUPED, 4).bytes_moved == 4 * 32 * 66 * 4 + 32 * 64 * 2


@pytest.mark.parametrize(("kv_len", "splits"), [(1000, 7), (64, 1), (65, 2), (100, 5), (0, 3)])
def test_splits_cover_the_keys_in_whole_tiles(kv_len: int, splits: int):
    lengths = split_lengths(kv_len, splits, 64)
    assert len(lengths) == splits
    assert sum(lengths) == kv_len
    assert all(length % 64 == 0 for length in lengths[:-1] if length and length != lengths[-1])
    assert max(lengths) - min(lengths) <= 2 * 64


def test_the_floor_is_bytes_over_bandwidth_and_a_launch():
    assert floor_us(4_560_000, 4560.0) == pytest.approx(1000 / 1000 + 2.1)


def test_the_floor_agrees_with_measured_ones():
    # Megabytes read and µs, one H200 in a CUDA graph, cold cache.
    for megabytes, us in ((1.05, 2.26), (4.2, 3.08), (16.8, 5.99), (33.6, 9.74), (134.2, 32.6), (536.9, 120.2)):
        assert floor_us(int(megabytes * 1e6), 0.95 * 4800) == pytest.approx(us, rel=0.06)


def test_every_program_runs_once_and_lanes_never_overlap():
    loads = [100.0 * (1 + i % 3) for i in range(50)]
    spans = schedule(loads, Machine(processors=4, resident=2, gb_per_s=1.0), problems=5)
    assert len(spans) == 50
    assert sorted(span.problem for span in spans) == sorted(i % 5 for i in range(50))
    for lane in {(span.processor, span.lane) for span in spans}:
        mine = sorted((span.start, span.stop) for span in spans if (span.processor, span.lane) == lane)
        assert all(stop <= start for (_, stop), (start, _) in pairwise(mine))
    assert {span.processor for span in spans} == {0, 1, 2, 3}


def test_the_schedule_never_beats_the_bandwidth():
    for programs in (1, 3, 4, 9, 100):
        loads = [1e6] * programs
        end = max(span.stop for span in schedule(loads, Machine(4, 2, 100.0), problems=1))
        assert end >= sum(loads) / 100e3 * (1 - 1e-9)
    # Enough equal programs draw all of it.
    assert end == pytest.approx(sum(loads) / 100e3, rel=0.02)


def test_one_processor_draws_no_more_than_its_boost():
    end = schedule([1e6], Machine(processors=100, resident=1, gb_per_s=100.0, boost=2.0), problems=1)[0].stop
    assert end == pytest.approx(1e6 / (2 * 100e3 / 100))


def test_no_keys_cost_no_time():
    empty = Sizes(1, 4, 4, 0, 64, 64, 2)
    prediction = predict(empty, 1, 64, H200)
    assert prediction.busy_share == 0
    assert prediction.chunk_us == pytest.approx(prediction.floor_us + 1.0)


def test_splitting_fills_the_processors_and_saves_time():
    unsplit, split = predict(LONG, 1, 64, H200), predict(LONG, 16, 64, H200)
    assert (unsplit.working_processors, split.working_processors) == (16, 132)
    assert unsplit.busy_share < 0.2 < 0.9 < split.busy_share
    assert unsplit.reduce_us == 0
    assert split.reduce_us > REDUCE_US
    assert split.total_us < 0.5 * unsplit.total_us
    assert split.total_us > split.floor_us


def test_splits_without_keys_are_programs_that_take_no_time():
    sizes = Sizes(64, 8, 8, 4096, 128, 128, 2)
    full, empty = predict(sizes, 64, 64, H200), predict(sizes, 16384, 64, H200)
    assert empty.programs == 64 * 8 * 16384
    assert len(empty.spans) == len(full.spans) == 64 * 8 * 64
    assert empty.chunk_us == full.chunk_us
    assert predict(Sizes(1, 4, 4, 0, 64, 64, 2), 3, 64, H200).working_processors == 0


def test_waves_count_the_rounds():
    machine = Machine(processors=10, resident=2, gb_per_s=100.0)
    sizes = Sizes(7, 3, 3, 640, 64, 64, 2)
    assert [predict(sizes, splits, 64, machine).waves for splits in (1, 2)] == [2, 3]


@pytest.mark.parametrize("suite", ["article", "serving"])
def test_unsplit_times_are_predicted_as_measured(suite):
    """The picture of `plan` claims how long a step takes without splitting; the H200's results say how long it took."""
    rows = json.loads((RESULTS / f"{suite}.json").read_text())["rows"]
    measured = {row["case"]: row for row in rows if row["impl"] == "flash_decoding_unsplit" and row["status"] == "ok"}
    assert measured
    gpu = _FoundGpu("h200")
    for row in measured.values():
        shape = Shape(**row["shape"])
        sizes, _, block_n, machine = gpu.choose(shape, "bfloat16", 1)
        predicted = predict(sizes, 1, block_n, machine).total_us
        # Below a few tiles per program, starting and ending are most of the time.
        if shape.kv_len >= 4096:
            assert predicted == pytest.approx(row["us_graph"], rel=0.1), shape
