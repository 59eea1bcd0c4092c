"""FlashInfer: its planned decode wrapper on CUDA cores and on tensor cores, and XQA.

The cache is paged there. A dense one is cut into pages that lie in order, of 16 and of 64 keys; both page layouts are
tried. The plan is made once, as for all the layers of a model, and its time is reported apart. Several query tokens per
sequence are a causal call of the planned prefill wrapper. Caches in fp8 come with a scale for K and one for V, numbers
on the host; the wrappers multiply their output by V's in a kernel of its own, XQA rounds queries and weights to fp8.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate, product
from typing import Any

import torch
from torch import Tensor

from flash_decoding.bench.paging import make_pages, make_pool
from flash_decoding.bench.peers.base import E4M3_TOLERANCE, Peer, Prepared, needs_fp8, needs_half, scale_numbers
from flash_decoding.bench.timing import Inputs
from flash_decoding.bench.workloads import Case

Variants = Iterator[Callable[[], Prepared]]
PAGE_SIZES, LAYOUTS = (16, 64), ("NHD", "HND")
XQA_PAGE_SIZE, XQA_PAGE_SIZES = 64, (16, 32, 64, 128)
WORKSPACE_BYTES = 128 << 20  # what its documentation recommends
XQA_WORKSPACE_BYTES = 256 << 20
GROUPS = (1, 2, 3, 4, 8)  # what its CUDA-core kernel is compiled for


def _to_bhnd(case: Case, out: Tensor) -> Tensor:
    """[B * Lq, Hq, D] as [B, Hq, Lq, D]."""
    return out.view(case.shape.batch, case.options.q_len, case.shape.heads_q, case.shape.head_dim).transpose(1, 2)


def _tokens(q: Tensor) -> Tensor:
    """[B, Hq, Lq, D] as [B * Lq, Hq, D]."""
    return q.transpose(1, 2).flatten(0, 1)


def _window_left(case: Case) -> int:
    return -1 if case.options.window is None else case.options.window


def _scales(case: Case, copy: Inputs) -> dict[str, float]:
    """The scales of codes as its calls take them."""
    return {} if case.form is None else dict(zip(("k_scale", "v_scale"), scale_numbers(copy), strict=True))


def _wrapper(case: Case, copies: Sequence[Inputs], page_size: int, layout: str, tensor_cores: bool) -> Prepared:
    import flashinfer

    s, q = case.shape, copies[0].q
    pages = make_pages(case, page_size, q.device)
    starts = [0, *accumulate(pages.counts)]
    sizes = s.heads_q, s.heads_kv, s.head_dim, page_size
    options = {"window_left": _window_left(case), "q_data_type": q.dtype, "kv_data_type": copies[0].k.dtype}
    cache = torch.tensor(starts, dtype=torch.int32), pages.flat, torch.tensor(pages.last, dtype=torch.int32)
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)
    # With tensor cores the automatic choice on Hopper is a prefill kernel that never splits the keys.
    backend = {"backend": "fa2"} if tensor_cores else {}
    if case.options.q_len == 1:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, layout, use_tensor_cores=tensor_cores, **backend
        )
        plan = partial(wrapper.plan, *cache, *sizes, **options)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, layout, **backend)
        queries = torch.arange(0, (s.batch + 1) * case.options.q_len, case.options.q_len, dtype=torch.int32)
        plan = partial(wrapper.plan, queries, *cache, *sizes, causal=True, **options)
    plan()
    calls = []
    for copy in copies:
        pools = make_pool(case, copy.k, page_size, layout), make_pool(case, copy.v, page_size, layout)
        calls.append(partial(wrapper.run, _tokens(copy.q), pools, **_scales(case, copy)))
    return Prepared(f"page {page_size}, {layout}", calls, partial(_to_bhnd, case), plan_us=_median_us(plan))


def _single(case: Case, copies: Sequence[Inputs], layout: str) -> Prepared:
    import flashinfer

    decode = partial(flashinfer.single_decode_with_kv_cache, window_left=_window_left(case))
    calls = []
    for copy in copies:
        k, v = copy.k[0], copy.v[0]
        if layout == "NHD":
            k, v = k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous()
        calls.append(partial(decode, copy.q[0, :, 0], k, v, layout, **_scales(case, copy)))
    return Prepared(f"single request, {layout}", calls, partial(_to_bhnd, case))


def _choices(case: Case) -> product:
    """(page size, layout) to try."""
    page_size = case.options.page_size
    return product(PAGE_SIZES if page_size is None else (page_size,), LAYOUTS)


def _takes_single(case: Case) -> bool:
    return case.shape.batch == 1 and case.options.page_size is None


def _cuda_core_variants(case: Case, copies: Sequence[Inputs]) -> Variants:
    for page_size, layout in _choices(case):
        yield partial(_wrapper, case, copies, page_size, layout, False)
    if _takes_single(case):
        for layout in LAYOUTS:
            yield partial(_single, case, copies, layout)


def _tensor_core_variants(case: Case, copies: Sequence[Inputs]) -> Variants:
    for page_size, layout in _choices(case):
        yield partial(_wrapper, case, copies, page_size, layout, True)


def _xqa(case: Case, copies: Sequence[Inputs], page_size: int, layout: str) -> Prepared:
    import flashinfer.decode

    s, device = case.shape, copies[0].q.device
    pages = make_pages(case, page_size, device)
    workspace = torch.zeros(XQA_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    calls = []
    for copy in copies:
        pools = make_pool(case, copy.k, page_size, layout), make_pool(case, copy.v, page_size, layout)
        k_scale, v_scale = (1.0, 1.0) if case.form is None else scale_numbers(copy)
        calls.append(
            partial(
                flashinfer.decode.xqa_batch_decode_with_kv_cache,
                _tokens(copy.q), pools, workspace, pages.table, pages.lens.view(torch.uint32), s.kv_len,
                bmm1_scale=k_scale * s.head_dim**-0.5, bmm2_scale=v_scale,
                window_left=_window_left(case), kv_layout=layout,
            )
        )  # fmt: skip
    tolerance = None if case.form is None else E4M3_TOLERANCE
    return Prepared(f"page {page_size}, {layout}", calls, partial(_to_bhnd, case), tolerance=tolerance)


def _xqa_page_size(case: Case) -> int:
    return case.options.page_size or XQA_PAGE_SIZE


def _xqa_variants(case: Case, copies: Sequence[Inputs]) -> Variants:
    for layout in LAYOUTS:
        yield partial(_xqa, case, copies, _xqa_page_size(case), layout)


def _median_us(function: Callable[[], object], repeats: int = 11) -> float:
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        function()
        times.append((time.perf_counter() - begin) * 1e6)
    return sorted(times)[repeats // 2]


def _needs_dtypes(case: Case) -> str | None:
    return needs_fp8(case) or needs_half(case)


def _cuda_core_refuses(case: Case) -> str | None:
    if case.shape.group not in GROUPS:
        return f"its CUDA-core kernel has no {case.shape.group} query heads per KV head"
    if case.options.q_len > 1:
        return "its CUDA-core kernel takes one query token per sequence"
    return _needs_dtypes(case)


def _xqa_refuses(case: Case) -> str | None:
    if _xqa_page_size(case) not in XQA_PAGE_SIZES:
        return f"its pages hold {', '.join(map(str, XQA_PAGE_SIZES))} keys, not {case.options.page_size}"
    if case.options.q_len > 1:
        return "called here with one query token per sequence only; more need a packed mask"
    return _needs_dtypes(case)


def _tensor_core_key(case: Case) -> tuple[object, ...]:
    return case.dtype, case.kv_dtype, case.shape.head_dim, case.options.window is None


def _cuda_core_key(case: Case) -> tuple[object, ...]:
    return *_tensor_core_key(case), _takes_single(case)


def _xqa_key(case: Case) -> tuple[object, ...]:
    return *_tensor_core_key(case), case.shape.group, _xqa_page_size(case)


_INSTALLED: dict[str, Any] = {"module": "flashinfer", "package": "flashinfer-python"}
PEERS = (
    Peer(
        "flashinfer", "FlashInfer", "cuda", _cuda_core_variants,
        refuses=_cuda_core_refuses, build_key=_cuda_core_key, **_INSTALLED,
    ),
    Peer(
        "flashinfer_tc", "FlashInfer, tensor cores", "cuda", _tensor_core_variants,
        refuses=_needs_dtypes, build_key=_tensor_core_key, **_INSTALLED,
    ),
    # Last: at long contexts it was seen to fail in a way that ends the process's use of the GPU.
    Peer("xqa", "XQA", "cuda", _xqa_variants, refuses=_xqa_refuses, build_key=_xqa_key, **_INSTALLED),
)  # fmt: skip
