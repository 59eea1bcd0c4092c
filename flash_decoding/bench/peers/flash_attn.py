"""flash_attn_with_kvcache of flash-attn 2 and of FlashAttention-3.

Both take [B, N, H, D] and any outer strides, so a cache stored head by head is a view; which of the two storages is
faster depends on the shape, and both are tried; pools of pages likewise. A full dense cache needs no lengths;
FlashAttention-3 also takes them with a schedule made beforehand, as its callers in serving do. Beside a cache in fp8
it wants the queries in fp8 as well, and rounds the weights to fp8; rounding the queries is not timed.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from flash_decoding.bench.paging import make_pages
from flash_decoding.bench.peers.base import (
    E4M3_TOLERANCE,
    Peer,
    Prepared,
    needs_fp8,
    needs_half,
    needs_numbers,
    scale_numbers,
)
from flash_decoding.bench.timing import Inputs
from flash_decoding.bench.workloads import Case

Variants = Iterator[Callable[[], Prepared]]
STORAGES = ("token by token", "head by head")
FA2_PAGE_STEP = 256
TUNED_SPLITS = (1, 2, 4, 8, 16, 32, 64)


def _fa3() -> ModuleType:
    """FlashAttention-3's interface: the module of its own build, or that of the fa3-fwd wheel."""
    try:
        return importlib.import_module("flash_attn_interface")
    except ModuleNotFoundError:
        return importlib.import_module("fa3_fwd_interface")


def _store(copy: Inputs, storage: str) -> tuple[Tensor, Tensor, Tensor]:
    """A copy as [B, Lq, Hq, D] and [B, N, Hkv, D], or [pages, page_size, Hkv, D]; q has the dtype of K and V."""
    q, k, v = (x.transpose(1, 2) for x in copy)
    return (q.to(k.dtype), k.contiguous(), v.contiguous()) if storage == "token by token" else (q.to(k.dtype), k, v)


def _descales(case: Case, copy: Inputs) -> dict[str, Tensor]:
    """The scales of codes, [B, Hkv] each."""
    if case.form is None:
        return {}
    sizes, device = (case.shape.batch, case.shape.heads_kv), copy.q.device
    names = ("k_descale", "v_descale")
    return {name: torch.full(sizes, x, device=device) for name, x in zip(names, scale_numbers(copy), strict=True)}


def _prepare(
    function: Callable, case: Case, copies: Sequence[Inputs], storage: str, options: dict, note: str
) -> Prepared:  # fmt: skip
    calls = [partial(function, *_store(copy, storage), **options, **_descales(case, copy)) for copy in copies]
    prepared = Prepared(f"{storage}{note}", calls, to_bhnd=lambda out: out.transpose(1, 2))
    if case.form is not None:
        prepared.variant += ", queries in fp8"
        prepared.tolerance = E4M3_TOLERANCE
    return prepared


def _masks(case: Case) -> dict[str, Any]:
    """The arguments for several query tokens and for a window."""
    masks: dict[str, Any] = {"causal": True} if case.options.q_len > 1 else {}
    return masks | ({"window_size": (case.options.window, 0)} if case.options.window is not None else {})


def _lengths(case: Case, device: torch.device, table: str) -> dict[str, Tensor]:
    """The arguments for a paged cache, whose table goes by a name of its own in each library."""
    if case.options.page_size is None:
        return {}
    pages = make_pages(case, case.options.page_size, device)
    return {"cache_seqlens": pages.lens, table: pages.table}


def _fa2_variants(case: Case, copies: Sequence[Inputs]) -> Variants:
    from flash_attn import flash_attn_with_kvcache

    options = _masks(case) | _lengths(case, copies[0].q.device, "block_table")
    for storage in STORAGES:
        yield partial(_prepare, flash_attn_with_kvcache, case, copies, storage, options, "")


def _fa3_variants(case: Case, copies: Sequence[Inputs]) -> Variants:
    fa3, s, masks, device = _fa3(), case.shape, _masks(case), copies[0].q.device
    lengths = _lengths(case, device, "page_table")
    lens = lengths.get("cache_seqlens", torch.full((s.batch,), s.kv_len, dtype=torch.int32, device=device))

    def scheduled(storage: str) -> Prepared:
        schedule = fa3.get_scheduler_metadata(
            s.batch, case.options.q_len, s.kv_len, s.heads_q, s.heads_kv, s.head_dim, lens,
            qkv_dtype=copies[0].k.dtype, page_size=case.options.page_size, **masks,
        )  # fmt: skip
        options = masks | lengths | {"cache_seqlens": lens, "scheduler_metadata": schedule}
        return _prepare(fa3.flash_attn_with_kvcache, case, copies, storage, options, ", scheduled")

    for storage in STORAGES:
        yield partial(_prepare, fa3.flash_attn_with_kvcache, case, copies, storage, masks | lengths, "")
        yield partial(scheduled, storage)


def _fa3_tuned_variants(case: Case, copies: Sequence[Inputs]) -> Variants:
    function = _fa3().flash_attn_with_kvcache
    options = _masks(case) | _lengths(case, copies[0].q.device, "page_table")
    for storage in STORAGES:
        for splits in TUNED_SPLITS:
            split = options | {"num_splits": splits}
            yield partial(_prepare, function, case, copies, storage, split, f", {splits} splits")


def _fa2_refuses(case: Case) -> str | None:
    page_size = case.options.page_size
    if case.form is None and page_size is not None and page_size % FA2_PAGE_STEP:
        return f"its pages hold a multiple of {FA2_PAGE_STEP} keys"
    return needs_numbers(case) or needs_half(case)


def _needs_hopper(case: Case) -> str | None:
    major = torch.cuda.get_device_capability()[0]
    if major != 9:
        return f"needs compute capability 9.x, this GPU has {major}.x"
    return needs_fp8(case) or needs_half(case)


def _fa3_module() -> str:
    return "flash_attn_interface" if importlib.util.find_spec("flash_attn_interface") else "fa3_fwd_interface"


def _fa3_package() -> str:
    return "fa3-fwd" if _fa3_module() == "fa3_fwd_interface" else "flash-attn-3"


PEERS = (
    Peer("flash_attn2", "flash-attn 2", "cuda", _fa2_variants, "flash_attn", "flash-attn", _fa2_refuses),
    Peer("fa3", "FlashAttention-3", "cuda", _fa3_variants, _fa3_module(), _fa3_package(), _needs_hopper),
    Peer(
        "fa3_tuned", "FlashAttention-3, best split count", "cuda", _fa3_tuned_variants,
        _fa3_module(), _fa3_package(), _needs_hopper,
    ),
)  # fmt: skip
