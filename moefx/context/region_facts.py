"""What is known of every MoE region of a program once it is placed, and what regions are called."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from moefx.ir.ways import Way


@dataclass(frozen=True)
class RegionFacts:
    """One MoE region of a program.

    load: the node with rows per expert: [E] of this rank, or [n, E] of all ranks along the axis of its `way`;
        None: unknown, or told by the first chunk of the region.
    choices: the nodes with the router's chosen expert ids; their elements are the (token, choice) pairs.
    copies: how many ranks along the axis send the same rows.
    """

    number: int
    module: str
    experts: int
    load: Any
    choices: tuple[Any, ...]
    way: Way
    of: int  # the number of the region that this one is a chunk of; its own if it is whole
    copies: int = 1


def region_names(regions: Iterable[RegionFacts], path: str = "") -> dict[int, str]:
    """{number: what messages and traces call a region}, the same for its chunks: its module in the model, with a number
    where another region of that module came first. path: in the model, of the module that the program runs."""
    names: dict[int, str] = {}
    facts = sorted(regions, key=lambda each: each.number)
    for each in facts:
        name = module_name(path, each.module)
        names.setdefault(each.of, f"{name} ({each.of})" if name in names.values() else name)
    return {each.number: names[each.of] for each in facts}


def module_name(*path: str) -> str:
    """What messages call the module at a path, which is given in parts."""
    return ".".join(filter(None, path)) or "the model"
