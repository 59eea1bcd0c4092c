"""From a small key to a compiled kernel: the one place that knows how kernels are started.

`kernel[grid](...)` binds and classifies every argument anew, 15 to 30 us a call. Triton compiles one variant per dtype
and per fact about strides and addresses (a multiple of 16); the launchers fold these facts into a key, and a kernel
that was started once under a key is started directly from then on.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

_compiled: dict[tuple, Any] = {}
_first_start = threading.Lock()


def variant(tensors: Sequence[Tensor], strides: Sequence[tuple[int, ...]]) -> object:
    """Which variant Triton compiles for these addresses and strides: True for the common one.

    Triton looks at each: whether it is a multiple of 16, whether it is 1, and whether it fits into 32 bits.
    """
    facts = 0
    for x in tensors:
        facts |= x.data_ptr()
    facts &= 15
    for stride in strides:
        for step in stride:
            facts |= step
    if facts & 15 == 0 and facts < 2**31:
        return True
    return (
        *[x.data_ptr() % 16 == 0 for x in tensors],
        *[(step % 16 == 0, step == 1, step >= 2**31) for stride in strides for step in stride],
    )


def launch(
    kernel: Any, key: tuple, grid: tuple[int, int], args: tuple, constants: tuple, build: tuple[int, int]
) -> None:
    """Start kernel(*args, *constants) on the current device and stream.

    Args:
        key: tells apart the variants of this kernel: types, what is None, and variant() of what Triton looks at.
        grid: programs along the two axes.
        build: (num_warps, num_stages).
    """
    device = args[0].device.index
    key = (device, kernel, key, constants, build)
    compiled = _compiled.get(key)
    if compiled is None:
        with _first_start:
            compiled = kernel[grid](*args, *constants, num_warps=build[0], num_stages=build[1])
        if hasattr(compiled, "packed_metadata"):  # the interpreter returns nothing
            _compiled[key] = compiled
        return
    runtime = triton.knobs.runtime
    hooks = runtime.launch_enter_hook, runtime.launch_exit_hook
    stream = torch._C._cuda_getCurrentRawStream(device)
    metadata = None
    # A chain of hooks to which nobody listens costs microseconds to call.
    if all(hook is None or not getattr(hook, "calls", True) for hook in hooks):
        hooks = None, None
    else:
        metadata = compiled.launch_metadata((*grid, 1), stream, *args, *constants)
    compiled.run(
        *grid, 1, stream, compiled.function, compiled.packed_metadata, metadata, *hooks, *args, *constants
    )  # fmt: skip
