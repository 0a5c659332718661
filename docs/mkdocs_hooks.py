"""What the site has besides docs/: the README as its first page, and a page for every file that a page links to.

Pages are written to be read in the repository, so they link to files outside of docs/: results of benchmarks, examples,
tests. Each of these becomes a page under repository/ (Markdown as it is, other text as code, a folder as a list), with
its own links followed, and every link is rewritten to where its target is in the site.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.structure.files import File, InclusionLevel

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
FENCE = re.compile(r"^\s*(```|~~~)")
KINDS = {".py": "python", ".sh": "bash", ".sbatch": "bash", ".json": "json", ".toml": "toml"}


def page_of(path: str) -> str:
    """Where a file of the repository is among the sources of the site."""
    if path == "README.md":
        return "index.md"
    if path.startswith("docs/") and not path.endswith(".py"):
        return path.removeprefix("docs/")
    return f"repository/{path}" if path.endswith(".md") else f"repository/{path}.md"


def file_of(page: str) -> str:
    """The reverse: the file of the repository that a page shows."""
    if page == "index.md":
        return "README.md"
    if not page.startswith("repository/"):
        return f"docs/{page}"
    path = page.removeprefix("repository/")
    return path if (ROOT / path).is_file() else path.removesuffix(".md")


def targets(path: str, text: str) -> Iterator[str]:
    """Files and folders of the repository that the Markdown of a file links to."""
    for line in _prose(text):
        for found in LINK.finditer(line):
            if "://" not in found[2] and not found[2].startswith("mailto:"):
                yield _joined(path, found[2])


def _joined(path: str, link: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), link))


def _prose(text: str) -> Iterator[str]:
    inside = False
    for line in text.splitlines():
        if FENCE.match(line):
            inside = not inside
        elif not inside:
            yield line


def _markdown(path: str) -> str:
    """What the page of a file outside of docs/ says."""
    place = ROOT / path
    if place.is_dir():
        names = sorted(each.name for each in place.iterdir() if each.suffix in (".md", *KINDS))
        return "\n".join([f"# {path}", "", *(f"- [{name}]({place.name}/{name})" for name in names)])
    text = place.read_text(encoding="utf-8")
    if path.endswith(".md"):
        return text
    return f"# {path}\n\n````{KINDS.get(place.suffix, 'text')}\n{text.rstrip()}\n````\n"


def on_files(files, config):
    files.append(File.generated(config, "index.md", content=(ROOT / "README.md").read_text(encoding="utf-8")))
    waiting = [file_of(file.src_uri) for file in files.documentation_pages()]
    seen = set(waiting)
    while waiting:
        path = waiting.pop()
        for target in targets(path, _markdown(path)):
            inside = target.startswith("docs/") and not target.endswith(".py")
            if target in seen or inside or target.startswith("..") or not (ROOT / target).exists():
                continue  # a link that leads nowhere is left as it is, and mkdocs names it
            seen.add(target)
            waiting.append(target)
            files.append(File.generated(config, page_of(target), content=_markdown(target),
                                        inclusion=InclusionLevel.NOT_IN_NAV))  # fmt: skip
    return files


def on_page_markdown(markdown, page, config, files):
    own, path, inside = page.file.src_uri, file_of(page.file.src_uri), False

    def moved(found: re.Match) -> str:
        target = _joined(path, found[2])
        if "://" in found[2] or not (ROOT / target).exists() or files.get_file_from_path(page_of(target)) is None:
            return found[0]
        return found[1] + posixpath.relpath(page_of(target), posixpath.dirname(own) or ".") + found[3]

    lines = []
    for line in markdown.splitlines():
        if FENCE.match(line):
            inside = not inside
        lines.append(line if inside else LINK.sub(moved, line))
    return "\n".join(lines)
