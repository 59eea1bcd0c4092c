"""The implementations behind flash_decode(): one folder each, none imports another, each loaded when first used."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Iterator
from functools import cache, lru_cache
from types import ModuleType

import torch

from flash_decoding.problem import Problem

BACKENDS = ("auto", "triton", "cpu")
_MIN_CAPABILITY = (8, 0)


def find_backend_errors(
    backend: str, device: torch.device, over_codes: torch.dtype | None = None
) -> Iterator[Exception]:
    """Every reason why `backend` cannot run on tensors of `device`.

    Args:
        over_codes: the dtype of queries over a quantised cache; None: the cache is not.
    """
    if backend not in BACKENDS:
        yield ValueError(f"backend must be one of {list(BACKENDS)}, got {backend!r}")
        return
    if device.type not in ("cpu", "cuda"):
        yield ValueError(f"q must be on a CPU or a CUDA device, got {device}")
        return
    name = resolve(backend, device)
    reasons = list(_refusals(name, device.type, device.index))
    if name == "triton" and over_codes == torch.float32:
        reasons.append("codes become float16 there, so q must be float16 or bfloat16, got float32")
    for reason in reasons:
        yield ValueError(f"backend {name!r} cannot run this call: {reason}")


def find_problem_errors(backend: str, problem: Problem) -> Iterator[Exception]:
    """Every reason why a backend that runs on the device cannot do this call."""
    name = resolve(backend, problem.q.device)
    if name == "triton":
        for error in load(name).find_errors(problem):
            yield ValueError(f"backend {name!r} cannot run this call: {error}")


def resolve(backend: str, device: torch.device) -> str:
    """The backend's own name: 'auto' is the one made for the device."""
    return ("triton" if device.type == "cuda" else "cpu") if backend == "auto" else backend


@cache
def load(name: str) -> ModuleType:
    """The backend's module, with plan() and decode(); importing it may take a second."""
    return importlib.import_module(f"flash_decoding.backends.{name}")


@lru_cache(maxsize=64)
def _refusals(name: str, device_type: str, device_index: int | None) -> tuple[str, ...]:
    if name == "cpu":
        if device_type != "cpu":
            return ("q is on a CUDA device; backend='triton' can",)
        return () if importlib.util.find_spec("numba") else ("numba is not installed",)
    if importlib.util.find_spec("triton") is None:
        return ("triton is not installed",)
    if device_type == "cpu":
        if os.environ.get("TRITON_INTERPRET") == "1":
            return ()
        return ("q is on the CPU; backend='cpu' can, and TRITON_INTERPRET=1 interprets the kernels",)
    capability = torch.cuda.get_device_capability(device_index)
    if capability < _MIN_CAPABILITY:
        return (f"it needs compute capability 8.0 or newer, got {capability[0]}.{capability[1]}",)
    return ()
