"""Facts of known GPUs, from a data file with sources, and of the device present. Importing it touches no device."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import resources
from typing import Any


@dataclass(frozen=True, slots=True)
class Limits:
    """What one processor can hold at a time; the same for all GPUs of a compute capability."""

    shared_per_processor: int  # bytes
    shared_per_program: int  # bytes
    warps: int
    programs: int
    registers: int


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as its data sheet describes it."""

    key: str
    name: str
    compute_capability: str
    processors: int
    gb_per_s: float
    l2_mb: float
    memory_gb: float
    tflops_bf16: float
    limits: Limits
    source: str
    device_names: tuple[str, ...] = ()


# CUDA keeps this much shared memory of every resident program for itself (compute capability 8.0 and newer).
RESERVED_SHARED = 1024
# Registers are handed out to a warp in portions of this many.
REGISTER_PORTION = 256


@lru_cache(maxsize=1)
def known_gpus() -> dict[str, Gpu]:
    """The GPUs of data/gpus.json by key."""
    data = _read_data()
    limits = {capability: Limits(**facts) for capability, facts in data["limits"].items()}
    gpus = {}
    for facts in data["gpus"]:
        names = tuple(facts["device_names"])
        gpus[facts["key"]] = Gpu(
            **(facts | {"device_names": names, "limits": limits[facts["compute_capability"]]}),
        )
    return gpus


def find_gpu(key: str) -> Gpu:
    """The GPU of that key, as h200."""
    gpus = known_gpus()
    plain = key.lower().replace(" ", "").replace("_", "-")
    if plain not in gpus:
        raise ValueError(f"gpu must be one of {', '.join(gpus)}, got {key!r}")
    return gpus[plain]


def present_gpu(index: int = 0) -> Gpu | None:
    """The device present, or None: the data sheet's facts when its name is known, what the driver reports otherwise."""
    import torch

    if not torch.cuda.is_available():
        return None
    device = torch.cuda.get_device_properties(index)
    known = match_device(device.name)
    if known is not None:
        return replace(known, processors=device.multi_processor_count)
    capability = f"{device.major}.{device.minor}"
    data = _read_data()["limits"]
    limits = Limits(**data.get(capability, data["8.0"]))
    return Gpu(
        key="present",
        name=device.name,
        compute_capability=capability,
        processors=device.multi_processor_count,
        gb_per_s=_reported_bandwidth(device),
        l2_mb=device.L2_cache_size / 2**20,
        memory_gb=device.total_memory / 2**30,
        tflops_bf16=0.0,
        limits=limits,
        source="the CUDA driver",
    )


def match_device(name: str) -> Gpu | None:
    """The known GPU that CUDA calls by this name; a Ti or a laptop's chip is another GPU."""
    return next((gpu for gpu in known_gpus().values() if name.lower() in gpu.device_names), None)


def resident_programs(limits: Limits, shared: int, num_warps: int, registers: int | None = None) -> int:
    """How many programs of a kernel one processor holds at a time.

    Args:
        shared: bytes of shared memory per program.
        registers: per thread; None leaves them out of account.
    """
    if shared > limits.shared_per_program:
        return 0
    fitting = [limits.programs, limits.warps // num_warps, limits.shared_per_processor // (shared + RESERVED_SHARED)]
    if registers:
        per_warp = -(-registers * 32 // REGISTER_PORTION) * REGISTER_PORTION
        fitting.append(limits.registers // per_warp // num_warps)
    return min(fitting)


def _reported_bandwidth(device: Any) -> float:
    """GB/s from the memory clock in kHz and the bus width in bits; two transfers a clock."""
    clock, width = getattr(device, "memory_clock_rate", 0), getattr(device, "memory_bus_width", 0)
    return 2 * clock * 1e3 * width / 8 / 1e9


def _read_data() -> dict[str, Any]:
    return json.loads(resources.files("flash_decoding").joinpath("data/gpus.json").read_text())
