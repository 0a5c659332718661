"""`with torch.autocast(..):` inside of a model, written as casts.

Passes move ops, and a mode holds for a place in the graph. A model whose modes differ from the caller's is written
without any: what torch would cast is cast, in the caller's autocast, too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from moefx import _torch_compat as compat
from moefx.errors import CaptureError
from moefx.ir import edit
from moefx.ir.op import run, value
from moefx.ir.writes import writes

Modes = dict[str, torch.dtype | None]  # by type of device


def make_explicit(gm: GraphModule, ambient: tuple) -> tuple:
    """Erase what enters and leaves autocast, and return the autocast under which the graph is to be read from now on:
    `ambient`, ((device type, dtype), ..), if nothing in the graph differs from it, else none. Every node has its fake
    value. Raises CaptureError for an op whose result no cast of its inputs gives."""
    switches = [n for n in gm.graph.nodes if n.target in (compat.enter_autocast, compat.exit_autocast)]
    own = dict(ambient)
    same = all(_entered(n)[1] == own.get(_entered(n)[0]) for n in switches if n.target is compat.enter_autocast)
    if not same:
        _cast(gm, own)
    for node in reversed(switches):
        gm.graph.erase_node(node)
    return ambient if same else ()


def _entered(node: Node) -> tuple[str, torch.dtype | None]:
    """(device type, dtype or None) of an entry: (device, dtype, enabled, cache)."""
    device, dtype, enabled, *_ = node.args
    dtype = torch.get_autocast_dtype(device) if dtype is None else dtype
    return device, dtype if enabled else None


def _cast(gm: GraphModule, own: Modes) -> None:
    stack: list[Modes] = [own]
    entries: list[Node | None] = [None]  # by which a cast of a parameter is shared, as in autocast's cache
    known: dict[tuple, Node] = {}
    for node in list(gm.graph.nodes):
        if node.target is compat.enter_autocast:
            device, dtype = _entered(node)
            stack.append({**stack[-1], device: dtype})
            entries.append(node)
        elif node.target is compat.exit_autocast:
            at = entries.index(node.args[0])
            del stack[at], entries[at]
        elif node.op.startswith("call") and _floats(node):
            dtype = stack[-1].get(edit.tensor_value(_floats(node)[0]).device.type)
            if dtype is not None:
                _cast_inputs(gm, node, dtype, known, entries[-1])


def _cast_inputs(gm: GraphModule, node: Node, low: torch.dtype, known: dict[tuple, Node], entry: Node | None) -> None:
    mixed = len({edit.tensor_value(n).dtype for n in _floats(node)}) > 1  # fakes do not say where that is wrong
    for dtype in (None,) if writes(node) else (low, torch.float32, None) if mixed else (None, low, torch.float32):
        casts = {n: dtype for n in _floats(node) if dtype not in (None, edit.tensor_value(n).dtype)}
        if _gives(node, casts):
            break
    else:
        raise CaptureError(f"what torch.autocast makes of `{node.name}` is not known", where=edit.place(node),
                           hint="enter autocast around the model alone, or write casts instead")  # fmt: skip
    new = {}
    for tensor in casts:
        key = (tensor, dtype, entry) if tensor.op == "placeholder" else (tensor, dtype, node)
        if key not in known:
            with edit.at(node):
                known[key] = edit.valued(gm.graph.call_method("to", (tensor, dtype)))
        new[tensor] = known[key]
    node.args, node.kwargs = map_arg((node.args, node.kwargs), lambda n: new.get(n, n))


def _gives(node: Node, casts: dict[Node, torch.dtype]) -> bool:
    """Whether the op without autocast, on inputs cast so, has results of the dtypes that it had."""
    mode = edit.tensor_value(_floats(node)[0]).fake_mode

    def given(each: Node) -> Any:
        found = value(each)
        return found.to(casts[each]) if each in casts else found

    with compat.faking(mode), compat.no_autocast():
        try:
            found = run(node, *map_arg((node.args, node.kwargs), given))
        except RuntimeError:  # inputs of several dtypes
            return False
    return _dtypes(found) == _dtypes(value(node))


def _floats(node: Node) -> list[Node]:
    """The inputs that autocast may cast."""
    found = [n for n in node.all_input_nodes if edit.tensor_value(n) is not None]
    return [n for n in found if edit.tensor_value(n).dtype in (torch.float32, torch.bfloat16, torch.float16)]


def _dtypes(found: Any) -> list[torch.dtype]:
    if isinstance(found, (tuple, list)):
        return [dtype for each in found for dtype in _dtypes(each)]
    return [found.dtype] if isinstance(found, torch.Tensor) else []
