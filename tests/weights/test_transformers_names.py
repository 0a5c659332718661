"""Names of tensors in checkpoints of transformers: of every family, each tensor of the model is made of something."""

from __future__ import annotations

import pytest
import torch

from moefx.weights import transformers_names as transformers_weights
from tests.support.families import families, tiny_model


@pytest.mark.parametrize("family", families())
def test_what_is_saved_fills_every_tensor(family):
    with torch.device("meta"):
        model = tiny_model(family)
    state = model.state_dict()
    tied = {name for name, tensor in state.items() if sum(tensor is other for other in state.values()) > 1}
    saved = transformers_weights.as_saved(model, state)
    found = transformers_weights.recipes(model, saved)
    assert set(state) - tied <= set(found) <= set(state)
    assert sorted(name for each in found.values() for names in each.sources.values() for name in names) == sorted(saved)
