"""Memory that every rank of a group on one host writes into: where the exchange kernel's states arrive.

torch.distributed's symmetric memory makes it: allocated on every rank alike and mapped into all of them. One inbox
serves all calls of a group, which follow one another; a larger one is made when a call needs it.
"""

from __future__ import annotations

import math
import socket
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flash_decoding.distributed.agreement import Members
from flash_decoding.workspace import INBOX_PROGRAMS, INBOX_ROW_WORDS, Inbox

_MIN_WORDS = 2**21  # 16 MB
_MAX_WORDS = 2**31
# torch.distributed's, for backends that don't tell theirs.
_DEFAULT_TIMEOUT = timedelta(minutes=10)


class SymmetricMemory:
    """The inboxes of a group on a device. All ranks make it, and take from it, in the same order."""

    def __init__(self, members: Members, device: torch.device) -> None:
        self._members, self._device = members, device
        self._inboxes: list[tuple[Inbox, Tensor]] = []  # with their memory, whose addresses CUDA graphs may hold
        self._stream: Any = None
        notes = members.exchange({"obstacle": find_obstacle(device), "host": _name_host()})
        obstacles = [note["obstacle"] for note in notes if note["obstacle"] is not None]
        if len({note["host"] for note in notes}) > 1:
            obstacles.append("the ranks are on several hosts")
        self._obstacle: str | None = next(iter(obstacles), None)

    def take(self, rows: int, value_dim: int) -> Inbox | str:
        """An inbox for the states of so many rows that each rank keeps, or why there can be none."""
        need = self._members.ranks * rows * (value_dim + INBOX_ROW_WORDS)
        if self._obstacle is None and 2 * need > _MAX_WORDS:
            return f"the states of {rows} query rows from {self._members.ranks} ranks take more than 16 GB"
        if self._obstacle is None and (not self._inboxes or self._inboxes[-1][0].half < need):
            self._obstacle = self._grow(need)
        return self._inboxes[-1][0] if self._obstacle is None else self._obstacle

    def follow(self) -> None:
        """Let the current stream wait for the calls before, wherever they were; they share the inbox.

        A captured call follows those of its own graph, and whoever replays graphs orders them.
        """
        if self._device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return
        stream = torch.cuda.current_stream(self._device)
        if self._stream is not None and self._stream != stream:
            stream.wait_stream(self._stream)
        self._stream = stream

    def _grow(self, need: int) -> str | None:
        """Make a larger inbox, on every rank now; returns why that failed."""
        members, failure = self._members, None
        words = max(_MIN_WORDS, 2 ** math.ceil(math.log2(2 * need)))
        try:
            memory, addresses = allocate(words, self._device, members)
            memory.zero_()
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
        except Exception as error:  # whatever it is, the others must hear of it
            failure = f"on rank {members.global_ranks[members.rank]}: {type(error).__name__}: {error}"
        # Nobody writes into an inbox before its owner has cleared it.
        for note in members.exchange({"failure": failure}):
            if note["failure"] is not None:
                return note["failure"]
        timeout_ms = _timeout_of(members, self._device) // timedelta(milliseconds=1)
        inbox = Inbox(
            torch.tensor(addresses, dtype=torch.int64, device=self._device), words // 2,
            torch.zeros(INBOX_PROGRAMS, dtype=torch.int32, device=self._device), members.rank,
            min(timeout_ms, 2**31 - 1),
        )  # fmt: skip
        self._inboxes.append((inbox, memory))
        return None


def find_obstacle(device: torch.device) -> str | None:
    """Why this process can have no symmetric memory on a device."""
    if device.type != "cuda" or torch.version.hip is not None:
        return f"tensors are on {device.type}, not on NVIDIA GPUs"
    try:
        from torch.distributed._symmetric_memory import rendezvous  # noqa: F401
    except ImportError:
        return f"torch {torch.__version__} has no symmetric memory"
    return None


def allocate(words: int, device: torch.device, members: Members) -> tuple[Tensor, list[int]]:
    """Words of 64 bits on every rank: this rank's, and the addresses at which this process reaches all ranks'."""
    from torch.distributed import _symmetric_memory

    memory = _symmetric_memory.empty(words, dtype=torch.int64, device=device)
    return memory, list(_symmetric_memory.rendezvous(memory, members.group).buffer_ptrs)


def _name_host() -> str:
    """The same for processes that run under one kernel."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}"


def _timeout_of(members: Members, device: torch.device) -> timedelta:
    """How long a rank waits for another."""
    options = getattr(members.group._get_backend(device), "options", None)
    return getattr(options, "_timeout", _DEFAULT_TIMEOUT)
