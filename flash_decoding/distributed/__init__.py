"""One cache spread over the ranks of a torch.distributed group: each decodes its shard, and the states are merged."""

from flash_decoding.distributed.cache import ShardedKVCache
from flash_decoding.distributed.context_parallel import PendingDecode, context_parallel_decode
from flash_decoding.distributed.sharding import Contiguous, Interleaved

__all__ = ["Contiguous", "Interleaved", "PendingDecode", "ShardedKVCache", "context_parallel_decode"]
