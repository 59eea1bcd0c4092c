"""The planner: a pure function of integers."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flash_decoding.split_plan import MIN_SHARED_MEMORY, choose_num_splits, choose_plan, choose_tile

H200 = dict(processors=132, shared_memory=232448)


def plan(batch, heads_q, heads_kv, kv_len, head_dim, **options):
    sizes = dict(batch=batch, heads_kv=heads_kv, group=heads_q // heads_kv, q_len=1, kv_len=kv_len)
    widths = dict(head_dim=head_dim, value_dim=head_dim, element_size=2)
    return choose_plan(**(sizes | widths | H200 | options))


@pytest.mark.parametrize(
    ("shape", "least", "most"),
    [
        # The ranges within 5 % of the best time of a sweep on one H200.
        ((2, 8, 8, 65536, 64), 16, 66),
        ((2, 8, 8, 65536, 128), 8, 8),
        ((2, 8, 8, 8000, 64), 16, 49),
        ((1, 8, 8, 512, 64), 16, 16),
        ((1, 32, 8, 1024, 128), 16, 16),
        ((1, 32, 8, 8192, 128), 16, 16),
        ((1, 32, 8, 131072, 128), 16, 33),
        ((16, 32, 8, 8192, 128), 1, 1),
        ((64, 32, 8, 4096, 128), 1, 1),
        ((1, 8, 1, 32768, 128), 99, 132),
        ((8, 28, 4, 8192, 128), 4, 4),
        ((4, 64, 8, 16384, 64), 8, 24),
    ],
    ids=str,
)
def test_measured_shapes_get_a_measured_good_count(shape, least, most):
    assert least <= plan(*shape).num_splits <= most


def test_small_caches_are_not_cut():
    for kv_len in (0, 1, 16, 64):
        for batch in (1, 8, 64):
            assert plan(batch, 32, 8, kv_len, 128).num_splits == 1


def test_sequences_that_may_differ_in_length_are_cut_into_pieces_of_one_size():
    chosen = plan(64, 32, 8, 16384, 128, paged=True, ragged=True)
    assert chosen.slots % H200["processors"] == 0, "every processor has as many programs"
    assert chosen.num_splits > chosen.slots
    assert chosen.partial_shape(64, 8, 4, 1) == (chosen.num_splits + 64 * 8, 4)
    assert plan(2, 8, 8, 2048, 128, ragged=True).slots
    # Short sequences are done before anybody waits, and the kernels count tiles in 32 bits.
    assert plan(512, 32, 8, 300, 128, ragged=True).num_splits == 1
    assert plan(2**20, 32, 8, 2**20, 128, ragged=True).slots is None
    # A wish for a number of splits, or for their size, is one for each sequence.
    assert plan(64, 32, 8, 16384, 128, ragged=True, num_splits=4).slots is None
    assert plan(64, 32, 8, 16384, 128, ragged=True, split_size=256).slots is None


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
        assert tile.block_m >= 16, "tensor cores take sixteen rows"
        pipeline = (tile.num_stages - 1) * tile.block_n * (tile.block_d + tile.block_dv) * element_size
        assert pipeline < shared_memory
    else:
        assert tile.block_m <= 8, "from sixteen rows on Triton makes a TF32 dot of an exact product"


def test_nothing_that_grows_is_in_the_tile():
    assert len({plan(batch, 8, 2, kv_len, 64).tile for batch in (1, 5, 64) for kv_len in (1, 1000, 10**6)}) == 1
