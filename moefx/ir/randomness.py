"""Which ops draw random numbers. They share one generator: the numbers are eager's only if the order is."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.fx import Node

from moefx._torch_compat import OpOverload
from moefx.ir.names import op_name
from moefx.ir.op import argument

_NAMES = ("bernoulli", "binomial", "cauchy", "exponential", "geometric", "gumbel_softmax", "log_normal", "multinomial",
          "normal", "poisson", "random", "rrelu", "uniform")  # fmt: skip


def is_random(node: Node) -> bool:
    if isinstance(node.target, OpOverload):
        return torch.Tag.nondeterministic_seeded in node.target.tags
    name = op_name(node).rstrip("_")
    return node.op.startswith("call") and (name in _NAMES or name.startswith("rand") or "dropout" in name)


def draws(node: Node) -> bool:
    """Whether an op draws random numbers: attention does if it drops some of its weights."""
    schema = getattr(node.target, "_schema", None)
    drops = schema is None or all(a.name != "dropout_p" for a in schema.arguments) or argument(node, "dropout_p") != 0
    return is_random(node) and drops


def never_drops(node: Node) -> bool:
    """A dropout that is switched off, or of probability zero."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    arguments = dict(zip(("input", "p", "training"), node.args)) | node.kwargs
    return name == "dropout" and (arguments.get("p") == 0 or arguments.get("training") is False)


def first_draw(nodes: Iterable[Node]) -> Node | None:
    """The first op that draws when it runs."""
    return next((node for node in nodes if is_random(node) and not never_drops(node)), None)


def draws_before(nodes: Iterable[Node]) -> dict[Node, Node]:
    """For every op that draws, in the order of `nodes`, the one that drew before it. Attention without dropout is none:
    that of one part of a batch need not wait for that of another."""
    drawing = [node for node in nodes if draws(node)]
    return dict(zip(drawing[1:], drawing))
