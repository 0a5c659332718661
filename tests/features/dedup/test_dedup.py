"""A token crosses once to a node: outputs and gradients of the eager model, on ranks that are threads."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest

import moefx
from moefx.ir.ways import GATHER, INTER, INTRA, SCATTER
from tests.planning.test_planner import machine
from tests.support.models import chosen, shallow
from tests.support.parity import one_token, skew
from tests.support.scenarios import EP4, check_compiled, compiled_case, steps_of
from tests.support.sharing import run_sharing

UNEVEN = [(1, 6), (3, 10)]
EP8 = ((8,), ("ep",))
FULL = pytest.mark.full
SLOW = machine(message_s=1e-9, bytes_per_s=1e5, intra=1e3, launch_s=1e-9, ranks_per_node=2)


def check(rank, world, layout, case, steps, options):
    wanted = moefx.Options.named(**{"alltoall": "dedup", "ranks_per_node": 2, **options})
    compiled = compiled_case(case, layout, lambda model, mesh: moefx.compile(model, mesh, wanted))
    check_compiled(rank, layout, case, steps, compiled)
    regions = [facts for variant in compiled._whole.variants for facts in variant.program.regions]
    kinds = {hop.kind for facts in regions for hop in facts.way.hops}
    assert kinds - {INTRA} == ({INTER, GATHER, SCATTER} if options.get("split") == "s3" else {INTER})
    compiled.close()


# A loss of the router, weights before the experts, biases, groups of experts with k=3, what is frozen, statistics.
@pytest.mark.parametrize("name", chosen(
    ["loop-before"],
    ["qwen3_moe-grouped_mm", "loop-before", "mixtral-router_logits", "gpt_oss-eager", "deepseek_v3-batched_mm",
     "olmoe-eager", "qwen3_moe-frozen", "loop-frozen", "loop-counting"]))  # fmt: skip
def test_two_nodes_of_two_ranks(name):
    """Chosen by the planner, since links between nodes are slow."""
    case = shallow(name)
    chosen_by = {"alltoall": None, "chunks": 1, "machine": SLOW}
    run_sharing(4, check, EP4, case, steps_of(case, [UNEVEN * 2]), chosen_by)


@pytest.mark.parametrize(("name", "layout", "options"), [
    ("loop-counting", EP8, {"ranks_per_node": 4, "chunks": 2, "scheduler": "optsche"}),
    pytest.param("gpt_oss-grouped_mm", EP4, {"ranks_per_node": 1}, marks=FULL),
    pytest.param("deepseek_v3-grouped_mm", EP8, {"chunks": 2, "scheduler": "optsche"}, marks=FULL),
    pytest.param("mixtral-grouped_mm", EP8, {"verify": 2}, marks=FULL),
    pytest.param("olmoe-grouped_mm", ((2, 4), ("dp", "ep")), {"chunks": 3}, marks=FULL),
    pytest.param("mixtral-router_logits", ((2, 2), ("mp", "ep")), {"ranks_per_node": 1}, marks=FULL),
    pytest.param("loop-plain", ((2, 4), ("dp", "mp")), {"ep": 8, "split": "baseline"}, marks=FULL),
], ids=["nodes of 4", "nodes of 1", "k=3", "4 nodes", "dp", "mp", "copies"])  # fmt: skip
def test_meshes(name, layout, options):
    case, (sizes, names) = shallow(name), layout
    readers = math.prod(size for size, dim in zip(sizes, names) if dim != "mp")
    run_sharing(math.prod(sizes), check, layout, case, steps_of(case, [(UNEVEN * readers)[:readers]]), options)


@pytest.mark.parametrize(("name", "layout", "options"), [
    ("mixtral-router_logits", ((2, 2), ("dp", "mp")), {"ep": 2, "esp": 2}),
    pytest.param("loop-counting", ((2, 2), ("ep", "esp")), {"chunks": 2, "scheduler": "optsche"}, marks=FULL),
    pytest.param("qwen3_moe-grouped_mm", ((4,), ("mp",)), {"ep": 2, "esp": 2, "verify": 2}, marks=FULL),
    pytest.param("gpt_oss-grouped_mm", ((2, 2, 2), ("mp", "ep", "esp")), {}, marks=FULL),
    pytest.param("deepseek_v3-grouped_mm", ((4, 2), ("ep", "esp")), {"ranks_per_node": 4}, marks=FULL),
    pytest.param("gpt_oss-grouped_mm", ((2, 4), ("dp", "mp")),
                 {"ep": 4, "esp": 2, "ranks_per_node": 4, "chunks": 2, "scheduler": "heuristic"}, marks=FULL),
    pytest.param("mixtral-grouped_mm", ((2, 4), ("dp", "mp")), {"ep": 2, "esp": 4, "ranks_per_node": 4}, marks=FULL),
], ids=["folded", "chunks", "over mp", "mp", "nodes of 2 places", "folded, 2 places", "parts of 4"])  # fmt: skip
def test_parts_of_experts(name, layout, options):
    """With S3: ranks with parts of the same experts are on one node."""
    test_meshes(name, layout, {"split": "s3", **options})


@pytest.mark.parametrize("change", ["all to two", pytest.param("idle", marks=FULL)])
@pytest.mark.parametrize(("layout", "options"), [
    (EP4, {}), pytest.param(((2, 2), ("ep", "esp")), {"split": "s3"}, marks=FULL),
], ids=["whole", "parts"])  # fmt: skip
def test_skewed_routing(layout, options, change):
    """Experts of one node get all tokens, or some of all."""
    case = shallow("gpt_oss-grouped_mm")
    if change == "all to two":
        case = replace(case, edit=partial(skew, experts=[0, 1]))
        steps = steps_of(case, [UNEVEN * 2])
    else:
        steps = steps_of(case, [UNEVEN * 2], change=partial(one_token, token=7))
    run_sharing(4, check, layout, case, steps, options)
