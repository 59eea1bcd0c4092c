"""Measuring peers: the fastest right variant counts, wrong ones get no number, and a dying process loses one row."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch

from flash_decoding import reference
from flash_decoding.bench import measure
from flash_decoding.bench.measure import make_stage, measure_case, measure_peer
from flash_decoding.bench.peers import OURS, Peer, Prepared, peers_for
from flash_decoding.bench.read_floor import Floor
from flash_decoding.bench.results import empty_row
from flash_decoding.bench.run import _build_jobs, build_peers, run
from flash_decoding.bench.timing import Method, Timed
from flash_decoding.bench.workloads import DENSE, SUITES, Case, Options, Shape

CASE = Case("x", "small", Shape(1, 4, 2, 100, 32), "float32", "cpu")
QUICK = Method(rotated_bytes=100_000, cpu_repeats=3, cpu_us=1000)


def make_peer(*variants: tuple[str, Callable], **options) -> Peer:
    def yield_variants(case, copies):
        for name, function in variants:
            yield lambda name=name, function=function: Prepared(name, [lambda x=x: function(*x) for x in copies])

    return Peer("fake", "Fake", "cpu", yield_variants, **options)


def right(q, k, v):
    return reference(q, k, v).to(q.dtype)


def slow(q, k, v):
    time.sleep(0.05)  # far more than `right` takes even when other programs have the cores
    return right(q, k, v)


def wrong(q, k, v):
    return right(q, k[:, :, :-1], v[:, :, :-1])


def failing(q, k, v):
    raise RuntimeError("no kernel for this\nlong trace")


@pytest.fixture(scope="module")
def stage():
    return make_stage(CASE, QUICK, {})


def test_the_fastest_variant_counts(stage):
    row = measure_peer(make_peer(("slow", slow), ("fast", right), ("slow too", slow)), stage, QUICK)
    assert (row["status"], row["variant"]) == ("ok", "fast")
    assert row["us_eager"] > 0
    assert row["us_eager_spread"] >= 0
    assert row["us_graph"] is None
    assert len(row["us_eager_repeats"]) >= QUICK.cpu_repeats
    assert row["us_eager"] == pytest.approx(statistics.median(row["us_eager_repeats"]), abs=2e-3)
    assert row["max_abs_err"] < 1e-6
    assert row["read_floor_us"] == round(stage.floor.us, 3)
    assert row["bytes"] == CASE.kv_bytes
    assert (row["options"], row["baseline"]) == ({}, None)


def test_a_gpu_row_keeps_the_repeats_of_both_times(stage, monkeypatch):
    times = Timed(2.0, 4.0, [1.0, 2.0, 5.0])
    monkeypatch.setattr(measure, "capture", lambda calls: ("graph", [call() for call in calls]))
    monkeypatch.setattr(measure, "time_graph", lambda graph, *args, **options: times)
    monkeypatch.setattr(measure, "time_eager", lambda calls, us, method: (times, times))
    monkeypatch.setattr(measure, "check_output", lambda out, want, dtype, tolerance: (0.0, None))
    prepared = Prepared("", [lambda: torch.zeros(1)] * 2)
    row = measure._measure_on_gpu(prepared, stage, QUICK)["finish"]()
    assert row["us_graph_repeats"] == row["us_eager_repeats"] == [1.0, 2.0, 5.0]
    assert row.keys() <= empty_row(CASE, "x", "ok").keys()


def test_a_wrong_result_gets_no_number(stage):
    row = measure_peer(make_peer(("wrong", wrong)), stage, QUICK)
    assert row["status"].startswith("wrong: the largest error is ")
    assert row["us_eager"] is None


def test_a_kernel_of_eight_bits_has_a_tolerance_of_its_own(stage):
    def off(q, k, v):
        out = right(q, k, v)
        return out + 0.1 * out.abs().amax((1, 2, 3), keepdim=True)

    def variants(case, copies, tolerance):
        yield lambda: Prepared("", [lambda x=x: off(*x) for x in copies], tolerance=tolerance)

    peers = [Peer("x", "X", "cpu", partial(variants, tolerance=tolerance)) for tolerance in (0.125, 0.09, None)]
    rows = [measure_peer(peer, stage, QUICK) for peer in peers]
    assert [row["status"].partition(":")[0] for row in rows] == ["ok", "wrong", "wrong"]
    assert rows[0]["tolerance"] == 0.125
    assert measure_peer(make_peer(("", right)), stage, QUICK)["tolerance"] == 2.0**-13


def test_one_failing_variant_does_not_hide_the_other(stage):
    row = measure_peer(make_peer(("bad", failing), ("wrong", wrong), ("good", right)), stage, QUICK)
    assert (row["status"], row["variant"]) == ("ok", "good")


def test_a_failing_peer_keeps_its_reason(stage):
    row = measure_peer(make_peer(("bad", failing)), stage, QUICK)
    assert row["status"] == "error: no kernel for this"


def test_an_error_while_preparing_is_a_reason(stage):
    def broken(case, copies):
        raise ValueError("cannot plan")
        yield

    row = measure_peer(Peer("fake", "Fake", "cpu", broken), stage, QUICK)
    assert row["status"] == "error: cannot plan"


def test_absent_and_refusing_peers_say_so(stage):
    absent = make_peer(("", right), module="no_such_library")
    assert measure_peer(absent, stage, QUICK)["status"] == "unavailable: no_such_library is not installed"
    refusing = make_peer(("", right), refuses=lambda case: "only on Tuesdays")
    assert measure_peer(refusing, stage, QUICK)["status"] == "unsupported: only on Tuesdays"


def test_a_shape_beyond_memory_is_skipped_for_every_peer(monkeypatch):
    monkeypatch.setattr(measure, "free_bytes", lambda device: 1000)
    events = []
    measure_case(CASE, [make_peer(("", right))], QUICK, {}, lambda kind, value: events.append((kind, value)))
    assert [kind for kind, _ in events] == ["stage", "row"]
    assert events[-1][1]["status"].startswith("skipped: needs ")


def test_a_floor_of_the_same_bytes_is_measured_once(stage):
    known = {CASE.kv_bytes: Floor(CASE.kv_bytes, 1.5, "known")}
    assert make_stage(CASE, QUICK, known).floor.us == 1.5
    found: dict[int, Floor] = {}
    make_stage(CASE, QUICK, found)
    assert list(found) == [CASE.kv_bytes]


def test_a_run_in_a_worker_gives_every_peer_a_row():
    events = list(run([CASE], QUICK, ["sdpa"]))
    rows = [value for kind, value in events if kind == "row"]
    assert [(row["impl"], row["status"]) for row in rows] == [(OURS, "ok"), ("sdpa", "ok")]
    environment = next(value for kind, value in events if kind == "environment")
    assert environment["torch"] == torch.__version__
    assert any(kind == "doing" and value == "small: sdpa" for kind, value in events)


def test_options_are_measured_like_everything_else():
    shape = Shape(2, 4, 2, 100, 32)
    ragged = Case("x", "ragged", shape, "float32", "cpu", Options(page_size=16, kv_lens=(100, 7)), baseline="dense")
    window = Case("x", "window", shape, "float32", "cpu", Options(q_len=3, window=20))
    events = list(run([ragged, window], QUICK, ["sdpa"]))
    rows = [value for kind, value in events if kind == "row"]
    assert [(row["case"], row["impl"], row["status"]) for row in rows] == [
        ("ragged", OURS, "ok"),
        ("ragged", "sdpa", "unsupported: takes no block table"),
        ("window", OURS, "ok"),
        ("window", "sdpa", "ok"),
    ]
    assert rows[0]["options"] == {"page_size": 16, "kv_lens": [100, 7]}
    assert (rows[0]["baseline"], rows[0]["bytes"]) == ("dense", ragged.kv_bytes)
    assert rows[2]["options"] == {"q_len": 3, "window": 20}
    assert rows[3]["variant"] == "enable_gqa, mask"
    assert all(row["read_floor_us"] > 0 for row in rows)


def test_codes_are_measured_beside_the_plain_cache():
    shape, paged = Shape(2, 4, 2, 100, 64), Options(page_size=16, kv_lens=(100, 7))
    plain = Case("quantised", "plain", shape, "bfloat16", "cpu", paged, ours_only=True)
    formats = ("fp8", "fp8:token", "int8", "int8:tensor", "int4")
    coded = [
        replace(plain, name=name, kv_format=name, baseline="plain", ours_only=False, options=options)
        for name in formats for options in (paged, DENSE)
    ]  # fmt: skip
    rows = [value for kind, value in run([plain, *coded], QUICK, ["sdpa"]) if kind == "row"]
    assert [(row["impl"], row["kv_dtype"]) for row in rows if row["case"] == "plain"] == [(OURS, "bfloat16")]
    ours, sdpa = ([row for row in rows if row["impl"] == impl and row["case"] != "plain"] for impl in (OURS, "sdpa"))
    assert [row["status"] for row in ours] == ["ok"] * len(coded)
    assert [(row["kv_dtype"], row["bytes"]) for row in ours] == [(case.kv_dtype, case.kv_bytes) for case in coded]
    assert all(row["read_floor_us"] > 0 for row in ours)
    assert {row["tolerance"] for row in ours} == {2 * torch.finfo(torch.bfloat16).eps}
    assert {row["status"] for row in sdpa} == {"unsupported: takes no quantised cache of these formats"}


def test_a_peer_that_kills_its_process_costs_its_own_row(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys, torch\n"
        "def die(*args, **kwargs):\n"
        "    print('the last words', file=sys.stderr)\n"
        "    sys.stderr.flush()\n"
        "    os._exit(7)\n"
        "torch.nn.functional.scaled_dot_product_attention = die\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    cases = [CASE, Case("x", "second", Shape(1, 2, 2, 64, 32), "float32", "cpu")]
    rows = [value for kind, value in run(cases, QUICK, ["sdpa"]) if kind == "row"]
    assert [(row["case"], row["impl"], row["status"]) for row in rows] == [
        ("small", OURS, "ok"),
        ("small", "sdpa", "error: the process ended with status 7: the last words"),
        ("second", OURS, "ok"),
        ("second", "sdpa", "error: the process ended with status 7: the last words"),
    ]


def test_what_peers_compile_is_built_once_per_key(monkeypatch):
    monkeypatch.setattr(Peer, "installed", lambda self: True)
    cases = SUITES["article"] + SUITES["latency"]
    built = [(peer.name, peer.build_key(case)) for case, peer in _build_jobs(cases, None)]
    assert len(built) == len(set(built))
    assert [name for name, _ in built[:2]] == ["flashinfer_tc"] * 2  # head sizes 64 and 128; the slowest goes first
    assert sum(name == "flex_attention" for name, _ in built) == len(cases)
    assert sum(name == "xqa" for name, _ in built) == 3


def test_what_options_compile_is_built_where_it_runs(monkeypatch):
    monkeypatch.setattr(Peer, "installed", lambda self: True)
    jobs = _build_jobs(SUITES["ragged"] + SUITES["options"], None)
    built = {name: [str(case.options) for case, peer in jobs if peer.name == name] for name in ("xqa", "flashinfer_tc")}
    # FlashInfer has one kernel for all pages and lengths, XQA one per page size; both have others for a window.
    assert built == {"xqa": ["page16-ragged", "", "window1024"], "flashinfer_tc": ["page16-ragged", "window1024"]}
    assert not [case for case, peer in jobs if peer.name == "flex_attention" and str(case.options)]


def test_only_codes_are_built_for_the_suite_of_quantised_caches(monkeypatch):
    monkeypatch.setattr(Peer, "installed", lambda self: True)
    jobs = _build_jobs(SUITES["quantised"], None)
    assert {case.kv_format for case, _ in jobs} == {"fp8"}
    # FlashInfer's CUDA-core kernel once for batches and once for a single request; XQA for 1 and 4 rows, two pages.
    counts = {name: sum(peer.name == name for _, peer in jobs) for name in ("flashinfer", "flashinfer_tc", "xqa")}
    assert counts == {"flashinfer": 2, "flashinfer_tc": 1, "xqa": 3}
    assert len(jobs) == 6


def test_nothing_to_build_starts_no_process(monkeypatch):
    def refuse(*args, **options):
        raise AssertionError("a process was started")

    monkeypatch.setattr("subprocess.Popen", refuse)
    build_peers([CASE], QUICK)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kv_format", [None, "fp8", "int8", "int4"])
@pytest.mark.parametrize(
    "options",
    [Options(page_size=16, kv_lens=(5, 2000, 700)), Options(page_size=64), Options(q_len=4), Options(window=100)],
    ids=str,
)
def test_options_are_timed_in_a_graph(options: Options, kv_format: str | None):
    case = Case("x", "x", Shape(3, 8, 2, 2000, 128), "bfloat16", options=options, kv_format=kv_format)
    method = Method(rotated_bytes=20_000_000, eager_repeats=2)
    stage = make_stage(case, method, {})
    assert stage.floor.bytes == case.kv_bytes
    (ours,) = [peer for peer in peers_for("cuda") if peer.name == OURS]
    row = measure_peer(ours, stage, method)
    assert row["status"] == "ok"
    assert row["us_graph"] > 0
