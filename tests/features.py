"""Draws docs/features.md: which test holds which feature on which backend. `make features` runs it.

A test belongs to a feature if it is marked so, @pytest.mark.feature("window"), or if its name matches the feature's
pattern. Its backend is that of its `target`; a test without one runs on a GPU if it is marked gpu, else on a CPU.
"""

import contextlib
import io
import os
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "features.md"
BACKENDS = ("gpu", "interpreter", "cpu")


class Feature(NamedTuple):
    name: str
    means: str
    pattern: str = "(?!)"  # of tests that carry no mark: searched in "test_file.py::test_name[parameters]"
    backends: tuple[str, ...] = BACKENDS  # where it exists


FEATURES = (
    Feature(
        "dense cache", "float16, bfloat16, float32", r"test_flash_decode.py::test_(lengths_and_plans|serving_shapes)"
    ),
    Feature(
        "layout bnhd", "the order of flash-attn", r"test_(flash_decode|cpu_backend|caches|append|flash_attn).*bnhd"
    ),
    Feature("strides", "slices, interleaved pools, broadcast arrays; no copy", r"strides|stride_0|interleaved_pool"),
    Feature("paged cache", "block_table, any page size", r"test_pages\b|_page\b|page_size|paged_cache"),
    Feature("shared pages", "sequences with pages in common", r"share_pages|test_a_fork_copies"),
    Feature("kv_lens", "ragged lengths, 0 allowed", r"ragged_lengths|[-[]lens\b|lengths_of_both|length_rules"),
    Feature("kv_start", "left padding", r"[-[]start\b|test_layouts_and_ragged|leftpad"),
    Feature("key_mask", "any set of keys", r"masked_keys|mask_of_ones|test_layouts_and_ragged"),
    Feature("group sizes", "any Hq / Hkv", r"group_sizes|group_of_seven|kv_head_i_over_g"),
    Feature("head sizes", "D from 16 to 576, no power of two needed", r"test_widths|wide_heads|head_sizes"),
    Feature("D and Dv differ", "values wider or narrower than keys", r"test_widths|values_wider|test_wide_heads"),
    Feature("values inside keys", "latent attention, MLA", r"inside_the_keys|view_into_the_keys"),
    Feature(
        "several query tokens", "1 to 64, causal from the bottom right", r"several_tokens|several-tokens|c039|c040"
    ),
    Feature("not causal", "causal=False", r"not-causal"),
    Feature("tree_mask", "any visibility among the new tokens", r"test_trees"),
    Feature("q_lens", "query tokens per sequence", r"q-lens|q_lens"),
    Feature("scale", "any number", r"test_flash_decode.py::test_scale\b"),
    Feature("window", "sliding window", r"window"),
    Feature("softcap", "tanh of the scores", r"soft_?cap|small_cap|the_cap\b"),
    Feature("alibi_slopes", "ALiBi", r"alibi"),
    Feature("sinks", "one more logit per head", r"sink"),
    Feature(
        "kv_format, k_scale, v_scale",
        "quantised caches: fp8, int8, int4",
        r"test_quantised_decode.py::|codes_are|test_c05[0-3]",
    ),
    Feature("num_splits, split_size", "the caller's plan", r"lengths_and_plans|splits|split_count"),
    Feature("log-sum-exp", "return_lse", r"the_lse"),
    Feature("out, lse", "results where the caller wants them", r"into_out_and_lse|out_given"),
    Feature("rows without keys", "out 0, lse -inf", r"without_keys|empty_splits|every_key|without_tokens"),
    Feature(
        "hidden NaN",
        "past the ends, behind a mask, in unused pages",
        r"nobody_may_see|nan_past|stale_page|hold_anything",
    ),
    Feature("large scores", "up to a million and beyond", r"scores_of_a_million|real_score_below|mass_underflows"),
    Feature("same bits", "repeated calls, other neighbours, any thread count", r"same_bits|neighbours|changes_no_bit"),
    Feature("large caches", "offsets and batches beyond 32 and 16 bits", r"beyond_32_bits|past_two_to|grid_axis"),
    Feature("merge_states", "parts of a cache", r"test_merge.py::|merged_are_the_whole|merging_empty|shards_without"),
    Feature("cascade_decode", "a prefix that the batch shares", r"test_cascade"),
    Feature(
        "append_kv", "new keys and values, in place", r"test_append.py::test_(new_tokens|ragged)|append_then_decode"
    ),
    Feature(
        "append_kv to pages",
        "through a block_table",
        r"test_append.py::test_(new_tokens|ragged).*page_size|append_then_decode",
    ),
    Feature("rotary embedding", "halves or interleaved, of keys and queries", r"rotate"),
    Feature("KVCache", "dense", r"dense_cache_grows|full_dense_cache"),
    Feature("PagedKVCache", "forks that share pages", r"test_caches.py::test_(a_fork|forks|a_full_pool|any_sequence)"),
    Feature("workspace", "scratch of the caller", r"test_workspace.py::"),
    Feature(
        "CUDA graphs",
        "one graph for every later length and table",
        r"graph_\w*(is_right|survives|follows)|captured",
        ("gpu",),
    ),
    Feature("torch.compile", "and other tracers", r"compiles_without|torch_compile|compiled|test_op.py::"),
    Feature(
        "threads, fork", "first calls at once, children of a busy parent", r"threads|a_fork_(after|while)|processes"
    ),
    Feature(
        "several processes",
        "a cache spread over the ranks of torch.distributed",
        r"test_distributed(_cache)?\.py",
        ("gpu", "interpreter", "cpu"),
    ),
    Feature("flash-attn's functions", "flash_attn_with_kvcache and those beside it", r"test_flash_attn.py::"),
    Feature("Transformers", "whole models", r"test_transformers.py::"),
)
# Tests of refusals, plans and tools compute no attention.
ELSEWHERE = re.compile(
    r"^test_(bench_\w+|cli|compile|cost_model|docs|errors|features|hardware|layering|plots|split_plan|tune)\.py|refused"
)
HEAD = """# Features and the tests that hold them

Drawn from the tests by `make features`; a test fails when it is stale. A tick says that a test of the feature runs
there: on a GPU (`pytest -m gpu`), on a CPU (`pytest -m "not gpu"`), or with the GPU's kernels in Triton's interpreter
(`TRITON_INTERPRET=1 pytest -m interpreter`). The last column names files, `tests/test_<name>.py`.

| feature | | GPU | interpreter | CPU | tests |
|---|---|:-:|:-:|:-:|---|
"""


class Collected:
    """The tests that pytest finds."""

    def pytest_collection_finish(self, session):
        self.tests = session.items


def collect():
    os.environ.pop("TRITON_INTERPRET", None)  # parameters are those of a plain run
    collected, said = Collected(), io.StringIO()
    with contextlib.redirect_stdout(said):
        code = pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", str(ROOT / "tests")], plugins=[collected])
    if code != pytest.ExitCode.OK:
        sys.exit(said.getvalue())
    return collected.tests


def features_of(test):
    marked = {name for mark in test.iter_markers("feature") for name in mark.args}
    unknown = marked - {feature.name for feature in FEATURES}
    if unknown:
        sys.exit(f"{test.nodeid} is marked with features that tests/features.py does not have: {sorted(unknown)}")
    name = test.nodeid.removeprefix("tests/")
    if ELSEWHERE.search(name):
        return marked
    return marked | {feature.name for feature in FEATURES if re.search(feature.pattern, name)}


def backends_of(test):
    target = test.callspec.params.get("target") if hasattr(test, "callspec") else None
    on_gpu = test.get_closest_marker("gpu") if target is None else target.device == "cuda"
    if on_gpu:
        return {"gpu"}
    return {"cpu", "interpreter"} if target is not None and test.get_closest_marker("interpreter") else {"cpu"}


def draw(tests):
    backends, files = defaultdict(set), defaultdict(set)
    for test in tests:
        for name in features_of(test):
            backends[name] |= backends_of(test)
            files[name].add(test.path.stem.removeprefix("test_"))
    rows = []
    for name, means, _, exists in FEATURES:
        if name not in files:
            sys.exit(f"no test holds {name!r}")
        ticks = " | ".join("✓" if x in backends[name] and x in exists else "–" for x in BACKENDS)
        rows.append(f"| {name} | {means} | {ticks} | {', '.join(sorted(files[name]))} |\n")
    return HEAD + "".join(rows)


if __name__ == "__main__":
    page = draw(collect())
    if "--check" not in sys.argv:
        PAGE.write_text(page)
    elif not PAGE.exists() or PAGE.read_text() != page:
        sys.exit(f"{PAGE.name} is stale: make features")
