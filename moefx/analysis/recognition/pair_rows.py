"""The values of the pairs of a routing, once as the user's code has them and once as rows sorted by expert.

A value of a pair is a vector, with axes of size one around it; as rows it is [R, d].
"""

from __future__ import annotations

import operator

from torch.fx import Node

from moefx.analysis.recognition.pairs import Pairs
from moefx.errors import RaiseError
from moefx.ir import edit
from moefx.ir.dims import is_pointwise, is_reshape
from moefx.ir.names import called, op_name
from moefx.ir.ragged import Region
from moefx.ir.shapes import features, sizes


class PairRows:
    """rows: of every value [R, d], or a tuple of such. results: what had no choices before -> what it is now."""

    def __init__(self, region: Region, pairs: Pairs, autocast: tuple) -> None:
        self.region, self.pairs, self.dtypes = region, pairs, dict(autocast)
        self.rows: dict[Node, Node] = {}
        self.results: dict[Node, Node] = {}
        self.bases: list[Node] = []  # what results are added to

    def keep(self, node: Node, new: Node) -> None:
        """`new` is what `node` was, if that is one vector for every pair."""
        if self.pairs.front(node) is None or (features(self.pairs.tail(node)) or (1,)) != sizes(new)[1:]:
            raise refused(node, "gives no vector for every pair")
        self.rows[node] = self.region.cast(new, edit.tensor_value(node).dtype)

    def copy(self, node: Node, new: dict[Node, Node]) -> Node:
        """The op of `node` on what its arguments are now."""
        return self.region.copy(node, {a: new.get(a, a) for a in node.all_input_nodes})

    def vector(self, node: Node, front: int, dims: int) -> Node:
        """[R, d] of an operand of `dims` dims, of which the first `front` number the pairs."""
        aligned = len(sizes(node)) == dims
        if aligned and self.pairs.front(node) == front:
            if node not in self.rows and self.pairs.is_per_choice(node):
                return self.score(node)
            if node not in self.rows and self.pairs.tokens_of(node, front) is None:
                self._ahead(node)
            if node in self.rows:
                return self.rows[node]
        x = self.pairs.tokens_of(node, front) if aligned and node not in self.rows else None
        if x is not None:
            return self.token(x)
        raise refused(node, "is neither of a token nor one number")

    def _ahead(self, node: Node) -> None:
        """What is computed of pairs before they meet weights of experts."""
        if node.op != "placeholder" and is_reshape(node):
            source = node.args[0]
            self.keep(node, self.vector(source, self.pairs.front(source), len(sizes(source))))
        elif is_pointwise(op_name(node)):
            self.on_entries(node)
        else:
            raise refused(node, "is neither of a token nor one number")

    def on_entries(self, node: Node) -> None:
        """An op that acts on every entry by itself."""
        new: dict[Node, Node] = {}
        dims, front = len(sizes(node)), self.pairs.front(node)
        if front is None:
            raise refused(node, "gives no vector for every pair")
        for a in node.all_input_nodes:
            if edit.tensor_value(a) is None:
                continue
            if a not in self.rows and len(sizes(a)) <= dims - front:  # the same for all pairs
                new[a] = a if len(sizes(a)) <= 1 else self.region.method("reshape", a, -1)
            else:
                new[a] = self.vector(a, front, dims)
        self.keep(node, self.copy(node, new))

    def score(self, node: Node) -> Node:
        """[R, 1] of one number per pair."""
        return self.region.method("unsqueeze", self.region.dispatch_choices(self.pairs.choices(node)), -1)

    def token(self, x: Node) -> Node:
        """[R, d] of what every token has."""
        width = features(self.pairs.width(x)) or (1,)
        if sizes(x) != (self.pairs.tokens, *width):
            x = self.region.shaped(x, "reshape", -1, int(width[0]))
        return self.region.dispatch(x)

    def autocast(self, node: Node) -> Node:
        return self.region.autocast(node, self.dtypes)

    def end(self, node: Node, rows: Node, base: Node | None = None) -> None:
        """What `node` was, with no axis of choices, is the sum over them."""
        new = self.region.combine(rows)
        if sizes(new) != sizes(node):
            new = self.region.method("reshape", new, *self._shape_of(node))
        new = self.region.cast(new, edit.tensor_value(node).dtype)
        if base is not None:
            self.bases.append(base)
            new = self.region.emit_call(operator.add, base, new)
        self.region.substitute(node, new)
        self.results[node] = new

    def _shape_of(self, node: Node) -> list[object]:
        """The shape of a node with a dim for every dim of the tokens in front, or one for all."""
        shape = edit.tensor_value(node).shape
        tokens = sizes(self.region.given_idx)[:-1]
        if sizes(node)[: len(tokens)] == tokens and len(tokens) > 1:
            front = [self.region.method("size", self.region.given_idx, dim) for dim in range(len(tokens))]
        elif sizes(node)[0] == self.pairs.tokens:
            front = [-1]
        else:
            raise refused(node, "has the tokens in other dims than the routing")
        return [*front, *shape[len(front) :]]


def refused(node: Node, why: str) -> RaiseError:
    return RaiseError(
        f"weights of the chosen experts are gathered per token, and {called(node)} {why}",
        where=edit.place(node),
        hint="between W[ids] and the sum over the choices use matmuls with gathered weights, elementwise ops and ops "
        "on the last dim. Or write the experts as a loop over all of them (torch.where, then index_add_)",
    )
