"""What `flash-decoding bench --suite distributed` does in each process that torchrun starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rich import box
from rich.table import Table

from flash_decoding.bench import distributed
from flash_decoding.bench.results import Row
from flash_decoding.bench.timing import Method
from flash_decoding.bench.workloads import Case, parse_shape
from flash_decoding.cli import fail


def choose(shapes: Sequence[str] | None, dtype: str | None, device: str) -> list[Case]:
    """The cases, the same on every rank."""
    import torch

    if not distributed.under_torchrun():
        fail(
            "--suite distributed must be started by torchrun: "
            "torchrun --nproc-per-node 2 -m flash_decoding bench --suite distributed"
        )
    gpus = torch.cuda.device_count()
    if device == "auto":
        device = "cuda" if gpus else "cpu"
    if device == "cuda" and not gpus:
        fail(f"--device must be one that PyTorch can use, got {device!r}, and torch {torch.__version__} finds no GPU")
    return distributed.choose_cases([parse_shape(text) for text in shapes or []], dtype, device)


def measure(
    cases: list[Case], method: Method, begin: Callable[[dict[str, Any]], None], add: Callable[[Row], None]
) -> bool:
    """Measure on every rank; rank 0, for which this is True, is told of the environment and of each row."""
    with distributed.process_group(cases[0].device) as rank:
        for kind, value in distributed.run(cases, method):
            if rank == 0:
                (begin if kind == "environment" else add)(value)
    return rank == 0


def rows_table(rows: Sequence[Row]) -> Table:
    """One line per shape and number of ranks."""
    table = Table(title="distributed: one cache over several ranks, µs per step", title_justify="left",
                  box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)  # fmt: skip
    ways = " and ".join(sorted({row["variant"].replace("_", " ") for row in rows if row["variant"]}))
    table.caption = (
        f"Travel: what a step takes longer than decoding a shard alone, the merge included; by {ways or 'nothing'}.\n"
        "Gather: the step with an all-gather."
    )
    table.add_column("shape", no_wrap=True)
    for name in ("ranks", "alone", "step", "speed-up", "shard", "travel", "gather"):
        table.add_column(name, justify="right")
    for row in rows:
        us = row["us_graph"] or row["us_eager"]
        table.add_row(
            row["case"].rpartition("-r")[0], str(row["ranks"]), _text(row["us_one"]), _text(us),
            _text(row["speedup"], ".2f"), _text(row["us_shard"]), _text(row["us_communication"]),
            _text(row.get("us_all_gather")),
        )  # fmt: skip
    return table


def _text(x: float | None, form: str = ".1f") -> str:
    return "–" if x is None else format(x, form)
