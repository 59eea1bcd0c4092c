"""flash-decoding plan: why a decode step needs splitting, for any shape and GPU, with no GPU needed."""

from __future__ import annotations

import importlib.util
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from flash_decoding.bench.workloads import ITEMSIZE, Shape, parse_shape
from flash_decoding.cli import fail
from flash_decoding.cli.common import (
    DTYPE_HELP,
    describe_row_tiles,
    find_dtype,
    refuse,
    require_drawable,
    require_supported,
    require_writable,
    write_json,
)
from flash_decoding.cli.generate import KV_DTYPE_HELP, find_kv_format, require_codes_run, require_width
from flash_decoding.cost_model import (
    REACHABLE_SHARE,
    Machine,
    Prediction,
    Sizes,
    chunk_work,
    kv_bytes,
    predict,
    reduce_work,
    shared_bytes,
)
from flash_decoding.quantization import KVFormat

console = Console()
# The GPU to plan for where none is named and none is present: the one that the kept results were measured on.
_DEFAULT_GPU = "h200"


def plan(
    shape: Annotated[
        list[str] | None,
        typer.Argument(help="B,Hq,Hkv,N,D; several may be given. Default: the long shape of the article."),
    ] = None,
    gpu: Annotated[
        list[str] | None,
        typer.Option(help="A GPU by name: rtx4060, a100, h100, h200, ... Default: the one present, else h200."),
    ] = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="This machine's CPU instead of a GPU.")] = False,
    dtype: Annotated[str, typer.Option(help=f"{DTYPE_HELP}.")] = "bfloat16",
    kv_dtype: Annotated[
        str | None, typer.Option(help=f"The cache as codes: {KV_DTYPE_HELP} [default: as --dtype]")
    ] = None,
    num_splits: Annotated[
        int | None, typer.Option(help="Splits per problem; default: what the library chooses.")
    ] = None,
    ranks: Annotated[
        list[int] | None,
        typer.Option(help="Spread the cache over so many GPUs: time, scaling, and where more stop paying. Repeatable."),
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(help="With --ranks, what connects a host's GPUs: nvlink4, pcie4, ...; default: theirs."),
    ] = None,
    gpus_per_host: Annotated[int, typer.Option(help="With --ranks.")] = 8,
    measured: Annotated[
        Path | None, typer.Option(help="With --ranks and --plot: draw this result file of bench beside it.")
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="Draw the processors over time, or with --ranks the scaling, as PLOT.png and PLOT.svg."),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write the numbers to this file.")] = None,
) -> None:
    """Show how many processors a decode step keeps busy, unsplit and split, and predict its time.

    Every sequence and KV head is one independent problem. Unsplit, a problem is one program on one processor; split
    over the keys, it is as many programs as it takes to fill the device. Times are predictions from the data sheet.
    """
    dtype = find_dtype(dtype)
    if gpu and len(gpu) > 1:
        fail(f"--gpu must be given once, got {' and '.join(gpu)}; run plan for each")
    if gpu and cpu:
        fail(f"--cpu must be given without --gpu, got --gpu {gpu[0]} as well")
    require_writable("--json", json)
    require_drawable(plot)
    try:
        shapes = [parse_shape(text) for text in shape or ["2,8,8,65536,128"]]
        require_supported(shapes, num_splits)
        if plot is not None and len(shapes) > 1:
            fail(f"--plot must be given with one shape, got {len(shapes)}")
        _require_ranks(ranks, cpu, link, gpus_per_host, measured, plot, num_splits)
        kv_format = _find_codes(kv_dtype, shapes, dtype, cpu)
        if kv_format is not None and measured is not None:
            fail("--measured must be given without --kv-dtype, its results are of 16-bit caches")
        target = _Cpu() if cpu else _FoundGpu(gpu[0] if gpu else None)
        if kv_format is not None and isinstance(target, _FoundGpu):
            target.require_memory(kv_format, shapes)
        if ranks and isinstance(target, _FoundGpu):
            _plan_ranks(shapes, dtype, kv_format, ranks, link, gpus_per_host, target, plot, json, measured)
            return
    except ValueError as error:
        refuse(error, shape="SHAPE", link="--link")
    console.print(target.description, highlight=False)
    reports = [_report(one, dtype, kv_format, num_splits, target) for one in shapes]
    for report in reports:
        console.print(_table(report, target))
    if json is not None:
        write_json(json, _numbers(reports, target))
    if plot is not None:
        _draw(plot, reports[0], target)


def _find_codes(kv_dtype: str | None, shapes: list[Shape], dtype: str, cpu: bool) -> KVFormat | None:
    """The format that --kv-dtype names, of caches that can be read."""
    import torch

    kv_format = find_kv_format("--kv-dtype", kv_dtype)
    if kv_format is None or kv_format.k is kv_format.v is None:
        return None
    require_codes_run(kv_format, torch.device("cpu" if cpu else "cuda"), getattr(torch, dtype))
    if not cpu and importlib.util.find_spec("triton") is None:
        fail("--kv-dtype needs triton, whose kernels decide how codes are read, or --cpu: pip install triton")
    for shape in shapes:
        require_width(kv_format, shape.head_dim, str(shape))
    return kv_format


def _require_ranks(
    ranks: list[int] | None, cpu: bool, link: str | None, gpus_per_host: int, measured: Path | None,
    plot: Path | None, num_splits: int | None,
) -> None:  # fmt: skip
    """Refuse what does not go with --ranks, or without it."""
    if not ranks:
        for option, value in (("--link", link), ("--measured", measured)):
            if value is not None:
                fail(f"{option} must be given with --ranks")
        return
    if num_splits is not None:
        fail("--num-splits must be given without --ranks, where every rank's own plan counts")
    if measured is not None and plot is None:
        fail("--measured must be given with --plot, where it is drawn")
    if cpu:
        fail("--cpu must be given without --ranks, which is about GPUs")
    if not all(1 <= count <= 4096 for count in ranks):
        fail(f"--ranks must be from 1 to 4096, got {', '.join(map(str, ranks))}")
    if gpus_per_host < 1:
        fail(f"--gpus-per-host must be at least 1, got {gpus_per_host}")


def _plan_ranks(
    shapes: list[Shape], dtype: str, kv_format: KVFormat | None, ranks: list[int], link: str | None,
    gpus_per_host: int, target: _FoundGpu, plot: Path | None, json: Path | None, measured: Path | None,
) -> None:  # fmt: skip
    """Predict each shape on one rank, on those asked for, and on the powers of two between."""
    from flash_decoding.bench.plots import save
    from flash_decoding.cli import plan_ranks
    from flash_decoding.distributed.cost import find_network

    network = find_network(link, target.gpu.compute_capability, gpus_per_host)

    def decode_us(shape: Shape) -> float:
        sizes, splits, block_n, machine = target.choose(shape, dtype, None, kv_format)
        return predict(sizes, splits, block_n, machine).total_us

    console.print(target.description, highlight=False)
    numbers = []
    for shape in shapes:
        predictions = plan_ranks.predict_each(shape, dtype, ranks, network, target.gb_per_s, decode_us)
        console.print(plan_ranks.ranks_table(_with_codes(shape, kv_format), predictions, network))
        facts = {"shape": asdict(shape), "kv_dtype": kv_format and str(kv_format)}
        numbers.append(facts | plan_ranks.ranks_numbers(predictions, network))
        if plot is not None:
            title = f"{_with_codes(shape, kv_format)} on {target.name}s, {network.inside.name}"
            speedups = {} if measured is None else plan_ranks.measured_speedups(measured, shape, target.gpu)
            for written in save(plan_ranks.ranks_figure(shape, predictions, title, speedups), plot):
                console.print(f"wrote {written}")
    if json is not None:
        write_json(json, {"device": target.name, "reachable_gb_per_s": target.gb_per_s, "plans": numbers})


class _FoundGpu:
    """A known or present GPU as the target of a plan."""

    processor = "processor"

    def __init__(self, key: str | None) -> None:
        from flash_decoding.hardware import find_gpu, present_gpu

        gpu = find_gpu(key) if key is not None else present_gpu()
        if gpu is None:
            gpu = find_gpu(_DEFAULT_GPU)
            console.print(f"No GPU here, so this is for --gpu {_DEFAULT_GPU}; name another, or --cpu.", style="yellow")
        self.gpu = gpu
        self.processors = gpu.processors
        self.name = gpu.name
        self.gb_per_s = REACHABLE_SHARE * gpu.gb_per_s
        self.description = (
            f"{gpu.name}: {gpu.processors} processors, {gpu.gb_per_s:.0f} GB/s by its data sheet, "
            f"{self.gb_per_s:.0f} GB/s reachable ({gpu.source})"
        )

    def require_memory(self, kv_format: KVFormat, shapes: list[Shape]) -> None:
        """Refuse codes for which a program has too little memory there."""
        from flash_decoding.backends.triton.chunk import find_group_errors

        for shape, name in product(shapes, "kv"):
            memory = self.gpu.limits.shared_per_program
            for error in find_group_errors(name, getattr(kv_format, name), shape.head_dim, memory):
                fail(f"--kv-dtype does not run on --gpu {self.gpu.key}: {error}")

    def describe_tile(self, shape: Shape, dtype: str, num_splits: int | None, kv_format: KVFormat | None) -> str:
        """Keys of a tile, and tiles in flight."""
        from flash_decoding.bench.profiling import plan_of

        tile = plan_of(shape, dtype, self.gpu, num_splits, kv_format).tile
        return f"{tile.block_n} keys × {tile.buffers}"

    def choose(
        self, shape: Shape, dtype: str, num_splits: int | None, kv_format: KVFormat | None = None
    ) -> tuple[Sizes, int, int, Machine]:
        """The step's sizes, splits, keys per tile, and the machine as this shape's kernel sees it."""
        from flash_decoding.bench.profiling import plan_of, sizes_of
        from flash_decoding.hardware import resident_programs

        itemsize = ITEMSIZE[dtype]
        chosen = plan_of(shape, dtype, self.gpu, num_splits, kv_format)
        tile = chosen.tile
        shared = shared_bytes(tile.block_n, tile.block_m, tile.block_d, tile.block_dv, itemsize, tile.num_stages)
        resident = max(1, resident_programs(self.gpu.limits, shared, tile.num_warps))
        in_flight = (tile.num_stages - 1) * tile.block_n * (tile.block_d + tile.block_dv) * itemsize
        machine = Machine(self.processors, resident, self.gb_per_s, in_flight=in_flight)
        return sizes_of(shape, dtype, tile, kv_format), chosen.num_splits, tile.block_n, machine


class _Cpu:
    """This machine's CPU as the target of a plan; its read bandwidth is measured."""

    processor = "thread"

    def __init__(self) -> None:
        import torch

        from flash_decoding.bench.read_floor import measure_floor
        from flash_decoding.bench.results import cpu_name
        from flash_decoding.bench.timing import Inputs, Method

        self.processors = torch.get_num_threads()
        self.name = cpu_name()
        q, k, v = (torch.ones(1, 1, length, 128) for length in (1, 65536, 65536))
        self.gb_per_s = measure_floor([Inputs(q, k, v)] * 2, Method()).gb_per_s
        self.description = f"{self.name}: {self.processors} threads, reads {self.gb_per_s:.1f} GB/s (measured now)"

    def describe_tile(self, shape: Shape, dtype: str, num_splits: int | None, kv_format: KVFormat | None) -> str:
        return "64 keys"

    def choose(
        self, shape: Shape, dtype: str, num_splits: int | None, kv_format: KVFormat | None = None
    ) -> tuple[Sizes, int, int, Machine]:
        from flash_decoding.backends.cpu.threads import choose_cpu_splits

        splits = num_splits or choose_cpu_splits(shape.batch, shape.heads_kv, shape.kv_len, self.processors)
        sizes = Sizes(
            shape.batch, shape.heads_q, shape.heads_kv, shape.kv_len, shape.head_dim, shape.head_dim, ITEMSIZE[dtype],
            code_bytes=None if kv_format is None else kv_format.token_bytes(shape.head_dim, ITEMSIZE[dtype]),
        )  # fmt: skip
        return sizes, splits, 64, Machine(self.processors, 1, self.gb_per_s)


class _Report:
    """A shape's plan, unsplit beside split."""

    def __init__(
        self, shape: Shape, kv_format: KVFormat | None, sizes: Sizes, unsplit: Prediction, split: Prediction,
        tiles: tuple[str, str],
    ) -> None:  # fmt: skip
        self.shape, self.kv_format, self.sizes, self.unsplit, self.split = shape, kv_format, sizes, unsplit, split
        self.tiles = tiles  # unsplit and split


def _report(
    shape: Shape, dtype: str, kv_format: KVFormat | None, num_splits: int | None, target: _FoundGpu | _Cpu
) -> _Report:  # fmt: skip
    whole, one, block_n, machine = target.choose(shape, dtype, 1, kv_format)
    unsplit = predict(whole, one, block_n, machine)
    sizes, splits, block_n, machine = target.choose(shape, dtype, num_splits, kv_format)
    one_tile, tile = (target.describe_tile(shape, dtype, count, kv_format) for count in (1, num_splits))
    return _Report(shape, kv_format, sizes, unsplit, predict(sizes, splits, block_n, machine), (one_tile, tile))


def _with_codes(text: object, kv_format: KVFormat | None) -> str:
    """A title, and how the cache is quantised."""
    return str(text) if kv_format is None else f"{text} in {kv_format.label}"


def _table(report: _Report, target: _FoundGpu | _Cpu) -> Table:
    sizes, unsplit, split, kv_format = report.sizes, report.unsplit, report.split, report.kv_format
    table = Table(
        title=f"{_with_codes(report.shape, kv_format)}: {sizes.problems} independent problems (batch × KV heads) "
        f"for {target.processors} {target.processor}s",
        title_justify="left", box=box.SIMPLE_HEAD,
    )  # fmt: skip
    table.add_column("")
    table.add_column("unsplit", justify="right")
    table.add_column("split", justify="right", style="bold")

    def row(name: str, show: Any) -> None:
        table.add_row(name, show(unsplit), show(split))

    row("splits per problem", lambda p: str(p.num_splits))
    row("programs", lambda p: str(p.programs))
    row(
        f"{target.processor}s with work",
        lambda p: f"{p.working_processors} of {target.processors} ({p.working_processors / target.processors:.0%})",
    )
    row("waves", lambda p: str(p.waves))
    table.add_row("tile × in flight", *report.tiles)
    row("time spent on work until the last ends", lambda p: f"{p.busy_share:.0%}")
    table.add_section()
    row("bytes of K and V" if kv_format is None else "bytes of K, V and scales", lambda p: _bytes(kv_bytes(sizes)))
    if sizes.row_tiles > 1:
        row(f"read by {sizes.row_tiles} tiles of query rows", lambda p: _bytes(sizes.row_tiles * kv_bytes(sizes)))
    row("bytes of partial results, written and read", lambda p: _bytes(2 * _partials(sizes, p)))
    row("FLOPs per byte, chunk kernel", lambda p: f"{chunk_work(sizes, p.num_splits).intensity:.1f}")
    table.add_section()
    row("only reading K and V, predicted", lambda p: f"{p.floor_us:.1f} µs")
    row("chunk kernel, predicted", lambda p: f"{p.chunk_us:.1f} µs")
    row("reduce kernel, predicted", lambda p: f"{p.reduce_us:.1f} µs" if p.num_splits > 1 else "none")
    row("together", lambda p: f"{p.total_us:.1f} µs")
    if split.num_splits > 1:
        table.caption = f"Splitting makes this step {unsplit.total_us / split.total_us:.1f} times as fast."
    else:
        table.caption = "One split is enough here: the problems fill the device, or there are too few keys to share."
    if report.tiles[0] != report.tiles[1]:
        table.caption += (
            "\nThe tile is a setting measured on this GPU, or one for a problem on every processor or for long caches "
            "of codes; calls with num_splits, as unsplit here, have the rule's."
        )
    if kv_format is not None:
        table.caption += "\nCodes are more work for each byte than numbers; the prediction counts their bytes alone."
    if sizes.row_tiles > 1:
        table.caption += f"\n{describe_row_tiles(sizes.row_tiles)} The prediction takes all reads to be from memory."
    return table


def _partials(sizes: Sizes, prediction: Prediction) -> int:
    from flash_decoding.cost_model import partial_bytes

    return partial_bytes(sizes, prediction.num_splits)


def _bytes(count: int) -> str:
    if count == 0:
        return "none"
    return f"{count / 1e6:.1f} MB" if count >= 1e5 else f"{count / 1e3:.1f} kB"


def _numbers(reports: list[_Report], target: _FoundGpu | _Cpu) -> dict[str, object]:
    def numbers(prediction: Prediction) -> dict[str, Any]:
        return {key: value for key, value in asdict(prediction).items() if key != "spans"}

    return {
        "device": target.name,
        "processors": target.processors,
        "reachable_gb_per_s": target.gb_per_s,
        "plans": [
            {
                "shape": asdict(report.shape),
                "kv_dtype": report.kv_format and str(report.kv_format),
                "kv_bytes": kv_bytes(report.sizes),
                "row_tiles": report.sizes.row_tiles,
                "tile": report.tiles[1],
                "unsplit": numbers(report.unsplit),
                "split": numbers(report.split),
                "reduce_bytes": reduce_work(report.sizes, report.split.num_splits).bytes_moved,
            }
            for report in reports
        ],
    }


def _draw(path: Path, report: _Report, target: _FoundGpu | _Cpu) -> None:
    from flash_decoding.bench.plots import save, schedule_figure

    figure = schedule_figure(report.unsplit, report.split, target.processors, target.processor, _title(report, target))
    try:
        for written in save(figure, path):
            console.print(f"wrote {written}")
    except OSError as error:
        fail(f"--plot must be a file that can be written, got {path}: {error.strerror}")


def _title(report: _Report, target: _FoundGpu | _Cpu) -> str:
    s = report.shape
    sequences = "1 sequence" if s.batch == 1 else f"{s.batch} sequences"
    heads = "1 KV head" if s.heads_kv == 1 else f"{s.heads_kv} KV heads"
    text = f"One decode step on {target.name}: {sequences} × {heads}, {s.kv_len:,} keys, head size {s.head_dim}"
    return _with_codes(text, report.kv_format)
