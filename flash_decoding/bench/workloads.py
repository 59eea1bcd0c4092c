"""What is measured, as data: shapes, cases and suites. Knows no tensor and no device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

DTYPES = ("bfloat16", "float16", "float32")
ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class Shape:
    """One decode step: a query token per sequence against a dense cache."""

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
class Case:
    """A shape in a suite, with the dtype it is measured in."""

    suite: str
    name: str
    shape: Shape
    dtype: str
    device: str = "cuda"

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V: what one decode step must read."""
        s = self.shape
        return 2 * s.batch * s.heads_kv * s.kv_len * s.head_dim * ITEMSIZE[self.dtype]

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict) -> Case:
        return cls(**{**fields, "shape": Shape(**fields["shape"])})


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

SUITES: dict[str, tuple[Case, ...]] = {
    "article": _cases("article", ARTICLE, ("bfloat16",), "cuda"),
    "serving": _cases("serving", SERVING, ("bfloat16",), "cuda"),
    "latency": _cases("latency", LATENCY, ("bfloat16",), "cuda"),
    "cpu": _cases("cpu", ((1, 32, 8, 8192, 128), (1, 8, 1, 32768, 128)), ("float32", "bfloat16", "float16"), "cpu")
    + _cases("cpu", ((2, 8, 8, 8000, 64),), ("float32",), "cpu"),
}


def parse_shape(text: str) -> Shape:
    """The shape written as B,Hq,Hkv,N,D, as in 1,32,8,8192,128."""
    parts = text.replace(" ", "").split(",")
    if len(parts) != 5 or not all(part.isdigit() for part in parts):
        raise ValueError(f"shape must be five whole numbers B,Hq,Hkv,N,D, got {text!r}")
    return Shape(*map(int, parts))


def select_cases(suites: Sequence[str], shapes: Sequence[str], dtype: str | None, device: str) -> list[Case]:
    """The cases of the named suites, then one case per given shape in the suite "shape".

    Args:
        suites: names in SUITES, or "all" for every suite of the device.
        dtype: replaces the suites' dtype; None keeps it, and means bfloat16 for given shapes.
        device: "cuda" or "cpu": what given shapes run on, and what "all" means.
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
        seen = dict.fromkeys(Case(c.suite, str(c.shape), c.shape, dtype, c.device) for c in cases)
        cases = list(seen)
    for text in shapes:
        shape = parse_shape(text)
        cases.append(Case("shape", str(shape), shape, dtype or ("float32" if device == "cpu" else "bfloat16"), device))
    return cases
