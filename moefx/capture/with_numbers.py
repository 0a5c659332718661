"""A capture in which numbers of Python that only decide sizes are inputs."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from moefx.capture import numbers
from moefx.capture.inputs import Fixed
from moefx.capture.numbers import Key
from moefx.capture.trace import Captured, trace

log = logging.getLogger("moefx")


def trace_with_numbers(root: nn.Module, model: nn.Module, leaves: list[Any], spec: Any, device: torch.device, *,
                       sizes: Any, fixed: Fixed, free: frozenset[Key], look: bool) -> Captured:  # fmt: skip
    """`trace`, with those of the numbers `free` as inputs that can be, and, with `look`, others that seem to decide
    sizes: a model where no size is computed by rounding is traced once."""
    found = trace(root, model, leaves, spec, device, sizes=sizes, fixed=fixed)
    dims = {size for param in model.parameters() for size in param.shape}
    wanted = free | (numbers.candidates(found.gm.graph, found.state, leaves, dims) if look else frozenset())
    while wanted:
        try:
            general = trace(root, model, leaves, spec, device, sizes=sizes, fixed=fixed, free=wanted)
        except Exception as error:  # with constants it could be captured
            log.debug("%s cannot be inputs: %s", sorted(map(str, wanted)), error)
            break
        if isinstance(general, Captured):
            return general
        wanted = general
    return found
