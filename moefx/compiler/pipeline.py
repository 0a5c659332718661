"""The list of passes, and the runner that verifies, times and records after each of them."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch.fx import GraphModule

from moefx import _torch_compat as compat
from moefx import progress, rooms
from moefx.analysis import kinds
from moefx.analysis.kinds import Kinds
from moefx.analysis.region_rows import BlockRows
from moefx.compiler.checks import Checks
from moefx.compiler.records import Record, Recorder
from moefx.context.pass_types import Pass, PassContext, PassResult, Run
from moefx.context.step_graphs import StepGraphs
from moefx.errors import ExtensionError, MoefxError, RaiseError, ScheduleError
from moefx.ir import alike, edit
from moefx.ir.infer import Values, propagate
from moefx.ir.level import Level
from moefx.ir.ops.layers import is_folded
from moefx.options import by_kinds
from moefx.passes import (
    accumulate_wgrads,
    add_outputs,
    ask_kernels,
    assign_slots,
    bucket_gradients,
    canonicalize,
    cat_slices,
    chunk,
    clean_up,
    dense_mixtures,
    differentiate,
    expand_transport,
    fold_layers,
    gather_experts,
    gather_tokens,
    group_keys,
    hoist_split,
    join_blocks,
    join_expert_layers,
    join_gates,
    join_slices,
    keep_rows_cut,
    materialise,
    name_values,
    number_masks,
    order,
    partition,
    place_parameters,
    place_regions,
    raise_einsum,
    raise_gathered,
    raise_grouped,
    raise_loop,
    refuse_unraised,
    reuse,
    shard_dense,
    shard_experts,
    sort_gates,
    spell_out,
    split_batch,
    split_tokens,
    split_waits,
    stack_weights,
    sum_statistics,
    unfold_layers,
    unstack_experts,
    weigh_inside,
    zero_experts,
)
from moefx.planning.pricing import Prices

log = logging.getLogger("moefx.passes")


def _in_turn(parts: Sequence[Pass]) -> Run:
    """Several files that are one step: the graph between them is of no level."""

    def run(gm: GraphModule, ctx: PassContext) -> PassResult:
        results = [part.run(gm, ctx) for part in rooms.with_passes(parts)]
        return PassResult([c for r in results for c in r.changes], [s for r in results for s in r.skipped])

    return run


def _refreshed(gm: GraphModule, ctx: PassContext) -> PassResult:
    """What follows asks for the sizes of a rank."""
    if ctx.mesh.size("mp+esp") > 1:
        refresh(gm, ctx)
    return PassResult()


PLACING: tuple[Pass, ...] = (
    Pass("gather-tokens", gather_tokens.run),
    Pass("refresh-tokens", _refreshed),
    Pass("cat-slices", cat_slices.run),
    Pass("spell-out", spell_out.run),
    Pass("shard-dense", shard_dense.run),
    Pass("shard-experts", shard_experts.run),
    Pass("assign-slots", assign_slots.run),
    Pass("gather-experts", gather_experts.run),
    Pass("place-parameters", place_parameters.run),
    Pass("place-regions", place_regions.run),
    Pass("keep-rows-cut", keep_rows_cut.run),
    Pass("refresh-rows", _refreshed),
    Pass("materialise", materialise.run),
    Pass("add-outputs", add_outputs.run),
)
place_experts = Pass("place-experts", _in_turn(PLACING), Level.MOE, Level.PLACED)

# Before differentiation: one graph. After it: forward and backward, each pass on both.
WHOLE: tuple[Pass, ...] = (
    Pass("fold-layers", fold_layers.run, Level.CAPTURED, Level.CAPTURED, optional=True),
    Pass("canonicalize", canonicalize.run, Level.CAPTURED, Level.CAPTURED, exact=True),
    Pass("ask-kernels", ask_kernels.run, Level.CAPTURED, Level.CAPTURED, optional=True),
    Pass("stack-weights", stack_weights.run, Level.CAPTURED, Level.CAPTURED),
    Pass("unstack-experts", unstack_experts.run, Level.CAPTURED, Level.CAPTURED),
    Pass("sort-gates", sort_gates.run, Level.CAPTURED, Level.CAPTURED),
    Pass("dense-mixtures", dense_mixtures.run, Level.CAPTURED, Level.CAPTURED),
    Pass("number-masks", number_masks.run, Level.CAPTURED, Level.CAPTURED),
    Pass("zero-experts", zero_experts.run, Level.CAPTURED, Level.CAPTURED),
    Pass("join-blocks", join_blocks.run, Level.CAPTURED, Level.CAPTURED),
    Pass("join-slices", join_slices.run, Level.CAPTURED, Level.CAPTURED),
    Pass("raise-grouped", raise_grouped.run, Level.CAPTURED, Level.MOE),
    Pass("raise-gathered", raise_gathered.run, Level.MOE, Level.MOE),
    Pass("raise-loop", raise_loop.run, Level.MOE, Level.MOE),
    Pass("raise-einsum", raise_einsum.run, Level.MOE, Level.MOE),
    Pass("refuse-unraised", refuse_unraised.run, Level.MOE, Level.MOE, exact=True),
    Pass("unfold-layers", unfold_layers.run, Level.MOE, Level.MOE, optional=True, undoes="fold-layers",
         valued=True),
    Pass("weigh-inside", weigh_inside.run, Level.MOE, Level.MOE, optional=True),
    Pass("split-batch", split_batch.run, Level.MOE, Level.MOE),
    Pass("split-tokens", split_tokens.run, Level.MOE, Level.MOE),
    Pass("hoist-split", hoist_split.run, Level.MOE, Level.MOE),
    Pass("chunk", chunk.run, Level.MOE, Level.MOE, optional=True, asked=True),
    Pass("split-capacity", partial(split_tokens.run, kind=BlockRows), Level.MOE, Level.MOE),
    place_experts,
    Pass("sum-statistics", sum_statistics.run, Level.PLACED, Level.PLACED),
    Pass("group-keys", group_keys.run, Level.PLACED, Level.PLACED, optional=True),
    Pass("join-gates", join_gates.run, Level.PLACED, Level.PLACED, optional=True),
    Pass("join-expert-layers", join_expert_layers.run, Level.PLACED, Level.PLACED, optional=True),
)
# Parts of differentiate, on the joint graph. Those of rooms behind "partition" are its last ones, and take the step.
JOINT: tuple[Pass, ...] = (Pass("clean-up", clean_up.run),)
STEP: tuple[Pass, ...] = (
    Pass("bucket-gradients", bucket_gradients.run, Level.PLACED, Level.PLACED, optional=True, exact=True),
    Pass("expand-transport", expand_transport.run, Level.PLACED, Level.PLACED, asked=True),
    Pass("split-waits", split_waits.run, Level.PLACED, Level.SCHEDULED, exact=True),
    Pass("order", order.run, Level.SCHEDULED, Level.SCHEDULED, optional=True, exact=True, asked=True),
    Pass("accumulate-wgrads", accumulate_wgrads.run, Level.SCHEDULED, Level.SCHEDULED),
    Pass("reuse", reuse.run, Level.SCHEDULED, Level.SCHEDULED, optional=True, exact=True),
)


def whole() -> list[Pass]:
    """Those of one graph, before differentiation, and those of rooms."""
    return rooms.with_passes(WHOLE)


def by_step() -> list[Pass]:
    """Those of forward and backward, and those of rooms."""
    return [*rooms.behind("differentiate"), *rooms.with_passes(STEP)]


def asked_for() -> set[str]:
    """Names of those that do what options ask for: of these users are told what they skipped."""
    return {entry.name for entry in (*whole(), *by_step()) if entry.asked}


def differentiated(gm: GraphModule, ctx: PassContext, result: PassResult | None = None,
                   equal: Kinds | None = None) -> StepGraphs:  # fmt: skip
    """Forward and backward of a placed graph. result: is told what was done to the joint graph that they come from.
    equal: its kinds of equal layers; None: it is differentiated as a whole."""
    names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
    joint = differentiate.run(gm, ctx, equal, result)
    changed = _in_turn(JOINT)(joint, ctx)
    name_values.run(joint, ctx, gm)
    step = partition.run(joint, ctx, names)
    behind = [each.run(step, ctx) for each in rooms.behind("partition")]
    step.note_sources(gm)
    if result is not None:
        result.changes += [change for each in (changed, *behind) for change in each.changes]
    return step


def _name_equal_layers(error: MoefxError, gm: GraphModule) -> None:
    """Let an error say once where it is in this layer and in later ones: "at: layers.3 to 47.mlp at model.py:41"."""
    places = list(dict.fromkeys(map(edit.place, gm.graph.nodes)))
    if error.where in places:
        places = places[places.index(error.where) :]
        equal = alike.groups(places)[0]
        error.where = alike.joined([places[each] for each in equal])


class OptionalPassFailed(Exception):
    """An optional pass failed half-way: compile again without it, on all ranks. refused: it did not; but what a later
    one refuses may be its work."""

    def __init__(self, name: str, *, refused: bool = False) -> None:
        super().__init__(name)
        self.name, self.refused = name, refused


@dataclass
class Pipeline:
    """Runs the passes on one captured graph and keeps a record of every step."""

    ctx: PassContext
    skip: frozenset[str] = frozenset()  # optional passes that failed on some rank
    recorder: Recorder = field(init=False)
    checks: Checks = field(init=False)  # of the last run
    values: Values = field(default_factory=Values)  # of the whole graph

    def __post_init__(self) -> None:
        self.recorder = Recorder(self.ctx)

    @property
    def records(self) -> list[Record]:
        return self.recorder.records

    def run(self, gm: GraphModule) -> StepGraphs:
        """Raises RaiseError where a pass would have to know a number that only the running program has."""
        try:
            return self._all(gm)
        except MoefxError as error:
            if is_folded(gm):
                log.info("layers are looked at one by one: %s", error.what)
                raise OptionalPassFailed("fold-layers", refused=True) from error
            _name_equal_layers(error, gm)
            raise
        except Exception as error:
            if not compat.is_data_dependent(error):
                raise
            raise RaiseError("what it does depends on a number that is known only when it runs, read from a tensor or "
                             "an array", hint="read it as a Python number, int(..), outside of the forward",
                             ) from error  # fmt: skip

    def _all(self, gm: GraphModule) -> StepGraphs:
        checks = self.checks = Checks(gm, self.ctx)
        self.values.learn(gm)
        checks.whole("capture", Level.CAPTURED)
        self.recorder.add("capture", Level.CAPTURED, {"graph": gm}, PassResult(), 0.0)
        for entry in whole():
            self._apply(entry, {"graph": gm}, lambda e: checks.whole(e.name, e.gives, exact=e.exact))
        start = time.perf_counter()
        progress.step("differentiate")
        result = PassResult()
        equal = kinds.find(gm).several() if by_kinds() else Kinds()
        step = differentiated(gm, self.ctx, result, equal)
        seconds = time.perf_counter() - start
        checks.step("differentiate", Level.PLACED, step)
        if equal.found:
            checks.same("differentiate", step, lambda: differentiated(gm, self.ctx))
        self.recorder.add("differentiate", Level.PLACED, step.graphs, result, seconds, step)
        self.ctx.decisions.time_of = prices = Prices(step, self.ctx)
        self.ctx.decisions.rates = prices.rates
        for entry in by_step():
            self._apply(entry, step.graphs, lambda e: checks.step(e.name, e.gives, step, exact=e.exact), step)
        return step

    def _apply(
        self, entry: Pass, graphs: dict[str, GraphModule], check: Callable[[Pass], None], step: StepGraphs | None = None
    ) -> None:
        if not self.skip.isdisjoint({entry.name, entry.undoes}):
            return
        start = time.perf_counter()
        total = PassResult()
        progress.step(entry.name)
        try:
            for gm in graphs.values():
                result = entry.run(gm, self.ctx)
                total.changes += result.changes
                total.skipped += result.skipped
            seconds = time.perf_counter() - start
            if entry.valued and total.changes:
                self.values.learn(graphs["graph"], copied=True)
            elif entry in whole() and total.changes:
                refresh(graphs["graph"], self.ctx, self.values)
            check(entry)
        except Exception as error:
            # What a user's scheduler does wrong is the user's to mend: nothing else is put in its place.
            if not entry.optional or isinstance(error, (ScheduleError, ExtensionError)):
                raise
            log.warning("the optional pass %s failed: %s", entry.name, error)
            raise OptionalPassFailed(entry.undoes or entry.name) from error
        for where, reason in total.skipped:
            log.info("%s left %s: %s", entry.name, where, reason)
        log.debug("%s (%s): %d changes, %.2f s", entry.name, entry.gives.value, len(total.changes), seconds)
        self.recorder.add(entry.name, entry.gives, graphs, total, seconds, step)


@contextlib.contextmanager
def tracing_modes(ctx: PassContext) -> Iterator[None]:
    """The grad mode and autocast under which the user called the model."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(ctx.grad))
        for device, dtype in ctx.autocast:
            stack.enter_context(torch.autocast(device, dtype=dtype))
        yield


def refresh(gm: GraphModule, ctx: PassContext, values: Values | None = None) -> None:
    """Make meta["val"] true again after a pass."""
    with tracing_modes(ctx):
        propagate(gm, ctx.fake_mode, values)
