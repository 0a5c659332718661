"""The text of a function with loops, run with names in place of values: what it does is the flat text.

Nothing is taken from what wrote the text but the names that values have in the flat one. A value that the flat text
lets go of must have no other name, and be in no list.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from types import CodeType

from moefx.errors import VerifyError
from moefx.link.statements import Function, Writer, commented, flat

_TOKEN = re.compile(r"(f?'(?:[^'\\]|\\.)*'|f?\"(?:[^\"\\]|\\.)*\"|(?<![\w.])[A-Za-z_]\w*(?!\w*=(?!=)))")
_COMMENT = re.compile(r" +# ([^'\"]*)$")
BRACES = re.compile(r"\{\{|\}\}|\{([^{}]*)\}")
_TAKE = re.compile(r"(\w+) = layers\.take\(inputs, (.*), step=(-?\d+), rounds=(\d+)\)$")
_UNPACK = re.compile(r"\) = (?:inputs|layers\.left\(inputs\)|(\w+)\.(pop|popleft)\(\))$")
_ROW = re.compile(r"\(([\w, ]+)\) = (\w+)\.(pop|popleft)\(\)$")
_FOR = re.compile(r"for (\w+) in range\((.*)\):$")
_LIST = re.compile(r"(\w+) = (?:\[\]|deque\(\))$")
_COLLECTED = re.compile(r"(\w+) = deque\(\[(\(.*\))\]\)$")
_ADD = re.compile(r"(\w+)(\[:0\] =| \+=) \[([\w, ]*)\]$")
_APPEND = re.compile(r"(\w+)\.append\(\(([\w, ]*)\)\)$")
_RENAME = re.compile(r"([\w, ]+) = ([\w, ]+)$")


def check_unrolled(text: str, function: Function) -> None:
    """Raises VerifyError where a text with loops is not the function."""
    wanted, found = flat(function), unrolled(text, function)
    if found != wanted:
        lines = difflib.unified_diff(wanted.splitlines(), found.splitlines(), "flat", "unrolled", lineterm="", n=0)
        raise VerifyError("the loop over equal layers is not what they do: " + " | ".join(list(lines)[2:8]),
                          hint="let every layer be printed: set MOEFX_LAYERS=0")  # fmt: skip


def unrolled(text: str, function: Function) -> str:
    """The flat text. function: has the names of values. Raises VerifyError for what cannot be run."""
    try:
        return _Unroller(function).run(text)
    except (KeyError, IndexError, ValueError, StopIteration) as error:
        raise VerifyError(f"the loop over equal layers does not run: {error!r}") from error


class _Unroller:
    def __init__(self, function: Function) -> None:
        self.order = [name for name, _ in function.inputs]
        self.inputs = list(self.order)
        self.names = iter([each.name for each in function.statements])
        self.types: dict[str, str] = {}
        self.values: dict[str, str] = {}  # {what the text calls a value: its name in the flat text}
        self.lists: dict[str, deque] = {}
        self.held: Counter[str] = Counter()
        self.var: dict[str, int] = {}
        self.out = Writer()
        self.known: set[str] = set()  # lines that the flat text has, too

    def run(self, text: str) -> str:
        first, *lines = text.splitlines()
        self._block(lines)
        head = [commented(f"        {name},", self.types[name]) for name in self.order]
        self.out.lines[:0] = [first, "    (", *head, "    ) = inputs"] if head else [first]
        return "\n".join(self.out.lines) + "\n"

    # ---- lines

    def _block(self, lines: Sequence[str]) -> None:
        at = 0
        while at < len(lines):
            match, stop = _FOR.match(_split(lines[at])[0]), at + 1
            if match is None:
                while stop < len(lines) and not lines[stop - 1].startswith("    ) = ") and lines[at] == "    (":
                    stop += 1
                self._run(lines[at:stop])
            else:
                while stop < len(lines) and (not lines[stop] or lines[stop].startswith(" " * 8)):
                    stop += 1
                for number in range(*map(int, match[2].split(","))):
                    self.var = {match[1]: number}
                    self._run(lines[at + 1 : stop])
                self.var = {}
            at = stop

    def _run(self, lines: Sequence[str]) -> None:
        rest = iter(lines)
        for line in rest:
            self._line(*_split(line), rest)

    def _line(self, code: str, comment: str, rest: Iterator[str]) -> None:
        if not code and not comment:
            return  # headings bring their own
        if not code:
            self.out.head(self._numbers(comment))
        elif code == "(":
            self._unpack(rest)
        elif code == "inputs.clear()":
            self.out.lines.append(f"    {code}  # {comment}")
        elif code.startswith("return ["):
            self.out.lines += ["", f"    return [{', '.join(self._returned(code[8:-1]))}]"]
        elif code in self.known or not self._own(code):
            self.known.add(code)
            self._statement(code, comment)

    def _own(self, code: str) -> bool:
        """Lines that the flat text does not have."""
        code, _, gone = code.partition("; del ")
        if match := _TAKE.match(code):
            step, rounds, first = int(match[3]), int(match[4]), eval(match[2], {"__builtins__": {"range": range}})
            rows = [[self.order[place + k * step] for place in first] for k in range(rounds)]
            self.lists[match[1]] = deque(rows)
            for row in rows:
                self.held.update(row)
                self.inputs = [name for name in self.inputs if name not in row]
        elif match := _LIST.match(code):
            self.lists[match[1]] = deque()
        elif match := _COLLECTED.match(code):
            rows = [[self.values[name] for name in _names(row)] for row in match[2][1:-1].split("), (")]
            self.lists[match[1]] = deque(rows)
            self.held.update(value for row in rows for value in row)
        elif match := _ROW.match(code):
            self._bind(_names(match[1]), self._popped(match[2], match[3]))
        elif match := _ADD.match(code):
            values = [self.values[name] for name in _names(match[3])]
            self.held.update(values)
            if match[2] == " +=":
                self.lists[match[1]].extend(values)
            else:
                self.lists[match[1]].extendleft(reversed(values))
        elif match := _APPEND.match(code):
            self.lists[match[1]].append([self.values[name] for name in _names(match[2])])
            self.held.update(self.lists[match[1]][-1])
        elif (match := _RENAME.match(code)) and all(each in self.values for each in _names(match[2])):
            self._bind(_names(match[1]), [self.values[name] for name in _names(match[2])])
        else:
            return False
        for name in _names(gone):
            self.held[self.values.pop(name)] -= 1
        return True

    def _statement(self, code: str, comment: str) -> None:
        code, _, gone = ("", "", code[4:]) if code.startswith("del ") else code.partition("; del ")
        target, equals, text = code.partition(" = ")
        is_value = bool(equals) and target.isidentifier() and not text.startswith("session.profiler.")
        line = self._renamed(text if is_value else code)
        if is_value:
            value = next(self.names)
            self._bind([target], [value])
            line = f"{value} = {line}"
        dead = [self.values.pop(name) for name in _names(gone)]
        self.held.subtract(dead)
        for value in dead:
            if self.held[value]:
                raise VerifyError(f"the loop over equal layers keeps {value} longer than they do")
        if dead:
            line += ("; del " if line else "del ") + ", ".join(dead)
        self.out.add(line, self._numbers(comment))

    # ---- values

    def _bind(self, names: list[str], values: list[str]) -> None:
        if len(names) != len(values):
            raise ValueError(f"{names} = {values}")
        for value in values:
            self.held[value] += 1
        for name, value in zip(names, values):
            if name in self.values:
                self.held[self.values[name]] -= 1
            self.values[name] = value

    def _popped(self, source: str, how: str) -> list[str]:
        row = getattr(self.lists[source], how)()
        self.held.subtract(row)
        return row

    def _unpack(self, rest: Iterator[str]) -> None:
        names, types = [], []
        for line in rest:
            code, comment = _split(line)
            if match := _UNPACK.match(code):
                values = self._popped(match[1], match[2]) if match[2] else self.inputs
                self._bind(names, values)
                self.types |= dict(zip(values, types))
                return
            names.append(code.removesuffix(","))
            types.append(self._numbers(comment))

    def _returned(self, text: str) -> Iterator[str]:
        for each in text.split(", "):
            if each.startswith("*"):
                yield from self.lists[each[1:]]
            else:
                yield self._renamed(each)

    def _renamed(self, text: str) -> str:
        parts = list(_parts(text))
        for place in range(1, len(parts), 2):
            token = parts[place]
            if token[0] not in "'\"":
                is_template = token[-1] in "'\""
                parts[place] = self._numbers(token[1:]) if is_template else self.values.get(token, token)
        return "".join(parts)

    def _numbers(self, text: str) -> str:
        def one(match: re.Match[str]) -> str:
            return match[0][0] if match[1] is None else str(eval(_compiled(match[1]), {}, self.var))

        return BRACES.sub(one, text) if self.var and "{" in text else text


@functools.lru_cache(4096)
def _parts(text: str) -> tuple[str, ...]:
    """Text, token, text, .., text."""
    return tuple(_TOKEN.split(text))


@functools.lru_cache(256)
def _compiled(expression: str) -> CodeType:
    return compile(expression, "<layer>", "eval")


@functools.lru_cache(4096)
def _split(line: str) -> tuple[str, str]:
    """(code, comment) of a line, without its indent."""
    match = _COMMENT.search(" " + line)
    return (line[: match.start() - 1 if match.start() else 0].strip(), match[1]) if match else (line.strip(), "")


def _names(text: str) -> list[str]:
    return [name for name in re.split(r",\s*", text) if name]
