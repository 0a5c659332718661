"""What every compiled model must get right, as functions for `run_ranks` (or for one rank, in process).

Each `check_*` takes (rank, world, layout, case, <what must come out>, compile_fn) and raises AssertionError. What must
come out is worked out once by the caller, from the eager model, by the function that stands before it.
`compile_fn(model, mesh)` is `moefx.compile` unless given.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import moefx
from moefx.axes import MeshSpec
from tests.support.models import Batch, Case
from tests.support.parity import (
    Expected,
    Numbers,
    buffers,
    cast,
    compare,
    draw,
    full,
    gradients,
    outputs_of,
    parameters,
    reference_step,
    routing,
)

Layout = tuple[tuple[int, ...], tuple[str, ...]]  # sizes and names of the mesh
Compile = Callable[[nn.Module, DeviceMesh], Any]
Shapes = list[tuple[int, int]]  # (rows, length) of each rank's batch
Step = tuple[list[Batch], Expected]

EP1: Layout = ((1, 1), ("dp", "ep"))
EP2: Layout = ((1, 2), ("dp", "ep"))
EP4: Layout = ((1, 4), ("dp", "ep"))
DP2_EP2: Layout = ((2, 2), ("dp", "ep"))


def reads(rank: int, layout: Layout) -> int:
    """The number of the batch that a rank reads: ranks along `mp` read the same."""
    found, sizes = 0, dict(zip(layout[1], layout[0]))
    for name, place in MeshSpec.named(sizes).coordinates(rank).items():
        found = found if name in ("mp", "tp") else found * sizes[name] + place
    return found


def compiled_case(case: Case, layout: Layout, compile_fn: Compile | None = None) -> Any:
    """The case's model compiled for a mesh of `layout`."""
    return (compile_fn or moefx.compile)(case.build(), init_device_mesh("cpu", layout[0], mesh_dim_names=layout[1]))


# Single steps


def steps_of(case: Case, shapes: list[Shapes], *, padded: bool = False,
             change: Callable[[Batch], Batch] | None = None) -> list[Step]:
    """One step per entry of `shapes`, parameters unchanged between them; `change` replaces drawn batches."""
    model, steps = case.build(), []
    for number, sizes in enumerate(shapes):
        batches = [draw(case, model, 10 * number + r, *size, padded=padded) for r, size in enumerate(sizes)]
        if change is not None:
            batches = [change(batch) for batch in batches]
        steps.append((batches, reference_step(model, batches)))
    return steps


def check_steps(rank: int, world: int, layout: Layout, case: Case, steps: list[Step],
                compile_fn: Compile | None = None) -> None:
    """Outputs, gradients and buffers of each step."""
    compiled = compiled_case(case, layout, compile_fn)
    check_compiled(rank, layout, case, steps, compiled)
    compiled.close()


def check_compiled(rank: int, layout: Layout, case: Case, steps: list[Step], compiled: Any) -> None:
    mine = reads(rank, layout)
    for number, (batches, expected) in enumerate(steps):
        actual = values_of(compiled, batches[mine])
        compare(actual, expected.of(mine)).check(f"{case.name} on {layout}, step {number}, rank {rank}")


def values_of(compiled: Any, batch: Batch) -> Numbers:
    """Outputs, gradients and buffers of one step."""
    compiled.zero_grad()
    out = compiled(**batch)
    out.loss.backward()
    return {**outputs_of(out), **gradients(compiled), **buffers(compiled)}


# Several forwards to one set of gradients


def check_accumulation(rank: int, world: int, layout: Layout, case: Case, steps: list[Step],
                       compile_fn: Compile | None = None) -> None:
    """All steps but the last in `no_sync`: the sum of what the steps give alone. Twice, to see what is left over."""
    compiled = compiled_case(case, layout, compile_fn)
    for again in range(2):
        compiled.zero_grad()
        with compiled.no_sync():
            for batches, _ in steps[:-1]:
                compiled(**batches[reads(rank, layout)]).loss.backward()
        compiled(**steps[-1][0][reads(rank, layout)]).loss.backward()
        compare(gradients(compiled), sum_of(steps)).check(f"{case.name}, no_sync, time {again}, rank {rank}")
    compiled.close()


def check_in_flight(rank: int, world: int, layout: Layout, case: Case, steps: list[Step],
                    compile_fn: Compile | None = None) -> None:
    """All forwards, then all backwards, first in the same order and then in the reverse one."""
    compiled = compiled_case(case, layout, compile_fn)
    for order in (1, -1):
        compiled.zero_grad()
        mine = reads(rank, layout)
        outs = [compiled(**batches[mine]) for batches, _ in steps]
        for out, (_, expected) in zip(outs, steps):
            compare(outputs_of(out), expected.outputs[mine]).check(f"{case.name} in flight, rank {rank}")
        for out in outs[::order]:
            out.loss.backward()
        compare(gradients(compiled), sum_of(steps)).check(f"{case.name} in flight, order {order}, rank {rank}")
    compiled.close()


def sum_of(steps: list[Step]) -> dict[str, Tensor | None]:
    """The gradients of all steps, added up."""
    grads = [expected.grads for _, expected in steps]
    found = {n: [other[n] for other in grads if other[n] is not None] for n in grads[0]}
    return {n: sum(each) if each else None for n, each in found.items()}


# Evaluation


@dataclass
class Evaluation:
    """Eager outputs of each rank in eval mode, with labels and without, and the training step between two of them."""

    labelled: list[Numbers]
    bare: list[Numbers]
    step: Step


def evaluation_of(case: Case, sizes: Shapes) -> Evaluation:
    """The evaluation of one batch per rank."""
    (step,) = steps_of(case, [sizes])
    model = case.build().eval()
    with torch.no_grad():
        labelled = [outputs_of(model(**batch)) for batch in step[0]]
        bare = [outputs_of(model(batch["input_ids"])) for batch in step[0]]
    return Evaluation(labelled, bare, step)


def check_evaluation(rank: int, world: int, layout: Layout, case: Case, wanted: Evaluation,
                     compile_fn: Compile | None = None) -> None:
    """Evaluation under no_grad, a training step, evaluation again: the modes do not disturb each other."""
    compiled = compiled_case(case, layout, compile_fn)
    batches, expected = wanted.step
    for _ in range(2):
        compiled.eval()
        with torch.no_grad():
            labelled, bare = compiled(**batches[rank]), compiled(batches[rank]["input_ids"])
        assert not labelled.loss.requires_grad
        compare(outputs_of(labelled), wanted.labelled[rank]).check(f"{case.name} eval, rank {rank}")
        compare(outputs_of(bare), wanted.bare[rank]).check(f"{case.name} eval without labels, rank {rank}")
        compiled.train()
        compiled.zero_grad()
        out = compiled(**batches[rank])
        out.loss.backward()
        compare({**outputs_of(out), **gradients(compiled)}, expected.outputs[rank] | expected.grads).check(
            f"{case.name} training between evaluations, rank {rank}"
        )
    compiled.close()


# bf16 autocast


@dataclass
class Rounding:
    """Steps in fp32, and the error that eager bf16 autocast makes on them (root mean square over the steps: that of one
    tiny batch is a matter of luck): of each rank's logits, of all gradients."""

    steps: list[Step]
    logits_error: list[float]
    grads_error: float


def reference_rounding(case: Case, world: int, steps: int = 16) -> Rounding:
    """Steps whose routing is the same in fp32 and in bf16, for errors of two routings say nothing."""
    model, batches = case.build(), []
    for seed in range(10_000):
        batch = draw(case, model, seed, 1, 4, gap=2e-3)
        exact = routing(model, batch).chosen
        with cast(torch.bfloat16):
            rounded = routing(model, batch).chosen
        if all(torch.equal(a, b) for a, b in zip(exact, rounded)):
            batches.append(batch)
        if len(batches) == world * steps:
            break
    assert len(batches) == world * steps, f"{case.name}: too few batches route alike in bf16"
    found, logits, grads = [], [], []
    for first in range(0, len(batches), world):
        step = batches[first : first + world]
        exact, rounded = reference_step(model, step), reference_step(model, step, autocast=torch.bfloat16)
        found.append((step, exact))
        logits.append([_logits_error(a["out.logits"], b) for a, b in zip(rounded.outputs, exact.outputs)])
        grads.append(overall_error(rounded.grads, exact.grads))
    return Rounding(found, [_rms(errors) for errors in zip(*logits)], _rms(grads))


def _logits_error(actual: Tensor, expected: Numbers) -> float:
    return overall_error({"": actual}, {"": expected["out.logits"]})


def _rms(errors: Sequence[float]) -> float:
    return (sum(e * e for e in errors) / len(errors)) ** 0.5


def overall_error(actual: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> float:
    """Norm of all differences over the norm of all expected values."""
    pairs = [(actual[n].double(), b.double()) for n, b in expected.items() if b is not None]
    return (sum((a - b).square().sum() for a, b in pairs) / sum(b.square().sum() for _, b in pairs)).sqrt().item()


def check_rounding(rank: int, world: int, layout: Layout, case: Case, wanted: Rounding,
                   compile_fn: Compile | None = None, most: float = 1.1) -> None:
    """Under bf16 autocast, errors at most `most` times those of eager; fp32 afterwards is as exact as ever."""
    compiled = compiled_case(case, layout, compile_fn)
    all_logits, all_grads = [], []
    for batches, exact in wanted.steps:
        compiled.zero_grad()
        with cast(torch.bfloat16):
            out = compiled(**batches[rank])
        out.loss.backward()
        all_logits.append(_logits_error(out.logits.detach(), exact.outputs[rank]))
        all_grads.append(overall_error(gradients(compiled), exact.grads))
    logits, grads = _rms(all_logits), _rms(all_grads)
    assert logits > 1e-4, f"logits have fp32 accuracy ({logits:.1e}): autocast was ignored"
    assert logits <= most * wanted.logits_error[rank], f"logits {logits:.2e}, eager {wanted.logits_error[rank]:.2e}"
    assert grads <= most * wanted.grads_error, f"gradients {grads:.2e}, eager {wanted.grads_error:.2e}"
    compiled.zero_grad()
    batches, exact = wanted.steps[0]
    compiled(**batches[rank]).loss.backward()
    compare(gradients(compiled), exact.grads).check(f"{case.name}, fp32 after bf16, rank {rank}")
    compiled.close()


# Training


LR, DECAY = 1e-3, 1e-2


@dataclass
class History:
    """A reference training run. `noise`: how far (norm) a run ends from it that differs by rounding alone.

    That run starts from parameters a last place away; with SGD another one sees the rows of every batch in another
    order, and the farther of the two counts. Not so with AdamW, which divides gradients that are zero but for rounding,
    such as those of experts not chosen where a softmax is renormalised over the chosen ones, by their own size: their
    rounding is each token's own, so that a permutation would leave it as it is. Nor with capacity layers: permuted,
    they would drop other tokens.
    """

    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    batches: list[list[Batch]]  # [step][rank]
    losses: list[list[float]]  # [step][rank]
    final: Numbers
    noise: float


def _adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LR, weight_decay=DECAY)


def _sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01)


def reference_training(case: Case, world: int, steps: int = 20) -> list[History]:
    """Train the reference; batches are drawn along the way, so that no step's routing is a near tie."""
    found = []
    for optimizer in (_adamw, _sgd):
        batches, losses, final = _train(case.build(), case, world, steps, optimizer)
        nudged = case.build()
        _nudge(nudged)
        rounded = [_train(nudged, case, world, steps, optimizer, batches)[2]]
        if optimizer is _sgd and not case.name.startswith("gshard"):
            permuted = [[{k: v.flip(0) for k, v in batch.items()} for batch in ranks] for ranks in batches]
            rounded.append(_train(case.build(), case, world, steps, optimizer, permuted)[2])
        found.append(History(optimizer, batches, losses, final, max(difference(each, final) for each in rounded)))
    return found


def _nudge(model: nn.Module) -> None:
    """Move every parameter by at most one last place."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for parameter in model.parameters():
            parameter.mul_(1 + torch.finfo(parameter.dtype).eps * torch.randint_like(parameter, -1, 2))


def _train(model: nn.Module, case: Case, world: int, steps: int, make: Callable, given: list[list[Batch]] | None = None
           ) -> tuple[list[list[Batch]], list[list[float]], Numbers]:
    used, losses = [], []
    optimizer = make(model.parameters())
    for step in range(steps):
        batches = given[step] if given else [draw(case, model, 100 * step + r) for r in range(world)]
        outputs = reference_step(model, batches).outputs
        optimizer.step()
        used.append(batches)
        losses.append([o["out.loss"].item() for o in outputs])
    return used, losses, parameters(model)


def difference(actual: Numbers, expected: Numbers) -> float:
    """Norm of the difference of all tensors together."""
    assert actual.keys() == expected.keys(), actual.keys() ^ expected.keys()
    return sum((actual[n] - b).double().square().sum() for n, b in expected.items()).sqrt().item()


def check_training(rank: int, world: int, layout: Layout, case: Case, histories: list[History],
                   compile_fn: Compile | None = None) -> None:
    """The loss of every step, the parameters at the end, and that no expert stood still; for every optimizer."""
    compiled = compiled_case(case, layout, compile_fn)
    start = {name: full(value.detach()).clone() for name, value in compiled.state_dict().items()}
    for history in histories:
        compiled.load_state_dict(start)
        _check_history(reads(rank, layout), case, compiled, history)
    compiled.close()


def _check_history(rank: int, case: Case, compiled: nn.Module, history: History) -> None:
    optimizer = history.optimizer(compiled.parameters())
    name = f"{case.name}, {type(optimizer).__name__}"
    start = parameters(compiled)
    for step, (batches, losses) in enumerate(zip(history.batches, history.losses)):
        compiled.zero_grad()
        loss = compiled(**batches[rank]).loss
        loss.backward()
        optimizer.step()
        error = abs(loss.item() / losses[rank] - 1)
        assert error <= 1e-5, f"{name}, step {step}, rank {rank}: loss {loss.item()}, expected {losses[rank]}"
    final = parameters(compiled)
    off = difference(final, history.final)
    assert off <= 10 * history.noise, f"{name}: final parameters off by {off:.2e}, noise is {history.noise:.2e}"
    if history.optimizer is not _adamw:
        return
    decayed = (1 - LR * DECAY) ** len(history.losses)
    for key, value in final.items():
        moved = (value - decayed * start[key]).abs()
        stacked = moved.dim() == 3 or re.search(r"(?<!shared_)experts\.[a-z]", key)
        moved = moved.flatten(1).amax(1) if stacked else moved.max()
        assert moved.min() > LR / 2, f"{case.name}: {key} or an expert in it did not train: {moved}"
