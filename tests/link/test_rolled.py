"""Loops over equal layers in emitted code: the same statements, numbers, lifetimes and messages as layer by layer."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import moefx
from moefx.errors import VerifyError
from moefx.link.rolled import roll
from moefx.link.statements import Function, Statement, flat, marked
from moefx.link.unrolled import check_unrolled, unrolled
from moefx.report.reports import programs_of
from tests.support.handmade import Block, LanguageModel, Loop, make_moe
from tests.support.models import Case
from tests.support.peaks import Peak
from tests.support.ranks import one_rank

# ---- texts

NAME = re.compile(r"\b([a-z]+\d+)\b")


def function(lines: list[str], inputs: list[str], outputs: list[str]) -> Function:
    """Of statements like `x1 = f(x0); del x0  # layers.1`."""
    statements = []
    for line in lines:
        line, _, heading = line.partition("  # ")
        code, _, gone = line.partition("; del ")
        statements.append(Statement(code.split(" = ")[0], NAME.sub(lambda m: marked(m[1]), code),
                                    tuple(filter(None, gone.split(", "))), "f32[4]", heading or None))  # fmt: skip
    return Function("forward", [(name, "f32[4]") for name in inputs], [], statements, list(map(marked, outputs)))


def layers(count: int, kinds: tuple[str, ...] = ("f",)) -> Function:
    """Of several statements each; what every layer keeps is given back, and its sum is sent while the next one runs."""
    lines = []
    for n in range(count):
        kind = kinds[n % len(kinds)]
        lines += [f"a{n} = {kind}.one(x{n}, w{n}); del w{n}  # layers.{n}",
                  f"sent{n} = send(a{n}, region='layers.{n}.mlp')  # layers.{n}",
                  *([f"got{n} = sent{n - 1}.wait(); del sent{n - 1}  # layers.{n - 1}"] if n else []),
                  *(f"b{n}{k} = {kind}.two(x{n}, {k})  # layers.{n}" for k in "123"),
                  f"x{n + 1} = {kind}.three(a{n}, b{n}1, b{n}2, b{n}3); del a{n}, b{n}1, b{n}2, b{n}3  # layers.{n}"]
    given = [f"w{n}" for n in range(count)]
    kept = [name for n in range(count) for name in ([f"got{n}"] if n else []) + [f"x{n}"]]
    last = [f"got{count} = sent{count - 1}.wait(); del sent{count - 1}"]
    return function(lines + last, ["x0", *given], [*kept, f"got{count}", f"x{count}"])


def test_equal_layers_are_a_loop():
    text = roll(layers(6), set())
    body = [re.sub(r"  +# (f32|for the).*", "", line).strip() for line in text.split(" equal layers\n")[1].splitlines()]
    assert text.count("5 equal layers\n") == 1
    assert body == """\
(
w,
) = given.popleft()

# layers.{layer}
a = f.one(last_x, w); del w
sent = send(a, region=f'layers.{layer}.mlp')

# layers.{layer - 1}
got = last_sent.wait(); del last_sent

# layers.{layer}
b = f.two(last_x, 1)
b_1 = f.two(last_x, 2)
b_2 = f.two(last_x, 3)
x = f.three(a, b, b_1, b_2); del a, b, b_1, b_2

kept += [got, last_x]
last_sent, last_x = sent, x; del sent, x

got6 = last_sent.wait(); del last_sent

return [x0, *kept, got6, last_x]""".splitlines()


@pytest.mark.parametrize(("count", "kinds", "loops"), [
    (2, ("f",), 0), (3, ("f",), 0), (4, ("f",), 1), (48, ("f",), 1), (9, ("f", "g"), 1), (5, ("f", "g"), 0),
    (30, ("f", "f", "f", "g"), 1),
])  # fmt: skip
def test_what_repeats_three_times_is_a_loop_of_the_same_statements(count, kinds, loops):
    program = layers(count, kinds)
    text = roll(program, set())
    assert (0 if text is None else text.count("for layer in")) == loops
    if text is not None:
        assert unrolled(text, program) == flat(program)
        assert text.count("\n") < flat(layers(4 * len(kinds), kinds)).count("\n")


@pytest.mark.parametrize(("old", "new", "said"), [
    ("range(1, 6)", "range(1, 5)", "does not run: "),
    ("range(1, 6)", "range(2, 7)", "is not what they do"),
    ("{layer - 1}", "{layer}", "is not what they do"),
    ("{layer}.mlp", "1.mlp", "is not what they do"),
    ("given.popleft()", "given.pop()", "is not what they do"),
    ("kept += [", "kept[:0] = [", "is not what they do"),
    ("step=1", "step=2", "does not run: "),
    ("; del last_sent", "", "is not what they do"),
    ("; del sent, x", "", "keeps sent\\d longer"),
    ("= given.popleft()", "= given[0]", "is not what they do|does not run: "),
    ("f.two(", "f.three(", "is not what they do"),
])  # fmt: skip
def test_damage_to_a_loop_is_found(old, new, said):
    program = layers(6)
    text = roll(program, set())
    check_unrolled(text, program)
    damaged = text.replace(old, new, 1)
    assert damaged != text
    with pytest.raises(VerifyError, match=said):
        check_unrolled(damaged, program)


STYLE = Loop(num_experts=4, gated=False)


class Deep(LanguageModel):
    """Equal blocks."""

    def __init__(self, blocks: int = 5) -> None:
        super().__init__(STYLE)
        self.layers = nn.ModuleList(Block(make_moe(STYLE), False) for _ in range(blocks))


CASE = Case("deep", Deep)


@pytest.fixture(scope="module")
def compiled():
    """{how it is printed: the model}."""
    found = {}
    with one_rank(), pytest.MonkeyPatch.context() as patch:
        for layers in ("0", "1"):
            patch.setenv("MOEFX_LAYERS", layers)
            mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "ep"))
            found[layers] = moefx.compile(CASE.build(), mesh, verify=2, example_inputs=CASE.batch(0))
        yield found
        for model in found.values():
            model.close()


def stepped(model, part: str = "loss") -> tuple[list[torch.Tensor], list[tuple[int, int]]]:
    """Gradients, and what was allocated and freed in which order."""
    model.zero_grad(set_to_none=True)
    batch = CASE.batch(1)
    with Peak([*model.parameters(), *model.buffers(), *batch.values()]) as peak:
        getattr(model(**batch), part).sum().backward()
    return [p.grad.full_tensor() for p in model.parameters()], peak.history


# The other one has no gradient then.
@pytest.mark.parametrize("part", ["loss", pytest.param("logits", marks=pytest.mark.full)])
def test_it_computes_the_same_and_lets_go_of_memory_at_the_same_ops(compiled, part):
    for model in compiled.values():
        stepped(model, part)
    (grads, history), (other, others) = (stepped(model, part) for model in compiled.values())
    assert all(map(torch.equal, grads, other))
    assert len(history) > 500
    assert history == others


def test_a_loop_is_in_the_code(compiled):
    once, whole = (dict(moefx.inspect(compiled[layers]).code) for layers in "10")
    for name in ("forward", "backward"):
        assert whole[name].count("\n    for layer in range(") == 0
        assert once[name].count("\n    for layer in range(") >= 1
        assert once[name].count("\n") < 0.8 * whole[name].count("\n")


class _Fails(TorchDispatchMode):
    """The n-th attention fails."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.left = number

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default:
            self.left -= 1
            if not self.left:
                raise RuntimeError("no kernel")
        return func(*args, **(kwargs or {}))


def test_errors_say_in_which_layer(compiled):
    for number in (3, 4):
        with _Fails(number), pytest.raises(RuntimeError, match="no kernel") as caught:
            compiled["1"](**CASE.batch(0))
        assert f"in layers.{number - 1}.attention" in caught.value.__notes__


def test_profiles_tell_of_every_layer(compiled):
    tasks = {}
    for layers, model in compiled.items():
        with moefx.profile(model) as profile:
            model(**CASE.batch(0)).loss.backward()
        tasks[layers] = [(run.graph, what, task) for run in profile._runs for what, task, _ in run._marks]
    assert len(tasks["0"]) > 50
    assert tasks["0"] == tasks["1"]
    for layers, model in compiled.items():
        (variant,) = programs_of(model, (), {})
        assert ("for layer in range" in variant.program.relinked["forward", (), True][1]) == (layers == "1")
