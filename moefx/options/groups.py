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
        "direct", "1dh" (HetuMoE), "2dh" (Tutel), "pipe" (ScheMoE), or one that was registered.
        {' '.join(f'"{name}": {says}' for name, says in OTHER_ROWS.items())}
        Several, ("direct", "2dh"): the first, or with a machine the fastest of them.
        None: "direct"; with a machine the planner chooses.""")
    codec: str = option(
        IDENTITY, Allowed(lambda v: isinstance(v, str), "the name of a codec; 'identity' changes nothing"), """
        What rows are sent as: "identity", "bf16", "int8", "fp8-e4m3", "fp8-e5m2" (a scale per row), "zfp" (a byte an
        entry, in blocks), or one that was registered. All but the first change numbers.""")
    lossy: bool = option(False, BOOL, "True lets the planner send rows as bf16 or int8, which changes numbers.")


@documented
@dataclass(frozen=True, repr=False)
class Placement(Group):
    """Who holds copies of which experts, from step to step, without a new program.

    Not for layers with capacities, for experts that are cut over `esp`, or for rows that go to several ranks (splits
    "baseline" and "s3") or cross to nodes first.
    """

    policy: str | None = option(None, _POLICY, """
        None: nobody does. Between steps, from the loads of the last five: "balanced" (ranks get as equally many rows as
        copies allow), "auto" (what takes least time on the machine){}.
        """.format(said(features.option_values("placement"))))
    copies: int = option(2, NUMBER, """
        How many copies a rank may hold of a layer's experts, beside those that live there. 0: only homes move.""")
    vars().update(features.option_fields("placement"))  # what rooms add
    __annotations__.update(dict.fromkeys(features.option_fields("placement"), "Any"))


@documented
@dataclass(frozen=True, repr=False)
class Parallel(Group):
    """What is spread over which ranks. None leaves a choice to the planner, or, without a machine, to the simplest."""

    ep: int | None = option(None, or_none(COUNT), """
        On a mesh of `dp` and `mp` alone: over how many ranks experts are spread. None: the mesh names them; or the
        planner chooses, with a machine; or 1.""")
    esp: int | None = option(None, or_none(COUNT), """
        Likewise, over how many ranks every expert is cut. The same ranks are [copies, ep, esp], `esp` fastest.""")
    split: str | None = option(None, or_none(one_of(*SPLITS)), """
        Which rows the ranks along `mp` take, which read the same data (Parm). "s1": each its share of the tokens, from
        before the gate on; capacities are a rank's own then, so other tokens are dropped. "s2-tokens": the same from
        behind the gate on. "s2": each its share of every expert's capacity. "s3": every row goes over
        `ep` once, and ranks along `esp` gather what arrived. "baseline": all of them all rows. None: "s1" as far as the
        model allows. What is named and cannot be is an error.""")
    rows: bool | None = option(None, or_none(BOOL), """
        True keeps activations between layers cut along tokens over `mp` (Megatron's sequence parallelism).""")
    r: int | None = option(None, or_none(NUMBER), """
        To how many of the ranks along `esp` a token's rows go (Tutel), a divisor of their number: the other parts of
        the weights are gathered before the layer. 0: all weights are gathered and no token moves. None: as many as
        there are. It may change from call to call (`CompiledModule.use`).""")
    vars().update(features.option_fields("parallel"))  # what rooms add
    __annotations__.update(dict.fromkeys(features.option_fields("parallel"), "Any"))
    ranks_per_node: int | None = option(None, or_none(COUNT), """
        Consecutive ranks of the mesh on one node. None: the machine's, or what torchrun says.""")
    formula: str | None = option(None, or_none(one_of(PARM, *dict(features.option_values("formula")))), """
        Whose formula chooses, where the planner would by simulation: "parm" (the split of each layer, s1 or s2, by its
        Algorithm 1){}.""".format(said(features.option_values("formula"))))
    state: str = option("float32", one_of(*STATES), """
        dtype of Adam's two moments, and of a master copy of narrower weights: experts are spread so that they fit.""")


@documented
@dataclass(frozen=True, repr=False)
class Debug(Group):
    """How much is checked, and what happens where something is wrong."""

    verify: int | None = option(
        None, Allowed(lambda v: v is None or (is_whole(v) and v in (0, 1, 2)),
                      "0: nothing; 1: structure and meaning; 2: also run and compare; None: what MOEFX_VERIFY says"),
        """
        0: nothing. 1: structure and meaning of every graph after every pass. 2: every graph is also run before and
        after each pass, and compared. None: what MOEFX_VERIFY says, else 1.""", told=False)
    timeout_s: float = option(600.0, _SECONDS, """
        Seconds after which a rank that waits in a collective gives up and names who it waits for.""", told=False)
    compare_every: int = option(100, STEPS, """
        After so many steps, and at first after 1, 2, 4, .., ranks compare the bits of parameters that they all hold:
        one that skips an update is named. 0: never, for training in which copies are meant to differ.""")
    dynamic: bool = option(True, BOOL, """
        True: one program for batches of all sizes. False: one for every size, compiled in half of the time (in a fifth
        for models that cut sequences into pieces); batches must then have one size on all ranks.""")
    strict: bool = option(True, BOOL, """
        False keeps an MoE that cannot be raised as it is, data-parallel on every rank, and says so once.""")
    dump_dir: str | os.PathLike | None = option(None, or_none(Allowed(_FILE.test, "a folder")), """
        Folder to write every graph and the emitted code to. None: what MOEFX_DUMP says.""", told=False)
