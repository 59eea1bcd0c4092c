"""What several commands share: how they refuse, choose a device, and write their result."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import NoReturn

import torch

from flash_decoding.bench.workloads import Shape
from flash_decoding.cli import fail
from flash_decoding.problem import HEAD_DIM_STEP, MAX_KV_LEN, MAX_SPLITS, MAX_VALUE_DIM, MIN_HEAD_DIM

DTYPE_NAMES = {
    "bfloat16": "bfloat16", "float16": "float16", "float32": "float32",
    "bf16": "bfloat16", "fp16": "float16", "fp32": "float32",
}  # fmt: skip
DTYPE_HELP = "bfloat16, float16 or float32, or short: bf16, fp16, fp32"
# What the library calls an argument, as the command line calls it.
_OPTIONS = {name: f"--{name}" for name in ("suite", "shape", "device", "dtype", "peer", "gpu")}


def refuse(error: ValueError, **names: str) -> NoReturn:
    """End the command with the library's sentence, its first word being the option's name here."""
    argument, _, rest = str(error).partition(" ")
    fail(f"{(_OPTIONS | names).get(argument, argument)} {rest}")


def find_dtype(name: str, *others: str) -> str:
    """The full name of the dtype that --dtype names; others are accepted as they are."""
    if name in others:
        return name
    if name not in DTYPE_NAMES:
        fail(f"--dtype must be one of {', '.join((*others, *DTYPE_NAMES))}, got {name!r}")
    return DTYPE_NAMES[name]


def find_device(name: str) -> torch.device:
    """The device that --device names; 'auto' is a GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        fail(f"--device must be auto, cpu or cuda, got {name!r}")
    if device.type == "cuda" and not torch.cuda.is_available():
        fail(f"--device must be one that PyTorch can use, got {name!r}, and torch {torch.__version__} finds no GPU")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        fail(f"--device must be below cuda:{torch.cuda.device_count()}, got {name!r}")
    return device


def takes_head_dim(head_dim: int) -> bool:
    """Whether the library takes this head size."""
    return head_dim % HEAD_DIM_STEP == 0 and MIN_HEAD_DIM <= head_dim <= MAX_VALUE_DIM


def require_supported(shapes: Sequence[Shape], num_splits: int | None) -> None:
    """Refuse shapes and split counts that flash_decode() would refuse, before any work."""
    if num_splits is not None and num_splits < 1:
        fail(f"--num-splits must be at least 1, got {num_splits}")
    if num_splits is not None and num_splits > MAX_SPLITS:
        fail(f"--num-splits must be at most {MAX_SPLITS}, got {num_splits}")
    for shape in shapes:
        if not takes_head_dim(shape.head_dim):
            fail(
                f"D must be a multiple of {HEAD_DIM_STEP} from {MIN_HEAD_DIM} to {MAX_VALUE_DIM}, got {shape.head_dim}"
            )
        if shape.kv_len > MAX_KV_LEN:
            fail(f"N must be at most {MAX_KV_LEN}, got {shape.kv_len}")


def describe_row_tiles(row_tiles: int) -> str:
    """What several tiles of query rows mean for the bytes read."""
    return (
        f"The query heads of a KV head fill {row_tiles} tiles of rows, and each reads K and V, "
        "all but the first mostly from the L2 cache."
    )


def require_writable(option: str, path: Path | None) -> None:
    """Refuse a file that cannot be written, before the work rather than after it; missing folders will be made."""
    if path is None:
        return
    absolute = path.absolute()
    folder = next(folder for folder in (*absolute.parents, absolute) if folder.exists())
    if path.is_dir() or not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        fail(f"{option} must be a file that can be written, got {path}")


def require_drawable(path: Path | None) -> None:
    """Refuse --plot where its two files cannot be written or nothing can draw them."""
    if path is None:
        return
    if importlib.util.find_spec("matplotlib") is None:
        fail("--plot needs matplotlib: pip install 'flash-decoding[bench]'")
    stem = path.with_suffix("") if path.suffix in (".png", ".svg") else path
    for suffix in (".png", ".svg"):
        require_writable("--plot", stem.with_name(stem.name + suffix))


def warn_unwritten(path: Path, error: OSError, then: str = "") -> None:
    """Say on stderr that a file could not be written after all; what was measured is not lost with it."""
    print(f"flash-decoding: {error.filename or path} cannot be written ({error.strerror}){then}", file=sys.stderr)


def show_written(paths: Iterator[Path]) -> bool:
    """Let a generator write files, and say which it wrote; whether it could write all."""
    written, failed = [], False
    try:
        for path in paths:
            written.append(path)
    except OSError as error:
        warn_unwritten(Path(), error)
        failed = True
    except ValueError as error:
        fail(str(error))
    for path in written:
        print(f"wrote {path}")
    return not failed


def write_json(path: Path, result: dict[str, object]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        fail(f"--json must be a file that can be written, got {path}: {error.strerror}")


def find_versions(*packages: str) -> dict[str, str]:
    """Versions of Python, of this package and of those named, without importing them; absent ones are left out."""
    versions = {"python": platform.python_version()}
    for package in ("flash-decoding", "torch", *packages):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions
