"""`moefx.lint`: what is wrong with a model that trains all the same.

    for each in moefx.lint(model, input_ids=tokens, labels=tokens):
        print(each)
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from moefx.analysis.lints import never_moves, softmax_twice
from moefx.analysis.lints.lint import Lint
from moefx.capture import loops_tried
from moefx.capture.trace import Captured, trace
from moefx.errors import ModelError, MoefxError, UnsupportedUse
from moefx.ir import alike
from moefx.model.api import CompiledModule
from moefx.model.stats import RegionStats

DEAD = "dead-experts"
ENOUGH = 16  # rows per expert on average: of a router without preferences one expert in nine millions gets none


def lint(model: nn.Module, *args: Any, **kwargs: Any) -> list[Lint]:
    """What looks wrong in a call `model(*args, **kwargs)`, which is captured but not run: softmax of a softmax, as some
    balance losses take it; routers, experts and adapters that are trained by name and get no gradient. Of a compiled
    model also experts that got no row in its last forward; without arguments these alone.

    Equal layers are one finding. Needs no process group, and no other rank. Raises ModelError for what is no nn.Module,
    UnsupportedUse for a plain model without arguments, and CaptureError where the call cannot be captured.
    """
    if not isinstance(model, nn.Module):
        raise ModelError(f"a {type(model).__name__} is not an nn.Module", where="lint", hint="pass the model itself")
    is_compiled = isinstance(model, CompiledModule)
    if not args and not kwargs and not is_compiled:
        raise UnsupportedUse("lint was given no example of a call", where="lint",
                             hint="moefx.lint(model, *args, **kwargs), as the model is called")  # fmt: skip
    found = of_stats(model.moe_stats()) if is_compiled else []
    if not args and not kwargs:
        return found
    if not is_compiled:
        return [*_of_call(model, args, kwargs), *found]
    with model._plain.callable(), loops_tried.in_place(model._inner, model._forwards):
        return [*_of_call(model._inner, args, kwargs), *found]


def _of_call(model: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> list[Lint]:
    leaves, spec = tree_flatten((args, dict(kwargs)))
    device = next((p.device for p in model.parameters() if not p.is_meta), torch.device("cpu"))
    with warnings.catch_warnings(), torch.inference_mode(False), torch.enable_grad():
        warnings.simplefilter("ignore")  # of what is captured, for whoever writes it
        captured = trace(model, model, leaves, spec, device, fixed="all")
    if not isinstance(captured, Captured):
        raise MoefxError("the call has numbers that are no constants", where="lint")
    return of_graph(captured.gm, model)


def of_graph(gm: torch.fx.GraphModule, model: nn.Module) -> list[Lint]:
    """gm: as captured from the model."""
    return _once([*softmax_twice.find(gm), *never_moves.find(gm, model)])


def of_stats(stats: Mapping[str, RegionStats]) -> list[Lint]:
    """Experts without rows, where there were many rows."""
    found = []
    for name, each in stats.items():
        idle = [expert for expert, rows in enumerate(each.load) if not rows]
        if idle and sum(each.load) >= ENOUGH * len(each.load):
            found.append(Lint(
                DEAD, f"{len(idle)} of {len(each.load)} experts of {name} got none of {sum(each.load)} rows",
                f"{name}: experts {alike.ranges(idle)}, in the last forward",
                "an expert without rows gets no gradient and takes memory for nothing",
                "add a balance loss or a bias that follows the load, raise its weight, or look whether the router has "
                "collapsed"))  # fmt: skip
    return found


def _once(found: list[Lint]) -> list[Lint]:
    """Those of equal layers are one."""
    shown = ["\n".join(each.to_dict().values()) for each in found]
    return [Lint(*alike.joined([shown[place] for place in places]).split("\n")) for places in alike.groups(shown)]
