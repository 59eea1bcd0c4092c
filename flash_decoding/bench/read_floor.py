"""The floor: how long a kernel takes that only reads as many bytes, the best of many settings.

Nothing that must read K and V can be faster, so every result is shown beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from itertools import count, product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flash_decoding.bench.timing import Inputs, Method, capture, time_cpu, time_graph


@dataclass(frozen=True, slots=True)
class Floor:
    """The best read-only time of a number of bytes, and the setting that reached it."""

    bytes: int
    us: float
    setting: str

    @property
    def gb_per_s(self) -> float:
        return self.bytes / self.us / 1e3


@dataclass(frozen=True, slots=True)
class ReadSetting:
    block: int  # 4-byte words per step and array
    num_warps: int
    num_stages: int  # 1: plain loads; more: that many steps in flight through shared memory
    programs_per_processor: int

    def __str__(self) -> str:
        return (
            f"block {self.block}, {self.num_warps} warps, {self.num_stages} stages, "
            f"{self.programs_per_processor} programs per processor"
        )


PIECE_WORDS = 1 << 17  # a megabyte at a time on a CPU
READ_SETTINGS = tuple(ReadSetting(*sizes) for sizes in product((1024, 2048, 4096, 8192), (4, 8), (1, 4), (1, 2, 4, 8)))


Sides = tuple[Tensor, Tensor]


def make_read_calls(
    sides: Sequence[Sides], setting: ReadSetting, processors: int, kv_bytes: int
) -> list[Callable[[], Tensor]]:
    """One call per rotated copy, which only reads the first kv_bytes of it, half from the keys, half from the values.

    Args:
        sides: of each copy, as Inputs.in_memory() gives them.
    """
    # Not at the top: the CPU suite needs no Triton.
    from flash_decoding.bench.read_kernel import launch_read

    # In whole 64 bytes: loads are 16 bytes wide only where the number of words tells so.
    words = kv_bytes // 128 * 16 or kv_bytes // 8
    pairs = [tuple(x[: words * 4].view(torch.int32) for x in side) for side in sides]
    programs = min(setting.programs_per_processor * processors, -(-words // setting.block))
    total = torch.empty(programs, dtype=torch.int32, device=pairs[0][0].device)

    def make(k: Tensor, v: Tensor) -> Callable[[], Tensor]:
        def call() -> Tensor:
            launch_read(k, v, total, setting.block, setting.num_warps, setting.num_stages)
            return total

        return call

    return [make(k, v) for k, v in pairs]


def measure_floor(copies: Sequence[Inputs], method: Method, kv_bytes: int | None = None) -> Floor:
    """The floor of so many bytes of one copy's K and V, None meaning all of them: the best of the settings' medians.

    A GPU times all settings once and the best three at full length.
    """
    device = copies[0].k.device
    sides = [copy.in_memory() for copy in copies]
    if kv_bytes is None:
        kv_bytes = sum(x.nbytes for x in sides[0])
    if device.type == "cpu":
        return min(
            (_measure_cpu_floor(sides, threads, method, kv_bytes) for threads in sorted({1, torch.get_num_threads()})),
            key=lambda floor: floor.us,
        )
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    screened: list[tuple[float, ReadSetting, torch.cuda.CUDAGraph]] = []
    for setting in READ_SETTINGS:
        try:
            graph, _ = capture(make_read_calls(sides, setting, processors, kv_bytes))
        except Exception as error:  # a setting that needs more shared memory than this GPU has
            if "out of resource" not in str(error):
                raise
            continue
        screened.append((time_graph(graph, len(copies), method, repeats=2).median, setting, graph))
        screened = sorted(screened, key=lambda entry: entry[0])[:3]
    us, setting = min(
        ((time_graph(graph, len(copies), method).median, setting) for _, setting, graph in screened),
        key=lambda entry: entry[0],
    )
    return Floor(kv_bytes, us, str(setting))


def _measure_cpu_floor(sides: Sequence[Sides], threads: int, method: Method, kv_bytes: int) -> Floor:
    timed = time_cpu([_make_cpu_read(side, threads, kv_bytes) for side in sides], method)
    return Floor(kv_bytes, timed.median, f"numba, {threads} threads")


def _make_cpu_read(sides: Sides, threads: int, kv_bytes: int) -> Callable[[], None]:
    """One pass over so many bytes of K and V by so many threads, which take a piece at a time from a common counter."""
    read = _cpu_reader()
    pieces = [
        words[start : start + PIECE_WORDS]
        for words in (x[: kv_bytes // 16 * 8].view(torch.int64).numpy() for x in sides)
        for start in range(0, words.size, PIECE_WORDS)
    ]

    def work(taken: Iterator[int]) -> None:
        for at in taken:
            if at >= len(pieces):
                return
            read(pieces[at])

    def call() -> None:
        taken = count()
        helpers = [_reader_pool().submit(work, taken) for _ in range(threads - 1)]
        work(taken)
        for helper in helpers:
            if not helper.cancel():  # one that has not begun has nothing left to read
                helper.result()

    return call


@lru_cache(maxsize=1)
def _reader_pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(1, torch.get_num_threads() - 1))


@lru_cache(maxsize=1)
def _cpu_reader() -> Callable[[Any], int]:
    """A compiled sum over 8-byte words, in four streams so that the memory always has the next request."""
    import numba

    @numba.njit(nogil=True)
    def read(words):
        quarter = words.size // 4
        first, second = words[:quarter], words[quarter : 2 * quarter]
        third, fourth = words[2 * quarter : 3 * quarter], words[3 * quarter : 4 * quarter]
        a, b, c, d = 0, 0, 0, 0
        for i in range(quarter):
            a += first[i]
            b += second[i]
            c += third[i]
            d += fourth[i]
        for word in words[4 * quarter :]:
            a += word
        return a + b + c + d

    read(np.zeros(8, np.int64))
    return read
