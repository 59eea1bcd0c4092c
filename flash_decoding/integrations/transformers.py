"""Transformers: register() once, then load a model with attn_implementation="split_kv".

A decode step (one query token) goes to flash_decode(), which reads every key once for the whole group of query heads,
so K and V are passed as the cache holds them and never repeated. Prefill (several query tokens) goes to SDPA, or where
the model has a soft cap or attention sinks, which SDPA lacks, to the same formula in plain torch. With a DecodeCache,
which may hold codes, everything behind the prompt goes to flash_decode().

Continuous batching takes all its steps through us after enable_continuous_batching(model), or with the name that
register_kernel() returns.
"""

from __future__ import annotations

import functools
import inspect
import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

try:
    from packaging.version import parse as parse_version
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
    from transformers import __version__ as transformers_version
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import flash_attention_mask, sdpa_mask
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    raise ModuleNotFoundError(
        "transformers must be installed for this integration: pip install 'flash-decoding[transformers]'",
        name="transformers",
    ) from error

from flash_decoding.api import flash_decode
from flash_decoding.integrations.decode_cache import CachedSide, DecodeCache
from flash_decoding.integrations.flash_attn import flash_attn_varlen_func
from flash_decoding.problem import MAX_Q_LEN
from flash_decoding.quantization import CodeFormat, KVFormat

__all__ = [
    "DecodeCache",
    "attention",
    "batched_attention",
    "cache_argument",
    "decode_calls",
    "enable_continuous_batching",
    "register",
    "register_kernel",
    "reset_decode_calls",
]

# A name with "flash" in it would be taken for a kernel of the hub.
NAME = "split_kv"
# Continuous batching refuses a name without "flash". No 2 or 3 may follow, which promise flash-attn's own package.
BATCHING_NAME = "flash_split_kv"
# A kernel of the hub is OWNER/NAME. With "flash" and a 2, continuous batching on CUDA hands us its pages.
KERNEL_NAME = "flash-decoding/flash-attn2"

# Options of Transformers' attention calls that change the result and that flash_decode() does not have.
_UNSUPPORTED = frozenset({
    "sinks", "position_bias", "head_mask", "indices", "block_indices", "block_table", "output_attentions",
})  # fmt: skip


def register() -> None:
    """Make attn_implementation="split_kv" known to Transformers; calling it again changes nothing.

    A model that cannot use it is then refused with a ValueError by from_pretrained() and from_config(). A loaded model
    whose attention cannot be changed at all stays as it is in set_attn_implementation(), which logs a warning.

    Example:
        >>> register()
        >>> model = AutoModelForCausalLM.from_pretrained("path/to/model", attn_implementation="split_kv")
    """
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    AttentionInterface.register(BATCHING_NAME, batched_attention)
    AttentionMaskInterface.register(BATCHING_NAME, flash_attention_mask)
    _check_models()


def enable_continuous_batching(model: PreTrainedModel) -> None:
    """Let a loaded model's generate_batch() and continuous batching run through flash_decode(), prefill included.

    Transformers takes our name in its registry, but loads any name with "flash" in it as a kernel of the hub when a
    model is given one. So the name is put into the model's config, which nothing checks. generate() needs another
    implementation then: model.set_attn_implementation("split_kv") brings that back.

    Args:
        model: on its device, in eval mode.

    Raises:
        ValueError: a model that does not call Transformers' attention interface, or Transformers before 5.24, where the
            cache was no part of the model and register_kernel() is the only way.

    Example:
        >>> enable_continuous_batching(model)
        >>> outputs = model.generate_batch([[1, 5, 7], [1, 9]], generation_config=generation_config)
    """
    if parse_version(transformers_version) < parse_version("5.24"):
        raise ValueError(f"transformers must be at least 5.24 here, got {transformers_version}; use register_kernel()")
    register()
    if (error := _find_model_error(model)) is not None:
        raise ValueError(f"model must call Transformers' attention interface, got {type(model).__name__}, {error}")
    model.config._attn_implementation = BATCHING_NAME


def register_kernel() -> str:
    """Make our functions known to the kernels package as a kernel of the hub, and return its name.

    Models then load with attn_implementation=name and use flash-attn's path in all of Transformers, continuous batching
    and `transformers serve` included; on CUDA its decode steps read the pages of the cache in place. Needs the kernels
    package, in the version that Transformers asks for. Nothing is fetched: the name is added to LOCAL_KERNELS, the
    environment variable by which that package finds kernels on this machine, for this process and those it starts.

    Example:
        >>> model = AutoModelForCausalLM.from_pretrained("path/to/model", attn_implementation=register_kernel())
    """
    entry = f"{KERNEL_NAME}={Path(__file__).parent / 'hub_kernel'}"
    entries = [x for x in os.environ.get("LOCAL_KERNELS", "").split(":") if x]
    if entry not in entries:
        os.environ["LOCAL_KERNELS"] = ":".join([*entries, entry])
    return KERNEL_NAME


def _check_models() -> None:
    """Let Transformers' own check of an implementation against a model ask _find_model_error() too.

    Transformers takes a registered name for any model, also for one that has attention code of its own, never looks the
    function up, and would read our boolean mask as numbers: its prompt would see the future. No registry is told the
    model, so the check is wrapped; other implementations pass through it unchanged.
    """
    check = PreTrainedModel.get_correct_attn_implementation
    if getattr(check, "checks_split_kv", False):
        return

    @functools.wraps(check)
    def get_correct_attn_implementation(
        self: PreTrainedModel, requested_attention: str | None, *args: object, **options: object
    ) -> str:
        if requested_attention == NAME and (error := _find_model_error(self)) is not None:
            raise ValueError(
                f"attn_implementation={NAME!r} must not be given for {type(self).__name__}, {error}; {_HINT}"
            )
        return check(self, requested_attention, *args, **options)

    get_correct_attn_implementation.checks_split_kv = True  # type: ignore[attr-defined] # a mark, so as to wrap it once
    PreTrainedModel.get_correct_attn_implementation = get_correct_attn_implementation


def _find_model_error(model: PreTrainedModel) -> str | None:
    """Why the model cannot use us, as far as its class tells before its first call."""
    # Many classes that use the interface do not set the flag, so Transformers' look at their source counts as well.
    if not (model._supports_attention_backend or model._can_set_attn_implementation()):
        return "which does not call Transformers' attention interface"
    return None


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor | CachedSide,
    value: Tensor | CachedSide,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The attention function that Transformers calls for every layer and step.

    Args:
        module: the attention layer; its layer_idx tells one step from the next.
        query: [B, Hq, Lq, D].
        key, value: [B, Hkv, N, D] and [B, Hkv, N, Dv], or what a DecodeCache holds.
        attention_mask: None, or [B, 1, Lq, N] bool, True where a key is visible. Over a DecodeCache, several tokens see
            what is causal, in the layer's window and no padding.
        dropout: must be 0 in a decode step.
        scaling: multiplies q·k; None means 1/sqrt(D).
        softcap: a score becomes softcap * tanh(score / softcap); None means off.
        s_aux: [Hq], attention sinks, of any dtype: one more logit per head in the denominator; None means off.
        options: what else the model passes. Those that would change the result and that we lack are refused.

    Returns:
        [B, Lq, Hq, Dv], and None for the weights, which are never formed.

    Raises:
        ValueError, TypeError: an option, mask or input that a decode step cannot have.
    """
    _refuse_options(NAME, options)
    if query.shape[2] != 1 and isinstance(key, Tensor) and isinstance(value, Tensor):
        if softcap is None and s_aux is None:
            return sdpa_attention_forward(
                module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
            )
        is_causal = options.get("is_causal")
        causal = getattr(module, "is_causal", True) if is_causal is None else bool(is_causal)
        return _prefill(query, key, value, attention_mask, causal, dropout, scaling, softcap, s_aux), None
    _refuse_dropout(NAME, dropout)
    scores = {"scale": scaling, "softcap": softcap, "sinks": None if s_aux is None else s_aux.float()}
    if isinstance(key, CachedSide) and isinstance(value, CachedSide) and query.shape[2] != 1:
        out = _decode_blocks(module, query, key, value, attention_mask, scores, options)
    else:
        if attention_mask is not None:
            key_mask = _as_key_mask(attention_mask, query.shape[0], key.shape[2])
            kv_start, kv_lens = _find_once(module, attention_mask, None, lambda: _find_range(key_mask))
            scores |= {"key_mask": key_mask, "kv_start": kv_start, "kv_lens": kv_lens}
        out = _decode(query, key, value, **scores)
    _count()
    return out.transpose(1, 2), None


def _decode(query: Tensor, key: Tensor | CachedSide, value: Tensor | CachedSide, **options: Any) -> Tensor:
    """flash_decode() of what a cache gave; [B, Hq, Lq, Dv]."""
    (k, k_form, k_scale), (v, v_form, v_scale) = _open(key), _open(value)
    if k_form is not None or v_form is not None:
        options |= {"kv_format": KVFormat(k_form, v_form), "k_scale": k_scale, "v_scale": v_scale}
    out = flash_decode(query, k, v, **options)
    assert isinstance(out, Tensor), "no lse was asked for"
    return out


def _open(x: Tensor | CachedSide) -> tuple[Tensor, CodeFormat | None, Tensor | None]:
    """What flash_decode() takes of one side of a cache."""
    return (x.codes, x.form, x.scale) if isinstance(x, CachedSide) else (x, None, None)


def _decode_blocks(
    module: torch.nn.Module,
    query: Tensor,
    key: CachedSide,
    value: CachedSide,
    attention_mask: Tensor | None,
    scores: dict[str, Any],
    options: dict[str, Any],
) -> Tensor:
    """Several new tokens over what a DecodeCache holds, as many at a time as flash_decode() takes."""
    batch, q_len, kv_len = query.shape[0], query.shape[2], key.shape[2]
    window, key_mask = options.get("sliding_window"), None
    if attention_mask is not None:
        key_mask = _find_once(
            module, attention_mask, window, lambda: _find_key_mask(attention_mask, batch, kv_len, window)
        )
    elif options.get("is_causal", getattr(module, "is_causal", True)) is False:
        raise ValueError(f"is_causal must be True for several tokens at a time over a DecodeCache, got False; {_HINT}")
    outs = []
    for first in range(0, q_len, MAX_Q_LEN):
        last = min(first + MAX_Q_LEN, q_len)
        seen = kv_len - q_len + last  # keys up to the last of these tokens
        scores |= {"window": window and window - 1, "key_mask": None if key_mask is None else key_mask[:, :seen]}
        outs.append(_decode(query[:, :, first:last], key.first(seen), value.first(seen), **scores))
    return torch.cat(outs, dim=2)


def cache_argument(model: PreTrainedModel) -> str:
    """What this version of Transformers calls the cache in a model's call and in generate()."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def batched_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    **options: object,
) -> tuple[Tensor, None]:
    """The attention function of continuous batching: sequences of any lengths, packed one after the other.

    Args:
        module: the attention layer.
        query: [1, Hq, total_q, D].
        key, value: [1, Hkv, total_k, D], the keys of each sequence, cached and new, one after the other.
        attention_mask: must be None.
        dropout: must be 0.
        scaling, softcap, s_aux: as for attention().
        sliding_window: how many keys a query sees, itself among them; None means all.
        is_causal: None means what the layer says.
        cu_seq_lens_q, cu_seq_lens_k: [B + 1], where each sequence's queries and keys begin.
        max_length_q: the most queries of a sequence, or any larger number.
        options: what else the model passes. Those that would change the result and that we lack are refused.

    Returns:
        [1, total_q, Hq, D], and None for the weights, which are never formed.

    Raises:
        ValueError, TypeError: a call that continuous batching does not make.
    """
    _refuse_options(BATCHING_NAME, options)
    _refuse_dropout(BATCHING_NAME, dropout)
    if attention_mask is not None or cu_seq_lens_q is None or cu_seq_lens_k is None:
        raise ValueError(
            f"attn_implementation must be {NAME!r} outside of continuous batching, got {BATCHING_NAME!r}; call "
            f"model.set_attn_implementation({NAME!r})"
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    # flash-attn does not count a token's own position.
    left = -1 if sliding_window is None else sliding_window - 1
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    out = flash_attn_varlen_func(
        q, k, v, cu_seq_lens_q, cu_seq_lens_k, q.shape[0] if max_length_q is None else max_length_q, k.shape[0],
        softmax_scale=scaling, causal=causal, window_size=(left, left), softcap=softcap or 0.0, s_aux=s_aux,
    )  # fmt: skip
    _count()
    return out[None], None


def _refuse_options(name: str, options: dict[str, object]) -> None:
    for option, x in options.items():
        if option in _UNSUPPORTED and x is not None and x is not False:
            raise ValueError(
                f"{option} must be None for attn_implementation={name!r}, which does not support it; {_HINT}"
            )


def _refuse_dropout(name: str, dropout: float) -> None:
    if dropout:
        raise ValueError(f"dropout must be 0 for attn_implementation={name!r}, got {dropout}; call model.eval() first")


# Scores that a prefill in plain torch forms at a time. Two float32 copies are held at most: 256 MB.
_MAX_SCORES = 2**25


def _prefill(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    causal: bool,
    dropout: float,
    scaling: float | None,
    softcap: float | None,
    s_aux: Tensor | None,
) -> Tensor:
    """Attention of several query tokens, soft cap and sinks included, in float32; [B, Lq, Hq, Dv] in query's dtype.

    As many tokens at a time as _MAX_SCORES allows, at least one. Without a mask, causal is as SDPA has it: token t sees
    keys up to t.
    """
    batch, heads_q, q_len, head_dim = query.shape
    kv_len = key.shape[2]
    if attention_mask is not None:
        _check_mask_dtype(attention_mask)
    scale = head_dim**-0.5 if scaling is None else scaling
    rows = max(1, _MAX_SCORES // max(batch * heads_q * (kv_len + 1), 1))
    n = torch.arange(kv_len, device=query.device)
    outs = []
    with _without_autocast(query.device.type):
        key, value = key.float(), value.float()
        for first in range(0, q_len, rows):
            q = query[:, :, first : first + rows]
            seen = None
            if attention_mask is not None:
                seen = attention_mask[:, :, first : first + rows]
            elif causal:
                seen = n <= first + torch.arange(q.shape[2], device=query.device)[:, None]
            out = _attend(q.float(), key, value, seen, dropout, scale, softcap, s_aux)
            outs.append(out.to(query.dtype))
        return torch.cat(outs, dim=2).transpose(1, 2)


def _without_autocast(device_type: str) -> AbstractContextManager[object]:
    """Autocast would form the products in half precision again; some devices, as meta, have none."""
    if not torch.amp.is_autocast_available(device_type):
        return nullcontext()
    return torch.autocast(device_type, enabled=False)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor | None,
    dropout: float,
    scale: float,
    softcap: float | None,
    s_aux: Tensor | None,
) -> Tensor:
    """Attention of float32 q [B, Hq, Lq, D], whose scores exist twice at most; what autograd keeps is not counted."""
    batch, heads_kv, kv_len, head_dim = k.shape
    # The heads of a group are rows of one product, so that keys are not repeated. Scaled behind the product: numbers
    # that were halves are exact in TF32 too, their products with a scale are not.
    s = q.reshape(batch, heads_kv, -1, head_dim) @ k.transpose(2, 3)
    s = s.reshape(*q.shape[:3], kv_len)
    if softcap is None:
        s = s.mul_(scale)
    else:
        s = torch.tanh(s.mul_(scale / softcap))
        s = s * softcap
    if seen is not None:
        s = s.masked_fill_(~seen, torch.finfo(s.dtype).min)
    if s_aux is not None:
        s = torch.cat((s, s_aux.float().view(1, -1, 1, 1).expand(*s.shape[:3], 1)), dim=3)
    s = torch.softmax(s, dim=3)
    p = torch.nn.functional.dropout(s[..., :kv_len], dropout)
    out = (p.reshape(batch, heads_kv, -1, kv_len) @ v).reshape(*q.shape[:3], v.shape[3])
    return out if seen is None else out.masked_fill(~seen.any(dim=-1, keepdim=True), 0.0)


_HINT = "use 'eager' or another implementation"


def decode_calls() -> int:
    """How many attention calls of this process went to flash_decode() since the last reset.

    Calls inside a graph of torch.compile do not pass here and are not counted.
    """
    return _counter.calls


def reset_decode_calls() -> None:
    """Set the count of decode_calls() to 0."""
    _counter.calls = 0


class _Counter:
    calls = 0


_counter = _Counter()


def _count() -> None:
    if not torch.compiler.is_compiling():
        _counter.calls += 1


def _as_key_mask(attention_mask: Tensor, batch: int, kv_len: int) -> Tensor:
    """[B or 1, 1, 1, N] bool as [B, N] bool, without a copy."""
    _check_mask_dtype(attention_mask)
    shape = attention_mask.shape
    if len(shape) != 4 or shape[0] not in (1, batch) or shape[1:] != (1, 1, kv_len):
        raise ValueError(
            f"attention_mask must have shape [{batch}, 1, 1, {kv_len}] for attn_implementation={NAME!r}, "
            f"the same for all heads, got {list(shape)}; {_HINT}"
        )
    return attention_mask[:, 0, 0, :].expand(batch, kv_len)


def _check_mask_dtype(attention_mask: Tensor) -> None:
    if attention_mask.dtype != torch.bool:
        raise TypeError(
            f"attention_mask must be bool for attn_implementation={NAME!r}, got {attention_mask.dtype}; {_HINT}"
        )


def _find_range(key_mask: Tensor) -> tuple[Tensor, Tensor]:
    """First visible key and last visible key + 1 of each sequence, [B] int32: what lies outside is never loaded."""
    kv_len = key_mask.shape[1]
    n = torch.arange(kv_len, dtype=torch.int32, device=key_mask.device)
    kv_start = torch.where(key_mask, n, kv_len).amin(dim=1)
    kv_lens = torch.where(key_mask, n + 1, 0).amax(dim=1)
    return kv_start, kv_lens


def _find_key_mask(attention_mask: Tensor, batch: int, kv_len: int, window: int | None) -> Tensor | None:
    """[B, N] bool, the keys that are no padding, or None for all; the mask hides others only by order and window.

    The mask is read on the host, once a step: one that hides other keys would silently be another attention.
    """
    _check_mask_dtype(attention_mask)
    shape = attention_mask.shape
    if len(shape) != 4 or shape[0] not in (1, batch) or shape[1] != 1 or shape[3] != kv_len:
        raise ValueError(
            f"attention_mask must have shape [{batch}, 1, Lq, {kv_len}] for attn_implementation={NAME!r}, "
            f"the same for all heads, got {list(shape)}; {_HINT}"
        )
    n = torch.arange(kv_len, device=attention_mask.device)
    own = n[kv_len - shape[2] :, None]  # each token's own position
    seen = n <= own
    if window is not None:
        seen = seen & (n > own - window)
    mask = attention_mask[:, 0]
    if torch.equal(mask, seen.expand_as(mask)):
        return None
    key_mask = mask.any(dim=1)
    if not torch.equal(mask, seen & key_mask[:, None]):
        raise ValueError(
            "attention_mask must hide keys by order, window and padding alone for several tokens at a time over a "
            f"DecodeCache, got one that hides others; {_HINT}"
        )
    return key_mask.expand(batch, kv_len)


def _find_once(module: torch.nn.Module, mask: Tensor, window: int | None, find: Callable[[], Any]) -> Any:
    """find(), which looks at a mask and a window alone: once for all layers of a step where that can be told."""
    layer = getattr(module, "layer_idx", None)
    # A compiled graph holds all layers, and its compiler merges equal computations.
    if torch.compiler.is_compiling() or layer is None:
        return find()
    return _ranges.find(mask, window, layer, find)


class _Ranges(threading.local):
    """What was found of the present step's masks, which all layers of the step share.

    What was found holds for the layers after the one that asked first; an earlier or the same layer begins a new step,
    where the mask may have new contents. So a mask that is updated in place is right, also where PyTorch keeps no
    version counter (inference mode) and where a CUDA graph is captured after eager steps.
    """

    def __init__(self) -> None:
        self._by_mask: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def find(self, mask: Tensor, window: int | None, layer: int, find: Callable[[], Any]) -> Any:
        """find(), taken from an earlier layer of the step with this window if there is one."""
        version = None if mask.is_inference() else mask._version
        of_mask = self._by_mask.setdefault(mask, {})
        found = of_mask.get(window)
        if found is None or found[0] >= layer or found[1] != version:
            found = (layer, version, find())
        of_mask[window] = (layer, version, found[2])
        return found[2]


_ranges = _Ranges()
