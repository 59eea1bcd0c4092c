"""What `flash-decoding plan --ranks` shows: a decode step whose cache is spread over many GPUs, on paper."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table

from flash_decoding.bench.workloads import ITEMSIZE, Shape
from flash_decoding.distributed.cost import Network, RankPrediction, find_turning_point, predict_ranks

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from flash_decoding.hardware import Gpu


def predict_each(
    shape: Shape,
    dtype: str,
    ranks: Sequence[int],
    network: Network,
    gb_per_s: float,
    decode_us: Callable[[Shape], float],
) -> list[RankPrediction]:  # fmt: skip
    """The step on 1, 2, 4, ... ranks up to the most that are asked for, and on those that are asked for.

    Args:
        decode_us: the predicted time of a shard's decode step on one GPU.
    """
    counts = {2**i for i in range(max(ranks).bit_length())} | set(ranks)
    predictions = []
    for count in sorted(counts):
        keys = -(-shape.kv_len // count)
        predictions.append(
            predict_ranks(
                count, keys, decode_us(replace(shape, kv_len=keys)), shape.heads_q, shape.batch * shape.heads_q,
                shape.head_dim, ITEMSIZE[dtype], network, gb_per_s,
            )
        )  # fmt: skip
    return predictions


def ranks_table(what: str, predictions: list[RankPrediction], network: Network) -> Table:
    """One line per number of ranks. what: the shape, in words."""
    alone, best = predictions[0].total_us, find_turning_point(predictions)
    table = Table(title=f"{what} spread over ranks, µs per step; each gets all heads", title_justify="left",
                  box=box.SIMPLE_HEAD, pad_edge=False)  # fmt: skip
    for name in ("ranks", "keys each", "decode", "travel", "merge", "in all", "speed-up", "each"):
        table.add_column(name, justify="right")
    table.add_column("by")
    for p in predictions:
        speedup = alone / p.total_us
        table.add_row(
            str(p.ranks), str(p.keys), f"{p.decode_us:.1f}",
            *([f"{p.communication_us:.1f}", f"{p.merge_us:.1f}"] if p.ranks > 1 else ["–", "–"]),
            f"{p.total_us:.1f}", f"{speedup:.2f}", f"{speedup / p.ranks:.0%}", p.way.split("_")[-1],
            style="bold" if p is best else None,
        )  # fmt: skip
    where = f"{network.inside.name} inside of hosts of {network.gpus_per_host}, {network.between.name} between"
    table.caption = (
        f"{_turning_words(predictions)}\n{where}. Travel: NCCL's own model, and what was measured of symmetric memory."
    )
    return table


def ranks_numbers(predictions: list[RankPrediction], network: Network) -> dict[str, Any]:
    """The same for --json."""
    alone = predictions[0].total_us
    return {
        "network": {"inside": network.inside.key, "between": network.between.key,
                    "gpus_per_host": network.gpus_per_host},
        "most_useful_ranks": find_turning_point(predictions).ranks,
        "predictions": [
            asdict(p) | {"total_us": p.total_us, "speedup": alone / p.total_us} for p in predictions
        ],
    }  # fmt: skip


def ranks_figure(shape: Shape, predictions: list[RankPrediction], title: str, measured: dict[int, float]) -> Figure:
    """Speed-up over ranks: predicted, ideal, and where there are results, measured.

    Args:
        measured: speed-up by ranks.
    """
    from flash_decoding.bench.plots import GRID, INK, OURS_COLOUR, QUIET, new_figure

    figure, axes = new_figure(7.5, 4.8)
    ranks = [p.ranks for p in predictions]
    alone, best = predictions[0].total_us, find_turning_point(predictions)
    axes.plot(ranks, ranks, color=QUIET, linestyle="--", linewidth=1, label="ranks times as fast")
    axes.plot(ranks, [alone / p.total_us for p in predictions], color=OURS_COLOUR, marker="o", label="predicted")
    if measured:
        axes.plot(*zip(*sorted(measured.items()), strict=True), color=INK, marker="s", linestyle="none",
                  label="measured")  # fmt: skip
    axes.annotate(f"{best.ranks} ranks, {best.total_us:.0f} µs", (best.ranks, alone / best.total_us), (0, -40),
                  textcoords="offset points", ha="right", color=INK, fontsize=9)  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(ranks, [str(count) for count in ranks])
    top = 2 * max(alone / p.total_us for p in predictions)
    ticks = [2**i for i in range(-3, 10) if min(alone / p.total_us for p in predictions) / 2 <= 2**i <= top]
    axes.set_yticks(ticks, [f"{tick:g}×" for tick in ticks])
    axes.set_ylim(ticks[0], top)
    axes.minorticks_off()
    axes.grid(True, color=GRID)
    axes.set_axisbelow(True)
    axes.set_xlabel("ranks", color=INK)
    axes.set_ylabel("speed-up over one GPU", color=INK)
    axes.set_title(title, loc="left", color=INK, fontweight="bold", fontsize=10)
    axes.legend(frameon=False, loc="upper left")
    return figure


def measured_speedups(path: Path, shape: Shape, gpu: Gpu) -> dict[int, float]:
    """Speed-ups by ranks that a result file of the suite `distributed` holds for a shape.

    Raises:
        ValueError: it is of other GPUs, or has none for the shape.
    """
    from flash_decoding.bench.results import read_results, time_us

    results = read_results(path)
    name = str(results["environment"].get("gpu"))
    if name.lower() not in (gpu.device_names or (gpu.name.lower(),)):
        raise ValueError(f"--measured must be results of {gpu.name}s, as --gpu says, got {name}'s")
    times = {}
    for row in results["rows"]:
        if row["suite"] == "distributed" and row["shape"] == asdict(shape) and time_us(row) is not None:
            times[row["ranks"]] = row["us_one"] / time_us(row)
    if not times:
        raise ValueError(f"--measured must have rows of the suite distributed for {shape}, got none in {path}")
    return times


def _turning_words(predictions: list[RankPrediction]) -> str:
    best = find_turning_point(predictions)
    if best is predictions[-1]:
        return f"Up to {best.ranks} ranks, every doubling makes the step shorter."
    following = predictions[predictions.index(best) + 1]
    return (
        f"More than {best.ranks} ranks stop paying: {following.ranks} take {following.total_us:.1f} µs, and "
        f"{best.ranks} take {best.total_us:.1f}."
    )
