"""Options and markers of the whole test suite."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read by triton, which torch._dynamo imports where there is one
import torch._dynamo

from tests.support.speed import keep_what_is_imported, roomy

BREADTH = Path(__file__).parent / "breadth.txt"  # see tools/choose_breadth.py


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run every model on every mesh, not one mesh in turn")
    parser.addoption("--broad", action="store_true", help="run what tests/breadth.txt leaves out, too")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "full: part of the whole matrix, run only with --full")
    # Reference runs are tiny: threads only cost, and the ranks of the tests want the cores.
    torch.set_num_threads(1)
    os.environ["MOEFX_CACHE"] = "off"  # tests are of the compiler
    torch._dynamo.config.fake_tensor_cache_enabled = False  # most graphs are small, and few are seen twice


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--full"):
        skip = pytest.mark.skip(reason="needs --full")
        broad = set() if config.getoption("--broad") else {*BREADTH.read_text(encoding="utf-8").splitlines()}
        for item in items:
            if "full" in item.keywords or item.nodeid in broad:
                item.add_marker(skip)


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of all tests of this run, those of other workers, too."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "programs"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


@pytest.fixture
def cached(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test compiles that another one has compiled comes from the cache: for tests of what programs do. Not for
    those that change the compiler, which the cache does not see."""
    monkeypatch.setenv("MOEFX_CACHE", str(programs))


def pytest_collection_finish() -> None:
    keep_what_is_imported()


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> Any:
    main = config.pluginmanager.subset_hook_caller("pytest_cmdline_main", [sys.modules[__name__]])
    return roomy(main, config=config)
