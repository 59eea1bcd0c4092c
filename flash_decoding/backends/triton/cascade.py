"""A shared prefix and what comes behind it: two chunk kernels, and one reduce kernel that merges both."""

import torch
from torch import Tensor

from flash_decoding.backends.triton.chunk import launch_chunk, view_words
from flash_decoding.backends.triton.reduce import SharedSplits, launch_reduce
from flash_decoding.problem import Problem
from flash_decoding.split_plan import Plan
from flash_decoding.workspace import Partial


def decode_shared(
    prefix: tuple[Problem, Plan, Partial], suffix: tuple[Problem, Plan, Partial], out: Tensor, lse: Tensor | None
) -> None:
    """Fill out and, if it is not None, lse. The prefix's partial lies behind the suffix's in the same arrays."""
    device = out.device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return decode_shared(prefix, suffix, out, lse)
    problem, plan, _ = prefix
    launch_chunk(view_words(problem), *prefix[1:], out, None)
    launch_chunk(view_words(suffix[0]), *suffix[1:], out, None)
    launch_reduce(*suffix, out, lse, SharedSplits(plan.num_splits, problem.batch, problem.q_len))
