"""FlashInfer: its planned decode wrapper on CUDA cores and on tensor cores, and XQA.

The cache is paged there; the pages of a sequence lie in order. Page sizes 16 and 64 and both page layouts are tried.
The plan is made once, as for all the layers of a model, and its time is reported apart.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from flash_decoding.bench.peers.base import Peer, Prepared, needs_half, to_pages
from flash_decoding.bench.timing import Inputs
from flash_decoding.bench.workloads import Case

Variants = Iterator[Callable[[], Prepared]]
PAGE_SIZES, LAYOUTS = (16, 64), ("NHD", "HND")
XQA_PAGE_SIZE = 64
WORKSPACE_BYTES = 128 << 20  # what its documentation recommends
XQA_WORKSPACE_BYTES = 256 << 20
GROUPS = (1, 2, 3, 4, 8)  # what its CUDA-core kernel is compiled for


def _flat_outputs(case: Case, out: Tensor) -> Tensor:
    """[B, Hq, D] as [B, Hq, 1, D]."""
    return out.view(case.shape.batch, case.shape.heads_q, 1, case.shape.head_dim)


def _wrapper(case: Case, copies: Sequence[Inputs], page_size: int, layout: str, tensor_cores: bool) -> Prepared:
    import flashinfer

    s, q = case.shape, copies[0].q
    pages = -(-s.kv_len // page_size)
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)
    # With tensor cores the automatic choice on Hopper is a prefill kernel that never splits the keys.
    backend = {"backend": "fa2"} if tensor_cores else {}
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, layout, use_tensor_cores=tensor_cores, **backend)
    plan = partial(
        wrapper.plan,
        torch.arange(0, (s.batch + 1) * pages, pages, dtype=torch.int32),
        torch.arange(s.batch * pages, dtype=torch.int32, device=q.device),
        torch.full((s.batch,), s.kv_len - (pages - 1) * page_size, dtype=torch.int32),
        s.heads_q, s.heads_kv, s.head_dim, page_size,
        q_data_type=q.dtype, kv_data_type=q.dtype,
    )  # fmt: skip
    plan()
    calls = []
    for copy in copies:
        cache = to_pages(copy.k, page_size, layout), to_pages(copy.v, page_size, layout)
        calls.append(partial(wrapper.run, copy.q.view(s.batch, s.heads_q, s.head_dim), cache))
    return Prepared(f"page {page_size}, {layout}", calls, partial(_flat_outputs, case), plan_us=_median_us(plan))


def _single(case: Case, copies: Sequence[Inputs], layout: str) -> Prepared:
    import flashinfer

    s = case.shape
    calls = []
    for q, k, v in copies:
        k, v = k[0], v[0]
        if layout == "NHD":
            k, v = k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous()
        calls.append(partial(flashinfer.single_decode_with_kv_cache, q.view(s.heads_q, s.head_dim), k, v, layout))
    return Prepared(f"single request, {layout}", calls, partial(_flat_outputs, case))


def _cuda_core_variants(case: Case, copies: Sequence[Inputs]) -> Variants:
    for page_size, layout in product(PAGE_SIZES, LAYOUTS):
        yield partial(_wrapper, case, copies, page_size, layout, False)
    if case.shape.batch == 1:
        for layout in LAYOUTS:
            yield partial(_single, case, copies, layout)


def _tensor_core_variants(case: Case, copies: Sequence[Inputs]) -> Variants:
    for page_size, layout in product(PAGE_SIZES, LAYOUTS):
        yield partial(_wrapper, case, copies, page_size, layout, True)


def _xqa(case: Case, copies: Sequence[Inputs], layout: str) -> Prepared:
    import flashinfer.decode

    s, device = case.shape, copies[0].q.device
    pages = -(-s.kv_len // XQA_PAGE_SIZE)
    workspace = torch.zeros(XQA_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    table = torch.arange(s.batch * pages, dtype=torch.int32, device=device).view(s.batch, pages)
    lens = torch.full((s.batch,), s.kv_len, dtype=torch.int32, device=device).view(torch.uint32)
    calls = []
    for copy in copies:
        cache = to_pages(copy.k, XQA_PAGE_SIZE, layout), to_pages(copy.v, XQA_PAGE_SIZE, layout)
        calls.append(
            partial(
                flashinfer.decode.xqa_batch_decode_with_kv_cache,
                copy.q.view(s.batch, s.heads_q, s.head_dim), cache, workspace, table, lens, s.kv_len,
                bmm1_scale=s.head_dim**-0.5, bmm2_scale=1.0, kv_layout=layout,
            )
        )  # fmt: skip
    return Prepared(f"page {XQA_PAGE_SIZE}, {layout}", calls, partial(_flat_outputs, case))


def _xqa_variants(case: Case, copies: Sequence[Inputs]) -> Variants:
    for layout in LAYOUTS:
        yield partial(_xqa, case, copies, layout)


def _median_us(function: Callable[[], object], repeats: int = 11) -> float:
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        function()
        times.append((time.perf_counter() - begin) * 1e6)
    return sorted(times)[repeats // 2]


def _cuda_core_refuses(case: Case) -> str | None:
    if case.shape.group not in GROUPS:
        return f"its CUDA-core kernel has no {case.shape.group} query heads per KV head"
    return needs_half(case)


def _head_key(case: Case) -> tuple[object, ...]:
    return case.dtype, case.shape.head_dim


def _head_and_single_key(case: Case) -> tuple[object, ...]:
    return case.dtype, case.shape.head_dim, case.shape.batch == 1


def _xqa_key(case: Case) -> tuple[object, ...]:
    return case.dtype, case.shape.head_dim, case.shape.group


_INSTALLED: dict[str, Any] = {"module": "flashinfer", "package": "flashinfer-python"}
PEERS = (
    Peer(
        "flashinfer", "FlashInfer", "cuda", _cuda_core_variants,
        refuses=_cuda_core_refuses, build_key=_head_and_single_key, **_INSTALLED,
    ),
    Peer(
        "flashinfer_tc", "FlashInfer, tensor cores", "cuda", _tensor_core_variants,
        refuses=needs_half, build_key=_head_key, **_INSTALLED,
    ),
    # Last: at long contexts it was seen to fail in a way that ends the process's use of the GPU.
    Peer("xqa", "XQA", "cuda", _xqa_variants, refuses=needs_half, build_key=_xqa_key, **_INSTALLED),
)  # fmt: skip
