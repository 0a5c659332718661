"""Families of transformers as tiny models on two ranks, which are threads; benchmarks/results/coverage.md has all of
them on processes."""

from __future__ import annotations

import re

import pytest

from tests.support.families import families, tiny_config, try_family
from tests.support.models import chosen
from tests.support.sharing import run_sharing

REFUSED = {
    "longcat_flash": "RaiseError|CaptureError",  # some experts do nothing
    "doge": "RaiseError: no mixture of experts was found",  # experts are rows of an embedding
}
SOME = ["ernie4_5_moe", "llama4_text", "dbrx", "jetmoe"]


@pytest.mark.parametrize("family", chosen(SOME, families()))
def test_family(family):
    found = try_family(family, run=run_sharing)
    if family in REFUSED:
        assert found.verdict == "refused", found.details
        assert re.match(REFUSED[family], found.why)
    else:
        assert found.verdict in ("equal", "rounding"), found.details
        assert found.layers >= 2


def test_the_list_is_not_empty():
    assert len(families()) > 50
    assert tiny_config("mixtral").hidden_size == 16
