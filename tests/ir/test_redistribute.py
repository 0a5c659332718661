"""Ops that redistribute: types, volumes and transposes agree with one table."""

from __future__ import annotations

import pytest
import torch
from torch.fx import Node
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from moefx.errors import MoefxError
from moefx.ir.op import REGISTRY, lookup, value
from moefx.ir.redistribute import REDISTRIBUTING, TRANSPOSED, redistribute
from tests.ir.test_volumes import EVERY
from tests.support.graphs import graph


class _Seen(TorchDispatchMode):
    """The dialect's ops that run."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in REGISTRY:
            self.records.append(REGISTRY[func])
        return func(*args, **(kwargs or {}))


def transposes(node: Node) -> list:
    """The records of the ops that run backward through a node, on its fake values."""

    def wanting(x: torch.Tensor) -> torch.Tensor:
        return x.detach().requires_grad_(x.is_floating_point())

    args = tree_map_only(torch.Tensor, wanting, tree_map_only(Node, value, list(node.args)))
    leaves = [x for x in tree_leaves(args) if isinstance(x, torch.Tensor) and x.requires_grad]
    outs = [x for x in tree_leaves(node.target(*args, **node.kwargs)) if isinstance(x, torch.Tensor) and x.grad_fn]
    if not outs:
        return []
    with _Seen() as seen:
        try:
            torch.autograd.grad(outs, leaves, [torch.ones_like(x) for x in outs], allow_unused=True)
        except RuntimeError as error:
            if "no autograd formula was registered" not in str(error):
                raise
    return seen.records


def test_transposes_take_and_give_what_the_table_says():
    gm, mode = graph(EVERY)
    checked = set()
    for node in gm.graph.nodes:
        if node.target not in REDISTRIBUTING:
            continue
        takes, gives = REDISTRIBUTING[node.target]
        with mode:
            back = [REDISTRIBUTING[each.target] for each in transposes(node) if each.target in REDISTRIBUTING]
        for there, to in back:
            assert there in TRANSPOSED[gives], (node, there, to)
            assert to in TRANSPOSED[takes], (node, there, to)
            checked.add(lookup(node).name)
    assert checked >= {"all_rows", "own_rows", "sum_own_rows", "vary_rows", "own_part", "gather_rows", "keep_rows",
                       "gather_parts", "scatter_parts", "gather_weights", "scatter_weights", "own_experts"}  # fmt: skip


def test_what_is_registered_twice_is_refused():
    with pytest.raises(MoefxError, match="sum_parts is defined twice"):
        redistribute(torch.ops.moefx.sum_parts.default, "P", "I")
