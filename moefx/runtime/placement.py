"""Who holds copies of which experts in a call: what calls counted, what is planned by it, and plans as tensors.

    call s       counts how many rows every rank along the axis of the experts has for every expert
    call s + 1   at its start a thread begins to plan by these counts and those of the calls before
    call s + 2   at its start the thread is joined, and what it planned is in force

Calls that train are counted; others use what is in force, and teach nothing. Nothing is sent for it: ranks along the
axis know the same counts, and a plan is a pure function of integers. Headers of exchanges tell whether ranks have the
same tables (`StepState.tables`).
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from moefx.placement.after_gate import InCall
from moefx.placement.loads import Window
from moefx.placement.policies import Policy
from moefx.placement.tables import BITS, Plan, homes_only, of_places

if TYPE_CHECKING:
    from moefx.runtime.session import Session

Planner = Callable[["Region", np.ndarray], Plan]

# Of all rows, the part that must go to other experts, or to others from each rank, before a plan is worth another look:
# a window of five calls has less noise, and "auto" takes milliseconds of a core that computes.
CHANGE, CHANGE_BY_RANK = 1 / 32, 1 / 4


@dataclass(frozen=True, eq=False)
class Decided:
    """A plan with as many places per expert as programs take. digest: of it. loads [n, E]: the rows that it was made
    for; None: for none, experts are at their homes."""

    plan: Plan
    digest: int
    loads: np.ndarray | None = None


@dataclass(frozen=True, eq=False)
class Tables(Decided):
    """What programs of this rank take of it; never written to. moves [E, P] int64: global slots, in the host's memory;
    table: the same on the device; ends [E, P] int64: this rank's, on the device."""

    moves: Tensor = field(kw_only=True)
    table: Tensor = field(kw_only=True)
    ends: Tensor = field(kw_only=True)

    @staticmethod
    def of(plan: Plan, rank: int, device: torch.device, decided: Decided | None = None) -> Tables:
        """Of the rank at this place along the axis of the experts."""
        decided = decided or Decided(plan, _digest(plan))
        moves, ends = (torch.from_numpy(np.ascontiguousarray(each)) for each in (plan.slots, plan.ends[rank]))
        if device.type == "cuda":
            moves, ends = moves.pin_memory(), ends.pin_memory()
        table, own = (each.to(device, non_blocking=True) for each in (moves, ends))
        return Tables(plan, decided.digest, decided.loads, moves=moves, table=table, ends=own)


def digest_of(tables: Iterable[Tables]) -> int:
    """Of the tables of a call, for headers; fits int64."""
    return _number(*(each.digest.to_bytes(8, "little", signed=True) for each in tables))


def _digest(plan: Plan) -> int:
    return _number(plan.slots.tobytes(), plan.ends.tobytes())


def _number(*content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(b"".join(content), digest_size=8).digest(), "little", signed=True)


@dataclass
class Region:
    """The experts of a region, wherever programs use them. name: of their first parameter in the model.

    axis: along which they are spread over `ranks` places, of which this rank has `place`; `per_node` consecutive ones
    share a node. owners [E]: where each expert lives. room, spare: slots of every rank, see `placement.tables`.
    tables: in force. planned: what comes into force with the next call that trains. counted [n, E]: by the last one.
    """

    name: str
    axis: str
    ranks: int
    place: int
    per_node: int
    owners: tuple[int, ...]
    room: int
    spare: int
    device: torch.device
    costs: Any = None
    window: Window = field(default_factory=Window)
    planned: Decided | None = None
    counted: np.ndarray | None = None

    def __post_init__(self) -> None:
        self.tables = Tables.of(self.decided(self.homes).plan, self.place, self.device)

    @property
    def homes(self) -> Plan:
        """The plan without copies."""
        return homes_only(self.owners, self.ranks, self.cap)

    @property
    def cap(self) -> int:
        """Slots of every rank."""
        return self.room + self.spare

    def use(self, decided: Decided) -> None:
        """It is in force from now on. Tensors stay where nothing changes."""
        if decided.digest == self.tables.digest:
            self.tables = replace(self.tables, loads=decided.loads)
        else:
            self.tables = Tables.of(decided.plan, self.place, self.device, decided)

    def decided(self, plan: Plan, loads: np.ndarray | None = None) -> Decided:
        """A plan that was made for these loads. Experts have a place for every rank, or without copies one. Raises
        MoefxError for tables that are wrong."""
        more = ((0, 0), (0, (self.ranks if self.spare else 1) - plan.slots.shape[1]))
        wide = Plan(np.pad(plan.slots, more, constant_values=-1),
                    np.pad(plan.ends, ((0, 0), *more), constant_values=1 << BITS))  # fmt: skip
        wide.check(self.owners, self.room, self.spare)
        return Decided(wide, _digest(wide), loads)

    def count(self, loads: np.ndarray) -> None:
        """loads [n, E]: rows per expert, of one chunk of the region."""
        self.counted = loads if self.counted is None else self.counted + loads

    def loads(self, traffic: np.ndarray) -> np.ndarray:
        """Rows per global slot [n, n*cap] -> rows per expert [n, E], under the tables in force."""
        slots = self.tables.plan.slots
        return (traffic[:, slots] * (slots >= 0)).sum(2)


class _Job:
    """One round of planning, on a thread that ends with it."""

    def __init__(self, work: Sequence[tuple[Region, np.ndarray]], planner: Planner) -> None:
        self.axis, self.doing = work[0][0].axis, ""  # the region that is planned
        self.plans: Future[list[Decided]] = Future()
        self.regions = [region for region, _ in work]
        self.owners = [region.owners for region in self.regions]
        threading.Thread(target=self._run, args=(work, planner), name="moefx placement", daemon=True).start()

    def _run(self, work: Sequence[tuple[Region, np.ndarray]], planner: Planner) -> None:
        plans = []
        try:
            for region, loads in work:
                self.doing = region.name
                plans.append(region.decided(planner(region, loads), loads))
        except BaseException as error:
            self.plans.set_exception(error)
        else:
            self.plans.set_result(plans)


class Placements:
    """Of one compiled model. policy: None: experts are at their homes alone."""

    def __init__(self, policy: Policy | None = None) -> None:
        self.policy = policy
        self.regions: dict[str, Region] = {}
        self.is_training = False
        self.updates = 0  # optimizer steps since homes moved; those of several optimizers behind one call are one
        self._is_stepped = True  # since the last call that trains
        self._job: _Job | None = None
        self._restored: dict[str, Any] = {}  # of regions that no program has asked for yet

    @property
    def plans(self) -> bool:
        """Whether copies are planned here, and not by the step itself alone."""
        return self.policy is not None and self.policy.ahead is not None

    @property
    def in_call(self) -> InCall | None:
        return None if self.policy is None else self.policy.in_call

    def plan(self, region: Region, loads: np.ndarray) -> Plan:
        """By predicted loads [n, E]: the rows that every rank will have for every expert."""
        return self.policy.ahead(loads, region.owners, (region.room, region.spare), region.costs, region.per_node)

    def weighed(self, name: str | None) -> Any:
        """What a plan after the gate of a region is weighed by; None: it is made whatever it costs."""
        is_weighed = self.policy is not None and self.policy.is_weighed and name in self.regions
        return self.regions[name].costs if is_weighed else None

    def of_call(self, region: Region, loads: np.ndarray) -> Plan:
        """What the last call, which had these rows per expert, [n, E], planned for itself after its gate."""
        slots, quota = self.in_call(loads, region.tables.plan.slots, (region.room, region.spare), region.per_node,
                                    self.weighed(region.name))  # fmt: skip
        return of_places(quota, np.arange(len(slots)), slots)

    def add(self, region: Region) -> None:
        """A region that a program has for the first time."""
        self.regions[region.name] = region
        self._restore(region, self._restored.pop(region.name, None))

    def begin_call(self, session: Session, *, is_training: bool) -> None:
        """A call of the model begins. Raises CollectiveError where planning failed, or takes longer than a session
        waits for others."""
        self.is_training = is_training and not session.is_fake
        if not self.is_training:
            return
        self._is_stepped = False
        self._join(session)
        work = []
        for region in self.regions.values():
            if region.planned is not None:
                region.use(region.planned)
                region.planned = None
            if region.counted is not None:
                region.window.add(region.counted)
                mean = region.window.mean()
                if region.spare and (self.policy.even_if_equal or has_changed(region.tables.loads, mean)):
                    work.append((region, mean))
                region.counted = None
        if work and self.plans:
            self._job = _Job(work, self.plan)

    def note_step(self) -> None:
        """An optimizer steps."""
        self.updates += not self._is_stepped
        self._is_stepped = True

    def move(self, names: Collection[str], owners: tuple[int, ...]) -> None:
        """The experts of regions live elsewhere from now on. What was planned for their former homes is dropped."""
        for name in names:
            if name in self.regions:
                region = self.regions[name]
                region.owners, region.planned, mean = owners, None, region.window.mean()
                region.use(self._for(region, mean))

    def _for(self, region: Region, loads: np.ndarray | None) -> Decided:
        plans = loads is not None and region.spare and self.plans
        return region.decided(self.plan(region, loads), loads) if plans else region.decided(region.homes)

    def learn(self, name: str, traffic: np.ndarray) -> None:
        """What a chunk of a region exchanges in the current call: rows per global slot [n, n*cap]."""
        if self.is_training:
            self.count(name, self.regions[name].loads(traffic))

    def count(self, name: str, loads: np.ndarray) -> None:
        """The same by expert [n, E], of the whole region."""
        if self.is_training:
            self.regions[name].count(loads)

    def _join(self, session: Session) -> None:
        job, self._job = self._job, None
        if job is None:
            return
        seconds = session.timeout.total_seconds()
        with session.guard("waiting for the placement of experts", job.axis):
            try:
                plans = job.plans.result(seconds)
            except TimeoutError as error:
                raise RuntimeError(f"planning {job.doing} takes longer than {seconds:g} s") from error
            except Exception as error:
                raise RuntimeError(f"planning {job.doing}: {type(error).__name__}: {error}") from error
        for region, owners, plan in zip(job.regions, job.owners, plans):
            if region.owners == owners:  # they have not moved meanwhile
                region.planned = plan

    def state(self, session: Session) -> dict[str, Any]:
        """What a run needs to go on with the same plans, which are those of the same loads: plain data."""
        self._join(session)
        return {"updates": self.updates, "regions": {name: {
            "owners": list(region.owners), "slots": [region.ranks, region.room, region.spare],
            "window": torch.tensor(region.window.state()), "counted": _saved(region.counted),
            "tables": _saved(region.tables.loads), "is_planned": region.planned is not None,
            "planned": _saved(region.planned and region.planned.loads),
        } for name, region in self.regions.items()}}  # fmt: skip

    def restore(self, session: Session, state: dict[str, Any]) -> None:
        """Go on from what `state` gave; regions whose homes or slots are others begin with their homes."""
        self._join(session)
        self.updates, self._restored = state.get("updates", 0), dict(state.get("regions", {}))
        for name, region in self.regions.items():
            self._restore(region, self._restored.pop(name, None))

    def _restore(self, region: Region, state: dict[str, Any] | None) -> None:
        homes = [*region.owners], [region.ranks, region.room, region.spare]
        fits = state is not None and homes == (state["owners"], state["slots"])
        counted, tables, planned = (_loaded(state[name] if fits else None) for name in ("counted", "tables", "planned"))
        region.window, region.counted, region.planned = Window(), counted, None
        region.use(self._for(region, tables))
        if fits:
            region.window.restore(state["window"].tolist())
            region.planned = self._for(region, planned) if state["is_planned"] else None


def has_changed(planned: np.ndarray | None, loads: np.ndarray) -> bool:
    """Whether loads [n, E] are others than those that a plan was made for. None: it was made for none."""
    if planned is None:
        return True
    of_all, by_rank = (np.abs(a - b).sum() for a, b in ((planned.sum(0), loads.sum(0)), (planned, loads)))
    total = loads.sum()
    return bool(of_all > CHANGE * total or by_rank > CHANGE_BY_RANK * total)


def _saved(loads: np.ndarray | None) -> Tensor | None:
    return None if loads is None else torch.from_numpy(loads)


def _loaded(loads: Tensor | None) -> np.ndarray | None:
    return None if loads is None else loads.numpy()
