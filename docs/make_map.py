"""Write map.md from docstrings: what every package, file, pass and op is for.

    python docs/make_map.py
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

from torch.library import CustomOpDef

from moefx import features, rooms
from moefx.compiler import pipeline
from moefx.compiler.pipeline import JOINT, PLACING, by_step, whole
from moefx.context.pass_types import Pass
from moefx.ir import ops
from moefx.ir.level import Level
from moefx.ir.op import REGISTRY, OpDef, Stage
from moefx.passes import differentiate, name_values, partition

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "map.md"
PIPELINE = Path(pipeline.__file__)


def rooms_of_ops() -> Iterator[ModuleType]:
    for name in features.LISTED:
        if importlib.util.find_spec(f"moefx.features.{name}.ops") is not None:
            yield importlib.import_module(f"moefx.features.{name}.ops")


PARTS = (ops.routing, ops.exchange, ops.experts, ops.parameters, ops.regions, ops.order, ops.transport, ops.sharding,
         ops.dense, ops.shares, ops.copies, ops.gathers, ops.vocabulary, ops.placement, ops.weights, ops.activations,
         ops.expert_layers, *rooms_of_ops())  # fmt: skip
FUNCTIONS = {name: found for part in PARTS for name, found in vars(part).items() if isinstance(found, CustomOpDef)}
_HEAD = """# Map

`python docs/make_map.py` writes this page from docstrings; [the architecture](architecture.md) says how it hangs
together.
"""
def page() -> str:
    return "\n".join([_HEAD, *passes(), *files(), *dialect()]) + "\n"


# ---- passes


def passes() -> Iterator[str]:
    yield from ("## Passes, in order", "", "| pass | level | what it does |", "|---|---|---|")
    for entry in whole():
        yield _row(entry, PLACING if entry.name == "place-experts" else (entry,))
    before, *behind = (Pass(each.__name__.split(".")[-1], each.run) for each in (differentiate, name_values, partition))
    yield _row(Pass("differentiate", differentiate.run, Level.PLACED, Level.PLACED), (before, *JOINT, *behind))
    for entry in by_step():
        yield _row(entry, (entry,))
    yield from ("", "`absent_tangents` runs later, where a backward does not get the gradient of some output.", "")


def _row(entry: Pass, parts: Sequence[Pass]) -> str:
    files = [_file_of(part) for part in (rooms.with_passes(parts) if len(parts) > 1 else parts)]
    said = [f"`{path.stem}`: {_says(path)}" if len(files) > 1 else _says(path) for path in files if path != PIPELINE]
    takes, gives = entry.takes.value, entry.gives.value
    return f"| {entry.name} | {takes if takes == gives else f'{takes} -> {gives}'} | {'<br>'.join(said)} |"


def _file_of(entry: Pass) -> Path:
    return Path(inspect.getfile(getattr(entry.run, "func", entry.run)))


# ---- files


def files() -> Iterator[str]:
    yield from ("## Files", "")
    package = ROOT / "moefx"
    for folder in [package, *sorted(path.parent for path in package.rglob("*/__init__.py"))]:
        yield from (f"### {folder.relative_to(ROOT)}/", "", _says(folder / "__init__.py"), "")
        paths = sorted(path for path in folder.glob("*.py") if path.stem != "__init__")
        yield from (f"- `{path.name}`: {_says(path)}" for path in paths)
        yield ""


def _says(path: Path) -> str:
    """The first paragraph of its docstring."""
    return " ".join(ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))).split("\n\n")[0].split())


# ---- the dialect


def dialect() -> Iterator[str]:
    yield from ("## Ops (`torch.ops.moefx`)", "", "Whom an op communicates with and for what; whether a backward may "
                "run it again.", "")  # fmt: skip
    yield from ("| op | meaning | takes and gives, of a routing | communicates | again |", "|---|---|---|---|---|")
    home = {op.name: home_of(op) for op in REGISTRY.values()}
    for part in PARTS:
        yield from (f"| {' | '.join(_cells(op))} |" for op in REGISTRY.values() if home[op.name] is part)


def _cells(op: OpDef) -> Iterator[str]:
    function = _python_of(op)
    yield f"`{op.name}({', '.join(inspect.signature(function).parameters)})`"
    yield " ".join(inspect.getdoc(function).split("\n\n")[0].split()).split(". ")[0].rstrip(".").replace("|", "\\|")
    yield "" if op.tokens is None else " -> ".join(filter(None, (", ".join(op.tokens.takes.values()), _gives(op))))
    stages = [op.stage.value] if isinstance(op.stage, Stage) else ["out", "back"]
    kind = "to the host" if op.waited_by_host else op.collective
    yield f"{kind}: {' or '.join(stages)}" if kind else op.copies
    yield "" if op.again else "never"


def home_of(op: OpDef) -> ModuleType | None:
    """The module that defines it."""
    return inspect.getmodule(_python_of(op))


def _python_of(op: OpDef):
    return FUNCTIONS[op.name]._init_fn if op.name in FUNCTIONS else op.target


def _gives(op: OpDef) -> str:
    given, rule = op.tokens.gives, op.tokens.rule
    words = given if isinstance(given, str) else ", ".join(filter(None, given))
    return words or (f"(rule {getattr(rule, '__name__', rule)})" if rule else "")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
