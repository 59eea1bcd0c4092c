"""flash-decoding: where the command line starts, before the packages are there that its commands need."""

from __future__ import annotations

import os
import sys

from flash_decoding.bench.load import choose_wait_policy
from flash_decoding.cli import fail

# The commands that time this process's own threads; `bench` times in processes that it starts by the same rule.
_TIMED = ("generate", "--cpu")


def app(prog_name: str = "flash-decoding") -> None:
    """Run the command that sys.argv names, and exit."""
    arguments = sys.argv[1:] or ["--help"]
    if any(word in _TIMED for word in arguments):
        _restart_with_waiting_threads()
    try:
        from flash_decoding.cli.commands import app as commands
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("typer", "rich"):
            raise
        fail(f"the command line needs {package}: pip install 'flash-decoding[bench]'")
    try:
        status = commands(arguments, prog_name=prog_name, standalone_mode=False)
    except Exception as error:
        # Typer carries its own copy of click in some versions, so a wrong option is known by what it can do.
        if not hasattr(error, "format_message"):
            raise
        context = getattr(error, "ctx", None)
        message = str(error.format_message()).rstrip(".")
        fail(f"{message}; see {context.command_path if context else prog_name} --help")
    sys.exit(status if isinstance(status, int) else 0)


def _restart_with_waiting_threads() -> None:
    """Start this process anew where its threads should sleep while they wait; see choose_wait_policy().

    OpenMP reads the variable when torch loads it, and importing this package has loaded torch, so it is too late to set
    it here.
    """
    added = choose_wait_policy()
    if os.name == "posix" and added:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | added)
