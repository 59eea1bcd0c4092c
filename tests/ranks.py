"""Starts processes that form a group, over gloo or NCCL, each of which runs many checks; a start costs seconds."""

import datetime
import functools
import json
import os
import tempfile
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from flash_decoding import KVCache, flash_decode, quantize_kv
from flash_decoding.distributed import symmetric

GROUP_SECONDS = 60  # what a rank waits for another before it is an error


@functools.cache
def compile_kernels():
    """Compile the CPU kernels that ranks use, once and here: they find them in Numba's cache, all equally fast."""
    q, kv = torch.zeros(1, 2, 1, 64), torch.zeros(1, 1, 2, 64)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        flash_decode(*(x.to(dtype) for x in (q, kv, kv)), backend="cpu")
    for kv_format in ("fp8", "int8", "int4"):
        codes = quantize_kv(kv, kv, kv_format)
        flash_decode(
            q.to(torch.float16), codes.k, codes.v, kv_format=codes.kv_format, k_scale=codes.k_scale,
            v_scale=codes.v_scale, backend="cpu",
        )  # fmt: skip
    for kv_format in (None, "int8"):
        cache = KVCache(1, 1, 2, 64, dtype=torch.float32, kv_format=kv_format)
        cache.append(kv, kv)
        cache.decode(q)


def run_ranks(ranks, work, *arguments, device="cpu", seconds=240, group_seconds=GROUP_SECONDS):
    """What work(rank, ranks, *arguments) returns on every rank, as JSON; None for one that died or was stopped.

    device: "cpu" for gloo; "cuda" for NCCL with a GPU per rank, on which new tensors are by default.
    """
    if device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        compile_kernels()
    with tempfile.TemporaryDirectory() as folder:
        context = mp.start_processes(
            _in_group, (ranks, device, folder, group_seconds, work, arguments), ranks, join=False, start_method="spawn"
        )
        end = time.monotonic() + seconds
        for process in context.processes:
            process.join(max(0.0, end - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        results = [Path(folder, f"{rank}.json") for rank in range(ranks)]
        return [json.loads(path.read_text()) if path.exists() else None for path in results]


def reach_each_other_through_files(min_words):
    """Let ranks on CPUs share files where GPUs would share memory; inboxes have at least so many words."""
    kept, folder = [], os.environ["RANKS_FOLDER"]

    def map_file(rank, words):
        return torch.from_file(f"{folder}/inbox-{len(kept)}-{rank}", shared=True, size=words, dtype=torch.int64)

    def meet(memory, members):
        inboxes = [memory if rank == members.rank else map_file(rank, len(memory)) for rank in range(members.ranks)]
        kept.append(inboxes)
        # As if each were a part of something larger, which begins elsewhere on every rank.
        return None, [x.data_ptr() - 64 * (rank + 1) for rank, x in enumerate(inboxes)]

    symmetric.refuse_device, symmetric._MIN_WORDS = lambda device: None, min_words
    symmetric.allocate, symmetric.meet = lambda words, device: map_file(dist.get_rank(), words), meet
    return kept


def _in_group(rank, ranks, device, folder, group_seconds, work, arguments):
    torch.set_num_threads(1)
    os.environ |= {"FLASH_DECODING_TUNED_DIR": os.devnull, "RANKS_FOLDER": folder}
    options = dict(init_method=f"file://{folder}/group", rank=rank, world_size=ranks)
    options["timeout"] = datetime.timedelta(seconds=group_seconds)
    if device == "cuda":
        torch.cuda.set_device(rank)
        torch.set_default_device("cuda")
        dist.init_process_group("nccl", device_id=torch.device("cuda", rank), **options)
    else:
        dist.init_process_group("gloo", **options)
    result = work(rank, ranks, *arguments)
    Path(folder, f"{rank}.json").write_text(json.dumps(result))
    if not (isinstance(result, list) and result[0] == "leave"):
        dist.barrier()  # nobody takes the store away from others
        dist.destroy_process_group()


def run_checks(rank, ranks, checks):
    """{name: None, or how it failed} of checks {name: (function, arguments)}."""
    failures = {}
    for name, (function, arguments) in checks.items():
        torch.manual_seed(0)
        try:
            function(rank, ranks, *arguments)
            failures[name] = None
        except Exception:
            failures[name] = traceback.format_exc()
    return failures


def assert_all_pass(results):
    """Of run_ranks(..., run_checks): every check passed on every rank."""
    for rank, failures in enumerate(results):
        assert failures is not None, f"rank {rank} ended before its checks did"
        failed = {name: text for name, text in failures.items() if text is not None}
        assert not failed, f"rank {rank} failed in {', '.join(failed)}; the first:\n{next(iter(failed.values()))}"
