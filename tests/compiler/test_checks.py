"""Verification by running: right passes go through on any mesh, a wrong one is named with what it changed first."""

from __future__ import annotations

import itertools
import logging
import operator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import moefx
from moefx.analysis.checking import compare
from moefx.compiler import checks, pipeline
from moefx.compiler.checks import chosen_level
from moefx.compiler.pipeline import OptionalPassFailed, Pass, Pipeline
from moefx.context.pass_types import PassResult
from moefx.errors import MoefxError, VerifyError
from moefx.ir.level import Level
from moefx.ir.ops.regions import leave_experts
from moefx.options import Options
from tests.support.breadth import places, some
from tests.support.graphs import context, graph
from tests.support.ranks import fake_world
from tests.support.small import CAPTURED
from tests.support.styles import D, Unbound

BIASED = CAPTURED.replace('down: "f32[8, 16, 24]"', 'down: "f32[8, 16, 24]", bias: "f32[16]", square: "f32[16, 16]"')
BIASED = BIASED.replace("    return (result,)", "    result = result @ square + bias\n    return (result,)")


WORDS = BIASED.replace("):\n", ', ids: "i64[s0]", labels: "i64[s0]", mask: "bool[s0, s1]", '
                       'x_words: "f32[s0, s1, 16]"):\n', 1)  # fmt: skip
WORDS = WORDS.replace("    return (result,)", """    words = torch.where(mask.unsqueeze(-1), x_words, 0.0)
    pooled = words.sum(1) / x_words.shape[1]
    kept = operator.ne(ids, 0).unsqueeze(-1) * (result + pooled)
    loss = F.cross_entropy(kept, labels, ignore_index=-100)
    return (kept, loss)""")


def run(source=BIASED, strength=2, sizes=None, **axes):
    gm, mode = graph(source, sizes=sizes)
    result = Pipeline(context(mode, Options.named(verify=strength), **axes))
    result.run(gm)
    return result


def with_pass(monkeypatch, edit, after, level, *, step=False, **more):
    """Put a pass `wrong` that edits graphs behind the pass `after`."""

    def wrong(gm, ctx):
        result = PassResult()
        if edit(gm):
            result.changed("something")
            gm.graph.lint()
        return result

    name = "STEP" if step else "WHOLE"
    entries = list(getattr(pipeline, name))
    place = next(i for i, entry in enumerate(entries) if entry.name == after) + 1
    entries.insert(place, Pass("wrong", wrong, level, level, **more))
    monkeypatch.setattr(pipeline, name, tuple(entries))


@pytest.fixture
def logged():
    """The messages of the verifier."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("moefx.verify").addHandler(handler)
    yield messages
    logging.getLogger("moefx.verify").removeHandler(handler)


@pytest.mark.parametrize("axes", [{"ep": 1}, {"dp": 2, "ep": 2}, {"dp": 3}])
def test_right_passes_go_through(axes, logged):
    run(**axes)
    assert not logged


def drop_bias(gm):
    node = gm.graph.output_node().args[0][0]
    gm.graph.output_node().args = ((node.args[0],),)
    return True


def swap_dims(gm):
    node = next(n for n in gm.graph.nodes if n.target is operator.matmul)
    with gm.graph.inserting_before(node):
        other = gm.graph.call_method("t", (node.args[1],))
    node.args = (node.args[0], other)
    return True


def transposed_experts(gm):
    """A permutation of experts: dispatch and weights no longer fit."""
    node = next(n for n in gm.graph.nodes if "grouped_linear" in str(n.target))
    with gm.graph.inserting_before(node):
        other = gm.graph.call_method("flip", (node.args[1], 0))
    node.args = (node.args[0], other, *node.args[2:])
    return True


def detach_weight(gm):
    """Only a gradient changes."""
    node = next(n for n in gm.graph.nodes if n.target is operator.matmul)
    with gm.graph.inserting_before(node):
        other = gm.graph.call_method("detach", (node.args[0],))
    node.args = (other, node.args[1])
    return True


@pytest.mark.parametrize(("edit", "level", "after", "message"), [
    (drop_bias, Level.CAPTURED, "canonicalize", "after wrong: output 0 differs"),
    (swap_dims, Level.CAPTURED, "canonicalize", "after wrong: output 0 differs"),
    (detach_weight, Level.CAPTURED, "canonicalize", "after wrong: the gradient of gate is gone"),
    (transposed_experts, Level.MOE, "raise-grouped", "after wrong: output 0 differs"),
    (transposed_experts, Level.PLACED, "place-experts", "after wrong: output 0 differs"),
])  # fmt: skip
def test_wrong_pass_is_named(monkeypatch, edit, level, after, message):
    with_pass(monkeypatch, edit, after, level)
    with pytest.raises(VerifyError) as caught:
        run(dp=1, ep=2)
    assert message in str(caught.value)
    run(strength=1, dp=1, ep=2)  # nothing but running the graph shows it


def drop_mask(gm):
    node = next(n for n in gm.graph.nodes if n.target is torch.where)
    node.replace_all_uses_with(node.args[1])
    return True


def drop_kept(gm):
    node = next(n for n in gm.graph.nodes if n.target is operator.mul and n.args[0].name.startswith("unsqueeze"))
    node.replace_all_uses_with(node.args[1])
    return True


def ignore_others(gm):
    node = next(n for n in gm.graph.nodes if n.target is torch.nn.functional.cross_entropy)
    node.kwargs = {"ignore_index": -1}
    return True


def fixed_length(gm):
    node = next(n for n in gm.graph.nodes if n.target is operator.truediv)
    node.args = (node.args[0], node.args[1].meta["val"].node.hint)
    return True


@pytest.mark.parametrize(("axes", "edit"), places(
    itertools.product([{"ep": 1}, {"ep": 2}], [drop_mask, drop_kept, ignore_others, fixed_length]), 0, 1, 2, 3, 7))
def test_inputs_and_sizes_show_what_they_are_for(monkeypatch, edit, axes):
    with_pass(monkeypatch, edit, "canonicalize", Level.CAPTURED)
    with pytest.raises(VerifyError, match=r"after wrong: (output . differs|the graph does not run: Target -100)"):
        run(WORDS, sizes={"s0": 4, "s1": 3}, **axes)


@pytest.mark.parametrize("fill", ["~mask, -torch.inf", "mask, -torch.inf"])
def test_rows_that_are_masked_as_a_whole_are_avoided_and_infinities_compared(monkeypatch, logged, fill):
    source = WORDS.replace("    kept =", f"""    scores = torch.masked_fill(x_words.sum(-1), {fill})
    pooled = pooled * F.softmax(scores, -1).sum(-1, keepdim=True)
    kept =""").replace("return (kept, loss)", "return (kept, loss, scores)")
    source = source.replace("~mask", "torch.logical_not(mask)").replace("-torch.inf", "float('-inf')")
    sizes = {"s0": 4, "s1": 3}
    run(source, sizes=sizes, ep=2)
    assert not logged

    def zero_for_infinity(gm):
        node = next(n for n in gm.graph.nodes if n.target is torch.masked_fill)
        node.args = (*node.args[:2], -50.0)
        return True

    with_pass(monkeypatch, zero_for_infinity, "canonicalize", Level.CAPTURED)
    with pytest.raises(VerifyError, match="output 2 differs"):
        run(source, sizes=sizes, ep=2)


def tiny_change(gm):
    """Of the output of the forward: within any tolerance, but not the same bits."""
    output = gm.graph.output_node()
    first, *rest = output.args[0]
    if not any("route" in node.name for node in gm.graph.nodes):
        return False
    with gm.graph.inserting_before(output):
        new = gm.graph.call_function(torch.ops.aten.mul.Tensor, (first, 1.0 + 2**-22))
    new.meta["val"] = first.meta["val"]
    output.args = ((new, *rest),)
    return True


def test_exact_pass_must_keep_every_bit(monkeypatch):
    with_pass(monkeypatch, tiny_change, "split-waits", Level.SCHEDULED, step=True)
    run(dp=1, ep=2)
    exact = tuple(replace(entry, exact=True) for entry in pipeline.STEP)
    monkeypatch.setattr(pipeline, "STEP", exact)
    with pytest.raises(VerifyError, match="after wrong: output 0 differs"):
        run(dp=1, ep=2)


def test_wrong_optional_pass_costs_only_speed(monkeypatch):
    with_pass(monkeypatch, tiny_change, "split-waits", Level.SCHEDULED, step=True, optional=True, exact=True)
    with pytest.raises(OptionalPassFailed, match="wrong"):
        run(dp=1, ep=2)


def test_autocast_is_compared_with_fewer_digits(logged):
    gm, mode = graph(BIASED.replace("token, weighted)", "token, weighted.float())"))
    ctx = context(mode, Options.named(verify=2), dp=1, ep=2)
    ctx.autocast = (("cpu", torch.bfloat16),)
    pipeline.refresh(gm, ctx)
    Pipeline(ctx).run(gm)
    assert not logged


MANY = CAPTURED.replace("8, ", "64, ").replace("=8", "=64")


@pytest.mark.parametrize("first", some([0, 30, 62], 62))
def test_every_expert_gets_rows(monkeypatch, first):
    def experts_swapped(gm):
        node = next(n for n in gm.graph.nodes if "expert_parameter" in str(n.target))
        order = [*range(first), first + 1, first, *range(first + 2, 64)]
        users = list(node.users)
        with gm.graph.inserting_after(node):
            new = gm.graph.call_function(operator.getitem, (node, order))
        for user in users:
            user.replace_input_with(node, new)
        return True

    with_pass(monkeypatch, experts_swapped, "raise-grouped", Level.MOE)
    with pytest.raises(VerifyError, match="after wrong: output 0 differs"):
        run(MANY, sizes={"s0": 4}, ep=2)


def test_a_gradient_that_is_zero_but_for_rounding_is_compared_by_the_others(logged):
    """The weight of the only choice, divided by itself, tells the router nothing."""
    source = CAPTURED.replace("torch.topk(scores, 2, dim=-1)", "torch.topk(scores, 1, dim=-1)")
    source = source.replace("weights = topk[0]", "weights = topk[0] / topk[0].sum(-1, keepdim=True)")
    source = source.replace("perm // 2", "perm // 1").replace("return (result,)", "return (result * 1000.0,)")
    run(source, sizes={"s0": 64}, ep=2)
    assert not logged


def scaled(name):
    """Two percent more of the result of an op: less than what rounding does."""
    def change(gm):
        node = next((n for n in gm.graph.nodes if n.op.startswith("call") and name in str(n.target)), None)
        if node is not None:
            users = list(node.users)
            with gm.graph.inserting_after(node):
                new = gm.graph.call_function(torch.mul, (node, 1.02))
            new.meta["val"] = node.meta["val"]
            for user in users:
                user.replace_input_with(node, new)
        return node is not None

    return change


@pytest.mark.parametrize(("how", "after", "level", "step"), places(
    [(how, *place) for how in ("bf16 parts", "autocast", "codec") for place in (
        ("canonicalize", Level.CAPTURED, False), ("place-experts", Level.PLACED, False),
        ("order", Level.SCHEDULED, True))], 0, 4, 8))  # fmt: skip
def test_what_rounds_is_also_compared_without_rounding(monkeypatch, logged, how, after, level, step):
    source = BIASED if how != "bf16 parts" else BIASED.replace("result @ square", "(result.bfloat16() @ "
                                                               "square.to(torch.bfloat16)).float()")

    def once():
        gm, mode = graph(source.replace("token, weighted)", "token, weighted.float())"))
        ctx = context(mode, Options.named(verify=2, codec="bf16" if how == "codec" else "identity"), dp=1, ep=2)
        ctx.autocast = (("cpu", torch.bfloat16),) if how == "autocast" else ()
        pipeline.refresh(gm, ctx)
        Pipeline(ctx).run(gm)

    if after == "order":  # right as it is, which the others need not find once more
        once()
        assert not logged
    with_pass(monkeypatch, scaled("silu"), after, level, step=step)
    with pytest.raises(VerifyError, match=r"after wrong: .* differs"):
        once()


def test_ranks_get_unequal_batches_only_if_guards_allow():
    free = BIASED
    tied = free.replace('x: "f32[s0, 16]"', 'x: "f32[s0, 16]", y: "f32[s0, 16]"').replace("F.linear(x, gate)",
                                                                                       "F.linear(x + y, gate)")
    for source in (free, tied):
        gm, mode = graph(source, sizes={"s0": 4})
        sizes = compare.rank_sizes(gm, context(mode, dp=2, ep=2))
        assert [list(s.values()) for s in sizes] == [[5], [6], [7], [8]]
    gm, mode = graph(free, sizes={"s0": 4})
    assert bool(gm.graph.find_nodes(op="placeholder")[0].meta["val"].shape[0] == 4)  # a guard fixes the size
    sizes = compare.rank_sizes(gm, context(mode, dp=2, ep=2))
    assert [list(s.values()) for s in sizes] in ([[4]] * 4, [[]] * 4)


def test_large_models_are_skipped_with_a_reason(monkeypatch, logged):
    monkeypatch.setattr(compare, "BUDGET_BYTES", 1000)
    run(ep=1)
    assert logged[0].startswith("verification by running is skipped: the parameters take")


def test_random_models_are_skipped_with_a_reason(logged):
    run(BIASED.replace("result @ square", "F.dropout(result, 0.5, True) @ square"), ep=1)
    assert "dropout draws random numbers" in logged[0]
    logged.clear()
    run(BIASED.replace("result @ square", "F.dropout(result, 0.0, True) @ square"), ep=1)
    assert not logged


def test_strength_comes_from_option_or_environment(monkeypatch):
    _, mode = graph(BIASED)
    monkeypatch.delenv("MOEFX_VERIFY", raising=False)
    assert chosen_level(context(mode, ep=1).options) == 1
    monkeypatch.setenv("MOEFX_VERIFY", "0")
    assert chosen_level(context(mode, ep=1).options) == 0
    assert chosen_level(context(mode, Options.named(verify=2), ep=1).options) == 2
    monkeypatch.setenv("MOEFX_VERIFY", "yes")
    with pytest.raises(MoefxError, match="verify is yes"):
        chosen_level(context(mode, ep=1).options)


def test_strength_zero_checks_nothing(monkeypatch):
    with_pass(monkeypatch, drop_bias, "canonicalize", Level.CAPTURED)
    run(strength=0, ep=1)


def test_a_write_to_a_buffer_that_a_pass_drops_is_named(monkeypatch):
    source = BIASED.replace('square: "f32[16, 16]"', 'square: "f32[16, 16]", buffer: "f32[16]"')
    source = source.replace("    return", "    view = buffer.view(-1)\n    view.add_(1.0)\n    return")
    assert run(source, strength=1, dp=2).records

    def drop(gm):
        for node in gm.graph.find_nodes(op="call_method", target="add_"):
            gm.graph.erase_node(node)
        return True

    with_pass(monkeypatch, drop, "raise-loop", Level.MOE)
    with pytest.raises(VerifyError, match="after wrong: what the model writes to its buffer buffer is gone"):
        run(source, strength=1, dp=2)


class OutOfRange(Unbound):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.up.flatten()[x.long() + 10_000]


class NoSuchToken(Unbound):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(4, D)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.words(x[..., 0].long() + 4)


class OddRows(Unbound):
    """Captured with the condition that as many rows are picked as can be divided."""

    def forward(self, x: Tensor) -> Tensor:
        rows = super().forward(x).reshape(-1, D)
        return x + rows[rows[:, 0] < torch.inf].view(1009, -1, D).sum()


@pytest.mark.parametrize(("model", "why", "where"), [
    (OutOfRange, "index .* is out of bounds for dimension 0", "test_checks.py"),
    (NoSuchToken, "index out of range", "words at test_checks.py"),
    (OddRows, "failed for expression", "test_checks.py"),
])  # fmt: skip
def test_a_model_that_fails_by_itself_is_said_to(model, why, where):
    """Eager fails, too; the place is the line of the model."""
    with fake_world(2):
        mesh, x = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",)), torch.randn(3, 5, D)
        with pytest.raises((RuntimeError, IndexError)):
            model()(x)
        with pytest.raises(MoefxError, match=f"^the captured model itself fails, before any pass: .*{why}") as caught:
            moefx.compile(model(), mesh, verify=2, example_inputs=(x,))
    assert not isinstance(caught.value, VerifyError)
    assert caught.value.where.startswith(f"{where}:")
    assert "While executing" not in str(caught.value)


def _other_dtype(gm):
    (out,) = gm.graph.output_node().args[0]
    out.meta["val"] = out.meta["val"].to(torch.float64)


def _no_value(gm):
    (out,) = gm.graph.output_node().args[0]
    del out.meta["val"]


def _another_op(gm):
    node = next(n for n in gm.graph.nodes if n.target is torch.ops.moefx.combine.default)
    node.target = torch.add  # rows that are dispatched come back to nobody


def _another_order(gm):
    (leave,) = [n for n in gm.graph.nodes if n.target is leave_experts]
    leave.args = (leave.args[0], None, *leave.args[2:])


@pytest.mark.parametrize("edit", [_other_dtype, _no_value, _another_op, _another_order])
def test_what_a_pass_does_not_tell_is_verified(edit, monkeypatch):
    """The pass before found nothing to do, so its graph was not verified once more; this one's is."""
    with_pass(monkeypatch, edit, "hoist-split", Level.MOE)
    with pytest.raises(VerifyError, match="after wrong"):
        run(strength=1, ep=2)


def test_a_graph_is_verified_once(monkeypatch):
    """What no pass changed since is not looked at again."""
    seen, verify = [], checks.verify

    def noted(gm, level, facts):
        seen.append((facts.graph, level))
        verify(gm, level, facts)

    monkeypatch.setattr(checks, "verify", noted)
    result = run(strength=1, ep=2)
    changed = [record for record in result.records if record.changes]
    at_moe = [graph for graph, level in seen if level is Level.MOE]
    assert at_moe == ["whole"] * (1 + sum(record.level is Level.MOE for record in changed))
    assert {"forward", "backward"} <= {graph for graph, _ in seen}
    assert len(seen) < len(result.records)
