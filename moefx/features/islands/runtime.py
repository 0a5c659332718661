"""What emitted code calls of this room: functions that Inductor compiles when the code is loaded.

    @islands.compiled("float32[s0, 16]", "float32[16]", device="cpu", sizes={"s0": 64})
    def island_0(x, weight):
        ...

Equal functions are compiled once in a process, and Inductor keeps what it compiled on disk. Most sizes are free; where
Inductor wants something of them that does not hold, the function is compiled once more, up to four times. Where sizes
are zero or one, where strides are others, and where somebody watches every op, it runs as it is written.
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from moefx import _torch_compat as compat
from moefx import progress
from moefx.errors import MoefxError

log = logging.getLogger("moefx.islands")

_TYPE = re.compile(r"(\w+)\[(.*?)\](?: by \[(.*)\])?$")
_MOST = 4  # forms of a function; what fits none of them runs as it is written
_NAME = re.compile(r"[A-Za-z_]\w*")
compiler: Callable[..., Callable] = compat.by_inductor
"""(function, mode of fakes, its sizes and inputs) -> what runs."""


def missing() -> str | None:
    """Why there is no compiler, in words."""
    return compat.inductor_missing()


@dataclass(frozen=True)
class Form:
    """A function as it was compiled for sizes like some. run: takes the sizes before the arguments."""

    run: Callable[..., tuple]
    holds: Callable[..., bool]


class Compiled:
    """What became of functions that are equal. seconds: that compiling took so far."""

    def __init__(self, function: Callable, types: tuple[str, ...], device: str, sizes: Mapping[str, int]) -> None:
        self._function, self._types, self._device = function, types, device
        self.forms: list[Form] = []
        self.seconds = 0.0
        inputs = _Inputs(types, device)
        self.sizes_of = inputs.sizes_of()
        self.add([max(2, inputs.at(formula, sizes)) for formula in inputs.formulas])

    def form(self, sizes: tuple[int, ...]) -> Form | None:
        """That for arguments of these sizes, which is compiled if there is none; None where there are enough."""
        found = next((form for form in self.forms if form.holds(*sizes)), None)
        return self.add(sizes) if found is None and len(self.forms) < _MOST else found

    def add(self, sizes: Sequence[int]) -> Form:
        """Raises MoefxError where the compiler cannot."""
        name, begun = self._function.__name__, time.perf_counter()
        progress.step(f"compile {name}")
        inputs = _Inputs(self._types, self._device)
        try:
            with compat.no_autocast(), torch.inference_mode(False):
                fakes, mode, symbols = inputs.fakes(sizes)
                run = compiler(self._listed, mode, fakes)
        except Exception as error:
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise MoefxError(f"Inductor cannot compile {name}: {reason}",
                             hint="islands=False; TORCH_LOGS=+inductor says more") from error  # fmt: skip
        conditions = " and ".join(compat.conditions_of(mode, symbols)) or "True"
        self.forms.append(Form(run, eval(f"lambda {', '.join(symbols.values())}: {conditions}", {"math": math})))
        self.seconds += time.perf_counter() - begun
        log.info("%s: compiled in %.2f s for sizes %s, if %s", name, time.perf_counter() - begun, sizes, conditions)
        return self.forms[-1]

    def _listed(self, *args: Any) -> tuple:
        found = self._function(*args[len(args) - len(self._types) :])
        return found if isinstance(found, tuple) else (found,)


_known: dict[tuple, Compiled] = {}


class Island:
    """A function of emitted code, and what is called in its place. is_new: it was compiled for this one."""

    def __init__(self, function: Callable, compiled: Compiled, *, is_new: bool) -> None:
        self.function, self.compiled, self.is_new = function, compiled, is_new
        self.__name__ = function.__name__

    def __call__(self, *args: Any) -> Any:
        sizes = None if compat.is_watched() else self.compiled.sizes_of(*args)
        form = None if sizes is None else self.compiled.form(sizes)
        if form is None:
            return self.function(*args)
        found = form.run(*sizes, *args)
        return found[0] if len(found) == 1 else found


def compiled(*types: str, device: str, sizes: Mapping[str, int]) -> Callable[[Callable], Island]:
    """Compile a function of plain ops. types: of its arguments, as "float32[s0, 16]", behind it " by [1, s0]" where
    they do not lie row by row; of a number its formula. sizes: examples of the symbols.

    Raises MoefxError where Inductor cannot.
    """

    def decorate(function: Callable) -> Island:
        code = function.__code__
        key = code.co_code, repr(code.co_consts), code.co_names, types, device, compiler
        is_new = key not in _known
        if is_new:
            _known[key] = Compiled(function, types, device, sizes)
        return Island(function, _known[key], is_new=is_new)

    return decorate


class _Inputs:
    """The types of arguments, in sizes n0, n1, .. A formula whose symbols no argument shows alone, as that of
    "float32[s0*s1]", is a size itself."""

    def __init__(self, types: tuple[str, ...], device: str) -> None:
        self._types, self._device = [_Type.of(each) for each in types], device
        self.formulas: dict[str, str] = {}  # {one that is a size: it}
        self._where: list[str] = []  # arguments show it
        shown = [(formula, f"a{i}.shape[{dim}]") for i, each in enumerate(self._types) if each.dtype
                 for dim, formula in enumerate(each.shape)]  # fmt: skip
        shown += [(each.shape[0], f"a{i}") for i, each in enumerate(self._types) if not each.dtype]
        for formula, where in sorted(shown, key=lambda each: not each[0].isidentifier()):
            try:
                self._text(formula)
            except KeyError:
                self.formulas[formula] = f"n{len(self._where)}"
                self._where.append(where)

    def _text(self, formula: str) -> str:
        """In sizes. Raises KeyError."""
        return self.formulas.get(formula) or f"({_NAME.sub(lambda found: self.formulas[found[0]], formula)})"

    def _strides(self, each: _Type) -> list[str]:
        if each.strides is not None:
            return [self._text(stride) for stride in each.strides]
        return ["*".join(map(self._text, each.shape[dim + 1 :])) or "1" for dim in range(len(each.shape))]

    @staticmethod
    def at(formula: str, examples: Mapping[str, int]) -> int:
        return int(eval(formula, {}, dict(examples)))

    def fakes(self, sizes: Sequence[int]) -> tuple[list[Any], Any, dict[Any, str]]:
        """The sizes and the arguments, as symbols and fakes with these examples; their mode; {symbol: size}."""
        mode = compat.FakeTensorMode(shape_env=compat.ShapeEnv())
        of = {name: compat.new_symbol(mode, name, size) for name, size in zip(self.formulas.values(), sizes)}
        symbols = {size.node.expr: name for name, size in of.items()}
        found: list[Any] = list(of.values())
        for each in self._types:
            shape = [eval(self._text(formula), {}, of) for formula in each.shape]
            if each.dtype is None:
                found += shape
                continue
            strides = [eval(stride, {}, of) for stride in self._strides(each)]
            with mode:
                found.append(torch.empty_strided(shape, strides, dtype=each.dtype, device=self._device))
        return found, mode, symbols

    def sizes_of(self) -> Callable[..., tuple[int, ...] | None]:
        """The sizes of arguments; None where one is less than two, or strides are not those of the types."""
        wanted = [f"{name} > 1" for name in self.formulas.values()]
        wanted += [f"a{i}.stride({dim}) == {stride}" for i, each in enumerate(self._types) if each.dtype
                   for dim, stride in enumerate(self._strides(each)) if each.shape[dim] != "1"]  # fmt: skip
        lines = [f"def sizes_of({', '.join(f'a{i}' for i in range(len(self._types)))}):"]
        lines += [f"    {name} = {where}" for name, where in zip(self.formulas.values(), self._where)]
        lines += [f"    return ({''.join(f'{name}, ' for name in self.formulas.values())}) "
                  f"if {' and '.join(wanted) or 'True'} else None"]  # fmt: skip
        scope: dict[str, Any] = {}
        exec("\n".join(lines), scope)
        return scope["sizes_of"]


@dataclass(frozen=True)
class _Type:
    """dtype: None of a number, whose formula is the one of `shape`. strides: None where it lies row by row."""

    dtype: torch.dtype | None
    shape: list[str]
    strides: list[str] | None

    @classmethod
    def of(cls, text: str) -> _Type:
        found = _TYPE.match(text)
        if found is None:
            return cls(None, [text], None)
        shape, strides = (None if each is None else each.split(", ") if each else [] for each in found.groups()[1:])
        return cls(getattr(torch, found[1]), shape, strides)
