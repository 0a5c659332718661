"""transformers' `generate` on a compiled model: every token is computed of the whole sequence, without a cache.

The model's own `generate` runs, and its calls of the model are calls of the program. Experts lie on all ranks, so a
call is made by all of them: who has finished computes along, for nothing, until nobody generates any more.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from moefx.capture.python_state import ROOT_HOOKS
from moefx.errors import MoefxError, UnsupportedUse
from moefx.runtime.together import Ranks

_DOING = "generating"
_CALLS, _DONE = "calls", "is done"
_ELSEWHERE = "compiled.save_safetensors(folder), then from_pretrained(folder).generate(..)"


def generate(compiled: nn.Module, inner: nn.Module, ranks: Ranks, *args: Any, **kwargs: Any) -> Any:
    """What `inner.generate` returns for this rank's prompts; all ranks call it. inner: the module that was compiled.

    Raises UnsupportedUse for a cache, and, on the other ranks, where one fails between two calls of the model."""
    _check(inner, args, kwargs)
    turns = _Turns(compiled, ranks)
    # Hooks of the model are part of the program. On a GPU `generate` would switch how experts run.
    own = {name: type(inner.__dict__[name])() for name in ROOT_HOOKS}
    own |= {"forward": turns.forward_of(inner), "_optimize_model_for_decode": contextlib.nullcontext}
    try:
        with _holding(inner, own):
            found = inner.generate(*args, **{**kwargs, "synced_gpus": False})
    except Exception as error:
        if not isinstance(error, MoefxError) and not turns.is_calling:
            turns.meet(f"failed: {type(error).__name__}: {error}")
        raise
    turns.finish()
    return found


class _Turns:
    """This rank's calls of the model, each of which all ranks make. is_calling: one is being made, or broke off."""

    def __init__(self, compiled: nn.Module, ranks: Ranks) -> None:
        self.compiled, self.ranks = compiled, ranks
        self.is_calling = False
        self.last: tuple[tuple, dict[str, Any]] = (), {}

    def forward_of(self, inner: nn.Module) -> Callable[..., Any]:
        own = inner.forward

        @functools.wraps(own)  # generate looks at its signature
        def forward(*args: Any, **kwargs: Any) -> Any:
            self.last = args, _alike(kwargs)
            self.meet(_CALLS)
            with _holding(inner, before):
                return self.call()

        before = {name: inner.__dict__.get(name) for name in (*ROOT_HOOKS, "forward", "_optimize_model_for_decode")}
        return forward

    def call(self) -> Any:
        args, kwargs = self.last
        self.is_calling = True
        found = self.compiled(*args, **kwargs)
        self.is_calling = False
        return found

    def meet(self, state: str) -> bool:
        """Whether any rank calls the model now, and so all do."""
        found = self.ranks.gather(state, _DOING)
        failed = next((rank for rank, each in enumerate(found) if each not in (_CALLS, _DONE)), None)
        if failed is not None and state in (_CALLS, _DONE):
            raise UnsupportedUse(f"rank {failed} of the mesh cannot go on generating: it {found[failed]}")
        return _CALLS in found

    def finish(self) -> None:
        with torch.no_grad():
            while self.meet(_DONE):
                self.call()


def _alike(kwargs: dict[str, Any]) -> dict[str, Any]:
    """In one order, and with the mask that `generate` leaves out where it masks nothing: a rank whose prompts are
    padded has one, and all run one program."""
    ids = kwargs.get("input_ids")
    if ids is not None and kwargs.get("attention_mask") is None:
        kwargs = {**kwargs, "attention_mask": torch.ones_like(ids)}
    return dict(sorted(kwargs.items()))


@contextlib.contextmanager
def _holding(module: nn.Module, values: Mapping[str, Any]) -> Iterator[None]:
    """The module with these attributes in its own `__dict__`; None: without it."""
    own = module.__dict__
    before = {name: own.get(name) for name in values}
    _set(own, values)
    try:
        yield
    finally:
        _set(own, before)


def _set(own: dict[str, Any], values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        own.pop(name, None)
        if value is not None:
            own[name] = value


def _check(inner: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> None:
    if inner.config.is_encoder_decoder:
        raise UnsupportedUse("generate of a compiled model with an encoder", hint=f"on one device: {_ELSEWHERE}")
    given = kwargs.get("generation_config") or (args[1] if len(args) > 1 else None)
    config = given or getattr(inner, "generation_config", None)
    use_cache = kwargs.get("use_cache", getattr(config, "use_cache", None))
    if use_cache is not False or kwargs.get("past_key_values") is not None:
        raise UnsupportedUse(
            "generate with a cache of keys and values, which a compiled model does not keep",
            hint=f"generate(.., use_cache=False), on all ranks; or with a cache on one device: {_ELSEWHERE}",
        )
