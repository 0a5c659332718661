"""Axes: roles that are several root dims, places along them, and how groups lie on nodes, against tables of ranks."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moefx.analysis.checking.compare import Comparison
from moefx.axes import MeshSpec
from moefx.compiler.pipeline import Pipeline
from moefx.costmodel.alltoall import Group
from moefx.costmodel.machines import preset
from moefx.errors import MeshError, MoefxError, VerifyError
from moefx.ir import world
from moefx.ir.edit import copy_of
from moefx.ir.header import Header, read_header
from moefx.ir.level import Level
from moefx.ir.verify import Facts, verify
from moefx.link import rehearsal
from moefx.link.emit import emit, load
from moefx.link.lower import Linker
from moefx.options import Options
from moefx.passes.expand_transport import _ranks_per_node
from moefx.runtime.groups import MeshView
from tests.support.breadth import places
from tests.support.graphs import context, graph
from tests.support.small import CAPTURED

FOLDED = MeshSpec({"d": 1, "a": 2, "b": 2}, {"data": ("d", "a", "b"), "ep": ("a", "b")})
SPREAD = MeshSpec({"a": 2, "m": 2, "b": 2}, {"data": ("a", "b"), "mp": ("m",), "ep": ("a", "b")})  # with m in between


@st.composite
def meshes(draw):
    """(a mesh of up to four dims, some of them)."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    dims = "abcd"[: len(sizes)]
    per_node = draw(st.sampled_from([None, 1, 2, 3, 4, 6, 8]))
    return MeshSpec(dict(zip(dims, sizes)), {}, per_node), tuple(d for d in dims if draw(st.booleans()))


def groups_of(mesh: MeshSpec, dims: tuple[str, ...]) -> list[list[int]]:
    """Every group of ranks that differ along `dims` alone, each in order, by looking at all ranks."""
    table = list(itertools.product(*(range(size) for size in mesh.root.values())))  # row r: coordinates of rank r
    names, found = list(mesh.root), {}
    for rank, row in enumerate(table):
        fixed = tuple(c for name, c in zip(names, row) if name not in dims)
        found.setdefault(fixed, []).append(rank)
    return list(found.values())


@settings(max_examples=60, deadline=None)
@given(meshes())
def test_places_are_those_in_the_table_of_ranks(drawn):
    mesh, dims = drawn
    for group in groups_of(mesh, dims):
        assert [mesh.place(dims, mesh.coordinates(rank)) for rank in group] == list(range(mesh.size(dims)))


@settings(max_examples=60, deadline=None)
@given(meshes())
def test_the_runtime_finds_the_same_places_and_ranks(drawn):
    mesh, dims = drawn
    sizes = tuple(mesh.root.values())
    for group in groups_of(mesh, dims):
        for rank in group:
            at = tuple(mesh.coordinates(rank).values())
            view = MeshView(tuple(mesh.root), sizes, at, tuple(range(100, 100 + math.prod(sizes))), "cpu")
            for axes in (dims, "+".join(dims)):
                assert view.members(axes) == [100 + other for other in group]
                assert (view.size(axes), view.index(axes)) == (len(group), group.index(rank))


@settings(max_examples=100, deadline=None)
@given(meshes())
def test_groups_on_nodes_are_as_counted(drawn):
    mesh, dims = drawn
    runs = set()
    for group in groups_of(mesh, dims):
        nodes = [rank // (mesh.ranks_per_node or 10**6) for rank in group]
        runs.add(tuple(len(list(run)) for _, run in itertools.groupby(nodes)))
    each = {length for lengths in runs for length in lengths}
    assert mesh.nodes_of(dims) == (mesh.size(dims), each.pop() if len(each) == 1 and len(runs) == 1 else None)


@settings(max_examples=40, deadline=None)
@given(meshes())
def test_the_machine_and_the_passes_say_the_same_of_nodes(drawn):
    mesh, dims = drawn
    axis = "+".join(d for d in dims if mesh.root[d] > 1)
    here = replace(preset("emulated-200mbit"), ranks_per_node=mesh.ranks_per_node or mesh.size(mesh.everyone))
    n, m = mesh.nodes_of(axis)
    if m is None:
        with pytest.raises(MoefxError, match="unevenly"):
            here.group(mesh.root, dims)
        assert _ranks_per_node(mesh, axis) == (n, f"the {n} ranks of '{axis}' are not whole nodes of "
                                                  f"{mesh.ranks_per_node} ranks")  # fmt: skip
    else:
        assert here.group(mesh.root, dims) == Group(n, m)
        assert _ranks_per_node(mesh, axis)[0] == m


def test_the_second_group_of_an_axis_may_lie_across_nodes():
    mesh = MeshSpec.named({"dp": 2, "ep": 3}, 4)  # ranks 0 1 2 | 3 4 5 on nodes 0 1 2 3 | 4 5
    assert mesh.nodes_of("ep") == (3, None)


def test_roles_are_root_dims():
    assert FOLDED.dims("ep") == ("a", "b")
    assert (FOLDED.axis("ep"), FOLDED.axis("data"), FOLDED.axis("data", but="ep")) == ("a+b", "a+b", "")
    assert (FOLDED.axis("mp"), FOLDED.size("mp"), FOLDED.place("mp", {})) == ("", 1, 0)
    assert (SPREAD.axis("ep"), SPREAD.size("data"), SPREAD.size(SPREAD.everyone)) == ("a+b", 4, 8)
    assert SPREAD.place("ep", {"a": 1, "m": 1, "b": 0}) == 2
    with pytest.raises(MeshError, match=r"no axis 'x'[\s\S]*it has d, a, b"):
        FOLDED.dims("a+x")


@pytest.mark.parametrize(("roles", "message"), [
    ({"tp": ("a",)}, "'tp' is no role of a mesh"),
    ({"ep": ("b", "a")}, "the role 'ep' is b[+]a, which are not root dims in the order of the mesh, a, b, mp"),
    ({"ep": ("c",)}, "the role 'ep' is c, which are not root dims"),
    ({"mp": ("a", "mp")}, "'mp' is a root dim, and a role of a[+]mp"),
])  # fmt: skip
def test_refusal(roles, message):
    with pytest.raises(MeshError, match=message):
        MeshSpec({"a": 2, "b": 2, "mp": 2}, roles)


@pytest.mark.parametrize("mesh", [FOLDED, SPREAD, MeshSpec.named({"dp": 2, "ep": 4}, 2), MeshSpec.named({"dp": 2})])
def test_a_dump_says_what_the_mesh_is(mesh):
    lines = "\n".join(Header("moe", mesh=mesh).lines())
    assert read_header(f'"""A graph.\n\n{lines}\n"""\n').mesh == mesh


def test_axes_of_a_program_stand_in_the_order_of_the_mesh():
    gm, _ = graph("""
        def graph(x: "f32[s0, 16]", table: "i64[8, 1]", idx: "i64[s0, 2]"):
            counts = m.route.default(idx, 8, table)[1]
            traffic = m.exchange_counts.default(counts, 4, 'a+b')
            return (traffic,)
    """)
    verify(gm, Level.PLACED, Facts(FOLDED))
    node = next(n for n in gm.graph.nodes if n.args[-1:] == ("a+b",))
    node.args = (*node.args[:-1], "b+a")
    with pytest.raises(VerifyError, match=r"'b[+]a', not in the order of the mesh"):
        verify(gm, Level.PLACED, Facts(FOLDED))
    node.args = (*node.args[:-2], 2, "a+b")
    with pytest.raises(VerifyError, match=r"takes 'a[+]b' for 2 ranks, it has 4"):
        verify(gm, Level.PLACED, Facts(FOLDED))


def program(mesh: MeshSpec, **options):
    """(pipeline, graphs) of the small model through the whole pipeline, every step run and compared."""
    gm, mode = graph(CAPTURED)
    pipeline = Pipeline(replace(context(mode, Options.named(verify=2, split="baseline", **options)), mesh=mesh))
    return pipeline, pipeline.run(gm)


@pytest.mark.parametrize(("mesh", "options"), places(
    itertools.product([FOLDED, SPREAD], [{}, {"chunks": 2, "alltoall": "2dh", "scheduler": "optsche"}]), 1, 2),
    ids=["folded, plain", "folded, 2dh", "spread, plain", "spread, 2dh"])  # fmt: skip
def test_experts_over_two_root_dims_are_those_over_one(mesh, options):
    """Four ranks of ep = a+b make the program, and compute the bits, of ep=4; so does the emitted code."""
    mesh = replace(mesh, ranks_per_node=2 if mesh is FOLDED else 4)
    pipeline, found = program(mesh, **options)
    plain, wanted = program(MeshSpec.named({"dp": 1, "ep": 4}, 2), **options)
    for ours, theirs in zip(found.graphs.values(), wanted.graphs.values()):
        ops = [[str(n.target) for n in gm.graph.nodes if n.op == "call_function"] for gm in (ours, theirs)]
        assert ops[0] == ops[1]
    names = [str(n.meta["moefx"].key) for n in found.forward.graph.find_nodes(op="placeholder")]
    functions, scheduled = {}, {name: copy_of(gm) for name, gm in found.graphs.items()}
    for name, gm in found.graphs.items():
        Linker(gm, names, "cpu").run()
        functions[name] = load(emit(gm, name), name)
    pipeline.checks.emitted(replace(found, **scheduled),
                            lambda name, inputs: rehearsal.run(functions[name], inputs, mesh.root))
    ranks = [r for r in range(mesh.size(mesh.everyone)) if mesh.coordinates(r).get("m", 0) == 0]
    for rank, one in zip(ranks, plain.checks.comparison.last):
        assert isinstance(pipeline.checks.comparison, Comparison)
        other = pipeline.checks.comparison.last[rank]
        assert one.values.keys() == other.values.keys()
        assert all(torch.equal(one.values[name], other.values[name]) for name in one.values)


def test_thread_ranks_meet_along_joined_axes():
    ranks = world.ThreadWorld({"a": 2, "m": 2, "b": 2})

    def one(rank: int):
        here = world.current()
        mine = torch.tensor([rank])
        return here.coordinate("a+b"), here.all_gather(mine, "a+b").tolist(), int(here.all_reduce(mine, "m+b"))

    assert ranks.run(one) == [(SPREAD.place("ep", SPREAD.coordinates(r)), [0 + r // 2 % 2 * 2, 1 + r // 2 % 2 * 2,
                               4 + r // 2 % 2 * 2, 5 + r // 2 % 2 * 2], sum(range(r // 4 * 4, r // 4 * 4 + 4)))
                              for r in range(8)]  # fmt: skip


def test_esp_is_divided_so_that_every_divisor_is_some_dims():
    mesh = MeshSpec.named({"dp": 2, "ep": 2, "esp": 12}, 24).divided("esp")
    assert mesh.root == {"dp": 2, "ep": 2, "esp0": 2, "esp1": 2, "esp2": 3}
    assert (mesh.axis("esp"), mesh.size("esp"), mesh.is_folded) == ("esp0+esp1+esp2", 12, False)
    assert mesh.dims("data") == tuple(mesh.root)
    found = {r: mesh.token_dims(r) for r in (0, 1, 2, 3, 4, 6, 12)}
    assert found == {0: (), 1: (), 2: ("esp0",), 3: ("esp2",), 4: ("esp0", "esp1"), 6: ("esp0", "esp2"),
                     12: ("esp0", "esp1", "esp2")}  # fmt: skip
    folded = MeshSpec.folded({"dp": 2, "mp": 4}, 2, 4).divided("esp")
    assert (folded.root, folded.dims("mp"), folded.is_folded) == ({"dp": 2, "mp0": 2, "mp1": 2}, ("mp0", "mp1"), True)
    assert MeshSpec.named({"ep": 4, "esp": 3}).divided("esp") == MeshSpec.named({"ep": 4, "esp": 3})
    for r, said in ((5, "r is 5, and 12 ranks share an expert"), (8, "r is 8, and 12 ranks")):
        with pytest.raises(MeshError, match=said):
            mesh.token_dims(r)
    with pytest.raises(MeshError, match="'esp' was not divided"):
        MeshSpec.named({"esp": 4}).token_dims(2)
