"""The two ceilings of a GPU, measured: reading memory and multiplying matrices. No kernel passes either."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import torch

from flash_decoding.bench.read_floor import measure_floor
from flash_decoding.bench.timing import Method, make_inputs
from flash_decoding.bench.workloads import ITEMSIZE, Case, Shape

READ_BYTES = 1 << 30
MATRIX_SIZE = 8192


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Measured limits of the present GPU."""

    read_gb_per_s: float
    read_bytes: int
    matrix_tflops: float
    dtype: str

    @property
    def ridge(self) -> float:
        """FLOPs per byte at which the limits meet; below it, memory is the limit."""
        return self.matrix_tflops * 1e3 / self.read_gb_per_s

    def reachable_tflops(self, intensity: float) -> float:
        """The roof above a kernel of that many FLOPs per byte."""
        return min(self.matrix_tflops, intensity * self.read_gb_per_s / 1e3)


def measure_ceilings(dtype: str, method: Method) -> Ceilings:
    """Read a gigabyte (less where memory is short), and multiply two square matrices of random numbers."""
    read_bytes = min(READ_BYTES, torch.cuda.mem_get_info()[0] // 8)
    kv_len = max(1024, read_bytes // (2 * 8 * 128 * ITEMSIZE[dtype]) // 1024 * 1024)
    case = Case("roofline", "read", Shape(1, 8, 8, kv_len, 128), dtype)
    floor = measure_floor(make_inputs(case, 2, method.seed), method)
    return Ceilings(floor.gb_per_s, floor.bytes, measure_matrix_tflops(dtype), dtype)


def measure_matrix_tflops(dtype: str, repeats: int = 10) -> float:
    """The rate of the library's square matrix product, the median of some."""
    size = MATRIX_SIZE
    a, b = (torch.randn(size, size, device="cuda", dtype=getattr(torch, dtype)) for _ in "ab")
    times = []
    for repeat in range(repeats + 3):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        torch.matmul(a, b)
        stop.record()
        stop.synchronize()
        if repeat >= 3:
            times.append(start.elapsed_time(stop))
    return 2 * size**3 / statistics.median(times) / 1e9
