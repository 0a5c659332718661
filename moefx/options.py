"""What a user may choose. Every field has a default that is right for most."""

from __future__ import annotations

import difflib
import inspect
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

from moefx.errors import MoefxError, UnsupportedUse
from moefx.presets import PRESETS, described

# {option: (what it names, the names there are)}, of what users register: said by the modules that keep it.
NAMES: dict[str, tuple[str, Callable[[], Iterable[str]]]] = {}

Arm = tuple[tuple[str, Any], ...]  # choices that differ from those of the options, by name: (("chunks", 2), ("r", 1))
ARMS = ("chunks", "alltoall", "scheduler", "schedule", "r")  # what may be another one from call to call


@dataclass(frozen=True)
class Options:
    """Options of `moefx.compile`. Raises MoefxError for an option that there is not, and for a value that none has,
    or, as UnsupportedUse, for a name that nobody has registered.

    verify: 0 nothing, 1 structure and meaning of every graph after every pass (default), 2 also runs every graph
        before and after each pass on random inputs and compares. None reads MOEFX_VERIFY.
    timeout_s: seconds after which a rank that waits in a collective gives up and names who it waits for.
    compare_every: after so many steps (calls with gradients, outside of no_sync), and at first after 1, 2, 4, .., all
        ranks compare how many optimizer steps they made, and the parameters of which they have copies, by the sum of
        their bits: a rank that skips an update or takes another learning rate is named. 0 never does, for training in
        which copies are meant to differ.
    dynamic: True keeps the sizes of the inputs symbolic, wherever the model allows it: one program for batches of all
        sizes, also of different ones on different ranks. False makes a program for every size (torch.compile's
        dynamic=False), in half of the time, in a fifth for models that cut the sequence into pieces (gated delta rule,
        Mamba); batches must then be of one size on all ranks.
    keep: what the forward keeps for the backward: "eager" keeps what eager autograd keeps, less the outputs of
        cheap activation functions (GELU is none) whose inputs are kept anyway; "lean" recomputes every elementwise
        result it can. "mpipemoe-s1" to "mpipemoe-s4" (MPipeMoE, table 2) keep neither the rows that arrive at the
        experts nor those between the experts' products: both wait in the host's memory (s1); what arrived is sent
        again, the rest waits (s2); what arrived waits, the rest is computed again (s3); both again (s4). At most two
        chunks of a region are restored at a time. "mpipemoe": of each region, with a machine, the one of the four that
        its equation 10 says is fastest. "auto": with a machine and a memory_limit, what takes least time
        within the limit, chosen for every layer, kind of values and chunk, and whether scores are applied before the
        experts' last product, which rounds otherwise. None: "auto" where it can be, else "eager".
    ep, esp: on a mesh of `dp` and `mp` alone, the ranks over which experts are spread, and over which every expert is
        cut: the same ranks, in mesh order, are [copies, ep, esp], `esp` fastest. None: the mesh names them; or the
        planner chooses, with a machine, when the first program is compiled; or 1.
    machine: how fast the cluster computes and sends: a file of `python -m moefx calibrate`, the name of a preset
        (`moefx.costmodel.presets`) or a Machine. With it the planner chooses what is None below, see `moefx.explain`;
        without it nothing is chosen and None is the first of the values.
    chunks: 1, 2, ..: into how many chunks every MoE region is cut, so that communication hides behind computation.
    alltoall: "direct", "1dh" (HetuMoE), "2dh" (Tutel), "pipe" (ScheMoE), or one that was registered. "dedup": directly,
        and a token that goes to several experts of one node crosses to it once; sums have another order then. Of
        experts that are cut over `esp` this needs the schedule "s3". Several, ("direct", "2dh"): the first one; with a
        machine whichever of them is fastest.
    dedup: True is the all-to-all "dedup" by another name.
    scheduler: who orders computation and communication: "optsche" (ScheMoE's order), "sequential" (no overlap),
        "heuristic", "optimal", or one that was registered. Whole regions keep the order of the model, with exchanges
        started early and waited for late, unless a scheduler is named.
    schedule: which rows the ranks along `mp` take, which read the same data (Parm). None: "s1" as far as the model
        allows; with a machine the planner chooses. "s1": each its share of the tokens, from before the gate on; in a
        layer with capacities with a capacity of its own, so that other tokens are dropped than in the eager model.
        "s2-tokens": the same from behind the gate on. "s2": of a layer with capacities, each its share of every
        expert's capacity, and of one chunk, exchanged directly and without a codec, one part is gathered while the next
        comes back (SAA); of others as "s2-tokens". "s3": as None, and every row goes over `ep` once, to one of the
        ranks with a part of its expert, which gather what arrived over `esp`. "baseline": all of them all rows, and
        ranks along `esp` gather their tokens. What is named and cannot be is an error. "parm", "tutel": see
        the presets.
    rows: True keeps activations between attention and MoE layers, or MLPs, cut along tokens over `mp` (Megatron's
        sequence parallelism): norms and residuals are computed of a rank's own tokens. What cannot be is an error.
        False gathers tokens behind every layer, and so does None without a machine; with one the planner chooses.
    r: to how many of the ranks along `esp`, which have parts of the same experts, a token's rows go (Tutel's adaptive
        parallelism): a divisor of their number. The other ranks' parts of the weights are gathered before the layer,
        and gradients are summed and cut behind it. As many as there are: nothing is gathered. 0: all weights are
        gathered, over `ep` too, and no token moves. Parameters live in the same places for all r, and r may change
        from call to call (`CompiledModule.use`). None: as many as there are; with a machine the planner chooses, unless
        `schedule` is named, and 0 only within a `memory_limit`.
    tune: what is chosen anew while training goes on, for batches of each size (powers of two). "off": nothing. "model":
        what the cost model predicts for that size; it needs a machine. "online": the two or three that it predicts to
        be fastest are measured in real steps, and the fastest is kept; ranks agree by what they exchange anyway.
        `CompiledModule.tuning` tells what changed, and why. A file that `tuning.save` wrote (*.json): every call has
        the choices that it had in that run.
    tune_file: where "online" remembers what it measured, by machine and model; None: nowhere.
    codec: what rows are sent as: "identity", "bf16", "int8", "fp8-e4m3", "fp8-e5m2" (a scale per row), "zfp" (a byte an
        entry, in blocks, see `moefx.transport.zfp`), or one that was registered. All but the first change numbers. None
        is used unless it is named here, or `lossy` allows the planner to take bf16 or int8.
    memory_limit: bytes that a forward or a backward may need at its peak on one rank, with parameters and gradients,
        without the optimizer's state, see docs/explain.md; predicted for the sizes it is compiled with and balanced
        routing. With a machine the planner chooses within it, and spreads experts so that they fit with their gradients
        and Adam's `state`; what cannot be kept is an error.
    state: dtype of Adam's two moments, and of a master copy of weights that are narrower than it, as an optimizer holds
        them that you bring: "float32", "bfloat16" or "float16". Experts are spread so that they fit with it
        (`memory_limit`), and `moefx.plan` counts it; nothing is trained otherwise by it.
    placement: who holds copies of which experts, from call to call, without a new program. None: nobody, experts are at
        their homes alone. Else every rank has `spare` slots for copies, and rows go to copies by shares. Planned beside
        the steps, from what the last five counted: "hecate" (Algorithm 1), "balanced" (ranks get equally many rows, as
        nearly as copies allow), "auto" (what takes least time on the `machine`, be it no copies). "exact": in the
        step, from the rows that there are: ranks get equally many, to within one; so does "auto" in layers where copies
        may leave as late as that, if they save time. "calibrated": beside the steps, as "auto" or without a machine
        "balanced"; in the step copies come that the forecast lacks, if they save time. "fastermoe": in the step, too:
        all ranks get a copy of experts of which its performance model says that it pays, and keep their rows for them.
        Not for layers with capacities, nor for experts that are cut over `esp`, nor with "dedup", "baseline" or "s3",
        where rows go to several ranks.
    spare: how many copies a rank may hold of experts of a layer, beside the experts that live there. 0: homes alone
        move (`rehome_every`).
    rehome_every: after so many optimizer steps experts move for good, with their optimizer's state, so that nodes have
        equal loads of those that have no copies (Hecate, Algorithm 2). With a `placement`, which counts. 0: never.
    ranks_per_node: consecutive ranks of the mesh on one node, for the all-to-alls that care; None: the machine's, or
        what torchrun says.
    shard_dense: True keeps of every parameter outside of the experts only a share of its rows on each rank that reads
        data of its own, with its gradient and the optimizer's state (FSDP, ZeRO-3): a layer's parameters are gathered
        before they are used, at most two layers at once, and again in the backward, unless `keep` is "eager"; gradients
        are summed and cut layer by layer, in every micro-step of `no_sync`. Parameters of one dim, and those with fewer
        rows than there are ranks, stay whole. Not with `mp`.
    strict: False keeps an MoE that cannot be raised as it is, on every rank and data-parallel, and says so once.
    dump_dir: folder to write every graph and the emitted code to; None reads MOEFX_DUMP.
    """

    verify: int | None = None
    timeout_s: float = 600.0
    compare_every: int = 100
    dynamic: bool = True
    keep: str | None = None
    ep: int | None = None
    esp: int | None = None
    machine: Any = None
    chunks: int | None = None
    alltoall: str | tuple[str, ...] | None = None
    dedup: bool = False
    scheduler: str | None = None
    schedule: str | None = None
    rows: bool | None = None
    r: int | None = None
    tune: str | os.PathLike = "off"
    tune_file: str | os.PathLike | None = None
    codec: str = "identity"
    lossy: bool = False
    memory_limit: float | None = None
    state: str = "float32"
    placement: str | None = None
    spare: int = 2
    rehome_every: int = 0
    ranks_per_node: int | None = None
    shard_dense: bool = False
    strict: bool = True
    dump_dir: str | None = None

    def __new__(cls, *_: Any, **given: Any) -> Options:
        for name in given:
            if name not in cls.__dataclass_fields__:
                near = difflib.get_close_matches(name, cls.__dataclass_fields__, 1)
                known = f"did you mean {near[0]}?" if near else f"one of {', '.join(cls.__dataclass_fields__)}"
                raise MoefxError(f"there is no option '{name}'", where="moefx.Options", hint=known)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name, (allows, allowed) in _ALLOWED.items():
            found = getattr(self, name)
            if not allows(found):
                raise MoefxError(f"{name} is {found!r}", where="moefx.Options", hint=allowed)
        for option, (what, names) in NAMES.items():
            found = getattr(self, option)
            for name in (found,) if isinstance(found, str) else found or ():
                if name not in names():
                    raise UnsupportedUse(f"there is no {what} '{name}'", where="moefx.Options",
                                         hint=f"one of {', '.join(names())}")  # fmt: skip
        if self.dedup and self.alltoall not in (None, "dedup"):
            raise MoefxError(f"dedup is True, and the all-to-all '{self.alltoall}'", where="moefx.Options",
                             hint="one of the two")  # fmt: skip
        if self.dedup:
            object.__setattr__(self, "alltoall", "dedup")
        self._check_placement()

    def _check_placement(self) -> None:
        if self.placement is None:
            if self.rehome_every:
                raise MoefxError(f"rehome_every is {self.rehome_every} without a placement, which counts what experts "
                                 "move by", where="moefx.Options", hint="placement='balanced'")  # fmt: skip
            return
        if self.placement in AFTER_GATE and not self.spare:
            raise MoefxError(f"placement is {self.placement!r} with no room for copies", where="moefx.Options",
                             hint="spare=1")  # fmt: skip
        for name, nearest, fits in (("alltoall", "'direct'", self.alltoall != "dedup"),
                                    ("esp", "1", self.esp in (None, 1)),
                                    ("schedule", "'s2-tokens'", self.schedule not in ("baseline", "s3"))):  # fmt: skip
            if not fits:
                raise MoefxError(f"{name} is {getattr(self, name)!r} with a placement of experts, for which every row "
                                 "goes to one rank that has its expert whole", where="moefx.Options",
                                 hint=f"{name}={nearest}, or placement=None")  # fmt: skip

    @classmethod
    def preset(cls, name: str, **changes: Any) -> Options:
        """The choices of a published system on top of expert parallelism, `changes` made to them.

        Raises MoefxError for a name that is none of these:
        """
        if not isinstance(name, str) or name not in PRESETS:
            raise MoefxError(f"there is no preset '{name}'", hint=f"one of {', '.join(PRESETS)}")
        return replace(cls(**PRESETS[name].options), **changes)

    def changed(self, arm: Arm) -> Options:
        """With the choices of an arm in place of these."""
        return replace(self, **dict(arm)) if arm else self

    def is_open(self, name: str) -> bool:
        """Whether this choice is left to a planner, or some of it."""
        return getattr(self, name) is None or isinstance(getattr(self, name), tuple)

    @property
    def forced(self) -> str | None:
        """The schedule that all regions have; None: each has its own."""
        return None if self.schedule in (PARM, TUTEL) else self.schedule

    def told(self) -> dict[str, str]:
        """What has to be the same on all ranks; a rank may write and verify for itself, and may find the file of the
        machine elsewhere."""
        return {f.name: repr(getattr(self, f.name)) for f in fields(self)
                if f.name not in ("verify", "timeout_s", "machine", "dump_dir", "tune_file")}  # fmt: skip


WEIGHTS = "weights"  # the role of parameters that were gathered
# What becomes of values that the backward reads, by their role in a region ("": all others), see `Decisions.restoring`.
STRATEGIES: dict[str, dict[str, str]] = {
    "eager": {},
    "lean": {"": "lean"},
    "mpipemoe-s1": {"T_DI": "offload", "T_M": "offload", "R": "inside"},
    "mpipemoe-s2": {"T_DI": "redo", "T_M": "offload", "R": "inside"},
    "mpipemoe-s3": {"T_DI": "offload", "T_M": "redo", "R": "inside"},
    "mpipemoe-s4": {"T_DI": "redo", "T_M": "redo", "R": "inside"},
    "auto": {},
    "mpipemoe": {},
}
PLACEMENTS = ("hecate", "balanced", "calibrated", "exact", "fastermoe", "auto")
AFTER_GATE = ("calibrated", "exact", "fastermoe")  # those that plan in the call, by the rows that there are
SCHEDULES = ("baseline", "s1", "s2", "s2-tokens", "s3")
STATES = {"float32": 4, "bfloat16": 2, "float16": 2}  # bytes of a number
TUNING = ("off", "model", "online")
PARM = "parm"  # one of "s1" and "s2" by a formula
TUTEL = "tutel"  # as None where nobody chooses, and r is chosen
MPIPEMOE = "mpipemoe"  # one of its four strategies by a formula

# What help() shows: that of the fields, and not of __new__, which takes anything.
Options.__signature__ = inspect.signature(partial(Options.__init__, None))
Options.preset.__func__.__doc__ += described()


def _is_whole(number: Any) -> bool:
    return isinstance(number, int) and not isinstance(number, bool)


def _is_count(found: Any) -> bool:
    return found is None or (_is_whole(found) and found >= 1)


def _are_names(found: Any) -> bool:
    is_some = isinstance(found, tuple) and len(found) > 0
    return is_some and all(isinstance(name, str) and name != "dedup" for name in found)


def _is_time(found: Any) -> bool:  # the last comparison is false for inf and nan, too
    return (_is_whole(found) or isinstance(found, float)) and 0 < found <= 1e9


# What every field may be, and the words for it. Machines are looked up later.
_ALLOWED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "verify": (lambda v: v is None or (_is_whole(v) and v in (0, 1, 2)),
               "0: nothing; 1: structure and meaning; 2: also run and compare; None: what MOEFX_VERIFY says"),
    "timeout_s": (_is_time, "a number of seconds above 0, at most 1e9"),
    "compare_every": (lambda v: _is_whole(v) and v >= 0, "a number of steps, or 0 for never"),
    "dynamic": (lambda v: isinstance(v, bool), "True or False"),
    "keep": (lambda v: v is None or (isinstance(v, str) and v in STRATEGIES),
             f"one of {', '.join(map(repr, STRATEGIES))}, or None"),
    "machine": (lambda v: v is None or isinstance(v, (str, os.PathLike)) or hasattr(v, "collectives"),
                "a file, the name of a preset, a Machine or None"),
    "ep": (_is_count, "1, 2, .. or None"),
    "esp": (_is_count, "1, 2, .. or None"),
    "chunks": (_is_count, "1, 2, .. or None"),
    "alltoall": (lambda v: v is None or isinstance(v, str) or _are_names(v),
                 "the name of an all-to-all, several but 'dedup', or None"),
    "dedup": (lambda v: isinstance(v, bool), "True or False"),
    "shard_dense": (lambda v: isinstance(v, bool), "True or False"),
    "scheduler": (lambda v: v is None or isinstance(v, str), "the name of a scheduler or None"),
    "schedule": (lambda v: v is None or v in (*SCHEDULES, PARM, TUTEL),
                 f"one of {', '.join((*SCHEDULES, PARM, TUTEL))}, or None"),
    "rows": (lambda v: v is None or isinstance(v, bool), "True, False or None"),
    "r": (lambda v: v is None or (_is_whole(v) and v >= 0), "0, 1, 2, .. or None"),
    "tune": (lambda v: isinstance(v, (str, os.PathLike)) and (str(v) in TUNING or str(v).endswith(".json")),
             f"one of {', '.join(map(repr, TUNING))}, or a log that tuning.save wrote (*.json)"),
    "tune_file": (lambda v: v is None or isinstance(v, (str, os.PathLike)), "a file or None"),
    "codec": (lambda v: isinstance(v, str), "the name of a codec; 'identity' changes nothing"),
    "lossy": (lambda v: isinstance(v, bool), "True or False"),
    "memory_limit": (lambda v: v is None or ((_is_whole(v) or isinstance(v, float)) and 0 < v < float("inf")),
                     "a number of bytes above 0 or None"),
    "state": (lambda v: isinstance(v, str) and v in STATES, f"one of {', '.join(map(repr, STATES))}"),
    "placement": (lambda v: v is None or (isinstance(v, str) and v in PLACEMENTS),
                  f"one of {', '.join(map(repr, PLACEMENTS))}, or None"),
    "spare": (lambda v: _is_whole(v) and v >= 0, "0, 1, 2, .."),
    "rehome_every": (lambda v: _is_whole(v) and v >= 0, "a number of optimizer steps, or 0 for never"),
    "ranks_per_node": (_is_count, "1, 2, .. or None"),
    "strict": (lambda v: isinstance(v, bool), "True or False"),
    "dump_dir": (lambda v: v is None or isinstance(v, (str, os.PathLike)), "a folder or None"),
}  # fmt: skip


def by_kinds() -> bool:
    """Whether equal layers are captured, differentiated and printed once; not with MOEFX_LAYERS=0."""
    return os.environ.get("MOEFX_LAYERS", "1") != "0"
