"""docs/token-walk.md and docs/recognition.md show what moefx makes of their models, line by line."""

from __future__ import annotations

import importlib.util
import re
from contextlib import closing
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import moefx
from tests.support.ranks import fake_world

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"```python ([\w-]+)\n(.*?)```", re.DOTALL)


def lines(code: str) -> list[str]:
    """Statements without comments, `del` and indentation."""
    return [re.split(r"\s+#|; del ", line)[0].strip() for line in code.splitlines()]


def stands_in(wanted: list[str], text: list[str]) -> list[str]:
    """The lines that do not come in the text, in this order."""
    rest = iter(text)
    return [line for line in wanted if line not in rest]


@pytest.mark.parametrize(("page", "steps"), [
    ("token-walk.md", {"capture", "raise-loop", "place-experts", "order", "forward"}),
    ("recognition.md", {"number-masks", "raise-loop"}),
])  # fmt: skip
def test_every_line_is_what_moefx_makes(page, steps, tmp_path):
    blocks = BLOCK.findall((DOCS / page).read_text())
    (source,) = [code for step, code in blocks if step == "model"]
    (tmp_path / "walk.py").write_text(source)
    spec = importlib.util.spec_from_file_location("walk", tmp_path / "walk.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
        with closing(moefx.compile(module.MoE(), mesh)) as compiled:
            found = moefx.inspect(compiled, torch.randn(6, 16))
    shown = [(step, lines(code)) for step, code in blocks if step != "model"]
    assert {step for step, _ in shown} == steps
    for step, wanted in shown:
        text = found.code[step] if step in found.code else next(iter(found.step(step).texts.values()))
        assert not (missing := stands_in(wanted, lines(text))), f"{step}: {missing}"


def test_a_line_that_moefx_does_not_make_is_seen():
    assert stands_in(["a = 1", "b = 2"], ["b = 2", "a = 1"]) == ["b = 2"]
