"""The folder of the cache: entries that are whole, of this user alone, and together no larger than a bound.

    ~/.cache/moefx/3f0c...e1.json          one line "moefx 1 <sha256 of the rest>", then JSON

Whoever can write to the folder can have code run by all who read it, as in a folder of Python modules. So the folder,
and every entry, must belong to this user, and nobody else may write to it, nor put another in the place of a folder
above it. The digest shows damage, not malice.

Entries are written into a file of another name, which then gets the right one: readers find a whole entry or none, and
of two who write at once the last one stays.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import stat
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

log = logging.getLogger("moefx")

MOST_BYTES = 1 << 30
_FORM = b"moefx 1 "  # another one where entries have another form
_LEFT_OVER_S = 3600.0  # after which nobody is still writing a file


class Refused(Exception):
    """A folder or an entry that is not to be trusted, or is no whole entry; the text says why."""


@dataclass(frozen=True)
class Entry:
    """A file of the cache. used: when it was last read or written, in seconds since 1970."""

    path: Path
    nbytes: int
    used: float


def chosen(text: str | None = None) -> Path | None:
    """Where `MOEFX_CACHE` says: None for "off", ~/.cache/moefx where it says nothing."""
    text = os.environ.get("MOEFX_CACHE", "") if text is None else text
    if text.strip().lower() in ("off", "0"):
        return None
    if text.strip():
        return Path(text).expanduser().absolute()
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser().absolute() / "moefx"


class Folder:
    """A folder of entries. Made, for this user alone, when something is first written."""

    def __init__(self, path: Path, most: int = MOST_BYTES) -> None:
        self.path, self.most = path, most

    def read(self, name: str, *, use: bool = True) -> dict[str, Any] | None:
        """The entry of this name; None if there is none. Raises Refused for one that is damaged, or that others could
        have written. use: it counts as used now."""
        path = self._path(name)
        if not os.path.lexists(path):
            return None
        self._check()
        with self._opened(path) as file:
            head, _, body = file.read().partition(b"\n")
        if head != _FORM + hashlib.sha256(body).hexdigest().encode():
            raise Refused(f"{path} is damaged, or of another version")
        if use:
            with contextlib.suppress(OSError):
                os.utime(path)
        return json.loads(body)

    def write(self, name: str, data: dict[str, Any]) -> Path:
        """Keep an entry; the oldest ones make room. Raises Refused, or OSError where it cannot be written."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._check()
        body = json.dumps(data, separators=(",", ":")).encode()
        handle, temporary = tempfile.mkstemp(prefix=".new-", dir=self.path)  # of this user alone
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(_FORM + hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
            os.replace(temporary, self._path(name))
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        self._make_room(self._path(name))
        return self._path(name)

    def entries(self) -> list[Entry]:
        """All that are there, those that were used last first."""
        found = []
        for path in self.path.glob("*.json"):
            with contextlib.suppress(OSError):  # gone meanwhile
                state = path.stat()
                found.append(Entry(path, state.st_size, state.st_mtime))
        return sorted(found, key=lambda entry: -entry.used)

    def model_of(self, entry: Entry) -> str:
        """The class of the model, in words for one who reads a list."""
        try:
            data = self.read(entry.path.stem, use=False)
        except (Refused, ValueError) as error:
            return f"not to be read: {error}"
        return "gone" if data is None else str(data.get("model"))

    def clear(self) -> int:
        """Remove all entries; how many there were."""
        found = [*self.entries(), *self._left_over(0.0)]
        for entry in found:
            entry.path.unlink(missing_ok=True)
        return sum(entry.path.suffix == ".json" for entry in found)

    def _make_room(self, newest: Path) -> None:
        total, gone = 0, self._left_over(_LEFT_OVER_S)
        for entry in sorted(self.entries(), key=lambda entry: entry.path != newest):
            total += entry.nbytes
            gone += [entry] if total > self.most else []
        for entry in gone:
            entry.path.unlink(missing_ok=True)

    def _left_over(self, age: float) -> list[Entry]:
        """Files of writers that were killed."""
        found = []
        for path in self.path.glob(".new-*"):
            with contextlib.suppress(OSError):
                state = path.stat()
                if time.time() - state.st_mtime >= age:
                    found.append(Entry(path, state.st_size, state.st_mtime))
        return found

    def _path(self, name: str) -> Path:
        return self.path / f"{name}.json"

    def _check(self) -> None:
        """Raises Refused where others could write to the folder, or put another one in its place."""
        here = self.path.resolve()
        _check_own(os.stat(here), here)
        for above in here.parents:
            state = os.stat(above)
            if state.st_uid not in (0, os.geteuid()):
                raise Refused(f"{above} belongs to another user")
            if state.st_mode & 0o022 and not state.st_mode & stat.S_ISVTX:
                raise Refused(f"others can write to {above}")

    def _opened(self, path: Path) -> Any:
        try:
            file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb")
        except OSError as error:
            raise Refused(f"{path} cannot be read: {error}") from error
        try:
            _check_own(os.fstat(file.fileno()), path)
        except BaseException:
            file.close()
            raise
        return file


def _check_own(state: os.stat_result, path: Path) -> None:
    if state.st_uid != os.geteuid():
        raise Refused(f"{path} belongs to another user")
    if state.st_mode & 0o022:
        raise Refused(f"others can write to {path}")
