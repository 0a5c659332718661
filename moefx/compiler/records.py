"""What the steps of a compilation leave behind, and the folder of files that it is dumped to.

    01-canonicalize.graph.py     a graph after a step: a Python file that runs, and that `python -m moefx.opt` replays
    forward.py, backward.py      the emitted code
    index.md                     the steps in order: what each changed, skipped and cost, and its diff
Steps that changed nothing have no file.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from torch.fx import GraphModule

from moefx.context.pass_types import PassContext, PassResult
from moefx.context.step_graphs import StepGraphs
from moefx.errors import VerifyError
from moefx.ir import alike
from moefx.ir.header import Header
from moefx.ir.level import Level
from moefx.ir.op import value
from moefx.ir.printed import Known, Printed, diff, op_count_diff, op_counts, printed
from moefx.layout import Layout
from moefx.options import Options

_DIFF_LINES = 400  # of a diff, in index.md


@dataclass(frozen=True)
class Picture:
    """One graph after one step."""

    printed: Printed
    counts: Counter[str]
    header: Header


@dataclass(frozen=True)
class Record:
    """One step: the text of its graphs, what changed, what was left alone and why, and how long it took.

    texts: {"graph": ..} until differentiation, then {"forward": .., "backward": ..}.
    """

    name: str
    level: Level
    pictures: Mapping[str, Picture]
    before: Mapping[str, Picture]
    changes: tuple[str, ...] = ()
    skipped: tuple[tuple[str, str], ...] = ()
    seconds: float = 0.0

    @property
    def texts(self) -> dict[str, str]:
        return {key: picture.printed.full for key, picture in self.pictures.items()}

    @cached_property
    def diffs(self) -> dict[str, str]:
        """The unified diff of every graph against the step before; made when asked for, since it takes long."""
        return {key: diff(self.before[key].printed.plain, picture.printed.plain)
                for key, picture in self.pictures.items() if key in self.before}

    @property
    def is_news(self) -> bool:
        """Whether a graph is new, or another one than before the step."""
        return any(key not in self.before or self.before[key].printed.plain != picture.printed.plain
                   for key, picture in self.pictures.items())

    @property
    def counts(self) -> dict[str, list[str]]:
        """Lines like `all_to_all: 0 -> 4 (+4)` for every graph."""
        return {key: op_count_diff(self.before[key].counts, picture.counts)
                for key, picture in self.pictures.items() if key in self.before}

    def file(self, key: str) -> str:
        """The graph as a Python file that runs."""
        picture = self.pictures[key]
        title = f"The {'' if key == 'graph' else key + ' '}graph after {self.name}."
        return picture.printed.file(title=title, notes=picture.header.lines())


@dataclass
class Recorder:
    """Makes the records of one run of the pipeline."""

    ctx: PassContext
    records: list[Record] = field(default_factory=list)
    known: dict[str, Known] = field(default_factory=lambda: defaultdict(Known))

    def add(self, name: str, level: Level, graphs: Mapping[str, GraphModule], result: PassResult, seconds: float,
            step: StepGraphs | None = None) -> Record:
        before = self.records[-1].pictures if self.records else {}
        pictures = {}
        for key, gm in graphs.items():
            same = before.get(key) if not result.changes else None
            form, counts = (same.printed, same.counts) if same else (_print(gm, self.known[key]), op_counts(gm))
            pictures[key] = Picture(form, counts, self._header(gm, key, level, step, form.sizes))
        record = Record(name, level, pictures, before, tuple(result.changes), tuple(result.skipped), seconds)
        self.records.append(record)
        return record

    def _header(self, gm: GraphModule, key: str, level: Level, step: StepGraphs | None, sizes: Mapping) -> Header:
        ctx = self.ctx
        inputs, layouts = {}, {}
        for node in gm.graph.find_nodes(op="placeholder"):
            source = node.meta.get("moefx")
            if source is not None:
                inputs[node.name] = (source.kind, source.key, bool(value(node).requires_grad))
                if source.layout != Layout():
                    layouts[node.name] = source.layout
        plain = Header(level.value, key, ctx.mesh, ctx.grad,
                       tuple((device, str(dtype)) for device, dtype in ctx.autocast), sizes, inputs,
                       users=ctx.decisions.num_user_outputs or len(gm.graph.output_node().args[0]), layouts=layouts)
        if step is None:
            return plain
        return Header(**{**vars(plain), "mutated": len(step.mutated_inputs), "users": step.num_user_outputs,
                         "statistics": step.num_statistics, "tangents": tuple(step.tangent_outputs),
                         "gradients": tuple(step.grad_inputs)})


def _print(gm: GraphModule, known: Known) -> Printed:
    """The graph as text, or, before canonicalisation, why it has none."""
    try:
        return printed(gm, known)
    except VerifyError as error:
        return Printed([f"# no text: {error.what} ({error.where})"], [])


def dump_folder(options: Options) -> Path | None:
    """Where programs are dumped to: the option, else MOEFX_DUMP, else nowhere."""
    found = options.debug.dump_dir or os.environ.get("MOEFX_DUMP")
    return Path(found) if found else None


def write(folder: str | Path, records: list[Record], code: Mapping[str, str]) -> Path:
    """Write the dump of one program: the steps that changed something, and the emitted code. Returns the folder. What
    stood there under the same names is replaced."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for number, record in enumerate(filter(lambda record: record.is_news, records)):
        for key, picture in record.pictures.items():
            if picture.printed.imports:
                (folder / f"{number:02}-{record.name}.{key}.py").write_text(record.file(key))
    for name, source in code.items():
        if source:
            (folder / f"{name}.py").write_text(source)
    (folder / "index.md").write_text(_index(records, code))
    return folder


def _index(records: list[Record], code: Mapping[str, str]) -> str:
    lines = ["# Steps", "", "| step | level | nodes | changes | seconds |", "|---|---|---|---|---|"]
    for number, record in enumerate(filter(lambda record: record.is_news, records)):
        files = ", ".join(f"[{key}]({number:02}-{record.name}.{key}.py): {picture.counts.total()}"
                          for key, picture in record.pictures.items())
        row = (record.name, record.level.value, files, str(len(record.changes)), f"{record.seconds:.2f}")
        lines.append(f"| {' | '.join(row)} |")
    unchanged = [record.name for record in records if not record.is_news]
    lines += ["", f"Nothing to do for: {', '.join(unchanged) or 'none'}."]
    lines += ["", "Emitted code: " + ", ".join(f"[{name}]({name}.py)" for name, source in code.items() if source), ""]
    for record in records:
        lines += [f"## {record.name}", ""]
        lines += alike.once([f"- {change}" for change in record.changes])
        lines += alike.once([f"- left alone: {where}: {reason}" for where, reason in record.skipped])
        lines.append("")
        for key, text in record.diffs.items():
            if text:
                shown = text.splitlines()
                rest = len(shown) - _DIFF_LINES
                lines += [f"{key}: {'; '.join(record.counts[key])}", "", "```diff", *shown[:_DIFF_LINES],
                          *([f"... {rest} lines more"] if rest > 0 else []), "```", ""]
    return "\n".join(lines)
