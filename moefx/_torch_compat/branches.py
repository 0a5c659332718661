"""Branches on values of tensors that a graph can hold, where dynamo would stop: checks.

A side that only raises becomes an assertion of the graph, and the other side is captured. A side that only prints or
logs is left out. Both are read from the bytecode: no other side is touched.
"""

from __future__ import annotations

import builtins
import contextlib
import dis
import inspect
import os
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._dynamo import symbolic_convert
from torch._dynamo.variables import LazyVariableTracker, SymNodeVariable, TensorVariable, UserDefinedObjectVariable
from torch._dynamo.variables.builder import wrap_fx_proxy
from torch._dynamo.variables.ctx_manager import GenericContextWrappingVariable, WithExitFunctionVariable
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from moefx._torch_compat import printing

_JUMPS = [name for name in dis.opmap if name.startswith("POP_JUMP") and name.endswith(("IF_TRUE", "IF_FALSE"))]
_TRACERS = ("InstructionTranslatorBase", "InstructionTranslator", "InliningInstructionTranslator",
            "InliningGeneratorInstructionTranslator")  # fmt: skip
_READS = ("LOAD_", "BUILD_", "FORMAT_", "CONVERT_", "BINARY_", "COMPARE_", "UNARY_", "CALL", "PRECALL", "KW_NAMES",
          "PUSH_NULL", "IS_OP", "CONTAINS_OP", "LIST_EXTEND", "TO_BOOL", "NOP", "CACHE")  # fmt: skip
_PASSES = ("NOP", "CACHE", "PUSH_NULL", "EXTENDED_ARG")
_PURE = {len, str, repr, int, float, bool, tuple, list, type, min, max, sum, round, abs, sorted, range, getattr}


@contextlib.contextmanager
def checks_taken(printed: list[str]) -> Iterator[None]:
    """While capturing. printed: gets the lines that print or log, as "model.py:41"."""
    with contextlib.ExitStack() as stack:
        for kind in (getattr(symbolic_convert, name) for name in _TRACERS if hasattr(symbolic_convert, name)):
            table = list(kind.dispatch_table)
            for opcode in (dis.opmap[name] for name in _JUMPS):
                table[opcode] = _jump(table[opcode], printed)
            stack.enter_context(mock.patch.object(kind, "dispatch_table", table))
        yield


def _jump(original: Callable[[Any, Any], Any], printed: list[str]) -> Callable[[Any, Any], Any]:
    def jump(tx: Any, inst: Any) -> Any:
        if not _is_unknown(tx.stack[-1]):
            return original(tx, inst)
        code, there = tx.instructions, tx.indexof[inst.target]
        here = tx.instruction_pointer
        frame = tx.frame_summary()
        for side, other, jumps in ((here, there, True), (there, here, False)):
            says = _only_says(tx, side, other)
            if says or _leaves(tx, _only_raises(code, side)):
                value = tx.pop()
                if not says:
                    good = inst.opname.endswith("IF_TRUE") == jumps
                    value = _tensor(tx, value)
                    value = value if good else value.call_method(tx, "logical_not", [], {})
                    told = f"{os.path.basename(frame.filename)}:{frame.lineno}: the forward raises an exception here"
                    tx.output.create_proxy("call_function", torch._assert_async, (value.as_proxy(), told), {})
                printed.extend([f"{frame.filename}:{line}" for line in says or ()])
                return tx.jump(inst) if jumps else None
        return original(tx, inst)

    return jump


def _is_unknown(value: Any) -> bool:
    """Whether it is a tensor of no dims, or a number that comes of one."""
    if isinstance(value, SymNodeVariable):
        return bool(free_unbacked_symbols(value.sym_num))
    return isinstance(value, TensorVariable) and value.as_proxy().node.meta["example_value"].dim() == 0


def _tensor(tx: Any, value: Any) -> Any:
    if isinstance(value, TensorVariable):
        return value
    return wrap_fx_proxy(tx, tx.output.create_proxy("call_function", torch.scalar_tensor, (value.as_proxy(),), {}))


def _only_raises(code: list[Any], at: int) -> Any:
    """What raises an exception, where from here on no line is run but those that make it; else None."""
    for inst in code[at:]:
        if inst.opname == "RAISE_VARARGS":
            return inst if inst.arg != 0 else None
        if not inst.opname.startswith((*_READS, "STORE_FAST", "POP_TOP")):
            return None
    return None


def _leaves(tx: Any, inst: Any) -> bool:
    """Whether an exception there leaves the forward: nobody on the way catches it."""
    if inst is None:
        return False
    while tx is not None:
        entry = getattr(inst, "exn_tab_entry", None)
        if entry is not None and tx.instructions[tx.indexof[entry.target] + 1].opname != "WITH_EXCEPT_START":
            return False
        contexts = [each.ctx for each in tx.stack if isinstance(each, WithExitFunctionVariable)]
        others = [each for each in contexts if isinstance(each, GenericContextWrappingVariable)]
        if others or len(contexts) != len(tx.block_stack):
            return False
        tx = tx.parent
        inst = tx.current_instruction if tx is not None else None
    return True


def _only_says(tx: Any, at: int, other: int) -> list[int]:
    """The lines of a side that prints or logs and then goes on as the other side does; none if it does more."""
    code, lines = tx.instructions, []
    while not _is_same(tx, at, other):
        end = next((i for i in range(at, len(code)) if not code[i].opname.startswith(_READS)), len(code))
        if end == len(code) or code[end].opname != "POP_TOP" or not _says(tx, code[at:end]):
            return []
        lines.append(next((each.starts_line for each in code[at:end] if each.starts_line), None))
        at = end + 1
    return [line for line in lines if line is not None]


def _is_same(tx: Any, a: int, b: int) -> bool:
    """Whether what is run from here and from there is the same: it is one place, or the function ends."""
    code = tx.instructions
    while True:
        a, b = _followed(tx, a), _followed(tx, b)
        if a == b:
            return True
        one, two = code[a], code[b]
        if one.opname != two.opname or one.opname not in ("LOAD_CONST", "RETURN_VALUE", "RETURN_CONST"):
            return False
        if one.argval is not two.argval:
            return False
        if one.opname != "LOAD_CONST":
            return True
        a, b = a + 1, b + 1


def _followed(tx: Any, at: int) -> int:
    for _ in range(len(tx.instructions)):
        inst = tx.instructions[at]
        if inst.opname in ("JUMP_FORWARD", "JUMP_ABSOLUTE", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT"):
            at = tx.indexof[inst.target]
        elif inst.opname in ("NOP", "CACHE"):
            at += 1
        else:
            break
    return at


def _says(tx: Any, statement: list[Any]) -> bool:
    """Whether it is a call that prints or logs, whose arguments change nothing."""
    body = [inst for inst in statement if inst.opname not in _PASSES]
    found, used = _loaded(tx, body)
    if used == 0 or not _prints(found):
        return False
    at = used
    while at < len(body):
        found, used = _loaded(tx, body[at:])
        if used == 0 and _is_method(body[at]) and not _is_harmless(body[at].argval):
            return False
        called = body[at].opname == "LOAD_GLOBAL" and callable(found) and found not in _PURE
        if called and not _is_harmless(getattr(found, "__name__", "_")):
            return False
        at += max(used, 1)
    return True


def _loaded(tx: Any, body: list[Any]) -> tuple[Any, int]:
    """(x.y.z, how many instructions load it) at the start; (None, 0) where that is no name of the function's."""
    first = body[0]
    if first.opname == "LOAD_GLOBAL":
        found = tx.f_globals.get(first.argval, getattr(builtins, str(first.argval), None))
    elif first.opname.startswith("LOAD_FAST"):
        held = tx.symbolic_locals.get(first.argval)
        held = held.realize() if isinstance(held, LazyVariableTracker) else held
        found = held.value if isinstance(held, UserDefinedObjectVariable) else None
    else:
        return None, 0
    used = 1
    while found is not None and used < len(body) and body[used].opname in ("LOAD_ATTR", "LOAD_METHOD"):
        found, used = inspect.getattr_static(found, body[used].argval, None), used + 1
    return (None, 0) if found is None else (found, used)


def _prints(found: Any) -> bool:
    function = getattr(found, "__func__", found)
    module = getattr(function, "__module__", None) if isinstance(function, types.FunctionType) else None
    return found is warnings.warn or function in printing.PRINTS or (
        module == "logging" and function.__name__ in printing.LEVELS)  # fmt: skip


def _is_method(inst: Any) -> bool:
    """From Python 3.12 on, the last bit of an attribute says whether it is called."""
    return inst.opname == "LOAD_METHOD" or (
        inst.opname == "LOAD_ATTR" and sys.version_info >= (3, 12) and bool(inst.arg & 1))  # fmt: skip


def _is_harmless(name: str) -> bool:
    """Of a method, or a function of torch: those that write end with an underscore."""
    return not name.endswith("_") and (hasattr(Tensor, name) or hasattr(str, name))
