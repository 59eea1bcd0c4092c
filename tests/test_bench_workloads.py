"""Shapes, cases and suites: data, so the tests are about what is in them and what is refused."""

from __future__ import annotations

import json
import math

import pytest
import torch

from flash_decoding.bench.workloads import DENSE, RAGGED, SUITES, Case, Options, Shape, parse_shape, select_cases

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
    for cases in SUITES.values():
        for case in cases:
            assert Case.from_json(json.loads(json.dumps(case.to_json()))) == case


def test_ragged_batches_are_those_that_peers_were_measured_on_before():
    """902, 381 and 333 MB: lengths and page orders drawn in turn from one seed."""
    generator = torch.Generator().manual_seed(0)
    for (least, most), (longest, lens), megabytes in zip(
        ((256, 16384), (16, 4096), (1000, 60000)), RAGGED, (902, 381, 333), strict=True
    ):
        assert most == longest
        low, high = math.log(least), math.log(most)
        drawn = (torch.rand(len(lens), generator=generator) * (high - low) + low).exp()
        assert max(abs(a - b) for a, b in zip(drawn.tolist(), lens, strict=True)) < 1.01  # exp() differs by machine
        torch.randperm(sum(-(-keys // 16) for keys in lens), generator=generator)
        (case,) = [case for case in SUITES["ragged"] if case.kv_lens == lens]
        assert round(case.kv_bytes / 1e6) == megabytes
        assert (case.shape.kv_len, case.options.page_size) == (most, 16)


def test_options_are_compared_with_a_case_of_the_suite():
    cases = {case.name: case for case in SUITES["options"]}
    compared = [case for case in cases.values() if case.baseline is not None]
    assert len(compared) == 6
    for case in compared:
        assert cases[case.baseline].options == DENSE
        # The same bytes to read, but for the few keys that a window has besides.
        assert case.kv_bytes == pytest.approx(cases[case.baseline].kv_bytes, rel=1e-3)


def test_bytes_of_paged_ragged_and_windowed_caches():
    shape, per_key = Shape(2, 8, 4, 1000, 64), 2 * 4 * 64 * 2
    ragged = Case("x", "x", shape, "bfloat16", options=Options(page_size=16, kv_lens=(17, 1000)))
    assert ragged.kv_bytes == 1017 * per_key
    assert ragged.cache_shape == (2 + 63, 4, 16, 64)
    assert ragged.cache_bytes == 65 * 16 * per_key
    window = Case("x", "x", shape, "bfloat16", options=Options(q_len=4, window=100))
    assert window.kv_bytes == 2 * 104 * per_key
    assert window.cache_bytes == 2 * 1000 * per_key
    short = Case("x", "x", shape, "bfloat16", options=Options(page_size=1, kv_lens=(50, 200), window=100))
    assert short.kv_bytes == (50 + 101) * per_key


# Bytes of 128 elements and of their scales: a float32 per token, a float16 per group.
ROW_BYTES = {None: 256, "fp8": 128, "fp8:token": 132, "int8": 132, "int8:tensor": 128, "int4": 68}


def test_quantised_caches_are_those_of_the_anchors_and_the_ragged_ones():
    cases = SUITES["quantised"]
    dense, paged = ([case for case in cases if (case.options == DENSE) == plain] for plain in (True, False))
    assert {sizes(case) for case in dense} == {
        (2, 8, 8, 65536, 128), (16, 32, 8, 8192, 128), (1, 32, 8, 131072, 128), (1, 32, 8, 8192, 128)
    }  # fmt: skip
    assert {case.kv_format for case in dense} == set(ROW_BYTES)
    assert len(dense) == 4 * len(ROW_BYTES)
    assert {(case.kv_lens, case.options.page_size, case.kv_format) for case in paged} == {
        (lens, page_size, kv_format) for _, lens in RAGGED for page_size in (16, 64) for kv_format in (None, "fp8")
    }
    for case in cases:
        keys, once = 8 * sum(case.kv_lens), 4 * (case.form is not None and case.form.scale == "tensor")
        assert case.kv_bytes == 2 * (keys * ROW_BYTES[case.kv_format] + once)
        assert case.cache_bytes >= case.kv_bytes


def test_quantised_caches_are_compared_with_the_same_cache_in_16_bits():
    cases = {case.name: case for case in SUITES["quantised"]}
    for case in cases.values():
        assert (case.kv_format is None) == case.ours_only == (case.baseline is None)
        if case.baseline is not None:
            plain = cases[case.baseline]
            assert (plain.kv_format, plain.shape, plain.options) == (None, case.shape, case.options)
            assert (plain.kv_dtype, case.kv_dtype) == ("bfloat16", str(case.form))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Case("x", "x", Shape(1, 2, 1, 64, 96), "float16", kv_format="int4"),
         "kv_format must have a group that divides head_dim 96, got 'int4'"),
        (lambda: Case("x", "x", Shape(1, 2, 1, 64, 64), "float16", kv_format="int3"),
         "kv_format must name one format of keys and of values, as 'fp8' or 'int4:group32', got 'int3'"),
        (lambda: Case("x", "x", Shape(1, 2, 1, 64, 64), "float16", kv_format="int8:channel"),
         "kv_format must name one format of keys and of values"),
        (lambda: Options(page_size=0), "page_size must be at least 1, got 0"),
        (lambda: Options(kv_lens=(5, 5)), "kv_lens must be given with a page_size, got none"),
        (lambda: Case("x", "x", Shape(2, 2, 1, 64, 16), "float32", options=Options(page_size=4, kv_lens=(5,))),
         "kv_lens must be 2 lengths from 1 to 64, got 1 from 5 to 5"),
        (lambda: Case("x", "x", Shape(2, 2, 1, 64, 16), "float32", options=Options(page_size=4, kv_lens=(5, 65))),
         "kv_lens must be 2 lengths from 1 to 64, got 2 from 5 to 65"),
    ],
)  # fmt: skip
def test_bad_options_are_named(make, message: str):
    with pytest.raises(ValueError, match=message):
        make()


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
    assert {case.suite for case in select_cases(["all"], [], None, "cuda")} == set(SUITES) - {"cpu"}


def test_select_with_a_dtype_measures_each_shape_once():
    cases = select_cases(["cpu"], ["1,2,1,64,16"], "float32", "cpu")
    assert {case.dtype for case in cases} == {"float32"}
    assert len(cases) == len({sizes(case) for case in SUITES["cpu"]}) + 1
    assert cases[-1].suite == "shape"


def test_select_with_a_dtype_keeps_the_options():
    for suite in ("ragged", "options", "quantised"):
        cases = select_cases([suite], [], "float16", "cuda")
        assert {case.dtype for case in cases} == {"float16"}
        assert [(c.name, c.options, c.baseline, c.kv_format) for c in cases] == [
            (c.name, c.options, c.baseline, c.kv_format) for c in SUITES[suite]
        ]


def test_given_shapes_are_quantised_where_asked():
    (case,) = select_cases([], ["1,2,1,64,64"], None, "cpu", "int8:head")
    assert (case.name, case.dtype, case.kv_dtype) == ("b1-h2x1-n64-d64-int8:head", "float32", "int8:head")


@pytest.mark.parametrize(
    ("suites", "dtype", "message"),
    [(["nope"], None, "suite must be one of article"), (["cpu"], "int8", "dtype must be one of bfloat16")],
)
def test_unknown_names_are_refused(suites: list[str], dtype: str | None, message: str):
    with pytest.raises(ValueError, match=message):
        select_cases(suites, [], dtype, "cpu")
