"""Pickles in the files of a checkpoint, read without running what stands in them: a file may come from anywhere.

torch reads the `.metadata` of `torch.distributed.checkpoint` (DCP) and what it saves besides tensors by plain pickle,
which calls whatever a file names. Both are looked at here first.
"""

from __future__ import annotations

import enum
import io
import pickle
import re
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, ReadItem
from torch.distributed.checkpoint.metadata import Metadata

from moefx.errors import CheckpointError

METADATA = ".metadata"
_DCP = "torch.distributed.checkpoint."
# What DCP writes into its metadata, besides dtypes. Nothing of it does anything when it is called.
_KNOWN = {
    *((f"{_DCP}metadata", name) for name in (
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING")),
    (f"{_DCP}filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    *(("pathlib", name) for name in ("Path", "PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")),
    *(("pathlib._local", name) for name in ("Path", "PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")),
    ("collections", "OrderedDict"),
}  # fmt: skip


class UntrustedError(CheckpointError):
    """A file of a checkpoint holds something else than plain data."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member  # Python 3.11.0 to 3.11.3 write members of an Enum so
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and (module, name) not in _KNOWN:
            raise _untrusted(METADATA, f"{module}.{name}")
        return super().find_class(module, name)


def _member(of: Any, name: str) -> Any:
    if not isinstance(of, enum.EnumMeta) or name not in of.__members__:
        raise _untrusted(METADATA, "builtins.getattr")
    return of[name]


def _untrusted(what: str, name: str | None, error: Exception | None = None) -> UntrustedError:
    found = f"names `{name}`, which is not plain data" if name else f"is not plain data ({type(error).__name__})"
    return UntrustedError(f"{what} {found}; nothing of it was run",
                          hint="load it by what wrote it, if you trust that, and save it again")  # fmt: skip


def read_metadata(folder: Path) -> Metadata:
    """What `.metadata` of a checkpoint holds. Raises UntrustedError if it names anything but what DCP writes."""
    try:
        with open(folder / METADATA, "rb") as file:
            found = _Unpickler(file).load()
    except CheckpointError:
        raise
    except Exception as error:
        raise _untrusted(METADATA, None, error) from error
    if not isinstance(found, Metadata):
        raise _untrusted(METADATA, None, TypeError(f"it holds a {type(found).__name__}"))
    return found


def packed(what: str, value: Any) -> bytes:
    """`value` as a file. What could not be read back is refused now, not when it is needed: CheckpointError."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    try:
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    except Exception as error:
        name = _named(error)
        raise CheckpointError(
            f"{what} holds something else than numbers, strings, tensors and containers of them: "
            f"{name or type(error).__name__}",
            hint="leave it out; or name its class by torch.serialization.add_safe_globals, also when you load",
        ) from error
    return buffer.getvalue()


def unpacked(what: str, file: Path | io.BytesIO) -> Any:
    """What `packed` made a file of; tensors are on the CPU. Raises UntrustedError."""
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        raise _untrusted(what, _named(error), error) from error


def _named(error: Exception) -> str | None:
    """The class or function that torch did not take from a file."""
    found = re.search(r"GLOBAL ([\w.]+)", str(error))
    return found[1] if found else None


class Planner(DefaultLoadPlanner):
    """DCP's own. Besides tensors it takes plain data alone. Raises UntrustedError."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        unpacked(f"`{read_item.dest_index.fqn}`", io.BytesIO(value.getbuffer()))
        super().load_bytes(read_item, value)

