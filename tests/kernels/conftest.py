"""Kernels run on the GPU where there is one, and are interpreted on CPU otherwise (tests/conftest.py says so)."""

from __future__ import annotations

import pytest
import torch

from moefx.link.implementations import triton_version


def _missing() -> str | None:
    """Why kernels cannot run, if so."""
    version = triton_version()
    if version is None:
        return "triton is not installed"
    if not torch.cuda.is_available() and tuple(map(int, version.split(".")[:2])) < (3, 7):
        return "triton interprets with today's numpy from 3.7 on"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    why = _missing()
    if why is not None:
        for item in items:
            if "tests/kernels/" in item.path.as_posix():
                item.add_marker(pytest.mark.skip(reason=why))
