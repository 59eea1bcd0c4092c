"""A call's numbers in plain memory, so that starting a kernel passes one address.

Numba takes several microseconds to look through a tuple of 80 numbers on every call. A record is a NamedTuple of ints,
floats and other records: the caller packs its numbers one after the other, 8 bytes each, and the kernel reads them
back.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator
from typing import Any, get_type_hints

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from flash_decoding.backends.cpu.simd import _DOUBLE, _I64, _load


def make_packer(record: type) -> struct.Struct:
    """Numbers in the order of the record's fields to bytes."""
    return struct.Struct("".join("d" if number is float else "q" for number in _numbers(record)))


def make_reader(record: type) -> Any:
    """A function for kernels: address of such bytes to the record."""
    result = _numba_type(record)

    @intrinsic
    def read(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
            offsets = iter(range(0, 8 * len(list(_numbers(record))), 8))

            def build(type_: types.Type) -> ir.Value:
                if isinstance(type_, types.NamedTuple):
                    return context.make_tuple(builder, type_, [build(x) for x in type_.types])
                place = builder.add(args[0], ir.Constant(_I64, next(offsets)))
                return _load(builder, place, _DOUBLE if type_ == types.float64 else _I64, align=8)

            return build(result)

        return result(types.int64), codegen

    return read


def place(record: bytes, counters: int) -> ctypes.Array[ctypes.c_char]:
    """A packed record in memory of its own, with some 8-byte counters behind it that begin at 0."""
    return ctypes.create_string_buffer(record, len(record) + 8 * counters)


def _numbers(record: type) -> Iterator[type]:
    """The type of each number of a record, int or float."""
    for type_ in get_type_hints(record).values():
        if type_ in (int, float):
            yield type_
        else:
            yield from _numbers(type_)


def _numba_type(record: type) -> types.NamedTuple:
    numbers = {int: types.int64, float: types.float64}
    return types.NamedTuple([numbers.get(x) or _numba_type(x) for x in get_type_hints(record).values()], record)
