"""Stands for a package of kernels: what moefx's functions do, and a note of who was called."""

from __future__ import annotations

from collections import Counter
from typing import Any

from moefx.runtime import collectives, expert_layer, glu, grouped

CALLED: Counter[str] = Counter()
not_a_function = 3


def linear(*args: Any, **kwargs: Any) -> Any:
    CALLED["linear"] += 1
    return grouped.grouped_linear(*args, **kwargs)


def exchange(*args: Any, **kwargs: Any) -> Any:
    CALLED["exchange"] += 1
    return collectives.all_to_all_start(*args, **kwargs)


def activation(*args: Any, **kwargs: Any) -> Any:
    CALLED["activation"] += 1
    return glu.gated(*args, **kwargs)


def activation_backward(*args: Any, **kwargs: Any) -> Any:
    CALLED["activation_backward"] += 1
    return glu.gated_backward(*args, **kwargs)


def layer(*args: Any, **kwargs: Any) -> Any:
    CALLED["layer"] += 1
    return expert_layer.expert_layer(*args, **kwargs)


def layer_backward(*args: Any, **kwargs: Any) -> Any:
    CALLED["layer_backward"] += 1
    return expert_layer.expert_layer_backward(*args, **kwargs)
