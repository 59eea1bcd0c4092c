"""How many splits, and which tile: integers in, a frozen Plan out. Knows no tensor and no device.

The constants were read off sweeps on one H200 (tiles x split counts x shapes, cold L2, benchmarks/sweeps): the time of
a call is flat near its best, and the best settings share one thing, about 72 KB of K and V in flight on every
processor in one whole wave. What is better than this rule by a percent or more differs from GPU to GPU and stands in a
table of measured settings (tuning.py); what the table does not have follows the rule.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

# A processor that has this much on its way from memory is busy; more only adds partials to merge. By codes in a 16-bit
# word: they are more work for each byte, of which more programs do more at a time.
_BYTES_IN_FLIGHT = {1: 72 * 1024, 2: 96 * 1024, 4: 128 * 1024}
# Programs of one warp each that read codes for up to eight query rows: one for each of a processor's four schedulers.
_PROGRAMS_OF_CODES = 4
# So many keys per processor, each of one KV head, are a long cache of codes.
_KEYS_OF_A_LONG_CACHE = 6000
# A merge costs about as much as this many tiles, and a tile more for so many splits (1 us and up on an H200).
_MERGE_TILES, _MERGE_SPLITS_PER_TILE = 2.5, 32
# So many of the processors with a whole problem each are as good as all of them.
_FULL = 0.9
# The model is no better than this, and fewer splits leave less to merge. Programs that read codes are busy themselves,
# not only waiting for memory, so there every one that is missing shows.
_SLACK, _SLACK_OF_CODES = 1.04, 1.01
# Sequences that may differ in length and hold more tiles than this are cut into pieces of one size: the longest alone
# would be the last to end. Shorter ones end soon enough to leave no processor idle for long.
_RAGGED_TILES = 8
# Then so many pieces per processor balance well, of at least so many tiles in a full cache; more are more to merge.
_PIECES_PER_PROCESSOR, _PIECES_OF_CODES, _TILES_PER_PIECE = 12, 16, 4
# Every program looks at all lengths; so many sequences keep a device busy uncut.
_MAX_RAGGED_BATCH = 1024
# The kernels count tiles in 32 bits, and divide those of one sequence in floating point.
_MAX_TILES, _MAX_RAGGED_TILES = 2**31 - 2**16, 2**20
# What the compiler keeps in shared memory besides the pipeline of K and V tiles: q, p and reductions over warps.
_SHARED_BESIDES_PIPELINE = 8 * 1024
# What CUDA keeps of it for each program; and what a scale takes with its zero point, or an element that has its own.
_SHARED_RESERVED, _SCALE_BYTES = 1024, 4
# The least among the architectures that the kernels are for (sm_86, sm_89), in bytes per program.
MIN_SHARED_MEMORY = 99 * 1024
# What a table of measured settings tells apart: kinds of calls, and how much of K and V a call may read, as the lower
# ends of the ranges in MB. The ends lie halfway between powers of two, which is what caches mostly are.
KINDS = ("dense", "paged", "ragged", "ragged-paged")
SIZES_MB = (0, 6, 24, 96)


@dataclass(frozen=True, slots=True)
class Tile:
    """The shape of one step of the chunk kernel, and how the compiler should build it."""

    block_m: int  # rows: query heads of one KV head times query tokens, padded
    block_n: int  # keys
    block_d: int  # head_dim, padded
    block_dv: int  # value_dim, padded
    num_warps: int
    num_stages: int
    rest_d: int = 0  # what a head_dim over 256 has beyond block_d, padded
    buffers: int = 1  # tiles of K and V on their way from memory while one is worked on


@dataclass(frozen=True, slots=True)
class Plan:
    """What the kernels need to know besides the problem."""

    num_splits: int
    split_size: int | None  # keys per split; None shares the tiles of each sequence out evenly
    tile: Tile
    at_once: int | None = None  # a ragged batch is cut into pieces instead: as many as run at once, or num_splits

    def count_pieces(self, problems: int) -> int:
        """At most, of a ragged batch: a piece more or less for every problem, unless all surely run at once."""
        assert self.at_once is not None, "the batch is cut into pieces"
        return self.at_once if all_run_at_once(problems, self.at_once) else self.num_splits + problems

    def partial_shape(self, batch: int, heads_kv: int, group: int, q_len: int) -> tuple[int, ...] | None:
        """Rows of scratch that the splits need between the kernels; None: there is one, and it writes the result."""
        if self.at_once is not None:
            rows = group * q_len
            problems = batch * heads_kv * -(-rows // self.tile.block_m)
            width = min(rows, self.tile.block_m)
            # A share more or less for every problem, and two numbers each that say where its pieces are.
            return self.num_splits + problems + -(-2 * problems // width), width
        if self.num_splits == 1 or batch == 0:
            return None
        return self.num_splits, batch, heads_kv * group, q_len


class Key(NamedTuple):
    """What a setting was measured for."""

    kind: str  # of KINDS
    width: int  # of keys or values, whichever are wider, padded
    rows: int  # block_m of the tile
    from_mb: int  # of SIZES_MB


@dataclass(frozen=True, slots=True)
class Setting:
    """How to go through K and V: what is free to choose once a tile has its rows and widths."""

    block_n: int
    num_warps: int
    buffers: int
    programs: int  # that run at once on a processor


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """The settings that were measured faster than the rule on one GPU. Hashed by identity, which costs nothing."""

    settings: Mapping[Key, Setting]
    sources: tuple[str, ...] = ()  # the files they are from


def next_power_of_2(x: int) -> int:
    return 1 << max(x - 1, 0).bit_length()


def choose_tile(
    group: int,
    q_len: int,
    head_dim: int,
    value_dim: int,
    element_size: int,
    shared_memory: int = MIN_SHARED_MEMORY,
    *,
    paged: bool = False,
    ragged: bool = False,
    parts: tuple[int, int] = (1, 1),
    scales: float = 0,
) -> Tile:
    """The tile of the GPU's chunk kernel. Never looks at batch or length, so that neither changes a result's bits.

    Args:
        element_size: bytes per element of q, k and v.
        shared_memory: bytes that one program may use on the device.
        paged: whether rows are found through a block table.
        ragged: whether the batch is cut into pieces, which want to be many and small.
        parts: quantised elements of K and of V in each of the 16-bit words that head_dim and value_dim then count.
        scales: how many of its own multiply the scores or weights of a key: 0 where none are by key, 1 per token, the
            groups of 4-bit codes, and infinity where they multiply elements.
    """
    block_d, rest_d, block_dv = max(next_power_of_2(head_dim), 16), 0, max(next_power_of_2(value_dim), 16)
    if head_dim > 256 and block_d != head_dim:
        # Padding to the next power of two would not fit; two parts are two products.
        block_d //= 2
        rest_d = max(next_power_of_2(head_dim - block_d), 16)
    widest, rows = max(block_d * parts[0], block_dv * parts[1]), next_power_of_2(group * q_len)
    most = max(parts)
    if element_size == 4:
        # Exact float32 is multiplied out in registers, so rows * keys * width elements must fit there; and from 16
        # rows on Triton would turn that product into a dot with TF32.
        block_m = min(rows, 8 if widest <= 256 else 4)
        block_n = min(max(16384 // (block_m * widest), 8), 64)
        return Tile(block_m, block_n, block_d, block_dv, 8, 3, rest_d, 1)

    # Tensor cores take eight columns or sixteen rows: up to eight rows of q are the columns of products with keys. Not
    # of wide heads, nor where scales multiply the elements of a tile of values.
    least = 8 if widest <= 256 and scales < math.inf else 16
    block_m = min(max(rows, least), 64 if widest <= 128 else 32 if widest <= 256 else 16)
    block_n = 64 if widest == 128 or (block_m == 64 and widest <= 128) else 32 if widest <= 256 else 16
    warps = 1 if widest <= 64 else 4 if widest <= 256 else 8  # per 16 rows
    buffers = 3
    if block_m == 8:
        # One warp shares nothing with others, and many small programs end together.
        block_n, warps = min(block_n, 32), 1 if widest <= 128 else 2
    elif widest == 128 and block_m == 16:
        if paged and ragged:
            block_n, warps = 32, 1
        elif ragged:
            warps = 2
        elif paged and shared_memory >= 160 * 1024:
            block_n = 128  # one program per processor
        elif paged:
            warps = 2
    if widest == 128 and block_m <= 16 and (paged or ragged):
        buffers = 2  # they and their page ids hide the hop from an id to its rows better than three
    if most > 1:
        # More rows would not fit into registers beside the parts.
        block_m = min(block_m, (64 if most == 2 else 32) if widest <= 128 else 16)
        if scales == math.inf:
            block_n, buffers = 16, 1  # their scales take more room than they
        elif widest <= 128:
            # Scales by key cross warps on their way to scores; without them wide tiles have less to do per key.
            # Codes of 4 bits beside wider elements spill in tiles of 64 keys.
            small = ragged or scales > 2 or (most == 4 and (block_m > 16 or parts != (4, 4)))
            if block_m == 8:
                block_n, warps, buffers = 32, 1, 2 if scales or ragged else 3
            elif scales == 0 and not ragged:
                block_n, warps, buffers = (128, 4, 2) if widest == 128 and block_m == 16 else (64, 1, 3)
            elif small:
                block_n, warps, buffers = 32, 1, 2
            else:
                block_n, warps, buffers = (64, 1, 2) if most == 4 else (32, 1, 3)
    tile = Tile(block_m, block_n, block_d, block_dv, min(max(block_m // 16, 1) * warps, 8), 1, rest_d)
    return _with_pipeline(tile, buffers, element_size, shared_memory, paged)


def enlarge_tile(
    tile: Tile, element_size: int, shared_memory: int, *, paged: bool, parts: tuple[int, int], scales: float
) -> Tile | None:  # fmt: skip
    """What is better than the rule's tile of codes for long caches, of whose first and last tiles less is seen.

    Measured for dense caches, heads of 128 and up to eight query rows; pages are taken to be alike. None for all
    others, and where registers would spill.
    """
    widest = max(tile.block_d * parts[0], tile.block_dv * parts[1])
    if max(parts) == 1 or tile.block_m != 8 or widest != 128 or scales > 2:
        return None
    if max(parts) == 2:
        return _with_pipeline(replace(tile, block_n=128, num_warps=4), 2, element_size, shared_memory, paged)
    if parts == (4, 4):
        return _with_pipeline(replace(tile, block_n=64), 3, element_size, shared_memory, paged)
    return None


def stand_alone(tile: Tile, element_size: int, shared_memory: int, parts: tuple[int, int]) -> Tile | None:
    """What is better than the rule's tile where every processor has one whole problem, and nothing is split.

    Measured as the rule's tile was: dense caches, heads of 64 and 128, up to eight query rows. None for all others.
    """
    width = max(tile.block_d, tile.block_dv)
    if max(parts) > 1 or element_size != 2 or tile.block_m != 8 or width not in (64, 128):
        return None
    larger = replace(tile, block_n=8192 // width, num_warps=2)
    return _with_pipeline(larger, 2 if width == 64 else 3, element_size, shared_memory, paged=False)


def _with_pipeline(tile: Tile, buffers: int, element_size: int, shared_memory: int, paged: bool) -> Tile:
    """The tile with so many buffers, or as many as fit."""
    width = tile.block_d + tile.rest_d
    besides = _SHARED_BESIDES_PIPELINE
    if max(tile.block_d, tile.block_dv) > 256:
        besides += tile.block_m * width * element_size
    buffers = max(1, min(buffers, (shared_memory - besides) // _tile_bytes(tile, element_size)))
    # A page id takes a stage before its rows.
    return replace(tile, buffers=buffers, num_stages=(2 * buffers if paged else buffers) + 1)


def _tile_bytes(tile: Tile, element_size: int) -> int:
    """Bytes of K and V in one tile."""
    return tile.block_n * (tile.block_d + tile.rest_d + tile.block_dv) * element_size


def find_key(tile: Tile, kv_bytes: int, *, paged: bool, ragged: bool) -> Key:
    """Where the setting of a call stands in a table.

    Args:
        tile: the rule's, whose rows and widths every setting keeps.
        kv_bytes: of the K and V that the call may read.
    """
    kind = KINDS[paged + 2 * ragged]
    from_mb = max(size for size in SIZES_MB if size * 10**6 <= kv_bytes)
    return Key(kind, max(tile.block_d + tile.rest_d, tile.block_dv), tile.block_m, from_mb)


def apply_setting(tile: Tile, setting: Setting, element_size: int, shared_memory: int, paged: bool) -> Tile:
    """The rule's tile with a measured setting instead of the rule's own."""
    tile = replace(tile, block_n=setting.block_n, num_warps=setting.num_warps)
    return _with_pipeline(tile, setting.buffers, element_size, shared_memory, paged)


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
    shared_memory: int = MIN_SHARED_MEMORY,
    paged: bool = False,
    window: int | None = None,
    ragged: bool = False,
    parts: tuple[int, int] = (1, 1),
    scales: float = 0,
    num_splits: int | None = None,
    split_size: int | None = None,
    table: Table | None = None,
) -> Plan:
    """The plan of a GPU call.

    Args:
        kv_len: keys of the cache; lengths per sequence are on the device and are not looked at.
        processors: streaming multiprocessors of the device.
        shared_memory: bytes that one program may use there.
        paged: whether rows are found through a block table.
        window: keys left of its own that a query sees; what is outside is not loaded and not counted.
        ragged: whether sequences may differ in length, by how much is not known here.
        parts, scales: those of choose_tile().
        num_splits, split_size: the caller's wish; None means choose.
        table: settings measured on the device; None means the rule. A caller with a wish gets the rule's tile, which
            knows neither batch nor length, so that neither changes a result's bits.
    """
    ragged, most = ragged and num_splits is None and split_size is None, max(parts)
    tile = choose_tile(
        group, q_len, head_dim, value_dim, element_size, shared_memory, paged=paged, ragged=ragged, parts=parts,
        scales=scales,
    )  # fmt: skip
    if window is not None:
        kv_len = min(kv_len, window + q_len)
    if split_size is not None:
        return Plan(max(1, -(-kv_len // split_size)), split_size, tile)
    if num_splits is None:
        programs = None
        if table is not None and element_size == 2 and most == 1:  # exact float32 has tiles of another kind
            kv_bytes = batch * heads_kv * kv_len * (head_dim + value_dim) * element_size
            setting = table.settings.get(find_key(tile, kv_bytes, paged=paged, ragged=ragged))
            if setting is not None:
                tile = apply_setting(tile, setting, element_size, shared_memory, paged)
                programs = setting.programs
        problems = batch * heads_kv * -(-group * q_len // tile.block_m)
        if not ragged:
            larger = enlarge_tile(tile, element_size, shared_memory, paged=paged, parts=parts, scales=scales)
            if larger is not None and problems * kv_len >= _KEYS_OF_A_LONG_CACHE * processors:
                tile = larger
        # Settings of the table are measured on other calls.
        if not paged and not ragged and _FULL * processors <= problems <= processors:
            alone = stand_alone(tile, element_size, shared_memory, parts)
            if alone is not None:
                tile, programs = alone, 1
        slots = processors * (
            programs
            or programs_per_processor(tile, element_size, shared_memory=shared_memory, parts=parts, scales=scales)
        )
        tiles = -(-kv_len // tile.block_n)
        cut = (
            ragged and 0 < batch <= _MAX_RAGGED_BATCH and _RAGGED_TILES < tiles <= _MAX_RAGGED_TILES
            and problems * tiles <= _MAX_TILES
        )  # fmt: skip
        if cut and problems:
            per_processor = _PIECES_PER_PROCESSOR if most == 1 else _PIECES_OF_CODES
            pieces = min(per_processor * processors, problems * tiles // _TILES_PER_PIECE)
            at_once = min(slots, pieces)
            return Plan(at_once if all_run_at_once(problems, at_once) else pieces, None, tile, at_once)
        num_splits = choose_num_splits(problems, tiles, slots, _SLACK if most == 1 else _SLACK_OF_CODES)
    return Plan(num_splits, None, tile)


def all_run_at_once(problems: int, at_once: int) -> bool:
    """Whether a limit of two even shares, if no less, leaves no more pieces than run at once, whatever the lengths."""
    return 2 * problems <= at_once


def programs_per_processor(
    tile: Tile, element_size: int, *, shared_memory: int, parts: tuple[int, int] = (1, 1), scales: float = 0
) -> int:  # fmt: skip
    """How many programs of the chunk kernel keep one processor's share of the memory system busy, and fit there."""
    if element_size == 4:
        return 2  # their tiles are in registers, where two programs fit
    in_flight = tile.buffers * _tile_bytes(tile, element_size)
    # One that does not fit beside the others is a second wave. A processor has little more than a program may use.
    width = (tile.block_d + tile.rest_d) * parts[0]
    per_key = width + tile.block_dv * parts[1] if scales == math.inf else 2 * scales
    scaling = int(tile.buffers * tile.block_n * per_key) * _SCALE_BYTES
    most = shared_memory // (in_flight + tile.block_m * width * element_size + scaling + _SHARED_RESERVED)
    if max(parts) > 1 and tile.block_m == 8 and tile.num_warps == 1:
        return max(1, min(_PROGRAMS_OF_CODES, most))
    return max(1, min(-(-_BYTES_IN_FLIGHT[max(parts)] // in_flight), most))


@lru_cache(maxsize=4096)
def choose_num_splits(problems: int, tiles: int, slots: int, slack: float = _SLACK) -> int:
    """The fewest splits per problem whose predicted time is within `slack` times the least.

    Args:
        problems: independent (sequence, KV head, tile of rows).
        tiles: tiles of keys in the longest sequence.
        slots: programs that run at once.
    """
    if problems == 0 or tiles <= 1:
        return 1
    most = min(tiles, max(2 * slots // problems, 1))
    costs = [_cost_in_tiles(problems, tiles, splits, slots) for splits in range(1, most + 1)]
    good_enough = slack * min(costs)
    return next(splits for splits, cost in enumerate(costs, start=1) if cost <= good_enough)


def _cost_in_tiles(problems: int, tiles: int, splits: int, slots: int) -> float:
    """Time of the busiest slot, counted in tiles, and of the merge."""
    waves = -(-problems * splits // slots)
    merge = _MERGE_TILES + splits / _MERGE_SPLITS_PER_TILE if splits > 1 else 0.0
    return waves * -(-tiles // splits) + merge
