"""The README's results are those of the files, and rewriting them touches nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flash_decoding.bench.document import BEGIN, END, find_block, fingerprint, merge_suites, render_block, replace_block
from flash_decoding.bench.results import empty_row, find_result_files, merge_environments, read_results
from flash_decoding.bench.workloads import Case, Shape

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
ROWS = [
    empty_row(Case("serving", "b1", Shape(1, 32, 8, 8192, 128), "bfloat16"), "flash_decoding", "ok")
    | {"us_graph": 12.5, "read_floor_us": 10.0}
]
ENVIRONMENT = {"gpu": "NVIDIA H200", "torch": "2", "triton": "3", "date": "2026-01-02T03:04:05"}


def test_only_the_block_is_replaced():
    block = render_block(ROWS, ENVIRONMENT, "docs/h200.svg")
    text = replace_block(f"before\n{BEGIN}\nold\n{END}\nafter\n", block)
    assert text == f"before\n{block}\nafter\n"
    assert find_block(text) == block
    assert replace_block(text, block) == text


def test_the_block_holds_the_table_and_the_picture():
    block = render_block(ROWS, ENVIRONMENT, "docs/h200.svg")
    assert "on one NVIDIA H200; torch 2, Triton 3, 2026-01-02." in block
    assert "| 1, 32/8, 8192, 128 | 34 | 10.0 | 12.5 | 1.25 |" in block
    assert "(docs/h200.svg)" in block
    assert "![" not in render_block(ROWS, ENVIRONMENT, None)


def test_the_picture_of_quantised_caches_is_another():
    case = Case("quantised", "f", Shape(1, 32, 8, 8192, 128), "bfloat16", kv_format="fp8")
    block = render_block([empty_row(case, "flash_decoding", "ok")], ENVIRONMENT, "images/quantised.svg")
    assert "![Time as a share of a 16-bit cache's, ours and other libraries](images/quantised.svg)" in block


@pytest.mark.parametrize("text", ["", BEGIN, END, f"{END}\n{BEGIN}"])
def test_a_document_without_marks_is_refused(text: str):
    with pytest.raises(ValueError, match="the document must have a line"):
        replace_block(text, "x")


def test_fingerprint_changes_with_any_number():
    changed = [ROWS[0] | {"us_graph": 12.6}]
    assert fingerprint(ROWS) == fingerprint([dict(reversed(ROWS[0].items()))]) != fingerprint(changed)


def test_every_kept_result_file_is_readable():
    for path in find_result_files([RESULTS]) if RESULTS.is_dir() else []:
        results = read_results(path)
        assert results["rows"], path
        assert all(row["suite"] == path.stem for row in results["rows"]), path


def test_merged_rows_are_one_suite():
    merged = merge_suites([ROWS[0], ROWS[0] | {"suite": "article"}])
    assert {row["suite"] for row in merged} == {"serving and article"}
    assert ROWS[0]["suite"] == "serving"


def test_the_readme_and_its_picture_are_drawn_from_the_files():
    """`make results` draws both from these two files; this fails when they or the README changed alone."""
    block = find_block((ROOT / "README.md").read_text())
    files = [RESULTS / "nvidia-h200" / f"{suite}.json" for suite in ("article", "serving")]
    results = [read_results(file) for file in files]
    rows = merge_suites([row for one in results for row in one["rows"]])
    assert block is not None, "README.md must have a marked block for the results"
    picture = re.search(r"!\[.*\]\((.*)\)", block)
    assert picture is not None, "the block must link its picture"
    assert block == render_block(rows, merge_environments([x["environment"] for x in results]), picture[1])
    assert fingerprint(rows) in (ROOT / picture[1]).read_text()


def test_quantised_caches_in_the_documents_are_those_of_the_file():
    """`make results` draws docs/performance.md's table and picture where the suite was measured; before, both lack."""
    path = ROOT / "docs" / "performance.md"
    block, file = find_block(path.read_text()), RESULTS / "nvidia-h200" / "quantised.json"
    assert block is not None, f"{path} must have a marked block for the results"
    if not file.exists():
        assert block.split() == [*BEGIN.split(), *END.split()]
        return
    results = read_results(file)
    picture = re.search(r"!\[.*\]\((.*)\)", block)
    assert picture is not None, "the block must link its picture"
    assert block == render_block(results["rows"], results["environment"], picture[1])
    assert fingerprint(results["rows"]) in (path.parent / picture[1]).read_text()
