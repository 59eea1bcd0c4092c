"""Two result files of the same suite side by side: which medians a second run did not repeat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table

from flash_decoding.bench.peers import label_of
from flash_decoding.bench.results import OK, Row, time_us
from flash_decoding.bench.tables import microseconds, shape_text

# Two runs should agree within this share; below so many µs, clocks and launches alone move a median by more.
AGREEMENT, MIN_US = 0.03, 50.0


@dataclass(frozen=True, slots=True)
class Pair:
    """One peer on one case, as each file has it."""

    row: Row
    us: float
    other_us: float

    @property
    def apart(self) -> float:
        """How much longer the slower one takes, as a share of the faster one."""
        return max(self.us, self.other_us) / min(self.us, self.other_us) - 1

    @property
    def name(self) -> str:
        return f"{self.row['suite']} {shape_text(self.row)}, {label_of(self.row['impl'])}"


def pair_rows(rows: Sequence[Row], others: Sequence[Row]) -> list[Pair]:
    """The peers and cases that both files have a time for, the furthest apart first."""
    times = {_key(row): time_us(row) for row in others if row["status"] == OK}
    pairs = []
    for row in rows:
        us, other_us = time_us(row), times.get(_key(row))
        if row["status"] == OK and us and other_us:
            pairs.append(Pair(row, us, other_us))
    return sorted(pairs, key=lambda pair: pair.apart, reverse=True)


def _key(row: Row) -> tuple[str, str, str, str]:
    return row["suite"], row["case"], row["dtype"], row["impl"]


def long_enough(pairs: Sequence[Pair]) -> list[Pair]:
    """The pairs with a time above MIN_US."""
    return [pair for pair in pairs if max(pair.us, pair.other_us) > MIN_US]


def comparison_table(pairs: Sequence[Pair]) -> Table:
    """The long enough pairs that are further apart than two runs should be."""
    title = f"medians that differ by more than {AGREEMENT:.0%} above {MIN_US:.0f} µs"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("B, Hq/Hkv, N, D, peer", overflow="fold")
    for name in ("µs", "µs compared", "apart"):
        table.add_column(name, justify="right", no_wrap=True)
    for pair in long_enough(pairs):
        if pair.apart > AGREEMENT:
            table.add_row(pair.name, microseconds(pair.us), microseconds(pair.other_us), f"{pair.apart:.1%}")
    return table


def comparison_line(pairs: Sequence[Pair]) -> str:
    """How many rows were compared and the largest difference."""
    judged = long_enough(pairs)
    counts = f"{len(pairs)} rows in both files, {len(judged)} above {MIN_US:.0f} µs"
    if not judged:
        return f"{counts}."
    worst = judged[0]
    times = f"{microseconds(worst.us)} and {microseconds(worst.other_us)} µs"
    return f"{counts}; the largest difference of these is {worst.apart:.1%}: {worst.name}, {times}."
