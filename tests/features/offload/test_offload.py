"""Steps whose values wait in the host's memory: numbers, several steps under way, steps that break off, code faults."""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import moefx
from moefx.compiler import pipeline
from moefx.compiler.checks import Checks
from moefx.compiler.pipeline import Pipeline
from moefx.context.step_graphs import StepGraphs
from moefx.errors import OffloadError, VerifyError
from moefx.features.offload import offload
from moefx.features.offload.runtime import Engines, ThreadCopy
from moefx.link import rehearsal
from moefx.link.emit import load
from moefx.options import Options
from moefx.runtime import kernels
from tests.support.graphs import context, graph
from tests.support.handmade import Loop, OneLayer
from tests.support.linking import code_of
from tests.support.models import shallow
from tests.support.parity import compare, gradients
from tests.support.ranks import fake_world
from tests.support.scenarios import EP2, check_compiled, compiled_case, steps_of, sum_of
from tests.support.sharing import run_sharing
from tests.support.small import CAPTURED

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]
EVEN, ONE_ROW = [(2, 8), (2, 8)], [(1, 3), (3, 10)]
T_DI, T_M = r"r\d_enter_regroup", r"r\d_linear"


@contextmanager
def waiting(pattern: str, found: set[str] | None = None) -> Iterator[None]:
    """Programs that are compiled in here offload what can go of the saved values of these names. found: is told."""
    original = pipeline.partition.run

    def run(joint, ctx, names):
        step = original(joint, ctx, names)
        chosen = {name for name in step.saved if re.search(pattern, name)} if step.backward is not None else set()
        look = step.backward and offload._Offload(step, chosen)
        for name in chosen:
            with mock.patch.object(offload, "_refuse", side_effect=LookupError):
                try:
                    look._checked(name)
                    ctx.decisions.moved[name] = "offload"
                except LookupError:
                    pass
        if found is not None:
            found.update(ctx.decisions.moved)
        return step

    with mock.patch.object(pipeline.partition, "run", run):
        yield


# ---- level 2, and faults of the code


def compiled_text(chunks: int, scheduler: str | None, pattern: str) -> tuple[Checks, StepGraphs, dict[str, str]]:
    """The checks, the graphs before they were linked, and the code."""
    gm, mode = graph(CAPTURED)
    run = Pipeline(context(mode, Options.named(chunks=chunks, scheduler=scheduler, verify=2), dp=1, ep=2))
    with waiting(pattern):
        step = run.run(gm)
    return run.checks, *code_of(gm, step)


def check(checks: Checks, step: StepGraphs, code: dict[str, str]) -> None:
    functions = {name: load(text, name) for name, text in code.items()}
    checks.emitted(step, lambda graph, inputs: rehearsal.run(functions[graph], inputs, checks.ctx.mesh.root))


@pytest.fixture(scope="module")
def linked():
    return compiled_text(2, "optsche", f"{T_DI}|{T_M}|scores")


@pytest.mark.parametrize("ways", [(1, None, "."), (4, "sequential", T_M)])
def test_graphs_and_code_compute_the_same(ways):
    checks, *found = compiled_text(*ways)
    assert checks.comparison.reason is None
    check(checks, *found)


def replaced(old: str, new: str) -> Callable[[str], str]:
    return lambda code: code.replace(old, new)


F, B = "forward", "backward"
OUT, BACK = "r0_linear_c0_on_host_started", "r0_linear_c0_back_started"
FAULTS: dict[str, tuple[str, Callable[[str], str], str]] = {
    "a handle is saved": (F, replaced(f"{OUT}.wait()", OUT), "does not wait for a copy"),
    "a copy is left alone": (F, replaced(f"{OUT}.wait()", "r0_linear_c1_on_host_done"), "does not run|differs"),
    "written to on its way": (F, replaced("silu.default(r0_linear_c1)", "silu_.default(r0_linear_c1)"), "differs"),
    "copied again": (F, replaced(f"    {OUT} =", "    offload.to_host_start(session, r0_linear_c0, region='');"
                                                 f" {OUT} ="), "does not wait for a copy"),
    "read on its way back": (B, replaced(f"{BACK}.wait()", f"{BACK}._result"), "does not wait|differs"),
    "read as it waits": (B, replaced(f"{BACK}.wait()", f"{BACK}._owned"), "does not run"),
    "read before it is back": (B, replaced(f"{BACK}.wait()", f"{BACK}._result.clone(); {BACK}.wait()"),
                               "'compute' reads memory that .*copy_.* on 'h2d' writes to"),
    "another value comes back": (B, replaced("session, r0_linear_c0_on_host,", "session, r0_linear_c1_on_host,"),
                                 "does not run|differs"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_damage_to_the_code_is_caught(name, linked):
    checks, step, code = linked
    where, damage, message = FAULTS[name]
    broken = code | {where: damage(code[where])}
    assert broken != code, "nothing was damaged"
    check(checks, step, code)
    with pytest.raises(VerifyError, match=message):
        check(checks, step, broken)


# ---- two ranks


def _steps(rank, world, case, steps, options):
    compiled = compiled_case(case, EP2, lambda model, mesh: moefx.compile(model, mesh, options))
    pool = compiled._session.held(Engines).pool
    check_compiled(rank, EP2, case, steps, compiled)
    for order in (1, -1):
        compiled.zero_grad()
        outs = [compiled(**batches[rank]) for batches, _ in steps]
        compiled(**steps[0][0][rank])  # and never differentiated
        with compiled.no_sync():
            outs[::order][0].loss.backward()
        outs[::order][1].loss.backward()
        del outs
        compare(gradients(compiled), sum_of(steps)).check(f"order {order}")
    assert pool.is_idle()
    assert pool.most > 0
    compiled.close()


def test_attention_and_rows_of_two_ranks():
    """One of them has few tokens in one step, and experts without any."""
    case = shallow("qwen3_moe-grouped_mm")
    with waiting(f"{T_DI}|{T_M}|attn|embed|hidden_states", found := set()):
        run_sharing(2, _steps, case, steps_of(case, [EVEN, ONE_ROW]), Options())
    assert {"r0_enter_regroup", "q_embed"} <= found


# ---- one rank: several steps under way, steps that break off, timelines


@pytest.fixture(scope="module", params=DEVICES)
def alone(request):
    """(compiled model on one rank, batches, their eager gradients); experts' rows and inner rows wait."""
    torch.manual_seed(0)
    device = request.param
    model = OneLayer(Loop(num_experts=4)).to(device)
    batches = [{"input_ids": (t := torch.randint(64, (2, n), device=device)), "labels": t} for n in (6, 9)]
    eager = []
    for batch in batches:
        model.zero_grad()
        model(**batch).loss.backward()
        eager.append(gradients(model))
    model.zero_grad()
    with fake_world(1), waiting(f"{T_DI}|{T_M}"):
        compiled = moefx.compile(model, init_device_mesh(device, (1,), mesh_dim_names=("ep",)))
        compiled(**batches[0])
        yield compiled, batches, eager
        compiled.close()


def settled(compiled) -> None:
    """Nobody has a value on the host, or a handle, which has one, once the threads are done with their copies."""
    deadline = time.monotonic() + 10  # after an error nobody waited for them
    while not compiled._session.held(Engines).pool.is_idle() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert compiled._session.held(Engines).pool.is_idle()
    compiled.zero_grad()


def steps_right(compiled, batches, eager) -> None:
    for batch, wanted in zip(batches, eager):
        compiled.zero_grad()
        compiled(**batch).loss.backward()
        compare(gradients(compiled), wanted).check("a step")
    settled(compiled)


def test_steps_under_way_dropped_and_in_any_order(alone):
    compiled, batches, eager = alone
    wanted = {name: eager[0][name] + eager[1][name] for name in eager[0]}
    for order in (1, -1):
        outs = [compiled(**batch) for batch in batches]
        compiled(**batches[1])
        assert not compiled._session.held(Engines).pool.is_idle()
        for out in outs[::order]:
            out.loss.backward()
        compare(gradients(compiled), wanted).check(f"order {order}")
        del outs, out
        settled(compiled)
    steps_right(*alone)


@pytest.mark.filterwarnings("ignore:gradient of")  # which nobody waits for, either
@pytest.mark.parametrize("name", ["combine", "combine_backward"])
def test_an_exception_in_a_step_leaves_nothing_behind(name, alone):
    compiled, batches, _ = alone
    with mock.patch.object(kernels, name, side_effect=RuntimeError("broken")), pytest.raises(RuntimeError) as caught:
        compiled(**batches[0]).loss.backward()
    assert "broken" in str(caught.value)
    del caught
    gc.collect()  # errors and their frames
    settled(compiled)
    steps_right(*alone)


@pytest.mark.filterwarnings("ignore:gradient of")
@pytest.mark.parametrize("number", [0, 4])  # of the copies of a step: out, or back
def test_a_copy_that_fails_is_an_error_of_its_step(number, alone):
    compiled, batches, _ = alone
    if batches[0]["labels"].is_cuda:
        pytest.skip("streams copy there")
    seen, run = [], ThreadCopy.run

    def sometimes(self):
        seen.append(None)
        if len(seen) == 1 + number:
            self._job = None, None, None
        run(self)

    failing = mock.patch.object(ThreadCopy, "run", sometimes)
    with failing, pytest.raises(OffloadError, match=r"the copy .* failed") as caught:
        compiled(**batches[0]).loss.backward()
    assert "rank 0, step" in str(caught.value)
    del caught
    gc.collect()  # errors and their frames
    settled(compiled)
    steps_right(*alone)


def test_traces_and_timelines_show_copies(alone):
    compiled, batches, _ = alone
    with moefx.profile(compiled) as profile:
        compiled(**batches[0]).loss.backward()
    copies = [each for each in compiled._session.trace if not each.axes]
    assert [each.kind for each in copies] == ["to_host"] * 3 + ["to_device"] * 3
    assert sorted(each.num_bytes for each in copies[:3]) == sorted(each.num_bytes for each in copies[3:])
    assert [stats.bytes_sent for stats in compiled.moe_stats().values()] == [0]
    for process in profile.trace.processes:
        assert {"d2h", "h2d"} <= set(process.tracks)
    settled(compiled)
