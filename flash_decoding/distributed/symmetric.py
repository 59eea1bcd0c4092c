"""Memory that every rank of a group on one host writes into: where the exchange kernel's states arrive.

torch.distributed's symmetric memory makes it: allocated on every rank alike and mapped into all of them. One inbox
serves all calls of a group, which follow one another; a larger one is made when a call needs it.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
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
        self._device = device
        self._inboxes: list[tuple[Inbox, Any]] = []  # with what owns their memory, whose addresses CUDA graphs may hold
        self._last: dict[bool, Any] = {}  # the stream of the last call, by whether it was captured
        obstacle, hosts = _do_on_all(members, lambda: _name_host(device))
        several = obstacle is None and len(set(hosts)) > 1
        self._obstacle = "the ranks are on several hosts" if several else obstacle

    def take(self, members: Members, rows: int, value_dim: int) -> Inbox | str:
        """An inbox for the states of so many rows that each rank keeps, or why there can be none."""
        need = members.ranks * rows * (value_dim + INBOX_ROW_WORDS)
        if self._obstacle is not None:
            return self._obstacle
        if 2 * need > _MAX_WORDS:
            return f"the states of {rows} query rows from {members.ranks} ranks take more than 16 GB"
        if not self._inboxes or self._inboxes[-1][0].half < need:
            failure = self._grow(members, max(_MIN_WORDS, 1 << (2 * need - 1).bit_length()))
            if failure is not None:
                return failure
        return self._inboxes[-1][0]

    def follow(self) -> None:
        """Let the current stream wait for the calls before, whose inbox it shares.

        A captured call follows those of its own graph; whoever replays graphs orders them.
        """
        if self._device.type != "cuda":
            return
        captured, stream = torch.cuda.is_current_stream_capturing(), torch.cuda.current_stream(self._device)
        last = self._last.get(captured)
        if last is not None and last != stream and _is_capturing(last) == captured:
            stream.wait_stream(last)
        self._last[captured] = stream

    def _grow(self, members: Members, words: int) -> str | None:
        """Make a larger inbox, on every rank now; returns why that failed."""
        device = self._device
        made: dict[str, Any] = {}

        def make_memory() -> None:
            made["memory"] = memory = allocate(words, device)
            made["counters"] = torch.zeros(INBOX_PROGRAMS, dtype=torch.int32, device=device)
            memory.zero_()  # before anybody may write there
            if device.type == "cuda":
                torch.cuda.synchronize(device)

        def meet_others() -> int:
            made["owner"], made["bases"] = meet(made["memory"], members)
            # The memory may be a part of what was allocated, another part on every rank.
            return made["memory"].data_ptr() - made["bases"][members.rank]

        failure, _ = _do_on_all(members, make_memory)
        if failure is None:
            failure, offsets = _do_on_all(members, meet_others)
        if failure is not None:
            return failure
        addresses = [base + offset for base, offset in zip(made["bases"], offsets, strict=True)]
        timeout_ms = min(_timeout_of(members, device) // timedelta(milliseconds=1), 2**31 - 1)
        inbox = Inbox(
            torch.tensor(addresses, dtype=torch.int64, device=device), words // 2, made["counters"], members.rank,
            timeout_ms,
        )  # fmt: skip
        self._inboxes.append((inbox, (made["memory"], made["owner"])))
        return None


def _do_on_all(members: Members, work: Callable[[], Any]) -> tuple[str | None, list[Any]]:
    """Do something on every rank: why it failed on the first rank on which it did, and what came out on each.

    Whatever fails on one rank, all hear of it, before the next step would wait for that rank.
    """
    failure = value = None
    try:
        value = work()
    except Exception as error:  # an import, an allocation or a driver call: none may leave the others waiting
        failure = f"{error} (on rank {members.global_ranks[members.rank]})"
    notes = members.exchange({"failure": failure, "value": value})
    return next((note["failure"] for note in notes if note["failure"]), None), [note["value"] for note in notes]


def _is_capturing(stream: Any) -> bool:
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()


def allocate(words: int, device: torch.device) -> Tensor:
    """Words of 64 bits of this rank, for others to reach."""
    from torch.distributed import _symmetric_memory

    return _symmetric_memory.empty(words, dtype=torch.int64, device=device)


def meet(memory: Tensor, members: Members) -> tuple[Any, list[int]]:
    """What keeps the mapping, and where this process finds what each rank allocated."""
    from torch.distributed import _symmetric_memory

    handle = _symmetric_memory.rendezvous(memory, members.group)
    return handle, list(handle.buffer_ptrs)


def _name_host(device: torch.device) -> str:
    """The same for processes that run under one kernel; raises where a process can have no symmetric memory."""
    refuse_device(device)
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}"


def refuse_device(device: torch.device) -> None:
    """Raise where there is no symmetric memory."""
    if device.type != "cuda" or torch.version.hip is not None:
        raise ValueError(f"tensors are on {device.type}, not on NVIDIA GPUs")


def _timeout_of(members: Members, device: torch.device) -> timedelta:
    """How long a rank waits for another."""
    options = getattr(members.group._get_backend(device), "options", None)
    return getattr(options, "_timeout", _DEFAULT_TIMEOUT)
