"""Build the dropless form of a region: route, dispatch, grouped ops on sorted rows, combine.

The raise passes find roles in the user's code and call these; what the dialect looks like is decided here only.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence

import sympy
import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from moefx.errors import RaiseError
from moefx.ir import edit, regions
from moefx.ir.op import decide_same, expr, value
from moefx.ir.ops.per_expert import call_per_expert, per_expert
from moefx.ir.ops.regions import stack_experts
from moefx.ir.text import path_of

_ops = torch.ops.moefx


class Rows:
    """Nodes emitted for rows that stand in the order of their experts. Every method inserts where the graph's insert
    point stands. counts: the rows of every expert [E]; like: a tensor with as many rows. on_one_axis: whether
    the rows of all experts stand on the first axis."""

    on_one_axis = True

    def __init__(self, gm: GraphModule, mode: object, prefix: str) -> None:
        self.gm, self.mode, self.prefix = gm, mode, prefix
        self._params: list[Node] = []
        self._core: list[Node] = []
        self._sources: dict[tuple, Node] = {}
        self.counts: Node
        self.like: Node

    def _call(self, op, *args, name: str) -> Node:
        return edit.valued(edit.call(self.gm.graph, op, *args, name=f"{self.prefix}_{name}"), self.mode)

    def method(self, method: str, x: Node, *args, **kwargs) -> Node:
        """A method call on one node (other node arguments allowed)."""
        return edit.valued(self.gm.graph.call_method(method, (x, *args), kwargs), self.mode)

    def cast(self, x: Node, dtype: torch.dtype | None) -> Node:
        """x in a dtype; None: in its own."""
        return x if dtype in (None, edit.tensor_value(x).dtype) else self.method("to", x, dtype)

    def with_ones(self, x: Node, number: int) -> Node:
        """x [..] as [.., 1, 1], with so many ones."""
        for _ in range(number):
            x = self.method("unsqueeze", x, -1)
        return x

    def autocast(self, x: Node, dtypes: Mapping[str, torch.dtype]) -> Node:
        """What torch's autocast, to these dtypes by kind of device, does to an argument of a matmul."""
        found = edit.tensor_value(x)
        return self.cast(x, dtypes.get(found.device.type)) if found.dtype.is_floating_point else x

    def emit_call(self, function, *args, **kwargs) -> Node:
        return edit.valued(edit.call(self.gm.graph, function, *args, **kwargs), self.mode)

    def emit(self, like: Node, *args) -> Node:
        """The op of `like` with other arguments."""
        return self.method(like.target, *args) if like.op == "call_method" else self.emit_call(like.target, *args)

    def stacked(self, tensors: Sequence[Node], dim: int = -1) -> Node:
        """The tensors as columns, [..] -> [.., n], or along another new dim."""
        return self.emit_call(torch.stack, list(tensors), dim)

    def on_weights(self, node: Node, mapping: dict[Node, Node], weights: set[Node]) -> Node:
        """An op of one expert on mapped arguments, for every expert: what its arguments in `weights` are mapped to has
        the experts in front."""
        path = f"torch.Tensor.{node.target}" if node.op == "call_method" else path_of(node.target)
        if path is None:
            raise RaiseError(f"{node.name} of a weight has no name to call it by", where=edit.place(node),
                             hint="compute weights by ops of torch")  # fmt: skip
        args, kwargs = call_per_expert(path, weights, node.args, node.kwargs), node.kwargs
        args, kwargs = map_arg((args, kwargs), mapping.__getitem__)
        try:
            return self.emit_call(per_expert, *args, **kwargs)
        except (RuntimeError, ValueError) as error:
            raise RaiseError(f"{path} of a weight cannot be done for all experts at once ({error})",
                             where=edit.place(node), hint="use other ops of torch") from error  # fmt: skip

    def copy(self, node: Node, mapping: dict[Node, Node], args: tuple | None = None,
             kwargs: dict | None = None) -> Node:  # fmt: skip
        """The same op on mapped arguments; args, kwargs: others than the node has, to be mapped."""
        given = (node.args, node.kwargs) if args is None else (args, kwargs)
        args, kwargs = map_arg(given, mapping.__getitem__)
        name = "_".join(filter(None, (self.prefix, edit.base_name(node.name))))
        new = self.gm.graph.create_node(node.op, node.target, args, kwargs, name)
        new.meta = {key: found for key, found in node.meta.items() if key not in ("val", "example_value")}
        return edit.valued(new, self.mode)

    def stack(self, params: tuple[Node, ...]) -> Node:
        """The parameters of all experts as one; emitted right behind the inputs, once."""
        if ("stack", params) not in self._sources:
            last = self.gm.graph.find_nodes(op="placeholder")[-1]
            with self.gm.graph.inserting_after(last):
                self._sources["stack", params] = self._call(stack_experts, list(params), name="stack")
        return self._sources["stack", params]

    def linear(self, rows: Node, weight: Node, transposed: bool, bias: Node | None = None) -> Node:
        shapes = [tuple(edit.tensor_value(n).shape[1:]) for n in (rows, weight)]
        fits = len(shapes[0]) > 0 and len(shapes[1]) == 2
        if not fits or decide_same(shapes[0][-1], shapes[1][0 if transposed else 1]) is False:
            raise RaiseError(f"rows of shape {shapes[0]} are multiplied by an expert's weight of shape {shapes[1]}",
                             where=edit.place(rows), hint="multiply rows [n, .., D] by a matrix")  # fmt: skip
        rows = self.cast(rows, edit.tensor_value(weight).dtype)
        rest = () if bias is None else (bias,)
        node = self._call(_ops.grouped_linear.default, rows, weight, self.counts, transposed, *rest, name="linear")
        self._core.append(node)
        self._params.extend((weight, *rest))
        return node

    def expert_rows(self, param: Node) -> Node:
        """The entry of a per-expert parameter for every row."""
        pairs = self.method("size", self.like, 0)
        node = self._call(_ops.expert_rows.default, param, self.counts, pairs, name="expert_rows")
        self._core.append(node)
        self._params.append(param)
        return node

    def beside(self, rows_dims: int, param: Node) -> Node:
        """A per-expert parameter, to be broadcast against rows of so many dims as that of one expert is."""
        entry, out = tuple(edit.tensor_value(param).shape[1:]), self.expert_rows(param)
        while len(entry) >= rows_dims and entry[0] == 1:
            entry, out = entry[1:], self.method("squeeze", out, 1)
        if len(entry) >= rows_dims:
            raise RaiseError(f"{param.name} gives an expert's rows several numbers each", where=edit.place(param),
                             hint="use matmuls, or one number per row and column")  # fmt: skip
        for _ in range(rows_dims - 1 - len(entry)):
            out = self.method("unsqueeze", out, 1 if entry else -1)
        return out


class Region(Rows):
    """One routing and the nodes emitted for it. pairs: every choice is a token of its own, with its own result.
    inside: where samples [L, D] are routed, a tensor of all of them, and the first axis of their tokens and the one
    behind the last: each token is routed as its sample is."""

    def __init__(self, gm: GraphModule, idx: Node, experts: int, k: int, *, pairs: bool = False,
                 inside: tuple[Node, int, int] | None = None) -> None:  # fmt: skip
        self.pairs, self.repeats, k = pairs, k if pairs else 1, 1 if pairs else k
        self.number = regions.next_region(gm)
        super().__init__(gm, edit.tensor_value(idx).fake_mode, f"r{self.number}")
        self.experts, self.k = experts, k
        samples, first, last = inside or (idx, 0, 0)
        self.inside = [self.method("size", samples, axis) for axis in range(first, last)]
        self._numbers: dict[Node, tuple[Node, ...]] = {}  # what was made of numbers of experts -> these
        self._given: dict[Node, Node] = {}  # what was shaped to one row per token -> as the user's code has it
        self.routed_dims = edit.tensor_value(idx).dim()
        self.given_idx = idx = self.of_each(idx)
        if edit.tensor_value(idx).dim() != 2 or edit.tensor_value(idx).shape[1] != k:
            idx = self.method("reshape", idx, -1, k)
        self.idx = idx
        routed = self._call(_ops.route.default, idx, experts, name="route")
        self.perm = self.like = edit.call(gm.graph, operator.getitem, routed, 0, name=f"{self.prefix}_perm")
        self.counts = edit.call(gm.graph, operator.getitem, routed, 1, name=f"{self.prefix}_counts")
        self.perm.meta["val"], self.counts.meta["val"] = routed.meta["val"]

    def dispatch(self, x: Node) -> Node:
        """Rows of `x` [T, ...] in expert order; one dispatch per tensor."""
        if ("dispatch", x) not in self._sources:
            self._check_routed(x)
            self._sources["dispatch", x] = self._call(_ops.dispatch.default, x, self.perm, self.k, name="dispatch")
        return self._sources["dispatch", x]

    def _check_routed(self, x: Node) -> None:
        """x has a row for every routed token, which code that reads both by indices alone does not ask for."""
        have, want = edit.tensor_value(x).shape[0], edit.tensor_value(self.idx).shape[0]
        self._use_same_sizes(expr(have), expr(want))
        if decide_same(have, want) is False:
            raise RaiseError(f"{x.name} has {have} rows, but {want} are routed", where=edit.place(x),
                             hint="route as many tokens as there are")  # fmt: skip
        row = edit.tensor_value(x).shape[1:]  # of one dim: what a block is given alone may have other features
        if len(row) > 1 and any(not expr(size).is_number for size in row):
            raise RaiseError(f"rows of {x.name} have a size that may differ from rank to rank", where=edit.place(x),
                             hint="keep the features on the last dim of what is routed, [.., D]")  # fmt: skip

    def _use_same_sizes(self, have: sympy.Expr, want: sympy.Expr) -> None:
        """[B, S, ..] of one input and [B, S, ..] of another, both taken as [B * S, ..]: then they are equal one by one,
        and not only their products."""
        inputs = self.gm.graph.find_nodes(op="placeholder")
        sizes = {expr(s): s for n in inputs if edit.tensor_value(n) is not None for s in edit.tensor_value(n).shape}
        if not (have.is_Mul and want.is_Mul and have != want and {*have.args, *want.args} <= sizes.keys()):
            return
        mine, others = ([size for size in sizes if size in product.args] for product in (have, want))
        for size in mine:
            same = next((other for other in others if decide_same(sizes[size], sizes[other])), None)
            others = [other for other in others if other is not same]

    def of_each(self, x: Node) -> Node:
        """x [.., K], one of what is routed, as one of each token inside of it, [.., L, K]. Without K: of one choice."""
        if self.inside and edit.tensor_value(x).dim() < self.routed_dims:
            x = self.shaped(x, "unsqueeze", -1)
        for size in self.inside:
            x = self.shaped(x, "unsqueeze", -2)
            dims = [-1] * (edit.tensor_value(x).dim() - 2)
            x = self.shaped(x, "expand", *dims, size, -1)
        return x

    @property
    def token_dims(self) -> int:
        """How many dims the user's code numbers the tokens by: those of the routing [.., K] without the choices."""
        return edit.tensor_value(self.given_idx).dim() - 1

    def per_token(self, x: Node, flat: bool = False) -> Node:
        """x [.., D], numbered as the routing, as [T, D]; flat: it has its tokens on one axis already."""
        dims = 1 + len(self.inside) if flat else self.token_dims
        if dims > 1:
            x = self.shaped(x, "flatten", 0, dims - 1)
        return x if self.repeats == 1 else self.shaped(x, "repeat_interleave", self.repeats, 0)

    def of_chosen(self, scores: Node, some: bool = False) -> Node:
        """Scores [.., E] of all experts -> those of the chosen ones [T, K]. some: ids may name nobody."""
        dims = edit.tensor_value(scores).dim()
        flat = scores if dims == 2 else self.shaped(scores, "flatten", 0, dims - 2)
        last = edit.tensor_value(scores).shape[-1] - 1
        return self.shaped(flat, "gather", 1, self.shaped(self.idx, "clamp", 0, last) if some else self.idx)

    def numbers(self, of_experts: Sequence[Node], some: bool = False) -> Node:
        """A number of every expert, for every pair in expert order [T*K]. some: ids may name nobody."""
        idx = self.shaped(self.idx, "clamp", 0, len(of_experts) - 1) if some else self.idx
        chosen = self.emit_call(operator.getitem, self.stacked(of_experts), idx)
        self._numbers[chosen] = tuple(of_experts)
        return self.dispatch_choices(chosen)

    def as_given(self, rows: Node, like: Node, flat: bool = False) -> Node:
        """[T, D] with the dims in front that the user's code has; `like` has as many dims. flat: it has what is routed
        on one axis."""
        if flat and self.inside:
            return self.method("view", rows, -1, *self.inside, *_numbers(like, 1 + len(self.inside)))
        if flat or self.token_dims + self.pairs == 1:
            return rows
        sizes = [self.method("size", self.given_idx, dim) for dim in range(self.token_dims)]
        return self.method("view", rows, *sizes, *_numbers(like, self.token_dims))

    def shaped(self, x: Node, method: str, *args: object) -> Node:
        """x with one row per token; it still counts as what the region reads."""
        key = (method, x, *args)
        if key not in self._sources:
            self._sources[key] = self.method(method, x, *args)
            self._given[self._sources[key]] = x
        return self._sources[key]

    def dispatch_choices(self, choices: Node) -> Node:
        """A value per pair, [.., K] or in any other shape, in expert order [T*K]."""
        found = edit.tensor_value(choices)
        if found.dim() != 2 or expr(found.shape[1]) != self.k:
            choices = self.shaped(choices, "reshape", -1, self.k)
        if ("choices", choices) not in self._sources:
            self._check_routed(choices)
            self._sources["choices", choices] = self._call(
                _ops.dispatch_choices.default, choices, self.perm, name="choices"
            )
        return self._sources["choices", choices]

    def combine(self, rows: Node, weights: Node | None = None) -> Node:
        """Sum over the choices, times `weights` [T, K] if given. Rows that were just multiplied by a score are combined
        with the score instead."""
        scored = self._score_of(rows) if weights is None else None
        if scored is not None:
            rows, weights = scored
        return self._call(_ops.combine.default, rows, self.perm, self.k, weights, name="combine")

    def _score_of(self, rows: Node) -> tuple[Node, Node] | None:
        """`rows = y * dispatch_choices(w)[:, None]` -> (y, w)."""
        if rows.op not in ("call_function", "call_method") or len(rows.args) != 2:
            return None
        name = rows.target if rows.op == "call_method" else getattr(rows.target, "__name__", "")
        if name != "mul":
            return None
        scores = {n: key[1] for key, n in self._sources.items() if key[0] == "choices"}
        for y, score in (rows.args, rows.args[::-1]):
            inner = _without_new_axis(score)
            if inner in scores and isinstance(y, Node) and edit.tensor_value(y).dim() == 2:
                return y, scores[inner]
        return None

    @property
    def inputs(self) -> list[Node]:
        """The token-side values that the region reads: hidden states and scores."""
        found = [key[1] for key in self._sources if key[0] in ("dispatch", "choices")]
        while any(node in self._given for node in found):
            found = [self._given.get(node, node) for node in found]
        return [each for node in found for each in self._numbers.get(node, (node,))]

    def substitute(self, old: Node, new: Node) -> None:
        """`new` takes the place of `old`."""
        if "val" not in new.meta:
            new.meta["val"] = edit.tensor_value(old)
        edit.rewrite_uses(old, new)

    def finish(self) -> int:
        """Delimit the expert side; returns the region's number. Raises RaiseError if rows leak out of the region."""
        if not self._core:
            raise RaiseError(
                "a routing is used, but no expert's parameter depends on it", where=edit.place(self.idx),
                hint="use two experts or more, as a list of one looks like any other module; or a mesh with the dim "
                "'dp' only, on which every rank has the whole model",
            )  # fmt: skip
        rows = self._row_space()
        seeds = list(self._core)
        for node in self._core:
            if node.target is _ops.expert_rows.default:
                seeds.extend(node.users)
        inside = regions.hull(seeds)
        layout = regions.Layout(counts=self.counts)
        return regions.mark(self.gm, inside, dict.fromkeys(rows, layout), self._params, self.experts)

    def _row_space(self) -> set[Node]:
        """Every tensor with one entry per sorted row: what comes of dispatched values, up to the combine."""
        stop = (_ops.combine.default,)
        seen: set[Node] = set()
        stack = [n for key, n in self._sources.items() if key[0] in ("dispatch", "choices")] + self._core
        pairs = value(self.perm).shape[0]
        while stack:
            node = stack.pop()
            if node in seen:
                continue
            seen.add(node)
            if any(u.op == "output" for u in node.users):
                raise RaiseError("the model returns rows that stand in the order of their experts",
                                 where=edit.place(node), hint="return them in the order of the tokens")  # fmt: skip
            stack.extend(u for u in node.users if u.target not in stop)
        rows = set()
        for node in seen:
            found = edit.tensor_value(node)
            if found is None:
                continue
            if found.dim() == 0 or expr(found.shape[0]) != expr(pairs):
                raise RaiseError(
                    f"{node.name} mixes rows of different tokens or experts",
                    where=edit.place(node),
                    hint="between dispatch and combine every row must be computed from itself",
                )
            rows.add(node)
        return rows


def _numbers(node: Node, first: int) -> list[int | torch.SymInt]:
    """The sizes of a row, from a first dim on."""
    return [int(expr(size)) if expr(size).is_number else size for size in edit.tensor_value(node).shape[first:]]


def _without_new_axis(node: object) -> object:
    """x for x.unsqueeze(-1), x[:, None], x.view(-1, 1), x[..., None]."""
    if not isinstance(node, Node):
        return node
    item = node.args[1] if node.target is operator.getitem else None
    if item in ((slice(None), None), (Ellipsis, None)):
        return node.args[0]
    if node.op == "call_method" and node.target == "unsqueeze" and node.args[1] in (-1, 1):
        return node.args[0]
    if node.op == "call_method" and node.target in ("view", "reshape") and tuple(node.args[1:]) == (-1, 1):
        return node.args[0]
    casts = node.op == "call_method" and node.target in ("to", "type_as", "float")
    if casts and edit.tensor_value(node).dtype == edit.tensor_value(node.args[0]).dtype:
        return _without_new_axis(node.args[0])
    return node
