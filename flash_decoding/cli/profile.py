"""flash-decoding profile: a decode step's time explained, kernel by kernel, against the GPU's measured ceilings."""

from __future__ import annotations

import json as jsonlib
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from flash_decoding.bench.workloads import Case, Shape, parse_shape
from flash_decoding.cli import fail
from flash_decoding.cli.common import (
    DTYPE_HELP,
    describe_row_tiles,
    find_dtype,
    refuse,
    require_drawable,
    require_supported,
    require_writable,
    takes_head_dim,
    warn_unwritten,
)

if TYPE_CHECKING:
    from flash_decoding.bench.profiling import KernelProfile, StepProfile
    from flash_decoding.bench.roofline import Ceilings
    from flash_decoding.hardware import Gpu

console = Console()
# What ends one shape's profile but not the run: too little memory, a kernel that fails, a call that is refused.
REASONS = (MemoryError, RuntimeError, ValueError)


def profile(
    shape: Annotated[
        list[str] | None,
        typer.Argument(help="B,Hq,Hkv,N,D; several may be given. Default: the long shape of the article."),
    ] = None,
    dtype: Annotated[str, typer.Option(help=f"{DTYPE_HELP}.")] = "bfloat16",
    num_splits: Annotated[
        int | None, typer.Option(help="Splits per problem; default: what the library chooses.")
    ] = None,
    ncu: Annotated[bool, typer.Option(help="Read hardware counters where Nsight Compute is installed.")] = True,
    plot: Annotated[Path | None, typer.Option(help="Draw the roofline as PLOT.png and PLOT.svg.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write the numbers to this file.")] = None,
) -> None:
    """Take decode steps apart: chunk and reduce kernel, gaps, bandwidth, FLOP rate, registers, waves, counters.

    The ceilings are measured on this GPU in the same run. Both kernels run inside NVTX ranges of their names.
    """
    dtype = find_dtype(dtype)
    require_writable("--json", json)
    require_drawable(plot)
    try:
        shapes = [parse_shape(text) for text in shape or ["2,8,8,65536,128"]]
    except ValueError as error:
        refuse(error, shape="SHAPE")
    require_supported(shapes, num_splits)
    from flash_decoding.hardware import present_gpu

    gpu = present_gpu()
    if gpu is None:
        fail("profile needs a CUDA device, and torch finds none; `flash-decoding plan` predicts without one")

    from flash_decoding.bench.roofline import measure_ceilings
    from flash_decoding.bench.timing import Method

    method = Method()
    with console.status("measuring the GPU's ceilings"):
        ceilings = measure_ceilings(dtype, method)
    console.print(
        f"{gpu.name}: {gpu.processors} processors, reads {ceilings.read_gb_per_s:.0f} GB/s, "
        f"multiplies {dtype} matrices at {ceilings.matrix_tflops:.0f} TFLOP/s (both measured now)",
        highlight=False,
    )
    steps: list[StepProfile] = []
    written = True
    checks: list[dict[str, Any]] = []
    for one in shapes:
        step = _profile_one(one, dtype, num_splits, ncu, gpu)
        if step is None:
            continue
        steps.append(step)
        checks.append(_article_checks(step, ceilings))
        console.print(_table(step, ceilings))
        for line in _check_lines(step, checks[-1]):
            console.print(line, highlight=False)
        if json is not None:
            written = _write_json(json, gpu, ceilings, steps, checks)
    if plot is not None and steps:
        written = _draw(plot, gpu, ceilings, steps) and written
    if not written:
        raise typer.Exit(2)
    if not steps:
        raise typer.Exit(1)


def _profile_one(shape: Shape, dtype: str, num_splits: int | None, ncu: bool, gpu: Gpu) -> StepProfile | None:
    """A shape's profile; None, with one sentence, when it cannot be had."""
    from flash_decoding.bench.peers import one_line
    from flash_decoding.bench.profiling import profile_step, read_counters
    from flash_decoding.bench.timing import Method

    case = Case("profile", str(shape), shape, dtype)
    try:
        with console.status(f"{case.name}: timing"):
            step = profile_step(case, gpu, num_splits, Method())
    except REASONS as error:
        console.print(f"{case.name}: {one_line(error)}", style="red", highlight=False)
        return None
    if ncu:
        try:
            with console.status(f"{case.name}: hardware counters"):
                counters = read_counters(case, step.num_splits)
            for kernel in step.kernels:
                kernel.counters = counters.get(kernel.kernel, {})
        except RuntimeError as error:
            console.print(str(error), style="yellow", highlight=False)
    return step


def _article_checks(step: StepProfile, ceilings: Ceilings) -> dict[str, Any]:
    """The article's two checks: time ≈ bytes ÷ bandwidth, and twice the head size takes twice as long."""
    expected = step.case.kv_bytes / ceilings.read_gb_per_s / 1e3
    check: dict[str, Any] = {
        "bytes_over_bandwidth_us": expected,
        "time_over_bytes_over_bandwidth": step.total.median / expected,
    }
    own = step.case.shape.head_dim
    other = own * 2 if own * 2 <= 128 else own // 2
    us, reason = _time_twin(step.case, other)
    wide, narrow = max(own, other), min(own, other)
    ratio = None if us is None else step.total.median / us if own == wide else us / step.total.median
    return check | {"wide": wide, "narrow": narrow, "wide_over_narrow": ratio, "no_ratio_because": reason}


def _time_twin(case: Case, head_dim: int) -> tuple[float | None, str | None]:
    """Median µs of the case at another head size, or None and why there is none."""
    from flash_decoding.bench.peers import one_line
    from flash_decoding.bench.profiling import time_step
    from flash_decoding.bench.timing import Method

    if not takes_head_dim(head_dim):
        return None, f"the library has no head size {head_dim}"
    shape = replace(case.shape, head_dim=head_dim)
    try:
        return time_step(Case("profile", str(shape), shape, case.dtype), Method()).median, None
    except REASONS as error:
        return None, one_line(error)


def _check_lines(step: StepProfile, check: dict[str, Any]) -> list[str]:
    lines = [
        f"time ≈ bytes ÷ bandwidth: {check['time_over_bytes_over_bandwidth']:.2f} times the "
        f"{check['bytes_over_bandwidth_us']:.1f} µs that the bytes of K and V take at the measured ceiling"
    ]
    if check["wide_over_narrow"] is not None:
        lines.append(
            f"D {check['wide']} ÷ D {check['narrow']} ≈ {check['wide'] // check['narrow']}: "
            f"{check['wide_over_narrow']:.2f}"
        )
    else:
        lines.append(f"D {check['wide']} ÷ D {check['narrow']} not measured: {check['no_ratio_because']}")
    if step.num_splits > 1 and step.gap_inside_us is None:
        lines.append("The reduce kernel is there before the chunk kernel ends; its time counts from that end.")
    if step.row_tiles > 1:
        lines.append(
            f"{describe_row_tiles(step.row_tiles)} Bytes moved, GB/s and FLOPs per byte of the chunk kernel count "
            "each of these reads."
        )
    return lines


def _table(step: StepProfile, ceilings: Ceilings) -> Table:
    table = Table(title=f"{step.case.name}, {step.num_splits} splits", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("")
    for kernel in step.kernels:
        table.add_column(kernel.kernel, justify="right")
    table.add_column("whole step", justify="right", style="bold")

    def row(name: str, show: Any, whole: str = "") -> None:
        table.add_row(name, *(show(kernel) for kernel in step.kernels), whole)

    whole_gb = step.case.kv_bytes / step.total.median / 1e3
    row("time, µs", lambda k: f"{k.us:.2f}", f"{step.total.median:.2f}")
    row("spread, µs", lambda k: f"{k.us_spread:.2f}", f"{step.total.spread:.2f}")
    if step.gap_inside_us is not None:
        table.add_row("gap between the kernels, µs", *[""] * len(step.kernels), f"{step.gap_inside_us:.2f}")
    if step.gap_between_us is not None:
        table.add_row("gap to the next step, µs", *[""] * len(step.kernels), f"{step.gap_between_us:.2f}")
    table.add_section()
    row("bytes moved, MB", lambda k: f"{k.work.bytes_moved / 1e6:.2f}", f"{step.case.kv_bytes / 1e6:.2f} (K and V)")
    row("GB/s", lambda k: f"{k.gb_per_s:.0f}", f"{whole_gb:.0f}")
    row(
        "share of the read ceiling",
        lambda k: f"{k.gb_per_s / ceilings.read_gb_per_s:.0%}",
        f"{whole_gb / ceilings.read_gb_per_s:.0%}",
    )
    row("FLOPs per byte", lambda k: f"{k.work.intensity:.2f}")
    row("TFLOP/s", lambda k: f"{k.tflops:.2f}")
    row("roof that binds", lambda k: "memory" if k.work.intensity < ceilings.ridge else "arithmetic")
    table.add_section()
    row("programs", lambda k: str(k.programs))
    row("warps per program", lambda k: str(k.num_warps))
    row("registers per thread", lambda k: str(k.registers))
    row("shared memory, bytes", lambda k: str(k.shared_bytes))
    row("resident programs per processor", lambda k: str(k.resident))
    row("waves", lambda k: f"{k.waves:.2f}")
    names = dict.fromkeys(name for kernel in step.kernels for name in kernel.counters)
    if names:
        table.add_section()
    for name in names:
        row(f"ncu: {name}", lambda k, name=name: f"{k.counters[name]:,.1f}" if name in k.counters else "–")
    return table


def _write_json(
    path: Path, gpu: Gpu, ceilings: Ceilings, steps: list[StepProfile], checks: list[dict[str, Any]]
) -> bool:
    """Whether the file could be written; what was measured is shown either way."""
    from flash_decoding.bench.results import describe_environment

    content = {
        "environment": describe_environment(),
        "gpu": gpu.name,
        "ceilings": asdict(ceilings),
        "steps": [
            {
                "case": step.case.to_json(),
                "num_splits": step.num_splits,
                "row_tiles": step.row_tiles,
                "us": step.total.median,
                "us_spread": step.total.spread,
                "gap_inside_us": step.gap_inside_us,
                "gap_between_us": step.gap_between_us,
                "kernels": [_kernel_numbers(kernel, ceilings) for kernel in step.kernels],
                "checks": check,
            }
            for step, check in zip(steps, checks, strict=True)
        ],
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(jsonlib.dumps(content, indent=1) + "\n")
    except OSError as error:
        warn_unwritten(path, error)
        return False
    return True


def _kernel_numbers(kernel: KernelProfile, ceilings: Ceilings) -> dict[str, Any]:
    facts = asdict(kernel)
    facts["work"] = kernel.work._asdict()
    return facts | {
        "gb_per_s": kernel.gb_per_s,
        "share_of_read_ceiling": kernel.gb_per_s / ceilings.read_gb_per_s,
        "intensity": kernel.work.intensity,
        "tflops": kernel.tflops,
    }


def _draw(path: Path, gpu: Gpu, ceilings: Ceilings, steps: list[StepProfile]) -> bool:
    from flash_decoding.bench.plots import RooflinePoint, roofline_figure, save

    points = [
        RooflinePoint(kernel.kernel, step.case.name, kernel.work.intensity, kernel.tflops)
        for step in steps
        for kernel in step.kernels
    ]
    try:
        for written in save(roofline_figure(ceilings, points, f"Roofline of {gpu.name}, {ceilings.dtype}"), path):
            console.print(f"wrote {written}")
    except OSError as error:
        warn_unwritten(path, error)
        return False
    return True
