"""A program that came from the cache, compiled after all: for reports, and calls that it was not kept for.

The compiler is put back to when the program was asked for: modes, flags of the model, places of parameters. What comes
of it has to be the same program, or the model is no longer what it was.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moefx import _torch_compat as compat
from moefx.capture.inputs import CallKey, ShapeGuard
from moefx.compiler.variant import LOCK, Call, Making, Variant
from moefx.errors import UnsupportedUse

if TYPE_CHECKING:
    from moefx.compiler.variants import Builder


class Again:
    """Gives the `Making` of a program, at once if it was asked for before. number: the digest of the program."""

    def __init__(self, builder: Builder, call: Call, number: int) -> None:
        self._builder, self._number = copy.copy(builder), number
        home = self._builder.home = copy.copy(builder.home)
        home.layouts, home.memory, home.spec = dict(home.layouts), dict(home.memory), builder.spec
        self._call = call._replace(leaves=[_Like(leaf) if isinstance(leaf, Tensor) else leaf for leaf in call.leaves])
        self._flags = [module.training for module in builder.root.modules()]
        self._made: Variant | None = None

    def __call__(self) -> Making:
        """Raises UnsupportedUse where the model is another one now, and what compiling raises."""
        return self._variant().making()

    def guard(self) -> ShapeGuard:
        return self._variant().guard

    def _variant(self) -> Variant:
        with LOCK:
            if self._made is None:
                leaves = [leaf.made() if isinstance(leaf, _Like) else leaf for leaf in self._call.leaves]
                with self._as_it_was(self._call.key):
                    found, _ = self._builder.compile(self._call._replace(leaves=leaves))
                if found.program.digest != self._number:
                    raise UnsupportedUse(
                        "a program came from the cache, and the model is no longer as it was: its steps cannot be "
                        "shown, nor can it be compiled for other outputs",
                        hint="compile without the cache: MOEFX_CACHE=off")  # fmt: skip
                self._made = found
        return self._made

    @contextlib.contextmanager
    def _as_it_was(self, key: CallKey) -> Iterator[None]:
        here, dtype = self._builder.home.session.device, torch.get_default_dtype()
        modules = list(self._builder.root.modules())
        flags = [module.training for module in modules]
        modes = dict(key.autocast)
        with contextlib.ExitStack() as stack:
            for mode in (torch.inference_mode(False), torch.set_grad_enabled(key.grad), compat.own_saved_tensors(),
                         torch.random.fork_rng([here] if here.type == "cuda" else [])):  # fmt: skip
                stack.enter_context(mode)
            for device in ("cpu", *(["cuda"] if torch.cuda.is_available() else [])):
                stack.enter_context(torch.autocast(device, modes.get(device), enabled=device in modes))
            try:
                torch.set_default_dtype(key.default_dtype)
                _set_flags(modules, self._flags)
                yield
            finally:
                _set_flags(modules, flags)
                torch.set_default_dtype(dtype)


def _set_flags(modules: list[Any], flags: list[bool]) -> None:
    for module, flag in zip(modules, flags):
        module.training = flag


class _Like:
    """What of an argument a capture looks at; its values are not kept."""

    def __init__(self, leaf: Tensor) -> None:
        self.shape, self.dtype, self.device = leaf.shape, leaf.dtype, leaf.device
        self.needs_grad, self.is_leaf = leaf.requires_grad, leaf.is_leaf

    def made(self) -> Tensor:
        found = torch.zeros(self.shape, dtype=self.dtype, device=self.device, requires_grad=self.needs_grad)
        return found if self.is_leaf else found.view_as(found)
