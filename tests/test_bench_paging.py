"""Pages of a case: shuffled where it is paged, in order where only a library wants pages, and whole either way."""

from __future__ import annotations

import pytest
import torch

from flash_decoding.bench.paging import make_pages, make_pool, take_sequence
from flash_decoding.bench.workloads import Case, Options, Shape

CPU = torch.device("cpu")
# A full last page, one key on it, fewer keys than a page.
RAGGED = Case("x", "x", Shape(3, 4, 2, 64, 8), "float32", "cpu", Options(page_size=16, kv_lens=(48, 33, 5)))


def test_every_page_of_a_ragged_case_belongs_to_one_sequence():
    pages = make_pages(RAGGED, 16, CPU)
    assert pages.table.shape == (3, 4)
    assert pages.lens.tolist() == [48, 33, 5]
    assert (pages.counts, pages.last) == ([3, 3, 1], [16, 1, 5])
    assert sorted(pages.flat.tolist()) == list(range(7))
    assert pages.flat.tolist() != list(range(7))  # shuffled
    assert torch.equal(pages.table, make_pages(RAGGED, 16, CPU).table)
    assert pages.table.dtype == pages.lens.dtype == pages.flat.dtype == torch.int32


def test_a_dense_case_has_its_pages_in_order():
    pages = make_pages(Case("x", "x", Shape(2, 4, 2, 33, 8), "float32", "cpu"), 16, CPU)
    assert pages.table.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert pages.last == [1, 1]


def test_a_sequence_is_taken_from_its_pages():
    pages = make_pages(RAGGED, 16, CPU)
    pool = torch.randn(RAGGED.cache_shape)
    for b, keys in enumerate(RAGGED.kv_lens):
        one = take_sequence(RAGGED, pool, pages, b)
        assert one.shape == (1, 2, keys, 8)
        for n in range(keys):
            assert torch.equal(one[0, :, n], pool[pages.table[b, n // 16], :, n % 16])


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_pools_hold_the_same_keys_in_either_layout(layout: str):
    pool = torch.randn(RAGGED.cache_shape)
    made = make_pool(RAGGED, pool, 16, layout)
    assert made.is_contiguous()
    assert torch.equal(made if layout == "HND" else made.transpose(1, 2), pool)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_a_dense_cache_is_cut_into_pages(layout: str):
    case = Case("x", "x", Shape(2, 3, 3, 10, 4), "float32", "cpu")
    x, pages = torch.randn(case.cache_shape), make_pages(case, 4, CPU)
    pool = make_pool(case, x, 4, layout)
    assert pool.shape == ((6, 4, 3, 4) if layout == "NHD" else (6, 3, 4, 4))
    paged = Case("x", "x", case.shape, "float32", "cpu", Options(page_size=4))
    for b in range(2):
        found = take_sequence(paged, pool if layout == "HND" else pool.transpose(1, 2), pages, b)
        assert torch.equal(found, x[b : b + 1])
