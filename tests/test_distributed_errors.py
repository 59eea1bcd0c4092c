"""What context_parallel_decode() refuses, on every rank and before any work, and what a lost rank does to others."""

from __future__ import annotations

import datetime
import os
import re
import time

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from flash_decoding.distributed import Contiguous, Interleaved, context_parallel_decode

I32 = torch.int32


def make(heads_q=4, length=6, dtype=torch.float32, batch=2, q_len=1, dim=16):
    kv = torch.zeros(batch, 2, length, dim, dtype=dtype)
    return dict(q=torch.zeros(batch, heads_q, q_len, dim, dtype=dtype), k_shard=kv, v_shard=kv)


def with_lens(**options):
    return make() | dict(kv_lens=torch.full((2,), 5, dtype=I32)) | options


# name: (arguments on rank 0, arguments on rank 1, the error, its words). A lone argument set is that of both.
CASES = {
    "shapes of q": (make(), make(batch=3), ValueError, r"q.shape must be the same on all ranks, got \[2, 4, 1, 16\] on rank 0 and \[3, 4, 1, 16\] on rank 1"),
    "dtypes": (make(), make(dtype=torch.float16), TypeError, "q.dtype must be the same on all ranks, got torch.float32 on rank 0 and torch.float16 on rank 1"),
    "shards of another dtype": (make(), make() | dict(k_shard=torch.zeros(2, 2, 6, 16, dtype=torch.float16)), TypeError, r"k must have the dtype of q, torch.float32, got torch.float16 \(on rank 1\)"),
    "scales": (make() | dict(scale=0.5), make() | dict(scale=0.25), ValueError, "scale must be the same on all ranks, got 0.5 on rank 0 and 0.25 on rank 1"),
    "windows": (with_lens(window=3), with_lens(), ValueError, "window must be the same on all ranks, got 3 on rank 0 and None on rank 1"),
    "layouts of shards": (with_lens(shard="interleaved"), with_lens(shard=Interleaved(4)), ValueError, "shard must be the same on all ranks, got interleaved by 1 on rank 0 and interleaved by 4 on rank 1"),
    "sinks on one rank": (make() | dict(sinks=torch.zeros(4)), make(), ValueError, r"sinks must be the same on all ranks, got \[4\] on rank 0 and None on rank 1"),
    "value widths": (make(), make() | dict(v_shard=torch.zeros(2, 2, 6, 24)), ValueError, "value_dim must be the same on all ranks, got 16 on rank 0 and 24 on rank 1"),
    "outputs": (make() | dict(output="heads"), make(), ValueError, "output must be the same on all ranks, got heads on rank 0 and replicated on rank 1"),
    "an option on one rank": (make() | dict(softcap=2.0), make(), ValueError, "softcap must be the same on all ranks, got 2.0 on rank 0 and None on rank 1"),
    "a bad window on rank 1": (with_lens(window=3), with_lens(window=-3), ValueError, r"window must be at least 0 .* \(on rank 1\)"),
    "a bad shape on rank 0": (make() | dict(v_shard=torch.zeros(2, 2, 5, 16)), make(), ValueError, r"v must have the length of k, 6, got 5 \(on rank 0\)"),
    "lists for lengths": (make() | dict(kv_lens=[5, 5]), None, TypeError, "kv_lens must be a torch.Tensor or None, got list"),
    "short lengths": (make() | dict(kv_lens=torch.zeros(3, dtype=I32)), None, ValueError, r"kv_lens must have shape \[2\], got \[3\]"),
    "lengths that no shards hold": (make() | dict(kv_lens=torch.tensor([13, 2])), None, ValueError, "kv_lens must lie from 0 to 12, what the shards hold, got values from 2 to 13"),
    "another shard": (make() | dict(shard="striped"), None, ValueError, "shard must be 'contiguous', 'interleaved', .* got 'striped'"),
    "a number for shard": (make() | dict(shard=4), None, TypeError, "shard must be .* got int"),
    "no block": (make() | dict(shard=Interleaved(0)), None, ValueError, "block must be at least 1, got 0"),
    "half a run": (with_lens(shard=Contiguous(start=torch.zeros(2, dtype=I32))), None, ValueError, "stop must be given with start"),
    "runs without lengths": (make() | dict(shard=Contiguous(torch.zeros(2, dtype=I32), torch.zeros(2, dtype=I32))), None, ValueError, "kv_lens must be given with start, got None"),
    "first ranks of another length": (with_lens(shard=Interleaved(2, torch.zeros(3, dtype=I32))), None, ValueError, r"first_rank must have shape \[2\], got \[3\]"),
    "uneven shards without lengths": (make(length=9) | dict(shard="interleaved", window=3), make() | dict(shard="interleaved", window=3), ValueError, "kv_lens must be given where shards are not the interleaved by 1 parts of one length, got shards of 9, 6 keys"),
    "another output": (make() | dict(output="split"), None, ValueError, r"output must be one of \['replicated', 'heads'\], got 'split'"),
    "another way": (make() | dict(communicate="broadcast"), None, ValueError, "communicate must be one of .* got 'broadcast'"),
    "heads that do not split": (make(heads_q=6) | dict(q=torch.zeros(2, 3, 1, 16), k_shard=torch.zeros(2, 1, 6, 16), v_shard=torch.zeros(2, 1, 6, 16), output="heads"), None, ValueError, "heads_q must be a multiple of the 2 ranks to be split, got 3"),
    "an unknown option": (make() | dict(dropout=0.1), None, TypeError, "options must be arguments of flash_decode.., got dropout"),
    "ALiBi by blocks": (with_lens(shard=Interleaved(2), alibi_slopes=torch.zeros(4)), None, ValueError, "alibi_slopes must be None for shards interleaved by more than one key, got one and block 2"),
    "ALiBi both ways": (make(q_len=3) | dict(causal=False, alibi_slopes=torch.zeros(4)), None, ValueError, "alibi_slopes must be None on shards where a query token may see keys behind its own"),
    "out of another shape": (make() | dict(out=torch.zeros(2, 4, 1, 8)), None, ValueError, r"out must have shape \[2, 4, 1, 16\], got \[2, 4, 1, 8\]"),
    "lse of another dtype": (make() | dict(lse=torch.zeros(2, 4, 1, dtype=torch.float64)), None, TypeError, "lse must be float32, got torch.float64"),
    "lse with gaps": (make() | dict(lse=torch.zeros(2, 4, 2)[..., :1]), None, ValueError, r"lse must be contiguous with shape \[2, 4, 1\]"),
    "out with gaps": (make() | dict(out=torch.zeros(2, 4, 1, 32)[..., ::2]), None, ValueError, "out must have a contiguous last axis"),
    "another backend": (make() | dict(backend="rocm"), None, ValueError, "backend must be one of .* got 'rocm'"),
    "no tensor": (make() | dict(q=3), None, TypeError, "q must be a torch.Tensor, got int"),
    "another device": (make() | dict(q=torch.zeros(2, 4, 1, 16, device="meta")), None, ValueError, "k must be on the device of q, meta, got cpu"),
    "no group": (make() | dict(group="all"), None, TypeError, "group must be a torch.distributed.ProcessGroup or None, got str"),
}  # fmt: skip


def refuse_all(rank, ranks):
    """What every case raises here."""
    said = {}
    for name, (first, second, *_) in CASES.items():
        try:
            context_parallel_decode(**(second if rank and second is not None else first))
        except Exception as error:
            said[name] = [type(error).__name__, str(error)]
        else:
            said[name] = ["nothing", ""]
    # The ranks are still in step.
    call = make()
    said["afterwards"] = float(context_parallel_decode(**call).abs().sum())
    return said


def test_every_rank_raises():
    said = run_ranks(2, refuse_all)
    for rank in range(2):
        assert said[rank] is not None, f"rank {rank} ended early"
        assert said[rank].pop("afterwards") == 0.0
        for name, (*_, kind, words) in CASES.items():
            got, text = said[rank][name]
            assert (got, bool(re.search(words, text))) == (kind.__name__, True), f"{name} on rank {rank}: {got}: {text}"


def test_without_a_process_group():
    with pytest.raises(ValueError, match=r"group must belong to an initialised torch\.distributed, got none"):
        context_parallel_decode(**make())


GROUP_SECONDS = 2


def call_and_time(group, how=None, **changed):
    """What a call raises, "" for nothing, and after how many seconds."""
    begin = time.monotonic()
    try:
        float(context_parallel_decode(**make(**changed), group=group, **(how or {})).sum())
    except RuntimeError as error:
        return str(error), time.monotonic() - begin
    return "", time.monotonic() - begin


def part_and_lose(rank, ranks):
    """The ranks make other calls than each other, and then rank 1 ends; what they see, and when."""
    timeout = datetime.timedelta(seconds=GROUP_SECONDS)
    parted, used, unused = (dist.new_group(timeout=timeout) for _ in range(3))
    for group in (parted, used):
        context_parallel_decode(**make(), group=group)
    said = [None] * ranks
    dist.all_gather_object(said, call_and_time(parted, batch=3) if rank == 0 else call_and_time(parted))
    if rank == 1:
        os._exit(0)
    return ["leave", *said, call_and_time(used), call_and_time(unused)]


def lose_rank_1(rank, ranks, communicate):
    """Rank 1 ends after a call; what rank 0's next one says, and when."""
    how = dict(communicate=communicate)
    context_parallel_decode(**make(), **how)
    dist.barrier()
    if rank == 1:
        os._exit(0)
    return ["leave", *call_and_time(None, how)]


def part_through_memory(rank, ranks):
    """Ranks that agreed on two calls each make another one then; what they see."""
    calls = [dict(communicate="symmetric_memory", softcap=softcap) for softcap in (1.0, 2.0)]
    for how in calls:
        context_parallel_decode(**make(), **how)
    dist.barrier()
    return ["leave", *call_and_time(None, calls[rank])]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("communicate", ["all_gather", "symmetric_memory"])
def test_a_lost_gpu_ends_the_others(communicate):
    """NCCL's own watch ends a process that waits for a lost one; what must not happen is that it waits for ever."""
    begin = time.monotonic()
    left, _ = run_ranks(2, lose_rank_1, communicate, device="cuda", seconds=150, group_seconds=10)
    assert time.monotonic() - begin < 140
    assert left is None or left[1], "the process was ended, or the call raised"


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_gpus_that_part_do_not_merge_each_other_s_states():
    for said in run_ranks(2, part_through_memory, device="cuda", seconds=100, group_seconds=10):
        assert said is None or said[1], "the process was ended, or the call raised"


def test_calls_that_part_and_a_lost_rank_are_errors_within_the_timeout():
    (_, *said), lost = run_ranks(2, part_and_lose, group_seconds=GROUP_SECONDS)
    assert lost is None
    assert len(said) == 4  # both ranks that parted, and rank 0 alone, with a call that it made before and a new one
    for words, seconds in said:
        assert words
        assert seconds < GROUP_SECONDS + 5
    assert "waited 0:00:02 for rank 1 to make a call with these shapes and options" in said[3][0]
