"""How many splits, and which tile: integers in, a frozen Plan out. Knows no tensor and no device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class Tile:
    """The shape of one step of the chunk kernel, and how the compiler should build it."""

    block_m: int  # rows: query heads of one KV head times query tokens, padded
    block_n: int  # keys
    block_d: int  # head_dim, padded
    block_dv: int  # value_dim, padded
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What the kernels need to know besides the problem."""

    num_splits: int
    split_size: int | None  # keys per split; None shares the tiles of each sequence out evenly
    tile: Tile


def next_power_of_2(x: int) -> int:
    return 1 << max(x - 1, 0).bit_length()


def choose_tile(group: int, q_len: int, head_dim: int, value_dim: int, element_size: int) -> Tile:
    """The tile of the GPU's chunk kernel. Never looks at batch or length, so that neither changes a result's bits."""
    block_d, block_dv = next_power_of_2(head_dim), next_power_of_2(value_dim)
    widest = max(block_d, block_dv)
    block_m = min(max(next_power_of_2(group * q_len), 16), 64 if widest <= 128 else 32)
    if element_size == 4:
        # Without tensor cores (exact float32) the tile lives in registers: small, or it spills.
        return Tile(16, 32 if widest <= 128 else 16, block_d, block_dv, num_warps=4, num_stages=2)
    if widest <= 128:
        return Tile(block_m, 64, block_d, block_dv, num_warps=2 if block_m == 16 else 4, num_stages=3)
    return Tile(block_m, 32, block_d, block_dv, num_warps=4, num_stages=3)


@lru_cache(maxsize=4096)
def choose_plan(
    *,
    batch: int,
    heads_kv: int,
    group: int,
    q_len: int,
    kv_len: int,
    head_dim: int,
    value_dim: int,
    element_size: int,
    processors: int,
    num_splits: int | None = None,
    split_size: int | None = None,
) -> Plan:
    """The plan of a GPU call.

    Args:
        kv_len: keys of the cache; lengths per sequence are on the device and are not looked at.
        processors: streaming multiprocessors of the device.
        num_splits, split_size: the caller's wish; None means choose.
    """
    tile = choose_tile(group, q_len, head_dim, value_dim, element_size)
    if split_size is not None:
        return Plan(max(1, -(-kv_len // split_size)), split_size, tile)
    if num_splits is None:
        row_tiles = -(-group * q_len // tile.block_m)
        num_splits = choose_num_splits(batch * heads_kv * row_tiles, -(-kv_len // tile.block_n), processors)
    return Plan(num_splits, None, tile)


def choose_num_splits(problems: int, tiles: int, processors: int) -> int:
    """Splits per problem so that the programs fill the processors in whole waves, each split a few tiles at least."""
    if problems == 0 or tiles <= 1:
        return 1
    programs = 2 * processors
    best, best_cost = 1, _cost(problems, tiles, 1, programs)
    for splits in range(2, min(tiles, max(programs // problems, 1)) + 1):
        cost = _cost(problems, tiles, splits, programs)
        if cost < best_cost:
            best, best_cost = splits, cost
    return best


def _cost(problems: int, tiles: int, splits: int, programs: int) -> float:
    """Time of the busiest program in tiles; a merge costs about as much as four tiles."""
    waves = -(-problems * splits // programs)
    return waves * -(-tiles // splits) + (4 + splits / 32 if splits > 1 else 0)
