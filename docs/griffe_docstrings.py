"""What the API reference makes of a docstring: a list of what it says of parameters and fields.

Docstrings here say `name: what it is` at the start of a line or after a full stop, and end with `Raises ..`. Each such
part becomes an item of a list, if the names are those of parameters or attributes, or a paragraph of its own.
"""

from __future__ import annotations

import re

import griffe

_SAID = re.compile(r"(?:\A|(?<=[.?)])\s+|\n\s*)((?:\w+)(?:, \w+)*):\s")
_ENDS = re.compile(r"(?:(?<=[.)])\s+|\n\s*)(?=(?:Raises|Returns) )")


def listed(text: str, names: set[str]) -> str:
    """The docstring as Markdown."""
    paragraphs = []
    for paragraph in re.split(r"\n\s*\n", text):
        if paragraph.startswith("    ") or "```" in paragraph:
            paragraphs.append(paragraph)
            continue
        for part in _ENDS.split(paragraph):
            found = [match for match in _SAID.finditer(part) if {*match[1].split(", ")} <= names]
            ends = [match.start() for match in found[1:]] + [len(part)]
            before = part[:found[0].start()] if found else part
            if before.strip():
                paragraphs.append(" ".join(before.split()))
            items = [f"- `{'`, `'.join(match[1].split(', '))}`: {' '.join(part[match.end():end].split())}"
                     for match, end in zip(found, ends)]  # fmt: skip
            if items:
                paragraphs.append("\n".join(items))
    return "\n\n".join(paragraphs)


class Listed(griffe.Extension):
    def on_function(self, *, func: griffe.Function, **_: object) -> None:
        if func.docstring:
            func.docstring.value = listed(func.docstring.value, {each.name.lstrip("*") for each in func.parameters})

    def on_class(self, *, cls: griffe.Class, **_: object) -> None:
        if cls.docstring:
            inside = {name for name, each in cls.members.items() if each.is_attribute}
            init = cls.members.get("__init__")
            if isinstance(init, griffe.Function):
                inside |= {each.name for each in init.parameters}
            cls.docstring.value = listed(cls.docstring.value, inside)
