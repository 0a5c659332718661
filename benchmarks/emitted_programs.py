"""Emitted programs before and after a change of moefx's own code: are they the same text?

    python benchmarks/emitted_programs.py write DIR          in each of the two trees
    python benchmarks/emitted_programs.py compare DIR DIR    differing lines by setting, names of modules aside

A tiny Qwen3-MoE in settings that use all features, compiled as rank 0 of a fake world, forward and backward. The same
text does the same to the bit. Exits with 1 where some program differs.
"""

from __future__ import annotations

import argparse
import difflib
import math
import re
import sys
import warnings
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import moefx  # noqa: E402
from benchmarks.equal_layers import SETTINGS  # noqa: E402
from tests.support.families import case_of  # noqa: E402
from tests.support.ranks import fake_world  # noqa: E402

NODES = {"ranks_per_node": 2}
MORE: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "plain": ({"ep": 2}, {}),
    "dedup": ({"ep": 4}, {"alltoall": "dedup", **NODES}),
    "dedup, s3": ({"ep": 4, "esp": 2}, {"alltoall": "dedup", "split": "s3", **NODES}),
    "2dh, bf16": ({"ep": 4}, {"alltoall": "2dh", "codec": "bf16", "chunks": 2, **NODES}),
    "baseline": ({"ep": 2, "mp": 2, "esp": 2}, {"split": "baseline"}),
    "r=0": ({"ep": 2, "esp": 2}, {"r": 0}),
    "keep=mpipemoe-s4": ({"ep": 2}, {"chunks": 2, "keep": "mpipemoe-s4"}),
    "keep=lean": ({"ep": 2}, {"keep": "lean"}),
    "formula=mpipemoe": ({"ep": 2}, {"formula": "mpipemoe", "machine": "emulated-200mbit", "chunks": 2}),
    "formula=tutel": ({"ep": 2, "esp": 2}, {"formula": "tutel", "machine": "emulated-200mbit"}),
    "calibrated": ({"ep": 2}, {"placement": "calibrated", "chunks": 2}),
    "fastermoe": ({"ep": 2}, {"placement": "fastermoe"}),
    "planned": ({"dp": 2, "ep": 4}, {"machine": "emulated-200mbit", **NODES}),
}
# Where functions live is told by their names; a change may move them.
_HOMES = re.compile(r"^(from|import) .*$|\b(?:[a-z_]+\.)+(?=\w+\()| +(?= #)", re.M)


def write(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, (axes, options) in (SETTINGS | MORE).items():
        with fake_world(math.prod(axes.values())), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
            case = case_of("qwen3_moe")
            with closing(moefx.compile(case.build(), mesh, **options)) as model:
                model.prepare(**case.batch(0))
                code = moefx.inspect(model).code
        text = "\n".join(f"# {part}\n{source}" for part, source in code.items())
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
        print(f"{name}: {len(text.splitlines())} lines", flush=True)


def compare(before: Path, after: Path) -> int:
    different = 0
    print("| setting | lines | differing |\n|---|---|---|")
    for path in sorted(before.glob("*.py")):
        old, new = (list(filter(None, _HOMES.sub("", each.read_text(encoding="utf-8")).splitlines()))
                    for each in (path, after / path.name))  # fmt: skip
        lines = [line for line in difflib.unified_diff(old, new, lineterm="", n=0) if line[:3] not in ("---", "+++")]
        different += bool(lines)
        print(f"| {path.stem} | {len(old)} | {len(lines) or 'none'} |")
        print(*lines[:6], sep="\n", end="\n" if lines else "", file=sys.stderr)
    return different


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("write", "compare"))
    parser.add_argument("folders", nargs="+", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.what == "write":
        write(given.folders[0])
    else:
        sys.exit(bool(compare(*given.folders)))


if __name__ == "__main__":
    main()
