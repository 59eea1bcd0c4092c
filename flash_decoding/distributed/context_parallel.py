"""context_parallel_decode(): every rank decodes its shard of the cache, and the states are merged.

A state is an unfinished softmax: acc, m and l in float32, one behind the other in one message, written there by the
kernels themselves. So a rank is one split more, and what merges splits merges ranks, as exactly. Where the GPUs of a
host reach each other's memory, one kernel pushes the states there and merges what arrives. Otherwise an all-gather
brings the states of all ranks to each, where one kernel merges them, or an all-to-all brings to each rank the states of
its heads (a reduce-scatter whose sum is the merge); a replicated output is gathered then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor

from flash_decoding.distributed.agreement import Members, find_members
from flash_decoding.distributed.cost import choose_way
from flash_decoding.distributed.local import decode_shard, find_backend
from flash_decoding.distributed.request import (
    Request,
    capacity_of,
    facts_of,
    find_output_errors,
    find_refusals,
    knows_positions,
    needs_no_positions,
    signature_of,
    value_dim_of,
)
from flash_decoding.distributed.sharding import (
    LocalCall,
    Place,
    Sequences,
    Shard,
    arrays_of,
    find_limit,
    localise,
    parse_shard,
    place_shard,
)
from flash_decoding.distributed.symmetric import SymmetricMemory
from flash_decoding.op import is_traced
from flash_decoding.workspace import Inbox, Partial

# Floats: states begin at multiples of 64 bytes, so that the merge reads them in vectors.
_MESSAGE_STEP = 16
# The collectives by their newer names, where torch has them.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_all_to_all = dist.all_to_all_single


class PendingDecode:
    """A decode step whose states are on their way; see async_op of context_parallel_decode().

    Attributes: communicate (the way they take).
    """

    def __init__(self, communicate: str, finish: Callable[[], Any]) -> None:
        self.communicate = communicate
        self._finish: Callable[[], Any] | None = finish
        self._result: Any = None

    def wait(self) -> Tensor | tuple[Tensor, Tensor]:
        """The result, merged on the current stream; a GPU waits for the states there, the host does not."""
        if self._finish is not None:
            self._result, self._finish = self._finish(), None
        return self._result


def context_parallel_decode(
    q: Tensor,
    k_shard: Tensor,
    v_shard: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    shard: Shard = "contiguous",
    output: str = "replicated",
    communicate: str = "auto",
    async_op: bool = False,
    kv_lens: Tensor | None = None,
    kv_start: Tensor | None = None,
    q_lens: Tensor | None = None,
    causal: bool = True,
    window: int | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    tree_mask: Tensor | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor] | PendingDecode:
    """flash_decode() over a cache whose keys are spread over the ranks of a group. Every rank of the group calls it.

    The result is that of flash_decode() on the whole cache. What describes keys is about this rank's shard: k_shard,
    v_shard, block_table, key_mask, scales of a quantised cache. What describes sequences is about the whole ones and
    must be the same on every rank: q, lengths, starts, windows, slopes, sinks, trees. Shards may be empty.

    The first call with a signature (shapes, dtypes, options) compares it between the ranks and raises on all of them
    where they differ or one refuses. From then on nothing is exchanged but the states, nothing is read on the host and
    message buffers are there, so a call can be captured in a CUDA graph. Calls of one group, replayed ones included,
    come in the same order on every rank, one after the other.

    Args:
        q: [B, Hq, Lq, D], the same on every rank.
        k_shard: [B, Hkv, N of this rank, D], or its pages with block_table; D and Hkv as on the other ranks.
        v_shard: likewise, Dv wide.
        group: the ranks that share the cache; None means the default group. NCCL for CUDA tensors, gloo for others.
        shard: which keys this rank holds: "contiguous" or Contiguous(start, stop), a run of keys; "interleaved" or
            Interleaved(block, first_rank), blocks dealt round robin.
        output: "replicated": every rank gets all heads. "heads": rank r of R gets heads r Hq / R to (r + 1) Hq / R.
        communicate: "symmetric_memory" (NVIDIA GPUs of one host), "all_gather", "reduce_scatter" (over heads, Hq a
            multiple of R) or "auto", by cost.choose_way().
        async_op: return a PendingDecode as soon as the states are under way; its wait() merges them. Through symmetric
            memory the current stream does both, and the stream of wait() waits for it.
        kv_lens: [B], keys per whole sequence. None means that the shards are full: together they are the sequences.
            Shapes of shards may change from call to call where kv_lens or positions don't depend on them; otherwise
            they change on all ranks in the same call.
        kv_start, q_lens, causal, window, alibi_slopes, sinks, tree_mask: of the whole sequences, as for flash_decode().
            alibi_slopes need block=1 or contiguous shards, and, with several query tokens, causal without tree_mask.
        return_lse: return (out, lse) instead of out.
        out, lse: where to write the result; None allocates.
        options: layout, block_table, scale, softcap, key_mask, num_splits, split_size, workspace, backend, check and
            the format of the cache, as for flash_decode() on the shard.

    Returns:
        out: [B, Hq, Lq, Dv], dtype of q, or with output="heads" [B, Hq / R, Lq, Dv] (in layout "bnhd" accordingly).
        lse, with return_lse: [B, Hq, Lq] or [B, Hq / R, Lq] float32, without the sink. No visible key: 0 and -inf.

    Raises:
        ValueError, TypeError: a bad argument, on every rank, naming the rank. RuntimeError: a rank that is lost or
            calls something else, within the group's timeout.

    Example:
        >>> torch.distributed.init_process_group("gloo")  # under torchrun
        >>> q, k, v = torch.randn(1, 8, 1, 64), torch.randn(1, 2, 1000, 64), torch.randn(1, 2, 1000, 64)
        >>> out = context_parallel_decode(q, k, v)  # over 1000 keys per rank
    """
    members = find_members(group)
    if any(isinstance(x, Tensor) and is_traced(x) for x in (q, k_shard, v_shard)):
        raise ValueError("q must not be traced: context_parallel_decode() runs outside torch.compile")
    sequence = dict(
        kv_lens=kv_lens, kv_start=kv_start, q_lens=q_lens, causal=causal, window=window, alibi_slopes=alibi_slopes,
        tree_mask=tree_mask,
    )  # fmt: skip
    request = Request(
        q, k_shard, v_shard, sequence, sinks, shard, output, communicate, return_lse, out, lse,
        options.pop("workspace", None), options.pop("backend", "auto"), options,
    )  # fmt: skip
    key = signature_of(request)
    session = members.agreed.get(key)
    if session is None:
        session = members.agreed[key] = _agree(members, request)
    pending = session.start(request._replace(shard=parse_shard(shard)), async_op)
    return pending if async_op else pending.wait()


def _agree(members: Members, request: Request) -> _Session:
    """Check the call here, compare it between the ranks, and make what later calls use again."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise ValueError("the first call with these shapes and options must come before a CUDA graph is captured")
    refusal = next(find_refusals(members, request), None)
    facts = {} if refusal is not None else facts_of(request)
    capacities = members.agree(facts, refusal, capacity_of(request))
    request = request._replace(shard=parse_shard(request.shard))
    place = None
    if not needs_no_positions(request):
        place = place_shard(request.shard, members.rank, capacities)
    return _Session(members, request, place, capacities)


class _Buffers(NamedTuple):
    """The memory of one call's messages, and the states in them."""

    own: Tensor  # this rank's state, and where it is sent as it is, the message
    state: Partial
    send: Tensor  # [ranks, floats] for an all-to-all
    parts: Partial  # of the state, by the rank that keeps those heads
    received: Tensor  # [ranks, floats]
    states: Partial  # of all ranks


class _Session:
    """A signature that all ranks agreed on: sizes, positions, the way of communicating and the memory for it."""

    def __init__(self, members: Members, request: Request, place: Place | None, capacities: list[int]) -> None:
        self._members, self.place, self.capacities = ref(members), place, capacities
        self.number = len(members.agreed) + 1  # the same on all ranks, as they agree in the same order
        heads, length = (1, 2) if request.layout == "bhnd" else (2, 1)
        self.batch, self.heads_q, self.q_len = request.q.shape[0], request.q.shape[heads], request.q.shape[length]
        self.value_dim, self.dtype, self.device = value_dim_of(request), request.q.dtype, request.q.device
        self.heads_out = self.heads_q // members.ranks if request.output == "heads" else self.heads_q
        self.way, self.inbox = self._choose_way(request)
        self.first_out = members.rank * self.heads_out if request.output == "heads" else 0
        # Shards that may grow from call to call are held against their lengths by flash_decode().
        self.limit = None if place is None or knows_positions(request) else find_limit(request.shard, capacities)
        self.kv_lens = None if place is None else self._full_lengths(request, capacities)
        arrays = [x for x in request.sequence.values() if isinstance(x, Tensor)]
        arrays += [x for x in arrays_of(request.shard).values() if x is not None]
        # Without arrays nothing about positions can change.
        self.fixed = self._localise(request) if place is not None and not arrays else None
        self._kept: dict[int, _Buffers] = {}

    @property
    def members(self) -> Members:
        members = self._members()
        assert members is not None, "the caller has them"
        return members

    def _choose_way(self, request: Request) -> tuple[str, Inbox | None]:
        """How states travel, and where they arrive in symmetric memory; the same way on every rank."""
        members, way = self.members, request.communicate
        rows = self.batch * self.heads_q * self.q_len
        sizes = request.output, members.ranks, self.heads_q, rows, self.value_dim, request.q.element_size()
        if way == "auto":
            way = choose_way(*sizes, reach=request.q.device.type == "cuda")
        if way != "symmetric_memory" or members.ranks == 1:
            return way, None
        memory = members.memory.get(self.device)
        if memory is None:
            memory = members.memory[self.device] = SymmetricMemory(members, self.device)
        inbox = memory.take(members, self.batch * self.heads_out * self.q_len, self.value_dim)
        if isinstance(inbox, Inbox):
            return way, inbox
        if request.communicate != "auto":
            raise ValueError(f"communicate must not be 'symmetric_memory' here: {inbox}")
        return choose_way(*sizes), None

    def start(self, request: Request, async_op: bool) -> PendingDecode:
        """Decode the shard and send the state on its way."""
        out, lse = self._make_outputs(request)
        if out.numel() == 0:
            return PendingDecode(self.way, lambda: _result(request, out, lse))
        calls = [LocalCall({})] if self.place is None else self.fixed or self._localise(request)
        buffers = self._take_buffers(fresh=async_op)
        decode_shard(request, calls, buffers.state)
        if self.members.ranks == 1:
            alone = Partial(*[x[None] for x in buffers.state])
            return PendingDecode(self.way, lambda: self._finish(request, alone, out, lse))
        if self.inbox is not None:
            self.members.memory[self.device].follow()
            find_backend(request).exchange_states(
                buffers.state, self.inbox, _heads_first(request, out), lse, sinks=request.sinks,
                scatter=request.output == "heads", signature=self.number,
            )  # fmt: skip
            done = torch.cuda.current_stream().record_event() if async_op and self.device.type == "cuda" else None

            def follow() -> Tensor | tuple[Tensor, Tensor]:
                if done is not None:
                    torch.cuda.current_stream(self.device).wait_event(done)
                return _result(request, out, lse)

            return PendingDecode(self.way, follow)
        if self.way == "all_gather":
            work = _all_gather(buffers.received.view(-1), buffers.own, group=self.members.group, async_op=async_op)
        else:
            for x, y in zip(buffers.parts, buffers.state, strict=True):
                x.copy_(y.unflatten(1, (self.members.ranks, -1)).transpose(0, 1))
            work = _all_to_all(
                buffers.received.view(-1), buffers.send.view(-1), group=self.members.group, async_op=async_op
            )  # fmt: skip

        def finish() -> Tensor | tuple[Tensor, Tensor]:
            if work is not None:
                work.wait()
            states = buffers.states
            if self.way == "all_gather":
                heads = slice(self.first_out, self.first_out + self.heads_out)
                return self._finish(request, Partial(*[x[:, :, heads] for x in states]), out, lse)
            if request.output == "heads":
                return self._finish(request, states, out, lse)
            return self._gather_heads(request, states, out, lse)

        return PendingDecode(self.way, finish)

    def _finish(
        self, request: Request, states: Partial, out: Tensor, lse: Tensor | None
    ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        """Merge states of the heads that this rank keeps into the result."""
        self._merge(request, states, self.first_out, _heads_first(request, out), lse)
        return _result(request, out, lse)

    def _merge(self, request: Request, states: Partial, first_head: int, out: Tensor, lse: Tensor | None) -> None:
        """Merge states into out and lse; a sink joins the denominator here."""
        sinks = None if request.sinks is None else request.sinks[first_head : first_head + out.shape[1]]
        if not states.acc[0].is_contiguous():  # some heads of all
            states = Partial(*[x.contiguous() for x in states])
        find_backend(request).merge_partials(states, out, lse, sinks=sinks)

    def _gather_heads(
        self, request: Request, states: Partial, out: Tensor, lse: Tensor | None
    ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        """Merge this rank's heads, and bring those of all ranks to each; the lse travels along where it is wanted."""
        ranks, heads = self.members.ranks, self.heads_q // self.members.ranks
        sizes = self.batch, heads, self.q_len, self.value_dim
        dtype = self.dtype if lse is None else torch.float32
        floats = math.prod(sizes)
        message = torch.empty(
            floats + math.prod(sizes[:3]) * (lse is not None), dtype=dtype, device=self.device
        )  # fmt: skip
        part = None if lse is None else message[floats:].view(sizes[:3])
        self._merge(request, states, self.members.rank * heads, message[:floats].view(sizes), part)
        gathered = torch.empty((ranks, message.numel()), dtype=dtype, device=self.device)
        _all_gather(gathered.view(-1), message, group=self.members.group)
        view = _heads_first(request, out)
        whole = gathered[:, :floats].view(ranks, *sizes).transpose(0, 1)  # [B, ranks, heads, Lq, Dv]
        view.unflatten(1, (ranks, heads)).copy_(whole)
        if lse is not None:
            lse.unflatten(1, (ranks, heads)).copy_(gathered[:, floats:].view(ranks, *sizes[:3]).transpose(0, 1))
        return _result(request, out, lse)

    def _localise(self, request: Request) -> list[LocalCall]:
        """What the call is on this shard."""
        lens = request.sequence["kv_lens"]
        if lens is not None and lens.device.type == "cpu" and lens.numel():
            self._check_lengths(request, lens)
        place = self.place
        if any(x is not None for x in arrays_of(request.shard).values()):
            place = place_shard(request.shard, self.members.rank, self.capacities)
        assert place is not None, "else there is nothing to localise"
        sequence = request.sequence | {"kv_lens": self.kv_lens if lens is None else lens}
        return localise(place, Sequences(q_len=self.q_len, **sequence), request.shard.held)

    def _check_lengths(self, request: Request, lens: Tensor) -> None:
        """The lengths of the whole, where looking costs nothing."""
        low, high = (int(x) for x in torch.aminmax(lens))
        if low < 0 or (self.limit is not None and high > self.limit):
            most = "what the shards hold" if self.limit is None else f"{self.limit}, what the shards hold"
            raise ValueError(f"kv_lens must lie from 0 to {most}, got values from {low} to {high}")

    def _full_lengths(self, request: Request, capacities: list[int]) -> Tensor | None:
        """kv_lens where none is given: the shards are full."""
        if request.sequence["kv_lens"] is not None:
            return None
        total = sum(capacities)
        if total != self.limit:
            raise ValueError(
                f"kv_lens must be given where shards are not the {request.shard} parts of one length, got shards of "
                f"{', '.join(map(str, capacities))} keys"
            )
        return torch.full((self.batch,), total, dtype=torch.int32, device=self.device)

    def _make_outputs(self, request: Request) -> tuple[Tensor, Tensor | None]:
        """out in the layout of the call, and lse where it is wanted."""
        for error in find_output_errors(request, self.heads_out):
            raise error
        shape, lse = (self.batch, self.heads_out, self.q_len), request.lse
        out = request.out
        if out is None:
            middle = shape[1:] if request.layout == "bhnd" else shape[:0:-1]
            out = torch.empty((self.batch, *middle, self.value_dim), dtype=self.dtype, device=self.device)
        if lse is None and request.return_lse:
            lse = torch.empty(shape, dtype=torch.float32, device=self.device)
        return out, lse

    def _take_buffers(self, fresh: bool) -> _Buffers:
        """Memory for the messages: kept per stream, but not where several calls may be under way or a graph owns it."""
        stream = 0
        if self.device.type == "cuda":
            fresh = fresh or torch.cuda.is_current_stream_capturing()
            stream = torch.cuda.current_stream(self.device).cuda_stream
        kept = None if fresh else self._kept.get(stream)
        if kept is None:
            kept = self._make_buffers()
            if not fresh:
                self._kept[stream] = kept
        return kept

    def _make_buffers(self) -> _Buffers:
        ranks, sizes = self.members.ranks, (self.batch, self.heads_q, self.q_len)
        part = sizes if self.way != "reduce_scatter" else (self.batch, self.heads_q // ranks, self.q_len)
        floats = _message_floats(math.prod(part), self.value_dim)
        own = self._make_floats(_message_floats(math.prod(sizes), self.value_dim))
        send = self._make_floats(ranks if self.way == "reduce_scatter" else 0, floats)
        received = self._make_floats(0 if self.inbox is not None else ranks, floats)
        parts, states = (_cut(x, x.shape[:1], *part, self.value_dim) for x in (send, received))
        return _Buffers(own, _cut(own, (), *sizes, self.value_dim), send, parts, received, states)

    def _make_floats(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.device)


def _heads_first(request: Request, out: Tensor) -> Tensor:
    """out as [B, Hq, Lq, Dv]."""
    return out.transpose(1, 2) if request.layout == "bnhd" else out


def _result(request: Request, out: Tensor, lse: Tensor | None) -> Tensor | tuple[Tensor, Tensor]:
    return (out, lse) if request.return_lse and lse is not None else out


def _message_floats(rows: int, value_dim: int) -> int:
    return -(-rows * (value_dim + 2) // _MESSAGE_STEP) * _MESSAGE_STEP


def _cut(message: Tensor, lead: Sequence[int], batch: int, heads: int, q_len: int, value_dim: int) -> Partial:
    """The state, or states [*lead], in a message."""
    rows, shape = batch * heads * q_len, (*lead, batch, heads, q_len)
    acc, m, l, _ = message.tensor_split([rows * (value_dim + i) for i in range(3)], dim=-1)
    return Partial(acc.view(*shape, value_dim), m.view(shape), l.view(shape))
