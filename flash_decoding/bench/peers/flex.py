"""torch.nn.attention.flex_attention, compiled for the shape at hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from flash_decoding.bench.peers.base import Peer, Prepared, needs_plain
from flash_decoding.bench.timing import Inputs
from flash_decoding.bench.workloads import Case


def _compiled(case: Case, copies: Sequence[Inputs]) -> Prepared:
    from torch.nn.attention.flex_attention import flex_attention

    # A second shape would make the sizes of the first symbolic and the kernel slower.
    torch.compiler.reset()
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    gqa = case.shape.group > 1
    return Prepared("compiled", [partial(compiled, q, k, v, enable_gqa=gqa) for q, k, v in copies])


def _variants(case: Case, copies: Sequence[Inputs]) -> Iterator[Callable[[], Prepared]]:
    yield lambda: _compiled(case, copies)


PEERS = (
    Peer(
        "flex_attention", "flex_attention", "cuda", _variants,
        module="torch.nn.attention.flex_attention", refuses=needs_plain,
        build_key=lambda case: (case.shape, case.dtype),
    ),
)  # fmt: skip
