"""What a step needs: planned by the sweep, measured at every operator; and what the sweep knows."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

import moefx
from moefx.axes import MeshSpec
from moefx.capture.trace import Source
from moefx.costmodel.amounts import at
from moefx.costmodel.memory import live_memory
from moefx.layout import Layout
from moefx.link.program import Home
from moefx.planning.memory import Footprint
from tests.support.graphs import graph
from tests.support.peaks import measured, noting_rows, planned
from tests.support.ranks import fake_world

HIDDEN = """
def graph(x: "f32[s0, 8]"):
    gate = ops.aten.silu.default(x)
    hidden = ops.aten.mul.Tensor(gate, x)
    return (hidden,)
"""
SUMMED = """
def graph(rows: "f32[s0, 8]", grad: "f32[s0, 4]", counts: "i64[2]"):
    first = m.grouped_wgrad.default(rows, grad, counts, True)
    both = m.grouped_wgrad.default(rows, grad, counts, True, first)
    return (both,)
"""
REDUCED = """
def graph(grad: "f32[8, s0]", x: "f32[s0, 4]"):
    product = ops.aten.mm.default(grad, x)
    turned = ops.aten.view.default(product, [{}])
    sent = start(m.reduce_gradient.default, turned, 'ep', 0.5, 0)
    reduced = wait(sent)
    return ({},)
"""
OWN = """
def graph(x: "f32[8, 8]"):
    mine = m.own_experts.default(x, 2, 'ep')
    return (mine,)
"""
COMBINED = """
def graph(rows: "f32[2*s0, 8]", weights: "f32[s0, 2]", perm: "i64[2*s0]"):
    combined = m.combine.default(rows, perm, 2, weights)
    return (combined,)
"""


def alive(source: str, name: str, takes: int | None = None) -> float:
    """Bytes that are alive while a node runs, without the inputs, of one token."""
    gm, _ = graph(source)
    node = next(node for node in gm.graph.nodes if node.name == name)
    if takes is not None:
        node.meta["takes"] = takes
    memory = live_memory(gm, outside={(node, 0) for node in gm.graph.find_nodes(op="placeholder")})
    found = dict(memory.points)[name]
    return at(found, {symbol.name: 1 for symbol in found.free_symbols})


def test_in_whose_memory_results_lie():
    assert alive(HIDDEN, "hidden") == 2 * 8 * 4
    assert alive(HIDDEN, "hidden", takes=0) == 8 * 4
    assert alive(SUMMED, "both") == 2 * 8 * 4 * 4  # in the memory of the base
    assert alive(REDUCED.format("4, 8", "reduced"), "reduced") == 8 * 4 * 4  # of a gradient that nobody else has
    assert alive(REDUCED.format("4, 8", "reduced, product"), "reduced") == 2 * 8 * 4 * 4
    turned = REDUCED.replace("view.default(product, [{}])", "t.default(product)").format("reduced")
    assert alive(turned, "reduced") == 2 * 8 * 4 * 4
    assert alive(OWN, "mine") == 0  # a view of an input


def test_what_ops_need_for_themselves():
    assert alive(COMBINED, "combined") == 8 * 4 + 2 * 8 * 4  # a row for every pair


def test_chunks_save_what_rings_let_go_of():
    foot = Footprint(around=10.0, within=18.0, elsewhere=11.0)
    assert [foot.peak(n) for n in (1, 4)] == [18.0, 18.0]
    assert [foot.peak(n, rings=2) for n in (1, 2, 4, 8)] == [18.0, 18.0, 14.0, 12.0]
    assert foot.peak(64, rings=2) == 11.0


def test_what_a_program_does_not_read_is_resident():
    """With its gradients in the backward; what is tied is there once, what is cut is there in part."""
    model = nn.Module()
    model.read, model.left, model.frozen, model.cut = (nn.Parameter(torch.ones(8, 4)) for _ in range(4))
    model.tied, model.frozen.requires_grad = model.read, False
    model.register_buffer("steps", torch.zeros(3))
    gm, _ = graph("def graph(read: 'f32[8, 4]'):\n    return (read,)\n")
    gm.graph.find_nodes(op="placeholder")[0].meta["moefx"] = Source("param", "read")
    home = Home(model, None, MeshSpec({"ep": 2}))
    home.layouts["cut"] = Layout.rows(8, "ep")
    whole, part = 8 * 4 * 4, 4 * 4 * 4
    assert home.unread(gm) == {"forward": 12 + 2 * whole + part, "backward": 12 + 3 * whole + 2 * part}
    home.layouts |= {"cut": Layout.spread((0, 1, 1, 1, 1, 1, 0, 0), "ep", 2), "left": Layout(owner=(("ep",), 0))}
    home.memory |= {"cut": 7, ("left", "elsewhere"): 3}  # rows; of two experts a rank has three
    memory, rows = 7 * 4 * 4 + whole * 3 / 2, 5 * 4 * 4
    assert home.unread(gm) == {"forward": 12 + whole + memory, "backward": 12 + whole + memory + rows + whole / 2}


class Layer(nn.Module):
    """A norm, an MoE, a residual."""

    def __init__(self) -> None:
        super().__init__()
        config = Qwen3MoeConfig(hidden_size=64, moe_intermediate_size=96, num_experts=4, num_experts_per_tok=2)
        config._experts_implementation = "grouped_mm"
        self.norm, self.moe = nn.LayerNorm(64), Qwen3MoeSparseMoeBlock(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.moe(self.norm(x))


@pytest.mark.parametrize("options", [
    {}, {"chunks": 4, "keep": "lean", "placement": "balanced", "copies": 1},  # with room for copies
], ids=str)  # fmt: skip
def test_what_is_planned_is_what_a_step_needs(options):
    """On a rank without peers: others would hold memory of it for a moment. benchmarks/results/memory_planned.md has
    more of it, on processes and larger layers."""
    torch.manual_seed(0)
    x, layer = torch.randn(4, 128, 64), Layer()
    for weight in layer.parameters():
        nn.init.normal_(weight, std=0.1)
    with fake_world(2), noting_rows():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
        with closing(moefx.compile(layer, mesh, **options, example_inputs=(x,))) as model:
            found, wanted = measured(model, x, steps=1), planned(model)
    errors = {name: wanted[name] / found[name] - 1 for name in found}
    assert all(abs(error) <= 0.01 for error in errors.values()), errors
