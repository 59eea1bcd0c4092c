"""Result files: written whole, read back checked, shown without a GPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from flash_decoding.bench.results import (
    Row,
    describe_environment,
    device_folder,
    empty_row,
    find_result_files,
    new_results,
    over_floor,
    read_results,
    time_us,
    write_results,
)
from flash_decoding.bench.tables import (
    SUMMARY,
    detail_table,
    failure_lines,
    ratio_cells,
    ratio_table,
    summary_cells,
    summary_columns,
    summary_table,
    to_markdown,
)
from flash_decoding.bench.timing import Method
from flash_decoding.bench.workloads import Case, Options, Shape

CASE = Case("serving", "b1", Shape(1, 32, 8, 8192, 128), "bfloat16")
ENVIRONMENT = {
    "gpu": "NVIDIA H200",
    "cpu": "a CPU",
    "cpu_threads": 2,
    "torch": "2",
    "triton": "3",
    "date": "2026-01-02",
}


def row(impl: str, us: float, floor: float = 10.0, case: Case = CASE) -> Row:
    return empty_row(case, impl, "ok") | {
        "us_graph": us, "us_graph_spread": 0.1, "us_eager": us + 20, "us_host": 21.0, "read_floor_us": floor,
        "max_abs_err": 1e-4, "variant": "page 16",
    }  # fmt: skip


ROWS = [
    row("sdpa", 15.6),
    row("flash_decoding", 12.5),
    row("flash_decoding_unsplit", 12.2),
    row("flashinfer", 18.5) | {"plan_us": 300.0},
    empty_row(CASE, "xformers", "unavailable: xformers.ops is not installed"),
]


def test_written_results_read_back(tmp_path: Path):
    results = new_results(ENVIRONMENT, Method(), ROWS)
    path = tmp_path / "deep" / "serving.json"
    write_results(path, results)
    assert read_results(path) == json.loads(json.dumps(results))
    assert [file.name for file in path.parent.iterdir()] == ["serving.json"]
    write_results(path, results | {"rows": []})
    assert read_results(path)["rows"] == []


def test_files_from_before_the_plain_call_s_repeats_were_kept_are_read(tmp_path: Path):
    old = [{key: value for key, value in row.items() if key != "us_eager_repeats"} for row in ROWS]
    write_results(tmp_path / "old.json", new_results(ENVIRONMENT, Method(), old))
    rows = read_results(tmp_path / "old.json")["rows"]
    assert "us_eager_repeats" not in rows[0]
    assert to_markdown(rows, ENVIRONMENT) == to_markdown(ROWS, ENVIRONMENT)


def test_one_row_is_one_line(tmp_path: Path):
    path = tmp_path / "x.json"
    write_results(path, new_results(ENVIRONMENT, Method(), ROWS))
    assert sum('"impl"' in line for line in path.read_text().splitlines()) == len(ROWS)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ('{"schema": 2, "rows": []}', "must be a result file of schema 1"),
        ("[]", "must be a result file of schema 1"),
        ('{"schema": 1, "rows": [{"suite": "x"}]}', "must have bytes, case, dtype"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, text: str, message: str):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_results(path)


def test_folders_are_searched_and_other_files_passed_over(tmp_path: Path):
    write_results(tmp_path / "gpu" / "a.json", new_results(ENVIRONMENT, Method()))
    (tmp_path / "gpu" / "profile.json").write_text("{}")
    assert find_result_files([tmp_path]) == [tmp_path / "gpu" / "a.json"]
    with pytest.raises(ValueError, match="does not exist"):
        find_result_files([tmp_path / "none"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no result files in"):
        find_result_files([tmp_path / "empty"])


def test_the_environment_names_versions_and_devices():
    environment = describe_environment(["torch", "no-such-package"])
    assert environment["torch"]
    assert environment["no-such-package"] is None
    assert environment["cpu_threads"] >= 1
    assert environment["date"].startswith("20")


def test_device_folder():
    assert device_folder(ENVIRONMENT, "cuda") == "nvidia-h200"
    assert device_folder({"cpu": "AMD EPYC 7763 (64)"}, "cpu") == "amd-epyc-7763-64"


def test_graph_time_is_compared_and_the_plain_call_where_there_is_none():
    assert time_us(ROWS[0]) == 15.6
    assert over_floor(ROWS[0]) == pytest.approx(1.56)
    assert time_us(ROWS[0] | {"us_graph": None}) == 35.6
    assert over_floor(ROWS[-1]) is None


def test_summary_compares_with_sdpa_and_the_best_other_library():
    assert summary_cells(ROWS) == ["1, 32/8, 8192, 128", "34", "10.0", "12.5", "1.25", "15.6", "15.6 (SDPA)", "1.25"]


RAGGED = Case("ragged", "r", Shape(2, 32, 8, 4096, 128), "bfloat16", options=Options(page_size=16, kv_lens=(70, 4000)))


def test_summary_of_paged_suites_compares_with_flashinfer():
    rows = [
        row("flash_decoding", 10.0, 8.0, RAGGED), row("fa3", 12.0, 8.0, RAGGED),
        row("flashinfer", 14.0, 8.0, RAGGED) | {"plan_us": 99.0},
        row("flashinfer_tc", 13.0, 8.0, RAGGED) | {"plan_us": 1266.4},
        empty_row(RAGGED, "sdpa", "unsupported: takes no block table"),
    ]  # fmt: skip
    columns = summary_columns(rows)
    assert dict(zip(columns, summary_cells(rows, columns), strict=True)) == {
        "B, Hq/Hkv, N, D": "2, 32/8, 70–4000, 128, page 16", "MB": "17", "read floor": "8.0", "ours": "10.0",
        "× floor": "1.25", "GB/s": "1667", "FlashInfer": "13.0", "FlashInfer ÷ ours": "1.30", "plan": "1266",
        "best other": "12.0 (FlashAttention-3)",
    }  # fmt: skip
    assert "| 2, 32/8, 70–4000, 128, page 16 | 17 | 8.0 | 10.0 | 1.25 | 1667 |" in to_markdown(rows, ENVIRONMENT)
    assert summary_columns([*rows, *ROWS]) == SUMMARY


def test_what_an_option_costs_is_a_ratio_to_its_baseline():
    slower = replace(CASE, name="w", options=Options(q_len=4, window=1024), baseline="b1")
    lost = replace(CASE, name="lost", options=Options(q_len=2), baseline="not measured")
    rows = [
        *ROWS, row("flash_decoding", 15.0, case=slower), row("sdpa", 31.2, case=slower),
        row("fa3", 9.0, case=slower), row("flash_decoding", 15.0, case=lost),
    ]  # fmt: skip
    cells = ["1, 32/8, 8192, 128, Lq 4, window 1024", "1, 32/8, 8192, 128", "15.0", "12.5", "1.20", "SDPA 2.00"]
    assert ratio_cells(rows) == [cells]
    assert "| " + " | ".join(cells) + " |" in to_markdown(rows, ENVIRONMENT)
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115, it lives as long as the console
    console.print(ratio_table("serving", rows))
    assert "1.20" in console.export_text()
    assert ratio_table("serving", ROWS) is None
    assert "compared with" not in to_markdown(ROWS, ENVIRONMENT)


PLAIN = Case("quantised", "p", Shape(1, 32, 8, 8192, 128), "bfloat16", ours_only=True)
FP8 = replace(PLAIN, name="f", kv_format="fp8", baseline="p", ours_only=False)
INT8 = replace(FP8, name="i", kv_format="int8")
QUANTISED = [
    row("flash_decoding", 13.0, case=PLAIN), row("flash_decoding", 8.0, 6.0, FP8), row("fa3", 18.0, 6.0, FP8),
    row("fa3_tuned", 14.0, 6.0, FP8), row("flashinfer", 17.0, 6.0, FP8), row("flashinfer_tc", 16.0, 6.0, FP8),
    row("xqa", 12.0, 6.0, FP8), row("flash_decoding", 10.0, 6.25, INT8),
    empty_row(INT8, "fa3", "unsupported: no such codes"), empty_row(INT8, "sdpa", "unsupported: no codes"),
    empty_row(FP8, "sdpa", "unsupported: no codes"),
]  # fmt: skip


def test_summary_of_quantised_caches_compares_with_sixteen_bits_and_the_libraries():
    text = to_markdown(QUANTISED, ENVIRONMENT)
    for line in (
        "| B, Hq/Hkv, N, D | K and V | MB | read floor | ours | × floor | 16-bit ÷ ours | FlashAttention-3 "
        "| FlashInfer | XQA | best other ÷ ours |",
        "| 1, 32/8, 8192, 128 | bfloat16 | 34 | 10.0 | 13.0 | 1.30 | – | – | – | – | – |",
        "| 1, 32/8, 8192, 128 | fp8_e4m3:tensor | 17 | 6.0 | 8.0 | 1.33 | 1.62 | 14.0 | 16.0 | 12.0 | 1.50 |",
        "| 1, 32/8, 8192, 128 | int8:token | 17 | 6.2 | 10.0 | 1.60 | 1.30 | – | – | – | – |",
        "| 1, 32/8, 8192, 128, fp8_e4m3:tensor | 17 | 6.0 | **8.0** |",
    ):
        assert line in text
    assert "compared with" not in text
    # Nobody else is measured on the plain cache, so a reason for all others is one for all.
    assert failure_lines(QUANTISED) == [
        "FlashAttention-3: unsupported: no such codes (1, 32/8, 8192, 128, int8:token)", "SDPA: unsupported: no codes"
    ]  # fmt: skip


def test_a_long_list_of_shapes_is_a_number():
    cases = [Case("x", f"{n}", Shape(1, 8, 8, n, 64), "bfloat16") for n in range(1, 11)]
    rows = [row("sdpa", 1.0, case=case) for case in cases]
    failed = [empty_row(case, "fa3", "error: no") for case in cases]
    assert failure_lines([*rows, *failed[:9]]) == ["FlashAttention-3: error: no (9 of 10 cases)"]
    assert failure_lines([*rows, *failed[:8]])[0].count(";") == 7


def test_files_from_before_there_were_options_are_read():
    new = ("options", "baseline", "tolerance")
    old = [{key: value for key, value in row.items() if key not in new} for row in ROWS]
    assert to_markdown(old, ENVIRONMENT) == to_markdown(ROWS, ENVIRONMENT)


def test_summary_of_nothing_measured():
    assert summary_cells(ROWS[-1:]) == ["1, 32/8, 8192, 128", "34", "–", "–", "–", "–", "–", "–"]


def test_a_failure_lists_its_shapes_unless_it_is_all_of_them():
    other = Case("serving", "b2", Shape(2, 32, 8, 100, 128), "float16")
    assert failure_lines(ROWS) == ["xFormers: unavailable: xformers.ops is not installed"]
    lines = failure_lines([*ROWS, row("sdpa", 5.0, case=other)])
    assert lines == ["xFormers: unavailable: xformers.ops is not installed (1, 32/8, 8192, 128)"]


def test_tables_hold_every_peer():
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115, it lives as long as the console
    console.print(detail_table("serving", ROWS), summary_table("serving", ROWS))
    text = console.export_text()
    for part in ("flash-decoding", "SDPA", "FlashInfer (page 16, plan 300 µs)", "1.85", "only reading it"):
        assert part in text


def test_markdown():
    text = to_markdown(ROWS, ENVIRONMENT)
    assert "µs per decode step on NVIDIA H200; torch 2, Triton 3; 2026-01-02." in text
    assert "| 1, 32/8, 8192, 128 | 34 | 10.0 | 15.6 | **12.5** | 12.2 | 18.5 |" in text
    assert "- xFormers: unavailable: xformers.ops is not installed" in text
