"""Equal layers that are compiled once against layers that are compiled one by one: the same programs?

    python benchmarks/equal_layers.py            all; writes results/equal_layers.md
    python benchmarks/equal_layers.py mixtral    what is named; prints
    python benchmarks/equal_layers.py --raised   only what is recognised; writes results/equal_layers_raised.md

Three layers of every family of coverage.py, tiny, of every hand-written style of the tests, and of Qwen3-MoE in other
settings. Each is compiled twice as rank 0 of a fake world with two experts' ranks (unless the setting says otherwise):
with equal layers once (here two are enough, where moefx wants three), and with MOEFX_LAYERS=0. "same":
forward and backward hold the same operations of the same operands, to the bit, whatever the order of independent ones
and the names of values (analysis/checking/same.py). --raised compares the graphs behind recognition, before anything is
placed, in the same way: it takes a quarter of the time.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import re
import sys
import warnings
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial, partialmethod
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.distributed.device_mesh import init_device_mesh

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import moefx  # noqa: E402
from benchmarks.coverage import commit  # noqa: E402
from moefx.analysis.checking.same import difference, difference_of_graphs  # noqa: E402
from moefx.analysis.kinds import Kinds  # noqa: E402
from moefx.capture import regions  # noqa: E402
from moefx.compiler import pipeline  # noqa: E402
from tests.support.block_styles import BLOCK_STYLES  # noqa: E402
from tests.support.families import case_of, families  # noqa: E402
from tests.support.handmade import LanguageModel, Loop  # noqa: E402
from tests.support.layered import layered  # noqa: E402
from tests.support.mask_styles import MASK_STYLES  # noqa: E402
from tests.support.models import Case  # noqa: E402
from tests.support.op_styles import OP_STYLES  # noqa: E402
from tests.support.place_styles import PLACE_STYLES  # noqa: E402
from tests.support.ranks import fake_world  # noqa: E402
from tests.support.slice_styles import SLICE_STYLES  # noqa: E402
from tests.support.styles import STYLES  # noqa: E402
from tests.support.sum_styles import SUM_STYLES  # noqa: E402
from tests.support.weight_styles import WEIGHT_STYLES  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
ALL_STYLES = (*STYLES, *BLOCK_STYLES, *SLICE_STYLES, *MASK_STYLES, *SUM_STYLES, *WEIGHT_STYLES, *OP_STYLES,
              *PLACE_STYLES)  # fmt: skip
SETTINGS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "chunks=4": ({"ep": 2}, {"chunks": 4}),
    "chunks=4, alltoall=pipe": ({"ep": 2}, {"chunks": 4, "alltoall": "pipe"}),
    "keep=mpipemoe-s1": ({"ep": 2}, {"chunks": 2, "keep": "mpipemoe-s1"}),
    "keep=auto": ({"ep": 2}, {"chunks": 2, "keep": "auto", "machine": "emulated-200mbit", "memory_limit": 3e5}),
    "esp": ({"ep": 2, "esp": 2}, {}),
    "mp": ({"ep": 2, "mp": 2}, {}),
    "mp, split=s1": ({"ep": 2, "mp": 2}, {"split": "s1"}),
    "mp, split=s2": ({"ep": 2, "mp": 2}, {"split": "s2"}),
    "mp and esp": ({"ep": 2, "mp": 2, "esp": 2}, {}),
    "shard_dense": ({"dp": 2, "ep": 2}, {"shard_dense": True}),
    "placement=exact": ({"ep": 2}, {"placement": "exact"}),
    "placement=auto": ({"ep": 2}, {"placement": "auto", "machine": "emulated-200mbit"}),
    "r": ({"ep": 2}, {"r": 1}),
}


class Compared(Exception):
    """What follows is not asked for."""


@dataclass
class Found:
    """once: how many layers are differentiated once per kind, and of how many kinds; folded: how many were recognised
    once per kind; reasons: why others were not."""

    kinds: int = 0
    folded: int = 0
    once: int = 0
    reasons: list[str] = field(default_factory=list)
    differs: str | None = "not compared"


def compared(case: Case, axes: dict[str, int], options: dict[str, Any], raised: bool) -> Found:
    """Compiles with equal layers once, and one by one."""
    found = Found()
    if raised:
        graph, pipe, _ = compiled(case, axes, options, "1", raised)
        whole, _, _ = compiled(case, axes, options, "0", raised)
        note_folded(found, pipe)
        found.differs = difference_of_graphs(graph, whole) or difference_of_graphs(whole, graph)
        return found
    step, pipe, (result, equal) = compiled(case, axes, options, "1")
    whole, _, _ = compiled(case, axes, options, "0")
    found.differs = difference(step, whole) or difference(whole, step)
    once = {change.removesuffix(": differentiated once") for change in result.changes if "once" in change}
    done = [kind for kind in equal.found if str(kind) in once]
    found.kinds, found.once = len(done), sum(len(kind.blocks) for kind in done)
    note_folded(found, pipe)
    found.reasons += [f"{what}: {why}" for what, why in (*equal.alone.items(), *result.skipped)]
    return found


def note_folded(found: Found, pipe: Any) -> None:
    for record in [record for record in pipe.records if record.name == "fold-layers"][-1:]:
        found.folded = sum(map(int, re.findall(r"(\d+) equal layers", " ".join(record.changes))))
        found.reasons += [f"{what}: {why}" for what, why in record.skipped]


def compiled(case: Case, axes: dict[str, int], options: dict[str, Any], once: str, raised: bool = False) -> Any:
    """Forward and backward, the pipeline that made them, and what differentiation said. raised: the graph behind
    recognition instead."""
    found, said = [], []
    plain, run, apply = pipeline.differentiated, pipeline.Pipeline.run, pipeline.Pipeline._apply

    def differentiated(gm: Any, ctx: Any, result: Any, equal: Any) -> Any:
        said.append((result, equal))
        found.append(plain(gm, ctx, result, equal))
        raise Compared

    def applied(self: Any, entry: Any, graphs: Any, *rest: Any) -> None:
        apply(self, entry, graphs, *rest)
        if raised and entry.name == "unfold-layers":
            found.append(graphs["graph"].graph)
            said.append(None)
            raise Compared

    with (mock.patch.object(pipeline, "differentiated", differentiated),
          mock.patch.object(pipeline.Pipeline, "_apply", applied), mock.patch.dict(os.environ, MOEFX_LAYERS=once),
          mock.patch.object(pipeline.Pipeline, "run", lambda self, gm: (found.append(self), run(self, gm))[1]),
          mock.patch.object(regions, "captured", return_value=None),  # inputs in one order
          mock.patch.object(Kinds, "several", partialmethod(Kinds.several, 2)),
          fake_world(math.prod(axes.values())), warnings.catch_warnings()):  # fmt: skip
        warnings.simplefilter("ignore")
        mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
        with (closing(moefx.compile(case.build(), mesh, verify=0, **options)) as model,
              contextlib.suppress(Compared)):  # fmt: skip
            model.prepare(**case.batch(0))
    pipe, step = found[-2:]
    return step, pipe, said[-1]


def contestants() -> dict[str, tuple[Case, dict[str, int], dict[str, Any]]]:
    ours = {style.__name__: Case(style.__name__, partial(layered, style, 3)) for style in ALL_STYLES}
    ours["checkpointed"] = Case("checkpointed", partial(LanguageModel, Loop(), checkpointed=True))
    found = {name: (case_of(name), {"ep": 2}, {}) for name in families()}
    found |= {f"`{name}`": (case, {"ep": 2}, {}) for name, case in ours.items()}
    return found | {name: (case_of("qwen3_moe"), axes, how) for name, (axes, how) in SETTINGS.items()}


def row(name: str, case: Case, axes: dict[str, int], options: dict[str, Any], raised: bool) -> tuple[str, Found]:
    try:
        found = compared(case, axes, options, raised)
    except Exception as error:
        found = Found(differs=f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}")
    same = "yes" if found.differs is None else f"no: {found.differs}"
    once = [found.folded] if raised else [found.folded, f"{found.once} of {found.kinds}"]
    return f"| {' | '.join(map(str, (name, *once, same, '; '.join(found.reasons))))} |", found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--after", help="begin behind this one, and print")
    parser.add_argument("--raised", action="store_true", help="compare what is recognised, and nothing behind it")
    given = parser.parse_args()
    chosen, names = given.names, list(contestants())
    if given.after:
        chosen = [name.strip("`") for name in names[names.index(given.after) + 1 :]]
    torch.set_num_threads(1)
    rows, found = [], []
    for name, (case, axes, options) in contestants().items():
        if not chosen or name.strip("`") in chosen:
            line, of_it = row(name, case, axes, options, given.raised)
            print(line, flush=True)
            rows.append(line)
            found.append(of_it)
    same, folded, once = (sum(map(bool, each)) for each in zip(*(
        (each.differs is None, each.folded, each.once) for each in found)))  # fmt: skip
    told = f"Of {len(rows)}, {same} give the same programs; in {folded} there are layers that are recognised once"
    told += "." if given.raised else f", in {once} such that are differentiated once."
    columns = ["model", "recognised once", "differentiated once, of kinds", "same", "the others"]
    if given.raised:
        del columns[2]
    print(told)
    if not chosen:
        begin = f"# Equal layers once\n\n{__doc__}\ntorch {torch.__version__}, at {commit()}.\n"
        head = [begin, told, "", f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
        path = RESULTS / f"equal_layers{'_raised' if given.raised else ''}.md"
        path.write_text("\n".join((*head, *rows)) + "\n")


if __name__ == "__main__":
    main()
