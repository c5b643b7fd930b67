"""Which zips are `.pt2`, what opening one costs, and that the fast way through a config and the strict one agree."""

from __future__ import annotations

import json
import os
import tracemalloc
import zipfile
from io import BytesIO

import pytest

import holdfast
from holdfast.cli.show import show_tree
from holdfast.core.limits import Limits
from holdfast.engine.saves import Hole, Late
from holdfast.engine.source import OpenSource
from holdfast.extras.packages.pt2.program import summarise
from holdfast.extras.packages.pt2.schema import ConfigEntry, TensorMeta, parse_config
from holdfast.formats import format_of
from holdfast.formats.zip.writer import lay_out_zip
from holdfast.stores.local import LocalStore
from holdfast.stores.memory import MemoryStore
from tests.extras.packages.pt2.craft_pt2 import (
    archive,
    config,
    entry,
    honest,
    meta,
    program,
    records,
)
from tests.hostile.craft_pickle import EMPTY_TUPLE, dict_of, stream, text
from tests.hostile.craft_torch import storage, tensor, torch_zip, torchscript


def matches(raw: bytes) -> bool:
    return format_of("pt2").matches(OpenSource(MemoryStore({"bytes": raw})))


def repacked(made: dict[str, bytes], prefix: str = "m/") -> bytes:
    """The same records by Python's zipfile, sorted by name."""
    buffer = BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for name, content in sorted(made.items()):
            file.writestr(prefix + name, content)
    return buffer.getvalue()


def test_it_is_known_by_a_record():
    assert matches(honest())
    assert matches(repacked(records()))
    assert matches(repacked({**records(), **{f"data/weights/x{i}": b"1" for i in range(500)}}))
    assert matches(repacked({"serialized_exported_program.json": program(), "version": b"8.8"}, ""))
    assert matches(repacked({"a": b"1", "serialized_exported_program.json": program()}, ""))


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"PK\3\4", b"PK\3\4" + bytes(100), bytes(100), torch_zip(stream(dict_of(text("w"), tensor(storage())))),
        archive({"deep/archive_format": b"pt2"}), archive({"archive_format.txt": b"pt2"}), archive({"text": b"m/archive_format"}),
        honest()[:-1], honest()[:-200],
    ],
)  # fmt: skip
def test_what_is_none(raw):
    assert not matches(raw)


def test_other_zips_open_as_before():
    with holdfast.open(torch_zip(stream(dict_of(text("w"), tensor(storage()))))) as ckpt:
        assert ckpt.format == "torch-zip"
    with holdfast.open(torchscript(stream(dict_of()), stream(EMPTY_TUPLE))) as ckpt:
        assert ckpt.format == "torchscript"


def test_a_repacked_archive_opens():
    with holdfast.open(repacked(records())) as ckpt:
        assert set(ckpt) == {"w", "v", "constants.c"}


def sparse(path, count: int, nbytes: int) -> None:
    """An archive of `count` weights of `nbytes` each, with holes where their bytes would be."""
    rows = {
        f"layers.{i}.weight": entry(
            f"weight_{i}", meta((nbytes // 256, 64), (64, 1)), is_param=True
        )
        for i in range(count)
    }
    made = [(f"data/weights/weight_{i}", Hole(nbytes)) for i in range(count)]
    rest = {
        **records(),
        "data/weights/model_weights_config.json": config(rows),
        "models/model.json": program(tuple(rows), ("c",)),
    }
    made += [(name, content) for name, content in rest.items() if name != "data/weights/weight_0"]
    with open(path, "wb") as file:
        for segment in lay_out_zip("m", made):
            if isinstance(segment, Hole):
                file.seek(segment.nbytes, os.SEEK_CUR)
            else:
                file.write(segment.make({}) if isinstance(segment, Late) else segment.data)
        file.truncate()


class Counted(LocalStore):
    """Counts what is read."""

    nbytes = 0

    def read(self, key: str, start: int, out: memoryview) -> None:
        self.nbytes += out.nbytes
        super().read(key, start, out)


def test_opening_ten_gigabytes_reads_the_index(tmp_path):
    path = tmp_path / "large.pt2"
    sparse(path, 290, 36 << 20)
    assert path.stat().st_size > 10e9
    with holdfast.open(path) as ckpt:
        assert len(ckpt) == 291
        assert ckpt.nbytes > 10e9
        assert ckpt["layers.289.weight"][5:7].numpy().sum() == 0
    tracemalloc.start()
    holdfast.open(path).close()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10 << 20
    store = Counted(path)
    source = OpenSource(store)
    assert format_of("pt2").matches(source)
    format_of("pt2").describe(source)
    # The directory and the headers: about two hundred bytes a record; the config: about three hundred a weight.
    assert store.nbytes < 1 << 20


ENTRIES = {
    "emb.weight": entry(is_param=True),
    "part": entry(tensor_meta=meta((3,), (1,), 2)),
    "scalar": entry(tensor_meta=meta((), ())),
    "cuda": entry(tensor_meta=meta(device={"type": "cuda", "index": 1})),
    "fp8": entry("weight_1", meta(dtype=29), use_pickle=True),
}

EMBEDDED = TensorMeta(holdfast.DTYPES.name("float32"), (2, 3), (3, 1), 0, False, "cpu")


def test_a_config_may_be_written_in_any_way():
    expected = {
        "emb.weight": ConfigEntry("weight_0", True, False, EMBEDDED),
        "part": ConfigEntry(
            "weight_0", False, False, EMBEDDED._replace(sizes=(3,), strides=(1,), offset=2)
        ),
        "scalar": ConfigEntry("weight_0", False, False, EMBEDDED._replace(sizes=(), strides=())),
        "cuda": ConfigEntry("weight_0", False, False, EMBEDDED._replace(location="cuda:1")),
        "fp8": ConfigEntry(
            "weight_1", False, True, EMBEDDED._replace(dtype=holdfast.DTYPES.name("float8_e4m3fn"))
        ),
    }
    variants = [
        config(ENTRIES),
        json.dumps({"config": ENTRIES}, indent=1).encode(),
        json.dumps({"config": ENTRIES, "more": [1]}).encode(),
        json.dumps(
            {"config": {name: dict(reversed(row.items())) for name, row in ENTRIES.items()}}
        ).encode(),
        config({name: {**row, "unknown": None} for name, row in ENTRIES.items()}),
    ]
    for variant in variants:
        assert parse_config(variant, Limits(), model="m", what="weight") == expected
    odd = {'a": {b, "c}, {é': entry()}
    assert list(parse_config(config(odd), Limits(), model="m", what="weight")) == list(odd)


def test_a_program_in_short():
    found = summarise(program(("w",), ("c",)))
    assert (list(found.weights), found.constants, found.nodes) == (["w"], ("c",), 1)
    assert found.operators == {"aten.relu.default": 1}
    assert str(found) == (
        "takes x: float32[3]; gives x: float32[3]; 1 calls of 1 operators: aten.relu.default ×1; exported by torch 2.13.0"
    )


def test_the_command_shows_it():
    with holdfast.open(honest()) as ckpt:
        lines = ["".join(part for part, _ in line) for line in show_tree(ckpt)]
    assert "pt2 · 3 tensors" in lines[0]
    assert any("in w" in line for line in lines)
    assert any(line.startswith("note") and "aten.relu.default" in line for line in lines)


def test_other_weights_than_the_program_was_exported_with_are_a_note():
    document = json.loads(program(("w", "v"), ("c",)))
    document["graph_module"]["graph"]["tensor_values"]["p_w"] = meta((9, 9), (9, 1))
    with holdfast.open(honest({"models/model.json": json.dumps(document).encode()})) as ckpt:
        assert any("another dtype or shape" in note for note in ckpt.notes)
