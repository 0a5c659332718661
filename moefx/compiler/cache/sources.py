"""The code that a capture went through: whether another process would go through the same.

Of every function its file is kept with a digest, and what its name leads to in its module, so that one that was put in
its place is noticed. Files of torch and of Python are told by their versions; functions of them by name alone.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterable
from types import CodeType
from typing import Any

import torch

from moefx.compiler.cache.told import Untold, codes_of, digest, is_of_python, of_code, of_file

_TORCH = os.path.dirname(torch.__file__) + os.sep
_MADE = ("__create_fn__", "<lambda>", "__init__", "__eq__", "__new__")  # by dataclasses and named tuples


def learned(codes: Iterable[CodeType] | None) -> dict[str, Any]:
    """{"files": {path: digest}, "functions": {"module:name": digest}} of code that was captured. Raises Untold for code
    that is in no file."""
    if codes is None:
        raise Untold("what this version of torch goes through, which it does not say")
    modules = {getattr(module, "__file__", None): name for name, module in list(sys.modules.items())}
    files, functions = {}, {}
    for code in codes:
        path = code.co_filename
        if path.startswith("<frozen") or (path == "<string>" and code.co_name in _MADE):
            continue
        found = of_file(path)
        if found is None:
            raise Untold(f"the function {code.co_name} of {path}, which is no file")
        if path in modules:
            name = f"{modules[path]}:{_name_of(code)}"
            functions[name] = _there(name)
        if not path.startswith(_TORCH) and not is_of_python(path):
            files[path] = found
    return {"files": files, "functions": functions}


def changed(data: dict[str, Any]) -> str | None:
    """The first file or function that is another one now."""
    files = (path for path, found in data["files"].items() if of_file(path) != found)
    functions = (name for name, found in data["functions"].items() if _there(name) != found)
    return next(files, None) or _missing(data) or next(functions, None)


def _missing(data: dict[str, Any]) -> str | None:
    """Modules that a first capture imports are imported; one that cannot be."""
    for module in dict.fromkeys(name.partition(":")[0] for name in data["functions"]):
        try:
            importlib.import_module(module)
        except Exception:
            return module
    return None


def _name_of(code: CodeType) -> str:
    return getattr(code, "co_qualname", code.co_name).partition(".<locals>")[0]


def _there(name: str) -> str:
    """What a name leads to now: the code of a function and of those that it wraps."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = vars(found).get(part) if hasattr(found, "__dict__") else None
    return digest(*map(of_code, codes_of(found)))
