"""The file in which `Options(tune_file=..)` remembers what was measured: JSON, by machine and model."""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

SCHEMA = 1


def read(path: Path, key: str) -> dict[str, Any] | None:
    """What is remembered under a key; None: nothing. Warns of a file that is damaged, or of a newer version."""
    return _load(path).get(key)


def write(path: Path, key: str, state: dict[str, Any]) -> None:
    """Beside what is there under other keys; the file is replaced whole. Warns where it cannot be."""
    data = {"moefx_tuning": SCHEMA, "found": {**_load(path), key: state}}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            file.write(json.dumps(data, indent=1) + "\n")
        os.replace(file.name, path)
    except OSError as error:
        warnings.warn(f"what was tuned is not written to {path}: {error}", stacklevel=2)


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
    warnings.warn(f"{path} holds nothing that was tuned, and is not read: {reason}", stacklevel=3)
    return {}
