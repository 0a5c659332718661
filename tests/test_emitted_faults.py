"""Damage done to emitted programs, the same on all ranks: level 2 runs the code and names what is wrong.

The layer is that of tests/test_faults.py. Damage of one rank alone is caught when ranks compare what they compiled.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import moefx
from moefx.compiler import variants
from moefx.compiler.checks import Checks
from moefx.compiler.pipeline import Pipeline
from moefx.context.step_graphs import StepGraphs
from moefx.errors import VerifyError
from moefx.link import rehearsal
from moefx.link.emit import load
from moefx.options import Options
from tests.support.graphs import context, graph
from tests.support.handmade import Loop, OneLayer
from tests.support.linking import code_of
from tests.support.ranks import run_ranks
from tests.test_faults import COUNTING

F, B = "forward", "backward"
Damage = Callable[[str], str]


@pytest.fixture(scope="module")
def linked() -> tuple[Checks, StepGraphs, dict[str, str]]:
    """The checks, the graphs before they were linked, and the code."""
    gm, mode = graph(COUNTING)
    ctx = context(mode, Options.named(chunks=2, alltoall="2dh", scheduler="optsche", verify=2), dp=2, ep=4)
    pipeline = Pipeline(replace(ctx, mesh=replace(ctx.mesh, ranks_per_node=2)))
    step = pipeline.run(gm)
    assert pipeline.checks.comparison.reason is None
    return pipeline.checks, *code_of(gm, step)


def another(old: str, new: str, number: int = 0) -> Damage:
    """Occurrence so-and-so of a text replaced."""
    def damage(code: str) -> str:
        parts = code.split(old)
        return old.join(parts[: number + 1]) + new + old.join(parts[number + 1 :])

    return damage


def line(mark: str, change: Callable[[str], list[str]], number: int = 0) -> Damage:
    """Other lines in place of the one with that mark."""
    def damage(code: str) -> str:
        lines = code.splitlines()
        place = [i for i, each in enumerate(lines) if mark in each][number]
        return "\n".join([*lines[:place], *change(lines[place]), *lines[place + 1 :]])

    return damage


def behind(mark: str, extra: str, number: int = 0) -> Damage:
    return line(mark, lambda old: [old, "    " + extra], number)


def returned(change: Callable[[list[str]], list[str]]) -> Damage:
    def damage(code: str) -> str:
        head, values = code.rstrip().removesuffix("]").rsplit("return [", 1)
        return f"{head}return [{', '.join(change(values.split(', ')))}]"

    return damage


# What is done, to which function, what is said.
FAULTS: dict[str, tuple[str, Damage, str]] = {
    "a wait is dropped": (F, line(".wait()", lambda old: []), "does not run: NameError"),
    "a handle in place of its result": (F, another(".wait()", ""), "does not run"),
    "started once too often": (F, line("exchange_counts_start(", lambda old: [old.split("; ")[0], old]),
                               "does not wait for all_g"),
    "a collective is dropped": (B, line("exchange_phase_start(", lambda old: []), "does not run"),
    "an exchange of other rows": (B, another("exchange_phase_start(session, grad_r0_leave_regroup_c0_by_number,",
                                             "exchange_phase_start(session, r0_enter_regroup_c0,"), "does not run"),
    "another group": (F, another("'ep'", "'dp'"), "code does not run|differs"),
    "gradients of fewer ranks": (B, another("axes=('dp', 'ep')", "axes=('dp',)"), "gradient of gate differs"),
    "gradients of more ranks": (B, another("axes=('dp',)", "axes=('dp', 'ep')"), "gradient of (up|down) differs"),
    "another scale": (B, another("scale=0.125", "scale=0.25"), "gradient of (up|down) differs"),
    "a scale per expert rank": (B, another("scale=0.125", "scale=0.5", 1), "gradient of gate differs"),
    "a statistic of fewer ranks": (F, another("axes=('dp', 'ep')", "axes=('ep',)"), "buffer_load differs"),
    "an average that is summed": (F, another("return [copy, steps, mean_1", "return [copy, steps, steps"),
                                  "buffer_mean"),
    "transposed weight": (F, another("transposed=False", "transposed=True"), "does not run"),
    "the way back is the way out": (F, another("reverse=True", "reverse=False", 3), "does not run|differs"),
    "the other phase": (F, another("step='inter'", "step='intra'"), "does not run|differs"),
    "blocks stay in their order": (F, another("regroup(r0_enter_a2a_c0_inter_done, r0_host_c0_done, reverse=False)",
                                              "regroup(r0_enter_a2a_c0_inter_done, r0_host_c0_done, reverse=True)"),
                                   "differs"),
    "the plan of the other chunk": (F, another("regroup_c0, up, r0_slots_c0", "regroup_c0, up, r0_slots_c1"),
                                    "does not run|differs"),
    "a chunk is lost": (F, another("[r0_combine_c0, r0_combine_c1]", "[r0_combine_c0, r0_combine_c0]"),
                        "does not run|differs"),
    "chunks swapped": (F, another("[r0_combine_c0, r0_combine_c1]", "[r0_combine_c1, r0_combine_c0]"), "differs|was"),
    "rows too few": (B, another("num_rows=grad_r0_leave_regroup_c0_by_number_rows)",
                                "num_rows=grad_r0_leave_regroup_c0_by_number_rows - 1)"), "does not run"),
    "another k": (F, another("topk.default(scores, 2)", "topk.default(scores, 1)"), "does not run"),
    "other slots": (F, another("r0_table, None, 8)", "r0_table.flip(0), None, 8)"), "differs"),
    "weight gradient of one chunk": (B, another(", out=grad_down_1", ""), "gradient of down differs"),
    "weight gradient into another": (B, another("out=grad_down_1", "out=grad_hidden_c0"), "does not run"),
    "an input is written to": (F, behind("mm.default(x, linear_t)", "x.add_(1)"), "writes to its input 0"),
    "an activation in place": (F, another("silu.default(r0_linear_c0)", "silu_.default(r0_linear_c0)"),
                               "gradient of .* differs"),
    "rows overwritten while they are sent": (F, line(
        "r0_enter_a2a_c0_inter_started =",
        lambda old: [old.replace("; del", "; r0_enter_a2a_c0_by_node.zero_(); del")]),
        r"on the stream 'compute' writes to memory that all_to_all on 'tokens of ranks \[\d, \d\]' reads"),
    "a gradient overwritten while it is reduced": (B, line(
        "reduced_grad_gate_started =", lambda old: [old.replace("; del", "; grad_gate.neg_(); del")]),
        r"writes to memory that all_reduce on 'gradient of ranks"),
    "a bucket takes a gradient for another": (B, another("names=['down', 'up']", "names=['up', 'down']"),
                                              "gradient of (up|down)"),
    "a bucket without a gradient": (B, line("reduce_gradients_start(", lambda old: [old.replace(
        "[grad_down, ", "[").replace("names=['down', ", "names=[")]), "does not run"),
    "a parameter is written to": (F, another("aten.t.default(gate)", "aten.t.default(gate.mul_(2))"),
                                  "writes to its input 1"),
    "freed too early": (F, behind("aten.t.default(gate)", "del x"), "does not run: UnboundLocalError"),
    "stale slot": (F, returned(lambda v: [{"r0_linear_c0": "r0_linear_c1", "r0_linear_c1":
                                           "r0_linear_c0"}.get(name, name) for name in v]), "does not run|differs"),
    "a slot too few": (F, returned(lambda v: v[:-1]), "does not run"),
    "gradients swapped": (B, returned(lambda v: [v[0], v[2], v[1]]), "gradient of .* (was|differs)"),
    "a gradient is lost": (B, returned(lambda v: [v[0], "None", v[2]]), "the gradient of up is gone"),
    "a buffer stays as it was": (F, another("return [copy,", "return [clone,"), "does not run"),
    "exchanges that two neighbours begin in other orders": (F, behind(
        "mm.default(x, linear_t)",
        "axes = ('dp', 'ep')[:: 1 - 2 * ((session.index('dp') + session.index('ep')) % 2)]; "
        "extra = {each: collectives.sum_parts_start(session, x.sum(), axis=each) for each in axes}; "
        "extra['dp'].wait(), extra['ep'].wait()"), "begin collectives in orders that do not fit together"),
    "gradient of the scores": (B, another("mm.default(grad_linear_t, x)", "mm.default(grad_linear_t, x).neg()"),
                               "gradient of gate"),
}  # fmt: skip


def check(linked, code: dict[str, str]) -> None:
    checks, step, _ = linked
    functions = {name: load(text, name) for name, text in code.items()}
    checks.emitted(step, lambda graph, inputs: rehearsal.run(functions[graph], inputs, checks.ctx.mesh.root))


def test_what_is_whole_goes_through(linked):
    check(linked, linked[2])


BRANCHES = (ast.If, ast.IfExp, ast.While, ast.BoolOp, ast.Try, ast.Match, ast.comprehension, ast.Lambda, ast.Assert)


def test_code_takes_one_way(linked):
    """What ranks with equal code begin, they begin in one order, whatever values they have."""
    for code in linked[2].values():
        assert not [ast.unparse(node) for node in ast.walk(ast.parse(code)) if isinstance(node, BRANCHES)]


@pytest.mark.parametrize("name", FAULTS)
def test_damage_to_the_code_of_all_ranks_is_caught(linked, name):
    where, damage, message = FAULTS[name]
    code = dict(linked[2])
    code[where] = damage(code[where])
    assert code != linked[2], "nothing was damaged"
    with pytest.raises(VerifyError, match=message) as caught:
        check(linked, code)
    assert "after emit" in str(caught.value)


def _compiles(rank: int, world: int) -> str:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))
    tokens = torch.arange(16).view(2, 8)
    original, damage = variants.emit, another("scale=0.5", "scale=1.0")
    torch.manual_seed(0)
    with (mock.patch.object(variants, "emit", lambda *args, **how: damage(original(*args, **how))),
          pytest.raises(VerifyError) as caught):  # fmt: skip
        moefx.compile(OneLayer(Loop()), mesh, verify=2, dynamic=False,
                      example_inputs={"input_ids": tokens, "labels": tokens})  # fmt: skip
    return str(caught.value)


def test_compile_runs_the_code_that_it_emits():
    assert all("after emit: the gradient of" in said for said in run_ranks(2, _compiles))
