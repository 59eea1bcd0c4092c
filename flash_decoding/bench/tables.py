"""Result rows as tables: rich for the terminal, Markdown for documents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table

from flash_decoding.bench.peers import OURS, OURS_UNSPLIT, label_of
from flash_decoding.bench.results import OK, Row, over_floor, time_us


def group_by_case(rows: Sequence[Row]) -> dict[tuple[str, str], list[Row]]:
    """Rows by (suite, case) in order of first appearance."""
    grouped: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        grouped.setdefault((row["suite"], row["case"]), []).append(row)
    return grouped


def timed(rows: Sequence[Row]) -> list[Row]:
    """The rows with a time, fastest first."""
    return sorted((row for row in rows if row["status"] == OK), key=lambda row: time_us(row) or 0.0)


def shape_text(row: Row) -> str:
    """Batch, heads, keys and width as the documents write them, then what is unusual: 1, 32/8, 8192, 128, page 16."""
    return ", ".join([sizes_text(row), row["kv_dtype"]] if is_quantised(row) else [sizes_text(row)])


def sizes_text(row: Row) -> str:
    """The same without the format of a quantised cache."""
    s = row["shape"]
    parts = [f"{s['batch']}", f"{s['heads_q']}/{s['heads_kv']}", keys_text(row), f"{s['head_dim']}", *option_texts(row)]
    return ", ".join(parts if row["dtype"] == "bfloat16" else [*parts, row["dtype"]])


def is_quantised(row: Row) -> bool:
    """Whether K and V are stored as codes."""
    return row["kv_dtype"] != row["dtype"]


def keys_text(row: Row) -> str:
    """The keys per sequence, or from how many to how many."""
    lens = _options(row).get("kv_lens")
    return f"{row['shape']['kv_len']}" if lens is None else f"{min(lens)}–{max(lens)}"


def option_texts(row: Row) -> list[str]:
    """The options of a case besides its lengths, each in two words."""
    names = {"q_len": "Lq", "page_size": "page", "window": "window"}
    return [f"{words} {_options(row)[name]}" for name, words in names.items() if name in _options(row)]


def _options(row: Row) -> dict[str, Any]:
    return row.get("options", {})  # files of the first suites have none


def megabytes(row: Row) -> str:
    mb = row["bytes"] / 1e6
    return f"{mb:.0f}" if mb >= 10 else f"{mb:.1f}"


def microseconds(us: float | None) -> str:
    if us is None:
        return "–"
    return f"{us:.0f}" if us >= 1000 else f"{us:.1f}"


def detail_table(suite: str, rows: Sequence[Row]) -> Table:
    """Every peer of every case of a suite that ran, the fastest first."""
    table = Table(title=f"{suite}: every peer", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("B, Hq/Hkv, N, D / peer", overflow="fold")
    for name in ("µs", "±", "× floor", "GB/s", "plain µs", "host µs", "error"):
        table.add_column(name, justify="right", no_wrap=True)
    for case_rows in group_by_case(rows).values():
        first = case_rows[0]
        floor = find_floor(case_rows)
        speed = f"{first['bytes'] / floor / 1e3:.0f}" if floor else ""
        table.add_row(f"{shape_text(first)}: {megabytes(first)} MB", style="bold")
        table.add_row("  only reading it", microseconds(floor), "", "1.00", speed, style="dim")
        for row in timed(case_rows):
            table.add_row(*_detail_cells(row), style="bold green" if row["impl"] == OURS else None)
        table.add_section()
    return table


def _detail_cells(row: Row) -> list[str]:
    us, ratio = time_us(row) or 0.0, over_floor(row)
    spread = row["us_graph_spread"] if row["us_graph"] is not None else row.get("us_eager_spread")
    plan = f"plan {row['plan_us']:.0f} µs" if row.get("plan_us") else ""
    how = ", ".join(part for part in (row.get("variant"), plan) if part)
    return [
        f"  {label_of(row['impl'])}" + (f" ({how})" if how else ""),
        microseconds(us),
        microseconds(spread),
        f"{ratio:.2f}" if ratio else "–",
        f"{row['bytes'] / us / 1e3:.0f}",
        microseconds(row["us_eager"]),
        microseconds(row["us_host"]),
        f"{row['max_abs_err']:.0e}" if row["max_abs_err"] is not None else "–",
    ]


def find_floor(case_rows: Sequence[Row]) -> float | None:
    """The read floor of a case, from whichever row has it."""
    return next((row["read_floor_us"] for row in case_rows if row["read_floor_us"]), None)


def failure_lines(rows: Sequence[Row]) -> list[str]:
    """One line per reason why a peer has no time, with its shapes unless it is all that peers are measured on."""
    cases = sum(any(row["impl"] != OURS for row in case_rows) for case_rows in group_by_case(rows).values())
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row["status"] != OK:
            reasons.setdefault(f"{label_of(row['impl'])}: {row['status']}", []).append(shape_text(row))

    def where(shapes: list[str]) -> str:
        if len(shapes) >= cases:
            return ""
        return f" ({'; '.join(shapes)})" if len(shapes) <= NAMED_SHAPES else f" ({len(shapes)} of {cases} cases)"

    return [reason + where(shapes) for reason, shapes in reasons.items()]


SUMMARY = ("B, Hq/Hkv, N, D", "MB", "read floor", "ours", "× floor", "SDPA", "best other", "SDPA ÷ ours")
# Where every cache is paged, which SDPA cannot read.
PAGED_SUMMARY = (
    "B, Hq/Hkv, N, D", "MB", "read floor", "ours", "× floor", "GB/s", "FlashInfer", "FlashInfer ÷ ours", "plan",
    "best other",
)  # fmt: skip
# Where caches are quantised: each beside the same cache in 16 bits, and the libraries that read one of the formats.
QUANTISED_SUMMARY = (
    "B, Hq/Hkv, N, D", "K and V", "MB", "read floor", "ours", "× floor", "16-bit ÷ ours", "FlashAttention-3",
    "FlashInfer", "XQA", "best other ÷ ours",
)  # fmt: skip
# Whose faster call a column shows, where a library has more than one peer.
LIBRARIES = {"FlashAttention-3": ("fa3", "fa3_tuned"), "FlashInfer": ("flashinfer", "flashinfer_tc"), "XQA": ("xqa",)}
NAMED_SHAPES = 8  # in a list of those that a peer has no time for
FOLDED_SHAPE = 16  # columns of a terminal
WORDS = ("B, Hq/Hkv, N, D", "K and V", "best other", "compared with", "others' ratios")  # the columns that hold words


def summary_columns(rows: Sequence[Row]) -> tuple[str, ...]:
    """What the summary of a suite shows: SDPA beside ours, FlashInfer and the host time of its plan, or 16 bits."""
    if any(map(is_quantised, rows)):
        return QUANTISED_SUMMARY
    return PAGED_SUMMARY if all("page_size" in _options(row) for row in rows) else SUMMARY


def summary_lines(rows: Sequence[Row], columns: Sequence[str]) -> list[list[str]]:
    """The cells of every case."""
    by_case = group_by_case(rows)
    return [
        summary_cells(case_rows, columns, by_case.get((suite, case_rows[0].get("baseline") or ""), ()))
        for (suite, _), case_rows in by_case.items()
    ]


def summary_cells(
    case_rows: Sequence[Row], columns: Sequence[str] = SUMMARY, there: Sequence[Row] = ()
) -> list[str]:  # fmt: skip
    """One case in one line: the floor, ours, SDPA's default or a library's faster kernel, and the fastest other.

    Args:
        there: the rows of the case that this one is compared with.
    """
    first, floor = case_rows[0], find_floor(case_rows)
    ours, sdpa, ours_there = fastest(case_rows, OURS), fastest(case_rows, "sdpa"), fastest(there, OURS)
    fa3, flashinfer, xqa = (fastest(case_rows, *impls) for impls in LIBRARIES.values())
    other = next((row for row in timed(case_rows) if row["impl"] not in (OURS, OURS_UNSPLIT)), None)
    our_us, sdpa_us, flashinfer_us = (time_us(row) if row else None for row in (ours, sdpa, flashinfer))
    fa3_us, xqa_us, there_us, other_us = (time_us(row) if row else None for row in (fa3, xqa, ours_there, other))
    cells = {
        "B, Hq/Hkv, N, D": sizes_text(first) if "K and V" in columns else shape_text(first),
        "K and V": first["kv_dtype"],
        "MB": megabytes(first),
        "read floor": microseconds(floor),
        "ours": microseconds(our_us),
        "× floor": _ratio(our_us, floor),
        "GB/s": f"{first['bytes'] / our_us / 1e3:.0f}" if our_us else "–",
        "SDPA": microseconds(sdpa_us),
        "FlashInfer": microseconds(flashinfer_us),
        "plan": microseconds(flashinfer["plan_us"] if flashinfer else None),
        "FlashAttention-3": microseconds(fa3_us),
        "XQA": microseconds(xqa_us),
        "16-bit ÷ ours": _ratio(there_us, our_us),
        "best other ÷ ours": _ratio(other_us, our_us),
        "best other": f"{microseconds(other_us)} ({label_of(other['impl'])})" if other else "–",
        "SDPA ÷ ours": _ratio(sdpa_us, our_us),
        "FlashInfer ÷ ours": _ratio(flashinfer_us, our_us),
    }
    return [cells[name] for name in columns]


def fastest(case_rows: Sequence[Row], *impls: str) -> Row | None:
    """The row of the fastest of some peers."""
    return next((row for row in timed(case_rows) if row["impl"] in impls), None)


def _ratio(us: float | None, other_us: float | None) -> str:
    return f"{us / other_us:.2f}" if us and other_us else "–"


def summary_table(suite: str, rows: Sequence[Row]) -> Table:
    """A suite in one line per case, for a terminal of 80 columns."""
    columns = summary_columns(rows)
    if columns == PAGED_SUMMARY:  # some does not fit; the Markdown has it
        columns = tuple(name for name in columns if name not in ("× floor", "plan"))
    if columns == QUANTISED_SUMMARY:
        columns = tuple(name for name in columns if name not in ("read floor", "XQA", "best other ÷ ours"))
    cells = summary_lines(rows, columns)
    return _narrow_table(f"{suite}: µs per decode step", columns, cells, fold_shapes=any(map(_options, rows)))


def _narrow_table(title: str, columns: Sequence[str], cells: Sequence[Sequence[str]], fold_shapes: bool) -> Table:
    """Headings and names of libraries break between words, and so do shapes where they are long."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for at, name in enumerate(columns):
        heading, folds = (name, fold_shapes) if at == 0 else (_break(name), True)
        texts = [heading] * folds + [row[at] for row in cells]
        table.add_column(
            heading, justify="left" if name in WORDS else "right", overflow="fold", no_wrap=not folds,
            min_width=max(len(word) for text in texts for word in (text.split() if folds else [text])),
            max_width=FOLDED_SHAPE if at == 0 and folds else None,
        )  # fmt: skip
    for row in cells:
        table.add_row(*row[: len(columns)])
    return table


def _break(name: str) -> str:
    """A heading on two lines; that of FlashInfer's ratio stands beside its time and need not name it again."""
    if "÷" in name:
        return name.removeprefix("FlashInfer ").replace(" ÷", "\n÷")
    narrow = {"FlashInfer": "Flash-\nInfer", "FlashAttention-3": "FA3"}
    if name in narrow:
        return narrow[name]
    return name if name == "× floor" else name.replace(" ", "\n", 1)


def summary_markdown(rows: Sequence[Row]) -> str:
    """The summary as a Markdown table."""
    columns = summary_columns(rows)
    return _markdown(columns, summary_lines(rows, columns))


def _markdown(columns: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(columns) + " |", "|" + "".join("---|" if c in WORDS else "---:|" for c in columns)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in cells)])


RATIOS = ("B, Hq/Hkv, N, D", "compared with", "ours", "ours there", "ratio", "others' ratios")


def ratio_cells(rows: Sequence[Row]) -> list[list[str]]:
    """One line per case that is compared with another of its suite: what its options cost us, and cost the others.

    What quantised caches are compared with is in their summary.
    """
    cells = []
    by_case = group_by_case(rows)
    for (suite, _), case_rows in by_case.items():
        there = by_case.get((suite, case_rows[0].get("baseline") or ""))
        if there is None or is_quantised(case_rows[0]):
            continue
        times, times_there = ({row["impl"]: time_us(row) for row in timed(found)} for found in (case_rows, there))
        ratios = {impl: _ratio(us, times_there.get(impl)) for impl, us in times.items()}
        others = [impl for impl in ratios if impl in times_there and impl not in (OURS, OURS_UNSPLIT)]
        cells.append([
            shape_text(case_rows[0]), shape_text(there[0]), microseconds(times.get(OURS)),
            microseconds(times_there.get(OURS)), ratios.get(OURS, "–"),
            "; ".join(f"{label_of(impl)} {ratios[impl]}" for impl in others) or "–",
        ])  # fmt: skip
    return cells


def ratio_table(suite: str, rows: Sequence[Row]) -> Table | None:
    """The ratios for a terminal, or None where no case is compared with another."""
    cells = ratio_cells(rows)
    return _narrow_table(f"{suite}: what the options cost", RATIOS[:-1], cells, fold_shapes=True) if cells else None


def detail_markdown(rows: Sequence[Row]) -> str:
    """Shapes down, peers across: µs, ours in bold, a dash where a peer did not run; then the reasons."""
    impls = list(dict.fromkeys(row["impl"] for row in rows))
    impls = [impl for impl in impls if any(row["impl"] == impl and row["status"] == OK for row in rows)]
    heads = ["B, Hq/Hkv, N, D", "MB", "read floor", *map(label_of, impls)]
    lines = ["| " + " | ".join(heads) + " |", "|---|" + "---:|" * (len(heads) - 1)]
    for case_rows in group_by_case(rows).values():
        by_impl = {row["impl"]: row for row in case_rows}
        cells = summary_cells(case_rows, heads[:3])
        for impl in impls:
            row = by_impl.get(impl)
            text = microseconds(time_us(row)) if row is not None and row["status"] == OK else "–"
            cells.append(f"**{text}**" if impl == OURS else text)
        lines.append("| " + " | ".join(cells) + " |")
    failures = failure_lines(rows)
    if failures:
        lines += ["", "Not measured:", "", *(f"- {line}" for line in failures)]
    return "\n".join(lines)


def to_markdown(rows: Sequence[Row], environment: dict) -> str:
    """The tables of each suite, under a line that says where they were measured."""
    gpu, cpu = environment.get("gpu"), environment.get("cpu")
    parts = []
    for suite in dict.fromkeys(row["suite"] for row in rows):
        chosen = [row for row in rows if row["suite"] == suite]
        on_cpu = chosen[0].get("device") == "cpu"
        where = f"{cpu}, {environment.get('cpu_threads')} threads" if on_cpu else gpu
        versions = f"torch {environment.get('torch')}" + ("" if on_cpu else f", Triton {environment.get('triton')}")
        parts += [
            f"## {suite}",
            f"µs per decode step on {where}; {versions}; {environment.get('date', '')[:10]}.",
            summary_markdown(chosen),
            *([_markdown(RATIOS, ratio_cells(chosen))] if ratio_cells(chosen) else []),
            detail_markdown(chosen),
        ]
    return "\n\n".join(parts) + "\n"
