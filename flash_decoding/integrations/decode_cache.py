"""DecodeCache: a cache of Transformers that keeps keys and values as codes and hands them to our attention as they are.

Import it from flash_decoding.integrations.transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import Cache, PretrainedConfig
from transformers.cache_utils import DynamicLayer

from flash_decoding.append import append_kv
from flash_decoding.quantization import CodeFormat, KVFormat, find_width_errors, quantize_kv

# Memory grows in steps of as many tokens, and by half at least: writing a token costs the same however long the text.
_STEP = 64
# What a layer of a model may be; the mask that comes with a call holds its window or chunk.
_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}


class CachedSide:
    """The keys or the values that a DecodeCache holds, on their way through a model to our attention function.

    No tensor, so that nothing computes with codes as if they were numbers: whatever else touches it is refused.

    Attributes:
        codes: [B, Hkv, N, D], or as the format stores them.
        form: None: numbers, no codes.
        scale: as flash_decode() takes it; None without codes.
        shape: of what the codes stand for.
    """

    def __init__(self, codes: Tensor, form: CodeFormat | None, scale: Tensor | None, width: int) -> None:
        self.codes, self.form, self.scale = codes, form, scale
        self.shape = torch.Size((*codes.shape[:3], width))

    def first(self, length: int) -> CachedSide:
        """Only the first so many tokens."""
        scale = self.scale
        if self.form is not None and scale is not None and self.form.is_by_token:
            scale = scale[:, :, :length]
        return CachedSide(self.codes[:, :, :length], self.form, scale, self.shape[3])

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise TypeError(_REFUSAL)

    def __getitem__(self, index: Any) -> NoReturn:
        raise TypeError(_REFUSAL)

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(_REFUSAL)


_REFUSAL = (
    "attn_implementation must be 'split_kv' with a DecodeCache, and the model must hand what the cache holds to its "
    "attention unchanged; use a DynamicCache otherwise"
)


class _Side:
    """Memory for the keys or the values of a layer."""

    def __init__(self, form: CodeFormat | None, x: Tensor) -> None:
        batch, heads, _, self.width = x.shape
        self.form = form
        self.codes = x.new_empty(
            (batch, heads, 0, x.shape[3] if form is None else form.code_width(x.shape[3])),
            dtype=x.dtype if form is None else form.dtype,
        )
        self.scale: Tensor | None = None
        if form is not None and form.is_by_token:
            shape = form.scale_shape(batch, heads, 0, self.width)
            self.scale = x.new_empty(shape, dtype=form.scale_dtype)

    def reserve(self, capacity: int) -> None:
        """Memory for so many tokens, with what it holds now in front."""
        self._replace(lambda x: _enlarge(x, capacity))

    def select(self, choose: Callable[[Tensor], Tensor]) -> None:
        """Other sequences in place of these: choose is an indexing along the first axis."""
        # Bytes, because some devices index no fp8.
        self._replace(lambda x: choose(x.view(torch.uint8)).view(x.dtype) if x.element_size() == 1 else choose(x))

    def _replace(self, make: Callable[[Tensor], Tensor]) -> None:
        self.codes = make(self.codes)
        if self.form is not None and self.scale is not None and self.form.is_by_token:
            self.scale = make(self.scale)

    def bytes_per_token(self, element_size: int | None) -> int:
        """Of one sequence, scales of the token's own included; numbers without codes count as many bytes."""
        if self.form is None:
            return self.codes.shape[1] * self.width * (element_size or self.codes.element_size())
        return self.codes.shape[1] * self.form.token_bytes(self.width)

    def held(self, length: int) -> CachedSide:
        return CachedSide(self.codes, self.form, self.scale, self.width).first(length)


def find_head_dim(config: PretrainedConfig) -> int | None:
    """How wide keys and values are, as Transformers reads a model's config; None where that has no one number."""
    if hasattr(config, "v_head_dim"):
        return None
    if getattr(config, "head_dim", None):
        return config.head_dim
    heads = getattr(config, "num_attention_heads", None)
    return config.hidden_size // heads if isinstance(heads, int) and heads else None


def _headroom(form: CodeFormat) -> float:
    """How many times the largest number of the first update must fit, where one scale serves all later tokens too.

    fp8 is as exact 16 times below its largest number, and a first token's values may be that much smaller than later
    ones. int8 pays with a bit for every factor of 2. A channel of rotated keys turns with the position, so what a short
    prompt shows of it is a part.
    """
    if form.codes.startswith("fp8"):
        return 16.0
    return 3.0 if form.scale == "channel" else 1.5


def _enlarge(x: Tensor, capacity: int) -> Tensor:
    larger = x.new_empty((*x.shape[:2], capacity, *x.shape[3:]))
    larger[:, :, : x.shape[2]] = x
    return larger


class DecodeLayer(DynamicLayer):
    """One layer of a DecodeCache."""

    def __init__(self, kv_format: KVFormat, exact_prompt: bool = True, reserve: int = 0) -> None:
        super().__init__()
        self._format, self._exact_prompt, self._least = kv_format, exact_prompt, reserve
        self._length = 0
        self._sides: tuple[_Side, ...] = ()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.device = key_states.device
        self._sides = _Side(self._format.k, key_states), _Side(self._format.v, value_states)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Append [B, Hkv, L, D] and [B, Hkv, L, Dv]; what the attention is to read of all tokens."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        past, length = self._length, self._length + key_states.shape[2]
        if past == 0 and not all(side.form is None or side.form.is_by_token for side in self._sides):
            self._find_shared_scales(key_states, value_states)
        self._reserve(length)
        self._append(key_states, value_states)
        self._length = length
        if past == 0 and self._exact_prompt:
            return key_states, value_states
        k, v = self._sides
        return k.held(length), v.held(length)

    def _find_shared_scales(self, key_states: Tensor, value_states: Tensor) -> None:
        new = quantize_kv(key_states, value_states, self._format, check=False)
        for side, scale in zip(self._sides, (new.k_scale, new.v_scale), strict=True):
            if side.form is not None and scale is not None and not side.form.is_by_token:
                side.scale = scale * _headroom(side.form)

    def _reserve(self, length: int) -> None:
        capacity = self._sides[0].codes.shape[2]
        if length > capacity:
            capacity = -(-max(length, capacity + capacity // 2, self._least) // _STEP) * _STEP
            for side in self._sides:
                side.reserve(capacity)

    def _append(self, key_states: Tensor, value_states: Tensor) -> None:
        k, v = self._sides
        past = torch.full((k.codes.shape[0],), self._length, dtype=torch.int32, device=self.device)
        append_kv(
            key_states, value_states, k.codes, v.codes, past,
            kv_format=self._format, k_scale=k.scale, v_scale=v.scale,
        )  # fmt: skip

    def get_seq_length(self) -> int:
        return self._length

    def count_bytes(self, element_size: int | None = None) -> int:
        """Of the tokens held and their own scales; numbers without codes count as many bytes (None: their own)."""
        return sum(side.bytes_per_token(element_size) * side.codes.shape[0] * self._length for side in self._sides)

    def describe(self) -> str:
        """How much it holds, and where."""
        if not self._sides:
            return "empty"
        codes = self._sides[0].codes
        return f"batch {codes.shape[0]}, {self._length} tokens with room for {codes.shape[2]}, {codes.device}"

    def count_elements(self) -> int:
        """Numbers that the tokens held stand for."""
        return sum(side.codes.shape[:2].numel() * side.width * self._length for side in self._sides)

    def reset(self) -> None:
        self._length, self._sides, self.is_initialized = 0, (), False

    def crop(self, tokens_to_remove: int) -> None:
        """Remove as many tokens as a negative number says; a positive one is the length to keep, as once."""
        if tokens_to_remove > 0:
            self._length = min(self._length, tokens_to_remove)
        else:
            self._length = max(self._length + tokens_to_remove, 0)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._select(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._select(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._select(lambda x: x[indices])

    def _select(self, choose: Callable[[Tensor], Tensor]) -> None:
        for side in self._sides:
            side.select(choose)

    def offload(self) -> NoReturn:
        raise ValueError("offloading must be False for a DecodeCache, which stays on its device")

    prefetch = offload


class DecodeCache(Cache):
    """A cache for generate() and for models with attn_implementation="split_kv": keys and values as codes.

    New keys and values are quantised as they come. A decode step reads codes and scales in place; nothing is ever
    dequantised into memory. The prompt, which is the first update, attends to itself as it was; every later token, and
    every later part of a prompt that comes in parts, attends to codes.

    Scales per token and per group come from each token. Scales per tensor, head and channel come from the prompt and
    then stay: with room for 16 times the prompt's largest number for fp8, which costs nothing, for 1.5 times for int8,
    and for 3 times per channel; what is larger saturates.

    Beam search, assisted decoding (crop) and padded batches work. Layers with a sliding window keep all tokens, and
    load only what the window sees.

    Args:
        config: of the model.
        kv_format: a KVFormat, or a name as in KVFormat.parse(), such as "int8" or "fp8/int4"; None: numbers as they
            come, no codes.
        exact_prompt: False lets the prompt attend to codes as well, as if its tokens had come one at a time.
        reserve: tokens to have memory for from the start; it grows beyond.

    Raises:
        ValueError, TypeError: no format, or a model whose layers or widths it cannot hold.

    Example:
        >>> cache = DecodeCache(model.config, "int8")
        >>> tokens = model.generate(**inputs, **{cache_argument(model): cache})
        >>> cache.nbytes / cache.nbytes_in_16_bits
        0.53125
    """

    def __init__(
        self,
        config: PretrainedConfig,
        kv_format: KVFormat | str | None = None,
        *,
        exact_prompt: bool = True,
        reserve: int = 0,
    ) -> None:
        if not hasattr(config, "get_text_config"):
            raise TypeError(f"config must be a model's config, such as model.config, got {type(config).__name__}")
        if isinstance(reserve, bool) or not isinstance(reserve, int):
            raise TypeError(f"reserve must be an int, got {type(reserve).__name__}")
        if reserve < 0:
            raise ValueError(f"reserve must be at least 0, got {reserve}")
        if getattr(config, "is_encoder_decoder", False):
            raise ValueError(f"config must be of a model that only decodes, got {type(config).__name__}")
        config = config.get_text_config(decoder=True)
        others = set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES
        if others:
            raise ValueError(f"config must have no layers but {sorted(_LAYER_TYPES)}, got {sorted(others)}")
        if getattr(config, "num_kv_shared_layers", 0) or any(getattr(config, "kv_sharing_modes", None) or ()):
            raise ValueError(f"config must be of a model whose layers share no keys, got {type(config).__name__}")
        self.kv_format = KVFormat.parse(kv_format)
        stored = self.kv_format or KVFormat(None, None)
        width = find_head_dim(config)  # where it is None the layers will tell
        for error in chain(find_width_errors("k", stored.k, width), find_width_errors("v", stored.v, width)):
            raise error
        super().__init__(layers=[DecodeLayer(stored, exact_prompt, reserve) for _ in range(config.num_hidden_layers)])

    @property
    def nbytes(self) -> int:
        """Bytes of the tokens held, codes and scales; more is reserved for those that come."""
        return sum(layer.count_bytes() for layer in self.layers)

    def __repr__(self) -> str:
        layer = self.layers[0] if self.layers else None
        kind = "as they come" if self.kv_format is None else str(self.kv_format)
        what = layer.describe() if isinstance(layer, DecodeLayer) else "no layers"
        return f"<{type(self).__name__}: {len(self.layers)} layers, {kind}, {what}, {self.nbytes / 1e6:.3g} MB>"

    @property
    def nbytes_in_16_bits(self) -> int:
        """Bytes that the same tokens would take in float16 or bfloat16."""
        return 2 * sum(layer.count_elements() for layer in self.layers)
