"""ShardedKVCache over gloo: appended to and decoded from, it is a cache of one process."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from helpers import max_error
from ranks import assert_all_pass, run_checks, run_ranks

from flash_decoding import KVCache, PagedKVCache, dequantize_kv, quantize_kv, reference
from flash_decoding.caches import CacheFullError
from flash_decoding.distributed import ShardedKVCache, context_parallel_decode

ROOT = Path(__file__).parents[1]
HEADS, DIM = 2, 16


def draw(batch, length, layout="bhnd"):
    x, y = torch.randn(batch, HEADS, length, DIM), torch.randn(batch, HEADS, length, DIM)
    return (x, y) if layout == "bhnd" else tuple(z.transpose(1, 2).contiguous() for z in (x, y))


def assert_same(sharded, plain):
    """Both decode the same."""
    error = max_error(sharded, plain.double())
    assert error < 2e-6, f"off by {error:.3g}"


def check_dense(rank, ranks, block, layout, kv_format=None):
    """A prompt, then tokens of one or several, some sequences pausing."""
    cache, plain = (KVCache(3, HEADS, 40, DIM, dtype=torch.float32, layout=layout, kv_format=kv_format) for _ in "ab")
    cache = ShardedKVCache(cache, block=block)
    for length, new_lens in ((11, [11, 0, 5]), (1, None), (1, [0, 1, 1]), (4, [4, 2, 0]), (1, None)):
        k, v = draw(3, length, layout)
        cache.append(k, v, new_lens=new_lens)
        plain.append(k, v, new_lens=new_lens)
        q = draw(3, 2, layout)[0].repeat_interleave(2, 1 if layout == "bhnd" else 2)
        for options in (dict(), dict(window=5), dict(softcap=3.0)):
            assert_same(cache.decode(q, **options), plain.decode(q, **options))
    assert cache.lengths == plain.lengths
    lengths = f"lengths {min(cache.lengths)} to {max(cache.lengths)} in blocks of {block}"
    assert repr(cache) == f"<ShardedKVCache: {lengths}, rank {rank} of {ranks} with {cache.cache!r}>"
    assert cache.nbytes == cache.cache.nbytes
    # No shard is more than a block ahead of another.
    for b, length in enumerate(cache.lengths):
        share = length / ranks
        assert abs(cache.cache.lengths[b] - share) < block, f"rank {rank} holds {cache.cache.lengths[b]} of {length}"
    cache.free(1)
    assert cache.lengths[1] == 0
    k, v = draw(3, 1, layout)
    q = draw(3, 1, layout)[0]
    cache.append(k, v, new_lens=[0, 1, 0])
    plain.free(1)
    plain.append(k, v, new_lens=[0, 1, 0])
    assert_same(cache.decode(q), plain.decode(q))


def check_pages(rank, ranks, block):
    """Sequences that come, fork and go."""
    cache = ShardedKVCache(PagedKVCache(40, 4, HEADS, DIM, dtype=torch.float32), block=block)
    plain = PagedKVCache(60, 4, HEADS, DIM, dtype=torch.float32)
    mine, theirs = [cache.allocate() for _ in range(2)], [plain.allocate() for _ in range(2)]

    def grow(length):
        k, v = draw(len(mine), length)
        cache.append(k, v, sequences=mine)
        plain.append(theirs, k, v)
        q = torch.randn(len(mine), 4, 1, DIM)
        assert_same(cache.decode(q, sequences=mine), plain.decode(theirs, q))

    grow(13)
    for length in (None, 6):
        mine.append(cache.fork(mine[0], length))
        theirs.append(plain.fork(theirs[0], length))
    grow(1)
    grow(3)
    cache.free(mine.pop(0))
    plain.free(theirs.pop(0))
    grow(2)
    assert list(cache.lengths.values()) == [plain.length(sequence) for sequence in theirs]


def check_full(rank, ranks):
    """No room on one rank is an error on all, and nothing is written."""
    cache = ShardedKVCache(KVCache(1, HEADS, 4, DIM, dtype=torch.float32), block=4)
    cache.append(*draw(1, 4 * ranks - 1))
    cache.append(*draw(1, 1))
    with pytest.raises(
        CacheFullError, match=f"got 1 for sequence 0, which holds {4 * ranks}, with room for 4 per rank"
    ):
        cache.append(*draw(1, 1))
    assert cache.lengths == [4 * ranks]


def check_refused(rank, ranks):
    """Caches that differ between ranks, and calls that are not of their kind."""
    with pytest.raises(ValueError, match=r"k\.shape must be the same on all ranks"):
        ShardedKVCache(KVCache(1, HEADS, 4 + rank, DIM))
    with pytest.raises(ValueError, match="block must be at least 1, got 0"):
        ShardedKVCache(KVCache(1, HEADS, 4, DIM), block=0)
    with pytest.raises(TypeError, match="cache must be a KVCache or a PagedKVCache, got list"):
        ShardedKVCache([])
    dense, pages = ShardedKVCache(KVCache(2, HEADS, 4, DIM)), ShardedKVCache(PagedKVCache(2, 4, HEADS, DIM))
    with pytest.raises(ValueError, match="sequences must be None for a KVCache"):
        dense.decode(torch.zeros(2, 2, 1, DIM), sequences=[0])
    with pytest.raises(ValueError, match="sequences must be allocated and not freed, got 5"):
        pages.decode(torch.zeros(1, 2, 1, DIM), sequences=[5])
    with pytest.raises(ValueError, match="sequences must name those of a paged cache, got None"):
        pages.append(*draw(1, 1))
    with pytest.raises(TypeError, match="cache must be a PagedKVCache for this, got a KVCache"):
        dense.allocate()
    for name in ("kv_lens", "block_table", "k_scale", "shard", "group"):
        with pytest.raises(TypeError, match=f"^{name} must not be given, the cache sets it itself, got int$"):
            dense.decode(torch.zeros(2, 2, 1, DIM), **{name: 1})
    with pytest.raises(ValueError, match=r"new_lens must hold 2 numbers from 0 to 1, got \[2, 0\]"):
        dense.append(*draw(2, 1), new_lens=[2, 0])


def check_documented(rank, ranks):
    """What docs/distributed.md shows of a quantised cache."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "distributed.md").read_text(), flags=re.DOTALL)
    (block,) = [x for x in blocks if "quantize_kv" in x]
    q = torch.randn(2, 4, 1, 32)
    k, v = torch.randn(2, 2, HEADS, 7 * ranks, 32).unbind()
    v *= torch.arange(1, 7 * ranks + 1)[:, None]  # so that every rank has scales of its own
    shards = [[x[:, :, 7 * r : 7 * r + 7] for x in (k, v)] for r in range(ranks)]
    k_shard, v_shard = shards[rank]
    names = dict(q=q, k_shard=k_shard, v_shard=v_shard, k_new=k, v_new=v)
    exec(block, names | {"context_parallel_decode": context_parallel_decode}, names)
    stored = [quantize_kv(*shard, "int8:head") for shard in shards]
    assert not torch.equal(stored[0].v_scale, stored[1].v_scale)
    whole = [dequantize_kv(x.k, x.v, x.kv_format, k_scale=x.k_scale, v_scale=x.v_scale) for x in stored]
    k_read, v_read = (torch.cat(parts, dim=2) for parts in zip(*whole, strict=True))
    assert max_error(names["out"], reference(q, k_read, v_read)) < 1e-4
    plain = KVCache(2, HEADS, 7 * ranks, 32, dtype=torch.float32, kv_format="int8/int4:group32")
    plain.append(k, v)
    assert max_error(names["out_of_new"], plain.decode(q).double()) < 1e-4


CHECKS = {
    "tokens": (check_dense, (1, "bhnd")), "blocks": (check_dense, (3, "bnhd")), "wide": (check_dense, (64, "bhnd")),
    "codes": (check_dense, (2, "bhnd", "int8")),
    "pages": (check_pages, (4,)), "pages-by-token": (check_pages, (1,)), "pages-across": (check_pages, (6,)),
    "full": (check_full, ()), "documented": (check_documented, ()), "refused": (check_refused, ()),
}  # fmt: skip


@pytest.mark.parametrize("ranks", [3])
def test_a_sharded_cache_is_one_cache(ranks):
    assert_all_pass(run_ranks(ranks, run_checks, CHECKS))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_cache_sharded_over_two_gpus_is_one_cache():
    checks = {name: CHECKS[name] for name in ("tokens", "pages", "full")}
    assert_all_pass(run_ranks(2, run_checks, checks, device="cuda", seconds=100, group_seconds=60))
