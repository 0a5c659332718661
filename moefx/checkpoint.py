"""Checkpoints that are whole or not there, over `torch.distributed.checkpoint` (DCP).

    directory/step-000020/             visible only when whole
        .metadata, __0_0.distcp, ...   model and optimizer, by DCP: load on any mesh, or into the plain model
        rank-00000.pt, ...             random states and `extra` of each rank
        manifest.json                  step, number of ranks, size and crc32 of every other file; written last
    directory/step-000040.tmp-1f2e     being written, or left behind by a run that was killed

A checkpoint is written under another name, synced to disk and then renamed, so that a cut at any point leaves the
older ones as they were. A directory belongs to one run at a time, and all ranks see the same files in it.

A compiled model is saved and loaded by all ranks of its mesh together: what fails on one fails on all. A plain model
is saved and loaded by one process alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import uuid
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from moefx import progress
from moefx.errors import CheckpointError, warn
from moefx.model.api import CompiledModule
from moefx.model.optimizer_state import check_known, drop_unsaved, to_load_into
from moefx.runtime import optimizer_guard
from moefx.runtime.together import Ranks, parts
from moefx.weights.plain_files import Planner, UntrustedError, packed, read_metadata, unpacked

MANIFEST = "manifest.json"
_STEP = re.compile(r"step-(\d{6,})")
_LEFT_BEHIND = re.compile(r"step-\d{6,}\.(tmp|old)-\w+")


@progress.task("saving a checkpoint")
def save(
    directory: str | os.PathLike,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    step: int,
    extra: dict[str, Any] | None = None,
    keep_last: int | None = None,
) -> Path:
    """Write `directory/step-{step}` and return its path. All ranks of a compiled model call this.

    extra: what else this rank needs to continue, such as its place in the data and `scheduler.state_dict()`: numbers,
        strings, tensors, and containers of them. Random states (torch, CUDA, Python, numpy) are saved anyway.
    keep_last: afterwards, remove all except this many of the newest whole checkpoints.
    Raises CheckpointError, on all ranks, if any rank fails, gives another directory, step or keep_last, or gives an
    optimizer when others give none, or if a whole checkpoint of that step exists. Older checkpoints then stay as they
    were. DivergenceError: copies of parameters differ (not checked with `compare_every=0`). If a rank does not come,
    it raises that or CollectiveError.
    """
    ranks = _ranks_of(model)
    ranks.each("preparing a checkpoint", lambda: _check_numbers(step, keep_last))
    kind = _kind(optimizer)
    ranks.check_alike("saving", directory=str(directory), step=step, keep_last=keep_last, optimizer=kind)
    if (compiled := _compiled(model)) is not None:  # of copies that have come apart, one would be saved
        compiled._replicas.check(compiled._homes)
    if optimizer is not None:  # what was loaded into it since its last step may be another rank's
        names = {param: name for name, param in model.named_parameters()}
        ranks.each("looking at the optimizer's state", lambda: optimizer_guard.check_state(optimizer, names))
    root = Path(directory)
    target = root / f"step-{step:06d}"
    folder = Path(ranks.first("preparing a checkpoint", lambda: str(_make_folder(root, target))))
    try:
        own = ranks.each("collecting the state", lambda: _own_state(extra, compiled))
        state = ranks.each("collecting the state", lambda: _readable(_state(model, optimizer)))
        # Apart from DCP's own collectives, in which nobody may wait for a rank that failed before them.
        ranks.each("writing a checkpoint", lambda: _write_file(folder / _own_name(ranks.index), own))
        ranks.each("writing a checkpoint", lambda: _save_state(folder, state, ranks))
        facts = ranks.each("reading back a checkpoint", lambda: _describe(folder, ranks))
        shares = ranks.gather(facts, "reading back a checkpoint")
        files = {name: fact for share in shares for name, fact in share.items()}
        ranks.first("finishing a checkpoint", lambda: _finish(folder, target, step, files, ranks))
    except CheckpointError:
        if ranks.index == 0:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    if keep_last is not None:
        ranks.first("removing old checkpoints", lambda: _prune(root, keep_last))
    return target


@progress.task("loading a checkpoint")
def load(directory: str | os.PathLike, model: nn.Module, optimizer: Optimizer | None = None) -> dict[str, Any]:
    """Load the newest whole checkpoint of `directory`, or the one whose own folder you give, in place. All ranks of a
    compiled model call this.

    If as many ranks load as have saved, each gets its own `extra` and random states back. Otherwise all get the `extra`
    of the first rank, and random states stay as they are. The mesh may be another one, before or after the first call,
    and a plain model may load what a compiled one saved. A parameter that had no gradient before the save has no state
    in the optimizer afterwards either. The files may come from anywhere: nothing in them runs.
    Returns {"step": int, "ranks": how many ranks saved it, "extra": dict}.
    Raises CheckpointError, on all ranks: there is no whole checkpoint; a file is missing, short or damaged, or holds
    something other than plain data (the error names the class or function); the checkpoint does not fit the model or
    the optimizer; or ranks give different directories, or only some give an optimizer.
    """
    ranks = _ranks_of(model)
    ranks.check_alike("loading", directory=str(directory), optimizer=_kind(optimizer))
    folder = Path(ranks.first("looking for a checkpoint", lambda: str(_choose(Path(directory)))))
    manifest = ranks.each("reading a checkpoint", lambda: _read_manifest(folder))
    ranks.each("checking a checkpoint", lambda: _check_contents(folder, manifest, ranks))
    same = manifest["ranks"] == ranks.size
    own = ranks.each("loading a checkpoint", lambda: _read_own(folder, ranks.index if same else 0))
    if (compiled := _compiled(model)) is not None and "placement" in own:
        compiled._moves.restore(ranks, compiled._runners, own["placement"])
    with to_load_into(optimizer):
        state = ranks.each("loading a checkpoint", lambda: _state(model, optimizer))
        ranks.each("loading a checkpoint", lambda: _load_state(folder, model, optimizer, state, ranks))
    if compiled is not None and "placement" in own:
        compiled._moves.restore_plans(ranks, compiled._runners, own["placement"])
    if same:
        _set_random_states(own["random"])
    return {"step": manifest["step"], "ranks": manifest["ranks"], "extra": own["extra"]}


def latest(directory: str | os.PathLike) -> Path | None:
    """The newest whole checkpoint of `directory`, judged by the sizes of its files; None if there is none."""
    return next((folder for folder in _steps(Path(directory)) if complaint(folder) is None), None)


def complaint(folder: str | os.PathLike) -> str | None:
    """Why the checkpoint in `folder` is not whole, or None; looks at the sizes of the files, not at what is in them."""
    folder = Path(folder)
    try:
        manifest = _read_manifest(folder)
    except CheckpointError as error:
        return error.what
    for name, (size, _) in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            return f"`{name}` is missing in {folder}"
        if path.stat().st_size != size:
            return f"`{name}` in {folder} has {path.stat().st_size} bytes, not {size}"
    return None


def _ranks_of(model: nn.Module) -> Ranks:
    compiled = _compiled(model)
    if compiled is None:
        return Ranks(None)
    compiled._check_values()
    return compiled._ranks()


def _compiled(model: nn.Module) -> CompiledModule | None:
    return next((m for m in model.modules() if isinstance(m, CompiledModule)), None)


def _kind(optimizer: Optimizer | None) -> str | None:
    return None if optimizer is None else type(optimizer).__name__


# ---- saving


def _check_numbers(step: Any, keep_last: Any) -> None:
    for name, number, least in (("step", step, 0), ("keep_last", 1 if keep_last is None else keep_last, 1)):
        if not isinstance(number, int) or isinstance(number, bool) or number < least:
            raise CheckpointError(f"{name} is {number!r}", hint=f"a whole number of at least {least}")


def _make_folder(root: Path, target: Path) -> Path:
    if target.exists() and complaint(target) is None:
        raise CheckpointError(f"{target} is there already", hint="resume from it, or save into another directory")
    root.mkdir(parents=True, exist_ok=True)
    for left_behind in root.iterdir():
        if _LEFT_BEHIND.fullmatch(left_behind.name):
            shutil.rmtree(left_behind)
    folder = root / f"{target.name}.tmp-{uuid.uuid4().hex[:8]}"
    folder.mkdir()
    return folder


def _state(model: nn.Module, optimizer: Optimizer | None) -> dict[str, Any]:
    """What DCP saves, or loads into. An optimizer that never stepped gets its state here."""
    if optimizer is None:
        return {"model": get_model_state_dict(model)}
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def _readable(state: dict[str, Any]) -> dict[str, Any]:
    """The same. What `load` would refuse to read is refused now: it makes plain data of what is no tensor."""
    for part, values in state.items():
        packed(f"the state of the {part}", [leaf for leaf in tree_leaves(values) if not isinstance(leaf, torch.Tensor)])
    return state


def _own_state(extra: dict[str, Any] | None, compiled: CompiledModule | None) -> bytes:
    """This rank's file."""
    own = {"random": _random_states(), "extra": extra or {}}
    return packed("`extra`", own if compiled is None else {**own, "placement": compiled.placement_state()})


def _save_state(folder: Path, state: dict[str, Any], ranks: Ranks) -> None:
    with _readable_failures():
        dcp.save(state, checkpoint_id=folder, process_group=ranks.group, no_dist=ranks.group is None)


@contextlib.contextmanager
def _readable_failures() -> Iterator[None]:
    """DCP raises, on all ranks, a BaseException that holds the error of every rank; and warns if there is one rank."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as error:
        rank, (reason, _) = next(iter(error.failures.items()))
        if isinstance(reason, UntrustedError):
            raise reason from error
        raise CheckpointError(f"rank {rank}: {parts(reason)[0]}") from error


def _write_file(path: Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _describe(folder: Path, ranks: Ranks) -> dict[str, tuple[int, int]]:
    """File name -> (size, crc32), of this rank's share of the files, once they are on disk."""
    facts = {}
    for name in sorted(os.listdir(folder))[ranks.index :: ranks.size]:
        with open(folder / name, "rb") as file:
            os.fsync(file.fileno())
        facts[name] = ((folder / name).stat().st_size, _crc32(folder / name))
    return facts


def _finish(folder: Path, target: Path, step: int, files: dict[str, tuple[int, int]], ranks: Ranks) -> None:
    manifest = {"format": 1, "step": step, "ranks": ranks.size, "files": files}
    _write_file(folder / MANIFEST, json.dumps(manifest, indent=1, sort_keys=True).encode())
    _sync_folder(folder)
    if target.exists():
        _remove(target)  # a damaged one, or _make_folder had refused
    folder.rename(target)
    _sync_folder(target.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _prune(root: Path, keep_last: int) -> None:
    whole = [folder for folder in _steps(root) if complaint(folder) is None]
    for folder in whole[keep_last:]:
        _remove(folder)


def _remove(folder: Path) -> None:
    """Under its own name, a checkpoint removed by half would look like a damaged one."""
    shutil.rmtree(folder.rename(folder.with_name(f"{folder.name}.old-{uuid.uuid4().hex[:8]}")))


# ---- loading


def _steps(root: Path) -> list[Path]:
    """The folders of checkpoints, whole or not, newest first."""
    if not root.is_dir():
        return []
    found = [path for path in root.iterdir() if _STEP.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")), reverse=True)


def _choose(path: Path) -> Path:
    if _STEP.fullmatch(path.name) or (path / MANIFEST).exists():
        trouble = complaint(path) if path.exists() else f"there is no {path}"
        if trouble is not None:
            raise CheckpointError(f"not a whole checkpoint: {trouble}", hint=_other(path))
        return path
    damaged = []
    for folder in _steps(path):
        trouble = complaint(folder)
        if trouble is None:
            if damaged:
                warn(f"loading {folder}; not whole: {'; '.join(damaged)}")
            return folder
        damaged.append(trouble)
    raise CheckpointError(f"no whole checkpoint in {path}{': ' if damaged else ''}{'; '.join(damaged)}")


def _other(folder: Path) -> str:
    whole = [other for other in _steps(folder.parent) if other.name != folder.name and complaint(other) is None]
    return f"whole is {whole[0]}" if whole else f"no other checkpoint in {folder.parent} is whole"


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    if not path.is_file():
        raise CheckpointError(f"`{MANIFEST}` is missing in {folder}")
    try:
        manifest = json.loads(path.read_bytes())
        form, step, ranks = manifest["format"], int(manifest["step"]), int(manifest["ranks"])
        files = {name: (int(size), int(crc)) for name, (size, crc) in manifest["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"`{MANIFEST}` in {folder} is short or damaged") from error
    if form != 1:
        raise CheckpointError(f"{folder} has format {form}, this moefx reads 1", hint="load it with a newer moefx")
    return {"step": step, "ranks": ranks, "files": files}


def _check_contents(folder: Path, manifest: dict[str, Any], ranks: Ranks) -> None:
    for name in sorted(manifest["files"])[ranks.index :: ranks.size]:
        if _crc32(folder / name) != manifest["files"][name][1]:
            raise CheckpointError(f"`{name}` in {folder} is damaged: its crc32 is wrong", hint=_other(folder))


def _crc32(path: Path) -> int:
    value = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            value = zlib.crc32(block, value)
    return value


def _load_state(
    folder: Path, model: nn.Module, optimizer: Optimizer | None, state: dict[str, Any], ranks: Ranks
) -> None:
    metadata = read_metadata(folder)  # which torch unpickles, too
    unsaved = set() if optimizer is None else drop_unsaved(state["optimizer"], metadata)
    try:
        with _readable_failures():
            dcp.load(state, checkpoint_id=folder, planner=Planner(), process_group=ranks.group,
                     no_dist=ranks.group is None)  # fmt: skip
        if unsaved:
            check_known(unsaved, state["optimizer"])
    except UntrustedError:
        raise
    except Exception as error:
        raise CheckpointError(f"{folder} does not fit the {'model' if optimizer is None else 'model and optimizer'}: "
                              f"{parts(error)[0]}", hint="build both as they were when it was saved") from error
    set_state_dict(model, () if optimizer is None else optimizer, model_state_dict=state["model"],
                   optim_state_dict=state.get("optimizer", {}),
                   options=StateDictOptions(strict=not unsaved))  # fmt: skip


def _own_name(index: int) -> str:
    return f"rank-{index:05d}.pt"


def _read_own(folder: Path, index: int) -> dict[str, Any]:
    return unpacked(_own_name(index), folder / _own_name(index))


# ---- random states


def _random_states() -> dict[str, Any]:
    name, keys, *rest = numpy.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "python": random.getstate(),
        "numpy": (name, keys.tolist(), *rest),
    }


def _set_random_states(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    random.setstate(states["python"])
    numpy.random.set_state(states["numpy"])
