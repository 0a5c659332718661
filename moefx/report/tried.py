"""`python -m moefx try`: whether moefx can train a model, in a minute, without weights and without other ranks.

A model with one layer of each kind is captured and looked at for lints. Then it is planned as `moefx.plan` does: as
rank 0 of so many, nothing is run.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Group
from rich.padding import Padding
from rich.text import Text

from moefx import progress
from moefx.analysis.lints.lint import Lint
from moefx.costmodel.machine import Machine
from moefx.errors import MoefxError
from moefx.report.described import Described, described
from moefx.report.layers import cut, layers_of
from moefx.report.lint import lint
from moefx.report.one_look import nobody
from moefx.report.programs import Programs, compiled
from moefx.report.reports import as_text
from moefx.report.what_if import Plan, asked, machine_named, mesh_of, plan_of
from moefx.report.words import gb, ms, percent, rate

MACHINE = "h100-8x400g"


@dataclass(frozen=True)
class Tried:
    """What came of a model. parameters: of the whole model. layers, looked_at: how many it has, and how many of them
    were captured. experts: of every MoE layer that was compiled, by its module. refusal: why it cannot be compiled.
    plan: None where it cannot. lints: None where it could not be captured. flags: what `plan` must be given to begin
    where this one did."""

    model: str
    ranks: int
    parameters: int
    layers: int
    looked_at: int
    seconds: float
    experts: dict[str, int]
    plan: Plan | None = None
    lints: tuple[Lint, ...] | None = None
    refusal: MoefxError | None = None
    notes: tuple[str, ...] = ()
    flags: str = ""

    @property
    def is_recognised(self) -> bool:
        return self.refusal is None and bool(self.experts)

    @property
    def moe_layers(self) -> int:
        """Of the whole model."""
        if self.plan is None or not self.layers:
            return len(self.experts)
        return sum(layer.count for layer in self.plan.layers if layer.has_experts)

    def __rich__(self) -> Group:
        first, *others = _lines(self)
        return Group(Text(first, style="bold"), *map(_indented, others))

    def __str__(self) -> str:
        return as_text(self)

    __repr__ = __str__


def try_model(model: Any, ranks: int = 8, *, tokens: int = 4096, machine: str | Path | Machine = MACHINE,
              ep: int | None = None, mp: int = 1, dtype: str = "bfloat16") -> Tried:  # fmt: skip
    """model: as `moefx.plan` takes it. ranks, ep, mp, machine: of the cluster. tokens: of one rank. A balance loss that
    the config knows is turned on, since it is looked at, too.

    Raises MoefxError: unknown names, with the nearest; MeshError: sizes that do not divide; UnsupportedUse where
    torch.distributed is in use. That the model itself is refused is no error: see `Tried.refusal`."""
    began = time.monotonic()
    cluster = machine_named(machine)
    sizes, ep, esp = mesh_of(ranks, cluster, dp=None, mp=mp, ep=ep, esp=None)
    what = described(model, 1, tokens, dtype=dtype)
    notes = _with_balance_loss(what)
    layers = layers_of(what.module)
    few = cut(what.module, layers, layers.one_of_each if layers else ())
    found: dict[str, Any] = {"experts": {}}
    with progress.task(f"trying {what.title}"):
        try:
            progress.step("looking for lints")
            found["lints"] = tuple(lint(few, *what.args, **what.kwargs))
            with nobody(ranks):
                options = asked(None, cluster, ep=ep, esp=esp, dynamic=False)  # one size is planned: half of the time
                programs = compiled(what, sizes, options, cluster)
                progress.step("choosing")
                found |= {"plan": plan_of(programs, None, 1), "experts": _experts(programs)}
        except MoefxError as error:
            found["refusal"] = error
    number = sum(p.numel() for p in what.module.parameters())
    flags = {"gpus": ranks, "machine": machine, "seq": tokens, "ep": ep, "mp": mp}
    given = " ".join(f"--{name} {each}" for name, each in flags.items()
                     if each not in (None, {"seq": 4096, "mp": 1}.get(name)))  # fmt: skip
    return Tried(what.title, ranks, number, layers.count if layers else 0, len(layers.kinds) if layers else 0,
                 time.monotonic() - began, notes=(*what.notes, *notes), flags=given, **found)  # fmt: skip


def _with_balance_loss(what: Described) -> list[str]:
    config = getattr(what.module, "config", None)
    if getattr(config, "output_router_logits", None) is not False:
        return []
    config.output_router_logits = True
    return ["the balance loss is turned on: output_router_logits=True"]


def _experts(programs: Programs) -> dict[str, int]:
    regions = programs.base.attempt.ctx.decisions.regions
    return {facts.module or f"region {number}": facts.experts for number, facts in regions.items()
            if facts.of == number}  # fmt: skip


def _lines(tried: Tried) -> Iterator[str]:
    yield f"{tried.model}: {_verdict(tried)}"
    if tried.refusal is not None:
        yield from (f"  {line}" for line in str(tried.refusal).splitlines())
    numbers = sorted(set(tried.experts.values()))
    if numbers:
        count = " or ".join(map(str, numbers))
        many = f" of {tried.layers} layers" if tried.layers else ""
        yield f"MoE layers: {tried.moe_layers}{many}, {count} experts in each"
    yield f"parameters: {_number(tried.parameters)} in all{_per_rank(tried)}"
    if tried.plan is not None:
        yield from _plan(tried.plan)
        yield f"  Such flags, and --memory-limit, belong to plan: python -m moefx plan {tried.model} {tried.flags}"
    if tried.lints is None:
        yield "lints: not looked for, since the model cannot be captured"
    else:
        yield f"lints: {len(tried.lints) or 'none'}"
        yield from (f"  {line}" for each in tried.lints for line in str(each).splitlines())
    if tried.looked_at < tried.layers:
        yield (f"looked at {tried.looked_at} of {tried.layers} layers, one of each kind, numbered from 0; the rest is "
               "extrapolated")  # fmt: skip
    yield from tried.notes
    yield f"took {tried.seconds:.0f} s"


def _indented(line: str) -> Padding:
    """So that what does not fit stays indented."""
    text = line.lstrip()
    return Padding(Text(text), (0, 0, 0, len(line) - len(text)), expand=False)


def _verdict(tried: Tried) -> str:
    if tried.refusal is not None:
        return "refused"
    if not tried.experts:
        return "no mixture of experts was found; it would train as a dense model"
    return f"recognised; it compiles for {tried.ranks} ranks"


def _per_rank(tried: Tried) -> str:
    if tried.plan is None:
        return ""
    nbytes = tried.plan.memory["parameters"]
    return f", {_number(nbytes / getattr(torch, tried.plan.dtype).itemsize)} on a rank ({gb(nbytes)})"


def _plan(plan: Plan) -> Iterator[str]:
    mesh = ", ".join(f"{name}={size}" for name, size in plan.mesh.items())
    yield f"plan for {plan.ranks} ranks of {plan.machine.name}, predicted:"
    yield f"  mesh {mesh}" + (f", with experts over ep={plan.ep}" if plan.has_experts else "") + "."
    yield (f"  A step of {list(plan.batch)} tokens per rank takes {ms(plan.step_s)}: {rate(plan.tokens_per_s)}, "
           f"{percent(plan.share_of_peak)} of the peak.")  # fmt: skip
    yield f"  A rank needs {gb(plan.memory['peak'])} with AdamW; no limit was set."
    for layer in plan.layers:
        for region in layer.regions[:1]:
            yield f"  {layer.name}: {region.chosen.choice.words()}, {region.reason}."
    yield from (f"  {hint[:1].upper()}{hint[1:]}." for hint in plan.hints)


def _number(number: float) -> str:
    if number < 1e6:
        return f"{number:,.0f}"
    return f"{number / 1e9:.2f} billion" if number >= 1e8 else f"{number / 1e6:.2f} million"
