"""What ops do to dims: the table against the ops themselves, cut and disturbed one entry at a time."""

from __future__ import annotations

import contextlib
import itertools
import re

import pytest
import sympy
import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_map_only

from moefx.ir import dims
from moefx.ir.dim_arguments import hold, sizes_held
from moefx.ir.edit import copy_of
from moefx.ir.fates import Fate, How, regrouped
from tests.support.graphs import graph

SIGNATURE = """x: "f32[4, 6, 8]", y: "f32[4, 6, 8]", w: "f32[6, 8]", v: "f32[8]", s: "f32[4, 1, 8]", m: "f32[4, 8, 6]",
    flat: "f32[24, 8]", ids: "i64[4]", picks: "i64[4, 2, 8]", big: "f32[2, 4, 6, 8]", few: "f32[2, 2, 6, 8]"
"""
ELEMENTWISE = [
    "x + y", "x * w", "x - v", "x / s", "x ** 2", "-x", "F.silu(x)", "torch.where(x > 0, x, w)", "torch.maximum(x, s)",
    "x.to(torch.float64)", "x.type_as(y)", "x.clone()", "x.masked_fill(y > 0, 0.0)", "x.clamp(0.2, 0.5)", "s * s",
    "torch.zeros_like(x) + x", "x.clone().add_(y)", "(x > 0) & (y > 0.5)", "x // 0.3", "F.gelu(x).detach()",
    "torch.ops.aten.mul.Tensor(x, y)", "torch.ops.aten.threshold_backward.default(x, y, 0.0)",
]  # fmt: skip
VIEWS = [
    "x.view(24, 8)", "x.view(4, 48)", "x.view(2, 2, 6, 8)", "x.reshape(4, 6, 2, 4)", "x.view(8, 3, 8)",
    "x.view(6, 4, 8)", "x.flatten()", "x.flatten(1)", "x.unflatten(1, (2, 3))",
    "x.unflatten(-1, (2, 4))", "x.unsqueeze(1)",
    "s.squeeze(1)", "flat.view(4, 6, 8)", "x.view(12, 16)", "x.view_as(y)", "flat.view(-1, 4)", "flat.view(16, 12)",
    "x[:, None]",
    "x.view(torch.int32)", "torch.ops.aten.view.default(x, [24, 8])", "x.reshape(1, 24, 8)",
]  # fmt: skip
MOVES = [
    "x.transpose(0, 1)", "x.permute(2, 0, 1)", "x.permute(dims=(0, 2, 1))", "x.mT", "w.t()", "w.T", "x.movedim(0, 2)",
    "torch.swapaxes(x, 0, 2)", "s.expand(4, 6, 8)", "v.expand(4, 6, 8)", "w.expand_as(x)", "w.repeat(2, 1)",
    "w.repeat(3, 2, 1)", "torch.tile(w, (1, 3))", "v.repeat_interleave(2)", "w.repeat_interleave(3, dim=0)",
    "torch.stack([x, y], 1)", "torch.stack([x, y])", "torch.stack([x, y], dim=-1)",
]  # fmt: skip
REDUCTIONS = [
    "x.sum()", "x.sum(1)", "x.mean((0, 2))", "x.mean(-1, keepdim=True)", "x.amax(0)", "x.max()", "x.amin((1, 2))",
    "x.max(1)", "x.min(2).values", "x.logsumexp(1)", "x.prod(0)", "(x > 0.5).any(1)", "(x > 0.01).all(2)", "x.std(1)",
    "x.var(dim=2)", "x.norm()", "torch.linalg.vector_norm(x, dim=1)", "x.argmax(-1)", "torch.count_nonzero(x > 0.5, 0)",
    "torch.ops.aten.sum.dim_IntList(x, [0])", "torch.ops.aten.mean.dim(x, [1], True)",
]  # fmt: skip
ALONG = [
    "x.softmax(-1)", "F.softmax(x, dim=0)", "x.log_softmax(1)", "x.cumsum(0)", "x.sort(1)", "x.argsort(-1)",
    "torch.topk(x, 2)", "x.topk(3, dim=1)[0]", "F.normalize(x)", "F.normalize(x, dim=-1)", "x.cumprod(2)", "w.tril()",
    "F.layer_norm(x, (8,))", "F.layer_norm(x, (6, 8), w)", "F.rms_norm(x, (8,), v)",
    "torch._weight_norm(x, x[:, :1, :1], 0)", "F.group_norm(x, 2)", "torch.ops.aten._softmax.default(x, 1, False)",
    "torch.ops.aten.native_layer_norm.default(x, [8], v, v, 1e-5)",
]  # fmt: skip
PRODUCTS = [
    "x @ m", "torch.bmm(x, m)", "w @ m", "x @ w.t()", "torch.mm(flat, w.t())", "x @ v", "v @ m", "w.mv(v)", "v.dot(v)",
    "F.linear(x, w)", "F.linear(x, w, w[:, 0])", "F.linear(v, w)", "torch.addmm(w[:, 0], flat, w.t())",
    "torch.baddbmm(x[:, :, :6], x, m)", "torch.einsum('bij,bjk->bik', x, m)", "torch.einsum('bij,j->b', x, v)",
    "torch.einsum('...ij,kj->...ki', x, w)", "torch.einsum('bij,bij->bj', x, y)", "torch.einsum('bij->ji', x)",
    "torch.ops.aten.mm.default(flat, w.t())", "F.scaled_dot_product_attention(x, y, y)",
    "F.scaled_dot_product_attention(x, y, y, is_causal=True)", "F.scaled_dot_product_attention(x, y, y, w @ w.t())",
    "F.scaled_dot_product_attention(big, few, few, enable_gqa=True)",
]  # fmt: skip
NUMBERS = [
    "x[:, 1]", "x[:, 1:3]", "x[..., ::2]", "x[1:]", "x[:, None, 2]", "x[ids]", "x[:, ids]", "x[:, ids, :2]",
    "x[0, ids]", "x[0, :, ids]", "x[ids, :, ids]", "x[:, [1, 0]]", "x.select(1, 0)", "x.narrow(2, 0, 4)",
    "x.chunk(2, dim=1)[1]",
    "x.split(4, -1)[0]", "x.unbind(1)[0]", "x.flip(0)", "x.roll(1, 2)", "x.index_select(1, ids)",
    "x.gather(1, picks)", "torch.cat([x, y], 1)", "torch.cat([x, y])", "F.pad(x, (1, 0, 0, 0))",
    "torch.zeros_like(x).scatter(1, picks, x)", "x.index_add(1, ids, x[:, :4])", "F.one_hot(ids, 8)",
    "F.embedding(ids, w)", "x[x > 0.5]", "torch.ops.aten.index.Tensor(x, [None, ids])",
    "torch.ops.aten.slice.Tensor(x, 1, 0, 9223372036854775807)", "torch.ops.aten.slice.Tensor(x, 0, 1, 3)",
    "torch.ops.aten.embedding.default(w, ids)", "x[None, ..., 1]",
]  # fmt: skip
EVERY = [*ELEMENTWISE, *VIEWS, *MOVES, *REDUCTIONS, *ALONG, *PRODUCTS, *NUMBERS]


BY_TORCH = [
    "torch.ops.aten.select_scatter.default(x, w, 0, 1)", "torch.ops.aten.kthvalue.default(x, 2, 1)",
    "torch.ops.aten.linalg_cross.default(x[:, :3], y[:, :3], dim=1)",
    "torch.ops.aten.index_fill.int_Scalar(x, 1, ids, 0.0)",
]  # fmt: skip


def traced(expression: str) -> GraphModule:
    gm, _ = graph(f"def graph({SIGNATURE}):\n            found = {expression}\n            return (found,)\n".replace(
        "\n            ", "\n    "))  # fmt: skip
    return gm


class Op:
    """A node, its operands, and what it makes of values of theirs."""

    def __init__(self, node: Node, values: dict[Node, object]) -> None:
        self.node, self.values = node, values
        self.operands = dims.trace(node)
        slots: list[Node] = []
        map_arg((node.args, node.kwargs), slots.append)
        self.slots = [n for n in slots if dims.tensor_of(n) is not None]
        self.given = [values[n] for n in self.slots]

    def result(self, given: list, sizes: dict | None = None) -> object:
        """What the op makes of other tensors and other literal sizes."""
        node = self.node
        if sizes:
            own = copy_of(node.graph.owning_module)
            node = next(n for n in own.graph.nodes if n.name == node.name)
            hold(node, sizes)
        feed = iter([self._changed(g, torch.clone) for g in given])  # the op may write to it
        args, kwargs = map_arg((node.args, node.kwargs), lambda n: next(feed) if dims.tensor_of(n) is not None
                               else self.values[n])  # fmt: skip
        if node.op == "call_method":
            return getattr(args[0], node.target)(*args[1:], **kwargs)
        return node.target(*args, **kwargs)

    def run(self, given: list, sizes: dict | None = None) -> list[torch.Tensor]:
        found = self.result(given, sizes)
        found = found if isinstance(found, (tuple, list)) else [found]
        return [t for t in found if isinstance(t, torch.Tensor)]

    def with_(self, position: int, change) -> list:
        """The operands with one changed: in place of it, or of the first of the tensors that it is."""
        return [self._changed(g, change) if i == position else g for i, g in enumerate(self.given)]

    @staticmethod
    def _changed(given, change):
        return tree_map_only(torch.Tensor, change, given)


def ops_of(expression: str) -> list[Op]:
    torch.manual_seed(0)
    gm, values, found = traced(expression), {}, []
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            shape = tuple(node.meta["val"].shape)
            values[node] = torch.rand(shape) + 0.01 if node.meta["val"].is_floating_point() else torch.randint(4, shape)
        elif node.op == "call_function" or node.op == "call_method":
            op = Op(node, values)
            values[node] = op.result(op.given)
            if op.slots:
                found.append(op)
    return found


def part(tensor: torch.Tensor, dim: int, i: int, outer: int = 1) -> torch.Tensor:
    """Half i of a dim, or of what is within its first factor."""
    size = tensor.shape[dim] // outer
    return tensor.unflatten(dim, (outer, size)).narrow(dim + 1, i * (size // 2), size // 2).flatten(dim, dim + 1)


def place_of(fate: Fate) -> tuple[int, int] | None:
    place = fate.cut(2)
    return None if place is None else (place.dim, int(place.outer))


def check_cut(op: Op) -> None:
    """An op makes of the halves of what goes to one place the halves of the result."""
    whole = op.run(op.given)
    for dim, outer in {place_of(fate) for o in op.operands for fate in o.dims} - {None}:
        sizes = {dim: whole[0].shape[dim] // 2} if dim in sizes_held(op.node) else None
        for i in range(2):
            given = list(op.given)
            for slot, operand in enumerate(op.operands):
                mine = [d for d, fate in enumerate(operand.dims) if place_of(fate) == (dim, outer)]
                assert len(mine) <= 1, op.node.format_node()
                for d in mine:
                    given[slot] = op._changed(given[slot], lambda t, d=d, i=i: part(t, d, i))
            for got, want in zip(op.run(given, sizes), whole):
                torch.testing.assert_close(got, part(want, dim, i, outer))


def changed(op: Op, position: int, dim: int, i: int) -> list[torch.Tensor]:
    """Which entries of the results change with entry i of a dim, of what is made larger or smaller."""

    def change(tensor: torch.Tensor, by: float) -> torch.Tensor:
        other = tensor.clone()
        row = other.select(dim, i)
        row.copy_(~row if tensor.dtype == torch.bool else row + by if tensor.is_floating_point() else (row + 1) % 4)
        return other

    before = op.run(op.given)
    after = [op.run(op.with_(position, lambda t, by=by: change(t, by))) for by in (9.0, -9.0)]
    return [torch.stack([a != b for b in each]).any(0) if all(a.shape == b.shape for b in each) else torch.ones(1) > 0
            for a, *each in zip(before, *after)]  # fmt: skip


def is_cut(op: Op, position: int, dim: int) -> bool:
    """Whether an op makes the last half of the result of the last half of one argument, or of all of its shape."""
    whole, shape = op.run(op.given), [getattr(given, "shape", None) for given in op.given]
    alike = [[position], [i for i, each in enumerate(shape) if each == shape[position]]]
    for cut in alike:
        with contextlib.suppress(RuntimeError, IndexError):
            given = [op._changed(g, lambda t: part(t, dim, 1)) if i in cut else g for i, g in enumerate(op.given)]
            for a, b in zip(op.run(given), whole):
                tail = b[tuple(slice(m - n, m) for n, m in zip(a.shape, b.shape))]
                if any(2 * n == m for n, m in zip(a.shape, b.shape)) and torch.equal(a, tail):
                    return True
    return False


def check_spread(op: Op) -> None:
    """Of a kept dim, an entry changes its own entries alone; of others, also those of others, or it cannot be cut."""
    for position, operand in enumerate(op.operands):
        tensor = torch.utils._pytree.tree_leaves(op.given[position])[0]
        for dim, fate in enumerate(operand.dims):
            where = f"{op.node.format_node()}: {operand.node} dim {dim} {fate}"
            sets = [changed(op, position, dim, i) for i in range(tensor.shape[dim])]
            meet = any((a & b).any() for one, other in itertools.combinations(sets, 2) for a, b in zip(one, other))
            if fate.how is How.UNREAD:
                assert not any(each.any() for found in sets for each in found), where
            elif fate.how is How.KEPT:
                assert not meet, where
            elif fate.how in (How.REDUCED, How.CONTRACTED, How.MIXED, How.ORDERED) and tensor.shape[dim] % 2 == 0:
                assert meet or not is_cut(op, position, dim), where


def together(op: Op, by: str, results: list, sizes: list[int]):
    stacked = torch.stack(results)
    if by == "mean":
        return (stacked * torch.tensor([s / sum(sizes) for s in sizes]).view(-1, *[1] * (stacked.dim() - 1))).sum(0)
    return {"sum": lambda: stacked.sum(0), "max": lambda: stacked.amax(0), "min": lambda: stacked.amin(0),
            "prod": lambda: stacked.prod(0), "all": lambda: stacked.all(0), "any": lambda: stacked.any(0),
            "logsumexp": lambda: stacked.logsumexp(0)}[by]()  # fmt: skip


COMBINED = ("sum", "mean", "max", "min", "prod", "all", "any", "logsumexp")


def check_reduced(op: Op) -> None:
    for position, operand in enumerate(op.operands):
        for dim, fate in enumerate(operand.dims):
            if fate.how is not How.REDUCED or fate.by not in COMBINED:
                continue
            size = op.given[position].shape[dim]
            results = [op.run(op.with_(position, lambda t, d=dim, a=a, n=n: t.narrow(d, a, n)))[0]
                       for a, n in ((0, 1), (1, size - 1)) if n]
            torch.testing.assert_close(together(op, fate.by, results, [1, size - 1]), op.run(op.given)[0])


def check_contracted(op: Op) -> None:
    """The halves of the contracted dims add up to the result, where what is added besides is added once."""
    cut = [[d for d, fate in enumerate(o.dims) if fate.how is How.CONTRACTED] for o in op.operands]
    if any(cut) and max(map(len, cut)) == 1:
        halves = [[part(g, ds[0], i) if ds else g * (1 - i) for g, ds in zip(op.given, cut)] for i in range(2)]
        torch.testing.assert_close(op.run(halves[0])[0] + op.run(halves[1])[0], op.run(op.given)[0])


def check_ordered(op: Op) -> None:
    """The op does not commute with a change of the order."""
    for position, operand in enumerate(op.operands):
        for dim, fate in enumerate(operand.dims):
            if fate.how is How.ORDERED:
                turned, plain = op.run(op.with_(position, lambda t, d=dim: t.flip(d))), op.run(op.given)
                ways = [plain, [b.flip(dim) if b.dim() > dim else b for b in plain]]
                assert not any(all(map(torch.allclose, turned, way)) for way in ways), op.node.format_node()


@pytest.mark.parametrize("expression", EVERY)
def test_the_table_says_what_ops_do(expression):
    for op in ops_of(expression):
        assert op.operands is not None, op.node.format_node()
        assert [o.node for o in op.operands] == op.slots
        for operand in op.operands:
            assert len(operand.dims) == dims.tensor_of(operand.node).dim()
        check_cut(op)
        check_spread(op)
        check_reduced(op)
        check_contracted(op)
        check_ordered(op)


@pytest.mark.parametrize(("before", "after", "wanted"), [
    ("a, b, 8", "a*b, 8", "0:a; 0:b/a; 1:8"),
    ("a*b, 8", "a, b, 8", "0:a 1:b; 2:8"),
    ("a, b, 12", "a, b, 4, 3", "0:a; 1:b; 2:4 3:3"),
    ("2*a, 8", "a, 16", "0:a 1:2; 1:8/2"),
    ("a*b, 8", "b, a, 8", "0:b 1:a; 2:8"),
    ("a, 6, 4", "a, 4, 6", "0:a; ?1:2; ?"),
    ("a, b", "b, a", "?; ?"),
    ("1, a, 4", "a, 4", "0:1; 0:a; 1:4"), ("a, 1, 4", "a, 4", "0:a; 1:1; 1:4"), ("a, 1", "a", "0:a; "),
    ("a, 4", "1, 4*a", "1:a; 1:4/a"),
    ("2*a, 3, c", "6*a, c", "0:2*a; 0:3/2*a; 1:c"),
    ("a - a//2, 4", "4*(a - a//2)", "0:a - a//2; 0:4/a - a//2"),
    ("4, 6, 5", "8, 3, 5", "0:4; 0:2/4 1:3; 2:5"),
    ("4, 9, 5", "6, 6, 5", "?0:2; ?; 2:5"),
])  # fmt: skip
def test_views_by_factors(before, after, wanted):
    symbols = {name: sympy.Symbol(name, positive=True, integer=True) for name in "abc"}

    def shape(text: str) -> tuple:
        return tuple(eval(each, dict(symbols)) for each in text.split(","))

    found = regrouped(shape(before), shape(after))
    texts = []
    for size, fate in zip(shape(before), found):
        assert fate.how in (How.KEPT, How.MIXED)
        if fate.how is How.KEPT:
            assert sympy.expand(sympy.prod([place.size for place in fate.to]) - size) == 0
        texts.append("?" * (fate.how is How.MIXED) + " ".join(
            f"{p.dim}:{p.size}{'' if p.outer == 1 else f'/{p.outer}'}" for p in fate.to))  # fmt: skip
    expected = [re.sub(r"a - a//2", str(symbols["a"] - symbols["a"] // 2), each.strip()) for each in wanted.split(";")]
    assert texts == expected


@pytest.mark.parametrize("expression", BY_TORCH)
def test_torch_is_asked_of_what_the_table_does_not_know(expression):
    op = ops_of(expression)[-1]
    if op.operands is None:
        pytest.skip("this torch has no rule of one dim for it")
    assert any(fate.how is How.KEPT for operand in op.operands for fate in operand.dims)
    check_cut(op)


def test_torch_adds_no_condition_on_sizes():
    gm, mode = graph("""
        def graph(x: "f32[s0, s1, 8]", w: "f32[s1, 8]"):
            found = torch.ops.aten.select_scatter.default(x, w, 0, 1)
            other = x.view(-1, 4).sum(0) + x.reshape(x.shape[0], -1).mean()
            return (found, other)
    """)
    before = len(mode.shape_env.guards)
    for node in gm.graph.nodes:
        dims.trace(node)
    assert len(mode.shape_env.guards) == before


def test_what_nobody_knows_has_no_answer():
    gm, _ = graph("""
        def graph(x: "f32[4, 8]"):
            found = torch.fft.fft(x)
            return (found,)
    """)
    assert dims.trace(gm.graph.output_node().args[0][0]) is None
