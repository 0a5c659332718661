"""Families of transformers as tiny models on two ranks, which are threads; benchmarks/results/coverage.md has all of
them on processes."""

from __future__ import annotations

import pytest

from tests.support.families import families, tiny_config, try_family
from tests.support.models import chosen
from tests.support.sharing import run_sharing

# Experts that all are given all tokens, and mixtures of attention; loops over experts are in tests/test_parity.py, too.
SOME = ["llama4_text", "jetmoe"]


@pytest.mark.parametrize("family", chosen(SOME, families()))
def test_family(family):
    found = try_family(family, run=run_sharing)
    assert found.verdict in ("equal", "rounding"), found.details
    assert found.layers >= 2


def test_the_list_is_not_empty():
    assert len(families()) > 50
    assert tiny_config("mixtral").hidden_size == 16
