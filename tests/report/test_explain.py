"""`moefx.explain`: what a user reads of the planner's choices, on the screen and as data."""

from __future__ import annotations

import json
import math
import re
from contextlib import closing
from dataclasses import replace

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import moefx
from moefx.analysis.sizes import typical_sizes
from moefx.costmodel.machines import preset
from moefx.errors import MoefxError, UnsupportedUse
from moefx.planning.memory import step_memory
from moefx.report import charts, page
from moefx.report.traces import Trace
from tests.support.breadth import places
from tests.support.handmade import Loop, OneLayer
from tests.support.models import shallow
from tests.support.ranks import fake_world
from tests.support.styles import D, E, K, Unbound

CASE = shallow("loop-setitem")


@pytest.fixture(scope="module", autouse=True)
def world():
    with fake_world(4):
        yield


def compiled(**options):
    mesh = init_device_mesh("cpu", (1, 4), mesh_dim_names=("dp", "ep"))
    return moefx.compile(CASE.build(), mesh, **options)


@pytest.fixture(scope="module")
def with_machine(world):
    with closing(compiled(machine="emulated-200mbit", lossy=True)) as model:
        yield moefx.explain(model, **CASE.batch(0)), moefx.timeline(model), moefx.memory(model), model.report()


@pytest.fixture(scope="module")
def planned(with_machine):
    return with_machine[0]


@pytest.fixture(scope="module")
def timeline(with_machine):
    return with_machine[1]


@pytest.fixture(scope="module")
def plain(world):
    model = compiled(chunks=2, codec="bf16")
    model.prepare(**CASE.batch(0))
    yield model
    model.close()


@pytest.fixture(scope="module")
def report(with_machine):
    return with_machine[3]


def test_a_sentence_says_what_communication_costs_and_what_hides_it(planned, timeline, plain):
    (program,) = planned.programs
    stages = [region.plan.stages for region in program.regions]
    sent = {name: sum(s for each in stages for k, s in each[name].items() if k in ("A1", "A2", "A1.intra", "A2.intra"))
            for name in ("forward", "backward")}  # fmt: skip
    total = {name: sum(s for each in stages for s in each[name].values()) for name in sent}
    assert f"communication is {sent['forward'] / total['forward']:.0%} of the forward" in program.summary
    assert f"{sent['backward'] / total['backward']:.0%} of the backward in whole" in program.summary
    assert f"predicted to take {1e3 * timeline.predicted.run_seconds:.3f} ms" in program.summary
    hidden = timeline.predicted.hidden_share()
    assert 0 < hidden < 1
    assert program.summary.endswith(f" {hidden:.0%} of the step's communication.")
    assert program.step.predicted.seconds == pytest.approx(timeline.predicted.run_seconds)
    assert f"computation hides {hidden:.0%} of that" in " ".join(str(planned).split())
    assert moefx.explain(plain).programs[0].summary == "", "nothing is predicted without a machine"


def test_it_begins_with_three_sentences_and_fits_on_two_screens(planned, plain):
    for found in (planned, moefx.explain(plain)):
        (program,) = found.programs
        title, *said = str(found).splitlines()
        assert title == program.title
        assert " ".join(" ".join(said).split()).startswith(" ".join(program.sentences))
        assert [sentence[-1] for sentence in program.sentences] == ["."] * 3
    what, how_long, memory = planned.programs[0].sentences
    layers, way = len(planned.regions), planned.regions[0].choice.words()
    runs = "its MoE layer runs" if layers == 1 else f"its {layers} MoE layers run"
    assert f"runs on 4 ranks, and {runs} with {way}." in what
    assert how_long == planned.programs[0].summary
    assert f"needs {planned.programs[0].peaks['backward'].bytes / 1e6:.1f} MB" in memory
    assert "No machine was given" in moefx.explain(plain).programs[0].sentences[1]
    (program,), region = planned.programs, planned.regions[0]
    chosen = region.plan.candidates
    kinds = [replace(region, choice=each.choice, plan=replace(region.plan, chosen=each)) for each in chosen[:12]]
    deep = [replace(kinds[n % 12], region=n, module=f"layers.{n}.mlp") for n in range(96)]
    text = str(replace(planned, programs=(replace(program, regions=tuple(deep)),)))
    assert len(text.splitlines()) <= 100
    assert "more ways, see to_dict()" in text
    assert f"8 with {chosen[0].choice.words()};" in " ".join(text.split())


def test_the_page_has_the_numbers_of_explain_timeline_and_memory(planned, timeline, with_machine, report):
    tree, memory = report.to_dict(), with_machine[2]
    assert tree["explanation"] == planned.to_dict()["programs"][0]
    assert tree["sentences"] == list(planned.programs[0].sentences)
    assert json.loads(json.dumps(tree)) == tree, "plain data"
    shown = Trace.from_chrome(tree["timeline"])
    assert shown.predicted.run_seconds == pytest.approx(timeline.predicted.run_seconds)
    bars = charts.timeline(shown, "forward")["data"]
    busy = sum(each.seconds for each in timeline.predicted.spans if each.graph == "forward")
    assert sum(sum(bar["x"]) for bar in bars) == pytest.approx(1e3 * busy)
    assert max(size for _, size in tree["memory"]["device"]["backward"]) == memory.peak("backward").bytes
    (layer,) = [each for each in tree["layers"] if each["choices"]]
    assert (layer["count"], layer["choices"]) == (len(planned.regions), [planned.regions[0].to_dict()])
    labels = [box["label"] for box in layer["graph"]]
    assert labels.index("rows out") < labels.index("experts") < labels.index("rows back") < labels.index("combine")
    assert all(above < number for number, box in enumerate(layer["graph"]) for above in box["after"])
    assert tree["loads"] == tree["stats"] == {}, "nothing ran"
    text = page.html(tree, "")
    assert text.count("<p>Chosen: ") == 1
    assert planned.regions[0].reason in text


def test_bytes_per_link_are_those_of_the_rows(world):
    """Of 15 tokens, each to K experts on 4 ranks of 2 nodes: a quarter stays on the node, a half leaves it."""
    mesh = init_device_mesh("cpu", (1, 4), mesh_dim_names=("dp", "ep"))
    options = moefx.Options(machine="emulated-200mbit", chunks=1, alltoall="direct")
    x = torch.randn(3, 5, D, requires_grad=True)
    with closing(moefx.compile(Unbound(), mesh, options, example_inputs=(x,))) as model:
        rows = model.report().to_dict()["links"]
    sent = {(row["graph"], row["link"], row["what"]): row["bytes"] for row in rows}
    whole = 15 * K * D * 4
    for graph in ("forward", "backward"):
        for what in ("rows out", "rows back"):
            assert sent[graph, "within a node", what] == pytest.approx(whole / 4)
            assert sent[graph, "between nodes", what] == pytest.approx(whole / 2)
    assert any(what == "gradients" for _, _, what in sent)


def test_candidates_reason_machine_and_formulas(planned):
    region = planned.regions[0]
    assert region.module.startswith("mlp")
    assert region.plan.chosen.choice == region.choice
    assert {c.choice.alltoall for c in region.plan.candidates} == {"direct", "pipe", "2dh", "1dh", "dedup"}
    assert {c.choice.codec for c in region.plan.candidates} == {"identity", "bf16", "int8"}
    text = str(planned)
    assert "machine emulated-200mbit (measured: all-to-all of 4 MiB" in text
    assert "figures assumed" in text
    assert region.reason in text
    assert "alpha_all_to_all_inter" in text
    assert "sizes: s" in text
    assert "\x1b[" not in text
    assert max(map(len, text.splitlines())) <= 120


def test_data_is_the_whole_of_it(planned):
    data = json.loads(planned.to_json())
    program = data["programs"][0]
    assert program["machine"]["kind"] == "measured"
    assert program["machine"]["sources"]["launch_s"].startswith("assumed")
    region = program["regions"][0]
    assert len(region["candidates"]) == len(planned.regions[0].plan.candidates)
    assert region["candidates"] == sorted(region["candidates"], key=lambda c: c["seconds"])
    assert set(region["formulas"]) == set(region["stage_seconds"]) == {"forward", "backward"}
    assert region["chosen"]["memory_bytes"] > 0
    assert data == planned.to_dict()
    (arrived, *_) = [each for each in program["classes"] if each["role"] == "T_DI"]
    assert arrived["where"] == region["module"]
    assert arrived["device_bytes"] == arrived["nbytes"] > arrived["seconds"] == arrived["host_bytes"] == 0


def test_without_a_machine_it_says_so_and_how_to_get_one(plain):
    found = moefx.explain(plain)
    assert found.programs[0].machine is None
    assert [region.plan for region in found.regions] == [None] * len(found.regions)
    choice = found.regions[0].choice
    assert (choice.chunks, choice.alltoall, choice.codec) == (2, "direct", "bf16")
    text = str(found)
    assert "No machine was given" in text
    assert "moefx calibrate" in text
    assert "chunks 2, all-to-all direct, codec bf16" in text


def test_equal_regions_are_said_once(planned):
    """The same figures of several layers, and of one that is slower."""
    (program,), region = planned.programs, planned.regions[0]
    several = [replace(region, region=n, module=f"layers.{n}.mlp") for n in range(48)]
    several[5] = replace(several[5], reason="another reason")
    slower = replace(region.plan.chosen, forward_s=1.0)
    several[7] = replace(several[7], plan=replace(region.plan, chosen=slower))
    text = str(replace(planned, programs=(replace(program, regions=tuple(several)),)))
    assert "region 0 to 4, 6 to 47 (layers.0 to 4, 6 to 47.mlp)" in " ".join(text.split())
    said = " ".join(text.split())
    assert re.search(r"region 5 \(layers\.5\.mlp\): Chosen: [^:]*: another reason", said)
    times = f"{1e3 * region.plan.chosen.seconds:.3f} ms to {1e3 * slower.seconds:.3f} ms"
    assert f"47 regions decide alike, in {times}; the figures are those of region 0" in said
    assert text.count("chunks") < 3 * str(planned).count("chunks")


def test_a_lossy_codec_names_its_error(plain):
    found = moefx.explain(plain)
    assert found.regions[0].codec_error == 2.0**-8
    assert "the codec 'bf16' changes numbers" in str(found)


def test_peak_memory_is_that_of_the_final_graphs(plain):
    variant = plain._variants[0]
    report = moefx.explain(plain).programs[0]
    sizes = typical_sizes(variant.scheduled.values(), variant.context)
    for name, memory in step_memory(variant.step).items():  # of a model whose parameters are all read
        assert report.peaks[name] == memory.peak(sizes)
    held = sum(p.to_local().numel() for p in plain.parameters())
    assert report.peaks["forward"].bytes > 4 * held
    assert report.peaks["backward"].bytes > 2 * 4 * held, "gradients are in it"


def test_memory_is_drawn_node_by_node(plain, tmp_path):
    report, found = moefx.explain(plain).programs[0], moefx.memory(plain)
    assert {graph: found.peak(graph) for graph in ("forward", "backward")} == report.peaks
    peak = report.peaks["forward"]
    data = found.to_dict()
    assert data["peaks"]["forward"] == {"bytes": peak.bytes, "node": peak.node}
    drawn = charts.memory(data)["data"]
    assert {each["name"] for each in drawn} >= {"gradients", "kept for the backward"}
    assert "measured" not in {each["name"] for each in drawn}, "nothing was"
    (last, _) = found.spaces["device"]["forward"][-1]
    (line,) = [each for each in charts.memory(found.to_dict({"forward": {last: 3 * 2**20}}))["data"]
               if each["name"] == "measured"]  # fmt: skip
    assert [size for size in line["y"] if size is not None] == pytest.approx([(3 * 2**20 + found.resident) / 1e3])
    pytest.importorskip("plotly")
    assert found.draw(tmp_path / "memory.html").read_text().rstrip().endswith("</html>")


def test_memory_tells_what_it_is_for(plain):
    """The step is over and nothing but gradients, parameters and what the user has is left; before, what is saved."""
    found = moefx.memory(plain)
    local = [each.to_local() if isinstance(each, DTensor) else each for each in (*plain.parameters(), *plain.buffers())]
    weights = sum(each.nbytes for each in local)
    gradients = sum(each.to_local().nbytes for each in plain.parameters())
    forward, backward = found.parts["forward"], found.parts["backward"]
    for graph, parts in found.parts.items():
        whole = [size for _, size in found.spaces["device"][graph]]
        assert [sum(each) for each in zip(*parts.values())] == pytest.approx(whole)
        assert min(map(min, parts.values())) > -1e-3
        assert set(parts["parameters and buffers"]) == {weights}
    assert not any(forward["gradients"])
    assert backward["gradients"][-1] == gradients
    assert (backward["kept for the backward"][-1], backward["in use"][-1]) == (0, 0)
    kept = forward["kept for the backward"][-1]
    assert kept == backward["kept for the backward"][0] > 0 == forward["kept for the backward"][0]
    optimizer = torch.optim.AdamW(plain.parameters())
    for p in plain.parameters():
        optimizer.state[p] = {"exp_avg": torch.zeros_like(p), "step": torch.zeros(())}
    state, steps = moefx.memory(plain, optimizer=optimizer), 4 * len(optimizer.state)
    assert set(state.parts["forward"]["optimizer's state"]) == {gradients + steps}
    assert state.peak("backward").bytes == found.peak("backward").bytes + gradients + steps
    assert "optimizer's state" in {each["name"] for each in charts.memory(state.to_dict())["data"]}


def test_what_could_not_be_used_is_said():
    model = compiled(chunks=2, alltoall="2dh", ranks_per_node=4)  # all ranks on one node
    text = str(moefx.explain(model, **CASE.batch(0)))
    assert "'2dh' is no better than 'direct'" in text.replace("\n", " ")
    model.close()


def test_impossible_memory_limit_is_one_error():
    model = compiled(memory_limit=1000)
    with pytest.raises(MoefxError, match=r"memory_limit is 1000 bytes, and no choice"):
        model.prepare(**CASE.batch(0))
    model.close()


def test_unknown_names_are_refused_at_compile():
    for options in ({"scheduler": "fifo"}, {"alltoall": "3dh"}, {"codec": "zip"}, {"machine": "h200-8x400"}):
        with pytest.raises(MoefxError):
            compiled(**options)


def test_nothing_compiled_yet():
    model = compiled()
    with pytest.raises(UnsupportedUse, match="nothing was compiled yet"):
        moefx.explain(model)
    model.close()


def test_a_batch_of_one_is_priced_as_one(world):
    """It is traced as a batch of two, since torch would specialise on the one."""
    mesh = init_device_mesh("cpu", (1, 4), mesh_dim_names=("dp", "ep"))
    model = moefx.compile(OneLayer(Loop()), mesh, machine="emulated-200mbit", chunks=1)
    report = moefx.explain(model, **CASE.batch(0, rows=1, length=32))
    assert [size for name, size in report.programs[0].sizes.items() if name.startswith("s")] == [1, 32, 1, 32]
    assert {size for name, size in report.programs[0].sizes.items() if name.startswith("u")} == {64}
    model.close()


@pytest.mark.parametrize("options", places([{}, {"chunks": 2}], 1), ids=str)
def test_sizes_are_those_that_the_code_names(world, options):
    """What turned out to be a constant, as the width of the input, or the same as another size, is none of them."""
    mesh = init_device_mesh("cpu", (1, 4), mesh_dim_names=("dp", "ep"))
    x = torch.randn(3, 5, D)
    with closing(moefx.compile(Unbound(), mesh, **options, example_inputs=(x,))) as model:
        sizes, code = moefx.explain(model).programs[0].sizes, moefx.inspect(model).code
    rows = {"u0": 7 * K, "u1": 8 * K} if options else {"u0": 15 * K}
    assert sizes == {"s0": 3, "s1": 5, **rows}
    for source in code.values():
        named = set(re.findall(r"\b[su]\d+\b", " ".join(re.findall(r"#.*", source))))
        assert named - set(sizes) == set()
    assert f"f32[s0, s1, {D}]" in code["forward"]
    assert set(sizes) <= set(re.findall(r"\b[su]\d+\b", code["forward"]))


def test_formulas_name_the_sizes_of_the_code(world):
    mesh = init_device_mesh("cpu", (1, 4), mesh_dim_names=("dp", "ep"))
    x, options = torch.randn(3, 5, D), moefx.Options(machine="emulated-200mbit", chunks=1, alltoall="direct")
    with closing(moefx.compile(Unbound(), mesh, options, example_inputs=(x,))) as model:
        report = moefx.explain(model)
    plan = report.regions[0].plan
    assert plan.sizes == report.programs[0].sizes == {"s0": 3, "s1": 5, "u0": 15 * K}
    for name, formulas in plan.formulas.items():
        symbols = {str(s) for f in formulas.values() for s in f.free_symbols if re.fullmatch(r"[suz]\d+", str(s))}
        assert symbols == set(plan.sizes), name
    assert "sizes in the formulas, of whole regions: s0 = 3, s1 = 5, u0 = 30" in str(report)


def test_copies_of_experts_are_priced_by_the_machine(world):
    mesh = init_device_mesh("cpu", (1, 4), mesh_dim_names=("dp", "ep"))
    options = moefx.Options.named(machine="emulated-200mbit", chunks=1, alltoall="direct", placement="auto",
                                  ranks_per_node=2)
    model, x = Unbound(), torch.randn(3, 5, D)
    experts = sum(p.numel() for p in model.parameters() if p.dim() == 3)
    with closing(moefx.compile(model, mesh, options, example_inputs=(x,))) as found:
        (facts,), report = found._variants[0].program.regions, moefx.explain(found)
    link = preset("emulated-200mbit").curve("all_to_all", "inter", "direct").at(math.inf)
    assert (facts.costs.row_bytes, facts.costs.expert_bytes) == (4 * D, 4 * experts / E)
    assert facts.costs.expert_bytes == facts.costs.gradient_bytes
    assert (facts.costs.byte[1], facts.costs.message[1]) == (link.beta_s_per_byte, link.alpha_s)
    assert facts.costs.row > 0
    assert all(each > 0 for each in facts.costs.hidden)
    (words,) = report.to_dict()["programs"][0]["regions"][0]["placement"]
    assert words.startswith(f"auto, room for {E // 4} experts and 2 copies on every rank")
    assert words.endswith("; no copies were planned yet")
    assert f"placement: {words}" in " ".join(str(report).split())


ORDERS = [({}, "none"), ({"chunks": 2}, "optsche"), ({"scheduler": "heuristic"}, "heuristic"),
          ({"machine": "emulated-200mbit", "chunks": 1}, "none"),
          ({"machine": "emulated-200mbit", "chunks": 2, "scheduler": "sequential"}, "sequential")]  # fmt: skip


@pytest.mark.parametrize(("options", "order"), places(ORDERS, 0, 2, 4), ids=str)
def test_the_scheduler_is_the_one_that_orders_the_tasks(world, options, order):
    mesh = init_device_mesh("cpu", (1, 4), mesh_dim_names=("dp", "ep"))
    x, options = torch.randn(3, 5, D), moefx.Options.named(**options)
    with closing(moefx.compile(Unbound(), mesh, options, example_inputs=(x,))) as model:
        report = moefx.explain(model)
        did = moefx.inspect(model).step("order").changes
    assert any("tasks by" in each for each in did) == (order != "none")
    data = report.to_dict()["programs"][0]["regions"][0]
    assert data["choice"]["scheduler"] == (None if order == "none" else order)
    if options.machine:
        assert data["chosen"]["scheduler"] == data["choice"]["scheduler"]
        assert {line.split("│")[5].strip() for line in str(report).splitlines() if "identity" in line} == {order}
    else:
        assert f"codec identity, scheduler {order}; the options" in str(report)
