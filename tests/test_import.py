"""Imports run one way, and importing the package imports nothing heavy."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "contrastile"
MODULES = sorted(PACKAGE.rglob("*.py"))

# a layer may import itself and the layers before it in this list
LAYERS = [
    {"oracle"},
    {"backends.contract", "backends.pairs"},
    {f"backends.{name}" for name in ("bars", "compiling", "crossing", "eager", "objectives", "passes", "settings")},
    {"backends.arrays", "backends.replay", "backends.staging"},
    {"backends.registry"},
    {"backends"},
    {"comm"},
    {"schedules"},
    {"validation"},
    {"forms", "order"},
    {"problems"},
    {"teachers"},
    {"plan"},
    {"compute"},
    {"autograd"},
    {"evaluation"},
    {"losses"},
    {""},  # contrastile/__init__.py
    {"nn", "data", "training", "retrieval", "environment", "reporting"},
    {"integrations"},
    {"verify"},
    {"bench", "capacity", "doctor", "mutate"},
    {"cli"},
    {"__main__"},
]
OPTIONAL = {
    *("torch", "triton", "cupy", "cuda", "ml_dtypes", "mpi4py", "hypothesis", "rich", "matplotlib", "pytest"),
    *("sentence_transformers", "transformers", "open_clip", "lightning", "accelerate"),
}
# the modules that may import each optional package
TORCH_USERS = (
    *("autograd", "nn", "training", "retrieval", "integrations", "validation", "verify", "mutate", "bench", "doctor"),
    "environment",
    *(f"backends.{name}" for name in ("arrays", "choice", "eager", "replay", "staging")),
)
HOMES = {
    "torch": (*TORCH_USERS, "backends.torch", "backends.triton", "comm.torch_group"),
    "triton": ("backends.triton",),
    "cupy": ("backends.cupy", "comm.nccl"),
    "cuda": ("backends.cupy",),
    "mpi4py": ("comm.mpi", "verify"),
    "hypothesis": ("verify",),
    "pytest": ("verify",),
    "rich": ("reporting",),
    "matplotlib": ("bench", "verify"),
    "sentence_transformers": ("integrations.sentence_transformers",),
    "transformers": ("integrations.transformers",),
}


def name_of(path: Path) -> str:
    """The module's name inside the package, "" for the package itself."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def within(module: str, package: str) -> bool:
    return module == package or (package != "" and module.startswith(f"{package}."))


def layer(module: str) -> int:
    """The index in LAYERS of the longest name that contains the module."""
    matches = [(len(name), index) for index, names in enumerate(LAYERS) for name in names if within(module, name)]
    assert matches, f"contrastile.{module} stands in no layer of tests/test_import.py: give it its place"
    return max(matches)[1]


@cache
def imports(path: Path, *, for_types: bool = False) -> set[str]:
    """Every module that a file imports; ``for_types`` includes imports under TYPE_CHECKING, which never run."""
    imported: set[str] = set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    typing_only = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for statement in node.body
        for child in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if id(node) in typing_only and not for_types:
            continue
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write imports in full"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            # "from package import module" imports the module; "from module import name" imports the module
            imported |= {name if is_module(name) else str(node.module) for name in names}
    return imported


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def inside(names: set[str]) -> set[str]:
    """The package's own modules among the names, without the prefix."""
    return {name.removeprefix("contrastile").removeprefix(".") for name in names if within(name, "contrastile")}


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_run_one_way_and_optional_packages_stay_where_they_are_needed(path: Path) -> None:
    module = name_of(path)
    for name in imports(path):
        root = name.partition(".")[0]
        assert root not in OPTIONAL or any(within(module, x) for x in HOMES.get(root, ())), f"{module} imports {name}"
    for imported in inside(imports(path)):
        assert layer(imported) <= layer(module), f"{module} imports {imported}, which stands above it"
        if within(imported, "oracle"):
            assert within(module, "verify") or within(module, "oracle"), f"{module} imports the oracle"


@pytest.mark.parametrize("judge", ["verify.truth", "verify.bounds", "verify.losses.arguments", "verify.losses.allowed"])
def test_truth_and_bounds_import_nothing_that_they_judge(judge: str) -> None:
    """They import only the records of a problem and of its placement among the modules that they judge."""
    imports_of = {name_of(path): inside(imports(path)) for path in MODULES}
    visited, pending = set[str](), {judge}
    while pending:
        visited |= pending
        pending = {name for module in pending for name in imports_of[module]} - visited
    judged = ("problems", "validation", "plan", "evaluation", "autograd", "losses", "nn", "training", "schedules")
    imported = {name for name in visited if any(within(name, package) for package in judged)}
    assert imported == {"schedules.problem", "schedules.placement"}


@pytest.mark.parametrize("path", [*PACKAGE.glob("backends/*/**/*.py")], ids=name_of)
def test_a_backend_imports_no_other_backend_no_autograd_and_no_loss(path: Path) -> None:
    backend = ".".join(name_of(path).split(".")[:2])
    for imported in inside(imports(path)):
        names = ("contract", "arrays", "bars", "compiling", "crossing", "pairs", "passes", "settings")
        shared = {f"backends.{name}" for name in names}
        assert within(imported, backend) or imported in shared or within(imported, "oracle"), imported


def test_imports_have_no_cycle() -> None:
    """Imports in functions and for type checkers count too, because a reader follows them."""
    TopologicalSorter({name_of(path): inside(imports(path, for_types=True)) for path in MODULES}).prepare()


@pytest.mark.parametrize(
    "statement",
    [
        "import contrastile",
        "import contrastile; contrastile.oracle, contrastile.backends, contrastile.backends.available()",
        "import contrastile, numpy as np; contrastile.clip_loss(np.ones((3, 2)), np.ones((3, 2)), 1.0)",
        "import contrastile.data; contrastile.data.load_wordnet_pairs()",
    ],
)
def test_nothing_optional_is_imported_before_it_is_needed(statement: str) -> None:
    command = [sys.executable, "-W", "error", "-c", f"{statement}\nimport sys\nprint(*sys.modules)"]
    loaded = {*subprocess.run(command, capture_output=True, text=True, timeout=1200, check=True).stdout.split()}
    assert "contrastile" in loaded
    assert not loaded & OPTIONAL
    if statement == "import contrastile":
        lazy = ("contrastile.oracle", "contrastile.verify", "contrastile.backends.numpy", "contrastile.backends.torch")
        assert not {name for name in loaded if any(within(name, package) for package in lazy)}


def test_the_reading_orders_of_contributing_name_existing_code() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    orders = [re.findall(r"`([\w/]+\.py):(\w+)`", line) for line in page.splitlines() if line.count(".py:") > 1]
    assert len(orders) == 5
    assert max(map(len, orders)) <= 8
    for file, name in (entry for order in orders for entry in order):
        tree = ast.parse((PACKAGE / file).read_text(encoding="utf-8"))
        defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        assert name in defined, f"{file}:{name}"


def test_no_file_is_longer_than_500_lines() -> None:
    folders = ("contrastile", "tests", "benchmarks", "scripts", "examples")
    files = [file for folder in folders for end in ("py", "cu", "cuh") for file in (ROOT / folder).rglob(f"*.{end}")]
    assert len(files) > 200
    assert {str(file): n for file in files if (n := len(file.read_text(encoding="utf-8").splitlines())) > 500} == {}
