"""Formats of quantised caches: names, sizes, packing, round trips, saturation. No kernel runs here."""

import itertools

import pytest
import torch
from helpers import describe

from flash_decoding import CodeFormat, KVFormat, dequantize_kv, quantize_kv
from flash_decoding.quantization import LARGEST_CODE, SCALES, pack_int4, unpack_int4

NAN, INF = float("nan"), float("inf")
KEY_FORMATS = [
    f"{codes}:{scale}"
    for codes, scale in itertools.product(("fp8_e4m3", "fp8_e5m2", "int8"), ("tensor", "head", "token", "channel"))
] + [f"int4:group{group}{zero}" for group, zero in itertools.product((32, 64, 128), ("", "+zero"))]  # fmt: skip
# Of one code: half the distance to the next, as a share of the value (fp8) or of the scale (integers).
FP8_ERROR = {"fp8_e4m3": 2.0**-4, "fp8_e5m2": 2.0**-3}


def make_cache(layout="bhnd", dtype=torch.float32, shape=(2, 3, 37, 128)):
    k, v = (torch.randn(shape).to(dtype) for _ in range(2))
    return (k, v) if layout == "bhnd" else (k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous())


def back(cache, layout="bhnd", dtype=torch.float32):
    return dequantize_kv(
        cache.k, cache.v, cache.kv_format, layout=layout, k_scale=cache.k_scale, v_scale=cache.v_scale, dtype=dtype
    )


def value_side(name):
    return None if name.endswith("channel") else CodeFormat.parse(name)


# Formats.


@pytest.mark.parametrize("name", KEY_FORMATS)
def test_names_are_formats_and_formats_names(name):
    form = CodeFormat.parse(name)
    assert str(form) == name
    both = KVFormat(form, value_side(name))
    assert KVFormat.parse(str(both)) == both
    assert eval(repr(both)) == both
    assert hash(both) == hash(KVFormat.parse(both))


@pytest.mark.parametrize(
    ("name", "k", "v"),
    [
        ("fp8", "fp8_e4m3:tensor", "fp8_e4m3:tensor"),
        ("fp8_e4m3", "fp8_e4m3:tensor", "fp8_e4m3:tensor"),
        ("fp8_e5m2", "fp8_e5m2:tensor", "fp8_e5m2:tensor"),
        ("int8", "int8:token", "int8:token"),
        ("int4", "int4:group64", "int4:group64"),
        ("fp8:head", "fp8_e4m3:head", "fp8_e4m3:head"),
        ("int8:channel/int4:group32+zero", "int8:channel", "int4:group32+zero"),
        ("none/int8", None, "int8:token"),
    ],
)
def test_short_names(name, k, v):
    kv_format = KVFormat.parse(name)
    assert (kv_format.k, kv_format.v) == tuple(x and CodeFormat.parse(x) for x in (k, v))
    assert KVFormat.parse(kv_format) is kv_format
    assert KVFormat.parse(None) is None


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: CodeFormat("fp4", "tensor"), ValueError, "codes must be one of"),
        (lambda: CodeFormat("int8", "row"), ValueError, "scale must be one of"),
        (lambda: CodeFormat("int4", "token"), ValueError, "scale must be 'group' for int4 codes, got 'token'"),
        (lambda: CodeFormat("int8", "group"), ValueError, "scale must be other than 'group' for int8 codes"),
        (lambda: CodeFormat("int4", "group", 48), ValueError, r"group must be one of \[32, 64, 128\], got 48"),
        (lambda: CodeFormat("int8", "head", 64), ValueError, "group must be None for scale 'head', got 64"),
        (lambda: CodeFormat("int8", "head", zero_point=True), ValueError, "zero_point must be False"),
        (lambda: CodeFormat("int4", "group", zero_point=1), TypeError, "zero_point must be a bool, got int"),
        (lambda: KVFormat(None, CodeFormat("int8", "channel")), ValueError, "v must have scales other than 'channel'"),
        (lambda: KVFormat("int8", None), TypeError, "k must be a CodeFormat or None, got str"),
        (lambda: KVFormat.parse("int2"), ValueError, "kv_format must name a format such as .*, got 'int2'"),
        (lambda: KVFormat.parse("int8:channel"), ValueError, "kv_format must name a format"),
        (lambda: KVFormat.parse("int8/int8/int8"), ValueError, "kv_format must name a format"),
        (lambda: KVFormat.parse("int4:group32+one"), ValueError, "kv_format must name a format"),
        (lambda: KVFormat.parse(8), TypeError, "kv_format must be a KVFormat, a str or None, got int"),
    ],
)
def test_formats_that_do_not_exist_are_refused(make, kind, message):
    with pytest.raises(kind, match=message):
        make()


def test_a_format_tells_shapes_and_dtypes():
    shapes = {scale: CodeFormat("int8", scale).scale_shape(2, 3, 5, 64) for scale in SCALES[:-1]}
    assert shapes == {"tensor": (), "head": (3,), "token": (2, 3, 5), "channel": (3, 64)}
    assert CodeFormat("int8", "token").scale_shape(2, 3, 5, 64, "bnhd") == (2, 5, 3)
    int4 = CodeFormat("int4", "group", 32, True)
    assert int4.scale_shape(2, 3, 5, 64, "bnhd") == (2, 5, 3, 2, 2)
    assert (int4.dtype, int4.scale_dtype, int4.code_width(64)) == (torch.uint8, torch.float16, 32)
    fp8 = CodeFormat("fp8_e4m3", "head")
    assert (fp8.dtype, fp8.scale_dtype, fp8.code_width(64)) == (torch.float8_e4m3fn, torch.float32, 64)


# Packing.


def test_four_codes_in_two_bytes():
    """Bytes 2 j and 2 j + 1 hold the elements j, j + Q, j + 2 Q, j + 3 Q, lowest bits first."""
    codes = torch.arange(16, dtype=torch.uint8)
    words = [0 | 4 << 4 | 8 << 8 | 12 << 12, 1 | 5 << 4 | 9 << 8 | 13 << 12]
    packed = pack_int4(codes)
    assert packed[:4].tolist() == [word >> shift & 255 for word in words for shift in (0, 8)]
    assert torch.equal(unpack_int4(packed), codes)


@pytest.mark.parametrize("width", [16, 24, 64, 576])
def test_packing_is_undone(width):
    codes = torch.randint(16, (3, 2, width), dtype=torch.uint8)
    packed = pack_int4(codes)
    assert packed.shape == (3, 2, width // 2)
    assert packed.is_contiguous()
    assert torch.equal(unpack_int4(packed), codes)


# Round trips.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=describe)
@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
@pytest.mark.parametrize("name", KEY_FORMATS)
def test_a_round_trip_is_off_by_half_a_code(name, layout, dtype):
    k, v = make_cache(layout, dtype)
    kv_format = KVFormat(CodeFormat.parse(name), value_side(name))
    cache = quantize_kv(k, v, kv_format, layout=layout)
    assert cache.kv_format == kv_format
    formats = (kv_format.k, kv_format.v)
    for x, codes, scale, form, got in zip((k, v), cache[:2], cache[2:4], formats, back(cache, layout), strict=True):
        if form is None:
            assert codes is x
            assert scale is None
            continue
        sizes = x.shape if layout == "bhnd" else x.transpose(1, 2).shape
        assert codes.dtype == form.dtype
        assert codes.shape == (*x.shape[:3], form.code_width(128))
        assert scale.dtype == form.scale_dtype
        assert scale.shape == form.scale_shape(*sizes, layout)
        error = (got - x.float()).abs()
        if form.codes in FP8_ERROR:
            smallest = scale.float().max() * (2.0**-6 if form.codes == "fp8_e4m3" else 2.0**-14)
            assert bool((error <= FP8_ERROR[form.codes] * x.float().abs().clamp(min=smallest)).all())
        else:
            # Rounding the scale to float16 lets the largest code miss by some thousandths of it.
            room = 0.5 + (1e-2 if form.codes == "int4" else 1e-4)
            step = spread(scale, form, layout)
            assert bool((error <= room * step).all())


def spread(scale, form, layout):
    """The scale of every element, by a way of its own."""
    if form.group is not None:
        scale = scale[..., 0] if form.zero_point else scale
        return scale.float().repeat_interleave(form.group, dim=-1)
    if form.scale == "token":
        return scale[..., None]
    if form.scale == "head":
        scale = scale[:, None]
    return scale if scale.ndim == 0 or layout == "bnhd" else scale[:, None]


@pytest.mark.parametrize("name", KEY_FORMATS)
def test_codes_and_scales_are_kept_by_a_second_round(name):
    k, v = make_cache()
    cache = quantize_kv(k, v, KVFormat(CodeFormat.parse(name), None))
    again = quantize_kv(back(cache)[0], v, cache.kv_format, k_scale=cache.k_scale)
    assert torch.equal(again.k.view(torch.uint8), cache.k.view(torch.uint8))
    assert again.k_scale is cache.k_scale


@pytest.mark.parametrize("codes", ["fp8_e4m3", "fp8_e5m2", "int8"])
def test_scales_of_a_short_name_tell_what_they_are_of(codes):
    k, v = make_cache()
    for scale, shape in (
        ("tensor", ()),
        ("tensor", (1,)),
        ("head", (3,)),
        ("channel", (3, 128)),
        ("token", (2, 3, 37)),
    ):
        k_scale = torch.rand(shape) + 0.5
        cache = quantize_kv(k, v, codes, k_scale=k_scale)
        assert cache.kv_format.k == CodeFormat(codes, scale)
        assert torch.equal(cache.k_scale, k_scale)


def test_float64_is_exact():
    k, v = make_cache()
    cache = quantize_kv(k, v, "int4:group32+zero")
    scale, zero = cache.k_scale.double().unbind(-1)
    want = (unpack_int4(cache.k).double().unflatten(-1, (-1, 32)) - zero[..., None]) * scale[..., None]
    assert torch.equal(back(cache, dtype=torch.float64)[0], want.flatten(-2))


@pytest.mark.parametrize("name", ["fp8", "fp8_e5m2", "fp8:head", "int8", "int4", "int4:group32+zero"])
@pytest.mark.parametrize("shape", [(0, 2, 5, 64), (2, 2, 0, 64)])
def test_empty_caches(name, shape):
    cache = quantize_kv(torch.zeros(shape), torch.zeros(shape), name)
    assert back(cache)[0].shape == shape


# What does not fit.


@pytest.mark.parametrize("scale", [1.0, torch.tensor(1.0), torch.ones(1)], ids=["float", "0-d", "1-d"])
def test_c052_values_beyond_the_range_saturate(scale):
    values = torch.tensor([1000.0, -1000.0, 448.0, 449.0, INF, -INF, 0.0, 1.0])
    k = values.repeat(2)[None, None, None]
    cache = quantize_kv(k, k, "fp8_e4m3", k_scale=scale, v_scale=scale)
    want = torch.tensor([448.0, -448.0, 448.0, 448.0, 448.0, -448.0, 0.0, 1.0])
    for x in back(cache):
        assert torch.equal(x[0, 0, 0, :8], want)
    k[..., 3] = NAN
    with pytest.raises(ValueError, match="k must hold no NaN, got some; check=False makes them 0"):
        quantize_kv(k, values.repeat(2)[None, None, None], "fp8_e4m3", k_scale=scale)
    with pytest.raises(ValueError, match="v must hold no NaN"):
        quantize_kv(values.repeat(2)[None, None, None], k, "fp8_e4m3", k_scale=scale)


def test_c052_a_scale_is_of_all_the_data():
    k = torch.randn(2, 4, 100, 128)
    k[..., 64:] *= 10
    cache = quantize_kv(k, k, "fp8_e4m3:head")
    assert torch.allclose(cache.k_scale, k.abs().amax(dim=(0, 2, 3)) / 448, rtol=1e-6)
    normal = k.abs() >= 2.0**-6 * cache.k_scale[:, None, None]
    off = ((back(cache)[0] - k).abs() / k.abs())[normal]
    assert off.max().item() <= 2.0**-4


@pytest.mark.parametrize("name", KEY_FORMATS)
def test_what_is_not_finite_leaves_the_rest_alone(name):
    k, v = make_cache()
    form = CodeFormat.parse(name)
    clean = k.clone()
    at = [(0, 0, 3, 5), (1, 2, 36, 127), (0, 1, 0, 0)]
    for index, value in zip(at, (NAN, INF, -INF), strict=True):
        clean[index] = 0.0
        k[index] = value
    cache, want = (quantize_kv(x, v, KVFormat(form, None), check=False) for x in (k, clean))
    assert torch.equal(cache.k_scale, want.k_scale)
    got, rest = back(cache)[0], back(want)[0]
    assert bool(got.isfinite().all())
    assert abs(got[at[0]].item() - rest[at[0]].item()) == 0.0
    others = torch.ones_like(k, dtype=torch.bool)
    for index in at:
        others[index] = False
    assert torch.equal(got[others], rest[others])
    largest = quantize_kv(torch.full_like(k, 1e30), v, KVFormat(form, None), k_scale=cache.k_scale)
    assert got[at[1]] == back(largest)[0][at[1]]
    smallest = quantize_kv(torch.full_like(k, -1e30), v, KVFormat(form, None), k_scale=cache.k_scale)
    assert got[at[2]] == back(smallest)[0][at[2]]


@pytest.mark.parametrize("name", KEY_FORMATS)
@pytest.mark.parametrize("size", [0.0, 1e-44, 1e-30, 1e30, 3e38, -1e7, -3e38])
def test_scales_are_neither_zero_nor_infinite(name, size):
    k = torch.rand(1, 1, 5, 128) * size
    cache = quantize_kv(k, k, KVFormat(CodeFormat.parse(name), None))
    scale = cache.k_scale[..., 0] if name.endswith("zero") else cache.k_scale
    assert bool((scale.isfinite() & (scale > 0)).all())
    got = back(cache)[0]
    assert bool(got.isfinite().all())
    if size == 0.0:
        assert bool((got == 0).all())


def test_every_code_means_what_torch_says():
    every = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    for codes, dtype in (("fp8_e4m3", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)):
        for stored in (every, every.view(dtype)):
            k, _ = dequantize_kv(stored, stored, codes, k_scale=2.0)
            assert torch.equal(k.nan_to_num(7.0), (every.view(dtype).float() * 2).nan_to_num(7.0))
    k, _ = dequantize_kv(every.view(torch.int8), every.view(torch.int8), "int8", k_scale=0.5, v_scale=1.0)
    assert torch.equal(k, every.view(torch.int8).float() * 0.5)


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2", "int8"])
def test_the_largest_codes(name):
    k = torch.linspace(-1, 1, 64)[None, None, None]
    cache = quantize_kv(k, k, name)
    codes = cache.k.float()
    assert (codes.min().item(), codes.max().item()) == (-LARGEST_CODE[name], LARGEST_CODE[name])


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (dict(kv_format="int5"), ValueError, "kv_format must name a format"),
        (dict(layout="nhd"), ValueError, "layout must be one of"),
        (dict(k=[1.0]), TypeError, "k must be a torch.Tensor, got list"),
        (dict(k=torch.zeros(2, 5, 64)), ValueError, r"k must have 4 axes, got shape \[2, 5, 64\]"),
        (dict(k=torch.zeros(1, 2, 5, 64, dtype=torch.int8)), TypeError, "k must be float16, bfloat16 or float32"),
        (dict(k_scale=torch.ones(3)), ValueError, r"k_scale must have shape \[2\] for scales per head, got \[3\]"),
        (dict(v_scale=torch.ones(2, 64)), ValueError, "v_scale must not be per channel"),
        (dict(k_scale=torch.ones(2).half()), TypeError, "k_scale must be float32 for scales per head"),
        (dict(k_scale=torch.tensor([1.0, 0.0])), ValueError, "k_scale must be finite and not 0"),
        (dict(v_scale=NAN), ValueError, "v_scale must be finite and not 0, got nan"),
        (dict(kv_format="none/int8", k_scale=1.0), ValueError, "k_scale must be None where k has no codes"),
        (dict(kv_format="int4", v=torch.zeros(1, 2, 5, 80)), ValueError, "group must divide the width of v, 80"),
        (dict(kv_format="int4", k=torch.zeros(1, 2, 5, 20)), ValueError, "k must have a width that is a multiple of 8"),
    ],
)  # fmt: skip
def test_bad_input_is_refused(change, kind, message):
    arguments = dict(k=torch.zeros(1, 2, 5, 64), v=torch.zeros(1, 2, 5, 64), kv_format="int8") | change
    with pytest.raises(kind, match=message):
        quantize_kv(**arguments)


def test_codes_of_another_dtype_are_refused():
    k = torch.zeros(1, 2, 5, 64, dtype=torch.int8)
    with pytest.raises(TypeError, match=r"k must be float8_e4m3fn or uint8 for fp8_e4m3 codes, got torch\.int8"):
        dequantize_kv(k, k, "fp8")
    with pytest.raises(ValueError, match="k_scale must be given with int8 codes, got None"):
        dequantize_kv(k, k)
    with pytest.raises(TypeError, match=r"k must be floating-point numbers or have a kv_format, got torch\.uint8"):
        dequantize_kv(k.view(torch.uint8), k)
