"""The command line: one file per command, commands.py puts them together, main.py starts them."""

from __future__ import annotations

import sys
from typing import NoReturn


def fail(sentence: str) -> NoReturn:
    """End the command with one sentence on stderr and exit code 2."""
    print(f"flash-decoding: {sentence}", file=sys.stderr)
    raise SystemExit(2)
