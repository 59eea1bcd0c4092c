"""flash-decoding accuracy: what a quantised cache costs a real language model."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from flash_decoding.cli import fail
from flash_decoding.cli.common import DTYPE_HELP, find_device, require_drawable, require_writable, show_written
from flash_decoding.cli.generate import (
    choose_dtype,
    doing,
    find_kv_format,
    find_model,
    first_sentence,
    head_dim_of,
    load_model,
    require_codes_run,
    require_width,
)
from flash_decoding.quantization import KVFormat

DEFAULT_TOKENS = 2048
# One that is predicted, and one before it.
_FEWEST_TOKENS = 2


def accuracy(
    model: Annotated[
        str | None,
        typer.Option(help="A model directory, a .gguf file or a hub name. [default: SmolLM2-135M-Instruct]"),
    ] = None,
    text: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A text, UTF-8. [default: the one that comes with the package]")
    ] = None,
    tokens: Annotated[int, typer.Option(min=_FEWEST_TOKENS, help="How many of its tokens to read.")] = DEFAULT_TOKENS,
    kv_dtype: Annotated[
        list[str] | None,
        typer.Option(help="Only this format, as in generate; may be repeated. Default: those that fit the model."),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[str, typer.Option(help=f"auto (float32 on a CPU, bfloat16 on a GPU), {DTYPE_HELP}.")] = "auto",
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the figures here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw memory against loss as PLOT.png and PLOT.svg.")] = None,
    report: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Measure nothing: show what --json wrote here.")
    ] = None,
    readme: Annotated[
        Path | None, typer.Option(help="Rewrite the results between the marks of this document, with --report.")
    ] = None,
) -> None:
    """Let a language model read a text with each cache format: perplexity, and what differs from the 16-bit cache.

    Every token sees keys and values of all tokens up to itself as codes, read by our kernels, as when a model writes.
    """
    for option, path in (("--json", json_file), ("--readme", readme)):
        require_writable(option, path)
    require_drawable(plot)
    if report is not None:
        _refuse_given({"--model": model, "--text": text, "--kv-dtype": kv_dtype, "--json": json_file})
        results = _read(report)
    else:
        if readme is not None:
            fail("--readme must be given with --report")
        results = _measure(model, text, tokens, kv_dtype, device, dtype)
    _print_table(results)
    if not show_written(_write(results, json_file, plot, readme)):
        raise typer.Exit(2)


def _refuse_given(options: dict[str, object]) -> None:
    for name, value in options.items():
        if value:
            fail(f"{name} must be given without --report, which measures nothing")


def _read(path: Path) -> dict[str, Any]:
    from flash_decoding.bench.accuracy import read_results

    try:
        return read_results(path)
    except ValueError as error:
        fail(f"--report {error}")


def _measure(
    model: str | None, text: Path | None, tokens: int, kv_dtypes: list[str] | None, device: str, dtype: str
) -> dict[str, Any]:
    from flash_decoding.bench.accuracy import BLOCK, SCHEMA, choose_formats, measure, read_shipped_text
    from flash_decoding.bench.results import describe_environment

    target = find_device(device)
    kind = choose_dtype(dtype, target)
    formats = [str(find_kv_format("--kv-dtype", name)) for name in kv_dtypes or []]
    require_codes_run(find_kv_format("--kv-dtype", "int8"), target, kind)
    words = read_shipped_text() if text is None else _read_text(text)
    source = find_model(model)
    progress = Console(file=sys.stderr, soft_wrap=True, highlight=False)
    dtype_name = str(kind).removeprefix("torch.")
    with doing(progress, f"Loading {source.name} on {target} in {dtype_name} ...", spin=source.local):
        language_model, tokenizer = load_model(source, target, kind)
    width = head_dim_of(language_model)
    for name in formats:
        require_width(KVFormat.parse(name), width, f"--model {source.name}")
    ids = tokenizer(words, return_tensors="pt", add_special_tokens=False)["input_ids"][0]
    limit = getattr(language_model.config.get_text_config(), "max_position_embeddings", tokens)
    ids = ids[: min(tokens, limit)].to(target)
    if ids.shape[0] < _FEWEST_TOKENS:
        fail(f"--text must hold at least {_FEWEST_TOKENS} tokens, got {ids.shape[0]}")
    names = formats or choose_formats(width)

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=progress, transient=True) as bar:
        blocks = -(-(ids.shape[0] - 1) // BLOCK) * (len(names) + 1)
        task = bar.add_task("compiling kernels", total=blocks)
        try:
            rows = measure(
                language_model, ids, names, done=lambda name: bar.update(task, advance=1, description=f"after {name}")
            )
        except (ValueError, TypeError) as error:  # what only the model's attention calls tell
            fail(f"--model {source.name} cannot be measured: {first_sentence(error)}")
    return {
        "schema": SCHEMA,
        "environment": describe_environment(("transformers",)),
        "model": source.name,
        "text": text.name if text is not None else "the introduction of Darwin's Origin of Species",
        "tokens": ids.shape[0],
        "device": target.type,
        "dtype": dtype_name,
        "formats": rows,
    }


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        fail(f"--text must be a file that can be read, got {path}: {error.strerror}")
    except UnicodeDecodeError:
        fail(f"--text must be UTF-8, got {path}, which is not")


def _print_table(results: dict[str, Any]) -> None:
    from flash_decoding.bench.accuracy import COLUMNS, describe, table_cells

    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    for number, name in enumerate(COLUMNS):
        # 80 columns must do.
        table.add_column(
            name.replace(" ", "\n"), justify="right" if number else "left", no_wrap=number > 0, overflow="fold"
        )
    for row in results["formats"]:
        table.add_row(*table_cells(row))
    console = Console(highlight=False)
    console.print(table)
    console.print(describe(results), style="dim")
    console.print("± is the standard error of the mean over the tokens; KL is of the 16-bit cache's distribution.")


def _write(
    results: dict[str, Any], json_file: Path | None, plot: Path | None, readme: Path | None
) -> Iterator[Path]:  # fmt: skip
    """Write the files that are wanted, and give each that is there."""
    from flash_decoding.bench.accuracy import accuracy_figure, dump, update_document
    from flash_decoding.bench.document import fingerprint
    from flash_decoding.bench.plots import save

    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(dump(results), encoding="utf-8")
        yield json_file
    pictures: list[Path] = []
    if plot is not None:
        pictures = save(accuracy_figure(results), plot, made_from=fingerprint(results["formats"]))
        yield from pictures
    if readme is not None:
        update_document(readme, results, pictures[1] if pictures else None)
        yield readme
