"""flash_attn_with_kvcache() against flash-attn 2's documented behaviour, said in plain torch."""

import inspect

import pytest
import torch
from helpers import DTYPES, LOOSE, describe, max_error
from paging import to_pages
from test_append import make_tables, rotate

from flash_decoding import flash_attn_with_kvcache, reference
from flash_decoding.integrations.flash_attn import flash_attn_func, flash_attn_varlen_func

NAN = float("nan")
# flash_attn_interface.py of flash-attn 2.8.
SIGNATURE = {
    "q": inspect.Parameter.empty, "k_cache": inspect.Parameter.empty, "v_cache": inspect.Parameter.empty,
    "k": None, "v": None, "rotary_cos": None, "rotary_sin": None, "cache_seqlens": None, "cache_batch_idx": None,
    "cache_leftpad": None, "block_table": None, "softmax_scale": None, "causal": False, "window_size": (-1, -1),
    "softcap": 0.0, "rotary_interleaved": True, "alibi_slopes": None, "num_splits": 0, "return_softmax_lse": False,
}  # fmt: skip


def attend(q, k_cache, v_cache, lens, *, causal=False, window=(-1, -1), softcap=0.0, slopes=None, leftpad=None,
           scale=None):  # fmt: skip
    """flash-attn's rules for one token at a time: q [B, Sq, H, D], caches [B, N, Hkv, D], lens the whole lengths."""
    batch, q_len, heads, width = q.shape
    out = torch.zeros(batch, q_len, heads, v_cache.shape[3], dtype=torch.float64)
    lse = torch.full((batch, heads, q_len), -torch.inf, dtype=torch.float64)
    q, k_cache, v_cache = (x.double().cpu() for x in (q, k_cache, v_cache))
    for b in range(batch):
        length = int(lens[b])
        for t in range(q_len):
            own = length - q_len + t
            n = torch.arange(0 if leftpad is None else int(leftpad[b]), length)
            if window[0] >= 0:
                n = n[n >= own - window[0]]
            right = 0 if causal else window[1]
            if right >= 0:
                n = n[n <= own + right]
            if len(n) == 0:
                continue
            for h in range(heads):
                h_kv = h // (heads // k_cache.shape[2])
                s = k_cache[b, n, h_kv] @ q[b, t, h] * (width**-0.5 if scale is None else scale)
                s = softcap * torch.tanh(s / softcap) if softcap else s
                if slopes is not None:
                    s = s - float(slopes[h]) * (own - n).abs()
                out[b, t, h] = torch.softmax(s, 0) @ v_cache[b, n, h_kv]
                lse[b, h, t] = torch.logsumexp(s, 0)
    return out, lse


def make(target, dtype, *, batch=3, q_len=1, new=None, rows=None, capacity=40, width=32):
    """q, k_cache, v_cache, k, v in flash-attn's layout."""
    shapes = [(batch, q_len, 4, width)] + [(rows or batch, capacity, 2, width)] * 2 + [(batch, new or 1, 2, width)] * 2
    q, k_cache, v_cache, k, v = (torch.randn(shape, device=target.device).to(dtype) for shape in shapes)
    return q, k_cache, v_cache, *((k, v) if new else (None, None))


def check(got, want, dtype):
    out, lse = got
    want_out, want_lse = want
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    assert max_error(out.cpu(), want_out) <= 4 * LOOSE[dtype]
    assert lse.shape == want_lse.shape
    assert torch.equal(lse.cpu() == -torch.inf, want_lse == -torch.inf)
    assert max_error(lse.cpu(), want_lse) <= 4 * LOOSE[dtype]


def put(cache, lens, new):
    """The cache with new tokens written from lens on."""
    cache = cache.clone()
    for b in range(len(new)):
        cache[b, int(lens[b]) : int(lens[b]) + new.shape[1]] = new[b]
    return cache


def test_names_order_and_defaults_are_those_of_flash_attn():
    parameters = inspect.signature(flash_attn_with_kvcache).parameters
    ours = {name: p.default for name, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD}
    assert list(ours.items()) == list(SIGNATURE.items())


@pytest.mark.parametrize("dtype", DTYPES, ids=describe)
@pytest.mark.parametrize(
    ("q_len", "options"),
    [
        (1, {}),
        (1, {"causal": True}),
        (5, {}),
        (5, {"causal": True}),
        (5, {"window_size": (3, -1)}),
        (5, {"window_size": (-1, 0)}),
        (5, {"window_size": (6, 0)}),
        (5, {"window_size": (6, 4)}),
        (5, {"window_size": (6, 6), "causal": True}),  # as Transformers passes a sliding window
        (1, {"window_size": (7, 7)}),
        (3, {"causal": True, "softcap": 2.0, "softmax_scale": 0.3}),
        (3, {"causal": True, "alibi": True}),
        (3, {"alibi": True}),
        (2, {"num_splits": 3, "causal": True}),
    ],
    ids=str,
)
def test_attention_options(target, q_len, options, dtype):
    options = dict(options)
    q, k_cache, v_cache, _, _ = make(target, dtype, q_len=q_len)
    lens = torch.tensor([40, 0, 13], dtype=torch.int32, device=target.device)
    slopes = torch.rand(4, device=target.device) if options.pop("alibi", False) else None
    got = flash_attn_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=lens, alibi_slopes=slopes, return_softmax_lse=True, **options
    )  # fmt: skip
    want = attend(
        q, k_cache, v_cache, lens, causal=options.get("causal", False), window=options.get("window_size", (-1, -1)),
        softcap=options.get("softcap", 0.0), slopes=slopes, scale=options.get("softmax_scale"),
    )  # fmt: skip
    check(got, want, dtype)
    assert bool((got[0][1] == 0).all()), "a sequence without keys gives zero"


@pytest.mark.parametrize("dtype", DTYPES, ids=describe)
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("interleaved", [True, False], ids=["interleaved", "halves"])
@pytest.mark.parametrize(
    ("q_len", "new", "options"),
    [(1, 1, {}), (4, 4, {"causal": True}), (4, 4, {}), (4, 4, {"window_size": (5, 0)}), (2, 5, {"causal": True})],
    ids=str,
)
def test_append_and_rotate(target, q_len, new, options, interleaved, paged, dtype):
    q, k_cache, v_cache, k, v = make(target, dtype, q_len=q_len, new=new)
    lens = torch.tensor([0, 35, 16], dtype=torch.int32, device=target.device)
    cos, sin = make_tables(48, 24, dtype, target.device)
    n = lens.long()[:, None] + torch.arange(new, device=target.device)
    want_k = put(k_cache, lens, rotate(k, cos[n][:, :, None], sin[n][:, :, None], interleaved).to(dtype))
    want_v = put(v_cache, lens, v)
    local = options.get("causal", False) or options.get("window_size", (-1, -1)) != (-1, -1)
    m = lens.long()[:, None] + (torch.arange(q_len, device=target.device) if local else 0 * n[:, :q_len])
    m = m.expand(3, q_len)
    turned = rotate(q, cos[m][:, :, None], sin[m][:, :, None], interleaved).to(dtype)

    caches, table = [k_cache.clone(), v_cache.clone()], None
    if paged:
        *caches, table = to_pages(k_cache.transpose(1, 2), v_cache.transpose(1, 2), 8, lens + new, layout="bnhd")
    kept_q = q.clone()
    got = flash_attn_with_kvcache(
        q, *caches, k, v, cos, sin, lens, block_table=table, rotary_interleaved=interleaved, return_softmax_lse=True,
        **options,
    )  # fmt: skip
    assert torch.equal(q, kept_q), "q stays as it is"
    check(got, attend(turned, want_k, want_v, lens + new, causal=options.get("causal", False),
                      window=options.get("window_size", (-1, -1))), dtype)  # fmt: skip
    assert lens.tolist() == [0, 35, 16]
    for got_cache, want_cache in zip(caches, (want_k, want_v), strict=True):
        for b, length in enumerate((lens + new).tolist()):
            row = got_cache[b] if table is None else got_cache[table[b, : -(-length // 8)].long()].flatten(0, 1)
            assert max_error(row[:length], want_cache[b, :length]) <= 4 * LOOSE[dtype]


@pytest.mark.parametrize("new", [None, 2])
def test_cache_batch_idx_and_leftpad(target, new):
    q, k_cache, v_cache, k, v = make(target, torch.float16, q_len=2, new=new, rows=6)
    lens = torch.tensor([30, 9, 20], dtype=torch.int32, device=target.device)
    leftpad = torch.tensor([4, 0, 19], dtype=torch.int32, device=target.device)
    rows = torch.tensor([5, 0, 2], device=target.device)
    end = lens + (new or 0)
    k_cache[1], v_cache[3] = NAN, NAN
    before = k_cache.clone()
    want_k, want_v = k_cache[rows], v_cache[rows]
    if new:
        want_k, want_v = put(want_k, lens, k), put(want_v, lens, v)
    got = flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=lens, cache_batch_idx=rows, cache_leftpad=leftpad, causal=True,
        return_softmax_lse=True,
    )  # fmt: skip
    check(got, attend(q, want_k, want_v, end, causal=True, leftpad=leftpad), torch.float16)
    assert torch.equal(k_cache[rows], want_k)
    assert torch.equal(k_cache[[3, 4]], before[[3, 4]])


def test_lengths_may_be_an_int_or_missing(target):
    q, k_cache, v_cache, k, v = make(target, torch.float16, new=1)
    got = flash_attn_with_kvcache(q, k_cache, v_cache)
    assert max_error(got, reference(q, k_cache, v_cache, layout="bnhd")) < LOOSE[torch.float16]
    got = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=11)
    assert max_error(got, reference(q, k_cache[:, :11], v_cache[:, :11], layout="bnhd")) < LOOSE[torch.float16]
    got = flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=39)
    assert torch.equal(k_cache[:, 39], k[:, 0])
    assert max_error(got, reference(q, k_cache, v_cache, layout="bnhd")) < LOOSE[torch.float16]
    rows = torch.tensor([2, 0, 1], device=target.device)
    got = flash_attn_with_kvcache(q, k_cache, v_cache, cache_batch_idx=rows)
    assert max_error(got, reference(q, k_cache[rows], v_cache[rows], layout="bnhd")) < LOOSE[torch.float16]


def test_page_table_is_block_table(target):
    q, k_cache, v_cache, _, _ = make(target, torch.float16)
    lens = torch.tensor([40, 3, 13], dtype=torch.int32, device=target.device)
    *pools, table = to_pages(k_cache.transpose(1, 2), v_cache.transpose(1, 2), 16, lens, layout="bnhd")
    got = flash_attn_with_kvcache(q, *pools, cache_seqlens=lens, page_table=table)
    assert torch.equal(got, flash_attn_with_kvcache(q, *pools, cache_seqlens=lens, block_table=table))
    want = reference(q, k_cache, v_cache, layout="bnhd", kv_lens=lens)
    assert max_error(got, want) < LOOSE[torch.float16]
    with pytest.raises(ValueError, match="page_table must be None when block_table is given"):
        flash_attn_with_kvcache(q, *pools, cache_seqlens=lens, page_table=table, block_table=table)


def test_inputs_with_gaps_in_their_last_axis(target):
    """flash-attn copies q, k and v then, but never the cache."""
    q, k_cache, v_cache, k, v = make(target, torch.float16, new=1)
    gaps = [torch.stack((x, x), -1)[..., 0] for x in (q, k, v)]
    want_caches = [k_cache.clone(), v_cache.clone()]
    want = flash_attn_with_kvcache(q, *want_caches, k, v, cache_seqlens=5)
    assert torch.equal(flash_attn_with_kvcache(gaps[0], k_cache, v_cache, *gaps[1:], cache_seqlens=5), want)
    assert torch.equal(k_cache, want_caches[0])
    assert torch.equal(v_cache, want_caches[1])


def one_by_one(tokens, caches, lens, options, slopes=None):
    """The float64 reference for each sequence alone: tokens [L, Hq, D], caches its (k, v) [N, Hkv, D]; as packed."""
    done = [
        reference(
            q[None], *(x[None] for x in cache), layout="bnhd", kv_lens=lens[b : b + 1], return_lse=True,
            alibi_slopes=None if slopes is None else slopes[b], **options,
        )
        for b, (q, cache) in enumerate(zip(tokens, caches, strict=True))
    ]  # fmt: skip
    return torch.cat([out[0] for out, _ in done]).cpu(), torch.cat([lse[0] for _, lse in done], 1).cpu()


def starts_of(lengths, device, dtype=torch.int32):
    return torch.tensor([0, *lengths], device=device).cumsum(0).to(dtype)


@pytest.mark.parametrize(
    ("lengths", "longest"),
    # One block per sequence; blocks of 64 with a rest, just full, one over; far fewer than max_seqlen_q says.
    [
        ([4, 0, 1], 4),
        ([1, 1, 1], 1),
        ([70, 0, 3], 70),
        ([64, 129, 65], 129),
        ([2, 0, 5], 1000),
        ([0, 0, 0], 4),
        ([0, 0, 0], 0),
    ],
    ids=str,
)
@pytest.mark.parametrize("cache", ["dense", "paged", "rows"])
def test_packed_queries(target, lengths, longest, cache):
    total = sum(lengths)
    q = torch.randn(total, 4, 32, device=target.device)
    k_cache, v_cache = torch.randn(2, 3, 150, 2, 32, device=target.device)
    lens = torch.tensor([150, 7, 66], device=target.device)
    starts = starts_of(lengths, target.device)
    want = one_by_one(q.split(lengths), zip(k_cache, v_cache, strict=True), lens, {})
    caches, where = (k_cache, v_cache), {}
    if cache == "paged":
        *caches, where["block_table"] = to_pages(k_cache.transpose(1, 2), v_cache.transpose(1, 2), 16, lens,
                                                 layout="bnhd")  # fmt: skip
    if cache == "rows":
        where["cache_batch_idx"] = torch.tensor([2, 0, 1], device=target.device)
        caches = [x[[1, 2, 0]] for x in caches]
    got = flash_attn_with_kvcache(
        q, *caches, cache_seqlens=lens, cu_seqlens_q=starts, max_seqlen_q=longest, causal=True,
        return_softmax_lse=True, **where,
    )  # fmt: skip
    check(got, want, torch.float32)


PACKED_OPTIONS = [
    ({"causal": False}, {"causal": False}),
    ({"causal": True, "window_size": (20, 20)}, {"window": 20}),
    ({"window_size": (9, 0)}, {"window": 9}),
    ({"causal": True, "softcap": 1.5, "softmax_scale": 0.4}, {"softcap": 1.5, "scale": 0.4}),
    ({"causal": True, "alibi_slopes": "heads"}, {}),
    ({"causal": True, "alibi_slopes": "sequences"}, {}),
    ({"causal": True, "s_aux": "heads"}, {}),
    ({"causal": True, "cache_leftpad": True}, {}),
]


@pytest.mark.parametrize("lengths", [[3, 0, 2], [70, 1, 130]], ids=str)
@pytest.mark.parametrize("options", PACKED_OPTIONS, ids=lambda options: "-".join(map(str, options[0])))
@pytest.mark.parametrize("dtype", DTYPES, ids=describe)
def test_options_of_packed_queries(target, lengths, options, dtype):
    ours, theirs = (dict(x) for x in options)
    q = torch.randn(sum(lengths) + 2, 4, 32, device=target.device).to(dtype)  # two tokens of nobody
    k_cache, v_cache = torch.randn(2, 3, 150, 2, 32, device=target.device).to(dtype)
    lens = torch.tensor([80, 40, 150], dtype=torch.int32, device=target.device)
    slopes = None
    if "alibi_slopes" in ours:
        slopes = torch.rand(3, 4, device=target.device)
        slopes = slopes if ours["alibi_slopes"] == "sequences" else slopes[:1].expand(3, 4)
        ours["alibi_slopes"] = slopes if ours["alibi_slopes"] == "sequences" else slopes[0]
    if "s_aux" in ours:
        ours["s_aux"] = torch.randn(4, device=target.device).to(dtype)
        theirs["sinks"] = ours["s_aux"].float()
    caches, own_lens = list(zip(k_cache, v_cache, strict=True)), lens
    if "cache_leftpad" in ours:
        pad = ours["cache_leftpad"] = torch.tensor([5, 40, 0], dtype=torch.int32, device=target.device)
        caches = [[x[int(p) :] for x in cache] for p, cache in zip(pad, caches, strict=True)]
        own_lens = lens - pad
    want, want_lse = one_by_one(q[:-2].split(lengths), caches, own_lens, theirs, slopes)
    out, lse = flash_attn_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=lens, cu_seqlens_q=starts_of(lengths, target.device, torch.int64),
        max_seqlen_q=max(lengths), return_softmax_lse=True, **ours,
    )  # fmt: skip
    check((out[:-2], lse[:, :-2]), (want, want_lse), dtype)
    assert bool((out[-2:] == 0).all())
    assert bool((lse[:, -2:] == -torch.inf).all())


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("q_len", [65, 128, 150])
def test_many_query_tokens(target, q_len, paged):
    q = torch.randn(2, q_len, 4, 32, device=target.device)
    k_cache, v_cache = torch.randn(2, 2, 200, 2, 32, device=target.device)
    lens = torch.tensor([200, 90], dtype=torch.int32, device=target.device)  # 90: the first tokens see nothing
    caches, table = (k_cache, v_cache), None
    if paged:
        *caches, table = to_pages(k_cache.transpose(1, 2), v_cache.transpose(1, 2), 16, lens, layout="bnhd")
    for options, want in (
        ({"causal": True}, {}), ({}, {"causal": False}), ({"causal": True, "window_size": (30, 0)}, {"window": 30})
    ):  # fmt: skip
        got = flash_attn_with_kvcache(
            q, *caches, cache_seqlens=lens, block_table=table, return_softmax_lse=True, **options
        )
        want = reference(q, k_cache, v_cache, layout="bnhd", kv_lens=lens, return_lse=True, **want)
        check(got, [x.cpu() for x in want], torch.float32)
    got = flash_attn_with_kvcache(q, k_cache, v_cache, causal=True)
    assert max_error(got, reference(q, k_cache, v_cache, layout="bnhd")) < LOOSE[torch.float32]


@pytest.mark.parametrize(("lengths", "new"), [(None, 70), ([2, 0, 5], 5), ([70, 1, 3], 2)], ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_append_and_rotate_blocks(target, lengths, new, causal):
    """Queries that are cut into blocks turn by their own positions, as in one piece."""
    cos, sin = make_tables(200, 24, torch.float32, target.device)
    k_cache, v_cache = torch.randn(2, 3, 150, 2, 32, device=target.device)
    k, v = torch.randn(2, 3, new, 2, 32, device=target.device)
    lens = torch.tensor([0, 61, 80], dtype=torch.int32, device=target.device)
    own = lengths or [70, 70, 70]
    q = torch.randn(sum(own), 4, 32, device=target.device)
    owner = torch.arange(3).repeat_interleave(torch.tensor(own))
    offset = torch.cat([torch.arange(n) for n in own])
    m = (lens.cpu()[owner] + (offset if causal else 0)).to(target.device)
    turned = rotate(q, cos[m][:, None], sin[m][:, None], True)
    n = lens.long()[:, None] + torch.arange(new, device=target.device)
    want_k = put(k_cache, lens, rotate(k, cos[n][:, :, None], sin[n][:, :, None], True))
    caches = zip(want_k, put(v_cache, lens, v), strict=True)
    want = one_by_one(turned.split(own), caches, lens + new, {"causal": causal})
    if lengths is None:
        got = flash_attn_with_kvcache(q.view(3, 70, 4, 32), k_cache, v_cache, k, v, cos, sin, lens, causal=causal)
        got = got.flatten(0, 1)
    else:
        got = flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, cos, sin, lens, cu_seqlens_q=starts_of(own, target.device),
            max_seqlen_q=max(own), causal=causal,
        )  # fmt: skip
    assert max_error(got.cpu(), want[0]) <= 4 * LOOSE[torch.float32]
    assert max_error(k_cache, want_k) <= 4 * LOOSE[torch.float32]


@pytest.mark.parametrize("q_len", [1, 3])
@pytest.mark.parametrize("paged", [False, True])
def test_alibi_slopes_of_each_sequence(target, q_len, paged):
    q, k_cache, v_cache, _, _ = make(target, torch.float32, q_len=q_len)
    lens = torch.tensor([40, 0, 13], dtype=torch.int32, device=target.device)
    slopes, caches, table = torch.rand(3, 4, device=target.device), (k_cache, v_cache), None
    if paged:
        *caches, table = to_pages(k_cache.transpose(1, 2), v_cache.transpose(1, 2), 16, lens, layout="bnhd")
    got = flash_attn_with_kvcache(
        q, *caches, cache_seqlens=lens, block_table=table, causal=True, alibi_slopes=slopes, return_softmax_lse=True
    )
    for b in range(3):
        one = slice(b, b + 1)
        want = attend(q[one], k_cache[one], v_cache[one], lens[one], causal=True, slopes=slopes[b])
        check([x[one] for x in got], want, torch.float32)
    nobody = flash_attn_with_kvcache(q[:0], k_cache[:0], v_cache[:0], alibi_slopes=slopes[:0])
    assert nobody.shape == (0, q_len, 4, 32)
    with pytest.raises(ValueError, match="alibi_slopes must have one row per sequence, 3, got 2"):
        flash_attn_with_kvcache(q, k_cache, v_cache, alibi_slopes=slopes[:2])
    with pytest.raises(ValueError, match=r"alibi_slopes must have shape \[4\], got \[3\]"):
        flash_attn_with_kvcache(q, k_cache, v_cache, alibi_slopes=slopes[:, :3])


@pytest.mark.parametrize("lengths", [[3, 0, 2], [70, 1, 130]], ids=str)
@pytest.mark.parametrize("paged", [False, True])
def test_packed_keys(target, lengths, paged):
    """flash_attn_varlen_func(): what a sequence sees begins and ends with its own keys."""
    keys = [75, 4, 131]
    q = torch.randn(sum(lengths), 4, 32, device=target.device)
    k, v = torch.randn(2, sum(keys), 2, 32, device=target.device)
    lens = torch.tensor(keys, device=target.device)
    slopes, sinks = torch.rand(3, 4, device=target.device), torch.randn(4, device=target.device)
    parts = list(zip(k.split(keys), v.split(keys), strict=True))
    caches, table = (k, v), None
    if paged:
        padded = (
            torch.stack([torch.cat((x, x.new_zeros(131 - len(x), 2, 32))) for x in y.split(keys)]) for y in (k, v)
        )
        *caches, table = to_pages(*(x.transpose(1, 2) for x in padded), 16, lens, layout="bnhd")
    starts = starts_of(lengths, target.device), starts_of(keys, target.device)
    for options, want in (
        ({"causal": True}, {}),
        ({}, {"causal": False}),
        ({"causal": True, "window_size": (10, 10), "softcap": 2.0}, {"window": 10, "softcap": 2.0}),
        ({"causal": True, "s_aux": sinks}, {"sinks": sinks}),
        ({"causal": True, "alibi_slopes": slopes}, {}),
    ):
        got = flash_attn_varlen_func(q, *caches, *starts, max(lengths), 131, block_table=table, **options)
        own = slopes if "alibi_slopes" in options else None
        want, _ = one_by_one(q.split(lengths), parts, lens, want, own)
        assert max_error(got.cpu(), want) <= 4 * LOOSE[torch.float32]


@pytest.mark.parametrize("q_len", [1, 5, 100])
def test_the_dense_function(target, q_len):
    q, k_cache, v_cache, _, _ = make(target, torch.float32, q_len=q_len, capacity=100)
    for causal in (True, False):
        got = flash_attn_func(q, k_cache, v_cache, causal=causal)
        assert max_error(got, reference(q, k_cache, v_cache, layout="bnhd", causal=causal)) < LOOSE[torch.float32]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_captured_graph_follows_the_starts_of_packed_queries():
    q = torch.randn(80, 4, 32, device="cuda")
    k_cache, v_cache = torch.randn(2, 3, 150, 2, 32, device="cuda")
    lens = torch.tensor([80, 40, 150], dtype=torch.int32, device="cuda")
    starts = starts_of([80, 0, 0], "cuda")

    def step():
        return flash_attn_with_kvcache(
            q, k_cache, v_cache, cache_seqlens=lens, cu_seqlens_q=starts, max_seqlen_q=80, causal=True
        )

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for lengths in ([80, 0, 0], [1, 70, 9], [10, 10, 60]):
        starts.copy_(starts_of(lengths, "cuda"))
        graph.replay()
        want, _ = one_by_one(q.split(lengths), zip(k_cache, v_cache, strict=True), lens, {})
        assert max_error(out.cpu(), want) <= 4 * LOOSE[torch.float32]


@pytest.mark.compiles
def test_torch_compile_traces_packed_queries(target):
    q = torch.randn(75, 4, 32, device=target.device)
    k_cache, v_cache = torch.randn(2, 3, 150, 2, 32, device=target.device)
    lens, starts = torch.tensor([80, 40, 150], device=target.device), starts_of([70, 2, 3], target.device)

    def step(q, k_cache, v_cache, lens, starts):
        return flash_attn_with_kvcache(
            q, k_cache, v_cache, cache_seqlens=lens, cu_seqlens_q=starts, max_seqlen_q=70, causal=True
        )

    with torch.no_grad():
        got = torch.compile(step, fullgraph=True, backend="aot_eager")(q, k_cache, v_cache, lens, starts)
        assert max_error(got, step(q, k_cache, v_cache, lens, starts)) < LOOSE[torch.float32]


def test_starts_that_do_not_fit_are_refused():
    q, cache, starts = torch.zeros(5, 4, 16), torch.zeros(2, 20, 2, 16), torch.tensor([0, 2, 5])
    good = {"cache_seqlens": 9, "cu_seqlens_q": starts, "max_seqlen_q": 3}
    assert flash_attn_with_kvcache(q, cache, cache, **good).shape == (5, 4, 16)
    for options, message in (
        ({"max_seqlen_q": None}, "max_seqlen_q must be given with cu_seqlens_q, got None"),
        ({"max_seqlen_q": 2}, "max_seqlen_q must be at least that of cu_seqlens_q, 3, got 2"),
        ({"cu_seqlens_q": torch.tensor([0, 2, 6])}, "cu_seqlens_q must rise from 0 to at most 5, got 0 to 6"),
        ({"cu_seqlens_q": torch.tensor([0, 4, 3])}, "cu_seqlens_q must rise"),
        ({"cu_seqlens_q": torch.tensor([0])}, "cu_seqlens_q must have shape"),
        ({"cu_seqlens_q": torch.tensor([0, 2, 3, 5])}, "must have the batch of q, 3, got 2"),
        ({"cache_seqlens": torch.tensor([9, 9, 9])}, r"cache_seqlens must have shape \[2\], got \[3\]"),
        ({"cache_seqlens": 21}, "cache_seqlens must lie from 0 to 20"),
        ({"max_seqlen_q": 65, "window_size": (4, -1)}, "causal must be True for window_size or alibi_slopes"),
    ):
        with pytest.raises(ValueError, match=message):
            flash_attn_with_kvcache(q, cache, cache, **good | options)
    with pytest.raises(TypeError, match=r"cu_seqlens_q must be int32 or int64, got torch\.float32"):
        flash_attn_with_kvcache(q, cache, cache, **good | {"cu_seqlens_q": starts.float()})
    with pytest.raises(ValueError, match=r"q must have shape \[total_q, H, D\] with cu_seqlens_q"):
        flash_attn_with_kvcache(q[None], cache, cache, **good)
    with pytest.raises(ValueError, match=r"cu_seqlens_k must have shape \[3\] as cu_seqlens_q, got \[2\]"):
        flash_attn_varlen_func(q, cache[0], cache[0], starts, starts[:2], 3, 20)
    for options in ({"dropout_p": 0.1}, {"return_attn_probs": True}):
        with pytest.raises(ValueError, match=next(iter(options))):
            flash_attn_varlen_func(q, cache[0], cache[0], starts, starts, 3, 20, **options)


@pytest.mark.compiles
def test_torch_compile_traces_all_of_it(target):
    q, k_cache, v_cache, k, v = make(target, torch.float32, new=1)
    lens = torch.tensor([0, 35, 16], dtype=torch.int32, device=target.device)
    cos, sin = make_tables(40, 32, torch.float32, target.device)
    caches = [k_cache.clone(), v_cache.clone()]

    def step(q, k_cache, v_cache, k, v, lens):
        return flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cos, sin, lens, causal=True)

    with torch.no_grad():
        got = torch.compile(step, fullgraph=True)(q, *caches, k, v, lens)
        want = step(q, k_cache, v_cache, k, v, lens)
    assert max_error(got, want) < LOOSE[torch.float32]
    assert torch.equal(caches[0], k_cache)
    assert torch.equal(caches[1], v_cache)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("scale", "here it is softmax_scale"),
        ("sm_scale", "here it is softmax_scale"),
        ("cache_lens", "here it is cache_seqlens"),
        ("seqused_k", "here it is cache_seqlens"),
        ("return_lse", "here it is return_softmax_lse"),
        ("logits_soft_cap", "here it is softcap"),
        ("sinks", "here it is s_aux"),
        ("learnable_sink", "here it is s_aux"),
        ("tree_mask", "use flash_decode.. and its tree_mask"),
        ("cu_seqlens_k_new", "use append_kv.. and its new_lens"),
        ("colour", "unexpected keyword argument 'colour'"),
    ],
)
def test_names_of_other_libraries_lead_to_ours(name, message):
    x = torch.zeros(1, 1, 1, 16)
    with pytest.raises(TypeError, match=message):
        flash_attn_with_kvcache(x, x, x, **{name: 1})


def test_defaults_of_flash_attn_3_are_taken():
    x = torch.randn(1, 1, 1, 16)
    silent = dict(scheduler_metadata=None, qv=None, pack_gqa=None, sm_margin=0, attention_chunk=0, q_descale=None)
    assert torch.equal(flash_attn_with_kvcache(x, x, x, **silent), x)
    with pytest.raises(TypeError, match="attention_chunk"):
        flash_attn_with_kvcache(x, x, x, attention_chunk=64)


def test_what_contradicts_itself_is_refused():
    q, cache, cos = torch.zeros(2, 8, 4, 16), torch.zeros(2, 20, 2, 16), torch.zeros(20, 8)
    new, rows = torch.zeros(2, 1, 2, 16), torch.tensor([0, 1])
    table = torch.zeros(2, 1, dtype=torch.int32)
    for options, message in (
        ({"k": new, "cache_seqlens": 3}, "v must be given with k"),
        ({"v": new, "cache_seqlens": 3}, "k must be given with v"),
        ({"k": new, "v": new}, "cache_seqlens must be given with k"),
        ({"rotary_cos": cos, "rotary_sin": cos}, "k must be given with rotary_cos"),
        ({"k": new, "v": new, "cache_seqlens": 3, "rotary_cos": cos}, "rotary_sin must be given with rotary_cos"),
        ({"cache_batch_idx": rows, "block_table": table}, "cache_batch_idx must be None with a block_table"),
        ({"window_size": (4, 3)}, "window_size must have a right side of -1, of 0, or of at least 7"),
        ({"window_size": (4,)}, "window_size must be .left, right."),
        ({"cache_seqlens": 21}, "cache_seqlens must lie from 0 to 20"),
    ):
        with pytest.raises(ValueError, match=message):
            flash_attn_with_kvcache(q, cache, cache, **options)
    with pytest.raises(ValueError, match="q must have shape"):
        flash_attn_with_kvcache(q[0], cache, cache)
    with pytest.raises(TypeError, match=r"k_cache must be a torch.Tensor"):
        flash_attn_with_kvcache(q, None, cache)


@pytest.mark.parametrize("wrong", [None, [[1.0]]], ids=["none", "list"])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_what_is_no_tensor_is_refused_by_name(name, wrong):
    dense, packed = torch.zeros(1, 5, 2, 16), torch.zeros(5, 2, 16)
    table = torch.zeros(1, 1, dtype=torch.int32)
    begins = torch.tensor([0, 5])
    starts = {"cu_seqlens_q": begins, "cu_seqlens_k": begins, "max_seqlen_q": 5, "max_seqlen_k": 5}
    whole, flat = {"q": dense, "k": dense, "v": dense}, {"q": packed, "k": packed, "v": packed}
    message = rf"^{name} must be a torch\.Tensor, got {type(wrong).__name__}$"
    with pytest.raises(TypeError, match=message):
        flash_attn_func(**whole | {name: wrong})
    with pytest.raises(TypeError, match=message):
        flash_attn_varlen_func(**flat | {name: wrong}, **starts)
    with pytest.raises(TypeError, match=message):
        flash_attn_varlen_func(**whole | {"q": packed} | {name: wrong}, **starts, block_table=table)


def test_starts_and_options_that_are_no_tensor_are_refused_by_name():
    dense, packed, starts = torch.zeros(1, 5, 2, 16), torch.zeros(5, 2, 16), torch.tensor([0, 5])
    table = torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(TypeError, match=r"^cu_seqlens_q must be a torch\.Tensor, got list$"):
        flash_attn_varlen_func(packed, packed, packed, [0, 5], starts, 5, 5)
    for k, options in ((packed, {}), (dense, {"block_table": table})):
        with pytest.raises(TypeError, match=r"^cu_seqlens_k must be a torch\.Tensor, got NoneType$"):
            flash_attn_varlen_func(packed, k, k, starts, None, 5, 5, **options)
    for options in ({"block_table": [[0]]}, {"cache_batch_idx": [0]}, {"k": [1.0]}, {"v": [1.0]}):
        with pytest.raises(TypeError, match=rf"^{next(iter(options))} must be a torch\.Tensor, got list$"):
            flash_attn_with_kvcache(dense, dense, dense, cache_seqlens=3, **options)
    with pytest.raises(ValueError, match=r"^k must have shape \[B, L, H, D\], got \[5, 2, 16\]$"):
        flash_attn_func(dense, packed, packed)


def test_what_decoding_refuses_is_refused_before_anything_is_written():
    k_cache, v_cache = torch.zeros(2, 20, 2, 64), torch.zeros(2, 20, 2, 64)
    q, k, v = torch.randn(2, 1, 4, 64), torch.randn(2, 1, 2, 64), torch.randn(2, 1, 2, 64)
    with pytest.raises(ValueError, match="alibi_slopes must have shape"):
        flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=3, alibi_slopes=torch.zeros(3))
    assert bool((k_cache == 0).all())
    with pytest.raises(TypeError, match="cache_batch_idx must be int32 or int64"):
        flash_attn_with_kvcache(q, k_cache, v_cache, cache_batch_idx=torch.tensor([0.0, 1.0]))
    with pytest.raises(ValueError, match="cache_batch_idx must hold rows from 0 to 1"):
        flash_attn_with_kvcache(q, k_cache, v_cache, cache_batch_idx=torch.tensor([0, 10**8]))


def test_a_window_as_long_as_the_cache_is_none():
    k_cache, v_cache = torch.randn(2, 20, 2, 64), torch.randn(2, 20, 2, 64)
    q = torch.randn(2, 3, 4, 64)
    whole = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=18)
    for window in ((20, -1), (100, 30), (-1, 25)):
        assert torch.equal(flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=18, window_size=window), whole)
