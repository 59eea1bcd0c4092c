"""Tables of measured settings: where they lie, and how a file becomes the planner's table.

`flash-decoding tune` writes a file per GPU. The user's own comes before the one in the package, key by key: a key that
the user's file measured counts as that file says, be it that nothing was better than the rule. Files are read once per
process and GPU, and importing this module reads none.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from flash_decoding.split_plan import KINDS, SIZES_MB, Key, Setting, Table, next_power_of_2

# Of the file. A change to the kernels that makes old measurements worthless raises it as well.
SCHEMA = 1
# Names the folder of the user's own files.
FOLDER_VARIABLE = "FLASH_DECODING_TUNED_DIR"
PACKAGED = Path(__file__).parent / "data" / "tuned"
# What the kernels can be built with.
_LIMITS = {"block_n": (16, 256), "num_warps": (1, 8), "buffers": (1, 8), "programs": (1, 32)}


def user_folder() -> Path | None:
    """Where the user's own files are, by the XDG base directory specification; None where there is no home."""
    named = os.environ.get(FOLDER_VARIABLE)
    if named:
        return Path(named).expanduser()
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        # The specification says to ignore a relative path.
        return (cache if cache.is_absolute() else Path.home() / ".cache") / "flash-decoding" / "tuned"
    except RuntimeError:
        return None


def file_name(gpu: str) -> str:
    """The file of a GPU, by the name that CUDA gives it: nvidia-h200.json."""
    return "-".join("".join(c.lower() if c.isalnum() else " " for c in gpu).split()) + ".json"


@lru_cache(maxsize=16)
def find_table(gpu: str) -> Table | None:
    """The settings measured on GPUs of this name; None where there are none."""
    settings: dict[Key, Setting] = {}
    sources: list[str] = []
    for folder in (PACKAGED, user_folder()):
        file = None if folder is None else folder / file_name(gpu)
        measured = None if file is None else _read(file, gpu)
        for key, setting in (measured or {}).items():
            settings.pop(key, None)
            if setting is not None:
                settings[key] = setting
        if measured is not None:
            sources.append(str(file))
    return Table(settings, tuple(sources)) if settings else None


def describe_table(gpu: str) -> str:
    """One line about the settings in use on GPUs of this name."""
    table = find_table(gpu)
    if table is None:
        return "the planner's rule; `flash-decoding tune` measures whether another is faster"
    return f"{len(table.settings)} measured ones from {' and '.join(table.sources)}, else the planner's rule"


def parse(document: object, gpu: str) -> dict[Key, Setting | None]:
    """The keys that a file measured, each with its setting, None where nothing was better than the rule.

    Raises:
        ValueError: it is no such file, or one of another version or GPU.
    """
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        found = document.get("schema") if isinstance(document, dict) else None
        raise ValueError(f"its schema must be {SCHEMA}, got {found!r}")
    if file_name(str(document.get("gpu"))) != file_name(gpu):
        raise ValueError(f"its gpu must be {gpu!r}, got {document.get('gpu')!r}")
    keys = document.get("keys")
    if not isinstance(keys, list):
        raise ValueError("its keys must be a list")
    return dict(_parse_key(entry) for entry in keys)


def _parse_key(entry: Any) -> tuple[Key, Setting | None]:
    if not isinstance(entry, dict):
        raise ValueError(f"a key must be an object, got {entry!r}")
    kind, width, rows, from_mb = (entry.get(name) for name in Key._fields)
    if kind not in KINDS or from_mb not in SIZES_MB or type(width) is not int or type(rows) is not int:
        raise ValueError(
            f"a key must have a kind of {KINDS}, a width, rows, and from_mb of {SIZES_MB}, "
            f"got {kind!r}, {width!r}, {rows!r} and {from_mb!r}"
        )
    chosen = entry.get("setting")
    return Key(kind, width, rows, from_mb), None if chosen is None else _parse_setting(chosen)


def _parse_setting(chosen: Any) -> Setting:
    values: dict[str, Any] = {name: chosen.get(name) if isinstance(chosen, dict) else None for name in _LIMITS}
    for name, (least, most) in _LIMITS.items():
        value = values[name]
        if type(value) is not int or not least <= value <= most:
            raise ValueError(f"{name} must be an integer from {least} to {most}, got {value!r}")
        if name in ("block_n", "num_warps") and value != next_power_of_2(value):
            raise ValueError(f"{name} must be a power of two, got {value}")
    return Setting(**values)


def _read(file: Path, gpu: str) -> Mapping[Key, Setting | None] | None:
    """A file's keys, None where there is no file; one that cannot be used has none either, and a warning says why."""
    try:
        return parse(json.loads(file.read_text(encoding="utf-8")), gpu)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return None
    except (OSError, ValueError) as error:  # what JSON and Unicode raise are ValueErrors
        warnings.warn(
            f"{file} is not used, since it is no table of measured settings for this version: {error}. "
            "`flash-decoding tune` writes it anew.",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
