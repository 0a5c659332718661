"""The call that an op becomes in emitted code, as its record says it: Python of words and constants."""

from __future__ import annotations

import ast
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from moefx.errors import MoefxError

LINKER_WORDS = ("session", "step_state", "region", "input_name", "input_names", "is_owned", "are_inputs", "learner",
                "is_fixed")  # fmt: skip


@dataclass(frozen=True)
class RuntimeCall:
    """The call that an op becomes in emitted code.

    Written as Python, "moefx.runtime.kernels.dispatch(x, perm, k)". Words are the op's arguments, or what the linker
    knows: `session`, `step_state`, `region` (the module's name), `input_name` (of the input with the number `param`),
    `input_names` (of those with the numbers `inputs`), `is_owned` (whether the first argument's memory is nobody
    else's), `are_inputs` (whether the first argument is a list of the program's inputs), `is_fixed` (True if it is a
    number of the program, else None). What is None is left out where it has a name.
    """

    function: str
    args: tuple[ast.expr, ...]
    kwargs: Mapping[str, ast.expr]

    @property
    def words(self) -> frozenset[str]:
        """Those that it is made of, the op's and the linker's."""
        return frozenset(each.id for each in (*self.args, *self.kwargs.values()) if isinstance(each, ast.Name))

    @classmethod
    def parse(cls, text: str, op: str, arguments: Collection[str]) -> RuntimeCall:
        """Raises MoefxError for what is no call, and for a word that is neither an argument nor the linker's."""
        try:
            call = ast.parse(text, mode="eval").body
        except SyntaxError:
            call = None
        given = [*call.args, *(k.value for k in call.keywords)] if isinstance(call, ast.Call) else [call]
        if not all(isinstance(each, (ast.Name, ast.Constant)) for each in given):
            raise MoefxError(f"the dialect op {op} becomes '{text}', which is no call of words and constants",
                             hint="write function(argument, name=argument)")  # fmt: skip
        known = {*arguments, *LINKER_WORDS}
        unknown = [each.id for each in given if isinstance(each, ast.Name) and each.id not in known]
        if unknown:
            raise MoefxError(f"the dialect op {op} becomes '{text}', and nobody knows {unknown[0]}",
                             hint=f"known are {', '.join(sorted(known))}")  # fmt: skip
        return cls(ast.unparse(call.func), tuple(call.args), {k.arg: k.value for k in call.keywords})
