"""Plans for clusters that are not there: what a model's name stands for, its layers, and the sums over them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from typer.testing import CliRunner

import moefx
from moefx.__main__ import app
from moefx.costmodel.machines import preset
from moefx.errors import MeshError, ModelError, MoefxError, UnsupportedUse
from moefx.report import page, what_if
from moefx.report.described import described
from moefx.report.layers import cut, layers_of
from moefx.report.one_look import linear, nobody
from moefx.report.programs import compiled
from moefx.report.what_if import asked, mesh_of
from moefx.report.within import Counts
from moefx.report.words import ms
from tests.support.handmade import Block, D, LanguageModel, Loop, make_moe
from tests.support.ranks import fake_world

CONFIGS = Path(__file__).parents[2] / "examples" / "configs"
MACHINE = "h100-8x400g"


def deep() -> nn.Module:
    """A dense layer, then four alike with experts."""
    style = Loop(num_experts=4)
    model = LanguageModel(style)
    moes = [Block(make_moe(style), False) for _ in range(4)]
    model.layers = nn.ModuleList([Block(nn.Linear(D, D), False), *moes])
    return model


def three() -> nn.Module:
    style = Loop(num_experts=2)
    model = LanguageModel(style)
    model.layers = nn.ModuleList(Block(make_moe(style), False) for _ in range(3))
    return model


def other_inputs() -> tuple[nn.Module, dict]:
    tokens = torch.zeros(3, 16, dtype=torch.long)
    return deep(), {"input_ids": tokens, "labels": tokens}


def compiled_for(what, ranks=64, *, ep=2, options=None, **changes):
    """The programs that plans on one mesh are made from."""
    machine = preset(MACHINE)
    with nobody(ranks):
        return compiled(what, {"dp": ranks}, asked(options, machine, ep=ep, esp=None), machine, **changes)


def plan_of(**changes):
    asked = {"machine": MACHINE, "ranks": 64, "batch": 2, "seq": 64, "ep": 2, "dtype": "float32", "curves": False}
    return moefx.plan(**{"model": three, **asked, **changes})


# What a name stands for


@pytest.mark.parametrize(("name", "billions", "kinds"), [
    ("qwen3-235b-a22b.json", 235.09, [94]), ("deepseek-v3.json", 671.03, [3, 58])])  # fmt: skip
def test_the_published_configs_have_their_parameters_and_kinds_of_layers(name, billions, kinds):
    found = described(str(CONFIGS / name), 1, 128)
    assert sum(p.numel() for p in found.module.parameters()) / 1e9 == pytest.approx(billions, abs=0.01)
    assert all(p.is_meta for p in found.module.parameters())
    assert found.kwargs["labels"].shape == (1, 128)
    assert [len(kind) for kind in layers_of(found.module).kinds] == kinds
    assert ("quantization" in "".join(found.notes)) is (name == "deepseek-v3.json")


def test_a_config_class_may_have_other_numbers_of_layers():
    found = described("MixtralConfig", 1, 16, layers=3)
    assert layers_of(found.module).count == 3
    assert found.module.config.num_hidden_layers == 3


@pytest.mark.parametrize(("name", "said"), [
    ("Qwen3MoeConfg", "did you mean Qwen3MoeConfig"), ("qwen3moeconfig", "did you mean Qwen3MoeConfig"),
    (f"{__name__}:dep", "did you mean deep"), ("no.such.module:f", "cannot be imported"),
    (str(CONFIGS / "deepseek-v4.json"), "deepseek-v3.json"), ("T5Config", "causal language model")])  # fmt: skip
def test_an_unknown_name_is_told_with_the_nearest(name, said):
    with pytest.raises(MoefxError, match=said):
        described(name, 1, 16)


def test_a_config_of_an_unknown_kind_is_told_with_the_nearest(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "qwen3_mo"}))
    with pytest.raises(MoefxError, match="qwen3_moe"):
        described(str(path), 1, 16)
    path.write_text("{")
    with pytest.raises(MoefxError, match="no JSON"):
        described(str(path), 1, 16)


def test_functions_bring_their_inputs_or_get_token_ids():
    assert described(other_inputs, 1, 8).kwargs["labels"].shape == (3, 16)
    assert described(f"{__name__}:deep", 1, 8).args[0].shape == (1, 8)
    with pytest.raises(ModelError, match="a list is not "):
        described(list, 1, 8)
    with pytest.raises(MoefxError, match="float32"):
        described(deep, 1, 8, dtype="float8")


# Layers


def test_layers_that_are_alike_are_one_kind_and_a_cut_model_has_some_of_them():
    model = deep()
    layers = layers_of(model)
    assert [(len(kind), kind.places) for kind in layers.kinds] == [(1, (0,)), (4, (1, 2, 3, 4))]
    assert layers.one_of_each == (0, 1)
    assert len({kind.name for kind in layers.kinds}) == 2
    small = cut(model, layers, (0, 1, 2))
    assert len(small.layers) == 3
    assert all(p.is_meta for p in small.parameters())
    assert len(model.layers) == 5
    assert not any(p.is_meta for p in model.parameters())
    assert layers_of(nn.Linear(2, 2)) is None
    assert layers_of(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))) is None  # no two are alike


def test_what_a_config_says_of_every_layer_is_cut_with_them():
    found = described("GptOssConfig", 1, 16, layers=6)
    layers = layers_of(found.module)
    assert [len(kind) for kind in layers.kinds] == [3, 3]  # attention of a window, and of all
    small = cut(found.module, layers, (0, 1, 3))
    assert small.config.num_hidden_layers == 3
    assert small.config.layer_types == [found.module.config.layer_types[i] for i in (0, 1, 3)]


def test_numbers_grow_by_what_one_layer_more_takes():
    found = linear({"a": 10.0, "b": 1.0}, {0: {"a": 12.0, "b": 1.0}, 1: {"a": 11.0, "b": 4.0}}, {0: 3, 1: 2})
    assert found == {"a": 10 + 3 * 2 + 2 * 1, "b": 1 + 2 * 3}


def test_a_module_of_the_cut_model_stands_for_all_of_its_kind():
    layers = layers_of(deep())
    counts = Counts(layers, is_cut=True)
    assert [counts.times(path) for path in ("layers.0.mlp", "layers.1", "embed", "mylayers.1")] == [1, 4, 1, 1]
    assert Counts(layers, is_cut=False).kind_of("layers.3.mlp") == 1
    assert Counts(layers, is_cut=False).times("layers.3.mlp") == 1


# Meshes


def test_meshes_are_folded_or_named():
    machine = preset(MACHINE)
    assert mesh_of(64, machine, dp=None, mp=2, ep=8, esp=None) == ({"dp": 32, "mp": 2}, 8, None)
    assert mesh_of(64, machine, dp=8, mp=1, ep=8, esp=None) == ({"dp": 8, "ep": 8}, None, None)
    assert mesh_of(4, machine, dp=None, mp=1, ep=2, esp=None) == ({"dp": 4}, 2, None)
    for wrong, said in (({"ranks": 60}, "56 or 64"), ({"mp": 3}, "mp=4"), ({"ep": 24}, "ep=32"),
                        ({"dp": 7}, "leave dp out"), ({"ep": 0}, "ep is 0")):  # fmt: skip
        given = {"ranks": 64, "dp": None, "mp": 1, "ep": None, "esp": None, **wrong}
        with pytest.raises(MeshError, match=said):
            mesh_of(given.pop("ranks"), machine, **given)


def test_an_unknown_machine_is_told_with_the_nearest():
    with pytest.raises(MoefxError, match="h100-8x400g"):
        plan_of(machine="h100-8x400")
    with pytest.raises(MoefxError, match="calibrate"):
        plan_of(machine="nowhere.json")


def test_a_process_with_a_world_is_refused_and_keeps_it():
    with fake_world(4):
        with pytest.raises(UnsupportedUse, match="world of its own"):
            plan_of()
        assert dist.get_world_size() == 4


# Plans


def check_alike(few, whole) -> None:
    assert few.seconds == pytest.approx(whole.seconds, rel=1e-6)
    assert few.memory == pytest.approx(whole.memory, rel=1e-6)


def test_a_plan_is_the_same_extrapolated_and_whole_and_stays_within_a_limit():
    programs = compiled_for(described(three, 2, 64, dtype="float32"))
    few, limited = what_if.plan_of(programs, None, 1, curves=True), what_if.plan_of(programs, 6.5e5, 1)
    check_alike(few, plan_of(whole=True))
    assert not dist.is_initialized()
    assert [count for count, _ in few.programs] == [1, 2]
    assert few.memory["optimizer"] == 2 * few.memory["gradients"]
    text = str(few)
    for said in ("3 layers", "Block", "extrapolated", "dp=64, experts over ep=2", "1 chunk"):
        assert said in text
    data = json.loads(few.to_json())
    assert data["step_s"] == pytest.approx(sum(few.seconds.values()))
    assert data["layers"][0]["regions"][0]["candidates"]
    assert data["layers"][0]["over_batches"]["64"]["seconds"]
    drawn = page.html({"title": data["title"], "sentences": data["sentences"], "plan": data}, "")
    assert "ms per sequence over sequences of a rank (batch)" in drawn
    assert "ms of a step over GPUs" in drawn
    assert "Chosen: from " in drawn
    assert f"takes {ms(few.step_s)} for a step" in drawn
    assert 'class="count">3 x</span>' in drawn

    assert limited.memory["peak"] <= 6.5e5 < few.memory["peak"]
    assert limited.memory["kept"] < few.memory["kept"]
    assert max(limited.within.seconds.values()) > 0
    assert limited.within.rows
    assert "not kept for the backward" in str(limited)


@pytest.mark.full
def test_within_a_limit_layers_keep_what_they_keep_where_all_are_compiled():
    """But that those of a kind are alike: the whole model may keep something in one layer and not in another."""
    programs, limit = compiled_for(described(three, 2, 64, dtype="float32")), 5.5e5
    few, all_layers = what_if.plan_of(programs, limit, 1), plan_of(whole=True, memory_limit=limit)
    assert all_layers.memory["peak"] <= limit
    assert 0.97 * limit < few.memory["peak"] <= limit
    assert 0.9 * all_layers.memory["kept"] < few.memory["kept"] <= all_layers.memory["kept"]


@pytest.mark.full
def test_kinds_of_layers_are_extrapolated_each_by_its_own():
    few = plan_of(model=f"{__name__}:deep", ep=4)
    check_alike(few, plan_of(model=deep, ep=4, whole=True))
    assert [count for count, _ in few.programs] == [2, 3]
    assert [(layer.count, bool(layer.regions)) for layer in few.layers] == [(1, False), (4, True)]


@pytest.mark.full
def test_too_little_memory_says_what_would_fit():
    with pytest.raises(MoefxError, match=r"what would fit: about .* of the tokens per rank"):
        plan_of(memory_limit=2.5e5)
    with pytest.raises(MoefxError, match=r"what would fit: .*(--ep |--set shard_dense=True|more ranks)"):
        plan_of(memory_limit=1e5)


@pytest.mark.full
def test_the_command_plans_and_draws(tmp_path):
    asked = ["plan", "Qwen3MoeConfig", "--gpus", "256", "--machine", MACHINE, "--layers", "3", "--seq", "512"]
    out = CliRunner().invoke(app, [*asked, "--html", str(tmp_path / "a.html"), "--json", str(tmp_path / "a.json")])
    assert out.exit_code == 0, out.output
    assert "3 layers" in out.output
    assert json.loads((tmp_path / "a.json").read_text())["ep"] > 1
    assert "Plotly.react" in (tmp_path / "a.html").read_text()
