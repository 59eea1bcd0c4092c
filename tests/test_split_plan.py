"""The planner: a pure function of integers."""

import json
import statistics
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flash_decoding.bench.profiling import plan_of
from flash_decoding.bench.workloads import Shape
from flash_decoding.cost_model import shared_bytes
from flash_decoding.hardware import known_gpus, resident_programs
from flash_decoding.quantization import KVFormat
from flash_decoding.split_plan import (
    MIN_SHARED_MEMORY,
    SIZES_MB,
    Key,
    Setting,
    Table,
    choose_num_splits,
    choose_plan,
    choose_tile,
    find_key,
)
from flash_decoding.tuning import PACKAGED

SWEEPS = Path(__file__).parent.parent / "benchmarks" / "sweeps"
H200 = dict(processors=132, shared_memory=232448)


def plan(batch, heads_q, heads_kv, kv_len, head_dim, **options):
    sizes = dict(batch=batch, heads_kv=heads_kv, group=heads_q // heads_kv, q_len=1, kv_len=kv_len)
    widths = dict(head_dim=head_dim, value_dim=head_dim, element_size=2)
    return choose_plan(**(sizes | widths | H200 | options))


def measured_cases():
    """Of the sweep on one H200: (cache, format, {(tile, splits): us})."""
    sweep = json.loads((SWEEPS / "nvidia-h200-keys-first.json").read_text())
    for name, rows in sweep["keys_first"].items():
        yield name, {(tuple(tile), splits): us for us, tile, splits in reversed(rows)}
    for name, rows in sweep["launches"].items():
        if name not in ("columns", "note"):
            yield name, {(tuple(tile), splits): us for us, how, tile, splits in rows if how == "early reduce"}


@pytest.mark.parametrize(("name", "times"), measured_cases(), ids=lambda x: x if isinstance(x, str) else "")
def test_measured_caches_get_a_plan_that_was_fast(name, times):
    """At most 4 % slower than the fastest of the sweep."""
    numbers, name = name.split("; ")
    batch, heads, kv_len, head_dim = numbers.split(", ")
    heads_q, heads_kv = map(int, heads.split("/"))
    shape = Shape(int(batch), heads_q, heads_kv, int(kv_len), int(head_dim))
    kv_format = None if name == "bfloat16" else KVFormat.parse(name)
    chosen = plan_of(shape, "bfloat16", known_gpus()["h200"], kv_format=kv_format)
    tile = chosen.tile
    near = {
        splits: us
        for (measured, splits), us in times.items()
        if measured == (tile.block_m, tile.block_n, tile.num_warps, tile.buffers)
        and 0.88 < splits / chosen.num_splits < 1.12
    }
    assert near, "the sweep has the tile with about as many splits"
    nearest = min(near, key=lambda splits: abs(splits - chosen.num_splits))
    assert near[nearest] <= 1.04 * min(times.values())


def test_small_caches_are_not_cut():
    for kv_len in (0, 1, 16, 64):
        for batch in (1, 8, 64):
            assert plan(batch, 32, 8, kv_len, 128).num_splits == 1


def test_sequences_that_may_differ_in_length_are_cut_into_pieces_of_one_size():
    chosen = plan(64, 32, 8, 16384, 128, paged=True, ragged=True)
    assert chosen.at_once % H200["processors"] == 0, "every processor has as many programs"
    assert chosen.num_splits > chosen.at_once
    # A row of scratch for every piece, a piece more or less for every problem, and two numbers each besides.
    assert chosen.partial_shape(64, 8, 4, 1) == (chosen.num_splits + 64 * 8 + 2 * 64 * 8 // 4, 4)
    assert chosen.count_pieces(64 * 8) == chosen.num_splits + 64 * 8
    few = plan(8, 32, 8, 16384, 128, paged=True, ragged=True)
    assert few.num_splits == few.at_once == few.count_pieces(64), "so few problems all run at once, whatever they hold"
    assert plan(2, 8, 8, 2048, 128, ragged=True).at_once
    # Short sequences are done before anybody waits, and the kernels count tiles in 32 bits.
    assert plan(512, 32, 8, 250, 128, ragged=True).num_splits == 1
    assert plan(2**20, 32, 8, 2**20, 128, ragged=True).at_once is None
    assert plan(2, 8, 8, 2**25, 128, ragged=True).at_once is not None
    assert plan(2, 8, 8, 2**25 + 1, 128, ragged=True).at_once is None, "tiles are divided in floating point"
    # A wish for a number of splits, or for their size, is one for each sequence.
    assert plan(64, 32, 8, 16384, 128, ragged=True, num_splits=4).at_once is None
    assert plan(64, 32, 8, 16384, 128, ragged=True, split_size=256).at_once is None


def test_a_wish_is_followed():
    assert plan(1, 8, 8, 4096, 64, num_splits=7).num_splits == 7
    chosen = plan(1, 8, 8, 4096, 64, split_size=100)
    assert (chosen.num_splits, chosen.split_size) == (41, 100)
    assert plan(1, 8, 8, 0, 64, split_size=100).num_splits == 1


@settings(max_examples=300, deadline=None)
@given(problems=st.integers(0, 5000), tiles=st.integers(0, 5000), slots=st.integers(1, 600))
def test_counts_are_sane(problems, tiles, slots):
    splits = choose_num_splits(problems, tiles, slots)
    assert 1 <= splits <= max(tiles, 1)
    if problems >= 2 * slots:
        assert splits == 1, "the processors are busy without splitting"


@settings(max_examples=300, deadline=None)
@given(
    group=st.integers(1, 200),
    head_dim=st.integers(2, 32).map(lambda x: 8 * x),
    value_dim=st.integers(2, 32).map(lambda x: 8 * x),
    element_size=st.sampled_from([2, 4]),
    shared_memory=st.sampled_from([MIN_SHARED_MEMORY, 163 * 1024, 227 * 1024]),
)
def test_tiles_hold_the_problem_and_fit(group, head_dim, value_dim, element_size, shared_memory):
    tile = choose_tile(group, 1, head_dim, value_dim, element_size, shared_memory)
    assert tile.block_d >= head_dim
    assert tile.block_dv >= value_dim
    for size in (tile.block_m, tile.block_n, tile.num_warps):
        assert size & (size - 1) == 0, "Triton wants powers of two"
    assert tile.num_warps <= 8
    assert tile.num_stages >= 2
    if element_size == 2:
        assert tile.block_m >= 8, "tensor cores take sixteen rows, or eight columns"
        pipeline = (tile.num_stages - 1) * tile.block_n * (tile.block_d + tile.block_dv) * element_size
        assert pipeline < shared_memory
    else:
        assert tile.block_m <= 8, "from sixteen rows on Triton makes a TF32 dot of an exact product"


def test_a_growing_cache_keeps_its_tile():
    tiles = {batch: {plan(batch, 8, 2, kv_len, 64).tile for kv_len in (1, 1000, 10**6)} for batch in (1, 5, 16, 64)}
    assert all(len(of_batch) == 1 for of_batch in tiles.values())
    assert tiles[1] == tiles[5] == tiles[16]


def test_a_problem_for_every_processor_is_not_split_and_measured_to_be_better_so():
    """The packaged file has times of the rule that cut such batches in two, and of other settings."""
    content = json.loads((PACKAGED / "nvidia-h200.json").read_text())
    gains = []
    for entry in content["keys"]:
        for case in entry["cases"] if (entry["kind"], entry["rows"], entry["run"]) == ("dense", 8, 0) else ():
            shape = [case[name] for name in ("batch", "heads_kv", "kv_len", "head_dim")]
            if shape[0] * shape[1] != 128 or case["heads_q"] != 4 * shape[1] or shape[3] > 128:
                continue
            chosen = plan(shape[0], case["heads_q"], *shape[1:])
            times = {tuple(row[:4]): row[5] for row in case["screened"]}
            tile = chosen.tile
            mine = times[tile.block_n, tile.num_warps, tile.buffers, chosen.num_splits]
            assert chosen.num_splits == 1
            assert mine <= 1.05 * min(times.values()), shape
            gains.append(times[tuple(case["rule"][:4])] / mine)
    assert len(gains) == 8
    assert statistics.geometric_mean(gains) > 1.04


class TestTable:
    """Settings measured on a device take the place of the rule's."""

    SETTING = Setting(block_n=64, num_warps=1, buffers=2, programs=4)
    LONG = (2, 8, 8, 65536, 64)  # 268 MB

    def table(self, kind="dense", width=64, rows=8, from_mb=96, setting=SETTING):
        return Table({Key(kind, width, rows, from_mb): setting})

    def test_a_setting_replaces_tile_and_program_count(self):
        rule, chosen = plan(*self.LONG), plan(*self.LONG, table=self.table())
        assert (chosen.tile.block_n, chosen.tile.num_warps, chosen.tile.buffers) == (64, 1, 2)
        assert chosen.tile.num_stages == 3
        assert (chosen.tile.block_m, chosen.tile.block_d) == (rule.tile.block_m, rule.tile.block_d)
        assert rule.num_splits < chosen.num_splits <= 4 * H200["processors"] // 16
        more = plan(*self.LONG, table=self.table(setting=Setting(64, 1, 2, 8)))
        assert more.num_splits > chosen.num_splits

    def test_what_is_not_in_it_follows_the_rule(self):
        for other in ({"kind": "paged"}, {"width": 128}, {"rows": 32}, {"from_mb": 24}):
            assert plan(*self.LONG, table=self.table(**other)) == plan(*self.LONG)
        assert plan(*self.LONG, element_size=4, table=self.table()) == plan(*self.LONG, element_size=4)

    def test_a_wish_has_the_rule_s_tile_whatever_the_size(self):
        """Otherwise batch and capacity would change a result's bits."""
        table = Table({Key("dense", 64, 16, size): self.SETTING for size in SIZES_MB})
        for wish in ({"num_splits": 4}, {"num_splits": 1}, {"split_size": 256}):
            for batch, kv_len in ((1, 100), (2, 65536), (64, 65536)):
                shape = (batch, 8, 8, kv_len, 64)
                assert plan(*shape, **wish, table=table) == plan(*shape, **wish)
                assert plan(*shape, **wish, table=table).tile == plan(*self.LONG).tile

    @pytest.mark.parametrize(
        ("options", "kind"),
        [
            ({}, "dense"),
            ({"paged": True}, "paged"),
            ({"ragged": True}, "ragged"),
            ({"paged": True, "ragged": True}, "ragged-paged"),
        ],
        ids=lambda x: x if isinstance(x, str) else "",
    )
    def test_kinds(self, options, kind):
        setting = Setting(16, 2, 4, 3)
        chosen = plan(*self.LONG, **options, table=self.table(kind, setting=setting))
        assert (chosen.tile.block_n, chosen.tile.num_warps, chosen.tile.buffers) == (16, 2, 4)
        assert chosen.tile.num_stages == (9 if "paged" in kind else 5), "page ids take stages too"
        if "ragged" in kind:
            assert chosen.at_once == 3 * H200["processors"]

    def test_sizes_are_those_of_what_may_be_read(self):
        tile, from_mb = plan(*self.LONG).tile, {}
        for mb in (0, 1, 5.9, 6, 23, 24, 95, 96, 500):
            from_mb[mb] = find_key(tile, int(mb * 1e6), paged=False, ragged=False).from_mb
        assert from_mb == {0: 0, 1: 0, 5.9: 0, 6: 6, 23: 6, 24: 24, 95: 24, 96: 96, 500: 96}
        # Only the window is read: 16 sequences' worth of 1001 keys.
        assert plan(*self.LONG, window=1000, table=self.table()).tile == plan(*self.LONG).tile
        small = self.table(from_mb=0)
        assert plan(*self.LONG, window=1000, table=small).tile.block_n == 64

    def test_wide_heads_have_keys_of_their_own(self):
        for head_dim, value_dim, width in ((80, 80, 128), (64, 128, 128), (256, 64, 256), (512, 512, 512)):
            tile = choose_tile(1, 1, head_dim, value_dim, 2)
            assert find_key(tile, 0, paged=False, ragged=False).width == width
        latent = find_key(choose_tile(16, 1, 576, 512, 2), 0, paged=True, ragged=False)
        assert latent.width not in (64, 128, 256, 512)

    def test_what_does_not_fit_is_made_to(self):
        """A file made on another card must not ask for more shared memory than there is."""
        table = self.table(width=128, setting=Setting(64, 4, 8, 1))
        chosen = plan(1, 8, 8, 65536, 128, shared_memory=MIN_SHARED_MEMORY, table=table)
        assert chosen.tile.buffers == 2
        assert chosen.tile.num_stages == 3

    def test_the_same_table_is_planned_once(self):
        table = self.table()
        assert plan(*self.LONG, table=table) is plan(*self.LONG, table=table)
        assert hash(table) == hash(table) != hash(self.table())


@pytest.mark.parametrize("words", [(128, 32), (64, 32), (32, 128)], ids=["none/int4", "int8/int4", "int4/none"])
def test_codes_of_different_widths_are_as_wide_as_their_elements(words):
    """Heads of 128 either way: not as wide as the words of one side times the elements in those of the other."""
    parts = tuple(128 // width for width in words)
    tile = choose_tile(4, 1, *words, 2, 227 * 1024, parts=parts)
    assert tile.block_n >= 32
    assert (tile.block_d, tile.block_dv) == words


@pytest.mark.parametrize("kv_format", [None, "fp8", "int8:token", "int4", "none/int4", "int8/int4:group32+zero"])
@pytest.mark.parametrize("gpu", known_gpus().values(), ids=lambda gpu: gpu.key)
def test_waves_of_a_long_cache_are_full_on_every_gpu(gpu, kv_format):
    """No program too many for the shared memory of the processors, which a nearly empty wave would be for."""
    shape = Shape(1, 32, 8, 131072, 128)
    chosen = plan_of(shape, "bfloat16", gpu, kv_format=KVFormat.parse(kv_format))
    tile = chosen.tile
    shared = shared_bytes(tile.block_n, tile.block_m, tile.block_d, tile.block_dv, 2, tile.num_stages)
    slots = gpu.processors * resident_programs(gpu.limits, shared + 1280, tile.num_warps)  # scales take some too
    programs = shape.heads_kv * chosen.num_splits
    if programs > slots:
        assert programs / slots / -(-programs // slots) > 0.9
    assert programs > 0.8 * gpu.processors
