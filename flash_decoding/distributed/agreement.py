"""The ranks of a group, and how they find out before any work that they make the same call.

The first call of a signature exchanges a short note through the group's store: what must be the same on every rank, and
why a rank refuses the call, if it does. So a bad argument on one rank is an error on all. The store and not a
collective, because ranks that disagree may not even be in the same collective: then the wait for the missing notes ends
at the group's timeout and names the ranks. Later calls of the signature exchange nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor


class Members:
    """The ranks of a group, seen from this process.

    Attributes: group, rank (of this process in the group), ranks (how many), global_ranks, agreed (what was found out
    per signature), memory (what they reach of each other's, per device).
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = ref(group)  # which the dictionary of all members must not keep alive
        self.rank, self.ranks = group.rank(), group.size()
        self.global_ranks = dist.get_process_group_ranks(group)
        self.agreed: dict[tuple, Any] = {}
        self.memory: dict[torch.device, Any] = {}
        self._exchanges = 0

    @property
    def group(self) -> dist.ProcessGroup:
        group = self._group()
        assert group is not None, "the caller has it"
        return group

    def exchange(self, note: dict[str, Any]) -> list[dict[str, Any]]:
        """The notes of all ranks, in their order; every rank must call this equally often."""
        number, self._exchanges = self._exchanges, self._exchanges + 1
        if self.ranks == 1:
            return [note]
        store: Any = dist.PrefixStore("flash_decoding", _store_of(self.group))
        keys = [f"{number}/{rank}" for rank in range(self.ranks)]
        store.set(keys[self.rank], json.dumps(note))
        try:
            store.wait(keys)
        except RuntimeError as error:
            missing = [self.global_ranks[rank] for rank, key in enumerate(keys) if not _is_there(store, key)]
            raise RuntimeError(
                f"context_parallel_decode() on rank {self.global_ranks[self.rank]} waited {store.timeout} for "
                f"{_name_ranks(missing)} to make a call with these shapes and options; make the process group anew, "
                "and change shapes, options and capacities on all ranks in the same call"
            ) from error
        read = store.multi_get(keys) if store.has_extended_api() else [store.get(key) for key in keys]
        return [json.loads(text) for text in read]

    def agree(
        self, facts: dict[str, Any], refusal: Exception | None, private: object = None
    ) -> list[Any]:  # fmt: skip
        """Raise on every rank if one refuses or the facts differ; returns what each rank said in private."""
        theirs = self.exchange(
            {
                "refusal": None if refusal is None else str(refusal),
                "is_type": isinstance(refusal, TypeError),
                "facts": {name: str(fact) for name, fact in facts.items()},
                "private": private,
            }
        )
        for rank, note in enumerate(theirs):
            if note["refusal"] is not None:
                kind = TypeError if note["is_type"] else ValueError
                raise kind(f"{note['refusal']} (on rank {self.global_ranks[rank]})") from refusal
        for name in facts:
            said: dict[str, list[int]] = {}
            for rank, note in enumerate(theirs):
                said.setdefault(note["facts"][name], []).append(self.global_ranks[rank])
            if len(said) > 1:
                kind = TypeError if name.endswith("dtype") else ValueError
                got = " and ".join(f"{fact} on {_name_ranks(ranks)}" for fact, ranks in said.items())
                raise kind(f"{name} must be the same on all ranks, got {got}")
        return [note["private"] for note in theirs]


_members: WeakKeyDictionary[dist.ProcessGroup, Members] = WeakKeyDictionary()


def find_members(group: dist.ProcessGroup | None) -> Members:
    """The ranks of a group; None is the default group."""
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(
            "group must belong to an initialised torch.distributed, got none; start with torchrun and call "
            "torch.distributed.init_process_group()"
        )
    if group is None:
        group = dist.group.WORLD
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"group must hold the calling rank, got a group without rank {dist.get_rank()}")
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group must be a torch.distributed.ProcessGroup or None, got {type(group).__name__}")
    members = _members.get(group)
    if members is None:
        members = _members[group] = Members(group)
    return members


def find_device_errors(members: Members, device: torch.device) -> list[Exception]:
    """Whether the group's backend communicates tensors of a device."""
    backends = dict(pair.split(":") for pair in dist.get_backend_config(members.group).split(",") if ":" in pair)
    backend = backends.get(device.type)
    # Gloo takes CUDA tensors for some collectives, and none of those that are needed here.
    if backend is None or (device.type == "cuda" and backend == "gloo"):
        served = ", ".join(f"{kind} by {name}" for kind, name in backends.items() if (kind, name) != ("cuda", "gloo"))
        return [ValueError(f"q must be on a device that the group communicates, {served}, got {device}")]
    return []


def describe(x: object) -> object:
    """What ranks compare of an argument, and what a signature holds of it."""
    if x is None:
        return None
    return (x.shape, x.dtype) if isinstance(x, Tensor) else (type(x), str(x))


def _store_of(group: dist.ProcessGroup) -> dist.Store:
    if hasattr(group, "get_group_store"):
        return group.get_group_store()
    return dist.PrefixStore(group.group_name, dist.distributed_c10d._get_default_store())


def _is_there(store: dist.Store, key: str) -> bool:
    try:
        return store.check([key])
    except RuntimeError:  # whoever kept the store is gone
        return False


def _name_ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
