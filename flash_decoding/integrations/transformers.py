"""Transformers: register() once, then load a model with attn_implementation="split_kv".

Prefill (several query tokens) goes to SDPA. A decode step (one query token) goes to flash_decode(), which reads every
key once for the whole group of query heads, so K and V are passed as the cache holds them and never repeated.
"""

from __future__ import annotations

import functools
import threading

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

try:
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    raise ModuleNotFoundError(
        "transformers must be installed for this integration: pip install 'flash-decoding[transformers]'",
        name="transformers",
    ) from error

from flash_decoding.api import flash_decode

# A name with "flash" in it would be taken for a kernel of the hub.
NAME = "split_kv"

# Options of Transformers' attention calls that change the result and that flash_decode() does not have.
_UNSUPPORTED = frozenset({
    "softcap", "s_aux", "sinks", "position_bias", "head_mask", "indices", "block_indices", "block_table",
    "output_attentions",
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
    _check_models()


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

    get_correct_attn_implementation.checks_split_kv = True  # type: ignore[attr-defined]
    PreTrainedModel.get_correct_attn_implementation = get_correct_attn_implementation


def _find_model_error(model: PreTrainedModel) -> str | None:
    """Why the model cannot use us, as far as its class and config tell before its first call."""
    # Many classes that use the interface do not set the flag, so Transformers' look at their source counts as well.
    if not (model._supports_attention_backend or model._can_set_attn_implementation()):
        return "which does not call Transformers' attention interface"
    softcap = getattr(model.config, "attn_logit_softcapping", None)
    if softcap:
        return f"whose softcap of {softcap:g} (attn_logit_softcapping) is not supported"
    return None


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: object,
) -> tuple[Tensor, None]:
    """The attention function that Transformers calls for every layer and step.

    Args:
        module: the attention layer; its layer_idx tells one step from the next.
        query: [B, Hq, Lq, D].
        key, value: [B, Hkv, N, D] and [B, Hkv, N, Dv].
        attention_mask: None, or [B, 1, Lq, N] bool, True where a key is visible.
        dropout: must be 0 in a decode step.
        scaling: multiplies q·k; None means 1/sqrt(D).
        options: what else the model passes. Those that would change the result and that we lack are refused.

    Returns:
        [B, Lq, Hq, Dv], and None for the weights, which are never formed.

    Raises:
        ValueError, TypeError: an option, mask or input that a decode step cannot have.
    """
    for name, option in options.items():
        if name in _UNSUPPORTED and option is not None and option is not False:
            raise ValueError(
                f"{name} must be None for attn_implementation={NAME!r}, which does not support it; {_HINT}"
            )
    if query.shape[2] != 1:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )
    if dropout:
        raise ValueError(f"dropout must be 0 for attn_implementation={NAME!r}, got {dropout}; call model.eval() first")

    key_mask, kv_start, kv_lens = None, None, None
    if attention_mask is not None:
        key_mask = _as_key_mask(attention_mask, query.shape[0], key.shape[2])
        layer = getattr(module, "layer_idx", None)
        # A compiled graph holds all layers, and its compiler merges equal computations.
        if torch.compiler.is_compiling() or layer is None:
            kv_start, kv_lens = _find_range(key_mask)
        else:
            kv_start, kv_lens = _ranges.find(attention_mask, key_mask, layer)
    out = flash_decode(
        query, key, value, scale=scaling, key_mask=key_mask, kv_start=kv_start, kv_lens=kv_lens
    )  # [B, Hq, 1, Dv]
    assert isinstance(out, Tensor), "no lse was asked for"
    if not torch.compiler.is_compiling():
        _counter.calls += 1
    return out.transpose(1, 2), None


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


def _as_key_mask(attention_mask: Tensor, batch: int, kv_len: int) -> Tensor:
    """[B or 1, 1, 1, N] bool as [B, N] bool, without a copy."""
    if attention_mask.dtype != torch.bool:
        raise TypeError(
            f"attention_mask must be bool for attn_implementation={NAME!r}, got {attention_mask.dtype}; {_HINT}"
        )
    shape = attention_mask.shape
    if len(shape) != 4 or shape[0] not in (1, batch) or shape[1:] != (1, 1, kv_len):
        raise ValueError(
            f"attention_mask must have shape [{batch}, 1, 1, {kv_len}] for attn_implementation={NAME!r}, "
            f"the same for all heads, got {list(shape)}; {_HINT}"
        )
    return attention_mask[:, 0, 0, :].expand(batch, kv_len)


def _find_range(key_mask: Tensor) -> tuple[Tensor, Tensor]:
    """First visible key and last visible key + 1 of each sequence, [B] int32: what lies outside is never loaded."""
    kv_len = key_mask.shape[1]
    n = torch.arange(kv_len, dtype=torch.int32, device=key_mask.device)
    kv_start = torch.where(key_mask, n, kv_len).amin(dim=1)
    kv_lens = torch.where(key_mask, n + 1, 0).amax(dim=1)
    return kv_start, kv_lens


class _Ranges(threading.local):
    """The ranges of the present step's masks, which all layers of the step share.

    A mask's range holds for the layers after the one that asked first; an earlier or the same layer begins a new step,
    where the mask may have new contents. So a mask that is updated in place is right, also where PyTorch keeps no
    version counter (inference mode) and where a CUDA graph is captured after eager steps.
    """

    def __init__(self) -> None:
        self._by_mask: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def find(self, mask: Tensor, key_mask: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """_find_range(key_mask), taken from an earlier layer of the step if there is one."""
        version = None if mask.is_inference() else mask._version
        found = self._by_mask.get(mask)
        if found is None or found[0] >= layer or found[1] != version:
            found = (layer, version, _find_range(key_mask))
        self._by_mask[mask] = (layer, version, found[2])
        return found[2]


_ranges = _Ranges()
