"""The pictures are drawn, hold what they should, and come out the same twice."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from flash_decoding.bench.plots import (
    RooflinePoint,
    over_floor_figure,
    roofline_figure,
    save,
    schedule_figure,
    suite_figure,
)
from flash_decoding.bench.results import empty_row
from flash_decoding.bench.roofline import Ceilings
from flash_decoding.bench.workloads import Case, Options, Shape
from flash_decoding.cost_model import Machine, Sizes, predict


def make_rows():
    rows = []
    for kv_len, floor in ((65536, 100.0), (512, 2.0), (8192, 10.0)):
        case = Case("serving", f"n{kv_len}", Shape(1, 8, 8, kv_len, 128), "bfloat16")
        for impl, ratio in (
            ("flash_decoding", 1.1),
            ("sdpa", 1.5),
            ("fa3", 8.0 if kv_len == 512 else 2.0),
            ("sdpa_math", 30),
        ):
            rows.append(empty_row(case, impl, "ok") | {"us_graph": ratio * floor, "read_floor_us": floor})
        rows.append(empty_row(case, "xqa", "error: no"))
    return rows


def texts(figure) -> str:
    from matplotlib.text import Text

    return "\n".join(text.get_text() for text in figure.findobj(Text))


def test_quantised_caches_are_bars_beside_the_plain_one():
    plain = Case("quantised", "p", Shape(1, 32, 8, 8192, 128), "bfloat16", ours_only=True)
    formats = [
        replace(plain, name=name, kv_format=name, baseline=baseline, ours_only=False)
        for name, baseline in (("fp8", "p"), ("int4", "p"), ("int8", "lost"))
    ]
    measured = [(plain, "flash_decoding", 20.0), (formats[0], "xqa", 60.0), (formats[0], "flash_decoding", 11.0),
                (formats[0], "fa3", 18.0), (formats[0], "fa3_tuned", 16.0), (formats[1], "flash_decoding", 7.0),
                (formats[2], "flash_decoding", 9.0)]  # fmt: skip
    rows = [empty_row(case, impl, "ok") | {"us_graph": us, "read_floor_us": 10.0} for case, impl, us in measured]
    figure = suite_figure([*rows, empty_row(formats[0], "flashinfer", "error: no")], "quantised, a GPU")
    (axes,) = figure.axes
    names = ["ours, fp8_e4m3:tensor", "ours, int4:group64", "FlashAttention-3, fp8_e4m3:tensor", "XQA, fp8_e4m3:tensor"]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == names
    # Of each library the faster call; what is too high ends at the edge and says how high it is.
    assert [bar.get_height() for bar in axes.patches] == pytest.approx([0.55, 0.35, 0.8, 1.6])
    assert "3.0" in texts(figure)
    assert [line.get_ydata()[0] for line in axes.lines] == pytest.approx([0.5] * 4 + [1.0])
    assert (
        over_floor_figure(make_rows(), "x").axes[0].get_ylabel() == suite_figure(make_rows(), "x").axes[0].get_ylabel()
    )


def test_over_floor_orders_by_bytes_and_leaves_out_what_is_far_away():
    figure = over_floor_figure(make_rows(), "serving, a GPU")
    (axes,) = figure.axes
    labels = [label.get_text().splitlines()[0] for label in axes.get_xticklabels()]
    assert labels == ["2.1 MB", "34 MB", "268 MB"]
    lines = {line.get_label(): list(line.get_ydata()) for line in axes.lines}
    assert lines["flash-decoding"] == pytest.approx([1.1] * 3)
    # Too high for the picture: no part of the line, but an open marker at the upper edge.
    assert lines["FlashAttention-3"] == pytest.approx([math.nan, 2.0, 2.0], nan_ok=True)
    (above,) = [line for line in axes.lines if line.get_markerfacecolor() == "white"]
    assert (list(above.get_xdata()), list(above.get_ydata()), above.get_linestyle()) == ([0], [6.0], "None")
    assert "Open markers at the upper edge: more than 6 times the floor" in texts(figure)
    assert "SDPA math" not in lines
    assert "XQA" not in lines
    assert "Not shown, more than 6 times the floor everywhere: SDPA math" in texts(figure)


def test_labels_say_what_is_unusual_about_a_case():
    options = Options(q_len=2, page_size=16, kv_lens=(100, 900), window=50)
    case = Case("options", "x", Shape(2, 8, 8, 1000, 128), "bfloat16", options=options)
    rows = [empty_row(case, "flash_decoding", "ok") | {"us_graph": 1.1, "read_floor_us": 1.0}]
    (axes,) = over_floor_figure(rows, "options").axes
    (label,) = axes.get_xticklabels()
    assert label.get_text().splitlines() == [
        "0.4 MB", "B 2", "8/8", "100–900", "D 128", "Lq 2", "page 16", "window 50",
    ]  # fmt: skip


def test_cpu_rows_may_be_far_from_the_floor():
    case = Case("cpu", "c", Shape(1, 8, 8, 512, 64), "float32", "cpu")
    rows = [
        empty_row(case, impl, "ok") | {"us_eager": us, "read_floor_us": 10.0}
        for impl, us in (("flash_decoding", 9.0), ("sdpa", 300.0))
    ]
    (axes,) = over_floor_figure(rows, "cpu").axes
    low, high = axes.get_ylim()
    assert low < 0.9
    assert high > 30


def test_the_same_rows_give_the_same_files(tmp_path: Path):
    first = save(over_floor_figure(make_rows(), "x"), tmp_path / "a.png")
    second = save(over_floor_figure(make_rows(), "x"), tmp_path / "b")
    assert [path.name for path in first] == ["a.png", "a.svg"]
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes()


def test_schedule_shows_idle_processors_and_the_gain():
    sizes = Sizes(2, 8, 8, 65536, 128, 128, 2)
    machine = Machine(132, 3, 4560.0)
    figure = schedule_figure(predict(sizes, 1, 64, machine), predict(sizes, 16, 64, machine), 132, "processor", "title")
    text = texts(figure)
    assert "116 processors wait" in text
    assert "times as fast" in text
    above, below = figure.axes
    assert len(above.collections[0].get_paths()) == 16
    assert len(below.collections[0].get_paths()) == 256
    assert above.get_xlim() == below.get_xlim()


def test_schedule_counts_the_programs_of_all_tiles_of_rows():
    for row_tiles, headline in (
        (1, "Unsplit: 4 programs, one per sequence and KV head"),
        (3, "Unsplit: 12 programs, one per sequence, KV head and tile of query rows"),
    ):
        unsplit = predict(Sizes(2, 8, 2, 640, 64, 64, 2, row_tiles=row_tiles), 1, 64, Machine(24, 1, 258.0))
        assert headline in texts(schedule_figure(unsplit, unsplit, 24, "processor", "title"))


def test_schedule_of_a_full_device_says_so():
    sizes = Sizes(64, 8, 8, 128, 64, 64, 2)
    full = predict(sizes, 1, 64, Machine(24, 1, 258.0))
    text = texts(schedule_figure(full, full, 24, "processor", "title"))
    assert "one split is enough" in text
    assert "wait" not in text


def test_roofline_places_both_kernels_under_the_roof():
    ceilings = Ceilings(4580.0, 1 << 30, 790.0, "bfloat16")
    assert ceilings.ridge == pytest.approx(790e3 / 4580)
    assert ceilings.reachable_tflops(1.0) == pytest.approx(4.58)
    assert ceilings.reachable_tflops(1e6) == 790.0
    points = [RooflinePoint("chunk", "b1", 4.0, 11.0), RooflinePoint("reduce", "b1", 0.5, 0.03)]
    figure = roofline_figure(ceilings, points, "Roofline")
    (axes,) = figure.axes
    shown = {line.get_label(): (line.get_xdata()[0], line.get_ydata()[0]) for line in axes.lines[1:]}
    assert shown == {"chunk, b1": (4.0, 11.0), "reduce, b1": (0.5, 0.03)}
    assert "4,580 GB/s" in texts(figure)
