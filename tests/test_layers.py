"""The import rules of the layers, read from the source; and that the Prefect side starts without GPU libraries."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).parent.parent
LAYERS = ("flows", "tasks", "forge_core")
CODE = (*LAYERS, "deployments", "tests", "benchmarks")
GPU_LIBRARIES = ("torch", "vllm", "torchtitan", "transformers")
FORBIDDEN = {
    "forge_core": ("prefect", "mlflow", "flows", "tasks", "deployments"),
    "tasks": ("flows", "deployments", *GPU_LIBRARIES),
    "flows": ("deployments", *GPU_LIBRARIES),
}
BANNED_NAMES = ("utils", "helpers", "common", "base", "manager")
MAX_LINES = 300
LONGER_FILES: tuple[str, ...] = ()


def sources(*places: str) -> list[Path]:
    return sorted(path for place in places for path in (REPO / place).rglob("*.py"))


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and full module name of every import in a file, function bodies included."""
    package = path.parent.relative_to(REPO).parts
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package[: len(package) - node.level + 1] if node.level else ()
            yield node.lineno, ".".join([*parents, *([node.module] if node.module else [])])


def prefect_side_modules() -> list[str]:
    return [
        ".".join(path.relative_to(REPO).with_suffix("").parts).removesuffix(".__init__")
        for path in sources("flows", "tasks")
    ]


@pytest.mark.parametrize("layer", FORBIDDEN)
def test_layer_imports_only_what_lies_below_it(layer: str):
    wrong = [
        f"{path.relative_to(REPO)}:{line} imports {module}"
        for path in sources(layer)
        for line, module in imports(path)
        if module.split(".")[0] in FORBIDDEN[layer]
    ]
    assert not wrong, "\n".join(wrong)


def test_prefect_side_imports_no_gpu_library_transitively():
    # One process, modules in order: the first that drags in a GPU library is named.
    program = (
        "import importlib, sys\n"
        f"for module in {prefect_side_modules()!r}:\n"
        "    importlib.import_module(module)\n"
        f"    found = [name for name in {GPU_LIBRARIES!r} if name in sys.modules]\n"
        "    assert not found, f'{module} imports {found}'\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_files_are_short_enough_to_read_in_one_sitting():
    long = {
        str(path.relative_to(REPO)): count
        for path in sources(*CODE)
        if (count := len(path.read_text().splitlines())) > MAX_LINES and str(path.relative_to(REPO)) not in LONGER_FILES
    }
    assert not long


def test_no_module_has_a_name_that_says_nothing():
    named = [
        str(path.relative_to(REPO))
        for path in sources(*CODE)
        if path.stem in BANNED_NAMES or set(path.relative_to(REPO).parts[:-1]) & set(BANNED_NAMES)
    ]
    assert not named
