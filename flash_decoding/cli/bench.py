"""flash-decoding bench: measure against every installed peer, or redraw what was measured."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from flash_decoding.bench.peers import OURS
from flash_decoding.bench.results import OK, Row
from flash_decoding.bench.timing import Method
from flash_decoding.bench.workloads import SUITES, Case
from flash_decoding.cli import fail
from flash_decoding.cli.common import (
    DTYPE_HELP,
    find_dtype,
    refuse,
    require_drawable,
    require_writable,
    show_written,
    warn_unwritten,
)

console = Console()


def bench(
    suite: Annotated[
        list[str] | None,
        typer.Option(
            help=f"What to measure: {', '.join(SUITES)} or all; may be repeated. Default: all of the device. Or, "
            "started by torchrun: distributed."
        ),
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(help="A shape of your own, B,Hq,Hkv,N,D; may be repeated."),
    ] = None,
    dtype: Annotated[str | None, typer.Option(help=f"{DTYPE_HELP}; instead of the suite's.")] = None,
    kv_format: Annotated[
        str | None, typer.Option(help="The caches of --shape quantised: fp8, fp8:token, int8, int4:group32 and so on.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cuda or cpu: where --shape and all run.")] = "auto",
    peer: Annotated[
        list[str] | None,
        typer.Option(help="Only this peer beside ours, or none; may be repeated. Default: every peer."),
    ] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads; default: as many as torch takes.")] = None,
    build: Annotated[
        bool, typer.Option(help="Let peers that compile at first use do so beforehand, in parallel.")
    ] = True,
    json: Annotated[Path | None, typer.Option(help="Write all rows to this file, after each row.")] = None,
    results_dir: Annotated[
        Path | None,
        typer.Option(help="Write one file per suite below this folder, as <device>/<suite>.json, after each row."),
    ] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write the tables as Markdown.")] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Draw each suite's times over the read floor, or the 16-bit cache's, as PLOT.png and PLOT.svg."
        ),
    ] = None,
    report: Annotated[
        list[Path] | None,
        typer.Option(help="Measure nothing: show this result file, or all files below this folder; may be repeated."),
    ] = None,
    compare: Annotated[
        Path | None, typer.Option(help="With --report: a second run's results; show which medians it did not repeat.")
    ] = None,
    merge: Annotated[bool, typer.Option("--merge", help="Tables and picture of all suites as one.")] = False,
    readme: Annotated[
        Path | None, typer.Option(help="Rewrite the results between the marks of this document, with --report.")
    ] = None,
    details: Annotated[bool, typer.Option("--details", help="Show every peer of every shape, too.")] = False,
) -> None:
    """Measure decode attention against every installed peer and the read floor.

    Inputs are rotated so that caches are cold, each output is checked against float64 before it is timed, and the
    time of only reading the same bytes is measured in the same run. A peer that fails is shown with its reason.
    """
    if threads is not None and threads < 1:
        fail(f"--threads must be at least 1, got {threads}")
    measuring = {"--suite": suite, "--shape": shape, "--dtype": dtype, "--kv-format": kv_format, "--peer": peer,
                 "--threads": threads, "--json": json, "--results-dir": results_dir}  # fmt: skip
    reporting = {"--compare": compare, "--merge": merge, "--readme": readme}
    for option, path in (("--json", json), ("--markdown", markdown), ("--readme", readme)):
        require_writable(option, path)
    require_writable("--results-dir", results_dir and results_dir / "device" / "suite.json")
    require_drawable(plot)
    if report:
        _refuse_given(measuring, "given without --report, which measures nothing")
        _report(report, compare, merge, details, markdown, plot, readme)
        return
    _refuse_given(reporting, "given with --report")
    dtype = dtype and find_dtype(dtype)
    if suite and "distributed" in suite:
        _distributed(suite, shape, dtype, device, peer, plot, _Keeper(json, results_dir))
        return
    if kv_format and not shape:
        fail("--kv-format must be given with --shape; the suite quantised has formats of its own")
    cases = _choose(suite, shape, dtype, device, kv_format)
    names = None if not peer else [name for name in peer if name != "none"]
    keeper = _Keeper(json, results_dir)
    try:
        _measure(cases, names, threads, build, keeper)
    except ValueError as error:
        refuse(error)
    except KeyboardInterrupt:
        console.print("Stopped; the rows so far are kept.")
    _show(keeper.rows, keeper.environment, details)
    written = show_written(_write_reports(keeper.rows, keeper.environment, markdown, plot, None))
    if not (written and keeper.written):
        raise typer.Exit(2)
    failed = [row for row in keeper.rows if row["impl"] == OURS and row["status"] != OK]
    if failed or not keeper.rows:
        raise typer.Exit(1)


def _distributed(
    suites: list[str], shapes: list[str] | None, dtype: str | None, device: str, peers: list[str] | None,
    plot: Path | None, keeper: _Keeper,
) -> None:  # fmt: skip
    """The suite that runs in all processes of a torchrun; rank 0 writes and shows."""
    from flash_decoding.cli import bench_distributed

    for option, value in (("--suite", suites[1:]), ("--peer", peers), ("--plot", plot)):
        if value:
            fail(f"{option} must not be given beside --suite distributed; plan --ranks --measured draws its results")
    try:
        cases = bench_distributed.choose(shapes, dtype, device)
    except ValueError as error:
        refuse(error)

    def begin(environment: dict[str, Any]) -> None:
        keeper.environment = environment

    def add(row: Row) -> None:
        keeper.add(row)
        console.print(_row_line(row), highlight=False)

    if bench_distributed.measure(cases, keeper.method, begin, add):
        _show_environment(keeper.environment)
        console.print(bench_distributed.rows_table(keeper.rows))
        if not keeper.written:
            raise typer.Exit(2)


def _refuse_given(options: Mapping[str, object], rule: str) -> None:
    for name, value in options.items():
        if value:
            fail(f"{name} must be {rule}")


def _report(
    paths: list[Path], compare: Path | None, merge: bool, details: bool,
    markdown: Path | None, plot: Path | None, readme: Path | None,
) -> None:  # fmt: skip
    """Show result files and, with compare, how well another run repeats them."""
    from flash_decoding.bench.document import merge_suites

    rows, environment = _read(paths)
    try:
        shown = merge_suites(rows) if merge else rows
    except ValueError as error:
        fail(f"--merge: {error}")
    _show(shown, environment, details)
    if compare is not None:
        _compare(rows, compare)
    if not show_written(_write_reports(shown, environment, markdown, plot, readme)):
        raise typer.Exit(2)


def _read(paths: list[Path]) -> tuple[list[Row], dict[str, Any]]:
    """All rows of the files, and the environment of the first, with the days of all."""
    from flash_decoding.bench.results import find_result_files, merge_environments, read_results

    try:
        files = [read_results(path) for path in find_result_files(paths)]
    except ValueError as error:
        fail(str(error))
    gpus = list(dict.fromkeys(str(results["environment"].get("gpu")) for results in files))
    if len(gpus) > 1:
        fail(f"--report must be given files of one machine, got {' and '.join(gpus)}")
    rows = [row for results in files for row in results["rows"]]
    return rows, merge_environments([results["environment"] for results in files])


def _compare(rows: list[Row], path: Path) -> None:
    from flash_decoding.bench.compare import comparison_line, comparison_table, pair_rows

    others, environment = _read([path])
    pairs = pair_rows(rows, others)
    if not pairs:
        fail(f"--compare must hold rows of the suites in --report, got {path}, which has none with a time")
    console.print(f"compared with {path}:")
    _show_environment(environment)
    table = comparison_table(pairs)
    if table.row_count:
        console.print(table)
    console.print(comparison_line(pairs), highlight=False)


def _choose(
    suites: Sequence[str] | None, shapes: Sequence[str] | None, dtype: str | None, device: str, kv_format: str | None
) -> list[Case]:  # fmt: skip
    """The cases to run here; without a GPU, those that need one are left out with a sentence."""
    import torch

    from flash_decoding.bench.workloads import select_cases

    try:
        if device not in ("auto", "cuda", "cpu"):
            raise ValueError(f"device must be auto, cuda or cpu, got {device!r}")
        here = "cuda" if torch.cuda.is_available() else "cpu"
        wanted = here if device == "auto" else device
        if not suites and not shapes:
            suites = ["all"]
        cases = select_cases(suites or [], shapes or [], dtype, wanted, kv_format)
    except ValueError as error:
        refuse(error, kv_format="--kv-format")
    runnable = [case for case in cases if case.device == "cpu" or here == "cuda"]
    missing = dict.fromkeys(case.suite for case in cases if case not in runnable)
    if missing:
        console.print(f"No CUDA device here: {', '.join(missing)} left out.", style="yellow")
    if not runnable:
        raise typer.Exit(2)
    return runnable


class _Keeper:
    """The rows so far, on disk after each one."""

    def __init__(self, json: Path | None, folder: Path | None) -> None:
        self.json, self.folder = json, folder
        self.rows: list[Row] = []
        self.environment: dict[str, Any] = {}
        self.method = Method()
        self.written = True

    def add(self, row: Row) -> None:
        from flash_decoding.bench.results import device_folder

        self.rows.append(row)
        if self.json is not None and not self._write(self.json, self.rows):
            self.json = None
        if self.folder is not None:
            path = self.folder / device_folder(self.environment, row["device"]) / f"{row['suite']}.json"
            if not self._write(path, [other for other in self.rows if other["suite"] == row["suite"]]):
                self.folder = None

    def _write(self, path: Path, rows: list[Row]) -> bool:
        from flash_decoding.bench.results import new_results, write_results

        try:
            write_results(path, new_results(self.environment, self.method, rows))
        except OSError as error:
            warn_unwritten(path, error, "; measuring goes on without it")
            self.written = False
            return False
        return True


def _measure(cases: list[Case], names: list[str] | None, threads: int | None, build: bool, keeper: _Keeper) -> None:
    from flash_decoding.bench.peers import peers_on
    from flash_decoding.bench.run import build_peers, run

    begin = time.perf_counter()
    method = keeper.method
    total = sum(len(peers_on(case, names)) for case in cases)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        if build:
            task = progress.add_task("compiling peers", total=None)
            build_peers(cases, method, names, done=lambda at, of: progress.update(task, completed=at, total=of))
            progress.remove_task(task)
        task = progress.add_task("starting", total=total)
        for kind, value in run(cases, method, names, threads):
            if kind == "environment":
                keeper.environment = value
            elif kind == "doing":
                progress.update(task, description=value)
            else:
                keeper.add(value)
                progress.advance(task)
                if not console.is_terminal:  # a log shows no progress bar
                    console.print(f"{time.perf_counter() - begin:6.1f} s  {_row_line(value)}", highlight=False)


def _row_line(row: Row) -> str:
    from flash_decoding.bench.results import time_us

    us = time_us(row)
    return f"{row['suite']} {row['case']} {row['impl']}: " + (f"{us:.2f} µs" if us is not None else row["status"])


def _show(rows: Sequence[Row], environment: dict[str, Any], details: bool) -> None:
    """Each suite in one line per shape and what options cost, then why peers are missing; with details every peer."""
    from flash_decoding.bench.tables import detail_table, failure_lines, ratio_table, summary_table
    from flash_decoding.cli import bench_distributed

    _show_environment(environment)
    suites = {
        suite: [row for row in rows if row["suite"] == suite] for suite in dict.fromkeys(r["suite"] for r in rows)
    }
    for suite, chosen in suites.items():
        if suite == "distributed":
            console.print(bench_distributed.rows_table(chosen))
            continue
        console.print(summary_table(suite, chosen))
        ratios = ratio_table(suite, chosen)
        if ratios is not None:
            console.print(ratios)
    for line in failure_lines(rows):
        console.print(line, style="dim", highlight=False)
    if details:
        for suite, chosen in suites.items():
            console.print(detail_table(suite, chosen))
    elif rows:
        console.print("Every peer of every shape: --details.", style="dim")


def _show_environment(environment: dict[str, Any]) -> None:
    """Where and when, in one line; nothing of a run that was stopped before it knew."""
    if environment:
        gpu = environment.get("gpu")
        where = f"{gpu}, driver {environment.get('driver', 'unknown')}, " if gpu else ""
        console.print(
            f"{where}{environment.get('cpu')}, {environment.get('cpu_threads')} threads; "
            f"torch {environment.get('torch')}, Triton {environment.get('triton')}; {environment.get('date')}",
            style="dim", highlight=False,
        )  # fmt: skip


def _write_reports(
    rows: Sequence[Row], environment: dict[str, Any], markdown: Path | None, plot: Path | None, readme: Path | None
) -> Iterator[Path]:
    """Write the files that are wanted, and give each that is there."""
    from flash_decoding.bench.document import update_document
    from flash_decoding.bench.tables import to_markdown

    if markdown is not None:
        markdown.parent.mkdir(parents=True, exist_ok=True)
        markdown.write_text(to_markdown(rows, environment))
        yield markdown
    pictures = _draw(rows, environment, plot) if plot is not None else []
    yield from pictures
    if readme is not None:
        update_document(readme, rows, environment, pictures[1] if pictures else None)
        yield readme


def _draw(rows: Sequence[Row], environment: dict[str, Any], plot: Path) -> list[Path]:
    from flash_decoding.bench.document import fingerprint
    from flash_decoding.bench.plots import save, suite_figure

    suites = list(dict.fromkeys(row["suite"] for row in rows if row["status"] == OK))
    stem = plot.with_suffix("") if plot.suffix in (".png", ".svg") else plot
    written = []
    for suite in suites:
        chosen = [row for row in rows if row["suite"] == suite]
        on_cpu = chosen[0].get("device") == "cpu"
        figure = suite_figure(chosen, f"{suite}, {environment.get('cpu' if on_cpu else 'gpu')}")
        path = stem if len(suites) == 1 else stem.with_name(f"{stem.name}-{suite}")
        written += save(figure, path, made_from=fingerprint(chosen))
    return written
