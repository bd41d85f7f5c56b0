"""The house rules: read from the table of docs/architecture.md, checked on every import statement of the packages."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.workspace.conftest import ROOT, Member, read_members

CORE = ROOT / "packages/deepinfer-core/src/deepinfer_core"
TABLE_ROW = re.compile(r"^\| (?P<names>`[a-z`, ]+`) \|.*\| (?P<torch>yes|no) \|$", re.MULTILINE)
# Each runs code from its input, or can be made to.
UNSAFE_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "jinja2"}
UNSAFE_CALLS = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "torch.load",
    "torch.save",
    "torch.hub.load",
    "os.system",
    "os.popen",
}
KERNEL_PACKAGES = ("deepinfer_kernels_nvidia", "deepinfer_kernels_ascend")
CONTRACT = ("deepinfer_core.kernels", "deepinfer_core.config", "deepinfer_core.errors")


class Floor(NamedTuple):
    """A row of the table: its height, counted from the top, and whether it may import torch."""

    height: int
    knows_torch: bool


class Import(NamedTuple):
    """One imported module, by its full name, and where it is imported."""

    name: str
    where: str


def read_house(text: str) -> dict[str, Floor]:
    rows = TABLE_ROW.finditer(text)
    return {
        name: Floor(height, row["torch"] == "yes")
        for height, row in enumerate(rows)
        for name in re.findall(r"[a-z]+", row["names"])
    }


HOUSE = read_house((ROOT / "docs/architecture.md").read_text(encoding="utf-8"))
SOURCES = [path for member in read_members() for path in sorted(member.source.rglob("*.py"))]
CORE_SOURCES = [path for path in SOURCES if path.is_relative_to(CORE) and path != CORE / "__init__.py"]


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def module_name(path: Path) -> str:
    """The dotted name of a file below some src/ folder; a package's is its folder's with `__init__`."""
    parts = path.relative_to(next(parent for parent in path.parents if parent.name == "src")).with_suffix("").parts
    return ".".join(parts)


def imports(tree: ast.AST, module: str) -> Iterator[Import]:
    """Every import statement, wherever it stands; relative ones resolved against `module`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, f"{module}:{node.lineno}")
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = module.split(".")[: -node.level]
                base = ".".join([*parent, base] if base else parent)
            for alias in node.names:
                yield Import(f"{base}.{alias.name}", f"{module}:{node.lineno}")


def floor_of(module: str) -> str:
    """`deepinfer_core.cache.rings` is on the floor `cache`; the package itself has none and gives ''."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def broken_rules(tree: ast.AST, module: str) -> list[str]:
    """What a module of the core imports that its floor may not."""
    floor = HOUSE[floor_of(module)]
    broken: list[str] = []
    for name, where in imports(tree, module):
        package, target = name.split(".")[0], floor_of(name)
        if package == "torch" and not floor.knows_torch:
            broken.append(f"{where} imports torch")
        elif package == "deepinfer_core" and target in HOUSE and HOUSE[target].height > floor.height:
            broken.append(f"{where} imports {name} from a floor below")
        elif package == "deepinfer_core" and target not in HOUSE and not target.startswith("__"):
            broken.append(f"{where} imports {name}: import it from its own module, not through the package's face")
        elif package in KERNEL_PACKAGES:
            broken.append(f"{where} imports a kernel package by name")
    return broken


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def test_the_table_has_the_floors_of_the_design() -> None:
    assert list(HOUSE)[:6] == ["errors", "config", "scheduling", "structured", "cluster", "kernels"]
    assert HOUSE["llm"].height == HOUSE["cli"].height == max(floor.height for floor in HOUSE.values())
    assert [name for name, floor in HOUSE.items() if not floor.knows_torch] == list(HOUSE)[:5]


def test_every_module_of_the_core_stands_on_a_floor() -> None:
    homeless = [module_name(path) for path in CORE_SOURCES if floor_of(module_name(path)) not in HOUSE]
    assert homeless == [], "add a row to docs/architecture.md, or move the module"


@pytest.mark.parametrize("path", CORE_SOURCES, ids=module_name)
def test_a_module_imports_only_from_its_own_floor_and_above(path: Path) -> None:
    assert broken_rules(parse(path), module_name(path)) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("deepinfer_core.scheduling.plan", "import torch.nn as nn"),
        ("deepinfer_core.config.model", "def f():\n    from torch import Tensor"),
        ("deepinfer_core.scheduling.plan", "from deepinfer_core.cache import rings"),
        ("deepinfer_core.scheduling.plan", "from ..kernels.registry import pick"),
        ("deepinfer_core.model.__init__", "from ..runtime import runner"),
        ("deepinfer_core.kernels.registry", "import deepinfer_kernels_nvidia"),
        ("deepinfer_core.cache.rings", "from deepinfer_core import LLM"),
    ],
)
def test_the_rule_sees_a_forbidden_import(module: str, source: str) -> None:
    assert len(broken_rules(ast.parse(source), module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("deepinfer_core.scheduling.plan", "from deepinfer_core.errors import RequestError"),
        ("deepinfer_core.scheduling.plan", "from . import blocks"),
        ("deepinfer_core.cli.main", "from deepinfer_core.llm import LLM\nimport torch"),
        ("deepinfer_core.cli.main", "from deepinfer_core import __version__"),
    ],
)
def test_the_rule_lets_an_allowed_import_pass(module: str, source: str) -> None:
    assert broken_rules(ast.parse(source), module) == []


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_no_module_can_run_code_from_its_input(path: Path) -> None:
    tree = parse(path)
    found = [where for name, where in imports(tree, module_name(path)) if name.split(".")[0] in UNSAFE_MODULES]
    found += [
        f"line {node.lineno}: {dotted(node.func)}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and dotted(node.func) in UNSAFE_CALLS
    ]
    assert found == []


@pytest.mark.parametrize("member", read_members(), ids=lambda member: member.name)
def test_recipe_knows_no_engine_and_kernels_know_only_the_contract(member: Member) -> None:
    allowed = {
        "deepseek_recipe": (),
        "deepinfer_core": ("deepseek_recipe",),
        "deepinfer_kernels_nvidia": CONTRACT,
        "deepinfer_kernels_ascend": CONTRACT,
    }[member.import_name]
    others = {"torch", *(other.import_name for other in read_members())} - {member.import_name}
    if member.import_name != "deepseek_recipe":
        others.discard("torch")
    strangers = [
        f"{where} imports {name}"
        for path in sorted(member.source.rglob("*.py"))
        for name, where in imports(parse(path), module_name(path))
        if name.split(".")[0] in others and not name.startswith(allowed or ("-",))
    ]
    assert strangers == []
