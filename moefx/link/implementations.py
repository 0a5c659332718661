"""Which implementation of a runtime function emitted code calls: ATen's, which is its meaning, or another one.

The linker asks for every call, with what is known then: device, dtype and width. `MOEFX_KERNELS` says what may run:

    aten     ATen alone; so without the variable, until a GPU has run the others
    auto     on CUDA, where Triton is installed: its kernels but for products in bfloat16, which are torch's
    triton   all kernels of Triton's, products too; on CPU, too, where Triton interprets (TRITON_INTERPRET=1)

Kernels that users register come first, unless the variable says `aten`.

All ranks must choose alike; what they emit is compared.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.metadata
import importlib.util
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from moefx._torch_compat import OpOverload
from moefx.errors import ExtensionError, MoefxError
from moefx.ir.op import REGISTRY, argument, lookup, value
from moefx.ir.text import path_of
from moefx.registered import Registered

log = logging.getLogger("moefx.link")

MODES = ("auto", "triton", "aten")
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_WIDEST = 1 << 16  # elements of a row; wider ones would unroll without end
_CODED = ("int8", "fp8-e4m3", "fp8-e5m2")  # codecs of one byte an entry; a cast to bfloat16 is one pass anyhow
_MOST_SLOTS = 1 << 12  # of which every program of a kernel reads all counts


@dataclass(frozen=True)
class Form:
    """One implementation of a runtime function, which takes and gives what that does. takes: whether it can run a call,
    given as a node of an op; modes: in which it is chosen."""

    function: str
    takes: Callable[[Node], bool]
    modes: tuple[str, ...] = ("auto", "triton")


def choose(function: str, call: Node, device_type: str) -> str:
    """The path of the function that `call`, an op that becomes `function`, calls on devices of this type.

    Raises MoefxError for an unknown MOEFX_KERNELS, or where it asks for Triton and there is none.
    """
    for path, takes in _registered().get(REGISTRY[call.target].name, ()):
        if takes(device_type, _arguments(call)):
            return path
    if not _may_choose(device_type):
        return function
    forms = (form for form in FORMS.get(function, ()) if chosen_mode() in form.modes and form.takes(call))
    return next((form.function for form in forms), function)


def chooser(device_type: str) -> Callable[[Node], bool] | None:
    """Whether the call of a dialect op becomes another form than ATen's on devices of this type; None: no call does."""
    if not _may_choose(device_type) and not _registered():
        return None

    def has_kernel(call: Node) -> bool:
        op = lookup(call)
        return op is not None and op.runtime is not None and (
            choose(op.runtime.function, call, device_type) != op.runtime.function)  # fmt: skip

    return has_kernel


_REGISTERED: dict[str, list[tuple[str, Registered]]] = {}  # {op: (path, takes), in order}


def register_kernel(op: str, path: str, takes: Callable[[str, Mapping[str, Any]], bool]) -> bool:
    """Let programs call another function for an op, on every rank and before compiling.

    op: its name, as "grouped_linear"; docs/map.md has them all. path: of the function, as "package.module.name". It
    takes what the one of moefx's runtime takes that the op becomes, and gives the same, up to rounding. takes: whether
    it can run a call: (type of the device, {argument of the op: a tensor without memory, or a number}) -> bool, the
    same on all ranks. Of several functions, the first that takes a call runs it.

    Returns whether the function can be imported; where it cannot, nothing changes. Raises ExtensionError for an op that
    there is not, and for what is no function of a module.
    """
    known = [each.name for each in REGISTRY.values() if each.runtime and isinstance(each.target, OpOverload)]
    if op not in known:
        near = difflib.get_close_matches(op, known, 1) if isinstance(op, str) else []
        raise ExtensionError(f"there is no op '{op}' that a kernel could run",
                             hint=f"did you mean {near[0]}?" if near else "docs/map.md has them all")  # fmt: skip
    module, _, name = path.rpartition(".")
    try:
        home = importlib.import_module(module)
    except (ImportError, OSError) as error:  # the latter: a library that it needs
        log.info("the kernel %s is not here: %s", path, error)
        return False
    found = getattr(home, name, None)
    if not callable(found) or path_of(found) is None:
        raise ExtensionError(f"the kernel {path} is no function that other code can import",
                             hint="give one that stands at the top of a module")  # fmt: skip
    _REGISTERED.setdefault(op, []).append((path, Registered(f"takes of the kernel {path}", takes, (bool,))))
    return True


def registered_kernels() -> list[str]:
    """Paths of those that users registered, which may be called."""
    return [path for found in _registered().values() for path, _ in found]


def _registered() -> Mapping[str, list[tuple[str, Registered]]]:
    return {} if os.environ.get("MOEFX_KERNELS") == "aten" else _REGISTERED


def _arguments(call: Any) -> dict[str, Any]:
    """Of an op, by name: fakes of tensors, and numbers."""
    return {each.name: map_arg(argument(call, each.name), value) for each in call.target._schema.arguments}


def _may_choose(device_type: str) -> bool:
    mode = chosen_mode()
    return mode == "triton" or (mode == "auto" and device_type == "cuda" and triton_version() is not None)


def chosen_mode() -> str:
    """One of `MODES`. Raises MoefxError for what MOEFX_KERNELS must not be."""
    mode = os.environ.get("MOEFX_KERNELS") or "aten"
    if mode not in MODES:
        raise MoefxError(f"MOEFX_KERNELS is {mode}", hint=f"let it be one of {', '.join(MODES)}")
    if mode == "triton" and triton_version() is None:
        raise MoefxError("MOEFX_KERNELS is triton, which is not installed", hint="pip install triton")
    return mode


@functools.cache
def triton_version() -> str | None:
    """None: it is not installed. Does not import it."""
    return importlib.metadata.version("triton") if importlib.util.find_spec("triton") is not None else None


def _width(tensor: Tensor) -> int | None:
    """Elements of one row; None if that is not known yet."""
    sizes = tensor.shape[1:]
    return sizes.numel() if all(isinstance(size, int) for size in sizes) else None


def _is_row(tensor: Any) -> bool:
    """Whether kernels take its rows."""
    width = _width(tensor)
    return tensor.dtype in _FLOATS and width is not None and 0 < width <= _WIDEST


def _rows(*names: str) -> Callable[[Node], bool]:
    """Whether kernels take the rows of these arguments, of which some may be None."""
    return lambda call: all(_is_row(found) for name in names if (found := value(argument(call, name))) is not None)


def _has_narrow_halves(call: Node) -> bool:
    """Whether kernels take the rows of gates and ups."""
    found = [value(half) for half in argument(call, "halves")]
    return all(each.dtype in _FLOATS and isinstance(each.shape[-1], int) and 0 < each.shape[-1] <= _WIDEST
               for each in found)  # fmt: skip


def _is_coded(call: Node) -> bool:
    """Whether kernels take the rows that become bytes, or are made of them."""
    rows = call if "payload" in {each.name for each in call.target._schema.arguments} else argument(call, "rows")
    return argument(call, "codec") in _CODED and _is_row(value(rows))


def _few_slots(call: Node) -> bool:
    return value(argument(call, "counts")).shape[0] <= _MOST_SLOTS


def _per_slot(*names: str) -> Callable[[Node], bool]:
    takes = _rows(*names)
    return lambda call: takes(call) and _few_slots(call)


def _routes(call: Node) -> bool:
    slots, table = argument(call, "num_slots"), value(argument(call, "table"))
    experts = slots if table is None else table.shape[0]
    return all(isinstance(each, int) and each < _MOST_SLOTS for each in (slots, experts))


def _product(*dtypes: torch.dtype) -> Callable[[Node], bool]:
    return lambda call: value(argument(call, "rows")).dtype in dtypes and _few_slots(call)


_MEANT, _MADE = "moefx.runtime", "moefx.runtime.triton_kernels"

FORMS: Mapping[str, tuple[Form, ...]] = MappingProxyType({
    f"{_MEANT}.kernels.route": (Form(f"{_MADE}.route", _routes),),
    f"{_MEANT}.kernels.dispatch": (Form(f"{_MADE}.dispatch", _rows("x")),),
    f"{_MEANT}.kernels.combine": (Form(f"{_MADE}.combine", _rows("rows", "weights")),),
    f"{_MEANT}.kernels.combine_backward": (
        Form(f"{_MADE}.combine_backward", _rows("grad", "rows", "weights")),),
    f"{_MEANT}.kernels.expert_rows": (Form(f"{_MADE}.expert_rows", _per_slot("param")),),
    f"{_MEANT}.kernels.expert_rows_backward": (Form(f"{_MADE}.expert_rows_backward", _per_slot("grad")),),
    f"{_MEANT}.glu.gated": (Form(f"{_MADE}.gated", _has_narrow_halves),),
    f"{_MEANT}.glu.gated_backward": (Form(f"{_MADE}.gated_backward", _has_narrow_halves),),
    f"{_MEANT}.expert_layer.expert_layer": (Form(f"{_MADE}.expert_layer", _per_slot("x"), ("triton",)),),
    f"{_MEANT}.expert_layer.expert_layer_backward": (
        Form(f"{_MADE}.expert_layer_backward", _per_slot("x"), ("triton",)),),
    "moefx.transport.codecs.encode": (Form(f"{_MADE}.encode", _is_coded),),
    "moefx.transport.codecs.decode": (Form(f"{_MADE}.decode", _is_coded),),
    # torch has one for bfloat16 alone; of float16 it would read the counts on the host, product by product.
    f"{_MEANT}.grouped.grouped_linear": (
        Form(f"{_MADE}.grouped_linear", _product(*_FLOATS), ("triton",)),
        Form(f"{_MADE}.grouped_linear", _product(torch.float16), ("auto",)),
        Form(f"{_MADE}.finished_linear", _product(torch.bfloat16), ("auto",)),
    ),
    f"{_MEANT}.grouped.grouped_wgrad": (
        Form(f"{_MADE}.grouped_wgrad", _product(*_FLOATS), ("triton",)),
        Form(f"{_MADE}.grouped_wgrad", _product(torch.float16), ("auto",)),
    ),
})  # fmt: skip
"""{a runtime function: implementations, the first that takes a call is chosen}."""
