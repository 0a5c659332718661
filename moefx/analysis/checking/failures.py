"""Graphs that do not run: of a pass that broke them, or of a model that fails by itself."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import torch
from torch.fx import GraphModule

from moefx.errors import MoefxError, VerifyError
from moefx.ir import edit

# What ops raise where they get what they cannot take. Running out of memory says nothing of a graph.
FAILURES = (RuntimeError, TypeError, ValueError, LookupError, ArithmeticError)


@contextlib.contextmanager
def of_pass(what: str = "graph") -> Iterator[None]:
    """Run what a pass has made: a failure is the pass's, a VerifyError."""
    try:
        yield
    except FAILURES as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        name = _failed(error)
        where = None if name is None else f"While executing %{name}"
        raise VerifyError(f"the {what} does not run: {_reason(error)}", where=where) from error


@contextlib.contextmanager
def of_model(captured: GraphModule) -> Iterator[None]:
    """Run the captured graph: a failure is the model's, which eager has, too. The error says so, with the source
    line."""
    try:
        yield
    except FAILURES as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        name = _failed(error)
        node = next((node for node in captured.graph.nodes if node.name == name), None)
        raise MoefxError(
            f"the captured model itself fails, before any pass: {_reason(error)}",
            where=None if node is None else edit.place(node),
            hint="call the plain model with such inputs. Level 2 of verification draws random ones, of the sizes that "
            "the model was compiled for. If the model may fail on these, use level 1 (MOEFX_VERIFY=1)",
        ) from error


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _failed(error: Exception) -> str | None:
    """The name of the node at which an interpreter stopped."""
    found = re.search(r"^While executing %(\w+)", str(error), re.MULTILINE)
    return None if found is None else found[1]
