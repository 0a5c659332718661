"""Rules about the shape of the code that no run would notice: layers, private names, sizes, headings."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from docs import make_map

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "moefx"
FILES = sorted(PACKAGE.rglob("*.py"))
PASSES = sorted(path for path in FILES if path.name != "__init__.py" and (
    path.parent.name == "passes" or (path.is_relative_to(PACKAGE / "features") and "\nContract\n" in path.read_text())))

# The layers from the bottom; a module may import from its own and from lower ones. What is not named stands beside.
LAYERS = [
    {"errors", "_torch_compat", "rooms", "progress"},
    {"features"},
    {"axes", "uncaught"},
    {"options", "registered"},
    {"transport", "layout", "placement"},
    {"ir"},
    {"costmodel"},
    {"context"},
    {"mesh", "capture", "analysis"},
    {"passes", "link"},
    {"planning"},
    {"compiler"},
    {"weights"},
    {"model"},
    {"room"},
    {"report", "checkpoint"},
    {"accelerators"},
    {"__init__", "__main__", "extend", "opt"},
]
SIBLINGS = ({"passes", "link"}, {"capture", "analysis", "mesh"})  # on one layer, and yet they do not meet
RUNTIME_IMPORTS = {"errors", "progress", "_torch_compat", "axes", "transport", "layout", "placement"}
MAY_IMPORT_RUNTIME = ("features", "link", "compiler.variants", "weights", "model", "report", "checkpoint")
MAY_IMPORT_INSIDE = {"transformers"}  # optional dependencies


def name_of(path: Path) -> str:
    """moefx/ir/ops/order.py -> moefx.ir.ops.order"""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def area_of(module: str) -> str:
    """The part of moefx that a module belongs to: moefx.ir.ops.order -> ir, moefx -> __init__, a feature's -> room."""
    return "room" if room_of(module) else [*module.split("."), "__init__"][1]


def room_of(module: str) -> str | None:
    parts = module.split(".")
    return parts[2] if parts[1:2] == ["features"] and len(parts) > 2 else None


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def rel(path: Path) -> str:
    return str(path.relative_to(ROOT))


def where(path: Path, node: ast.AST) -> str:
    return f"{rel(path)}:{node.lineno}"


def listed(wrong: list[str]) -> str:
    return "\n" + "\n".join(wrong)


def imports(path: Path) -> Iterator[tuple[ast.stmt, str]]:
    """Every module that a file imports, wherever in the file, except for type checkers alone."""
    tree = tree_of(path)
    for_types = {
        id(node)
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and "TYPE_CHECKING" in ast.unparse(branch.test)
        for node in ast.walk(branch)
    }
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            for alias in node.names:
                submodule = PACKAGE.parent.joinpath(*node.module.split("."), alias.name)
                is_module = submodule.with_suffix(".py").exists() or submodule.is_dir()
                yield node, f"{node.module}.{alias.name}" if is_module else node.module


def own_imports(path: Path) -> Iterator[tuple[ast.stmt, str]]:
    return ((node, name) for node, name in imports(path) if name.split(".")[0] == "moefx")


def level(area: str) -> int:
    found = [number for number, layer in enumerate(LAYERS) if area in layer]
    assert len(found) == 1, f"moefx/{area} has no place in LAYERS"
    return found[0]


def forbidden(module: str, imported: str) -> str | None:
    """Why `module` may not import `imported`, or None."""
    mine, other = area_of(module), area_of(imported)
    if room_of(module) != room_of(imported) and room_of(imported):
        return f"{room_of(module) or 'the core'} imports the room {room_of(imported)}"
    if room_of(module) and module.endswith((".runtime", ".transport")):
        both = module[: module.rindex(".")] + ".transport"  # what its compiler and its runtime know
        allowed = other in RUNTIME_IMPORTS or imported in (module, both) or (other == "runtime" and module != both)
        return None if allowed else f"{module} imports {imported}, which its compiler or its runtime does not know"
    if room_of(module) and module.endswith(".options"):  # which moefx.options reads
        return None if imported == "moefx.options.declare" else f"options of a room import {imported}"
    if mine == other:
        return "a pass imports a pass" if mine == "passes" and module != imported else None
    if mine == "runtime":
        return None if other in RUNTIME_IMPORTS else f"the runtime imports {other}"
    if other == "runtime":
        allowed = any(f"{module}.".startswith(f"moefx.{each}.") for each in MAY_IMPORT_RUNTIME)
        return None if allowed else f"{mine} imports the runtime"
    if level(other) > level(mine) or any({mine, other} <= siblings for siblings in SIBLINGS):
        return f"{mine} imports {other}, which stands above or beside it"
    return None


def test_imports_go_downwards():
    wrong = [f"{where(path, node)}: {why}" for path in FILES for node, name in own_imports(path)
             if (why := forbidden(name_of(path), name))]
    assert not wrong, listed(wrong)


@pytest.mark.parametrize(
    ("module", "imported"),
    [
        ("moefx.ir.text", "moefx.passes.canonicalize"),
        ("moefx.passes.canonicalize", "moefx.passes.raise_loop"),
        ("moefx.passes.canonicalize", "moefx.link.emit"),
        ("moefx.passes.canonicalize", "moefx.runtime.groups"),
        ("moefx.compiler.pipeline", "moefx.runtime.groups"),
        ("moefx.runtime.groups", "moefx.ir.level"),
        ("moefx.model.api", "moefx.features.tuning.follower"),
        ("moefx.report.explanation", "moefx.features.tuning.tuner"),
        ("moefx.features.tuning.options", "moefx.model.api"),
        ("moefx.features.tuning.arms", "moefx.features.other.arms"),
        ("moefx.features.saa.runtime", "moefx.features.saa.ops"),
        ("moefx.features.saa.transport", "moefx.features.saa.runtime"),
        ("moefx.features.saa.transport", "moefx.runtime.groups"),
        ("moefx.features.tuning.arms", "moefx.report.explanation"),
        ("moefx.analysis.recognition.blocks", "moefx.compiler.pipeline"),
    ],
)
def test_the_rule_itself_refuses(module, imported):
    assert forbidden(module, imported)


def test_no_import_inside_a_function():
    wrong = []
    for path in FILES:
        inside = {id(node) for function in ast.walk(tree_of(path))
                  if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)) for node in ast.walk(function)}
        wrong += [f"{where(path, node)}: {name}" for node, name in imports(path)
                  if id(node) in inside and name.split(".")[0] not in MAY_IMPORT_INSIDE]
    assert not wrong, listed(wrong)


def test_private_names_of_torch_stay_in_one_place():
    wrong = [f"{where(path, node)}: {name}" for path in FILES if path.parent.name != "_torch_compat"
             for node in ast.walk(tree_of(path)) for name in torch_names(node) if is_private(name)]
    assert not wrong, listed(wrong)


def torch_names(node: ast.AST) -> list[str]:
    """The names of torch that a statement or an expression uses."""
    if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "torch":
        return [f"{node.module}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names if alias.name.split(".")[0] == "torch"]
    if isinstance(node, ast.Attribute) and (name := dotted(node)).startswith("torch."):
        return [name]
    return []


def dotted(node: ast.expr) -> str:
    """a.b.c of nested attributes of a name; empty for any other expression."""
    if isinstance(node, ast.Name):
        return node.id
    inner = dotted(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{inner}.{node.attr}" if inner else ""


def is_private(name: str) -> bool:
    """A dunder is public, and so is what torch.ops and torch.utils._pytree (no public form in 2.11) hold."""
    if name.startswith(("torch.ops.", "torch.utils._pytree")):
        return False
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def test_files_and_functions_are_short():
    wrong = [f"{rel(path)}: {len(lines)} lines" for path in FILES if len(lines := path.read_text().splitlines()) > 400]
    wrong += [f"{where(path, node)}: {node.name} has {node.end_lineno - node.lineno + 1} lines" for path in FILES
              for node in ast.walk(tree_of(path))
              if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno >= 60]
    wrong += [f"{rel(path)}: not ASCII" for path in FILES if not path.read_text().isascii()]
    assert not wrong, listed(wrong)


def test_passes_say_what_they_do():
    wrong = []
    for path in PASSES:
        tree = tree_of(path)
        doc = (ast.get_docstring(tree) or "").splitlines()
        wrong += [f"{rel(path)}: no heading {name}" for name in ("Contract", "Pseudo-code") if name not in doc]
        public = [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name[0] != "_"]
        wrong += [] if public == ["run"] else [f"{rel(path)}: the public functions are {public}"]
    assert not wrong, listed(wrong)


def test_passes_read_nothing_but_their_graph():
    wrong = [f"{where(path, node)}: {name}" for path in PASSES for node, name in imports(path)
             if name.split(".")[0] in ("os", "time", "random", "socket") or name.startswith("torch.distributed")]
    assert not wrong, listed(wrong)


def test_import_linter_agrees():
    tool = Path(sys.executable).parent / "lint-imports"
    if not tool.exists():
        pytest.skip("import-linter is not installed")
    result = subprocess.run([tool], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-1000:]


def test_the_map_says_what_docstrings_say():
    assert make_map.PAGE.read_text(encoding="utf-8") == make_map.page(), "run python docs/make_map.py"


def test_the_page_of_the_architecture_names_every_package_and_is_short():
    page = (ROOT / "docs" / "architecture.md").read_text()
    packages = {path.parent.relative_to(PACKAGE).parts[0] for path in FILES if path.parent != PACKAGE}
    assert not [name for name in packages if f"`{name}/" not in page]
    named = re.findall(r"`(\w+/[\w/]+\.py)`", page)
    assert named
    assert not [name for name in named if not (PACKAGE / name).exists() and not (ROOT / name).exists()]
    assert len(page.splitlines()) <= 200
