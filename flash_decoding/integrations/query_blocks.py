"""Any number of query tokens per sequence, packed one sequence after the other, as blocks that flash_decode() takes.

A block holds up to 64 neighbouring tokens of one sequence and sees the cache as it was when its last token was the
newest: its kv_lens leaves out the tokens behind it. Positions count from the end, so causal masks, windows and ALiBi
stay right. How long the sequences are is known on the device alone, so the number of blocks is a bound from shapes, and
blocks that no token needs are empty. q is copied into the blocks and the result out of them, the cache never.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_decoding.api import flash_decode
from flash_decoding.problem import MAX_Q_LEN


class QueryBlocks(NamedTuple):
    """Which tokens each block holds, and where each token's result is."""

    token: Tensor  # [blocks, size], the packed token of each row; any token where the row holds none
    sequence: Tensor  # [blocks]
    q_lens: Tensor  # [blocks], rows that hold a token
    behind: Tensor  # [blocks], tokens of the sequence behind the block
    row: Tensor  # [total], each token's row among all blocks' rows
    outside: Tensor  # [total] bool, tokens of no sequence


def cut(cu_seqlens_q: Tensor, total: int, max_seqlen_q: int) -> QueryBlocks:
    """The blocks of sequences of at most max_seqlen_q >= 1 tokens that begin at cu_seqlens_q [B + 1]."""
    batch, device = cu_seqlens_q.shape[0] - 1, cu_seqlens_q.device
    # Powers of two: a GPU compiles its kernel once for every size.
    size = min(1 << (max_seqlen_q - 1).bit_length(), MAX_Q_LEN)
    # A sequence has at most its share of the total, rounded up, and no more than the longest one has.
    blocks = min(batch * -(-max_seqlen_q // size), (total + batch * (size - 1)) // size) if total else 0
    lens = cu_seqlens_q.diff()
    blocks_of = (lens + size - 1) // size
    ends = blocks_of.cumsum(0)

    block = torch.arange(blocks, device=device)
    sequence = torch.searchsorted(ends, block, right=True).clamp(max=batch - 1)
    first = (block - (ends - blocks_of)[sequence]) * size
    left = torch.where(block < blocks_of.sum(), lens[sequence] - first, 0)
    token = (cu_seqlens_q[sequence] + first)[:, None] + torch.arange(size, device=device)

    owner, offset = _find_owners(cu_seqlens_q, total)
    row = ((ends - blocks_of)[owner] + offset // size) * size + offset % size
    return QueryBlocks(
        token=token.clamp(0, max(total - 1, 0)),
        sequence=sequence,
        q_lens=left.clamp(0, size),
        behind=(left - size).clamp(min=0),
        row=row.clamp(0, max(blocks * size - 1, 0)),
        outside=torch.arange(total, device=device) >= cu_seqlens_q[-1],
    )


def unpack(q: Tensor, cu_seqlens_q: Tensor, max_seqlen_q: int) -> Tensor:
    """Packed [total, Hq, D] as [B, max_seqlen_q, Hq, D]; rows without a token hold any."""
    token = cu_seqlens_q[:-1, None] + torch.arange(max_seqlen_q, device=q.device)
    return q[token.clamp(max=q.shape[0] - 1)] if q.shape[0] else q.new_empty((*token.shape, *q.shape[1:]))


def pack(q: Tensor, cu_seqlens_q: Tensor, total: int) -> Tensor:
    """unpack() undone."""
    owner, offset = _find_owners(cu_seqlens_q, total)
    return q[owner, offset.clamp(max=q.shape[1] - 1)]


def _find_owners(cu_seqlens_q: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """The sequence of each of the packed tokens, and its place among the sequence's tokens; [total] each."""
    token = torch.arange(total, device=cu_seqlens_q.device)
    owner = torch.searchsorted(cu_seqlens_q[1:].long(), token, right=True).clamp(max=cu_seqlens_q.shape[0] - 2)
    return owner, token - cu_seqlens_q[owner]


def block_options(blocks: QueryBlocks, kv_lens: Tensor, decoding: dict[str, Any]) -> dict[str, Any]:
    """decoding, whose kv_start and block_table are per sequence, as options of a call with a row per block."""
    lens = kv_lens[blocks.sequence]
    options = {**decoding, "kv_lens": (lens - blocks.behind).clamp(min=0) if decoding["causal"] else lens}
    for name in ("kv_start", "block_table"):
        if decoding[name] is not None:
            options[name] = decoding[name][blocks.sequence]
    for name in _differs(decoding):
        options[name] = decoding[name][blocks.sequence]
    return options | {"q_lens": blocks.q_lens}


def attend_blocks(
    q: Tensor, k: Tensor, v: Tensor, blocks: QueryBlocks, options: dict[str, Any], return_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """out [total, Hq, Dv] and lse [Hq, total] of packed queries [total, Hq, D]; options from block_options()."""
    out, lse = attend(q[blocks.token], k, v, options, return_lse)
    out = out.flatten(0, 1)[blocks.row].masked_fill(blocks.outside[:, None, None], 0.0)
    if lse is not None:
        lse = lse.transpose(0, 1).flatten(1, 2)[:, blocks.row].masked_fill(blocks.outside, float("-inf"))
    return out, lse


def attend(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any], return_lse: bool) -> tuple[Tensor, Tensor | None]:
    """flash_decode() in flash-attn's layout, also with ALiBi slopes [B, Hq] or scales [B, Hkv] that differ by sequence.

    The kernels have one slope or scale per head, so these cost a call per sequence.
    """
    differing = _differs(options)
    if differing and q.shape[0] > 0:
        parts = [_attend_alone(b, q, k, v, options, return_lse) for b in range(q.shape[0])]
        return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts]) if return_lse else None
    # Of no sequences, whatever has the right form is as good.
    options = options | {name: None if name == "alibi_slopes" else options[name].new_ones(()) for name in differing}
    done = flash_decode(q, k, v, return_lse=return_lse, **options)
    return done if isinstance(done, tuple) else (done, None)


def _attend_alone(b: int, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any], return_lse: bool) -> Any:
    """Sequence b of attend(), with its own slopes and scales."""
    only = slice(b, b + 1)
    own = {name: options[name][only] for name in _PER_SEQUENCE if options.get(name) is not None}
    if options["block_table"] is None:
        k, v = k[only], v[only]
        tokens = {name: options.get(name) for name in ("k_scale", "v_scale")}
        own |= {name: x[only] for name, x in tokens.items() if x is not None and x.ndim == 3}
    own |= {name: options[name][b] for name in _differs(options)}
    return attend(q[only], k, v, options | own, return_lse)


def _differs(options: dict[str, Any]) -> list[str]:
    """The options that have a row of their own for each sequence but no such form in flash_decode()."""
    found = {name: options.get(name) for name in ("alibi_slopes", "k_scale", "v_scale")}
    return [name for name, x in found.items() if x is not None and x.ndim == 2]


_PER_SEQUENCE = ("kv_lens", "kv_start", "q_lens", "block_table")
