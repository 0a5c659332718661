"""Branches of a loop over experts: are they one function of different parameters, and if so, which?

Branch e is the code that ends in the rows that expert e adds to the output. All branches are walked together, node by
node. They must agree in every op and constant; where they read different parameters, those form one stacked parameter.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from moefx.analysis.recognition.facts import Index, Mask, OfExpert, Read, Weighed, tokens_of
from moefx.analysis.recognition.indexing import taken
from moefx.analysis.recognition.roles import Body, Chosen, Count, Numbers, Part, Scores, Shared, Slices, Stack, Tokens
from moefx.analysis.recognition.structure import structure
from moefx.errors import RaiseError
from moefx.ir import edit
from moefx.ir.describe import module_path
from moefx.ir.dim_indexing import items
from moefx.ir.expert_weights import check_no_writes, is_weight
from moefx.ir.names import arg, common_name, op_name
from moefx.ir.op import value
from moefx.ir.writes import users_of_memory


class Branches:
    """`roles` says what the leaves of branch 0 are; its other `nodes`, in graph order, are ops on them. `dense`: every
    branch computes all tokens, and what its expert was not chosen for is multiplied by zero. `row_dims`: how many dims
    in front number the rows of a branch, in dense ones those of the tokens. experts: whose branches these are, 0, 1, ..
    if not said; of one alone is shared what does not come of its tokens."""

    def __init__(self, facts: dict, rows: Sequence[Node], *, dense: bool = False, row_dims: int = 1,
                 experts: Sequence[int] | None = None) -> None:  # fmt: skip
        self.facts, self.rows, self.dense, self.row_dims = facts, tuple(rows), dense, row_dims
        self.experts = list(range(len(rows)) if experts is None else experts)
        self._own = _own(facts, self.experts[0]) if len(rows) == 1 else set()
        self.roles: dict[Node, Any] = {}
        self.members: set[Node] = set()  # nodes of all branches, leaves that read the routing included
        self._seen: dict[Node, tuple[Node, ...]] = {}
        self._walk(self.rows)

    @property
    def nodes(self) -> list[Node]:
        """The nodes of branch 0 in graph order."""
        return [n for n in self.rows[0].graph.nodes if n in self._seen]

    def enter_common_module(self, node: Node) -> None:
        """Let a node of branch 0 say that it is in layers.0.experts.up, no longer in layers.0.experts.0.up."""
        path = common_name([module_path(each) for each in self._seen[node]])
        if node not in self.roles and path:
            node.meta["nn_module_stack"] = {"": (".".join(path), None)}

    def _walk(self, start: tuple[Node, ...]) -> None:
        stack = [start]
        while stack:
            nodes = stack.pop()
            known = self._seen.get(nodes[0])
            if known is not None:
                if known != nodes:
                    raise _differ(nodes, "use different values")
                continue
            self._seen[nodes[0]] = nodes
            role = self._role(nodes)
            if role is not None:
                self.roles[nodes[0]] = role
                if isinstance(role, (Tokens, Part, Scores, Chosen, Slices, Body, Count)):
                    self.members.update(nodes)
                continue
            self.members.update(nodes)
            if _takes_statistics(nodes[0]):
                raise RaiseError("experts have a BatchNorm, whose statistics mix the rows of an expert",
                                 where=edit.place(nodes[0]), hint="use LayerNorm or RMSNorm in experts")  # fmt: skip
            if any(users_of_memory(nodes[0]).values()):
                raise RaiseError(f"the experts of a loop write to {nodes[0].name}, or to a part of it",
                                 where=edit.place(nodes[0]),
                                 hint="compute a new tensor (torch.where, masked_fill, torch.cat)")  # fmt: skip
            stack.extend(self._inputs(nodes))

    def _role(self, nodes: tuple[Node, ...]) -> Any:
        if len(nodes) == 1:
            return self._read(nodes) or (None if nodes[0] in self._own else Shared())
        if all(n is nodes[0] for n in nodes):
            return Shared()
        if all(n.op == "placeholder" for n in nodes) and all(map(is_weight, nodes)):
            return self._stack(nodes)
        if all(edit.body_of(n) is not None for n in nodes):
            if len({structure(edit.body_of(n).graph.nodes) for n in nodes}) > 1:
                raise _differ(nodes, "have custom autograd functions that do different things")
            return Body()
        if self._are_counts(nodes):
            return Count()
        read = self._read(nodes)
        return Numbers(nodes) if read is None and not self.dense and all(map(_is_number_apart, nodes)) else read

    def _are_counts(self, nodes: tuple[Node, ...]) -> bool:
        """Whether these are the sizes of the index vectors of the experts."""
        sized = op_name(nodes[0]) in ("sym_size", "size") and all(len(n.args) == 2 and n.args[1] == 0 for n in nodes)
        found = [self.facts.get(n.args[0]) for n in nodes] if sized else []
        return bool(found) and [f.mask.expert for f in found if isinstance(f, Index)] == self.experts

    def _stack(self, nodes: tuple[Node, ...]) -> Stack:
        values = [edit.tensor_value(n) for n in nodes]
        if len({(tuple(v.shape), v.dtype) for v in values}) > 1:
            raise _differ(nodes, f"have parameters of shapes {sorted({tuple(v.shape) for v in values})}")
        if len(set(nodes)) < len(nodes):
            raise _differ(nodes, "share parameters between some of them, but not all")
        return Stack(nodes)

    def _read(self, nodes: tuple[Node, ...]) -> Any:
        """Tokens, Scores or Slices if all nodes read the same tensor by their own expert's indices."""
        slices = _slices(nodes)
        if slices is not None:
            return slices
        reads = [self._index_of(n) for n in nodes]
        if any(r is None for r in reads):
            return None
        sources = {r[0] for r in reads}
        kinds = {r[1] for r in reads}
        experts = [r[2] for r in reads]
        is_slice = all(kind == "slice" or isinstance(kind, int) for kind in kinds)
        if len(nodes) > 1 and is_slice:
            if len(set(experts)) == 1 or not all(_computes_same(reads[0][0], each) for each in sources):
                return None  # each reads the same part, of a parameter of its own or of one
            sources = {reads[0][0]}
        if experts != self.experts:
            raise _differ(nodes, f"read the {'weights' if is_slice else 'tokens'} of experts {experts}")
        if len(sources) != 1 or len(kinds) != 1:
            raise _differ(nodes, "read different tensors")
        source, kind = sources.pop(), kinds.pop()
        ones = edit.tensor_value(nodes[0]).dim() - self.row_dims
        if is_slice:
            return Slices(source, None if kind == "slice" else kind, tuple(experts))
        if kind in ("tokens", "flat tokens"):
            return Tokens(source, kind == "flat tokens")
        if kind == "chosen":
            return Chosen()
        if kind == "rows":
            return Part(source)
        has_gradient = [edit.tensor_value(each).requires_grad for each in (source, nodes[0])]
        return Scores(source, kind == "dense", ones, has_gradient == [True, False])

    def _index_of(self, node: Node) -> tuple[Node, str | int, int] | None:
        """(tensor read, kind of read, expert) of a read by a routing's indices or by an expert's number; the kind is a
        number where an expert has so many rows."""
        fact = self.facts.get(node)
        if self.dense and isinstance(fact, Weighed) and fact.is_of_tokens:
            return fact.w, "scores", fact.mask.expert
        if self.dense and isinstance(fact, Mask) and fact.is_of_tokens:
            return fact.idx, "chosen", fact.expert
        if isinstance(fact, Read):
            return fact.w, "scores", fact.mask.expert
        if isinstance(fact, OfExpert) and fact.source is not None:
            return fact.source, "rows", fact.expert
        if op_name(node) in ("index_select", "gather"):
            read = taken(node)
            return None if read is None else self._kind(read[0], read[1:])
        if op_name(node) in ("reshape", "view", "squeeze") and _is_double(node.args[0]):
            inner = self._index_of(node.args[0])
            same = inner is not None and edit.tensor_value(node).dim() == edit.tensor_value(inner[0]).dim()
            if same and inner[1] in ("tokens", "flat tokens"):
                self.members.add(node.args[0])
                return inner
            return None
        if node.target is not operator.getitem or edit.tensor_value(node) is None:
            return None
        if isinstance(node.args[1], int) and op_name(node.args[0]) in ("unbind", "split", "chunk"):
            return self._piece(node, *node.args)
        item = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
        return self._kind(node.args[0], tuple(i for i in item if i is not None and i is not Ellipsis))

    def _piece(self, node: Node, pieces: Node, number: int) -> tuple[Node, str | int, int] | None:
        """One of the equal pieces that a parameter was cut into."""
        dim = arg(pieces, 1 if op_name(pieces) == "unbind" else 2, "dim", 0)
        if dim != 0 or not is_weight(pieces.args[0]):
            return None
        shapes = {tuple(piece.shape) for piece in value(pieces)}
        if len(shapes) > 1:
            return None
        self.members.add(pieces)
        return pieces.args[0], "slice" if op_name(pieces) == "unbind" else shapes.pop()[0], number

    def _kind(self, source: Node, item: tuple) -> tuple[Node, str | int, int] | None:
        if len(item) == 1 and isinstance(item[0], slice) and is_weight(source):
            return _rows_of_one(source, item[0])
        mask, rest = tokens_of(self.facts, item)
        if mask is None or len(rest) > 1:
            return None
        if not rest:
            return source, "flat tokens" if mask.is_flat else "tokens", mask.expert
        return (source, "dense", mask.expert) if rest[0] == mask.expert else None

    def _inputs(self, nodes: tuple[Node, ...]) -> list[tuple[Node, ...]]:
        """Check that all nodes are the same op with the same constants; their node arguments side by side."""
        first = nodes[0]
        if any((n.op, n.target) != (first.op, first.target) for n in nodes):
            raise _differ(nodes, f"compute different ops ({sorted({op_name(n) for n in nodes})})")
        if first.op in ("placeholder", "get_attr"):
            raise _differ(nodes, "read different inputs")
        flat = [_flatten_args(n) for n in nodes]
        if len({len(f) for f in flat}) > 1:
            raise _differ(nodes, "are called differently")
        found = []
        for arguments in zip(*flat):
            if all(isinstance(a, Node) for a in arguments):
                found.append(tuple(arguments))
            elif any(a != arguments[0] or type(a) is not type(arguments[0]) for a in arguments):
                if list(arguments) == self.experts and isinstance(first.args[0], Node) and op_name(first) == "getitem":
                    check_no_writes(first.args[0])
                    raise _differ(nodes, f"read their own part of {first.args[0].name}, which is computed from inputs "
                                         "or at random, or read it in another way than W[e]")  # fmt: skip
                if list(arguments) == self.experts:
                    raise _differ(nodes, f"use their own numbers in {op_name(first)}, in a way that is not recognised")
                raise _differ(nodes, f"use different constants {sorted({str(a) for a in arguments})}")
        return found


def _takes_statistics(node: Node) -> bool:
    """Whether this is a batch_norm by the statistics of its rows."""
    return op_name(node) == "batch_norm" and arg(node, 5, "training", False) is not False


def _computes_same(a: Node, b: Node) -> bool:
    """Whether two weights are computed in one way of the same."""
    if a is b:
        return True
    same = (a.op, a.target) == (b.op, b.target) and a.op.startswith("call")
    if not (same and is_weight(a) and is_weight(b)):
        return False
    left, right = _flatten_args(a), _flatten_args(b)
    return len(left) == len(right) and all(
        _computes_same(x, y) if isinstance(x, Node) and isinstance(y, Node) else x == y for x, y in zip(left, right)
    )


def _is_number_apart(node: Node) -> bool:
    """Whether a tensor without dims is computed of nothing whose size depends on data, as that of an expert's rows, but
    not of parameters alone: those are of some experts only."""
    found = edit.tensor_value(node)
    if found is None or found.dim() > 0 or is_weight(node):
        return False
    shapes = (size for n in edit.ancestors([node]) for size in getattr(edit.tensor_value(n), "shape", ()))
    return not any(free_unbacked_symbols(size) for size in shapes)


def _own(facts: dict, expert: int) -> set[Node]:
    """What comes of the tokens of an expert."""
    masks = ((node, getattr(fact, "mask", fact)) for node, fact in facts.items())
    return edit.descendants(node for node, mask in masks if getattr(mask, "expert", None) == expert)


def _slices(nodes: Sequence[Node]) -> Slices | None:
    """W[e], W[:, e], W[0, 2 * e, :4]: other entries of one axis for every expert, and the same of the other axes."""
    sources = [n.args[0] for n in nodes if n.target is operator.getitem and is_weight(n.args[0])]
    if len(sources) < len(nodes) or not all(_computes_same(sources[0], each) for each in sources):
        return None
    tensor, found = edit.tensor_value(sources[0]), [n.args[1] for n in nodes]
    if tensor is None or any(None in each if isinstance(each, tuple) else each is None for each in found):
        return None
    taken = [items(each, tensor.dim()) for each in found]
    if None in taken:
        return None
    parts = [[part for _, part in one] for one in taken]
    axes = [axis for axis, of in enumerate(zip(*parts)) if any(part != of[0] for part in of)]
    if len(nodes) == 1:
        axes = [axis for axis, part in enumerate(parts[0]) if type(part) is int][:1]
    if len(axes) != 1 or any(type(one[axes[0]]) is not int for one in parts):
        return None
    (axis,) = axes
    places = tuple(one[axis] % int(tensor.shape[axis]) for one in parts)
    return Slices(sources[0], None, places, axis, (*parts[0][:axis], *parts[0][axis + 1 :]))


def _rows_of_one(source: Node, item: slice) -> tuple[Node, int, int] | None:
    """W[e * rows : (e + 1) * rows]."""
    start, stop = item.start or 0, edit.tensor_value(source).shape[0] if item.stop is None else item.stop
    if not (isinstance(start, int) and isinstance(stop, int)) or item.step not in (None, 1):
        return None
    rows = stop - start
    return (source, rows, start // rows) if rows > 0 and start % rows == 0 else None


def _is_double(node: Any) -> bool:
    return isinstance(node, Node) and node.target is operator.getitem and isinstance(node.args[1], tuple)


def _flatten_args(node: Node) -> list[Any]:
    out: list[Any] = []

    def visit(value: Any) -> None:
        if isinstance(value, (tuple, list)):
            out.append(len(value))
            for v in value:
                visit(v)
        elif isinstance(value, dict):
            for key in sorted(value):
                out.append(key)
                visit(value[key])
        elif isinstance(value, slice):
            visit((value.start, value.stop, value.step))
        else:
            out.append(value)

    visit(node.args)
    visit(node.kwargs)
    return out


def _differ(nodes: Sequence[Node], how: str) -> RaiseError:
    return RaiseError(
        f"the experts of a loop {how}",
        where=edit.place(nodes[0]),
        hint="experts must be one function of different parameters",
    )
