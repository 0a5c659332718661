"""What an op does to the dims of its tensors, as one line, from which the rest follows: the type of the result, what
becomes of every dim (`ir.fates`), and which arguments have an entry per token.

    x [T? ..], perm [p] -> [p ..]                        dispatch: rows are picked; what is behind them stays
    [.. i k], [.. k j] -> [.. i j]                       a product; dims with the same letter run together
    part [.. dim~ ..] -> [.. total ..]                   the rows of all ranks, in the dim whose number `dim` says

Operands are arguments, by name, or else by position, with one term per dim. A letter or word that the result has, too,
is kept there; one that it lacks is summed, or contracted where several operands have it. A mark says something else:
`?` some entries are taken, by number; `<` what comes of them depends on their order; `~` mixed with others; `-` not
read. `T` are tokens. `..` are all other dims, numbered from the right; `...` the same of an operand that may be
broadcast, and lack even terms that are spelled out. Between `..` and `..` stands the argument that names the dim.

In the result, terms are sizes: letters, arguments that are numbers, or what Python computes of them: `n*slots`. Behind
a result stands its dtype, or the operand whose dtype and device it has; by default the first one. Of ops whose forms
differ in their dims all forms are written, with `|` between them: the first that fits is meant.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from moefx._torch_compat import OpOverload
from moefx.errors import MoefxError
from moefx.ir.fates import CONTRACTED, MIXED, ORDERED, SUMMED, TAKEN, UNREAD, Fate, Operand, meets, shape_of, tensor_of
from moefx.ir.names import arg
from moefx.ir.op import argument

_MARKS = {"?": TAKEN, "<": ORDERED, "~": MIXED, "-": UNREAD}
_DOTS = ("..", "...")
_WORDS = {"min": min, "max": max, "__builtins__": {}}  # beside sizes, in those of results
_OPERAND = re.compile(r"\s*(\w*)\s*\[([^]]*)\]\s*(\w*)\s*")


@dataclass(frozen=True)
class Term:
    """A dim, or several (`..`), and its fate where that does not follow."""

    word: str
    fate: Fate | None = None

    @classmethod
    def read(cls, text: str) -> Term:
        is_marked = text[-1] in _MARKS and len(text) > 1
        return cls(text[:-1] if is_marked else text, _MARKS[text[-1]] if is_marked else None)


@dataclass(frozen=True)
class Tensors:
    """An operand or a result. like: of a result, its dtype or the operand that it is like."""

    name: str
    terms: tuple[Term, ...]
    like: str = ""

    @classmethod
    def read(cls, text: str) -> tuple[Tensors, ...]:
        found = [_OPERAND.fullmatch(each) for each in re.split(r",(?![^[]*\])", text)]
        if not all(found):
            raise MoefxError(f"'{text}' are no tensors: name [dim dim ..], ..")
        return tuple(cls(each[1], tuple(map(Term.read, each[2].split())), each[3]) for each in found)

    @property
    def place(self) -> str:
        """The argument that names the dim of which alone something is said."""
        return self.terms[1].word if [term.word for term in self.terms[::2]] == ["..", ".."] else ""

    def dims(self, count: int, at: int) -> list[tuple[Hashable, Fate | None]] | None:
        """What every dim of a tensor of `count` dims is called, and its fate; None where the terms do not fit. at: the
        number of the dim of which alone something is said."""
        dots = [i for i, term in enumerate(self.terms) if term.word in _DOTS]
        more = count - len(self.terms) + len(dots)
        if self.place:
            at %= count
            before, named, behind = self.terms
            return [*[((True, i), before.fate) for i in range(at)], (named.word, named.fate),
                    *[((False, i), behind.fate) for i in range(count - at - 1)]]  # fmt: skip
        spelled = [[(term.word, term.fate)] for term in self.terms]
        if dots:
            term = self.terms[dots[0]]
            spelled[dots[0]] = [(i, term.fate) for i in reversed(range(more))]
            if more < 0 and term.word == "...":
                return [each for (each,) in spelled[1 - more :]]
        elif more:
            return None
        return None if more < 0 else [each for several in spelled for each in several]


@dataclass(frozen=True)
class Form:
    """One line."""

    operands: tuple[Tensors, ...]
    results: tuple[Tensors, ...]

    @classmethod
    def read(cls, text: str) -> Form:
        left, _, right = text.partition("->")
        found = cls(Tensors.read(left), Tensors.read(right))
        kept = {term.word for result in found.results for term in result.terms}
        computed = {word for each in kept for word in re.findall(r"[A-Za-z]\w*", each)} - kept
        for term in (term for operand in found.operands for term in operand.terms):
            if term.fate is None and term.word in computed:
                raise MoefxError(f"'{text}' says of what sizes of the result are computed, and not what becomes of "
                                 f"{term.word}", hint=f"a mark: {term.word}? {term.word}< {term.word}~")  # fmt: skip
        return found

    def fates(self, node: Node) -> list[Operand] | None:
        """What a node does to every dim of its operands; None where this form does not fit."""
        given = [(each, _argument(node, i, each.name)) for i, each in enumerate(self.operands)]
        given = [(each, a) for each, a in given if isinstance(a, Node) and tensor_of(a) is not None]
        at = argument(node, self.place) if self.place else 0
        found = [each.dims(tensor_of(a).dim(), at) for each, a in [*given, (self.results[0], node)]]
        if None in found:
            return None
        return together(node, [(a, dims) for (_, a), dims in zip(given, found)], [key for key, _ in found[-1]])

    @property
    def place(self) -> str:
        """The argument that names a dim."""
        return next((each.place for each in self.operands if each.place), "")

    def result(self, given: Mapping[str, Any]) -> Any:
        """Tensors of the result's shapes and dtypes. given: the arguments by name."""
        sizes: dict[Hashable, Any] = {}
        tensors = [(each, given[each.name]) for each in self.operands if given[each.name] is not None]
        for each, tensor in tensors:
            dims = each.dims(tensor.dim(), given.get(self.place, 0))
            if dims is None:
                raise MoefxError(f"{each.name} has {tensor.dim()} dims, not {len(each.terms)}")
            sizes |= {key: size for (key, fate), size in zip(dims, tensor.shape)
                      if key not in sizes and (isinstance(key, str) or fate is None)}  # fmt: skip
        numbers = {name: each for name, each in given.items() if isinstance(each, (int, torch.SymInt))}
        words = _WORDS | numbers | {key: size for key, size in sizes.items()
                                    if isinstance(key, str) and (key == self.place or key not in numbers)}  # fmt: skip

        def made(result: Tensors) -> Tensor:
            behind = sorted((key for key in sizes if isinstance(key, int)), reverse=True)
            shape: list[Any] = []
            for i, term in enumerate(result.terms):
                beside = [key for key in sizes if isinstance(key, tuple) and key[0] is (i == 0)]
                shape += [sizes[key] for key in (beside if result.place else behind)] if term.word in _DOTS else [
                    eval(term.word, dict(words))]  # fmt: skip
            like = given.get(result.like, tensors[0][1])
            dtype = like.dtype if result.like in ("", *given) else getattr(torch, result.like)
            return like.new_empty(shape, dtype=dtype)

        found = tuple(map(made, self.results))
        return found if len(found) > 1 else found[0]


class Factors:
    """What an op does to dims: its forms."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.forms = tuple(map(Form.read, text.split("|")))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(each.name for form in self.forms for each in form.operands if each.name)

    @property
    def per_token(self) -> tuple[str, ...]:
        """The arguments that have an entry for every token."""
        return tuple(each.name for each in self.forms[0].operands if each.terms[:1] and each.terms[0].word == "T")

    def dims(self, node: Node) -> list[Operand] | None:
        return next((found for form in self.forms if (found := form.fates(node)) is not None), None)

    def fake(self, function: Callable) -> Callable:
        """The function that makes the type of the result of `function`, whose arguments it takes."""
        signature = inspect.signature(function)

        def fake(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            return self.forms[0].result(given.arguments)

        return fake


@functools.cache
def factors(text: str) -> Factors:
    return Factors(text)


def together(node: Node, given: Sequence[tuple[Any, Sequence[tuple[Hashable, Fate | None]]]],
             out: Sequence[Hashable]) -> list[Operand]:  # fmt: skip
    """Dims with the same key run together. given: operands with the keys of their dims, each with its fate where it has
    one of its own; out: the keys of the result's."""
    sizes, places = shape_of(tensor_of(node)), {key: i for i, key in enumerate(out)}
    count = Counter(key for _, dims in given for key, own in dims if own is None)

    def fate(key: Hashable, own: Fate | None, size: Any) -> Fate:
        if own is not None or key not in places:
            return own or (CONTRACTED if count[key] > 1 else SUMMED)
        return meets(size, places[key], sizes[places[key]])

    return [Operand(a, tuple(fate(*key, size) for key, size in zip(dims, shape_of(tensor_of(a))))) for a, dims in given]


def _argument(node: Node, position: int, name: str) -> Any:
    """Of an op of the dialect by name; of others by position or name."""
    is_ours = isinstance(node.target, OpOverload) and node.target.namespace == "moefx"
    return argument(node, name) if is_ours else arg(node, position, name)
