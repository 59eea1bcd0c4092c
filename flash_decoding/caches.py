"""Caches to append to and to decode from: KVCache, one stretch of memory per sequence, and PagedKVCache, pages.

Either may be quantised: it then holds codes and their scales, and append() makes them on the way.

How long each sequence is, and which pages it has, is known on the host, so that a full cache is an error before any
launch. A captured CUDA graph does not run the host's part: capture append_kv() and flash_decode() on the tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from numbers import Integral
from typing import Any, cast

import torch
from torch import Tensor

from flash_decoding.api import flash_decode
from flash_decoding.append import append_kv
from flash_decoding.problem import DTYPES, LAYOUTS, find_dim_errors
from flash_decoding.quantization import (
    CodeFormat,
    KVFormat,
    Side,
    element_width,
    find_scale_errors,
    find_value_errors,
    place_scale,
    resolve_side,
    split_sides,
)


class CacheFullError(RuntimeError):
    """There is no room for the new keys; nothing was written."""


def refuse_own(options: dict[str, Any], *own: str) -> None:
    """Raise where options hold what the cache passes on itself."""
    for name in own:
        if name in options:
            got = None if options[name] is None else type(options[name]).__name__
            raise TypeError(f"{name} must not be given, the cache sets it itself, got {got}")


def describe_lengths(lengths: Collection[int]) -> str:
    """The range of numbers on the host."""
    low, high = min(lengths, default=0), max(lengths, default=0)
    return str(low) if low == high else f"{low} to {high}"


class _Storage:
    """What both caches are made of: arrays of keys and values in a layout, as they come or as codes with scales.

    Uninitialised, because nothing that was not written is ever used.
    """

    def __init__(
        self, first: int, heads: int, length: int, head_dim: int, value_dim: int | None, dtype: torch.dtype,
        device: torch.device | str | None, layout: str, kv_format: KVFormat | str | None,
        k_scale: Tensor | float | None, v_scale: Tensor | float | None,
    ) -> None:  # fmt: skip
        if layout not in LAYOUTS:
            raise ValueError(f"layout must be one of {list(LAYOUTS)}, got {layout!r}")
        if dtype not in DTYPES:
            raise TypeError(f"dtype must be float16, bfloat16 or float32, got {dtype}; kv_format names codes")
        widths, middle = (head_dim, head_dim if value_dim is None else value_dim), (heads, length)
        for error in find_dim_errors(*widths):
            raise error
        self.layout = layout
        rows = (first, *(middle if layout == "bhnd" else middle[::-1]))
        (self.k, self.k_scale, k), (self.v, self.v_scale, v) = (
            _make_side(*side, rows, dtype, device, layout)
            for side in zip("kv", split_sides(kv_format), (k_scale, v_scale), widths, strict=True)
        )
        self.kv_format = KVFormat(k, v) if k or v else None

    @property
    def nbytes(self) -> int:
        """Bytes of memory for keys and values, scales included, filled or not."""
        return sum(x.nbytes for x in (self.k, self.v, self.k_scale, self.v_scale) if x is not None)

    def _describe(self, filled: str) -> str:
        """What repr() shows; knows it without a look at the device."""
        forms = (None, None) if self.kv_format is None else (self.kv_format.k, self.kv_format.v)
        sides = list(zip((self.k, self.v), forms, strict=True))
        shapes = [[*x.shape[:3], element_width(form, x)] for x, form in sides]
        kinds = [str(form or x.dtype).removeprefix("torch.") for x, form in sides]
        k, v = (f"{shape} {kind}" for shape, kind in zip(shapes, kinds, strict=True))
        what = f"k and v {k}" if k == v else f"k {k}, v {v}"
        return f"<{type(self).__name__}: {what}, {self.layout}, {filled}, {self.k.device}, {self.nbytes / 1e6:.3g} MB>"

    @property
    def _codes(self) -> dict[str, Any]:
        """The arguments of append_kv() and flash_decode() that say what is in the arrays."""
        return {
            "layout": self.layout, "kv_format": self.kv_format, "k_scale": self.k_scale, "v_scale": self.v_scale
        }  # fmt: skip


class KVCache(_Storage):
    """A dense cache of a batch: memory for max_len keys per sequence, filled from the front.

    Attributes: k [B, Hkv, max_len, D] and v [B, Hkv, max_len, Dv] ([B, max_len, Hkv, D] for layout "bnhd"), kv_lens [B]
    int32 on their device, lengths (the same, a list of ints on the host), layout, nbytes; kv_format, k_scale and
    v_scale, which are None for a cache that is not quantised.

    Args:
        batch: sequences.
        heads_kv: KV heads.
        max_len: keys that each sequence has room for.
        head_dim: width of a key.
        value_dim: width of a value; None means head_dim.
        dtype: float16, bfloat16 or float32; of keys and values that are not quantised.
        device: where; None means torch's default.
        layout: "bhnd" or "bnhd", of the cache and of what is appended.
        kv_format: None keeps keys and values in dtype; a KVFormat or a name as in KVFormat.parse() keeps codes, whose
            scales append() makes where there is one per token or group.
        k_scale: the others, which must be given, as append_kv() takes them; None means 1 for fp8 codes.
        v_scale: likewise.

    Example:
        >>> cache = KVCache(2, 4, 100, 64, dtype=torch.float32)
        >>> cache.append(torch.randn(2, 4, 7, 64), torch.randn(2, 4, 7, 64), new_lens=[7, 3])
        >>> out = flash_decode(torch.randn(2, 8, 1, 64), cache.k, cache.v, kv_lens=cache.kv_lens)
        >>> cache.lengths
        [7, 3]
    """

    def __init__(
        self,
        batch: int,
        heads_kv: int,
        max_len: int,
        head_dim: int,
        *,
        value_dim: int | None = None,
        dtype: torch.dtype = torch.float16,
        device: torch.device | str | None = None,
        layout: str = "bhnd",
        kv_format: KVFormat | str | None = None,
        k_scale: Tensor | float | None = None,
        v_scale: Tensor | float | None = None,
    ) -> None:
        _check_sizes(batch=batch, heads_kv=heads_kv, max_len=max_len, head_dim=head_dim, value_dim=value_dim)
        super().__init__(
            batch, heads_kv, max_len, head_dim, value_dim, dtype, device, layout, kv_format, k_scale, v_scale
        )  # fmt: skip
        self.max_len = max_len
        self.kv_lens = torch.zeros(batch, dtype=torch.int32, device=self.k.device)
        self.lengths = [0] * batch

    def __repr__(self) -> str:
        return self._describe(f"lengths {describe_lengths(self.lengths)} of {self.max_len}")

    def append(
        self, k_new: Tensor, v_new: Tensor, *, new_lens: Sequence[int] | None = None, **options: Any
    ) -> Tensor | None:
        """Write new keys [B, Hkv, L, D] and values behind those that are there; kv_lens and lengths grow.

        Args:
            k_new, v_new: as for append_kv(), in the layout of the cache.
            new_lens: how many of the L new tokens count, per sequence; None means all.
            options: rotary_cos, rotary_sin, rotary_interleaved, q, q_advances and backend of append_kv().

        Returns:
            What append_kv() returns: the rotated q, or None without q.

        Raises:
            CacheFullError: a sequence would be longer than max_len.
        """
        if options:
            refuse_own(options, "k_cache", "v_cache", "kv_lens", "block_table", *self._codes)
        counts = _counts(k_new, self.layout, new_lens, len(self.lengths))
        for b, (length, new) in enumerate(zip(self.lengths, counts, strict=True)):
            if length + new > self.max_len:
                raise CacheFullError(
                    f"the cache must have room for the new keys, got {new} for sequence {b}, which holds {length} of "
                    f"{self.max_len}"
                )
        lens = None if new_lens is None else upload(counts, self.k.device)
        rotated = append_kv(k_new, v_new, self.k, self.v, self.kv_lens, new_lens=lens, **self._codes, **options)
        self.kv_lens += k_new.shape[_length_axis(self.layout)] if lens is None else lens
        self.lengths = [length + new for length, new in zip(self.lengths, counts, strict=True)]
        return rotated

    def decode(self, q: Tensor, **options: Any) -> Tensor | tuple[Tensor, Tensor]:
        """flash_decode() of queries over the keys that every sequence holds, with any of its other options."""
        if options:
            refuse_own(options, "k", "v", "kv_lens", "block_table", *self._codes)
        return flash_decode(q, self.k, self.v, kv_lens=self.kv_lens, **self._codes, **options)

    def free(self, sequences: int | Sequence[int] | None = None) -> None:
        """Empty some sequences, one, or all (None): their memory is written anew by the next append."""
        emptied = list(range(len(self.lengths))) if sequences is None else _as_list(sequences)
        for b in emptied:
            if not _is_int(b) or not 0 <= b < len(self.lengths):
                raise ValueError(f"sequences must be ints from 0 to {len(self.lengths) - 1}, got {b!r}")
        for b in emptied:
            self.lengths[b] = 0
        self.kv_lens.copy_(upload(self.lengths, self.k.device))


class PagedKVCache(_Storage):
    """A paged cache: sequences of any length share one pool of pages, and a common prefix.

    allocate() gives a sequence's number, append() writes to a list of sequences and takes pages as they grow, fork()
    makes a sequence that shares what another one holds, free() gives the pages back that nobody else uses.
    block_table() and kv_lens() are what flash_decode() wants for a list of sequences; where a list is taken, one
    sequence may stand for a list of itself.

    A page is shared until somebody writes to it: only the last, partly filled page of a fork is ever copied, when
    either side appends to it.

    Attributes: k [pages, Hkv, page_size, D] and v [pages, Hkv, page_size, Dv] ([pages, page_size, Hkv, D] for layout
    "bnhd"), layout, page_size, free_pages (how many are left), nbytes; kv_format, k_scale and v_scale, which are None
    for a cache that is not quantised.

    Args:
        pages: pages in the pool.
        page_size: keys per page.
        heads_kv: KV heads.
        head_dim: width of a key.
        value_dim: width of a value; None means head_dim.
        dtype: float16, bfloat16 or float32; of keys and values that are not quantised.
        device: where; None means torch's default.
        layout: "bhnd" or "bnhd", of the cache and of what is appended.
        kv_format: None keeps keys and values in dtype; a KVFormat or a name as in KVFormat.parse() keeps codes, whose
            scales append() makes where there is one per token or group.
        k_scale: the others, which must be given, as append_kv() takes them; None means 1 for fp8 codes.
        v_scale: likewise.

    Example:
        >>> cache = PagedKVCache(32, 16, 4, 64, dtype=torch.float32)
        >>> prompt = cache.allocate()
        >>> cache.append([prompt], torch.randn(1, 4, 40, 64), torch.randn(1, 4, 40, 64))
        >>> both = [prompt, cache.fork(prompt)]
        >>> cache.append(both, torch.randn(2, 4, 1, 64), torch.randn(2, 4, 1, 64))
        >>> out = flash_decode(torch.randn(2, 8, 1, 64), cache.k, cache.v, kv_lens=cache.kv_lens(both),
        ...                    block_table=cache.block_table(both))
        >>> cache.block_table(both).tolist(), cache.free_pages
        ([[0, 1, 3], [0, 1, 2]], 28)
    """

    def __init__(
        self,
        pages: int,
        page_size: int,
        heads_kv: int,
        head_dim: int,
        *,
        value_dim: int | None = None,
        dtype: torch.dtype = torch.float16,
        device: torch.device | str | None = None,
        layout: str = "bhnd",
        kv_format: KVFormat | str | None = None,
        k_scale: Tensor | float | None = None,
        v_scale: Tensor | float | None = None,
    ) -> None:
        _check_sizes(pages=pages, page_size=page_size, heads_kv=heads_kv, head_dim=head_dim, value_dim=value_dim)
        super().__init__(
            pages, heads_kv, page_size, head_dim, value_dim, dtype, device, layout, kv_format, k_scale, v_scale
        )  # fmt: skip
        self.page_size = page_size
        self._free = list(range(pages - 1, -1, -1))  # the next one is at the end
        self._users = [0] * pages  # sequences per page
        self._pages: dict[int, list[int]] = {}
        self._lengths: dict[int, int] = {}
        self._next = 0

    def __repr__(self) -> str:
        used = len(self._users) - len(self._free)
        count = "1 sequence" if len(self._lengths) == 1 else f"{len(self._lengths)} sequences"
        lengths = describe_lengths(self._lengths.values())
        return self._describe(f"{count} of {lengths}, {used} of {len(self._users)} pages used")

    @property
    def free_pages(self) -> int:
        """Pages that no sequence uses."""
        return len(self._free)

    def allocate(self) -> int:
        """A new, empty sequence; it takes its pages as it grows."""
        sequence, self._next = self._next, self._next + 1
        self._pages[sequence], self._lengths[sequence] = [], 0
        return sequence

    def fork(self, sequence: int, length: int | None = None) -> int:
        """A new sequence that starts with the first `length` keys of another (None: all) and shares their pages."""
        self._check([sequence])
        most = self._lengths[sequence]
        length = most if length is None else length
        if not _is_int(length):
            raise TypeError(f"length must be an int or None, got {type(length).__name__}")
        length = int(length)
        if not 0 <= length <= most:
            raise ValueError(f"length must lie from 0 to {most}, what sequence {sequence} holds, got {length}")
        child = self.allocate()
        self._pages[child] = self._pages[sequence][: -(-length // self.page_size)]
        self._lengths[child] = length
        for page in self._pages[child]:
            self._users[page] += 1
        return child

    def free(self, sequence: int) -> None:
        """End a sequence; its pages are free again unless another sequence shares them."""
        self._check([sequence])
        for page in self._pages.pop(sequence):
            self._release(page)
        del self._lengths[sequence]

    def length(self, sequence: int) -> int:
        """Keys that a sequence holds."""
        self._check([sequence])
        return self._lengths[sequence]

    def append(
        self,
        sequences: int | Sequence[int],
        k_new: Tensor,
        v_new: Tensor,
        *,
        new_lens: Sequence[int] | None = None,
        **options: Any,
    ) -> Tensor | None:
        """Write new keys [B, Hkv, L, D] and values behind those of B sequences.

        Args:
            sequences: B different sequences, one per row of k_new; for one row also the sequence itself.
            k_new, v_new: as for append_kv(), in the layout of the cache.
            new_lens: how many of the L new tokens count, per sequence; None means all.
            options: rotary_cos, rotary_sin, rotary_interleaved, q, q_advances and backend of append_kv().

        Returns:
            What append_kv() returns: the rotated q, or None without q.

        Raises:
            CacheFullError: the pool has too few free pages; nothing has changed.
        """
        if options:
            refuse_own(options, "k_cache", "v_cache", "kv_lens", "block_table", *self._codes)
        sequences = _as_list(sequences)
        self._check(sequences)
        if len(set(sequences)) < len(sequences):
            raise ValueError(f"sequences must differ from each other, got {sequences}")
        counts = _counts(k_new, self.layout, new_lens, len(sequences))
        needed = self._pages_needed(sequences, counts)
        if needed > len(self._free):
            raise CacheFullError(f"the pool must have {needed} free pages for the new keys, got {len(self._free)}")
        for sequence, new in zip(sequences, counts, strict=True):
            self._grow(sequence, new)
        try:
            rotated = append_kv(
                k_new, v_new, self.k, self.v, self.kv_lens(sequences), block_table=self.block_table(sequences),
                new_lens=None if new_lens is None else upload(counts, self.k.device), **self._codes, **options,
            )  # fmt: skip
        except BaseException:
            for sequence in sequences:
                self._trim(sequence)
            raise
        for sequence, new in zip(sequences, counts, strict=True):
            self._lengths[sequence] += new
        return rotated

    def decode(self, sequences: int | Sequence[int], q: Tensor, **options: Any) -> Tensor | tuple[Tensor, Tensor]:
        """flash_decode() of queries [B, Hq, Lq, D] over the keys of B sequences, with any of its other options."""
        if options:
            refuse_own(options, "k", "v", "kv_lens", "block_table", *self._codes)
        lens, table = self.kv_lens(sequences), self.block_table(sequences)
        if isinstance(q, Tensor) and q.ndim and q.shape[0] != lens.shape[0]:
            raise ValueError(f"q must have one row per sequence, {lens.shape[0]}, got {q.shape[0]}")
        return flash_decode(q, self.k, self.v, kv_lens=lens, block_table=table, **self._codes, **options)

    def block_table(self, sequences: int | Sequence[int]) -> Tensor:
        """[B, max_pages] int32 on the device of the cache, as wide as the longest sequence; entries past an end are 0.

        Made anew by every call: with many layers of the same lengths, ask once per step.
        """
        sequences = _as_list(sequences)
        self._check(sequences)
        rows = [self._pages[sequence] for sequence in sequences]
        width = max([1, *map(len, rows)])
        return upload([row + [0] * (width - len(row)) for row in rows], self.k.device).view(len(rows), width)

    def kv_lens(self, sequences: int | Sequence[int]) -> Tensor:
        """[B] int32 on the device of the cache."""
        sequences = _as_list(sequences)
        self._check(sequences)
        return upload([self._lengths[sequence] for sequence in sequences], self.k.device)

    def _pages_needed(self, sequences: Sequence[int], counts: list[int]) -> int:
        """Free pages that appending takes: for growth, and for copies of shared last pages."""
        needed, writers = 0, Counter[int]()
        for sequence, new in zip(sequences, counts, strict=True):
            length = self._lengths[sequence]
            needed += -(-(length + new) // self.page_size) - len(self._pages[sequence])
            if new and length % self.page_size:
                writers[self._pages[sequence][-1]] += 1
        # Of all that share a page, the last one that writes may keep it if everybody else has written too.
        return needed + sum(min(count, self._users[page] - 1) for page, count in writers.items())

    def _grow(self, sequence: int, new: int) -> None:
        """Take the pages for `new` more keys, and an own copy of the page that they begin in if it is shared."""
        pages, length = self._pages[sequence], self._lengths[sequence]
        if new and length % self.page_size and self._users[pages[-1]] > 1:
            shared, pages[-1] = pages[-1], self._take()
            for x in (self.k, self.v, self.k_scale, self.v_scale):
                if x is not None and x.ndim > 2:  # others are not of single pages
                    x[pages[-1]] = x[shared]
            self._release(shared)
        while len(pages) * self.page_size < length + new:
            pages.append(self._take())

    def _trim(self, sequence: int) -> None:
        """Give back the pages that hold no key."""
        pages = self._pages[sequence]
        while len(pages) > -(-self._lengths[sequence] // self.page_size):
            self._release(pages.pop())

    def _take(self) -> int:
        page = self._free.pop()
        self._users[page] = 1
        return page

    def _release(self, page: int) -> None:
        self._users[page] -= 1
        if self._users[page] == 0:
            self._free.append(page)

    def _check(self, sequences: Sequence[int]) -> None:
        for sequence in sequences:
            if not _is_int(sequence):
                raise TypeError(f"sequences must be ints that allocate() gave, got {type(sequence).__name__}")
            if sequence not in self._pages:
                raise ValueError(f"sequences must be allocated and not freed, got {sequence}")


def _make_side(
    name: str, side: Side, scale: Tensor | float | None, width: int, rows: tuple[int, ...], dtype: torch.dtype,
    device: torch.device | str | None, layout: str,
) -> tuple[Tensor, Tensor | None, CodeFormat | None]:  # fmt: skip
    """Memory for keys or for values, their scales, and how both are stored. rows: the shape without the last axis."""
    if side is None:
        if scale is not None:
            raise ValueError(f"{name}_scale must be None where {name} has no codes, got one")
        return torch.empty((*rows, width), dtype=dtype, device=device), None, None
    if isinstance(side, str):  # scales that are left open are those given, or those of KVFormat.parse()
        side = CodeFormat.parse(side) if scale is None else resolve_side(name, side, scale, width)
    codes = torch.empty((*rows, side.code_width(width)), dtype=side.dtype, device=device)
    for error in find_scale_errors(f"{name}_scale", side, scale, codes, width, layout):
        raise error
    return codes, _make_scale(f"{name}_scale", side, scale, codes, width, layout), side


def _make_scale(
    name: str, form: CodeFormat, scale: Tensor | float | None, codes: Tensor, width: int, layout: str
) -> Tensor | None:  # fmt: skip
    """The scales of one side, as append_kv() takes them."""
    if form.is_by_token:
        if scale is not None:
            raise ValueError(f"{name} must be None for scales per {form.scale}, which append() makes, got one")
        heads, length = (1, 2) if layout == "bhnd" else (2, 1)
        shape = form.scale_shape(codes.shape[0], codes.shape[heads], codes.shape[length], width, layout)
        return torch.empty(shape, dtype=form.scale_dtype, device=codes.device)
    if scale is None:
        if form.scale != "tensor" or not form.codes.startswith("fp8"):
            raise ValueError(f"{name} must be given for {form.codes} codes with scales per {form.scale}, got None")
        return None
    for error in find_value_errors(name, scale):
        raise error
    return place_scale(scale, codes.device)


def _is_int(x: object) -> bool:
    return isinstance(x, Integral) and not isinstance(x, bool)


def _check_sizes(**sizes: int | None) -> None:
    """Sizes of a cache by their names; the widths are checked further by what looks at both."""
    for name, size in sizes.items():
        if size is None and name == "value_dim":
            continue
        if size is None or not _is_int(size):
            raise TypeError(f"{name} must be an int, got {type(size).__name__}")
        least = 1 if name in ("page_size", "heads_kv") else 0
        if size < least:
            raise ValueError(f"{name} must be at least {least}, got {size}")


def _as_list(sequences: int | Sequence[int]) -> list[int]:
    if _is_int(sequences):
        return [int(cast(int, sequences))]
    if not isinstance(sequences, Iterable):
        raise TypeError(f"sequences must be an int or a list of ints, got {type(sequences).__name__}")
    return list(sequences)


def _length_axis(layout: str) -> int:
    return 2 if layout == "bhnd" else 1


def _counts(k_new: Tensor, layout: str, new_lens: Sequence[int] | None, batch: int) -> list[int]:
    """New tokens per sequence."""
    if not isinstance(k_new, Tensor):
        raise TypeError(f"k_new must be a torch.Tensor, got {type(k_new).__name__}")
    if k_new.ndim != 4 or k_new.shape[0] != batch:
        raise ValueError(f"k_new must have four dimensions and one row per sequence, {batch}, got {list(k_new.shape)}")
    new = k_new.shape[_length_axis(layout)]
    if new_lens is None:
        return [new] * batch
    if not isinstance(new_lens, Iterable):
        raise TypeError(f"new_lens must be a list of ints or None, got {type(new_lens).__name__}")
    given = new_lens.tolist() if isinstance(new_lens, Tensor) else list(new_lens)
    wrong = next((type(x).__name__ for x in given if not _is_int(x)), None)
    if wrong is not None:
        raise TypeError(f"new_lens must be a list of ints or None, got a list of {wrong}")
    counts = [int(x) for x in given]
    if len(counts) != batch or not all(0 <= x <= new for x in counts):
        raise ValueError(f"new_lens must hold {batch} numbers from 0 to {new}, got {counts}")
    return counts


def upload(values: list[Any] | Tensor, device: torch.device) -> Tensor:
    """An array of the CPU, or numbers as int32, on the device; pinned where that spares the host a wait."""
    x = values if isinstance(values, Tensor) else torch.tensor(values, dtype=torch.int32, device="cpu")
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x
