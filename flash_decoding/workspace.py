"""Scratch for the partial softmax of the splits: made once, used by every call after."""

from __future__ import annotations

import math
import threading
from typing import NamedTuple

import torch
from torch import Tensor

# Programs that may use an inbox at a time; and words of a row there besides acc: m, l, and which call it belongs to.
INBOX_PROGRAMS, INBOX_ROW_WORDS = 1024, 3
# Views kept per workspace; making one costs a few microseconds, so the recent shapes keep theirs.
_MAX_VIEWS = 64


class Partial(NamedTuple):
    """The unfinished softmax of every split: out = sum of acc / sum of l once all have the same m."""

    acc: Tensor  # [*shape, Dv] float32, the shape that the plan gives: [num_splits, B, Hq, Lq] or [slots, rows]
    m: Tensor  # [*shape] float32, base 2
    l: Tensor  # [*shape] float32


class Inbox(NamedTuple):
    """Where the states of other ranks arrive: memory into which every rank of a group writes."""

    addresses: Tensor  # [ranks] int64: of the inboxes of all ranks, as this process reaches them
    half: int  # words of 64 bits in each of an inbox's two halves
    counters: Tensor  # [INBOX_PROGRAMS] int32, each the number of calls so far
    rank: int
    timeout_ms: int  # after which waiting for another rank is an error


class Workspace:
    """Scratch memory for calls on one stream, owned by the caller.

    Without one, flash_decode() keeps its own per device, stream and thread. Pass one to own that memory, or to be sure
    that a call allocates nothing. It grows when a call needs more, but never while a CUDA graph is captured: reserve
    enough before. Two calls that may run at the same time must not share one. Make it on the stream that uses it, and
    keep it as long as any graph that was captured with it.

    Args:
        size_bytes: what to allocate now; 0 leaves it to the first call that needs some.
        device: where; only needed with size_bytes.

    Example:
        >>> workspace = Workspace()
        >>> q, k, v = torch.randn(1, 4, 1, 64), torch.randn(1, 2, 100, 64), torch.randn(1, 2, 100, 64)
        >>> out = flash_decode(q, k, v, workspace=workspace, num_splits=4)
        >>> workspace.size_bytes >= Workspace.size(batch=1, heads_q=4, value_dim=64, num_splits=4)
        True
    """

    def __init__(self, size_bytes: int = 0, device: torch.device | str | None = None) -> None:
        self._buffer: Tensor | None = None
        self._partials: dict[tuple[int, ...], Partial] = {}
        self._captured: list[Tensor] = []  # buffers whose address is inside a CUDA graph
        if size_bytes < 0:
            raise ValueError(f"size_bytes must be at least 0, got {size_bytes}")
        if size_bytes:
            if device is None:
                raise ValueError("device must be given with size_bytes, got None")
            self.reserve(size_bytes, device)

    def __repr__(self) -> str:
        return f"Workspace(size_bytes={self.size_bytes}, device={getattr(self._buffer, 'device', None)})"

    @staticmethod
    def size(*, batch: int, heads_q: int, value_dim: int, num_splits: int, q_len: int = 1) -> int:
        """Bytes that a call with these sizes needs; one split needs none."""
        return 0 if num_splits == 1 else _bytes_of((num_splits, batch, heads_q, q_len), value_dim)

    @property
    def buffer(self) -> Tensor | None:
        """The memory, float32; another one after a call that needed more."""
        return self._buffer

    @property
    def size_bytes(self) -> int:
        """Bytes held now."""
        return 0 if self._buffer is None else 4 * self._buffer.numel()

    def reserve(self, size_bytes: int, device: torch.device | str) -> None:
        """Hold at least size_bytes on device; keeps what is there when that is enough."""
        device = torch.device(device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        if self._buffer is not None and self._buffer.device == device and self.size_bytes >= size_bytes:
            return
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise ValueError(
                f"workspace must hold {size_bytes} bytes on {device} before a CUDA graph is captured, "
                f"got {self.size_bytes}; call workspace.reserve({size_bytes}, {str(device)!r}) first"
            )
        self._buffer = torch.empty(-(-size_bytes // 4), dtype=torch.float32, device=device)
        self._partials = {}

    def partial(self, shape: tuple[int, ...], value_dim: int, device: torch.device) -> Partial:
        """Views for partials of a shape. Their contents are arbitrary."""
        self.reserve(_bytes_of(shape, value_dim), device)
        assert self._buffer is not None, "reserve() made a buffer"
        capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if capturing and not any(buffer is self._buffer for buffer in self._captured):
            self._captured.append(self._buffer)
        key = (*shape, value_dim)
        partial = self._partials.get(key)
        if partial is None:
            if len(self._partials) >= _MAX_VIEWS:
                self._partials.clear()
            partial = self._partials[key] = make_partial(self._buffer, shape, value_dim)
        return partial


def _bytes_of(shape: tuple[int, ...], value_dim: int) -> int:
    return 4 * math.prod(shape) * (value_dim + 2)


def make_partial(buffer: Tensor, shape: tuple[int, ...], value_dim: int) -> Partial:
    """Cut a float32 buffer into acc, m and l, acc first so that its rows stay aligned."""
    count = math.prod(shape)
    acc = buffer[: count * value_dim].view(*shape, value_dim)
    m = buffer[count * value_dim : count * (value_dim + 1)].view(shape)
    l = buffer[count * (value_dim + 1) : count * (value_dim + 2)].view(shape)
    return Partial(acc, m, l)


class _Owned(threading.local):
    """The library's own workspaces: per thread, because two threads may interleave their launches on one stream."""

    def __init__(self) -> None:
        self.by_stream: dict[tuple[str, int, int], Workspace] = {}


_owned = _Owned()


def take_partial(
    workspace: Workspace | None, shape: tuple[int, ...] | None, value_dim: int, device: torch.device
) -> Partial | None:
    """Scratch for a call, None for a single split: the caller's workspace or our own for this device and stream."""
    if shape is None:
        return None
    if workspace is None and device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        # A captured address must outlive the graph, so it comes from the graph's own memory pool.
        buffer = torch.empty(_bytes_of(shape, value_dim) // 4, dtype=torch.float32, device=device)
        return make_partial(buffer, shape, value_dim)
    stream = torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0
    return find_workspace(workspace, device, stream).partial(shape, value_dim, device)


def find_workspace(workspace: Workspace | None, device: torch.device, stream: int) -> Workspace:
    """The caller's workspace, or our own for this device, stream and thread."""
    if workspace is not None:
        return workspace
    key = (device.type, device.index or 0, stream)
    if key not in _owned.by_stream:
        _owned.by_stream[key] = Workspace()
    return _owned.by_stream[key]
