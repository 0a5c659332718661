"""The file in which `Tune(file=..)` remembers what was measured: JSON, by machine and model. And logs of which
calls had which arm, to run them again."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moefx.errors import MoefxError, warn
from moefx.options import Arm, Options

SCHEMA = 1


def read(path: Path, key: str) -> dict[str, Any] | None:
    """What is remembered under a key; None: nothing. Warns of a file that is damaged, or of a newer version."""
    return _load(path).get(key)


def write(path: Path, key: str, state: dict[str, Any]) -> None:
    """Beside what is there under other keys; the file is replaced whole. Warns where it cannot be."""
    _write(path, {"moefx_tuning": SCHEMA, "found": {**_load(path), key: state}})


def write_log(path: Path, ran: Sequence[tuple[int, Arm]]) -> None:
    """ran: (the first call, its arm) of calls with one arm. Warns where it cannot be written."""
    _write(path, {"moefx_tuning_log": SCHEMA, "ran": [[call, arm] for call, arm in ran]})


def read_log(path: Path) -> list[tuple[int, Arm]] | str:
    """What was written, or why it cannot be read."""
    try:
        data = json.loads(path.read_text())
        if data["moefx_tuning_log"] != SCHEMA:
            return f"it is of version {data['moefx_tuning_log']}, and this moefx reads {SCHEMA}"
        found = [(int(call), tuple((str(name), value) for name, value in arm)) for call, arm in data["ran"]]
        for _, arm in found:
            Options().changed(**dict(arm))  # raises for choices that are none
        return found or "there are no calls in it"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return repr(error)
    except MoefxError as error:
        return error.what


def _write(path: Path, data: dict[str, Any]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            file.write(json.dumps(data, indent=1) + "\n")
        try:
            os.replace(file.name, path)
        except OSError:
            os.unlink(file.name)
            raise
    except OSError as error:
        warn(f"what was tuned is not written to {path}: {error}")


def _load(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text())
        if data["moefx_tuning"] == SCHEMA and isinstance(data["found"], dict):
            return data["found"]
        reason = f"it is of version {data['moefx_tuning']}, and this moefx reads {SCHEMA}"
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = repr(error)
    warn(f"{path} holds nothing that was tuned, and is not read: {reason}")
    return {}
