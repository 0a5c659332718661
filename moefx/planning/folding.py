"""How experts can be spread over a mesh that names no dims for them: ep x esp by closed forms.

Regions are known once a program was captured. The first one of a model decides, before parameters have their places
(`compiler.choosing`); where it may not, `moefx.explain` says what `compile(.., ep=.., esp=..)` would bring.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import sympy
from torch.fx import Node

from moefx.axes import MeshSpec
from moefx.costmodel.amounts import Amounts, Kind, at
from moefx.costmodel.machine import Machine
from moefx.costmodel.optimizer import held
from moefx.costmodel.ways import FORMS, GATE, OMEGA, C, Q, V, X, seconds
from moefx.errors import MoefxError
from moefx.ir import edit
from moefx.ir.op import lookup, nbytes, value
from moefx.ir.regions import region_of

SIMPLER = 0.02  # what is chosen must be this much faster than a simpler one
SCHEDULES = ("s1", "baseline")  # that every region by tokens can have, if its ranks share out tokens


@dataclass(frozen=True)
class Layer:
    """A region by tokens: experts, choices of a token, bytes of the tokens that a rank has and of all experts.
    held: of these, with gradients and the optimizer's state, by the bytes of the weights."""

    experts: int
    k: int
    token_bytes: float
    weight_bytes: float
    held: float = 4.0


@dataclass(frozen=True)
class Fold:
    """seconds: predicted, of a step's exchanges and of the experts' gradients; weight_bytes: of experts, on a rank.
    reason: why it was chosen, if it was. held: as that of `Layer`."""

    ep: int
    esp: int
    schedule: str
    seconds: float
    weight_bytes: float
    reason: str = ""
    held: float = 4.0


def layer_of(nodes: Iterable[Node], region: int, experts: int, sizes: Mapping[str, float],
             state: str = "float32") -> Layer | None:  # fmt: skip
    """What the forward of a program says of a region. sizes: of all tokens. state: `Parallel.state`. None: it has no
    routing of tokens."""
    ops = [(op, node) for node in nodes if region_of(node) == region and (op := lookup(node)) and op.tokens]
    route = next((node for op, node in ops if op.tokens.rule == "routing"), None)
    moved = next((node for op, node in ops if op.tokens.gives == "sorted"), None)
    weights = dict.fromkeys(node.args[1] for op, node in ops if op.gemm is not None and op.tokens.gives == "slot")
    if route is None or moved is None or not weights:
        return None
    k = int(edit.tensor_value(route.args[0]).shape[1])
    rows = at(nbytes(moved), sizes)
    itemsize = min(value(weight).element_size() for weight in weights)
    return Layer(experts, k, rows / k, sum(at(nbytes(weight), sizes) for weight in weights),
                 held(itemsize, state) / itemsize)  # fmt: skip


def folds(mesh: Mapping[str, int], layer: Layer, machine: Machine) -> list[Fold]:
    """All that nest in a mesh of `dp` and `mp` and divide the experts, the fastest first; of equal ones the first with
    the fewest ranks along `esp`, then along `ep`.

    Seconds of a step: twice the better schedule's, and the reduction of the gradients of the experts that a rank has,
    over the ranks that have the same.
    """
    world, found = math.prod(mesh.values()), []
    for ep in (n for n in range(1, world + 1) if world % n == 0 and layer.experts % n == 0):
        for esp in (n for n in range(1, world // ep + 1) if world // ep % n == 0):
            try:
                spec = MeshSpec.folded(mesh, ep, esp, machine.ranks_per_node)
                best = min((_step(name, spec, layer, machine), name) for name in SCHEDULES)
            except MoefxError:
                continue  # they do not nest, or lie unevenly on nodes, or the machine has no such link
            found.append(Fold(ep, esp, best[1], best[0], layer.weight_bytes / (ep * esp),
                              held=layer.held))  # fmt: skip
    return sorted(found, key=lambda fold: (fold.seconds, fold.esp, fold.ep))


def best_fold(by_region: Mapping[int, Sequence[Fold]], limit: float | None) -> Fold | None:
    """The ep x esp that all regions can have and that is fastest for all of them together; None: experts stay whole, as
    nothing is faster, or fits. limit: bytes, for experts with their gradients and Adam's state."""
    found: dict[tuple[int, int], list[Fold]] = {}
    for fold in (fold for folds_ in by_region.values() for fold in folds_):
        found.setdefault((fold.ep, fold.esp), []).append(fold)
    every = [Fold(ep, esp, each[0].schedule, sum(fold.seconds for fold in each), sum(f.weight_bytes for f in each),
                  held=max(fold.held for fold in each))
             for (ep, esp), each in found.items() if len(each) == len(by_region)]  # fmt: skip
    fits = [fold for fold in every if limit is None or fold.held * fold.weight_bytes <= limit]
    best = min(fits, key=lambda fold: (fold.seconds, fold.esp, fold.ep), default=None)
    if best is None or best.ep * best.esp == 1:
        return None
    whole = next(fold for fold in every if fold.ep * fold.esp == 1)
    if whole in fits and best.seconds > whole.seconds / (1 + SIMPLER):
        return None
    return replace(best, reason=f"experts are spread by ep={best.ep}, esp={best.esp}: {gain(best, whole)}")


def gain(best: Fold, whole: Fold) -> str:
    """What spreading experts brings."""
    return (f"exchanges and gradients of a step are predicted to take {1e3 * best.seconds:.3f} ms instead of "
            f"{1e3 * whole.seconds:.3f} ms, and a rank has {best.weight_bytes / 1e6:.1f} MB of them instead of "
            f"{whole.weight_bytes / 1e6:.1f} MB")  # fmt: skip


def _step(name: str, mesh: MeshSpec, layer: Layer, machine: Machine) -> float:
    known = {X: layer.token_bytes, Q: layer.k * layer.token_bytes, C: 0, V: 0, GATE: 0, OMEGA: 1}
    there_and_back = 2 * float(seconds(FORMS[name], machine, mesh).xreplace(
        {symbol: sympy.Float(number) for symbol, number in known.items()}))  # fmt: skip
    owners = tuple(dim for dim in mesh.root if dim not in mesh.dims("ep+esp") and mesh.root[dim] > 1)
    if name == "baseline":  # ranks along `mp` compute the same
        owners = tuple(dim for dim in owners if dim not in mesh.dims("mp"))
    if not owners:
        return there_and_back
    mine = layer.weight_bytes / mesh.size("ep+esp")
    gradients = Amounts(Kind.COLLECTIVE, collective="all_reduce", axes=owners, payload=sympy.Float(mine))
    return there_and_back + machine.time_of(gradients, {}, mesh.root)
