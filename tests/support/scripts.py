"""Scripts of several ranks, as torchrun would start them, in processes that have imported torch and transformers.

That torchrun itself starts ranks of moefx is seen in tests/gloo/test_readme.py.
"""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import socket
import sys
from pathlib import Path

import torch.distributed as dist

from tests.support.ranks import run_ranks


def run_script(script: Path, *args: str, folder: Path, ranks: int = 2, timeout: float = 300.0) -> str:
    """What the first rank prints. `folder`: where they run."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    return run_ranks(ranks, _run, script, args, folder, port, timeout=timeout)[0]


def _run(rank: int, world: int, script: Path, args: tuple[str, ...], folder: Path, port: int) -> str:
    dist.destroy_process_group()  # the script makes its own
    as_torchrun = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "GROUP_RANK": 0,
                   "MASTER_ADDR": "localhost", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": port}  # fmt: skip
    os.environ.update({name: str(value) for name, value in as_torchrun.items()})
    os.chdir(folder)
    sys.argv = [str(script), *args]
    sys.path.insert(0, str(script.parent))
    with contextlib.redirect_stdout(io.StringIO()) as said:
        runpy.run_path(str(script), run_name="__main__")
    if dist.is_initialized():
        dist.destroy_process_group()
    store = dist.FileStore(f"{folder}/store-{port}", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)  # for `run_ranks` to end with
    return said.getvalue()
