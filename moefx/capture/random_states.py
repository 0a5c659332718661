"""Random numbers that a forward draws apart from torch's default generators: Python's, numpy's, and those of
generators that modules hold."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator

import torch
from torch import nn


@contextlib.contextmanager
def kept(model: nn.Module) -> Iterator[None]:
    """What is drawn in here will be drawn again after it."""
    restore = [setter(getter()) for getter, setter in _generators(model)]
    try:
        yield
    finally:
        for each in restore:
            each()


def _generators(model: nn.Module) -> Iterator[tuple[Callable[[], object], Callable[[object], Callable[[], None]]]]:
    """(what gives the state, what makes of a state a function that sets it again) of every generator."""

    def both(get: Callable, put: Callable) -> tuple[Callable, Callable]:
        return get, lambda state: lambda: put(state)

    yield both(random.getstate, random.setstate)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        yield both(numpy.random.get_state, numpy.random.set_state)
    held = {id(value): value for module in model.modules() for value in module.__dict__.values()}
    for value in held.values():
        if isinstance(value, torch.Generator):
            yield both(value.get_state, value.set_state)
        elif isinstance(value, random.Random):
            yield both(value.getstate, value.setstate)
        elif numpy is not None and isinstance(value, numpy.random.RandomState):
            yield both(value.get_state, value.set_state)
        elif numpy is not None and isinstance(value, numpy.random.Generator):
            bits = value.bit_generator
            yield both(lambda bits=bits: bits.state, lambda state, bits=bits: setattr(bits, "state", state))
