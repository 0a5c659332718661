"""MPipeMoE's strategies of what is kept (table 2), and the formula that takes one of them for every region."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

from moefx.context.pass_types import PassContext
from moefx.context.step_graphs import StepGraphs
from moefx.costmodel.machine import Machine
from moefx.costmodel.restore import Layer, Mix, as_array, seconds_of
from moefx.costmodel.simulate import Rates
from moefx.planning.pricing import Candidate
from moefx.planning.restoring import Restoring, Search, mix_of, template_of

FORMULA = "mpipemoe"
OFFLOAD = "offload"  # the way of values that wait in the host's memory
STRATEGIES: dict[str, dict[str, str]] = {
    f"{FORMULA}-s1": {"T_DI": OFFLOAD, "T_M": OFFLOAD, "R": "inside"},
    f"{FORMULA}-s2": {"T_DI": "redo", "T_M": OFFLOAD, "R": "inside"},
    f"{FORMULA}-s3": {"T_DI": OFFLOAD, "T_M": "redo", "R": "inside"},
    f"{FORMULA}-s4": {"T_DI": "redo", "T_M": "redo", "R": "inside"},
}
RINGS = 2  # chunks that are alive at once: else all are restored before the first of them is used


def by_equation_10(graphs: StepGraphs, ctx: PassContext, machine: Machine, sizes: Mapping[str, float],
                   chosen: Mapping[int, Candidate]) -> Restoring:  # fmt: skip
    """What MPipeMoE takes: of every region the one of its strategies S1 to S4 that costs least by its equation 10,
    the longest of three streams, forward and backward. Everything else is kept."""
    candidates = {number: [each] for number, each in chosen.items()}
    template = template_of(graphs, ctx, sizes)
    search = Search(template, ctx, machine, sizes, candidates, RINGS, inside=False)  # strategies have scores there
    mixes, reasons, inside = [], {}, {}
    for unit in search.units:
        (layer,) = unit.layers
        mix = mix_of(layer, {})
        if isinstance(unit.key, int):
            costs = {name: _seconds(layer, mix_of(layer, ways), search.rates()) for name, ways in STRATEGIES.items()}
            best = min(costs, key=costs.__getitem__)
            mix, inside = mix_of(layer, STRATEGIES[best]), inside | {unit.names.get("R"): ("inside",)}
            said = ", ".join(f"{name.removeprefix('mpipemoe-')} {1e3 * each:.3f} ms" for name, each in costs.items())
            reasons |= dict.fromkeys(unit.names.values(), f"{best}, by equation 10: {said}")
        mixes.append((layer, mix))
    found = search.of(mixes)
    return replace(found, rows=tuple(replace(row, ways=inside.get(row.name, row.ways),
                                             reason=reasons.get(row.name, row.reason)) for row in found.rows))


def _seconds(layer: Layer, mix: Mix, rates: Rates) -> float:
    """By equation 10: without fill and drain."""
    loads = defaultdict(float, layer.loads)
    for values in layer.classes:
        for way, number in mix[values.name].items():
            for queue, seconds in values.ways[way].loads.items():
                loads[queue] += number * seconds
    return float(seconds_of(as_array(loads), math.inf, rates))
