"""Every golden file opens, and holds what torch and safetensors found in it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast.core.tensor import Composite, LazyTensor

HERE = Path(__file__).resolve().parent
MAX_FILE, MAX_ALL = 30_000, 500_000


def at(tree: object, name: str) -> object:
    """The node of a tree under a dotted name that has no dots inside its parts."""
    for part in name.split("."):
        match tree:
            case dict():
                tree = tree[part] if part in tree else tree[int(part)]
            case list() | tuple():
                tree = tree[int(part)]
            case holdfast.Opaque():
                tree = tree.attributes()[part]
            case _:
                raise AssertionError(f"{name}: nothing called {part!r} in {tree!r}")
    return tree


def packed(array: np.ndarray, bits: int) -> bytes:
    """Elements of a narrow type, one a byte, as the file has them: lowest bits first."""
    each = np.unpackbits(array.reshape(-1, 1).view(np.uint8), axis=1, bitorder="little")[:, :bits]
    return np.packbits(each.reshape(-1), bitorder="little").tobytes()


def digest(tensor: LazyTensor) -> str:
    array = np.ascontiguousarray(tensor.numpy())
    raw = packed(array, tensor.dtype.bits) if tensor.dtype.packed else array.tobytes()
    return hashlib.sha256(raw).hexdigest()


def same(tensor: LazyTensor, line: dict[str, object]) -> None:
    assert tensor.dtype.name == line["dtype"], tensor
    assert list(tensor.shape) == line["shape"], tensor
    if line["sha256"] is None:
        assert tensor.traits.meta
    else:
        assert digest(tensor) == line["sha256"], tensor


def python3(name: str) -> str:
    """`module name` as a pickle has it, in Holdfast's spelling: with the Python 3 name of the builtins."""
    return name.replace("__builtin__ ", "builtins ").replace(" ", ".")


def test_tensors(golden, expected):
    with holdfast.open(golden) as ckpt:
        assert ckpt.format == expected["format"]
        for name, line in expected["tensors"].items():
            same(ckpt[name], line)


def test_nothing_else_is_named(golden, expected):
    if golden.name in ("jagged.pt", "kinds.pt"):
        pytest.skip("holds a jagged tensor or a bare storage, whose names torch does not settle")
    with holdfast.open(golden) as ckpt:
        composites = expected.get("composites", {})
        parts = {name for name in ckpt if any(name.startswith(f"{outer}.") for outer in composites)}
        assert set(ckpt) - parts == set(expected["tensors"])


def test_aliases(golden, expected):
    with holdfast.open(golden) as ckpt:
        found = [
            sorted(n for n in alias.names if n in expected["tensors"]) for alias in ckpt.aliases
        ]
        assert sorted(names for names in found if len(names) > 1) == expected["aliases"]


def test_composites(golden, expected):
    composites = expected.get("composites", {})
    with holdfast.open(golden) as ckpt:
        for name, wanted in composites.items():
            if wanted["kind"] == "jagged":
                hashes = {digest(t) for n, t in ckpt.items() if n.startswith(name)}
                assert hashes >= {line["sha256"] for line in wanted["parts"].values()}
                continue
            node = at(ckpt.tree, name)
            assert isinstance(node, Composite)
            assert node.kind == wanted["kind"]
            if wanted["shape"] is not None:
                assert list(node.shape) == wanted["shape"]
            for key in ("coalesced", "qscheme", "scale", "zero_point", "axis"):
                assert node.attributes.get(key) == wanted.get(key), key
            for part, line in wanted["parts"].items():
                if part == "stored":
                    elements = node.parts["int_repr"]
                    assert elements.dtype.name == wanted["dtype"]
                    assert stored_digest(elements, line["shape"][0]) == line["sha256"]
                else:
                    same(node.parts[part], line)
                    assert f"{name}.{part}" in ckpt


def test_what_blocks_stand_for(golden, expected):
    with holdfast.open(golden) as ckpt:
        numbers = {
            name: digest(holdfast.dequantize(t))
            for name, t in ckpt.items()
            if name in expected.get("dequantized", {})
        }
        assert numbers == expected.get("dequantized", {})


def stored_digest(elements: LazyTensor, nbytes: int) -> str:
    """The hash of a quantised tensor's whole storage; torch rounds it up, so what is left over comes from the file."""
    chunk = elements.chunks[0]
    start = chunk.storage.start
    assert chunk.storage.nbytes == nbytes
    raw = Path(elements.source.store.name).read_bytes()[start : start + nbytes]
    array = np.ascontiguousarray(elements.numpy())
    used = packed(array, elements.dtype.bits) if elements.dtype.packed else array.tobytes()
    # The last byte may be used in part; torch leaves whatever was there in the rest of it.
    partial = array.size * elements.dtype.bits % 8
    whole = used[:-1] if partial else used
    assert raw.startswith(whole)
    if partial:
        assert raw[len(whole)] & ((1 << partial) - 1) == used[-1]
    return hashlib.sha256(raw).hexdigest()


def test_plain_values(golden, expected):
    with holdfast.open(golden) as ckpt:
        for name, value in expected.get("values", {}).items():
            assert at(ckpt.tree, name) == value, name


def test_foreign_globals_were_mentioned(golden, expected):
    if "globals" not in expected:
        pytest.skip("the expectation lists the globals of zips only")
    mentioned = {python3(name) for name in expected["globals"]}
    with holdfast.open(golden) as ckpt:
        foreign = {str(f.what) for f in ckpt.foreign}
        assert foreign <= mentioned
        assert {
            m for m in mentioned if m.startswith("trainer.") and "TaggedTensor" not in m
        } <= foreign


def test_hostile_files_run_nothing(hostile, capfd):
    wanted = json.loads((HERE / "hostile" / "expected.json").read_text())[hostile.name]["globals"]
    try:
        with holdfast.open(hostile) as ckpt:
            foreign = {str(f.what) for f in ckpt.foreign}
    except holdfast.errors.FormatError:
        assert hostile.name in ("broken_tail.pt", "raw_pickle.pt")
    else:
        assert foreign >= {python3(name) for name in wanted}
    assert capfd.readouterr() == ("", "")


def test_each_file_has_an_expectation_and_a_line_in_the_readme():
    files = sorted(p.name for p in (HERE / "files").iterdir())
    assert sorted(p.name for p in (HERE / "expected").iterdir()) == [
        f"{name}.json" for name in files
    ]
    readme = (HERE / "README.md").read_text()
    hostile = sorted(p.name for p in (HERE / "hostile").glob("*.pt"))
    lines = [f"`files/{n}" for n in files] + [f"`hostile/{n}`" for n in hostile]
    assert [line for line in lines if line not in readme] == []


def test_the_files_are_small():
    sizes = {p: p.stat().st_size for p in (HERE / "files").rglob("*") if p.is_file()}
    assert max(sizes.values()) < MAX_FILE
    assert sum(sizes.values()) < MAX_ALL
