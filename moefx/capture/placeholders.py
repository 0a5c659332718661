"""What the placeholders of a captured graph are called and hold."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.fx import Node

from moefx.capture import refusals

_TAKEN = ("session", "step", "inputs")  # what emitted functions are called with


def describe(placeholders: Iterable[Node], sources: Iterable[Any], model: nn.Module) -> None:
    """Let every placeholder say where its value comes from, its `Source`, and have a readable name. Raises CaptureError
    for what cannot be an input."""
    held = dict(model.named_buffers())
    for node, source in zip(placeholders, sources):
        node.meta["moefx"] = source
        refusals.check_input(node, source.kind, source.key)
        if source.kind == "buffer" and _is_of_integers(held.get(source.key)):
            node.meta["held"] = held[source.key]
        node._rename(_name(source, node))
        node.target = node.name


def _name(source: Any, node: Node) -> str:
    """A readable input name: the parameter's own, or the argument's."""
    name = source.key if isinstance(source.key, str) else node.name.strip("_").removeprefix("l_").removeprefix("args_")
    name = re.sub(r"\W+", "_", name)
    return f"{source.kind}_{name}" if name[:1].isdigit() or name in _TAKEN else name


def _is_of_integers(buffer: Tensor | None) -> bool:
    """Whether only the values that a buffer holds may be sensible ones, as those of a permutation."""
    return buffer is not None and not buffer.is_meta and not (buffer.is_floating_point() or buffer.is_complex())
