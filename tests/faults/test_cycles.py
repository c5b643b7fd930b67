"""No verb leaves a reference cycle: with the collector off, as training loops have it, memory and files go when the call ends.

Each call is made with the collector off; then it is asked what it would have had to collect. Of what is found only two kinds may be
there: the functions that Python's own `json` makes for an indented text, and what `scan` notes of a pickle. Neither holds a tensor.
"""

from __future__ import annotations

import ast
import gc
import io
import shutil
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, TracebackType

import numpy as np
import pytest
import torch

import holdfast
import holdfast.torch as ht
from holdfast.engine.threads import BackgroundCall, run_all
from tests.support import flip_bit

SOURCES = ("x.pt", "legacy.pt", "x.safetensors", "native", "x.npz", "dcp")
COUNT = 6

PICKLED = (
    "holdfast.formats.pickle.recording",
    "holdfast.formats.pickle.rare",
    "holdfast.core.opaque",
)
"""What `scan` makes of a pickle: values that refer to each other as those of the pickle do."""


def arrays() -> dict[str, np.ndarray]:
    return {f"w{i}": np.full((8, 8), i, np.float32) for i in range(COUNT)}


def tensors() -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array.copy()) for name, array in arrays().items()}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cycles")
    holdfast.save(arrays(), folder / "x.safetensors")
    holdfast.save(arrays(), folder / "native")
    torch.save(tensors(), folder / "x.pt")
    torch.save(tensors(), folder / "legacy.pt", _use_new_zipfile_serialization=False)
    np.savez(folder / "x.npz", **arrays())
    ht.save_sharded(folder / "dcp", tensors(), format="dcp")
    return folder


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.freeze()  # so that the collections of the test look at what it made
    gc.disable()
    yield
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()


def harmless(thing: object) -> bool:
    """Whether a thing that is in a cycle holds nothing that a person would miss: no tensor, no file, nobody's variables."""
    kinds = (
        FrameType,
        TracebackType,
        BaseException,
        torch.Tensor,
        torch.UntypedStorage,
        memoryview,
        io.IOBase,
    )
    if issubclass(type(thing), kinds):  # not `isinstance`, which would ask a proxy of what is gone
        return False
    module = type(thing).__module__
    return not module.startswith("holdfast") or module in PICKLED


def check(call: Callable[[], object]) -> None:
    call()  # imports, caches
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    call()
    gc.collect()
    gc.set_debug(0)
    assert not [type(thing) for thing in gc.garbage if not harmless(thing)]


def _read(path: Path) -> None:
    with holdfast.open(path) as checkpoint:
        checkpoint.read()
        holdfast.read(list(checkpoint.values()))
        checkpoint["w1"][1:3].numpy()


READING: dict[str, Callable[[Path], object]] = {
    "open": lambda path: holdfast.open(path).close(),
    "read": _read,
    "mapped": lambda path: holdfast.open(path, mmap=True).close(),
    "verify": holdfast.verify,
    "diff": lambda path: holdfast.diff(path, path),
    "stats": holdfast.stats,
    "sparsity": holdfast.sparsity,
    "alias_graph": holdfast.alias_graph,
    "scan": holdfast.scan,
    "torch.open": lambda path: ht.open(path).close(),
    "load_into": lambda path: ht.load_into(path, tensors()),
    "load_full": ht.load_full,
}

WRITING: dict[str, Callable[[Path, Path], object]] = {
    "to torch": lambda src, dst: holdfast.convert(src, dst / "y.pt", overwrite=True),
    "to safetensors": lambda src, dst: holdfast.convert(src, dst / "y.safetensors", overwrite=True),
    "to native": lambda src, dst: holdfast.convert(src, dst / "y", overwrite=True),
    "cast": lambda src, dst: holdfast.convert(src, dst / "y", dtype="bf16", overwrite=True),
    "edit": lambda src, dst: holdfast.edit(src, dst / "y.pt", drop=["w1"], overwrite=True),
    "tie": lambda src, dst: holdfast.tie(src, dst / "y.pt", overwrite=True),
    "compact": lambda src, dst: holdfast.compact(src, dst / "y.safetensors", overwrite=True),
    "package": lambda src, dst: holdfast.package({"model": src}, dst / "y.pt2", overwrite=True),
    "prune": lambda src, dst: holdfast.prune(src, dst / "y.pt", ["*: global 0.5"], overwrite=True),
}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("verb", READING)
def test_reading_leaves_no_cycle(files: Path, no_collector: None, verb: str, source: str):
    check(lambda: READING[verb](files / source))


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("verb", WRITING)
def test_rewriting_leaves_no_cycle(
    files: Path, tmp_path: Path, no_collector: None, verb: str, source: str
):
    check(lambda: WRITING[verb](files / source, tmp_path))


SAVING: dict[str, Callable[[Path, dict[str, object]], object]] = {
    "torch": lambda folder, state: holdfast.save(state, folder / "x.pt"),
    "safetensors": lambda folder, state: holdfast.save(state, folder / "x.safetensors"),
    "native": lambda folder, state: holdfast.save(state, folder / "x", overwrite=True),
    "shards": lambda folder, state: holdfast.save(
        state, folder / "y", format="safetensors", max_shard_size=300, overwrite=True
    ),
    "to_bytes": lambda folder, state: holdfast.to_bytes(state, format="torch"),
    "torch.save": lambda folder, state: ht.save(state, folder / "x.pt"),
    "torch.save old": lambda folder, state: ht.save(
        state, folder / "x.pt", _use_new_zipfile_serialization=False
    ),
    "torch.save to memory": lambda folder, state: ht.save(state, io.BytesIO()),
    "save_sharded": lambda folder, state: ht.save_sharded(folder / "z", state, overwrite=True),
    "async_save_sharded": lambda folder, state: ht.async_save_sharded(
        folder / "z", state, overwrite=True
    ).wait(),
}


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("verb", SAVING)
def test_what_was_saved_goes_with_its_last_user(
    tmp_path: Path, no_collector: None, verb: str, kind: str
):
    if kind == "numpy" and verb.endswith("save_sharded"):
        pytest.skip("takes tensors of torch")
    kept: list[weakref.ref[object]] = []

    def call() -> None:
        state: dict[str, object] = {**arrays()} if kind == "numpy" else {**tensors()}
        kept[:] = map(weakref.ref, state.values())
        SAVING[verb](tmp_path, state)

    check(call)
    assert len(kept) == COUNT
    assert not any(one() is not None for one in kept)


@pytest.mark.parametrize("options", [{}, {"weights_only": False}, {"mmap": True}], ids=str)
@pytest.mark.parametrize("source", ["x.pt", "legacy.pt"])
def test_what_was_loaded_goes_with_its_last_user(
    files: Path, no_collector: None, source: str, options: dict[str, bool]
):
    if source == "legacy.pt" and "mmap" in options:
        pytest.skip("the old stream is not mapped")
    kept: list[weakref.ref[object]] = []

    def call() -> None:
        loaded = ht.load(files / source, **options)
        kept[:] = [weakref.ref(tensor.untyped_storage()) for tensor in loaded.values()]

    check(call)
    assert len(kept) == COUNT
    assert not any(one() is not None for one in kept)


def _damaged(path: Path) -> None:
    with holdfast.open(path) as checkpoint:
        checkpoint.read()


def _missing(path: Path) -> None:
    holdfast.open(path.with_name("nothing.pt"))


def _helpers(path: Path) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    run_all([fail] * 3, 2)


def _beside(path: Path) -> None:
    with BackgroundCall(lambda: 1 // 0) as call:
        call.result()


def test_a_failure_keeps_nobodys_variables(tmp_path: Path, no_collector: None):
    """An error that threads hand over, and one that is met while reading, go when they have been handled."""
    path = tmp_path / "x.pt"
    holdfast.save({f"w{i}": np.full(1 << 18, i, np.float32) for i in range(4)}, path)
    flip_bit(path, path.stat().st_size // 2)
    kept: list[weakref.ref[np.ndarray]] = []

    def call() -> None:
        mine = np.ones(3)
        kept[:] = [weakref.ref(mine)]
        # Not by `pytest.raises`, which keeps what it caught.
        for failing in (_damaged, _missing, _helpers, _beside):
            try:
                failing(path)
            except (holdfast.HoldfastError, ZeroDivisionError):
                continue
            pytest.fail("nothing was raised")

    check(call)
    assert kept[0]() is None


@pytest.mark.parametrize("left", [0.3, 0.6, 0.99])
def test_an_index_that_ends_early_leaves_no_cycle(
    files: Path, tmp_path: Path, no_collector: None, left: float
):
    path = tmp_path / "dcp"
    shutil.copytree(files / "dcp", path)
    content = (path / ".metadata").read_bytes()
    (path / ".metadata").write_bytes(content[: int(len(content) * left)])

    def call() -> None:
        try:
            holdfast.open(path).close()
        except holdfast.HoldfastError:
            return
        pytest.fail("nothing was raised")

    check(call)


def _knowing_themselves(tree: ast.AST) -> Iterator[str]:
    """Functions inside of functions that reach themselves by their names: such a function is a cycle, with all that it can see."""
    for outer in ast.walk(tree):
        if not isinstance(outer, ast.FunctionDef):
            continue
        inner = {
            node.name: node
            for node in ast.walk(outer)
            if isinstance(node, ast.FunctionDef) and node is not outer
        }
        uses = {
            name: {
                one.id for one in ast.walk(node) if isinstance(one, ast.Name) and one.id in inner
            }
            for name, node in inner.items()
        }
        for name in inner:
            reached: set[str] = set()
            waiting = [name]
            while waiting:
                waiting += uses[waiting.pop()] - reached
                if name in waiting:
                    yield f"{outer.name}: {name}"
                    break
                reached.update(waiting)


def test_no_function_inside_of_a_function_calls_itself():
    root = Path(holdfast.__file__).parent
    found = [
        f"{path.relative_to(root)}: {one}"
        for path in root.rglob("*.py")
        for one in _knowing_themselves(ast.parse(path.read_text()))
    ]
    assert not found, "make it a class, or a function of the module"
