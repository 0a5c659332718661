"""One program as rank 0 of a world that is not there: what a step of it takes, as numbers that add up over layers."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.fx import Node

from moefx import _torch_compat as compat
from moefx.analysis.tasks import stage_of
from moefx.compiler.choosing import Attempt
from moefx.costmodel.amounts import Kind, amounts_of, at, product_flops
from moefx.costmodel.machine import Machine
from moefx.costmodel.optimizer import master, moments, moved
from moefx.costmodel.tasks import COMPUTE
from moefx.errors import UnsupportedUse
from moefx.ir.op import BACKGROUND, Stage, expr, value
from moefx.ir.ops.order import start, unsplit
from moefx.model.api import compile
from moefx.options import WEIGHTS, Options
from moefx.planning.memory import nbytes_of, step_memory
from moefx.planning.pieces import outside
from moefx.planning.planner import Decision, decide
from moefx.planning.pricing import Prices

Numbers = dict[str, float]
PHASES = ("forward", "backward")
_PARAMETERS = ("param", "experts", "stack")
_HELD = ("parameters", "gradients", "master", "optimizer", "held", "held_experts", "moved")


class Look(NamedTuple):
    """A program with whole regions, the plan, and the numbers of a step by that plan, see `numbers_of`."""

    attempt: Attempt
    decision: Decision
    numbers: Numbers


@contextlib.contextmanager
def nobody(ranks: int) -> Iterator[None]:
    """This process as rank 0 of so many, without peers, and with nothing left of it. Raises UnsupportedUse where
    torch.distributed is in use."""
    if dist.is_initialized():
        raise UnsupportedUse("torch.distributed is initialised in this process, and a plan needs a world of its own",
                             hint="plan before init_process_group, or by python -m moefx plan")  # fmt: skip
    dist.init_process_group("fake", store=compat.fake_store(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def look(module: nn.Module, sizes: Mapping[str, int], options: Options, args: tuple, kwargs: Mapping[str, Any]) -> Look:
    """sizes: of the mesh, by name. The module becomes one on that mesh. Raises what compiling raises."""
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    compiled = compile(module, mesh, options)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of models that are captured, for whoever writes them
            with compiled._plain.callable():
                attempt, decision = compiled._whole.look(*args, **kwargs)
    finally:
        compiled.close()
    return Look(attempt, decision, numbers_of(attempt, decision))


def numbers_of(attempt: Attempt, decision: Decision) -> Numbers:
    """Of one step on one rank, by graph and all together; each is about linear in how often a layer is there.

    seconds.forward, ..: regions as they were chosen, all else one node after the other. links.forward, ..: of these,
    for which the regions' exchanges keep a link busy. beside.forward, ..: of reductions of gradients and gathers of
    weights, which run beside the step; once.forward, ..: of these, of what is done once for micro-batches whose
    gradients add up. flops.forward, ..: of products. bytes.parameters, bytes.gradients, bytes.master, bytes.optimizer
    (its moments); bytes.held: all four, of which bytes.held_experts; bytes.moved: by AdamW. bytes.kept: for the
    backward. peak.forward, peak.turn, peak.end: the most bytes in the forward, in the backward, and in its last part.
    """
    ctx, prices = attempt.ctx, Prices(attempt.graphs, attempt.ctx)
    found: Numbers = {}
    planned = {plan.region for plan in decision.regions}
    for name, gm in attempt.graphs.graphs.items():
        background = [(stage_of(node), _reduction_s(node, prices)) for node in gm.graph.nodes
                      if node.target is start and stage_of(node) in BACKGROUND]  # fmt: skip
        beside = sum(seconds for _, seconds in background)
        found[f"once.{name}"] = sum(seconds for stage, seconds in background if stage is Stage.GRADIENT)
        found[f"flops.{name}"] = sum(product_flops(node, prices.sizes) for node in gm.graph.nodes)
        serial = 0.0
        for node in outside(gm.graph.nodes, ctx, planned):
            if node.target is start and unsplit(node)[0].queue_of(unsplit(node)[1]) == WEIGHTS:
                beside += prices(node)
            else:
                serial += prices(node)
        chosen = [plan.chosen for plan in decision.regions]
        found[f"seconds.{name}"] = serial + sum(getattr(each, f"{name}_s") for each in chosen)
        found[f"links.{name}"] = sum(max((seconds for (graph, queue), seconds in each.loads.items()
                                          if graph == name and queue != COMPUTE), default=0.0) for each in chosen)
        found[f"beside.{name}"] = beside
    return found | _bytes(attempt, prices.sizes) | _peaks(attempt, prices.sizes)


def _reduction_s(node: Node, prices: Prices) -> float:
    """Seconds of a collective that nobody computes with. All-reduces of many ranks go by trees where these have less
    latency than a ring, 2 log2(n) messages instead of 2 (n - 1), as NCCL's do."""
    amounts, ring = amounts_of(node), prices(node)
    if amounts.kind is not Kind.COLLECTIVE or amounts.collective != "all_reduce":
        return ring
    group = prices.machine.group(prices.ctx.mesh.root, amounts.axes)
    if group.size < 2:
        return ring
    nbytes = 2 * at(amounts.payload, prices.sizes) * (group.size - 1) / group.size
    curve = prices.machine.curve("all_reduce", group.link, "ring")
    return min(ring, curve.seconds(2 * math.ceil(math.log2(group.size)), nbytes))


def _bytes(attempt: Attempt, sizes: Mapping[str, float]) -> Numbers:
    ctx, found = attempt.ctx, dict.fromkeys(map("bytes.{}".format, _HELD), 0.0)
    experts, state = {*ctx.mesh.dims("ep+esp")}, ctx.options.parallel.state
    for node in attempt.graphs.forward.graph.find_nodes(op="placeholder"):
        source = node.meta.get("moefx")
        if source is None or source.kind not in _PARAMETERS or value(node) is None:
            continue
        nbytes, itemsize = at(nbytes_of((node, 0)), sizes), value(node).element_size()
        mine = {"parameters": nbytes}
        if value(node).is_floating_point():
            each = {"gradients": itemsize, "master": master(itemsize, state), "optimizer": moments(state)}
            mine |= {name: size * nbytes / itemsize for name, size in each.items()}
            found["bytes.moved"] += moved(itemsize, state) * nbytes / itemsize
        cut_over = {dim for each in source.layout.cuts for dim in each.axis}
        is_expert = source.kind != "param" or (bool(cut_over) and cut_over <= experts)
        for name, size in mine.items():
            found[f"bytes.{name}"] += size
        found["bytes.held"] += sum(mine.values())
        found["bytes.held_experts"] += sum(mine.values()) if is_expert else 0.0
    kept = sum(at(each.nbytes[ctx.way_of(each)], sizes) for each in ctx.decisions.restorables)
    return found | {"bytes.kept": kept}


def _peaks(attempt: Attempt, sizes: Mapping[str, float]) -> Numbers:
    memory = {name: [at(alive, sizes) for _, alive in each.points]
              for name, each in step_memory(attempt.graphs, attempt.ctx.resident).items()}  # fmt: skip
    found = {"peak.forward": max(memory["forward"])}
    points = memory.get("backward", ())
    if points:
        last = len(points) * 3 // 4  # behind it only the first layer's values are still there
        found |= {"peak.turn": max(points[: last + 1]), "peak.end": max(points[last:])}
    return found


def with_batch(attempt: Attempt, batch: int) -> Attempt | None:
    """The same for another batch; None: the program is for this one alone."""
    given = [value(node) for node in attempt.graphs.forward.graph.find_nodes(op="placeholder") if _is_input(node)]
    symbols = {str(symbol) for x in given if x.dim() for symbol in expr(x.shape[0]).free_symbols}
    if not symbols:
        return None
    ctx = replace(attempt.ctx, sizes={**attempt.ctx.sizes, **dict.fromkeys(symbols, batch)})
    return attempt._replace(ctx=ctx)


def at_batch(found: Look, batch: int, machine: Machine) -> Look | None:
    """The program priced for another batch; None: it is for this one alone."""
    attempt = with_batch(found.attempt, batch)
    if attempt is None:
        return None
    decision = decide(attempt.graphs, attempt.ctx, machine)
    decision = replace(decision, notes=found.decision.notes)
    return Look(attempt, decision, numbers_of(attempt, decision))


def _is_input(node: Node) -> bool:
    return getattr(node.meta.get("moefx"), "kind", "") == "input" and hasattr(value(node), "shape")


def linear(base: Numbers, more: Mapping[int, Numbers], extra: Mapping[int, int]) -> Numbers:
    """base, with `extra[kind]` layers more of each kind; more: the same with one layer more of it."""
    return {name: found + sum(extra[kind] * (each.get(name, 0.0) - found) for kind, each in more.items())
            for name, found in base.items()}  # fmt: skip

