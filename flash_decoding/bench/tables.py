"""Result rows as tables: rich for the terminal, Markdown for documents."""

from __future__ import annotations

from collections.abc import Sequence

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
    """Batch, heads, keys and width as the documents write them: 1, 32/8, 8192, 128."""
    s = row["shape"]
    text = f"{s['batch']}, {s['heads_q']}/{s['heads_kv']}, {s['kv_len']}, {s['head_dim']}"
    return text if row["dtype"] == "bfloat16" else f"{text}, {row['dtype']}"


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
    """One line per reason why a peer has no time, with its shapes unless it is all of them."""
    cases = len(group_by_case(rows))
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row["status"] != OK:
            reasons.setdefault(f"{label_of(row['impl'])}: {row['status']}", []).append(shape_text(row))
    return [reason + ("" if len(shapes) == cases else f" ({'; '.join(shapes)})") for reason, shapes in reasons.items()]


SUMMARY = ("B, Hq/Hkv, N, D", "MB", "read floor", "ours", "× floor", "SDPA", "best other", "SDPA ÷ ours")


def summary_cells(case_rows: Sequence[Row]) -> list[str]:
    """One case in one line: the floor, ours, SDPA's default and the fastest of the others."""
    ran = timed(case_rows)
    ours = next((row for row in ran if row["impl"] == OURS), None)
    sdpa = next((row for row in ran if row["impl"] == "sdpa"), None)
    other = next((row for row in ran if row["impl"] not in (OURS, OURS_UNSPLIT)), None)
    our_us = time_us(ours) if ours else None
    sdpa_us = time_us(sdpa) if sdpa else None
    ratio = over_floor(ours) if ours else None
    first = case_rows[0]
    return [
        shape_text(first),
        megabytes(first),
        microseconds(find_floor(case_rows)),
        microseconds(our_us),
        f"{ratio:.2f}" if ratio else "–",
        microseconds(sdpa_us),
        f"{microseconds(time_us(other))} ({label_of(other['impl'])})" if other else "–",
        f"{sdpa_us / our_us:.2f}" if sdpa_us and our_us else "–",
    ]


def summary_table(suite: str, rows: Sequence[Row]) -> Table:
    """A suite in one line per case, for a terminal of 80 columns: names of the fastest others break between words."""
    table = Table(title=f"{suite}: µs per decode step", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    cells = [summary_cells(case_rows) for case_rows in group_by_case(rows).values()]
    for at, name in enumerate(SUMMARY):
        column = [name.partition(" ")[0], *(row[at] for row in cells)]
        words = column if at == 0 else [word for text in column for word in text.split()]
        table.add_column(
            name.replace(" ", "\n", 1) if at in (2, 6) else name.replace(" ÷", "\n÷"),
            justify="left" if at in (0, 6) else "right",
            min_width=max(len(word) for word in words), overflow="fold", no_wrap=at == 0,
        )  # fmt: skip
    for row in cells:
        table.add_row(*row)
    return table


def summary_markdown(rows: Sequence[Row]) -> str:
    """The summary as a Markdown table."""
    lines = ["| " + " | ".join(SUMMARY) + " |", "|---|" + "---:|" * (len(SUMMARY) - 3) + "---|---:|"]
    lines += ["| " + " | ".join(summary_cells(case_rows)) + " |" for case_rows in group_by_case(rows).values()]
    return "\n".join(lines)


def detail_markdown(rows: Sequence[Row]) -> str:
    """Shapes down, peers across: µs, ours in bold, a dash where a peer did not run; then the reasons."""
    impls = list(dict.fromkeys(row["impl"] for row in rows))
    impls = [impl for impl in impls if any(row["impl"] == impl and row["status"] == OK for row in rows)]
    heads = ["B, Hq/Hkv, N, D", "MB", "read floor", *map(label_of, impls)]
    lines = ["| " + " | ".join(heads) + " |", "|---|" + "---:|" * (len(heads) - 1)]
    for case_rows in group_by_case(rows).values():
        by_impl = {row["impl"]: row for row in case_rows}
        cells = [summary_cells(case_rows)[at] for at in range(3)]
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
    """Both tables of each suite, under a line that says where they were measured."""
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
            detail_markdown(chosen),
        ]
    return "\n\n".join(parts) + "\n"
