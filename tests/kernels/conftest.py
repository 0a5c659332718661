"""Kernels run on the GPU where there is one, and are interpreted on CPU otherwise (tests/conftest.py says so)."""

from __future__ import annotations

import importlib.util

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("triton") is None:
        for item in items:
            if "tests/kernels/" in item.path.as_posix():
                item.add_marker(pytest.mark.skip(reason="triton is not installed"))
