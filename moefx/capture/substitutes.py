"""What stands for functions of torch while a model is captured, since dynamo cannot follow them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import Distribution


@contextlib.contextmanager
def symbolic_one_hot() -> Iterator[None]:
    """torch's one_hot fixes its number of classes; a capacity often is one and follows from the batch."""
    original = F.one_hot

    def one_hot(tensor: Tensor, num_classes: int = -1) -> Tensor:
        if isinstance(num_classes, int) and num_classes == -1:
            return original(tensor)
        return torch.ops.moefx.one_hot(tensor, num_classes)

    F.one_hot = one_hot
    try:
        yield
    finally:
        F.one_hot = original


@contextlib.contextmanager
def trusted_distributions() -> Iterator[None]:
    """torch.distributions check their arguments by values, which no capture has."""
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)


@contextlib.contextmanager
def fresh_tensors_need_no_gradient() -> Iterator[None]:
    """Dynamo takes no torch.zeros(.., requires_grad=True). Nobody reads the gradient of what a forward makes anew."""

    def plain(original: Any) -> Any:
        def create(*args: Any, requires_grad: bool = False, **kwargs: Any) -> Tensor:
            return original(*args, **kwargs)

        return create

    originals = {name: getattr(torch, name) for name in ("zeros", "ones", "empty", "full", "zeros_like", "ones_like")}
    try:
        for name, original in originals.items():
            setattr(torch, name, plain(original))
        yield
    finally:
        for name, original in originals.items():
            setattr(torch, name, original)


ZEROS = torch.zeros  # torch's own
