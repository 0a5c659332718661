"""Attention of a compiled model asks its kernel for what the plain model asks, and masks that say more keep their
meaning."""

from __future__ import annotations

from contextlib import closing
from functools import partial

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import moefx
from tests.support.models import Case, shallow
from tests.support.ranks import fake_world

CASE = Case("grouped keys", partial(shallow("qwen3_moe-grouped_mm").make, num_attention_heads=4, num_key_value_heads=2))
PACKED = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3], [0, 1, 0, 1, 2, 3, 4, 5]])


def gradients(model, batch):
    model.zero_grad()
    model(**batch).loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def local(gradient):
    return gradient.to_local() if hasattr(gradient, "to_local") else gradient


@pytest.fixture(scope="module")
def compiled():
    with fake_world(1):
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("ep",))
        with closing(moefx.compile(CASE.build(), mesh)) as found:
            yield found


@pytest.mark.parametrize(("more", "asked", "why"), [
    ({}, ("attn_output: its mask says causal",), []),
    ({"position_ids": PACKED}, (), ["its mask depends on kwargs_position_ids"]),
], ids=["plain", "packed"])  # fmt: skip
def test_numbers_and_what_kernels_are_asked(compiled, more, asked, why):
    batch = CASE.batch(0) | more
    wanted, found = gradients(CASE.build(), batch | ({"use_cache": False} if more else {})), gradients(compiled, batch)
    found = {name: local(gradient) for name, gradient in found.items()}
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    steps = moefx.inspect(compiled)
    assert steps.step("ask-kernels").changes == asked
    assert [reason for _, reason in steps.step("ask-kernels").skipped] == why
    assert bool(steps.step("group-keys").changes) == bool(asked)  # with a mask, kernels do not take them in groups
    apart = gradients(CASE.build(), CASE.batch(0))
    same = all(torch.allclose(wanted[name], gradient) for name, gradient in apart.items())
    assert same == (not more)  # sequences that are packed are others
