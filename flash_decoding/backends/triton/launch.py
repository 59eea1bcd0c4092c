"""From a small key to a compiled kernel: the one place that knows how kernels are started.

`kernel[grid](...)` binds and classifies every argument anew, 15 to 30 us a call. Triton compiles one variant per dtype
and per fact about strides and addresses (a multiple of 16); the launchers fold these facts into a key, and a kernel
that was started once under a key is started directly from then on. A call of which only addresses change goes further:
Launch keeps the kernel's parameters packed, and hands them to the driver.
"""

from __future__ import annotations

import ctypes
import re
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

# Names of the driver's API: what follows in `extra` is the buffer, and its size.
_BUFFER_POINTER, _BUFFER_SIZE = 1, 2
# The attribute of a launch that need not wait for the end of the one before it.
_PROGRAMMATIC_STREAM_SERIALIZATION = 6
_FORMATS = {"i1": "?", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "fp32": "f", "fp64": "d"}

_compiled: dict[tuple, Any] = {}
_first_start = threading.Lock()


def variant(tensors: Sequence[Tensor], strides: Sequence[tuple[int, ...]]) -> object:
    """Which variant Triton compiles for these addresses and strides: True for the common one.

    Triton looks at each: whether it is a multiple of 16, whether it is 1, and whether it fits into 32 bits.
    """
    facts = 0
    for x in tensors:
        facts |= x.data_ptr()
    facts &= 15
    for stride in strides:
        for step in stride:
            facts |= step
    if facts & 15 == 0 and facts < 2**31:
        return True
    return (
        *[x.data_ptr() % 16 == 0 for x in tensors],
        *[(step % 16 == 0, step == 1, step >= 2**31) for stride in strides for step in stride],
    )


def launch(
    kernel: Any, key: tuple, grid: tuple[int, int], args: tuple, constants: tuple, build: tuple[int, int],
    fp_fusion: bool = True, early: bool = False,
) -> None:  # fmt: skip
    """Start kernel(*args, *constants) on the current device and stream.

    Args:
        key: tells apart the variants of this kernel: types, what is None, and variant() of what Triton looks at.
        grid: programs along the two axes.
        build: (num_warps, num_stages).
        fp_fusion: whether a product and a sum may be rounded as one.
        early: start when every program of the kernel before has said that it may (programmatic dependent launch); the
            kernel itself waits for the end of that one before it reads what it wrote.
    """
    device = args[0].device.index
    key = (device, kernel, key, constants, build, fp_fusion, early)
    compiled = _compiled.get(key)
    if compiled is None:
        options: dict[str, Any] = {"launch_pdl": True} if early else {}
        with _first_start:
            compiled = kernel[grid](
                *args, *constants, num_warps=build[0], num_stages=build[1], enable_fp_fusion=fp_fusion, **options
            )
        if hasattr(compiled, "packed_metadata"):  # the interpreter returns nothing
            _compiled[key] = compiled
    else:
        stream = torch._C._cuda_getCurrentRawStream(device)
        hooks, metadata = (None, None), None
        # A chain of hooks to which nobody listens costs microseconds to call.
        if has_listeners():
            hooks = triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook
            metadata = compiled.launch_metadata((*grid, 1), stream, *args, *constants)
        compiled.run(
            *grid, 1, stream, compiled.function, compiled.packed_metadata, metadata, *hooks, *args, *constants
        )  # fmt: skip
    if _recorder.started is not None:
        _recorder.started.append((compiled, grid, (*args, *constants)))


def has_listeners() -> bool:
    """Whether a profiler wants to hear of launches."""
    runtime = triton.knobs.runtime
    hooks = runtime.launch_enter_hook, runtime.launch_exit_hook
    return any(hook is not None and getattr(hook, "calls", True) for hook in hooks)


class _Recorder(threading.local):
    started: list[tuple[Any, tuple[int, int], tuple]] | None = None


_recorder = _Recorder()


@contextmanager
def recording() -> Iterator[list[tuple[Any, tuple[int, int], tuple]]]:
    """What launch() starts in this thread meanwhile: (compiled kernel, grid, arguments)."""
    started: list[tuple[Any, tuple[int, int], tuple]] = []
    _recorder.started = started
    try:
        yield started
    finally:
        _recorder.started = None


class Launch:
    """A compiled kernel, its grid and its arguments, to be started again with other addresses.

    The driver takes a kernel's parameters as one buffer, whose layout the PTX declares; they are packed once, and a
    start writes the addresses alone. One thread at a time may use it.

    Args:
        compiled: what Triton compiled, which must have been started before.
        grid: programs along the two axes.
        args: the kernel's arguments, constants included.
        tensors: the tensors among them, in the order in which their addresses will come.

    Raises:
        ValueError: a kernel that wants more from its launcher than this knows.
    """

    def __init__(self, compiled: Any, grid: tuple[int, int], args: tuple, tensors: Sequence[Tensor]) -> None:
        parameters = pack_parameters(compiled, args)
        self._compiled = compiled  # its module must stay loaded
        self._buffer = parameters.buffer
        self._words = memoryview(parameters.buffer).cast("Q")
        index = {id(x): i for i, x in enumerate(tensors)}
        self._places = [(at // 8, index[id(x)]) for at, x in parameters.tensors]
        self._size = ctypes.c_size_t(len(self._buffer))
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._buffer))
        self._extra = (ctypes.c_void_p * 5)(_BUFFER_POINTER, address, _BUFFER_SIZE, ctypes.addressof(self._size), 0)
        metadata = compiled.metadata
        self._attributes = (_Attribute * 1)()
        self._attributes[0].name, self._attributes[0].value[0] = _PROGRAMMATIC_STREAM_SERIALIZATION, 1
        self._config = _Config(
            *grid, 1, metadata.num_warps * 32, 1, 1, metadata.shared, None, ctypes.addressof(self._attributes),
            bool(metadata.launch_pdl),
        )  # fmt: skip
        self._start = _driver().cuLaunchKernelEx
        function = ctypes.c_void_p(compiled.function)
        self._arguments = ctypes.byref(self._config), function, None, ctypes.byref(self._extra)

    def __call__(self, stream: int, addresses: Sequence[int]) -> None:
        """Start on a stream of the current device."""
        words = self._words
        for at, index in self._places:
            words[at] = addresses[index]
        self._config.stream = stream
        error = self._start(*self._arguments)
        if error:
            raise RuntimeError(f"cuLaunchKernelEx failed with CUDA error {error}")


class _Config(ctypes.Structure):
    """The driver's CUlaunchConfig."""

    _fields_ = (
        *[(f"grid_{axis}", ctypes.c_uint) for axis in "xyz"], *[(f"block_{axis}", ctypes.c_uint) for axis in "xyz"],
        ("shared", ctypes.c_uint), ("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    )  # fmt: skip


class _Attribute(ctypes.Structure):
    """The driver's CUlaunchAttribute."""

    _fields_ = (("name", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_uint * 16))


def start_again(launches: Sequence[Launch]) -> Callable[[Sequence[int], int, object], bool]:
    """All of them, one after the other; not while a profiler listens, which launch() tells."""

    def start(addresses: Sequence[int], stream: int, _owners: object) -> bool:
        if has_listeners():
            return False
        for start_kernel in launches:
            start_kernel(stream, addresses)
        return True

    return start


class Parameters(NamedTuple):
    """The parameter buffer of a kernel, and where the addresses of its tensors are."""

    buffer: bytearray
    tensors: list[tuple[int, Tensor]]


def pack_parameters(compiled: Any, args: tuple) -> Parameters:
    """The arguments as the PTX of a compiled kernel wants them; what Triton adds at the end, unused, is null."""
    if compiled is None:
        raise ValueError("an interpreted kernel cannot be packed")
    offsets, end = _parameter_offsets(compiled.asm["ptx"])
    kinds, values = _flat(compiled.src.signature.values()), _flat(args)
    if len(kinds) != len(values):
        raise ValueError(f"a kernel with {len(kinds)} arguments cannot be packed with {len(values)}")
    kept = [(kind, x) for kind, x in zip(kinds, values, strict=True) if kind]
    metadata = compiled.metadata
    wants_more = (
        metadata.num_ctas != 1 or metadata.launch_cooperative_grid
        or metadata.global_scratch_size or metadata.profile_scratch_size
    )  # fmt: skip
    if wants_more or not len(kept) <= len(offsets) <= len(kept) + 2:
        raise ValueError(f"a kernel with {len(kept)} arguments and {len(offsets)} parameters cannot be packed")
    parameters = Parameters(bytearray(-(-end // 8) * 8), [])
    for at, (kind, x) in zip(offsets, kept, strict=False):
        if isinstance(x, Tensor):
            parameters.tensors.append((at, x))
        elif kind in _FORMATS:
            struct.pack_into(f"={_FORMATS[kind]}", parameters.buffer, at, x)
        else:
            raise ValueError(f"an argument of type {kind} cannot be packed")
    return parameters


def _flat(values: Any) -> list[Any]:
    """Arguments or their types without nesting; a type that takes no parameter is ''."""
    flat: list[Any] = []
    for x in values:
        if isinstance(x, tuple):
            flat += _flat(x)
        else:
            flat.append("" if isinstance(x, str) and x == "constexpr" else x)
    return flat


@lru_cache(maxsize=256)
def _parameter_offsets(ptx: str) -> tuple[list[int], int]:
    """Where each parameter of the entry is, and where the last one ends."""
    header = ptx[ptx.index(".entry") :]
    offsets, end = [], 0
    for bits in re.findall(r"\.param \.[a-z]+(\d+)", header[: header.index(")")]):
        size = int(bits) // 8
        at = -(-end // size) * size
        offsets.append(at)
        end = at + size
    return offsets, end


@lru_cache(maxsize=64)
def may_overlap(device_index: int | None) -> bool:
    """Whether a kernel may start before the one before it has ended: from NVIDIA's compute capability 9.0 on.

    Graphs capture such launches since the driver of CUDA 12.3.
    """
    if capability(device_index) < (9, 0):
        return False
    version = ctypes.c_int()
    return _driver().cuDriverGetVersion(ctypes.byref(version)) == 0 and version.value >= 12030


@lru_cache(maxsize=64)
def capability(device_index: int | None) -> tuple[int, int]:
    """NVIDIA's compute capability; (0, 0) for another maker's device and for the interpreter, which has none."""
    if device_index is None or torch.version.hip is not None:
        return 0, 0
    return torch.cuda.get_device_capability(device_index)


@cache
def _driver() -> ctypes.PyDLL:
    """The driver's library. PyDLL keeps the interpreter's lock, so no thread comes between packing and starting."""
    return ctypes.PyDLL("libcuda.so.1")
