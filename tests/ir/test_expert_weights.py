"""What experts multiply by: which computations a rank can do for its own experts alone."""

from __future__ import annotations

import pytest
import torch
from torch.fx import GraphModule

from moefx.capture.trace import Source
from moefx.errors import RaiseError
from moefx.ir.edit import ancestors
from moefx.ir.expert_weights import is_given, is_parameter, is_weight, leave_experts_open, roots
from tests.support.graphs import graph

E = 4
APART = [
    "w * 2.0 + v", "w + shared", "shared - w", "w * s.view(4, 1, 1)", "w * s[:, None, None]", "w.to(torch.float64)",
    "torch.where(w > 0, w, shared)", "F.normalize(w, dim=-1)", "F.normalize(w)", "w / w.norm(dim=(1, 2), keepdim=True)",
    "w - w.mean(-1, keepdim=True)", "w.softmax(dim=1)", "w.amax(1)", "w.cumsum(2)", "w.var(dim=2)",
    "w.transpose(1, 2)", "w.mT", "w.permute(0, 2, 1)", "w.unsqueeze(1).squeeze(1)", "w.chunk(2, dim=1)[1]",
    "w.split(3, -1)[0]", "w.unbind(1)[2]", "w[:, 1]", "w[:, :, None]", "w[..., :2]", "w.view(4, -1)",
    "w.reshape(4, 6, 4)", "w.flatten(1)", "w.flatten()", "w.unflatten(1, (2, 3))", "rows.view(4, 2, 6)",
    "rows.unflatten(0, (4, 2))", "rows.reshape(4, -1)", "s.view(4, 1, 1).expand(4, 6, 4)", "s.repeat_interleave(2)",
    "w @ v.mT", "torch.bmm(w, v.transpose(1, 2))", "w @ shared.t()", "shared @ v.mT", "rows @ shared", "w @ vector",
    "F.linear(w, shared)", "F.linear(rows, shared.t())", "torch.einsum('eij,ekj->eik', w, v)",
    "torch.einsum('eij,kj->eik', w, shared)", "torch.einsum('e,eij->ej', s, w)", "torch.cat([w, v], -1)",
    "torch.cat([w, v], dim=1)", "torch.stack([w, v], 1)", "F.layer_norm(w, (4,))", "F.layer_norm(w, (6, 4), shared)",
    "torch.zeros_like(w) + v", "w + ((w / 0.1).round().clamp(-8, 7) * 0.1 - w).detach()", "F.silu(w).clone()",
    "torch._weight_norm(w, s.view(4, 1, 1), 0)", "w.std(dim=1)", "torch.linalg.vector_norm(w, dim=1)",
    "torch.maximum(w, v)", "w[:, torch.tensor([2, 0])]", "w[:, :, torch.tensor([2, 0])]", "w[:, 1:3]",
    "torch.ones_like(s) * s", "(w.view(torch.int32) + 1).view(torch.float32)",
]  # fmt: skip
MIXING = [  # or not known not to
    "square.expand(4, 4, 4) + w[:, :4]", "w.view(2, 2, 6, 4).unbind(0)[0].repeat(2, 1, 1)",
    "w.flip(0)", "w - w.mean(0)", "w.softmax(0)", "w / w.norm()", "w.cumsum(0)", "w[torch.tensor([1, 0, 2, 3])]",
    "w.roll(1, 0)", "torch.cat([w[2:], w[:2]])", "square @ rows[:4]", "torch.einsum('eij,kj->kei', w, rows[:4, :4])",
    "rows.t().reshape(6, 4, 2).permute(1, 0, 2)", "F.layer_norm(w, (4, 6, 4))", "w.transpose(0, 1).reshape(4, 6, 4)",
    "w.std(0, keepdim=True) * w", "w.max(0)[0] + w", "torch.stack([s[0], s[1], s[2], s[3]])", "w.view(6, 4, 4)[:4]",
    "torch._weight_norm(w, s.view(1, 1, 4), 2)", "square @ square",
    "w[:, torch.tensor([0, 1, 2, 3]), :, None][:, torch.tensor([0, 1, 2, 3]), 0]", "w[..., torch.tensor([1, 0])]",
    "w[:, 0, torch.tensor([1, 0])]", "F.linear(square, square)", "F.normalize(w, dim=0)",
    "torch.einsum('ij,jk->ik', square, square)", "s.cumsum(0)",
]  # fmt: skip


def weight(expression: str) -> tuple[GraphModule, torch.fx.Node]:
    gm, _ = graph(f"""
        def graph(w: "f32[4, 6, 4]", v: "f32[4, 6, 4]", s: "f32[4]", rows: "f32[8, 6]", shared: "f32[6, 4]",
                  vector: "f32[4]", square: "f32[4, 4]"):
            found = {expression}
            return (found,)
    """)
    return gm, gm.graph.output_node().args[0][0]


def run_with(gm: GraphModule, known: dict, wanted: torch.fx.Node) -> torch.Tensor:
    """A node's value where others are given."""
    values = dict(known)
    for node in gm.graph.nodes:
        if node not in values and node.op.startswith("call") and node in ancestors([wanted], stop=values.__contains__):
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = getattr(args[0], node.target)(*args[1:], **kwargs) if node.op == "call_method" \
                else node.target(*args, **kwargs)  # fmt: skip
    return values[wanted]


def of_some(gm: GraphModule, found: torch.fx.Node) -> tuple[torch.Tensor, torch.Tensor]:
    """(the part of all that the last two experts have, what is computed of their part of the roots)."""
    torch.manual_seed(0)
    drawn = {n: torch.rand(tuple(n.meta["val"].shape)) + 0.1 for n in gm.graph.find_nodes(op="placeholder")}
    whole = run_with(gm, drawn, found)
    begin, between = roots(found, E)
    parts = {}
    for root in begin:
        value = run_with(gm, drawn, root)
        parts[root] = value[value.shape[0] // 2 :]
    leave_experts_open(between)
    shared = {n: v for n, v in drawn.items() if n not in parts}
    for node in between:  # what they read beside is of every rank
        shared.update((a, run_with(gm, drawn, a)) for a in node.all_input_nodes if a not in between | parts.keys())
    return whole[whole.shape[0] // 2 :], run_with(gm, {**shared, **parts}, found)


@pytest.mark.parametrize("expression", APART)
def test_a_rank_computes_its_own_experts(expression):
    gm, found = weight(expression)
    begin, _ = roots(found, E)

    assert all(map(is_given, begin))
    torch.testing.assert_close(*of_some(gm, found))


@pytest.mark.parametrize("expression", MIXING)
def test_what_mixes_experts_is_taken_whole(expression):
    gm, found = weight(expression)
    torch.testing.assert_close(*of_some(gm, found))


def test_a_wrong_rule_would_be_seen():
    """The check of these tests: a root that is taken for one of every expert, but is not."""
    gm, found = weight("w.flip(0)")
    w = next(iter(gm.graph.nodes))
    drawn = {w: torch.rand(4, 6, 4)}
    with pytest.raises(AssertionError):
        torch.testing.assert_close(run_with(gm, drawn, found)[2:], run_with(gm, {w: drawn[w][2:]}, found))


@pytest.mark.parametrize(("expression", "what"), [
    ("w * x.mean()", "computed from inputs"), ("F.dropout(w, 0.5)", "at random"),
    ("w[:3]", "has 3 rows for 4 experts"), ("w.sum()", "has no rows for 4 experts"),
    ("w * torch.rand_like(w)", "at random"), ("w.clone().mul_(x.mean())", "computed from inputs"),
])  # fmt: skip
def test_refusal(expression, what):
    gm, _ = graph(f"""
        def graph(x: "f32[s0, 4]", w: "f32[4, 6, 4]"):
            found = {expression}
            return (found,)
    """)
    found = gm.graph.output_node().args[0][0]
    with pytest.raises(RaiseError, match=what):
        roots(found, E)


def test_what_is_written_elsewhere_is_a_weight():
    gm, _ = graph("""
        def graph(x: "f32[4, 4]", w: "f32[4, 4]"):
            made = w * 2.0
            written = x.add_(made)
            other = x.to(made.dtype).mul_(2.0)
            return (written,)
    """)
    assert is_weight(next(node for node in gm.graph.nodes if node.name == "made"))


@pytest.mark.parametrize("write", ["buffer.add_(1.0)", "buffer[0].mul_(x.sum())", "buffer.view(-1)[1:].zero_()"])
def test_what_is_written_to_is_no_weight(write):
    gm, _ = graph(f"""
        def graph(x: "f32[s0, 4]", buffer: "f32[4, 4]"):
            before = buffer * 2.0
            written = {write}
            return (before,)
    """)
    assert not is_weight(gm.graph.output_node().args[0][0])


def test_parameters_and_buffers():
    gm, _ = graph("""
        def graph(x: "f32[s0, 4]", w: "f32[4, 4]", buffer: "f32[4, 4]", table: "i64[4]"):
            a = w * 2.0
            b = buffer + 1.0
            c = a * b
            d = b * torch.ones(4)
            e = c + x
            f = torch.ones(4) * 2.0
            return (a, b, c, d, e, f)
    """, buffer=Source("buffer", "buffer"))
    a, b, c, d, e, f = gm.graph.output_node().args[0]
    assert [is_parameter(n) for n in (a, b, c, d, e, f)] == [True, False, True, False, False, False]
    assert [is_weight(n) for n in (a, b, c, d, e, f)] == [True, True, True, True, False, False]
