"""Which keys a query sees: one place for all that hides keys.

Query token t of a sequence has the position own = origin + t. It sees the keys n from first to last (kv_start, kv_lens,
and the widest window) for which

    n >= own - window    and    n <= own, or tree_mask[t, n - origin] where there is one and n >= origin
    and    key_mask[n]

A key that no token of the sequence sees is not listed, so it is never loaded: it may hold anything. A key that only
some tokens see is loaded for all of them, and its score is -inf for the others: they weigh its value with exactly 0,
which a value that is not finite would turn into NaN.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from flash_decoding.backends.cpu.scores import NO_SCORE
from flash_decoding.backends.cpu.simd import (
    FLOAT32,
    LANES,
    address_of,
    inner,
    load,
    load_byte,
    load_float,
    load_int32,
    load_int64,
    splat,
    store,
    store_float,
    where_less,
)


class Reach(NamedTuple):
    """The keys that the query tokens of sequence b may see between them."""

    b: int
    tokens: int  # how many query tokens count
    origin: int  # the position of the first; negative where the sequence is shorter than its query
    first: int
    last: int  # the end


@inner
def read_length(sequence, b, default, limit):
    """Entry b of kv_lens, kv_start or q_lens, clamped to [0, limit]."""
    if sequence.base == 0:
        return default
    address = sequence.base + b * sequence.step
    n = load_int64(address) if sequence.size == 8 else load_int32(address)
    return min(max(n, 0), limit)


@inner
def find_reach(call, b):
    """What sequence b may see; nothing where no query token counts."""
    tokens = read_length(call.q_lens, b, call.q_len, call.q_len)
    last = read_length(call.kv_lens, b, call.kv_len, call.kv_len)
    origin = last - tokens
    first = max(read_length(call.kv_start, b, 0, call.kv_len), origin - call.window)
    return Reach(b, tokens, origin, first, max(first, last) if tokens > 0 else first)


@inner
def is_listed(call, reach, n):
    """Whether any token sees key n of the reach."""
    if call.key_mask.base != 0 and load_byte(address_of(call.key_mask, reach.b, 0, n)) == 0:
        return False
    column = n - reach.origin
    if call.tree_mask.base == 0 or column < 0:
        return True
    for token in range(min(reach.tokens, column + call.window + 1)):
        if load_byte(address_of(call.tree_mask, reach.b, token, column)) != 0:
            return True
    return False


@inner
def key_range(call, reach, token):
    """The first key and the end of what one token may see, as far as positions tell."""
    own = reach.origin + token
    return own - call.window, own + 1 if call.causal else reach.last


@inner
def overlaps(call, reach, first, last, tile):
    """Whether any of the tokens from first to last may see a key of the tile."""
    return tile.end > key_range(call, reach, first)[0] and tile.begin < key_range(call, reach, last)[1]


@inner
def hides(call, reach, first, last, tile):
    """Whether any of the tokens from first to last may miss a listed key of the tile."""
    end = key_range(call, reach, first)[1]
    if call.tree_mask.base != 0:
        end = min(end, reach.origin)
    return tile.begin < key_range(call, reach, last)[0] or tile.end > end


@inner
def hide_keys(call, reach, token, tile, s):
    """-inf for the keys of a tile that one token does not see; s [tile.size] float32."""
    begin, end = key_range(call, reach, token)
    begin, end = splat(np.float32(begin - tile.begin)), splat(np.float32(end - tile.begin))
    hidden = splat(NO_SCORE)
    for i in range(0, tile.size, LANES):
        n = load(tile.n + 4 * i, FLOAT32)
        from_begin = where_less(n, begin, hidden, load(s + 4 * i, FLOAT32))
        store(s + 4 * i, where_less(n, end, from_begin, hidden), FLOAT32)
    if call.tree_mask.base != 0:
        for i in range(tile.size):
            column = tile.begin + np.int64(load_float(tile.n + 4 * i)) - reach.origin
            if column >= 0 and load_byte(address_of(call.tree_mask, reach.b, token, column)) == 0:
                store_float(s + 4 * i, NO_SCORE)
