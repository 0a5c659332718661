"""S3 with "dedup": a token crosses once to a node, whose ranks gather its pairs. Golden, refusal, meaning, faults."""

# ruff: noqa: E501 (golden texts)

from __future__ import annotations

import re

import pytest
import torch
from expecttest import assert_expected_inline

from moefx.axes import MeshSpec
from moefx.errors import UnsupportedUse, VerifyError
from moefx.ir.edit import copy_of
from moefx.ir.level import Level
from moefx.ir.op import value
from moefx.ir.verify import Facts, verify
from moefx.ir.ways import GATHER, INTER, INTRA, SCATTER, Hop, Way
from moefx.options import Options
from tests.ir.test_sharding_rules import BIASED
from tests.passes.test_dedup_nodes import MANY, PER_ROW, UNWEIGHTED, called, changed, doubled, dropped
from tests.passes.test_gather_tokens import WHOLE, check_meaning
from tests.support.graphs import short
from tests.support.placing import nested_and_placed, placed
from tests.support.small import MOE

ONCE = Options(schedule="s3", alltoall="dedup")
PLAIN = MeshSpec.named({"ep": 2, "esp": 2}, 2)
FOLDED = MeshSpec.folded({"dp": 2, "mp": 2}, 2, 2, 2)
TWO_PLACES = MeshSpec.named({"ep": 4, "esp": 2}, 4)
MOVES = re.compile(r"all_to_all|regroup|_parts|exchange|traffic|across|within|arrived|kept|crossed|r0_rows =|route|combine")


def nested(source: str, mesh: MeshSpec) -> tuple[str, Way]:
    _, gm, _, ctx = placed(source, run=nested_and_placed, options=ONCE, mesh=mesh)
    lines = [line.strip() for line in short(gm).splitlines()]
    return "\n".join(line for line in lines if MOVES.search(line)), ctx.decisions.regions[0].way


def test_golden():
    """A node is one place: pairs are where their experts are once their token has crossed."""
    found, way = nested(MOE, PLAIN)
    assert_expected_inline(found, """""")
    assert way == Way((Hop(INTER, "ep+esp"), Hop(GATHER, "esp")), (Hop(SCATTER, "esp"), Hop(INTER, "ep+esp")))
    assert way.axis == "ep+esp"


def test_golden_of_nodes_with_several_places():
    found, way = nested(MOE, TWO_PLACES)
    assert_expected_inline("\n".join(line for line in found.splitlines() if re.search(r"_to_all|regroup|_parts", line)), """""")
    assert way == Way((Hop(INTER, "ep+esp"), Hop(INTRA, "ep"), Hop(GATHER, "esp")),
                      (Hop(SCATTER, "esp"), Hop(INTRA, "ep"), Hop(INTER, "ep+esp")))  # fmt: skip


def test_refusal():
    with pytest.raises(UnsupportedUse, match=r"'s3' needs experts that are cut over 'esp', and these are whole: .*softmax"):
        nested(WHOLE, PLAIN)


@pytest.mark.parametrize(("source", "mesh"), [
    (MOE, PLAIN), (MANY, FOLDED), (UNWEIGHTED, PLAIN), (PER_ROW, PLAIN), (BIASED, MeshSpec.named({"dp": 2, "ep": 2, "esp": 2}, 2)),
    (MANY, TWO_PLACES), (PER_ROW, TWO_PLACES), (MOE, MeshSpec.named({"ep": 2, "esp": 4}, 4)),
], ids=["weights", "folded", "none", "per row", "bias", "two places", "two places per row", "parts of 4"])  # fmt: skip
def test_meaning(source, mesh):
    check_meaning(source, mesh, ONCE, nested_and_placed)


# ---- faults


FAULTS = {
    "not gathered": (dropped("gather_parts"), "regroup: rows"),
    "not scattered": (dropped("scatter_parts"), "belong to another routing"),
    "gathered twice": (doubled("gather_parts"), "gather_parts: x belong to another routing"),
    "scattered twice": (doubled("scatter_parts"), "scatter_parts: x belong to another routing"),
    "ids stay at home": (dropped("all_to_all"), "dispatch: x are in the order 'source'"),
    "tokens cross twice": (doubled("all_to_all", 1), "all_to_all: rows are in the order 'source'"),
    "gathered over ep": (changed("gather_parts", 5, "ep"), "takes the rows of region 0"),
    "tokens cross over ep": (changed("all_to_all", 4, "ep", 1), "takes 'ep' for 4 ranks, it has 2"),
    "tokens within nodes": (changed("all_to_all", 6, "intra", 1), "'intra' nodes of 2 ranks"),
    "nodes of others": (changed("all_to_all", 7, 1, 1), "'inter' nodes of 1 ranks"),
    "gathered by who crosses": (changed("gather_parts", 1, lambda gm: called(gm, "across_places")), "belong to another routing"),
    "counts that are not dumped": (dropped("dump_counts"), "the traffic of rows that are not dumped"),
    "counts of nodes": (dropped("traffic_on_nodes"), "belong to another routing"),
    "as many rows come back as were gathered": (
        changed("scatter_parts", 2, lambda gm: called(gm, "received_rows", 1)), "rows come back"),
}  # fmt: skip


@pytest.fixture(scope="module")
def good():
    before, gm, _, ctx = placed(MOE, run=nested_and_placed, options=ONCE, mesh=PLAIN)
    sources = tuple(node.meta["moefx"] for node in gm.graph.find_nodes(op="placeholder"))
    ways = {number: region.way for number, region in ctx.decisions.regions.items()}
    facts = Facts(ctx.mesh, sources=sources, outputs=(value(before.graph.output_node().args[0][0]),), ways=ways)
    verify(gm, Level.PLACED, facts)
    return gm, facts


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_named(fault, good):
    gm, facts = copy_of(good[0]), good[1]
    damage, message = FAULTS[fault]
    damage(gm)
    with pytest.raises(VerifyError, match=message):
        verify(gm, Level.PLACED, facts)
