"""Random calls with any combination of options: against the reference, cut in two and merged, and after an append.

A call is drawn in two parts. Its Mould, what a backend compiles kernels for, is one of a fixed list; its Numbers are
free. So a long run on a GPU spends its time on calls and not in the compiler. Draws are the same in every run; how many
there are is FLASH_DECODING_EXAMPLES, and FLASH_DECODING_SEED draws others. A long run, spread over 16 processes, each
with moulds of its own:

    FLASH_DECODING_EXAMPLES=20000 OMP_NUM_THREADS=1 python -m pytest tests/test_properties.py -m gpu -k test_any -n 16

A failure names its Mould and its Numbers; keep them in KEPT. The tests called every_option take each option once, for
tools under which kernels are slow (`make memcheck`).
"""

import math
import os
import random
from typing import NamedTuple

import pytest
import torch
from conftest import INTERPRETED
from helpers import DTYPES, describe
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from paging import to_pages
from test_append import ROUNDING, assert_same, make_tables, rotate

from flash_decoding import append_kv, cascade_decode, dequantize_kv, flash_decode, merge_states, quantize_kv, reference
from flash_decoding.backends import find_backend_errors

pytestmark = pytest.mark.interpreter

EXAMPLES = os.environ.get("FLASH_DECODING_EXAMPLES")
# On a GPU nearly all the time of a short run goes into compiling, in the interpreter a call takes up to seconds.
USUAL_EXAMPLES = {"cpu": 2000, "gpu": 100, "interpreter": 60}
SEED = int(os.environ.get("FLASH_DECODING_SEED", "0"))
SHARDS = 16 if int(EXAMPLES or 0) > 2000 else 4
CALLS_PER_MOULD = 4  # at least


class Mould(NamedTuple):
    """What kernels are compiled for: types, widths, and which options are there."""

    dtype: torch.dtype = torch.float16
    group: int = 2
    q_len: int = 1
    widths: tuple[int, int] = (64, 64)  # head_dim, value_dim
    v_in_k: bool = False
    layout: str = "bhnd"
    page_size: int | None = None
    kv_lens: torch.dtype | None = None
    kv_start: torch.dtype | None = None
    q_lens: torch.dtype | None = None
    visible: str = "causal"  # or "all", "tree"
    window: bool = False
    softcap: bool = False
    alibi: bool = False
    sinks: bool = False
    key_mask: bool = False
    plan: str = "few"  # splits; or "one", "many", "size", "auto"
    lse: bool = True
    own_out: bool = False
    rotary: str | None = None  # how an append rotates: "halves", "interleaved"
    kv_format: str | None = None


class Numbers(NamedTuple):
    """What does not change a kernel."""

    batch: int = 2
    heads_kv: int = 2
    kv_len: int = 100
    window: int = 40
    softcap: float = 3.0
    scale: float | None = None
    num_splits: int = 3
    split_size: int = 37
    loudness: float = 1.0  # multiplies the queries, and so the scores
    density: float = 0.5  # of key_mask and tree_mask
    shared: bool = False  # pages belong to all sequences
    poison: str = "nan"
    seed: int = 0


def draw_mould(draw):
    any_widths = 8 * draw.randint(2, 20), 8 * draw.randint(2, 20)
    widths = draw.choice([(16, 16), (40, 40), (64, 64), (80, 80), (128, 128), (64, 128), (576, 512), any_widths])
    integers = [torch.int32, torch.int64]
    page_size = draw.choice([None, None, None, 1, 3, 16, 64, draw.randint(1, 64)])
    some = {name: draw.random() < 0.3 for name in ("window", "softcap", "alibi", "sinks", "key_mask", "own_out")}
    lens = {name: draw.choice(integers) if draw.random() < 0.4 else None for name in ("kv_lens", "kv_start", "q_lens")}
    if page_size is not None:
        lens["kv_lens"] = draw.choice(integers)
    mould = Mould(
        dtype=draw.choice(DTYPES),
        group=draw.choice([1, 2, 3, 4, 5, 7, 8]),
        q_len=64 if draw.random() < 0.03 and not INTERPRETED else draw.choice([1, 1, 1, 1, 2, 3, 4, 5, 6, 7, 8]),
        widths=widths,
        v_in_k=widths == (576, 512) or (widths[1] <= widths[0] and draw.random() < 0.15),
        layout=draw.choice(["bhnd", "bnhd"]),
        page_size=page_size,
        visible=draw.choice(["causal", "causal", "all", "tree"]),
        plan=draw.choice(["one", "few", "many", "size", "auto"]),
        lse=draw.random() < 0.8,
        rotary=draw.choice([None, "halves", "interleaved"]),
        **some,
        **lens,
    )
    return mould._replace(kv_format=draw_format(draw, mould)) if draw.random() < 0.4 else mould


def draw_format(draw, m):
    """Any codes and scales with float16 queries, and fewer with others: the CPU compiles for each dtype."""
    if m.v_in_k:
        return draw.choice(["fp8_e4m3", "int8:head", "int8"])
    names = ["fp8_e4m3", "fp8_e4m3:token", "int8:head", "int8", "int8:channel/int8:head"]
    for group in (32, 64, 128):
        if all(width % group == 0 for width in m.widths):
            names += [f"int4:group{group}", f"int4:group{group}+zero"]
    if m.dtype == torch.float16:
        names += ["fp8_e5m2:head", "none/int8", "fp8_e4m3/none"]
        names += [f"int8/{name}" for name in names if name.startswith("int4")]
    return draw.choice(names)


# The long run above meets some 1200 kernels of a GPU.
MOULDS = [draw_mould(random.Random(i)) for i in range(320)]
FEW_MOULDS = MOULDS[::10]
LONGEST, MOST = (80, 1) if INTERPRETED else (200, 3)
# Hypothesis prefers the first of a list, so that is the most telling.
NUMBERS = st.builds(
    Numbers,
    batch=st.sampled_from([2, 1, MOST, 0, 2, 1, MOST]),
    heads_kv=st.sampled_from([2, 1, MOST]),
    kv_len=st.sampled_from([67, 0, 0, *range(LONGEST + 1)]),
    window=st.sampled_from([40, 0, 1, 5, 130, 10**9]),
    softcap=st.sampled_from([3.0, 0.0, 0.5, 30.0, 1e4]),
    scale=st.sampled_from([None, None, 0.2, -0.05, 0.0]),
    num_splits=st.integers(2, 8),
    split_size=st.sampled_from([37, 1, 16, 64, 100, 250]),
    loudness=st.sampled_from([1.0, 1.0, 30.0, 1000.0]),
    density=st.sampled_from([0.5, 0.02, 0.95]),
    shared=st.booleans(),
    poison=st.sampled_from(["nan", "inf"]),
    seed=st.integers(0, 2**32 - 1),
)


def random_lens(batch, most):
    """[B] int64 from 0 to most, the two ends often."""
    lens, end = torch.randint(most + 1, (batch,)), torch.rand(batch)
    return lens.where(end > 0.2, 0).where(end < 0.8, most)


def make_call(m, x):
    """q, k and v in layout bhnd and the options of flash_decode(), on the CPU; the cache is not poisoned yet."""
    torch.manual_seed(x.seed)
    (head_dim, value_dim), heads_q = m.widths, x.heads_kv * m.group
    q = (torch.randn(x.batch, heads_q, m.q_len, head_dim) * x.loudness).to(m.dtype)
    k = torch.randn(x.batch, x.heads_kv, x.kv_len, head_dim).to(m.dtype)
    v = torch.randn(x.batch, x.heads_kv, x.kv_len, value_dim).to(m.dtype)
    if m.v_in_k:
        v = k[..., :value_dim]
    if is_shared(m, x):
        k, v = (y[:1].expand(x.batch, -1, -1, -1) for y in (k, v))
    options = {"scale": x.scale, "causal": m.visible != "all"}
    for name, dtype, most in (
        ("kv_lens", m.kv_lens, x.kv_len), ("kv_start", m.kv_start, x.kv_len), ("q_lens", m.q_lens, m.q_len)
    ):  # fmt: skip
        if dtype is not None:
            options[name] = random_lens(x.batch, most).to(dtype)
    if m.q_lens is not None:
        asks = torch.arange(m.q_len) < options["q_lens"][:, None]
        q = q.masked_fill(~asks[:, None, :, None], float(x.poison))
    if m.visible == "tree":
        options["tree_mask"] = torch.rand(x.batch, m.q_len, m.q_len) < x.density
    if m.window:
        options["window"] = x.window
    if m.softcap:
        options["softcap"] = x.softcap
    if m.alibi:
        options["alibi_slopes"] = torch.rand(heads_q) * 0.25
    if m.sinks:
        options["sinks"] = torch.randn(heads_q) * 5
    if m.key_mask:
        options["key_mask"] = torch.rand(x.batch, x.kv_len) < x.density
    if m.kv_format is not None:
        k, v, *scales, options["kv_format"] = quantize_kv(k, v, m.kv_format)
        if m.v_in_k:
            v, scales = k[..., :value_dim], scales[:1] * 2
        options["k_scale"], options["v_scale"] = scales
    return q, k, v, options


def scales_of(options):
    """Scales that stand beside the rows of a cache, by name."""
    found = {name: options.get(name) for name in ("k_scale", "v_scale")}
    return {name: y for name, y in found.items() if y is not None and y.ndim > 2}


def is_shared(m, x):
    return x.shared and m.page_size is not None


def reach(m, x, options):
    """(first, end) [B]: the keys of the cache that a call may look at, none where no query asks."""
    end = options.get("kv_lens", torch.full((x.batch,), x.kv_len)).long()
    tokens = options.get("q_lens", torch.full((x.batch,), m.q_len)).long()
    first = options.get("kv_start", torch.zeros(x.batch)).long()
    if m.window:
        first = torch.maximum(first, end - tokens - min(x.window, x.kv_len))
    return first, end.where(tokens > 0, 0)


def store(m, x, k, v, first, end, options):
    """(k, v, options of theirs) as a cache has them in the layout of the call, with poison at all keys out of reach."""
    key_mask, scales = options.get("key_mask"), scales_of(options)
    n = torch.arange(x.kv_len)
    kept = (n >= first[:, None]) & (n < end[:, None])
    if key_mask is not None:
        kept &= key_mask
    if is_shared(m, x):
        kept = kept.any(dim=0, keepdim=True).expand_as(kept)
    k, v, *spoiled = (spoil(y, ~kept, float(x.poison)) for y in (k, v, *scales.values()))
    stored = {}
    if m.page_size is None:
        k, v, *spoiled = (flip(m, y) for y in (k, v, *spoiled))
    else:
        k, v, *spoiled, stored["block_table"] = to_pages(
            k, v, m.page_size, end, starts=first, shared=is_shared(m, x), layout=m.layout, scales=spoiled
        )
    stored |= dict(zip(scales, spoiled, strict=True))
    return k, k[..., : v.shape[3]] if m.v_in_k else v, stored


def spoil(y, hidden, poison):
    """y [B, Hkv, N, ...] with poison in hidden rows [B, N]; codes become NaN or the largest."""
    hidden = hidden.view(y.shape[0], 1, y.shape[2], *[1] * (y.ndim - 3))
    if y.dtype.itemsize > 1:
        return y.masked_fill(hidden, poison)
    return y.view(torch.uint8).masked_fill(hidden, 0x7F).view(y.dtype)


def with_stored(m, options, stored):
    """The options of a call on the cache that store() made."""
    options, table = {**options, **stored}, stored.get("block_table")
    if table is not None and "key_mask" in options:
        mask = options["key_mask"]
        unused = table.shape[1] * m.page_size - mask.shape[1]
        options["key_mask"] = torch.nn.functional.pad(mask, (0, unused), value=True)
    return options


def flip(m, x):
    """From layout bhnd to that of the call, or back."""
    return x if m.layout == "bhnd" else x.transpose(1, 2).contiguous()


def plan_of(m, x):
    """num_splits or split_size."""
    plans = {"one": 1, "few": x.num_splits, "many": 8 + x.num_splits}
    if m.plan == "size":
        return {"split_size": x.split_size}
    return {"num_splits": plans.get(m.plan)}


def decode(target, m, x, q, k, v, options):
    """(out, lse) of flash_decode() in layout bhnd on the CPU, lse None if it is not wanted; q as well is in bhnd."""
    q, k, v = (y.to(target.device) for y in (flip(m, q), k, v))
    if m.v_in_k:
        v = k[..., : v.shape[3]]
    options = {name: y.to(target.device) if isinstance(y, torch.Tensor) else y for name, y in options.items()}
    frame, out = None, None
    if m.own_out:
        b, i, j, d = (*q.shape[:3], m.widths[1])
        frame = torch.full((b + 1, i + 2, j + 1, d + 32), 7.0, dtype=q.dtype, device=q.device)
        out = frame[1:, 1:-1, :-1, 16:-16]
    got = flash_decode(
        q, k, v, layout=m.layout, return_lse=m.lse, out=out, backend=target.backend, **plan_of(m, x), **options
    )
    got, lse = got if m.lse else (got, None)
    got = got.clone()
    if frame is not None:
        out.fill_(7.0)
        assert bool((frame == 7.0).all()), "nothing but out is written"
    return flip(m, got).cpu(), None if lse is None else lse.cpu()


# Rounding of the weights and of the result, in units of sum p |v|; float32 adds up to 200 numbers.
RELATIVE = {dtype: 2 * torch.finfo(dtype).eps for dtype in (torch.float16, torch.bfloat16)} | {torch.float32: 2e-6}


def of_unsigned(kv_format, v_scale):
    """What float32 loses of sums over unsigned codes, from which the share of the code for 0 is taken at the end."""
    form = None if kv_format is None else kv_format.v
    span = 0 if form is None else {"int8": 256, "int4": 16}.get(form.codes, 0)
    if span == 0 or v_scale.numel() == 0:
        return 0.0
    scales = v_scale[..., 0] if form.zero_point else v_scale
    return 2 * RELATIVE[torch.float32] * span * scales.abs().max().item()


def assert_close(out, lse, q, k, v, *, roundings=1, **options):
    """out and lse are the reference's up to rounding; rows without keys are exactly empty."""
    codes = {name: options.pop(name, None) for name in ("kv_format", "k_scale", "v_scale")}
    k, v = dequantize_kv(k, v, **codes, dtype=torch.float64)
    both, want_lse = reference(q, k, torch.cat((v, v.abs()), dim=-1), return_lse=True, **options)
    want, weighed = both.chunk(2, dim=-1)
    scale = q.shape[-1] ** -0.5 if options["scale"] is None else abs(options["scale"])
    norms = [y.double().nan_to_num(0.0, 0.0, 0.0).norm(dim=-1).flatten() for y in (q, k)]
    largest = scale * math.prod(y.max().item() if y.numel() else 0.0 for y in norms)
    if options.get("alibi_slopes") is not None:
        largest += options["alibi_slopes"].max().item() * LONGEST
    of_scores = 4 * torch.finfo(torch.float32).eps * largest
    bound = roundings * (RELATIVE[q.dtype] + math.expm1(2 * of_scores)) * weighed + 1e-6
    bound += roundings * of_unsigned(codes["kv_format"], codes["v_scale"])
    assert out.dtype == q.dtype
    off = ((out.double() - want).abs() / bound).nan_to_num(nan=math.inf)
    assert bool((off <= 1).all()), f"out is off by up to {off.max():.3g} times what rounding explains"
    empty = want_lse == -math.inf
    if lse is not None:
        assert lse.dtype == torch.float32
        assert torch.equal(lse == -math.inf, empty), "a row without keys has lse -inf, and no other"
        off = ((lse.double() - want_lse).abs() / (1e-5 + 1e-6 * want_lse.abs() + of_scores))[~empty]
        assert bool((off <= 1).all()), f"lse is off by up to {off.max():.3g} times what rounding explains"
    rows = empty if options.get("layout", "bhnd") == "bhnd" else empty.transpose(1, 2)
    assert bool((out[rows] == 0).all()), "a row without keys has out 0"


def check_call(target, m, x):
    """flash_decode() is the reference, whatever the cache holds out of reach."""
    q, k, v, options = make_call(m, x)
    *cache, stored = store(m, x, k, v, *reach(m, x, options), options)
    out, lse = decode(target, m, x, q, *cache, with_stored(m, options, stored))
    assert_close(out, lse, q, k, v, **options)


def check_merge(target, m, x):
    """Calls on the keys below and from a cut on, merged, are a call on all of them."""
    m = m._replace(sinks=False, lse=True)  # a sink belongs to no part
    q, k, v, options = make_call(m, x)
    first, end = reach(m, x, options)
    cut = random_lens(x.batch, x.kv_len)
    upper = {**options, "kv_start": cut.maximum(options.get("kv_start", torch.zeros_like(cut)))}
    if m.window or m.alibi or m.visible == "tree" or (m.visible == "causal" and m.q_len > 1):
        # Positions count back from kv_lens, so the lower part keeps them.
        below = torch.arange(x.kv_len) < cut[:, None]
        lower = {**options, "key_mask": below & options.get("key_mask", torch.ones_like(below))}
    else:
        lower = {**options, "kv_lens": cut.minimum(options.get("kv_lens", cut))}
    parts = []
    for part in (lower, upper):
        *cache, stored = store(m, x, k, v, first, end, part)
        parts.append(decode(target, m, x, q, *cache, with_stored(m, part, stored)))
    outs, lses = ([y.to(target.device) for y in states] for states in zip(*parts, strict=True))
    out, lse = merge_states(outs, lses)
    assert_close(out.cpu(), lse.cpu(), q, k, v, roundings=2, **options)


def check_append(target, m, x):
    """append_kv() makes the cache that might have been there before, and the next call sees it."""
    m = m._replace(v_in_k=False, kv_lens=m.kv_lens or torch.int32, kv_format=None)
    x = x._replace(shared=False, poison="nan")
    q, k, v, options = make_call(m, x)
    new, new_lens = min(m.q_len, x.kv_len), None
    if m.q_lens is None:
        options["kv_lens"] = options["kv_lens"].clamp(min=new)
    else:
        new_lens = options["q_lens"].clamp(max=new).minimum(options["kv_lens"])
    after = options["kv_lens"].long()
    before = after - (new if new_lens is None else new_lens)
    n = torch.arange(x.kv_len)
    is_new = ((n >= before[:, None]) & (n < after[:, None]))[:, None, :, None]
    place = (before[:, None] + torch.arange(new)).clamp(max=max(x.kv_len - 1, 0))[:, None, :, None]
    fresh = [flip(m, y.gather(2, place.expand(-1, x.heads_kv, -1, y.shape[3]))) for y in (k, v)]

    def cache_of(k, v):
        torch.manual_seed(x.seed)  # the same pages each time
        return store(m, x, k, v, torch.zeros_like(after), after, {})

    *cache, stored = cache_of(*(y.masked_fill(is_new, math.nan) for y in (k, v)))
    table = stored.get("block_table")
    capacity = x.kv_len if table is None else table.shape[1] * m.page_size
    cos, sin = make_tables(max(capacity, 1), min(m.widths[0], 64) // 16 * 16, torch.float32, "cpu")
    interleaved, rotation = m.rotary == "interleaved", {}
    if m.rotary is not None:
        rotation = {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": interleaved, "q": flip(m, q)}

    def rotated(y, positions):
        if m.rotary is None or y.numel() == 0:
            return y
        positions = positions.clamp(max=len(cos) - 1)
        return rotate(y, cos[positions][:, None], sin[positions][:, None], interleaved)

    def on_device(y):
        return y.to(target.device) if isinstance(y, torch.Tensor) else y

    cache = [on_device(y) for y in cache]
    optional = {name: on_device(y) for name, y in {"block_table": table, "new_lens": new_lens, **rotation}.items()}
    q_rotated = append_kv(
        *map(on_device, fresh), *cache, on_device(before), layout=m.layout, backend=target.backend, **optional
    )
    cache = [y.cpu() for y in cache]
    want = cache_of(torch.where(is_new, rotated(k, n.expand(x.batch, -1)).to(m.dtype), k), v)[:2]
    rounding = ROUNDING[m.dtype] if m.rotary is not None else 0.0
    assert_same(cache[0], want[0], rounding)
    assert_same(cache[1], want[1])
    if m.rotary is not None:
        q_rotated = flip(m, q_rotated.cpu())
        want_q = rotated(q, before[:, None] + torch.arange(m.q_len))
        assert_same(q_rotated, want_q, rounding * x.loudness)
        q = q_rotated
    options = with_stored(m, options, stored)
    out, lse = decode(target, m, x, q, *cache, options)
    assert_close(flip(m, out), lse, flip(m, q), *cache, layout=m.layout, **options)


def check_cascade(target, m, x):
    """cascade_decode() with a shared prefix is the reference."""
    m, x = m._replace(v_in_k=False, lse=True, own_out=False), x._replace(shared=True)
    q, k, v, options = make_call(m, x)
    prefix_len = x.kv_len // 2 // m.page_size * m.page_size
    fewest = min(prefix_len + m.q_len, x.kv_len)
    options["kv_lens"] = (fewest + random_lens(x.batch, x.kv_len - fewest)).to(m.kv_lens)
    *cache, stored = store(m, x, k, v, torch.zeros(x.batch), options["kv_lens"], options)
    more = {**options, **stored}
    more = {name: y.to(target.device) if isinstance(y, torch.Tensor) else y for name, y in more.items()}
    q_and_cache = [y.to(target.device) for y in (flip(m, q), *cache)]
    out, lse = cascade_decode(
        *q_and_cache,
        prefix_len=prefix_len,
        shared=True,
        layout=m.layout,
        return_lse=True,
        backend=target.backend,
        **more,
    )
    assert_close(flip(m, out).cpu(), lse.cpu(), q, k, v, **options)


def search(check, moulds, share, target, shard):
    """check() this shard's part of the examples. Shards have their own moulds, so that few kernels are built twice."""
    name = "gpu" if target.device == "cuda" else "cpu" if target.backend == "cpu" else "interpreter"
    examples = math.ceil(share * int(EXAMPLES or USUAL_EXAMPLES[name]) / SHARDS)
    mine = range(len(moulds))[shard::SHARDS][: math.ceil(examples / CALLS_PER_MOULD)]
    for i in mine:
        search_numbers(check, target, moulds[i], math.ceil(examples / len(mine)), SEED * len(moulds) + i)


def allowed(mould, target):
    """The mould, without a format where the backend says that it has none for these queries."""
    refused = list(find_backend_errors(target.backend, torch.device(target.device), mould.dtype))
    return mould._replace(kv_format=None) if refused else mould


def search_numbers(check, target, mould, examples, start):
    @seed(start)
    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.just(mould), NUMBERS)
    def draw(mould, numbers):
        check(target, allowed(mould, target), numbers)

    draw()


CALLS = (
    "dense cache", "layout bnhd", "paged cache", "shared pages", "kv_lens", "kv_start", "key_mask", "group sizes",
    "head sizes", "D and Dv differ", "values inside keys", "several query tokens", "not causal", "tree_mask", "q_lens",
    "scale", "window", "softcap", "alibi_slopes", "sinks", "num_splits, split_size", "log-sum-exp", "out, lse",
    "rows without keys", "hidden NaN", "kv_format, k_scale, v_scale",
)  # fmt: skip


MERGES, APPENDS = ("merge_states", "log-sum-exp"), ("append_kv", "append_kv to pages", "rotary embedding")
ANY = [
    pytest.param(check_call, MOULDS, 0.75, id="call", marks=pytest.mark.feature(*CALLS)),
    pytest.param(check_merge, FEW_MOULDS, 0.125, id="call-in-two-parts", marks=pytest.mark.feature(*MERGES)),
    pytest.param(check_append, FEW_MOULDS, 0.125, id="append", marks=pytest.mark.feature(*APPENDS)),
]


@pytest.mark.parametrize(("check", "moulds", "share"), ANY)
@pytest.mark.parametrize("shard", range(SHARDS))
def test_any(target, check, moulds, share, shard):
    search(check, moulds, share, target, shard)


KEPT = {
    "no-keys-of-any-kind": (
        check_call,
        Mould(torch.float32, 1, widths=(16, 16), kv_lens=torch.int32, kv_start=torch.int64, key_mask=True, plan="auto"),
        Numbers(1, 1, 0),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KEPT)
def test_kept(target, name):
    check, mould, numbers = KEPT[name]
    check(target, allowed(mould, target), numbers)


def once(name, feature, *, check=check_call, numbers=None, **mould):
    return pytest.param(check, Mould(**mould), Numbers(**numbers or {}), id=name, marks=pytest.mark.feature(feature))


INT32, INT64 = torch.int32, torch.int64
EVERYTHING = dict(
    group=3, q_len=3, page_size=16, kv_lens=INT32, kv_start=INT64, q_lens=INT32, window=True, softcap=True, alibi=True,
    sinks=True, key_mask=True, own_out=True,
)  # fmt: skip
FORMATS = ("fp8_e4m3", "fp8_e5m2:head", "int8:channel/int8", "int4:group64", "int4:group32+zero", "none/int8")
CASCADE, APPEND = dict(check=check_cascade, kv_lens=INT32), dict(check=check_append, q_len=3)
EVERY_OPTION = [
    *[once(describe(dtype), "dense cache", dtype=dtype) for dtype in DTYPES],
    once("bnhd", "layout bnhd", layout="bnhd"),
    once("unsplit", "num_splits, split_size", plan="one", lse=False),
    once("many-splits", "num_splits, split_size", plan="many"),
    once("split_size", "num_splits, split_size", plan="size"),
    once("automatic", "num_splits, split_size", plan="auto"),
    once("lse", "log-sum-exp", plan="one"),
    once("out", "out, lse", own_out=True),
    once("no-keys", "rows without keys", numbers={"kv_len": 0}),
    once("group-1", "group sizes", group=1),
    once("group-7", "group sizes", group=7),
    once("width-40", "head sizes", widths=(40, 40)),
    once("widths-80-24", "D and Dv differ", widths=(80, 24)),
    once("values-inside-keys", "values inside keys", widths=(576, 512), v_in_k=True),
    once("tokens-3", "several query tokens", q_len=3),
    once("tokens-64", "several query tokens", q_len=64, group=3, numbers={"batch": 1, "heads_kv": 1, "kv_len": 70}),
    once("not-causal", "not causal", q_len=3, visible="all"),
    once("tree", "tree_mask", q_len=5, visible="tree"),
    once("q_lens", "q_lens", q_len=3, q_lens=INT32),
    once("kv_lens", "kv_lens", kv_lens=INT32),
    once("kv_lens-int64", "kv_lens", kv_lens=INT64),
    once("kv_start", "kv_start", kv_start=INT32),
    once("key_mask", "key_mask", key_mask=True),
    once("scale", "scale", numbers={"scale": -0.05}),
    once("window", "window", window=True),
    once("softcap", "softcap", softcap=True),
    once("alibi", "alibi_slopes", alibi=True, q_len=3, visible="all"),
    once("sinks", "sinks", sinks=True),
    once("sinks-unsplit", "sinks", sinks=True, plan="one"),
    # Tiles hold 16 to 64 keys: pages of one key, of no power of two, shorter than a tile, and of several tiles.
    *[
        once(f"pages-of-{size}", "paged cache", page_size=size, kv_lens=INT32, numbers={"kv_len": 200})
        for size in (1, 3, 16, 128)
    ],
    once("shared-pages", "shared pages", page_size=16, kv_lens=INT32, numbers={"shared": True}),
    once("everything", "paged cache", **EVERYTHING),
    once("everything-bnhd-tree", "paged cache", **EVERYTHING, layout="bnhd", visible="tree", plan="one"),
    *[once(name, "kv_format, k_scale, v_scale", kv_format=name) for name in FORMATS],
    *[
        once(f"everything-{name}", "kv_format, k_scale, v_scale", **EVERYTHING, kv_format=name)
        for name in ("fp8_e4m3:token", "int8/int4:group32+zero")
    ],
    once("merge", "merge_states", check=check_merge),
    once("merge-int8", "merge_states", check=check_merge, kv_format="int8"),
    once("cascade", "cascade_decode", **CASCADE, page_size=16),
    once("cascade-fp8", "cascade_decode", **CASCADE, page_size=16, kv_format="fp8_e4m3:token"),
    once("cascade-tokens", "cascade_decode", **CASCADE, page_size=3, q_len=3, sinks=True, layout="bnhd"),
    once("append", "append_kv", **APPEND),
    once("append-ragged", "append_kv", **APPEND, q_lens=INT32, layout="bnhd"),
    once("append-pages", "append_kv to pages", **APPEND, page_size=3, kv_lens=INT64),
    once("append-rotated", "rotary embedding", **APPEND, rotary="halves"),
    once("append-pages-rotated", "rotary embedding", **APPEND, page_size=16, rotary="interleaved"),
]


@pytest.mark.parametrize(("check", "mould", "numbers"), EVERY_OPTION)
def test_every_option(target, check, mould, numbers):
    check(target, allowed(mould, target), numbers)
