"""ShardedKVCache: a cache spread over the ranks of a group, appended to and decoded from as if it were one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flash_decoding.caches import CacheFullError, KVCache, PagedKVCache, describe_lengths, refuse_own, upload
from flash_decoding.distributed.agreement import find_members
from flash_decoding.distributed.context_parallel import PendingDecode, context_parallel_decode
from flash_decoding.distributed.sharding import Interleaved, Turns


class ShardedKVCache:
    """Every rank's part of one cache, in blocks of keys dealt round robin, so that shards differ by a block at most.

    All ranks of the group make the same calls, with the same new keys: each writes those that are its own. Where every
    sequence is and how long it is, is known on the host; nothing is read from the device. The first block of sequence b
    lies on rank b % ranks, so that short sequences don't all lie on rank 0.

    Attributes: cache (this rank's KVCache or PagedKVCache), block, lengths (keys per whole sequence: a list for a
    KVCache, a dictionary by sequence for a PagedKVCache), nbytes (of this rank's part).

    Args:
        cache: this rank's part; of the same kind, size and dtype on every rank. A KVCache holds max_len keys of each
            sequence here, so ranks * max_len in all.
        group: the ranks; None means the default group.
        block: keys per block; for pages, best a multiple of the page size. ALiBi needs 1.

    Example:
        >>> torch.distributed.init_process_group("gloo")  # under torchrun
        >>> cache = ShardedKVCache(KVCache(2, 4, 100, 64, dtype=torch.float32), block=16)
        >>> cache.append(torch.randn(2, 4, 40, 64), torch.randn(2, 4, 40, 64))  # the same on every rank
        >>> out = cache.decode(torch.randn(2, 8, 1, 64))
        >>> cache.lengths
        [40, 40]
    """

    def __init__(
        self, cache: KVCache | PagedKVCache, *, group: dist.ProcessGroup | None = None, block: int = 64
    ) -> None:
        if not isinstance(cache, (KVCache, PagedKVCache)):
            raise TypeError(f"cache must be a KVCache or a PagedKVCache, got {type(cache).__name__}")
        members = find_members(group)
        refusal: Exception | None = None
        if isinstance(block, bool) or not isinstance(block, int):
            refusal = TypeError(f"block must be an int, got {type(block).__name__}")
        elif block < 1:
            refusal = ValueError(f"block must be at least 1, got {block}")
        facts = {"cache": type(cache).__name__, "k.shape": list(cache.k.shape), "v.shape": list(cache.v.shape),
                 "dtype": cache.k.dtype, "layout": cache.layout, "block": block,
                 "kv_format": cache.kv_format}  # fmt: skip
        members.agree(facts, refusal)
        self.cache, self.block, self.group = cache, block, group
        self._rank, self._ranks = members.rank, members.ranks
        self._first: dict[int, int] = {}  # of each sequence in pages, who holds its first block
        self.lengths: list[int] | dict[int, int] = {}
        if isinstance(cache, KVCache):
            batch, device = len(cache.lengths), cache.k.device
            self.lengths = [0] * batch
            self._kv_lens = torch.zeros(batch, dtype=torch.int32, device=device)
            self._first_rank = torch.arange(batch, dtype=torch.int32, device=device) % self._ranks

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's part."""
        return self.cache.nbytes

    def __repr__(self) -> str:
        lengths = self.lengths.values() if isinstance(self.lengths, dict) else self.lengths
        return (
            f"<ShardedKVCache: lengths {describe_lengths(lengths)} in blocks of {self.block}, rank {self._rank} of "
            f"{self._ranks} with {self.cache!r}>"
        )

    def allocate(self) -> int:
        """A new, empty sequence of a paged cache; the same number on every rank."""
        sequence = self._pages.allocate()
        self._first[sequence], self._by_sequence[sequence] = sequence % self._ranks, 0
        return sequence

    def fork(self, sequence: int, length: int | None = None) -> int:
        """A new sequence of a paged cache that shares the first `length` keys of another (None: all)."""
        whole = self._by_sequence.get(sequence, 0)
        length = whole if length is None else length
        if not 0 <= length <= whole:
            raise ValueError(f"length must lie from 0 to {whole}, what sequence {sequence} holds, got {length}")
        child = self._pages.fork(sequence, self._held(length, self._first.get(sequence, 0), self._rank))
        self._first[child], self._by_sequence[child] = self._first[sequence], length
        return child

    def free(self, sequences: int | Sequence[int] | None = None) -> None:
        """Empty sequences of a KVCache, all by default; end one sequence of a PagedKVCache."""
        if isinstance(self.cache, PagedKVCache):
            if not isinstance(sequences, int):
                raise TypeError(f"sequences must be one sequence of a paged cache, got {type(sequences).__name__}")
            self.cache.free(sequences)
            del self._first[sequences], self._by_sequence[sequences]
            return
        self.cache.free(sequences)
        lengths = self._in_order
        emptied = range(len(lengths)) if sequences is None else [sequences] if isinstance(sequences, int) else sequences
        for b in emptied:
            lengths[b] = 0
        self._kv_lens.copy_(upload(lengths, self._kv_lens.device))

    def append(
        self,
        k_new: Tensor,
        v_new: Tensor,
        *,
        sequences: Sequence[int] | None = None,
        new_lens: Sequence[int] | None = None,
        backend: str = "auto",
    ) -> None:
        """Write new keys [B, Hkv, L, D] and values behind those that are there, each on the rank that it belongs to.

        Args:
            k_new, v_new: all new keys and values, the same on every rank, rotated already; in the layout of the cache.
            sequences: which sequences of a paged cache; None for a KVCache, whose sequences are all.
            new_lens: how many of the L new tokens count, per sequence; None means all.
            backend: as for append_kv().

        Raises:
            CacheFullError: some rank's KVCache has no room, on every rank; or this rank's pool has too few pages.
        """
        named = self._named(sequences)
        axis = 2 if self.cache.layout == "bhnd" else 1
        if not isinstance(k_new, Tensor) or k_new.ndim != 4 or k_new.shape[0] != len(named):
            got = list(k_new.shape) if isinstance(k_new, Tensor) else type(k_new).__name__
            raise ValueError(f"k_new must have four dimensions and one row per sequence, {len(named)}, got {got}")
        new = k_new.shape[axis]
        counts = [new] * len(named) if new_lens is None else [int(x) for x in new_lens]
        if len(counts) != len(named) or not all(0 <= x <= new for x in counts):
            raise ValueError(f"new_lens must hold {len(named)} numbers from 0 to {new}, got {counts}")
        lengths, firsts = [self.lengths[b] for b in named], self._firsts(named)
        self._refuse_full(lengths, counts, firsts)
        mine = [self._mine(*sizes) for sizes in zip(lengths, counts, firsts, strict=True)]
        if any(map(len, mine)):
            k_own, v_own = (_select(x, mine, axis) for x in (k_new, v_new))
            own_lens = [len(tokens) for tokens in mine]
            if isinstance(self.cache, KVCache):
                self.cache.append(k_own, v_own, new_lens=own_lens, backend=backend)
            else:
                self.cache.append(named, k_own, v_own, new_lens=own_lens, backend=backend)
        for b, length, count in zip(named, lengths, counts, strict=True):
            self.lengths[b] = length + count
        if isinstance(self.cache, KVCache):
            self._kv_lens += new if new_lens is None else upload(counts, self._kv_lens.device)

    def decode(
        self, q: Tensor, *, sequences: Sequence[int] | None = None, **options: Any
    ) -> Tensor | tuple[Tensor, Tensor] | PendingDecode:  # fmt: skip
        """context_parallel_decode() over the whole cache.

        Args:
            q: [B, Hq, Lq, D], the same on every rank, in the layout of the cache.
            sequences: which sequences of a paged cache; None for a KVCache.
            options: of context_parallel_decode(), apart from those that say where keys are and what they are.
        """
        refuse_own(
            options, "k_shard", "v_shard", "group", "shard", "kv_lens", "block_table", *self.cache._codes,
        )  # fmt: skip
        named = self._named(sequences)
        if isinstance(self.cache, KVCache):
            kv_lens, first_rank, held = self._kv_lens, self._first_rank, self.cache.kv_lens
        else:
            device = self.cache.k.device
            kv_lens = upload([self.lengths[b] for b in named], device)
            first_rank, held = upload(self._firsts(named), device), self.cache.kv_lens(named)
            options["block_table"] = self.cache.block_table(named)
        cache = self.cache
        return context_parallel_decode(
            q, cache.k, cache.v, group=self.group, layout=cache.layout, kv_lens=kv_lens, kv_format=cache.kv_format,
            k_scale=cache.k_scale, v_scale=cache.v_scale, shard=Interleaved(self.block, first_rank, held), **options,
        )  # fmt: skip

    @property
    def _pages(self) -> PagedKVCache:
        if not isinstance(self.cache, PagedKVCache):
            raise TypeError("cache must be a PagedKVCache for this, got a KVCache")
        return self.cache

    @property
    def _by_sequence(self) -> dict[int, int]:
        assert isinstance(self.lengths, dict), "of pages"
        return self.lengths

    @property
    def _in_order(self) -> list[int]:
        assert isinstance(self.lengths, list), "of a dense cache"
        return self.lengths

    def _named(self, sequences: Sequence[int] | None) -> list[int]:
        """The sequences that a call is about."""
        if isinstance(self.cache, KVCache):
            if sequences is not None:
                raise ValueError("sequences must be None for a KVCache, whose calls are about all of them")
            return list(range(len(self.lengths)))
        if sequences is None:
            raise ValueError("sequences must name those of a paged cache, got None")
        named: list[int] = [sequences] if isinstance(sequences, int) else [int(x) for x in sequences]
        for sequence in named:
            if sequence not in self._by_sequence:
                raise ValueError(f"sequences must be allocated and not freed, got {sequence}")
        return named

    def _firsts(self, named: list[int]) -> list[int]:
        """Who holds the first block of each sequence."""
        return [b % self._ranks if isinstance(self.cache, KVCache) else self._first[b] for b in named]

    def _held(self, length: int, first: int, rank: int) -> int:
        """Keys that a rank holds of a sequence of `length`."""
        return int(Turns(rank, first, self.block, self._ranks).count(torch.tensor([length], device="cpu")))

    def _mine(self, length: int, count: int, first: int) -> Tensor:
        """Which of `count` new tokens behind `length` keys are this rank's."""
        block = torch.arange(length, length + count, device="cpu") // self.block
        return ((block + first) % self._ranks == self._rank).nonzero()[:, 0]

    def _refuse_full(self, lengths: list[int], counts: list[int], firsts: list[int]) -> None:
        """Raise on every rank if one of them has no room: shards are equally large, and nobody writes then."""
        if not isinstance(self.cache, KVCache):
            return
        room = self.cache.max_len
        for b, (length, count, first) in enumerate(zip(lengths, counts, firsts, strict=True)):
            # The rank whose turn is first never holds less than another.
            if self._held(length + count, first, first) > room:
                raise CacheFullError(
                    f"the cache must have room for the new keys on every rank, got {count} for sequence {b}, which "
                    f"holds {length}, with room for {room} per rank in blocks of {self.block}"
                )


def _select(x: Tensor, chosen: list[Tensor], axis: int) -> Tensor:
    """Of each row its own tokens, as many as the longest choice; what is past a row's choice is any token."""
    most = max(map(len, chosen))
    if most == x.shape[axis]:
        whole = [len(tokens) in (0, most) for tokens in chosen]
        if all(whole):
            return x
    at = torch.zeros(len(chosen), most, dtype=torch.long, device="cpu")
    for row, tokens in zip(at, chosen, strict=True):
        row[: len(tokens)] = tokens
    shape = [len(chosen), 1, 1, x.shape[3]]
    shape[3 - axis] = x.shape[3 - axis]
    shape[axis] = most
    index = upload(at, x.device).view([len(chosen), *[most if i == axis else 1 for i in (1, 2)], 1])
    return x.gather(axis, index.expand(shape))
