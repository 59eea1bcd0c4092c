"""What several commands share: how they refuse, choose a device, and write their result."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import NoReturn

import torch

from flash_decoding.bench.workloads import Shape
from flash_decoding.problem import HEAD_DIM_STEP, MAX_KV_LEN, MAX_SPLITS, MAX_VALUE_DIM, MIN_HEAD_DIM


def fail(sentence: str) -> NoReturn:
    """End the command with one sentence on stderr and exit code 2."""
    print(f"flash-decoding: {sentence}", file=sys.stderr)
    raise SystemExit(2)


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


def require_writable(path: Path | None) -> None:
    """Refuse a result file that cannot be written, before the work rather than after it."""
    if path is None:
        return
    folder = path.parent
    if not folder.is_dir():
        fail(f"--json must lie in an existing directory, got {path}")
    if path.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        fail(f"--json must be a writable file, got {path}")


def write_json(path: Path, result: dict[str, object]) -> None:
    try:
        path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        fail(f"--json must be a writable file, got {path}: {error.strerror}")


def find_versions(*packages: str) -> dict[str, str]:
    """Versions of Python, of this package and of those named, without importing them; absent ones are left out."""
    versions = {"python": platform.python_version()}
    for package in ("flash-decoding", "torch", *packages):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions
