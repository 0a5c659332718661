"""Machines: times by algorithm and their limits, formulas, files."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import sympy

from moefx.costmodel.alltoall import Algorithm, Group, phases
from moefx.costmodel.amounts import Amounts, Gemm, Kind, at
from moefx.costmodel.curves import AlphaBeta, GemmModel, Segment, symbol
from moefx.costmodel.machine import Machine, Provenance
from moefx.costmodel.machines import PRESETS, preset
from moefx.errors import MoefxError
from moefx.ir.op import Sent, Volume

A_I, B_I, A_X, B_X, MEMORY, LAUNCH = 3e-6, 4e-12, 12e-6, 4e-11, 1e12, 5e-6
BYTES = sympy.Symbol("S", positive=True)


def machine(**changes):
    links = {"intra": AlphaBeta.of(A_I, B_I), "inter": AlphaBeta.of(A_X, B_X)}
    figures = {
        "name": "test", "provenance": Provenance("assumed", "a test", "2025-01-02"),
        "gemm": {"float32": GemmModel(1e13, 10, 20, 30)}, "memory_bytes_per_s": MEMORY, "launch_s": LAUNCH,
        "collectives": {(c, link, a): curve for link, curve in links.items()
                        for c, a in (("all_to_all", "direct"), ("all_gather", "ring"), ("all_reduce", "ring"))},
        "copies": {"d2h": AlphaBeta.of(1e-5, 1e-10)}, "ranks_per_node": 8, "nics_per_node": 8, "pipe_rho": 0.25,
        "interference": {("compute", "inter"): 0.9, ("compute", "intra"): 0.8},
    }  # fmt: skip
    return Machine(**{**figures, **changes})


def all_to_all(payload=BYTES):
    return Amounts(Kind.COLLECTIVE, collective="all_to_all", axes=("ep",), payload=sympy.sympify(payload))


def seconds(algorithm, ranks, nbytes, on=None):
    return (on or machine()).time_of(all_to_all(), {"S": nbytes}, {"ep": ranks}, algorithm=algorithm)


def test_direct_is_the_sum_over_both_links():
    n, m, nbytes = 32, 8, 2**24
    intra = (m - 1) * A_I + nbytes * (m - 1) / n * B_I
    inter = (n - m) * A_X + nbytes * (n - m) / n * B_X
    assert seconds("direct", n, nbytes) == pytest.approx(intra + inter)
    assert seconds("pipe", n, nbytes) == pytest.approx(max(intra, inter) + 0.25 * min(intra, inter))


def test_2dh_is_tutels_formula():
    n, m, nbytes = 64, 8, 2**20
    wanted = (2 * (2 * nbytes / MEMORY + LAUNCH) + (m - 1) * A_I + nbytes * B_I * (m - 1) / m
              + (n / m - 1) * A_X + nbytes * (1 - m / n) * B_X)
    assert seconds("2dh", n, nbytes) == pytest.approx(wanted)


def test_2dh_wins_for_many_ranks_and_little_data_only():
    assert seconds("2dh", 256, 2**20) < seconds("direct", 256, 2**20) / 2
    assert seconds("2dh", 16, 2**27) > seconds("direct", 16, 2**27)


def test_1dh_loads_one_rank_of_a_node_with_all_its_data():
    n, m, nbytes = 16, 8, 2**20
    collected = (m - 1) * A_I + nbytes * (m - 1) * B_I
    between = A_X + m * nbytes / 2 * B_X  # its own card: no faster than when all ranks send
    copies = 2 * (LAUNCH + 2 * m * nbytes / MEMORY)
    assert seconds("1dh", n, nbytes) == pytest.approx(2 * collected + copies + between)
    one_card = machine(nics_per_node=1)  # now it has the card of eight
    assert seconds("1dh", n, nbytes, one_card) == pytest.approx(2 * collected + copies + A_X + nbytes / 2 * B_X)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_within_a_node_all_algorithms_are_one(ranks):
    wanted = (ranks - 1) * A_I + 2**20 * (ranks - 1) / ranks * B_I
    for algorithm in Algorithm:
        assert seconds(algorithm, ranks, 2**20) == pytest.approx(wanted)


@pytest.mark.parametrize("algorithm", list(Algorithm))
def test_one_rank_sends_nothing(algorithm):
    assert seconds(algorithm, 1, 2**20) == 0


@pytest.mark.parametrize("algorithm", list(Algorithm))
def test_one_rank_per_node_has_nothing_to_aggregate(algorithm):
    alone = machine(ranks_per_node=1, nics_per_node=1)
    assert seconds(algorithm, 4, 2**20, alone) == pytest.approx(3 * A_X + 2**20 * 3 / 4 * B_X)


@pytest.mark.parametrize("algorithm", list(Algorithm))
def test_every_byte_arrives(algorithm):
    """What a rank sends over a link: direct sends just what leaves; 2DH passes more through the node."""
    found = phases(algorithm, Group(32, 8), sympy.Integer(3200))
    inter = sum(phase.nbytes for phase in found if phase.resource == "inter")
    assert inter == (8 if algorithm is Algorithm.ONE_DH else 1) * 3200 * 24 // 32
    resources = [phase.resource for phase in found]
    back = [phase.resource for phase in phases(algorithm, Group(32, 8), sympy.Integer(3200), reverse=True)]
    assert back == resources[::-1]


@pytest.mark.parametrize("algorithm", list(Algorithm))
@pytest.mark.parametrize("link", ["intra", "inter"])
@pytest.mark.parametrize("figure", ["alpha_s", "beta_s_per_byte"])
def test_no_faster_with_a_slower_link(algorithm, link, figure):
    fast, key = machine(), ("all_to_all", link, "direct")
    old = fast.collectives[key].segments[0]
    slow = replace(fast, collectives={**fast.collectives, key: AlphaBeta((replace(old, **{figure: 100.0}),))})
    for ranks in (2, 8, 16, 64):
        before, after = seconds(algorithm, ranks, 2**20, fast), seconds(algorithm, ranks, 2**20, slow)
        assert after > before if link in _links_of(algorithm, ranks) else after == before


def _links_of(algorithm, ranks):
    return {phase.resource for phase in phases(algorithm, Group(ranks, min(ranks, 8)), sympy.Integer(2**20))}


def test_times_of_other_nodes():
    here = machine()
    gather = Amounts(Kind.COLLECTIVE, collective="all_gather", axes=("ep",), payload=sympy.Integer(800))
    assert here.time_of(gather, {}, {"ep": 4}) == pytest.approx(3 * A_I + 600 * B_I)
    reduce = replace(gather, collective="all_reduce", axes=("dp", "ep"))
    assert here.time_of(reduce, {}, {"dp": 2, "ep": 8}) == pytest.approx(30 * A_X + 2 * 750 * B_X)
    assert here.time_of(Amounts(Kind.MEMORY, Volume(hbm_bytes=10**9)), {}) == pytest.approx(LAUNCH + 1e-3)
    assert here.time_of(Amounts(Kind.HOST, Volume(hbm_bytes=10**5)), {}) == pytest.approx(2e-5)
    assert here.time_of(Amounts(Kind.FREE), {}) == 0


def test_matmuls_saturate_in_every_dim():
    here, model = machine(), GemmModel(1e13, 10, 20, 30)
    assert model.efficiency(10, 1e9, 1e9) == pytest.approx(0.5)
    assert model.efficiency(1e9, 20, 1e9) == pytest.approx(0.5)
    assert model.efficiency(1e9, 1e9, 1e9) == pytest.approx(1)
    product = Amounts(Kind.GEMM, gemm=Gemm(*sympy.symbols("m n k"), sympy.Integer(3), "float32"))
    sizes = {"m": 128, "n": 256, "k": 512}
    wanted = LAUNCH + 3 * 2 * 128 * 256 * 512 * (1 + 10 / 128 + 20 / 256 + 30 / 512) / 1e13
    assert here.time_of(product, sizes) == pytest.approx(wanted)
    assert at(here.formula(product), sizes) == pytest.approx(wanted)
    assert here.time_of(product, {**sizes, "m": 0}) == LAUNCH
    more = replace(product, gemm=replace(product.gemm, beside=sympy.Symbol("m") * 1000))
    wanted += 128_000 / here.memory_bytes_per_s
    assert here.time_of(more, sizes) == pytest.approx(wanted)
    assert at(here.formula(more), sizes) == pytest.approx(wanted)


def test_of_a_dtype_that_was_not_measured_the_nearest_in_size_counts():
    fast, slow = GemmModel(2e13), GemmModel(1e13)
    here = machine(gemm={"float32": slow, "bfloat16": fast})
    dtypes = ("float32", "bfloat16", "float16", "float64", "float8_e4m3fn")
    assert [here.gemm_model(dtype) for dtype in dtypes] == [slow, fast, fast, slow, fast]
    with pytest.raises(MoefxError, match="no matmul times"):
        machine(gemm={}).gemm_model("float32")


def test_a_measured_shape_is_used_as_it_is():
    here = machine(gemm={"float32": GemmModel(1e13, table=((128, 256, 512, 0.125),))})
    shape = Gemm(*map(sympy.Integer, (128, 256, 512, 1)), "float32")
    assert here.time_of(Amounts(Kind.GEMM, gemm=shape), {}) == 0.125
    assert here.time_of(Amounts(Kind.GEMM, gemm=replace(shape, m=sympy.Integer(129))), {}) < 0.1


@pytest.mark.parametrize("algorithm", list(Algorithm))
def test_the_formula_is_the_number(algorithm):
    here, mesh = machine(), {"dp": 2, "ep": 16}
    split = AlphaBeta((Segment(1e-6, 1e-9, 2**12), Segment(1e-5, 1e-10)))
    here = replace(here, collectives={**here.collectives, ("all_to_all", "inter", "direct"): split})
    formula = here.formula(all_to_all(), mesh, algorithm=algorithm)
    for nbytes in (2**10, 2**14, 2**16, 2**18, 2**22):
        assert at(formula, {"S": nbytes}) == pytest.approx(
            here.time_of(all_to_all(), {"S": nbytes}, mesh, algorithm=algorithm))
    named = here.formula(all_to_all(), mesh, algorithm=algorithm, how=symbol)
    assert "alpha_all_to_all_inter_1" in str(named)


def test_a_formula_prints():
    text = str(machine().formula(all_to_all(), {"ep": 16}, how=symbol))
    assert text == ("S*beta_all_to_all_inter/2 + 7*S*beta_all_to_all_intra/16 "
                    "+ 8*alpha_all_to_all_inter + 7*alpha_all_to_all_intra")
    assert "rho" in str(machine().formula(all_to_all(), {"ep": 16}, algorithm="pipe", how=symbol))


def test_groups_by_place_in_the_mesh():
    here = machine(ranks_per_node=4)
    mesh = {"dp": 2, "ep": 8}
    assert here.group(mesh, ["ep"]) == Group(8, 4)
    assert here.group({"dp": 8, "ep": 2}, ["ep"]) == Group(2, 2)
    assert here.group({"ep": 4, "dp": 4}, ["ep"]) == Group(4, 1)
    assert here.group({"ep": 4, "dp": 2}, ["ep"]) == Group(4, 2)
    assert here.group(mesh, ["dp", "ep"]) == Group(16, 4)
    with pytest.raises(MoefxError, match="unevenly"):
        here.group({"ep": 6}, ["ep"])
    with pytest.raises(MoefxError, match="no axis 'tp'"):
        here.group(mesh, ["tp"])


def test_what_a_machine_lacks_is_named():
    here = machine(collectives={("all_to_all", "intra", "direct"): AlphaBeta.of(1, 1)}, copies={})
    with pytest.raises(MoefxError, match="all_to_all/inter/direct"):
        seconds("direct", 16, 100, here)
    with pytest.raises(MoefxError, match="needs the mesh"):
        here.time_of(all_to_all(100), {})
    with pytest.raises(MoefxError, match="'S'"):
        here.time_of(all_to_all(), {}, {"ep": 2})
    with pytest.raises(MoefxError, match="d2h"):
        here.time_of(Amounts(Kind.HOST, Volume(hbm_bytes=1)), {})


def test_where_nothing_is_sent_no_link_is_wanted():
    """Rows that crossed to a node with one rank go no further."""
    slow = preset("emulated-200mbit")
    alone = replace(slow, collectives={key: curve for key, curve in slow.collectives.items() if key[1] == "inter"})
    sent = (Sent("inter", 1, sympy.Integer(4096)), Sent("intra", 0, sympy.Integer(0)))
    amounts = Amounts(Kind.COLLECTIVE, collective="all_to_all", payload=sympy.Integer(8192), sent=sent)
    assert alone.time_of(amounts, {}, {"ep": 2}) == slow.time_of(replace(amounts, sent=sent[:1]), {}, {"ep": 2}) > 0


def test_an_unknown_algorithm_is_refused():
    with pytest.raises(MoefxError, match="3dh"):
        seconds("3dh", 16, 100)


@pytest.mark.parametrize("found", [machine(), *PRESETS.values()], ids=lambda m: m.name)
def test_a_file_gives_back_the_same_machine(found, tmp_path):
    path = tmp_path / "machine.json"
    split = AlphaBeta((Segment(1 / 3, 1e-300, 2**12), Segment(0.1, 1e-10)), 0.1)
    found = replace(found, copies={**found.copies, "h2d": split}, gemm={"x": GemmModel(1e9, table=((1, 2, 3, 0.3),))})
    found.save(path)
    assert Machine.load(path) == found
    assert Machine.load(path).digest() == found.digest()
    assert replace(found, launch_s=found.launch_s * (1 + 1e-15)).digest() != found.digest()


def test_wrong_files_are_refused(tmp_path):
    text = machine().to_json()
    data = json.loads(text)
    newer = json.dumps({**data, "moefx_machine": 99})
    damaged = json.dumps({name: each for name, each in data.items() if name != "launch_s"})
    bad_key = json.dumps({**data, "collectives": {"all_to_all": data["copies"]["d2h"]}})
    for wrong, match in ((newer, "version 99"), (damaged, "damaged"), (bad_key, "damaged"),
                         *((other, "not a machine file") for other in ("{}", text[:100], "[1]"))):  # fmt: skip
        with pytest.raises(MoefxError, match=match):
            Machine.from_json(wrong)
    with pytest.raises(MoefxError, match="no machine file"):
        Machine.load(tmp_path / "none.json")


def test_segments_must_cover_all_sizes():
    for ends in ([], [1.0], [None, None], [2.0, 1.0, None]):
        with pytest.raises(MoefxError):
            AlphaBeta(tuple(Segment(0, 0, end) for end in ends))


@pytest.mark.parametrize("found", PRESETS.values(), ids=list(PRESETS))
def test_every_figure_of_a_preset_says_where_it_comes_from(found):
    wanted = {f"gemm.{dtype}" for dtype in found.gemm} | {"/".join(key) for key in found.collectives}
    wanted |= {"memory_bytes_per_s", "rows_bytes_per_s", "launch_s", "start_s", "copies", "pipe_rho"}
    assert found.start_s > 0
    assert 0 < found.rows_bytes_per_s <= found.memory_bytes_per_s
    wanted |= {"interference"} if found.interference else set()
    assert set(found.sources) == wanted
    assert all(source.text for source in found.sources.values())


def test_presets_by_name():
    assert preset("parm-b").ranks_per_node == 4
    with pytest.raises(MoefxError, match="h100-8x400g"):
        preset("h100-8x400")


def test_schemoe_preset_gives_the_papers_all_to_all():
    """ScheMoE's Table 10: 644 MB on 32 GPUs; Pipe-A2A is 1.645 times faster."""
    found = preset("schemoe")
    assert seconds("direct", 32, 644e6, found) == pytest.approx(0.393, rel=1e-3)
    assert seconds("direct", 32, 644e6, found) / seconds("pipe", 32, 644e6, found) == pytest.approx(1.645, rel=1e-3)


def test_emulated_preset_gives_what_was_measured():
    assert seconds("direct", 4, 2**22, preset("emulated-200mbit")) == pytest.approx(0.180, rel=0.02)
