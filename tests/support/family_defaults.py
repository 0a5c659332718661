"""Families of transformers as their default configurations train them: with the noise and dropout that these have, and
with the losses of routers, which `output_router_logits=True` asks for. On one rank, so that both draw alike."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import moefx
from moefx.errors import MoefxError
from tests.support.families import moe_layers, regions_of, tiny_config
from tests.support.models import Case
from tests.support.parity import compare, gradients, outputs_of
from tests.support.ranks import one_rank

_NOISE, _LOSS = re.compile("drop|jitter|noise"), re.compile("aux_loss|z_loss|moe_loss")


def fields(family: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What draws random numbers in training by default, and what weighs losses of routers: fields that are not 0."""
    found = {name: value for name, value in _flat(CONFIG_MAPPING[family]().to_dict()) if value}
    return tuple({n: v for n, v in found.items() if words.search(n)} for words in (_NOISE, _LOSS))


def _flat(config: dict[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        yield from _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else [(f"{prefix}{name}", value)]


def try_defaults(family: str) -> tuple[str, str]:
    """(equal, different or refused; why): two steps in training, beside eager with the same seeds."""
    try:
        with one_rank():
            return _train(family)
    except MoefxError as error:
        return "refused", error.what
    finally:
        torch._dynamo.reset()


def _train(family: str) -> tuple[str, str]:
    config = tiny_config(family)
    if fields(family)[1] and hasattr(config, "output_router_logits"):
        config.output_router_logits = True
    case = Case(family, lambda: AutoModelForCausalLM.from_config(config))
    plain, mesh = case.build().train(), init_device_mesh("cpu", (1,), mesh_dim_names=("ep",))
    worst = []
    with contextlib.closing(moefx.compile(case.build().train(), mesh)) as compiled:
        for step in range(2):
            found = []
            for model in (plain, compiled):
                model.zero_grad()
                torch.manual_seed(step)
                out = model(**case.batch(step))
                out.loss.backward()
                found.append(outputs_of(out) | gradients(model))
            wanted, actual = found
            actual |= {n: None for n, v in wanted.items() if v is None and n in actual and not _any(actual[n])}
            worst += [f"{name}: {text}" for name, text in compare(actual, wanted).wrong.items()]
        regions = regions_of(compiled)
    if regions < len(moe_layers(plain)):
        return "different", f"{regions} MoEs were raised"
    return ("different", f"{len(worst)} tensors, as {worst[0]}") if worst else ("equal", "")


def _any(grad: Tensor | None) -> bool:
    """Experts without tokens have no gradient in eager, and zeros here."""
    return grad is not None and bool(grad.any())
