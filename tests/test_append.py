"""append_kv() on every backend against plain indexing and a rotation of the test's own."""

import pytest
import torch
from conftest import INTERPRETED, NO_GPU
from helpers import DTYPES, LOOSE, describe, max_error

from flash_decoding import (
    CodeFormat,
    KVFormat,
    append_kv,
    backends,
    dequantize_kv,
    flash_decode,
    quantize_kv,
    reference,
)
from flash_decoding.append import Append, Codes
from flash_decoding.quantization import LARGEST_CODE, unpack_int4

NAN = float("nan")


def rotate(x, cos, sin, interleaved):
    """x [..., D] turned by cos and sin [..., pairs], in float64, through complex numbers."""
    half = cos.shape[-1]
    turned, rest = x[..., : 2 * half].double(), x[..., 2 * half :].double()
    pairs = turned.unflatten(-1, (half, 2)) if interleaved else turned.unflatten(-1, (2, half)).transpose(-1, -2)
    z = torch.view_as_complex(pairs.contiguous()) * torch.complex(cos.double(), sin.double())
    y = torch.view_as_real(z)
    y = y.flatten(-2) if interleaved else y.transpose(-1, -2).flatten(-2)
    return torch.cat((y, rest), -1)


def make_tables(positions, rotary_dim, dtype, device):
    angles = torch.arange(positions)[:, None] * 10000.0 ** -(torch.arange(0, rotary_dim, 2) / rotary_dim)
    return [x.to(dtype).to(device) for x in (angles.cos(), angles.sin())]


class Case:
    """New tokens, a cache full of NaN, and what it must hold after."""

    def __init__(self, target, dtype, *, layout="bhnd", page_size=None, head_dim=24, value_dim=40, lens=(0, 5, 17),
                 new=4, new_lens=None, heads_kv=3, capacity=21, index=torch.int32):  # fmt: skip
        device, batch = target.device, len(lens)
        self.target, self.layout, self.capacity, self.page_size = target, layout, capacity, page_size
        # Drawn on the CPU, so that every device has the same numbers.
        self.k_new = torch.randn(batch, heads_kv, new, head_dim).to(device, dtype)
        self.v_new = torch.randn(batch, heads_kv, new, value_dim).to(device, dtype)
        self.lens = torch.tensor(lens, dtype=index, device=device)
        self.new_lens = None if new_lens is None else torch.tensor(new_lens, dtype=index, device=device)
        self.table, first, length = None, batch, capacity
        if page_size is not None:
            columns = capacity // page_size
            first, length = batch * columns + 3, page_size
            table = torch.randperm(first)[: batch * columns].view(batch, columns).to(torch.int32)
            ends = torch.tensor(lens) + (new if new_lens is None else torch.tensor(new_lens))
            starts = torch.arange(columns) * page_size
            unused = (starts >= ends[:, None]) | (starts + page_size <= torch.tensor(lens)[:, None])
            self.table = table.masked_fill(unused, -7).to(device)
        self.k_cache, self.v_cache = (
            torch.full((first, heads_kv, length, width), NAN, dtype=dtype, device=device)
            for width in (head_dim, value_dim)
        )

    def flip(self, x):
        return x if self.layout == "bhnd" or x is None else x.transpose(1, 2).contiguous()

    def run(self, **options):
        """The caches after append_kv(), [first, Hkv, length, width], and what it returned."""
        k_cache, v_cache = self.flip(self.k_cache.clone()), self.flip(self.v_cache.clone())
        q = options.pop("q", None)
        rotated = append_kv(
            self.flip(self.k_new), self.flip(self.v_new), k_cache, v_cache, self.lens, layout=self.layout,
            block_table=self.table, new_lens=self.new_lens, q=self.flip(q), backend=self.target.backend, **options,
        )  # fmt: skip
        return self.flip(k_cache), self.flip(v_cache), self.flip(rotated)

    def expected(self, cos=None, sin=None, interleaved=False):
        k_cache, v_cache = self.k_cache.double(), self.v_cache.double()
        for b, i in torch.cartesian_prod(torch.arange(len(self.lens)), torch.arange(self.k_new.shape[2])).tolist():
            n = int(self.lens[b]) + i
            if self.new_lens is not None and i >= int(self.new_lens[b]):
                continue
            first, slot = (b, n) if self.page_size is None else (int(self.table[b, n // self.page_size]),
                                                                 n % self.page_size)  # fmt: skip
            k = self.k_new[b, :, i]
            k_cache[first, :, slot] = k.double() if cos is None else rotate(k, cos[n], sin[n], interleaved)
            v_cache[first, :, slot] = self.v_new[b, :, i].double()
        return k_cache, v_cache


def assert_same(got, want, bound=0.0):
    """Equal within bound where something is expected; NaN, and nothing else, where nothing is."""
    assert torch.equal(got.isnan(), want.isnan()), "only the slots of the new tokens are written"
    assert max_error(got.nan_to_num(nan=0.0), want.nan_to_num(nan=0.0)) <= bound


CACHES = [{}, {"page_size": 1}, {"page_size": 7}]
# One last place of the largest entries, which are below 8.
ROUNDING = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3.2e-2}


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", DTYPES, ids=describe)
@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
@pytest.mark.parametrize("cache", CACHES, ids=describe)
def test_new_tokens_land_where_they_belong_and_nowhere_else(target, cache, layout, dtype):
    case = Case(target, dtype, layout=layout, **cache)
    k_cache, v_cache, rotated = case.run()
    want_k, want_v = case.expected()
    assert_same(k_cache, want_k)
    assert_same(v_cache, want_v)
    assert rotated is None


@pytest.mark.interpreter
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=describe)
@pytest.mark.parametrize("cache", CACHES, ids=describe)
def test_ragged_new_tokens(target, cache, index):
    case = Case(target, torch.float16, lens=(20, 0, 14, 21), new=7, new_lens=(1, 0, 7, 0), index=index, **cache)
    for got, want in zip(case.run()[:2], case.expected(), strict=True):
        assert_same(got, want)


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", DTYPES, ids=describe)
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
# All of the head, a part that is a whole number of vectors or not, one pair.
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(16, 16), (64, 32), (72, 72), (40, 24), (24, 2)])
@pytest.mark.parametrize("cache", [{}, {"page_size": 7}], ids=describe)
def test_keys_and_queries_are_rotated(target, cache, head_dim, rotary_dim, interleaved, dtype):
    case = Case(target, dtype, head_dim=head_dim, layout="bnhd", **cache)
    q = torch.randn(3, 6, 4, head_dim, device=target.device).to(dtype)
    for table_dtype in {dtype, torch.float32}:
        cos, sin = make_tables(case.capacity, rotary_dim, table_dtype, target.device)
        options = {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": interleaved}
        want_k, want_v = case.expected(cos, sin, interleaved)
        for q_advances in (True, False):
            k_cache, v_cache, rotated = case.run(q=q, q_advances=q_advances, **options)
            assert_same(k_cache, want_k, ROUNDING[dtype])
            assert_same(v_cache, want_v)
            n = case.lens.long()[:, None] + (torch.arange(4, device=target.device) if q_advances else 0)
            n = n.expand(3, 4)
            want_q = rotate(q, cos[n][:, None], sin[n][:, None], interleaved)
            assert rotated.dtype == dtype
            assert max_error(rotated, want_q) <= ROUNDING[dtype]
            # Entries that are not turned keep their bits.
            assert torch.equal(rotated[..., rotary_dim:], q[..., rotary_dim:])


@pytest.mark.interpreter
def test_more_queries_than_keys_and_other_strides(target):
    """q may have tokens that are not appended; arrays may be slices of larger ones."""
    case = Case(target, torch.float32, new=1, lens=(3, 20), heads_kv=2)
    wide = torch.randn(2, 5, 9, 50, device=target.device)
    q = wide[:, :4, 2:7, 8:32]
    cos, sin = make_tables(case.capacity + 4, 24, torch.float32, target.device)
    big_k, big_v = (torch.full((2, 4, 30, 60), NAN, device=target.device) for _ in "kv")
    k_cache, v_cache = big_k[:, 1:3, 4:25, 8:32], big_v[:, 2:, 9:, 20:]
    rotated = append_kv(
        case.k_new, case.v_new, k_cache, v_cache, case.lens, rotary_cos=cos, rotary_sin=sin, q=q,
        backend=target.backend,
    )  # fmt: skip
    want_k, want_v = case.expected(cos, sin)
    assert_same(k_cache, want_k, ROUNDING[torch.float32])
    assert_same(v_cache, want_v)
    assert int((~big_k.isnan()).sum()) == 2 * 2 * 24
    assert int((~big_v.isnan()).sum()) == 2 * 2 * 40
    n = case.lens.long()[:, None] + torch.arange(5, device=target.device)
    assert max_error(rotated, rotate(q, cos[n][:, None], sin[n][:, None], False)) <= ROUNDING[torch.float32]


@pytest.mark.interpreter
@pytest.mark.parametrize("page_size", [None, 4])
def test_the_kernels_themselves_stay_in_bounds(target, page_size):
    """What a GPU cannot check before the launch: lengths and pages that are garbage write nothing."""
    name = backends.resolve(target.backend, torch.device(target.device))
    lens = torch.tensor([7, 100, -1, -(2**62), 2**62, 8], device=target.device)
    length = 8 if page_size is None else page_size
    pages = 6 if page_size is None else 3
    room = torch.full((pages + 2, 2, length, 16), NAN, device=target.device)
    cache = room[1:-1]
    table = None
    if page_size is not None:
        table = torch.tensor([[-1, 1]] + [[0, 2]] * 4 + [[2**31 - 1, 3]], dtype=torch.int32, device=target.device)
    new = torch.randn(6, 2, 3, 16, device=target.device)
    other = torch.full_like(room, NAN)[1:-1]
    append = Append(
        new, new, cache, other, lens, table, None, None, None, False, None, None, 1,
        8, page_size,
    )  # fmt: skip
    backends.load(f"{name}.append").append(append)
    first, slot = (0, 7) if page_size is None else (1, 3)
    assert torch.equal(cache[first, :, slot], new[0, :, 0])
    assert torch.equal(other[first, :, slot], new[0, :, 0])
    assert int((~room.isnan()).sum()) == 2 * 16

    if page_size is not None:
        bad = torch.tensor([[-1, -1], [3, 3], [2**31 - 1, -(2**31)]] * 2, dtype=torch.int32, device=target.device)
        append = append._replace(block_table=bad, kv_lens=torch.zeros_like(lens))
        room.fill_(NAN)
        backends.load(f"{name}.append").append(append)
        assert bool(room.isnan().all())


@pytest.mark.interpreter
def test_queries_past_the_tables_take_their_last_row(target):
    case = Case(target, torch.float32, lens=(19, 20), new=1)
    cos, sin = make_tables(case.capacity, 24, torch.float32, target.device)
    q = torch.randn(2, 3, 4, 24, device=target.device)
    rotated = case.run(q=q, rotary_cos=cos, rotary_sin=sin)[2]
    n = (case.lens.long()[:, None] + torch.arange(4, device=target.device)).clamp(max=case.capacity - 1)
    assert max_error(rotated, rotate(q, cos[n][:, None], sin[n][:, None], False)) <= ROUNDING[torch.float32]


def test_wide_heads_and_many_tokens(target):
    """Shared out to several threads: a prompt of 1000 tokens, MLA's widths."""
    case = Case(target, torch.bfloat16, head_dim=576, value_dim=512, new=1000, lens=(3, 90), capacity=1100)
    cos, sin = make_tables(1100, 64, torch.float32, target.device)
    k_cache, v_cache, _ = case.run(rotary_cos=cos, rotary_sin=sin)
    want_k, want_v = case.expected(cos, sin)
    assert_same(k_cache, want_k, ROUNDING[torch.bfloat16])
    assert_same(v_cache, want_v)


@pytest.mark.interpreter
@pytest.mark.parametrize("shape", [(0, 2, 3, 16), (2, 2, 0, 16)], ids=["no-sequence", "no-token"])
def test_nothing_to_append(target, shape):
    new = torch.zeros(shape, device=target.device)
    cache = torch.full((shape[0], 2, 8, 16), NAN, device=target.device)
    lens = torch.zeros(shape[0], dtype=torch.int32, device=target.device)
    append_kv(new, new, cache, cache.clone(), lens, backend=target.backend)
    assert bool(cache.isnan().all())


def test_append_then_decode(target):
    """Token by token through a paged cache: each step sees what the steps before have written."""
    batch, heads_kv, page_size, columns = 2, 2, 16, 4
    k, v = (torch.randn(batch, heads_kv, 50, 32, device=target.device, dtype=torch.float16) for _ in "kv")
    pools = [torch.full((9, heads_kv, page_size, 32), NAN, device=target.device, dtype=torch.float16) for _ in "kv"]
    table = torch.randperm(8).view(batch, columns).to(torch.int32).to(target.device)
    lens = torch.zeros(batch, dtype=torch.int32, device=target.device)
    options = {"backend": target.backend, "block_table": table}
    for start, stop in ((0, 30), (30, 31), (31, 36), (36, 50)):
        append_kv(k[:, :, start:stop], v[:, :, start:stop], *pools, lens, **options)
        lens += stop - start
        q = torch.randn(batch, 4, 1, 32, device=target.device, dtype=torch.float16)
        got = flash_decode(q, *pools, kv_lens=lens, **options)
        want = reference(q, k[:, :, :stop], v[:, :, :stop])
        assert max_error(got, want) < LOOSE[torch.float16]


# Quantised caches.

# K per 96 elements, whose quarters are no whole groups, V per 64; 8-bit codes of other widths below.
FORMATS = [
    "fp8_e4m3:tensor/fp8_e5m2:head", "fp8_e4m3:channel/int8:tensor", "fp8_e5m2:token/fp8_e4m3:token",
    "int8:token/int8:head", "int8:channel/none", "int4:group32/int4:group64", "int4:group32+zero/int4:group64+zero",
    "none/int4:group32",
]  # fmt: skip
UNTOUCHED = 0xAB


def make_wanted(k, v, kv_format, given=(None, None)):
    """quantize_kv() of rows [first, Hkv, length, width], NaN where nothing belongs, with scales for most of it."""
    kv_format, rows = KVFormat.parse(kv_format), [x.nan_to_num(nan=0.0) for x in (k, v)]
    scales = list(given)
    for i, (form, scale) in enumerate(zip((kv_format.k, kv_format.v), quantize_kv(*rows, kv_format)[2:4], strict=True)):
        if form is not None and form.scale not in ("token", "group") and scales[i] is None:
            scales[i] = scale * 0.7  # so that the largest saturate
    return quantize_kv(*rows, kv_format, k_scale=scales[0], v_scale=scales[1], check=False)


def append_codes(case, wanted, given=(None, None), **options):
    """(codes, scales) of K and of V that append_kv() writes to caches full of one byte; [first, Hkv, length, ...]."""
    caches, scales = [], []
    for x, scale, number, plain in zip(
        wanted[:2], wanted[2:4], given, (case.k_cache, case.v_cache), strict=True
    ):  # fmt: skip
        is_made = scale is not None and scale.ndim > 2
        caches.append(case.flip(plain if scale is None and x.dtype == plain.dtype else filled_like(x)))
        scales.append(case.flip(filled_like(scale)) if is_made else scale if number is None else number)
    append_kv(
        case.flip(case.k_new), case.flip(case.v_new), *caches, case.lens, layout=case.layout, block_table=case.table,
        new_lens=case.new_lens, kv_format=wanted.kv_format, k_scale=scales[0], v_scale=scales[1],
        backend=case.target.backend, **options,
    )  # fmt: skip
    made = [None if x is None or not hasattr(x, "ndim") or x.ndim < 3 else case.flip(x) for x in scales]
    return [(case.flip(codes), scale) for codes, scale in zip(caches, made, strict=True)]


def filled_like(x):
    return torch.full(x.shape, UNTOUCHED, dtype=torch.uint8, device=x.device).view(x.dtype) if x.itemsize == 1 else (
        torch.full_like(x, NAN)
    )  # fmt: skip


def steps(codes, form):
    """Codes as whole numbers in the order of what they mean, where neighbours differ by 1; none for a plain side."""
    if form.codes == "int4":
        return unpack_int4(codes).long()
    if form.codes == "int8":
        return codes.long()
    bits = codes.view(torch.uint8).long()
    return torch.where(bits < 128, bits, 128 - bits)


def assert_codes(got, wanted, written, most=0):
    """Codes within `most` steps of those wanted, scales likewise equal, where rows were written; no byte elsewhere."""
    forms = wanted.kv_format.k, wanted.kv_format.v
    for (codes, made), want, scale, form in zip(got, wanted[:2], wanted[2:4], forms, strict=True):
        if form is None:
            assert torch.equal(codes[written], want[written])
            assert bool(codes[~written].isnan().all())
            continue
        assert int((steps(codes, form) - steps(want, form))[written].abs().max()) <= most
        assert bool((codes.view(torch.uint8)[~written] == UNTOUCHED).all()), "only the slots of new tokens are written"
        if made is not None:
            error = (made.double() - scale.double())[written].abs()
            assert bool((error <= most * scale.double()[written].abs() * 2.0**-8).all())
            assert bool(made[~written].isnan().all())


def rows_without_codes(case, **options):
    """What append_kv() writes to a cache that is not quantised, and where."""
    k, v, _ = case.run(**options)
    return k, v, ~v.isnan().any(-1)


@pytest.mark.interpreter
@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
@pytest.mark.parametrize("cache", [{}, {"page_size": 7}], ids=describe)
@pytest.mark.parametrize("kv_format", FORMATS)
def test_codes_are_those_of_quantize_kv(target, kv_format, cache, layout):
    sizes = {"head_dim": 96, "value_dim": 64, "heads_kv": 2, "new_lens": (4, 0, 3)}
    case = Case(target, torch.float16, layout=layout, **sizes, **cache)
    case.k_new[0, 1], case.v_new[2, 0, 1] = 0.0, 0.0
    k, v, written = rows_without_codes(case)
    wanted = make_wanted(k, v, kv_format)
    assert_codes(append_codes(case, wanted), wanted, written)


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", DTYPES, ids=describe)
@pytest.mark.parametrize(
    ("kv_format", "head_dim", "value_dim"),
    [("fp8_e4m3:channel/int8:token", 24, 40), ("int8:token/fp8_e5m2:token", 576, 16),
     ("int4:group128+zero/int4:group32", 128, 32)],
)  # fmt: skip
def test_codes_of_rotated_keys(target, kv_format, head_dim, value_dim, dtype):
    """They are those of the rows as an unquantised cache would hold them, rounded to the dtype after the rotation."""
    case = Case(target, dtype, head_dim=head_dim, value_dim=value_dim, heads_kv=2, page_size=7)
    cos, sin = make_tables(case.capacity, 16, torch.float32, target.device)
    options = {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": True}
    k, v, written = rows_without_codes(case, **options)
    wanted = make_wanted(k, v, kv_format)
    # On a GPU the compiler may round a product and a sum of the rotation as one in one of the two kernels alone. That
    # moves a key by one last place, so the code by one step where it was next to a tie, and the scale as little.
    most = 1 if target.device == "cuda" else 0
    assert_codes(append_codes(case, wanted, **options), wanted, written, most)


def every_half(device):
    """All values of float16, NaN and infinity among them, [1, 1, 128, 512]."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32, device=device).to(torch.int16)
    return bits.view(torch.float16).view(1, 1, 128, 512)


@pytest.mark.interpreter
@pytest.mark.parametrize("kv_format", ["fp8_e4m3/fp8_e5m2", "int8:tensor/int8:tensor"])
def test_every_half_becomes_the_nearest_code(target, kv_format):
    x, lens = every_half(target.device), torch.zeros(1, dtype=torch.int32, device=target.device)
    # For int8 scales below and above 1, so that ties and saturation are among the values.
    scales = (None, None) if kv_format.startswith("fp8") else (0.5, 3.0)
    wanted = quantize_kv(x, x, kv_format, k_scale=scales[0] or 1.0, v_scale=scales[1] or 1.0, check=False)
    caches = [torch.zeros_like(codes) for codes in wanted[:2]]
    append_kv(x, x, *caches, lens, kv_format=kv_format, k_scale=scales[0], v_scale=scales[1], backend=target.backend)
    for codes, want in zip(caches, wanted[:2], strict=True):
        assert torch.equal(codes.view(torch.uint8), want.view(torch.uint8))
        assert bool((codes.view(torch.uint8)[x.isnan()] == 0).all())


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=describe)
def test_ties_between_fp8_codes_go_to_the_even_one(target, dtype):
    """Halfway between neighbours and next to it on either side, in float32, where float16 has no such values."""
    codes = torch.arange(128, dtype=torch.uint8, device=target.device).view(dtype).float()
    codes = codes[codes <= LARGEST_CODE[{torch.float8_e4m3fn: "fp8_e4m3", torch.float8_e5m2: "fp8_e5m2"}[dtype]]]
    ties = (codes[1:] + codes[:-1]) / 2
    x = torch.cat([ties, ties.nextafter(codes[1:]), ties.nextafter(codes[:-1]), codes, torch.full_like(codes[:1], NAN)])
    x = torch.cat([x, -x])
    x = torch.nn.functional.pad(x, (0, -len(x) % 64)).view(1, 1, -1, 64)
    cache = torch.zeros(x.shape, dtype=dtype, device=target.device)
    lens = torch.zeros(1, dtype=torch.int64, device=target.device)
    append_kv(x, x, cache, cache.clone(), lens, backend=target.backend)  # the dtype says what it holds
    assert torch.equal(cache.view(torch.uint8), x.nan_to_num(nan=0.0).to(dtype).view(torch.uint8))


@pytest.mark.interpreter
@pytest.mark.parametrize(
    "kv_format", ["int8:token/fp8_e4m3:token", "int4:group32/int4:group32+zero", "fp8_e5m2:token/fp8_e5m2:token"]
)
def test_scales_are_made_of_finite_values(target, kv_format):
    inf, huge, tiny = float("inf"), 3e38, 1e-42
    rows = torch.randn(12, 64)
    for i, special in enumerate((NAN, inf, -inf, 0.0, huge, -huge, tiny, 1e-7)):
        rows[i, ::5] = special
    rows[8], rows[9], rows[10], rows[11, 1:] = NAN, inf, tiny, 0.0
    x = rows.view(1, 1, 12, 64).to(target.device)
    wanted = quantize_kv(x, x, kv_format, check=False)
    caches, scales = [torch.zeros_like(x) for x in wanted[:2]], [torch.full_like(x, NAN) for x in wanted[2:4]]
    lens = torch.zeros(1, dtype=torch.int32, device=target.device)
    append_kv(x, x, *caches, lens, kv_format=kv_format, k_scale=scales[0], v_scale=scales[1], backend=target.backend)
    for got, want in zip(caches, wanted[:2], strict=True):
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
    for got, want in zip(scales, wanted[2:4], strict=True):
        assert torch.equal(got, want)


@pytest.mark.interpreter
def test_scales_may_be_numbers(target):
    """As for flash_decode(): a number, a tensor of one number, also one on a CPU; codes may be stored as uint8."""
    case = Case(target, torch.float16, head_dim=16, value_dim=16, new=1)
    k, v, written = rows_without_codes(case)
    wanted = make_wanted(k, v, "fp8_e4m3", (0.25, 0.5))
    for number in (0.25, torch.tensor(0.25), torch.full((1,), 0.25, device=target.device)):
        assert_codes(append_codes(case, wanted, (number, 0.5)), wanted, written)
    stored = wanted._replace(k=wanted.k.view(torch.uint8), v=wanted.v.view(torch.uint8))
    assert_codes(append_codes(case, stored, (0.25, 0.5)), stored, written)


@pytest.mark.interpreter
def test_no_scale_and_one_scale_are_different_kernels(target, monkeypatch):
    """A kernel that was compiled without a scale would not look at one."""
    x = torch.randn(1, 2, 1, 16, device=target.device)
    lens = torch.zeros(1, dtype=torch.int32, device=target.device)
    keys = []
    launch = "flash_decoding.backends.triton.append.launch"
    if target.backend == "triton":
        monkeypatch.setattr(launch, lambda kernel, key, *arguments: keys.append(key))
    for scale in (None, torch.full((), 0.5, device=target.device)):
        caches = [torch.zeros(1, 2, 4, 16, device=target.device).to(torch.float8_e4m3fn) for _ in "kv"]
        append_kv(x, x, *caches, lens, k_scale=scale, backend=target.backend)
        if not keys:
            wanted = x if scale is None else x / scale
            assert torch.equal(caches[0][:, :, :1].float(), wanted.to(torch.float8_e4m3fn).float())
    assert len(set(keys)) == len(keys)


@pytest.mark.interpreter
def test_scales_of_other_strides(target):
    """Scales per token in a slice of a larger array; the rest of it stays as it is."""
    x = torch.randn(2, 2, 3, 16, device=target.device)
    room = torch.full((2, 4, 9, 2), NAN, device=target.device)
    k_scale, v_scale = room[:, 1:3, 1:, 0], room[:, 1:3, 1:, 1]
    caches = [torch.zeros(2, 2, 8, 16, dtype=torch.int8, device=target.device) for _ in "kv"]
    lens = torch.tensor([0, 5], device=target.device)
    options = {"k_scale": k_scale, "v_scale": v_scale, "kv_format": "int8:token"}
    append_kv(x, 2 * x, *caches, lens, backend=target.backend, **options)
    wanted = quantize_kv(x, 2 * x, "int8")
    for b, start in enumerate((0, 5)):
        assert torch.equal(k_scale[b, :, start : start + 3], wanted.k_scale[b])
        assert torch.equal(v_scale[b, :, start : start + 3], wanted.v_scale[b])
    assert int((~room.isnan()).sum()) == 2 * 2 * 2 * 3


@pytest.mark.interpreter
def test_the_kernels_write_no_codes_nor_scales_out_of_bounds(target):
    name = backends.resolve(target.backend, torch.device(target.device))
    lens = torch.tensor([8, 100, -1, 0], device=target.device)
    table = torch.tensor([[0, 1], [0, 1], [0, 1], [-1, 3]], dtype=torch.int32, device=target.device)
    new = torch.randn(4, 2, 2, 32, device=target.device)
    codes, packed = (torch.full((5, 2, 4, n), UNTOUCHED, dtype=torch.uint8, device=target.device) for n in (32, 16))
    scales, groups = (torch.full((5, 2, 4, 2), NAN, dtype=x, device=target.device) for x in (torch.float32, torch.half))
    append = Append(
        new, new, codes[1:-1].view(torch.int8), packed[1:-1], lens, table, None, None, None, False, None, None, 1, 8, 4,
        Codes(CodeFormat("int8", "token"), scales[1:-1, :, :, :1], 32),
        Codes(CodeFormat("int4", "group", 32, True), groups[1:-1, :, :, :1], 32),
    )  # fmt: skip
    backends.load(f"{name}.append").append(append)
    assert bool((codes == UNTOUCHED).all())
    assert bool((packed == UNTOUCHED).all())
    assert bool(scales.isnan().all())
    assert bool(groups.isnan().all())


@pytest.mark.parametrize("kv_format", ["fp8", "int8", "int4:group32+zero"])
@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
def test_append_codes_then_decode(target, layout, kv_format):
    case = Case(target, torch.float16, layout=layout, head_dim=64, value_dim=32, lens=(0, 0), new=18, page_size=7)
    k, v, _ = rows_without_codes(case)
    wanted = make_wanted(k, v, kv_format, (0.02, 0.02) if kv_format == "fp8" else (None, None))
    (k_codes, k_scale), (v_codes, v_scale) = append_codes(case, wanted)
    options = {
        "layout": layout, "kv_format": wanted.kv_format, "kv_lens": case.lens + 18, "block_table": case.table,
        "k_scale": wanted.k_scale if k_scale is None else case.flip(k_scale),
        "v_scale": wanted.v_scale if v_scale is None else case.flip(v_scale),
    }  # fmt: skip
    q = case.flip(torch.randn(2, 6, 1, 64).to(target.device, torch.float16))
    caches = case.flip(k_codes), case.flip(v_codes)
    got = flash_decode(q, *caches, backend=target.backend, **options)
    assert max_error(got, reference(q, *caches, **options)) < LOOSE[torch.float16]
    plain = {name: options[name] for name in ("layout", "kv_lens", "block_table")}
    # The codes are those of these keys and values: a cache that is not quantised decodes to nearly the same.
    assert max_error(got, reference(q, *(case.flip(x.nan_to_num(nan=0.0)) for x in (k, v)), **plain)) < 0.15


@pytest.mark.compiles
@pytest.mark.parametrize("kv_format", ["fp8", "int8", "int4:group32"])
def test_torch_compile_writes_codes_and_scales(target, kv_format):
    case = Case(target, torch.float32, lens=(0, 5), new=2, head_dim=32, value_dim=32)
    k, v, written = rows_without_codes(case)
    wanted = make_wanted(k, v, kv_format, (0.02, 0.02) if kv_format == "fp8" else (None, None))
    caches = [filled_like(x) for x in wanted[:2]]
    scales = [x if x.ndim == 0 else filled_like(x) for x in wanted[2:4]]

    def step(k_new, v_new, k_cache, v_cache, k_scale, v_scale, lens):
        options = {"kv_format": wanted.kv_format, "k_scale": k_scale, "v_scale": v_scale}
        append_kv(k_new * 1.0, v_new, k_cache, v_cache, lens, **options)
        return dequantize_kv(k_cache, v_cache, **options)[0] + 0.0

    with torch.no_grad():
        seen = torch.compile(step, fullgraph=True)(case.k_new, case.v_new, *caches, *scales, case.lens)
    made = [None if x.ndim == 0 else x for x in scales]
    assert_codes(list(zip(caches, made, strict=True)), wanted, written)
    assert max_error(seen[written], dequantize_kv(*wanted[:2], wanted.kv_format, k_scale=wanted.k_scale,
                                                  v_scale=wanted.v_scale)[0][written]) == 0.0  # fmt: skip


@pytest.mark.compiles
def test_torch_compile_records_one_op_that_writes(target):
    case = Case(target, torch.float32, lens=(0, 5), new=1)
    case.k_cache[1, :, :5], case.v_cache[1, :, :5] = 1.0, 2.0  # what the second sequence holds before
    cos, sin = make_tables(case.capacity, 24, torch.float32, target.device)
    q = torch.randn(2, 6, 1, 24, device=target.device)

    def step(k_new, v_new, k_cache, v_cache, lens, q):
        q = append_kv(k_new * 1.0, v_new, k_cache, v_cache, lens, rotary_cos=cos, rotary_sin=sin, q=q + 0.0)
        return q + 0.0, flash_decode(q, k_cache, v_cache, kv_lens=lens + 1)

    arguments = case.k_new, case.v_new, case.k_cache.clone(), case.v_cache.clone(), case.lens, q
    with torch.no_grad():
        rotated, out = torch.compile(step, fullgraph=True)(*arguments)
    want_k, want_v = case.expected(cos, sin)
    assert_same(arguments[2], want_k, ROUNDING[torch.float32])
    assert_same(arguments[3], want_v)
    n = case.lens.long()[:, None]
    assert max_error(rotated, rotate(q, cos[n][:, None], sin[n][:, None], False)) <= ROUNDING[torch.float32]
    want = reference(rotated, *(x.nan_to_num(nan=0.0) for x in arguments[2:4]), kv_lens=case.lens + 1)
    assert max_error(out, want) < LOOSE[torch.float32]


@pytest.mark.compiles
def test_the_schema_holds(target):
    case = Case(target, torch.float32, lens=(0, 5), new=2)
    cos, sin = make_tables(case.capacity, 24, torch.float32, target.device)
    q = torch.randn(2, 6, 2, 24, device=target.device)
    arguments = (
        case.k_new, case.v_new, torch.zeros_like(case.k_cache), torch.zeros_like(case.v_cache), case.lens, "bhnd",
        None, None, cos, sin, True, q, True, None, None, None, None, None, torch.zeros_like(q), "auto",
    )  # fmt: skip
    torch.library.opcheck(torch.ops.flash_decoding.append.default, arguments)
    codes = torch.zeros(case.k_cache.shape, dtype=torch.int8, device=target.device)
    scale, scales = torch.tensor(0.5, device=target.device), torch.zeros(codes.shape[:3], device=target.device)
    quantised = (
        case.k_new, case.k_new, codes, codes.clone(), case.lens, "bhnd", None, None, None, None, False, None, True,
        "int8", scale, None, None, scales, None, "auto",
    )  # fmt: skip
    torch.library.opcheck(torch.ops.flash_decoding.append.default, quantised)
    with pytest.raises(ValueError, match="q_out must be like q"):
        torch.ops.flash_decoding.append(*arguments[:-2], None, "auto")


@pytest.mark.gpu
@NO_GPU
def test_a_captured_graph_is_right_for_later_lengths_and_tables():
    new, cache = torch.randn(2, 2, 1, 64, device="cuda"), torch.full((6, 2, 16, 64), NAN, device="cuda")
    lens = torch.tensor([0, 0], dtype=torch.int32, device="cuda")
    table = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32, device="cuda")
    values = cache.clone()

    def step():
        append_kv(new, new, cache, values, lens, block_table=table)
        lens.add_(1)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    cache.fill_(NAN)
    lens.copy_(torch.tensor([15, 3]))
    table.copy_(torch.tensor([[5, 4], [1, 0]]))
    graph.replay()
    graph.replay()
    written = (~cache.isnan()).any(-1).all(1).nonzero().tolist()
    assert written == [[1, 3], [1, 4], [4, 0], [5, 15]]
    assert lens.tolist() == [17, 5]


@pytest.mark.skipif(INTERPRETED, reason="the interpreter does not compile")
@pytest.mark.parametrize(
    ("arch", "dtype"), [(80, torch.float32), (89, torch.float16), (90, torch.bfloat16)], ids=describe
)
@pytest.mark.parametrize(("head_dim", "value_dim"), [(64, 64), (128, 128), (80, 256), (576, 512)])
@pytest.mark.parametrize("options", [False, True], ids=["dense", "paged-rotated"])
def test_the_kernel_compiles_and_does_not_spill(options, head_dim, value_dim, dtype, arch):
    pytest.importorskip("triton")
    from compiling import compile_append

    built = compile_append(
        dtype, head_dim, arch, value_dim=value_dim, page_size=16 if options else None, queries=options,
        rotary="interleaved" if options else None, rotary_dim=64, new_lens=options,
    )  # fmt: skip
    assert built.spills == 0
    assert built.stack_bytes == 0
    assert built.shared_bytes <= 48 * 1024
    assert "st.global.v4.b32" in built.ptx, "16 bytes a thread"


@pytest.mark.skipif(INTERPRETED, reason="the interpreter does not compile")
@pytest.mark.parametrize(
    ("arch", "dtype"), [(80, torch.float16), (89, torch.float32), (90, torch.bfloat16)], ids=describe
)
@pytest.mark.parametrize(("head_dim", "value_dim"), [(96, 192), (576, 512)])
@pytest.mark.parametrize(
    "kv_format", ["fp8_e4m3:tensor/fp8_e5m2:token", "int8:channel/int8:token", "int4:group32/int4:group64+zero"]
)
def test_quantising_compiles_and_does_not_spill(kv_format, head_dim, value_dim, dtype, arch):
    pytest.importorskip("triton")
    from compiling import compile_append

    built = compile_append(
        dtype, head_dim, arch, value_dim=value_dim, page_size=16, rotary="halves", rotary_dim=64, queries=True,
        kv_format=KVFormat.parse(kv_format),
    )  # fmt: skip
    assert built.spills == 0
    assert built.stack_bytes == 0
    assert built.shared_bytes <= 48 * 1024
    assert "e4m3" not in built.ptx, "made of integers, also where there is an instruction"


def bad(**changes):
    """A good call with one thing wrong."""
    x = torch.zeros(2, 3, 1, 16)
    cos = torch.zeros(8, 8)
    call = {
        "k_new": x, "v_new": x, "k_cache": torch.zeros(2, 3, 8, 16), "v_cache": torch.zeros(2, 3, 8, 16),
        "kv_lens": torch.tensor([0, 7]),
    }  # fmt: skip
    paged = {"block_table": torch.zeros(2, 4, dtype=torch.int32)}
    tables = {"rotary_cos": cos, "rotary_sin": cos}
    for name, more in (("paged", paged), ("tables", tables)):
        if changes.pop(name, False):
            call.update(more)
    return {**call, **changes}


def bad_codes(kv_format="int8", dtype=torch.int8, width=16, **changes):
    """The same for a quantised cache, with scales per token."""
    codes = [torch.zeros(2, 3, 8, width, dtype=dtype) for _ in "kv"]
    scales = {"k_scale": torch.zeros(2, 3, 8), "v_scale": torch.zeros(2, 3, 8)}
    return bad(**{"k_cache": codes[0], "v_cache": codes[1], "kv_format": kv_format, **scales, **changes})


TWICE, ROWS = torch.zeros(2, 3, 8, 16), torch.zeros(2, 3, 8)
X, WIDE, HALF = torch.zeros(2, 3, 1, 16), torch.zeros(8, 9), torch.zeros(8, 8).half()
BAD = {
    "layout": (bad(layout="nhd"), ValueError, "layout must be one of"),
    "kind": (bad(kv_lens=3), TypeError, "kv_lens must be a torch.Tensor, got int"),
    "dtype": (bad(k_new=X.double()), TypeError, "k_new must be float16, bfloat16 or float32"),
    "cache-dtype": (bad(k_cache=torch.zeros(2, 3, 8, 16).half()), TypeError, "k_cache must have the dtype of k_new"),
    "lens-dtype": (bad(kv_lens=torch.zeros(2)), TypeError, "kv_lens must be int32 or int64"),
    "table-dtype": (bad(block_table=torch.zeros(2, 4).long()), TypeError, "block_table must be int32"),
    "rank": (bad(k_new=X[0]), ValueError, "k_new must have shape"),
    "v-shape": (bad(v_new=X[:, :2]), ValueError, "v_new must have shape"),
    "cache-shape": (bad(k_cache=torch.zeros(3, 3, 8, 16)), ValueError, "k_cache must have shape"),
    "cache-length": (bad(v_cache=torch.zeros(2, 3, 9, 16)), ValueError, "v_cache must have shape"),
    "width": (bad(v_new=X[..., :12], v_cache=torch.zeros(2, 3, 8, 12)), ValueError, "value_dim must be a multiple"),
    "lens-shape": (bad(kv_lens=torch.zeros(3).long()), ValueError, "kv_lens must have one entry per sequence"),
    "stride": (bad(k_cache=torch.zeros(2, 3, 16, 8).transpose(2, 3)), ValueError, "k_cache must have a contig"),
    "overlap": (bad(k_cache=torch.zeros(1, 3, 8, 16).expand(2, -1, -1, -1)), ValueError, "must not overlap itself"),
    "too-long": (bad(kv_lens=torch.tensor([0, 9])), ValueError, "kv_lens must lie from 0 to 8"),
    "negative": (bad(kv_lens=torch.tensor([-1, 2])), ValueError, "kv_lens must lie from 0 to 8"),
    "full": (bad(kv_lens=torch.tensor([0, 8])), ValueError, "kv_lens must leave room for the new keys"),
    "new-lens": (bad(new_lens=torch.tensor([0, 2])), ValueError, "new_lens must lie from 0 to 1"),
    "page": (bad(block_table=torch.full((2, 4), 2, dtype=torch.int32)), ValueError, "block_table must hold pages from"),
    "same-cache": (bad(k_cache=TWICE, v_cache=TWICE), ValueError, "v_cache must not be k_cache: keys would be"),
    "same-memory": (bad(k_cache=TWICE, v_cache=TWICE[:]), ValueError, "v_cache must not be k_cache"),
    "same-place": (bad(paged=True, kv_lens=torch.tensor([5, 5])), ValueError,
                   r"got slot 5 of page 0 for tokens of sequences \[0, 1\]"),
    "same-place-later": (bad(paged=True, kv_lens=torch.tensor([5, 29])), ValueError, "a place of its own for every"),
    "one-table": (bad(rotary_cos=torch.zeros(8, 8)), ValueError, "rotary_sin must be given with rotary_cos"),
    "short-table": (bad(tables=True, paged=True), ValueError, "a row for each of the 32 positions"),
    "wide-table": (bad(rotary_cos=WIDE, rotary_sin=WIDE), ValueError, "rotary_cos must have from 1 to head_dim"),
    "table-kind": (bad(rotary_cos=HALF, rotary_sin=HALF), TypeError, "rotary_cos must be float32 or have the dtype"),
    "q-alone": (bad(q=X), ValueError, "rotary_cos must be given with q"),
    "q-width": (bad(tables=True, q=torch.zeros(2, 3, 1, 24)), ValueError, "q must have shape"),
    "gradient": (bad(k_new=X.clone().requires_grad_()), ValueError, "k_new must not require a gradient"),
    "flag": (bad(rotary_interleaved=1), TypeError, "rotary_interleaved must be a bool"),
    "format": (bad_codes(kv_format="int2"), ValueError, "kv_format must name a format"),
    "format-kind": (bad_codes(kv_format=8), TypeError, "kv_format must be a KVFormat, a str or None"),
    "format-dtype": (bad_codes(kv_format="fp8"), TypeError, "k_cache must be float8_e4m3fn or uint8 for fp8_e4m3"),
    "no-format": (bad_codes(kv_format=None, dtype=torch.uint8), TypeError, "k_cache must have the dtype of k_new"),
    "packed-width": (bad_codes(kv_format="int4", dtype=torch.uint8), ValueError, "k_cache must have shape .*, 8., got"),
    "scale-kind": (bad_codes(k_scale="1"), TypeError, "k_scale must be a torch.Tensor, a number or None, got str"),
    "no-scale": (bad_codes(v_scale=None), ValueError, "v_scale must be given with int8 codes, got None"),
    "no-scale-to-write": (bad_codes("fp8:token", torch.uint8, k_scale=None), ValueError, "k_scale must be given with"),
    "scale-alone": (bad(k_scale=ROWS), ValueError, "k_scale must be None where k_cache has the dtype"),
    "scale-shape": (bad_codes(k_scale=ROWS[:, :, 1:]), ValueError, "k_scale must have shape .2, 3, 8. for scales per"),
    "scale-dtype": (bad_codes(v_scale=ROWS.half()), TypeError, "v_scale must be float32 for scales per token"),
    "scale-overlap": (bad_codes(k_scale=torch.zeros(2, 3, 1).expand(-1, -1, 8)), ValueError,
                      "k_scale must not overlap itself"),
    "scale-zero": (bad_codes(k_scale=torch.tensor([1.0, 0.0, 1.0])), ValueError, "k_scale must be finite and not 0"),
    "scale-nan": (bad_codes(v_scale=NAN), ValueError, "v_scale must be finite and not 0"),
    "scale-gradient": (bad_codes(k_scale=ROWS.clone().requires_grad_()), ValueError, "k_scale must not require a grad"),
    "scales-twice": (bad_codes(k_scale=ROWS, v_scale=ROWS[:]), ValueError, "v_scale must not be k_scale"),
    "channel-values": (bad_codes(v_scale=torch.ones(3, 16)), ValueError, "v_scale must not be per channel"),
    "backend": (bad(backend="cuda"), ValueError, "backend must be one of"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused(name):
    call, kind, message = BAD[name]
    caches = [call["k_cache"].clone(), call["v_cache"].clone()]
    with pytest.raises(kind, match=message):
        append_kv(**call)
    assert torch.equal(call["k_cache"], caches[0])
    assert torch.equal(call["v_cache"], caches[1])


def test_the_good_call_behind_the_bad_ones_is_accepted():
    call = bad(tables=True, q=X)
    append_kv(**call)
    with pytest.raises(ValueError, match="kv_lens must lie"):  # values are looked at again
        append_kv(**{**call, "kv_lens": torch.tensor([0, 9])})


def test_new_tokens_of_one_sequence_must_not_meet_either():
    new, table = torch.zeros(1, 2, 5, 16), torch.zeros(1, 3, dtype=torch.int32)
    caches, lens = [torch.zeros(3, 2, 4, 16) for _ in "kv"], torch.tensor([2])
    with pytest.raises(ValueError, match=r"got slot 2 of page 0 for tokens of sequences \[0, 0\]"):
        append_kv(new, new, *caches, lens, block_table=table)
    append_kv(new[:, :, :4] + 1, new[:, :, :4], *caches, lens, block_table=table)  # its two halves do not meet
    assert bool((caches[0][0] == 1).all())


def test_only_new_tokens_count_where_places_are_compared():
    call = bad(paged=True, kv_lens=torch.tensor([5, 5]), new_lens=torch.tensor([1, 0]))
    append_kv(**call)
    append_kv(**{**call, "kv_lens": torch.tensor([5, 6]), "new_lens": None})  # one page, two slots


def test_halves_of_one_memory_are_two_caches():
    new, both = torch.ones(2, 3, 1, 16), torch.zeros(2, 2, 3, 8, 16)
    append_kv(new, 2 * new, both[0], both[1], torch.tensor([0, 7]))
    both = both.transpose(0, 1).contiguous()
    append_kv(new, 2 * new, both[:, 0], both[:, 1], torch.tensor([0, 7]))
    assert both[:, 0].sum() * 2 == both[:, 1].sum() == 2 * 2 * 3 * 16


@pytest.mark.gpu
@NO_GPU
def test_check_compares_places_on_a_gpu():
    new, table = torch.zeros(2, 3, 1, 16, device="cuda"), torch.zeros(2, 4, dtype=torch.int32, device="cuda")
    caches, lens = [torch.zeros(2, 3, 8, 16, device="cuda") for _ in "kv"], torch.tensor([5, 5], device="cuda")
    with pytest.raises(ValueError, match="a place of its own for every new token"):
        append_kv(new, new, *caches, lens, block_table=table, check=True)
