"""What is known of every MoE region of a program once it is placed, and what regions are called."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from moefx.ir.ways import Way
from moefx.layout import Layout
from moefx.placement.tables import contiguous


class Slots(NamedTuple):
    """How many experts a rank may hold in a region. room: of those that live there; the ranks of the axis may have
    different numbers of them. spare: of copies. owners: the place along the axis where expert e lives while the program
    is compiled. params: the keys of the Sources of its experts' parameters, but for what every rank has whole."""

    room: int
    spare: int = 0
    owners: tuple[int, ...] = ()
    params: tuple[Any, ...] = ()

    @property
    def cap(self) -> int:
        """Slots of every rank: global slot = rank * cap + place."""
        return self.room + self.spare

    def are_plain(self, ranks: int) -> bool:
        """Whether experts stood in order, as many on every rank, and nothing else did: a program takes slots for
        experts, and only its tables know of those that have moved since."""
        return self.cap * ranks == len(self.owners) and self.owners == contiguous(len(self.owners), ranks)


@dataclass(frozen=True)
class RegionFacts:
    """One MoE region of a program.

    load: the node with rows per expert: [E] of this rank, or [n, E] of all ranks along the axis of its `way`, or
        [n, C, E] by chunk, too; None: unknown, or told by the first chunk of the region.
    choices: the nodes with the router's chosen expert ids; their elements are the (token, choice) pairs.
    copies: how many ranks along the axis send the same rows. slots: see `Decisions.slots`. costs: what copies of its
        experts cost and save (`placement.score.Costs`), if there is a machine. counted: whether calls count the rows of
        experts for a placement.
    """

    number: int
    module: str
    experts: int
    load: Any
    choices: tuple[Any, ...]
    way: Way
    of: int  # the number of the region that this one is a chunk of; its own if it is whole
    copies: int = 1
    slots: Slots | None = None
    costs: Any = None
    counted: bool = False

    def placed_as(self, path: str) -> str:
        """What says where its experts are in a call knows it by this name: their first parameter in the model, of
        experts that every rank has whole the module. path: of what the program runs."""
        first = self.slots.params[0] if self.slots.params else self.module
        return module_name(path, first if isinstance(first, str) else first[0])


def split_statistics(regions: Sequence[RegionFacts],
                     outputs: Sequence[Tensor]) -> dict[int, tuple[Tensor, list[Tensor]]]:  # fmt: skip
    """{region: (load, choices)} out of a program's statistics outputs, in the order in which it returns them."""
    rest = list(outputs)
    found = {}
    for facts in regions:
        if facts.load is not None:
            load = rest.pop(0)
            found[facts.number] = (load, [rest.pop(0) for _ in facts.choices])
    return found


def homes_of(key: Any, rows: int, experts: int, layouts: Mapping[str, Layout],
             sizes: Mapping[str, int]) -> tuple[int, ...] | None:  # fmt: skip
    """Where along their axis experts live, [E]; None: nothing has been laid out. key: of their parameter, which has
    `rows` rows, or of one parameter for each. layouts: of parameters. sizes: of the mesh."""
    if (key if isinstance(key, str) else key[0]) not in layouts:
        return None
    found = [layouts[key].of_row(expert * rows // experts, sizes) for expert in range(experts)] if (
        isinstance(key, str)) else [layouts[name] for name in key]  # fmt: skip
    return None if any(each.owner is None for each in found) else tuple(each.owner[1] for each in found)


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
