"""flash-decoding tune: find settings that are faster on the present GPU than the planner's rule, and keep them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from flash_decoding.cli import fail
from flash_decoding.cli.common import require_writable, warn_unwritten
from flash_decoding.split_plan import KINDS, SIZES_MB, Key, Setting, Tile
from flash_decoding.tuning import FOLDER_VARIABLE, file_name, user_folder

if TYPE_CHECKING:
    from flash_decoding.bench.tile_sweep import Device, Measured, Target

console = Console(highlight=False)
# The GPU whose list --dry-run shows where there is none.
_DEFAULT_GPU = "h200"


def tune(
    output: Annotated[
        Path | None,
        typer.Option(help=f"Where to write. Default: where the library looks, which ${FOLDER_VARIABLE} moves."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Only caches of 24 MB and more, one token, heads of 64 and 128.")
    ] = False,
    kind: Annotated[
        list[str] | None, typer.Option(help=f"Only this kind of call: {', '.join(KINDS)}; may be repeated.")
    ] = None,
    width: Annotated[list[int] | None, typer.Option(help="Only heads of this width; may be repeated.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be measured.")] = False,
) -> None:
    """Measure on this GPU which tiles and how many programs are fastest, and keep what beats the planner's rule.

    Without it the planner follows its rule; the results of a call are right either way. What was measured before and is
    not measured now stays in the file.
    """
    from flash_decoding.bench.tile_sweep import make_targets, tuned_widths

    for one in kind or ():
        if one not in KINDS:
            fail(f"--kind must be one of {', '.join(KINDS)}, got {one!r}")
    for number in width or ():
        if number not in tuned_widths():
            fail(f"--width must be one of {', '.join(map(str, tuned_widths()))}, got {number}")
    require_writable("--output", output)
    name, device = _find_device(dry_run)
    targets = make_targets(device, kind, width, quick)
    if not targets:
        fail("--kind and --width must leave something to measure, got a kind that has no such width")
    path = output
    if path is None:
        folder = user_folder()
        if folder is None and not dry_run:
            fail(f"--output must be given where there is no home folder; or set ${FOLDER_VARIABLE}")
        path = (folder or Path()) / file_name(name)
        require_writable("--output", None if dry_run else path)
    if dry_run:
        _show_targets(targets, device, name, path)
        return

    begin = time.monotonic()
    measured = _measure(targets, device)
    seconds = time.monotonic() - begin
    try:
        _write(path, name, measured, seconds)
    finally:
        _show_measured(measured, seconds)


def _find_device(dry_run: bool) -> tuple[str, Device]:
    """Name and facts of the present GPU."""
    from flash_decoding.bench.tile_sweep import Device

    if torch.cuda.is_available():
        facts: Any = torch.cuda.get_device_properties(0)
        return facts.name, Device(facts.multi_processor_count, facts.shared_memory_per_block_optin)
    if not dry_run:
        fail("tune needs a CUDA device, and torch finds none; --dry-run shows what would be measured")
    from flash_decoding.hardware import find_gpu

    gpu = find_gpu(_DEFAULT_GPU)
    console.print(f"No GPU here, so this is for an {gpu.name}.", style="yellow")
    return f"NVIDIA {gpu.name}", Device(gpu.processors, gpu.limits.shared_per_program)


def _measure(targets: Sequence[Target], device: Device) -> list[Measured]:
    from flash_decoding.bench.tile_sweep import GpuTimer, compile_ahead, compile_jobs, count_compilers, measure
    from flash_decoding.bench.timing import Method

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True, highlight=False), transient=True) as progress:
        jobs = compile_jobs(targets, device)
        compilers = count_compilers(len(jobs))
        if compilers > 1:
            task = progress.add_task(f"compiling, {compilers} at a time", total=len(jobs))
            compile_ahead(jobs, compilers, lambda: progress.advance(task))
        timer = GpuTimer(targets, Method())
        task = progress.add_task("measuring", total=len(targets))
        measured = []
        for target in targets:
            progress.update(task, description=_describe_key(target.key))
            measured.append(measure(target, device, timer))
            progress.advance(task)
    for fault in dict.fromkeys(timer.faults):
        console.print(f"left out: {fault}", style="yellow", markup=False)
    return measured


def _write(path: Path, gpu: str, measured: Sequence[Measured], seconds: float) -> None:
    from flash_decoding.bench.results import describe_environment
    from flash_decoding.bench.tile_sweep import describe_method, write_document
    from flash_decoding.bench.timing import Method

    environment = describe_environment(["flash-decoding"])
    run = {"environment": environment, "method": describe_method(Method()), "seconds": round(seconds, 1)}
    try:
        write_document(path, gpu, run, measured)
    except OSError as error:
        warn_unwritten(path, error)
        raise typer.Exit(2) from None
    console.print(f"wrote {path}", soft_wrap=True)


def _show_measured(measured: Sequence[Measured], seconds: float) -> None:
    table = Table(title="Faster than the planner's rule", title_justify="left", box=box.SIMPLE)
    table.caption = "keys, warps and buffers of a tile; then how many programs run on a processor"
    table.add_column("calls")
    for name in ("the rule", "faster", "by"):
        table.add_column(name, justify="right", no_wrap=True)
    won = [one for one in measured if one.setting is not None]
    for one in won:
        assert one.setting is not None, "those that won"
        table.add_row(
            _describe_key(one.target.key), _describe_tile(one.rule), _describe_tile(one.setting), f"{one.gain - 1:.1%}"
        )
    if won:
        console.print(table)
    console.print(
        f"{len(won)} of {len(measured)} keys have a faster setting, the rule stays for the others; {seconds:.0f} s"
    )


def _show_targets(targets: Sequence[Target], device: Device, gpu: str, path: Path) -> None:
    from flash_decoding.bench.tile_sweep import compile_jobs, plans_of

    table = Table(title=f"What tune would measure on one {gpu}", title_justify="left", box=box.SIMPLE)
    table.add_column("calls")
    table.add_column("samples", no_wrap=True)
    table.add_column("plans", justify="right")
    total = 0
    for target in targets:
        rule, others = plans_of(target, device)
        count = sum(len({rule[i], *(plans[i] for plans in others)}) for i in range(len(rule)))
        total += count
        table.add_row(_describe_key(target.key), "\n".join(map(str, target.samples)), str(count))
    console.print(table)
    jobs = compile_jobs(targets, device)
    console.print(f"{len(targets)} keys, {total} plans of {len(jobs)} chunk kernels; the file would be {path}")


def _describe_key(key: Key) -> str:
    above = [size for size in SIZES_MB if size > key.from_mb]
    size = f"{key.from_mb}–{above[0]} MB" if above else f"≥ {key.from_mb} MB"
    return f"{key.kind} {size}, D {key.width}, {key.rows} rows"


def _describe_tile(tile: Tile | Setting) -> str:
    text = f"{tile.block_n}, {tile.num_warps}, {tile.buffers}"
    return text if isinstance(tile, Tile) else f"{text}; {tile.programs}"
