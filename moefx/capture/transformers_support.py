"""What Hugging Face transformers needs around a capture. Nothing here runs unless the model comes from transformers.

Its experts run by one of several interchangeable implementations; the eager one loops over the hit experts, which no
capture can follow. Around the capture they are switched to `grouped_mm` and then set back. Which experts a graph holds
is found by data flow like everywhere else.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from unittest import mock

from torch import nn


def _pretrained_parts(model: nn.Module) -> list[nn.Module]:
    base = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    return [m for m in model.modules() if base is not None and isinstance(m, base)]


@contextlib.contextmanager
def prepared(model: nn.Module) -> Iterator[None]:
    """Switch experts to a capturable implementation and caches off; everything is restored on exit."""
    parts = _pretrained_parts(model)
    configs = list({id(c): c for part in parts for c in _configs(part.config)}.values())
    saved = [(c, dict(c.__dict__)) for c in configs]
    try:
        for part in parts:
            _install_output_hooks(part)
            if part._can_set_experts_implementation():
                part.set_experts_implementation("grouped_mm")
        for config in configs:
            if "use_cache" in config.__dict__:
                config.use_cache = False
        with _collecting_nothing(configs):
            yield
    finally:
        for config, before in saved:
            config.__dict__.clear()
            config.__dict__.update(before)


def _configs(config) -> list:
    """A config and its sub-configs."""
    subs = [getattr(config, name, None) for name in getattr(config, "sub_configs", {})]
    return [config] + [c for sub in subs if sub is not None for c in _configs(sub)]


@contextlib.contextmanager
def _collecting_nothing(configs: list) -> Iterator[None]:
    """A layer that is captured by itself is in no call that collects its outputs: no capture can ask a context variable
    for that. Where outputs are collected, the layer's are needed, so it is left as it is."""
    collector = getattr(sys.modules.get("transformers.utils.output_capturing"), "_active_collector", None)
    asked = any(getattr(config, name, False) for config in configs for name in _COLLECTED)
    if asked or not hasattr(collector, "compiling"):
        yield
        return
    with mock.patch.multiple(collector, compiling=True, global_var=None):
        yield


_COLLECTED = ("output_router_logits", "output_hidden_states", "output_attentions")


def _install_output_hooks(part: nn.Module) -> None:
    """Hooks for `output_router_logits` are installed lazily under a lock, which a capture cannot enter."""
    module = sys.modules.get("transformers.utils.output_capturing")
    install = getattr(module, "maybe_install_capturing_hooks", None)
    if install is not None:
        install(part)
