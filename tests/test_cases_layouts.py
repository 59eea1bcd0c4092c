"""Public cases: large offsets, strides, groups of query heads, head sizes."""

import numpy as np
import pytest
import torch
from cases import INTERPRETED, assert_same_bits, decode, dense_of, int32, reference_of_large
from helpers import DTYPES, LOOSE, assert_matches, decode_and_check, describe, make_inputs, max_error
from paging import to_pages

from flash_decoding import flash_decode, reference

SIXTEEN_BITS = [dtype for dtype in DTYPES if dtype != torch.float32]
PAGED = pytest.mark.parametrize("paged", [False, True], ids=["dense", "paged"])

# Integer overflow. A dense cache of more than 2**31 elements is in test_gpu.py.


@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
def test_c008_pages_past_two_to_the_31_elements(target, layout):
    """Page 65536 of 32768 elements each starts at exactly 2**31. On a CPU the 4.3 GB are zeros that nobody touches."""
    shape = (65537, 16, 16, 128)
    if target.device == "cuda":
        pool = torch.zeros(shape, dtype=torch.bfloat16, device="cuda")
    else:
        pool = torch.from_numpy(np.zeros(shape, np.int16)).view(torch.bfloat16)
    q = torch.randn(1, 1, 16, 128, device=target.device).bfloat16()
    pool[[0, 65535, 65536]] = torch.randn(16, 16, 128, device=target.device).bfloat16()
    if layout == "bhnd":
        q, pool = q.transpose(1, 2), pool.transpose(1, 2)
    for plan in ({"num_splits": 1}, {"num_splits": 2}):
        first, high, top = (
            decode(target, q, pool, pool, layout=layout, block_table=int32([[page]], target),
                   kv_lens=int32([16], target), **plan)
            for page in (0, 65535, 65536)
        )  # fmt: skip
        assert_same_bits(high, first)
        assert_same_bits(top, first)
        page = pool[:1]
        assert_matches(*first, q, page, page, layout=layout)


@pytest.mark.interpreter
def test_c008_keys_of_a_page_past_two_to_the_31_elements(target):
    """Keys 2**26 elements apart: the second tile of a page of 64 begins at 2**31."""
    page, step, width = 64, 2**26, 16
    if target.device == "cuda":
        memory = torch.zeros(page * step, dtype=torch.float16, device="cuda")
    else:
        memory = torch.from_numpy(np.zeros(page * step, np.float16))
    pool = memory.as_strided((1, 1, page, width), (page * step, page * step, step, 1))
    pool.copy_(torch.randn(pool.shape))
    q = torch.randn(1, 1, 1, width, device=target.device).half()
    for num_splits in (1, 2):
        out, lse = decode(
            target, q, pool, pool, block_table=int32([[0]], target), kv_lens=int32([page], target),
            num_splits=num_splits,
        )  # fmt: skip
        near = pool.contiguous()
        assert_matches(out, lse, q, near, near)


@pytest.mark.parametrize(("batch", "heads"), [(70000, 1), (8192, 16)])
def test_c009_more_sequences_than_a_grid_axis_holds(target, batch, heads):
    q, k, v = make_inputs(batch, heads, heads, 1, 64, torch.float16, target.device)
    table = torch.randperm(batch, device=target.device).int()
    in_pages = torch.empty_like(table)
    in_pages[table.long()] = torch.arange(batch, dtype=torch.int32, device=target.device)
    kv_lens = torch.ones_like(table)
    for num_splits in (1, 2):
        out, lse = decode(target, q, k, v, num_splits=num_splits)
        assert torch.equal(out, v)
        assert max_error(lse[..., None], (q.double() * k.double()).sum(-1, keepdim=True) / 8) <= 1e-3
        pools = k[in_pages.long()], v[in_pages.long()]
        paged = decode(target, q, *pools, block_table=table[:, None], kv_lens=kv_lens, num_splits=num_splits)
        assert torch.equal(paged[0], v)
        assert max_error(paged[1], lse) <= 1e-5


# Strides and layout.


@pytest.mark.interpreter
@pytest.mark.parametrize("plan", [{"num_splits": 1}, {"num_splits": 3}], ids=describe)
@PAGED
def test_c014_halves_of_one_interleaved_pool(target, paged, plan):
    """K and V in one pool, [..., k or v, ...]; and one layer of three, in between the others."""
    dtype, batch, kv_len = DTYPES[-1], *((1, 40) if INTERPRETED else (2, 100))
    q = torch.randn(batch, 1, 8, 128, device=target.device).to(dtype)
    options = {"layout": "bnhd", **plan}
    if paged:
        pages = -(-kv_len // 16)
        k, v = torch.randn(batch * pages + 3, 2, 16, 4, 128, device=target.device).to(dtype).unbind(1)
        layers = torch.randn(batch * pages + 3, 3, 16, 4, 128, device=target.device).to(dtype)[:, 1]
        options["block_table"] = torch.randperm(len(k), device=target.device)[: batch * pages].int().view(batch, pages)
        options["kv_lens"] = int32([kv_len, 37][:batch], target)
    else:
        k, v = torch.randn(batch, kv_len, 2, 4, 128, device=target.device).to(dtype).unbind(2)
        layers = torch.randn(batch, kv_len, 3, 4, 128, device=target.device).to(dtype)[:, :, 1]
    for keys, values in ((k, v), (layers, v), (k, layers)):
        got = decode(target, q, keys, values, **options)
        assert_same_bits(got, decode(target, q, keys.contiguous(), values.contiguous(), **options))


@pytest.mark.interpreter
@pytest.mark.parametrize("plan", [{"num_splits": 1}, {"num_splits": 3}], ids=describe)
@pytest.mark.parametrize("what", ["batch of k and v", "heads of k", "q", "block_table"])
def test_c015_broadcast_tensors_with_stride_0(target, what, plan):
    batch, kv_len = (2, 70) if INTERPRETED else (5, 333)
    q, k, v = make_inputs(batch, 8, 4, kv_len, 64, torch.float16, target.device)
    options = dict(plan)
    if what == "batch of k and v":
        k, v = k[:1].expand_as(k), v[:1].expand_as(v)
    elif what == "heads of k":
        k = k[:, :1].expand_as(k)
    elif what == "q":
        q = q[:1, :1].expand_as(q)
    else:
        k, v, table = to_pages(k[:1], v[:1], 16, torch.tensor([kv_len]))
        options["kv_lens"] = int32([kv_len, 0, 17, 64, 1][:batch], target)
        options["block_table"] = table[:, :-1].expand(batch, -1)
    got = decode(target, q, k, v, **options)
    if what == "block_table":
        options["block_table"] = options["block_table"].contiguous()
    assert_same_bits(got, decode(target, *(x.contiguous() for x in (q, k, v)), **options))


@pytest.mark.interpreter
@PAGED
def test_c016_strides_are_looked_at_on_every_call(target, paged):
    kv_len = 40 if INTERPRETED else 70
    q, k, v = make_inputs(3, 6, 2, kv_len, 64, torch.float16, target.device)
    fused = torch.randn(3, 10, 1, 64, device=target.device, dtype=torch.float16)
    transposed = torch.randn(6, 3, 1, 64, device=target.device, dtype=torch.float16).transpose(0, 1)
    options, dense = {}, (k, v)
    if paged:
        options["kv_lens"] = int32([kv_len, 33, 2], target)
        k, v, options["block_table"] = to_pages(k, v, 16, options["kv_lens"])
    k_nh = k.transpose(1, 2).contiguous().transpose(1, 2)
    for queries, keys in ((q, k), (fused[:, :6], k), (transposed, k), (q, k_nh), (q, k)):
        got = decode(target, queries, keys, v, **options)
        assert_same_bits(got, decode(target, queries.contiguous(), keys.contiguous(), v, **options))
        assert_matches(*got, queries, *dense, kv_lens=options.get("kv_lens"), atol=4 * LOOSE[q.dtype])


# Groups of query heads.


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", SIXTEEN_BITS, ids=describe)
@pytest.mark.parametrize("heads", [(28, 4), (40, 8), (24, 4), (64, 4), (64, 1), (14, 2)], ids=str)
def test_c017_query_head_i_reads_kv_head_i_over_g(target, heads, dtype):
    heads_q, heads_kv = heads
    q, k, v = make_inputs(1, heads_q, heads_kv, 90 if INTERPRETED else 515, 128, dtype, target.device)
    decode_and_check(target, q, k, v)
    v = (torch.arange(heads_kv, device=target.device) + 1.0).to(dtype)[None, :, None, None].expand_as(v).contiguous()
    out = flash_decode(q, k, v, backend=target.backend)
    want = (1.0 + torch.arange(heads_q, device=target.device) // (heads_q // heads_kv))[None, :, None, None]
    assert bool(((out - want).abs() <= LOOSE[dtype] * want).all())


@PAGED
def test_c018_a_group_of_seven_is_as_exact_as_its_expansion(target, paged):
    seven, expanded, eight = [], [], []
    for seed in range(10):
        torch.manual_seed(seed)
        q, k, v = make_inputs(1, 32, 4, 256, 128, torch.bfloat16, target.device)
        want, options = reference(q, k, v), {"backend": target.backend}
        if paged:
            options["kv_lens"] = int32([256], target)
            k, v, options["block_table"] = to_pages(k, v, 16, options["kv_lens"])
        eight.append(max_error(flash_decode(q, k, v, **options), want))
        q, want = (x.unflatten(1, (4, 8))[:, :, :7].flatten(1, 2) for x in (q, want))
        seven.append(max_error(flash_decode(q, k, v, **options), want))
        k, v = (x.repeat_interleave(7, dim=1) for x in (k, v))
        expanded.append(max_error(flash_decode(q, k, v, **options), want))
    assert max(seven) <= 1.25 * max(expanded)
    assert max(seven) <= 1.25 * max(eight)


# Head sizes.


@pytest.mark.interpreter
@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize("dtype", SIXTEEN_BITS, ids=describe)
@pytest.mark.parametrize("head_dim", [80, 96, 192, 256])
@PAGED
def test_c019_head_sizes_that_are_no_power_of_two(target, paged, head_dim, dtype, num_splits):
    q, k, v = make_inputs(1, 16, 4, 33 if INTERPRETED else 1030, head_dim, dtype, target.device)
    dense, options = (k, v), {"num_splits": num_splits}
    if paged:
        options["kv_lens"] = int32([k.shape[2]], target)
        k, v, options["block_table"] = to_pages(k, v, 32, options["kv_lens"])
    got = decode(target, q, k, v, **options)
    assert_matches(*got, q, *dense, atol=LOOSE[dtype] * 4 if INTERPRETED else None)
    assert_same_bits(decode(target, q, k, v, scale=head_dim**-0.5, **options), got)  # of the true width


@pytest.mark.interpreter
@pytest.mark.parametrize("heads_q", [16] if INTERPRETED else [16, 128])
@PAGED
def test_c020_latent_attention_with_values_inside_the_keys(target, paged, heads_q):
    """That the tiles fit into 99 KB of shared memory is tested where kernels are compiled, in test_compile.py."""
    dtype, kv_len = DTYPES[-1], 70 if INTERPRETED else 1000  # bfloat16, but for the interpreter
    pages = -(-kv_len // 64)
    q = torch.randn(1, heads_q, 1, 576, device=target.device).to(dtype)
    kv = torch.randn(pages + 1, 1, 64, 576, device=target.device).to(dtype)
    table = torch.randperm(pages + 1, device=target.device)[:pages].int()[None]
    options, dense = {"scale": 192**-0.5, "kv_lens": int32([kv_len], target)}, dense_of(kv, table)
    want, want_lse = reference_of_large(q, dense, dense[..., :512], **options)
    if paged:
        options["block_table"] = table
    else:
        kv = dense
    ulp = torch.finfo(dtype).eps * want.abs().max().item()
    for plan in ({"num_splits": 1}, {"num_splits": 2}):
        out, lse = decode(target, q, kv, kv[..., :512], **plan, **options)
        assert max_error(out, want) <= ulp
        assert max_error(lse, want_lse) <= 1e-3
        apart, _ = decode(target, q, kv, kv[..., :512].contiguous(), **plan, **options)
        assert max_error(out, apart) <= ulp
