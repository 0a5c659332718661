"""A program as data, and the program of such data for a model that is there.

Kept is what a call reads: the emitted code, where its inputs come from, what its outputs are, for which sizes and which
values of Python it is right. Graphs, records and decisions are not: whoever asks for them has the program compiled
again (`again.py`), which takes as long as without a cache, and gives the same.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import fx, nn

from moefx import _torch_compat as compat
from moefx.capture.inputs import CallKey, ShapeGuard, sizes_of
from moefx.capture.numbers import Numbers
from moefx.capture.origin import Origin
from moefx.capture.python_state import PythonState, spoken
from moefx.capture.small_sizes import Verdict
from moefx.compiler.cache import packing, sources
from moefx.compiler.cache.data import decoded, encoded
from moefx.compiler.cache.told import Teller, Untold, digest
from moefx.compiler.variant import Making, Variant
from moefx.context.step_graphs import StepGraphs
from moefx.link.emit import load
from moefx.link.program import Code, Home, Program

_INDICES = ("mutated_inputs", "num_user_outputs", "num_statistics", "saved", "tangent_outputs", "grad_inputs",
            "differentiable_outputs")  # fmt: skip


class Stale(Exception):
    """An entry that is not right any more; the text says what is another one now."""


def written(variant: Variant, leaves: list[Any], tree: Any, teller: Teller, name: str) -> dict[str, Any]:
    """Raises Untold for a program that cannot be kept."""
    program, origin = variant.program, variant.origin
    if origin.foreign is not None:
        raise Untold(f"{origin.foreign}, whose code is not captured")
    if variant.numbers.keys or variant.written:
        raise Untold("numbers that decide sizes" if variant.numbers.keys else "arguments that are written to")
    if any(source.kind == "constant" for source in program.sources):
        raise Untold("a tensor that no module of the model has")
    regions = [replace(facts, load=None if facts.load is None else "", choices=("",) * len(facts.choices))
               for facts in program.regions]  # fmt: skip
    return {
        "name": name, "model": type(program.home.model).__name__, "made": time.time(), "digest": program.digest,
        "forward": program.code.forward_source, "backward": program.code.backward_source, "relinked": {},
        "graphs": {each: encoded(getattr(program.graphs, each)) for each in _INDICES}, "draws": program.draws,
        "peak_s_per_token": program.peak_s_per_token,
        "sources": encoded(program.sources), "regions": encoded(regions),
        "left_out": encoded({names: tuple(readers) for names, readers in program.left_out.items()}),
        "mesh": encoded(variant.mesh), "expert_buffers": encoded(variant.expert_buffers),
        "relied": encoded(variant.relied), "said": list(variant.said),
        "guard": _guard(variant.guard, sizes_of(leaves)),
        "state": _state(variant.state, origin, teller), "code": sources.learned(origin.code),
        "packing": packing.learned(variant.pack_outputs, program.graphs.num_user_outputs, tree, leaves,
                                   variant.state, origin.sets),
    }  # fmt: skip


def read(data: Mapping[str, Any], home: Home, key: CallKey, teller: Teller,
         making: Callable[[], Making]) -> Variant:  # fmt: skip
    """The program of an entry. making: compiles it again. Raises Stale; KeyError, TypeError, ValueError, .. for data
    that `written` does not make."""
    other = sources.changed(data["code"])
    if other is not None:
        raise Stale(f"{other} is another one now")
    state = _read_state(data["state"], home.model, teller)
    nothing = fx.GraphModule({}, fx.Graph())
    graphs = StepGraphs(nothing, nothing if data["backward"] else None,
                        **{each: decoded(data["graphs"][each]) for each in _INDICES})  # fmt: skip
    code = Code(load(data["forward"], "forward"), data["forward"],
                load(data["backward"], "backward") if data["backward"] else None, data["backward"])  # fmt: skip
    program = Program(home, graphs, code, decoded(data["sources"]), data["digest"], decoded(data["regions"]),
                      decoded(data["left_out"]), data["draws"], data["peak_s_per_token"])  # fmt: skip
    guard = _read_guard(data["guard"], lambda leaves: Verdict(making.guard().complaint(leaves)))
    return Variant(
        key, program, guard, state, packing.packer(data["packing"], state), making, Numbers(), {}, None,
        decoded(data["mesh"]), decoded(data["expert_buffers"]), decoded(data["relied"]), tuple(data["said"]),
    )  # fmt: skip


def _guard(guard: ShapeGuard, sizes: tuple) -> dict[str, Any]:
    return {"shapes": encoded(guard.shapes), "conditions": encoded(guard.conditions), "fits": encoded(sizes)}


def _read_guard(data: Mapping[str, Any], with_ones: Callable[[list[Any]], Verdict]) -> ShapeGuard:
    return ShapeGuard.of(decoded(data["shapes"]), decoded(data["conditions"]), with_ones, decoded(data["fits"]))


def _state(state: PythonState, origin: Origin, teller: Teller) -> dict[str, Any]:
    if origin.variables is None:
        raise Untold("environment variables whose names are not known")
    data = {"reads": list(origin.reads), "hooks": list(origin.hooks), "names": list(origin.names),
            "variables": sorted(origin.variables), "told": _told(state, origin.variables, teller)}  # fmt: skip
    _read_state(data, state.model, teller)
    return data


def _read_state(data: Mapping[str, Any], model: nn.Module, teller: Teller) -> PythonState:
    """What the forward reads from Python, if it is what it was. Raises Stale."""
    cells = getattr(getattr(model.forward, "__code__", None), "co_freevars", ())
    scope = {"L": dict.fromkeys((*data["names"], *cells), model), "G": compat.global_scope(model)}
    state = PythonState(model, data["reads"], data["hooks"], scope)
    state.look_again()
    now = _told(state, data["variables"], teller)
    if now != data["told"]:
        before = data["told"]
        path = next(path for path in (*now, *before) if now.get(path) != before.get(path))
        raise Stale(f"`{spoken(path)}`, which the forward reads, is another value now")
    if (path := state.changed()) is not None:
        raise Stale(f"`{path}`, which the forward reads, is another value now")
    return state


def _told(state: PythonState, variables: Any, teller: Teller) -> dict[str, str]:
    found = {path: digest(teller.told(value))[:16] for path, value in state.seen}
    return found | {f"the environment's {name}": digest(repr(os.environ.get(name)))[:16] for name in sorted(variables)}
