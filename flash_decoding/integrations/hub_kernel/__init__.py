"""Our functions under flash-attn's names, laid out as the kernels package wants a kernel: this file and metadata.json.

The kernels package runs this file under a name of its own, so nothing here may depend on where it lies.
"""

from flash_decoding.integrations.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]
