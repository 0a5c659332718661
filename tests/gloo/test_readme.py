"""The README's quick start runs as pasted, and its links lead somewhere."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "CONTRIBUTING.md"]


def test_the_quick_start_trains_on_two_ranks(tmp_path):
    (code,) = (block for block in re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
               if "init_process_group" in block)  # fmt: skip
    script = tmp_path / "quickstart.py"
    script.write_text(code)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [float(found) for found in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert len(losses) == 5
    assert losses == sorted(losses, reverse=True), losses
    loads = [[int(n) for n in found.split(",")] for found in re.findall(r"\[([\d, ]+)\]", done.stdout)]
    assert [sum(load) for load in loads] == [2 * 4 * 32 * 2] * 2, "ranks x tokens x choices, of both layers"


@pytest.mark.full
@pytest.mark.parametrize("flags", [
    "--mp 2 --esp 2 --fold", "--mp 2 --fold", "--mp 2", "--ema 0.5 --accumulate 2 --evaluate-every 2",
])  # fmt: skip
def test_the_example_trains_as_eager_does(flags):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
               str(ROOT / "examples/train_moe.py"), *f"{flags} --steps 3 --batch 2 --seq 32 --check".split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    (worst,) = re.findall(r"largest difference of the losses ([\d.e+-]+),", done.stdout)
    assert float(worst) < 1e-5
    averages = re.findall(r"of the averages ([\d.e+-]+)", done.stdout)
    assert len(averages) == ("--ema" in flags)
    assert all(float(worst) < 1e-4 for worst in averages), "one that lags a step is 6e-4 off"


@pytest.mark.full
def test_the_example_resumes_the_average_that_it_evaluates(tmp_path):
    flags = "--autocast --ema 0.5 --accumulate 2 --steps 4 --batch 2 --seq 32 --evaluate-every 2 --save-every 2"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
               str(ROOT / "examples/train_moe.py"), "--checkpoint", str(tmp_path), "--resume",
               *flags.split()]  # fmt: skip
    losses = []
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr[-3000:]
        losses.append(re.findall(r"step +4  held-out loss ([\d.]+)", done.stdout))
        shutil.rmtree(tmp_path / "step-000004")
    assert losses[0] == losses[1]
    assert len(losses[0]) == 1


@pytest.mark.full
def test_two_nodes_are_two_agents_of_torchrun():
    done = subprocess.run([ROOT / "examples/two_nodes.sh"], env={**os.environ, "PYTHON": sys.executable},
                          capture_output=True, text=True, timeout=600)  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "in 5 steps" in done.stdout


def test_the_readme_is_a_front_page():
    assert len(README.splitlines()) <= 120
    features = README.partition("## What you get")[2].partition("##")[0]
    assert len(re.findall(r"^\| \*\*", features, re.MULTILINE)) <= 8


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page):
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        name, _, heading = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists():
            broken.append(target)
        elif heading:
            titles = re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE)
            slugs = [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]
            if heading not in slugs:
                broken.append(target)
    assert not broken
