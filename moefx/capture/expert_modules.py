"""Which modules of a model hold experts, by what they are made of and called with: where blocks are looked for; and
lists that hold one module in the place of several."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from torch import Tensor, nn

from moefx.capture.loops_tried import Call
from moefx.errors import CaptureError, RaiseError

LISTS = (nn.ModuleList, nn.ModuleDict)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def holders(modules: Mapping[str, nn.Module], calls: Mapping[str, list[Call]]) -> list[str]:
    """The modules that hold experts: lists of equal modules, and those with parameters [E, .., ..] of their own."""
    found = []
    for path, module in modules.items():
        is_list = isinstance(module, LISTS) and _are_experts(list(module.children()))
        if _is_stacked(module) or (is_list and not _is_chain([calls.get(f"{path}.{n}") for n in module._modules])):
            found.append(path)
    return found


@contextlib.contextmanager
def naming_one_module(model: nn.Module) -> Iterator[None]:
    """Where experts are not understood, errors say, too, that their list holds one module again and again."""
    try:
        yield
    except (CaptureError, RaiseError) as error:
        place = (error.where or "").rpartition(" at ")[0]
        found = next((path for path in _of_one_module(model) if _is_near(path, place)), None)
        if found is None or (isinstance(error, RaiseError) and error.is_dense):
            raise
        entries = model.get_submodule(found)._modules
        told = type(error)(
            f"`{found}` holds one module, `{found}.{next(iter(entries))}`, {len(entries)} times: {error.what}",
            where=error.where,
            hint="give every expert a module of its own, as copy.deepcopy makes it; if all experts are to be one, call "
            "it once for all rows, or compile over a mesh without 'ep'",
        )
        vars(told).update({name: each for name, each in vars(error).items() if name not in vars(told)})
        raise told from error


def _of_one_module(model: nn.Module) -> Iterator[str]:
    """Lists whose entries are all one module that may be an expert."""
    for path, module in model.named_modules():
        entries = list(module._modules.values()) if isinstance(module, LISTS) else []
        if len(entries) > 1 and len(set(entries)) == 1:
            within = list(entries[0].modules())
            nested = any(isinstance(m, LISTS) or _is_stacked(m) for m in within)
            if next(entries[0].parameters(), None) is not None and not nested:
                yield path


def _is_near(path: str, place: str) -> bool:
    """Whether a list is a part of the module at a place, or of one around it."""
    around = path.rpartition(".")[0]
    return f"{place}.".startswith(f"{around}." if around else "") or path.startswith(f"{place}." if place else "")


def _is_stacked(module: nn.Module) -> bool:
    own = module.parameters(recurse=False)
    return any(p.dim() >= 3 and p.shape[0] > 1 for p in own) and not isinstance(module, _CONVOLUTIONS)


def _is_chain(calls: list[list[Call] | None]) -> bool:
    """Whether modules are layers behind one another: those that are called are so once, with all tokens [B, S, ..], but
    every one with another tensor. Experts get a part of the tokens, or all the same ones."""
    called = [each for each in calls if each]
    if len(called) < 2 or any(len(each) != 1 or not each[0][0] for each in called):
        return False
    inputs = [each[0][0][0] for each in called]
    if not all(isinstance(x, Tensor) and x.dim() >= 3 for x in inputs):
        return False
    storages = {x.untyped_storage().data_ptr() for x in inputs}
    return len({x.shape for x in inputs}) == 1 and len(storages) == len(inputs)


def _are_experts(children: list[nn.Module]) -> bool:
    """Several modules of one kind, with matrices and without lists or experts in them, beside any without parameters;
    layers of a model have blocks inside."""
    children = [child for child in children if next(child.parameters(), None) is not None]
    shapes = {(type(c), tuple(tuple(p.shape) for p in c.parameters())) for c in children}
    nested = any(isinstance(m, LISTS) or _is_stacked(m) for c in children for m in c.modules())
    return len(children) > 1 and len(shapes) == 1 and any(len(s) > 1 for s in next(iter(shapes))[1]) and not nested
