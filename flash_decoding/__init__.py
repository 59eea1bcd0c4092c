"""Flash Decoding: attention of a few new queries against a long key/value cache, as fast as memory allows."""

from flash_decoding.api import explain, flash_decode
from flash_decoding.append import append_kv
from flash_decoding.caches import KVCache, PagedKVCache
from flash_decoding.cascade import cascade_decode
from flash_decoding.integrations.flash_attn import flash_attn_with_kvcache
from flash_decoding.merge import merge_states
from flash_decoding.quantization import CodeFormat, KVFormat, dequantize_kv, quantize_kv
from flash_decoding.reference import reference
from flash_decoding.workspace import Workspace

__version__ = "0.1.0"

__all__ = [
    "CodeFormat",
    "KVCache",
    "KVFormat",
    "PagedKVCache",
    "Workspace",
    "__version__",
    "append_kv",
    "cascade_decode",
    "dequantize_kv",
    "explain",
    "flash_attn_with_kvcache",
    "flash_decode",
    "merge_states",
    "quantize_kv",
    "reference",
]
