"""The commands put together, as a Typer application; main.py starts it."""

from __future__ import annotations

from typing import Annotated

import typer

from flash_decoding import __version__
from flash_decoding.cli import accuracy, bench, check, generate, info, plan, profile, tune

app = typer.Typer(
    help="Flash Decoding: attention of a few new tokens against a long key/value cache.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (
    generate.generate, accuracy.accuracy, check.check, info.info, bench.bench, profile.profile, plan.plan, tune.tune,
):  # fmt: skip
    app.command()(command)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"flash-decoding {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass
