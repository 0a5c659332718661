"""Bytes of the Python standard library's source as training text, in an order that depends on the seed alone."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor

LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__", "lib2to3", "pydoc_data"}


def read_text(limit: int = 4_000_000) -> Tensor:
    """uint8 [N]: the first `limit` bytes of the standard library's .py files, in order of their paths."""
    root = Path(sysconfig.get_path("stdlib"))
    pieces, size = [], 0
    for path in sorted(root.rglob("*.py")):
        if LEFT_OUT.isdisjoint(path.relative_to(root).parts):
            pieces.append(path.read_bytes())
            size += len(pieces[-1])
            if size >= limit:
                break
    return torch.frombuffer(bytearray(b"".join(pieces)[:limit]), dtype=torch.uint8)


def counting(number: int, *, seed: int) -> list[dict[str, Tensor]]:
    """Rows of 16 numbers that count upwards, each from a number of its own: what a small model learns in seconds."""
    starts = torch.randint(0, 64, (number,), generator=torch.Generator().manual_seed(seed))
    tokens = (starts[:, None] + torch.arange(16)) % 64
    return [{"input_ids": row, "labels": row} for row in tokens]


class Batches:
    """Batches of `rows` windows of `length` bytes. In an epoch no two batches, of any step or rank, share a window."""

    def __init__(self, text: Tensor, *, rows: int, length: int, readers: int, seed: int) -> None:
        self.windows = text[: len(text) // length * length].view(-1, length)
        self.rows, self.readers, self.seed = rows, readers, seed
        self.per_epoch = len(self.windows) // (rows * readers)
        assert self.per_epoch, f"{len(text)} bytes are too few for one batch of every rank"

    def __call__(self, number: int, reader: int) -> Tensor:
        """Batch `number` (0, 1, ...) of `reader`: int64 [rows, length]."""
        epoch, place = divmod(number, self.per_epoch)
        order = torch.randperm(len(self.windows), generator=torch.Generator().manual_seed(self.seed + epoch))
        first = (place * self.readers + reader) * self.rows
        return self.windows[order[first : first + self.rows]].long()
