"""Shapes, cases and suites: data, so the tests are about what is in them and what is refused."""

from __future__ import annotations

import pytest

from flash_decoding.bench.workloads import SUITES, Case, Shape, parse_shape, select_cases

# The twelve dense shapes that peers were measured on before: B, Hq, Hkv, N, D.
ANCHORS = {
    (2, 8, 8, 65536, 64), (2, 8, 8, 65536, 128), (2, 8, 8, 8000, 64), (1, 8, 8, 512, 64), (1, 32, 8, 1024, 128),
    (1, 32, 8, 8192, 128), (1, 32, 8, 131072, 128), (16, 32, 8, 8192, 128), (64, 32, 8, 4096, 128),
    (1, 8, 1, 32768, 128), (8, 28, 4, 8192, 128), (4, 64, 8, 16384, 64),
}  # fmt: skip


def sizes(case: Case) -> tuple[int, ...]:
    s = case.shape
    return s.batch, s.heads_q, s.heads_kv, s.kv_len, s.head_dim


def test_article_and_serving_hold_the_anchors():
    measured = {sizes(case) for suite in ("article", "serving") for case in SUITES[suite]}
    assert measured >= ANCHORS


def test_names_are_unique_within_a_suite():
    for cases in SUITES.values():
        assert len({case.name for case in cases}) == len(cases)


def test_kv_bytes_count_keys_and_values_once():
    case = Case("x", "x", Shape(2, 8, 4, 1000, 64), "bfloat16")
    assert case.kv_bytes == 2 * 2 * 4 * 1000 * 64 * 2


def test_case_survives_json():
    for case in SUITES["cpu"]:
        assert Case.from_json(case.to_json()) == case


def test_parse_shape():
    assert parse_shape("1, 32,8,8192,128") == Shape(1, 32, 8, 8192, 128)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1,2,3", "shape must be five whole numbers B,Hq,Hkv,N,D, got '1,2,3'"),
        ("1,8,2,-5,64", "shape must be five whole numbers"),
        ("1,8,2,x,64", "shape must be five whole numbers"),
        ("1,6,4,100,64", "heads_q must be a multiple of heads_kv, got 6 and 4"),
        ("0,8,2,100,64", "batch must be at least 1, got 0"),
    ],
)
def test_bad_shapes_are_named(text: str, message: str):
    with pytest.raises(ValueError, match=message):
        parse_shape(text)


def test_select_all_takes_the_suites_of_the_device():
    assert {case.suite for case in select_cases(["all"], [], None, "cpu")} == {"cpu"}
    assert {case.suite for case in select_cases(["all"], [], None, "cuda")} == {"article", "serving", "latency"}


def test_select_with_a_dtype_measures_each_shape_once():
    cases = select_cases(["cpu"], ["1,2,1,64,16"], "float32", "cpu")
    assert {case.dtype for case in cases} == {"float32"}
    assert len(cases) == len({sizes(case) for case in SUITES["cpu"]}) + 1
    assert cases[-1].suite == "shape"


@pytest.mark.parametrize(
    ("suites", "dtype", "message"),
    [(["nope"], None, "suite must be one of article"), (["cpu"], "int8", "dtype must be one of bfloat16")],
)
def test_unknown_names_are_refused(suites: list[str], dtype: str | None, message: str):
    with pytest.raises(ValueError, match=message):
        select_cases(suites, [], dtype, "cpu")
