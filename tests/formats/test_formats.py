"""The list of formats: what it says is true, and a line of it is all that a new format needs."""

from __future__ import annotations

import inspect
import itertools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.formats.outside.holdfast_toy import MAGIC, TOY

import holdfast
from holdfast import formats
from holdfast.cli.completion import script
from holdfast.cli.main import main
from holdfast.core.value import replace
from holdfast.errors import (
    BadArgument,
    CannotHold,
    FormatError,
    HeaderError,
    NotCommitted,
    UnknownFormat,
    Unsupported,
)
from holdfast.formats import FORMATS, Format, format_of, rank_formats, titles, written_formats
from holdfast.stores.remote.url import parse_url
from holdfast.verbs.shared.formats import LAYOUT_ARGUMENTS, map_suffixes_to_formats

STATE = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.array([7, 8], np.int64)}

BUCKETS = itertools.count()


@pytest.fixture
def toy() -> Iterator[None]:
    """One line more in the list."""
    FORMATS.append(TOY)
    yield
    FORMATS.remove(TOY)


@pytest.fixture
def path(toy: None, tmp_path: Path) -> Path:
    holdfast.save(STATE, tmp_path / "x.toy")
    return tmp_path / "x.toy"


def same(place: object) -> None:
    with holdfast.open(place) as found:
        assert {name: tensor.numpy().tolist() for name, tensor in found.items()} == {
            n: a.tolist() for n, a in STATE.items()
        }


def test_without_its_line_nobody_knows_it(tmp_path: Path):
    with pytest.raises(
        Unsupported,
        match=r"no format has the suffix '\.toy'; use one of \.pt, \.pth, \.bin, \.ckpt, \.safetensors, none",
    ):
        holdfast.save(STATE, tmp_path / "x.toy")
    with pytest.raises(
        Unsupported,
        match=r"there is no format 'toy'; use torch, safetensors, native or dcp$",
    ):
        holdfast.save(STATE, tmp_path / "x", format="toy")
    with pytest.raises(UnknownFormat):
        holdfast.open(MAGIC + (2).to_bytes(8, "little") + b"{}")


READ_ONLY = [
    (one.title, suffix)
    for one in FORMATS
    for suffix in one.suffixes
    if not one.written_by and not one.programs
]


@pytest.mark.parametrize(("title", "suffix"), READ_ONLY, ids=[suffix for _, suffix in READ_ONLY])
def test_a_format_that_is_only_read_is_refused_as_such(title: str, suffix: str, tmp_path: Path):
    message = f"^{title} can be read and not written; use"
    with pytest.raises(Unsupported, match=message):
        holdfast.save(STATE, tmp_path / f"x{suffix}")
    with pytest.raises(Unsupported, match=message):
        holdfast.save(STATE, tmp_path / f"x{suffix.upper()}")
    with pytest.raises(Unsupported, match=message):
        holdfast.save(STATE, tmp_path / "x", format=title)
    holdfast.save(STATE, tmp_path / "a.safetensors")
    with pytest.raises(Unsupported, match=message):
        holdfast.convert(tmp_path / "a.safetensors", tmp_path / f"x{suffix}")


@pytest.mark.extras
def test_the_suffix_of_packages_names_the_command_that_writes_them(tmp_path: Path):
    with pytest.raises(Unsupported, match="`holdfast package` writes it"):
        holdfast.save(STATE, tmp_path / "x.pt2")


def test_it_is_written_by_its_suffix_and_opened_by_its_content(path: Path):
    raw = path.read_bytes()
    assert raw.startswith(MAGIC)
    (path.parent / "other.name").write_bytes(raw)
    same(path)
    same(path.parent / "other.name")
    with holdfast.open(path) as found:
        assert found.format == "toy"
        assert found["w"][1:].numpy().tolist() == [[3, 4, 5]]


def test_it_is_written_by_its_name(toy: None, tmp_path: Path):
    saved = holdfast.save(STATE, tmp_path / "x", format="toy")
    assert saved.format == "toy"
    same(tmp_path / "x")
    same(holdfast.to_bytes(STATE, "toy"))


def test_messages_tell_of_it(toy: None, tmp_path: Path):
    with pytest.raises(Unsupported, match=r"use torch, safetensors, native, dcp or toy$"):
        holdfast.save(STATE, tmp_path / "x", format="tyo")
    with pytest.raises(Unsupported, match=r"use one of .*, \.toy, none for a native directory"):
        holdfast.save(STATE, tmp_path / "x.tyo")


def test_what_its_layout_cannot_hold_is_refused(toy: None, tmp_path: Path):
    with pytest.raises(CannotHold, match="nested"):
        holdfast.save({"a": {"b": np.ones(2)}}, tmp_path / "x.toy")
    with pytest.raises(Unsupported, match="only native directories share files, and this is toy"):
        holdfast.save(STATE, tmp_path / "x.toy", hashes=True)
    assert list(tmp_path.iterdir()) == []


def test_what_its_reader_does_not_open_is_not_published(
    toy: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("tests.formats.outside.holdfast_toy.MAGIC", b"YOT:")
    with pytest.raises(NotCommitted, match="what was written cannot be opened again"):
        holdfast.save(STATE, tmp_path / "x.toy", read_back=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("target", ["x.safetensors", "x.pt", "x", "again.toy"])
def test_it_is_converted_and_back(path: Path, target: str):
    other = path.parent / target
    holdfast.convert(path, other)
    same(other)
    back = holdfast.convert(other, path.parent / "back.toy")
    assert back.format == "toy"
    same(path.parent / "back.toy")


def test_it_is_edited_in_its_place(path: Path):
    holdfast.edit(path, in_place=True, drop="b", rename={"w": "v"})
    with holdfast.open(path) as found:
        assert (found.format, list(found)) == ("toy", ["v"])
    with pytest.raises(Unsupported, match="a toy file has no place for metadata"):
        holdfast.edit(path, in_place=True, set_metadata={"a": "b"})


def test_scan_and_verify(path: Path):
    (path.parent / "notes.txt").write_text("nothing")
    (report,) = holdfast.scan(path).reports
    assert (report.format, report.verdict()) == ("toy", "clean")
    found = holdfast.verify(path)
    assert (found.format, found.verdict, found.unchecked) == ("toy", "ok", ())
    # In a folder, it is a checkpoint by its name.
    found = holdfast.verify(path.parent)
    assert [name for name, _ in found.files] == ["x.toy"]
    assert found.skipped == (str(path.parent / "notes.txt"),)


def test_a_file_is_unknown_to_scan_unless_its_format_says_whether_it_can_contain_code(
    path: Path, tmp_path: Path
):
    silent = Format(TOY.name, TOY.read_by, TOY.begins, suffixes=TOY.suffixes)
    FORMATS[FORMATS.index(TOY)] = silent
    try:
        for place in (path, tmp_path):
            report = holdfast.scan(place)
            (file,) = report.reports
            (finding,) = file.findings
            assert (finding.severity, finding.what) == ("unknown", "the format toy")
            assert (report.verdict(), report.verdict(strict=True)) == ("unknown", "suspicious")
    finally:
        FORMATS[FORMATS.index(silent)] = TOY
    assert holdfast.scan(path).verdict() == "clean"


def test_every_format_says_whether_it_can_contain_code():
    # A graph of ONNX may name operators of libraries that its runtime loads, and scan reads no graphs.
    unknown_formats = {entry.name for entry in FORMATS if entry.code == "unknown"}
    assert unknown_formats == {"onnx"}


def test_a_damaged_one_is_refused_by_its_reader(path: Path):
    path.write_bytes(MAGIC + (8).to_bytes(8, "little") + b"{nothing")
    with pytest.raises(HeaderError):
        holdfast.open(path)
    assert not holdfast.verify(path).ok
    assert holdfast.scan(path).verdict() == "error"


def test_one_that_is_a_pickle_as_well_is_refused():
    """torch knows nothing of a new format, and would unpickle it."""
    call = b"cposix\nsystem\n"
    # Before bare pickles, which it would be taken for.
    FORMATS.insert(0, other := replace(TOY, begins=call))
    try:
        with pytest.raises(FormatError, match="toy and a pickle at once"):
            holdfast.open(call + b"(S'x'\ntR.")
    finally:
        FORMATS.remove(other)


def test_diff_knows_that_its_names_are_all_it_has(path: Path):
    nested = {"a": {"b": np.ones(2, np.float32)}}
    holdfast.save(nested, path.parent / "nested.pt")
    holdfast.save({"a.b": nested["a"]["b"]}, path.parent / "flat.toy")
    found = holdfast.diff(path.parent / "nested.pt", path.parent / "flat.toy")
    assert any(
        "nested on one side and have dotted names on the other" in note for note in found.notes
    )


@pytest.mark.parametrize("name", ["x.toy", "folder/x.TOY"])
def test_a_url(toy: None, name: str):
    url = f"memory://formats-{next(BUCKETS)}/{name}"
    assert holdfast.save(STATE, url).format == "toy"
    same(url)
    holdfast.convert(url, url + ".safetensors")
    same(url + ".safetensors")


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("x.toy", True),
        ("x.PT", True),
        ("run/step-1.5", False),
        ("Llama-3.1-8B", False),
        ("a.pt/step-1", False),
    ],
)
def test_a_url_is_an_objects_by_its_suffix(name: str, file: bool):
    assert parse_url(f"memory://bucket/{name}").has_suffix is file


@pytest.mark.extras
def test_exports_of_a_run(toy: None, tmp_path: Path):
    from holdfast.extras.runs.export import Export

    assert Export(tmp_path, format="toy").target(5) == str(tmp_path / "step-00000005.toy")
    inside = tmp_path / "step-5.toy"
    inside.mkdir()
    with pytest.raises(BadArgument, match=r"an export would have the name step-5\.toy"):
        Export(tmp_path, format="toy").check(str(inside))
    Export(tmp_path, format="toy").check(str(tmp_path / "step-5.txt"))


@pytest.mark.extras
def test_the_command_line(path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["show", str(path)]) == 0
    assert "toy" in capsys.readouterr().out
    assert main(["convert", str(path), str(path.parent / "y"), "--format", "toy", "--quiet"]) == 0
    same(path.parent / "y")
    for verb in ("convert", "prune"):
        assert main([verb, "--help"]) == 0
        assert "{torch,safetensors,native,dcp,toy}" in capsys.readouterr().out
    for shell in ("bash", "zsh", "fish"):
        assert re.search(r"torch\W+safetensors\W+native\W+dcp\W+toy", script(shell))


def test_the_help_of_convert_lists_what_is_written():
    code = """
import sys
from holdfast.formats import FORMATS
from tests.formats.outside.holdfast_toy import TOY
FORMATS.append(TOY)
from holdfast.cli.main import main
sys.exit(main(["convert", "--help"]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    told = " ".join(done.stdout.split())
    assert (
        "torch (.pt, .pth, .bin, .ckpt), safetensors, a native directory (no suffix), or toy."
        in told
    )


# The list itself.


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_an_entry_names_functions_of_the_formats_or_of_an_extra(format: formats.Format):
    named = {
        format.read_by,
        format.known_by,
        format.written_by,
        format.sharded_by,
        format.weights_by,
    } - {""}
    assert all(where.startswith((".", "holdfast.extras.")) for where in named)
    assert all(callable(formats.load_function(where)) for where in named)
    suffices = format.index if format.folder else format.begins
    assert format.known_by or suffices
    if format.written_by:
        taken = inspect.signature(formats.load_function(format.written_by)).parameters
        assert set(format.takes) <= set(taken)
        assert set(format.takes) <= set(LAYOUT_ARGUMENTS)
        assert format.folder or format.suffixes
    if format.sharded_by:
        assert format.folder
        assert format.index


def test_names_and_suffixes_are_no_two_formats():
    names = [format.name for format in FORMATS]
    assert len(names) == len(set(names))
    suffixes = [suffix for format in FORMATS for suffix in format.suffixes]
    assert len(suffixes) == len(set(suffixes))
    assert titles(written_formats()) == ("torch", "safetensors", "native", "dcp")
    assert titles(rank_formats()) == ("native", "dcp", "safetensors")
    assert map_suffixes_to_formats()[""] == "native"


def test_of_what_is_no_format_nothing_is_known():
    other = format_of("a file object")
    assert other == formats.Format("a file object", "")
    assert format_of("native") is format_of("native")


def test_what_a_reader_says_is_in_the_list(golden: Path):
    with holdfast.open(golden) as found:
        assert found.format in [format.name for format in FORMATS]
