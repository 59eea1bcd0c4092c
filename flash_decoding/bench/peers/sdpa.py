"""torch.nn.functional.scaled_dot_product_attention: its default choice, each backend by name, and on the CPU.

Query heads that share a KV head can be passed with enable_gqa=True, or packed as query rows, which is the same
attention where a decode step needs no mask. Several query tokens and windows need one, since is_causal is aligned top
left; pages it cannot read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from flash_decoding.bench.peers.base import Peer, Prepared, needs_numbers, needs_plain, split_heads
from flash_decoding.bench.timing import Inputs
from flash_decoding.bench.workloads import Case

Variants = Iterator[Callable[[], Prepared]]


def _mask(case: Case, device: torch.device) -> Tensor | None:
    """The keys that each query token sees, [Lq, N] bool; None where that is all of them."""
    q_len, window = case.options.q_len, case.options.window
    if q_len == 1 and window is None:
        return None
    n = torch.arange(case.shape.kv_len, device=device)
    own = n[-q_len:, None]
    seen = n <= own
    return seen if window is None else seen & (n >= own - window)


def _gqa(case: Case, copies: Sequence[Inputs]) -> Prepared:
    grouped, mask = case.shape.group > 1, _mask(case, copies[0].q.device)
    attend = partial(scaled_dot_product_attention, attn_mask=mask, enable_gqa=grouped)
    choices = ["enable_gqa"] * grouped + ["mask"] * (mask is not None)
    return Prepared(", ".join(choices), [partial(attend, *copy) for copy in copies])


def _packed(copies: Sequence[Inputs]) -> Prepared:
    calls = [partial(scaled_dot_product_attention, split_heads(q, k.shape[1]), k, v) for q, k, v in copies]
    shape = copies[0].q.shape
    return Prepared("query heads as rows", calls, to_bhnd=lambda out: out.reshape(shape))


def _repeated(copies: Sequence[Inputs], group: int) -> Prepared:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1))

    return Prepared("KV heads repeated", [partial(call, *copy) for copy in copies])


def _gqa_variants(case: Case, copies: Sequence[Inputs]) -> Variants:
    yield lambda: _gqa(case, copies)


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
            yield lambda: with_backend(_gqa(case, copies))
        if case.shape.group > 1:
            yield lambda: with_backend(_packed(copies))

    return variants


def _needs_dense(case: Case) -> str | None:
    return needs_numbers(case) or ("takes no block table" if case.options.page_size is not None else None)


def _needs_plain(case: Case) -> str | None:
    return _needs_dense(case) or needs_plain(case)


def _needs_group(case: Case) -> str | None:
    if case.form is None and case.shape.group == 1:
        return "the same call as sdpa when every query head has a KV head of its own"
    return _needs_plain(case)


_BACKENDS = {
    "flash": ("SDPA flash", SDPBackend.FLASH_ATTENTION),
    "cudnn": ("SDPA cuDNN", SDPBackend.CUDNN_ATTENTION),
    "efficient": ("SDPA efficient", SDPBackend.EFFICIENT_ATTENTION),
    "math": ("SDPA math", SDPBackend.MATH),
}

PEERS = (
    Peer("sdpa", "SDPA", "cuda", _gqa_variants, refuses=_needs_dense),
    Peer("sdpa_packed", "SDPA packed", "cuda", _packed_variants, refuses=_needs_group),
    *(
        Peer(f"sdpa_{name}", label, "cuda", _forced(backend), refuses=_needs_plain)
        for name, (label, backend) in _BACKENDS.items()
    ),
    Peer("sdpa", "SDPA", "cpu", _gqa_variants, refuses=_needs_dense),
    Peer("sdpa_repeat", "SDPA repeated", "cpu", _repeated_variants, refuses=_needs_group),
    Peer("sdpa_packed", "SDPA packed", "cpu", _packed_variants, refuses=_needs_group),
)
