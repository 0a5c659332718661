"""Damage done to the code of blocks in parts, the same on all ranks: level 2 runs it and names what is wrong."""

from __future__ import annotations

import pytest

from moefx.compiler.checks import Checks
from moefx.compiler.pipeline import Pipeline
from moefx.context.step_graphs import StepGraphs
from moefx.errors import VerifyError
from moefx.options import Options
from tests.support.graphs import context, graph
from tests.support.linking import code_of
from tests.test_emitted_faults import B, F, another, check

LAYER = """
    v{n} = F.linear({x}, q{n}).unsqueeze(1)
    a{n} = F.scaled_dot_product_attention({x}.unsqueeze(1), {x}.unsqueeze(1), v{n}).squeeze(1)
    tokens{n} = a{n}.view(a{n}.size(0) * a{n}.size(1), 16)
    topk{n} = torch.topk(F.softmax(F.linear(tokens{n}, gate{n}), dim=-1), 2, dim=-1)
    weights{n} = topk{n}[0]
    flat{n} = topk{n}[1].reshape(-1)
    perm{n} = torch.argsort(flat{n}, stable=True)
    token{n} = perm{n} // 2
    offsets{n} = torch.cumsum(torch.bincount(flat{n}, minlength=4), 0, dtype=torch.int32)
    hidden{n} = F.silu(grouped_mm_fallback(tokens{n}[token{n}], up{n}.transpose(-2, -1), offsets{n}))
    out{n} = grouped_mm_fallback(hidden{n}, down{n}.transpose(-2, -1), offsets{n})
    weighted{n} = out{n} * weights{n}.reshape(-1)[perm{n}].unsqueeze(-1)
    h{n} = a{n} + torch.zeros_like(tokens{n}).index_add(0, token{n}, weighted{n}).view_as(a{n})
"""
WEIGHTS = 'q{n}: "f32[16, 16]", gate{n}: "f32[4, 16]", up{n}: "f32[4, 24, 16]", down{n}: "f32[4, 16, 24]"'
TWO = (f'def graph(x: "f32[s0, s1, 16]", {WEIGHTS.format(n=0)}, {WEIGHTS.format(n=1)}):'
       + LAYER.format(n=0, x="x") + LAYER.format(n=1, x="h0") + "    return (h1,)\n")  # fmt: skip


def made_for(samples: int) -> tuple[Checks, StepGraphs, dict[str, str]]:
    gm, mode = graph(TWO)
    options = Options.named(chunks=2, whole_blocks=True, scheduler="heuristic", verify=2)
    ctx = context(mode, options, dp=2, ep=2)
    ctx.sizes[str(next(iter(gm.graph.nodes)).meta["val"].shape[0])] = samples
    pipeline = Pipeline(ctx)
    step = pipeline.run(gm)
    assert pipeline.checks.comparison.reason is None
    return pipeline.checks, *code_of(gm, step)


@pytest.fixture(scope="module")
def linked() -> tuple[Checks, StepGraphs, dict[str, str]]:
    return made_for(4)


@pytest.fixture(scope="module")
def linked_for_one() -> tuple[Checks, StepGraphs, dict[str, str]]:
    """The sequence is cut."""
    return made_for(1)


def early(code: str) -> str:
    """What is reduced of q1's gradient is what there is before the second part is added."""
    lines, added, reduced = q1_in_a_bucket(code)
    lines[reduced] = lines[reduced].replace("grad_q1_2", "early")
    return "\n".join([*lines[:added], "    early = grad_q1.clone()", *lines[added:]])


def at_once(code: str) -> str:
    """A bucket begins before the last part of q1's gradient is there."""
    lines, added, reduced = q1_in_a_bucket(code)
    begun = lines.pop(reduced)
    return "\n".join([*lines[:added], begun.split("; del")[0], *lines[added:]])


def q1_in_a_bucket(code: str) -> tuple[list[str], int, int]:
    """The lines, where the last part of q1's gradient is added, and where its bucket begins."""
    lines = code.splitlines()
    (added,) = [i for i, each in enumerate(lines) if "grad_q1_2 = " in each]
    (reduced,) = [i for i, each in enumerate(lines) if "reduce_gradients_start(" in each and "grad_q1_2" in each]
    assert "names=" in lines[reduced]
    return lines, added, reduced


# What is done, to which function, what is said.
FAULTS = {
    "an exchange of part 2 sends part 1's tokens": (
        F, another("dispatch(tokens0_c1, r0_perm_c1", "dispatch(tokens0_c0, r0_perm_c1"), "does not run"),
    "part 2 goes by part 1's plan": (
        F, another("r0_dispatch_c1, r0_host_c1_done", "r0_dispatch_c1, r0_host_c0_done"), "does not run"),
    "attention reads another part": (
        F, another("unsqueeze.default(h0_c1, 1)", "unsqueeze.default(h0_c0, 1)"), "does not run"),
    "parts in another order": (F, another("[h1_c0, h1_c1]", "[h1_c1, h1_c0]"), "output 0 differs"),
    "a reduction before its last part": (B, early, "the gradient of q1 differs"),
    "a bucket before the last part of one of its gradients": (B, at_once, "does not run: .*grad_q1_2"),
    "a gradient without its last part": (
        B, another("aten.add_.Tensor(grad_q1, grad_q1_1)", "grad_q1"), "the gradient of q1 differs"),
}  # fmt: skip


# Of the sequence's parts.
OF_POSITIONS = {
    "parts in another order": (F, another("[h1_c0, h1_c1]", "[h1_c1, h1_c0]"), "output 0 differs"),
    "attention sees one part twice": (
        F, another("cat.default([h0_c0, h0_c1], 1)", "cat.default([h0_c0, h0_c0], 1)"), "does not run"),
    "a gradient without its last part": (
        B, another("aten.add_.Tensor(grad_q1, grad_q1_1)", "grad_q1"), "the gradient of q1 differs"),
}  # fmt: skip


def test_what_is_whole_goes_through(linked, linked_for_one):
    for each in (linked, linked_for_one):
        check(each, each[2])


@pytest.mark.parametrize("name", FAULTS)
def test_damage_is_named(linked, name):
    is_named(linked, *FAULTS[name])


@pytest.mark.parametrize("name", OF_POSITIONS)
def test_damage_to_parts_of_the_sequence_is_named(linked_for_one, name):
    is_named(linked_for_one, *OF_POSITIONS[name])


def is_named(linked, where, damage, message):
    code = dict(linked[2])
    code[where] = damage(code[where])
    assert code != linked[2], "nothing was damaged"
    with pytest.raises(VerifyError, match=message):
        check(linked, code)
