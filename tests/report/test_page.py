"""The page of a report: from data alone, in a browser, and what it refuses."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil

import pytest
from typer.testing import CliRunner

from moefx.__main__ import app
from moefx.errors import MoefxError
from moefx.report import charts, page, run
from moefx.report.traces import Process, Span, Trace
from tests.support.breadth import places

EVIL = "<img src=x onerror=alert(1)>&amp;.mlp"
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def spans(stretch: float = 1.0) -> tuple[Span, ...]:
    """Two chunks whose exchanges run beside the experts; then the backward."""
    found = []
    for graph, begin in (("forward", 0.0), ("backward", 10e-3)):
        for name, kind, track, start, end, chunk in (
            ("attn", "dense", "compute", 0, 2, 0), ("out0", "A1", "inter", 2, 3, 0), ("out1", "A1", "inter", 3, 4, 1),
            ("e0", "E", "compute", 3, 5, 0), ("e1", "E", "compute", 5, 7, 1), ("back0", "A2", "inter", 5, 6, 0),
            ("back1", "A2", "inter", 7, 8, 1), ("sum", "AR", "gradient", 6, 8, 0),
        ):  # fmt: skip
            layer = -1 if kind in ("dense", "AR") else 0
            at = begin + start * 1e-3 * stretch
            found.append(Span(f"{graph}_{name}", kind, track, at, at + (end - start) * 1e-3 * stretch, graph, 0, "p",
                              chunk, layer))  # fmt: skip
    return tuple(found)


def box(label: str, kind: str, seconds: float, *after: int) -> dict:
    return {"label": label, "kind": kind, "ops": {"mm": 2, "silu": 1}, "seconds": seconds, "after": list(after)}


def ways() -> list[dict]:
    return [{"words": words, "scheduler": "optsche", "forward_s": s, "backward_s": s, "exposed_s": s / 2,
             "seconds": 2 * s, "memory_bytes": 1e6}
            for words, s in (("2dh, 2 chunks", 1e-3), ("direct, 1 chunk", 2e-3))]  # fmt: skip


def region(number: int, module: str) -> dict:
    return {"region": number, "module": module, "sentence": f"It runs {module} with 2dh, 2 chunks.",
            "candidates": ways(), "chosen": ways()[0], "stage_seconds": {"forward": {"E": 1e-3}}, "closed_forms": [],
            "formulas": {"forward": {"E": "3*launch + 512*m_half_float32*u0/peak_float32 + " * 6 + "launch"}}}


def tree() -> dict:
    """Of 48 layers of two kinds, with names that are HTML."""
    trace = Trace((Process("predicted", None, spans()), Process("rank 0", 0, spans(1.5))), {"machine": "by hand"})
    graph = [box("input_layernorm", "dense", 1e-5), box("self_attn", "dense", 2e-3, 0), box("add", "dense", 1e-5, 1),
             box("mlp.gate", "dense", 1e-4, 2), box("rows out", "A1", 1e-3, 3), box("experts", "E", 4e-3, 4),
             box("rows back", "A2", 1e-3, 5), box("add", "dense", 1e-5, 2, 6)]  # fmt: skip
    part = {"step": {"predicted": {"seconds": 16e-3, "parts": {"experts": 8e-3}},
                     "measured": {"seconds": 24e-3, "parts": {"experts": 12e-3}}}}  # fmt: skip
    points = [["a", 2e6], ["b", 5e6], [EVIL, 4e6]]
    parts = {"parameters and buffers": [1e6] * 3, "kept for the backward": [1e6, 4e6, 3e6]}
    return {
        "format": run.TREE, "title": f"{EVIL} of a run", "sentences": ["One.", f"Two of {EVIL}.", "Three."],
        "note": f"compiled block by block: {EVIL}",
        "explanation": {**part, "left": [{"where": EVIL, "why": "a reason"}], "notes": []},
        "layers": [
            {"name": "Decoder", "count": 47, "where": "layers.0, 2 to 47", "graph": graph,
             "choices": [region(0, EVIL)]},
            {"name": EVIL, "count": 1, "where": f"layers.1 {EVIL}", "choices": [],
             "graph": [*graph[:3], box(EVIL, "W", 1)]},
        ],
        "timeline": trace.to_chrome(),
        "memory": {"title": "t", "resident_bytes": 1e6, "peaks": {"forward": {"bytes": 5e6, "node": "b"},
                   "backward": {"bytes": 5e6, "node": "b"}}, "device": {"forward": points, "backward": points},
                   "parts": {"forward": parts, "backward": parts}, "host": {}, "measured": {}},
        "links": [{"graph": graph, "link": link, "what": what, "bytes": size} for graph in ("forward", "backward")
                  for link, what, size in (("within a node", "rows out", 4e6), ("between nodes", "rows back", 2e6))],
        "stats": {EVIL: {"rows": [30, 10], "rows_at_home": [35, 5], "ranks": [0, 1]}},
        "loads": {EVIL: [[9, 1, 2, 8], [10, 0, 5, 5]], "model.layers.3.mlp": [[5, 5, 5, 5], [4, 6, 5, 5]]},
    }  # fmt: skip


@pytest.fixture(scope="module")
def plain() -> str:
    """The page without plotly's own source."""
    return page.html(tree(), "")


def figures(text: str) -> list[dict]:
    return json.loads(re.search(r'id="figures">(.*?)</script>', text, re.DOTALL)[1])


def test_it_begins_with_three_sentences_and_each_layer_is_there_once(plain):
    said = re.search(r'<div class="lead">(.*?)</div>', plain)[1]
    assert re.findall(r"<p>(\w+)", said) == ["One", "Two", "Three"]
    assert re.findall(r'<summary><b>.*?</b> <span class="count">(\d+) x</span>', plain) == ["47", "1"]
    assert plain.count("<h2>") == 6
    assert plain.count("with 2dh, 2 chunks.</p>") == 1, "of the layer that is shown"


def test_names_are_text_and_not_html(plain):
    assert "<img" not in plain
    assert "&lt;img src=x onerror=alert(1)&gt;&amp;amp;.mlp" in plain
    shown = json.dumps(figures(plain))
    assert "<img" not in shown, "plotly reads some HTML in text"
    assert "&lt;img" in shown


def test_it_fetches_nothing(plain):
    assert "default-src 'none'" in plain
    assert not re.findall(r"""(?:src|href)\s*=|url\(|@import|https?:""", plain.replace("src=x", ""))


def test_figures_have_the_numbers_of_the_data(plain):
    drawn = {re.search(rf'aria-label="([^"]*)" data-figure="{n}"', plain)[1]: each
             for n, each in enumerate(figures(plain))}  # fmt: skip
    forward = drawn["Timeline of the forward"]["data"]
    ms = {axis: sum(sum(bar["x"]) for bar in forward if bar["yaxis"] == axis) for axis in ("y", "y2")}
    busy = sum(span.seconds for span in spans() if span.graph == "forward") * 1e3
    assert ms == pytest.approx({"y": busy, "y2": 1.5 * busy})
    assert min(min(bar["base"]) for bar in drawn["Timeline of the backward"]["data"]) == 0
    loads = drawn[f"Rows of each expert of {page.escape(EVIL)}"]["data"][0]
    assert loads["z"] == [[9, 10], [1, 0], [2, 5], [8, 5]]
    links = drawn["Bytes that a rank sends over each link in a step"]["data"]
    assert {each["name"]: sum(each["x"]) * 1e6 for each in links} == {"rows out": 8e6, "rows back": 4e6}
    memory = drawn["Memory in use on one rank over a step"]["data"]
    assert [sum(size) * 1e6 for size in zip(*(each["y"] for each in memory))] == [2e6, 5e6, 4e6] * 2


def test_what_plotly_draws_is_what_plotly_knows(plain):
    """Its Python half refuses names of attributes that its other half would leave out without a word."""
    graph_objects = pytest.importorskip("plotly.graph_objects")
    for figure in figures(plain):
        graph_objects.Figure(figure)
    graph_objects.Figure(charts.curves({"a": {1: 1.0, 2: 3.0}, "far": {1: 9.0, 2: 99.0}}, "GPUs", "ms"))
    assert charts.far_off({"a": {1: 1.0, 2: 3.0}, "far": {1: 9.0, 2: 99.0}}) == ["far"]
    graph_objects.Figure(charts.shares({"forward": 1.0, "backward": 2.0}, "ms"))


def test_files_become_pages_or_are_refused(tmp_path):
    pytest.importorskip("plotly")
    (tmp_path / "run.json").write_text(json.dumps(tree()))
    done = CliRunner().invoke(app, ["report", str(tmp_path / "run.json"), "--out", str(tmp_path / "run.html")])
    assert done.exit_code == 0, done.output
    assert "Plotly.react" in (tmp_path / "run.html").read_text()
    Trace((Process("rank 0", 0, spans()),)).save(tmp_path / "trace.json")
    found = run.load(tmp_path / "trace.json")
    assert found.to_dict()["sentences"][0] == "The trace has 1 step of 1 rank."
    for name, text, said in (("a.json", "{}", "neither"), ("b.json", "no", "not JSON"), ("c.json", None, "cannot be")):
        if text is not None:
            (tmp_path / name).write_text(text)
        with pytest.raises(MoefxError, match=said):
            run.load(tmp_path / name)
    with pytest.raises(MoefxError, match="no step 5"):
        run.load(tmp_path / "trace.json", step=5)
    with pytest.raises(MoefxError, match="only a trace"):
        run.load(tmp_path / "run.json", step=5)
    with pytest.raises(MoefxError, match="pdf"):
        found.save(tmp_path / "run.pdf")


def test_without_plotly_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MoefxError) as caught:
        page.write(tree(), tmp_path / "run.html")
    assert "pip install plotly" in caught.value.hint
    assert not (tmp_path / "run.html").exists()


# ---- in a browser


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    pytest.importorskip("axe_playwright_python")
    pytest.importorskip("plotly")
    if BROWSER is None:
        pytest.skip("no chromium: apt-get install chromium")
    with playwright.sync_playwright() as p:
        found = p.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    pytest.importorskip("plotly")
    return page.write(tree(), tmp_path_factory.mktemp("page") / "run.html")


SIZES = [(400, "dark"), (1280, "light"), (400, "light"), (1280, "dark")]


@pytest.mark.parametrize(("width", "scheme"), places(SIZES, 0, 1), ids=str)
def test_in_a_browser(browser, file, width, scheme):
    """No errors, nothing fetched, nothing wider than the window, nothing that axe finds serious."""
    from axe_playwright_python.sync_playwright import Axe

    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    context.set_default_timeout(120_000)
    shown, errors, fetched = context.new_page(), [], []
    shown.on("console", lambda each: errors.append(each.text) if each.type in ("error", "warning") else None)
    shown.on("pageerror", lambda error: errors.append(str(error)))
    shown.on("request", lambda request: fetched.append(request.url))
    shown.goto(file.as_uri())
    shown.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true; })")
    count = shown.locator(".chart").count()
    shown.wait_for_function("n => document.querySelectorAll('.chart .main-svg').length >= n", arg=count)
    assert errors == []
    assert [url for url in fetched if not url.startswith(("file:", "data:", "blob:"))] == []
    assert shown.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") <= 0
    assert shown.evaluate(OUTSIDE) == []
    found = Axe().run(shown).response["violations"]
    serious = [each for each in found if each["impact"] in ("serious", "critical")]
    assert [(each["id"], each["nodes"][0]["html"][:200]) for each in serious] == []
    context.close()


# Text of a chart that is cut at the chart's edge.
OUTSIDE = """[...document.querySelectorAll('.chart')].flatMap(chart => {
    const frame = chart.getBoundingClientRect();
    return [...chart.querySelectorAll('text')].filter(text => {
        const box = text.getBoundingClientRect();
        return box.width && text.textContent.trim() && getComputedStyle(text).display !== 'none'
            && (box.left < frame.left - 1 || box.right > frame.right + 1 || box.bottom > frame.bottom + 1);
    }).map(text => text.textContent);
})"""
