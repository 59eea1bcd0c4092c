"""torch.nn.functional.scaled_dot_product_attention: its default choice, each backend by name, and on the CPU.

Query heads that share a KV head can be passed with enable_gqa=True, or packed as query rows, which is the same
attention because a decode step needs no mask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from flash_decoding.bench.peers.base import Peer, Prepared, split_heads
from flash_decoding.bench.timing import Inputs
from flash_decoding.bench.workloads import Case

Variants = Iterator[Callable[[], Prepared]]


def _gqa(copies: Sequence[Inputs], group: int) -> Prepared:
    calls = [partial(scaled_dot_product_attention, q, k, v, enable_gqa=group > 1) for q, k, v in copies]
    return Prepared("enable_gqa" if group > 1 else "", calls)


def _packed(copies: Sequence[Inputs]) -> Prepared:
    calls = [partial(scaled_dot_product_attention, split_heads(q, k.shape[1]), k, v) for q, k, v in copies]
    shape = copies[0].q.shape
    return Prepared("query heads as rows", calls, to_bhnd=lambda out: out.reshape(shape))


def _repeated(copies: Sequence[Inputs], group: int) -> Prepared:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1))

    return Prepared("KV heads repeated", [partial(call, *copy) for copy in copies])


def _gqa_variants(case: Case, copies: Sequence[Inputs]) -> Variants:
    yield lambda: _gqa(copies, case.shape.group)


def _packed_variants(case: Case, copies: Sequence[Inputs]) -> Variants:
    yield lambda: _packed(copies)


def _repeated_variants(case: Case, copies: Sequence[Inputs]) -> Variants:
    yield lambda: _repeated(copies, case.shape.group)


def _forced(backend: SDPBackend) -> Callable[[Case, Sequence[Inputs]], Variants]:
    """Both ways of passing the heads, with one backend alone allowed."""

    def with_backend(prepared: Prepared) -> Prepared:
        prepared.context = lambda: sdpa_kernel(backend)
        return prepared

    def variants(case: Case, copies: Sequence[Inputs]) -> Variants:
        if case.shape.group == 1 or backend != SDPBackend.EFFICIENT_ATTENTION:  # which has no enable_gqa
            yield lambda: with_backend(_gqa(copies, case.shape.group))
        if case.shape.group > 1:
            yield lambda: with_backend(_packed(copies))

    return variants


def _needs_group(case: Case) -> str | None:
    return "the same call as sdpa when every query head has a KV head of its own" if case.shape.group == 1 else None


_BACKENDS = {
    "flash": ("SDPA flash", SDPBackend.FLASH_ATTENTION),
    "cudnn": ("SDPA cuDNN", SDPBackend.CUDNN_ATTENTION),
    "efficient": ("SDPA efficient", SDPBackend.EFFICIENT_ATTENTION),
    "math": ("SDPA math", SDPBackend.MATH),
}

PEERS = (
    Peer("sdpa", "SDPA", "cuda", _gqa_variants),
    Peer("sdpa_packed", "SDPA packed", "cuda", _packed_variants, refuses=_needs_group),
    *(Peer(f"sdpa_{name}", label, "cuda", _forced(backend)) for name, (label, backend) in _BACKENDS.items()),
    Peer("sdpa", "SDPA", "cpu", _gqa_variants),
    Peer("sdpa_repeat", "SDPA repeated", "cpu", _repeated_variants, refuses=_needs_group),
    Peer("sdpa_packed", "SDPA packed", "cpu", _packed_variants, refuses=_needs_group),
)
