"""What one decode step costs: bytes, FLOPs, and a predicted time. Numbers in, numbers out; knows no tensor.

The time is that of reading K and V. Programs share the memory's bandwidth, but one processor alone cannot draw all of
it, which is why a few long programs are slower than many short ones that read the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

# An H200 reads 4.58 TB/s of its 4.80 at best; the same share is assumed of other GPUs.
REACHABLE_SHARE = 0.95
# How many times its even share of the bandwidth one processor can draw when the others are idle. Measured on an H200:
# 32 programs with 128 KB in flight each drew 47 GB/s (benchmarks/sweeps/nvidia-h200.json).
PROCESSOR_BOOST = 1.35
# One program alone waits so long for what it asked memory for, and takes it in at so many GB/s: of unsplit programs,
# those with 24 KB in flight drew 23.5 GB/s each and those with 48 KB 33.3 (article.json and serving.json in
# benchmarks/results/nvidia-h200).
LATENCY_US, PROGRAM_GB_PER_S = 0.6, 57.0
# Read-only kernels inside a CUDA graph on an H200 take this long beyond bytes ÷ bandwidth, 1 MB to 537 MB alike.
LAUNCH_US = 2.1
# The chunk kernel's query, first tile and last store on top of that, and a reduce kernel with little to merge that is
# already there (1.1 us less than one that is launched after it, benchmarks/sweeps/nvidia-h200-keys-first.json).
CHUNK_EXTRA_US = 1.0
REDUCE_US = 0.7


@dataclass(frozen=True, slots=True)
class Sizes:
    """One decode step as far as its cost goes."""

    batch: int
    heads_q: int
    heads_kv: int
    kv_len: int
    head_dim: int
    value_dim: int
    itemsize: int  # bytes per element of q, k, v and out
    q_len: int = 1
    row_tiles: int = 1  # programs per KV head and split, where one does not hold all query rows; each reads K and V
    code_bytes: int | None = None  # of a key and its value with their own scales; None: they are elements of itemsize

    @property
    def problems(self) -> int:
        """Independent attention problems: one per sequence and KV head."""
        return self.batch * self.heads_kv

    @property
    def key_bytes(self) -> int:
        """Bytes of a key and its value, of one KV head."""
        return (self.head_dim + self.value_dim) * self.itemsize if self.code_bytes is None else self.code_bytes

    @property
    def rows(self) -> int:
        """Query rows in all."""
        return self.batch * self.heads_q * self.q_len


class Work(NamedTuple):
    """What a kernel moves and computes."""

    bytes_moved: int
    flops: int

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return self.flops / self.bytes_moved if self.bytes_moved else 0.0


def kv_bytes(sizes: Sizes) -> int:
    """Bytes of K and V: what must come from memory once, however many programs read it."""
    return sizes.problems * sizes.kv_len * sizes.key_bytes


def partial_bytes(sizes: Sizes, num_splits: int) -> int:
    """Bytes of the float32 partials (acc, m, l); one split has none."""
    return 0 if num_splits == 1 else num_splits * sizes.rows * (sizes.value_dim + 2) * 4


def chunk_work(sizes: Sizes, num_splits: int) -> Work:
    """The chunk kernel: reads q once and K and V once per tile of query rows, whether from memory or from the L2
    cache; writes the partials, or the output when there is one split."""
    q_bytes = sizes.rows * sizes.head_dim * sizes.itemsize
    written = partial_bytes(sizes, num_splits) or sizes.rows * sizes.value_dim * sizes.itemsize
    flops = 2 * sizes.rows * sizes.kv_len * (sizes.head_dim + sizes.value_dim)
    return Work(sizes.row_tiles * kv_bytes(sizes) + q_bytes + written, flops)


def reduce_work(sizes: Sizes, num_splits: int) -> Work:
    """The reduce kernel: reads the partials, writes the output. Nothing for one split."""
    if num_splits == 1:
        return Work(0, 0)
    flops = num_splits * sizes.rows * (2 * sizes.value_dim + 4)
    return Work(partial_bytes(sizes, num_splits) + sizes.rows * sizes.value_dim * sizes.itemsize, flops)


class Span(NamedTuple):
    """One program at work: where, when in µs, and for which problem."""

    processor: int
    lane: int
    start: float
    stop: float
    problem: int


@dataclass(frozen=True, slots=True)
class Machine:
    """As much of a device as the schedule needs."""

    processors: int
    resident: int  # programs that a processor holds at a time
    gb_per_s: float  # reachable read bandwidth
    boost: float = PROCESSOR_BOOST
    in_flight: float = math.inf  # bytes of K and V that a program has on their way at a time

    @property
    def bytes_per_us(self) -> float:
        return self.gb_per_s * 1e3

    @property
    def rate_of_one(self) -> float:
        """Bytes per us that one program draws at most."""
        if math.isinf(self.in_flight):
            return math.inf
        return self.in_flight / (LATENCY_US + self.in_flight / (PROGRAM_GB_PER_S * 1e3))


@dataclass(frozen=True, slots=True)
class Prediction:
    """The time of one decode step and how busy it keeps the processors."""

    num_splits: int
    programs: int
    waves: int
    floor_us: float
    chunk_us: float
    reduce_us: float
    working_processors: int  # processors that get any work
    busy_share: float  # of the processors' time until the last program ends, how much is spent on work
    spans: tuple[Span, ...]

    @property
    def total_us(self) -> float:
        return self.chunk_us + self.reduce_us


def floor_us(read_bytes: int, gb_per_s: float) -> float:
    """Time of only reading so many bytes at the reachable bandwidth, one launch included."""
    return LAUNCH_US + read_bytes / (gb_per_s * 1e3)


def predict(sizes: Sizes, num_splits: int, block_n: int, machine: Machine) -> Prediction:
    """Play one decode step through: programs start in order on the first free lane and share the bandwidth.

    Args:
        block_n: keys per tile; a split is a whole number of tiles, as even as can be.
    """
    lengths = split_lengths(sizes.kv_len, num_splits, block_n)
    per_split = sizes.problems * sizes.row_tiles
    # A split without keys is a program too, but one that ends as it starts.
    loads = [length * sizes.key_bytes for length in lengths if length for _ in range(per_split)]
    spans = schedule(loads, machine, sizes.problems, sizes.row_tiles)
    end = max((span.stop for span in spans), default=0.0)
    worked = sum(span.stop - span.start for span in spans)
    reduce = REDUCE_US + partial_bytes(sizes, num_splits) / machine.bytes_per_us if num_splits > 1 else 0.0
    lanes = min(machine.resident, -(-len(loads) // machine.processors)) * machine.processors
    return Prediction(
        num_splits=num_splits,
        programs=num_splits * per_split,
        waves=-(-num_splits * per_split // (machine.processors * machine.resident)),
        floor_us=floor_us(kv_bytes(sizes), machine.gb_per_s),
        chunk_us=LAUNCH_US + CHUNK_EXTRA_US + end,
        reduce_us=reduce,
        working_processors=min(machine.processors, len(loads)),
        busy_share=worked / (end * lanes) if end else 0.0,
        spans=tuple(spans),
    )


def split_lengths(kv_len: int, num_splits: int, block_n: int) -> list[int]:
    """Keys of each split: tiles shared out evenly, the last one may be partial."""
    tiles = -(-kv_len // block_n)
    bounds = [min(i * tiles // num_splits * block_n, kv_len) for i in range(num_splits + 1)]
    return [stop - start for start, stop in pairwise(bounds)]


def schedule(loads: Sequence[float], machine: Machine, problems: int, row_tiles: int = 1) -> list[Span]:
    """When and where each program runs.

    Tiles of query rows of one problem read the same keys, and each counts as if it read them from memory; that the
    L2 cache answers some of it makes the time an upper bound there.

    Args:
        loads: bytes per program, in launch order; program i belongs to problem i // row_tiles % problems.
    """
    bytes_of = np.asarray(loads, float)
    done = 1e-6 * bytes_of.max(initial=0.0)
    lanes = machine.processors * machine.resident
    alone = machine.boost * machine.bytes_per_us / machine.processors  # what one processor can draw by itself
    program = np.full(lanes, -1)  # lane i is on processor i % processors, as programs are dealt out
    left = np.zeros(lanes)
    began = np.zeros(lanes)
    processor = np.arange(lanes) % machine.processors
    spans: list[Span] = []
    now, following = 0.0, 0
    while True:
        free = np.flatnonzero(program < 0)[: len(loads) - following]
        program[free] = np.arange(following, following + free.size)
        left[free], began[free] = bytes_of[program[free]], now
        following += free.size
        active = program >= 0
        if not active.any():
            return spans
        sharing = np.bincount(processor[active], minlength=machine.processors)[processor]
        rate = np.minimum(machine.bytes_per_us / active.sum(), alone / np.maximum(sharing, 1))
        rate = np.minimum(rate, machine.rate_of_one)
        step = (left[active] / rate[active]).min()
        now += step
        left[active] -= rate[active] * step
        for lane in np.flatnonzero(active & (left <= done)):
            index = int(program[lane])
            where, row = int(lane) % machine.processors, int(lane) // machine.processors
            spans.append(Span(where, row, float(began[lane]), now, index // row_tiles % problems))
            program[lane] = -1


def shared_bytes(block_n: int, block_m: int, head_dim: int, value_dim: int, itemsize: int, num_stages: int) -> int:
    """Shared memory of the chunk kernel: the tiles of K and V in flight, and q; an estimate from above by a little."""
    tiles = (num_stages - 1) * block_n * (head_dim + value_dim) * itemsize
    return tiles + block_m * max(head_dim, block_n) * itemsize
