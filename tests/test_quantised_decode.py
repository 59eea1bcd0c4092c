"""flash_decode() and what is built on it over quantised caches: against the reference on the codes as stored.

The bound is the contract's on the cache that the codes stand for: 1.5 times what SDPA loses there, or one last place.
"""

import pytest
import torch
from cases import assert_same_bits, int32
from helpers import assert_matches, describe, make_inputs, max_error, quantized, skip_where_codes_are_refused
from paging import poison_of, to_pages

from flash_decoding import (
    KVFormat,
    cascade_decode,
    dequantize_kv,
    explain,
    flash_attn_with_kvcache,
    flash_decode,
    merge_states,
    quantize_kv,
    reference,
)
from flash_decoding.integrations.flash_attn import flash_attn_func

pytestmark = pytest.mark.interpreter

FORMATS = [
    "fp8_e4m3", "fp8_e4m3:head", "fp8_e4m3:token", "fp8_e4m3:channel/fp8_e4m3:head", "fp8_e5m2:head", "int8:head",
    "int8", "int8:channel/int8", "int4:group32", "int4", "int4:group64+zero", "int8:head/int4:group32", "none/int8",
    "fp8:head/none",
]  # fmt: skip
SOME = ["fp8_e4m3:head", "int8", "int4:group32+zero"]
# Whole tiles of int4 codes, none, and groups that end inside a quarter of a row (96, 160, 576).
WIDTHS = {
    "fp8_e4m3:head": [(16, 16), (24, 40), (80, 80), (576, 512)],
    "int8": [(16, 24), (40, 16), (256, 128)],
    "int4:group32": [(32, 32), (32, 96), (64, 64), (96, 160), (256, 32), (576, 512)],
    "int4:group64+zero": [(64, 192), (576, 512)],
    "int4:group128": [(128, 128), (256, 384)],
}


NAN = float("nan")


@pytest.fixture(autouse=True)
def read_by(target):
    skip_where_codes_are_refused(target, torch.float16)


def bound_of(q, k, v, options):
    """The contract's, on the cache that the codes stand for, as far as one token per sequence goes."""
    names = ("kv_format", "k_scale", "v_scale")
    codes = {name: options.get(name) for name in names} | {"layout": options.get("layout", "bhnd")}
    k, v = (x.to(q.dtype) for x in dequantize_kv(k, v, **codes))
    if options.get("layout") == "bnhd":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    want = reference(q, k, v, causal=False)
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    loss = max_error(torch.nn.functional.scaled_dot_product_attention(q, k, v), want)
    largest = max(want.abs().max().item(), 1e-30)
    return max(1.5 * loss, torch.finfo(q.dtype).eps * 2.0 ** torch.tensor(largest).log2().floor().item())


def check(target, q, k, v, *, atol=None, plan=None, **options):
    """flash_decode() is the reference on the codes; (out, lse)."""
    out, lse = flash_decode(q, k, v, return_lse=True, backend=target.backend, **(plan or {}), **options)
    assert_matches(out, lse, q, k, v, atol=bound_of(q, k, v, options) if atol is None else atol, **options)
    return out, lse


def make(target, kv_format, *, layout="bhnd", batch=2, heads=(4, 2), kv_len=133, widths=(64, 64), dtype=torch.float16):
    """q, codes of k and v, and their options."""
    head_dim, value_dim = widths
    sizes = batch, *heads, kv_len, head_dim
    q, k, v = make_inputs(*sizes, dtype, target.device, value_dim=value_dim, layout=layout)
    return q, *quantized(k, v, kv_format, layout=layout)


@pytest.mark.feature("kv_format, k_scale, v_scale", "dense cache")
@pytest.mark.parametrize("plan", [{"num_splits": 1}, {"num_splits": 3}], ids=describe)
@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
@pytest.mark.parametrize("kv_format", FORMATS)
def test_formats(target, kv_format, layout, plan):
    q, k, v, options = make(target, kv_format, layout=layout)
    check(target, q, k, v, layout=layout, plan=plan, **options)


@pytest.mark.parametrize(("kv_format", "widths"), [(name, widths) for name in WIDTHS for widths in WIDTHS[name]])
def test_widths(target, kv_format, widths):
    q, k, v, options = make(target, kv_format, widths=widths, kv_len=70)
    check(target, q, k, v, plan={"num_splits": 2}, **options)


@pytest.mark.parametrize("heads_q", [1, 3, 5, 8])
@pytest.mark.parametrize("kv_format", SOME)
def test_group_sizes(target, kv_format, heads_q):
    q, k, v, options = make(target, kv_format, heads=(heads_q, 1))
    check(target, q, k, v, **options)


@pytest.mark.parametrize("kv_format", SOME)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=describe)
def test_other_queries(target, kv_format, dtype):
    skip_where_codes_are_refused(target, dtype)
    q, k, v, options = make(target, kv_format, dtype=dtype)
    if target.backend == "triton" and target.device == "cpu" and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter rounds to bfloat16 by cutting bits off")
    check(target, q, k, v, **options)


def hide(x, seen, fill=None):
    """Poison in the rows [B, Hkv, N, ...] that are not seen [B, N]."""
    hidden = ~seen.view(x.shape[0], 1, x.shape[2], *[1] * (x.ndim - 3)).expand_as(x)
    y = x.clone(memory_format=torch.contiguous_format)
    bits = y.view(torch.uint8) if y.dtype.itemsize == 1 else y
    bits[hidden] = torch.tensor(poison_of(x.dtype) if fill is None else fill).to(x.dtype).view(bits.dtype).item()
    return y


def poisoned(k, v, options, seen, fill=None):
    """The cache with poison in rows that are not seen, in codes and in scales."""
    k, v = hide(k, seen, fill), hide(v, seen, fill)
    scales = {name: options[name] for name in ("k_scale", "v_scale")}
    scales = {name: hide(x, seen, fill) for name, x in scales.items() if x is not None and x.ndim > 2}
    return k, v, options | scales


@pytest.mark.feature("hidden NaN", "kv_lens", "key_mask")
@pytest.mark.parametrize("plan", [{"num_splits": 1}, {"num_splits": 3}], ids=describe)
@pytest.mark.parametrize("kv_format", [*SOME, "fp8_e5m2", "none/int8"])
def test_what_nobody_may_see_changes_no_bit(target, kv_format, plan):
    """Rows past the ends, before the starts and behind a mask, codes and scales."""
    q, k, v, options = make(target, kv_format, batch=4)
    n = torch.arange(133, device=target.device)
    lens, start = int32([133, 5, 0, 77], target), int32([0, 2, 0, 40], target)
    mask = torch.rand(4, 133, device=target.device) < 0.7
    seen = (n < lens[:, None]) & (n >= start[:, None]) & mask
    options |= {"kv_lens": lens, "kv_start": start, "key_mask": mask}
    k, v, clean = poisoned(k, v, options, seen, fill=0)
    want = check(target, q, k, v, atol=2e-3, plan=plan, **clean)
    k, v, dirty = poisoned(k, v, options, seen)
    assert_same_bits(flash_decode(q, k, v, return_lse=True, backend=target.backend, **plan, **dirty), want)


@pytest.mark.feature("paged cache")
@pytest.mark.parametrize(
    ("kv_format", "page_size"),
    [
        *((kv_format, page_size) for kv_format in SOME for page_size in (3, 16)),
        ("int8", 1), ("int4:group32+zero", 128), ("fp8_e4m3:token", 16), ("int8:channel/int8", 3),
    ],
)  # fmt: skip
def test_pages_change_no_bit(target, kv_format, page_size):
    """Pages in any order, with poison in their other rows and in unused ones."""
    q, k, v, options = make(target, kv_format, batch=3)
    lens = int32([133, 40, 0], target)
    want = check(target, q, k, v, atol=2e-3, kv_lens=lens, plan={"split_size": 50}, **options)
    names = [name for name in ("k_scale", "v_scale") if options[name].ndim > 2]
    k, v, *scales, table = to_pages(k, v, page_size, lens, scales=[options[name] for name in names])
    options |= dict(zip(names, scales, strict=True)) | {"kv_lens": lens, "block_table": table}
    got = flash_decode(q, k, v, return_lse=True, backend=target.backend, split_size=50, **options)
    if target.backend == "cpu":
        assert_same_bits(got, want)
    assert_matches(*got, q, k, v, atol=2e-3, **options)


OPTIONS = {
    "tokens": dict(tokens=3),
    "not-causal": dict(tokens=3, causal=False),
    "window": dict(window=20),
    "softcap": dict(softcap=2.0),
    "scale": dict(scale=-0.3),
    "alibi": dict(alibi_slopes=[0.1, 0.2, 0.3, 0.4]),
    "sinks": dict(sinks=[1.0, -1.0, 3.0, 0.0]),
    "tree": dict(tokens=3, tree_mask=[[[True, False, False], [True, True, False], [True, False, True]]] * 2),
    "q_lens": dict(tokens=3, q_lens=[1, 3]),
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("kv_format", SOME)
def test_every_option(target, kv_format, option):
    options = dict(OPTIONS[option])
    q, k, v, codes = make(target, kv_format)
    q = torch.randn(2, 4, options.pop("tokens", 1), 64, device=target.device).half()
    options = {name: torch.tensor(x, device=target.device) if isinstance(x, list) else x for name, x in options.items()}
    atol = 2e-3 if option != "scale" else 1e-2
    check(target, q, k, v, atol=atol, plan={"num_splits": 3}, **options, **codes)


@pytest.mark.parametrize("kv_format", ["fp8_e4m3", "fp8_e5m2"])
def test_bits_of_fp8_as_uint8(target, kv_format):
    q, k, v, options = make(target, kv_format)
    want = flash_decode(q, k, v, return_lse=True, backend=target.backend, **options)
    options["kv_format"] = kv_format
    k, v = k.view(torch.uint8), v.view(torch.uint8)
    assert_same_bits(flash_decode(q, k, v, return_lse=True, backend=target.backend, **options), want)


@pytest.mark.parametrize("codes", [torch.float8_e4m3fn, torch.float8_e5m2], ids=describe)
def test_every_fp8_code(target, codes):
    """Values are 256 codes, one key each: what a query that sees one key gets back is what torch makes of the code."""
    every = torch.arange(256, dtype=torch.uint8, device=target.device).view(codes)
    v = every.view(256, 1, 1, 1).expand(256, 1, 1, 16).contiguous()
    q, k = torch.zeros(256, 1, 1, 16, dtype=torch.float16, device=target.device), torch.zeros_like(v)
    out = flash_decode(q, k, v, backend=target.backend)[:, 0, 0]
    want = every.float()[:, None].expand(256, 16)
    finite = want.isfinite()
    assert torch.equal(out.float()[finite], want[finite])
    assert not bool(out[~finite].isfinite().any())
    # Keys: the score is q . k.
    q[..., 0] = 1.0
    k = every.view(256, 1, 1, 1).expand(256, 1, 1, 16).contiguous()
    _, lse = flash_decode(q, k, torch.zeros_like(k), scale=1.0, return_lse=True, backend=target.backend)
    want, finite = want[:, 0], finite[:, 0]
    assert torch.allclose(lse.flatten()[finite], want[finite], rtol=1e-6, atol=0)


@pytest.mark.parametrize("shift", [0, 1])
def test_every_int4_code_and_int8_code(target, shift):
    """Each code in each place of a row."""
    q = torch.zeros(1, 1, 1, 64, dtype=torch.float16, device=target.device)
    codes = (torch.arange(-128, 128, device=target.device)[:, None] + torch.arange(64, device=target.device)).char()
    for n in range(shift * 128, 256, 37):
        k = codes[n].view(1, 1, 1, 64)
        out = flash_decode(q, k, k, k_scale=1.0, v_scale=1.0, backend=target.backend)
        assert torch.equal(out.float(), k.float())
    for n in range(16):
        v = (torch.arange(64, device=target.device) * (2 * shift + 1) + n).remainder(16).float().view(1, 1, 1, 64) - 8
        scale = torch.full((1, 1, 1, 2), 0.5, dtype=torch.float16, device=target.device)
        k, packed, options = quantized(v / 2, v / 2, "int4", k_scale=scale, v_scale=scale)
        assert torch.equal(flash_decode(q, k, packed, backend=target.backend, **options).float(), v / 2)


@pytest.mark.feature("merge_states", "log-sum-exp")
@pytest.mark.parametrize("kv_format", SOME)
def test_parts_merge(target, kv_format):
    q, k, v, options = make(target, kv_format)
    whole = check(target, q, k, v, **options)
    parts = []
    for part in (slice(0, 50), slice(50, 133)):
        scales = {name: options[name] for name in ("k_scale", "v_scale")}
        scales = {name: x[:, :, part] if x.ndim > 2 else x for name, x in scales.items()}
        call = options | scales
        parts.append(flash_decode(q, k[:, :, part], v[:, :, part], return_lse=True, backend=target.backend, **call))
    out, lse = merge_states(*(list(x) for x in zip(*parts, strict=True)))
    assert max_error(out, whole[0]) <= 2e-3
    assert max_error(lse, whole[1]) <= 1e-4


@pytest.mark.feature("values inside keys")
@pytest.mark.parametrize("kv_format", ["fp8_e4m3", "int8"])
def test_values_inside_the_keys(target, kv_format):
    q, k, _ = make_inputs(2, 8, 1, 70, 576, torch.float16, target.device)
    k, _, options = quantized(k, k, kv_format)
    check(target, q, k, k[..., :512], atol=4e-3, **options)


def test_a_name_leaves_the_scales_to_the_call(target):
    q, k, v, options = make(target, "int8:head/int8:token")
    want = flash_decode(q, k, v, backend=target.backend, **options)
    for kv_format in ("int8", None, "int8:head/int8:token", KVFormat.parse("int8:head/int8")):
        got = flash_decode(q, k, v, backend=target.backend, **options | {"kv_format": kv_format})
        assert torch.equal(got, want)
    assert explain(q, k, v, backend=target.backend, **options) == []


@pytest.mark.parametrize("kv_format", ["fp8_e4m3", "int8:head/int4"])
def test_repeated_calls_give_the_same_bits(target, kv_format):
    q, k, v, options = make(target, kv_format)
    calls = [flash_decode(q, k, v, return_lse=True, backend=target.backend, **options) for _ in range(3)]
    assert_same_bits(calls[1], calls[0])
    assert_same_bits(calls[2], calls[0])
    other = quantized(*dequantize_kv(k.flip(2), v.flip(2), **options), kv_format)  # other addresses and other scales
    check(target, q, *other[:2], **other[2])


def test_scales_per_group_may_lie_at_any_address(target):
    """Also in a call that is repeated from one whose scales could be read two at a time."""
    q, k, v, options = make(target, "int4:group32")
    want = flash_decode(q, k, v, backend=target.backend, **options)
    for name in ("k_scale", "v_scale"):
        room = torch.empty(options[name].numel() + 1, dtype=torch.half, device=target.device)[1:]
        options[name] = room.view(options[name].shape).copy_(options[name])
        assert torch.equal(flash_decode(q, k, v, backend=target.backend, **options), want)


@pytest.mark.parametrize("kind", ["slice", "expanded"])
def test_scales_per_channel_of_other_strides(target, kind):
    q, k, v, options = make(target, "int8:channel/int8:head")
    scale = options["k_scale"]
    if kind == "slice":
        options["k_scale"] = torch.full((3, 100), NAN, device=target.device)[1:, 20:84].copy_(scale)
    else:
        options["k_scale"] = scale[:1].expand(2, -1)
    check(target, q, k, v, atol=1e-3, **options)


@pytest.mark.parametrize("kv_format", ["fp8_e4m3:token", "int8", "int4:group32"])
def test_a_value_far_smaller_than_the_others_may_have_all_the_weight(target, kv_format):
    q, k, v = make_inputs(1, 1, 1, 40, 64, torch.bfloat16, target.device)
    k.copy_(-q.sign())
    k[:, :, 3], v[:, :, 3] = 8 * q.sign()[:, :, 0], v[:, :, 3] * 2.0**-20
    k, v, options = quantized(k, v, kv_format)
    want = reference(q, k, v, **options)
    out = flash_decode(q, k, v, backend=target.backend, **options)
    assert max_error(out, want) <= 2.0**-7 * want.abs().max().item()


def test_without_scales_a_call_is_repeated_too(target):
    q, k, v = make_inputs(2, 4, 2, 133, 64, torch.float16, target.device)
    for _ in range(3):
        k, v = (torch.randn_like(x) for x in (k, v))
        codes = k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn)
        check(target, q, *codes)
        codes = k.to(torch.float8_e5m2), v.to(torch.float8_e5m2)
        check(target, q, *codes)
        check(target, q, k, v)


@pytest.mark.feature("cascade_decode")
@pytest.mark.parametrize("kv_format", [*SOME, "int8:channel/int8:head"])
@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
def test_a_shared_prefix(target, kv_format, layout):
    q = torch.randn(3, 4, 1, 64, device=target.device).half()
    k, v = (torch.randn(9, 2, 16, 64, device=target.device) for _ in range(2))
    k, v, options = quantized(*(flip(x, layout) for x in (k, v)), kv_format, layout=layout)
    table = int32([[0, 1, 2, 3, 4], [0, 1, 5, 6, 6], [0, 1, 7, 8, 8]], target)
    options |= {"block_table": table, "kv_lens": int32([70, 50, 60], target), "layout": layout}
    q = flip(q, layout)
    for shared in (True, None):
        out, lse = cascade_decode(
            q, k, v, prefix_len=32, shared=shared, return_lse=True, backend=target.backend, **options
        )
        assert_matches(out, lse, q, k, v, atol=2e-3, **options)


def flip(x, layout):
    return x if layout == "bhnd" else x.transpose(1, 2).contiguous()


@pytest.mark.feature("cascade_decode")
@pytest.mark.parametrize("kv_format", ["fp8_e4m3", "int8:head"])
def test_a_shared_prefix_with_scales_of_its_own(target, kv_format):
    """Pages of the prefix are quantised with other scales than the rest."""
    q = torch.randn(3, 4, 1, 64, device=target.device).half()
    k, v = (torch.randn(9, 2, 16, 64, device=target.device) for _ in range(2))
    first = quantized(k[:2] * 5, v[:2] * 5, kv_format)
    rest = quantized(k[2:], v[2:], kv_format)
    bits = ([x.view(torch.uint8) for x in sides] for sides in zip(first[:2], rest[:2], strict=True))
    k, v = (torch.cat(pair).view(first[0].dtype) for pair in bits)
    table = int32([[0, 1, 2, 3, 4], [0, 1, 5, 6, 6], [0, 1, 7, 8, 8]], target)
    lens = {"block_table": table, "kv_lens": int32([70, 50, 60], target)}
    scales = {f"shared_{name}": first[2][name] for name in ("k_scale", "v_scale")}
    out, lse = cascade_decode(
        q, k, v, prefix_len=32, return_lse=True, backend=target.backend, **lens, **scales, **rest[2]
    )
    wide = [torch.cat(x) for x in zip(*(dequantize_kv(*c[:2], **c[2]) for c in (first, rest)), strict=True)]
    want, want_lse = reference(q, *wide, return_lse=True, **lens)
    assert max_error(out, want) <= 4e-3 * want.abs().max().item()
    assert max_error(lse, want_lse) <= 1e-3

    def refused(message, kind=ValueError, **change):
        with pytest.raises(kind, match=message):
            cascade_decode(q, k, v, prefix_len=32, backend=target.backend, **lens | rest[2] | scales | change)

    refused("shared_k_scale must be None with shared=False", shared=False)
    refused("shared_k_scale must be None with shared=False, a window or alibi_slopes", window=5)
    refused("shared_k_scale must have shape", shared_k_scale=torch.ones(3, device=target.device))
    meta = scales["shared_k_scale"].to("meta")
    refused(f"shared_k_scale must be on the device of the codes, {q.device}, got meta", shared_k_scale=meta)
    refused("shared_v_scale must be a torch.Tensor, a number or None, got str", TypeError, shared_v_scale="1")
    with pytest.raises(ValueError, match="shared_v_scale must be None where v has the dtype of q"):
        cascade_decode(q, *(x.half() for x in wide), prefix_len=32, shared_v_scale=1.0, backend=target.backend, **lens)


@pytest.mark.feature("flash-attn's functions")
@pytest.mark.parametrize("codes", [torch.float8_e4m3fn, torch.int8], ids=describe)
@pytest.mark.parametrize("scales", ["number", "per-head", "per-sequence", "expanded"])
@pytest.mark.parametrize("where", ["dense", "pages", "rows", "packed", "long"])
def test_descales_of_flash_attn(target, codes, scales, where):
    batch, q_len = 3, 70 if where == "long" else 2
    device = target.device
    q = torch.randn(batch, q_len, 4, 64, device=device).half()
    k, v = (torch.randn(batch, 96, 2, 64, device=device).mul(2).clamp(-6, 6).to(codes) for _ in range(2))
    descale = {
        "number": torch.tensor(0.25, device=device),
        "per-head": torch.tensor([0.25, 0.5], device=device),
        "per-sequence": torch.rand(batch, 2, device=device) + 0.1,
        "expanded": torch.tensor(0.25, device=device).expand(batch, 2),
    }[scales]
    lens = int32([96, 80, 75], target)
    options = {"cache_seqlens": lens, "causal": True}
    k_cache, v_cache, k_wide, v_wide = k, v, k.float(), v.float()
    if where == "pages":
        options["block_table"] = int32([[4, 0], [2, 5], [1, 3]], target)
        order = options["block_table"].flatten().argsort()
        k_cache, v_cache = (x.view(torch.uint8).view(6, 48, 2, 64)[order].view(codes) for x in (k, v))
    elif where == "rows":
        options["cache_batch_idx"] = int32([2, 0, 1], target)
        k_cache, v_cache = (x.view(torch.uint8)[[1, 2, 0]].view(codes) for x in (k, v))
    elif where == "packed":
        options |= {"cu_seqlens_q": int32([0, 2, 4, 6], target), "max_seqlen_q": 2}
    per_row = descale if descale.ndim == 2 else descale.expand(batch, 2)
    k_wide, v_wide = (x * per_row[:, None, :, None] for x in (k_wide, v_wide * 2))
    asked = q.flatten(0, 1) if where == "packed" else q
    out = flash_attn_with_kvcache(asked, k_cache, v_cache, k_descale=descale, v_descale=descale * 2, **options)
    if scales == "number":
        numbers = {"q_descale": None, "k_descale": 0.25, "v_descale": 0.5}
        assert torch.equal(flash_attn_with_kvcache(asked, k_cache, v_cache, **numbers, **options), out)
    out = out.view(q.shape)
    blocks = range(0, q_len, 64)
    want = torch.cat(
        [
            reference(
                q[:, i : i + 64], k_wide, v_wide, layout="bnhd", kv_lens=lens - (q_len - min(i + 64, q_len)),
            )
            for i in blocks
        ],
        dim=1,
    )  # fmt: skip
    assert max_error(out, want) <= 4e-3 * max(1.0, want.abs().max().item())


def test_descales_that_are_refused(target):
    q = torch.zeros(2, 1, 4, 64, device=target.device).half()
    k = torch.zeros(2, 10, 2, 64, device=target.device).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"k_descale must have shape \[2, 2\], got \[2, 3\]"):
        flash_attn_with_kvcache(q, k, k, k_descale=torch.ones(2, 3, device=target.device))
    with pytest.raises(ValueError, match=r"v_descale must have shape \[2\] for scales per head, got \[3\]"):
        flash_attn_with_kvcache(q, k, k, v_descale=torch.ones(3, device=target.device))
    int8 = k.to(torch.int8)
    with pytest.raises(ValueError, match=r"^k_descale must be given with int8 codes, as float32 \[B, Hkv\]"):
        flash_attn_with_kvcache(q, int8, int8)
    with pytest.raises(ValueError, match=r"^v_descale of flash_attn_with_kvcache\(\) must be given with int8 codes"):
        flash_attn_func(q, k, int8)
    with pytest.raises(TypeError, match=r"^v_cache must have a dtype that tells its codes, .*; bits of fp8"):
        flash_attn_with_kvcache(q, k, k.view(torch.uint8))
    with pytest.raises(TypeError, match=r"; flash_decode\(\) and its kv_format can name a format for each"):
        flash_attn_with_kvcache(q, k, int8.half())
    with pytest.raises(ValueError, match="q_descale must be None, queries are float16, bfloat16 or float32 here"):
        flash_attn_with_kvcache(q, k, k, q_descale=torch.ones(2, 2, device=target.device))
    with pytest.raises(TypeError, match=r"k_descale must be a torch\.Tensor, a number or None, got str"):
        flash_attn_with_kvcache(q, k, k, k_descale="1")
    with pytest.raises(ValueError, match="v_descale must be finite and not 0, got 0"):
        flash_attn_with_kvcache(q, k, k, v_descale=0)
    with pytest.raises(TypeError, match=r"k_scale.*here it is k_descale"):
        flash_attn_with_kvcache(q, k, k, k_scale=1.0)


@pytest.mark.feature("flash-attn's functions")
@pytest.mark.parametrize("scales", ["per-head", "per-token"])
def test_flash_attn_appends_to_codes(target, scales):
    q, k, v = make_inputs(2, 4, 2, 40, 64, torch.float16, target.device, layout="bnhd")
    name = {"per-head": "fp8_e4m3:head", "per-token": "int8:token"}[scales]
    k_codes, v_codes, options = quantized(k, v, name, layout="bnhd")
    want_k, want_v = k_codes.clone(), v_codes.clone()
    k_codes.view(torch.uint8)[:, 30:] = 0
    v_codes.view(torch.uint8)[:, 30:] = 0
    k_scale, v_scale = (options[x].clone() for x in ("k_scale", "v_scale"))
    if scales == "per-token":
        k_scale[:, 30:], v_scale[:, 30:] = 0.0, 0.0
    descales = {"k_descale": k_scale, "v_descale": v_scale}
    out = flash_attn_with_kvcache(q, k_codes, v_codes, k[:, 30:], v[:, 30:], cache_seqlens=30, causal=True, **descales)
    for got, want in ((k_codes, want_k), (v_codes, want_v)):
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
    assert max_error(out, reference(q, want_k, want_v, layout="bnhd", **options)) <= 2e-3


@pytest.mark.feature("flash-attn's functions")
@pytest.mark.parametrize("where", ["dense", "pages"])
def test_flash_attn_appends_with_scales_of_each_sequence(target, where):
    q, k, v = make_inputs(2, 4, 2, 12, 64, torch.float16, target.device, layout="bnhd")
    angles = torch.rand(16, 16, device=target.device)
    turns = {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
    k_descale = torch.tensor([[0.02, 0.05], [0.03, 0.04]], device=target.device)
    v_descale = {"dense": torch.zeros(2, 16, 2, device=target.device), "pages": k_descale[0] * 0.7}[where]
    caches = [torch.zeros(2, 16, 2, 64, dtype=torch.int8, device=target.device) for _ in "kv"]
    kept = v_descale.clone()
    options = {"cache_seqlens": int32([3, 0], target), "causal": True, **turns}
    if where == "pages":
        options["block_table"] = int32([[1], [0]], target)
    out = flash_attn_with_kvcache(q, *caches, k, v, **options, k_descale=k_descale, v_descale=v_descale)
    alone = []
    for b in range(2):
        own = [torch.zeros(1, 16, 2, 64, dtype=torch.int8, device=target.device) for _ in "kv"]
        scales = {"k_descale": k_descale[b], "v_descale": kept[b : b + 1] if where == "dense" else kept}
        alone.append(
            flash_attn_with_kvcache(
                q[b : b + 1], *own, k[b : b + 1], v[b : b + 1], cache_seqlens=[3, 0][b], causal=True, **turns, **scales
            )
        )
        page = 1 - b if where == "pages" else b
        assert torch.equal(caches[0][page], own[0][0])
        assert torch.equal(caches[1][page], own[1][0])
    assert torch.equal(v_descale, kept)
    assert max_error(out, torch.cat(alone).double()) <= 2e-3
    before = caches[0].clone()
    with pytest.raises(ValueError, match="v must have shape"):
        flash_attn_with_kvcache(q, *caches, k, v[:, :1], **options, k_descale=k_descale, v_descale=v_descale)
    assert torch.equal(caches[0], before)


@pytest.mark.feature("flash-attn's functions")
@pytest.mark.parametrize("step", [1, 2])
def test_the_scales_of_the_only_sequence_are_the_same_for_all(target, step):
    q, k, v = make_inputs(1, 4, 2, 40, 64, torch.float16, target.device, layout="bnhd")
    descale = torch.tensor([[0.02, 0.0, 0.03, 0.0]], device=target.device)[:, ::2]
    if step == 1:
        descale = descale.contiguous()
    caches = [torch.zeros(1, 50, 2, 64, dtype=torch.int8, device=target.device) for _ in "kv"]
    out = flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=0, causal=True, k_descale=descale, v_descale=descale)
    scales = {"k_scale": descale[0].contiguous(), "v_scale": descale[0].contiguous()}
    want = quantize_kv(k, v, "int8:head", layout="bnhd", **scales)
    assert torch.equal(caches[0][:, :40], want.k)
    assert torch.equal(caches[1][:, :40], want.v)
    assert max_error(out, reference(q, want.k, want.v, layout="bnhd", **scales)) <= 2e-3


@pytest.mark.compiles
@pytest.mark.feature("torch.compile")
@pytest.mark.parametrize("name", ["int8:head", "int4:group32+zero"])
@pytest.mark.parametrize(
    "form", [str, KVFormat.parse, lambda name: name.split(":")[0]], ids=["name", "format", "short"]
)
def test_compiled_in_one_graph(target, name, form):
    q, k, v, options = make(target, name)
    options["kv_format"] = form(name)

    def step(q, k, v, k_scale, v_scale):
        call = options | {"k_scale": k_scale, "v_scale": v_scale}
        return flash_decode(q, k, v, return_lse=True, backend=target.backend, **call)

    inputs = q, k, v, options["k_scale"], options["v_scale"]
    assert_same_bits(torch.compile(step, fullgraph=True, backend="eager")(*inputs), step(*inputs))


@pytest.mark.compiles
@pytest.mark.feature("torch.compile")
def test_numbers_as_scales_are_compiled(target):
    q, k, v, _ = make(target, "fp8_e4m3")
    compiled = torch.compile(
        lambda q, k, v: flash_decode(q, k, v, k_scale=0.5, v_scale=2, backend=target.backend),
        fullgraph=True,
        backend="eager",
    )
    assert torch.equal(compiled(q, k, v), flash_decode(q, k, v, k_scale=0.5, v_scale=2, backend=target.backend))


def test_codes_at_odd_strides_are_refused_by_name_where_words_are_loaded(target):
    k, v, options = quantized(*(torch.randn(1, 2, 30, 64, device=target.device) for _ in range(2)), "int8:head")
    q = torch.randn(1, 4, 1, 64, device=target.device).half()
    odd = torch.zeros(1, 2, 30, 65, dtype=torch.int8, device=target.device)[..., :64].copy_(k)
    options["backend"] = target.backend
    reasons = explain(q, odd, v, **options)
    if target.backend == "triton":
        assert len(reasons) == 1
        assert "k must have codes at an even address and with even strides" in reasons[0]
        with pytest.raises(ValueError, match="k must have codes at an even address"):
            flash_decode(q, odd, v, **options)
    else:
        assert reasons == []
        assert torch.equal(flash_decode(q, odd, v, **options), flash_decode(q, k, v, **options))


def test_int4_values_inside_wider_keys_are_refused(target):
    k, _, options = quantized(*(torch.randn(1, 1, 20, 128, device=target.device) for _ in range(2)), "int4")
    q = torch.randn(1, 4, 1, 128, device=target.device).half()
    options |= {"v_scale": options["k_scale"][..., :1], "backend": target.backend}
    for _ in range(2):  # also when the signature is known
        with pytest.raises(ValueError, match="v must not begin inside k where it holds int4 codes"):
            flash_decode(q, k, k[..., :32], **options)
