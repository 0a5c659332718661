"""Values for a model that was compiled on the meta device: drawn by an initialiser, or read from safetensors files; and
such files written again.

No rank ever holds all experts. An initialiser sees one module at a time, whole, for a moment. From files every rank
reads the blocks of tensors that it stores. Writing gathers one parameter after the other.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moefx import progress
from moefx.errors import CheckpointError, UnsupportedUse
from moefx.layout import Layout
from moefx.link.program import Home
from moefx.runtime import parameters
from moefx.runtime.session import Session
from moefx.runtime.together import Ranks
from moefx.weights import transformers_names as transformers_weights
from moefx.weights.transformers_names import Recipe

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
FILE_BYTES = 5 * 10**9  # the most that one file is given
InitFn = Callable[[nn.Module], object]


def pending(model: nn.Module) -> list[str]:
    """The parameters and buffers without a value: those on the meta device, by their first names."""
    held = [(n, parameters.local(p) if isinstance(p, DTensor) else p) for n, p in model.named_parameters()]
    return [name for name, tensor in [*held, *model.named_buffers()] if tensor.is_meta]


def allocate(home: Home) -> None:
    """Give all that is pending memory of undefined values, each rank its own part."""
    device = home.session.device
    home.stacks.update({key: stack.allocated(device) for key, stack in home.stacks.items()})
    for name, param in home.params.items():
        parameters.allocate(param, device, home.memory.get(name))
    for module in home.model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device=device)


def fill(home: Home, names: list[str], source: InitFn | str | os.PathLike, init_fn: InitFn | None, seed: int,
         ranks: Ranks) -> None:  # fmt: skip
    """Give what is pending, `names`, its values from where `CompiledModule.materialize` says."""
    allocate(home)
    if callable(source):
        init_fn = source
    else:
        filled = ranks.each("reading weights", lambda: read(home, Path(source)))
        names = [name for name in names if name not in set(filled)]
        init_fn = init_fn or transformers_weights.initialiser(home.model)
    if names and init_fn is None:
        raise UnsupportedUse(f"files have no values for {', '.join(names[:4])}", hint="give materialize an init_fn")
    if names:
        check_set(ranks.each("setting values", lambda: initialise(home, init_fn, names, seed)))


# -- from an initialiser -------------------------------------------------------------------------------------------


def initialise(home: Home, init_fn: InitFn, names: list[str], seed: int) -> list[str]:
    """Call `init_fn(module)` for every module with tensors of its own that are in `names`, in the order of
    `model.modules()`, with whole tensors in place, and keep this rank's part. All ranks draw the same numbers.

    Returns the tensors that it left as they were.
    """
    wanted, device = set(names), home.session.device
    tied = {id(p) for n, p in home.params.items() if n in wanted}
    left: list[str] = []
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.no_grad():
        torch.manual_seed(seed)
        modules = [*home.model.named_modules()]
        for number, (path, module) in enumerate(modules):
            progress.step(path, number, len(modules))
            params = {n: p for n, p in module._parameters.items() if p is not None}
            buffers = {n: b for n, b in module._buffers.items() if b is not None}
            prefix = f"{path}." if path else ""
            due = [n for n in params if id(params[n]) in tied] + [n for n in buffers if prefix + n in wanted]
            if not due:
                continue
            with _whole(module, params, buffers, device) as whole:
                init_fn(module)
                for name in due:
                    value = whole(name)
                    if value is None:
                        left.append(prefix + name)
                    elif name in params:
                        parameters.load_full_(params[name], value)
                    else:
                        buffers[name].copy_(value)
    return left


def check_set(left: list[str]) -> None:
    """Raises UnsupportedUse where an init_fn left tensors without a value."""
    if left:
        raise UnsupportedUse(
            f"init_fn left {len(left)} tensors without a value: {', '.join(left[:4])}{', ..' if len(left) > 4 else ''}",
            hint="init_fn(module) sets every parameter and buffer that the module itself has",
        )


@contextlib.contextmanager
def _whole(module: nn.Module, params: dict[str, nn.Parameter], buffers: dict[str, Tensor],
           device: torch.device) -> Iterator[Callable[[str], Tensor | None]]:  # fmt: skip
    """The module with whole, plain tensors; gives them by name as they are then, None if nobody has written to them."""
    for name, param in params.items():
        module._parameters[name] = nn.Parameter(_unset(param, device), requires_grad=param.requires_grad)
    for name, buffer in buffers.items():
        module._buffers[name] = _unset(buffer, device)
    given = {**module._parameters, **module._buffers}
    versions = {name: given[name]._version for name in (*params, *buffers)}

    def whole(name: str) -> Tensor | None:
        found = module._parameters.get(name, module._buffers.get(name)).detach()
        if found.is_floating_point() or found.is_complex():
            nobody = found.numel() > 0 and (found.float() if found.itemsize == 1 else found).isnan().all()
        else:  # versions do not count what is written to `.data`
            same = found.data_ptr() == given[name].data_ptr() and given[name]._version == versions[name]
            nobody = same and found.numel() > 0 and torch.equal(found, _unset(found, device))
        return None if nobody else found

    try:
        yield whole
    finally:
        module._parameters.update(params)
        module._buffers.update(buffers)


def _unset(tensor: Tensor, device: torch.device) -> Tensor:
    """Values that nobody means: NaN, a large number, true and false in turns."""
    found = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    if found.dtype == torch.bool:
        return (torch.arange(found.numel(), device=device) % 2 == 0).view(found.shape)
    is_exact = not found.is_floating_point() and not found.is_complex()
    return found.fill_(torch.iinfo(found.dtype).max - 41 if is_exact else math.nan)


# -- from files ----------------------------------------------------------------------------------------------------


class Files:
    """The safetensors files of a checkpoint: a folder with an index or one file, or the file itself."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file_of = _contents(path)
        self._open: dict[Path, Any] = {}

    @property
    def names(self) -> list[str]:
        return list(self._file_of)

    def read(self, name: str, block: tuple[slice, ...] | None = None) -> Tensor:
        """One tensor, or a block of it."""
        opened = self._opened(name)
        is_whole = block is None or [each.stop - each.start for each in block] == self.shape(name)
        return opened.get_tensor(name) if is_whole else opened.get_slice(name)[block]

    def shape(self, name: str) -> list[int]:
        return self._opened(name).get_slice(name).get_shape()

    def _opened(self, name: str) -> Any:
        file = self._file_of[name]
        if file not in self._open:
            self._open[file] = _opened(file)
        return self._open[file]


def _opened(file: Path) -> Any:
    try:
        return safe_open(str(file), framework="pt")
    except Exception as error:
        raise CheckpointError(f"{file} is not a whole safetensors file: {error}") from error


def _contents(path: Path) -> dict[str, Path]:
    """{tensor: its file}. Raises CheckpointError."""
    if path.is_file():
        files = [path]
    elif (path / INDEX).is_file():
        try:
            named = dict(json.loads((path / INDEX).read_text())["weight_map"])
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path / INDEX} is damaged: {error!r}") from error
        absent = sorted({file for file in named.values() if not (path / file).is_file()})
        if absent:
            raise CheckpointError(f"{path} lacks {', '.join(absent[:4])}", hint="its index names these files")
        return {name: path / file for name, file in named.items()}
    else:
        files = [path / SINGLE] if (path / SINGLE).is_file() else sorted(path.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"there are no safetensors files in {path}", hint=f"{SINGLE}, or several with {INDEX}")
    found = {}
    for file in files:
        with _opened(file) as opened:
            names = list(opened.keys())
        twice = sorted(set(names) & set(found))
        if twice:
            raise CheckpointError(f"{path} has `{twice[0]}` in several files", hint=f"an {INDEX} says which one counts")
        found.update(dict.fromkeys(names, file))
    return found


def read(home: Home, path: Path) -> list[str]:
    """Fill parameters and saved buffers, all allocated, from files; the names of the tensors that were filled.

    Raises CheckpointError where a tensor is missing or has another shape; of what the files have besides, it warns.
    """
    files = Files(path)
    recipes = transformers_weights.recipes(home.model, files.names)
    saved = home.model.state_dict()
    filled, missing = [], []
    targets = [*home.model.named_parameters(), *home.model.named_buffers()]
    for number, (name, target) in enumerate(targets):
        progress.step(name, number, len(targets))
        aliases = [n for n, p in home.params.items() if p is target] or [name]
        known = next((recipes[alias] for alias in aliases if alias in recipes), None)
        if known is not None:
            _fill(name, target, known, files)
            filled.append(name)
        elif name in saved:
            missing.append(name)
    if missing:
        raise CheckpointError(
            f"{path} has no values for {len(missing)} tensors: {', '.join(missing[:4])}",
            hint=f"it has {', '.join(files.names[:4])}, ..",
        )
    taken = {key for recipe in recipes.values() for keys in recipe.sources.values() for key in keys}
    unused = [key for key in files.names if key not in taken]
    unused += [name for name in recipes if name not in saved]
    if unused:
        home.session.tell(f"{path} has {len(unused)} tensors that the model does not: {', '.join(unused[:4])}")
    return filled


def _fill(name: str, target: Tensor, recipe: Recipe, files: Files) -> None:
    is_spread = isinstance(target, DTensor)
    local = parameters.local(target) if is_spread else target
    boxes = parameters.boxes(target) if is_spread else Layout().boxes(target.shape, {}, {})
    if not boxes:
        return  # another rank stores all of it
    try:
        values, shape = recipe.blocks(files.read, files.shape, [box.slices for box in boxes])
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"`{name}` cannot be read from {files.path}: {error}") from error
    if shape != list(target.shape):
        raise CheckpointError(f"`{name}` has shape {tuple(shape)} in {files.path}, not {tuple(target.shape)}")
    for box, value in zip(boxes, values):
        if value.dtype != local.dtype and local.is_floating_point() and (
            not value.is_floating_point() or value.itemsize == 1
        ):
            raise CheckpointError(f"`{name}` is of {value.dtype} in {files.path}, not {local.dtype}",
                                  hint="its scales would be left out: give materialize a checkpoint of plain numbers")
        with torch.no_grad():
            box.of_local(local).copy_(value)


# -- into files ----------------------------------------------------------------------------------------------------


def write(home: Home, folder: Path, ranks: Ranks, max_file_bytes: int, replace: bool = False) -> None:
    """Write the model as safetensors files with an index, in the names of its own checkpoints, by the first rank.

    replace: whether model files that are in the folder give way. Files appear when all is written, the index last.
    A collective of all ranks. Raises CheckpointError on all of them.
    """
    ranks.check_alike("writing weights", folder=str(folder), max_file_bytes=max_file_bytes)
    draft = Path(ranks.first("preparing", lambda: str(_draft(folder, replace))))
    groups = _groups(home.model)
    placed: dict[str, int] = {}
    files, total = 0, 0
    waiting: dict[str, Tensor] = {}

    def flush() -> None:
        nonlocal files, waiting
        save_file(waiting, str(draft / f"{files}.part"), metadata={"format": "pt"})
        placed.update(dict.fromkeys(waiting, files))
        files, waiting = files + 1, {}

    def take(values: Mapping[str, Tensor]) -> None:
        nonlocal total
        for name, tensor in transformers_weights.as_saved(home.model, values).items():
            size = tensor.numel() * tensor.itemsize
            if waiting and sum(t.numel() * t.itemsize for t in waiting.values()) + size > max_file_bytes:
                flush()
            waiting[name] = tensor.contiguous().cpu()
            total += size

    try:
        for number, group in enumerate(groups):
            progress.step(group[0][0], number, len(groups))
            values = {}
            for name, tensor in group:
                whole = gathered(home.session, ranks, name, tensor)
                if ranks.index == 0:
                    values[name] = whole
            ranks.first("writing weights", lambda values=values: take(values))
        ranks.first("writing weights", flush)
        ranks.first("finishing", lambda: _publish(home.model, draft, folder, placed, files, total))
    finally:
        if ranks.index == 0:
            shutil.rmtree(draft, ignore_errors=True)


def gathered(session: Session, ranks: Ranks, name: str, tensor: Tensor) -> Tensor:
    """The whole of it, on every rank."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    doing = f"gathering {name}"
    with session.guard(doing, ranks.axes):
        if ranks.size > 1:  # DTensors wait as long as the default group does
            session.meet(doing, ranks.axes)
        return parameters.full(tensor)


def _draft(folder: Path, replace: bool) -> Path:
    if folder.is_file():
        raise CheckpointError(f"{folder} is a file", hint="name a folder")
    found = [each.name for each in folder.glob("*.safetensors")] if folder.is_dir() else []
    if found and not replace:
        raise CheckpointError(f"{folder} has weights already: {found[0]}", hint="name an empty folder")
    for left_behind in folder.glob(".part-*") if folder.is_dir() else ():  # by a run that was killed
        shutil.rmtree(left_behind)
    draft = folder / f".part-{uuid.uuid4().hex[:8]}"
    draft.mkdir(parents=True)
    return draft


def _groups(model: nn.Module) -> list[list[tuple[str, Tensor]]]:
    """What is saved, layer by layer: what is converted together stays together. Tied parameters count once."""
    saved = model.state_dict(keep_vars=True)
    seen: set[int] = set()
    groups: dict[str, list[tuple[str, Tensor]]] = {}
    for name, tensor in saved.items():
        if isinstance(tensor, Tensor) and id(tensor) not in seen:
            seen.add(id(tensor))
            layer = re.match(r".*?\.\d+(?=\.)", name)
            groups.setdefault(layer.group() if layer else name, []).append((name, tensor))
    return list(groups.values())


def _publish(model: nn.Module, draft: Path, folder: Path, placed: dict[str, int], files: int, total: int) -> None:
    for old in (folder / INDEX, folder / SINGLE, *folder.glob("model-*-of-*.safetensors")):
        old.unlink(missing_ok=True)
    if files == 1:
        os.replace(draft / "0.part", folder / SINGLE)
    else:
        names = [f"model-{number + 1:05}-of-{files:05}.safetensors" for number in range(files)]
        for number, name in enumerate(names):
            os.replace(draft / f"{number}.part", folder / name)
        numbers = {"total_parameters": sum(p.numel() for p in model.parameters()), "total_size": total}
        index = {"metadata": numbers, "weight_map": {n: names[f] for n, f in sorted(placed.items())}}
        (draft / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        os.replace(draft / INDEX, folder / INDEX)
    transformers_weights.save_config(model, folder)
