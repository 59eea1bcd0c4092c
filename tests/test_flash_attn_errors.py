"""What flash_attn_with_kvcache() refuses, it refuses by flash-attn's names, and before anything is written."""

import re

import pytest
import torch

from flash_decoding import flash_attn_with_kvcache
from flash_decoding.integrations.flash_attn import flash_attn_func, flash_attn_varlen_func

ROWS, LENS = torch.tensor([0, 1]), torch.tensor([3, 5])
TABLE = torch.tensor([[0], [1]], dtype=torch.int32)
NEW, HALF, COS = torch.zeros(2, 1, 2, 16), torch.zeros(2, 1, 2, 16).half(), torch.zeros(20, 8)
APPEND = {"k": NEW, "v": NEW, "cache_seqlens": LENS}


def make(**changes):
    """A good call with one thing wrong."""
    good = {"q": torch.zeros(2, 1, 4, 16), "k_cache": torch.zeros(2, 20, 2, 16), "v_cache": torch.zeros(2, 20, 2, 16)}
    return good | changes


# The kinds of arguments: what came as a list or a number.
KINDS = {
    "block-table": (make(block_table=[[0]]), "block_table must be a torch.Tensor, got list"),
    "page-table": (make(page_table=[[0]]), "page_table must be a torch.Tensor, got list"),
    "rows": (make(cache_batch_idx=[0, 1]), "cache_batch_idx must be a torch.Tensor, got list"),
    "lens": (make(cache_seqlens=[3, 5]), "cache_seqlens must be an int, a torch.Tensor or None, got list; torch."),
    "float": (make(cache_seqlens=3.0), "cache_seqlens must be an int, a torch.Tensor or None, got float"),
    "leftpad": (make(cache_leftpad=[0, 1]), "cache_leftpad must be a torch.Tensor, got list"),
    "slopes": (make(alibi_slopes=[0.5] * 4), "alibi_slopes must be a torch.Tensor, got list"),
    "sink": (make(s_aux=[0.5] * 4), "s_aux must be a torch.Tensor, got list"),
    "cos": (make(rotary_cos=[1.0]), "rotary_cos must be a torch.Tensor, got list"),
    "k": (make(**APPEND | {"k": [0.0]}), "k must be a torch.Tensor, got list"),
    "window-int": (make(window_size=5), "window_size must be (left, right), got 5"),
    "window-none": (make(window_size=None), "window_size must be (left, right), got None"),
    "window-float": (make(window_size=(1.5, 0)), "window_size must hold two ints, got (1.5, 0)"),
    "scale": (make(softmax_scale="1"), "softmax_scale must be a number or None, got str"),
    "splits": (make(num_splits=1.5), "num_splits must be an int or None, got float"),
    "causal": (make(causal=1), "causal must be a bool, got int"),
    "lens-dtype": (make(cache_seqlens=LENS.float()), "cache_seqlens must be int32 or int64, got torch.float32"),
    "cache-dtype": (make(k_cache=torch.zeros(2, 20, 2, 16).half()), "k_cache must have the dtype of q, torch.float32"),
    "new-dtype": (make(**APPEND | {"v": HALF}), "v must have the dtype of k, torch.float32, got torch.float16"),
    "table-dtype": (make(page_table=TABLE.long()), "page_table must be int32, got torch.int64"),
}  # fmt: skip
VALUES = {
    "int": (make(cache_seqlens=21), "cache_seqlens must lie from 0 to 20, the cache's keys, got 21"),
    "negative-int": (make(cache_seqlens=-1), "cache_seqlens must lie from 0 to 20, the cache's keys, got -1"),
    "lens": (make(cache_seqlens=LENS + 17), "cache_seqlens must lie from 0 to 20, the cache's keys, got values from 2"),
    "lens-shape": (make(cache_seqlens=LENS[:1]), "cache_seqlens must have shape [2], got [1]"),
    "leftpad": (make(cache_leftpad=LENS - 4), "cache_leftpad must lie from 0 to 20"),
    "sink-shape": (make(s_aux=torch.zeros(3)), "s_aux must have shape [4], got [3]"),
    "table-shape": (make(block_table=TABLE[:, 0]), "block_table must have shape [B, max_pages], got [2]"),
    "page-table-shape": (make(page_table=TABLE[:1]), "page_table must have shape [2, max_pages], got [1, 1]"),
    "no-shape": (make(page_table=TABLE[0, 0]), "page_table must have shape [B, max_pages], got []"),
    "rows-shape": (make(cache_batch_idx=ROWS[:1]), "cache_batch_idx must have shape [2], got [1]"),
    "block-table": (make(block_table=TABLE + 1), "block_table must hold pages from 0 to 1 where cache_seqlens reaches"),
    "page-table": (make(page_table=TABLE + 1), "page_table must hold pages from 0 to 1 where cache_seqlens reaches"),
    "rows": (make(cache_batch_idx=ROWS + 1), "cache_batch_idx must hold rows from 0 to 1 where cache_seqlens reaches"),
    "splits": (make(num_splits=-1), "num_splits must be from 1 to 16384, got -1; 0 means automatic"),
    "k-batch": (make(k_cache=torch.zeros(3, 20, 2, 16)), "k_cache must have the batch of q, 2, got 3"),
    "v-length": (make(v_cache=torch.zeros(2, 21, 2, 16)), "v_cache must have the length of k_cache, 20, got 21"),
    "k-width": (make(k_cache=torch.zeros(2, 20, 2, 24)), "k_cache must have the head_dim of q, 16, got 24"),
    "order": (make(k_cache=torch.zeros(2, 4, 20, 16), v_cache=torch.zeros(2, 4, 20, 16), q=torch.zeros(2, 8, 1, 16)),
              "heads_q must be a positive multiple of heads_kv, got 1 and 20; the shapes [2, 8, 1, 16] and "
              "[2, 4, 20, 16] of q and k_cache fit [B, H, L, D], not flash-attn's [B, L, H, D]"),
    "window": (make(window_size=(4,)), "window_size must be (left, right), got (4,)"),
    "new-rank": (make(**APPEND | {"k": NEW[0]}), "k must have shape [B, L, H, D], got [1, 2, 16]"),
    "new-number": (make(**APPEND | {"k": NEW[0, 0, 0, 0]}), "k must have shape [B, L, H, D], got []"),
    "new-v-shape": (make(**APPEND | {"v": NEW[:1]}), "v must have shape [2, 1, 2, 16], got [1, 1, 2, 16]"),
    "full": (make(**APPEND | {"cache_seqlens": LENS + 15}), "cache_seqlens must leave room for the new keys in a"),
    "gradient": (make(**APPEND | {"k": NEW.clone().requires_grad_()}), "k must not require a gradient"),
    "one-table": (make(**APPEND, rotary_cos=COS), "rotary_sin must be given with rotary_cos, got None"),
    "same-rows": (make(**APPEND | {"cache_seqlens": 3}, cache_batch_idx=ROWS * 0),
                  "cache_batch_idx must have a place of its own for every new token, got slot 3 of row 0 for tokens of "
                  "sequences [0, 1]"),
    "same-pages": (make(**APPEND | {"cache_seqlens": 3}, page_table=TABLE * 0),
                   "page_table must have a place of its own for every new token, got slot 3 of page 0"),
}  # fmt: skip


def refuse(call, kind, message):
    before = [call["k_cache"].clone(), call["v_cache"].clone()]
    with pytest.raises(kind, match="^" + re.escape(message)):
        flash_attn_with_kvcache(**call)
    assert torch.equal(call["k_cache"], before[0])
    assert torch.equal(call["v_cache"], before[1])


@pytest.mark.parametrize("name", KINDS)
def test_wrong_types_are_refused_by_flash_attns_names(name):
    refuse(KINDS[name][0], TypeError, KINDS[name][1])


@pytest.mark.parametrize("name", VALUES)
def test_wrong_values_are_refused_by_flash_attns_names(name):
    refuse(VALUES[name][0], ValueError, VALUES[name][1])


def test_the_good_calls_behind_the_bad_ones_are_accepted():
    for options in ({}, APPEND, APPEND | {"cache_batch_idx": ROWS}, APPEND | {"page_table": TABLE}, {"num_splits": 2}):
        assert flash_attn_with_kvcache(**make(**options)).shape == (2, 1, 4, 16)
    for options in ({"window_size": [4, 0]}, {"window_size": (None, None)}, {"cache_batch_idx": ROWS * 0}):
        assert flash_attn_with_kvcache(**make(**options)).shape == (2, 1, 4, 16)


def test_rows_of_the_cache_may_repeat_where_new_keys_do_not_meet():
    call = make(**APPEND | {"k": NEW + 1}, cache_batch_idx=ROWS * 0)
    flash_attn_with_kvcache(**call)
    assert call["k_cache"][:, :, 0, 0].nonzero().tolist() == [[0, 3], [0, 5]]


def test_one_memory_for_keys_and_values_is_refused():
    cache = torch.zeros(2, 20, 2, 16)
    refuse(make(k_cache=cache, v_cache=cache, **APPEND), ValueError, "v_cache must not be k_cache: keys would be")
    assert flash_attn_with_kvcache(torch.zeros(2, 1, 4, 16), cache, cache, cache_seqlens=LENS).shape == (2, 1, 4, 16)


@pytest.mark.parametrize("q_len", [1, 65], ids=["one-block", "cut"])
def test_queries_of_any_length_have_the_same_names(q_len):
    q = torch.zeros(2, q_len, 4, 16)
    refuse(make(q=q, s_aux=torch.zeros(3)), ValueError, "s_aux must have shape [4], got [3]")
    refuse(make(q=q, cache_seqlens=LENS + 17), ValueError, "cache_seqlens must lie from 0 to 20")


def test_the_other_functions_have_names_of_their_own():
    q, k, v = torch.zeros(2, 3, 4, 16), torch.zeros(2, 9, 2, 16), torch.zeros(2, 8, 2, 16)
    with pytest.raises(ValueError, match=r"^v must have the length of k, 9, got 8$"):
        flash_attn_func(q, k, v)
    with pytest.raises(ValueError, match=r"^s_aux must have shape \[4\], got \[3\]$"):
        flash_attn_func(q, k, k, s_aux=torch.zeros(3))
    starts, packed = torch.tensor([0, 2, 5]), torch.zeros(5, 4, 16)
    with pytest.raises(TypeError, match=r"^k must have the dtype of q, torch\.float32, got torch\.float16$"):
        flash_attn_varlen_func(packed, packed.half(), packed, starts, starts, 3, 3)
    with pytest.raises(TypeError, match=r"^window_size must be \(left, right\), got 5$"):
        flash_attn_varlen_func(packed, packed, packed, starts, starts, 3, 3, window_size=5)
    pages, table = torch.zeros(2, 2, 2, 16), torch.tensor([[0], [1]], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"^cu_seqlens_k must lie from 0 to 2, the cache's keys, got values"):
        flash_attn_varlen_func(packed, pages, pages, starts, starts, 3, 3, block_table=table)
    with pytest.raises(ValueError, match=r"^v must have the pages of k, 2, got 1$"):
        flash_attn_varlen_func(packed, pages, pages[:1], starts, torch.tensor([0, 2, 3]), 3, 3, block_table=table)
