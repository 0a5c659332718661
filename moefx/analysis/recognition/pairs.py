"""Values of the (token, choice) pairs of a routing: how they are laid out, and what they have of the tokens.

A value of the pairs has dims in front that number them, in the order of the routing [.., K]: [T, K, ..], [T*K, ..], or
[B, S, K, ..]. Reshaping keeps that order, so which dims these are is seen from the sizes alone.
"""

from __future__ import annotations

import operator
from typing import Any

import sympy
import torch
from torch.fx import Node

from moefx.analysis.recognition import choices
from moefx.analysis.recognition.draws import same
from moefx.ir import edit
from moefx.ir.dims import is_reshape
from moefx.ir.names import arg, op_name
from moefx.ir.shapes import features, sizes


class Pairs:
    """How tensors are laid out that have entries for every pair of the routing idx [.., K]."""

    def __init__(self, idx: Node) -> None:
        *tokens, k = sizes(idx)
        self.k = int(k)
        self.tokens = sympy.prod(tokens)
        self.number = self.tokens * self.k

    def front(self, node: Node) -> int | None:
        """How many dims in front number the pairs; None: none do."""
        return self._front(node, self.number)

    def _front(self, node: Any, number: sympy.Expr) -> int | None:
        total = sympy.Integer(1)
        for dim, size in enumerate(sizes(node)):
            total = total * size
            if total == number:
                return dim + 1
        return None

    def tail(self, node: Node) -> tuple:
        """The sizes behind the pairs."""
        return sizes(node)[self.front(node) :]

    def is_per_choice(self, node: Node) -> bool:
        """Whether a node is one number per pair."""
        return self.front(node) is not None and not features(self.tail(node))

    def choices(self, node: Node) -> Node:
        """Numbers per pair as they were, [.., K], before other shapes."""
        best = found = node
        while is_reshape(found):
            found = found.args[0]
            if sizes(best)[1:] != (self.k,) and sizes(found)[-1:] == (self.k,):
                best = found
        return best

    def tokens_of(self, node: Node, front: int) -> Node | None:
        """x if `node` is the same for every choice of a token: x in another shape, with one entry per token. `front`:
        how many dims number the pairs, of which the last one may be of size one, for all choices."""
        found = node
        if self.k == 1 or sizes(node)[front - 1] != 1:
            found = self._repeated(node)
        return None if found is None else self.plain(found)

    def width(self, x: Node) -> tuple:
        """The sizes behind the tokens of a tensor with one entry per token."""
        return sizes(x)[self._front(x, self.tokens) :]

    def plain(self, x: Node) -> Node | None:
        """x as [T, D] before it got other shapes, if it was that."""
        best = None
        while True:
            front = self._front(x, self.tokens)
            if front is not None and len(features(sizes(x)[front:])) <= 1:
                best = x
                if edit.tensor_value(x).dim() == 2:
                    return x
            if not is_reshape(x):
                return best
            x = x.args[0]

    def _repeated(self, node: Node) -> Node | None:
        """What `node` has for every pair is that of the token: the tensor of the tokens."""
        if self.front(node) is None:
            return None
        name, source = op_name(node), node.args[0] if node.args else None
        if edit.tensor_value(source) is not None and self._is_by_token(node):
            return source
        if self.k == 1:
            return node
        if edit.tensor_value(source) is None:
            return None
        if is_reshape(node):
            return self._repeated(source)
        if name in ("expand", "expand_as", "repeat", "broadcast_to"):
            return source if self._adds_choices(node, source) else None
        if name == "repeat_interleave" and arg(node, 1, "repeats") == self.k:
            dim = arg(node, 2, "dim")
            dim = 0 if dim is None and edit.tensor_value(source).dim() == 1 else dim
            return source if isinstance(dim, int) and self._front(source, self.tokens) in (dim + 1, dim) else None
        return None

    def _adds_choices(self, node: Node, source: Node) -> bool:
        """[T, 1, D] -> [T, K, D]."""
        new, old = sizes(node), sizes(source)
        old = (*[1] * (len(new) - len(old)), *old)
        axis = self.front(node) - 1
        return new[axis] == self.k and (*old[:axis], new[axis], *old[axis + 1 :]) == new and old[axis] == 1

    def _is_by_token(self, node: Node) -> bool:
        """x[numbers of the tokens of all pairs]."""
        if node.target is operator.getitem and isinstance(node.args[1], Node):
            index = node.args[1]
        elif op_name(node) == "index_select" and arg(node, 1, "dim") == 0:
            index = arg(node, 2, "index")
        else:
            return False
        return sizes(node.args[0])[:1] == (self.tokens,) and self.is_numbering(index)

    def is_numbering(self, index: Any) -> bool:
        """Whether an index names the token of every pair, in every draw: 0, 0, 1, 1, .. for K = 2."""
        if not isinstance(index, Node) or self.front(index) is None or features(self.tail(index)):
            return False
        found = choices.drawn(index.graph.owning_module, index)
        numbers = [torch.arange(v.numel()) // self.k for v in found or ()]
        return found is not None and same([v.flatten() for v in found], numbers)
