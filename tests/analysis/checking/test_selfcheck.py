"""The self-check of raises refuses what changes meaning: experts that mix rows, and raised graphs that are damaged."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from itertools import takewhile

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from moefx.analysis.checking import selfcheck
from moefx.analysis.checking.selfcheck import SelfCheck
from moefx.axes import MeshSpec
from moefx.capture.trace import trace
from moefx.compiler.pipeline import WHOLE, refresh
from moefx.context.pass_types import PassContext
from moefx.errors import RaiseError
from moefx.ir.edit import copy_of
from moefx.ir.ops.regions import enter_experts
from moefx.options import Options
from moefx.passes import raise_grouped, raise_loop
from tests.passes.test_raise_grouped import BIASED
from tests.passes.test_raise_loop import loop
from tests.support.graphs import assert_same_meaning, context, graph
from tests.support.small import CAPTURED

m = torch.ops.moefx


def raised(run, source, **axes):
    """(the comparison with the graph before, what that gave, the raised graph)"""
    gm, mode = graph(source)
    check, end = SelfCheck(gm), gm.graph.output_node().args[0][0]
    run(gm, context(mode, **(axes or {"ep": 1})))
    return check, end, gm


# ---- experts that mix rows

ROWS_APART = ["F.softmax(H, dim=-1)", "F.layer_norm(H.cumsum(1), (24,))"]
ROWS_MIXED = ["F.softmax(H, dim=0)", "H.cumsum(0)", "H.flip(0)", "H.roll(1, 0)", "F.normalize(H, dim=0)",
              "H - H.mean(0)", "H - H.mean(0, keepdim=True)", "H.clamp_min(H.max())", "F.layer_norm(H, H.shape)",
              "F.softmax(F.dropout(H, 0.5, True), dim=0)"]  # fmt: skip


def in_loop(code, experts=range(3)):
    source = loop()
    for e in experts:
        line = f"    rows{e} ="
        assert line in source
        source = source.replace(line, f"    hidden{e} = {code.replace('H', f'hidden{e}')}\n{line}")
    return source


def in_grouped(code, tokens="s0"):
    source = CAPTURED.replace("x: \"f32[s0,", f"x: \"f32[{tokens},")
    return source.replace("    out =", f"    hidden = {code.replace('H', 'hidden')}\n    out =")


@pytest.mark.parametrize("code", ROWS_APART)
def test_rows_apart_are_taken(code):
    raised(raise_loop.run, in_loop(code))
    raised(raise_grouped.run, in_grouped(code))
    raised(raise_grouped.run, in_grouped(code, tokens="6"))


@pytest.mark.parametrize("code", [code for code in ROWS_MIXED if "roll" not in code])  # that no tracer takes
def test_mixed_rows_of_a_loop_are_refused(code):
    with pytest.raises(RaiseError) as caught:
        raised(raise_loop.run, in_loop(code))
    assert caught.value.where
    assert caught.value.hint


@pytest.mark.parametrize(
    ("code", "tokens"), [*((code, "s0") for code in ROWS_MIXED), *((code, "6") for code in ROWS_MIXED[:5])]
)
def test_mixed_rows_of_grouped_matmuls_are_refused(code, tokens):
    """On one device they mean the same; not where every rank has other rows. Also where the batch is of fixed size."""
    with pytest.raises(RaiseError) as caught:
        raised(raise_grouped.run, in_grouped(code, tokens))
    assert caught.value.where
    assert caught.value.hint


def test_one_odd_expert_is_refused():
    with pytest.raises(RaiseError) as caught:
        raised(raise_loop.run, in_loop("H.cumsum(0)", experts=(1,)))
    assert caught.value.where


# ---- the same from modules: the user is told the module and the line


class Experts(nn.Module):
    """Four experts. body: from the hidden rows [.., H] of one expert, or of all as static blocks, to others."""

    def __init__(self, body: Callable[[Tensor], Tensor], style: str) -> None:
        super().__init__()
        self.body, self.style = body, style
        self.gate = nn.Linear(8, 4, bias=False)
        self.up = nn.Parameter(torch.randn(4, 8, 12))
        self.down = nn.Parameter(torch.randn(4, 12, 8))

    def forward(self, x_TD: Tensor) -> Tensor:
        scores = self.gate(x_TD).softmax(-1)
        if self.style == "blocks":
            out = torch.bmm(self.body(torch.bmm(x_TD.expand(4, -1, -1), self.up)), self.down)
            return (out * scores.t().unsqueeze(-1)).sum(0)
        weights, idx = torch.topk(scores, 2, dim=-1)
        out = torch.zeros_like(x_TD)
        for e in range(4):
            token, choice = torch.where(idx == e)
            rows = self.body(x_TD[token] @ self.up[e]) @ self.down[e]
            out.index_add_(0, token, rows * weights[token, choice, None])
        return out


class Model(nn.Module):
    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.mlp = experts

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(x)


def compile_up_to_the_raises(model: nn.Module) -> GraphModule:
    leaves, spec = pytree.tree_flatten(((torch.randn(6, 8),), {}))
    captured = trace(model, model, leaves, spec, torch.device("cpu"))
    ctx = PassContext(MeshSpec.named({"ep": 2}), Options(), captured.fake_mode)
    for entry in takewhile(lambda entry: entry.name != "refuse-unraised", WHOLE):
        if entry.run(captured.gm, ctx).changes:
            refresh(captured.gm, ctx)
    return captured.gm


BODIES = {"softmax": lambda rows: rows.softmax(-2), "cumsum": lambda rows: rows.relu().cumsum(0),
          "mean": lambda rows: rows - rows.mean(-2, keepdim=True), "flip": lambda rows: rows.flip(-2)}  # fmt: skip


@pytest.mark.parametrize(
    ("style", "name"),
    [("loop", "softmax"), ("loop", "cumsum"), ("loop", "mean"), ("blocks", "mean"), ("blocks", "flip")],
)
def test_module_and_line_are_named(style, name):
    with pytest.raises(RaiseError) as caught:
        compile_up_to_the_raises(Model(Experts(BODIES[name], style)))
    module, _, line = caught.value.where.partition(" at ")
    assert module == "mlp"
    path, _, number = line.rpartition(":")
    assert path.endswith("test_selfcheck.py")
    source, first = inspect.getsourcelines(Experts)
    assert int(number) in (*range(first, first + len(source)), BODIES[name].__code__.co_firstlineno)


@pytest.mark.parametrize("style", ["loop", "blocks"])
def test_the_same_modules_are_taken_if_rows_stay_apart(style):
    gm = compile_up_to_the_raises(Model(Experts(lambda rows: rows.softmax(-1), style)))
    assert gm.graph.find_nodes(op="call_function", target=enter_experts)


# ---- raised graphs that are damaged


def node_of(gm: GraphModule, target: object) -> Node:
    return next(n for n in gm.graph.nodes if n.target is target or n.target == target)


def behind(gm: GraphModule, source: Node, user: Node, position: int, method: str, *args: object) -> None:
    """Let `user` read source.method(*args) as its argument at `position`."""
    with gm.graph.inserting_before(user):
        new = gm.graph.call_method(method, (source, *args))
    new.meta["val"] = source.meta["val"]
    user.update_arg(position, new)


def undamaged(gm):
    """Nothing."""


def swapped_weights(gm):
    linear = node_of(gm, m.grouped_linear.default)
    behind(gm, linear.args[1], linear, 1, "flip", 0)


def dropped_bias(gm):
    linear = node_of(gm, m.grouped_linear.default)
    if len(linear.args) > 4:
        linear.args = linear.args[:4]
    else:
        add = next(n for n in linear.users if n.target is operator.add)
        add.replace_all_uses_with(linear)


def wrong_activation(gm):
    node = next(n for n in gm.graph.nodes if n.target in (F.silu, "relu"))
    if node.op == "call_function":
        node.target = F.gelu
    else:
        node.target = "tanh"


def wrong_scores(gm):
    combine = node_of(gm, m.combine.default)
    behind(gm, combine.args[3], combine, 3, "flip", -1)


def scores_a_thousandth_too_large(gm):
    combine = node_of(gm, m.combine.default)
    behind(gm, combine.args[3], combine, 3, "mul", 1.001)


def no_scores(gm):
    combine = node_of(gm, m.combine.default)
    combine.args = combine.args[:3]


def wrong_rows(gm):
    dispatch = node_of(gm, m.dispatch.default)
    behind(gm, dispatch.args[1], dispatch, 1, "flip", 0)


def wrong_counts(gm):
    linear = [n for n in gm.graph.nodes if n.target is m.grouped_linear.default][1]
    behind(gm, linear.args[2], linear, 2, "roll", 1)


def no_gradient_of_weights(gm):
    linear = node_of(gm, m.grouped_linear.default)
    behind(gm, linear.args[1], linear, 1, "detach")


def no_gradient_of_scores(gm):
    combine = node_of(gm, m.combine.default)
    behind(gm, combine.args[3], combine, 3, "detach")


SOURCES = {"loop": (raise_loop.run, loop()), "grouped": (raise_grouped.run, BIASED)}


def checked(style: str, damage: Callable[[GraphModule], None]) -> None:
    check, old, gm = raised(*SOURCES[style])
    damage(gm)
    gm.graph.lint()
    nodes = {n.name: n for n in gm.graph.nodes}
    new = gm.graph.output_node().args[0][0]
    experts = 3 if style == "loop" else 8
    for _ in range(2):  # again: one that it has seen
        check.compare(old, new, nodes["idx"], [nodes["x"], nodes["weights"]], experts)


@pytest.mark.parametrize("style", SOURCES)
@pytest.mark.parametrize(("damage", "message"), [
    (swapped_weights, "output differs"),
    (dropped_bias, "output differs"),
    (wrong_activation, "output differs"),
    (wrong_scores, "output differs"),
    (scores_a_thousandth_too_large, "output differs"),
    (no_scores, "output differs"),
    (wrong_rows, "output differs"),
    (wrong_counts, "output differs"),
    (no_gradient_of_weights, "gradient of up"),
    (no_gradient_of_scores, "gradient of weights differs"),
], ids=lambda p: getattr(p, "__name__", ""))  # fmt: skip
def test_damage_is_found(style, damage, message):
    with pytest.raises(RaiseError) as caught:
        checked(style, damage)
    assert message in caught.value.what
    assert "please report it" in caught.value.hint


@pytest.mark.parametrize("style", SOURCES)
def test_what_is_not_damaged_goes_through(style):
    checked(style, undamaged)


# ---- what is compared, and what is not


@pytest.fixture
def trials(monkeypatch):
    """How often a region was run beside the original."""
    made: list[int] = []
    original = SelfCheck._trial
    monkeypatch.setattr(SelfCheck, "_trial", lambda self, *args: made.append(args[0]) or original(self, *args))
    return made


def two_layers(first, second):
    *head, last = in_grouped(first).splitlines(keepends=True)
    again = in_grouped(second).splitlines(keepends=True)[2:]
    again = "".join(again).replace(" up.", " up2.").replace(" down.", " down2.")
    text = "".join(head).replace('down: "f32[8, 16, 24]"',
                                 'down: "f32[8, 16, 24]", up2: "f32[8, 24, 16]", down2: "f32[8, 16, 24]"')
    assert last == "    return (result,)\n"
    return f"{text}    x = result\n{again}"


def test_equal_layers_are_compared_once(trials):
    raised(raise_grouped.run, two_layers("H.flip(-1)", "H.flip(-1)"))
    assert trials == [0, 1, 2]


def test_layers_that_differ_in_a_constant_are_both_compared(trials):
    raised(raise_grouped.run, two_layers("H.flip(-1)", "H.roll(2, -1)"))
    assert trials == [0, 1, 2] * 2
    with pytest.raises(RaiseError, match="tokens"):
        raised(raise_grouped.run, two_layers("H.flip(-1)", "H.flip(0)"))


def test_one_that_is_refused_is_left_as_it_was_and_no_other():
    gm, mode = graph(two_layers("H.flip(-1)", "H.flip(0)"))
    before, ctx = copy_of(gm), context(mode, Options.named(strict=False), ep=2)
    raise_grouped.run(gm, ctx)
    gm.graph.lint()
    assert len(ctx.report.left) == len(gm.graph.find_nodes(op="call_function", target=m.route.default)) == 1
    assert_same_meaning(before, gm, exact=False, double=True)


def test_a_layer_is_compared_from_the_one_before_on(monkeypatch, trials):
    """The parameters of the layer before are not read again, nor counted."""
    monkeypatch.setattr(selfcheck, "_BUDGET_ELEMENTS", 2 * 8 * 16 * 24 + 8 * 16)
    raised(raise_grouped.run, two_layers("H.flip(-1)", "H.roll(2, -1)"))
    assert trials == [0, 1, 2] * 2


def test_too_large_regions_are_compared_by_rules_only(monkeypatch, trials):
    monkeypatch.setattr(selfcheck, "_BUDGET_ELEMENTS", 1000)
    checked("loop", undamaged)
    assert not trials


@pytest.mark.parametrize(("code", "count"), [
    ("H + torch.rand_like(H)", 0),
    ("F.dropout(H, 0.5, True)", 3),  # as if it let everything through
], ids=["rand", "dropout"])  # fmt: skip
def test_random_regions(code, count, trials):
    raised(raise_grouped.run, in_grouped(code))
    assert len(trials) == count


def test_numbers_in_double_precision_are_compared_in_it():
    """Two that differ in the last digit may be rounded to unlike ones of single precision."""
    middle = torch.tensor([1 + 2.0**-24], dtype=torch.float64)
    below, above = middle - 2.0**-50, middle + 2.0**-50
    assert below.float() != above.float()
    check = object.__new__(SelfCheck)
    assert 0 < check._error(below, above) < 1e-14
