"""The groups of `Options`: what belongs together."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from moefx import features
from moefx.options.declare import (
    BOOL,
    COUNT,
    NUMBER,
    STEPS,
    Allowed,
    Group,
    documented,
    is_whole,
    one_of,
    option,
    or_none,
    said,
)

IDENTITY = "identity"  # the codec that changes nothing
SPLITS = ("baseline", "s1", "s2", "s2-tokens", "s3")
STATES = {"float32": 4, "bfloat16": 2, "float16": 2}  # bytes of a number
PARM = "parm"  # whose formula may choose

_FILE = Allowed(lambda v: isinstance(v, (str, os.PathLike)), "a file")
_POLICY = Allowed(lambda v: v is None or isinstance(v, str), "the name of a policy, or None")
_SECONDS = Allowed(  # the last comparison is false for inf and nan, too
    lambda v: (is_whole(v) or isinstance(v, float)) and 0 < v <= 1e9, "a number of seconds above 0, at most 1e9")


# All-to-alls of rooms, {name: what it says}: their passes make other rows, which are exchanged directly.
OTHER_ROWS = dict(features.option_values("alltoall"))


def _are_names(found: Any) -> bool:
    is_some = isinstance(found, tuple) and len(found) > 0
    return is_some and all(isinstance(name, str) and name not in OTHER_ROWS for name in found)


@documented
@dataclass(frozen=True, repr=False)
class AllToAll(Group):
    """How rows travel between ranks."""

    algorithm: str | tuple[str, ...] | None = option(
        None, Allowed(lambda v: v is None or isinstance(v, str) or _are_names(v),
                      f"the name of an all-to-all, {' but '.join(('several', *map(repr, OTHER_ROWS)))}, or None"), f"""
        "direct", "1dh" (HetuMoE), "2dh" (Tutel), "pipe" (ScheMoE), or one that you registered.
        {' '.join(f'"{name}": {says}' for name, says in OTHER_ROWS.items())}
        Several, ("direct", "2dh"): the first, or with a machine the fastest.
        None: "direct"; with a machine the planner chooses.""")
    codec: str = option(
        IDENTITY, Allowed(lambda v: isinstance(v, str), "the name of a codec; 'identity' changes nothing"), """
        What rows are sent as: "identity", "bf16", "int8", "fp8-e4m3", "fp8-e5m2" (a scale per row), "zfp" (a byte per
        entry, in blocks), or one that you registered. All except the first change numbers.""")
    lossy: bool = option(False, BOOL, "True lets the planner send rows as bf16 or int8, which changes numbers.")


@documented
@dataclass(frozen=True, repr=False)
class Placement(Group):
    """Which ranks hold copies of which experts, from step to step, without a new program.

    Not for layers with capacities, for experts that are cut over `esp`, or for rows that go to several ranks (splits
    "baseline" and "s3") or cross to nodes first.
    """

    policy: str | None = option(None, _POLICY, """
        How copies are planned. None: there are none. "balanced": between steps, from the loads of the last five, so
        that ranks get as equal numbers of rows as copies allow. "auto": between steps or as "exact", layer by layer,
        whatever takes the least time on the machine.{}
        """.format(said(features.option_values("placement"))))
    copies: int = option(2, NUMBER, """
        How many copies of a layer's experts a rank may hold, besides those that live there. 0: only homes move.""")
    vars().update(features.option_fields("placement"))  # what rooms add
    __annotations__.update(dict.fromkeys(features.option_fields("placement"), "Any"))


@documented
@dataclass(frozen=True, repr=False)
class Parallel(Group):
    """What is spread over which ranks. None leaves a choice to the planner. Without a machine it is the simplest."""

    ep: int | None = option(None, or_none(COUNT), """
        On a mesh of `dp` and `mp` alone: how many ranks to spread experts over. None: the mesh names them; or the
        planner chooses, with a machine; or 1.""")
    esp: int | None = option(None, or_none(COUNT), """
        Also, how many ranks to cut every expert over. The same ranks are [copies, ep, esp], `esp` fastest.""")
    split: str | None = option(None, or_none(one_of(*SPLITS)), """
        Which rows each rank along `mp` takes; these ranks read the same data (Parm). "s1": its share of the tokens,
        from before the gate on. Capacities are then a rank's own, so other tokens are dropped. "s2-tokens": its share
        of the tokens, from after the gate on. "s2": its share of every expert's capacity. "s3": every row goes over
        `ep` once, and ranks along `esp` gather what arrived. "baseline": all rows. None: "s1" as far as the model
        allows. If you name a split that is impossible, that is an error.""")
    rows: bool | None = option(None, or_none(BOOL), """
        True keeps activations between layers cut along tokens over `mp` (Megatron's sequence parallelism). False never
        does. None: the planner may.""")
    r: int | None = option(None, or_none(NUMBER), """
        How many of the ranks along `esp` get a token's rows (Tutel): a divisor of their number. The other parts of
        the weights are gathered before the layer. 0: all weights are gathered, and no token moves. None: all ranks.
        It may change from call to call (`CompiledModule.use`).""")
    vars().update(features.option_fields("parallel"))  # what rooms add
    __annotations__.update(dict.fromkeys(features.option_fields("parallel"), "Any"))
    ranks_per_node: int | None = option(None, or_none(COUNT), """
        How many consecutive ranks of the mesh share a node. None: the machine's number, or torchrun's.""")
    formula: str | None = option(None, or_none(one_of(PARM, *dict(features.option_values("formula")))), """
        A paper's formula that chooses in place of the planner's simulation. "parm": the split of each layer, s1 or s2,
        by its Algorithm 1.{}""".format(said(features.option_values("formula"))))
    state: str = option("float32", one_of(*STATES), """
        The dtype of Adam's two moments, and of a master copy if weights are narrower. Experts are spread so that
        these fit.""")


@documented
@dataclass(frozen=True, repr=False)
class Debug(Group):
    """How much is checked, and what happens if something is wrong."""

    verify: int | None = option(
        None, Allowed(lambda v: v is None or (is_whole(v) and v in (0, 1, 2)),
                      "0: nothing; 1: structure and meaning; 2: also run and compare; None: what MOEFX_VERIFY says"),
        """
        0: nothing. 1: structure and meaning of every graph after every pass. 2: every graph also runs before and after
        each pass, and the results are compared. None: what MOEFX_VERIFY says, else 1.""", told=False)
    timeout_s: float = option(600.0, _SECONDS, """
        Seconds after which a rank that waits in a collective gives up and names the ranks that it waits for.""",
        told=False)
    compare_every: int = option(100, STEPS, """
        After 1, 2, 4, .. steps, and then after every so many, ranks compare the bits of parameters that they all hold.
        The error names a rank that skips an update. 0: never, for training in which copies are meant to differ.""")
    dynamic: bool = option(True, BOOL, """
        True: one program for batches of all sizes. False: one for every size, compiled in half of the time (in a fifth
        for models that cut sequences into pieces). Batches must then have the same size on all ranks.""")
    strict: bool = option(True, BOOL, """
        False keeps an MoE layer that moefx cannot express as it is, data-parallel on every rank, and warns once.""")
    dump_dir: str | os.PathLike | None = option(None, or_none(Allowed(_FILE.test, "a folder")), """
        A folder for every graph and the emitted code. None: what MOEFX_DUMP says.""", told=False)
