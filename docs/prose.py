"""Check the prose of what users read: proselint, and a small style of our own.

    python docs/prose.py [page ..]        list the findings; without pages, of all that users read

What moefx says itself, in errors, hints, warnings and the help of commands, has to keep to the style, too.

Code, tables' rulers, links' targets and headings are no prose. The style: sentences of at most `LONGEST` words, no more
than `PASSIVE` of a page's sentences in the passive voice, and none of the `BANNED` words.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
# What is written for those who change moefx, not for those who use it, and what is made by a script.
CONTRIBUTORS = {"add-a-feature", "add-a-pass", "add-an-axis", "add-an-op", "architecture", "cost-model", "internals",
                "invariants", "map", "recognition", "token-walk"}  # fmt: skip
PAGES = [ROOT / "README.md", *sorted(path for path in (ROOT / "docs").rglob("*.md") if path.stem not in CONTRIBUTORS)]

LONGEST = 32
PASSIVE = 0.33
BANNED = {
    r"anew": "again",
    r"computed of": "computed from",
    r"but for": "except for",
    r"be it": "whether",
    r"(?:is|are) no (?:nn\.|longer a plain |plain |prime |whole )": "is not a ..",
    r"what is no\b": "what is not a ..",
    r"behind (?:the|it|its|a|which|attention|differentiat\w+)": "after",
    r"give way": "are replaced",
    r"by turns": "in turn",
    r"likewise": "also",
    r"what is left of": "the rest of",
    r"so is it|so it is with": "the same holds for",
    r"of which that is not true": "where that does not hold",
    r"is to come": "follows",
    r"whoever": "the rank that",
    r"upon": "on",
    r"unlike numbers|unequally many": "different numbers",
    r"in times of": "as a multiple of",
    r"(?:is|are) said of|what is named": "who says or names it",
    r"thus|hence|thereby|whilst|amongst|therein|thereof|whereby": "a plain word",
    r"simply|obviously|just": "nothing",
    r"utilize[sd]?|leverage[sd]?": "use",
    r"in order to": "to",
}
# Of proselint, what is made for other texts than these: it wants typographic signs that are not ASCII, and sees
# repeated words where code was taken out.
OFF = ("typography.", "lexical_illusions", "misc.phrasal_adjectives", "spelling.consistency", "misc.capitalization",
       "weasel_words", "industrial_language.jargon", "restricted.", "annotations")  # fmt: skip

SAY = ("UnsupportedUse", "warn", "tell", "Finding", "Option", "Argument")  # besides errors

_IRREGULAR = ("built|bound|brought|caught|chosen|cut|done|drawn|driven|fed|found|given|gone|held|hidden|kept|known|"
              "laid|left|lent|lost|made|met|paid|put|read|run|said|seen|sent|set|shown|shut|sold|split|spent|spread|stuck|"
              "taken|taught|thrown|told|understood|worn|written")  # fmt: skip
_ADVERB = r"(?:not|never|also|often|still|then|always|already|\w+ly)\s+"
_PASSIVE = re.compile(rf"\b(?:is|are|was|were|be|been|being|gets?)\s+(?:{_ADVERB})*(?:\w\w+ed|{_IRREGULAR})\b",
                      re.IGNORECASE)  # fmt: skip


def prose(text: str) -> str:
    """The same lines, with everything that is not prose blanked: an item or a cell of a table ends a sentence."""
    lines, inside = [], False
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            inside = not inside
            line = ""
        if inside or re.match(r"\s*(#|!\[|:::|    \S)", line):
            line = ""
        elif line.lstrip().startswith("|"):
            line = _cells(line)
        line = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", line)
        line = re.sub(r"`[^`]*`", "CODE", line)
        line = re.sub(r"^(\s*)([-*]|\d+\.)\s", r"\1. ", line)
        lines.append(line.replace("**", "").replace("*", ""))
    return "\n".join(lines)


def _cells(line: str) -> str:
    return "" if re.fullmatch(r"[\s|:-]+", line) else ". ".join(line.strip().strip("|").split("|")) + "."


def sentences(text: str) -> Iterator[tuple[int, str]]:
    """(line, sentence)."""
    start = 0
    for end in re.finditer(r"(?<!\be\.g)(?<!\bi\.e)(?<!\bal)(?<!\.)[.!?](?=\s|$)|\n\s*\n|:\s*(?=\n)|\Z", text):
        found = text[start:end.end()]
        if found.strip(" .\n"):
            yield text[:start].count("\n") + 1 + _led(found), " ".join(found.split()).strip(". ")
        start = end.end()


def _led(found: str) -> int:
    return (found[:len(found) - len(found.lstrip())]).count("\n")


def own_style(text: str) -> Iterator[tuple[int, str]]:
    """(line, finding)."""
    every = [(line, words) for line, words in sentences(text) if len(words.split()) > 2]
    for line, words in every:
        if len(words.split()) > LONGEST:
            yield line, f"a sentence of {len(words.split())} words: {words[:60]} .."
        for banned, instead in BANNED.items():
            if found := re.search(rf"\b(?:{banned})", words, re.IGNORECASE):
                yield line, f"'{found[0]}': say {instead}"
    passive = [line for line, words in every if _PASSIVE.search(words)]
    if len(every) >= 10 and len(passive) > PASSIVE * len(every):
        yield passive[0], f"{len(passive)} of {len(every)} sentences are in the passive voice"


def by_proselint(text: str) -> Iterator[tuple[int, str]]:
    """(line, finding). Raises ImportError where proselint is not installed."""
    from proselint.checks import __register__
    from proselint.config import DEFAULT
    from proselint.registry import CheckRegistry
    from proselint.tools import LintFile

    registry = CheckRegistry()
    if not registry.checks:
        registry.register_many(__register__)
    for found in LintFile("page", text).lint(DEFAULT):
        check = found.check_result
        if not check.check_path.startswith(OFF):
            yield found.pos[0], f"{check.check_path}: {check.message}"


def said() -> list[str]:
    """Findings in what errors, hints, warnings and the help of commands say."""
    found = []
    for path in sorted((ROOT / "moefx").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = getattr(node.func, "attr", getattr(node.func, "id", "")) if isinstance(node, ast.Call) else ""
            if name in SAY or name.endswith("Error"):
                texts = filter(None, map(_literal, [*node.args, *(each.value for each in node.keywords)]))
                found += [f"{path.relative_to(ROOT)}:{node.lineno}: {words}" for text in texts
                          for _, words in own_style(text)]  # fmt: skip
    return found


def _literal(node: ast.AST) -> str:
    """The text of a string, with CODE for what is put into it."""
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_literal, node.values))
    if isinstance(node, ast.BinOp):
        return _literal(node.left) + _literal(node.right)
    return "CODE" if isinstance(node, ast.FormattedValue) else str(getattr(node, "value", ""))


def findings(pages: Iterable[Path]) -> list[str]:
    found = []
    for page in pages:
        text = prose(page.read_text(encoding="utf-8"))
        name = page.relative_to(ROOT) if page.is_relative_to(ROOT) else page
        found += [f"{name}:{line}: {words}" for line, words in sorted({*own_style(text), *by_proselint(text)})]
    return found


if __name__ == "__main__":
    listed = findings(Path(name).resolve() for name in sys.argv[1:]) if sys.argv[1:] else [*findings(PAGES), *said()]
    print("\n".join([*listed, f"{len(listed)} findings"]))
    sys.exit(bool(listed))
