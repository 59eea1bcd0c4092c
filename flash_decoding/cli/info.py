"""flash-decoding info: versions, devices, and which backend would run on each and why."""

from __future__ import annotations

import os
import platform

import torch
from rich.console import Console
from rich.table import Table

from flash_decoding import explain
from flash_decoding.backends import resolve
from flash_decoding.cli.common import find_versions
from flash_decoding.tuning import describe_table

# The smallest call that every backend takes, to ask what would run it.
_PROBE = (1, 1, 1, 64)


def info() -> None:
    """Show versions, devices, and which backend would run on each of them and why."""
    console = Console(highlight=False)
    versions = Table(title="Versions", title_justify="left")
    versions.add_column("package")
    versions.add_column("version")
    found = find_versions("triton", "numba", "llvmlite", "numpy", "transformers")
    for package in ("python", "flash-decoding", "torch", "triton", "numba", "llvmlite", "numpy", "transformers"):
        versions.add_row(package, found.get(package, "not installed"))
    versions.add_row("CUDA of torch", torch.version.cuda or "none: a CPU build")
    console.print(versions)

    devices = Table(title="Devices", title_justify="left")
    for name in ("device", "what", "backend", "why"):
        devices.add_column(name)
    for device in _find_devices():
        devices.add_row(str(device), _describe(device), *_choose_backend(device))
    if not torch.cuda.is_available():
        devices.add_row("cuda", "none found", "-", "PyTorch finds no CUDA device")
    console.print(devices)
    for index in range(torch.cuda.device_count()):
        name = torch.cuda.get_device_properties(index).name
        console.print(f"settings of cuda:{index}: {describe_table(name)}", markup=False, soft_wrap=True)


def _find_devices() -> list[torch.device]:
    return [torch.device("cpu"), *(torch.device("cuda", i) for i in range(torch.cuda.device_count()))]


def _describe(device: torch.device) -> str:
    if device.type == "cpu":
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        simd = torch.backends.cpu.get_cpu_capability()
        return f"{platform.machine()}, {cores} cores, {torch.get_num_threads()} threads, {simd}"
    facts = torch.cuda.get_device_properties(device)
    return (
        f"{facts.name}, sm_{facts.major}{facts.minor}, {facts.multi_processor_count} processors, "
        f"{facts.total_memory / 2**30:.0f} GiB"
    )


def _choose_backend(device: torch.device) -> tuple[str, str]:
    """(backend, why), or ('-', every reason why there is none)."""
    probe = torch.empty(_PROBE, device=device)
    reasons = explain(probe, probe, probe)
    if reasons:
        return "-", "; ".join(reasons)
    return resolve("auto", device), f"made for tensors on {device.type}, and it can run here"
