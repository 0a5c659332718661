"""Faults at run time: what one rank does wrong, or what befalls it, the other ranks learn in time and by name.

Every test runs plain processes, compiles one small layer on all of them, and then one rank goes astray.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import moefx
from moefx._torch_compat import new_named_group
from moefx.compiler import pipeline
from moefx.costmodel.schedulers import optsche
from moefx.errors import CollectiveError, DivergenceError, MoefxError
from moefx.model import api
from moefx.runtime import groups
from moefx.runtime.session import Session
from moefx.transport.codecs import codec_named
from tests.support.handmade import Capacity, Loop, OneLayer
from tests.support.models import Batch, Case
from tests.support.parity import full, parameters
from tests.support.ranks import RanksError, run_ranks
from tests.support.scenarios import EP2, check_compiled, check_steps, compiled_case, steps_of

pytestmark = pytest.mark.usefixtures("cached")
TIMEOUT_S, PERIOD_S = 3.0, 0.3
NO_OPTIONS = moefx.Options()
LAYER = Case("layer", partial(OneLayer, Loop(num_experts=6, gated=False)))


def train(compiled: nn.Module, batch: Batch) -> None:
    compiled(**batch).loss.backward()


def evaluate(compiled: nn.Module, batch: Batch) -> None:
    compiled.eval()
    with torch.no_grad():
        compiled(**batch)
    compiled.train()


def quick(model: nn.Module, mesh, compare_every: int = 0, options: moefx.Options = NO_OPTIONS) -> nn.Module:
    """Compiled, with a watchdog that looks often."""
    with mock.patch.object(api, "Session", partial(Session, watch_period_s=PERIOD_S)):
        return moefx.compile(model, mesh, options.changed(compare_every=compare_every))


# A rank that goes astray. Each fault is what the last rank does in place of its second training step.


def dies(compiled, batch):
    os._exit(3)


def dies_before_its_backward(compiled, batch):
    loss = compiled(**batch).loss
    time.sleep(3 * PERIOD_S)  # what it did last is published
    os._exit(3 if loss.isfinite() else 4)


def stalls(compiled, batch):
    time.sleep(TIMEOUT_S + 3)


def raises(compiled, batch):
    raise ValueError("the data loader of one rank is broken")


PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


class RunsOut(TorchDispatchMode):
    """No memory is left for the first matrix product after an exchange of tokens."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.session, self.begun = session, len(session.trace)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in PRODUCTS and any(each.kind == "all_to_all" for each in self.session.trace[self.begun :]):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return func(*args, **(kwargs or {}))


def skips_a_batch(compiled, batch):
    """As trainers do that catch errors of memory."""
    compiled._session.trace = []
    with RunsOut(compiled._session), pytest.raises(torch.OutOfMemoryError):
        train(compiled, batch)
    train(compiled, batch)


def runs_out_of_memory(compiled, batch):
    compiled._session.trace = []
    with RunsOut(compiled._session):
        train(compiled, batch)


def reads_logits(compiled, batch):
    out = compiled(**batch)
    (out.loss + out.logits.sum()).backward()


def evaluates(compiled, batch):
    evaluate(compiled, batch)


def has_no_labels(compiled, batch):
    compiled(batch["input_ids"])


def freezes_a_parameter(compiled, batch):
    compiled.head.weight.requires_grad_(False)
    train(compiled, batch)


def finishes(compiled, batch):
    compiled.close()


def goes_astray(rank: int, world: int, fault: Callable, evaluated: bool, compare_every: int = 0) -> None:
    compiled = compiled_case(LAYER, ((world,), ("ep",)), partial(quick, compare_every=compare_every))
    batch = LAYER.batch(rank)
    train(compiled, batch)
    if evaluated:
        evaluate(compiled, batch)
    compiled._session.timeout = timedelta(seconds=TIMEOUT_S)  # ranks that share cores compile at very unequal speed
    start = time.monotonic()
    try:
        (fault if rank == world - 1 else train)(compiled, batch)
    except (CollectiveError, DivergenceError):
        # The time-out, two looks at the store, and some slack for a busy machine.
        assert time.monotonic() - start < TIMEOUT_S + 2 * PERIOD_S + 5
        raise


def errors_of(fault: Callable, *, world: int = 2, evaluated: bool = False, compare_every: int = 0) -> dict[int, str]:
    """rank -> what it said."""
    with pytest.raises(RanksError) as caught:
        run_ranks(world, goes_astray, fault, evaluated, compare_every, timeout=240)
    return caught.value.failures


def in_step(number: int, doing: str, text: str, rank: int = 0) -> None:
    assert "CollectiveError" in text, text
    assert f"at: rank {rank}, step {number}, {doing} of mlp" in text, text


def test_a_rank_that_dies():
    failures = errors_of(dies, world=3)
    for rank in (0, 1):
        in_step(1, "exchange_counts", failures[rank], rank)
        assert "rank 2: silent since" in failures[rank]


def _ends_after_its_error(rank: int, world: int) -> None:
    compiled = compiled_case(LAYER, ((world,), ("ep",)), quick)
    batch = LAYER.batch(rank)
    train(compiled, batch)
    compiled._session.timeout = timedelta(seconds=60)
    start = time.monotonic()
    try:
        (evaluate if rank else train)(compiled, batch)
    except CollectiveError:
        assert time.monotonic() - start < 30
        raise


def test_a_rank_that_refuses_to_wait_ends_and_the_others_hear_of_it():
    failures = run_ranks_that_fail(_ends_after_its_error)
    assert "DivergenceError: Rank 1 alone came to" in failures[1]
    in_step(1, "exchange_counts", failures[0])
    assert "rank 1: raised an error" in failures[0]


def test_a_rank_that_dies_while_others_compile():
    failures = run_ranks_that_fail(_dies_before_a_compilation)
    assert "CollectiveError" in failures[0]
    assert "rank 1: silent since" in failures[0]


def _dies_before_a_compilation(rank: int, world: int) -> None:
    compiled = compiled_case(LAYER, ((world,), ("ep",)), quick)
    train(compiled, LAYER.batch(rank))
    compiled._session.timeout = timedelta(seconds=60)
    if rank:
        os._exit(3)
    start = time.monotonic()
    try:
        evaluate(compiled, LAYER.batch(rank))
    finally:
        assert time.monotonic() - start < 30


def run_ranks_that_fail(fn: Callable) -> dict[int, str]:
    with pytest.raises(RanksError) as caught:
        run_ranks(2, fn, timeout=240)
    return caught.value.failures


@pytest.mark.full
def test_a_rank_that_dies_between_forward_and_backward():
    text = errors_of(dies_before_its_backward)[0]
    assert "CollectiveError" in text
    assert "at: rank 0, step 1, check_header of the backward" in text
    assert "(in step 1, last in all_to_all back of mlp)" in text


def test_a_rank_that_stalls():
    text = errors_of(stalls)[0]
    in_step(1, "exchange_counts", text)
    assert "rank 1: not waiting for anyone (in step 0, last in all_reduce of" in text


def test_a_rank_that_leaves_early():
    text = errors_of(finishes)[0]
    in_step(1, "exchange_counts", text)
    assert "rank 1: closed its session (in step 0)" in text


def test_a_rank_that_goes_on_after_a_call_that_broke_off():
    """Its next exchange would be paired with one of the call before."""
    failures = errors_of(skips_a_batch)
    assert "CollectiveError: an earlier call of the model broke off between exchanges" in failures[1]
    assert "at: rank 1, step 1, the next call" in failures[1]
    assert "CollectiveError" in failures[0]
    assert "rank 1: " in failures[0]


def test_a_rank_that_runs_out_of_memory():
    """It says what was alive, and the others do not wait for it: it is the one that they name."""
    failures = errors_of(runs_out_of_memory)
    assert "OutOfMemoryError: Rank 1 is out of memory: CUDA out of memory\nAlive are" in failures[1]
    assert "values of this forward; the largest are" in failures[1]
    assert "MiB: parameters on this rank" in failures[1]
    assert re.search(r"at: rank 1, step 1, the forward, `\w+ = \S+\(", failures[1])
    assert "CollectiveError: Rank 0 failed in check_header of the backward" in failures[0]
    assert "rank 1: raised an error: a call of the model, by OutOfMemoryError (in step 1)" in failures[0]


def test_a_rank_whose_loss_reads_other_outputs():
    """Its backward is another program, which may reduce other gradients."""
    failures = errors_of(reads_logits)
    for rank in (0, 1):
        assert "DivergenceError: Ranks do not run the same program, step and region" in failures[rank]
        assert re.search(rf"rank {1 - rank}: program \w+, step 1, of other outputs", failures[rank])


@pytest.mark.full
def test_a_rank_whose_own_code_raises():
    failures = errors_of(raises)
    assert "ValueError: the data loader" in failures[1]
    in_step(1, "exchange_counts", failures[0])


@pytest.mark.parametrize(
    ("fault", "alone_in"),
    [
        (evaluates, "evaluation without gradients"),
        pytest.param(has_no_labels, "training with gradients", marks=pytest.mark.full),
        pytest.param(freezes_a_parameter, "training with gradients", marks=pytest.mark.full),
    ],
)
def test_a_rank_with_another_kind_of_call_says_so_itself(fault, alone_in):
    """Long before the time-out, since it sees the others in a step that it has not begun."""
    failures = errors_of(fault)
    assert f"DivergenceError: Rank 1 alone came to compiling for {alone_in}" in failures[1]
    assert "rank 0: waiting in exchange_counts of mlp (in step 1)" in failures[1]
    in_step(1, "exchange_counts", failures[0])
    assert "rank 1: " in failures[0]


def test_a_rank_that_evaluates_alone_with_a_program_that_all_have():
    failures = errors_of(evaluates, evaluated=True)
    for rank in (0, 1):
        assert "DivergenceError: Ranks do not run the same program, step and region" in failures[rank]
        assert f"at: rank {rank}, step 2, mlp" in failures[rank]


# The same while the others compare their copies of the weights, which they do before their second step.


def test_a_rank_that_dies_before_the_others_compare():
    text = errors_of(dies, compare_every=1)[0]
    assert "CollectiveError: Rank 0 failed in comparing the numbers of updates" in text
    assert "rank 1: silent since" in text


@pytest.mark.full
def test_a_rank_that_stalls_while_the_others_compare():
    text = errors_of(stalls, compare_every=1)[0]
    assert "CollectiveError: Rank 0 failed in comparing the numbers of updates" in text
    assert "rank 1: not waiting for anyone (in step 0, last in all_reduce of" in text


def test_a_rank_that_compiles_while_the_others_compare():
    failures = errors_of(evaluates, compare_every=1)
    for rank in (0, 1):
        assert "DivergenceError: Ranks came together for different things" in failures[rank]
        assert "rank 0: comparing the numbers of updates" in failures[rank]
        assert "rank 1: compiling for evaluation without gradients" in failures[rank]


def test_a_rank_that_runs_while_the_others_compare():
    failures = errors_of(evaluates, evaluated=True, compare_every=1)
    assert "DivergenceError: Rank 0 alone came to comparing the numbers of updates" in failures[0]
    assert "rank 1: waiting in exchange_counts of mlp (in step 2)" in failures[0]
    in_step(2, "exchange_counts", failures[1], 1)


# Batches of another shape.


def short_batch(rank: int, world: int, steps) -> str:
    """One step as compiled, and then the last rank has a batch of its own shape. What became of it."""
    compiled = compiled_case(LAYER, EP2, quick)
    check_compiled(rank, EP2, LAYER, steps[:1], compiled)
    compiled._session.timeout = timedelta(seconds=TIMEOUT_S)
    try:
        check_compiled(rank, EP2, LAYER, steps[1:], compiled)
    except moefx.errors.MoefxError as error:
        return f"{type(error).__name__}: {error}"
    return "right"


def test_a_shorter_last_batch_of_one_rank_is_no_fault():
    steps = steps_of(LAYER, [[(2, 6), (2, 6)], [(2, 6), (1, 5)], [(2, 6), (2, 1)]])
    assert run_ranks(2, short_batch, steps) == ["right", "right"]


def odd_capacity(rank: int, world: int) -> None:
    case = Case("blocks", partial(OneLayer, Capacity(num_experts=4)))
    compiled = moefx.compile(case.build(), init_device_mesh("cpu", (world,), mesh_dim_names=("ep",)),
                             chunks=2)  # fmt: skip
    train(compiled, case.batch(rank, 2, 2))  # a capacity of 2: chunks of one, which is fixed
    compiled._session.timeout = timedelta(seconds=TIMEOUT_S)
    train(compiled, case.batch(rank, 2, 2 + 2 * rank))


@pytest.mark.full
def test_a_batch_that_fits_no_program_is_named_by_its_rank():
    with pytest.raises(RanksError) as caught:
        run_ranks(2, odd_capacity, timeout=240)
    failures = caught.value.failures
    assert "DivergenceError: Rank 1 alone came to compiling for training with gradients" in failures[1]
    in_step(1, "exchange_sizes", failures[0])


# Gradients that are not finite.


def moved(compiled: nn.Module, before: dict[str, torch.Tensor]) -> bool:
    return any(not torch.equal(now, before[name]) for name, now in parameters(compiled).items())


def poisons(rank: int, world: int, factor: float) -> None:
    """The last rank multiplies its loss: every rank sees the same norm, and whoever steps, all step alike."""
    compiled = compiled_case(LAYER, EP2, quick)
    batch, before = LAYER.batch(rank), parameters(compiled)
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for factor_now in (factor, 1.0):
        fine = factor_now == 1.0
        optimizer.zero_grad()
        loss = compiled(**batch).loss
        scaler.scale(loss * factor_now if rank == world - 1 else loss).backward()
        scaler.unscale_(optimizer)
        norm = full(nn.utils.get_total_norm([p.grad for p in compiled.parameters()]))
        assert bool(norm.isfinite()) == fine
        if not fine:
            with pytest.raises(RuntimeError, match="non-finite"):
                nn.utils.clip_grad_norm_(compiled.parameters(), 1.0, error_if_nonfinite=True)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 2.0
        assert moved(compiled, before) == fine
    compiled.close()


@pytest.mark.parametrize("factor", [float("nan"), pytest.param(3e38, marks=pytest.mark.full)])
def test_what_is_not_finite_on_one_rank_is_seen_by_all(factor):
    run_ranks(2, poisons, factor)


# A pass that fails on one rank.


def broken(names: tuple[str, ...]) -> contextlib.ExitStack:
    """The passes of these names raise."""
    def raises(gm, ctx):
        raise RuntimeError("a bug of this pass")

    def entries(passes: tuple[pipeline.Pass, ...]) -> tuple[pipeline.Pass, ...]:
        return tuple(replace(entry, run=raises) if entry.name in names else entry for entry in passes)

    stack = contextlib.ExitStack()
    for each in ("WHOLE", "STEP"):
        stack.enter_context(mock.patch.object(pipeline, each, entries(getattr(pipeline, each))))
    return stack


def fails_on_one(rank: int, world: int, steps, names: tuple[str, ...]) -> str:
    with broken(names if rank == world - 1 else ()), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            check_steps(rank, world, EP2, LAYER, steps, partial(moefx.compile, options=moefx.Options(chunks=2)))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "\n".join(str(each.message) for each in said if "left out" in str(each.message))


def test_optional_passes_that_fail_on_one_rank_are_left_out_on_all(monkeypatch):
    """One after the other: the second fails only when the first is gone."""
    monkeypatch.setenv("MOEFX_CACHE", "off")
    said = run_ranks(2, fails_on_one, steps_of(LAYER, [[(2, 6), (2, 6)]]), ("chunk", "order"))
    assert said[0].splitlines() == [f"passes ['{name}'] failed on some rank and are left out on all"
                                    for name in ("chunk", "order")]  # fmt: skip
    assert said[1:] == [""]  # all know it, one says it


@pytest.mark.parametrize("name", ["raise-loop", pytest.param("split-waits", marks=pytest.mark.full)])
def test_a_required_pass_that_fails_on_one_rank_is_an_error_on_all(name, monkeypatch):
    monkeypatch.setenv("MOEFX_CACHE", "off")
    first, second = run_ranks(2, fails_on_one, steps_of(LAYER, [[(2, 6), (2, 6)]]), (name,))
    assert "DivergenceError: rank 1 of the mesh failed to compile: RuntimeError: a bug of this pass" in first
    assert second == "RuntimeError: a bug of this pass"


def _raises(*args):
    raise AttributeError("the extension of one rank is broken")


def _registers_what_fails(rank: int, world: int) -> list[str]:
    """What a rank says of a scheduler that raises on the last rank, and then of a codec that does so in a step."""
    is_last, fails, int8, said = rank == world - 1, [], codec_named("int8"), []
    moefx.register_scheduler("lopsided", _raises if is_last else optsche)
    moefx.register_codec("lopsided", replace(int8, encode=lambda rows: (_raises if fails else int8.encode)(rows)))
    for options in (moefx.Options(scheduler="lopsided"), moefx.Options.named(codec="lopsided")):
        compiled, batch = compiled_case(LAYER, ((world,), ("ep",)), partial(quick, options=options)), LAYER.batch(rank)
        try:
            train(compiled, batch)
            fails += [True] * is_last
            compiled._session.timeout = timedelta(seconds=TIMEOUT_S)
            train(compiled, batch)
        except MoefxError as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def test_an_extension_that_raises_on_one_rank_is_named_on_all(monkeypatch):
    monkeypatch.setenv("MOEFX_CACHE", "off")
    (others_compile, others_run), (compiles, runs) = run_ranks(2, _registers_what_fails, timeout=120)
    assert compiles.startswith("ExtensionError: the scheduler 'lopsided' raised AttributeError: ")
    assert "DivergenceError: rank 1 of the mesh failed to compile: the scheduler 'lopsided' raised A" in others_compile
    assert re.search(r"\n  at: test_faults_at_run_time\.py:\d+\n", others_compile)
    assert runs.startswith("ExtensionError: encode of the codec 'lopsided' raised AttributeError: ")
    assert re.search(r"\n  at: test_faults_at_run_time\.py:\d+$", runs)
    assert others_run.startswith("CollectiveError: Rank 0 failed in all_to_all of ")
    assert re.search(r"rank 1: raised an error: .*encode of the codec 'lopsided' raised Attr.* \(test_\w+\.py:\d+\)",
                     others_run)  # fmt: skip


def _group_rank(rank, world):
    """The times at which this rank had connected a group and at which it was given it; rank 0 is slow to connect."""
    connected = []

    def slow(*args, **how):
        group = new_named_group(*args, **how)
        time.sleep(0.5 if rank == 0 else 0.0)
        connected.append(time.monotonic())
        return group

    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))
    with mock.patch.object(groups, "new_named_group", slow):
        session = Session(mesh, "groups", timedelta(seconds=60))
        session.group("ep", "data")
        given = time.monotonic()
        session.close()
    return connected[0], given


def test_no_rank_may_close_a_group_that_others_still_connect():
    found = run_ranks(3, _group_rank)
    assert min(given for _, given in found) >= max(connected for connected, _ in found)
