"""Attention over sequences that lie end to end: each token sees its own sequence only, and nothing is padded.

Registered with transformers as one more attention implementation, so the models stay as they are. On CUDA in half
precision it is torch's variable-length FlashAttention, one kernel for all sequences; elsewhere one call a sequence.
Neither builds a mask, whose size would be the square of the step.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fabric_pipelines.device import calls

_numbers = itertools.count()


@dataclass(frozen=True, slots=True, eq=False)
class Packing:
    """How a step of T tokens is laid out. lengths: of the sequences, sum T; ends: int32 [n + 1] on the device, 0 and
    the running sums, made once for all layers; positions: int64 [1, T], from 0 in each sequence."""

    lengths: tuple[int, ...]
    ends: Any
    positions: Any


def laid_out(lengths: Sequence[int]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """`ends` [n + 1] and positions [T] of sequences that lie end to end, made here and not on the device."""
    counts = np.asarray(lengths, np.int64)
    ends = np.concatenate([[0], np.cumsum(counts)])
    positions = np.arange(ends[-1]) - np.repeat(ends[:-1], counts)
    return ends.astype(np.int32), positions


class Attention:
    """The attention of one engine, under a name of its own. `packing` is that of the pass at hand, set before it: handed
    down through the blocks it would be part of what they are compiled for, and it is new in every step."""

    def __init__(self) -> None:
        self.name = f"fabric_varlen_{next(_numbers)}"
        self.packing: Packing | None = None

    def register(self, transformers: Any, torch: Any) -> None:
        """Make `name` known to transformers. A compiled block stops here and goes on behind."""
        transformers.AttentionInterface.register(self.name, torch.compiler.disable(self._attend))

    def _attend(
        self, module: Any, query: Any, key: Any, value: Any, mask: Any, **more: Any
    ) -> tuple[Any, None]:
        assert self.packing is not None, "a pass has a packing"
        window = more.get("sliding_window")
        with calls.ours():
            return attend(module, query, key, value, self.packing, more["scaling"], window), None


def attend(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    packing: Packing,
    scaling: float,
    sliding_window: int | None = None,
) -> Any:
    """query [1, heads, T, d], key and value [1, kv_heads, T, d] -> [1, T, heads, d]. RuntimeError for a sequence
    beyond the model's window: here it would see all of itself."""
    assert query.shape[0] == 1
    assert sum(packing.lengths) == query.shape[2]
    longest = max(packing.lengths)
    if sliding_window is not None and longest > sliding_window:
        raise RuntimeError(
            f"a sequence of {longest} tokens is longer than the model's window of {sliding_window}"
        )
    causal = bool(getattr(module, "is_causal", False))
    if query.is_cuda and query.element_size() == 2:
        q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
        return _one_kernel(q, k, v, packing, scaling, causal)[None]
    return _one_by_one(query, key, value, packing, scaling, causal)


def _one_kernel(
    query: Any, key: Any, value: Any, packing: Packing, scaling: float, causal: bool
) -> Any:
    """[T, heads, d] each."""
    from torch.nn.attention.varlen import varlen_attn

    more: dict[str, Any] = {}
    group = query.shape[1] // key.shape[1]
    if group > 1 and "enable_gqa" in inspect.signature(varlen_attn).parameters:
        more["enable_gqa"] = True
    elif group > 1:  # torch before 2.12
        key, value = (states.repeat_interleave(group, dim=1) for states in (key, value))
    longest = max(packing.lengths)
    return varlen_attn(
        query,
        key,
        value,
        packing.ends,
        packing.ends,
        longest,
        longest,
        scale=scaling,
        window_size=(-1, 0) if causal else (-1, -1),
        **more,
    )


def _one_by_one(
    query: Any, key: Any, value: Any, packing: Packing, scaling: float, causal: bool
) -> Any:
    import torch

    attention = torch.nn.functional.scaled_dot_product_attention
    grouped = query.shape[1] != key.shape[1]
    mixed = [
        attention(q, k, v, is_causal=causal, scale=scaling, enable_gqa=grouped)
        for q, k, v in zip(
            *(states.split(packing.lengths, dim=2) for states in (query, key, value)), strict=True
        )
    ]
    return torch.cat(mixed, dim=2).transpose(1, 2)
