"""Write the branches of a loop over experts as one, on the rows of all experts.

Branch 0 is emitted with stacked parameters: linear -> grouped_linear, other uses of a per-expert parameter ->
expert_rows.
"""

from __future__ import annotations

import operator

import sympy
import torch
from torch import Tensor
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from moefx.analysis.recognition.branches import Branches
from moefx.analysis.recognition.roles import Body, Chosen, Count, Numbers, Part, Scores, Shared, Slices, Stack, Tokens
from moefx.analysis.recognition.routings import may_name_nobody
from moefx.analysis.recognition.row_ops import RowOps
from moefx.errors import MoefxError, RaiseError
from moefx.ir import edit, ragged
from moefx.ir.expert_weights import is_of_inputs, is_parameter
from moefx.ir.names import arg, called, op_name
from moefx.ir.op import value
from moefx.ir.shapes import einsum_terms, sizes

_ELEMENTWISE = {"add", "sub", "mul", "truediv", "div", "maximum", "minimum", "pow"}


class Emitter:
    """Emits branch 0 on rows of all experts. `stacked` holds the nodes of branch 0 that are emitted with a leading
    expert dim. (Not what is emitted: that may also stand for the weights of all experts as each of them reads them.)"""

    def __init__(self, region: ragged.Rows, branches: Branches, autocast: tuple) -> None:
        self.region, self.branches, self.autocast = region, branches, dict(autocast)
        self.new: dict[Node, Node] = {}
        self.stacked: set[Node] = set()
        self._of_rows = self._find_rows()
        self._rows = self._row_ops()

    def _find_rows(self) -> set[Node]:
        """The nodes of branch 0 that come of its tokens or of other inputs; the rest is computed of weights."""
        found: set[Node] = set()
        for node in self.branches.nodes:
            role = self.branches.roles.get(node)
            if isinstance(role, Shared):
                of_rows = is_of_inputs(node)
            elif role is None:
                of_rows = any(a in found for a in node.all_input_nodes)
            else:
                of_rows = isinstance(role, (Tokens, Part, Scores))
            if of_rows:
                found.add(node)
        return found

    def _row_ops(self) -> RowOps | None:
        """None: the rows of experts stand on several axes, or there are none."""
        if not self.region.on_one_axis:
            return None
        if self.branches.dense:
            return RowOps(self.region, sympy.prod(self._tokens))
        roles = self.branches.roles
        leaf = next((n for n in self.branches.nodes if isinstance(roles.get(n), (Tokens, Part))), None)
        return None if leaf is None else RowOps(self.region, sympy.prod(sizes(leaf)[: self.branches.row_dims]))

    def emit(self) -> Node:
        for node in self.branches.nodes:
            role = self.branches.roles.get(node)
            self.branches.enter_common_module(node)
            try:
                self.new[node] = self._leaf(node, role) if role is not None else self._op(node)
            except MoefxError:
                raise
            except (RuntimeError, LookupError, ArithmeticError, TypeError, ValueError) as error:
                raise RaiseError(f"{called(node)} of an expert cannot be done on the rows of all experts ({error})",
                                 where=edit.place(node), hint="write it for rows [n, D]; keep what mixes tokens, such "
                                 "as attention, outside of experts") from error  # fmt: skip
        return self.new[self.branches.rows[0]]

    def _leaf(self, node: Node, role: object) -> Node:
        region = self.region
        if isinstance(role, Shared):
            axes = self._axes_of_tokens(node)
            return region.dispatch(region.per_token(node, flat=axes < len(self._tokens))) if axes else node
        if isinstance(role, (Body, Chosen)):
            return node
        if isinstance(role, Count):
            return region.method("size", region.like, 0)
        if isinstance(role, Part):
            return role.x
        if isinstance(role, Tokens):
            return region.dispatch(region.per_token(role.x, role.flat))
        if isinstance(role, Scores):
            some = may_name_nobody(region.given_idx)
            scores = region.of_each(role.read(region))
            score = region.dispatch_choices(region.of_chosen(scores, some) if role.dense else scores)
            return region.with_ones(score, role.ones)
        if isinstance(role, Numbers):
            return self._number_of_rows(node, role)
        assert isinstance(role, (Slices, Stack))
        if isinstance(role, Stack) and not is_parameter(role.params[0]):
            return self._weight(node, region.stacked(role.params, 0))  # of buffers
        return self._weight(node, self._slices(role) if isinstance(role, Slices) else region.stack(role.params))

    def _slices(self, role: Slices) -> Node:
        """What all experts read of one weight, [E, ..]."""
        region, places = self.region, list(role.places)
        stacked = region.method("movedim", role.param, role.axis, 0) if role.axis else role.param
        if any(other != slice(None) for other in role.others):
            stacked = region.emit_call(operator.getitem, stacked, (slice(None), *role.others))
        shape, step = edit.tensor_value(stacked).shape, places[1] - places[0] if len(places) > 1 else 1
        if role.rows is not None:
            return region.method("view", stacked, (-1, role.rows, *shape[1:]))
        if places == list(range(shape[0])):
            return stacked
        if step > 1 and places == list(range(places[0], shape[0], step)) and shape[0] == step * len(places):
            every = region.method("unflatten", stacked, 0, (-1, step))
            return region.emit_call(operator.getitem, every, (slice(None), places[0]))
        if places == list(range(len(places))):
            return region.method("narrow", stacked, 0, 0, len(places))  # it has some more that nobody reads
        return region.emit_call(operator.getitem, stacked, places)

    def _weight(self, node: Node, new: Node) -> Node:
        """`new` [E, ..] is what is emitted for a node."""
        self.stacked.add(node)
        return new

    def _number_of_rows(self, node: Node, role: Numbers) -> Node:
        """[R, 1], or [R] where it meets no more than one number per row; [E] where it meets weights."""
        users = [user for user in node.users if user in self.branches.members]
        if not any(user in self._of_rows for user in users):
            return self._weight(node, self.region.stacked(role.nodes))
        if not isinstance(self.region, ragged.Region):
            raise RaiseError(f"{op_name(node)} gives a different number for every expert", where=edit.place(node),
                             hint="pick the tokens of every expert by torch.where(idx == e)")  # fmt: skip
        results = [found for user in users for found in tree_leaves(value(user)) if isinstance(found, Tensor)]
        dims = {found.dim() for found in results}
        if not dims <= {1, 2} or len(dims) > 1:
            raise RaiseError(f"{op_name(node)} gives a number for every expert, which meets tensors of several shapes",
                             where=edit.place(node), hint="multiply the rows [n, D] with it")  # fmt: skip
        numbers = self.region.numbers(role.nodes, may_name_nobody(self.region.given_idx))
        return self.region.with_ones(numbers, int(dims != {1}))

    @property
    def _tokens(self) -> tuple[sympy.Expr, ...]:
        """How many tokens there are, along every axis of the routing."""
        return sizes(self.region.given_idx)[: self.region.token_dims]

    def _axes_of_tokens(self, node: Node) -> int:
        """In a dense loop the experts read whole tensors of the tokens, which have them on these many axes; else 0."""
        source = node.meta.get("moefx")
        if not self.branches.dense or edit.tensor_value(node) is None or (
                node.op == "placeholder" and source is not None and source.kind != "input"):  # fmt: skip
            return 0
        tokens, found = self._tokens, sizes(node)
        if found[: len(tokens)] == tokens:
            return len(tokens)
        return int(found[:1] == (sympy.prod(tokens),))

    def _of_chosen(self, node: Node) -> Node:
        """x * mask: of the tokens that chose the expert, x."""
        rest = [a for a in node.args if not isinstance(self.branches.roles.get(a), Chosen)]
        if op_name(node) != "mul" or len(rest) != 1 or not isinstance(rest[0], Node):
            raise RaiseError(f"{called(node)} of an expert reads where tokens chose it", where=edit.place(node),
                             hint="multiply tokens by the mask, or leave it out: weigh what experts give")  # fmt: skip
        return self.region.cast(self.new[rest[0]], edit.tensor_value(node).dtype)

    def _op(self, node: Node) -> Node:
        """The op on all rows; where it takes a per-expert parameter, its grouped form."""
        name = op_name(node)
        if any(isinstance(self.branches.roles.get(a), Chosen) for a in node.all_input_nodes):
            return self._of_chosen(node)
        per_expert = [a in self.stacked for a in node.all_input_nodes]
        if not any(per_expert):
            if self._rows is None or node not in self._of_rows:
                return self.region.copy(node, self.new)
            return self._rows.copy(node, self.new, self._of_rows)
        if node not in self._of_rows:
            return self._on_weights(node, name)
        if name in ("to", "type_as") and per_expert == [True, False]:  # of the rows' dtype
            return self._weight(node, self.region.method("to", self.new[node.args[0]], edit.tensor_value(node).dtype))
        if name in ("linear", "matmul", "mm", "mv", "addmm"):
            return self._linear(node, name)
        out = edit.tensor_value(node)
        dims = None if out is None else out.dim() - self.branches.row_dims
        if name in ("layer_norm", "rms_norm") or (name == "group_norm" and dims == 1):
            return self._norm(node, name)
        if name == "prelu" and dims == 1:
            return self._prelu(node)
        if name == "einsum":
            return self._einsum(node)
        if any(edit.body_of(a) is not None for a in node.all_input_nodes) and self._takes_numbers(node):
            return self.region.copy(node, self.new | {a: self._rows_of(a, node) for a in node.all_input_nodes})
        if name in _ELEMENTWISE and len(node.args) == 2 and not node.kwargs:
            args = [self._rows_of(a, node) for a in node.args]
            return self.region.emit(node, *args)
        raise self._refused(node)

    def _takes_numbers(self, node: Node) -> bool:
        """Whether all that an op takes of an expert's own is one number each."""
        own = [edit.tensor_value(a) for a in node.all_input_nodes if a in self.stacked]
        return all(found is not None and found.dim() == 0 for found in own)

    def _on_weights(self, node: Node, name: str) -> Node:
        """An op on what an expert has of its own, done for all experts at once."""
        if (
            name in ("t", "T")
            or (name == "getattr" and node.args[1] in ("T", "mT"))
            or (name in ("transpose", "mT") and edit.tensor_value(node).dim() == 2)
        ):
            return self._weight(node, self.region.method("transpose", self.new[node.args[0]], -2, -1))
        is_piece = name == "getitem" and edit.tensor_value(node.args[0]) is None  # of a chunk
        if is_piece or name in ("to", "float", "half", "bfloat16", "contiguous", "type_as"):
            return self._weight(node, self.region.copy(node, self.new))
        return self._weight(node, self.region.on_weights(node, self.new, self.stacked))

    def _linear(self, node: Node, name: str) -> Node:
        bias = None
        if name == "addmm":
            bias, rows, weight = node.args
        else:
            rows, weight = node.args[0], arg(node, 1, "weight")
            bias = arg(node, 2, "bias") if name == "linear" else None
        if not {rows, weight} & self.stacked and weight.op == "placeholder":
            raise RaiseError(f"all experts share the weight {weight.name}", where=edit.place(node),
                             hint="give every expert one of its own, or multiply by it before the experts")  # fmt: skip
        if rows in self.stacked or weight not in self.stacked:
            raise RaiseError(
                f"{name} multiplies a parameter by rows",
                where=edit.place(node),
                hint="write rows @ weight or F.linear(rows, weight)",
            )
        return self._product(self.new[rows], self.new[weight], name != "linear", bias)

    def _product(self, rows: Node, weight: Node, transposed: bool, bias: Node | None = None) -> Node:
        """Rows times [E, I, O], or [E, O, I] if not `transposed`, or [E, I]. bias: the node of branch 0."""
        per_expert = bias in self.stacked
        if edit.tensor_value(weight).dim() == 2 and bias is None:
            column = self.region.method("unsqueeze", weight, -1)
            return self.region.method("squeeze", self._product(rows, column, True), -1)
        if weight.target == "transpose" and tuple(weight.args[1:]) == (-2, -1):
            weight, transposed = weight.args[0], not transposed
        rows, weight = (self.region.autocast(each, self.autocast) for each in (rows, weight))
        bias = None if bias is None else self.region.autocast(self.new[bias], self.autocast)
        if bias is None or per_expert:
            return self.region.linear(rows, weight, transposed, bias)
        return self.region.emit_call(operator.add, self.region.linear(rows, weight, transposed), bias)

    def _norm(self, node: Node, name: str) -> Node:
        """A norm with its own scale (and shift) per expert: the plain norm, then scale and shift per row."""
        names = ("weight",) if name == "rms_norm" else ("weight", "bias")
        affine = [(i + 2, n, arg(node, i + 2, n)) for i, n in enumerate(names)]
        plain_args = [*node.args[:2], *[None] * len(names), *node.args[2 + len(names) :]]
        kwargs = {k: v for k, v in node.kwargs.items() if k not in names}
        out = self.region.emit_call(
            node.target, *[self.new.get(a, a) if isinstance(a, Node) else a for a in plain_args], **kwargs
        )
        for function, (_, _, param) in zip((operator.mul, operator.add), affine):
            if isinstance(param, Node):
                out = self.region.emit_call(function, out, self._rows_of(param, node))
        return out

    def _einsum(self, node: Node) -> Node:
        """One of rows [.., D] and of a matrix, or a vector, of every expert."""
        terms, _ = einsum_terms(node) or ((), "")
        rows, weight = sorted(terms, key=lambda term: term.node in self.stacked) if len(terms) == 2 else (None, None)
        if rows is None or rows.node in self.stacked or rows.node not in self._of_rows:
            raise self._refused(node)
        out = node.args[0].split("->")[1]
        lead, summed = rows.all_letters[:-1], rows.all_letters[-1:]
        made = weight.all_letters.replace(summed, "")
        plain = len(lead) >= self.branches.row_dims and len(made) < 2 and made not in tuple(lead)
        if not plain or summed not in tuple(weight.all_letters) or out != lead + made:
            raise self._refused(node)
        return self._product(self.new[rows.node], self.new[weight.node], weight.all_letters[0] == summed)

    def _refused(self, node: Node) -> RaiseError:
        return RaiseError(
            f"{called(node)} takes a parameter of one expert",
            where=edit.place(node),
            hint="linear, matmul, norms, elementwise ops and einsums of rows [n, .., D] and a parameter are understood",
        )

    def _prelu(self, node: Node) -> Node:
        """[R, D]; the parameter is [1] or [D]."""
        x = self.new[node.args[0]]
        below = self.region.emit_call(operator.mul, x, self._rows_of(node.args[1], node))
        return self.region.emit_call(torch.where, self.region.emit_call(operator.gt, x, 0), x, below)

    def _rows_of(self, argument: object, out: Node) -> object:
        """A per-expert parameter as one entry per row, ready to broadcast against the rows that `out` is made of; other
        arguments as mapped."""
        if not isinstance(argument, Node):
            return argument
        new = self.new[argument]
        if argument not in self.stacked:
            return new
        rows = [edit.tensor_value(self.new[a]) for a in out.all_input_nodes if a in self._of_rows]
        return self.region.beside(max(each.dim() for each in rows), new)
