"""Ranks that are threads of this process and share one compile: exact numbers of many ranks at the price of one.

That ranks compile alike, that collectives overlap, and that processes fail as they should is what `run_ranks` is for.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from moefx.capture.inputs import sizes_of
from moefx.compiler import variants
from moefx.compiler.variant import Call
from moefx.compiler.variants import Builder
from tests.support.ranks import run_threads


def run_sharing(n: int, fn: Callable[..., Any], *args: Any, timeout: float = 600.0) -> list[Any]:
    """`run_threads`, in which models that are compiled with the same options are one (each with its own weights)."""
    try:
        with mock.patch.object(Builder, "compile", _once(Builder.compile)):
            return run_threads(n, fn, *args, timeout=timeout)
    finally:
        torch._dynamo.reset()


def _once(original: Any) -> Any:
    """The program is compiled by the first rank that comes; all ranks would make the same one."""
    made: dict[Any, Any] = {}
    verdicts: dict[Any, Any] = {}

    def with_ones(builder: Builder, place: Any, given: tuple) -> Any:
        """A rank captures its own model: the others may be running theirs."""

        def verdict(leaves: list[Any]) -> Any:
            key = place, sizes_of(leaves)
            if key not in verdicts:
                verdicts[key] = builder._with_ones(*given, leaves)
            return verdicts[key]

        return verdict

    def shared(self: Builder, call: Call):
        leaves, _, key, sizes, fixed, skip = call
        place = repr(self.options), self.path, len(self.forwards), key, sizes, fixed, skip, self.free
        if place not in made:
            try:
                made[place] = original(self, call)
            except Exception as error:
                made[place] = error
        if isinstance(made[place], Exception):
            raise made[place]
        variant, outcome = made[place]
        p = variant.program
        mine = type(p)(self.home, p.graphs, p.code, p.sources, p.digest, p.regions, p.left_out, p.draws,
                       p.peak_s_per_token)  # fmt: skip
        guard = copy.copy(variant.guard)
        guard._known, guard._of_ones, guard._with_ones = {}, [], with_ones(self, place, variant.guard._with_ones.args)
        numbers = replace(variant.numbers, read=variant.state.of(self.model).value)
        found = replace(variant, program=mine, guard=guard, state=_SharedState(variant.state), numbers=numbers)
        return found, replace(outcome, complaint=guard.complaint(leaves))

    return shared


class _SharedState:
    """What the first rank's model holds besides tensors, not to be read while that model is captured once more: a
    capture changes attributes for a moment. Ranks have models of their own otherwise."""

    def __init__(self, state: Any) -> None:
        self._state = state

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)

    def changed(self) -> str | None:
        with variants.LOCK:
            return self._state.changed()
