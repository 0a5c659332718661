"""Adapters of PEFT, written as its own `save_pretrained` writes them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from moefx.link.program import Home
from moefx.runtime.together import Ranks
from moefx.weights.values import gathered


def has_adapters(module: nn.Module) -> bool:
    base = getattr(sys.modules.get("peft"), "PeftModel", None)
    return base is not None and isinstance(module, base)


def write(home: Home, folder: Path, ranks: Ranks, others: Mapping[str, Any]) -> None:
    """Write what PEFT would write, and no weight of the model below. others: arguments of its `save_pretrained`.

    A collective of all ranks, of which the first writes. Raises CheckpointError on all of them."""
    ranks.check_alike("writing adapters", folder=str(folder), arguments=dict(others))
    wanted = ranks.each("choosing adapters", lambda: _wanted(home.model, others))
    values = {name: gathered(home.session, ranks, name, tensor) for name, tensor in wanted.items()}
    ranks.first("writing adapters",
                lambda: home.model.save_pretrained(str(folder), state_dict=values, **others))  # fmt: skip


def _wanted(model: nn.Module, others: Mapping[str, Any]) -> dict[str, Tensor]:
    """{name in the model: what PEFT takes of it}: adapters, and modules that are trained whole."""
    state, taken = model.state_dict(keep_vars=True), set()
    for adapter in others.get("selected_adapters") or model.peft_config:
        of_it = sys.modules["peft"].get_peft_model_state_dict(
            model, state_dict=state, adapter_name=adapter,
            save_embedding_layers=others.get("save_embedding_layers", "auto"))  # fmt: skip
        taken.update(map(id, of_it.values()))
    return {name: tensor for name, tensor in state.items() if id(tensor) in taken}
