"""What processes print of an error of moefx that nobody catches: its words, once.

All ranks raise, since all have to stop; the lowest one that knows prints. Its traceback has the user's frames alone,
unless MOEFX_TRACEBACK=1. torchrun, which prints some thirty lines of its own, gets the words for its last lines.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
import time
import types
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from moefx import _torch_compat as compat
from moefx.errors import MoefxError

_MIXED = "got mixed torch.Tensor and DTensor"
_COPIES = "load into the compiled model; or, to load into a plain one, save {name: p.full_tensor()}, on all ranks, " \
    "or use moefx.checkpoint"  # fmt: skip
_OTHERS = "call what moefx.compile returned, not a part of it; for other uses p.to_local() is this rank's part of a " \
    "parameter, p.full_tensor(), on all ranks, the whole"  # fmt: skip
_WAIT_S = 3.0  # for lower ranks, whose words would be the same
_OWN = os.path.dirname(os.path.abspath(__file__)) + os.sep
_HIDDEN = (_OWN, os.path.dirname(os.path.abspath(torch.__file__)) + os.sep)


def install() -> None:
    """Print errors of moefx in this way; others are left to the hook that is there."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        _explain_mixed(error)
        words = error.what if isinstance(error, MoefxError) else str(error)
        if not isinstance(error, MoefxError) and not words.startswith(_MIXED):
            before(kind, error, trace)
            return
        found: list[int | None] = []
        asking = threading.Thread(target=lambda: found.append(_teller(f"{kind.__name__} {words}")), daemon=True)
        asking.start()
        asking.join(2 * _WAIT_S + 1)  # who has the store may be gone
        if (teller := found[0] if found else None) is None:
            _tell_torchrun(f"{kind.__name__}: {error}")
            before(kind, *(error, trace) if os.environ.get("MOEFX_TRACEBACK") == "1" else _shortened(error, trace))
        else:
            _tell_torchrun(f"{kind.__name__}, as rank {teller} says")

    sys.excepthook = hook


def _explain_mixed(error: BaseException) -> None:
    """torch's error of an op on a parameter, which is a DTensor, and a plain tensor. `load_state_dict` lists one for
    every parameter."""
    text = str(error)
    if not isinstance(error, RuntimeError) or _MIXED not in text:
        return
    op = text[: text.index(_MIXED)].split()[-1].strip("(':\"")
    hint = _COPIES if op.startswith("aten.copy_") else _OTHERS
    error.args = (f"{_MIXED} in {op}, and parameters of a compiled model are DTensors\n  try: {hint}",)


def _shortened(error: BaseException, trace: types.TracebackType | None) -> tuple[Any, Any]:
    """Without frames of moefx and torch, and without the errors that it came from. The process ends behind this."""
    frames = []
    while trace is not None:
        if not trace.tb_frame.f_code.co_filename.startswith(_HIDDEN):
            frames.append(trace)
        trace = trace.tb_next
    for frame in reversed(frames):
        trace = types.TracebackType(trace, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    error.__cause__, error.__suppress_context__ = None, True
    footnote = "\n  (MOEFX_TRACEBACK=1 shows where in moefx, and what it came from)"
    if isinstance(error, MoefxError):
        error.footnote = footnote
    else:
        error.args = (f"{error}{footnote}",)
    return error.with_traceback(trace), trace


def _teller(words: str) -> int | None:
    """Which other rank prints these words; None: this one does."""
    try:
        rank, store = _rank_and_store()
        if store is None:
            return None
        name = hashlib.sha256(words.encode()).hexdigest()[:16]
        key = f"moefx/uncaught/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{name}"
        lowest = _lowest(store, key, rank)
        until = time.monotonic() + _WAIT_S
        while lowest == rank and rank and time.monotonic() < until:
            time.sleep(0.05)
            lowest = _lowest(store, key, rank)
        return lowest if lowest < rank or store.add(f"{key}/told", 1) > 1 else None
    except Exception:  # the store went away with the rank that had it
        return None


def _rank_and_store() -> tuple[int, dist.Store | None]:
    """Before there is a process group: torchrun's own store."""
    if dist.is_initialized():
        return dist.get_rank(), compat.default_store() if dist.get_world_size() > 1 else None
    env = os.environ
    if env.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or env.get("WORLD_SIZE", "1") == "1":
        return 0, None
    store = dist.TCPStore(env["MASTER_ADDR"], int(env["MASTER_PORT"]), is_master=False, wait_for_workers=False,
                          timeout=timedelta(seconds=_WAIT_S))  # fmt: skip
    return int(env["RANK"]), store


def _lowest(store: dist.Store, key: str, rank: int) -> int:
    """The lowest of all ranks that have asked this until now, `rank` among them."""
    found = int(store.compare_set(key, "", str(rank)))
    while found > rank:
        found = int(store.compare_set(key, str(found), str(rank)))
    return found


def _tell_torchrun(words: str) -> None:
    """In the form of `torch.distributed.elastic`: it ends with what it finds in this file."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path and not os.path.exists(path):
        extra = {"py_callstack": words, "timestamp": str(int(time.time()))}
        try:
            with open(path, "w") as file:
                json.dump({"message": {"message": words, "extraInfo": extra}}, file)
        except OSError:
            return
