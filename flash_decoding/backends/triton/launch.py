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
_STRIDE_LIMIT = 2**31  # from here on Triton passes an integer as 64 bits, which is another variant


def is_aligned(tensors: Sequence[Tensor], strides: Sequence[tuple[int, ...]]) -> bool:
    """Whether Triton compiles the common variant for these: all multiples of 16, all strides 32 bits wide."""
    facts = 0
    for x in tensors:
        facts |= x.data_ptr()
    facts &= 15
    for stride in strides:
        for step in stride:
            facts |= step
    return facts & 15 == 0 and facts < _STRIDE_LIMIT


def launch(
    kernel: Any,
    key: tuple | None,
    grid: tuple[int, int],
    args: tuple,
    constants: tuple,
    tile: tuple[int, int],
) -> None:
    """Start kernel(*args, *constants) on the current device and stream.

    Args:
        key: whatever tells apart the variants of this kernel; None takes Triton's own way.
        grid: programs along the two axes.
        tile: (num_warps, num_stages).
    """
    device = args[0].device.index
    compiled = None if key is None else _compiled.get((device, kernel, key, constants, tile))
    if compiled is None:
        with _first_start:
            compiled = kernel[grid](*args, *constants, num_warps=tile[0], num_stages=tile[1])
        if key is not None and hasattr(compiled, "packed_metadata"):  # the interpreter returns nothing
            _compiled[device, kernel, key, constants, tile] = compiled
        return
    runtime = triton.knobs.runtime
    hooks = runtime.launch_enter_hook, runtime.launch_exit_hook
    stream = torch._C._cuda_getCurrentRawStream(device)
    metadata = None
    if hooks[0] is not None and not getattr(hooks[0], "calls", True):
        hooks = None, None  # nobody listens; calling an empty chain costs microseconds
    else:
        metadata = compiled.launch_metadata((*grid, 1), stream, *args, *constants)
    compiled.run(
        *grid, 1, stream, compiled.function, compiled.packed_metadata, metadata, *hooks, *args, *constants
    )  # fmt: skip
