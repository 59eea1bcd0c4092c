"""The table in a document, drawn from result files between two marks, so that a test can tell when it is stale."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flash_decoding.bench.results import Row
from flash_decoding.bench.tables import is_quantised, summary_markdown

# Their rows are a shape each, and nothing else.
_MERGEABLE = ("article", "serving", "latency")
BEGIN, END = "<!-- results: begin, drawn by `make results` -->", "<!-- results: end -->"


def fingerprint(rows: Sequence[Row]) -> str:
    """A short name for exactly these rows, kept in pictures drawn from them."""
    return hashlib.sha256(json.dumps(list(rows), sort_keys=True).encode()).hexdigest()[:16]


def merge_suites(rows: Sequence[Row]) -> list[Row]:
    """The rows as if all were of one suite, for one table and one picture.

    Raises:
        ValueError: they are of several devices, or of suites whose rows one column of times does not tell apart.
    """
    devices = list(dict.fromkeys(row["device"] for row in rows))
    if len(devices) > 1:
        raise ValueError(f"rows of one device only can be merged, got {' and '.join(devices)}")
    others = [suite for suite in dict.fromkeys(row["suite"] for row in rows) if suite not in _MERGEABLE]
    if others:
        raise ValueError(f"only the suites {', '.join(_MERGEABLE)} can be merged, got {', '.join(others)}")
    name = " and ".join(dict.fromkeys(row["suite"] for row in rows))
    return [row | {"suite": name} for row in rows]


def render_block(rows: Sequence[Row], environment: dict[str, Any], picture: str | None) -> str:
    """The marked block: where and when, the summary table, and the picture if there is one."""
    date = environment.get("date", "")
    days = date if " and " in date else date[:10]
    where = (
        f"µs per decode step in a CUDA graph with cold caches on one {environment.get('gpu')}; "
        f"torch {environment.get('torch')}, Triton {environment.get('triton')}, {days}. "
        "The read floor is the time of a kernel that only reads as many bytes."
    )
    parts = [BEGIN, where, summary_markdown(rows)]
    if picture is not None:
        what = "as a share of a 16-bit cache's" if any(map(is_quantised, rows)) else "over the read floor"
        parts.append(f"![Time {what}, ours and other libraries]({picture})")
    return "\n\n".join([*parts, END])


def replace_block(text: str, block: str) -> str:
    """The text with its marked block replaced.

    Raises:
        ValueError: the text has no marks.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the document must have a line {BEGIN!r} and, below it, a line {END!r}")
    return before + block + after


def find_block(text: str) -> str | None:
    """The marked block as it stands in the text, or None."""
    if BEGIN not in text or END not in text:
        return None
    return text[text.index(BEGIN) : text.index(END) + len(END)]


def update_document(path: Path, rows: Sequence[Row], environment: dict[str, Any], picture: Path | None) -> None:
    """Rewrite the block in the file at path; the picture is linked relative to it."""
    link = None if picture is None else picture.resolve().relative_to(path.resolve().parent).as_posix()
    path.write_text(replace_block(path.read_text(), render_block(rows, environment, link)))
