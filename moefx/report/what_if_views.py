"""How a plan is shown, as text and as data."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from moefx import rooms
from moefx.report.explanation_views import choice_sentence
from moefx.report.hints import again_s, exchanges_s
from moefx.report.words import gb, ms, rate

if TYPE_CHECKING:
    from moefx.report.what_if import LayerPlan, Plan

_SHOWN = 4  # candidates of a layer
_PARTS = {"forward": "forward", "backward": "backward", "exposed": "reductions and gathers, not hidden",
          "sums": "gradients of micro-batches added up", "optimizer": "AdamW, bound by memory"}  # fmt: skip


def text(plan: Plan) -> Group:
    mesh = " x ".join(f"{name}={size}" for name, size in plan.mesh.items())
    spread = f"experts over ep={plan.ep}, esp={plan.esp}" if plan.has_experts else "no experts"
    several = f", {plan.accumulate} times in a step" if plan.accumulate > 1 else ""
    parts: list[Any] = [
        Text(f"{plan.model} on {plan.ranks} ranks of {plan.machine.name}", style="bold"),
        Text(f"mesh {mesh}, {spread}; every rank gets {list(plan.batch)}{several}"),
        Text(f"machine: {plan.machine.provenance.kind}: {plan.machine.provenance.text}, "
             f"{plan.machine.ranks_per_node} ranks per node"),
    ]  # fmt: skip
    if not plan.has_experts:
        parts.append(Text("there are no experts in this model: nothing is exchanged, and ep and esp spread nothing"))
    parts += [_speed(plan), _step(plan), _memory(plan), *(Text(f"hint: {hint}") for hint in plan.hints), _kinds(plan)]
    again = ", before anything is computed again" if plan.within is not None and plan.within.rows else ""
    for layer in plan.layers:
        parts += _choice(layer, again)
    if plan.within is not None and plan.within.rows:
        parts.append(Text("not kept for the backward as eager autograd does:"))
        parts += [Text(f"    {times} x {name}: {ways}") for name, ways, times in plan.within.rows]
    parts.append(Text(_programs(plan)))
    parts += [Text(note) for note in plan.notes]
    return Group(*parts)


def _speed(plan: Plan) -> Text:
    return Text(f"{rate(plan.tokens_per_s)}, {plan.tokens_per_s / plan.ranks:,.0f} per GPU, {plan.share_of_peak:.1%} "
                f"of the machine's peak ({plan.peak_flops_per_s / 1e12:g} TFLOP/s per GPU, {plan.dtype})", style="bold")


def _step(plan: Plan) -> Table:
    table = Table(title=f"a step takes {ms(plan.step_s)}, predicted", title_justify="left")
    for column in ("part", "time", "share"):
        table.add_column(column, justify="left" if column == "part" else "right")
    parts = [(_PARTS[name], seconds) for name, seconds in plan.seconds.items()]
    inside = {"  of both: exchanges of experts, not hidden": exchanges_s(plan),
              "  of both: to stay within the limit of memory": again_s(plan)}  # fmt: skip
    parts[2:2] = [(words, seconds) for words, seconds in inside.items() if seconds]
    for words, seconds in parts:
        table.add_row(words, ms(seconds), f"{seconds / plan.step_s:.1%}")
    return table


def _memory(plan: Plan) -> Table:
    limit = f", of {gb(plan.limit)}" if plan.limit is not None else ""
    table = Table(title=f"a rank needs {gb(plan.memory['peak'])} at the peak{limit}", title_justify="left")
    words = memory_words(plan)
    table.add_column("memory")
    table.add_column("bytes", justify="right")
    for name, nbytes in plan.memory.items():
        if nbytes or name != "master":
            table.add_row(words[name], gb(nbytes))
    return table


def memory_words(plan: Plan) -> dict[str, str]:
    state = plan.options.parallel.state
    return {"parameters": f"weights, {plan.dtype}", "gradients": f"gradients, {plan.dtype}",
            "master": f"master weights, {state}", "optimizer": f"AdamW's moments, {state}",
            "kept": "kept for the backward", "peak": "at the peak, with what is in use then"}  # fmt: skip


def _kinds(plan: Plan) -> Table:
    table = Table(title="layers", title_justify="left")
    for column in ("kind", "layers", "time of one", "weights", "kept"):
        table.add_column(column, justify="left" if column == "kind" else "right")
    for each in plan.layers:
        table.add_row(each.name, str(each.count), "" if each.seconds is None else ms(each.seconds),
                      *("" if size is None else gb(size) for size in (each.bytes_parameters, each.bytes_kept)))
    return table


def _choice(layer: LayerPlan, again: str) -> Iterator[Any]:
    for plan in layer.regions[:1]:
        yield Text(f"{layer.name}: {_stars(plan.module)}: ways to run it{again}")
        table = Table()
        for column in ("", "way", "forward", "backward", "exposed"):
            table.add_column(column, justify="left" if column in ("", "way") else "right")
        best = {each.choice.words(): each for each in reversed((plan.chosen, *plan.candidates))}  # of several orders
        best[plan.chosen.choice.words()] = plan.chosen
        ranked = sorted(best.values(), key=lambda each: each.seconds)
        for each in ranked[: max(_SHOWN, ranked.index(plan.chosen) + 1)]:
            table.add_row("->" if each is plan.chosen else "", each.choice.words(),
                          *map(ms, (each.forward_s, each.backward_s, each.exposed_s)))  # fmt: skip
        yield table
        yield Text(f"-> {plan.chosen.choice.words()}: {plan.reason}")
        yield from (Text(line) for line in (*plan.words_of_r, *plan.notes))
        if layer.chosen:
            changes = "; ".join(f"from batch {batch} on {new}, before {old}" for batch, old, new in layer.crossovers)
            first, last = min(layer.chosen), max(layer.chosen)
            yield Text(f"batches of {first} to {last}: {changes or f'always {layer.chosen[first]}'}")


def _programs(plan: Plan) -> str:
    took = ", ".join(f"{f'{count} layer' + 's' * (count > 1) if count else 'all layers'} in {seconds:.0f} s"
                     for count, seconds in plan.programs)  # fmt: skip
    if not plan.is_extrapolated:
        return f"compiled: {took}"
    total = sum(layer.count for layer in plan.layers)
    return (f"extrapolated to {total} layers: compiled were models with {took}; what one layer more of a kind takes is "
            "what all others of it are taken to take, and peaks grow as they do there")


def sentences(plan: Plan) -> tuple[str, str, str]:
    """What a step takes, what a rank needs, and how the layers run."""
    limit = "" if plan.limit is None else f" of the {gb(plan.limit)} allowed"
    ways = [f"{layer.count} x {layer.name} with {layer.regions[0].chosen.choice.words()}" for layer in plan.layers
            if layer.regions]  # fmt: skip
    return (
        f"{plan.model} on {plan.ranks} ranks of {plan.machine.name} takes {ms(plan.step_s)} for a step, which is "
        f"{rate(plan.tokens_per_s)} and {plan.share_of_peak:.1%} of the machine's peak.",
        f"A rank needs {gb(plan.memory['peak'])}{limit} at the peak, with AdamW.",
        f"How MoE layers run: {'; '.join(ways)}." if ways else "No layer exchanges rows of experts.",
    )


def to_dict(plan: Plan) -> dict[str, Any]:
    kept = plan.within
    return {
        "title": f"Plan: {plan.model}", "sentences": list(sentences(plan)),
        "words": {"seconds": _PARTS, "memory": memory_words(plan)},
        "model": plan.model, "machine": plan.machine.name, "machine_digest": plan.machine.digest(),
        "mesh": dict(plan.mesh), "ep": plan.ep, "esp": plan.esp, "batch": list(plan.batch),
        "accumulate": plan.accumulate, **rooms.of_axes(plan.options), "state": plan.options.parallel.state,
        "step_s": plan.step_s, "tokens": plan.tokens, "tokens_per_s": plan.tokens_per_s,
        "tokens_per_s_per_rank": plan.tokens_per_s / plan.ranks, "share_of_peak": plan.share_of_peak,
        "hints": list(plan.hints),
        "seconds": dict(plan.seconds), "memory": dict(plan.memory), "memory_limit": plan.limit,
        "layers": [_as_dict(layer) for layer in plan.layers],
        "programs": [{"layers": count, "seconds": seconds} for count, seconds in plan.programs],
        "notes": list(plan.notes),
        "not_kept": [{"class": name, "ways": ways, "times": times} for name, ways, times in kept.rows] if kept else [],
        "over_ranks": {str(n): {"ep": ep, "esp": esp, "seconds": s} for n, (ep, esp, s) in plan.ranks_curve.items()},
    }  # fmt: skip


def _as_dict(layer: LayerPlan) -> dict[str, Any]:
    return {
        "name": layer.name, "count": layer.count, "seconds": layer.seconds,
        "parameter_bytes": layer.bytes_parameters, "kept_bytes": layer.bytes_kept,
        "regions": [{"module": _stars(plan.module), "sentence": choice_sentence(plan.chosen.choice, plan.reason, plan),
                     "reason": plan.reason, "choice": plan.chosen.choice.to_dict(),
                     "forward_s": plan.chosen.forward_s, "backward_s": plan.chosen.backward_s,
                     "exposed_s": plan.chosen.exposed_s,
                     "candidates": [{**each.choice.to_dict(), "seconds": each.seconds} for each in plan.candidates]}
                    for plan in layer.regions],
        "over_batches": {str(batch): {"chosen": layer.chosen[batch], "seconds": dict(ways)}
                         for batch, ways in layer.curves.items()},
    }  # fmt: skip


def _stars(path: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)
