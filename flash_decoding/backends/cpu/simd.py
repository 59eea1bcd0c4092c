"""A small vocabulary of SIMD for Numba: vectors of float32, and tuples of them that live in registers.

Numba leaves vectorisation to LLVM, which gives up on the loops of attention. Here the vectors are explicit: `Vector` is
an LLVM vector of LANES float32, the functions below are the few operations that the kernels need, and a tuple of
vectors is a block of accumulators. LLVM translates each operation for the host: none needs a certain instruction set.

Memory is addressed by plain integers. The element kinds of q and out, of K and of V travel as NumPy scalars whose types
say how to read memory:

    float32 -> float32        int16 -> the bits of a float16        uint16 -> the bits of a bfloat16

and of quantised caches INT8, E4M3, E5M2 and INT4 below, for which only the type itself counts, not what NumPy means by
it. What load() makes of a code must still be multiplied by unit() of its kind, which callers do for many at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.core.datamodel import PrimitiveModel, register_default
from numba.core.registry import cpu_target
from numba.extending import intrinsic

_FEATURES: frozenset[str] = frozenset(cpu_target.target_context.codegen().magic_tuple()[2].split(","))
_TRIPLE: str = cpu_target.target_context.codegen().magic_tuple()[0]

# 32 registers of 512 bits hold 16 accumulators of 16 floats; with 256 bits (or two NEON registers) 8 of 8 is what fits.
LANES = 16 if "+avx512f" in _FEATURES else 8
# x86 without F16C has no instruction for float16, and LLVM would call a library function that may not be there.
_HAS_HALF = "+f16c" in _FEATURES or not _TRIPLE.startswith(("x86", "i386", "i686"))

_FLOAT, _DOUBLE = ir.FloatType(), ir.DoubleType()
_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))

# 2**x on [-0.5, 0.5], highest power first: minimax in relative error (2.0e-9 before rounding to float32).
_EXP2 = (
    0.00015353361959569156,
    0.0013398875016719103,
    0.00961843691766262,
    0.055503323674201965,
    0.24022647738456726,
    0.6931471824645996,
    1.0,
)


# The kind of our own scratch.
FLOAT32 = np.float32(0)
# Kinds of codes; two of INT4 lie in a byte.
INT8, E4M3, E5M2, INT4 = np.int8(0), np.uint8(0), np.uint32(0), np.uint64(0)
# A float16 whose exponent is that of an e4m3 number is smaller by this factor.
_E4M3_UNIT = 2.0**8
_BYTES = {
    types.float32: 4, types.int16: 2, types.uint16: 2, types.int8: 1, types.uint8: 1, types.uint32: 1, types.uint64: 1
}  # fmt: skip

# For functions that only kernels call: entry points from Python, which they do not need, are a third of compiling. They
# must be inlined: records travel by value, and calls that copy a hundred numbers per tile of keys made everything take
# half as long again (Zen 5).
inner = njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, forceinline=True)


@inner
def address_of(view, b, head, token):
    """Where a row of a [batch, heads, length, width] array begins."""
    return view.base + b * view.batch + head * view.head + token * view.token


class VectorType(types.Type):
    """LANES float32 in one register."""

    def __init__(self) -> None:
        super().__init__(name=f"Vector(float32 x {LANES})")


Vector = VectorType()
_VECTOR = ir.VectorType(_FLOAT, LANES)
_BITS = ir.VectorType(_I32, LANES)
_SHORTS = ir.VectorType(_I16, LANES)
_CODES = ir.VectorType(_I8, LANES)


@register_default(VectorType)
class _VectorModel(PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: Any) -> None:
        super().__init__(dmm, fe_type, _VECTOR)


# LLVM building blocks: builder in, LLVM value out.


def _floats(value: float) -> ir.Constant:
    return ir.Constant(_VECTOR, [value] * LANES)


def _bits(value: int) -> ir.Constant:
    return ir.Constant(_BITS, [value] * LANES)


def _shorts(value: int) -> ir.Constant:
    return ir.Constant(_SHORTS, [value] * LANES)


def _at(builder: ir.IRBuilder, address: ir.Value, type_: ir.Type) -> ir.Value:
    return builder.inttoptr(address, type_.as_pointer())


def _load(builder: ir.IRBuilder, address: ir.Value, type_: ir.Type, align: int) -> ir.Value:
    return builder.load(_at(builder, address, type_), align=align)


def _store(builder: ir.IRBuilder, value: ir.Value, address: ir.Value, align: int) -> None:
    builder.store(value, _at(builder, address, value.type), align=align)


def _broadcast(builder: ir.IRBuilder, scalar: ir.Value) -> ir.Value:
    one = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), scalar, ir.Constant(_I32, 0))
    return builder.shuffle_vector(one, ir.Constant(_VECTOR, ir.Undefined), _bits(0))


def _fma(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    # fmuladd, not fma: without an FMA unit the latter is a library call per lane.
    return _call(builder, "fmuladd", [a, b, c])


def _call(builder: ir.IRBuilder, name: str, vectors: list[ir.Value]) -> ir.Value:
    """One of LLVM's own functions on vectors."""
    type_ = ir.FunctionType(_VECTOR, [_VECTOR] * len(vectors))
    function = cgutils.get_or_insert_function(builder.module, type_, f"llvm.{name}.v{LANES}f32")
    return builder.call(function, vectors)


def _maximum(builder: ir.IRBuilder, new: ir.Value, old: ir.Value) -> ir.Value:
    """The larger of two, lane by lane; old where new is NaN."""
    return builder.select(builder.fcmp_ordered(">", new, old), new, old)


def _shuffle(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, order: list[int]) -> ir.Value:
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_I32, len(order)), order))


def _widen(builder: ir.IRBuilder, address: ir.Value, kind: types.Type) -> ir.Value:
    if kind == types.float32:
        return _load(builder, address, _VECTOR, align=4)
    if _BYTES[kind] == 1:
        return _widen_codes(builder, _load(builder, address, _CODES, align=1), kind)
    raw = _load(builder, address, _SHORTS, align=2)
    if kind == types.uint16:
        return builder.bitcast(builder.shl(builder.zext(raw, _BITS), _bits(16)), _VECTOR)
    return _widen_half(builder, raw)


def _widen_codes(builder: ir.IRBuilder, codes: ir.Value, kind: types.Type) -> ir.Value:
    if kind == types.int8:
        return builder.sitofp(builder.sext(codes, _BITS), _VECTOR)
    return _widen_half(builder, _fp8_to_half(builder, codes, kind))


def _fp8_to_half(builder: ir.IRBuilder, codes: ir.Value, kind: types.Type) -> ir.Value:
    """Any number of fp8 codes to the bits of float16, e4m3 less its unit."""
    lanes = codes.type.count
    type_ = ir.VectorType(_I16, lanes)

    def every(value: int) -> ir.Constant:
        return ir.Constant(type_, [value] * lanes)

    if kind == types.uint32:  # an e5m2 number is the upper byte of a float16
        return builder.shl(builder.zext(codes, type_), every(8))
    # e4m3: sign, exponent and mantissa move to where a float16 has them, which holds each such number exactly. Only the
    # bit below the sign is wrong: it repeats the sign and has to be 0, but 1 for the largest magnitude, which is NaN. A
    # carry out of that magnitude flips it, so the exclusive or of before and after the carry is right for all.
    moved = builder.shl(builder.sext(codes, type_), every(7))
    return builder.xor(moved, builder.and_(builder.add(moved, every(0x80)), every(0x4000)))


def _widen_half(builder: ir.IRBuilder, raw: ir.Value) -> ir.Value:
    if _HAS_HALF:
        return builder.fpext(builder.bitcast(raw, ir.VectorType(ir.HalfType(), LANES)), _VECTOR)
    return _widen_half_by_bits(builder, raw)


def _widen_half_by_bits(builder: ir.IRBuilder, raw: ir.Value) -> ir.Value:
    """float16 to float32 with integer operations: move the fields, then rebias by an exact multiplication."""
    bits = builder.zext(raw, _BITS)
    moved = builder.shl(builder.and_(bits, _bits(0x7FFF)), _bits(13))
    rebiased = builder.bitcast(builder.fmul(builder.bitcast(moved, _VECTOR), _floats(2.0**112)), _BITS)
    special = builder.icmp_unsigned(">=", moved, _bits(0x0F800000))
    magnitude = builder.select(special, builder.or_(moved, _bits(0x7F800000)), rebiased)
    sign = builder.shl(builder.and_(bits, _bits(0x8000)), _bits(16))
    return builder.bitcast(builder.or_(magnitude, sign), _VECTOR)


def _narrow(builder: ir.IRBuilder, value: ir.Value, kind: types.Type) -> ir.Value:
    """Round to nearest, ties to even, into the stored form of `kind`."""
    if kind == types.float32:
        return value
    if kind == types.int16 and _HAS_HALF:
        return builder.fptrunc(value, ir.VectorType(ir.HalfType(), LANES))
    bits = builder.bitcast(value, _BITS)
    nan = builder.fcmp_unordered("uno", value, value)
    narrow = _narrow_half_by_bits(builder, bits, nan) if kind == types.int16 else _narrow_bfloat(builder, bits, nan)
    return builder.trunc(narrow, ir.VectorType(_I16, LANES))


def _narrow_bfloat(builder: ir.IRBuilder, bits: ir.Value, nan: ir.Value) -> ir.Value:
    high = builder.lshr(bits, _bits(16))
    half_up = builder.add(_bits(0x7FFF), builder.and_(high, _bits(1)))
    rounded = builder.lshr(builder.add(bits, half_up), _bits(16))
    return builder.select(nan, builder.or_(high, _bits(0x40)), rounded)


def _narrow_half_by_bits(builder: ir.IRBuilder, bits: ir.Value, nan: ir.Value) -> ir.Value:
    """float32 to float16 with integer operations; the subnormal results are rounded by one float32 addition."""
    magnitude = builder.and_(bits, _bits(0x7FFFFFFF))
    odd = builder.and_(builder.lshr(magnitude, _bits(13)), _bits(1))
    rebiased = builder.sub(magnitude, _bits((127 - 15) << 23))
    normal = builder.lshr(builder.add(rebiased, builder.add(_bits(0xFFF), odd)), _bits(13))
    # At 0.5 the last bit of a float32 is worth 2**-24, the spacing of float16's subnormals.
    shifted = builder.fadd(builder.bitcast(magnitude, _VECTOR), _floats(0.5))
    subnormal = builder.sub(builder.bitcast(shifted, _BITS), _bits(0x3F000000))
    small = builder.icmp_unsigned("<", magnitude, _bits((127 - 14) << 23))
    large = builder.icmp_unsigned(">=", magnitude, _bits(0x47800000))
    half = builder.select(small, subnormal, builder.select(large, _bits(0x7C00), normal))
    sign = builder.and_(builder.lshr(bits, _bits(16)), _bits(0x8000))
    return builder.or_(builder.select(nan, _bits(0x7E00), half), sign)


def _transpose_add(builder: ir.IRBuilder, vectors: list[ir.Value]) -> ir.Value:
    """LANES vectors to one: lane i is the sum of vector i.

    Each step halves the number of vectors, so a sum costs 2 shuffles and an addition; separate horizontal sums would
    cost as much as the dot products that they finish.
    """

    def halve(pairs: list[ir.Value], low: list[int], high: list[int]) -> list[ir.Value]:
        return [
            builder.fadd(_shuffle(builder, a, b, low), _shuffle(builder, a, b, high))
            for a, b in zip(pairs[::2], pairs[1::2], strict=True)
        ]

    quads = range(0, LANES, 4)
    # Inside each group of 4 lanes, then groups: these orders are single instructions on AVX and AVX-512.
    low = [i for n in quads for i in (n, n + LANES, n + 1, n + 1 + LANES)]
    high = [i + 2 for i in low]
    vectors = halve(vectors, low, high)
    low = [i for n in quads for i in (n, n + 1, n + LANES, n + 1 + LANES)]
    high = [i + 2 for i in low]
    vectors = halve(vectors, low, high)
    groups = LANES // 4
    while len(vectors) > 1:
        even = list(range(0, groups, 2))
        low = [4 * g + i for g in even + [g + groups for g in even] for i in range(4)]
        high = [i + 4 for i in low]
        vectors = halve(vectors, low, high)
    return vectors[0]


def _fold(builder: ir.IRBuilder, vector: ir.Value, combine: Callable[[ir.Value, ir.Value], ir.Value]) -> ir.Value:
    """Combine all lanes into one scalar."""
    width = LANES // 2
    while width:
        vector = combine(_shuffle(builder, vector, vector, [(i + width) % LANES for i in range(LANES)]), vector)
        width //= 2
    return builder.extract_element(vector, ir.Constant(_I32, 0))


def _exp2(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    x = builder.select(builder.fcmp_ordered("<", x, _floats(-127.0)), _floats(-127.0), x)
    # Adding 1.5 * 2**23 rounds to a whole number and leaves it in the low bits: a shift makes it the exponent.
    magic = _floats(1.5 * 2.0**23)
    shifted = builder.fadd(x, magic)
    fraction = builder.fsub(x, builder.fsub(shifted, magic))
    power = _floats(_EXP2[0])
    for coefficient in _EXP2[1:]:
        power = _fma(builder, power, fraction, _floats(coefficient))
    exponent = builder.add(builder.shl(builder.bitcast(shifted, _BITS), _bits(23)), _bits(127 << 23))
    return builder.fmul(power, builder.bitcast(exponent, _VECTOR))


def _tuple(context: Any, builder: ir.IRBuilder, type_: types.UniTuple, values: list[ir.Value]) -> ir.Value:
    return context.make_tuple(builder, type_, values)


def _untuple(builder: ir.IRBuilder, type_: types.UniTuple, value: ir.Value) -> list[ir.Value]:
    return [builder.extract_value(value, i) for i in range(type_.count)]


# The vocabulary. Addresses and steps are int64 and count bytes.


@intrinsic
def element_bytes(typingctx: Any, kind: Any) -> Any:
    """Bytes of one stored element of this kind, or of two codes of INT4."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return ir.Constant(_I64, _BYTES[kind])

    return types.int64(kind), codegen


@intrinsic
def holds_codes(typingctx: Any, kind: Any) -> Any:
    """Whether what is loaded of this kind must be multiplied by scales; known to the compiler."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return ir.Constant(ir.IntType(1), _BYTES[kind] == 1)

    return types.boolean(kind), codegen


@intrinsic
def holds_fp8(typingctx: Any, kind: Any) -> Any:
    """Whether load_first_each() knows this kind; known to the compiler."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return ir.Constant(ir.IntType(1), kind in (types.uint8, types.uint32))

    return types.boolean(kind), codegen


@intrinsic
def holds_pairs(typingctx: Any, kind: Any) -> Any:
    """Whether a byte of this kind holds two codes; known to the compiler."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return ir.Constant(ir.IntType(1), kind == types.uint64)

    return types.boolean(kind), codegen


@intrinsic
def unit(typingctx: Any, kind: Any) -> Any:
    """What a number loaded of this kind must be multiplied by."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return ir.Constant(_FLOAT, _E4M3_UNIT if kind == types.uint8 else 1.0)

    return types.float32(kind), codegen


def _vectors_per_line(kind: types.Type) -> int:
    return max(1, 64 // (LANES * _BYTES[kind]))


@intrinsic
def vectors_per_line(typingctx: Any, kind: Any) -> Any:
    """How many vectors of this kind as stored fill a cache line."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return ir.Constant(_I64, _vectors_per_line(kind))

    return types.int64(kind), codegen


@intrinsic
def load_int64(typingctx: Any, address: Any) -> Any:
    """The int64 at address."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return _load(builder, args[0], _I64, align=8)

    return types.int64(types.int64), codegen


@intrinsic
def load_int32(typingctx: Any, address: Any) -> Any:
    """The int32 at address, as an int64."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return builder.sext(_load(builder, args[0], _I32, align=4), _I64)

    return types.int64(types.int64), codegen


@intrinsic
def load_byte(typingctx: Any, address: Any) -> Any:
    """The unsigned byte at address, as an int64."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return builder.zext(_load(builder, args[0], ir.IntType(8), align=1), _I64)

    return types.int64(types.int64), codegen


@intrinsic
def load_float(typingctx: Any, address: Any) -> Any:
    """The float32 at address."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return _load(builder, args[0], _FLOAT, align=4)

    return types.float32(types.int64), codegen


@intrinsic
def load_half(typingctx: Any, address: Any) -> Any:
    """The float16 at address, as a float32."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        bits = builder.insert_element(_shorts(0), _load(builder, args[0], _I16, align=2), ir.Constant(_I32, 0))
        return builder.extract_element(_widen_half(builder, bits), ir.Constant(_I32, 0))

    return types.float32(types.int64), codegen


@intrinsic
def load_double(typingctx: Any, address: Any) -> Any:
    """The float64 at address."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return _load(builder, args[0], _DOUBLE, align=8)

    return types.float64(types.int64), codegen


@intrinsic
def store_double(typingctx: Any, address: Any, value: Any) -> Any:
    """Write a float64."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        _store(builder, args[1], args[0], align=8)
        return context.get_dummy_value()

    return types.void(types.int64, types.float64), codegen


@intrinsic
def store_int64(typingctx: Any, address: Any, value: Any) -> Any:
    """Write an int64."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        _store(builder, args[1], args[0], align=8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def store_float(typingctx: Any, address: Any, value: Any) -> Any:
    """Write a float32."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        _store(builder, args[1], args[0], align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.float32), codegen


@intrinsic
def fetch_add(typingctx: Any, address: Any, value: Any) -> Any:
    """Add to the int64 at address and return what it was, ordered with every other memory access of the thread."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return builder.atomic_rmw("add", _at(builder, args[0], _I64), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def splat(typingctx: Any, value: Any) -> Any:
    """A vector with the same float32 in every lane."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return _broadcast(builder, args[0])

    return Vector(types.float32), codegen


@intrinsic
def load(typingctx: Any, address: Any, kind: Any) -> Any:
    """LANES elements widened to float32."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return _widen(builder, args[0], kind)

    return Vector(types.int64, kind), codegen


@intrinsic
def store(typingctx: Any, address: Any, value: Any, kind: Any) -> Any:
    """Write LANES elements rounded to the kind."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        _store(builder, _narrow(builder, args[1], kind), args[0], align=kind.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(types.int64, Vector, kind), codegen


def _binary(operation: Callable[[ir.IRBuilder, ir.Value, ir.Value], ir.Value]) -> Any:
    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return operation(builder, args[0], args[1])

    return Vector(Vector, Vector), codegen


@intrinsic
def add(typingctx: Any, a: Any, b: Any) -> Any:
    """a + b."""
    return _binary(lambda builder, x, y: builder.fadd(x, y))


@intrinsic
def sub(typingctx: Any, a: Any, b: Any) -> Any:
    """a - b."""
    return _binary(lambda builder, x, y: builder.fsub(x, y))


@intrinsic
def mul(typingctx: Any, a: Any, b: Any) -> Any:
    """a * b."""
    return _binary(lambda builder, x, y: builder.fmul(x, y))


@intrinsic
def div(typingctx: Any, a: Any, b: Any) -> Any:
    """a / b."""
    return _binary(lambda builder, x, y: builder.fdiv(x, y))


@intrinsic
def maximum(typingctx: Any, new: Any, old: Any) -> Any:
    """The larger of two, lane by lane; old where new is NaN."""
    return _binary(_maximum)


@intrinsic
def absolute(typingctx: Any, x: Any) -> Any:
    """|x|."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return _call(builder, "fabs", args)

    return Vector(Vector), codegen


@intrinsic
def copy_sign(typingctx: Any, magnitude: Any, sign: Any) -> Any:
    """|magnitude| with the sign of the other."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return _call(builder, "copysign", args)

    return Vector(Vector, Vector), codegen


@intrinsic
def where_less(typingctx: Any, a: Any, b: Any, yes: Any, no: Any) -> Any:
    """Lane by lane, yes where a < b, else no; no where one of them is NaN."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        a, b, yes, no = args
        return builder.select(builder.fcmp_ordered("<", a, b), yes, no)

    return Vector(Vector, Vector, Vector, Vector), codegen


@intrinsic
def fma(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once where the host can."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return _fma(builder, *args)

    return Vector(Vector, Vector, Vector), codegen


@intrinsic
def lanes_sum(typingctx: Any, vector: Any) -> Any:
    """The sum of the lanes in float64."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        wide = builder.fpext(args[0], ir.VectorType(_DOUBLE, LANES))
        return _fold(builder, wide, lambda x, y: builder.fadd(x, y))

    return types.float64(Vector), codegen


@intrinsic
def lanes_max(typingctx: Any, vector: Any) -> Any:
    """The largest lane."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return _fold(builder, args[0], lambda x, y: _maximum(builder, x, y))

    return types.float32(Vector), codegen


@intrinsic
def exp2(typingctx: Any, x: Any) -> Any:
    """2**x for x < 128.5, relative error below 1.5e-7; 0 for x <= -127 (subnormal results) and -inf; NaN stays."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return _exp2(builder, args[0])

    return Vector(Vector), codegen


# Blocks of registers: a tuple of vectors, row by row.


@intrinsic
def zeros_outer(typingctx: Any, rows: Any, columns: Any) -> Any:
    """A block of zeros, one vector for each pair of two tuples."""
    block = types.UniTuple(Vector, rows.count * columns.count)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return _tuple(context, builder, block, [_floats(0.0)] * block.count)

    return block(rows, columns), codegen


@intrinsic
def fma_outer(typingctx: Any, rows: Any, columns: Any, block: Any) -> Any:
    """block[i, j] + rows[i] * columns[j]."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        a, b, c = (_untuple(builder, t, x) for t, x in zip(signature.args, args, strict=True))
        out = [_fma(builder, x, y, c[i * len(b) + j]) for i, x in enumerate(a) for j, y in enumerate(b)]
        return _tuple(context, builder, block, out)

    return block(rows, columns, block), codegen


@intrinsic
def mul_rows(typingctx: Any, rows: Any, block: Any) -> Any:
    """block[i, j] * rows[i]."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        a, c = (_untuple(builder, t, x) for t, x in zip(signature.args, args, strict=True))
        columns = len(c) // len(a)
        return _tuple(context, builder, block, [builder.fmul(x, a[i // columns]) for i, x in enumerate(c)])

    return block(rows, block), codegen


@intrinsic
def mul_columns(typingctx: Any, columns: Any, block: Any) -> Any:
    """block[i, j] * columns[j]."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        a, c = (_untuple(builder, t, x) for t, x in zip(signature.args, args, strict=True))
        return _tuple(context, builder, block, [builder.fmul(x, a[i % len(a)]) for i, x in enumerate(c)])

    return block(columns, block), codegen


@intrinsic
def sum_each(typingctx: Any, block: Any) -> Any:
    """LANES vectors to one vector of their sums."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return _transpose_add(builder, _untuple(builder, block, args[0]))

    return Vector(block), codegen


@intrinsic
def places(typingctx: Any, base: Any, step: Any, indices: Any) -> Any:
    """base + step * i for each index: a tuple of addresses or offsets."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        values = [builder.add(args[0], builder.mul(args[1], i)) for i in _untuple(builder, indices, args[2])]
        return _tuple(context, builder, indices, values)

    return indices(types.int64, types.int64, indices), codegen


@intrinsic
def at_most(typingctx: Any, values: Any, limit: Any) -> Any:
    """The smaller of each value and the limit."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        out = [
            builder.select(builder.icmp_signed("<", x, args[1]), x, args[1]) for x in _untuple(builder, values, args[0])
        ]
        return _tuple(context, builder, values, out)

    return values(values, types.int64), codegen


@intrinsic
def one_per_line(typingctx: Any, offsets: Any, kind: Any) -> Any:
    """Of the offsets of neighbouring vectors, the first in each cache line."""
    step = _vectors_per_line(kind)
    kept = types.UniTuple(types.int64, -(-offsets.count // step))

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return _tuple(context, builder, kept, _untuple(builder, offsets, args[0])[::step])

    return kept(offsets, kind), codegen


@intrinsic
def prefetch_each(typingctx: Any, addresses: Any, offset: Any) -> Any:
    """Ask for the cache line at offset from each address to come to the first-level cache; never faults."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        pointer = ir.IntType(8).as_pointer()
        type_ = ir.FunctionType(ir.VoidType(), [pointer, _I32, _I32, _I32])
        function = builder.module.declare_intrinsic("llvm.prefetch", [pointer], type_)
        for x in _untuple(builder, addresses, args[0]):
            place = builder.inttoptr(builder.add(x, args[1]), pointer)
            to_read, every_level, data = (ir.Constant(_I32, i) for i in (0, 3, 1))
            builder.call(function, [place, to_read, every_level, data])
        return context.get_dummy_value()

    return types.void(addresses, types.int64), codegen


@intrinsic
def load_each(typingctx: Any, addresses: Any, offset: Any, kind: Any) -> Any:
    """The vector at offset from each address."""
    block = types.UniTuple(Vector, addresses.count)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        places = [builder.add(x, args[1]) for x in _untuple(builder, addresses, args[0])]
        return _tuple(context, builder, block, [_widen(builder, x, kind) for x in places])

    return block(addresses, types.int64, kind), codegen


def _half_of_wide(addresses: Any, kind: Any, first: int) -> Any:
    block = types.UniTuple(Vector, addresses.count)
    codes = ir.VectorType(_I8, 2 * LANES)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        vectors = []
        for x in _untuple(builder, addresses, args[0]):
            # The same for both halves, so that the compiler does it once.
            both = _fp8_to_half(builder, _load(builder, builder.add(x, args[1]), codes, align=1), kind)
            vectors.append(_widen_half(builder, _shuffle(builder, both, both, list(range(first, first + LANES)))))
        return _tuple(context, builder, block, vectors)

    return block(addresses, types.int64, kind), codegen


@intrinsic
def load_first_each(typingctx: Any, addresses: Any, offset: Any, kind: Any) -> Any:
    """Of 2 * LANES fp8 codes at offset from each address the first half; quicker than load_each() with the second."""
    return _half_of_wide(addresses, kind, 0)


@intrinsic
def load_second_each(typingctx: Any, addresses: Any, offset: Any, kind: Any) -> Any:
    """The second half, likewise."""
    return _half_of_wide(addresses, kind, LANES)


@intrinsic
def load_codes_each(typingctx: Any, addresses: Any, offset: Any, shifts: Any) -> Any:
    """Of LANES bytes at offset from each address, the four bits from the shift on, as numbers from 0 to 15."""
    block = types.UniTuple(Vector, addresses.count)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        vectors = []
        for x, shift in zip(_untuple(builder, addresses, args[0]), _untuple(builder, shifts, args[2]), strict=True):
            codes = builder.zext(_load(builder, builder.add(x, args[1]), _CODES, align=1), _BITS)
            by = builder.bitcast(_broadcast(builder, builder.bitcast(builder.trunc(shift, _I32), _FLOAT)), _BITS)
            vectors.append(builder.sitofp(builder.and_(builder.lshr(codes, by), _bits(15)), _VECTOR))
        return _tuple(context, builder, block, vectors)

    return block(addresses, types.int64, shifts), codegen


@intrinsic
def load_pair_each(typingctx: Any, addresses: Any, offset: Any) -> Any:
    """Two float32 at offset from each address, the first in every even lane and the second in every odd one."""
    block = types.UniTuple(Vector, addresses.count)
    pairs = ir.VectorType(_I64, LANES // 2)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        vectors = []
        for x in _untuple(builder, addresses, args[0]):
            pair = _load(builder, builder.add(x, args[1]), _I64, align=4)
            one = builder.insert_element(ir.Constant(pairs, ir.Undefined), pair, ir.Constant(_I32, 0))
            every = _shuffle(builder, one, ir.Constant(pairs, ir.Undefined), [0] * (LANES // 2))
            vectors.append(builder.bitcast(every, _VECTOR))
        return _tuple(context, builder, block, vectors)

    return block(addresses, types.int64), codegen


@intrinsic
def divide_each(typingctx: Any, values: Any, divisor: Any) -> Any:
    """The quotient of each value, all positive."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        out = [builder.udiv(x, args[1]) for x in _untuple(builder, values, args[0])]
        return _tuple(context, builder, values, out)

    return values(values, types.int64), codegen


@intrinsic
def combine_each(typingctx: Any, a: Any, by_a: Any, b: Any, by_b: Any) -> Any:
    """by_a * a[i] + by_b * b[i], integers."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        pairs = zip(_untuple(builder, a, args[0]), _untuple(builder, b, args[2]), strict=True)
        out = [builder.add(builder.mul(x, args[1]), builder.mul(y, args[3])) for x, y in pairs]
        return _tuple(context, builder, a, out)

    return a(a, types.int64, b, types.int64), codegen


@intrinsic
def fma_each(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
    """a[i] * b[i] + c[i]."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        x, y, z = (_untuple(builder, a, values) for values in args)
        return _tuple(context, builder, a, [_fma(builder, *each) for each in zip(x, y, z, strict=True)])

    return a(a, a, a), codegen


@intrinsic
def load_shares(typingctx: Any, address: Any, like: Any) -> Any:
    """A vector made of equal shares, as many as `like` has entries, each the same float32 from address."""
    share = LANES // like.count

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        part = _load(builder, args[0], ir.VectorType(_FLOAT, share), align=4)
        return _shuffle(builder, part, part, [i % share for i in range(LANES)])

    return Vector(types.int64, like), codegen


@intrinsic
def splat_each(typingctx: Any, addresses: Any, offset: Any) -> Any:
    """The float32 at offset from each address, each in every lane of its vector."""
    block = types.UniTuple(Vector, addresses.count)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        places = [builder.add(x, args[1]) for x in _untuple(builder, addresses, args[0])]
        values = [_broadcast(builder, _load(builder, x, _FLOAT, align=4)) for x in places]
        return _tuple(context, builder, block, values)

    return block(addresses, types.int64), codegen


@intrinsic
def load_addresses(typingctx: Any, address: Any, like: Any) -> Any:
    """As many consecutive int64 as `like` has entries."""
    width = like.count

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        places = [builder.add(args[0], ir.Constant(_I64, 8 * i)) for i in range(width)]
        return _tuple(context, builder, like, [_load(builder, x, _I64, align=8) for x in places])

    return like(types.int64, like), codegen


@intrinsic
def store_shares(typingctx: Any, addresses: Any, offset: Any, vector: Any) -> Any:
    """Cut a vector into one equal share per address and write each at offset."""
    share = LANES // addresses.count

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        for i, x in enumerate(_untuple(builder, addresses, args[0])):
            part = _shuffle(builder, args[2], args[2], list(range(i * share, (i + 1) * share)))
            _store(builder, part, builder.add(x, args[1]), align=4)
        return context.get_dummy_value()

    return types.void(addresses, types.int64, Vector), codegen


@intrinsic
def load_block(typingctx: Any, rows: Any, columns: Any) -> Any:
    """The float32 vectors at rows[i] + columns[j]."""
    block = types.UniTuple(Vector, rows.count * columns.count)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        a, b = (_untuple(builder, t, x) for t, x in zip(signature.args, args, strict=True))
        values = [_load(builder, builder.add(x, y), _VECTOR, align=4) for x in a for y in b]
        return _tuple(context, builder, block, values)

    return block(rows, columns), codegen


@intrinsic
def store_block(typingctx: Any, rows: Any, columns: Any, block: Any) -> Any:
    """Write the float32 vectors to rows[i] + columns[j]."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        a, b, c = (_untuple(builder, t, x) for t, x in zip(signature.args, args, strict=True))
        for i, value in enumerate(c):
            _store(builder, value, builder.add(a[i // len(b)], b[i % len(b)]), align=4)
        return context.get_dummy_value()

    return types.void(rows, columns, block), codegen
