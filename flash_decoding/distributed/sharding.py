"""Where the keys of a shard lie in the whole sequence, and what that makes of a call's options on the shard.

Positions grow along a shard, so the keys below any position are the first ones of the shard, and count() says how many.
Lengths, starts and windows become lengths and starts of the shard; what differs between query tokens becomes a tree
mask over the last keys; ALiBi's distance is a multiple of the distance within the shard plus a number per query token,
which moves only its maximum. So the kernels know nothing of shards. docs/distributed.md derives it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Contiguous:
    """Every rank holds one run of keys, in the order of the ranks.

    Args:
        start, stop: [B] integers on the device of q: the position of the first key of this rank's run, and of the one
            behind its last. None: the runs follow from the shards' capacities, each filled before the next one begins.
        held: [B] integers, how many keys of each sequence this rank holds, where the caller keeps count; None: that is
            computed from kv_lens in every call.
    """

    start: Tensor | None = None
    stop: Tensor | None = None
    held: Tensor | None = None

    def __str__(self) -> str:
        return "contiguous" if self.start is None else "contiguous with start and stop"


@dataclass(frozen=True, eq=False)
class Interleaved:
    """Blocks of keys are dealt round robin: rank r holds the blocks i with i % ranks == r, one behind the other.

    Args:
        block: keys per block; 1 deals token by token.
        first_rank: [B] integers from 0 to ranks - 1 on the device of q: who holds the first block of each sequence, so
            that many short sequences don't all lie on rank 0. None: rank 0.
        held: as for Contiguous.
    """

    block: int = 1
    first_rank: Tensor | None = None
    held: Tensor | None = None

    def __str__(self) -> str:
        return f"interleaved by {self.block}" + (" with first_rank" if self.first_rank is not None else "")


Shard = str | Contiguous | Interleaved


@dataclass(frozen=True, eq=False, slots=True)
class Run:
    """The keys from start to stop; numbers, or [B] tensors."""

    start: int | Tensor
    stop: int | Tensor

    @property
    def rate(self) -> int | None:
        """Positions per key, where that is one number."""
        return 1

    def count(self, x: Tensor) -> Tensor:
        """How many keys of the shard lie before position x, [B] or [B, Lq]."""
        start, stop = _beside(self.start, x), _beside(self.stop, x)
        if isinstance(start, int) and isinstance(stop, int):
            return (x - start).clamp(0, stop - start)
        return torch.minimum(x, torch.as_tensor(stop)).sub_(start).clamp_(min=0)

    def position(self, key: Tensor) -> Tensor:
        """Where in the whole sequence key number `key` of the shard lies."""
        return key + _beside(self.start, key)


@dataclass(frozen=True, eq=False, slots=True)
class Turns:
    """Every `ranks`-th block of keys; a rank's turn is the number of its first block."""

    rank: int
    first_rank: int | Tensor  # whose turn is 0; a number, or a [B] tensor
    block: int
    ranks: int

    @property
    def rate(self) -> int | None:
        """Positions per key, where that is one number."""
        return self.ranks if self.block == 1 or self.ranks == 1 else None

    def count(self, x: Tensor) -> Tensor:
        """How many keys of the shard lie before position x, [B] or [B, Lq]."""
        x = x.clamp(min=0)
        rounds = x // (self.block * self.ranks)
        rest = x - rounds * (self.block * self.ranks) - self._turn(x) * self.block
        return rounds * self.block + rest.clamp(0, self.block)

    def position(self, key: Tensor) -> Tensor:
        """Where in the whole sequence key number `key` of the shard lies."""
        blocks = key // self.block
        return key + (blocks * (self.ranks - 1) + self._turn(key)) * self.block

    def _turn(self, other: Tensor) -> int | Tensor:
        return _beside((self.rank - self.first_rank) % self.ranks, other)


Place = Run | Turns


def parse_shard(shard: object) -> Contiguous | Interleaved:
    """The layout that shard= names."""
    if isinstance(shard, str) and shard in ("contiguous", "interleaved"):
        return Contiguous() if shard == "contiguous" else Interleaved()
    if isinstance(shard, Interleaved):
        if isinstance(shard.block, bool) or not isinstance(shard.block, int):
            raise TypeError(f"block must be an int, got {type(shard.block).__name__}")
        if shard.block < 1:
            raise ValueError(f"block must be at least 1, got {shard.block}")
        return shard
    if isinstance(shard, Contiguous):
        if (shard.start is None) != (shard.stop is None):
            raise ValueError("stop must be given with start, and start with stop")
        return shard
    if isinstance(shard, str):
        raise ValueError(f"shard must be 'contiguous', 'interleaved', Contiguous() or Interleaved(), got {shard!r}")
    raise TypeError(
        f"shard must be 'contiguous', 'interleaved', Contiguous() or Interleaved(), got {type(shard).__name__}"
    )


def arrays_of(shard: Contiguous | Interleaved) -> dict[str, Tensor | None]:
    """What a layout holds that may differ from call to call."""
    if isinstance(shard, Contiguous):
        return {"start": shard.start, "stop": shard.stop, "held": shard.held}
    return {"first_rank": shard.first_rank, "held": shard.held}


def place_shard(shard: Contiguous | Interleaved, rank: int, capacities: Sequence[int]) -> Place:
    """Where this rank's keys lie.

    Args:
        capacities: keys that each rank's shard can hold per sequence.
    """
    if isinstance(shard, Interleaved):
        return Turns(rank, 0 if shard.first_rank is None else shard.first_rank, shard.block, len(capacities))
    if shard.start is None or shard.stop is None:
        return Run(sum(capacities[:rank]), sum(capacities[: rank + 1]))
    return Run(shard.start, shard.stop)


def find_limit(shard: Contiguous | Interleaved, capacities: Sequence[int]) -> int | None:
    """How long a sequence may be before some shard lacks room; None where tensors say how it is cut."""
    if isinstance(shard, Contiguous):
        return sum(capacities) if shard.start is None else None
    if shard.first_rank is not None:
        return None
    ranks = len(capacities)
    return min(_first_beyond(shard.block, ranks, rank, capacity) for rank, capacity in enumerate(capacities))


def _first_beyond(block: int, ranks: int, turn: int, capacity: int) -> int:
    """The position of the first key that a shard of so many keys has no room for."""
    return capacity + (capacity // block * (ranks - 1) + turn) * block


class Sequences(NamedTuple):
    """What a call says of whole sequences: the arguments of flash_decode() on the unsharded cache."""

    kv_lens: Tensor  # [B]
    kv_start: Tensor | None  # [B]
    q_lens: Tensor | None  # [B]
    tree_mask: Tensor | None  # [B, Lq, Lq]
    alibi_slopes: Tensor | None  # [Hq]
    window: int | None
    causal: bool
    q_len: int


class LocalCall(NamedTuple):
    """One call of flash_decode() on the shard.

    Attributes:
        options: what takes the place of the options of the whole.
        distance: [B, Lq]; slope times it is to be taken from the maximum. None: nothing is.
        by_token: whether every query token is a sequence of its own; the lengths in options are [B * Lq] then.
    """

    options: dict[str, Any]
    distance: Tensor | None = None
    by_token: bool = False


def find_position_errors(shard: Contiguous | Interleaved, ranks: int, sequences: Sequences) -> list[Exception]:
    """Combinations that no call on a shard expresses."""
    s = sequences
    if s.alibi_slopes is None:
        return []
    errors: list[Exception] = []
    if isinstance(shard, Interleaved) and shard.block > 1 and ranks > 1:
        errors.append(
            ValueError(
                f"alibi_slopes must be None for shards interleaved by more than one key, got one and block "
                f"{shard.block}; block=1 and contiguous shards can"
            )
        )
    if s.tree_mask is not None or (s.q_len > 1 and not s.causal):
        errors.append(
            ValueError("alibi_slopes must be None on shards where a query token may see keys behind its own, got one")
        )
    return errors


def localise(place: Place, sequences: Sequences, held: Tensor | None = None) -> list[LocalCall]:
    """The calls on the shard whose states, merged, are the shard's part of the call on the whole.

    Args:
        held: [B], keys of each sequence in the shard; None: to be computed.
    """
    s = sequences
    if s.alibi_slopes is not None and s.q_len > 1:
        return [_by_token(place, s)]
    end = place.count(s.kv_lens) if held is None else held
    if s.q_len == 1 and s.tree_mask is None:
        return [_single_token(place, s, end)]
    return _several_tokens(place, s, end)


def _single_token(place: Place, s: Sequences, end: Tensor) -> LocalCall:
    """One query token sees one range of keys."""
    start = _start(place, s.kv_start, None if s.window is None else s.kv_lens - (1 + s.window))
    options = {"kv_lens": end, "kv_start": start, "q_lens": s.q_lens, "causal": s.causal}
    if s.alibi_slopes is None:
        return LocalCall(options)
    assert place.rate is not None, "find_position_errors() refuses the others"
    options["alibi_slopes"] = s.alibi_slopes * place.rate
    return LocalCall(options, (s.kv_lens - 1 - place.position(end - 1))[:, None])


def _several_tokens(place: Place, s: Sequences, end: Tensor) -> list[LocalCall]:
    """A call over the keys that all tokens may see, and where a window ends, one over the few that only some do."""
    tokens = s.q_len if s.q_lens is None else s.q_lens
    first = s.kv_lens - tokens
    lowest = None if s.window is None else s.kv_lens - (1 + s.window)  # the first key that the last token sees
    options = {
        "kv_lens": end, "kv_start": _start(place, s.kv_start, lowest), "q_lens": s.q_lens, "causal": s.causal,
        "tree_mask": _tree(place, s, first, end, tokens, None) if s.causal else None,
    }  # fmt: skip
    if s.window is None or lowest is None:
        return [LocalCall(options)]
    end = place.count(lowest)
    edge = {
        "kv_lens": end, "kv_start": _start(place, s.kv_start, first - s.window), "q_lens": s.q_lens, "causal": True,
        "tree_mask": _tree(place, s, first, end, tokens, s.window),
    }  # fmt: skip
    return [LocalCall(options), LocalCall(edge)]


def _tree(
    place: Place, s: Sequences, first: Tensor, end: Tensor, tokens: int | Tensor, window: int | None
) -> Tensor:  # fmt: skip
    """[B, Lq, Lq] bool: which token sees which of the last keys before `end`; the new tokens start at `first`."""
    at = torch.arange(s.q_len, device=end.device)
    position = place.position((end - tokens)[:, None] + at)  # [B, Lq keys]
    new = (position - first[:, None])[:, None, :].expand(-1, s.q_len, -1)  # [B, Lq tokens, Lq keys]
    if s.tree_mask is not None:
        seen = (new < 0) | torch.gather(s.tree_mask, 2, new.clamp(0, s.q_len - 1).long())
    elif s.causal:
        seen = new <= at[:, None]
    else:
        seen = torch.ones_like(new, dtype=torch.bool)
    return seen if window is None else seen & (new >= at[:, None] - window)


def _by_token(place: Place, s: Sequences) -> LocalCall:
    """Every token as a sequence that ends with the last key it sees, from which distances are counted."""
    assert place.rate is not None, "find_position_errors() refuses the others"
    t = torch.arange(s.q_len, device=s.kv_lens.device)
    tokens = s.q_len if s.q_lens is None else s.q_lens[:, None]
    own = (s.kv_lens[:, None] - tokens) + t  # [B, Lq]
    end = place.count(own + 1)
    distance = own - place.position(end - 1)
    start = None if s.kv_start is None else s.kv_start[:, None].expand(own.shape)
    start = _start(place, start, None if s.window is None else own - s.window)
    if s.q_lens is not None:  # tokens that are not there lie past all keys, and see none
        end = end.masked_fill(t >= tokens, 0)
        start = None if start is None else start.masked_fill(t >= tokens, 0)
    assert s.alibi_slopes is not None, "the reason for this way"
    dtype = s.kv_lens.dtype
    options = {
        "kv_lens": end.flatten().to(dtype), "kv_start": None if start is None else start.flatten().to(dtype),
        "q_lens": None, "tree_mask": None, "causal": True, "alibi_slopes": s.alibi_slopes * place.rate,
    }  # fmt: skip
    return LocalCall(options, distance, by_token=True)


def _start(place: Place, kv_start: Tensor | None, lowest: Tensor | None) -> Tensor | None:
    """The first key of the shard that counts: none before kv_start, none before the window's first."""
    if kv_start is None or lowest is None:
        first = lowest if kv_start is None else kv_start
        return None if first is None else place.count(first)
    return place.count(torch.maximum(kv_start, lowest))


def _beside(x: int | Tensor, other: Tensor) -> int | Tensor:
    """[B] so that it lies along the first axis of `other`."""
    return x if isinstance(x, int) else x.view(-1, *[1] * (other.ndim - 1))
