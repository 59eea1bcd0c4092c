"""xFormers' split-K attention, which shares a KV head among expanded query heads when K and V are strided views."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from flash_decoding.bench.peers.base import Peer, Prepared, needs_plain
from flash_decoding.bench.timing import Inputs
from flash_decoding.bench.workloads import Case


def _split_k(case: Case, copies: Sequence[Inputs], head_by_head: bool) -> Prepared:
    from xformers.ops import fmha

    s = case.shape
    calls = []
    for copy in copies:
        q = copy.q.view(s.batch, 1, s.heads_kv, s.group, s.head_dim)
        k, v = (x.transpose(1, 2) for x in (copy.k, copy.v))
        if not head_by_head:
            k, v = k.contiguous(), v.contiguous()
        k, v = (x.unsqueeze(3).expand(-1, -1, -1, s.group, -1) for x in (k, v))  # stride 0: no copy
        calls.append(partial(fmha.memory_efficient_attention_forward, q, k, v, op=fmha.triton_splitk.FwOp))
    shape = copies[0].q.shape
    storage = "head by head" if head_by_head else "token by token"
    return Prepared(f"triton split-K, {storage}", calls, to_bhnd=lambda out: out.reshape(shape))


def _variants(case: Case, copies: Sequence[Inputs]) -> Iterator[Callable[[], Prepared]]:
    for head_by_head in (False, True):
        yield partial(_split_k, case, copies, head_by_head)


PEERS = (Peer("xformers", "xFormers", "cuda", _variants, "xformers.ops", "xformers", needs_plain),)
