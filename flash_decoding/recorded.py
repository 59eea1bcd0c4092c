"""Calls made again: what follows from shapes and options is worked out once, and later calls bring addresses.

Checking a call, planning it and binding its kernels costs tens of microseconds on the host, more than a short cache
takes. A model repeats a few signatures thousands of times, so the first call of one leaves a record, and a later one
looks at nothing but what may differ: addresses, the stream, scratch, and flags of the tensors.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flash_decoding.workspace import Workspace, find_workspace

# Starts the kernels of a recorded call on a stream, with the addresses of q, k, v, the optional arrays there are, out,
# lse and scratch, as far as there are these, and with the objects that own them. False: nothing was started.
Start = Callable[[Sequence[int], int, object], bool]

_MAX_RECORDS = 1024


class Recorded:
    """One signature on one device, made again by repeat().

    Args:
        start: the kernels, for q, k, v and out that begin at multiples of 16 bytes.
        device: of all tensors.
        out_shape, lse_shape: of the results.
        scratch_shape: of the partials; None: there is one split.
        q: queries with the signature's shape and strides.
    """

    def __init__(
        self, start: Start, device: torch.device, out_shape: tuple[int, ...], lse_shape: tuple[int, ...],
        scratch_shape: tuple[int, ...] | None, q: Tensor,
    ) -> None:  # fmt: skip
        self._start, self._device, self._index = start, device, device.index
        self._may_be_like_q = _may_be_like(q, out_shape)
        self._out_shape, self._lse_shape, self._scratch_shape = out_shape, lse_shape, scratch_shape
        # Where scratch was last found. Weakly: a record must not keep memory that its owner gave up.
        self._stream = -1
        self._workspace: Callable[[], Workspace | None] = _nowhere
        self._holder: Callable[[], Workspace | None] = _nowhere
        self._buffer: Callable[[], Tensor | None] = _nowhere
        self._scratch: tuple[int, ...] = ()

    def repeat(
        self, tensors: tuple[Tensor | None, ...], addresses: list[int], out: Tensor | None, lse: Tensor | None,
        return_lse: bool, workspace: Workspace | None,
    ) -> Tensor | tuple[Tensor, Tensor] | None:  # fmt: skip
        """The results of another call with this signature; None: it needs the long way, and nothing was started.

        Args:
            tensors: q, and those that the call reads besides.
            addresses: of q, k, v and the optional arrays there are; multiples of 16 for q, k and v.
        """
        stream, buffer = 0, None
        if self._index is not None:
            if torch._C._cuda_getDevice() != self._index:
                return None
            stream = torch._C._cuda_getCurrentRawStream(self._index)
        if self._scratch_shape is not None:
            buffer = self._find_scratch(workspace, stream)
            if buffer is None:
                return None
        if out is None:
            q = tensors[0]
            assert q is not None, "comes first"
            out = torch.empty_like(q) if self._may_be_like_q else _make_plain(q, self._out_shape)
        at = out.data_ptr()
        if at & 15:
            return None
        addresses.append(at)
        if lse is None and return_lse:
            lse = torch.empty(self._lse_shape, dtype=torch.float32, device=self._device)
        if lse is not None:
            addresses.append(lse.data_ptr())
        addresses += self._scratch
        if not self._start(addresses, stream, (tensors, out, lse, buffer)):
            return None
        return (out, lse) if return_lse and lse is not None else out

    def _find_scratch(self, workspace: Workspace | None, stream: int) -> Tensor | None:
        """The memory of the scratch for this workspace and stream; None in a capture, whose scratch is its own."""
        if self._index is not None and torch._C._cuda_isCurrentStreamCapturing():
            return None
        holder, buffer = self._holder(), self._buffer()
        if (
            holder is None or buffer is None or holder.buffer is not buffer or stream != self._stream
            or self._workspace() is not workspace
        ):  # fmt: skip
            assert self._scratch_shape is not None, "there are splits"
            holder = find_workspace(workspace, self._device, stream)
            partial = holder.partial(self._scratch_shape, self._out_shape[-1], self._device)
            buffer = holder.buffer
            assert buffer is not None, "partial() made one"
            self._scratch = partial.acc.data_ptr(), partial.m.data_ptr(), partial.l.data_ptr()
            self._stream, self._holder, self._buffer = stream, weakref.ref(holder), weakref.ref(buffer)
            self._workspace = _nowhere if workspace is None else weakref.ref(workspace)
        return buffer


def _nowhere() -> None:
    """A weak reference to nothing."""


def make_out(q: Tensor, shape: tuple[int, ...]) -> Tensor:
    """An output; like q where it may be, which takes half the time and keeps heads and tokens in their order."""
    return torch.empty_like(q) if _may_be_like(q, shape) else _make_plain(q, shape)


def _may_be_like(q: Tensor, shape: tuple[int, ...]) -> bool:
    """Whether empty_like(q) is an output of this shape. Of a q that overlaps itself the last axis is not contiguous."""
    return q.shape == shape and (q.is_contiguous() or q.transpose(1, 2).is_contiguous())


def _make_plain(q: Tensor, shape: tuple[int, ...]) -> Tensor:
    return torch.empty(shape, dtype=q.dtype, device=q.device)


class _Records(threading.local):
    """Per thread, because a record's parameters and scratch are one call's at a time."""

    def __init__(self) -> None:
        self.by_key: dict[tuple, Recorded] = {}


_records = _Records()


def find(key: tuple) -> Recorded | None:
    """The record of a signature, if there is one."""
    return _records.by_key.get(key)


def add(key: tuple, record: Recorded | None) -> None:
    """Keep a record, if the call left one."""
    if record is None:
        return
    if len(_records.by_key) >= _MAX_RECORDS:
        del _records.by_key[next(iter(_records.by_key))]  # the oldest
    _records.by_key[key] = record
