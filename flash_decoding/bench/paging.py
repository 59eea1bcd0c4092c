"""Paged caches: which pages a sequence has, and a cache in pages as each library stores it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flash_decoding.bench.workloads import Case


class Pages(NamedTuple):
    """The pages of every sequence; one table serves all rotated copies, as it serves all layers of a model."""

    table: Tensor  # [B, max_pages] int32
    lens: Tensor  # [B] int32, keys per sequence
    counts: list[int]  # pages per sequence
    last: list[int]  # keys on each sequence's last page

    @property
    def flat(self) -> Tensor:
        """The pages of all sequences in turn, [pages] int32."""
        return torch.cat([row[:count] for row, count in zip(self.table, self.counts, strict=True)])


def make_pages(case: Case, page_size: int, device: torch.device) -> Pages:
    """The pages of a case: shuffled over the pool where the case is paged, in order where a library wants pages."""
    counts = [-(-keys // page_size) for keys in case.kv_lens]
    order = torch.arange(sum(counts), dtype=torch.int32)
    if case.options.page_size is not None:
        order = order[torch.randperm(len(order), generator=torch.Generator().manual_seed(0))]
    table = torch.zeros(len(counts), -(-case.shape.kv_len // page_size), dtype=torch.int32)
    for row, pages in zip(table, order.split(counts), strict=True):
        row[: len(pages)] = pages
    lens = torch.tensor(case.kv_lens, dtype=torch.int32)
    last = [keys - (count - 1) * page_size for keys, count in zip(case.kv_lens, counts, strict=True)]
    return Pages(table.to(device), lens.to(device), counts, last)


def make_pool(case: Case, x: Tensor, page_size: int, layout: str) -> Tensor:
    """K or V of a case as the pool [pages, Hkv, page_size, D] for HND, [pages, page_size, Hkv, D] for NHD."""
    if x.itemsize == 1:  # bytes can be padded everywhere, 8-bit floats not
        return _make_pool(case, x.view(torch.uint8), page_size, layout).view(x.dtype)
    return _make_pool(case, x, page_size, layout)


def _make_pool(case: Case, x: Tensor, page_size: int, layout: str) -> Tensor:
    if case.options.page_size is None:
        return to_pages(x, page_size, layout)
    return x if layout == "HND" else x.transpose(1, 2).contiguous()


def to_pages(x: Tensor, page_size: int, layout: str) -> Tensor:
    """[B, H, N, D] as a pool that holds the pages of all sequences in turn."""
    batch, heads, kv_len, head_dim = x.shape
    pages = -(-kv_len // page_size)
    if pages * page_size != kv_len:
        x = torch.nn.functional.pad(x, (0, 0, 0, pages * page_size - kv_len))
    paged = x.view(batch, heads, pages, page_size, head_dim)
    order = (0, 2, 1, 3, 4) if layout == "HND" else (0, 2, 3, 1, 4)
    paged = paged.permute(order).contiguous()
    return paged.view(batch * pages, *paged.shape[2:])


def take_sequence(case: Case, x: Tensor, pages: Pages | None, b: int) -> Tensor:
    """The keys or values of sequence b, [1, Hkv, keys, D], or their scales per key, [1, Hkv, keys, ...]."""
    if pages is None:
        return x[b : b + 1]
    if x.itemsize == 1:  # likewise
        return _gather(case, x.view(torch.uint8), pages, b).view(x.dtype)
    return _gather(case, x, pages, b)


def _gather(case: Case, x: Tensor, pages: Pages, b: int) -> Tensor:
    own = x[pages.table[b, : pages.counts[b]].long()]  # [count, Hkv, page_size, ...]
    return own.transpose(0, 1).flatten(1, 2)[None, :, : case.kv_lens[b]]
