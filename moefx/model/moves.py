"""Experts of a compiled model that move to other ranks between two calls, and the optimizer state that follows them.

A move takes parameters and gradients along at once. Optimizer state follows when its optimizer steps next: each of its
tensors knows where it lives, so any number of optimizers may hold some, and what is saved before that step is whole.
"""

from __future__ import annotations

import contextlib
import operator
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.fx import Node
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from moefx import rooms
from moefx.context.region_facts import RegionFacts, Slots, homes_of, module_name
from moefx.errors import DivergenceError, UnsupportedUse
from moefx.ir.op import Along, lookup
from moefx.ir.ways import A2A, BLOCKS
from moefx.layout import size
from moefx.link.program import Home, Program
from moefx.model.runner import Runner
from moefx.runtime import optimizer_guard, origins, parameters, rehome
from moefx.runtime.expert_tensor import layout_of
from moefx.runtime.rehome import Move
from moefx.runtime.together import Ranks

Owners = Mapping[str, Sequence[int]]  # by the path of a module, or the name of a parameter: the place of every expert

_FOLLOWING = "moving optimizer state"
_HINT = "keep state that is shaped like its parameter (`zeros_like`), as AdamW and SGD do, or a number"


@dataclass(eq=False)
class Experts:
    """Experts that move together: those of all regions, of all programs, that read one of their parameters.

    keys: of these in `home`, the name of a stacked one or the names of a stack. names: of these and of the regions'
    modules, in the model. axis: over which they are spread. count: how many there are. least, most: how many may live
    on a rank. fixed: why they cannot move.
    """

    home: Home
    keys: list[Any]
    names: list[str]
    axis: tuple[str, ...]
    count: int
    least: int
    most: int
    fixed: str | None

    @property
    def owners(self) -> tuple[int, ...]:
        """The place along the axis where each lives."""
        key = self.keys[0]
        rows = len(self.home.params[key]) if isinstance(key, str) else self.count
        return homes_of(key, rows, self.count, self.home.layouts, self.home.spec.root)

    def check(self, name: str, owners: tuple[int, ...]) -> tuple[int, ...]:
        """These owners; raises UnsupportedUse where the experts cannot live with them."""
        along, ranks, hint = "+".join(self.axis), size(self.axis, self.home.spec.root), None
        strange = next((owner for owner in owners if owner not in range(ranks)), None)
        place = next((p for p in range(ranks) if not self.least <= owners.count(p) <= self.most), None)
        if self.fixed:
            wrong = f"cannot move: {self.fixed}"
        elif len(owners) != self.count:
            wrong = f"have {len(owners)} owners, but there are {self.count} experts"
        elif strange is not None:
            wrong = f"cannot live at place {strange} of '{along}', which has {ranks}"
        elif place is not None:
            exactly = "exactly" if self.least == self.most else "at most"
            wrong = f"have {owners.count(place)} homes at place {place} of '{along}', {exactly} {self.most} fit"
            hint = "let experts change places; or leave room for more: docs/guide/skew.md, experts that move"
        else:
            return owners
        raise UnsupportedUse(f"the experts of {name} {wrong}", hint=hint)

    def moves(self, after: tuple[int, ...]) -> Iterator[Move]:
        """Of their parameters and gradients."""
        for key in self.keys:
            if isinstance(key, tuple):
                stack, places = self.home.stacks[key], [(place,) for place in after]
                yield rehome.move_of_stack(stack, after, lambda new, key=key: self.home.stacks.update({key: new}))
                params = stack.params
            else:
                params = [self.home.params[key]]
                places = [tuple(place for place in after for _ in range(len(params[0]) // self.count))]
                parameters.check_subclass_support(params[0])
                yield rehome.move_of(params[0], places[0], self.home.memory.get(key))
            for param, place in zip(params, places):
                if isinstance(param.grad, DTensor) and not origins.is_whole(param.grad):
                    if rehome.homes_of(param.grad) is None:
                        raise UnsupportedUse("experts cannot move while gradients are laid out in another way",
                                             hint="zero_grad() first")
                    yield rehome.move_of(param.grad, place)

    def note(self) -> None:
        """They have moved."""
        for key in self.keys:
            for name in key if isinstance(key, tuple) else (key,):
                self.home.layouts[name] = layout_of(self.home.params[name])
        self.home.session.placements.move(self.names, self.owners)


def experts_of(runners: Sequence[Runner]) -> list[Experts]:
    """All experts that programs have spread over ranks of `ep`, in the order of the programs."""
    found: list[Experts] = []
    for runner in (runner for runner in runners if runner.builder.home.spec.dims("ep")):
        for variant in runner.variants:
            nodes = [node for gm in variant.scheduled.values() for node in gm.graph.nodes]
            in_order = any(map(_takes_in_order, nodes))
            for facts in variant.program.regions:
                if facts.way.hops:
                    _add(found, runner, variant.program, facts, _fixed(facts, in_order))
    return found


def _add(found: list[Experts], runner: Runner, program: Program, facts: RegionFacts, fixed: str | None) -> None:
    """Add a region of a program, to the experts that are there if it reads a parameter of these, or has none."""
    home, slots, count = runner.builder.home, facts.slots or Slots(0), facts.experts
    keys = list(slots.params)
    names = [module_name(runner.path, name) for key in keys for name in (key if isinstance(key, tuple) else (key,))]
    rooms = [source.room for source in program.sources if source.key in keys]
    axis = tuple(home.spec.dims("ep"))
    even = count // size(axis, home.spec.root)
    least, most = (even, even) if None in rooms else (0, slots.room)
    new = Experts(home, keys, [module_name(runner.path, facts.module), *names], axis, count, least, most,
                  fixed)  # fmt: skip
    for other in [each for each in found if each.home is home and not set(each.keys or each.names[:1]).isdisjoint(
                  keys or new.names[:1])]:  # fmt: skip
        found.remove(other)
        new = Experts(home, list(dict.fromkeys(other.keys + new.keys)), list(dict.fromkeys(other.names + new.names)),
                      axis, count, max(other.least, new.least), min(other.most, new.most),
                      other.fixed or new.fixed)  # fmt: skip
    found.append(new)


def _takes_in_order(node: Node) -> bool:
    """Whether it takes a rank's experts of all, without a table."""
    op = lookup(node)
    return op is not None and op.along == Along("R", "V") and op.is_view(node)


def _fixed(facts: RegionFacts, in_order: bool) -> str | None:
    """Why the experts of a region stay where they are. in_order: the program takes some by their order on ranks."""
    kinds = {hop.kind for hop in facts.way.hops}
    if BLOCKS in kinds:
        return "they compute static blocks of rows, which go to ranks in their order"
    nested = [nesting.fixed for nesting in rooms.nestings() if nesting.hop in kinds]
    if nested:
        return nested[0]
    if kinds - {A2A}:
        return "they are cut over 'esp'"
    if in_order or not facts.slots.params:
        return "every rank has some of their weights whole, and takes those of its experts in their order"
    return None


class Moves:
    """Of one compiled model."""

    def __init__(self) -> None:
        self.wanted: Owners = {}  # as soon as there are programs
        self._count = 0  # the same on all ranks
        self._followed: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()

    def move(self, ranks: Ranks, runners: Sequence[Runner], owners: Owners, *, or_not: bool = False) -> bool:
        """Let experts live at these places along their axis, by the path of a module or the name of a parameter. A
        collective of `ranks`, who give the same.

        or_not: where a forward or gradients wait on any rank, nothing moves, and False is returned. Else that raises
        UnsupportedUse, as does what cannot be; DivergenceError: ranks give other owners. On all ranks, and before
        anything has moved.
        """
        complaint, plan, count = None, [], 0
        try:
            plan = _plan(experts_of(runners), _checked(owners))
            self._check_optimizers(plan)
            count = sum(1 for experts, after in plan for _ in experts.moves(after))  # ranks may lack gradients
        except UnsupportedUse as error:
            complaint = error.what, error.hint
        mine = [(experts.names[0], after) for experts, after in plan], count
        found = ranks.gather((complaint, _what_waits(runners), mine), "moving experts")
        for rank, (wrong, busy, theirs) in enumerate(found):
            where = f"rank {rank} of {ranks.size}, moving experts"
            if wrong is not None:
                raise UnsupportedUse(wrong[0], where=where, hint=wrong[1])
            if theirs != found[0][2]:
                raise DivergenceError(f"rank {rank} moves {theirs[0]} with {theirs[1]} tensors, rank 0 {found[0][2]}",
                                      where=where, hint="let all ranks move the same experts to the same places")
            if busy is not None and not or_not:
                raise UnsupportedUse(busy[0], where=where, hint=busy[1])
        if any(busy is not None for _, busy, _ in found):
            return False
        if plan:
            self._run(ranks, plan)
            for runner in runners:
                runner.last = None  # what it counted goes by the tables of then
        return True

    def _run(self, ranks: Ranks, plan: Sequence[tuple[Experts, tuple[int, ...]]]) -> None:
        with ranks.session.running():  # what breaks off in here leaves ranks with other experts than others think
            for experts, after in plan:
                rehome.run(ranks.session, experts.axis, list(experts.moves(after)))
                experts.note()
        self._count += 1

    def follow(self, ranks: Ranks, optimizer: Optimizer, model: nn.Module) -> None:
        """Bring the state of an optimizer that is about to step to where its parameters live. A collective of `ranks`,
        if anything moved, or state was loaded, since it last stepped.

        Raises CheckpointError for state that another rank has saved, UnsupportedUse for state that cannot follow, and
        DivergenceError where ranks have other state.
        """
        last, is_loaded = self._followed.setdefault(optimizer, 0), optimizer_guard.was_loaded(optimizer)
        if last == self._count and not is_loaded:
            return
        names = {param: name for name, param in model.named_parameters()}
        if is_loaded:
            ranks.each("stepping with loaded state", lambda: optimizer_guard.check_state(optimizer, names))
        lagging = [each for each in _state_of(optimizer, names) if each.lags]
        stuck = next((each for each in lagging if not each.follows), None)
        facts = [(each.name, str(layout_of(each.value)), str(each.value.dtype)) for each in lagging]
        found = ranks.gather((stuck and stuck.name, facts), _FOLLOWING)
        for rank, (complaint, theirs) in enumerate(found):
            where = f"rank {rank} of {ranks.size}, {_FOLLOWING}"
            if complaint is not None:
                raise UnsupportedUse(f"{complaint} cannot follow experts that have moved", where=where, hint=_HINT)
            if theirs != found[0][1]:
                mine, other = set(found[0][1]) - set(theirs), set(theirs) - set(found[0][1])
                raise DivergenceError(f"rank {rank} has other optimizer state than rank 0: {sorted(mine | other)[:2]}",
                                      where=where, hint="give every rank the same optimizer, and load the same into it")
        by_axis: dict[tuple[str, ...], list[Move]] = {}
        for each in lagging:
            axis, after = rehome.homes_of(each.param)
            by_axis.setdefault(axis, []).append(rehome.move_of(each.value, after))
        with ranks.session.running():
            for axis, moves in by_axis.items():
                rehome.run(ranks.session, axis, moves)
        self._followed[optimizer] = self._count

    def state(self, runners: Sequence[Runner]) -> dict[str, Any]:
        """Where all experts live, by their first parameters, and on which mesh; plain data."""
        homes = {each.names[1]: list(each.owners) for each in experts_of(runners) if each.keys} or dict(self.wanted)
        session = runners[0].session
        return {"mesh": dict(runners[0].builder.spec.root), "homes": homes,
                "plans": session.placements.state(session)}  # fmt: skip

    def restore(self, ranks: Ranks, runners: Sequence[Runner], state: Mapping[str, Any] | None = None) -> None:
        """Let experts live as they did in a `state` of the same mesh, or as was wanted before there were programs. What
        these programs cannot do stays as it is. A collective of `ranks`."""
        if state is not None:
            self.wanted = state["homes"] if _is_same_mesh(runners, state) else {}
        if self.wanted and any(runner.variants for runner in runners):
            with contextlib.suppress(UnsupportedUse):
                self.move(ranks, runners, self.wanted)
            self.wanted = {}
            for variant in (variant for runner in runners for variant in runner.variants):
                variant.program.tables()  # which have their plans before a call begins

    def restore_plans(self, ranks: Ranks, runners: Sequence[Runner], state: Mapping[str, Any]) -> None:
        """Go on with the plans of a `state`, once homes are restored, and optimizers have their state. What was counted
        before was under other plans."""
        for runner in runners:
            runner.last = None
        ranks.session.placements.restore(ranks.session, state["plans"] if _is_same_mesh(runners, state) else {})

    def _check_optimizers(self, plan: Sequence[tuple[Experts, tuple[int, ...]]]) -> None:
        """Raises UnsupportedUse if what an optimizer keeps of parameters that will move cannot follow."""
        names = {experts.home.params[name]: name for experts, _ in plan
                 for key in experts.keys for name in (key if isinstance(key, tuple) else (key,))}  # fmt: skip
        for optimizer in list(self._followed):
            stuck = next((each for each in _state_of(optimizer, names) if not each.follows), None)
            if stuck is not None:
                raise UnsupportedUse(f"{stuck.name} could not follow experts that move", hint=_HINT)


def _is_same_mesh(runners: Sequence[Runner], state: Mapping[str, Any]) -> bool:
    return state["mesh"] == dict(runners[0].builder.spec.root)


class _State(NamedTuple):
    """One tensor of an optimizer's state. name: for messages."""

    name: str
    param: DTensor
    value: Tensor

    @property
    def lags(self) -> bool:
        """Whether it lives somewhere else than its parameter."""
        is_spread = isinstance(self.value, DTensor) and not origins.is_whole(self.value)
        return is_spread and not origins.same_layout(self.value, self.param)

    @property
    def follows(self) -> bool:
        """Whether it can live wherever its parameter does: it is whole, a number, or has a row for each of its, or all
        of it lives where all of the parameter does."""
        if not isinstance(self.value, DTensor):
            return self.value.numel() <= 1
        homes = rehome.homes_of(self.param), rehome.homes_of(self.value)
        by_row = self.value.shape == self.param.shape or all(layout_of(each).owner for each in (self.param, self.value))
        alike = by_row and None not in homes and homes[0][0] == homes[1][0]
        return origins.is_whole(self.value) or alike


def _state_of(optimizer: Optimizer, names: Mapping[Tensor, str]) -> Iterator[_State]:
    """In the order of the parameters, which is that of all ranks."""
    for param in (p for group in optimizer.param_groups for p in group["params"] if p in names):
        for key, value in optimizer.state.get(param, {}).items():
            for leaf in tree_leaves(value):
                if isinstance(leaf, Tensor):
                    yield _State(f"{type(optimizer).__name__}'s `{key}` of `{names[param]}`", param, leaf)


def _checked(owners: Any) -> dict[str, tuple[int, ...]]:
    """Raises UnsupportedUse for what is no mapping of names to places."""
    try:
        return {str(name): tuple(map(operator.index, places)) for name, places in owners.items()}
    except (AttributeError, TypeError) as error:
        raise UnsupportedUse(f"owners are {str(owners)[:80]}",
                             hint="{path of a module: [place of every expert along ep]}") from error  # fmt: skip


def _plan(found: Sequence[Experts], owners: Owners) -> list[tuple[Experts, tuple[int, ...]]]:
    """What moves, in the order of the programs. Raises UnsupportedUse for what cannot."""
    wanted: dict[Experts, tuple[str, tuple[int, ...]]] = {}
    for name, places in owners.items():
        named = [experts for experts in found if name in experts.names]
        if len(named) != 1:
            known = [experts.names[bool(named)] for experts in named or found]
            raise UnsupportedUse(
                f"{'several mixtures have' if named else 'no program spreads'} experts of {name}",
                hint=f"there are {', '.join(known[:8])}" if known else "let a program be compiled first: give "
                "moefx.compile example_inputs, on a mesh with ep")  # fmt: skip
        after = named[0].check(name, places)
        other, before = wanted.setdefault(named[0], (name, after))
        if before != after:
            raise UnsupportedUse(f"{other} and {name} share experts, which have other owners in each")
    return [(experts, wanted[experts][1]) for experts in found
            if experts in wanted and wanted[experts][1] != experts.owners]  # fmt: skip


def _what_waits(runners: Sequence[Runner]) -> tuple[str, str] | None:
    """Why nothing may move now, and what to do."""
    steps = [step.number for runner in runners for step in runner.builder.home.steps if step.waits]
    if steps:
        return (f"experts cannot move while the backward of step {min(steps)} is to come",
                "call backward, or drop the outputs of that forward, before they move")
    waiting = [name for runner in runners for name in runner.buffers.names()]
    if waiting:
        return (f"experts cannot move while gradients of {len(waiting)} parameters wait to be synchronised",
                "run the last backward of an accumulation outside of no_sync(), or drop them by model.zero_grad()")
    return None

