"""Run a graph without the rounding that it asks for: what is half precision becomes single, codecs do nothing, and
products in fp8 are exact ones.

Then a graph that rounds can be compared with as many digits as any other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter
from torch.utils._pytree import tree_map

from moefx.ir import edit
from moefx.ir.op import REGISTRY, lookup

HALF = (torch.float16, torch.bfloat16)


class Unrounded(Interpreter):
    """Executes a graph; its inputs are to be `widened`."""

    def call_function(self, target: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        rounds = target in REGISTRY and REGISTRY[target].rounds
        if rounds is True:
            return args[0].clone()
        target = rounds or target
        return super().call_function(target, *_in_single(args, kwargs))

    def call_method(self, target: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        name = "float" if target in ("half", "bfloat16") else target
        return super().call_method(name, *_in_single(args, kwargs))


def widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in HALF else tensor


def is_possible(gm: GraphModule) -> bool:
    """Whether the casts of a graph are its own: those in bodies of higher-order ops are out of reach."""
    bodies = [module for module in gm.modules() if isinstance(module, GraphModule) and module is not gm]
    return not any(map(has_halves, bodies))


def has_halves(gm: GraphModule) -> bool:
    tensors = map(edit.tensor_value, gm.graph.nodes)
    return any(tensor is not None and tensor.dtype in HALF for tensor in tensors)


def encodes(gm: GraphModule) -> bool:
    return any(op.rounds for op in map(lookup, gm.graph.nodes) if op is not None)


def _in_single(args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    def single(each: Any) -> Any:
        return torch.float32 if isinstance(each, torch.dtype) and each in HALF else each

    return tree_map(single, (args, kwargs))
