"""New keys and values into the cache, keys and queries rotated on the way, in one kernel.

    k_cache[kv_lens[b] + i] = R k_new[i]    v_cache[kv_lens[b] + i] = v_new[i]    q_out[t] = R q[t]

A unit of work is all the heads of one token. Each row is widened to float32, and there R turns pairs of its first
entries by the angles of its position; without tables it is left out. A token whose position is not in the cache, or
whose page is not in the pool, is not written.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable
from functools import partial as bind
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic
from torch import Tensor

from flash_decoding.backends.cpu import _KINDS, _NOWHERE, _address, _prepare_lock, _sequence, _view, _view_table
from flash_decoding.backends.cpu.chunk import Sequence, View
from flash_decoding.backends.cpu.masks import read_length
from flash_decoding.backends.cpu.packing import make_packer, make_reader, place
from flash_decoding.backends.cpu.reduce import vector_offset
from flash_decoding.backends.cpu.simd import (
    _HAS_HALF,
    FLOAT32,
    LANES,
    _load,
    _widen_half_by_bits,
    address_of,
    element_bytes,
    fetch_add,
    inner,
    load,
    load_float,
    load_int32,
    load_int64,
    store,
    store_float,
)
from flash_decoding.backends.cpu.threads import count_threads, run_shared

if TYPE_CHECKING:
    from flash_decoding.append import Append


class Call(NamedTuple):
    """One call as plain numbers; an address of 0 stands for an array that is not there. Its counter lies behind it."""

    k_new: View
    v_new: View
    k: View
    v: View
    q: View
    q_out: View
    kv_lens: Sequence
    new_lens: Sequence
    block_table: View
    cos: int
    sin: int
    cos_step: int  # bytes from one position to the next
    sin_step: int
    half: int  # pairs per row that are turned
    positions: int  # rows of the tables
    interleaved: int  # 1 or 0
    batch: int
    heads_kv: int
    heads_q: int
    new: int
    q_len: int
    q_step: int
    capacity: int
    page_size: int  # 0: a dense cache
    pages: int
    head_dim: int
    value_dim: int


_packer = make_packer(Call)
_SIZE = _packer.size
_read_call = make_reader(Call)


@intrinsic
def load_element(typingctx: Any, address: Any, kind: Any) -> Any:
    """One element as float32."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        if kind == types.float32:
            return _load(builder, args[0], ir.FloatType(), align=4)
        raw = _load(builder, args[0], ir.IntType(16), align=2)
        if kind == types.uint16:
            wide = builder.shl(builder.zext(raw, ir.IntType(32)), ir.Constant(ir.IntType(32), 16))
            return builder.bitcast(wide, ir.FloatType())
        if _HAS_HALF:
            return builder.fpext(builder.bitcast(raw, ir.HalfType()), ir.FloatType())
        first = ir.Constant(ir.IntType(32), 0)
        lanes = builder.insert_element(ir.Constant(ir.VectorType(ir.IntType(16), LANES), None), raw, first)
        return builder.extract_element(_widen_half_by_bits(builder, lanes), first)

    return types.float32(types.int64, kind), codegen


@inner
def find_row(call, b, position):
    """(page, slot) of a position of sequence b in the cache; page -1 where it has none."""
    if position >= call.capacity:
        return -1, 0
    if call.page_size == 0:
        return b, position
    page = load_int32(address_of(call.block_table, b, 0, position // call.page_size))
    return page if page < call.pages else -1, position % call.page_size


@inner
def copy_row(source, target, width, kind, row):
    """Copy a row through its float32 image `row`, which is left there."""
    size = element_bytes(kind)
    for i in range((width + LANES - 1) // LANES):
        d = vector_offset(i, width)
        x = load(source + d * size, kind)
        store(row + 4 * d, x, FLOAT32)
        store(target + d * size, x, kind)


@inner
def rotate(call, table_kind, position, row):
    """Turn the pairs of a float32 row by the angles of a position."""
    size = element_bytes(table_kind)
    cos_at, sin_at = call.cos + position * call.cos_step, call.sin + position * call.sin_step
    step, apart = (8, 4) if call.interleaved else (4, 4 * call.half)
    for i in range(call.half):
        cos, sin = load_element(cos_at + i * size, table_kind), load_element(sin_at + i * size, table_kind)
        at = row + i * step
        x, y = load_float(at), load_float(at + apart)
        store_float(at, x * cos - y * sin)
        store_float(at + apart, y * cos + x * sin)


@inner
def copy_rotated(call, source, target, kind, table_kind, position, row):
    """Copy a row of keys or queries, rotated if there are tables."""
    copy_row(source, target, call.head_dim, kind, row)
    if call.half > 0:
        rotate(call, table_kind, position, row)
        # Entries that are not turned were copied; the last vector may reach them, which changes nothing.
        for i in range((2 * call.half + LANES - 1) // LANES):
            d = vector_offset(i, call.head_dim)
            store(target + d * element_bytes(kind), load(row + 4 * d, FLOAT32), kind)


@inner
def append_token(call, kind, table_kind, b, i, row):
    """All heads of new token i of sequence b."""
    length = load_int64(call.kv_lens.base + b * 8) if call.kv_lens.size == 8 else load_int32(call.kv_lens.base + b * 4)
    if length < 0 or i >= read_length(call.new_lens, b, call.new, call.new):
        return
    position = min(length, call.capacity) + i
    page, slot = find_row(call, b, position)
    if page < 0:
        return
    for h in range(call.heads_kv):
        source, target = address_of(call.k_new, b, h, i), address_of(call.k, page, h, slot)
        copy_rotated(call, source, target, kind, table_kind, position, row)
        source, target = address_of(call.v_new, b, h, i), address_of(call.v, page, h, slot)
        copy_row(source, target, call.value_dim, kind, row)


@inner
def rotate_token(call, kind, table_kind, b, t, row):
    """All heads of query token t of sequence b."""
    position = min(read_length(call.kv_lens, b, 0, call.capacity) + t * call.q_step, call.positions - 1)
    for h in range(call.heads_q):
        source, target = address_of(call.q, b, h, t), address_of(call.q_out, b, h, t)
        copy_rotated(call, source, target, kind, table_kind, position, row)


def _make_kernel(stamp: str, cache: bool) -> Callable[..., Any]:
    """The entry point. Numba keys its cache on this file and on captured constants: stamp covers the others."""

    @njit(nogil=True, cache=cache)
    def append_units(record, kind, table_kind):
        """Take units until none is left; any number of threads may run it on the same record."""
        stamp  # noqa: B018, captured by being named
        call = _read_call(record)
        memory = np.empty(max(call.head_dim, call.value_dim), np.float32)
        row = memory.ctypes.data
        tokens = call.new + call.q_len
        while True:
            unit = fetch_add(record + _SIZE, 1)
            if unit >= call.batch * tokens:
                return memory[0]  # a use after the last unit, or memory would be freed before the first
            b, i = unit // tokens, unit % tokens
            if i < call.new:
                append_token(call, kind, table_kind, b, i, row)
            else:
                rotate_token(call, kind, table_kind, b, i - call.new, row)

    return append_units


_kernel: Callable[..., Any] | None = None
_compiled: set[tuple[torch.dtype, torch.dtype]] = set()


def append(call: Append) -> None:
    """Write the new keys and values of a checked call, and its rotated queries."""
    dtype = call.k_new.dtype
    table_dtype = torch.float32 if call.rotary_cos is None else call.rotary_cos.dtype
    kernel = _prepare() if _kernel is None else _kernel
    memory = place(_describe(call), counters=1)
    # `keep` lives as long as any thread works: an interrupt may take the caller away earlier.
    work = bind(_work, kernel, ctypes.addressof(memory), _KINDS[dtype], _KINDS[table_dtype], (call, memory))
    if (dtype, table_dtype) not in _compiled:
        with _prepare_lock:  # so that no other thread forks while this one compiles
            work()
            _compiled.add((dtype, table_dtype))
        return
    elements = sum(x.numel() for x in (call.k_new, call.v_new, call.q) if x is not None)
    run_shared(work, count_threads(elements))


def _work(kernel: Callable[..., Any], record: int, kind: Any, table_kind: Any, keep: tuple[object, ...]) -> None:
    kernel(record, kind, table_kind)


def _prepare() -> Callable[..., Any]:
    global _kernel
    with _prepare_lock:
        if _kernel is None:
            sources = sorted(Path(__file__).parent.glob("*.py"))
            stamp = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
            try:
                _kernel = _make_kernel(stamp, cache=True)
            except RuntimeError:  # Numba found no directory that it may write to
                _kernel = _make_kernel(stamp, cache=False)
    return _kernel


def _describe(call: Append) -> bytes:
    """The packed fields of Call, in their order."""
    batch, heads_kv, new, head_dim = call.k_new.shape
    heads_q, q_len = (0, 0) if call.q is None else call.q.shape[1:3]
    positions, half = (0, 0) if call.rotary_cos is None else call.rotary_cos.shape
    return _packer.pack(
        *_view(call.k_new), *_view(call.v_new), *_view(call.k_cache), *_view(call.v_cache),
        *(_NOWHERE if call.q is None else _view(call.q)), *(_NOWHERE if call.q_out is None else _view(call.q_out)),
        *_sequence(call.kv_lens), *_sequence(call.new_lens), *_view_table(call.block_table),
        _address(call.rotary_cos), _address(call.rotary_sin), _row_bytes(call.rotary_cos), _row_bytes(call.rotary_sin),
        half, positions, call.rotary_interleaved, batch, heads_kv, heads_q, new, q_len, call.q_step, call.capacity,
        call.page_size or 0, call.k_cache.shape[0], head_dim, call.v_new.shape[3],
    )  # fmt: skip


def _row_bytes(x: Tensor | None) -> int:
    return 0 if x is None else x.stride(0) * x.element_size()
