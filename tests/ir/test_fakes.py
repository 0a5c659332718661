"""Fake values of equal ops: run once, and the same as if every op had been run."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from moefx._torch_compat import FakeTensorMode, ShapeEnv
from moefx.ir import infer
from moefx.ir.copies import Fakes, Sizes
from moefx.ir.forms import Writer
from moefx.ir.op import value
from moefx.ir.writes import storage
from tests.support.graphs import graph


@pytest.fixture
def runs(monkeypatch):
    """The names of ops that are run."""
    found, plain = [], infer._Propagate._run

    def run(self, node):
        if node.op.startswith("call"):
            found.append(node.name)
        return plain(self, node)

    monkeypatch.setattr(infer._Propagate, "_run", run)
    return found


def text(body, layers, given=""):
    lines = "".join(body.strip("\n").format(n=n, i=n - 1) + "\n" for n in range(1, layers + 1))
    weights = ", ".join(f'w{n}: "f32[16, 16]"' for n in range(1, layers + 1))
    return f'def graph(x0: "f32[s0, 16]", {weights}{given}):\n{lines}    return (x{layers},)\n'


def types(gm):
    writer = Writer()
    return [writer.type(value(node)) for node in gm.graph.nodes if node.op.startswith("call")]


PLAIN = """
    y{n} = F.silu(F.linear(x{i}, w{n}))
    v{n} = y{n}.unsqueeze(0)
    x{n} = v{n}.sum(0)
"""


def test_the_second_layer_is_not_run(runs):
    gm, _ = graph(text(PLAIN, 3))
    # The first input needs no gradient, so the second layer is not as the first; the third is.
    assert [name for name in runs if name.endswith("3")] == ["v3"], "a view has the memory of its own input"
    whole, _ = graph(text(PLAIN, 3))
    assert types(gm) == types(whole)
    nodes = {node.name: node for node in gm.graph.nodes}
    assert storage(nodes["v3"]) == storage(nodes["y3"])
    own = [storage(nodes[name]) for name in ("x1", "y1", "x2", "y2", "x3", "y3")]
    assert len({*own}) == len(own), "every value has memory of its own"


def test_what_is_true_is_kept(runs):
    gm, mode = graph(text(PLAIN, 3))
    before = [value(node) for node in gm.graph.nodes]
    runs.clear()
    infer.propagate(gm, mode)
    assert not any(name.endswith("3") for name in runs), "views, too, since they are of the memory of their input"
    assert all(value(node) is fake for node, fake in zip(gm.graph.nodes, before) if node.name.endswith("3"))


@pytest.mark.parametrize("odd", [
    "F.silu(F.linear(x2, w3.double().float()))",
    "F.silu(F.linear(x2.double(), w3.double())).float()",
    "F.silu(F.linear(x2, w3.t()))",
    "F.silu(F.linear(x2, w3.detach()))",
    "F.silu(F.linear(x2.detach(), w3))",
    "F.silu(F.linear(x2[:, :], w3, x2[0]))",
])  # fmt: skip
def test_another_type_stride_or_gradient_is_run(runs, odd):
    source = text(PLAIN, 3).replace("F.silu(F.linear(x2, w3))", odd)
    gm, _ = graph(source)
    found = types(gm)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(infer.Results, "of", lambda *_: None)
        whole, _ = graph(source)
    assert found == types(whole)


def test_what_is_written_to_is_run(runs):
    body = "    y{n} = F.linear(x{i}, w{n})\n    z{n} = y{n}.add_(1.0)\n    x{n} = y{n} * 2.0\n"
    gm, _ = graph(text(body, 3))
    nodes = {node.name: node for node in gm.graph.nodes}
    assert {"y3", "z3"} <= {*runs}
    assert storage(nodes["z3"]) == storage(nodes["y3"])


def test_sizes_that_data_alone_tells_are_those_of_their_own_layer(runs):
    given = ', u: "i64[s0]", v: "i64[s0]"'
    body = """
    a1 = torch.nonzero(u)
    b1 = torch.nonzero(v)
    x1 = F.silu(a1.to(torch.float32))
    x2 = F.silu(b1.to(torch.float32))
"""
    gm, _ = graph(text(body, 1, given).replace("return (x1,)", "return (x1, x2)"))
    nodes = {node.name: value(node) for node in gm.graph.nodes}
    assert nodes["x2"].shape[0].node.expr == nodes["b1"].shape[0].node.expr
    assert nodes["x1"].shape[0].node.expr != nodes["x2"].shape[0].node.expr
    assert "b1" in runs, "it makes a size of its own"
    assert "x2" not in runs
    assert nodes["x2"].dtype == torch.float32


def test_without_gradients_it_is_another_op():
    body = """
    y1 = F.linear(x0, w1)
    off = torch._C._set_grad_enabled(False)
    z1 = F.linear(x0, w1)
    on = torch._C._set_grad_enabled(True)
    x1 = F.linear(x0, w1)
"""
    gm, _ = graph(text(body, 1).replace("return (x1,)", "return (x1, y1, z1)"))
    found = {node.name: value(node).requires_grad for node in gm.graph.nodes if node.name in ("x1", "y1", "z1")}
    assert found == {"x1": True, "y1": True, "z1": False}


def test_copies_of_the_parts_of_a_split_may_be_written_to():
    """Autograd forbids it of the parts themselves. Parts of one memory are so again, in a memory of their own."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    x = mode.from_tensor(torch.empty(8, 6), static_shapes=False).requires_grad_()
    with mode:
        parts = (x * 2).chunk(2, -1)
        copies = Fakes(mode, {}, []).of(list(parts))
        copies[0].add_(1)
    for part, copy in zip(parts, copies):
        assert (copy.shape, copy.stride(), copy.storage_offset()) == (part.shape, part.stride(), part.storage_offset())
        assert copy.requires_grad
        assert not copy.is_leaf
    memory = [each.untyped_storage()._cdata for each in (*parts, *copies)]
    assert memory[0] == memory[1] != memory[2] == memory[3]
    assert parts[0]._version == 0


def test_copies_are_no_ops_of_a_graph_that_is_traced():
    """Layers are copied while the graph around them is traced."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    with mode.shape_env.ignore_fresh_unbacked_symbols():
        size, other = (mode.shape_env.create_unbacked_symint() for _ in range(2))
    with mode:
        rows = torch.empty(size, 6)
    found = []

    def traced(x):
        found.extend(kind.of(rows) for kind in (Sizes(mode, symbols), Fakes(mode, symbols, [])))
        return x + 1

    symbols = {size.node.expr: other.node.expr}
    graph = make_fx(traced)(torch.ones(2)).graph
    assert [node.target for node in graph.nodes if node.op == "call_function"] == [torch.ops.aten.add.Tensor]
    assert [str(each.shape[0]) for each in found] == [str(other)] * 2
