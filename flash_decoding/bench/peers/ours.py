"""This library."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from flash_decoding.bench.paging import make_pages
from flash_decoding.bench.peers.base import Peer, Prepared, needs_numbers
from flash_decoding.bench.timing import Inputs
from flash_decoding.bench.workloads import Case
from flash_decoding.quantization import KVFormat

OURS, OURS_UNSPLIT = "flash_decoding", "flash_decoding_unsplit"


def _prepare(case: Case, copies: Sequence[Inputs], **plan: Any) -> Prepared:
    from flash_decoding import Workspace, flash_decode

    arguments = plan | {"workspace": Workspace(), "window": case.options.window}
    if case.options.page_size is not None:
        pages = make_pages(case, case.options.page_size, copies[0].q.device)
        arguments |= {"block_table": pages.table, "kv_lens": pages.lens}
    if case.form is not None:
        arguments["kv_format"] = KVFormat(case.form, case.form)
    calls: list[Any] = [
        partial(flash_decode, *copy, k_scale=copy.k_scale, v_scale=copy.v_scale, **arguments) for copy in copies
    ]
    return Prepared("", calls)


def _variants(case: Case, copies: Sequence[Inputs]) -> Iterator[Callable[[], Prepared]]:
    yield lambda: _prepare(case, copies)


def _unsplit_variants(case: Case, copies: Sequence[Inputs]) -> Iterator[Callable[[], Prepared]]:
    yield lambda: _prepare(case, copies, num_splits=1)


def _not_for_codes(case: Case) -> str | None:
    return "measured on 16-bit caches only" if needs_numbers(case) else None


_PACKAGE: dict[str, Any] = {"module": "flash_decoding", "package": "flash-decoding"}
PEERS = (
    Peer(OURS, "flash-decoding", "cuda", _variants, **_PACKAGE),
    Peer(OURS, "flash-decoding", "cpu", _variants, **_PACKAGE),
    # What the same kernel takes without splitting: the reason for all of this, in one row.
    Peer(OURS_UNSPLIT, "flash-decoding, unsplit", "cuda", _unsplit_variants, refuses=_not_for_codes, **_PACKAGE),
)
