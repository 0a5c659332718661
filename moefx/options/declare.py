"""How an option is declared: once, with its default, the values it may have, and what it says to a user."""

from __future__ import annotations

import ast
import difflib
import inspect
import re
import textwrap
from collections.abc import Callable
from dataclasses import Field, dataclass, field, fields
from functools import partial
from typing import Any, TypeVar

from moefx.errors import MoefxError

_WIDTH = 100  # of what help() shows
_Class = TypeVar("_Class", bound=type)


@dataclass(frozen=True)
class Allowed:
    """What values an option may have: a test of them, and the words for it."""

    test: Callable[[Any], bool]
    words: str


def option(default: Any, allowed: Allowed, says: str, *, told: bool = True) -> Any:
    """A field of a `Group`. allowed: which values it takes; its words are the hint of the error. says: its text in
    help() and docs/options.md. told: all ranks must have the same."""
    return field(default=default, metadata={"allowed": allowed, "says": says, "told": told})


def group(kind: type[Group], says: str, *, short: bool = True) -> Any:
    """A field that holds a `Group`. short: a value that is no group is one for its first field."""
    names = [each.name for each in fields(kind)]
    says = f"{kind.__name__}({', '.join((*names[:3], '..') if len(names) > 3 else names)}): {says}"
    return field(default=kind(), metadata={"group": kind, "says": says, "short": short})


class _Short(type):
    """help() shows a class as its docstring and its own methods: the fields are in the former."""

    def __dir__(cls) -> list[str]:
        return [name for name in super().__dir__() if not name.startswith("_") and name not in cls.__annotations__]


@dataclass(frozen=True, repr=False)
class Group(metaclass=_Short):
    """Options that belong together. Raises MoefxError for an option that does not exist, or a value that it cannot
    have."""

    def __new__(cls, *_: Any, **given: Any) -> Any:
        for name in given:
            if name not in cls.__dataclass_fields__:
                raise cls._no_option(name)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for each in fields(self):
            found = getattr(self, each.name)
            if "group" in each.metadata:
                object.__setattr__(self, each.name, as_group(each, found, type(self)))
            elif not each.metadata["allowed"].test(found):
                raise MoefxError(f"{each.name} is {found!r}", where=f"moefx.{type(self).__name__}",
                                 hint=each.metadata["allowed"].words)  # fmt: skip

    def __repr__(self) -> str:
        """What is not as by default."""
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        said = (f"{each.name}={found[each.name]!r}" for each in fields(self) if found[each.name] != each.default)
        return f"{type(self).__name__}({', '.join(said)})"

    @classmethod
    def _no_option(cls, name: str) -> MoefxError:
        names = list(cls.__dataclass_fields__)
        near = difflib.get_close_matches(name, names, 1)
        return MoefxError(f"there is no option '{name}'", where=f"moefx.{cls.__name__}",
                          hint=f"did you mean {near[0]}?" if near else f"one of {', '.join(names)}")  # fmt: skip


def as_group(each: Field, found: Any, owner: type) -> Group:
    """The value of a field that holds a group."""
    kind = each.metadata["group"]
    if isinstance(found, kind):
        return found
    first = first_of(kind)
    if not each.metadata["short"] or not first.metadata["allowed"].test(found):
        words = f", or {first.metadata['allowed'].words}" if each.metadata["short"] else ""
        raise MoefxError(f"{each.name} is {found!r}", where=f"moefx.{owner.__name__}",
                         hint=f"moefx.{kind.__name__}(..){words}")  # fmt: skip
    return kind(**{first.name: found})


def first_of(kind: type[Group]) -> Field:
    """The field that a value without a group is for."""
    return fields(kind)[0]


def documented(cls: _Class) -> _Class:
    """Class decorator: adds what every field says to the docstring, and shows help() the fields as the signature."""
    lines = [inspect.cleandoc(cls.__doc__), ""]
    for each in fields(cls):
        text = f"{each.name}: {' '.join(each.metadata['says'].split())}"
        lines += textwrap.wrap(text, _WIDTH, subsequent_indent="    ", break_on_hyphens=False)
    cls.__doc__ = "\n".join(lines)
    cls.__signature__ = inspect.signature(partial(cls.__init__, None))
    return cls


# ---- values


def said(values: list[tuple[str, str]]) -> str:
    """What the text of an option says of the values that rooms add, after those of its own."""
    return "".join(f' "{name}": {says}.' for name, says in values)


def literal(word: str) -> Any:
    """The value that a command line spells."""
    return ast.literal_eval(word) if re.fullmatch(r"[\d.]+(e\d+)?|True|False|None", word) else word


def is_whole(number: Any) -> bool:
    return isinstance(number, int) and not isinstance(number, bool)


def one_of(*names: str) -> Allowed:
    return Allowed(lambda v: isinstance(v, str) and v in names, f"one of {', '.join(map(repr, names))}")


def or_none(allowed: Allowed) -> Allowed:
    return Allowed(lambda v: v is None or allowed.test(v), f"{allowed.words}, or None")


BOOL = Allowed(lambda v: isinstance(v, bool), "True or False")
COUNT = Allowed(lambda v: is_whole(v) and v >= 1, "1, 2, ..")
NUMBER = Allowed(lambda v: is_whole(v) and v >= 0, "0, 1, 2, ..")
STEPS = Allowed(NUMBER.test, "a number of steps, or 0 for never")
