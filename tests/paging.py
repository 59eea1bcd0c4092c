"""Paged caches made from dense ones, with everything poisoned that no call may read."""

import torch

NAN = float("nan")


def poison_of(dtype, poison=NAN):
    """What nobody may see; of integers, the largest."""
    return poison if dtype.is_floating_point else torch.iinfo(dtype).max


def to_pages(k, v, page_size, ends, *, starts=None, shared=False, layout="bhnd", scales=()):
    """Pools of k and v [B, Hkv, N, D] and of scales [B, Hkv, N, ...], pages in random order, and the block table.

    Sequence b lives from starts[b] (None: 0) to ends[b]: only pages that hold some of these keys are there. Their other
    slots and some unused pages hold NaN, table entries of other pages name no page. shared: all sequences have the keys
    of sequence 0 and use the same pages.
    """
    batch, _, kv_len, _ = k.shape
    columns = -(-kv_len // page_size) + 1
    first = torch.arange(columns) * page_size
    starts, ends = torch.zeros(batch) if starts is None else starts.cpu(), ends.cpu()
    used = (first < ends[:, None]) & (first + page_size > starts[:, None]) & (starts < ends)[:, None]
    owners = used.any(dim=0, keepdim=True) if shared else used
    order = torch.randperm(int(owners.sum()) + 3).to(torch.int32)
    garbage = torch.tensor([-1, 2**31 - 1, len(order), -(2**31)], dtype=torch.int32)
    pages = torch.full(owners.shape, -1, dtype=torch.int32)
    pages[owners] = order[:-3]
    table = torch.where(used, pages, garbage[torch.randint(4, used.shape)])

    pools = []
    for x in (k, v, *scales):
        pool = x.new_full((len(order), x.shape[1], page_size, *x.shape[3:]), poison_of(x.dtype))
        for b, column in owners.nonzero().tolist():
            keys = x[b, :, column * page_size : (column + 1) * page_size]
            pool[int(pages[b, column]), :, : keys.shape[1]] = keys
        pools.append(pool if layout == "bhnd" else pool.transpose(1, 2).contiguous())
    return *pools, table.to(k.device)
