"""A report as one page: HTML that fetches nothing, with plotly in it. It sees the data alone, see `run.Report`."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from moefx.errors import MoefxError
from moefx.report import charts
from moefx.report.traces import Trace
from moefx.report.words import ms, size

_HERE = Path(__file__).parent
_SHOWN = 8  # candidates of a layer
_LISTS = {"left_out": "Not used", "left": "Whole on every rank", "not_cut": "Whole on every rank of esp",
          "schedules": "Split over mp", "rows": "Rows over mp", "cut_over_mp": "Cut over mp",
          "whole_over_mp": "Whole on every rank of mp", "drifting": "Each rank's own, and decides choices"}  # fmt: skip


def write(tree: Mapping[str, Any], path: str | Path) -> Path:
    """Write the page of a report's data. Raises MoefxError without plotly."""
    path = Path(path)
    path.write_text(html(tree, _plotly()), encoding="utf-8")
    return path


def _plotly() -> str:
    found = importlib.util.find_spec("plotly")
    if found is None:
        raise MoefxError("a report is drawn by plotly, which is not installed", where="report",
                         hint="pip install plotly")  # fmt: skip
    return (Path(found.origin).parent / "package_data" / "plotly.min.js").read_text(encoding="utf-8")


def html(tree: Mapping[str, Any], plotly: str) -> str:
    """plotly: the source of plotly.js."""
    page = _Page()
    body = "".join(page.sections(tree))
    figures = json.dumps(page.figures, separators=(",", ":")).replace("<", "\\u003c")
    said = "".join(f"<p>{escape(sentence)}</p>" for sentence in tree.get("sentences", ()))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; script-src 'unsafe-inline'; "
        "style-src 'unsafe-inline'; img-src data: blob:\">\n"
        f"<title>{escape(tree['title'])}</title>\n<style>{(_HERE / 'page.css').read_text()}</style>\n</head>\n<body>\n"
        f'<header><h1>{escape(tree["title"])}</h1><div class="lead">{said}</div></header>\n<main>{body}</main>\n'
        f'<script type="application/json" id="figures">{figures}</script>\n<script>{plotly}</script>\n'
        f"<script>{(_HERE / 'page.js').read_text()}</script>\n</body>\n</html>\n"
    )


class _Page:
    """figures: of plotly, in the order in which they stand on the page."""

    def __init__(self) -> None:
        self.figures: list[charts.Figure] = []

    def sections(self, tree: Mapping[str, Any]) -> Iterator[str]:
        for title, parts in (
            ("Layers", self._layers(tree)), ("Timeline of a step", self._timeline(tree)),
            ("Memory over a step", self._memory(tree)), ("Bytes over each link", self._links(tree)),
            ("Load of the experts", self._loads(tree)), ("Time", self._seconds(tree.get("plan"))),
            ("Memory of a rank", self._bytes(tree.get("plan"))), ("Choices", self._plan(tree.get("plan"))),
            ("Also", self._lists(tree)),
        ):  # fmt: skip
            if found := "".join(parts):
                yield f"<section><h2>{title}</h2>{found}</section>\n"

    def figure(self, figure: charts.Figure, label: str, caption: str = "", kind: str = "chart") -> str:
        """label: for who does not see it."""
        self.figures.append(figure)
        words = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
        return (f'<figure><div class="{kind}" role="group" aria-label="{escape(label)}" '
                f'data-figure="{len(self.figures) - 1}" style="height:{figure["layout"]["height"]}px"></div>{words}'
                "</figure>")  # fmt: skip

    # ---- of a run

    def _layers(self, tree: Mapping[str, Any]) -> Iterator[str]:
        for number, layer in enumerate(tree.get("layers", ())):
            mine = layer["choices"]
            said = "".join(f"<p>{escape(region['sentence'])}</p>" for region in mine)
            graph = self.figure(charts.layer(layer["graph"]), f"The forward of {layer['name']}",
                                "The forward, from the top; milliseconds are predicted, those of chunks summed up. An "
                                "arc on the left joins what are not neighbours.", "chart narrow")  # fmt: skip
            more = "".join(map(_candidates, mine))
            head = f"<b>{escape(layer['name'])}</b> {_count(layer)} {escape(layer['where'])}"
            yield _fold(head, said + graph + more, is_open=bool(mine) and number < 2)

    def _timeline(self, tree: Mapping[str, Any]) -> Iterator[str]:
        if "timeline" not in tree:
            return
        trace = Trace.from_chrome(tree["timeline"])
        step = tree.get("explanation", {}).get("step")
        if trace.predicted is not None and not trace.about.get("machine_given", True):
            yield (f"<p>No machine was named: the prediction is for the preset {escape(trace.about['machine'])}, and "
                   "only the order of tasks means something.</p>")  # fmt: skip
        for graph in ("forward", "backward"):
            if any(span.graph == graph for process in trace.processes for span in process.spans):
                yield f"<h3>{graph.capitalize()}</h3>"
                yield self.figure(charts.timeline(trace, graph), f"Timeline of the {graph}",
                                  "Drag to zoom, double-click to go back. Numbers in exchanges are chunks.")
        if step and step["measured"]:
            yield _comparison(step)

    def _memory(self, tree: Mapping[str, Any]) -> Iterator[str]:
        if found := tree.get("memory"):
            peaks = "; ".join(f"the {graph} {size(peak['bytes'])} at {peak['node']}"
                              for graph, peak in found["peaks"].items())  # fmt: skip
            yield self.figure(charts.memory(found), "Memory in use on one rank over a step",
                              f"Predicted, on one rank, one part on top of the other. Peaks: {peaks}.")  # fmt: skip

    def _links(self, tree: Mapping[str, Any]) -> Iterator[str]:
        if rows := tree.get("links"):
            yield self.figure(charts.links(rows), "Bytes that a rank sends over each link in a step",
                              "What one rank sends in a step, predicted for balanced routing.")  # fmt: skip
            yield _table(("link", "graph", "for", "bytes"),
                         [(row["link"], row["graph"], row["what"], size(row["bytes"])) for row in rows])  # fmt: skip

    def _loads(self, tree: Mapping[str, Any]) -> Iterator[str]:
        for number, (name, rows) in enumerate(tree.get("loads", {}).items()):
            stats, mean = tree.get("stats", {}).get(name, {}), sum(map(sum, rows)) / len(rows) / len(rows[0])
            most = max(map(max, rows)) / mean if mean else 0.0
            drawn = self.figure(charts.loads(rows), f"Rows of each expert of {name}")
            if stats.get("rows"):
                drawn += self.figure(charts.ranks(stats), f"Rows that each rank computes for {name}",
                                     "Rows that each rank computed in the last forward. The dashed line is the mean.")
            head = f"{escape(name)}: the busiest expert has {most:.2f} times the mean, in {_forwards(len(rows))}"
            yield _fold(head, drawn, is_open=not number)

    def _lists(self, tree: Mapping[str, Any]) -> Iterator[str]:
        program = tree.get("explanation", {})
        if tree.get("note"):
            yield f"<p>{escape(tree['note'])}</p>"
        notes = [*program.get("notes", ()), *tree.get("plan", {}).get("notes", ())]
        yield "".join(f"<p>{escape(note)}</p>" for note in notes)
        for key, title in _LISTS.items():
            if found := program.get(key):
                rows = [(each["where"], each.get("why", each.get("how", ""))) for each in found]
                yield _fold(f"{title} ({len(rows)})", _table(("where", "how or why"), rows))

    # ---- of a plan

    def _seconds(self, plan: Mapping[str, Any] | None) -> Iterator[str]:
        if plan:
            parts = {plan["words"]["seconds"][name]: seconds for name, seconds in plan["seconds"].items()}
            yield self.figure(charts.shares({words: 1e3 * part for words, part in parts.items()}, "ms of a step"),
                              "What a step's time goes to")  # fmt: skip
            yield _table(("part", "time", "share"), [(words, ms(part), f"{part / plan['step_s']:.1%}")
                                                     for words, part in parts.items()])  # fmt: skip
            yield "".join(f"<p>Hint: {escape(hint)}.</p>" for hint in plan["hints"])

    def _bytes(self, plan: Mapping[str, Any] | None) -> Iterator[str]:
        if plan:
            words, parts = plan["words"]["memory"], {name: part for name, part in plan["memory"].items() if part}
            yield self.figure(charts.shares({words[name]: part / 1e9 for name, part in parts.items() if name != "peak"},
                                            "GB"), "What a rank's memory is for")  # fmt: skip
            yield _table(("memory", "bytes"), [(words[name], size(part)) for name, part in parts.items()])

    def _plan(self, plan: Mapping[str, Any] | None) -> Iterator[str]:
        for layer in plan["layers"] if plan else ():
            yield f"<h3>{escape(layer['name'])} {_count(layer)}</h3>"
            for region in layer["regions"][:1]:
                yield f"<p>{escape(region['sentence'])}</p>"
            if layer["over_batches"]:
                lines: dict[str, dict[int, float]] = {}
                for batch, found in layer["over_batches"].items():
                    for way, seconds in found["seconds"].items():
                        lines.setdefault(way, {})[int(batch)] = 1e3 * seconds / int(batch)
                yield self._curves(lines, "sequences of a rank (batch)", "ms per sequence",
                                   {batch: found["chosen"] for batch, found in layer["over_batches"].items()})
        if plan and plan["over_ranks"]:
            line = {int(n): 1e3 * found["seconds"] for n, found in plan["over_ranks"].items()}
            named = {n: f"ep={found['ep']}, esp={found['esp']}" for n, found in plan["over_ranks"].items()}
            yield "<h3>Exchanges and gradients of a layer's experts, spread as is fastest</h3>"
            yield self._curves({"closed form, one chunk": line}, "GPUs", "ms of a step", named)

    def _curves(self, lines: Mapping[str, Mapping[int, float]], across: str, up: str, chosen: Mapping[str, str]) -> str:
        words, before = [], None
        for x, each in chosen.items():
            words += [f"from {x} on {each}"] if each != before else []
            before = each
        far = charts.far_off(lines)
        words += [f"not drawn, more than {charts.FAR} times the fastest: {', '.join(far)}"] if far else []
        return self.figure(charts.curves(lines, across, up), f"{up} over {across}", f"Chosen: {'; '.join(words)}.")


def _candidates(region: Mapping[str, Any]) -> str:
    """Folded: what else was open, and the formulas."""
    if "candidates" not in region:
        return ""
    shown = region["candidates"][:_SHOWN]
    rows = [("yes" if each == region["chosen"] else "", each["words"], each["scheduler"] or "",
             *(ms(each[name]) for name in ("forward_s", "backward_s", "exposed_s")), size(each["memory_bytes"]))
            for each in shown]  # fmt: skip
    head = ("chosen", "way", "order", "forward", "backward", "exposed", "memory")
    formulas = [(f"{graph} {kind}", ms(region["stage_seconds"][graph].get(kind, 0.0)), formula)
                for graph, found in region["formulas"].items() for kind, formula in found.items()]  # fmt: skip
    formulas += [(f"split {each['schedule']}", ms(each["seconds"]), f"{each['name']} = {each['formula']}")
                 for each in region["closed_forms"]]  # fmt: skip
    ways = f"The best {len(shown)} of {len(region['candidates'])} ways"
    return ((_fold(ways, _table(head, rows)) if len(shown) > 1 else "")
            + _fold("Formulas", _table(("stage", "time", "formula"), formulas)))  # fmt: skip


def _fold(head: str, inside: str, *, is_open: bool = False) -> str:
    """head, inside: HTML."""
    return f"<details{' open' if is_open else ''}><summary>{head}</summary>{inside}</details>"


def _count(layer: Mapping[str, Any]) -> str:
    return f'<span class="count">{layer["count"]} x</span>'


def _forwards(count: int) -> str:
    return "the last forward" if count == 1 else f"{count} forwards"


def _comparison(step: Mapping[str, Any]) -> str:
    parts = [step[name]["parts"] if step[name] else {} for name in ("predicted", "measured")]
    names = dict.fromkeys(part for found in parts for part in found)
    rows = [(name, *(ms(found.get(name, 0.0)) for found in parts)) for name in names]
    rows.append(("step", *(ms(step[name]["seconds"]) if step[name] else "" for name in ("predicted", "measured"))))
    return f"<h3>Where the time goes</h3>{_table(('what the rank does', 'predicted', 'measured'), rows)}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    names = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    body = "".join(f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows)
    return (f'<div class="wide" tabindex="0" role="region" aria-label="{escape(", ".join(filter(None, head)))}">'
            f"<table><thead><tr>{names}</tr></thead><tbody>{body}</tbody></table></div>")  # fmt: skip
