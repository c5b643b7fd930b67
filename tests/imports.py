"""The modules of the package, the layers that they belong to, and what each of them imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent / "src" / "holdfast"
MODULES = sorted(ROOT.rglob("*.py"))


def layer(module: str) -> str:
    """Return the layer of a module's dotted name.

    >>> layer("holdfast.core.box"), layer("holdfast"), layer("holdfast.extras.runs.run")
    ('core', '', 'extras/runs')
    """
    parts = module.split(".")
    if len(parts) > 2 and parts[1] == "extras":
        return f"extras/{parts[2]}"
    return parts[1] if len(parts) > 1 else ""


def dotted(path: Path) -> str:
    """The dotted name of a file of the package."""
    parts = ("holdfast", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = {*map(dotted, MODULES)}


def is_type_checking(node: ast.AST) -> bool:
    test = node.test if isinstance(node, ast.If) else None
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def run_time_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node that may run, which leaves out what is under `if TYPE_CHECKING`."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        if is_type_checking(node):
            waiting.extend(node.orelse)
        else:
            waiting.extend(ast.iter_child_nodes(node))


def imports(tree: ast.AST, *, module: str, is_package: bool) -> Iterator[tuple[str, int]]:
    """The dotted name of everything that a module imports, and the line."""
    package = module if is_package else module.rpartition(".")[0]
    for node in run_time_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield (inner if inner in NAMES else base), node.lineno


def imports_of(path: Path) -> list[tuple[str, int]]:
    tree = ast.parse(path.read_text(), str(path))
    return list(imports(tree, module=dotted(path), is_package=path.name == "__init__.py"))
