"""The site builds without a warning, fetches nothing from the net, and its prose has no findings."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs import prose

ROOT = Path(__file__).parent.parent


def needs(*names: str) -> None:
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}; pip install -e '.[docs]'")


def test_the_site_builds_and_its_links_lead_somewhere(tmp_path):
    needs("mkdocs", "material", "mkdocstrings", "mkdocstrings_handlers")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
                          env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    pages = {page.relative_to(tmp_path).as_posix(): page.read_text() for page in tmp_path.rglob("*.html")}
    assert len(pages) > 80, "pages of docs, and of what they link to"
    fetched = re.compile(r"<(?:link|script|img)\b[^>]*(?:src|href)=\"?(https?:[^\" >]+)")
    assert not {found for text in pages.values() for found in fetched.findall(text)}
    api = pages["api.html"]
    names = "compile", "CompiledModule.materialize", "plan", "errors.MeshError"
    assert all(f'id="moefx.{name}"' in api for name in names)


@pytest.mark.parametrize("page", prose.PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_prose(page):
    needs("proselint")
    assert not prose.findings([page])


def test_what_moefx_says():
    assert not prose.said()


def test_the_prose_checker_finds():
    lines = ["# Simply ignored", "", "`simply` too. It is computed of rows.", "", "| a | " + "word " * 40 + "|", ""]
    text = "\n".join(lines + ["It was done. It is not often seen. They were then made. We ate it."] * 4)
    found = [words for _, words in prose.own_style(prose.prose(text))]
    assert [re.sub(r"\W.*", "", words.lstrip("'")) for words in found] == ["computed", "a", "13"], found
