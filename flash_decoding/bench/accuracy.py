"""What a quantised cache costs a language model: every format beside the 16-bit cache, on the same tokens."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from flash_decoding.bench.document import BEGIN, END, replace_block
from flash_decoding.bench.plots import GRID, INK, MARKERS, OURS_COLOUR, PEER_COLOURS, QUIET, new_figure
from flash_decoding.problem import MAX_Q_LEN
from flash_decoding.quantization import KVFormat

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from transformers import PreTrainedModel

SCHEMA = 1
# The introduction to C. Darwin's "On the Origin of Species" (John Murray, 1859), whole; in the public domain.
TEXT = "origin_introduction.txt"
# As many tokens as flash_decode() takes in one call.
BLOCK = MAX_Q_LEN
FORMATS = (
    "fp8_e4m3", "fp8_e4m3:token", "fp8_e5m2", "int8", "int8:head", "int8:channel/int8", "int8/int4:group32+zero",
    "int8/int4", "int4/int8", "int4:group32+zero", "int4:group32", "int4",
)  # fmt: skip
FAMILIES = {"fp8_e4m3": "#2563eb", "fp8_e5m2": "#7c3aed", "int8": OURS_COLOUR, "int4": "#059669"}

Results = dict[str, Any]


def read_shipped_text() -> str:
    """The text that comes with the package."""
    return resources.files("flash_decoding").joinpath("data", TEXT).read_text(encoding="utf-8")


def choose_formats(head_dim: int | None) -> list[str]:
    """The formats to measure where none are named: those that heads of this size (None: any) can have."""
    return [name for name in (*FORMATS, "int4:group128") if _fits(name, head_dim)]


def _fits(name: str, head_dim: int | None) -> bool:
    kv_format = KVFormat.parse(name)
    assert kv_format is not None, "a name gives a format"
    groups = [side.group for side in (kv_format.k, kv_format.v) if side is not None and side.group is not None]
    return not groups or (head_dim is not None and all(head_dim % group == 0 for group in groups))


def _label(row: Mapping[str, Any]) -> str:
    kv_format = KVFormat.parse(row["format"])
    assert kv_format is not None, "a row of a format"
    return kv_format.label


class _Figures(NamedTuple):
    """What one format gives, for every predicted token."""

    nll: Tensor  # of the token that came, nats
    kl: Tensor  # of the 16-bit cache's distribution from this one's, nats
    same: Tensor  # 1 where the likeliest token is the same


@torch.no_grad()
def measure(
    model: PreTrainedModel, tokens: Tensor, formats: Sequence[str], done: Callable[[str], None] = lambda _: None
) -> list[dict[str, Any]]:
    """One row per format, the 16-bit cache first.

    The text is given, 64 tokens a call, and every token sees codes of all tokens up to itself, as when it is written
    token by token. All formats take a block in turn, so that their distributions are compared while both are there. In
    a float32 model keys and values are rounded to bfloat16 before they are stored or quantised: that is the 16-bit
    cache, and the cache is all that differs.

    Args:
        model: with attn_implementation="split_kv".
        tokens: [T] token ids; T - 1 of them are predicted.
        formats: names as in KVFormat.parse().
        done: called with a format's name after each of its blocks.
    """
    from flash_decoding.integrations.transformers import DecodeCache, cache_argument

    class Cache(DecodeCache):
        """Keys and values of a float32 model as a 16-bit one would have them."""

        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **options: Any) -> tuple[Any, Any]:
            key_states, value_states = (
                x.bfloat16().float() if x.dtype == torch.float32 else x for x in (key_states, value_states)
            )
            return super().update(key_states, value_states, *args, **options)

    names: list[str | None] = [None, *formats]
    count = tokens.shape[0] - 1
    # All that stays is allocated beforehand: pieces of it between the logits of two calls would keep the heap from
    # using the logits' memory again.
    caches = {name: Cache(model.config, name, exact_prompt=False, reserve=count) for name in names}
    figures = {name: _Figures(*torch.zeros(3, count, dtype=torch.float64, device=tokens.device)) for name in names}
    argument = cache_argument(model)
    for first in range(0, count, BLOCK):
        block, following = tokens[first : min(first + BLOCK, count)], tokens[first + 1 : first + 1 + BLOCK]
        exact = None
        for name, cache in caches.items():
            output = model(input_ids=block[None], use_cache=True, **{argument: cache})
            found = output.logits[0].double().log_softmax(dim=-1)  # [block, vocabulary]
            exact = found if exact is None else exact
            nll, kl, same = (x[first : first + BLOCK] for x in figures[name])
            nll.copy_(-found.gather(1, following[:, None])[:, 0])
            kl.copy_((exact.exp() * (exact - found)).sum(dim=-1))
            same.copy_(found.argmax(dim=-1) == exact.argmax(dim=-1))
            done("16 bits" if name is None else name)
    return [_row(name, figures[name], figures[None], caches[name], count) for name in names]


def _row(name: str | None, figures: _Figures, exact: _Figures, cache: Any, count: int) -> dict[str, Any]:
    change = figures.nll - exact.nll
    spread = float(change.std()) / math.sqrt(count) if count > 1 else 0.0
    stored = sum(layer.count_bytes(element_size=2) for layer in cache.layers)
    return {
        "format": name,
        "bytes_per_token": stored / count,
        "of_16_bits": stored / cache.nbytes_in_16_bits,
        "perplexity": math.exp(float(figures.nll.mean())),
        "change_percent": 100 * math.expm1(float(change.mean())),
        "change_error_percent": 100 * spread,
        "kl": float(figures.kl.mean()),
        "same_tokens": float(figures.same.mean()),
    }


_FIELDS = {
    "format", "bytes_per_token", "of_16_bits", "perplexity", "change_percent", "change_error_percent", "kl",
    "same_tokens",
}  # fmt: skip


def dump(results: Results) -> str:
    """JSON with one format per line."""
    head = json.dumps({key: value for key, value in results.items() if key != "formats"}, indent=1)
    rows = ",\n".join("  " + json.dumps(row) for row in results["formats"])
    return f'{head[:-2]},\n "formats": [\n{rows}\n ]\n}}\n'


def read_results(path: Path) -> Results:
    """A file that dump() made, checked.

    Raises:
        ValueError: it is none.
    """
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(results, dict) or results.get("schema") != SCHEMA or "formats" not in results:
        raise ValueError(f"{path} must be a result file of the accuracy command, schema {SCHEMA}")
    for row in results["formats"]:
        if not isinstance(row, dict) or _FIELDS - row.keys():
            raise ValueError(f"{path} must have {', '.join(sorted(_FIELDS))} for each format")
    return results


COLUMNS = ("cache", "bytes per token", "of 16 bits", "perplexity", "change, %", "KL, nats", "same greedy token, %")


def table_cells(row: dict[str, Any]) -> list[str]:
    """A row in the columns of COLUMNS."""
    exact = row["format"] is None
    return [
        "16 bits" if exact else _label(row),
        f"{row['bytes_per_token']:,.0f}",
        f"{row['of_16_bits']:.3f}",
        f"{row['perplexity']:.3f}",
        "" if exact else f"{row['change_percent']:+.2f} ± {row['change_error_percent']:.2f}",
        "" if exact else f"{row['kl']:.1e}",
        "" if exact else f"{100 * row['same_tokens']:.1f}",
    ]


def describe(results: Results) -> str:
    """What was measured where, in a sentence."""
    environment = results["environment"]
    machine = environment.get("gpu") if results["device"] == "cuda" else environment.get("cpu")
    return (
        f"{results['model']} in {results['dtype']} on {results['tokens']} tokens of {results['text']}; {machine}, "
        f"torch {environment.get('torch')}, {environment.get('date', '')[:10]}."
    )


def render_block(results: Results, picture: str | None) -> str:
    """The marked block of a document: what was measured, the table, and the picture if there is one."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|---|" + "---:|" * (len(COLUMNS) - 1)]
    lines += [f"| {' | '.join(table_cells(row))} |" for row in results["formats"]]
    parts = [BEGIN, describe(results), "\n".join(lines)]
    if picture is not None:
        parts.append(f"![Bytes of the cache against what they cost the model]({picture})")
    return "\n\n".join([*parts, END])


def update_document(path: Path, results: Results, picture: Path | None) -> None:
    """Rewrite the block in the file at path; the picture is linked relative to it."""
    link = None if picture is None else picture.resolve().relative_to(path.resolve().parent).as_posix()
    path.write_text(replace_block(path.read_text(encoding="utf-8"), render_block(results, link)), encoding="utf-8")


def accuracy_figure(results: Results) -> Figure:
    """Memory of the cache against the KL divergence from 16 bits, one point per format."""
    rows = [row for row in results["formats"] if row["format"] is not None]
    figure, axes = new_figure(8.6, 5.0)
    markers = MARKERS.replace("*", "")  # which is smaller than the others
    for number, row in enumerate(sorted(rows, key=lambda row: -row["of_16_bits"])):
        codes = _label(row).split("/")
        family = codes[-1].partition(":")[0]
        axes.plot(
            100 * row["of_16_bits"], max(row["kl"], 1e-12), markers[number % len(markers)], markersize=8, linestyle="",
            color=FAMILIES.get(family, PEER_COLOURS["sdpa"]), markeredgecolor="white", clip_on=False,
            label=f"{_label(row)}   {row['change_percent']:+.2f} %",
        )  # fmt: skip
    axes.set_yscale("log")
    shares = [100 * row["of_16_bits"] for row in rows]
    axes.set_xlim(min(shares, default=20) - 3, max(shares, default=60) + 3)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0f} %")
    axes.grid(True, color=GRID)
    axes.set_axisbelow(True)
    axes.set_xlabel("bytes of the cache, scales included, of those of 16 bits", color=INK)
    axes.set_ylabel("KL divergence from the 16-bit cache, nats per token", color=INK)
    axes.set_title(f"{results['model']}: memory against loss", loc="left", color=INK, fontweight="bold")
    legend = axes.legend(
        frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(1.0, 1.0), title="change of perplexity"
    )
    legend.get_title().set_color(QUIET)
    return figure
