"""flash_attn_with_kvcache() against flash-attn 2's documented behaviour, said in plain torch."""

import inspect

import pytest
import torch
from helpers import DTYPES, LOOSE, describe, max_error
from paging import to_pages
from test_append import make_tables, rotate

from flash_decoding import flash_attn_with_kvcache, reference

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
        ("sinks", "use flash_decode.. and its sinks"),
        ("s_aux", "use flash_decode.. and its sinks"),
        ("colour", "unexpected keyword argument 'colour'"),
    ],
)
def test_names_of_other_libraries_lead_to_ours(name, message):
    x = torch.zeros(1, 1, 1, 16)
    with pytest.raises(TypeError, match=message):
        flash_attn_with_kvcache(x, x, x, **{name: None})


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
        ({"cache_seqlens": 21}, "kv_lens must lie from 0 to 20"),
    ):
        with pytest.raises(ValueError, match=message):
            flash_attn_with_kvcache(q, cache, cache, **options)
    with pytest.raises(ValueError, match="q must have shape"):
        flash_attn_with_kvcache(q[0], cache, cache)
    with pytest.raises(TypeError, match=r"k_cache must be a torch.Tensor"):
        flash_attn_with_kvcache(q, None, cache)


def test_what_decoding_refuses_is_refused_before_anything_is_written():
    k_cache, v_cache = torch.zeros(2, 20, 2, 64), torch.zeros(2, 20, 2, 64)
    q, k, v = torch.randn(2, 1, 4, 64), torch.randn(2, 1, 2, 64), torch.randn(2, 1, 2, 64)
    with pytest.raises(ValueError, match="alibi_slopes must have shape"):
        flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=3, alibi_slopes=torch.zeros(3))
    assert bool((k_cache == 0).all())
    with pytest.raises(TypeError, match="cache_batch_idx must be int32 or int64"):
        flash_attn_with_kvcache(q, k_cache, v_cache, cache_batch_idx=torch.tensor([0.0, 1.0]))
    with pytest.raises(ValueError, match="block_table must hold pages from 0 to 1"):
        flash_attn_with_kvcache(q, k_cache, v_cache, cache_batch_idx=torch.tensor([0, 10**8]))


def test_a_window_as_long_as_the_cache_is_none():
    k_cache, v_cache = torch.randn(2, 20, 2, 64), torch.randn(2, 20, 2, 64)
    q = torch.randn(2, 3, 4, 64)
    whole = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=18)
    for window in ((20, -1), (100, 30), (-1, 25)):
        assert torch.equal(flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=18, window_size=window), whole)
