"""Write every golden file with the real torch and safetensors, and what is in it.

    make golden            (or: python tests/golden/make.py [NAME…])

1. Each recipe below writes one small checkpoint into `files/`. torch and safetensors do the writing wherever
   they can; containers that today's torch cannot write are assembled from records (`archive.py`) or by hand,
   and torch reads them back.
2. The file is then loaded with the library that wrote it, and `expected/<file>.json` records what that library
   found: for each tensor its dtype, shape and the SHA-256 of its elements in C order and little-endian.
   Holdfast takes no part in this.
3. `hostile/` gets pickles that would do harm if they were loaded. They are assembled from opcodes and never
   loaded here.

Values are fixed, so a second run writes the same bytes. The names of the tensors are those that Holdfast
promises: the path through dicts, sequences and attributes joined by dots, and for an `nn.Module` the names of
its `state_dict()`.
"""

from __future__ import annotations

import json
import shutil
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path

import distributed  # noqa: F401  # importing enters its recipes in the registry
import graphs  # noqa: F401
import older  # noqa: F401
import safetensors
import torch
import zips  # noqa: F401
from archive import pack, unpack
from arrays import dequantized
from expect import expectation
from payloads import HOSTILE, globals_of
from recipe import HERE, RECIPES, plain_state
from safe import packed_expectation

FILES, EXPECTED, HOSTILE_DIR = HERE / "files", HERE / "expected", HERE / "hostile"
TORCH, SAFETENSORS = "2.13.0", "0.8.0"
MARK = "<!-- table -->"
WRITERS = {".gguf": "gguf", ".onnx": "onnx"}
"""Packages that are not among those of the tests, by the suffix of the files that they write."""


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def pickles(path: Path) -> list[bytes]:
    """The pickles of a zip whose globals the expectation lists."""
    if path.is_file() and path.read_bytes()[:4] == b"PK\x03\x04":
        return [
            payload
            for name, payload in unpack_stored(path)
            if name in ("data.pkl", "constants.pkl")
        ]
    return []


def unpack_stored(path: Path) -> list[tuple[str, bytes]]:
    try:
        return list(unpack(path).items())
    except Exception:  # zipfile refuses an archive without CRCs; torch's reader does not mind
        reader = torch._C.PyTorchFileReader(str(path))
        return [(name, reader.get_record(name)) for name in reader.get_all_records()]


def make(name: str) -> None:
    """Write one golden file and its expectation."""
    form, _, recipe = RECIPES[name]
    path = FILES / name
    remove(path)
    state = recipe(path)
    if name == "packed.safetensors":
        found = packed_expectation(path)
    else:
        found = expectation(torch.load(path, weights_only=False) if state is None else state, form)
    if form == "gguf":
        found["dequantized"] = dequantized(path)
    if streams := pickles(path):
        found["globals"] = sorted({g for stream in streams for g in globals_of(stream)})
    (EXPECTED / f"{name}.json").write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")


def make_hostile() -> None:
    """Write the hostile files. Nothing here loads them."""
    expected = {}
    for name, (_, content, wanted) in HOSTILE.items():
        (HOSTILE_DIR / name).write_bytes(content)
        expected[name] = {"globals": wanted}
    (HOSTILE_DIR / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


def table() -> str:
    """The list of files in README.md."""
    lines = ["| file | format | bytes | what it is for |", "| --- | --- | ---: | --- |"]
    for name, (form, purpose, _) in RECIPES.items():
        path = FILES / name
        size = (
            sum(f.stat().st_size for f in path.iterdir()) if path.is_dir() else path.stat().st_size
        )
        lines.append(
            f"| `files/{name}{'/' if path.is_dir() else ''}` | {form} | {size:,} | {purpose} |"
        )
    lines += [
        "",
        "| hostile file | bytes | what it would do if it were unpickled |",
        "| --- | ---: | --- |",
    ]
    lines += [
        f"| `hostile/{name}` | {len(content):,} | {purpose} |"
        for name, (purpose, content, _) in HOSTILE.items()
    ]
    return "\n".join(lines)


def main(names: list[str]) -> None:
    assert torch.__version__.split("+")[0] == TORCH, (
        f"the golden files come from torch {TORCH}, not {torch.__version__}"
    )
    assert safetensors.__version__ == SAFETENSORS
    warnings.simplefilter("ignore")
    for folder in (FILES, EXPECTED, HOSTILE_DIR):
        folder.mkdir(exist_ok=True)
    torch.save(plain_state(), probe := FILES / "probe.pt")
    assert pack("probe", unpack(probe).items()) == probe.read_bytes(), (
        "archive.py does not write as torch does"
    )
    probe.unlink()
    for name in names or RECIPES:
        writer = WRITERS.get(Path(name).suffix, "torch")
        if find_spec(writer) is not None:
            make(name)
    make_hostile()
    readme = HERE / "README.md"
    head, _, rest = readme.read_text().partition(MARK)
    readme.write_text(head + MARK + "\n" + table() + "\n" + MARK + rest.partition(MARK)[2])
    total = sum(f.stat().st_size for f in FILES.rglob("*") if f.is_file())
    print(f"{len(RECIPES)} golden files, {total:,} bytes; {len(HOSTILE)} hostile files")


if __name__ == "__main__":
    main(sys.argv[1:])
