"""What a user may choose. Every field has a default that is right for most."""

from __future__ import annotations

import difflib
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from moefx import features, rooms
from moefx.errors import MoefxError, UnsupportedUse
from moefx.options.declare import (
    COUNT,
    Allowed,
    Group,
    as_group,
    documented,
    first_of,
    group,
    is_whole,
    one_of,
    option,
    or_none,
    said,
)
from moefx.options.groups import OTHER_ROWS, AllToAll, Debug, Parallel, Placement

# {option: (what it names, the names there are)}, of what users register: said by the modules that keep it.
NAMES: dict[str, tuple[str, Callable[[], Iterable[str]]]] = {}

# Raise MoefxError for what options together cannot be: of modules that know what values mean.
CHECKS: list[Callable[[Options], None]] = []

Arm = tuple[tuple[str, Any], ...]  # choices that differ from those of the options, by name: (("chunks", 2), ("r", 1))
ARMS = ("chunks", "alltoall", "scheduler", "split", "r")  # what may be another one from call to call

WEIGHTS = "weights"  # the role of parameters that were gathered
# Values of `keep`: what becomes of values that the backward reads, by their role in a region ("": all others), see
# `Decisions.restoring`. Rooms have more (`rooms.strategies`).
STRATEGIES: dict[str, Mapping[str, str]] = {"eager": {}, "lean": {"": "lean"}, "auto": {}}
_STRATEGIES = ("eager", "lean", *dict(features.option_values("keep")), "auto")

# Machines are looked up later.
_MACHINE = Allowed(lambda v: v is None or isinstance(v, (str, os.PathLike)) or hasattr(v, "collectives"),
                   "a file, the name of a preset, a Machine or None")
_BYTES = Allowed(lambda v: v is None or ((is_whole(v) or isinstance(v, float)) and 0 < v < float("inf")),
                 "a number of bytes above 0 or None")


@documented
@dataclass(frozen=True, repr=False)
class Options(Group):
    """Options of `moefx.compile`, which also takes each as a keyword: `moefx.compile(model, mesh, chunks=4, ep=8)`.

    With a `machine` the planner chooses whatever is None. Without one, None means the first, simplest value.
    A group takes the group, or a value for its first field: `placement="auto"`. Each group has its own help().
    """

    machine: Any = option(None, _MACHINE, """
        How fast the cluster computes and sends: a file of `python -m moefx calibrate`, the name of a preset, or a
        Machine.""", told=False)
    chunks: int | None = option(None, or_none(COUNT), """
        How many chunks to cut every MoE layer into, so that communication hides behind computation.""")
    alltoall: AllToAll = group(AllToAll, 'how rows travel, as "direct" or "2dh".')
    scheduler: str | None = option(
        None, Allowed(lambda v: v is None or isinstance(v, str), "the name of a scheduler or None"), """
        What orders tasks: "optsche" (ScheMoE), "sequential" (no overlap), "heuristic", "optimal", or one that you
        registered.""")
    keep: str | None = option(None, or_none(one_of(*_STRATEGIES)), """
        What the forward keeps for the backward. "eager": what autograd keeps. "lean": elementwise results are computed
        again.{} "auto": whatever takes the least time within the memory_limit, layer by layer. None: "auto" if
        possible.
        """.format(said(features.option_values("keep"))))
    memory_limit: float | None = option(None, _BYTES, """
        Bytes that one rank may need at its peak, with parameters and gradients, but without the optimizer's state. With
        a machine the planner chooses within it.""")
    placement: Placement = group(Placement, "copies of busy experts.")
    parallel: Parallel = group(Parallel, "what is spread over which ranks.", short=False)
    vars().update(features.option_fields())  # what rooms add
    __annotations__.update(dict.fromkeys(features.option_fields(), "Group"))
    debug: Debug = group(Debug, "checks, time-outs, dumps.", short=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, (what, names) in NAMES.items():
            found = self.value_of(name)
            for each in (found,) if isinstance(found, str) else found or ():
                if each not in names():
                    raise UnsupportedUse(f"there is no {what} '{each}'", where="moefx.Options",
                                         hint=f"one of {', '.join(names())}")  # fmt: skip
        self._check_placement()
        for check in CHECKS:
            check(self)

    def _check_placement(self) -> None:
        policy, where = self.placement.policy, "moefx.Options"
        if policy is None:
            return
        for name, nearest, fits in (("alltoall", "'direct'", self.alltoall.algorithm not in OTHER_ROWS),
                                    ("esp", "1", self.parallel.esp in (None, 1)),
                                    ("split", "'s2-tokens'", self.parallel.split not in ("baseline", "s3"))):
            if not fits:
                raise MoefxError(f"{name} is {self.value_of(name)!r} with a placement of experts, for which every row "
                                 "goes to one rank that has its expert whole", where=where,
                                 hint=f"{name}={nearest}, or placement=None")  # fmt: skip

    @classmethod
    def named(cls, **values: Any) -> Options:
        """Options by name, including those in groups: `Options.named(chunks=2, ep=4)`."""
        return cls().changed(**values)

    @classmethod
    def preset(cls, name: str, **changes: Any) -> Options:
        """The choices of a published system, or of another preset. Raises MoefxError for an unknown name."""
        known = rooms.presets()
        if not isinstance(name, str) or name not in known:
            raise MoefxError(f"there is no preset '{name}'", hint=f"one of {', '.join(known)}" if known else None)
        return cls.named(**{**known[name], **changes})

    def changed(self, **values: Any) -> Options:
        """The same options with other values, by name. One value for a group is the value of its first field."""
        top, inner = {}, defaultdict(dict)
        for name, value in values.items():
            own = self.__dataclass_fields__.get(name)
            if own is not None and (name not in NAMED or NAMED[name][0] is None or isinstance(value, Group)):
                top[name] = value
            elif name in NAMED:
                if own is not None:
                    as_group(own, value, type(self))
                owner, short = NAMED[name]
                inner[owner][short] = value
            else:
                raise self._no_option(name)
        for owner, given in inner.items():
            top[owner] = replace(top.get(owner, getattr(self, owner)), **given)
        return replace(self, **top) if top else self

    def value_of(self, name: str) -> Any:
        """That of an option by its name alone."""
        owner, own = NAMED[name]
        return getattr(self if owner is None else getattr(self, owner), own)

    def is_open(self, name: str) -> bool:
        """Whether this choice is left to a planner, or some of it."""
        if name == "split" and self.formula not in (None, *rooms.formulas()):
            return False
        return self.value_of(name) is None or isinstance(self.value_of(name), tuple)

    @property
    def formula(self) -> str | None:
        """`Parallel.formula`; None, too, where what it would choose is named."""
        formula = self.parallel.formula
        return formula if (self.keep if formula in rooms.formulas() else self.parallel.split) is None else None

    def told(self) -> dict[str, str]:
        """What has to be the same on all ranks; one may verify for itself, and find the machine elsewhere."""
        return {name: repr(self.value_of(name)) for name, (owner, own) in NAMED.items()
                if (type(self) if owner is None else type(getattr(self, owner))).__dataclass_fields__[own]
                .metadata["told"]}  # fmt: skip

    @classmethod
    def _no_option(cls, name: str) -> MoefxError:
        owner, own = NAMED.get(name, (None, name))
        if owner is None:
            names = list(dict.fromkeys((*cls.__dataclass_fields__, *NAMED)))
            near = difflib.get_close_matches(name, names, 1)
            hint = f"did you mean {near[0]}?" if near else f"one of {', '.join(names)}"
            return MoefxError(f"there is no option '{name}'", where="moefx.Options", hint=hint)
        kind = type(getattr(cls, owner)).__name__
        return MoefxError(f"there is no option '{name}'", where="moefx.Options", hint=f"{owner}=moefx.{kind}({own}=..)")


def _by_name() -> Mapping[str, tuple[str | None, str]]:
    """The first field of a group that takes a value goes by the group's name."""
    found: dict[str, tuple[str | None, str]] = {}
    for each in fields(Options):
        kind = each.metadata.get("group")
        if kind is None:
            found[each.name] = None, each.name
            continue
        for inner in fields(kind):
            is_first = each.metadata["short"] and inner is first_of(kind)
            found[each.name if is_first else inner.name] = each.name, inner.name
    return found


NAMED = _by_name()  # {an option's name: its group, and its name in there}


def by_kinds() -> bool:
    """Whether equal layers are captured, differentiated and printed once; not with MOEFX_LAYERS=0."""
    return os.environ.get("MOEFX_LAYERS", "1") != "0"
