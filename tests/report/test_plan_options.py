"""What a plan says of state, speed, accumulation and remedies, and what a search finds: by the programs of one mesh."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import re

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

import moefx
from moefx import __main__ as command
from moefx.costmodel.machines import preset
from moefx.errors import MoefxError
from moefx.options import Options
from moefx.planning.folding import Fold, Layer, best_fold
from moefx.report import search as searching
from moefx.report.described import described
from moefx.report.hints import hints_of
from moefx.report.search import Facts, Where, candidates
from moefx.report.what_if import plan_of
from tests.report.test_what_if import MACHINE, compiled_for, three
from tests.support.handmade import Block, D, LanguageModel, Loop

H100 = preset(MACHINE)
TOKENS = 2 * 64


def dense() -> nn.Module:
    model = LanguageModel(Loop(num_experts=2))
    model.layers = nn.ModuleList([Block(nn.Linear(D, D), False)])
    return model


@pytest.fixture(scope="module")
def programs():
    return compiled_for(described(three, 2, 64))


@pytest.fixture(scope="module")
def free(programs):
    return plan_of(programs, None, 1, curves=True)


@pytest.fixture(scope="module")
def limited(programs, free):
    return plan_of(programs, free.memory["peak"] - 0.4 * free.memory["kept"], 1)


# The optimizer's state


def test_bf16_weights_have_masters_and_moments_in_fp32_and_the_state_may_be_another(programs, free):
    """Experts over 2 of 64 ranks, all else whole: 2 bytes a weight and a gradient, 4 a master copy, 8 the moments."""
    sizes = {name: p.numel() for name, p in three().named_parameters()}
    mine = sum(size // 2 if ".experts." in name else size for name, size in sizes.items())
    found = {name: free.memory[name] for name in ("parameters", "gradients", "master", "optimizer")}
    assert found == {"parameters": 2 * mine, "gradients": 2 * mine, "master": 4 * mine, "optimizer": 8 * mine}
    assert programs.numbers["bytes.held"] == 16 * mine
    assert programs.numbers["bytes.moved"] == 28 * mine
    assert "master weights, float32" in str(free)


def test_experts_are_spread_so_that_they_fit_with_their_state():
    def fold(ep, seconds, weight, held):
        return Fold(ep, 1, "s1", seconds, weight, held=held)

    for per_weight, ep in ((4.0, 1), (8.0, 2)):  # fp32 weights, and bf16 ones with an fp32 state
        both = {0: [fold(1, 1.0, 2.0, per_weight), fold(2, 3.0, 1.0, per_weight)]}
        best = best_fold(both, 8.0)
        assert (best.ep if best is not None else 1) == ep


# Speed


def test_tokens_per_second_and_the_share_of_the_peak(free):
    assert free.tokens == 64 * TOKENS
    assert free.tokens_per_s * free.step_s == pytest.approx(free.tokens)
    assert free.share_of_peak == pytest.approx(free.flops / (free.step_s * 989e12))
    model = three()
    with FlopCounterMode(display=False) as counted:
        model(torch.zeros(2, 64, dtype=torch.long)).logits.sum().backward()
    attention = 3 * 4 * TOKENS * 64 * D / 2  # of three layers, causal; on CPU torch does not count it
    assert free.flops == pytest.approx(counted.get_total_flops() + (1 + 2.5) * attention)
    data = json.loads(free.to_json())
    assert data["tokens_per_s_per_rank"] == pytest.approx(free.tokens_per_s / 64)
    assert f"{free.share_of_peak:.1%} of the machine's peak (989 TFLOP/s per GPU, bfloat16)" in str(free)


def test_micro_batches_reduce_gradients_once_and_hold_their_sum(programs, free):
    four = plan_of(programs, None, 4)
    assert four.tokens == 4 * free.tokens
    assert four.seconds["forward"] == 4 * free.seconds["forward"]
    assert 0 < programs.numbers["once.backward"] == programs.numbers["beside.backward"]
    slow = copy.copy(programs)
    slow.numbers = programs.numbers | {"once.backward": 1.0, "beside.backward": 1.0}  # longer than all that hides it
    exposed = [plan_of(slow, None, n).seconds["exposed"] for n in (1, 4)]
    assert 0 < exposed[0] == pytest.approx(exposed[1])
    assert four.seconds["optimizer"] == free.seconds["optimizer"]
    assert four.seconds["sums"] == pytest.approx(9 * free.memory["gradients"] / H100.memory_bytes_per_s)
    assert four.memory["peak"] == pytest.approx(free.memory["peak"] + free.memory["gradients"])
    assert "4 times in a step" in str(four)


def test_shards_are_gathered_and_summed_in_every_micro_batch():
    sharded = compiled_for(described(dense, 2, 64), ep=None, options=Options.named(shard_dense=True), only_base=True)
    beside, once = sharded.numbers["beside.backward"], sharded.numbers["once.backward"]
    assert 0 < once < beside  # what is too small to be cut is reduced once
    one, four = (plan_of(sharded, None, n).seconds["exposed"] for n in (1, 4))
    assert one < four <= 4 * one


# What is said


def test_without_parts_of_experts_there_is_no_best_r(limited):
    assert "r = 1 (weights stay)" in str(limited)
    assert "r*" not in str(limited)
    (region,) = limited.layers[0].regions
    assert region.adaptive.to_dict(region)["optimum"] is None


def test_the_chosen_way_says_what_it_would_be_without_the_limit(free, programs):
    limited = plan_of(programs, 0.55 * free.memory["peak"], 1)
    (region,), (before,) = limited.layers[0].regions, programs.room.within(math.inf).decision.regions
    assert region.chosen.choice != before.chosen.choice
    said = f"without the limit: {before.chosen.choice.words()}, {1e3 * before.chosen.seconds:.1f} ms"
    assert said in region.reason
    assert said in re.sub(r"\s+", " ", str(limited))


def test_what_is_named_is_not_chosen():
    """MPipeMoE's strategy is, without a limit, too."""
    options = Options.named(chunks=4, alltoall="direct", formula="mpipemoe", placement="balanced")
    found = plan_of(compiled_for(described(three, 2, 64), options=options, only_base=True), None, 1)
    (region,) = found.layers[0].regions
    assert {each.choice.chunks for each in region.candidates} == {4}
    assert found.within.rows
    assert sum(found.within.seconds.values()) > 0


def test_what_takes_most_has_a_remedy_where_there_is_one(programs, free):
    def hints(**seconds):
        changed = dataclasses.replace(free, seconds={**free.seconds, **seconds}, limit=1e12)
        return " ".join(hints_of(changed, programs))

    assert "reductions and gathers" in hints(exposed=1.0)
    assert "--set shard_dense=True" in hints(exposed=1.0)
    assert re.search(r"--accumulate 8 .*: [\d,]+ tokens/s instead of [\d,]+ tokens/s", hints(exposed=1.0))
    assert "AdamW's step" in hints(optimizer=1.0)
    assert hints(forward=1e3) == ""
    options = Options.named(shard_dense=True)
    sharded = dataclasses.replace(free, options=options, seconds={**free.seconds, "exposed": 1.0})
    assert "shard_dense" not in " ".join(hints_of(sharded, programs))


def test_a_model_without_experts_is_told_so():
    found = moefx.plan(dense, MACHINE, 64, batch=2, seq=64, curves=False)
    assert not found.has_experts
    assert "there are no experts in this model" in str(found)
    assert "experts over ep" not in str(found)


def test_hints_name_configs_alone(tmp_path, free):
    """And neither plans nor machines, which are JSON files of moefx's own."""
    (tmp_path / "nop.json").write_text(free.to_json())
    H100.save(tmp_path / "noper.json")
    (tmp_path / "n.json").write_text("[")
    with pytest.raises(MoefxError, match="there is no file") as caught:
        described(str(tmp_path / "nope.json"), 1, 16)
    assert caught.value.hint == "a config.json"
    (tmp_path / "nopes.json").write_text('{"model_type": "mixtral"}')
    with pytest.raises(MoefxError) as caught:
        described(str(tmp_path / "nope.json"), 1, 16)
    assert caught.value.hint == str(tmp_path / "nopes.json")
    with pytest.raises(MoefxError, match="has no model_type"):
        described(str(tmp_path / "nop.json"), 1, 16)


# Searches


def search_of(programs, limit, **changes):
    given = {"batch": None, "accumulate": None, "sequences": None, "meshes": 1, **changes}
    return searching._Search(programs.what, H100, 64, Options(), limit, **given)


def test_a_search_keeps_to_the_limit_and_has_the_fastest_first(programs, free, monkeypatch):
    limit = 4 * free.memory["peak"]
    monkeypatch.setattr(searching, "LARGEST", 4)
    monkeypatch.setattr(searching._Search, "_compiled", lambda *args, **more: programs)
    found = search_of(programs, limit).run(Where(1, 2, 1, {"shard_dense": False}))
    assert len(found.plans) > 1
    assert all(plan.memory["peak"] <= limit for plan in found.plans)
    rates = [plan.tokens_per_s for plan in found.plans]
    assert rates == sorted(rates, reverse=True)
    assert {plan.batch[0] for plan in found.plans} >= {2, 4}
    first = found.plans[0]
    again = plan_of(programs.at(first.batch[0]), limit, first.accumulate)
    assert again.step_s == first.step_s
    shown = str(found)
    assert f"--batch {first.batch[0]}" in shown
    assert shown.count("dp=64") <= 10
    assert json.loads(found.to_json())["plans"][0]["accumulate"] == first.accumulate
    with pytest.raises(MoefxError, match=r"no mesh of 64 ranks and 0.00 MB has room .*: experts take 0\.11 MB"):
        search_of(programs, 1.0).run(Where(1, 2, 1, {"shard_dense": False}))
    too_little = programs.numbers["bytes.held"] * 1.01
    with pytest.raises(MoefxError, match=r"nothing fits into .*: mp=1, ep=2, esp=1: a rank needs"):
        search_of(programs, too_little).run(Where(1, 2, 1, {"shard_dense": False}))


def test_a_search_may_keep_to_the_sequences_of_a_step(programs):
    plans, _ = search_of(programs, 1e12, sequences=64 * 8)._plans(programs)
    assert {plan.batch[0] * plan.accumulate for plan in plans} == {8}
    assert {plan.batch[0] for plan in plans} <= {2, 4, 8}


def test_meshes_to_try_fit_and_take_turns():
    layer = Layer(8, 2, 1e6, 1e9, held=8.0)
    open_ = Where(None, None, None)
    found = list(candidates(Facts(layer, 8e9, 8e9), H100, 64, 3e9, open_))
    assert all(8e9 / (64 if w.options["shard_dense"] else w.mp) + 8e9 / (w.ep * w.esp) < 3e9 for w in found)
    assert found[0].options["shard_dense"]  # 8 GB of what is no expert fit no other way on one rank
    assert {w.mp for w in found} == {1, 8}
    assert [w.mp for w in found[:4]] == [1, 8, 1, 8]
    kept = list(candidates(Facts(layer, 8e9, 8e9), H100, 64, 1e12, Where(1, 4, 1, {"shard_dense": False})))
    assert kept == [Where(1, 4, 1, {"shard_dense": False})]
    sharded = list(candidates(Facts(layer, 8e9, 8e9), H100, 64, 1e12, Where(None, None, None, {"shard_dense": True})))
    assert {w.mp for w in sharded} == {1}
    assert all(w.options["shard_dense"] for w in sharded)
    (only,) = candidates(Facts(None, 0.0, 8e9), H100, 64, 1e9, open_)
    assert only == Where(1, None, None, {"shard_dense": True})


def test_a_search_needs_a_limit():
    with pytest.raises(MoefxError, match="how much memory") as caught:
        searching.search(three, MACHINE, 64, memory_limit=None)
    assert "--memory-limit" in caught.value.hint


# The command


def test_the_command_hands_on_its_flags(monkeypatch, free):
    asked_for = {}

    def stand_in(model, machine, gpus, **given):
        asked_for.update(given)
        return free

    monkeypatch.setattr(command, "what_if", stand_in)
    flags = ["--chunks", "2", "--alltoall", "2dh", "--keep", "lean", "--placement", "balanced", "--state", "bfloat16",
             "--accumulate", "4", "--set", "shard_dense=True"]  # fmt: skip
    out = CliRunner().invoke(command.app, ["plan", "m", "--gpus", "64", "--machine", MACHINE, *flags])
    assert out.exit_code == 0, out.output
    assert asked_for["accumulate"] == 4
    assert asked_for["options"] == Options.named(chunks=2, alltoall="2dh", keep="lean", placement="balanced",
                                           state="bfloat16", shard_dense=True)  # fmt: skip
    assert "tokens/s" in out.stdout
