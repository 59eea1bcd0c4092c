"""KVCache and PagedKVCache: what a sequence holds is what was appended to it, whoever shares its pages."""

import numpy as np
import pytest
import torch
from helpers import LOOSE, max_error
from hypothesis import given, settings
from hypothesis import strategies as st

from flash_decoding import KVCache, KVFormat, PagedKVCache, append_kv, flash_decode, quantize_kv, reference
from flash_decoding.caches import CacheFullError

HEADS, WIDTH, VALUE_WIDTH = 2, 16, 24


def new_tokens(batch, count, layout="bhnd", device="cpu", dtype=torch.float32):
    k, v = (torch.randn(batch, HEADS, count, width, device=device).to(dtype) for width in (WIDTH, VALUE_WIDTH))
    return (k, v) if layout == "bhnd" else (k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous())


def held(cache, sequence):
    """(keys, values) of a sequence of a paged cache, [length, Hkv, width]."""
    table, length = cache.block_table([sequence])[0].tolist(), cache.length(sequence)
    pools = (x if cache.layout == "bhnd" else x.transpose(1, 2) for x in (cache.k, cache.v))
    return tuple(torch.cat([x[page] for page in table], dim=1)[:, :length].transpose(0, 1) for x in pools)


@pytest.mark.interpreter
@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
def test_dense_cache_grows_and_decodes(target, layout):
    cache = KVCache(
        3, HEADS, 20, WIDTH, value_dim=VALUE_WIDTH, dtype=torch.float16, device=target.device, layout=layout
    )
    seen = [[], [], []]
    for count, lens in ((7, [7, 0, 3]), (1, None), (12, [12, 2, 5])):
        k, v = new_tokens(3, count, layout, target.device, torch.float16)
        cache.append(k, v, new_lens=lens, backend=target.backend)
        for b, new in enumerate(lens or [count] * 3):
            pair = (k, v) if layout == "bhnd" else (k.transpose(1, 2), v.transpose(1, 2))
            seen[b].append([x[b, :, :new] for x in pair])
        assert cache.kv_lens.tolist() == cache.lengths
    assert cache.lengths == [20, 3, 9]
    q = torch.randn(3, 4, 1, WIDTH, device=target.device, dtype=torch.float16)
    queries = q if layout == "bhnd" else q.transpose(1, 2)
    got = flash_decode(queries, cache.k, cache.v, layout=layout, kv_lens=cache.kv_lens, backend=target.backend)
    got = got if layout == "bhnd" else got.transpose(1, 2)
    for b, parts in enumerate(seen):
        k, v = (torch.cat([part[i] for part in parts], dim=1)[None] for i in range(2))
        assert max_error(got[b : b + 1], reference(q[b : b + 1], k, v)) < LOOSE[torch.float16]


@pytest.mark.interpreter
@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
def test_forks_of_a_paged_cache_decode(target, layout):
    """Two sequences that share a prompt and go on differently see their own keys."""
    cache = PagedKVCache(
        8, 4, HEADS, WIDTH, value_dim=VALUE_WIDTH, dtype=torch.float16, device=target.device, layout=layout
    )
    prompt = cache.allocate()
    cache.append([prompt], *new_tokens(1, 10, layout, target.device, torch.float16), backend=target.backend)
    both = [prompt, cache.fork(prompt)]
    cache.append(both, *new_tokens(2, 3, layout, target.device, torch.float16), new_lens=[3, 1], backend=target.backend)
    q = torch.randn(2, 4, 1, WIDTH, device=target.device, dtype=torch.float16)
    got = flash_decode(
        q if layout == "bhnd" else q.transpose(1, 2), cache.k, cache.v, layout=layout, kv_lens=cache.kv_lens(both),
        block_table=cache.block_table(both), backend=target.backend,
    )  # fmt: skip
    for b, sequence in enumerate(both):
        k, v = (x.transpose(0, 1)[None] for x in held(cache, sequence))
        want = reference(q[b : b + 1], k, v)
        assert max_error((got if layout == "bhnd" else got.transpose(1, 2))[b : b + 1], want) < LOOSE[torch.float16]


# Scales per token and group, which the caches make; per head, channel and tensor, which are given.
QUANTISED = [
    ("int8", None, None),
    ("int4:group32+zero/int4:group32", None, None),
    ("fp8_e4m3:token/fp8_e5m2", None, None),
    ("int8:channel/none", torch.full((HEADS, 32), 0.03), None),
    ("fp8:head/int8:head", torch.tensor([0.01, 0.02]), torch.tensor([0.03, 0.04])),
]


def wide_tokens(batch, count, layout, device):
    k, v = (torch.randn(batch, HEADS, count, 32, device=device).half() for _ in "kv")
    return (k, v) if layout == "bhnd" else (k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous())


def on_device(x, device):
    return None if x is None else x.to(device)


@pytest.mark.interpreter
@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
@pytest.mark.parametrize(("kv_format", "k_scale", "v_scale"), QUANTISED)
def test_a_quantised_dense_cache_holds_the_codes_of_what_came(target, kv_format, k_scale, v_scale, layout):
    k_scale, v_scale = on_device(k_scale, target.device), on_device(v_scale, target.device)
    options = {"device": target.device, "layout": layout, "k_scale": k_scale, "v_scale": v_scale}
    cache = KVCache(2, HEADS, 9, 32, kv_format=kv_format, **options)
    assert cache.kv_format == KVFormat.parse(kv_format)
    k, v = wide_tokens(2, 9, layout, target.device)
    length = 2 if layout == "bhnd" else 1
    for start, stop in ((0, 4), (4, 5), (5, 9)):
        cache.append(*(x.narrow(length, start, stop - start) for x in (k, v)), backend=target.backend)
    v_scale = 1.0 if kv_format.endswith("fp8_e5m2") else v_scale  # which None means there
    wanted = quantize_kv(k, v, kv_format, layout=layout, k_scale=k_scale, v_scale=v_scale)
    for got, want in zip((cache.k, cache.v, cache.k_scale, cache.v_scale), wanted[:4], strict=True):
        assert got is None or torch.equal(got.view(torch.uint8), want.view(torch.uint8))


@pytest.mark.interpreter
@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
@pytest.mark.parametrize(("kv_format", "k_scale", "v_scale"), QUANTISED)
def test_forks_of_a_quantised_cache_share_codes_and_scales(target, kv_format, k_scale, v_scale, layout):
    options = {
        "device": target.device, "layout": layout, "kv_format": kv_format, "k_scale": on_device(k_scale, target.device),
        "v_scale": on_device(v_scale, target.device),
    }  # fmt: skip
    paged, dense = PagedKVCache(6, 4, HEADS, 32, **options), KVCache(2, HEADS, 12, 32, **options)
    prompt = wide_tokens(1, 6, layout, target.device)
    first = paged.allocate()
    paged.append(first, *prompt, backend=target.backend)
    both = [first, paged.fork(first)]
    after = wide_tokens(2, 3, layout, target.device)
    paged.append(both, *after, backend=target.backend)
    assert paged.free_pages == 1, "the first page is shared, the second was copied"
    dense.append(*(x.expand(2, -1, -1, -1) for x in prompt), backend=target.backend)
    dense.append(*after, backend=target.backend)
    table, length = paged.block_table(both), 2 if layout == "bhnd" else 1
    for pool, rows in ((paged.k, dense.k), (paged.v, dense.v), (paged.k_scale, dense.k_scale),
                       (paged.v_scale, dense.v_scale)):  # fmt: skip
        if pool is None or pool.ndim < 3:
            continue
        for b in range(2):
            held = torch.cat([pool.view(torch.uint8)[page] for page in table[b].tolist()], dim=length - 1)
            want = rows.view(torch.uint8)[b]
            assert torch.equal(held.narrow(length - 1, 0, 9), want.narrow(length - 1, 0, 9))
    for sequence in both:
        paged.free(sequence)
    assert paged.free_pages == 6


@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
@pytest.mark.parametrize(
    ("kv_format", "k_scale", "v_scale"),
    [("int8", None, None), ("fp8:head", torch.tensor([0.01, 0.02]), torch.tensor([0.03, 0.04])), (None, None, None)],
)
def test_decode_passes_on_what_the_cache_holds(target, kv_format, k_scale, v_scale, layout):
    k_scale, v_scale = on_device(k_scale, target.device), on_device(v_scale, target.device)
    options = {"layout": layout, "kv_format": kv_format, "k_scale": k_scale, "v_scale": v_scale}
    dense = KVCache(2, HEADS, 12, 32, device=target.device, **options)
    paged = PagedKVCache(6, 4, HEADS, 32, device=target.device, **options)
    sequences = [paged.allocate(), paged.allocate()]
    k, v = wide_tokens(2, 10, layout, target.device)
    dense.append(k, v, new_lens=[10, 7], backend=target.backend)
    paged.append(sequences, k, v, new_lens=[10, 7], backend=target.backend)
    q = torch.randn(2, 4, 1, 32, device=target.device).half()
    q = q if layout == "bhnd" else q.transpose(1, 2)
    out, lse = dense.decode(q, return_lse=True, softcap=5.0, backend=target.backend)
    again = paged.decode(sequences, q, softcap=5.0, backend=target.backend)
    want, want_lse = reference(
        q, dense.k, dense.v, layout=layout, kv_lens=dense.kv_lens, kv_format=dense.kv_format, k_scale=dense.k_scale,
        v_scale=dense.v_scale, softcap=5.0, return_lse=True,
    )  # fmt: skip
    assert max_error(out, want) < LOOSE[torch.float16]
    assert max_error(again, want) < LOOSE[torch.float16]
    assert max_error(lse, want_lse) < 1e-3


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"kv_format": "int8", "k_scale": torch.ones(1, HEADS, 4)}, ValueError, "k_scale must be None for scales per"),
        ({"kv_format": "int8:tensor"}, ValueError, "k_scale must be given for int8 codes with scales per tensor"),
        ({"kv_format": "fp8/fp8:head"}, ValueError, "v_scale must be given for fp8_e4m3 codes with scales per head"),
        ({"kv_format": "fp8", "k_scale": 0.0}, ValueError, "k_scale must be finite and not 0"),
        ({"kv_format": "int8:head", "k_scale": torch.ones(3)}, ValueError, r"k_scale must have shape \[2\] for scales"),
        ({"kv_format": "int4:group64"}, ValueError, "group must divide the width of k, 32, got 64"),
        ({"kv_format": "int3"}, ValueError, "kv_format must name a format"),
        ({"k_scale": 1.0}, ValueError, "k_scale must be None where k has no codes, got one"),
    ],
)
def test_formats_and_scales_that_do_not_fit_are_refused(options, kind, message):
    for make in (lambda **x: KVCache(1, HEADS, 4, 32, **x), lambda **x: PagedKVCache(1, 4, HEADS, 32, **x)):
        with pytest.raises(kind, match=message):
            make(**options)


def test_a_format_without_scales_takes_them_as_they_come():
    cache = KVCache(1, HEADS, 4, 32, kv_format="fp8", k_scale=torch.ones(HEADS, 32), v_scale=0.5)
    assert cache.kv_format == KVFormat.parse("fp8:channel/fp8:tensor")
    assert cache.v_scale.item() == 0.5


def test_a_full_dense_cache_refuses_and_keeps_what_it_has():
    cache = KVCache(2, HEADS, 8, WIDTH, value_dim=VALUE_WIDTH, dtype=torch.float32)
    cache.append(*new_tokens(2, 8), new_lens=[8, 2])
    before = cache.k.clone()
    with pytest.raises(CacheFullError, match="got 1 for sequence 0, which holds 8 of 8"):
        cache.append(*new_tokens(2, 1))
    assert torch.equal(cache.k.nan_to_num(), before.nan_to_num())
    assert cache.kv_lens.tolist() == cache.lengths == [8, 2]
    cache.free([0])
    k, v = new_tokens(2, 1)
    cache.append(k, v)
    assert cache.lengths == [1, 3]
    assert torch.equal(cache.k[:, :, 0][0], k[0, :, 0])
    assert torch.equal(cache.v[:, :, 2][1], v[1, :, 0])
    cache.free()
    assert cache.kv_lens.tolist() == [0, 0]


def test_options_of_append_kv_pass_through():
    cos, sin = torch.rand(8, 8), torch.rand(8, 8)
    k, v = new_tokens(2, 3)
    q = torch.randn(2, 4, 3, WIDTH)
    lens = torch.zeros(2, dtype=torch.int32)
    want_k, want_v = torch.zeros(2, HEADS, 8, WIDTH), torch.zeros(2, HEADS, 8, VALUE_WIDTH)
    options = {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": True, "q": q}
    want_q = append_kv(k, v, want_k, want_v, lens, **options)
    dense = KVCache(2, HEADS, 8, WIDTH, value_dim=VALUE_WIDTH, dtype=torch.float32)
    assert torch.equal(dense.append(k, v, **options), want_q)
    assert torch.equal(dense.k[:, :, :3], want_k[:, :, :3])
    paged = PagedKVCache(4, 4, HEADS, WIDTH, value_dim=VALUE_WIDTH, dtype=torch.float32)
    sequences = [paged.allocate(), paged.allocate()]
    assert torch.equal(paged.append(sequences, k, v, **options), want_q)
    assert torch.equal(held(paged, sequences[1])[0], want_k[1, :, :3].transpose(0, 1))


def test_a_fork_copies_only_the_page_that_it_writes_to():
    cache = PagedKVCache(8, 4, HEADS, WIDTH, value_dim=VALUE_WIDTH, dtype=torch.float32)
    prompt = cache.allocate()
    cache.append([prompt], *new_tokens(1, 10))
    assert cache.free_pages == 5
    forks = [cache.fork(prompt), cache.fork(prompt)]
    assert cache.free_pages == 5, "forking takes no page"
    before = [x.clone() for x in held(cache, prompt)]
    new = new_tokens(2, 1)
    cache.append(forks, *new)
    assert cache.free_pages == 3, "each fork has its own last page"
    tables = cache.block_table([prompt, *forks])
    assert torch.equal(tables[:, :2], tables[:1, :2].expand(3, 2)), "full pages are shared"
    assert len(set(tables[:, 2].tolist())) == 3
    for i, x in enumerate(held(cache, prompt)):
        assert torch.equal(x, before[i])
    for b, fork in enumerate(forks):
        for i, x in enumerate(held(cache, fork)):
            assert torch.equal(x[:10], before[i])
            assert torch.equal(x[10], new[i][b, :, 0])
    cache.append([prompt], *new_tokens(1, 1))
    assert cache.free_pages == 3, "the last one to write keeps the page"
    for sequence in [prompt, *forks]:
        cache.free(sequence)
    assert cache.free_pages == 8


def test_a_fork_on_a_page_boundary_copies_nothing():
    cache = PagedKVCache(4, 4, HEADS, WIDTH, value_dim=VALUE_WIDTH, dtype=torch.float32)
    prompt = cache.allocate()
    cache.append([prompt], *new_tokens(1, 11))
    fork = cache.fork(prompt, 8)
    cache.append([fork], *new_tokens(1, 1))
    assert cache.free_pages == 0
    assert cache.block_table([prompt, fork])[:, :2].unique(dim=0).shape[0] == 1
    cache.append([prompt], *new_tokens(1, 1))
    assert cache.length(prompt) == 12


def test_a_full_pool_refuses_and_changes_nothing():
    cache = PagedKVCache(3, 4, HEADS, WIDTH, value_dim=VALUE_WIDTH, dtype=torch.float32)
    a, b = cache.allocate(), cache.allocate()
    cache.append([a, b], *new_tokens(2, 4))
    child = cache.fork(a, 3)
    keys = cache.k.clone()
    # One page for b's growth, one for the copy of the page that the fork shares.
    with pytest.raises(CacheFullError, match="must have 2 free pages for the new keys, got 1"):
        cache.append([b, child], *new_tokens(2, 1))
    assert torch.equal(keys.nan_to_num(), cache.k.nan_to_num())
    assert [cache.length(x) for x in (a, b, child)] == [4, 4, 3]
    assert cache.free_pages == 1
    cache.free(a)
    cache.append([b, child], *new_tokens(2, 1))  # the fork owns the page now
    assert cache.free_pages == 0


def test_unknown_and_repeated_sequences_are_refused():
    cache = PagedKVCache(3, 4, HEADS, WIDTH)
    a = cache.allocate()
    cache.free(a)
    b = cache.allocate()
    for call in (cache.free, cache.fork, cache.length, lambda x: cache.block_table([x]), lambda x: cache.kv_lens([x])):
        with pytest.raises(ValueError, match=f"must be allocated and not freed, got {a}"):
            call(a)
    with pytest.raises(ValueError, match="must differ from each other"):
        cache.append([b, b], *new_tokens(2, 1))
    with pytest.raises(ValueError, match="length must lie from 0 to 0"):
        cache.fork(b, 1)
    with pytest.raises(ValueError, match="page_size must be at least 1"):
        PagedKVCache(3, 0, HEADS, WIDTH)
    with pytest.raises(ValueError, match="layout must be one of"):
        KVCache(1, HEADS, 4, WIDTH, layout="nhd")
    for wrong in (2.0, "x", True):
        with pytest.raises(TypeError, match=f"length must be an int or None, got {type(wrong).__name__}"):
            cache.fork(b, wrong)
    assert "1 sequence of 0" in repr(cache)
    for dtype in (torch.float64, torch.int8, torch.float8_e4m3fn):
        with pytest.raises(TypeError, match="dtype must be float16, bfloat16 or float32, got"):
            KVCache(1, HEADS, 4, WIDTH, dtype=dtype)
    with pytest.raises(ValueError, match="head_dim must be a multiple of 8 from 16 to 576, got 20"):
        PagedKVCache(3, 4, HEADS, 20)
    with pytest.raises(ValueError, match="max_len must be at least 0, got -1"):
        KVCache(1, HEADS, -1, WIDTH)
    with pytest.raises(TypeError, match="pages must be an int, got float"):
        PagedKVCache(3.0, 4, HEADS, WIDTH)
    with pytest.raises(TypeError, match="new_lens must be a list of ints or None, got a list of float"):
        cache.append([b], *new_tokens(1, 2), new_lens=[1.5])
    with pytest.raises(TypeError, match="sequences must be ints"):
        cache.free(True)
    with pytest.raises(ValueError, match="heads_kv must be at least 1, got 0"):
        KVCache(1, 0, 4, WIDTH)
    with pytest.raises(ValueError, match="q must have one row per sequence, 1, got 2"):
        cache.decode([b], torch.randn(2, 2 * HEADS, 1, WIDTH))
    with pytest.raises(ValueError, match="one row per sequence, 1, got"):
        cache.append([b], *new_tokens(2, 1))
    with pytest.raises(ValueError, match="new_lens must hold 1 numbers from 0 to 2"):
        cache.append([b], *new_tokens(1, 2), new_lens=[3])


def test_one_sequence_may_stand_for_a_list_of_itself():
    paged = PagedKVCache(3, 4, HEADS, WIDTH, value_dim=VALUE_WIDTH, dtype=torch.float32)
    a = paged.allocate()
    k, v = new_tokens(1, 5)
    paged.append(a, k, v)
    assert torch.equal(paged.block_table(a), paged.block_table([a]))
    assert paged.kv_lens(a).tolist() == [5]
    assert torch.equal(held(paged, a)[0], k[0].transpose(0, 1))
    dense = KVCache(2, HEADS, 8, WIDTH, value_dim=VALUE_WIDTH, dtype=torch.float32)
    dense.append(*new_tokens(2, 3))
    dense.free(1)
    assert dense.lengths == dense.kv_lens.tolist() == [3, 0]


def test_what_is_no_sequence_is_refused_by_name():
    paged = PagedKVCache(3, 4, HEADS, WIDTH, value_dim=VALUE_WIDTH, dtype=torch.float32)
    a = paged.allocate()
    for call in (lambda x: paged.append(x, *new_tokens(1, 1)), paged.block_table, paged.kv_lens):
        with pytest.raises(TypeError, match="sequences must be an int or a list of ints, got float"):
            call(1.5)
        with pytest.raises(TypeError, match=r"sequences must be ints that allocate.. gave, got list"):
            call([[a]])
    for call in (paged.free, paged.fork, paged.length):
        with pytest.raises(TypeError, match=r"sequences must be ints that allocate.. gave, got list"):
            call([a])
    with pytest.raises(TypeError, match="new_lens must be a list of ints or None, got int"):
        paged.append(a, *new_tokens(1, 2), new_lens=2)
    with pytest.raises(TypeError, match=r"k_new must be a torch\.Tensor, got list"):
        paged.append(a, [1.0], new_tokens(1, 2)[1])
    assert paged.free_pages == 3


def test_lengths_are_plain_ints_whatever_they_came_as():
    """Else those of 8 bits would be added up in 8 bits."""
    cache = KVCache(1, HEADS, 300, WIDTH, value_dim=VALUE_WIDTH)
    for new_lens in (np.array([200], dtype=np.uint8), torch.tensor([50])):
        cache.append(*new_tokens(1, 200, dtype=torch.float16), new_lens=new_lens)
    assert cache.lengths == [250]
    assert type(cache.lengths[0]) is int
    with pytest.raises(CacheFullError):
        cache.append(*new_tokens(1, 200, dtype=torch.float16), new_lens=np.array([100], dtype=np.uint8))


def test_a_refused_free_empties_nothing():
    dense = KVCache(2, HEADS, 8, WIDTH, value_dim=VALUE_WIDTH, dtype=torch.float32)
    dense.append(*new_tokens(2, 3))
    for wrong in ([0, 2], [0, -1], [0, "1"], 2):
        with pytest.raises(ValueError, match="sequences must be ints from 0 to 1"):
            dense.free(wrong)
    with pytest.raises(TypeError, match="sequences must be an int or a list of ints, got float"):
        dense.free(0.5)
    assert dense.lengths == dense.kv_lens.tolist() == [3, 3]


class Model:
    """A paged cache beside plain lists that hold what each sequence must hold."""

    def __init__(self, layout, page_size):
        self.cache = PagedKVCache(
            24, page_size, HEADS, WIDTH, value_dim=VALUE_WIDTH, dtype=torch.float32, layout=layout
        )  # fmt: skip
        self.lists = {}

    def allocate(self):
        self.lists[self.cache.allocate()] = []

    def fork(self, sequence, share):
        length = round(share * len(self.lists[sequence]))
        self.lists[self.cache.fork(sequence, length)] = self.lists[sequence][:length]

    def free(self, sequence):
        self.cache.free(sequence)
        del self.lists[sequence]

    def append(self, sequences, lens):
        new = max(lens)
        k, v = new_tokens(len(sequences), new, self.cache.layout)
        free = self.cache.free_pages
        try:
            self.cache.append(sequences, k, v, new_lens=lens)
        except CacheFullError:
            assert self.cache.free_pages == free
            return
        if self.cache.layout == "bnhd":
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        for b, (sequence, count) in enumerate(zip(sequences, lens, strict=True)):
            self.lists[sequence] += [(k[b, :, i], v[b, :, i]) for i in range(count)]

    def check(self):
        used = set()
        for sequence, rows in self.lists.items():
            assert self.cache.length(sequence) == len(rows)
            used |= set(self.cache.block_table([sequence])[0, : -(-len(rows) // self.cache.page_size)].tolist())
            for got, want in zip(held(self.cache, sequence), zip(*rows, strict=True) if rows else (), strict=False):
                assert torch.equal(got, torch.stack(want))
        assert self.cache.free_pages == 24 - len(used), "every page is free or in use"


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from(["bhnd", "bnhd"]), st.sampled_from([1, 3, 4]))
def test_any_sequence_of_steps(data, layout, page_size):
    model = Model(layout, page_size)
    for _ in range(data.draw(st.integers(1, 12), label="steps")):
        known = sorted(model.lists)
        step = data.draw(st.sampled_from(["allocate", "fork", "append", "append", "free"] if known else ["allocate"]))
        if step == "allocate":
            model.allocate()
        elif step == "fork":
            model.fork(data.draw(st.sampled_from(known)), data.draw(st.floats(0, 1)))
        elif step == "free":
            model.free(data.draw(st.sampled_from(known)))
        else:
            chosen = data.draw(st.lists(st.sampled_from(known), min_size=1, max_size=4, unique=True))
            model.append(chosen, [data.draw(st.integers(0, 9)) for _ in chosen])
        model.check()


def test_a_refused_append_leaves_the_pages_as_they_were():
    cache = PagedKVCache(6, 4, HEADS, WIDTH, value_dim=VALUE_WIDTH, dtype=torch.float32)
    a, b = cache.allocate(), cache.allocate()
    cache.append([a, b], *new_tokens(2, 2))
    free, before = cache.free_pages, held(cache, a)
    k, v = new_tokens(1, 16)
    with pytest.raises(TypeError):
        cache.append([a], k, v.half())
    assert cache.free_pages == free
    assert all(torch.equal(x, y) for x, y in zip(held(cache, a), before, strict=True))
    cache.append([a, b], *new_tokens(2, 8))
    assert (cache.length(a), cache.length(b)) == (10, 10)


@pytest.mark.parametrize(
    ("kv_format", "side", "k_width", "v_width", "scale"),
    [(None, "float16", 32, 48, 0), ("int8", "int8:token", 16, 24, 8), ("int4:group32", "int4:group32", 32, 32, 8)],
)
def test_caches_tell_their_bytes_and_what_they_hold(kv_format, side, k_width, v_width, scale):
    """On the device "meta", which has no memory to look at."""
    widths = {"float16": (16, 24), "int8:token": (16, 24), "int4:group32": (64, 64)}[side]
    options = {"value_dim": widths[1], "kv_format": kv_format, "device": "meta"}
    dense = KVCache(3, 2, 10, widths[0], **options)
    dense.lengths = [4, 0, 10]
    row = k_width + v_width + scale
    assert dense.nbytes == 3 * 2 * 10 * row
    k, v = (f"[3, 2, 10, {width}] {side}" for width in widths)
    what = f"k and v {k}" if k == v else f"k {k}, v {v}"
    assert repr(dense) == f"<KVCache: {what}, bhnd, lengths 0 to 10 of 10, meta, {60 * row / 1e6:.3g} MB>"
    pages = PagedKVCache(7, 4, 2, widths[0], layout="bnhd", **options)
    assert pages.nbytes == 7 * 4 * 2 * row
    pages.allocate()
    assert f"[7, 4, 2, {widths[1]}] {side}, bnhd, 1 sequence of 0, 0 of 7 pages used, meta" in repr(pages)
    pages = PagedKVCache(7, 4, HEADS, WIDTH, value_dim=VALUE_WIDTH)
    pages.append([pages.allocate(), pages.allocate()], *new_tokens(2, 5, dtype=torch.float16), new_lens=[5, 3])
    assert "2 sequences of 3 to 5, 3 of 7 pages used, cpu" in repr(pages)


def test_what_a_cache_sets_itself_is_refused_by_name():
    k, v = new_tokens(1, 1)
    q = torch.zeros(1, 2, 1, WIDTH)
    dense = KVCache(1, HEADS, 4, WIDTH, value_dim=VALUE_WIDTH, dtype=torch.float32)
    pages = PagedKVCache(2, 4, HEADS, WIDTH, value_dim=VALUE_WIDTH, dtype=torch.float32)
    a = pages.allocate()
    codes = {"layout": "bhnd", "kv_format": None, "k_scale": 1.0, "v_scale": torch.ones(2), "kv_lens": None,
             "block_table": [[0]]}  # fmt: skip
    for cache, first in ((dense, ()), (pages, (a,))):
        for name, x in codes.items():
            got = None if x is None else type(x).__name__
            message = f"^{name} must not be given, the cache sets it itself, got {got}$"
            with pytest.raises(TypeError, match=message):
                cache.append(*first, k, v, **{name: x})
            with pytest.raises(TypeError, match=message):
                cache.decode(*first, q, **{name: x})
        with pytest.raises(TypeError, match=r"^k_cache must not be given"):
            cache.append(*first, k, v, k_cache=k)
        with pytest.raises(TypeError, match=r"^v must not be given"):
            cache.decode(*first, q, v=v)
    assert (dense.lengths, pages.length(a), pages.free_pages) == ([0], 0, 2)


@pytest.mark.interpreter
def test_another_default_device_changes_nothing(target):
    """torch.set_default_device() is about the caller's tensors, not about ours (pinning once met one on a GPU)."""
    make = dict(dtype=torch.float16, device=target.device)
    q, new = (torch.randn(2, *shape, 16, **make) for shape in ((4, 1), (2, 3)))
    with torch.device("meta"):
        dense, codes = (KVCache(2, 2, 8, 16, kv_format=form, **make) for form in (None, "int8"))
        paged = PagedKVCache(6, 4, 2, 16, **make)
        sequences, outs = [paged.allocate() for _ in range(2)], []
        for cache, *at in ((dense,), (codes,), (paged, sequences)):
            cache.append(*at, new, new, backend=target.backend)
            cache.append(*at, new, new, new_lens=[1, 2], backend=target.backend)
            outs.append(cache.decode(*at, q, backend=target.backend))
    torch.testing.assert_close(outs[0], outs[2])
    torch.testing.assert_close(outs[0], outs[1], atol=0.05, rtol=0.0)
