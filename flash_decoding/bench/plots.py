"""Result rows and plans as pictures, PNG and SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from flash_decoding.bench.peers import OURS, label_of
from flash_decoding.bench.results import OK, Row, over_floor, time_us
from flash_decoding.bench.tables import (
    LIBRARIES,
    fastest,
    group_by_case,
    is_quantised,
    keys_text,
    megabytes,
    option_texts,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from flash_decoding.bench.roofline import Ceilings
    from flash_decoding.cost_model import Prediction

INK, QUIET, GRID = "#1f2933", "#7b8794", "#e4e7eb"
OURS_COLOUR, IDLE_COLOUR, FLOOR_COLOUR = "#c2410c", "#e6eaee", "#3e4c59"
WORK_TONES = ("#f97316", "#ea580c")
PEER_COLOURS = {
    "flash_decoding_unsplit": "#f0a58a", "sdpa": "#2563eb", "sdpa_packed": "#60a5fa",
    "sdpa_flash": "#7c3aed", "sdpa_cudnn": "#0f172a",
    "fa3": "#059669", "fa3_tuned": "#34d399", "flashinfer": "#b45309", "flashinfer_tc": "#d97706",
    "xqa": "#be185d", "flash_attn2": "#65a30d", "xformers": "#475569", "sdpa_efficient": "#94a3b8",
    "sdpa_math": "#a8a29e", "flex_attention": "#78716c", "sdpa_repeat": "#7c3aed",
}  # fmt: skip
MARKERS = "os^Dv<>pPX*hd"
# Times over the floor that end the picture. A peer above them on every shape would only flatten the others; the
# picture says that it is left out.
TALLEST = {"cuda": 6.0, "cpu": 100.0}
# The bars of quantised caches end here, with their height above them.
TALLEST_SHARE = 1.6
LIBRARY_COLOURS = {"FlashAttention-3": "#059669", "FlashInfer": "#2563eb", "XQA": "#64748b"}
FORMAT_TONES = ("#9a3412", "#c2410c", "#ea580c", "#fb923c", "#fdba74")
TICKS = (0.5, 0.75, 1, 1.5, 2, 3, 4, 6, 10, 20, 30, 60, 100)


def new_figure(width: float, height: float, rows: int = 1, **options: Any) -> tuple[Figure, Any]:
    """A figure and its axes in the house style; needs no display."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "flash-decoding"  # the same rows give the same file
    matplotlib.rcParams["font.size"] = 10
    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, 1, **options)
    for one in axes if rows > 1 else [axes]:
        one.spines[["top", "right"]].set_visible(False)
        one.spines[["left", "bottom"]].set_color(QUIET)
        one.tick_params(colors=INK, which="both", length=0)
    return figure, axes


def save(figure: Figure, path: Path, made_from: str | None = None) -> list[Path]:
    """Write path.png and path.svg; a .png or .svg at the end of path is dropped first.

    Args:
        made_from: kept in the files' description, to tell later what they were drawn from.
    """
    stem = path.with_suffix("") if path.suffix in (".png", ".svg") else path
    stem.parent.mkdir(parents=True, exist_ok=True)
    written = [stem.with_name(stem.name + suffix) for suffix in (".png", ".svg")]
    figure.savefig(written[0], dpi=160, metadata={"Software": None, "Description": made_from})
    figure.savefig(written[1], metadata={"Date": None, "Description": made_from})
    return written


def suite_figure(rows: Sequence[Row], title: str) -> Figure:
    """The picture of a suite: over_floor_figure(), or quantised_figure() where caches are quantised."""
    return (quantised_figure if any(map(is_quantised, rows)) else over_floor_figure)(rows, title)


class Bar(NamedTuple):
    """A time and its read floor as shares of our own on the same cache in 16 bits."""

    name: str
    height: float
    floor: float


def quantised_figure(rows: Sequence[Row], title: str) -> Figure:
    """Times as shares of our own on the same cache in 16 bits: bars by shape, ours by format, then the other libraries.

    A short line on each bar is the read floor of its bytes.
    """
    groups = _share_bars(rows)
    names = sorted(
        dict.fromkeys(bar.name for bars in groups.values() for bar in bars),
        key=lambda name: not name.startswith("ours"),
    )
    colours = _bar_colours(names)
    figure, axes = new_figure(max(8.0, 0.2 * sum(map(len, groups.values())) + 4.2), 4.8)
    left, ticks = 0, []
    for bars in groups.values():
        for at, bar in enumerate(sorted(bars, key=lambda bar: names.index(bar.name)), left):
            _draw_bar(axes, at, bar, colours[bar.name])
        ticks.append(left + (len(bars) - 1) / 2)
        left += len(bars) + 1
    axes.axhline(1, color=QUIET, linewidth=1.2)
    axes.annotate("ours, 16 bits", (0, 1), (4, 4), xycoords=("axes fraction", "data"), textcoords="offset points",
                  ha="left", fontsize=8.5, color=QUIET)  # fmt: skip
    highest = max((bar.height for bars in groups.values() for bar in bars), default=0.0)
    axes.set_ylim(0, 1.06 * min(TALLEST_SHARE, max(highest, 1.1)))
    axes.yaxis.grid(True, color=GRID)
    axes.set_axisbelow(True)
    axes.set_xlim(-1.5, left - 0.5)
    axes.set_xticks(ticks, list(groups), fontsize=8)
    axes.set_ylabel("time, as a share of our own in 16 bits", color=INK)
    axes.set_title(title, loc="left", color=INK, fontweight="bold")
    handles, labels = axes.get_legend_handles_labels()
    found = dict(zip(labels, handles, strict=True))
    axes.legend([found[name] for name in names], names, frameon=False, fontsize=9, loc="upper left",
                bbox_to_anchor=(1.0, 1.0))  # fmt: skip
    figure.supxlabel("Dark lines: the time of only reading as many bytes.", fontsize=8, color=QUIET, x=0.01, ha="left")
    return figure


def _share_bars(rows: Sequence[Row]) -> dict[str, list[Bar]]:
    """The bars of each shape; none where our own time in 16 bits is missing."""
    by_case = group_by_case(rows)
    groups: dict[str, list[Bar]] = {}
    for (suite, _), case_rows in by_case.items():
        there = by_case.get((suite, case_rows[0].get("baseline") or ""), [])
        whole = fastest(there, OURS)
        for name, impls in {"ours": (OURS,), **LIBRARIES}.items():
            row = fastest(case_rows, *impls)
            if row is not None and whole is not None:
                us, floor, whole_us = (
                    time_us(row) or math.nan,
                    row["read_floor_us"] or math.nan,
                    time_us(whole) or math.nan,
                )
                bar = Bar(f"{name}, {row['kv_dtype']}", us / whole_us, floor / whole_us)
                groups.setdefault("\n".join(_shape_lines(row)), []).append(bar)
    return groups


def _draw_bar(axes: Any, at: int, bar: Bar, colour: str) -> None:
    axes.bar(at, min(bar.height, TALLEST_SHARE), width=0.86, color=colour, label=bar.name, zorder=3)
    if bar.height > TALLEST_SHARE:
        axes.annotate(f"{bar.height:.1f}", (at, TALLEST_SHARE), ha="center", va="bottom", fontsize=7, color=INK)
    axes.plot([at - 0.43, at + 0.43], [bar.floor, bar.floor], color=FLOOR_COLOUR, linewidth=1.5, zorder=4)


def _bar_colours(names: Sequence[str]) -> dict[str, str]:
    """Tones of our colour by format, and a colour of its own for each library."""
    tones = iter(FORMAT_TONES * len(names))
    return {name: LIBRARY_COLOURS.get(name.split(",")[0]) or next(tones) for name in names}


def over_floor_figure(rows: Sequence[Row], title: str) -> Figure:
    """Time over the read floor, shapes from small to large, one line per peer."""
    cases = sorted(group_by_case(rows).values(), key=lambda case_rows: case_rows[0]["bytes"])
    figure, axes = new_figure(max(8.0, 0.72 * len(cases) + 4.2), 5.2)
    lines: dict[str, list[float | None]] = {}
    for at, case_rows in enumerate(cases):
        for row in case_rows:
            ratio = over_floor(row) if row["status"] == OK else None
            lines.setdefault(row["impl"], [None] * len(cases))[at] = ratio
    dtypes = {row["dtype"] for row in rows}
    tallest = TALLEST[rows[0].get("device", "cuda")]
    left_out = [impl for impl, ratios in lines.items() if impl != OURS and _least(ratios) > tallest]
    shown = [impl for impl, ratios in lines.items() if any(ratios) and impl not in left_out]
    for number, impl in enumerate(sorted(shown, key=lambda impl: impl == OURS)):
        _draw_line(axes, impl, lines[impl], MARKERS[number % len(MARKERS)], tallest)

    axes.axhline(1, color=FLOOR_COLOUR, linewidth=1.5)
    axes.annotate("only reading the bytes", (1, 1), (-4, -5), xycoords=("axes fraction", "data"),
                  textcoords="offset points", va="top", ha="right", fontsize=8.5, color=FLOOR_COLOUR)  # fmt: skip
    drawn = [ratio for impl in shown for ratio in lines[impl] if ratio is not None]
    top = min(tallest, 1.1 * max(drawn, default=2.0))
    bottom = min(top**-0.09, 0.93 * min(drawn, default=1.0))  # room for the words under the floor's line
    axes.set_yscale("log")
    axes.set_ylim(bottom, top)
    ticks = [tick for tick in TICKS if bottom < tick <= top]
    axes.set_yticks(ticks, [f"{tick:g}×" for tick in ticks])
    axes.minorticks_off()
    axes.yaxis.grid(True, color=GRID)
    axes.set_axisbelow(True)
    axes.set_xlim(-0.5, len(cases) - 0.5)
    axes.set_xticks(range(len(cases)), [_case_label(case_rows[0], len(dtypes) > 1) for case_rows in cases], fontsize=8)
    axes.set_xlabel("decode steps, from few bytes of K and V to many", color=INK)
    axes.set_ylabel("time over read floor", color=INK)
    axes.set_title(title, loc="left", color=INK, fontweight="bold")
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    notes = []
    if any(ratio > tallest for impl in shown for ratio in lines[impl] if ratio is not None):
        notes.append(f"Open markers at the upper edge: more than {tallest:.0f} times the floor.")
    if left_out:
        names = ", ".join(label_of(impl) for impl in left_out)
        notes.append(f"Not shown, more than {tallest:.0f} times the floor everywhere: {names}")
    if notes:
        figure.supxlabel("   ".join(notes), fontsize=8, color=QUIET, x=0.01, ha="left")
    return figure


def _draw_line(axes: Any, impl: str, ratios: list[float | None], marker: str, tallest: float) -> None:
    """A peer's line, broken where it did not run or is too high; the latter is an open marker at the upper edge."""
    ours = impl == OURS
    style = {
        "color": OURS_COLOUR if ours else PEER_COLOURS.get(impl, QUIET), "marker": marker, "clip_on": False,
        "markersize": 7 if ours or impl == "sdpa" else 4.5, "alpha": 1.0 if ours else 0.8, "zorder": 5 if ours else 3,
    }  # fmt: skip
    heights = [ratio if ratio is not None and ratio <= tallest else math.nan for ratio in ratios]
    # Where it runs the same kernel as SDPA, both lines must be seen.
    dashes = (0, (2, 2)) if impl == "sdpa_cudnn" else "-"
    axes.plot(range(len(ratios)), heights, label=label_of(impl), linestyle=dashes,
              linewidth=2.8 if ours else 1.1, **style)  # fmt: skip
    above = [at for at, ratio in enumerate(ratios) if ratio is not None and ratio > tallest]
    if above:
        axes.plot(above, [tallest] * len(above), linestyle="", markerfacecolor="white", **style)


def _least(ratios: list[float | None]) -> float:
    return min((ratio for ratio in ratios if ratio is not None), default=0.0)


def _case_label(row: Row, with_dtype: bool) -> str:
    lines = [f"{megabytes(row)} MB", *_shape_lines(row)]
    return "\n".join([*lines, row["dtype"]] if with_dtype else lines)


def _shape_lines(row: Row) -> list[str]:
    s = row["shape"]
    return [
        f"B {s['batch']}", f"{s['heads_q']}/{s['heads_kv']}", keys_text(row), f"D {s['head_dim']}", *option_texts(row),
    ]  # fmt: skip


def schedule_figure(unsplit: Prediction, split: Prediction, processors: int, processor: str, title: str) -> Figure:
    """Every processor as a line over time: one program per problem above, the same problems split below.

    Args:
        unsplit, split: predictions for the same sizes.
        processor: what to call one, in the singular.
    """
    figure, (above, below) = new_figure(9.0, 6.4, rows=2, sharex=True)
    end = max(unsplit.total_us, split.total_us)
    for axes, prediction in ((above, unsplit), (below, split)):
        _draw_schedule(axes, prediction, processors, processor)
        axes.set_xlim(0, end)
    problems = len({span.problem for span in unsplit.spans})
    each = "sequence and KV head" if unsplit.programs == problems else "sequence, KV head and tile of query rows"
    _headline(above, f"Unsplit: {unsplit.programs} programs, one per {each}", unsplit, processors, processor)
    if split.num_splits > 1:
        what = f"Split over the keys: {split.num_splits} programs in place of each"
        _headline(below, what, split, processors, processor)
        above.tick_params(labelbottom=False)
        if split.total_us < 0.75 * end:
            below.annotate(
                f"done, {unsplit.total_us / split.total_us:.1f} times as fast", (split.total_us, processors / 2),
                (14, 0), textcoords="offset points", va="center", fontsize=13, fontweight="bold", color=OURS_COLOUR,
            )  # fmt: skip
    else:
        _headline(below, "As the library runs it: one split is enough", split, processors, processor)
    below.set_xlabel("time in µs (predicted)", color=INK)
    _legend(figure, split.num_splits > 1)
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold", color=INK)
    return figure


def _headline(axes: Any, what: str, prediction: Prediction, processors: int, processor: str) -> None:
    result = f"{prediction.working_processors} of {processors} {processor}s work, {prediction.total_us:,.0f} µs"
    axes.set_title(what, loc="left", fontsize=10.5, color=INK)
    axes.set_title(result, loc="right", fontsize=10.5, color=INK, fontweight="bold")


def _draw_schedule(axes: Any, prediction: Prediction, processors: int, processor: str) -> None:
    """Idle processors in grey, programs in two tones by turns, the reduce kernel last."""
    from matplotlib.collections import PolyCollection
    from matplotlib.patches import Rectangle

    end = prediction.total_us
    axes.add_patch(Rectangle((0, 0), end, processors, color=IDLE_COLOUR, linewidth=0))
    lanes = 1 + max((span.lane for span in prediction.spans), default=0)
    before = prediction.chunk_us - max((span.stop for span in prediction.spans), default=0.0)
    edge = 0.002 * end
    gap = 0.1 if processors <= 40 else 0.0
    boxes, tones = [], []
    for span in prediction.spans:
        left, right = before + span.start + edge, before + span.stop
        top = processors - span.processor - span.lane / lanes
        low, high = top - (1 - gap) / lanes, top - gap / lanes
        boxes.append([(left, low), (right, low), (right, high), (left, high)])
        tones.append(WORK_TONES[span.problem % len(WORK_TONES)])
    axes.add_collection(PolyCollection(boxes, facecolors=tones, edgecolors="none", antialiaseds=processors <= 40))
    if prediction.reduce_us:
        merging = (prediction.chunk_us, 0), prediction.reduce_us, processors
        axes.add_patch(Rectangle(*merging, color=FLOOR_COLOUR, linewidth=0))
    idle = processors - prediction.working_processors
    if idle > 0.15 * processors:
        axes.text(end / 2, idle / 2, f"{idle} {processor}s wait", ha="center", va="center", fontsize=13, color=QUIET)
    axes.set_ylim(0, processors)
    axes.set_yticks([processors - 0.5, 0.5], ["1", str(processors)])
    axes.set_ylabel(f"{processor}s", color=INK)


def _legend(figure: Figure, merges: bool) -> None:
    from matplotlib.patches import Patch

    entries = [Patch(color=WORK_TONES[0], label="reading keys and values"), Patch(color=IDLE_COLOUR, label="idle")]
    if merges:
        entries.insert(1, Patch(color=FLOOR_COLOUR, label="merging the splits"))
    figure.legend(handles=entries, loc="outside lower right", ncols=3, frameon=False, fontsize=9)


class RooflinePoint(NamedTuple):
    """A kernel on the roofline."""

    kernel: str
    case: str
    intensity: float  # FLOPs per byte
    tflops: float


def roofline_figure(ceilings: Ceilings, points: Sequence[RooflinePoint], title: str) -> Figure:
    """The measured roof, and where each kernel lies under it."""
    figure, axes = new_figure(8.4, 5.2)
    left = min(0.1, *(point.intensity / 2 for point in points))
    right = 4 * ceilings.ridge
    corners = [left, ceilings.ridge, right]
    roof = [ceilings.reachable_tflops(intensity) for intensity in corners]
    axes.plot(corners, roof, color=FLOOR_COLOUR, linewidth=2.2)
    axes.fill_between(corners, roof, [1e-9] * 3, color=IDLE_COLOUR, alpha=0.55, linewidth=0)
    middle = (left * ceilings.ridge) ** 0.5
    axes.annotate(
        f"reading memory: {ceilings.read_gb_per_s:,.0f} GB/s", (middle, ceilings.reachable_tflops(middle)), (-8, 8),
        textcoords="offset points", ha="right", va="bottom", color=INK,
    )  # fmt: skip
    axes.annotate(
        f"multiplying matrices: {ceilings.matrix_tflops:,.0f} TFLOP/s", (right, ceilings.matrix_tflops), (-4, 6),
        textcoords="offset points", ha="right", va="bottom", color=INK,
    )  # fmt: skip
    colours = {"chunk": OURS_COLOUR, "reduce": "#2563eb"}
    for number, case in enumerate(dict.fromkeys(point.case for point in points)):
        for point in points:
            if point.case == case:
                axes.plot(
                    point.intensity, point.tflops, MARKERS[number % len(MARKERS)], markersize=8,
                    color=colours[point.kernel], markeredgecolor="white", label=f"{point.kernel}, {case}", linestyle="",
                )  # fmt: skip
    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlim(left, right)
    axes.set_ylim(min(point.tflops for point in points) / 3, 3 * ceilings.matrix_tflops)
    axes.grid(True, color=GRID)
    axes.set_axisbelow(True)
    axes.set_xlabel("FLOPs per byte of memory moved", color=INK)
    axes.set_ylabel("TFLOP/s", color=INK)
    axes.set_title(title, loc="left", color=INK, fontweight="bold")
    axes.legend(frameon=False, fontsize=9, loc="lower right")
    return figure
