"""The charts of a page, as figures of plotly: plain data, which `page` draws. Colors that follow the reader's light or
dark are the page's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from moefx.costmodel.tasks import COMPUTE
from moefx.report.step_times import words_of
from moefx.report.traces import Span, Trace
from moefx.report.words import unit_of

Figure = dict[str, Any]
"""{"data": traces, "layout": layout}, see https://plotly.com/javascript/reference"""

# By the kind of task; ScheMoE's names, see costmodel.tasks.Task.
_COLORS = {"E": "#3a6ea5", "W": "#7d9fc7", "C1": "#7fb181", "D1": "#7fb181", "C2": "#7fb181", "D2": "#7fb181",
           "repack": "#7fb181", "route": "#a9cfa9", "dense": "#a3adb8", "A1": "#e8833a", "A2": "#f2b27d",
           "AR": "#b58bc2"}  # fmt: skip
_OTHER = "#d9a441"  # counts and what goes to the host
_TRACKS = {"compute": "compute", "comm": "rows", "intra": "in nodes", "inter": "between", "counts": "counts",
           "gradient": "gradients", "host": "host reads", "d2h": "to host", "h2d": "to device"}  # fmt: skip
# From the bottom of the picture of memory.
PARTS = {"parameters and buffers": "#98a3b0", "optimizer's state": "#c3c9d1", "inputs and outputs": "#d9c58f",
         "gradients": "#b58bc2", "kept for the backward": "#3a6ea5", "in use": "#9dbbe0"}  # fmt: skip
_MEASURED, _HOST = "#d1601f", "#8a6414"
_SERIES = ("#3a6ea5", "#e8833a", "#4f9d4f", "#9a6bb8", "#c0524f", "#7b8794", "#2f9c95")
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
_LEGEND = {"orientation": "h", "x": 0, "y": 1, "xanchor": "left", "yanchor": "bottom", "traceorder": "normal"}
_ROW = 26  # pixels of a row of bars
FAR = 5  # a way that takes more than so many times the fastest everywhere is named and not drawn


def _text(words: str) -> str:
    """Plotly reads some HTML in text."""
    return escape(str(words), quote=False)


def _layout(height: float, **more: Any) -> dict[str, Any]:
    return {"height": round(height), "margin": {"l": 8, "r": 12, "t": 8, "b": 40}, "legend": _LEGEND, **more}


def _names(**more: Any) -> dict[str, Any]:
    """An axis of names, a little off what it names."""
    return _axis(fixedrange=True, type="category", ticks="outside", ticklen=5, tickcolor="rgba(0,0,0,0)", **more)


def _axis(title: str = "", **more: Any) -> dict[str, Any]:
    return {"title": {"text": _text(title), "standoff": 8}, "automargin": True, **more}


# ---- a step


def timeline(trace: Trace, graph: str) -> Figure:
    """Spans of one graph of a trace of one step, in ms: a group of rows for each process, which begins at 0."""
    blocks = [(process.name, [span for span in process.spans if span.graph == graph], process.tracks)
              for process in (*filter(None, [trace.predicted]), *trace.measured)]  # fmt: skip
    blocks = [(name, spans, [track for track in tracks if any(span.track == track for span in spans)])
              for name, spans, tracks in blocks if spans]  # fmt: skip
    rows, data, axes, named = sum(len(tracks) for *_, tracks in blocks), [], {}, set()
    below, gap = 1.0, 0.03
    for number, (name, spans, tracks) in enumerate(blocks):
        part = (1 - gap * (len(blocks) - 1)) * len(tracks) / rows
        suffix = str(number + 1) if number else ""
        axes[f"yaxis{suffix}"] = _names(title=name, domain=[max(0.0, below - part), below], autorange="reversed",
                                        categoryorder="array",
                                        categoryarray=[_TRACKS.get(track, track) for track in tracks])  # fmt: skip
        below -= part + gap
        kinds: dict[str, list[Span]] = {}
        for span in spans:
            kinds.setdefault(words_of(span.kind) if span.kind in _COLORS else "counts, other", []).append(span)
        for words, mine in kinds.items():
            data.append(_bars(words, mine, min(span.start_s for span in spans), f"y{suffix}", words not in named))
            named.add(words)
    layout = _layout(_ROW * rows + 130, barmode="overlay", bargap=0.12, dragmode="zoom", **axes,
                     uniformtext={"minsize": 9, "mode": "hide"},
                     xaxis=_axis("ms", rangemode="tozero", anchor=f"y{len(blocks) if len(blocks) > 1 else ''}"))
    return {"data": data, "layout": layout}


def _bars(words: str, spans: Sequence[Span], zero: float, axis: str, is_first: bool) -> dict[str, Any]:
    about = [f"{_text(span.name)}<br>{_text(words)}" + (f", region {span.layer}, chunk {span.chunk}"
             if span.layer >= 0 else "") + f"<br>{span.seconds * 1e3:.3f} ms" for span in spans]  # fmt: skip
    return {"type": "bar", "orientation": "h", "name": _text(words), "legendgroup": words, "showlegend": is_first,
            "base": [(span.start_s - zero) * 1e3 for span in spans], "x": [span.seconds * 1e3 for span in spans],
            "y": [_TRACKS.get(span.track, span.track) for span in spans], "yaxis": axis,
            "marker": {"color": _COLORS.get(spans[0].kind, _OTHER), "line": {"width": 0}},
            "text": [str(span.chunk) if span.layer >= 0 and span.track != COMPUTE else "" for span in spans],
            "textposition": "inside", "insidetextanchor": "middle", "textangle": 0, "textfont": {"color": "#1b1f24"},
            "hovertext": about, "hovertemplate": "%{hovertext}<extra></extra>"}  # fmt: skip


def memory(found: Mapping[str, Any]) -> Figure:
    """`StepMemory.to_dict()`: an area for each part, node by node through the forward and the backward."""
    graphs = found["device"]
    most = max(size for points in graphs.values() for _, size in points)
    scale, unit = unit_of(most)
    names = [f"{graph}: {_text(name)}" for graph, points in graphs.items() for name, _ in points]
    across, data = list(range(len(names))), []
    for part, color in PARTS.items():
        sizes = [size / scale for graph in graphs for size in found["parts"][graph].get(part, ())]
        if any(sizes):
            data.append({"type": "scatter", "mode": "lines", "name": part, "x": across, "y": sizes, "stackgroup": "all",
                         "line": {"width": 0, "shape": "hvh"}, "fillcolor": color,
                         "hovertemplate": f"{part}: %{{y:.4g}} {unit}<extra></extra>"})  # fmt: skip
    for words, color, of_graph in (("in the host's memory", _HOST, found.get("host", {})),
                                   ("measured", _MEASURED, found.get("measured", {}))):  # fmt: skip
        line = [None if size is None else size / scale for graph in graphs for size in of_graph.get(graph, ())]
        if any(size is not None for size in line):
            data.append({"type": "scatter", "mode": "lines", "name": words, "x": across, "y": line, "connectgaps": True,
                         "line": {"width": 2, "color": color},
                         "hovertemplate": f"{words}: %{{y:.4g}} {unit}<extra></extra>"})  # fmt: skip
    data[0] |= {"hovertext": names, "hovertemplate": f"%{{hovertext}}<br>{data[0]['hovertemplate']}"}
    first = len(next(iter(graphs.values())))
    shapes = [{"type": "line", "x0": first - 0.5, "x1": first - 0.5, "yref": "paper", "y0": 0, "y1": 1,
               "line": {"width": 1, "dash": "dot", "color": "#808080"}}] if len(graphs) > 1 else []  # fmt: skip
    middles = [first / 2, (first + len(names)) / 2]
    ticks = {"tickvals": middles, "ticktext": list(graphs)} if shapes else {"showticklabels": False}
    return {"data": data, "layout": _layout(380, shapes=shapes, hovermode="x unified",
                                            xaxis=_axis("operators, in the order in which they run", **ticks),
                                            yaxis=_axis(unit, rangemode="tozero"))}  # fmt: skip


# ---- layers, experts, links


def layer(boxes: Sequence[Mapping[str, Any]]) -> Figure:
    """`Layer.to_dict()["graph"]`: boxes one below the other, with arcs to those that are not neighbours."""
    shapes, wide = [], max((number - above for number, box in enumerate(boxes) for above in box["after"]), default=1)
    for number, box in enumerate(boxes):
        for above in box["after"]:
            bend = 0.0 if number - above == 1 else -0.25 - 0.75 * (number - above) / wide
            shapes.append({"type": "path", "layer": "below", "line": {"width": 1.5, "color": "#8d97a3"},
                           "path": f"M 0 {above} C {bend} {above}, {bend} {number}, 0 {number}"})  # fmt: skip
    words = [f"{_text(_short(box['label']))}  <i>{box['seconds'] * 1e3:.3f} ms</i>" for box in boxes]
    about = [f"{_text(box['label'])}<br>" + "<br>".join(f"{times} x {_text(op)}" for op, times in box["ops"].items())
             for box in boxes]  # fmt: skip
    data = {"type": "scatter", "mode": "markers+text", "x": [0] * len(boxes), "y": list(range(len(boxes))),
            "text": words, "textposition": "middle right", "cliponaxis": False, "hovertext": about,
            "hovertemplate": "%{hovertext}<extra></extra>",
            "marker": {"size": 13, "symbol": "square", "color": [_COLORS.get(box["kind"], _OTHER) for box in boxes]}}
    hidden = {"visible": False, "fixedrange": True}
    return {"data": [data], "layout": _layout(_ROW * len(boxes) + 16, shapes=shapes, showlegend=False, dragmode=False,
                                              xaxis={**hidden, "range": [-1.0, 3.4]}, hovermode="closest",
                                              yaxis={**hidden, "range": [len(boxes) - 0.4, -0.6]},
                                              margin={"l": 4, "r": 4, "t": 8, "b": 8})}  # fmt: skip


def _short(words: str, most: int = 26) -> str:
    return words if len(words) <= most else f"{words[: most - 2]}.."


def loads(rows: Sequence[Sequence[int]]) -> Figure:
    """Rows of every expert in every recorded forward."""
    steps, experts = len(rows), len(rows[0])
    data = {"type": "heatmap", "x": list(range(1, steps + 1)), "y": list(range(experts)),
            "z": [[row[expert] for row in rows] for expert in range(experts)], "colorscale": "Viridis",
            "zauto": False, "zmin": 0, "zmax": max(map(max, rows)),
            "colorbar": {"title": {"text": "rows", "side": "right"}, "thickness": 12, "outlinewidth": 0},
            "hovertemplate": "forward %{x}, expert %{y}: %{z} rows<extra></extra>"}  # fmt: skip
    return {"data": [data], "layout": _layout(min(640, 110 + 18 * experts), dragmode="zoom",
                                              xaxis=_axis("forward", tickformat="d", dtick=max(1, steps // 8)),
                                              yaxis=_axis("expert", tickformat="d", dtick=max(1, experts // 16)))}


def ranks(stats: Mapping[str, Any]) -> Figure:
    """Of one layer in `Report.to_dict()["stats"]`: rows that every rank computed, and would have without copies."""
    named = {"rows_at_home": ("if every expert were at home only", "#a3adb8"), "rows": ("as it ran", "#3a6ea5")}
    names = [str(rank) for rank in stats["ranks"]]
    data = [{"type": "bar", "name": words, "x": names, "y": list(stats[key]), "marker": {"color": color},
             "hovertemplate": f"rank %{{x}}, {words}: %{{y}} rows<extra></extra>"}
            for key, (words, color) in named.items()]  # fmt: skip
    mean = sum(stats["rows"]) / len(stats["rows"])
    line = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": mean, "y1": mean,
            "line": {"width": 1.5, "dash": "dash", "color": "#e8833a"}}  # fmt: skip
    return {"data": data, "layout": _layout(240, barmode="group", dragmode=False, shapes=[line],
                                            xaxis=_axis("rank", type="category", fixedrange=True),
                                            yaxis=_axis("rows", rangemode="tozero", fixedrange=True))}  # fmt: skip


def links(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """`links_of(..)`: bytes of a step over each link, by what they are for."""
    scale, unit = unit_of(max(row["bytes"] for row in rows))
    places = list(dict.fromkeys(row["link"] for row in rows))
    data = []
    for number, what in enumerate(dict.fromkeys(row["what"] for row in rows)):
        mine = [row for row in rows if row["what"] == what]
        data.append({"type": "bar", "orientation": "h", "name": _text(what), "y": [row["link"] for row in mine],
                     "x": [row["bytes"] / scale for row in mine], "customdata": [row["graph"] for row in mine],
                     "marker": {"color": _SERIES[number % len(_SERIES)], "line": {"width": 0}},
                     "hovertemplate": f"{_text(what)}, %{{customdata}}: %{{x:.4g}} {unit}<extra></extra>"})  # fmt: skip
    return {"data": data, "layout": _layout(46 * len(places) + 130, barmode="stack", dragmode=False,
                                            xaxis=_axis(unit, rangemode="tozero", fixedrange=True),
                                            yaxis=_names())}  # fmt: skip


# ---- plans


def shares(parts: Mapping[str, float], unit: str) -> Figure:
    """One bar in parts."""
    data = [{"type": "bar", "orientation": "h", "name": _text(words), "x": [size], "y": [""],
             "marker": {"color": _SERIES[number % len(_SERIES)], "line": {"width": 0}},
             "hovertemplate": f"{_text(words)}: %{{x:.4g}} {unit}<extra></extra>"}
            for number, (words, size) in enumerate(parts.items())]  # fmt: skip
    return {"data": data, "layout": _layout(110 + 24 * len(parts), barmode="stack", dragmode=False, yaxis=_names(),
                                            xaxis=_axis(unit, fixedrange=True))}  # fmt: skip


def curves(lines: Mapping[str, Mapping[int, float]], across: str, up: str) -> Figure:
    """{name: {x: y}} over a logarithmic x axis; ways that are far from the fastest everywhere are left out, see
    `far_off`."""
    left_out = far_off(lines)
    xs = sorted({x for line in lines.values() for x in line})
    data = [{"type": "scatter", "mode": "lines+markers", "name": _text(name), "x": list(line), "y": list(line.values()),
             "line": {"color": _SERIES[number % len(_SERIES)], "dash": _DASHES[number % len(_DASHES)]},
             "hovertemplate": f"{_text(name)}, %{{x}}: %{{y:.4g}} {up}<extra></extra>"}
            for number, (name, line) in enumerate(lines.items()) if name not in left_out]  # fmt: skip
    xaxis = _axis(across, type="log", tickvals=xs, ticktext=[str(x) for x in xs])
    return {"data": data, "layout": _layout(360, hovermode="closest", showlegend=True, xaxis=xaxis,
                                            yaxis=_axis(up, rangemode="tozero"))}  # fmt: skip


def far_off(lines: Mapping[str, Mapping[int, float]]) -> list[str]:
    """Names of lines above `FAR` times the lowest everywhere."""
    best: dict[int, float] = {}
    for x, y in _points(lines.values()):
        best[x] = min(best.get(x, y), y)
    return [name for name, line in lines.items() if all(y > FAR * best[x] for x, y in line.items())]


def _points(lines: Iterable[Mapping[int, float]]) -> Iterable[tuple[int, float]]:
    return (point for line in lines for point in line.items())
