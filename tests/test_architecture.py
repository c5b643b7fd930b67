"""The shape of the package, held by tests: which layer may import which, who may import torch, who may print.

    errors < core < metadata, stores < numeric < engine < formats < verbs < ranks        the kernel
    kernel < holdfast < cli, torch < extras < integrations < jax

Imports are found with `ast` in every module under `src/holdfast`, also those inside functions. Blocks under
`TYPE_CHECKING` are not imports at run time and are left out.
"""

from __future__ import annotations

import ast
import collections
import functools
import importlib
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from holdfast import extras
from holdfast.core.registry import HOOKS
from holdfast.formats import FORMATS
from tests.imports import MODULES, NAMES, ROOT, dotted, imports, imports_of, layer, run_time_nodes
from tests.rooms import room_of

ROOM_TOKENS = {
    ".": 5950,
    "cli": 24570,
    "core": 48100,
    "engine": 39100,
    "engine/commit": 8250,
    "engine/targets": 14650,
    "extras": 230,
    "extras/maps": 12468,
    "extras/packages": 20230,
    "extras/pruning": 10690,
    "extras/rank_files": 19950,
    "extras/reports": 15238,
    "extras/runs": 30912,
    "formats": 12000,
    "formats/dcp": 19730,
    "formats/gguf": 3967,
    "formats/native": 15166,
    "formats/npy": 3974,
    "formats/onnx": 4330,
    "formats/pickle": 20628,
    "formats/safetensors": 10650,
    "formats/torch": 25660,
    "formats/tree_json": 8520,
    "formats/zip": 10082,
    "integrations": 15000,
    "numeric": 15040,
    "ranks": 15780,
    "stores": 24609,
    "torch": 1817,
    "torch/cuda": 14607,
    "torch/modules": 11072,
    "torch/ranks": 28692,
    "torch/serialization": 23502,
    "torch/sparsity": 13830,
    "torch/tensors": 19460,
    "verbs": 40544,
    "verbs/scanning": 8434,
    "verbs/seals": 7114,
    "verbs/shared": 23700,
}
"""The budget of each room: its size in tokens, without comments and strings. It only goes down."""

SLACK = 0.02
"""The share by which a room may exceed its budget, so that mending a bug needs no bookkeeping."""

SMALLEST_SLACK = 200
"""The tokens by which a small room may always exceed its budget."""

NOT_COUNTED = {
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.COMMENT,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.STRING,
    tokenize.ENDMARKER,
}
"""Kinds of tokens that cost a reader nothing: layout, comments, documentation and messages."""

KERNEL = {"errors", "core", "metadata", "stores", "numeric", "engine", "formats", "verbs", "ranks"}
"""The layers of the kernel, without the command line."""

EXTRAS = {"maps", "packages", "pruning", "rank_files", "reports", "runs"}
"""The folders of `extras/`. None of them imports another one."""

BELOW = {
    "errors": set(),
    "core": {"errors"},
    "metadata": {"errors", "core"},
    "stores": {"errors", "core"},
    "numeric": {"errors", "core"},
    "engine": {"errors", "core", "metadata", "stores", "numeric"},
    "formats": {"errors", "core", "metadata", "numeric"},
    "verbs": {*KERNEL} - {"ranks"},
    "ranks": {*KERNEL},
    "": {*KERNEL},
    "testing": {*KERNEL},
    "cli": {*KERNEL, ""},
    "__main__": {"cli"},
    "torch": {*KERNEL, ""},
    "extras": set(),
    **{f"extras/{name}": {*KERNEL, "", "cli", "torch"} for name in EXTRAS},
    "integrations": {*KERNEL, "", "torch", "extras/runs"},
    "jax": {"integrations"},
}
"""Layer to the layers that it may import besides itself; "" is `holdfast/__init__.py`."""

REGISTRY = {"core/registry.py"}
"""The modules of the kernel that name modules of the adapter: `find_hook` imports them on use."""


PLANS = {f"holdfast.engine.{name}" for name in ("coalesce", "files", "reads", "saves", "table")}
"""The plans of the engine, which touch no file: they import each other, and nothing of the engine that moves bytes."""

ALSO = {("formats", name) for name in ("holdfast.stores.virtual", *PLANS)}
"""What a layer may import of another that it may not import: a format computes bytes, makes plans, touches no file system."""


TORCH_PARTS = {
    "holdfast.extras.packages.torch_programs",
    "holdfast.extras.packages.torch_weights",
    "holdfast.extras.runs.ranks",
}
"""Modules of extras that import torch. `holdfast.torch` offers their names."""


ENDS = "torch/ranks/background.py"
"""It puts something behind `sys.stderr`, whose last flush decides the exit status, and writes nothing to it."""


def misplaced(module: str, imported: str) -> bool:
    """Whether an import of the package by itself breaks the order of the layers."""
    if imported.split(".")[0] != "holdfast":
        return False
    if (layer(module), imported) in ALSO:
        return False
    return layer(imported) != layer(module) and layer(imported) not in BELOW[layer(module)]


def may_import_torch(module: str) -> bool:
    """Return whether a module belongs to the adapter, to an integration, or to the torch part of an extra."""
    return layer(module) in ("torch", "integrations") or module in TORCH_PARTS


def speaks(node: ast.AST) -> bool:
    """Whether a node prints, touches a standard stream, or logs above DEBUG."""
    if isinstance(node, ast.Call):
        called = node.func
        if isinstance(called, ast.Name):
            return called.id in ("print", "breakpoint", "input")
        loud = ("info", "warning", "warn", "error", "critical", "exception", "basicConfig")
        if (
            isinstance(called, ast.Attribute)
            and isinstance(called.value, ast.Name)
            and called.attr in loud
        ):
            return called.value.id.lower().strip("_") in ("log", "logger", "logging")
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return node.value.id == "sys" and node.attr in (
            "stdout",
            "stderr",
            "__stdout__",
            "__stderr__",
        )
    if isinstance(node, ast.ImportFrom) and node.module == "sys":
        return any(alias.name in ("stdout", "stderr") for alias in node.names)
    return False


def fresh(code: str) -> str:
    """Run code in a new interpreter and return what it printed."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_every_package_has_a_layer():
    assert MODULES, f"nothing under {ROOT}"
    assert {layer(dotted(path)) for path in MODULES} <= set(BELOW)


def test_an_import_only_points_down():
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in MODULES
        for name, line in imports_of(path)
        if misplaced(dotted(path), name)
    ]
    assert wrong == []


def test_a_plan_touches_no_file():
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in MODULES
        if dotted(path) in PLANS
        for name, line in imports_of(path)
        if name not in PLANS and layer(name) in ("engine", "stores")
    ]
    assert wrong == []


UPPER = re.compile(r"holdfast\.(torch|extras|integrations|jax)(\.\w+)*(:\w+)?")
"""The name of a module, or of something in it, above the kernel."""


def module_names(tree: ast.AST) -> Iterator[str]:
    """Yield every text in a module that names a module above the kernel, with a part behind the folder."""
    for node in ast.walk(tree):
        text = node.value if isinstance(node, ast.Constant) else None
        if isinstance(text, str) and UPPER.fullmatch(text) and text.count(".") > 1:
            yield text


def test_the_kernel_names_upper_modules_in_its_registry_only():
    wrong = [
        f"{path.relative_to(ROOT)} names {name}"
        for path in MODULES
        if layer(dotted(path)) in KERNEL | {"cli"}
        if path.relative_to(ROOT).as_posix() not in REGISTRY
        for name in module_names(ast.parse(path.read_text("utf-8"), str(path)))
    ]
    assert wrong == []


def test_hooks_and_tables_lead_somewhere():
    """What the registry and the tables of extras name exists; a module of torch's side is only parsed."""
    places = [*HOOKS.values(), *extras.HOOKS.values()]
    places += [module for _, module in extras.COMMANDS.values()]
    for table in (extras.NAMES, extras.TORCH_NAMES):
        places += [f"{module}:{name}" for name, module in table.items()]
    for place in places:
        module, _, name = place.partition(":")
        assert module in NAMES, place
        (path,) = [path for path in MODULES if dotted(path) == module]
        tree = ast.parse(path.read_text("utf-8"))
        assert not name or name in names_defined(tree), place


def names_defined(tree: ast.Module) -> set[str]:
    """Return the names that the top level of a module defines."""
    names = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return names


def test_torch_is_imported_only_under_the_adapter():
    wrong = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in MODULES
        for name, line in imports_of(path)
        if name.split(".")[0] == "torch" and not may_import_torch(dotted(path))
    ]
    assert wrong == []


def test_importing_the_package_is_light():
    banned = (
        "torch",
        "rich",
        "typer",
        "safetensors",
        "holdfast.cli",
        "holdfast.torch",
        "holdfast.integrations",
        "holdfast.jax",
        "jax",
    )
    found = fresh(f"import sys, holdfast; print([m for m in {banned} if m in sys.modules])")
    assert found == "[]"


def test_importing_the_package_costs_little_beyond_numpy():
    # CPU seconds, the least of three, against the two libraries that it cannot do without.
    code = "import time; t = time.process_time(); import {}; print(time.process_time() - t)"
    floor = min(float(fresh(code.format("numpy, ml_dtypes"))) for _ in range(3))
    ours = min(float(fresh(code.format("holdfast"))) for _ in range(3))
    assert ours < 4 * floor, (
        f"importing holdfast takes {ours / floor:.1f} times as long as numpy and ml_dtypes"
    )


MOST_MODULES = 50
"""The most modules of Holdfast that reading one tensor of a safetensors file imports."""


def test_reading_one_tensor_imports_few_modules(tmp_path: Path):
    path = tmp_path / "a.safetensors"
    save_file({"w": np.ones((10, 3), np.float32)}, path, metadata={"format": "pt"})
    imported = fresh(
        f"import sys, holdfast; holdfast.open({str(path)!r})['w'].numpy(); "
        "print(*[name for name in sys.modules if name.split('.')[0] == 'holdfast'])"
    ).split()
    assert len(imported) <= MOST_MODULES, sorted(imported)


RESULTS = {
    "core": {"notebook"}, "numeric": {"compare"}, "metadata": {"metadata"}, "ranks": {"state"},
    "verbs": {
        "compact", "compare_values", "convert", "copy", "diff", "findings", "planned", "scan", "seal", "sparsity", "stats",
        "verify",
    },
    "extras/packages": {"tie"}, "extras/pruning": {"prune", "rules"}, "extras/rank_files": {"placements"},
    "extras/reports": {"report"}, "extras/runs": {"export", "retention", "rules", "steps", "summary", "table"},
    "torch": {"load_into", "load_sharded", "saving"}, "integrations": {"sglang", "torchtitan", "vllm", "writer"},
}  # fmt: skip
"""Modules with dataclasses, by their layers: results that people get, and the few others that core/value.py tells of."""


def test_a_dataclass_is_a_result():
    found: dict[str, set[str]] = {}
    for path in MODULES:
        if path.name != "value.py" and any(
            name.split(".")[0] == "dataclasses" for name, _ in imports_of(path)
        ):
            found.setdefault(layer(dotted(path)), set()).add(path.stem)
    assert found == RESULTS, "a value is a struct: core/value.py says why"


def test_nothing_prints_outside_the_cli():
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in MODULES
        if layer(dotted(path)) != "cli" and "commands" not in path.parts
        for node in run_time_nodes(ast.parse(path.read_text(), str(path)))
        if speaks(node) and not (path == ROOT / ENDS and isinstance(node, ast.Attribute))
    ]
    assert wrong == []


FRAMEWORKS = {
    "holdfast.integrations.accelerate": ["accelerate"],
    "holdfast.integrations.jax": ["jax"],
    "holdfast.integrations.lightning": ["lightning"],
    "holdfast.integrations.sglang": ["sglang"],
    "holdfast.integrations.torchtitan": ["torchtitan.components.checkpointer"],
    "holdfast.integrations.transformers": ["transformers"],
    "holdfast.integrations.vllm": ["vllm"],
    "holdfast.jax": ["jax"],
}
"""What an adapter imports; `make test-integrations` has all of them."""


PUBLIC = (
    "",
    "errors",
    "integrations.dcp",
    "jax",
    "metadata",
    "testing",
    "torch",
    "torch.serialization",
    "torch.sparsity",
)
"""Modules that say in `__all__` what they offer. What is internal has none: whoever imports a name of it knows which."""


@pytest.mark.parametrize("module", [dotted(path) for path in MODULES if path.name != "__main__.py"])
def test_modules_can_be_imported_and_all_is_honest(module: str):
    if may_import_torch(module):
        pytest.importorskip("torch")
    for framework in FRAMEWORKS.get(module, ()):
        pytest.importorskip(framework)
    loaded = importlib.import_module(module)
    names = getattr(loaded, "__all__", [])
    assert bool(names) == (module.removeprefix("holdfast").removeprefix(".") in PUBLIC)
    assert [name for name in names if not hasattr(loaded, name)] == []
    assert len(names) == len(set(names))


def test_entry_points_lead_somewhere():
    """What the package offers to other programs is there, also where those programs are not installed."""
    project = tomllib.loads((ROOT.parent.parent / "pyproject.toml").read_text())["project"]
    groups = {"console_scripts": project["scripts"], **project["entry-points"]}
    for group, points in groups.items():
        for name, value in points.items():
            module, _, function = value.partition(":")
            tree = ast.parse(
                (ROOT.parent / Path(*module.split("."))).with_suffix(".py").read_text()
            )
            assert any(
                isinstance(node, ast.FunctionDef) and node.name == function for node in tree.body
            ), f"{group}: {name}"
    assert project["entry-points"]["vllm.general_plugins"] == {
        "holdfast": "holdfast.integrations.vllm:register"
    }


def count_tokens(source: str) -> int:
    """Count the tokens of a module. An f-string is a string, as tokenize saw it before Python 3.12."""
    fstring_start = getattr(tokenize, "FSTRING_START", None)
    fstring_end = getattr(tokenize, "FSTRING_END", None)
    depth = 0
    count = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == fstring_start:
            depth += 1
        elif token.type == fstring_end:
            depth -= 1
        elif not depth and token.type not in NOT_COUNTED:
            count += 1
    return count


@functools.cache
def count_room_tokens() -> dict[str, int]:
    counts: dict[str, int] = collections.Counter()
    for path in MODULES:
        counts[room_of(path.relative_to(ROOT).as_posix())] += count_tokens(path.read_text("utf-8"))
    return counts


@pytest.mark.parametrize(
    "room", sorted({room_of(path.relative_to(ROOT).as_posix()) for path in MODULES})
)
def test_a_room_stays_within_its_budget(room: str):
    assert room in ROOM_TOKENS, (
        f"src/holdfast/{room} is new: add it to ROOM_TOKENS with {count_room_tokens()[room]} tokens"
    )
    tokens = count_room_tokens()[room]
    budget = ROOM_TOKENS[room]
    limit = budget + max(SMALLEST_SLACK, int(SLACK * budget))
    assert tokens <= limit, (
        f"src/holdfast/{room} has {tokens} tokens, its budget is {budget} and its limit {limit}. "
        "Delete or simplify something in this room. If a feature needs the tokens, raise the "
        "number in ROOM_TOKENS and say in the commit message what a user gets for it."
    )


def test_budgets_follow_rooms_that_shrink():
    counts = count_room_tokens()
    too_high = {
        room: counts.get(room, 0)
        for room, budget in ROOM_TOKENS.items()
        if counts.get(room, 0) < budget - max(SMALLEST_SLACK, int(SLACK * budget))
    }
    assert too_high == {}, "these rooms became smaller: lower their numbers in ROOM_TOKENS"


def test_tokens_are_counted_without_comments_and_strings():
    source = 'def f(x):\n    """Double x."""\n    # A comment.\n    return 2 * x\n'
    assert count_tokens(source) == len(["def", "f", "(", "x", ")", ":", "return", "2", "*", "x"])


def picks_by_number(node: ast.AST) -> bool:
    """Whether a number is compared with a constant that says how many are few, or many."""
    return isinstance(node, ast.Compare) and any(
        isinstance(one, ast.Name)
        and re.fullmatch(r"_?(?:FEW|MANY)(?:_ROWS|_RECORDS|_TENSORS)?", one.id)
        for side in (node.left, *node.comparators)
        for one in ast.walk(side)
    )


def test_no_number_of_tensors_picks_a_way():
    """What may depend on it: which files are written together (`formats/native/base`), and what a page shows (`reports`)."""
    found = {
        path.relative_to(ROOT).as_posix()
        for path in MODULES
        for node in run_time_nodes(ast.parse(path.read_text(), str(path)))
        if picks_by_number(node)
    }
    allowed = {"formats/native/base.py", "extras/reports/measures.py"}
    assert found - allowed == set()


@pytest.mark.parametrize(
    ("source", "wrong"),
    [
        ("if len(rows) < FEW: pass", True),
        ("if len(rows) >= 2 * MANY: pass", True),
        ("if count <= FEW_RECORDS: pass", True),
        ("if count <= FEW_THREADS: pass", False),
        ("small = rows[:FEW]", False),
    ],
)
def test_numbers_that_pick_a_way_are_seen(source: str, wrong: bool):
    assert any(picks_by_number(node) for node in ast.walk(ast.parse(source))) == wrong


def compares_a_format(node: ast.AST) -> bool:
    """Whether the name of a format is compared with something, or something looked for among such names."""
    if isinstance(node, ast.MatchValue):
        sides = [node.value]
    elif isinstance(node, ast.Compare):
        sides = (
            [*node.comparators]
            if isinstance(node.ops[0], ast.In | ast.NotIn)
            else [node.left, *node.comparators]
        )
    elif (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "startswith"
    ):
        sides = [*node.args] if "format" in ast.dump(node.func.value) else []
    else:
        return False
    inside = [
        one
        for side in sides
        for one in (side.elts if isinstance(side, ast.Tuple | ast.List | ast.Set) else [side])
    ]
    names = {format.name for format in FORMATS}
    return any(isinstance(one, ast.Constant) and one.value in names for one in inside)


def test_nobody_asks_for_a_format_by_its_name():
    """What differs between formats is said in the list of them (`formats.FORMATS`)."""
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in MODULES
        if layer(dotted(path)) not in ("formats", "extras/rank_files")
        for node in run_time_nodes(ast.parse(path.read_text(), str(path)))
        if compares_a_format(node)
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("source", "wrong"),
    [
        ("checkpoint.format == 'native'", True),
        ("'dcp' != format", True),
        ("format in ('pt2', 'other')", True),
        ("format.startswith('safetensors')", True),
        ("match format:\n    case 'npz': pass", True),
        ("'npy' in kinds", False),
        ("name == 'weights'", False),
        ("plan_save(path, state, 'safetensors')", False),
    ],
)
def test_names_of_formats_are_seen(source: str, wrong: bool):
    assert any(compares_a_format(node) for node in ast.walk(ast.parse(source))) == wrong


def test_threads_are_started_in_one_place():
    """Where a thread that cannot start is thought of, and work is done at the end of the program as well."""
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in MODULES
        if dotted(path) != "holdfast.core.runtime"
        for node in run_time_nodes(ast.parse(path.read_text(), str(path)))
        if starts_threads(node)
    ]
    assert wrong == []


def decodes_late(node: ast.AST) -> bool:
    """Whether a decoder is made where it is used: `msgspec.json.decode(raw, type=…)`."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "decode"
        and any(keyword.arg == "type" for keyword in node.keywords)
    )


def test_decoders_are_made_when_their_module_is_imported():
    """msgspec compiles and executes the annotations of a class that is decoded first: not while a file is opened."""
    late = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text("utf-8"), str(path)))
        if decodes_late(node)
    ]
    assert late == []
    assert decodes_late(ast.parse("msgspec.json.decode(raw, type=Said)", mode="eval").body)


def test_a_store_says_what_it_is():
    """Whoever asks of which class a store is has to be told of every store that is added: `Store` has a member for each."""
    trees = {path: ast.parse(path.read_text("utf-8"), str(path)) for path in MODULES}
    stores = store_classes(trees.values())
    assert {
        "LocalStore",
        "MemoryStore",
        "Virtual",
        "ComputedTensors",
        "GpuMemory",
    } <= stores
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path, tree in trees.items()
        if layer(dotted(path)) != "stores"
        for node in run_time_nodes(tree)
        if sniffs(node, stores)
    ]
    assert wrong == []


def test_one_module_knows_what_differs_between_torches():
    """Whoever looks at torch's version, or whether torch has a name, is told of every new torch by `versions` alone."""
    # A backend of a device may be registered at run time, whatever the version.
    others = [
        path
        for path in MODULES
        if dotted(path) not in ("holdfast.torch.versions", "holdfast.torch.serialization.locations")
    ]
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in others
        for node in run_time_nodes(ast.parse(path.read_text("utf-8"), str(path)))
        if asks_torch_what_it_has(node)
    ]
    assert wrong == []


def asks_torch_what_it_has(node: ast.AST) -> bool:
    """Whether a node reads torch's version, or asks a module of torch for a name that it may not have."""
    if isinstance(node, ast.Attribute):
        return (
            node.attr == "__version__"
            and isinstance(node.value, ast.Name)
            and node.value.id == "torch"
        )
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        return False
    asks = node.func.id == "hasattr" or (node.func.id == "getattr" and len(node.args) == 3)
    return asks and ast.unparse(node.args[0]).split(".")[0] == "torch"


def store_classes(trees: Iterable[ast.AST]) -> set[str]:
    """The names of all classes of stores: the first, and whatever is derived from it."""
    bases = {
        node.name: {name for base in node.bases for name in names_in(base)}
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    found = {"Store"}
    while more := {name for name, above in bases.items() if above & found} - found:
        found |= more
    return found


def names_in(node: ast.AST) -> set[str]:
    """The names, and the last parts of dotted names, in an expression."""
    found = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    return found | {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)}


def sniffs(node: ast.AST, stores: set[str]) -> bool:
    """Whether a node asks of which class a store is, or whether a store or source has an attribute."""
    if isinstance(node, ast.MatchClass):
        return bool(names_in(node.cls) & stores)
    if isinstance(node, ast.Compare):
        of_type = any(
            isinstance(each, ast.Call) and names_in(each.func) == {"type"}
            for each in ast.walk(node.left)
        )
        return of_type and any(names_in(each) & stores for each in node.comparators)
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or len(node.args) < 2:
        return False
    if node.func.id in ("isinstance", "issubclass"):
        return bool(names_in(node.args[1]) & stores)
    asked = node.args[0]
    last = (
        asked.attr
        if isinstance(asked, ast.Attribute)
        else asked.id
        if isinstance(asked, ast.Name)
        else ""
    )
    return node.func.id in ("getattr", "hasattr") and last in ("store", "source")


def starts_threads(node: ast.AST) -> bool:
    """Whether something that begins threads is named: `threading.Thread` called or a pool of Python's imported."""
    if isinstance(node, ast.ImportFrom | ast.Import):
        return any(
            alias.name in ("ThreadPoolExecutor", "ThreadPool", "Timer") for alias in node.names
        )
    called = node.func if isinstance(node, ast.Call) else None
    return isinstance(called, ast.Attribute) and called.attr in (
        "Thread",
        "Timer",
        "start_new_thread",
        "ThreadPoolExecutor",
    )


# The checks themselves can fail:


@pytest.mark.parametrize(
    ("source", "wrong"),
    [
        ("threading.Thread(target=run).start()", True),
        ("from concurrent.futures import ThreadPoolExecutor", True),
        ("from concurrent.futures import Future", False),
        ("threading.Lock()", False),
    ],
)
def test_threads_are_seen(source: str, wrong: bool):
    assert any(starts_threads(node) for node in ast.walk(ast.parse(source))) is wrong


@pytest.mark.parametrize(
    ("source", "wrong"),
    [
        ("torch.__version__", True),
        ("hasattr(torch, name)", True),
        ("getattr(torch.serialization, 'x', None)", True),
        ("getattr(torch, name)", False),
        ("module.__version__", False),
        ("hasattr(value, '__dict__')", False),
    ],
)
def test_questions_to_torch_are_seen(source: str, wrong: bool):
    assert any(asks_torch_what_it_has(node) for node in ast.walk(ast.parse(source))) is wrong


@pytest.mark.parametrize(
    ("source", "wrong"),
    [
        ("isinstance(x.store, LocalStore)", True),
        ("isinstance(store, local.LocalStore | MemoryStore)", True),
        ("isinstance(store, (Made, str))", True),
        ("isinstance(store, Store)", True),
        ("match store:\n    case LocalStore(): pass", True),
        ("type(store) is LocalStore", True),
        ("getattr(tensor.source, 'resident', False)", True),
        ("hasattr(store, 'gather')", True),
        ("isinstance(stored, StoredBox)", False),
        ("getattr(torch, name)", False),
        ("LocalStore(path)", False),
        ("type(first) is type(stored)", False),
    ],
)
def test_sniffing_is_seen(source: str, wrong: bool):
    classes = "class LocalStore(Store): pass\nclass MemoryStore(stores.Store): pass\nclass Made(MemoryStore): pass"
    stores = store_classes([ast.parse(classes)])
    assert any(sniffs(node, stores) for node in ast.walk(ast.parse(source))) is wrong


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("import torch", ["torch"]),
        ("def f():\n    import torch.nn", ["torch.nn"]),
        ("if TYPE_CHECKING:\n    import torch\nelse:\n    import numpy", ["numpy"]),
        ("from holdfast import errors", ["holdfast.errors"]),
        ("from holdfast import open", ["holdfast"]),
        ("from . import box", ["holdfast.core.box"]),
        ("from ..verbs.open import open", ["holdfast.verbs.open"]),
    ],
)
def test_imports_are_found(source: str, names: list[str]):
    found = imports(ast.parse(source), module="holdfast.core.tensor", is_package=False)
    assert [name for name, _ in found] == names


@pytest.mark.parametrize(
    ("module", "imported", "wrong"),
    [
        ("holdfast.core.box", "holdfast.verbs.open", True),
        ("holdfast.core.box", "holdfast", True),
        ("holdfast.numeric.zeros", "holdfast.stores.local", True),
        ("holdfast.formats.native.chunks", "holdfast.engine.saves", False),
        ("holdfast.formats.native.chunks", "holdfast.engine.ranges", True),
        ("holdfast.engine.ranges", "holdfast.formats.zip", True),
        ("holdfast.numeric.compare", "holdfast.engine.scan", True),
        ("holdfast.engine.scan", "holdfast.numeric.compare", False),
        ("holdfast.formats.native.chunks", "holdfast.stores.local", True),
        ("holdfast.formats.native.chunks", "holdfast.stores.virtual", False),
        ("holdfast.cli.main", "holdfast.torch.tensors.from_lazy", True),
        ("holdfast.verbs.open", "holdfast.core.box", False),
        ("holdfast.core.box", "holdfast.core.chunk", False),
        ("holdfast.core.box", "numpy", False),
    ],
)
def test_layers_are_compared(module: str, imported: str, wrong: bool):
    assert misplaced(module, imported) is wrong


@pytest.mark.parametrize(
    ("source", "loud"),
    [
        ("print(1)", True),
        ("import sys\nsys.stdout.write('x')", True),
        ("from sys import stderr", True),
        ("log.warning('x')", True),
        ("log.debug('x')", False),
        ("warnings.warn('x')", False),
    ],
)
def test_speech_is_heard(source: str, loud: bool):
    assert any(speaks(node) for node in ast.walk(ast.parse(source))) is loud


def test_one_function_says_what_a_path_is():
    """`local_path` turns what users give into paths. The drop-in alone takes them as torch does: as the system has them."""
    taken = {"fspath", "fsdecode", "expanduser"}
    found = {
        str(path.relative_to(ROOT))
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in taken
    }
    assert found == {
        "cli/main.py",
        "stores/paths.py",
        "torch/serialization/opening.py",
        "torch/serialization/saving.py",
    }


def test_the_drawing_of_the_layers_is_that_of_the_code():
    script = ROOT.parent.parent / "tools" / "draw_layers.py"
    drawing = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, check=True
    ).stdout
    page = ROOT.parent.parent.joinpath("CONTRIBUTING.md").read_text("utf-8")
    assert f"<!-- tools/draw_layers.py -->\n\n{drawing}" in page, (
        "run python tools/draw_layers.py --write"
    )


def test_contributing_names_modules_that_exist():
    page = ROOT.parent.parent.joinpath("CONTRIBUTING.md").read_text("utf-8")
    calls = page.partition("## Three calls")[2].partition("## To add a format")[0]
    names = [
        name
        for brackets in re.findall(r"(?<!!)\[([a-z_/, …]+)\](?!\()", calls)
        for name in brackets.split(", ")
        if name != "…"
    ]
    assert len(names) > 20
    missing = [
        name for name in names if not (ROOT / name).is_dir() and not (ROOT / f"{name}.py").exists()
    ]
    assert missing == []
