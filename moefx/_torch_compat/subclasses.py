"""Subclasses of DTensor that say themselves how operators run on them, as torch 2.13 lets them.

Torch 2.11 runs operators on a subclass as on a plain DTensor, in C++, unless a dict has a handler of the operator. So
every operator gets one there, which looks for a subclass among the arguments. Where there is none it calls the operator
again, and for that call the dict is the one of before.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

import torch
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from moefx._torch_compat.operators import mend_operators

_thread = threading.local()


@functools.cache
def let_subclasses_dispatch() -> None:
    """Once per process; for torch 2.11."""
    mend_operators()  # which adds handlers
    dispatcher = DTensor._op_dispatcher
    plain = dispatcher._custom_op_handlers
    every = dict.fromkeys(_operators(), _dispatch)
    handlers = property(lambda self: plain if getattr(_thread, "is_plain", False) else every)
    type(dispatcher)._custom_op_handlers = handlers


def _dispatch(op: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
    kinds = {type(each) for each in tree_leaves((args, kwargs)) if isinstance(each, DTensor)} - {DTensor}
    if kinds:
        kind = max(kinds, key=lambda each: len(each.__mro__))
        return kind.__torch_dispatch__(op, tuple(kinds), args, kwargs)
    _thread.is_plain = True
    try:
        return op(*args, **kwargs)
    finally:
        _thread.is_plain = False


def _operators() -> list[OpOverload]:
    found = []
    for name in torch._C._dispatch_get_all_op_names():
        space, _, name = name.partition("::")
        if space == "aten":
            name, _, overload = name.partition(".")
            found.append(getattr(getattr(torch.ops.aten, name), overload or "default"))
    return found
