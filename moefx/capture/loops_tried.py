"""Loops over hit experts as they are written, and as loops over all experts, tried out beside one another."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

Methods = Mapping[str, Callable[..., Any]]  # by name, `forward` among them
Call = tuple[tuple, dict[str, Any]]


class Loops(NamedTuple):
    """The methods of a module with loops over all experts. left_out: names of its parameters that these read of experts
    nobody chose, and those that are written do not."""

    methods: Methods
    left_out: frozenset[str] = frozenset()


Forwards = Mapping[tuple[nn.Module, bool], Loops]  # of a module while it is training, or while it is not


@contextlib.contextmanager
def in_place(model: nn.Module, forwards: Forwards) -> Iterator[None]:
    """The modules of `model` with the methods of their mode. Others may have programs in place."""
    own = [(module, name) for module in model.modules() for name in _methods(forwards, module)]
    before = [(module, name, module.__dict__.get(name)) for module, name in own]
    try:
        for module, name in own:
            setattr(module, name, MethodType(_methods(forwards, module)[name], module))
        yield
    finally:
        for module, name, method in before:
            module.__dict__.pop(name, None)
            module.__dict__.update({} if method is None else {name: method})


def _methods(forwards: Forwards, module: nn.Module) -> Methods:
    key = module, module.training
    return forwards[key].methods if key in forwards else {}


def agrees(module: nn.Module, methods: Methods, call: Call) -> bool:
    """Whether both versions give the same bits and leave the same in buffers, whose values stay: as called, with equal
    tokens, all ids zero, ids spread anew, and one row of the batch."""
    with torch.no_grad():
        for args, kwargs in _changed(call):
            try:
                wanted, given = (_outcome(module, each, args, kwargs) for each in ({}, methods))
            except Exception:
                return False
            pairs = zip(wanted, given, strict=True)
            if not all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs):
                return False
    return True


def left_out(module: nn.Module, methods: Methods, calls: Sequence[Call]) -> frozenset[str] | None:
    """Names of parameters that in some of these runs have a gradient with loops over all experts, and none in the
    module as it is written: nobody chose their expert. None: other gradients are not the same."""
    names = {param: name for name, param in module.named_parameters() if param.is_floating_point()}
    frozen, found = [param for param in names if not param.requires_grad], set()
    for param in frozen:
        param.requires_grad_(True)
    try:
        for call in calls:
            for args, kwargs in _changed(call):
                own = _gradients(module, {}, args, kwargs, list(names))
                try:
                    all_experts = _gradients(module, methods, args, kwargs, list(names))
                except Exception:
                    return None
                found |= {name for name, mine, every in zip(names.values(), own, all_experts)
                          if mine is None and every is not None}  # fmt: skip
                if not all(map(_is_close, own, all_experts)):
                    return None
    except Exception:  # what cannot be differentiated has no gradients
        return frozenset()
    finally:
        for param in frozen:
            param.requires_grad_(False)
    return frozenset(found)


def _gradients(module: nn.Module, methods: Methods, args: tuple, kwargs: dict[str, Any],
               params: Sequence[Tensor]) -> list[Tensor | None]:  # fmt: skip
    """Of the sum of what the module gives, to the parameters and to the arguments."""
    leaves = []

    def fresh(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
            return leaf
        leaves.append(leaf.detach().clone().requires_grad_())
        return leaves[-1].clone()  # which may be written to

    with torch.enable_grad():
        args, kwargs = tree_map(fresh, (args, kwargs))
        given = _outcome(module, methods, args, kwargs)
        given = [leaf for leaf in given if isinstance(leaf, Tensor) and leaf.requires_grad]
        ones = [torch.ones_like(leaf) for leaf in given]
        to = [*params, *leaves]
        return list(torch.autograd.grad(given, to, ones, allow_unused=True)) if given else [None] * len(to)


def _is_close(one: Tensor | None, two: Tensor | None) -> bool:
    """None is as good as zeros."""
    if one is None or two is None:
        return all(each is None or not each.any() for each in (one, two))
    return torch.allclose(one, two, rtol=1e-4, atol=1e-5, equal_nan=True)


def _outcome(module: nn.Module, methods: Methods, args: tuple, kwargs: dict[str, Any]) -> list[Any]:
    """What the module gives with these methods, and leaves in its buffers, which stay, and so do their values."""
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    tables = [(each._buffers, dict(each._buffers)) for each in module.modules()]
    torch.manual_seed(0)  # routers may draw noise
    try:
        with in_place(module, {(module, module.training): Loops(methods)}):
            result = tree_leaves(module.forward(*args, **kwargs))
        return result + [buffer.clone() for buffer in module.buffers()]
    finally:
        for table, before in tables:
            table.update(before)
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


def _changed(call: Call) -> Iterator[Call]:
    """A call as it is, and with other choices."""
    generator = torch.Generator().manual_seed(0)

    def spread(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.is_floating_point() or leaf.dtype is torch.bool or not leaf.numel():
            return leaf
        return leaf.flatten()[torch.randperm(leaf.numel(), generator=generator)].view_as(leaf)

    def to_one(leaf: Any) -> Any:
        is_ids = isinstance(leaf, Tensor) and not leaf.is_floating_point() and leaf.dtype is not torch.bool
        return torch.zeros_like(leaf) if is_ids else leaf

    def equal(leaf: Any) -> Any:
        is_rows = isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dim() > 1 and leaf.numel()
        return leaf[(0,) * (leaf.dim() - 1)].expand_as(leaf).contiguous() if is_rows else leaf

    rows = {leaf.shape[:1] for leaf in tree_leaves(call) if isinstance(leaf, Tensor)}

    def one_row(leaf: Any) -> Any:
        return leaf[:1] if isinstance(leaf, Tensor) and len(rows) == 1 else leaf

    for change in (lambda leaf: leaf, equal, to_one, spread, one_row):
        yield tree_map(change, call)
