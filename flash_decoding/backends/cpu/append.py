"""New keys and values into the cache, keys and queries rotated and quantised on the way, in one kernel.

    k_cache[kv_lens[b] + i] = R k_new[i]    v_cache[kv_lens[b] + i] = v_new[i]    q_out[t] = R q[t]

A unit of work is all the heads of one token. Each row is widened to float32, and there R turns pairs of its first
entries by the angles of its position; without tables it is left out. A quantised cache gets codes(R k_new[i] / scale),
or codes(R k_new[i] / scale + zero) for int4, of the rotated row rounded to its dtype, by the rules of quantization.py;
scales of single rows and groups are made here from the row itself. A token whose position is not in the cache, or whose
page is not in the pool, is not written.
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
from numba import njit, typeof, types
from numba.extending import intrinsic
from torch import Tensor

from flash_decoding.backends.cpu import (
    _CODES,
    _KINDS,
    _NOWHERE,
    _address,
    _prepare_lock,
    _sequence,
    _view,
    _view_table,
)
from flash_decoding.backends.cpu.chunk import Sequence, View
from flash_decoding.backends.cpu.masks import read_length
from flash_decoding.backends.cpu.packing import make_packer, make_reader, place
from flash_decoding.backends.cpu.reduce import vector_offset
from flash_decoding.backends.cpu.simd import (
    _HAS_HALF,
    FLOAT32,
    LANES,
    _bits,
    _broadcast,
    _call,
    _floats,
    _load,
    _narrow,
    _store,
    _widen_half_by_bits,
    absolute,
    add,
    address_of,
    div,
    element_bytes,
    fetch_add,
    holds_codes,
    holds_pairs,
    inner,
    lanes_max,
    load,
    load_float,
    load_half,
    load_int32,
    load_int64,
    maximum,
    splat,
    store,
    store_float,
    sub,
    where_less,
)
from flash_decoding.backends.cpu.threads import count_threads, run_shared
from flash_decoding.quantization import LARGEST_CODE

if TYPE_CHECKING:
    from flash_decoding.append import Append, Codes


class Scales(NamedTuple):
    """What the codes of the keys, or of the values, are multiplied with."""

    at: View  # of a row's first one; 0: all are 1
    step: int  # bytes to the next one of a row
    part: int  # elements of a row whose scale is made here; 0: scales are given, one per element
    zero_point: int  # 1: behind every scale; 0: none


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
    k_scales: Scales
    v_scales: Scales
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


_BITS_OF_FP8 = {types.uint8: (3, 7), types.uint32: (2, 15)}  # of the mantissa, and the exponent's bias
_LARGEST = {type_: LARGEST_CODE[name] for name, type_ in zip(_CODES, map(typeof, _CODES.values()), strict=True)}
_I32 = ir.IntType(32)


@intrinsic
def largest_code(typingctx: Any, codes: Any) -> Any:
    """As quantization.LARGEST_CODE has it; 0 where nothing is quantised."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return ir.Constant(ir.FloatType(), _LARGEST.get(codes, 0.0))

    return types.float32(codes), codegen


@intrinsic
def or_zero(typingctx: Any, x: Any) -> Any:
    """x, and 0 for NaN."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return builder.select(builder.fcmp_ordered("==", args[0], args[0]), args[0], _floats(0.0))

    return x(x), codegen


@intrinsic
def store_half(typingctx: Any, address: Any, value: Any) -> Any:
    """Write a float32 rounded to float16."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        halves = _narrow(builder, _broadcast(builder, args[1]), types.int16)
        _store(builder, builder.extract_element(halves, ir.Constant(_I32, 0)), args[0], align=2)
        return context.get_dummy_value()

    return types.void(types.int64, types.float32), codegen


@intrinsic
def store_codes(typingctx: Any, address: Any, x: Any, codes: Any) -> Any:
    """Write the nearest codes of LANES numbers, already divided by their scale, a byte each. Large ones saturate."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        if codes not in _LARGEST:
            return context.get_dummy_value()
        low, high = (0.0, 15.0) if codes == types.uint64 else (-_LARGEST[codes], _LARGEST[codes])
        x = builder.select(builder.fcmp_ordered(">", args[1], _floats(low)), args[1], _floats(low))
        x = builder.select(builder.fcmp_ordered("<", x, _floats(high)), x, _floats(high))
        if codes in _BITS_OF_FP8:
            rounded = _round_fp8(builder, x, *_BITS_OF_FP8[codes])
        else:  # added to 1.5 * 2**23, a number is rounded to a whole one, and lies in the lowest bits
            rounded = builder.bitcast(builder.fadd(x, _floats(1.5 * 2.0**23)), _bits(0).type)
        _store(builder, builder.trunc(rounded, ir.VectorType(ir.IntType(8), LANES)), args[0], align=1)
        return context.get_dummy_value()

    return types.void(types.int64, x, codes), codegen


def _round_fp8(builder: ir.IRBuilder, x: ir.Value, mantissa: int, bias: int) -> ir.Value:
    """The bits of the nearest numbers with so many bits of mantissa, ties to even; for |x| up to the largest one."""
    shift, rebias = 23 - mantissa, 127 - bias
    bits = builder.bitcast(x, _bits(0).type)
    magnitude = builder.and_(bits, _bits(0x7FFFFFFF))
    odd = builder.and_(builder.lshr(magnitude, _bits(shift)), _bits(1))
    rebiased = builder.add(builder.sub(magnitude, _bits(rebias << 23)), _bits((1 << (shift - 1)) - 1))
    normal = builder.lshr(builder.add(rebiased, odd), _bits(shift))
    # The last bit of a float32 of this size is the smallest number of the format: adding rounds to it.
    large = rebias + 1 + shift
    shifted = builder.fadd(_call(builder, "fabs", [x]), _floats(2.0 ** (large - 127)))
    tiny = builder.sub(builder.bitcast(shifted, _bits(0).type), _bits(large << 23))
    is_tiny = builder.icmp_unsigned("<", magnitude, _bits((rebias + 1) << 23))
    sign = builder.and_(builder.lshr(bits, _bits(24)), _bits(0x80))
    return builder.or_(builder.select(is_tiny, tiny, normal), sign)


@intrinsic
def pack_pairs(typingctx: Any, source: Any, quarter: Any, target: Any) -> Any:
    """Eight codes of each quarter of a row, a byte each and so many bytes apart, to 16 bytes of two."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        eight = ir.VectorType(ir.IntType(8), 8)
        places = [builder.add(args[0], builder.mul(args[1], ir.Constant(args[1].type, i))) for i in range(4)]
        first, second, third, fourth = (_load(builder, place, eight, align=1) for place in places)
        four = ir.Constant(eight, [4] * 8)
        lower, upper = (builder.or_(x, builder.shl(y, four)) for x, y in ((first, second), (third, fourth)))
        order = ir.Constant(ir.VectorType(_I32, 16), [i // 2 + i % 2 * 8 for i in range(16)])
        _store(builder, builder.shuffle_vector(lower, upper, order), args[2], align=1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


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
def make_scale(source, at, part, zero_point, kind, codes):
    """Write the scale, and the zero point, that just cover `part` elements at source."""
    high, below = splat(np.float32(0.0)), splat(np.float32(0.0))  # finite values alone count; 0 is covered
    for i in range((part + LANES - 1) // LANES):
        x = load(source + vector_offset(i, part) * element_bytes(kind), kind)
        x = where_less(absolute(x), splat(np.float32(np.inf)), x, splat(np.float32(0.0)))
        high, below = maximum(x, high), maximum(sub(splat(np.float32(0.0)), x), below)
    top, bottom = lanes_max(high), lanes_max(below)
    if holds_pairs(codes):
        scale = max(top, bottom) / largest_code(codes)
        if zero_point != 0:
            scale = top / np.float32(15.0) + bottom / np.float32(15.0)
        store_half(at, min(max(scale, np.float32(2.0**-24)), np.float32(65504.0)) if scale > 0.0 else np.float32(1.0))
        if zero_point != 0:
            store_half(at + 2, min(bottom / load_half(at), np.float32(15.0)))
    else:
        scale = max(top, bottom) / largest_code(codes)
        store_float(at, max(scale, np.float32(2.0**-126)) if scale > 0.0 else np.float32(1.0))


@inner
def write_codes(source, target, scales, scale_at, width, kind, codes, unpacked):
    """The codes of a row, and the scales that are made of it; unpacked is scratch for a byte per element."""
    part, zero = width, np.float32(8.0)
    if scales.part > 0:
        part = scales.part
    out = unpacked if holds_pairs(codes) else target
    for begin in range(0, width, part):
        at = scale_at + begin // part * scales.step
        if scales.part > 0:
            make_scale(source + begin * element_bytes(kind), at, part, scales.zero_point, kind, codes)
        scale = splat(np.float32(1.0))
        if holds_pairs(codes):
            scale = splat(load_half(at))
            if scales.zero_point != 0:
                zero = load_half(at + 2)
        elif scales.at.base != 0:
            scale = splat(load_float(at))
        for i in range((part + LANES - 1) // LANES):
            d = begin + vector_offset(i, part)
            if scales.part == 0 and scales.step != 0:
                scale = load(scale_at + 4 * d, FLOAT32)  # per channel
            y = div(or_zero(load(source + d * element_bytes(kind), kind)), scale)
            if holds_pairs(codes):
                y = add(y, splat(zero))
            store_codes(out + d, y, codes)
    if holds_pairs(codes):
        for j in range(0, width // 4, 8):
            pack_pairs(unpacked + j, width // 4, target + 2 * j)


@inner
def append_token(call, kind, table_kind, k_codes, v_codes, b, i, row, spare):
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
        if holds_codes(k_codes):
            if call.half > 0:
                copy_rotated(call, source, spare, kind, table_kind, position, row)
                source = spare
            at = address_of(call.k_scales.at, page, h, slot)
            write_codes(source, target, call.k_scales, at, call.head_dim, kind, k_codes, row)
        else:
            copy_rotated(call, source, target, kind, table_kind, position, row)
        source, target = address_of(call.v_new, b, h, i), address_of(call.v, page, h, slot)
        if holds_codes(v_codes):
            at = address_of(call.v_scales.at, page, h, slot)
            write_codes(source, target, call.v_scales, at, call.value_dim, kind, v_codes, row)
        else:
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
    def append_units(record, kind, table_kind, k_codes, v_codes):
        """Take units until none is left; any number of threads may run it on the same record."""
        stamp  # noqa: B018, captured by being named
        call = _read_call(record)
        width = max(call.head_dim, call.value_dim)
        memory = np.empty(2 * width, np.float32)
        row = memory.ctypes.data
        spare = row + 4 * width
        tokens = call.new + call.q_len
        while True:
            unit = fetch_add(record + _SIZE, 1)
            if unit >= call.batch * tokens:
                return memory[0]  # a use after the last unit, or memory would be freed before the first
            b, i = unit // tokens, unit % tokens
            if i < call.new:
                append_token(call, kind, table_kind, k_codes, v_codes, b, i, row, spare)
            else:
                rotate_token(call, kind, table_kind, b, i - call.new, row)

    return append_units


_kernel: Callable[..., Any] | None = None
# The dtypes of what is new and of the tables, and what the caches hold, by name.
_Kinds = tuple[torch.dtype, torch.dtype, str | None, str | None]
_compiled: set[_Kinds] = set()


def append(call: Append) -> None:
    """Write the new keys and values of a checked call, and its rotated queries."""
    dtype = call.k_new.dtype
    kinds = (
        dtype, torch.float32 if call.rotary_cos is None else call.rotary_cos.dtype,
        call.k_codes and call.k_codes.form.codes, call.v_codes and call.v_codes.form.codes,
    )  # fmt: skip
    kernel = _prepare() if _kernel is None else _kernel
    memory = place(_describe(call), counters=1)
    scalars = _KINDS[dtype], _KINDS[kinds[1]], *(_KINDS[dtype] if x is None else _CODES[x] for x in kinds[2:])
    # `keep` lives as long as any thread works: an interrupt may take the caller away earlier.
    work = bind(_work, kernel, ctypes.addressof(memory), scalars, (call, memory))
    if kinds not in _compiled:
        with _prepare_lock:  # so that no other thread forks while this one compiles
            work()
            _compiled.add(kinds)
        return
    elements = sum(x.numel() for x in (call.k_new, call.v_new, call.q) if x is not None)
    run_shared(work, count_threads(elements))


def _work(kernel: Callable[..., Any], record: int, scalars: tuple[Any, ...], keep: tuple[object, ...]) -> None:
    kernel(record, *scalars)


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
        *_describe_scales(call.k_codes), *_describe_scales(call.v_codes),
        _address(call.rotary_cos), _address(call.rotary_sin), _row_bytes(call.rotary_cos), _row_bytes(call.rotary_sin),
        half, positions, call.rotary_interleaved, batch, heads_kv, heads_q, new, q_len, call.q_step, call.capacity,
        call.page_size or 0, call.k_cache.shape[0], head_dim, call.v_new.shape[3],
    )  # fmt: skip


def _describe_scales(codes: Codes | None) -> tuple[int, ...]:
    """The numbers of Scales."""
    if codes is None or codes.scale is None:
        return (*_NOWHERE, 0, 0, 0)
    scale = codes.scale
    return (*_view(scale), scale.stride(3) * scale.element_size(), codes.part or 0, int(codes.form.zero_point))


def _row_bytes(x: Tensor | None) -> int:
    return 0 if x is None else x.stride(0) * x.element_size()
