"""`compiled.report("run.html")`: what is known of a run as one tree, with three views: text, data, and a page.

    with moefx.profile(compiled) as p:                  # all ranks; adds what was measured
        step()
    compiled.report("run.html", optimizer=optimizer)    # one rank

Of a profile it takes the last one. `python -m moefx report run.json` makes the page from the data.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from moefx.errors import MoefxError, UnsupportedUse
from moefx.model import observed
from moefx.model.api import CompiledModule
from moefx.report import page
from moefx.report.explanation import ProgramReport, report_of
from moefx.report.layer_graphs import layers_of
from moefx.report.links import links_of
from moefx.report.memory import memory_of
from moefx.report.reports import as_text
from moefx.report.timeline import last_of, timeline
from moefx.report.traces import FORMAT, Trace

TREE = "moefx report 1"
_RANKS = 8  # of a trace, that are drawn


@dataclass(frozen=True)
class Report:
    """A run on one rank. `str()`: three sentences and the explanation of each program; `to_dict()`: all of it;
    `save(path)`: a page, or the data."""

    tree: Mapping[str, Any]
    programs: tuple[ProgramReport, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """title; sentences; explanation: of the program, see `moefx.explain`; layers: the distinct ones, with `count`,
        `graph` and `choices`; timeline: one step in the Chrome format; memory: bytes by node; links: bytes of a step;
        stats: see `moe_stats`; loads: {module: rows per expert, by forward}."""
        return dict(self.tree)

    def save(self, path: str | Path) -> Path:
        """Write a page (.html) or the data (.json). Raises MoefxError for another suffix, or without plotly."""
        path = Path(path)
        if path.suffix == ".json":
            path.write_text(json.dumps(self.tree), encoding="utf-8")
            return path
        if path.suffix not in (".html", ".htm"):
            raise MoefxError(f"a report is no '{path.suffix}' file", where=str(path), hint="run.html or run.json")
        return page.write(self.tree, path)

    def __str__(self) -> str:
        return "\n".join([self.tree["title"], *self.tree["sentences"], *map(as_text, self.programs)])

    __repr__ = __str__


def report(compiled: CompiledModule, path: str | Path | None = None,
           optimizer: torch.optim.Optimizer | None = None) -> Report:  # fmt: skip
    """See `CompiledModule.report`."""
    variants, profile = last_of(compiled), compiled._profile
    programs = tuple(report_of(variant, profile) for variant in variants)
    widest = max(zip(programs, variants), key=lambda each: len(each[0].regions))
    stats = compiled.moe_stats()
    loads = profile.loads if profile is not None else {}
    found = Report({
        "format": TREE,
        "title": f"{type(compiled._inner).__name__}: {widest[0].title}",
        "sentences": list(widest[0].sentences),
        "note": compiled._note,
        "explanation": widest[0].to_dict(),
        "layers": [layer.to_dict() | {"choices": [region.to_dict() for region in programs[layer.program].regions
                                                  if region.region in layer.regions]}
                   for layer in layers_of(variants)],
        "timeline": _step(compiled).to_chrome(),
        "memory": memory_of(widest[1], optimizer=optimizer).to_dict(),
        "links": links_of(variants),
        "stats": {name: asdict(each) for name, each in stats.items()},
        "loads": loads or {name: [each.load] for name, each in stats.items()},
    }, programs)  # fmt: skip
    if path is not None:
        found.save(path)
    return found


def _step(compiled: CompiledModule) -> Trace:
    """What was measured of a typical step, beside its prediction; else the prediction."""
    try:
        trace = compiled._profile and compiled._profile.trace
    except UnsupportedUse:  # nothing ran in the profile
        trace = None
    return timeline(compiled) if trace is None else trace.of_step(trace.typical_step)


def load(path: str | Path, step: int | None = None) -> Report:
    """A report from a file: the data of a report or of a plan, or a trace, of which a typical step, or that step.
    Raises MoefxError for other files, and for a step that is not there."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise MoefxError(f"the file cannot be read: {error.strerror}", where=str(path)) from error
    except ValueError as error:
        raise MoefxError(f"this is not JSON ({error})", where=str(path), hint=_FILES) from error
    is_trace = isinstance(data, dict) and data.get("otherData", {}).get("format") == FORMAT
    if step is not None and not is_trace:
        raise MoefxError("only a trace has steps to choose from", where=str(path), hint="leave out --step")
    if is_trace:
        return of_trace(Trace.load(path), Path(path).name, step)
    if isinstance(data, dict) and data.get("format") == TREE:
        return Report(data)
    if isinstance(data, dict) and "share_of_peak" in data:
        return Report({"format": TREE, "title": data["title"], "sentences": data["sentences"], "plan": data})
    raise MoefxError("this is neither a report, nor a plan, nor a trace of moefx", where=str(path), hint=_FILES)


_FILES = "give what compiled.report(\"run.json\"), `plan --json` or the save() of moefx.profile(..) wrote"


def of_trace(trace: Trace, title: str, step: int | None = None) -> Report:
    """One step of a trace."""
    number = trace.typical_step if step is None else step
    ranks = len(trace.measured)
    shown = replace(trace, processes=tuple(each for each in trace.processes if each not in trace.measured[_RANKS:]))
    shown = shown.of_step(number)
    steps = max((process.num_steps for process in trace.processes), default=0)
    spans = [f"{process.name} {process.run_seconds * 1e3:.1f} ms" for process in shown.processes]
    return Report({
        "format": TREE, "title": title, "timeline": shown.to_chrome(),
        "sentences": [f"The trace has {steps} step{'s' * (steps != 1)} of {ranks} rank{'s' * (ranks != 1)}"
                      + (f", of which the first {_RANKS} are drawn." if ranks > _RANKS else "."),
                      f"Step {number}, the typical one, takes {', '.join(spans)}." if step is None else
                      f"Step {number} takes {', '.join(spans)}.",
                      f"Over all steps {trace.hidden_share()}."],
    })  # fmt: skip


def install() -> None:
    """For `CompiledModule.report`, which stands below."""
    observed.REPORTS[:] = [report]
