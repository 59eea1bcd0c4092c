"""Formats of quantised caches, and what they mean: quantize_kv() and dequantize_kv() in plain torch.

    fp8: value = scale * code        int8: value = scale * code        int4: value = scale * (code - zero)

fp8 codes are the numbers of torch.float8_e4m3fn or torch.float8_e5m2, int8 codes are -127 to 127, int4 codes are 0 to
15 with zero = 8 where there is no zero point. Codes are rounded to nearest, ties to even, with the scale as stored.
What does not fit saturates: finite values and infinities become the largest code of their sign, and NaN becomes 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from numbers import Real
from typing import NamedTuple

import torch
from torch import Tensor

# The first dtype is the one that quantize_kv() makes. Some caches keep the bits of fp8 codes as uint8.
CODE_DTYPES = {
    "fp8_e4m3": (torch.float8_e4m3fn, torch.uint8),
    "fp8_e5m2": (torch.float8_e5m2, torch.uint8),
    "int8": (torch.int8,),
    "int4": (torch.uint8,),
}
LARGEST_CODE = {"fp8_e4m3": 448.0, "fp8_e5m2": 57344.0, "int8": 127.0, "int4": 7.0}
SCALES = ("tensor", "head", "token", "channel", "group")
GROUPS = (32, 64, 128)
# What a dtype says by itself, without kv_format.
_CODES_OF = {torch.float8_e4m3fn: "fp8_e4m3", torch.float8_e5m2: "fp8_e5m2", torch.int8: "int8"}
# How a name without scales is understood where there is nothing to read them off.
_DEFAULT_SCALES = {"fp8_e4m3": "tensor", "fp8_e5m2": "tensor", "int8": "token", "int4": "group"}
_ALIASES = {"fp8": "fp8_e4m3"}
# An int4 code of 8 is 0 where there is no zero point.
_ZERO = 8.0
_LARGEST_INT4 = 15.0


@dataclass(frozen=True, slots=True)
class CodeFormat:
    """How one side of a cache, the keys or the values, is stored.

    Args:
        codes: "fp8_e4m3", "fp8_e5m2", "int8" or "int4". int4 is stored as uint8 [..., D / 2]: with Q = D / 4, the bytes
            2 j and 2 j + 1 hold the codes of the elements j, j + Q, j + 2 Q and j + 3 Q, four bits each, lowest first.
        scale: what has a scale of its own. "tensor": float32 [] or [1]. "head": float32 [Hkv]. "channel", for keys:
            float32 [Hkv, D]. "token": float32 [B, Hkv, N] ([B, N, Hkv] for "bnhd"; with pages [pages, Hkv, page_size]
            or [pages, page_size, Hkv]). "group", for int4, its only one: float16 [B, Hkv, N, D / group], likewise.
        group: 32, 64 or 128 elements along D; None means 64 for "group" and nothing else.
        zero_point: for "group": the scales are [..., D / group, 2], a scale and the code that means 0, which need not
            be a whole number.

    Raises:
        ValueError: a combination that does not exist.

    Example:
        >>> CodeFormat("int4", "group", group=32).group
        32
    """

    codes: str
    scale: str
    group: int | None = None
    zero_point: bool = False

    def __post_init__(self) -> None:
        if self.codes not in CODE_DTYPES:
            raise ValueError(f"codes must be one of {list(CODE_DTYPES)}, got {self.codes!r}")
        if self.scale not in SCALES:
            raise ValueError(f"scale must be one of {list(SCALES)}, got {self.scale!r}")
        if (self.codes == "int4") != (self.scale == "group"):
            allowed = "'group' for int4 codes" if self.codes == "int4" else f"other than 'group' for {self.codes} codes"
            raise ValueError(f"scale must be {allowed}, got {self.scale!r}")
        if not isinstance(self.zero_point, bool):
            raise TypeError(f"zero_point must be a bool, got {type(self.zero_point).__name__}")
        if self.scale != "group":
            if self.group is not None:
                raise ValueError(f"group must be None for scale {self.scale!r}, got {self.group!r}")
            if self.zero_point:
                raise ValueError(f"zero_point must be False for scale {self.scale!r}, got True")
        elif self.group is None:
            object.__setattr__(self, "group", 64)
        elif isinstance(self.group, bool) or self.group not in GROUPS:
            raise ValueError(f"group must be one of {list(GROUPS)}, got {self.group!r}")

    def __str__(self) -> str:
        scale = f"group{self.group}" if self.group else self.scale
        return f"{self.codes}:{scale}{'+zero' if self.zero_point else ''}"

    @staticmethod
    def parse(text: str) -> CodeFormat:
        """A format by its name, such as "int8:head" or "int4:group32+zero"; "int8" alone as KVFormat.parse() has it."""
        side = _side_of(text)
        if side is None:
            raise ValueError(f"codes must be one of {list(CODE_DTYPES)}, got {text!r}")
        return side if isinstance(side, CodeFormat) else CodeFormat(side, _DEFAULT_SCALES[side])

    @property
    def dtype(self) -> torch.dtype:
        """Of the codes that quantize_kv() makes."""
        return CODE_DTYPES[self.codes][0]

    @property
    def is_by_token(self) -> bool:
        """Whether every token has scales of its own, which are made with it."""
        return self.scale in ("token", "group")

    @property
    def scale_dtype(self) -> torch.dtype:
        return torch.float16 if self.scale == "group" else torch.float32

    def token_bytes(self, width: int) -> int:
        """Bytes of a row of so many elements, with the scales of its own."""
        scales = math.prod(self.scale_shape(1, 1, 1, width)) if self.is_by_token else 0
        return self.code_width(width) + scales * self.scale_dtype.itemsize

    def code_width(self, width: int) -> int:
        """The last axis of the codes of rows of so many elements."""
        return width // 2 if self.codes == "int4" else width

    def scale_shape(
        self, batch: int, heads: int, length: int, width: int, layout: str = "bhnd"
    ) -> tuple[int, ...]:  # fmt: skip
        """The shape of the scales of a cache of such sizes; with pages, batch and length are theirs."""
        rows = (batch, heads, length) if layout == "bhnd" else (batch, length, heads)
        if self.group is not None:
            return (*rows, width // self.group, 2) if self.zero_point else (*rows, width // self.group)
        return {"tensor": (), "head": (heads,), "channel": (heads, width), "token": rows}[self.scale]


@dataclass(frozen=True, slots=True)
class KVFormat:
    """How the keys and the values of a cache are stored; they may differ.

    Args:
        k: of the keys; None: they have the dtype of q.
        v: of the values, likewise; their scales are not per channel.

    Example:
        >>> KVFormat(CodeFormat("int8", "channel"), CodeFormat("int4", "group"))
        KVFormat.parse('int8:channel/int4:group64')
    """

    k: CodeFormat | None
    v: CodeFormat | None

    def __post_init__(self) -> None:
        for name in ("k", "v"):
            side = getattr(self, name)
            if side is not None and not isinstance(side, CodeFormat):
                raise TypeError(f"{name} must be a CodeFormat or None, got {type(side).__name__}")
        if self.v is not None and self.v.scale == "channel":
            raise ValueError("v must have scales other than 'channel', which fold into q and so are for keys")

    def __str__(self) -> str:
        k, v = ["none" if x is None else str(x) for x in (self.k, self.v)]  # torch.compile knows str(x), not f"{x}"
        return f"{k}/{v}"

    def __repr__(self) -> str:
        return f"KVFormat.parse({str(self)!r})"

    @property
    def label(self) -> str:
        """The shortest name, as one would type it: without scales that the codes have anyway."""
        k, v = (
            "none" if x is None else x.codes if x == CodeFormat.parse(x.codes) else str(x) for x in (self.k, self.v)
        )
        return k if k == v else f"{k}/{v}"

    def token_bytes(self, width: int, element_size: int) -> int:
        """Bytes of a key and its value of one head, each so wide, with the scales of their own."""
        return sum(width * element_size if x is None else x.token_bytes(width) for x in (self.k, self.v))

    @staticmethod
    def parse(kv_format: str | KVFormat | None) -> KVFormat | None:
        """A format by its name.

        Args:
            kv_format: "fp8" or "fp8_e4m3", and "fp8_e5m2" (a scale per tensor), "int8" (per token), "int4" (groups of
                64), with other scales "fp8:head", "int8:channel", "int4:group32+zero" and so on, and two of them with a
                slash between for keys and values that differ, of which one may be "none". A KVFormat and None stay.

        Raises:
            ValueError, TypeError: not a format.

        Example:
            >>> KVFormat.parse("int8/int4:group32").v
            CodeFormat(codes='int4', scale='group', group=32, zero_point=False)
        """
        k, v = split_sides(kv_format)
        if kv_format is None or isinstance(kv_format, KVFormat):
            return kv_format
        return KVFormat(*(CodeFormat(x, _DEFAULT_SCALES[x]) if isinstance(x, str) else x for x in (k, v)))


class QuantizedKV(NamedTuple):
    """What quantize_kv() makes, in the order of flash_decode()'s arguments."""

    k: Tensor
    v: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None
    kv_format: KVFormat


Side = CodeFormat | str | None


def split_sides(kv_format: str | KVFormat | None) -> tuple[Side, Side]:
    """What a format says of the keys and of the values: a format, codes whose scales it leaves open, or no codes."""
    if kv_format is None:
        return None, None
    if isinstance(kv_format, KVFormat):
        return kv_format.k, kv_format.v
    if not isinstance(kv_format, str):
        raise TypeError(f"kv_format must be a KVFormat, a str or None, got {type(kv_format).__name__}")
    parts = kv_format.split("/")
    try:
        k, v = (_side_of(part) for part in (parts * 2 if len(parts) == 1 else parts))
        KVFormat(*(x if isinstance(x, CodeFormat) else None for x in (k, v)))
    except ValueError as error:
        raise ValueError(
            f"kv_format must name a format such as 'fp8' or 'int4:group32', got {kv_format!r}: {error}"
        ) from error
    return k, v


def _side_of(text: str) -> Side:
    """A side by its name; only the codes where it names no scales."""
    codes, colon, scale = text.partition(":")
    codes = _ALIASES.get(codes, codes)
    if not colon:
        if codes != "none" and codes not in CODE_DTYPES:
            raise ValueError(f"codes must be one of {list(CODE_DTYPES)}, got {text!r}")
        return None if codes == "none" else codes
    scale, plus, zero = scale.partition("+")
    if plus and zero != "zero":
        raise ValueError(f"scale must be followed by '+zero' or nothing, got {text!r}")
    group = None
    if scale.startswith("group") and scale[5:].isdecimal():
        scale, group = "group", int(scale[5:])
    return CodeFormat(codes, scale, group, bool(plus))


def side_of_dtype(dtype: torch.dtype) -> str | None:
    """The codes that a dtype stands for by itself."""
    return _CODES_OF.get(dtype)


def resolve_side(name: str, side: CodeFormat | str, scale: Tensor | float | None, width: int) -> CodeFormat:
    """The format of one side whose codes are known: scales that it leaves open are read off those of the call.

    Args:
        name: "k" or "v".
        width: elements of a row.
    """
    codes = side if isinstance(side, str) else side.codes
    if scale is None:
        if codes.startswith("fp8"):
            return CodeFormat(codes, "tensor")
        raise ValueError(f"{name}_scale must be given with {codes} codes, got None")
    if isinstance(side, CodeFormat):
        return side
    axes = scale.ndim if isinstance(scale, Tensor) else 0
    if codes == "int4":
        groups = scale.shape[3] if isinstance(scale, Tensor) and axes in (4, 5) else 0
        group = width // groups if groups else 0
        if group not in GROUPS:
            raise ValueError(
                f"{name}_scale must have shape [B, Hkv, N, {width} / group] or [B, Hkv, N, {width} / group, 2] for "
                f"int4 codes, with a group of {', '.join(map(str, GROUPS))}, got {_shape(scale)}"
            )
        return CodeFormat(codes, "group", group, axes == 5)
    if axes == 2 and name == "v":
        raise ValueError(f"v_scale must not be per channel, which is for keys, got shape {_shape(scale)}")
    if axes > 3:
        raise ValueError(f"{name}_scale must have at most 3 axes for {codes} codes, got shape {_shape(scale)}")
    if axes == 1 and isinstance(scale, Tensor) and scale.shape[0] == 1:
        axes = 0
    return CodeFormat(codes, ("tensor", "head", "channel", "token")[axes])


def find_scale_errors(
    name: str, form: CodeFormat, scale: Tensor | float | None, codes: Tensor, width: int, layout: str
) -> Iterator[Exception]:
    """What is wrong with a format or the scales of one side, apart from their values.

    Args:
        name: "k_scale" or "v_scale", with any prefix.
        scale: None: there are none, or they are yet to be made.
        codes: the side itself, [batch, heads, length, width as stored] or as the layout has it.
        width: elements of a row.
    """
    side = name.removesuffix("_scale")[-1]
    yield from find_width_errors(side, form, width)
    if scale is None or (form.group is not None and width % form.group):
        return
    if not isinstance(scale, Tensor):
        if form.scale != "tensor":
            yield TypeError(f"{name} must be a torch.Tensor for scales per {form.scale}, got {type(scale).__name__}")
        return
    if scale.layout != torch.strided:
        yield TypeError(f"{name} must be a dense tensor, got layout {scale.layout}")
        return
    batch, heads, length = (codes.shape[i] for i in ((0, 1, 2) if layout == "bhnd" else (0, 2, 1)))
    if scale.dtype != form.scale_dtype:
        wanted = str(form.scale_dtype).removeprefix("torch.")
        yield TypeError(f"{name} must be {wanted} for scales per {form.scale}, got {scale.dtype}")
    shape = form.scale_shape(batch, heads, length, width, layout)
    if scale.shape != shape and not (form.scale == "tensor" and scale.shape == (1,)):
        wanted = "[] or [1]" if form.scale == "tensor" else str(list(shape))
        yield ValueError(f"{name} must have shape {wanted} for scales per {form.scale}, got {list(scale.shape)}")
    elif form.scale in ("head", "channel", "group") and scale.numel() and not _is_dense(scale, form):
        yield ValueError(f"{name} must have contiguous rows of scales, got strides {list(scale.stride())}")
    if scale.device != codes.device and not (scale.ndim == 0 and scale.device.type == "cpu"):
        yield ValueError(f"{name} must be on the device of the codes, {codes.device}, got {scale.device}")


def find_width_errors(side: str, form: CodeFormat | None, width: int | None) -> Iterator[ValueError]:
    """A width of keys or values that a format does not fit, where it is known; side: "k" or "v"."""
    if form is None or width is None:
        return
    if form.codes == "int4" and width % 8:
        yield ValueError(f"{side} must have a width that is a multiple of 8 for int4 codes, got {width}")
    if form.group is not None and width % form.group:
        yield ValueError(f"group must divide the width of {side}, {width}, got {form.group}")


def _is_dense(scale: Tensor, form: CodeFormat) -> bool:
    """Whether the scales of a row follow each other in memory."""
    steps = scale.stride()
    if form.zero_point:
        return steps[-1] == 1 and (steps[-2] == 2 or scale.shape[-2] == 1)
    return steps[-1] == 1 or scale.shape[-1] == 1


def find_value_errors(name: str, scale: Tensor | float) -> Iterator[Exception]:
    """Scales that make no sense; reads them. Not those per token and group, where unused ones may hold anything."""
    if isinstance(scale, Tensor):
        # Another dtype or layout is refused by itself.
        if scale.ndim > 2 or scale.numel() == 0 or scale.dtype != torch.float32 or scale.layout != torch.strided:
            return
        low, high = torch.aminmax(scale.abs())  # both are NaN where one is
        good = float(low) > 0.0 and float(high) < math.inf
    else:
        good = 2.0**-126 <= abs(scale) <= torch.finfo(torch.float32).max
    if not good:
        got = "one that is not" if isinstance(scale, Tensor) else scale
        yield ValueError(f"{name} must be finite and not 0, got {got}")


def is_number(x: object) -> bool:
    """Whether a scale came as a plain number."""
    return isinstance(x, Real) and not isinstance(x, bool)


def place_scale(scale: Tensor | float | None, device: torch.device) -> Tensor | None:
    """Scales as kernels want them: a number, and a CPU's tensor of one number, as a tensor on the device."""
    if scale is None or (isinstance(scale, Tensor) and scale.device == device):
        return scale
    # Filled, not copied: a copy from a CPU waits, and none can be captured.
    return torch.full((), float(scale), dtype=torch.float32, device=device)


def quantize_kv(
    k: Tensor,
    v: Tensor,
    kv_format: str | KVFormat,
    *,
    layout: str = "bhnd",
    k_scale: Tensor | float | None = None,
    v_scale: Tensor | float | None = None,
    check: bool = True,
) -> QuantizedKV:
    """Keys and values as a quantised cache holds them.

    Args:
        k: [B, Hkv, N, D] ([B, N, Hkv, D] for "bnhd"), or pages with their number for B; float16, bfloat16 or float32.
        v: likewise, Dv wide.
        kv_format: a KVFormat, or a name as in KVFormat.parse(). A side whose format is None is returned as it is.
        layout: "bhnd" or "bnhd".
        k_scale: scales to use, as CodeFormat has them; None takes them from the data: the largest finite magnitude over
            the largest code, 1 where all is 0. With a zero point the range that is covered includes 0.
        v_scale: likewise.
        check: refuse NaN, and given scales per tensor, head and channel that are 0 or not finite, which waits for a
            GPU. Without it NaN becomes 0.

    Returns:
        (k, v, k_scale, v_scale, kv_format), with the names and in the form that flash_decode() takes.

    Raises:
        ValueError: shapes or values that do not fit.
        TypeError: a wrong type or dtype.

    Example:
        >>> k, v = torch.randn(1, 2, 100, 64), torch.randn(1, 2, 100, 64)
        >>> cache = quantize_kv(k, v, "int8")
        >>> cache.k.dtype, cache.k_scale.shape
        (torch.int8, torch.Size([1, 2, 100]))
    """
    sides = _checked_sides(kv_format, layout, k=k, v=v)
    codes_k, k_scales, k_form = _quantize_side("k", k, sides[0], k_scale, layout, check)
    codes_v, v_scales, v_form = _quantize_side("v", v, sides[1], v_scale, layout, check)
    return QuantizedKV(codes_k, codes_v, k_scales, v_scales, KVFormat(k_form, v_form))


def _quantize_side(
    name: str, x: Tensor, side: Side, scale: Tensor | float | None, layout: str, check: bool
) -> tuple[Tensor, Tensor | None, CodeFormat | None]:
    """Codes, scales and their format; no codes where the format has none."""
    if side is None:
        _refuse_scale(name, scale)
        return x, None, None
    if x.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise TypeError(f"{name} must be float16, bfloat16 or float32, got {x.dtype}")
    if scale is not None:
        form = resolve_side(name, side, scale, x.shape[3])
    else:
        form = side if isinstance(side, CodeFormat) else CodeFormat(side, _DEFAULT_SCALES[side])
    for error in find_scale_errors(f"{name}_scale", form, scale, x, x.shape[3], layout):
        raise error
    if check and not torch.compiler.is_compiling():
        if bool(x.isnan().any()):
            raise ValueError(f"{name} must hold no NaN, got some; check=False makes them 0")
        for error in () if scale is None else find_value_errors(f"{name}_scale", scale):
            raise error
    given, x = place_scale(scale, x.device), x.float()
    if given is None:
        given = _find_scale(x, form, layout)
    return _encode(x, form, given, layout), given, form


def dequantize_kv(
    k: Tensor,
    v: Tensor,
    kv_format: str | KVFormat | None = None,
    *,
    layout: str = "bhnd",
    k_scale: Tensor | float | None = None,
    v_scale: Tensor | float | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """The keys and values that codes and scales stand for: what flash_decode() attends to.

    Args:
        k, v, layout, k_scale, v_scale: as quantize_kv() returns them and flash_decode() takes them.
        kv_format: None reads the codes off the dtypes, as flash_decode() does.
        dtype: of the result. Its numbers are those of float32, rounded, or of float64.

    Returns:
        (k, v). fp8 codes of infinity and NaN, which quantize_kv() never makes, are what torch has them for.

    Raises:
        ValueError, TypeError: as for quantize_kv().

    Example:
        >>> k, v = torch.randn(1, 2, 100, 64), torch.randn(1, 2, 100, 64)
        >>> *cache, k_scale, v_scale, kv_format = quantize_kv(k, v, "int8")
        >>> back, _ = dequantize_kv(*cache, kv_format, k_scale=k_scale, v_scale=v_scale)
        >>> bool(((back - k).abs() <= 0.501 * k_scale[..., None]).all())
        True
    """
    sides = _checked_sides(kv_format, layout, k=k, v=v)
    if kv_format is None:
        sides = side_of_dtype(k.dtype), side_of_dtype(v.dtype)
    wide = []
    for name, x, side, scale in zip("kv", (k, v), sides, (k_scale, v_scale), strict=True):
        if side is None:
            if x.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
                raise TypeError(f"{name} must be floating-point numbers or have a kv_format, got {x.dtype}")
            _refuse_scale(name, scale)
            wide.append(x.to(dtype))
            continue
        for error in find_code_errors(name, side, x.dtype):
            raise error
        width = element_width(side, x)
        form = resolve_side(name, side, scale, width)
        for error in find_scale_errors(f"{name}_scale", form, scale, x, width, layout):
            raise error
        number = torch.float64 if dtype == torch.float64 else torch.float32
        wide.append(_decode(x, form, place_scale(scale, x.device), layout, number).to(dtype))
    return wide[0], wide[1]


def find_code_errors(name: str, side: CodeFormat | str, dtype: torch.dtype) -> Iterator[Exception]:
    """Whether a dtype can hold the codes."""
    codes = side if isinstance(side, str) else side.codes
    if dtype not in CODE_DTYPES[codes]:
        names = " or ".join(str(x).removeprefix("torch.") for x in CODE_DTYPES[codes])
        yield TypeError(f"{name} must be {names} for {codes} codes, got {dtype}")


def element_width(side: Side, codes: Tensor) -> int:
    """Elements of a row, of which int4 has two in a byte."""
    name = side.codes if isinstance(side, CodeFormat) else side
    return codes.shape[-1] * (2 if name == "int4" else 1)


def _checked_sides(kv_format: str | KVFormat | None, layout: str, **sides: Tensor) -> tuple[Side, Side]:
    if layout not in ("bhnd", "bnhd"):
        raise ValueError(f"layout must be one of ['bhnd', 'bnhd'], got {layout!r}")
    for name, x in sides.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        if x.ndim != 4:
            raise ValueError(f"{name} must have 4 axes, got shape {list(x.shape)}")
    return split_sides(kv_format)


def _refuse_scale(name: str, scale: Tensor | float | None) -> None:
    if scale is not None:
        raise ValueError(f"{name}_scale must be None where {name} has no codes, got one")


def _shape(scale: Tensor | float) -> list[int]:
    return list(scale.shape) if isinstance(scale, Tensor) else []


def _find_scale(x: Tensor, form: CodeFormat, layout: str) -> Tensor:
    """The scales that just hold x, float32."""
    x = x.where(x.isfinite(), 0.0)
    length = 2 if layout == "bhnd" else 1
    if form.group is not None:
        x = x.unflatten(-1, (-1, form.group))
    if form.zero_point:
        low, high = (-_over(-x, (-1,))).clamp(max=0.0), _over(x, (-1,)).clamp(min=0.0)
        # Divided first, because the difference of two floats may be too large for one.
        scale = _half_scale(_divided(high, _LARGEST_INT4) - _divided(low, _LARGEST_INT4))
        # At most the largest code where the scale does not cover the range: what means 0 must be a code.
        zero = (-low / scale.float()).clamp(max=_LARGEST_INT4)
        return torch.stack((scale, zero.half()), dim=-1)
    axes = {"tensor": (0, 1, 2, 3), "head": (0, length, 3), "channel": (0, length)}.get(form.scale, (-1,))
    scale = _divided(_over(x.abs(), axes), LARGEST_CODE[form.codes])
    if form.scale == "group":
        return _half_scale(scale)
    return scale.clamp(min=torch.finfo(torch.float32).tiny).where(scale > 0, 1.0)


def _divided(x: Tensor, by: float) -> Tensor:
    """x / by, rounded once; by a number a GPU would multiply with the rounded inverse."""
    return x / torch.full((), by, dtype=x.dtype, device=x.device)


def _half_scale(scale: Tensor) -> Tensor:
    """Rounded to float16, neither to 0 nor to infinity; 1 for 0."""
    return scale.clamp(2.0**-24, torch.finfo(torch.float16).max).where(scale > 0, 1.0).half()


def _over(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    """The largest along some axes; 0 of nothing."""
    return x.amax(dim=axes) if x.numel() else x.sum(dim=axes)


def _spread(scale: Tensor, form: CodeFormat, layout: str) -> Tensor:
    """Scales [..., Hkv, N or 1, D or 1], or as the layout has it, to multiply elements with."""
    if form.scale == "tensor":
        return scale.reshape(())
    if form.scale in ("head", "channel"):
        scale = scale[:, None] if form.scale == "head" else scale  # [Hkv, D or 1]
        return scale[:, None] if layout == "bhnd" else scale
    return scale[..., None] if form.group is None else scale.repeat_interleave(form.group, dim=-1)


def _encode(x: Tensor, form: CodeFormat, scale: Tensor, layout: str) -> Tensor:
    """Float32 to codes."""
    if form.codes == "int4":
        scale, zero = scale.float().unbind(-1) if form.zero_point else (scale.float(), None)
        codes = x / _spread(scale, form, layout) + (_ZERO if zero is None else _spread(zero, form, layout))
        # NaN means 0, which need not be the code 0.
        codes = codes.where(~x.isnan(), _ZERO if zero is None else _spread(zero, form, layout))
        return pack_int4(codes.round().clamp(0, _LARGEST_INT4).to(torch.uint8))
    largest = LARGEST_CODE[form.codes]
    codes = (x / _spread(scale, form, layout)).clamp(-largest, largest).where(~x.isnan(), 0.0)
    return codes.round().to(torch.int8) if form.codes == "int8" else codes.to(form.dtype)


def _decode(codes: Tensor, form: CodeFormat, scale: Tensor | None, layout: str, dtype: torch.dtype) -> Tensor:
    """Codes to float32 or float64."""
    if form.codes == "int4":
        assert scale is not None, "int4 has one"
        x = unpack_int4(codes).to(dtype)
        scale, zero = scale.to(dtype).unbind(-1) if form.zero_point else (scale.to(dtype), None)
        return (x - (_ZERO if zero is None else _spread(zero, form, layout))) * _spread(scale, form, layout)
    if form.codes != "int8":
        codes = codes.view(form.dtype).float()  # exact, and there is no way to float64 on some devices
    x = codes.to(dtype)
    return x if scale is None else x * _spread(scale.to(dtype), form, layout)


def pack_int4(codes: Tensor) -> Tensor:
    """Codes 0 to 15 as uint8 [..., D] to two in a byte, [..., D / 2], in the order that CodeFormat has."""
    first, second, third, fourth = codes.unflatten(-1, (4, -1)).unbind(-2)
    return torch.stack((first | second << 4, third | fourth << 4), dim=-1).flatten(-2)


def unpack_int4(packed: Tensor) -> Tensor:
    """pack_int4() undone."""
    pairs = packed.unflatten(-1, (-1, 2))
    low, high = pairs & 15, pairs >> 4
    return torch.cat((low[..., 0], high[..., 0], low[..., 1], high[..., 1]), dim=-1)
