"""Context parallel decode over gloo: shards of a cache, decoded by 2, 3 and 4 processes, are the whole cache."""

from __future__ import annotations

import math
import random
import re

import pytest
import torch
import torch.distributed as dist
from helpers import assert_matches, max_error, tolerance
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import assert_all_pass, reach_each_other_through_files, run_checks, run_ranks

from flash_decoding import flash_decode, quantize_kv, reference
from flash_decoding.distributed import (
    Contiguous,
    Interleaved,
    context_parallel,
    context_parallel_decode,
    symmetric,
)
from flash_decoding.distributed.agreement import find_members

BATCH, HEADS_Q, HEADS_KV, DIM = 3, 12, 4, 32
SLOPES, SINKS = torch.linspace(0.02, 0.4, HEADS_Q), torch.linspace(-2, 3, HEADS_Q)
WAYS = ("all_gather", "reduce_scatter")
# Lengths that leave shards empty, short, and full; the longest is the capacity.
LENS = [5, 0, 37]


def tree(q_len):
    """A random tree of each sequence: every token sees itself and some before it."""
    mask = torch.rand(BATCH, q_len, q_len) < 0.6
    return mask.tril() | torch.eye(q_len, dtype=torch.bool)


# name: (query tokens, options of the whole sequence). Every option of flash_decode() that knows of positions, alone and
# in company, with one query token and with several.
OPTIONS = {
    "plain": (1, {}),
    "lens": (1, dict(kv_lens=LENS)),
    "start": (1, dict(kv_lens=LENS, kv_start=[2, 0, 20])),
    "window": (1, dict(kv_lens=LENS, window=6)),
    "window-start": (1, dict(kv_lens=LENS, kv_start=[4, 0, 3], window=9)),
    "alibi": (1, dict(kv_lens=LENS, alibi_slopes=SLOPES)),
    "alibi-window": (1, dict(kv_lens=LENS, alibi_slopes=SLOPES, window=11)),
    "sinks": (1, dict(kv_lens=LENS, sinks=SINKS)),
    "softcap-scale": (1, dict(kv_lens=LENS, softcap=2.0, scale=0.5)),
    "mask": (1, dict(kv_lens=LENS, key_mask=True)),
    "causal": (5, {}),
    "causal-lens": (5, dict(kv_lens=LENS)),
    "all-see-all": (5, dict(kv_lens=LENS, causal=False)),
    "q-lens": (5, dict(kv_lens=LENS, q_lens=[3, 5, 2])),
    "no-tokens": (5, dict(kv_lens=LENS, q_lens=[0, 1, 5], sinks=SINKS)),
    "tokens-window": (5, dict(kv_lens=LENS, window=7)),
    "tokens-short-window": (5, dict(kv_lens=LENS, window=2, q_lens=[5, 5, 4])),
    "tokens-window-0": (5, dict(kv_lens=LENS, window=0)),
    "tokens-window-not-causal": (5, dict(kv_lens=LENS, window=3, causal=False)),
    "tokens-start": (5, dict(kv_lens=LENS, kv_start=[3, 0, 34], window=20)),
    "tokens-alibi": (5, dict(kv_lens=LENS, alibi_slopes=SLOPES)),
    "tokens-alibi-window": (5, dict(kv_lens=LENS, alibi_slopes=SLOPES, window=4, q_lens=[2, 5, 4], kv_start=[1, 0, 3])),
    "tokens-alibi-nobody": (5, dict(kv_lens=LENS, alibi_slopes=SLOPES, window=0, q_lens=[1, 0, 0])),
    "tokens-alibi-mask": (3, dict(kv_lens=LENS, alibi_slopes=SLOPES, key_mask=True)),
    "tree": (6, dict(kv_lens=LENS, tree_mask=tree)),
    "tree-one": (1, dict(kv_lens=LENS, tree_mask=lambda _: torch.tensor([[[True]], [[True]], [[False]]]))),
    "tree-window": (6, dict(kv_lens=LENS, tree_mask=tree, window=3, q_lens=[6, 2, 5])),
    "everything": (
        4, dict(kv_lens=LENS, kv_start=[1, 0, 5], window=25, softcap=5.0, sinks=SINKS,
                key_mask=True, q_lens=[4, 1, 3], scale=0.4),
    ),
}  # fmt: skip
SHARDS = {
    "contiguous": Contiguous(), "given": Contiguous(torch.zeros(0), torch.zeros(0)), "tokens": Interleaved(),
    "blocks": Interleaved(4), "turned": Interleaved(3, torch.tensor([1, 0, 1])),
    "turned-tokens": Interleaved(1, torch.tensor([1, 1, 0])),
}  # fmt: skip


def positions(shard, rank, ranks, length, b):
    """Positions of the keys of sequence b on a rank, by the definition of the layout, plainly."""
    if isinstance(shard, Interleaved):
        first = 0 if shard.first_rank is None else int(shard.first_rank[b])
        return [n for n in range(length) if (n // shard.block) % ranks == (rank - first) % ranks]
    if shard.start is None:
        cuts = [0, *sorted(length * (2 * r + 1) // (2 * ranks) for r in range(1, ranks)), length]
        return list(range(cuts[rank], cuts[rank + 1]))
    # Every sequence cut elsewhere, the middle ranks of some empty.
    cuts = [0, *[min(length, (b * 7 + 3) * r) for r in range(1, ranks)], length]
    return list(range(cuts[rank], cuts[rank + 1]))


def deal(x, shard, rank, ranks, axis=2):
    """This rank's part of x, whose axis counts keys; what is past a sequence's part is NaN, or True in a mask."""
    length = x.shape[axis]
    at = [positions(shard, rank, ranks, length, b) for b in range(x.shape[0])]
    nothing = math.nan if x.is_floating_point() else 1
    part = x.new_full((*x.shape[:axis], max(map(len, at)), *x.shape[axis + 1 :]), nothing)
    for b, where in enumerate(at):
        keys = x[b].index_select(axis - 1, torch.tensor(where, dtype=torch.long))
        part[b].narrow(axis - 1, 0, len(where)).copy_(keys)
    return part


def locate(shard, rank, ranks, length):
    """The layout as the call wants it, with real tensors."""
    if isinstance(shard, Contiguous) and shard.start is not None:
        at = [positions(shard, rank, ranks, length, b) for b in range(BATCH)]
        start, stop = [p[0] if p else 0 for p in at], [p[-1] + 1 if p else 0 for p in at]
        return Contiguous(torch.tensor(start), torch.tensor(stop))
    if isinstance(shard, Interleaved) and shard.first_rank is not None:
        return Interleaved(shard.block, torch.tensor(shard.first_rank.tolist()))
    return shard


def make_whole(q_len, options, dtype, length):
    """q, k, v of the whole and its options as tensors."""
    q = torch.randn(BATCH, HEADS_Q, q_len, DIM).to(dtype)
    k, v = torch.randn(BATCH, HEADS_KV, length, DIM).to(dtype), torch.randn(BATCH, HEADS_KV, length, 24).to(dtype)
    options = {name: x.to(q.device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    for name in ("kv_lens", "kv_start", "q_lens"):
        if name in options:
            options[name] = torch.tensor(options[name], dtype=torch.int32)
    if options.pop("key_mask", None):
        options["key_mask"] = torch.rand(BATCH, length) < 0.7
    if "tree_mask" in options:
        options["tree_mask"] = options["tree_mask"](q_len)
    return q, k, v, options


def in_pages(x, page_size):
    """A dense shard as a pool of shuffled pages with its table."""
    batch, heads, length, width = x.shape
    per = max(1, -(-length // page_size))
    padded = torch.full((batch, heads, per * page_size, width), math.nan, dtype=x.dtype)
    padded[:, :, :length] = x
    table = torch.tensor(random.Random(5).sample(range(batch * per), batch * per)).view(batch, per)
    pool = torch.empty(batch * per, heads, page_size, width, dtype=x.dtype)
    pool[table] = padded.view(batch, heads, per, page_size, width).transpose(1, 2)
    return pool, table.to(torch.int32)


def decode_in_shards(rank, ranks, whole, shard, *, page_size=None, layout="bhnd", **how):
    """context_parallel_decode() of this rank's part of the whole."""
    q, k, v, options = whole
    length, options = k.shape[2], dict(options)
    k, v = deal(k, shard, rank, ranks), deal(v, shard, rank, ranks)
    if "key_mask" in options:
        options["key_mask"] = deal(options["key_mask"], shard, rank, ranks, axis=1)
    if page_size is not None:
        mask, keys = options.get("key_mask"), k.shape[2]
        k, options["block_table"] = in_pages(k, page_size)
        v, _ = in_pages(v, page_size)
        if mask is not None:
            room = options["block_table"].shape[1] * page_size
            options["key_mask"] = torch.cat([mask, torch.ones(BATCH, room - keys, dtype=torch.bool)], 1)
    if layout == "bnhd":
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    return context_parallel_decode(
        q, k, v, shard=locate(shard, rank, ranks, length), layout=layout, return_lse=True, **options, **how
    )  # fmt: skip


def join_heads(x, ranks, group=None):
    """The heads of all ranks of a group, axis 1."""
    parts = [torch.empty_like(x) for _ in range(ranks)]
    dist.all_gather(parts, x, group=group)
    return torch.cat(parts, 1)


def assert_whole(rank, ranks, whole, out, lse, output="replicated", layout="bhnd"):
    """The result is that of the whole cache, in every head."""
    q, k, v, options = whole
    if layout == "bnhd":
        out = out.transpose(1, 2)
    if output == "heads":
        out, lse = (join_heads(x.contiguous(), ranks) for x in (out, lse))
    want = reference(q, k, v, **options)
    # The contract's bound. SDPA lacks most options, so what one process loses on the whole cache counts as well.
    loss = max_error(flash_decode(q, k, v, **options), want)
    assert_matches(out, lse, q, k, v, atol=max(tolerance(q, k, v, want, **options), 2 * loss), **options)


def refused(shard, options, ranks):
    """Combinations that are refused by name: see find_position_errors()."""
    return "alibi_slopes" in options and isinstance(shard, Interleaved) and shard.block > 1 and ranks > 1


def check_option(rank, ranks, name, shard_name):
    q_len, options = OPTIONS[name]
    shard = SHARDS[shard_name]
    length = max(LENS) if "kv_lens" in options or not isinstance(shard, Interleaved) else 6 * shard.block * ranks
    if "kv_lens" not in options and shard_name in ("given", "turned", "turned-tokens"):
        options = options | {"kv_lens": [length] * BATCH}
    whole = make_whole(q_len, options, torch.float32, length)
    if refused(shard, options, ranks):
        with pytest.raises(ValueError, match="alibi_slopes must be None for shards interleaved by more than one key"):
            decode_in_shards(rank, ranks, whole, shard)
        return
    for communicate, output in (("all_gather", "replicated"), ("reduce_scatter", "heads")):
        out, lse = decode_in_shards(rank, ranks, whole, shard, communicate=communicate, output=output)
        assert_whole(rank, ranks, whole, out, lse, output)
    assert_whole(rank, ranks, whole, *decode_in_shards(rank, ranks, whole, shard))  # again, with nothing to agree on


TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")

# What may be combined with any options: the cache's form, dtypes, and how states travel.
FORMS = {
    "float16": dict(dtype=torch.float16),
    "bfloat16": dict(dtype=torch.bfloat16, communicate="reduce_scatter"),
    "pages": dict(page_size=3),
    "pages-bnhd": dict(page_size=4, layout="bnhd", dtype=torch.bfloat16),
    "bnhd": dict(layout="bnhd", communicate="reduce_scatter"),
    "bnhd-heads": dict(layout="bnhd", output="heads"),
    "gathered-heads": dict(communicate="all_gather", output="heads"),
    "scattered": dict(communicate="reduce_scatter"),
    "splits": dict(split_size=16),
}
FORMED = ("mask", "tokens-window", "tokens-alibi-window", "tree", "everything")


def check_form(rank, ranks, form, name):
    how = dict(FORMS[form])
    q_len, options = OPTIONS[name]
    whole = make_whole(q_len, options, how.pop("dtype", torch.float32), max(LENS))
    # What pages can hold is more than what they hold, so runs of pages are given by their positions.
    runs = SHARDS["given" if "page_size" in how else "contiguous"]
    for shard in (runs, SHARDS["tokens"], SHARDS["turned"]):
        if not refused(shard, options, ranks):
            out, lse = decode_in_shards(rank, ranks, whole, shard, **how)
            assert_whole(rank, ranks, whole, out, lse, how.get("output", "replicated"), how.get("layout", "bhnd"))


def check_layouts(rank, ranks):
    """Shards cut anywhere, by hypothesis; every process draws the same examples."""

    @settings(max_examples=15, deadline=None, derandomize=True, database=None)
    @given(
        st.lists(st.integers(0, 70), min_size=BATCH, max_size=BATCH), st.integers(1, 4), st.integers(1, 20),
        st.none() | st.integers(0, 30), st.booleans(), st.data(),
    )  # fmt: skip
    def cut_anywhere(lens, q_len, block, window, causal, data):
        length = max(*lens, 1)
        options = dict(kv_lens=lens, window=window, causal=causal)
        first = data.draw(st.lists(st.integers(0, ranks - 1), min_size=BATCH, max_size=BATCH))
        cuts = [sorted(data.draw(st.lists(st.integers(0, n), min_size=ranks - 1, max_size=ranks - 1))) for n in lens]
        torch.manual_seed(1)
        whole = make_whole(q_len, options, torch.float32, length)
        assert_whole(rank, ranks, whole, *decode_in_shards(rank, ranks, whole, Interleaved(block, torch.tensor(first))))
        start, stop = ([[0, *c, n][rank + i] for c, n in zip(cuts, lens, strict=True)] for i in (0, 1))
        q, k, v, options = whole
        room = max(y - x for x, y in zip(start, stop, strict=True))
        parts = [torch.full((BATCH, HEADS_KV, room, x.shape[3]), math.nan) for x in (k, v)]
        for b, (x, y) in enumerate(zip(start, stop, strict=True)):
            for part, full in zip(parts, (k, v), strict=True):
                part[b, :, : y - x] = full[b, :, x:y]
        shard = Contiguous(torch.tensor(start), torch.tensor(stop))
        assert_whole(rank, ranks, whole, *context_parallel_decode(q, *parts, shard=shard, return_lse=True, **options))

    cut_anywhere()


def check_growing_shards(rank, ranks):
    """A token at a time, on one rank after the other: shapes of shards change while the signature stays."""
    q, k, v, _ = make_whole(1, {}, torch.float32, 3 * ranks + 1)
    for length in range(1, k.shape[2] + 1):
        whole = q, k[:, :, :length], v[:, :, :length], {}
        mine = [deal(x, Interleaved(), rank, ranks) for x in whole[1:3]]
        assert_whole(rank, ranks, whole, *context_parallel_decode(q, *mine, return_lse=True, shard="interleaved"))
        lens = torch.full((BATCH,), length)
        assert_whole(
            rank, ranks, whole,
            *context_parallel_decode(q, *mine, return_lse=True, shard="interleaved", kv_lens=lens, window=4 * ranks),
        )  # fmt: skip


def check_into_given(rank, ranks):
    """out and lse of the caller, and results that are waited for later, in any order."""
    whole = make_whole(2, dict(kv_lens=LENS), torch.float32, max(LENS))
    for communicate in ("all_gather", "reduce_scatter"):
        out, lse = torch.empty(BATCH, HEADS_Q, 2, 24), torch.empty(BATCH, HEADS_Q, 2)
        got = decode_in_shards(rank, ranks, whole, Interleaved(), out=out, lse=lse, communicate=communicate)
        assert got[0] is out
        assert got[1] is lse
        assert_whole(rank, ranks, whole, out, lse)
        with pytest.raises(ValueError, match=r"out must have shape \[3, 12, 2, 24\], got \[1, 12, 2, 24\]"):
            decode_in_shards(rank, ranks, whole, Interleaved(), out=out[:1], lse=lse, communicate=communicate)
        others = [make_whole(2, dict(kv_lens=LENS), torch.float32, max(LENS)) for _ in range(3)]
        pending = [
            decode_in_shards(rank, ranks, other, Interleaved(), async_op=True, communicate=communicate)
            for other in others
        ]
        for other, one in zip(others, pending, strict=True):
            result = one.wait()
            assert_whole(rank, ranks, other, *result)
            assert one.wait() is result


def check_no_rows(rank, ranks):
    """An empty batch, and a cache in which nobody holds a key."""
    q, kv = torch.randn(0, 4, 1, 16), torch.randn(0, 2, 3, 16)
    assert context_parallel_decode(q, kv, kv).shape == (0, 4, 1, 16)
    q, kv = torch.randn(2, 4, 1, 16), torch.randn(2, 2, 0, 16)
    out, lse = context_parallel_decode(q, kv, kv, sinks=torch.zeros(4), return_lse=True)
    assert bool((out == 0).all())
    assert bool((lse == -math.inf).all())


def check_tokens_dealt_to_many(rank, ranks):
    """Two keys over all ranks, and sequences of 2, 0 and 9 (a rank without tokens once gave NaN in the merge)."""
    whole = make_whole(1, dict(kv_lens=[2, 0, 9]), torch.float32, 9)
    assert_whole(rank, ranks, whole, *decode_in_shards(rank, ranks, whole, Interleaved()))


def check_subgroup(rank, ranks):
    """A group of some ranks: those in it decode, the others are told."""
    group = dist.new_group([ranks - 2, ranks - 1])
    q, kv = torch.randn(1, 2, 1, 16), torch.randn(1, 2, 8, 16)
    if rank < ranks - 2:
        with pytest.raises(ValueError, match=f"group must hold the calling rank, got a group without rank {rank}"):
            context_parallel_decode(q, kv, kv, group=group)
        return
    part = kv[:, :, 4 * (rank - ranks + 2) :][:, :, :4]
    torch.testing.assert_close(context_parallel_decode(q, part, part, group=group), flash_decode(q, kv, kv))


def check_head_mesh(rank, ranks):
    """Heads over one dimension of a mesh, keys over the other."""
    mesh = dist.init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("tp", "cp"))
    whole = make_whole(3, dict(kv_lens=LENS, sinks=SINKS), torch.float32, max(LENS))
    q, k, v, options = whole
    half = mesh.get_local_rank("tp")
    q, k, v = (x.chunk(2, dim=1)[half] for x in (q, k, v))
    sinks = options["sinks"].chunk(2)[half]
    mine = q, k, v, options | {"sinks": sinks}
    at, of = mesh.get_local_rank("cp"), ranks // 2
    out, lse = decode_in_shards(at, of, mine, Interleaved(2), group=mesh["cp"].get_group())
    assert_whole(rank, ranks, whole, *(join_heads(x, 2, mesh["tp"].get_group()) for x in (out, lse)))


def check_ways_agree(rank, ranks, dtype):
    """Both collectives give the same bits, and each of its heads the other output; symmetric memory is as good."""
    whole = make_whole(3, dict(kv_lens=LENS, window=9, sinks=SINKS), dtype, max(LENS))
    out, lse = decode_in_shards(rank, ranks, whole, Interleaved(), communicate="all_gather")
    assert_whole(rank, ranks, whole, out, lse)
    other, other_lse = decode_in_shards(rank, ranks, whole, Interleaved(), communicate="reduce_scatter")
    assert max_error(out, other) == 0.0
    assert max_error(lse, other_lse) == 0.0
    heads = [decode_in_shards(rank, ranks, whole, Interleaved(), communicate=way, output="heads")[0] for way in WAYS]
    assert all(max_error(part, out.chunk(ranks, 1)[rank]) == 0.0 for part in heads)
    if out.device.type == "cuda":
        for output in ("replicated", "heads"):
            how = dict(communicate="symmetric_memory", output=output)
            assert_whole(rank, ranks, whole, *decode_in_shards(rank, ranks, whole, Interleaved(), **how), output)


def check_large_scores(rank, ranks):
    """Scores of a million, equal on all ranks, of which each has another number: one float32 has no room for that."""
    for dtype, shard in ((torch.float32, Interleaved()), (torch.float32, Contiguous()), (torch.float16, Interleaved())):
        q, k, v, _ = make_whole(1, {}, dtype, 7)
        for x in (q, k):
            x.zero_()[..., 0] = 1000.0
        whole = q, k, v, dict(scale=1.0)
        for communicate in WAYS:
            out, lse = decode_in_shards(rank, ranks, whole, shard, communicate=communicate)
            assert_whole(rank, ranks, whole, out, lse)


def check_on_triton(rank, ranks):
    """The main ways through in the interpreter: 16 bits and 32, one call per shard and two."""
    for name, dtype, communicate in (
        ("everything", torch.float16, "all_gather"), ("tokens-alibi", torch.float32, "reduce_scatter"),
    ):  # fmt: skip
        q_len, options = OPTIONS[name]
        whole = make_whole(q_len, options, dtype, max(LENS))
        out, lse = decode_in_shards(rank, ranks, whole, Interleaved(), backend="triton", communicate=communicate)
        assert_whole(rank, ranks, whole, out, lse)
    check_large_scores(rank, ranks)


def check_exchange(rank, ranks):
    """States pushed into each other's memory, here files: options, outputs, and calls of any size one after another."""
    inboxes = reach_each_other_through_files(min_words=8000)
    context_parallel._Session._make_floats = lambda _, *shape: torch.full(shape, math.nan)
    how = dict(backend="triton", communicate="symmetric_memory")
    nobody, kv = torch.randn(0, 4, 1, 16), torch.randn(0, 2, 3, 16)
    assert context_parallel_decode(nobody, kv, kv, **how).shape == nobody.shape
    small = make_whole(1, dict(kv_lens=LENS, softcap=2.0), torch.float32, max(LENS))
    for name, dtype, layout, output, shard, more in (
        ("sinks", torch.bfloat16, "bnhd", "heads", Interleaved(), {}),
        ("window-start", torch.float16, "bhnd", "replicated", Interleaved(), {}),
        ("tokens-window", torch.float32, "bnhd", "replicated", Interleaved(2), {}),
        ("lens", torch.float32, "bhnd", "heads", Interleaved(8), dict(split_size=64)),  # states that nobody writes
    ):  # fmt: skip
        q_len, options = OPTIONS[name]
        whole = make_whole(q_len, options, dtype, max(LENS))
        out, lse = decode_in_shards(rank, ranks, whole, shard, output=output, layout=layout, **more, **how)
        assert_whole(rank, ranks, whole, out, lse, output, layout)
        if name in ("sinks", "tokens-window"):  # the second time with the inbox which the call had first
            assert_whole(rank, ranks, small, *decode_in_shards(rank, ranks, small, Interleaved(), **how))
    assert len(inboxes) == 2, "the first was too small for the third call"

    allocate = symmetric.allocate

    def fail(words, device):
        if rank == 1:
            raise RuntimeError("out of memory")
        return allocate(words, device)

    symmetric.allocate = fail
    large = make_whole(16, dict(kv_lens=LENS), torch.float32, max(LENS))
    with pytest.raises(ValueError, match=r"not be 'symmetric_memory' here: out of memory \(on rank 1\)"):
        decode_in_shards(rank, ranks, large, Interleaved(), **how)
    symmetric.allocate = allocate

    memory = find_members(None).memory[torch.device("cpu")]
    # They pass the largest number of 32 bits; even, as the number of the last call was, since halves take turns.
    memory.take(find_members(None), 1, 1).counters.fill_(2**31 - 2)
    others = [make_whole(1, dict(kv_lens=LENS, window=5), torch.float32, max(LENS)) for _ in range(2)]
    pending = [decode_in_shards(rank, ranks, other, Interleaved(), async_op=True, **how) for other in others]
    for other, one in reversed(list(zip(others, pending, strict=True))):
        assert one.communicate == "symmetric_memory"
        assert_whole(rank, ranks, other, *one.wait())
    calls = [dict(softcap=softcap, **how) for softcap in (1.0, 3.0)]  # alike but for what they mean
    for call in calls:
        decode_in_shards(rank, ranks, others[0], Interleaved(), **call)
    out, _ = decode_in_shards(rank, ranks, others[0], Interleaved(), **calls[rank == 0])
    assert bool(out.isnan().all()), "no rank merges another call's states; on a GPU that is an error"


def check_no_reach(rank, ranks):
    """Ranks without GPUs, and no choice left."""
    q, kv = torch.randn(1, 2, 1, 16), torch.randn(1, 2, 3, 16)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^communicate must not be 'symmetric_memory' here: tensors are on cpu"):
            context_parallel_decode(q, kv, kv, communicate="symmetric_memory")


def check_streams(rank, ranks):
    """Calls of two groups on several streams, one after another as far as each rank's host goes; no rank waits."""
    whole = make_whole(1, dict(kv_lens=LENS), torch.bfloat16, max(LENS))
    other = dist.new_group(list(range(ranks)))
    streams, results = [torch.cuda.Stream() for _ in range(3)], []
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    for i in range(30):
        with torch.cuda.stream(streams[i % 3]):
            group = other if i % 2 else None
            results.append(
                decode_in_shards(rank, ranks, whole, Interleaved(), communicate="symmetric_memory", group=group)
            )
    with torch.cuda.stream(streams[0]):
        pending = decode_in_shards(
            rank, ranks, whole, Interleaved(), communicate="symmetric_memory", async_op=True
        )  # fmt: skip
    with torch.cuda.stream(streams[1]):
        results.append(tuple(x.clone() for x in pending.wait()))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=streams[0], capture_error_mode="thread_local"):
        streams[1].wait_stream(streams[0])
        for stream in streams[:2]:
            with torch.cuda.stream(stream):
                results.append(decode_in_shards(rank, ranks, whole, Interleaved(), communicate="symmetric_memory"))
        streams[0].wait_stream(streams[1])
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert_whole(rank, ranks, whole, *results[0])
    assert all(torch.equal(x, y) for result in results for x, y in zip(result, results[0], strict=True))


def check_many_wide_rows(rank, ranks):
    """More rows than programs, and so wide that a program has several warps."""
    q, k, v = (torch.randn(40, *shape, 576).to(torch.bfloat16) for shape in ((32, 1), (1, 16), (1, 16)))
    v = v[..., :512].contiguous()
    part = slice(8 * rank, 8 * rank + 8)
    out = context_parallel_decode(q, k[:, :, part], v[:, :, part], communicate="symmetric_memory")
    assert_matches(out, None, q, k, v, atol=2e-2)


def check_graph(rank, ranks, communicate):
    """One CUDA graph of a step with its communication is right for every later content of the lengths."""
    q, k, v, options = make_whole(3, dict(kv_lens=LENS, window=9, sinks=SINKS), torch.bfloat16, max(LENS))
    k_own, v_own = (deal(x, Interleaved(), rank, ranks) for x in (k, v))
    lens = options["kv_lens"]

    def step():
        return context_parallel_decode(
            q, k_own, v_own, shard=Interleaved(), return_lse=True, communicate=communicate, **options
        )  # fmt: skip

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # The process group's own thread looks at events meanwhile, which a capture of all threads forbids.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        out, lse = step()
    for content in (LENS, [37, 1, 12], [0, 0, 3]):
        lens.copy_(torch.tensor(content))  # of options
        out.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert_whole(rank, ranks, (q, k, v, options), out, lse)


def check_wrong_device(rank, ranks):
    """Tensors on a CPU and a group that communicates those of GPUs."""
    with pytest.raises(ValueError, match="q must be on a device that the group communicates, cuda by nccl, got cpu"):
        context_parallel_decode(*[torch.zeros(1, 2, 3, 16, device="cpu") for _ in range(3)])


def check_rounded_once(rank, ranks):
    """States that nearly cancel: rounded to 16 bits before the merge, they would be off by far more than the result."""
    for dtype, odd in ((torch.bfloat16, 99.3), (torch.float16, 1000.3)):
        q, k = torch.zeros(1, 4, 1, 16, dtype=dtype), torch.zeros(1, 2, 2, 16, dtype=dtype)
        v = torch.full((1, 2, 2, 16), odd, dtype=dtype)
        v[:, :, 1::2] *= 0.75  # the state of a rank is no number of 16 bits
        whole = torch.cat([-v if r else v * 1.0625 for r in range(ranks)], 2)
        mine = whole[:, :, 2 * rank : 2 * rank + 2]
        out, want = context_parallel_decode(q, k, mine), reference(q, k.repeat(1, 1, ranks, 1), whole)
        error, ulp = max_error(out, want), torch.finfo(dtype).eps * want.abs().max().item()
        assert error <= ulp, f"{dtype} is off by {error:.3g}, allowed {ulp:.3g}"


def check_codes(rank, ranks, kv_format, q_len):
    """Shards of a quantised cache, with the scales of their keys."""
    q = torch.randn(BATCH, 8, q_len, 64).to(torch.float16)
    k, v = (torch.randn(BATCH, 2, max(LENS), 64) for _ in range(2))
    whole = quantize_kv(k, v, kv_format)
    options = dict(kv_lens=torch.tensor(LENS), window=9)
    want = reference(
        q, whole.k, whole.v, kv_format=whole.kv_format, k_scale=whole.k_scale, v_scale=whole.v_scale, **options
    )
    for shard in (SHARDS["given"], Interleaved(2)):
        k, v = (deal(x.view(torch.uint8), shard, rank, ranks).view(x.dtype) for x in (whole.k, whole.v))
        scales = (whole.k_scale, whole.v_scale)
        k_scale, v_scale = (deal(x, shard, rank, ranks) if x.ndim > 2 else x for x in scales)
        out = context_parallel_decode(
            q, k, v, shard=locate(shard, rank, ranks, max(LENS)), kv_format=whole.kv_format, k_scale=k_scale,
            v_scale=v_scale, **options,
        )  # fmt: skip
        error, bound = max_error(out, want), 2.0**-9 * want.abs().max().item()
        assert error <= bound, f"{kv_format} is off by {error:.3g}, allowed {bound:.3g}"


# name: (function, arguments, ranks that run it)
OTHERS = {
    "layouts": (check_layouts, (), (2, 3, 4)), "growing": (check_growing_shards, (), (2, 3, 4)),
    "given": (check_into_given, (), (2, 3)), "no-rows": (check_no_rows, (), (2, 3)),
    "many": (check_tokens_dealt_to_many, (), (2, 4)), "subgroup": (check_subgroup, (), (2, 3)),
    "mesh": (check_head_mesh, (), (2, 4)), "ways": (check_ways_agree, (torch.float32,), (2, 4)),
    "large": (check_large_scores, (), (2, 3)), "rounded-once": (check_rounded_once, (), (2,)),
    "no-reach": (check_no_reach, (), (2,)),
    "fp8": (check_codes, ("fp8", 1), (2,)), "int8": (check_codes, ("int8", 3), (2,)),
    "int4": (check_codes, ("int4", 2), (2,)),
}  # fmt: skip
SHARDS_OF = {2: tuple(SHARDS), 3: ("given", "turned", "turned-tokens"), 4: ("contiguous", "blocks")}
FORMED_OF = {2: FORMED, 3: ("everything",), 4: ("tokens-alibi-window",)}


def checks_of(ranks):
    """Every check of a group's processes by name."""
    options = {f"{name}-{shard}": (check_option, (name, shard)) for name in OPTIONS for shard in SHARDS_OF[ranks]}
    forms = {f"{name}-{form}": (check_form, (form, name)) for name in FORMED_OF[ranks] for form in FORMS}
    others = {name: (function, arguments) for name, (function, arguments, of) in OTHERS.items() if ranks in of}
    return options | forms | others


@pytest.mark.parametrize("ranks", SHARDS_OF)
def test_shards_are_the_whole(ranks):
    assert_all_pass(run_ranks(ranks, run_checks, checks_of(ranks)))


@pytest.mark.interpreter
def test_two_ranks_in_the_interpreter(target):
    if target != ("triton", "cpu"):
        pytest.skip("needs TRITON_INTERPRET=1; the other tests start the other backends")
    assert_all_pass(run_ranks(2, run_checks, {"triton": (check_on_triton, ())}))


@pytest.mark.interpreter
def test_ranks_that_reach_each_other_in_the_interpreter(target):
    if target != ("triton", "cpu"):
        pytest.skip("needs TRITON_INTERPRET=1; the other tests start the other backends")
    assert_all_pass(run_ranks(2, run_checks, {"exchange": (check_exchange, ())}))


@pytest.mark.gpu
@TWO_GPUS
def test_two_gpus_are_one():
    """One start of two processes for everything, and few kernels: each compiles what it starts."""
    checks = {
        "device": (check_wrong_device, ()), "ways": (check_ways_agree, (torch.bfloat16,)),
        "graph": (check_graph, ("reduce_scatter",)), "exchange-graph": (check_graph, ("symmetric_memory",)),
        "large": (check_large_scores, ()), "streams": (check_streams, ()),
        "wide": (check_many_wide_rows, ()),
    }  # fmt: skip
    assert_all_pass(run_ranks(2, run_checks, checks, device="cuda", seconds=100, group_seconds=60))


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("is_last", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_kernel_that_merges_ranks_compiles_and_does_not_spill(dtype, is_last, arch):
    pytest.importorskip("triton")
    from compiling import compile_partials

    built = compile_partials(dtype, 128, 8, arch, is_last=is_last)
    assert built.spills == 0
    assert built.stack_bytes == 0


@pytest.mark.parametrize("arch", [80, 90])
def test_the_reduce_kernel_lets_the_exchange_kernel_start(arch):
    pytest.importorskip("triton")
    from compiling import compile_reduce

    built = compile_reduce(torch.float32, 128, 8, 1, arch, is_last=False)
    assert (built.spills, built.stack_bytes) == (0, 0)
    assert ("griddepcontrol.launch_dependents" in built.ptx) == (arch >= 90)


@pytest.mark.parametrize("arch", [80, 89, 90])
@pytest.mark.parametrize(
    ("ranks", "scatter", "width"), [(2, False, 128), (8, False, 128), (8, True, 64), (8, True, 512)]
)
def test_the_exchange_kernel_compiles_and_does_not_spill(ranks, scatter, width, arch):
    pytest.importorskip("triton")
    from compiling import compile_exchange

    built = compile_exchange(torch.bfloat16, width, ranks, arch, scatter=scatter)
    assert built.spills == 0
    assert built.stack_bytes == 0
    assert built.registers <= 128
    # What another GPU writes is read from memory each time, whole words are written, and waiting has an end.
    assert "ld.volatile.global" in built.ptx
    assert re.search(r"st\.global(\.v2)?\.b64", built.ptx)
    assert "trap;" in built.ptx
    assert ("griddepcontrol.wait" in built.ptx) == (arch >= 90)
