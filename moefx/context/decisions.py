"""What passes and the planner decide about one program."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import sympy
from torch import Tensor
from torch.fx import Node

from moefx import rooms
from moefx.context.region_facts import RegionFacts, Slots
from moefx.costmodel.amounts import Amounts
from moefx.options import Options


@dataclass(frozen=True)
class Choice:
    """How one region runs; the fields are those of `Options`.

    Whoever adds a field says here what is simplest, and in `whole` whether it changes what a region is. Regions that
    share parameters (a module that is called twice) may have different choices, except for the split, which says
    how their gradients are summed. split: None: as few rows as the model allows.
    """

    chunks: int = 1
    alltoall: str = "direct"
    codec: str = "identity"
    scheduler: str = "optsche"
    split: str | None = None
    r: int | None = None

    @classmethod
    def asked(cls, options: Options) -> Choice:
        """What the options say, and the simplest of what they leave open."""
        asked = {name: options.value_of(name) for name in cls.__dataclass_fields__}
        asked["scheduler"] = rooms.scheduler(options)
        first = {name: found[0] if isinstance(found, tuple) else found for name, found in asked.items()}
        return cls(**{name: found for name, found in first.items() if found is not None})

    @property
    def whole(self) -> bool:
        """Whether the region is as it was captured, in whatever order: one chunk, exchanged directly, as it is. Whether
        the ranks along `mp` share out its rows is another question."""
        return self == Choice(scheduler=self.scheduler, split=self.split)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def words(self, *, with_chunks: bool = True) -> str:
        """In a few words, such as "2dh, 4 chunks"."""
        found = [self.alltoall, *([self.codec] if self.codec != "identity" else [])]
        found += [self.split] if self.split is not None else []
        found += [f"r = {self.r}"] if self.r is not None else []
        found += [f"{self.chunks} chunk{'s' * (self.chunks > 1)}"] if with_chunks else []
        return ", ".join(found)


class Chunk(NamedTuple):
    """A region that is one of the `n` chunks of another one."""

    of: int  # the region's number before it was cut; chunk 0 keeps it
    index: int
    n: int


WAYS = ("keep", "lean", "redo", "inside")
"""What becomes of values that the backward reads. keep: as eager autograd does, less what is cheaper to compute again
than to read. lean: all but elementwise results of what is kept. redo: nothing that can be computed, or sent, again.
inside: of rows that return (R) alone, nothing: scores are applied where the experts are (the pass weigh-inside); where
they cannot be, the rows are kept. Rooms have ways by which what lean keeps waits elsewhere (`rooms.Keeping`)."""


@dataclass(frozen=True)
class Weighing:
    """What it takes to apply the scores of a region before the last product, in one chunk. nbytes: inner rows that are
    kept twice then, weighed and not, where they are kept; again: what a pass computes and sends besides, forward and
    backward each."""

    nbytes: sympy.Expr
    again: tuple[Amounts, ...]


@dataclass(frozen=True)
class Restorable:
    """Values of one class, in one chunk, that the backward reads.

    name: of the class, the key of `Decisions.restoring`: "0.T_M" of region 0, or the path of a module. region: its
    number before it was cut, -1 outside of regions. role: "T_DI" (rows on their way to the experts), "T_M" (between
    experts' products), "T_DO" (results, on their way back), "R" (that are back), "W" (weights that were fetched),
    "weights" (that were gathered) or "dense". nbytes: what the forward keeps, by way, on the device or elsewhere.
    again: what the backward computes and sends again, by way. weighing: of rows that are back (R) which need not be
    kept if scores are applied before the last product; None: they cannot be, or are.
    """

    name: str
    region: int
    role: str
    chunk: int
    nbytes: Mapping[str, sympy.Expr]
    again: Mapping[str, tuple[Amounts, ...]]
    weighing: Weighing | None = None


@dataclass
class Decisions:
    """Of one attempt to compile.

    choices: by the planner; regions not in here run as the options say. plan: the planner's whole account of it.
    whole: leave regions whole, whatever was chosen: what the planner looks at. tentative: routings that passes made of
    what may be no MoE at all; declined: those of them that turned out to be none, and stay as they are. chunks: which
    region is a chunk of which. split: regions of which ranks with the same data take a share each; batches: those of
    them whose shares are batches of their own, by which other tokens are dropped. schedules: of every region, on a mesh
    with `mp`. slots: of regions of rows (not of their chunks) that travel. gatherable: regions that could gather their
    tokens (the baseline); nestable: by name of an all-to-all of a room, those whose rows could cross by it; sharing:
    sets of regions that read one parameter; weighable: regions whose scores could be applied before the last product;
    all four only where the planner looks. regions: what was placed. expert_buffers: Sources of what experts' weights
    are computed of besides parameters. time_of: seconds of a node; of a start: of its exchange. rates:
    how resources slow one another down. orders: what the scheduler found, graph by graph. rows:
    whether activations stay cut over `mp`, if no option says. rings: of how many chunks of a region values of one kind
    that travel are alive at once, at most, and of other kinds one; 0: of all. moved: {name of a saved value that waits
    elsewhere for the backward: its way, a room's}. restoring: by class of values (`Restorable.name`) the way of each
    chunk, the last for all that follow; classes not in here go as the options say. restorables: the classes that there
    are, with what each way costs. late: regions (not their chunks) that a plan after the gate balances,
    beside those that the options name. readers: of parameters of separate experts, the regions (not their chunks) that
    read them. spare: slots for copies on each rank, if fewer than the options say. relied: (Source, values) of inputs
    that the program is right for as long as they hold these values. proposed_by: the room whose proposal this is.
    """

    choices: dict[int, Choice] = field(default_factory=dict)
    plan: Any = None
    whole: bool = False
    tentative: set[str] = field(default_factory=set)
    declined: set[str] = field(default_factory=set)
    chunks: dict[int, Chunk] = field(default_factory=dict)
    split: set[int] = field(default_factory=set)
    batches: set[int] = field(default_factory=set)
    schedules: dict[int, str] = field(default_factory=dict)
    gatherable: set[int] = field(default_factory=set)
    nestable: dict[str, set[int]] = field(default_factory=dict)
    sharing: list[set[int]] = field(default_factory=list)
    weighable: set[int] = field(default_factory=set)
    regions: dict[int, RegionFacts] = field(default_factory=dict)
    num_user_outputs: int = 0
    expert_buffers: dict[str, Any] = field(default_factory=dict)
    time_of: Callable[[Node], float] = lambda node: 1.0
    rates: Mapping[tuple[str, str], float] = field(default_factory=dict)
    orders: list[Any] = field(default_factory=list)
    rows: bool = False
    rings: int = 0
    moved: dict[str, str] = field(default_factory=dict)
    restoring: dict[str, tuple[str, ...]] = field(default_factory=dict)
    restorables: list[Restorable] = field(default_factory=list)
    slots: dict[int, Slots] = field(default_factory=dict)
    late: set[int] = field(default_factory=set)
    readers: dict[tuple[str, ...], set[int]] = field(default_factory=dict)
    spare: int | None = None
    relied: list[tuple[Any, Tensor]] = field(default_factory=list)
    proposed_by: str = ""

    def asked(self) -> Decisions:
        """The same before the planner chose anything."""
        return replace(self, whole=False, choices={})
