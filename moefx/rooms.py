"""Features: what moefx can do without. Each has a room, a folder of `moefx/features`; this is all that the core knows.

A feature says what options and meshes it cannot have, which passes and rules it adds and where, what `plan` may
choose of it, whether it changes choices while training goes on, and who follows the calls of a compiled model for it.
Its ops register themselves where its modules are imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch import Tensor


class Meter(Protocol):
    """Measures one call of a model: its forwards and backwards run in these contexts."""

    def forward(self, *, has_backward: bool) -> AbstractContextManager:
        ...

    def backward(self) -> AbstractContextManager:
        ...

    def words(self) -> Sequence[int]:
        """What the header that opens a backward carries to all ranks."""
        ...

    def hear(self, found: Tensor) -> object:
        """found [n, words] int64 of all ranks, on the device."""
        ...


class Change(Protocol):
    """Something that a feature decided while training went on. `str()` says it in a line."""

    def to_dict(self) -> Mapping[str, Any]:
        ...


class Follower(Protocol):
    """Follows the calls of one compiled model, which has it as an attribute of the feature's name."""

    changes: tuple[Change, ...]

    def set_arm(self, given: tuple) -> None:
        """Programs are made now. given: the choices that the user named, which come first."""
        ...

    def begin_call(self, given: tuple, args: tuple, kwargs: Mapping[str, Any], *, grad: bool) -> None:
        """A call begins on all ranks, who have made all calls before it."""
        ...


@dataclass(frozen=True)
class Insertion:
    """A pass of a room. after: the pass of the core that it follows, "differentiate" too, or a part of one
    ("keep-rows-cut"); "schedule": it gets the copies that become code, which may hold a `link.parts.Part` behind it.
    entry: a `context.pass_types.Pass`; behind "partition", the last part of differentiate, its `run` takes the
    `StepGraphs`."""

    after: str
    entry: Any


@dataclass(frozen=True)
class Axis:
    """An option of the room that `plan` tells of, and `plan --search` tries.

    values: what may be tried on a mesh of these sizes, by role, the best guess first. ranks: over how many ranks a
    value spreads what is no expert. remedies: {"time" or "memory": words}, what a value that is not the default does
    against either; {size} is what a rank would hold.
    """

    option: str
    values: Callable[[Mapping[str, int]], tuple]
    ranks: Callable[[Any, Mapping[str, int]], int]
    remedies: Mapping[str, str] = field(default_factory=dict)
    default: Any = False

    def words(self, value: Any) -> list[str]:
        """What tables say of a value: nothing of the default."""
        named = self.option if value is True else f"{self.option}={value}"
        return [named] * (value != self.default)


@dataclass(frozen=True)
class Keeping:
    """Where values that the backward reads may wait: what `lean` keeps of them leaves the device, and comes back. A
    pass behind "partition" moves them (`Decisions.moved`).

    is_priced: whether a machine says what that takes. loads: (machine, bytes) -> {(pass, queue): seconds} of one value.
    """

    name: str
    is_priced: Callable[[Any], bool]
    loads: Callable[[Any, float], Mapping[tuple[str, str], float]]


@dataclass(frozen=True)
class Nesting:
    """An all-to-all of the room by which rows cross first, in a routing of their own (the outer one), in which that of
    the experts is nested. Its pass puts two markers around a region; `place_regions` lets rows take the way of both.

    name: what the option `alltoall` calls it; the room's options.py has it among its VALUES. fixed: why experts stay in
    their order. markers: (there, back), functions of (rows, perm of the outer routing, region). hop: what stands for
    them in a way. way: (axis of places, that of parts of experts, mesh) -> `ir.ways.Way`. counts: (outer routing, table
    of slots), the node of its counts, which ranks exchange; from here on it finds experts by the table. cross: (outer
    routing, these counts of all ranks, ranks, axis, namer), three things: rows per expert; of the crossing its traffic
    on the host, and rows before and behind it; the traffic of the nested routing.

    may: (region, schedule, PassContext), whether rows could by this schedule, and the options let them. pieces:
    (pieces of the region in numbers, by graph and kind; RegionFacts, PassContext), the same of a region by it. note:
    (RegionFacts, PassContext), what its price takes for granted; None where it has none. form: (experts, choices of a
    token, mesh), its schedule and closed form (`costmodel.ways.Form`); None where it makes no difference.
    """

    name: str
    fixed: str
    markers: tuple[Callable, Callable]
    hop: str
    way: Callable[[str, str, Any], Any]
    counts: Callable[[Any, Any], Any]
    cross: Callable[[Any, Any, int, str, Callable[[str], str]], tuple[Any, tuple[Any, Any, Any], Any]]
    may: Callable[[int, str, Any], bool]
    pieces: Callable[[Any, Any, Any], Any]
    note: Callable[[Any, Any], str | None]
    form: Callable[[int, int, Any], tuple[str, Any] | None]


@dataclass(frozen=True)
class Proposal:
    """A program that may be better than the one that was planned: `choices` by region, of a pass that must have found
    something to do. words: what reports call it, beside "as planned"."""

    words: str
    choices: Mapping[int, Any]
    needs: str


@dataclass(frozen=True)
class Degrees:
    """How the planner chooses to how many (r) of the ranks that share an expert a row goes, where weights of the others
    are gathered (`Choice.r`).

    allowed: (region, schedule, PassContext, whether memory has a limit), every r that may be, the program's first.
    change: (r, pieces of the region in numbers, by graph and kind; its Way, PassContext), pieces and Way with r, and
    the axis over which weights are gathered. more: (r, these pieces, PassContext) -> `planning.pricing.More`. arrived:
    (StepGraphs, {graph: {region: Stages}}), a function: of which region a piece of memory has rows, fewer of which come
    where fewer ranks get them. closed: (bytes of rows, pieces of the forward, MeshSpec, Machine), the closed form of a
    region; it has `lines` and `to_dict`, both of a RegionPlan, and `seconds` by r.
    """

    allowed: Callable[[int, str, Any, bool], tuple[int, ...]]
    change: Callable[[int, Any, Any, Any], tuple[Any, Any, str]]
    more: Callable[[int, Any, Any], Any]
    arrived: Callable[[Any, Any], Callable[[Any], int | None]]
    closed: Callable[[float, Any, Any, Any], Any]


@dataclass(frozen=True)
class Feature:
    """What the core calls of a room, by when it does.

    Options and meshes
        check       (Options) raises UnsupportedUse where options want what cannot be
        check_mesh  (Options, DeviceMesh) raises MeshError
        only_whole  (Options) -> (why, what to do instead) where a model is not compiled block by block
        presets     {name: {option: value}}, for `Options.preset`
    Compiling
        passes      of its own, and their places
        rules       of the verifier (`ir.rules.Rule`), behind those of the core
        in_call     its passes plan behind the gate, for policies of placement (`placement.policies.Policy.in_call`)
        rings       (Options) -> `Decisions.rings`
        homes       (Options) -> for how many even shares of experts' homes a rank has room
    Choosing
        axes        options that `plan` tells of and searches
        nesting     an all-to-all, see Nesting
        degrees     to how many ranks rows go, see Degrees
        parts_back  {schedule: (MeshSpec, axis) -> in how many parts blocks come back by it over the axis, each gathered
                    while the next is on its way}
        keepings    where values that the backward reads may wait, see Keeping
        strategies  values of the option `keep`, as in `moefx.options.STRATEGIES`
        scheduler   (Options) -> who orders tasks, if no option says
        proposals   (PassContext of the planned program) -> Proposals; one is taken if a whole step is predicted to be
                    faster by it, and the next one is tried only then. Its passes know it by `Decisions.proposed_by`
        formulas    values of the option `formula` that choose what is kept: (graphs, PassContext, Machine, sizes,
                    {region: its candidate}) -> `planning.restoring.Restoring`
    Training
        chooses     (Options) -> whether choices change from call to call
        follow      (CompiledModule) -> its Follower; None: nobody follows it
    """

    name: str
    check: Callable[[Any], None] = field(default=lambda options: None)
    check_mesh: Callable[[Any, Any], None] = field(default=lambda options, mesh: None)
    only_whole: Callable[[Any], tuple[str, str] | None] = field(default=lambda options: None)
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    passes: tuple[Insertion, ...] = ()
    rules: tuple = ()
    in_call: bool = False
    rings: Callable[[Any], int] = field(default=lambda options: 0)
    homes: Callable[[Any], int] = field(default=lambda options: 1)
    axes: tuple[Axis, ...] = ()
    nesting: Nesting | None = None
    degrees: Degrees | None = None
    parts_back: Mapping[str, Callable[[Any, str], int]] = field(default_factory=dict)
    keepings: tuple[Keeping, ...] = ()
    strategies: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    formulas: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    scheduler: Callable[[Any], str | None] = field(default=lambda options: None)
    proposals: Callable[[Any], Sequence[Proposal]] = field(default=lambda ctx: ())
    chooses: Callable[[Any], bool] = field(default=lambda options: False)
    follow: Callable[[Any], Follower | None] = field(default=lambda compiled: None)


FEATURES: dict[str, Feature] = {}


def register(feature: Feature) -> None:
    FEATURES[feature.name] = feature


# ---- options and meshes


def check(options: Any) -> None:
    for feature in FEATURES.values():
        feature.check(options)


def check_mesh(options: Any, mesh: Any) -> None:
    for feature in FEATURES.values():
        feature.check_mesh(options, mesh)


def only_whole(options: Any) -> tuple[str, str] | None:
    return next(filter(None, (feature.only_whole(options) for feature in FEATURES.values())), None)


def presets() -> dict[str, Mapping[str, Any]]:
    return {name: options for feature in FEATURES.values() for name, options in feature.presets.items()}


# ---- compiling


def with_passes(entries: Sequence[Any]) -> list[Any]:
    """Passes of the core, each followed by those that features put behind it."""
    return [each for entry in entries for each in (entry, *behind(entry.name))]


def behind(name: str) -> list[Any]:
    """Those that features put behind a pass of the core, or a part of one."""
    return [each.entry for feature in FEATURES.values() for each in feature.passes if each.after == name]


def rules() -> tuple:
    return tuple(rule for feature in FEATURES.values() for rule in feature.rules)


def plan_in_call() -> bool:
    """Whether some feature plans behind the gate."""
    return any(feature.in_call for feature in FEATURES.values())


def rings(options: Any) -> int:
    return max((feature.rings(options) for feature in FEATURES.values()), default=0)


def homes(options: Any) -> int:
    return max((feature.homes(options) for feature in FEATURES.values()), default=1)


# ---- choosing


def axes() -> tuple[Axis, ...]:
    return tuple(axis for feature in FEATURES.values() for axis in feature.axes)


def of_axes(options: Any) -> dict[str, Any]:
    """{option: its value} of all axes."""
    return {axis.option: options.value_of(axis.option) for axis in axes()}


def words(options: Any) -> list[str]:
    """What options want of axes."""
    return [word for axis in axes() for word in axis.words(options.value_of(axis.option))]


def nestings() -> tuple[Nesting, ...]:
    return tuple(feature.nesting for feature in FEATURES.values() if feature.nesting is not None)


def nesting(alltoall: Any) -> Nesting | None:
    """That of this name."""
    return next((each for each in nestings() if each.name == alltoall), None)


def degrees() -> Degrees | None:
    return next((feature.degrees for feature in FEATURES.values() if feature.degrees is not None), None)


def parts_back(schedule: str, mesh: Any, axis: str) -> int:
    """In how many parts static blocks come back by a schedule over `axis`; 1: at once."""
    found = (feature.parts_back.get(schedule) for feature in FEATURES.values())
    return max((parts(mesh, axis) for parts in found if parts is not None), default=1)


def keepings() -> dict[str, Keeping]:
    return {each.name: each for feature in FEATURES.values() for each in feature.keepings}


def strategies() -> dict[str, Mapping[str, str]]:
    return {name: each for feature in FEATURES.values() for name, each in feature.strategies.items()}


def formulas() -> dict[str, Callable[..., Any]]:
    return {name: each for feature in FEATURES.values() for name, each in feature.formulas.items()}


def scheduler(options: Any) -> str | None:
    """Who orders tasks: the option, or what a feature knows to be better with the others."""
    found = (feature.scheduler(options) for feature in FEATURES.values())
    return options.scheduler or next(filter(None, found), None)


def proposals(ctx: Any) -> dict[str, Sequence[Proposal]]:
    """{room: what it proposes}."""
    return {name: made for name, feature in FEATURES.items() if (made := feature.proposals(ctx))}


# ---- training


def choose(options: Any) -> bool:
    """Whether some feature may change choices from call to call."""
    return any(feature.chooses(options) for feature in FEATURES.values())


def followers(compiled: Any) -> dict[str, Follower]:
    found = ((name, feature.follow(compiled)) for name, feature in FEATURES.items())
    return {name: follower for name, follower in found if follower is not None}
