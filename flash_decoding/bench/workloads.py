"""What is measured, as data: shapes, cases and suites. Makes no tensor and asks no device."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from flash_decoding.quantization import CodeFormat, KVFormat

DTYPES = ("bfloat16", "float16", "float32")
ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of one decode step."""

    batch: int
    heads_q: int
    heads_kv: int
    kv_len: int
    head_dim: int

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.heads_q % self.heads_kv != 0:
            raise ValueError(f"heads_q must be a multiple of heads_kv, got {self.heads_q} and {self.heads_kv}")

    @property
    def group(self) -> int:
        return self.heads_q // self.heads_kv

    def __str__(self) -> str:
        return f"b{self.batch}-h{self.heads_q}x{self.heads_kv}-n{self.kv_len}-d{self.head_dim}"


@dataclass(frozen=True, slots=True)
class Options:
    """What a decode step has beyond one query token per sequence and a dense, full cache."""

    q_len: int = 1  # query tokens per sequence, causal
    page_size: int | None = None  # keys per page; the pages of all sequences are shuffled. None: dense
    kv_lens: tuple[int, ...] | None = None  # keys per sequence, in pages; None: kv_len each
    window: int | None = None  # keys left of its own position that a query sees; None: all

    def __post_init__(self) -> None:
        for name in ("q_len", "page_size", "window"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.kv_lens is not None and self.page_size is None:
            raise ValueError("kv_lens must be given with a page_size, got none")

    def to_json(self) -> dict[str, Any]:
        """The options that are set."""
        return {name: value for name, value in asdict(self).items() if value != getattr(DENSE, name)}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Options:
        lens = fields.get("kv_lens")
        return cls(**fields | ({"kv_lens": tuple(lens)} if lens is not None else {}))

    def __str__(self) -> str:
        parts = [f"lq{self.q_len}"] * (self.q_len > 1)
        parts += [f"page{self.page_size}"] * (self.page_size is not None)
        parts += ["ragged"] * (self.kv_lens is not None)
        parts += [f"window{self.window}"] * (self.window is not None)
        return "-".join(parts)


DENSE = Options()


@dataclass(frozen=True, slots=True)
class Case:
    """A shape in a suite, with the dtype it is measured in."""

    suite: str
    name: str
    shape: Shape
    dtype: str
    device: str = "cuda"
    options: Options = DENSE
    baseline: str | None = None  # the case of the same suite that this one's time is compared with
    kv_format: str | None = None  # of K and of V, as CodeFormat.parse() has it; None: dtype
    ours_only: bool = False  # there to be compared with; other suites measure the peers on it

    def __post_init__(self) -> None:
        if self.kv_format is not None:
            try:
                form = CodeFormat.parse(self.kv_format)
                KVFormat(form, form)
            except ValueError as error:
                rule = "kv_format must name one format of keys and of values, as 'fp8' or 'int4:group32'"
                raise ValueError(f"{rule}, got {self.kv_format!r}") from error
            if self.shape.head_dim % (form.group or 1):
                raise ValueError(
                    f"kv_format must have a group that divides head_dim {self.shape.head_dim}, got {self.kv_format!r}"
                )
        lens = self.options.kv_lens
        if lens is not None and (len(lens) != self.shape.batch or not 1 <= min(lens) <= max(lens) <= self.shape.kv_len):
            raise ValueError(
                f"kv_lens must be {self.shape.batch} lengths from 1 to {self.shape.kv_len}, "
                f"got {len(lens)} from {min(lens, default=0)} to {max(lens, default=0)}"
            )

    @property
    def form(self) -> CodeFormat | None:
        """How K and V are quantised, each with scales of its own."""
        return None if self.kv_format is None else CodeFormat.parse(self.kv_format)

    @property
    def kv_dtype(self) -> str:
        """What K and V are stored as."""
        return self.dtype if self.form is None else str(self.form)

    @property
    def kv_lens(self) -> tuple[int, ...]:
        """Keys per sequence."""
        return self.options.kv_lens or (self.shape.kv_len,) * self.shape.batch

    @property
    def cache_shape(self) -> tuple[int, int, int, int]:
        """Elements of K and of V: [B, Hkv, N, D], or [pages, Hkv, page_size, D] with as many pages as the keys fill."""
        s, page_size = self.shape, self.options.page_size
        if page_size is None:
            return s.batch, s.heads_kv, s.kv_len, s.head_dim
        return sum(-(-keys // page_size) for keys in self.kv_lens), s.heads_kv, page_size, s.head_dim

    @property
    def cache_bytes(self) -> int:
        """Bytes that K and V occupy."""
        pages_or_sequences, _, keys, _ = self.cache_shape
        return 2 * self._side_bytes(pages_or_sequences * keys)

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V that one decode step must read: those of the keys that a query sees, codes and scales."""
        window = self.options.window
        seen = self.kv_lens if window is None else (min(keys, window + self.options.q_len) for keys in self.kv_lens)
        return 2 * self._side_bytes(sum(seen))

    def _side_bytes(self, keys: int) -> int:
        """Bytes of so many keys, or values, of every KV head."""
        s, form = self.shape, self.form
        if form is None:
            return s.heads_kv * keys * s.head_dim * ITEMSIZE[self.dtype]
        scales = math.prod(form.scale_shape(1, s.heads_kv, keys, s.head_dim))
        return s.heads_kv * keys * form.code_width(s.head_dim) + scales * form.scale_dtype.itemsize

    def to_json(self) -> dict[str, object]:
        return asdict(self) | {"options": self.options.to_json()}

    @classmethod
    def from_json(cls, fields: dict) -> Case:
        made = {"shape": Shape(**fields["shape"]), "options": Options.from_json(fields["options"])}
        return cls(**{**fields, **made})


def _name(shape: Shape, options: Options = DENSE, kv_format: str | None = None) -> str:
    parts = [str(shape), *([str(options)] if options != DENSE else []), *([kv_format] if kv_format else [])]
    return "-".join(parts)


def _option_case(
    suite: str, sizes: tuple[int, ...], options: Options = DENSE, than: tuple[int, ...] | None = None
) -> Case:
    """A bfloat16 case; than: the dense sizes of the case that it is compared with."""
    shape = Shape(*sizes)
    baseline = None if than is None else str(Shape(*than))
    return Case(suite, _name(shape, options), shape, "bfloat16", options=options, baseline=baseline)


def _cases(suite: str, shapes: Iterable[tuple[int, ...]], dtypes: Sequence[str], device: str) -> tuple[Case, ...]:
    made = []
    for sizes in shapes:
        shape = Shape(*sizes)
        for dtype in dtypes:
            name = str(shape) if len(dtypes) == 1 else f"{shape}-{dtype}"
            made.append(Case(suite, name, shape, dtype, device))
    return tuple(made)


# The shapes of the article that gave the idea: two sequences, 8 heads, a long and a short cache, and a tiny one.
ARTICLE = ((2, 8, 8, 65536, 64), (2, 8, 8, 65536, 128), (2, 8, 8, 8000, 64), (2, 8, 8, 8000, 128),
           (1, 8, 8, 512, 64), (1, 8, 8, 512, 128))  # fmt: skip
# Grouped-query and multi-query shapes as language models are served: one user, a long context, full batches.
SERVING = ((1, 32, 8, 1024, 128), (1, 32, 8, 8192, 128), (1, 32, 8, 131072, 128), (16, 32, 8, 8192, 128),
           (64, 32, 8, 4096, 128), (1, 8, 1, 32768, 128), (8, 28, 4, 8192, 128), (4, 64, 8, 16384, 64))  # fmt: skip
LATENCY = tuple((1, 32, 8, kv_len, 128) for kv_len in (128, 256, 512, 1024, 2048, 4096))

# Batches whose sequences differ: lengths drawn log-uniform from 256 to 16384, from 16 to 4096 and from 1000 to 60000,
# and kept as numbers, because what a seed gives differs between versions and machines.
RAGGED = (
    (16384, (
        2016, 6248, 369, 443, 919, 3576, 1965, 10650, 1702, 3550, 1092, 1360, 280, 516, 869, 2211, 4659, 7131, 500, 828,
        4358, 11514, 1334, 9707, 1464, 2552, 13460, 297, 553, 1209, 910, 12348, 532, 786, 479, 292, 608, 12235, 5179,
        5610, 2284, 705, 2911, 293, 455, 701, 7605, 6931, 814, 1899, 7743, 16185, 4674, 2712, 8257, 601, 3017, 408, 484,
        699, 5247, 4726, 597, 3838,
    )),
    (4096, (
        600, 1546, 4074, 634, 243, 59, 117, 20, 20, 30, 1782, 831, 3254, 1731, 1765, 454, 1040, 692, 28, 28, 2365, 1456,
        125, 52, 36, 30, 105, 322, 277, 710, 358, 523, 2045, 476, 213, 1003, 668, 842, 121, 16, 96, 2417, 99, 63, 78,
        1403, 3311, 18, 98, 2306, 475, 1494, 28, 1340, 64, 45, 84, 33, 584, 1647, 41, 690, 32, 1174, 201, 308, 28, 706,
        734, 96, 77, 2243, 1841, 62, 686, 78, 18, 226, 24, 69, 207, 43, 1283, 112, 29, 408, 506, 122, 31, 879, 100, 81,
        2412, 53, 1241, 263, 140, 45, 3743, 335, 380, 28, 1827, 248, 881, 1678, 495, 1296, 70, 817, 795, 1035, 101,
        1208, 2881, 66, 191, 196, 1032, 183, 480, 88, 612, 1319, 444, 3778, 3010, 35,
    )),
    (60000, (1748, 5623, 1070, 2435, 39517, 2421, 25774, 2775)),
)  # fmt: skip
# What each option costs: beside the same cache without it, and a window beside a cache of as many keys.
LONG, BATCH, SHORT = (1, 32, 8, 131072, 128), (16, 32, 8, 8192, 128), (1, 32, 8, 1024, 128)
OPTIONS = (
    _option_case("options", LONG),
    _option_case("options", LONG, Options(page_size=16), LONG),
    _option_case("options", LONG, Options(page_size=64), LONG),
    _option_case("options", BATCH),
    _option_case("options", BATCH, Options(page_size=16), BATCH),
    _option_case("options", BATCH, Options(page_size=64), BATCH),
    _option_case("options", BATCH, Options(q_len=4), BATCH),
    _option_case("options", SHORT),
    _option_case("options", LONG, Options(window=1024), SHORT),
)

# 268 MB of 8-bit codes, and 16.8; per case, beside the same cache in 16 bits.
QUANTISED = ((2, 8, 8, 65536, 128), (16, 32, 8, 8192, 128), (1, 32, 8, 131072, 128), (1, 32, 8, 8192, 128))
KV_FORMATS = ("fp8", "fp8:token", "int8", "int8:tensor", "int4")


def _quantised_cases(sizes: tuple[int, ...], options: Options, kv_formats: Sequence[str]) -> tuple[Case, ...]:
    """The 16-bit cache, which only we are measured on, then the formats, which are compared with it."""
    shape = Shape(*sizes)
    plain = Case("quantised", _name(shape, options), shape, "bfloat16", options=options, ours_only=True)
    return plain, *(
        replace(
            plain, name=_name(shape, options, kv_format), kv_format=kv_format, baseline=plain.name, ours_only=False
        )
        for kv_format in kv_formats
    )  # fmt: skip


SUITES: dict[str, tuple[Case, ...]] = {
    "article": _cases("article", ARTICLE, ("bfloat16",), "cuda"),
    "serving": _cases("serving", SERVING, ("bfloat16",), "cuda"),
    "latency": _cases("latency", LATENCY, ("bfloat16",), "cuda"),
    "ragged": tuple(
        _option_case("ragged", (len(lens), 32, 8, longest, 128), Options(page_size=16, kv_lens=lens))
        for longest, lens in RAGGED
    ),
    "options": OPTIONS,
    "quantised": (
        *(case for sizes in QUANTISED for case in _quantised_cases(sizes, DENSE, KV_FORMATS)),
        *(
            case
            for longest, lens in RAGGED
            for page_size in (16, 64)
            for case in _quantised_cases(
                (len(lens), 32, 8, longest, 128), Options(page_size=page_size, kv_lens=lens), ("fp8",)
            )
        ),
    ),
    "cpu": _cases("cpu", ((1, 32, 8, 8192, 128), (1, 8, 1, 32768, 128)), ("float32", "bfloat16", "float16"), "cpu")
    + _cases("cpu", ((2, 8, 8, 8000, 64),), ("float32",), "cpu"),
}


def parse_shape(text: str) -> Shape:
    """The shape written as B,Hq,Hkv,N,D, as in 1,32,8,8192,128."""
    parts = text.replace(" ", "").split(",")
    if len(parts) != 5 or not all(part.isdigit() for part in parts):
        raise ValueError(f"shape must be five whole numbers B,Hq,Hkv,N,D, got {text!r}")
    return Shape(*map(int, parts))


def select_cases(
    suites: Sequence[str], shapes: Sequence[str], dtype: str | None, device: str, kv_format: str | None = None
) -> list[Case]:
    """The cases of the named suites, then one case per given shape in the suite "shape".

    Args:
        suites: names in SUITES, or "all" for every suite of the device.
        dtype: replaces the suites' dtype; None keeps it, and means bfloat16 for given shapes.
        device: "cuda" or "cpu": what given shapes run on, and what "all" means.
        kv_format: of the given shapes' caches; None means dtype.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    cases: list[Case] = []
    for suite in suites:
        if suite == "all":
            cases += [case for named in SUITES.values() for case in named if case.device == device]
        elif suite in SUITES:
            cases += SUITES[suite]
        else:
            raise ValueError(f"suite must be one of {', '.join(SUITES)} or all, got {suite!r}")
    if dtype is not None:
        cases = list(dict.fromkeys(replace(c, name=_name(c.shape, c.options, c.kv_format), dtype=dtype) for c in cases))
    for text in shapes:
        shape = parse_shape(text)
        name = _name(shape, kv_format=kv_format)
        chosen = dtype or ("float32" if device == "cpu" else "bfloat16")
        cases.append(Case("shape", name, shape, chosen, device, kv_format=kv_format))
    return cases
