"""Calls that were found without fault: of their like, only what may differ from one to the next is looked at again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from flash_decoding.quantization import KVFormat

Check = Callable[[Any], Iterator[Exception]]
_MOST = 4096


class Accepted:
    """Signatures of one function's accepted calls. Decoding repeats a few of them per step thousands of times."""

    def __init__(self) -> None:
        self._signatures: set[tuple] = set()

    def refuse(self, call: tuple, find_errors: Check, find_state_errors: Check) -> None:
        """Raise the first reason to refuse a call, a tuple of arguments.

        Args:
            find_errors: every reason, those of find_state_errors included.
            find_state_errors: what may differ between calls of one signature.
        """
        signature = _signature(call)
        known = signature in self._signatures
        for error in find_state_errors(call) if known else find_errors(call):
            raise error
        if not known and signature is not None:
            if len(self._signatures) >= _MOST:
                self._signatures.clear()
            self._signatures.add(signature)


def _signature(call: tuple) -> tuple | None:
    """All that checks look at apart from a tensor's flags and contents; None with an argument of no expected kind."""
    facts: list[object] = []
    for x in call:
        if isinstance(x, Tensor):
            if x.layout != torch.strided:
                return None
            facts += (x.shape, x.stride(), x.dtype, x.device)
        elif x is None:
            facts.append(x)
        elif isinstance(x, (str, int, float, KVFormat)):
            facts += (type(x), x)  # True, 1 and 1.0 are equal
        else:
            return None
    return tuple(facts)
