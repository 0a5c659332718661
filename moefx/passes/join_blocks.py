"""Write experts that each compute their own block of a static tensor as batched ops on all blocks.

Contract
    takes  CAPTURED   canonical
    gives  CAPTURED   what every expert computed of its block [C, D] out of [.., E, .., C, D] (DeepSpeed's Experts:
                      chunks along the dim of the experts, concatenated again) is computed by batched matmuls on
                      stacked parameters, which raise-einsum sees
    never  touches experts that do anything but linear, norm, elementwise and last-dim ops on their rows, or modules
           whose blocks neither a router filled nor a soft mixture, as heads of attention or of several outputs

Pseudo-code
    1. which nodes are expert e's block: parts of chunk, split or unbind, or x[e], x[:, e], x[:, e : e + 1]
    2. where all blocks come together again, in order: cat or stack
    3. compare the experts' branches node by node; emit the first one on [E, rows, D], with stacked parameters
    4. compare with the original

    cat([f(part, W_e) for e, part in enumerate(x.chunk(E, dim=0))])  ->  bmm(x, stack(W)) ..
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule, Node

from moefx.analysis.checking.raising import Raising
from moefx.analysis.recognition.branches import Branches
from moefx.analysis.recognition.facts import OfExpert
from moefx.analysis.recognition.merge import Emitter
from moefx.analysis.recognition.roles import Part, Shared
from moefx.analysis.recognition.routings import CHOOSERS
from moefx.context.pass_types import PassContext, PassResult
from moefx.errors import RaiseError
from moefx.ir import edit, ragged
from moefx.ir.dims import is_pointwise
from moefx.ir.expert_weights import is_parameter
from moefx.ir.names import arg, op_name
from moefx.ir.op import expr, value
from moefx.ir.shapes import sizes

_ON_ROWS = ("linear", "matmul", "mm", "addmm", "layer_norm", "rms_norm", "softmax", "glu", "chunk", "split", "t", "mT",
            "transpose", "permute", "getattr")  # fmt: skip


@dataclass(frozen=True)
class _Block:
    """One expert's part of `source`: along `dim`, which it keeps with size one, or not."""

    source: Node
    dim: int
    expert: int
    keeps: bool


@dataclass(frozen=True)
class _Join:
    """end: the node that has what all experts made of their blocks, rows, along its dim."""

    end: Node
    dim: int
    rows: tuple[Node, ...]
    block: _Block  # the first one


class _Batched(ragged.Rows):
    """Ops on [E, rows, D], with the parameters of expert e for its rows."""

    on_one_axis = False

    def linear(self, rows: Node, weight: Node, transposed: bool, bias: Node | None = None) -> Node:
        weight = weight if transposed else self.method("transpose", weight, 1, 2)
        out = self.method("bmm", rows, weight)
        return out if bias is None else self.emit_call(operator.add, out, self.expert_rows(bias))

    def expert_rows(self, param: Node) -> Node:
        entry = edit.tensor_value(param).shape[1:]
        entry = entry[1:] if len(entry) == 3 and entry[0] == 1 else entry
        return self.method("reshape", param, -1, *[1] * (2 - len(entry)), *entry)

    def beside(self, rows_dims: int, param: Node) -> Node:
        return self.expert_rows(param)


def run(gm: GraphModule, ctx: PassContext) -> PassResult:
    result = PassResult()
    found = {node: block for node in gm.graph.nodes if (block := _block(node)) is not None}
    facts = {node: OfExpert((b.source, b.dim), b.expert, b.source) for node, b in found.items()}
    joins = []
    for join in _joins(gm, found):
        try:
            branches = Branches(facts, join.rows)
        except RaiseError:
            continue
        if any(not isinstance(r, (Part, Shared)) for r in branches.roles.values()) and _is_on_rows(branches):
            joins.append((join, branches))
    raising = Raising(gm, ctx, result)
    for join, branches in joins:
        with raising.candidate(join.end) as check:
            new = _rewrite(gm, join, branches, ctx)
            check.compare(join.end, new, None, [join.block.source], len(join.rows), by_token=False)
            edit.rewrite_uses(join.end, new, after=new)
            check.sweep()
            result.changed(f"{join.end.name}: the blocks of {len(join.rows)} experts are computed as one")
    return result


def _block(node: Node) -> _Block | None:
    """What one expert sees of a tensor with at least three dims."""
    source, item = (node.args[0], arg(node, 1, "item")) if node.target is operator.getitem else (None, None)
    if isinstance(source, Node) and isinstance(item, int) and op_name(source) in ("chunk", "split", "unbind"):
        whole, keeps = source.args[0], op_name(source) != "unbind"
        dim = arg(source, 2 if keeps else 1, "dim", 0) % len(sizes(whole))
        if keeps and any(expr(part.shape[dim]) != 1 for part in value(source)):
            return None
        return _of(whole, dim, item, keeps)
    if op_name(node) == "select":
        dim, number = arg(node, 1, "dim"), arg(node, 2, "index")
        return _of(node.args[0], dim % len(sizes(node.args[0])), number, False)
    if source is None or edit.tensor_value(source) is None:
        return None
    items = item if isinstance(item, tuple) else (item,)
    dim = next((i for i, each in enumerate(items) if each != slice(None)), None)
    if dim is None or any(each != slice(None) for each in items[dim + 1 :]):
        return None
    each = items[dim]
    if isinstance(each, slice):
        start = each.start or 0
        is_one = type(start) is int and each == slice(each.start, start + 1)
        return _of(source, dim, start, True) if is_one else None
    return _of(source, dim, each, False) if type(each) is int else None


def _of(whole: Node, dim: int, number: Any, keeps: bool) -> _Block | None:
    """Not of parameters: those are read by the experts' numbers, too."""
    shape = sizes(whole)
    static = len(shape) >= 3 and dim < len(shape) - 1 and shape[dim].is_Integer and type(number) is int
    if not static or whole.op == "placeholder" or not edit.tensor_value(whole).dtype.is_floating_point:
        return None
    return _Block(whole, dim, number % int(shape[dim]), keeps)


def _joins(gm: GraphModule, found: dict[Node, _Block]) -> Iterator[_Join]:
    for node in gm.graph.nodes:
        if op_name(node) not in ("cat", "concat", "concatenate", "stack"):
            continue
        rows = arg(node, 0, "tensors")
        if not isinstance(rows, (list, tuple)) or not all(isinstance(n, Node) for n in rows) or len(rows) < 2:
            continue
        blocks = _blocks_behind(rows[0], found)
        dim = arg(node, 1, "dim", 0) % len(sizes(node))
        for block in blocks if any(_is_filled_by_choice(b.source) or _is_soft(b.source, node) for b in blocks) else ():
            fits = int(sizes(block.source)[block.dim]) == len(rows) and block.expert == 0 and dim < len(sizes(node)) - 1
            if fits and block.keeps == (op_name(node) != "stack"):
                yield _Join(node, dim, tuple(rows), block)


def _blocks_behind(rows: Node, found: dict[Node, _Block]) -> list[_Block]:
    """The blocks that a branch reads, without going further; only if they are of one tensor."""
    blocks = {found[node] for node in edit.ancestors([rows], stop=found.__contains__) if node in found}
    return list(blocks) if len(blocks) == 1 else []


def _is_filled_by_choice(blocks: Node) -> bool:
    """Whether what tokens stand in the blocks follows from a top-k or a maximum, with no parameter in between."""
    return any(op_name(node) in CHOOSERS for node in edit.ancestors([blocks], stop=_reads_parameter))


def _is_soft(blocks: Node, end: Node) -> bool:
    """Whether it is a soft mixture: the blocks are means of tokens, and tokens are means of what comes of all, as the
    outputs of heads of attention are not."""
    return _is_of_softmax(blocks) and any(
        op_name(user) in ("einsum", "matmul", "bmm")
        and any(_is_of_softmax(a) for a in user.all_input_nodes if a is not before)
        for before in _same_values(end) for user in before.users)  # fmt: skip


def _is_of_softmax(node: Node) -> bool:
    return any(op_name(n) in ("softmax", "exp") for n in edit.ancestors([node], stop=_reads_parameter))


def _same_values(node: Node) -> Iterator[Node]:
    """A tensor and other forms of it."""
    stack = [node]
    while stack:
        yield (top := stack.pop())
        stack += [user for user in top.users if op_name(user) in _FORMS]


_FORMS = ("reshape", "view", "flatten", "movedim", "permute", "transpose", "contiguous", "to", "type_as")


def _reads_parameter(node: Node) -> bool:
    return any(is_parameter(a) for a in node.all_input_nodes)


_ALONG = {"softmax": 1, "glu": 1, "chunk": 2, "split": 2}  # the place of the dim among the arguments


def _is_on_rows(branches: Branches) -> bool:
    """Whether the experts only do what every row is computed by itself with, on its last dim."""
    own = [n for n in branches.nodes if n not in branches.roles]
    for node in own:
        name, of_params = op_name(node), all(a in branches.roles or a.op == "placeholder" for a in node.all_input_nodes)
        along = _ALONG.get(name)
        dim = -1 if along is None else arg(node, along, "dim", -1 if name == "glu" else 0)
        if along is not None and dim not in (-1, len(sizes(node.all_input_nodes[0])) - 1):
            return False
        if not (is_pointwise(name) or name in _ON_ROWS or (node.target is operator.getitem and not of_params)):
            return False
    return True


def _rewrite(gm: GraphModule, join: _Join, branches: Branches, ctx: PassContext) -> Node:
    source, dim = join.block.source, join.block.dim
    with edit.at(join.end):
        batched = _Batched(gm, edit.tensor_value(source).fake_mode, join.end.name)
        front = source if dim == 0 else batched.method("movedim", source, dim, 0)
        rest = edit.tensor_value(front).dim() - 2
        blocks = front if rest == 1 else batched.method("flatten", front, 1, rest)
        for node in (n for n in branches.nodes if n not in branches.roles):
            along = _ALONG.get(op_name(node))
            if along is not None and arg(node, along, "dim", -1) != -1:  # the last of [n, D]; there are more dims now
                node.update_kwarg("dim", -1) if "dim" in node.kwargs else node.update_arg(along, -1)
        branches.roles |= {n: Part(blocks) for n, role in branches.roles.items() if isinstance(role, Part)}
        out = Emitter(batched, branches, ctx.autocast).emit()
        if rest != 1:
            shape = [batched.method("size", front, d) for d in range(1, rest + 1)]
            out = batched.method("reshape", out, -1, *shape, edit.tensor_value(out).shape[-1])
        out = out if join.dim == 0 else batched.method("movedim", out, 0, join.dim)
        return batched.cast(out, edit.tensor_value(join.end).dtype)
