"""Raise experts whose weights are gathered, one copy for every token and choice, for batched matmuls.

Contract
    takes  MOE   canonical
    gives  MOE   reads W[ids] of parameters by chosen experts, and all that is computed of them until the choices of a
                 token are added up, became grouped ops on rows sorted by expert
    never  changes the router; what is computed of a pair (token, choice) and anything else than this token, the weights
           of this expert and numbers of this pair is refused

Pseudo-code
    1. find reads param[ids], ids from top-k, argmax or a sort; group them by routing
    2. walk over what depends on them. A value with dims [T, K] or [T*K] in front has one row [d] per pair, whatever
       axes of size one stand around it: views do nothing; a vector times the matrix of its pair is grouped_linear,
       bias[ids] expert_rows, a tensor of the tokens dispatch, a number per pair dispatch_choices, the sum over the
       choices combine; other ops are done on the rows if they act on single entries or on the last dim
    3. where ids are [T], nothing is added up: the rows go back to their tokens behind the last op that reads weights,
       or where they are multiplied by a number per token behind it

    (einsum("td,tkdf->tkf", x, W[ids]) * w[..., None]).sum(1)  ->  combine(grouped_linear(dispatch(x), W), weights=w)
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from moefx.analysis.checking.raising import Candidate, Raising
from moefx.analysis.recognition import einsums, gathered_weights, gathers
from moefx.analysis.recognition.gathers import Read, read_of
from moefx.analysis.recognition.pair_rows import PairRows, refused
from moefx.analysis.recognition.pairs import Pairs
from moefx.context.pass_types import PassContext, PassResult
from moefx.ir import edit, ragged
from moefx.ir.dim_indexing import items
from moefx.ir.dims import CASTS, axes_of, is_pointwise, is_reshape
from moefx.ir.names import arg, op_name
from moefx.ir.op import value
from moefx.ir.shapes import Term, einsum_terms, features, sizes

_ON_LAST = {"chunk": 2, "split": 2, "softmax": 1, "log_softmax": 1, "glu": 1, "layer_norm": None, "rms_norm": None}
_ZEROS = ("zeros_like", "zeros", "new_zeros")


def run(gm: GraphModule, ctx: PassContext) -> PassResult:
    result = PassResult()
    gathered_weights.compute_before(gm, result)
    einsums.by_pairs(gm, lambda node: read_of(node) is not None, result)
    raising = Raising(gm, ctx, result)
    for origin, all_reads in _find(gm).items():
        if not raising.wants(origin):
            continue
        idx, changes = _with_choices(gm, origin, all_reads), []
        with raising.candidate(origin) as check:
            for reads in _stages(idx, all_reads):
                layer, place = _Layer(gm, idx, reads, ctx.autocast), edit.place(reads[0].node)
                number = layer.rewrite(check)
                inputs = [*layer.values.region.inputs, *layer.values.bases]
                for old, new in layer.values.results.items():
                    check.compare(old, new, idx, inputs, layer.experts)
                changes.append(f"region {number}: {layer.experts} experts, weights gathered ({place})")
            result.changes += changes
    return result


def _stages(idx: Node, reads: list[Read]) -> list[list[Read]]:
    """Reads that are multiplied by what tokens became after the choices were added up are regions of their own."""
    pairs, found = Pairs(idx), []
    while reads and pairs.k != 1:
        first = [r for r in reads if not any(_follows(r, other, pairs) for other in reads if other is not r)]
        if not first:
            break
        found.append(first)
        reads = [r for r in reads if r not in first]
    return [*found, reads] if reads else found


def _follows(read: Read, before: Read, pairs: Pairs) -> bool:
    """Whether what is read is used with what comes of the other, but with nothing that is still one for each pair."""
    later, still, stack = edit.descendants([before.node]), {before.node}, [before.node]
    while stack:
        for user in stack.pop().users:
            if user not in still and (edit.tensor_value(user) is None or pairs.front(user) is not None):
                still.add(user)
                stack.append(user)
    uses = [user for user in read.node.users if user in later and user is not before.node]
    return bool(uses) and not any(a in still for user in uses for a in user.all_input_nodes)


def _find(gm: GraphModule) -> dict[Node, list[Read]]:
    """The reads of every routing that reads matrices, or vectors that are multiplied by tokens."""
    found: dict[tuple, list[Read]] = {}
    for node in gm.graph.nodes:
        read = gathers.read_of(node)
        if read is not None and gathers.is_routing(read):
            origin = read.origin  # ids[:, 0] may be taken again for every read
            found.setdefault((origin.target, str(origin.args), str(origin.kwargs)), []).append(read)
    return {reads[0].origin: reads for reads in found.values() if any(r.is_matrix or _is_key(r.node) for r in reads)}


def _is_key(node: Node) -> bool:
    """Whether the product of every read vector and a token is taken: W[ids] @ x[:, :, None]."""
    products = [user for user in node.users if op_name(user) in ("bmm", "matmul") and user.args[0] is node]
    return any(sizes(product)[-1] == 1 for product in products)


def _with_choices(gm: GraphModule, origin: Node, reads: list[Read]) -> Node:
    """ids as [.., K]: if every token has one choice, [..], they get the axis, and the reads take it off again."""
    if gathers.has_choice_axis(origin):
        return origin
    first = {_next_to_origin(read): read.origin for read in reads}
    with edit.at(origin, after=True):
        emit = ragged.Rows(gm, edit.tensor_value(origin).fake_mode, "")
        idx = emit.method("unsqueeze", origin, -1)
        flat = emit.method("squeeze", idx, -1)
    for node, ids in first.items():
        node.replace_input_with(ids, flat)
    return idx


def _next_to_origin(read: Read) -> Node:
    """The node on the way to a read that takes the ids themselves."""
    node, ids = read.node, read.ids
    while ids is not read.origin:
        node, ids = ids, ids.args[0]
    return node


@dataclass
class _Matrices:
    """What a read of matrices became: the parameter of all experts [E, a, b]; turned: the user's code sees [b, a]."""

    param: Node
    turned: bool = False


class _Layer:
    """One routing: what the values of its pairs in the user's code become."""

    def __init__(self, gm: GraphModule, idx: Node, reads: list[Read], autocast: tuple) -> None:
        self.gm, self.idx, self.reads = gm, idx, {read.node: read for read in reads}
        self.pairs, self.experts = Pairs(idx), int(sizes(reads[0].param)[0])
        self.matrices: dict[Node, _Matrices] = {}
        self.extent = gathers.extent(self.pairs, reads) if self.pairs.k == 1 else set(gm.graph.nodes)
        with edit.at(reads[0].node):
            self.values = PairRows(ragged.Region(gm, idx, self.experts, self.pairs.k), self.pairs, autocast)

    def rewrite(self, check: Candidate) -> int:
        old = [n for n in self.gm.graph.nodes if n in self.extent]
        for node in old:
            with edit.at(node):
                if node in self.reads:
                    self._read(self.reads[node])
                elif any(a in self.values.rows or a in self.matrices for a in node.all_input_nodes):
                    self._op(node)
        for node in old if self.pairs.k == 1 else ():
            if node in self.values.rows and any(u not in self.extent for u in node.users):
                with edit.at(node, after=True):
                    self.values.end(node, self.values.rows[node])
        check.sweep()
        self._check_gone()
        return self.values.region.finish()

    def _check_gone(self) -> None:
        mine = {*self.values.rows, *self.matrices}
        for node in self.gm.graph.nodes:
            if node in mine:
                raise refused(next((u for u in node.users if u not in mine), node), "is not an op on vectors of pairs")

    def _read(self, read: Read) -> None:
        """param[ids]"""
        kinds = len(features(sizes(read.param)[1:]))
        if sizes(read.param)[0] != self.experts or kinds > 2 or (kinds == 2 and len(sizes(read.param)) != 3):
            raise refused(read.node, "reads no matrix and no vector of every expert")
        if kinds == 2:
            self.matrices[read.node] = _Matrices(read.param)
            return
        new = self.values.region.expert_rows(read.param)
        if len(sizes(new)) != 2:
            new = self.values.region.method(*(("unsqueeze", new, -1) if len(sizes(new)) == 1 else ("flatten", new, 1)))
        self.values.keep(read.node, new)

    def _op(self, node: Node) -> None:
        name, source = op_name(node), node.args[0] if node.args else None
        if isinstance(value(node), (torch.Size, torch.SymInt, int)):
            return
        elif name in ("bmm", "matmul", "baddbmm"):
            self._matmul(node)
        elif name == "einsum":
            self._einsum(node)
        elif source in self.matrices:
            self._view_matrices(node, self.matrices[source])
        elif name == "sum":
            self._sum(node)
        elif name in ("index_add", "index_add_"):
            self._index_add(node)
        elif name == "getitem":
            self._getitem(node, *node.args)
        elif is_reshape(node) or self._permutes_tail(node):
            self.values.keep(node, self.values.rows[source])
        elif name in _ON_LAST:
            self._on_last(node, _ON_LAST[name])
        elif is_pointwise(name):
            self.values.on_entries(node)
        else:
            raise refused(node, "is not understood")

    def _permutes_tail(self, node: Node) -> bool:
        axes, front = axes_of(node), self.pairs.front(node.args[0])
        return axes is not None and front is not None and axes[:front] == list(range(front))

    def _view_matrices(self, node: Node, of: _Matrices) -> None:
        before = features(self.pairs.tail(node.args[0]))
        param, turned = of.param, of.turned
        if op_name(node) in CASTS:
            param = self.values.copy(node, {node.args[0]: param})
        elif self._permutes_tail(node):
            shape = sizes(node.args[0])
            order = [a for a in axes_of(node)[self.pairs.front(node.args[0]) :] if shape[a] != 1]
            turned ^= order != sorted(order)
            before = tuple(shape[a] for a in order)
        elif not is_reshape(node):
            raise refused(node, "of gathered weights is not understood")
        if self.pairs.front(node) is None or features(self.pairs.tail(node)) != before:
            raise refused(node, "of gathered weights does not keep the matrices")
        self.matrices[node] = _Matrices(param, turned)

    def _linear(self, vector: Node, of: _Matrices, contracted: int) -> Node:
        """contracted: which dim of the matrices, 0 or 1, as the user's code sees them."""
        vector, param = self.values.autocast(vector), self.values.autocast(of.param)
        return self.values.region.linear(vector, param, contracted == int(of.turned))

    def _matmul(self, node: Node) -> None:
        """A vector of every pair times its matrix, from the left or from the right."""
        *addend, a, b = node.args
        is_add = op_name(node) == "baddbmm"
        if node.kwargs or len(addend) != int(is_add):
            raise refused(node, "takes arguments that are not understood")
        if a in self.values.rows and b not in self.values.rows and b not in self.matrices and sizes(b)[-1] == 1:
            return self._inner(node, a, b)
        if a not in self.matrices and b not in self.matrices:
            return self._weigh(node, a, b)
        front, dims, on_left = self.pairs.front(node), len(sizes(node)), b in self.matrices
        vector, matrices = (a, b) if on_left else (b, a)
        is_vector = vector not in self.matrices and sizes(vector)[-2 if on_left else -1] == 1
        tail = self.pairs.tail(matrices)
        if not is_vector or front is None or len(tail) > dims - front or 1 in tail[-2:]:
            raise refused(node, "does not multiply one vector by one matrix for every pair")
        new = self._linear(self.values.vector(vector, front, dims), self.matrices[matrices], 0 if on_left else 1)
        if is_add:
            new = self.values.region.emit_call(operator.add, new, self.values.vector(addend[0], front, dims))
        return self.values.keep(node, new)

    def _inner(self, node: Node, y: Node, x: Node) -> None:
        """[T, K, D] @ [T, D, 1]: the product of a vector of every pair and its token."""
        plain = self.pairs.plain(x)
        if plain is None or self.pairs.front(y) != len(sizes(y)) - 1:
            raise refused(node, "does not multiply one vector by its token for every pair")
        rows = self.values.autocast(self.values.rows[y]), self.values.autocast(self.values.token(plain))
        product = self.values.region.emit_call(operator.mul, *rows)
        self.values.keep(node, self.values.region.method("sum", product, -1, True))

    def _weigh(self, node: Node, w: Node, y: Node) -> None:
        """[T, 1, K] @ [T, K, D]: a weighted sum over the choices."""
        front, shape = self.pairs.front(y), sizes(y)
        if y not in self.values.rows or len(shape) != front + 1 or shape[front - 1] != self.pairs.k:
            raise refused(node, "does not multiply one vector by one matrix for every pair")
        if sizes(w) != (*shape[: front - 1], 1, self.pairs.k):
            raise refused(w, "is not one number")
        weights = self.values.rows[w] if w in self.values.rows else self.values.score(w)
        self.values.end(node, self.values.region.emit_call(operator.mul, self.values.rows[y], weights))

    def _einsum(self, node: Node) -> None:
        terms, out = einsum_terms(node) or ((), "")
        if len(terms) != 2:
            raise refused(node, "is not understood")
        rows = self.values.rows
        small, large = sorted(terms, key=lambda t: (t.node in self.matrices, t.node in rows, len(t.letters)))
        front = self.pairs.front(large.node)
        lead, tail = large.split(front)
        summed = [c for c in tail if c in small.letters and c not in out]
        if large.node in self.matrices and len(tail) == 2 and len(summed) == 1:
            vector = self._of_letters(small, lead, summed[0])
            new = self._linear(vector, self.matrices[large.node], tail.index(summed[0]))
            rest = tail.replace(summed[0], "")
        elif large.node in rows and len(tail) <= 1 and small.letters == lead:
            new = self.values.region.emit_call(operator.mul, rows[large.node], self._of_letters(small, lead, ""))
            rest = tail
        else:
            raise refused(node, "does not multiply one vector by one matrix for every pair")
        if out == lead + rest:
            return self.values.keep(node, new)
        if self.pairs.k == 1 or out != lead[:-1] + rest:
            raise refused(node, "gives no vector for every pair or token")
        return self.values.end(node, new)

    def _of_letters(self, term: Term, lead: str, summed: str) -> Node:
        """An operand whose letters are those of the pairs, or of the tokens alone, and the one that is summed over."""
        if term.letters == lead + summed and term.node in self.values.rows:
            return self.values.rows[term.node]
        if term.letters == lead + summed:
            return self.values.vector(term.node, term.letters_before(summed), len(sizes(term.node)))
        x = self.pairs.plain(term.node) if self.pairs.k > 1 and term.letters == lead[:-1] + summed else None
        if x is None:
            raise refused(term.node, "is neither of a token nor one number")
        return self.values.token(x)

    def _sum(self, node: Node) -> None:
        source, dims = node.args[0], arg(node, 1, "dim")
        shape, front = sizes(source), self.pairs.front(source)
        dims = [d % len(shape) for d in (dims if isinstance(dims, (tuple, list)) else [dims]) if d is not None]
        if dims and all(shape[d] == 1 for d in dims):
            self.values.keep(node, self.values.rows[source])
        elif dims == [front - 1] and front > 1 and shape[front - 1] == self.pairs.k > 1:
            self.values.end(node, self.values.rows[source])
        else:
            raise refused(node, "does not add up the choices of a token")

    def _index_add(self, node: Node) -> None:
        base, index, source = node.args[0], arg(node, 2, "index"), arg(node, 3, "source")
        plain = arg(node, 1, "dim") == 0 and node.kwargs.get("alpha", 1) == 1 and base not in self.values.rows
        fits = source in self.values.rows and self.pairs.front(source) == 1 and self.pairs.is_numbering(index)
        if not plain or not fits:
            raise refused(node, "does not add up the choices of a token")
        self.values.end(node, self.values.rows[source], None if op_name(base) in _ZEROS else base)

    def _getitem(self, node: Node, source: Node, item: object) -> None:
        """One of several chunks; views; a part of the last dim."""
        if edit.tensor_value(source) is None:
            return self.values.keep(node, self.values.copy(node, self.values.rows))
        axes, part = items(item, len(sizes(source))), None
        for axis, of in axes or ():
            is_last = axis == len(sizes(source)) - 1
            if isinstance(of, int) and sizes(source)[axis] == 1:
                continue
            if isinstance(of, slice) and (of == slice(None) or (is_last and axis >= self.pairs.front(source))):
                part = of if of != slice(None) else part
                continue
            raise refused(node, "is not understood")
        if axes is None:
            raise refused(node, "is not understood")
        rows = self.values.rows[source]
        if part is not None:
            rows = self.values.region.emit_call(operator.getitem, rows, (Ellipsis, part))
        return self.values.keep(node, rows)

    def _on_last(self, node: Node, position: int | None) -> None:
        source = node.args[0]
        shape = sizes(source)
        if position is not None:
            dim = arg(node, position, "dim")
            if dim not in (-1, len(shape) - 1) or self.pairs.front(source) == len(shape):
                raise refused(node, "is not along the last dim")
            if len(node.args) > position:
                node.args = (*node.args[:position], -1, *node.args[position + 1 :])
            else:
                node.kwargs = {**node.kwargs, "dim": -1}
        if features(self.pairs.tail(source)) and shape[-1] == 1:
            raise refused(node, "is not along the last dim")
        new = self.values.copy(node, self.values.rows)
        if edit.tensor_value(node) is None:
            self.values.rows[node] = new
        else:
            self.values.keep(node, new)
