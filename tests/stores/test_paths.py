"""What counts as a path, alike for every verb that takes one, and that nothing is made on the way to a refusal."""

from __future__ import annotations

import os
from pathlib import Path, PureWindowsPath

import numpy as np
import pytest
import torch

import holdfast
from holdfast.cli.main import main
from holdfast.errors import (
    BadPath,
    HoldfastError,
    NotAPath,
    NotCommitted,
    Refused,
    StoreError,
    Unsupported,
)
from holdfast.extras.pruning.prune import prune
from holdfast.stores.paths import disambiguate_path, local_path
from holdfast.stores.place import is_same_place
from holdfast.torch import async_save_sharded, load, load_into, load_sharded, save, save_sharded
from holdfast.torch import open as open_torch
from holdfast.verbs.reshard import reshard
from holdfast.verbs.stats import stats

URLS = ["hf://org/model", "file:///tmp/x", "simplecache::s3://b/x", "a+b.c-1://x"]
OBJECTS = ["s3://bucket/x", "S3://B/x", Path("s3://bucket/x"), "s3:/bucket/x", " s3://bucket/x"]
BAD = [
    *URLS,
    Path("hf://bucket/x"),
    "hf:/bucket",
    " hf://bucket/x",
    "s3://",
    "s3://bucket/../x",
    "C:\\x",
    "c:/x",
    "C:",
    "\\\\server\\x",
    "~no-such-user/x",
]
BAD += ["", "a\0b"]
WRONG = [b"x", 5, None]


class Bytes:
    """A path as bytes, in an object."""

    def __fspath__(self) -> bytes:
        return b"x"


STATE = {"w": np.ones(2, np.float32)}

READERS = {
    "open": holdfast.open,
    "torch.open": open_torch,
    "load_into": lambda path: load_into({"w": torch.zeros(2)}, path),
    "load_sharded": lambda path: load_sharded(path, {"w": torch.zeros(2)}),
    "diff": lambda path: holdfast.diff("here.pt", path),
    "stats": lambda path: list(stats(path)),
    "convert from": lambda path: holdfast.convert(path, "made.pt"),
    "edit": lambda path: holdfast.edit(path, in_place=True, drop=["w"]),
    "prune from": lambda path: prune(path, "made.pt", ["*: 2:4"]),
    "reshard from": lambda path: reshard(path, "made", mesh={"dp": 2}),
    "tie": lambda path: holdfast.tie(path, dry_run=True),
    "compact": lambda path: holdfast.compact(path, "made.pt"),
    "replace_weights": lambda path: holdfast.replace_weights(path, weights=STATE, in_place=True),
    "package of": lambda path: holdfast.package({"m": path}, "made.pt2"),
}
WRITERS = {
    "save": lambda path: holdfast.save(STATE, path, format="native"),
    "save torch": lambda path: holdfast.save(STATE, path, format="torch"),
    "save_sharded": lambda path: save_sharded(path, {"w": torch.ones(2)}),
    "async_save_sharded": lambda path: async_save_sharded(path, {"w": torch.ones(2)}).wait(),
    "convert": lambda path: holdfast.convert("here.pt", path, format="native"),
    "convert with resume": lambda path: holdfast.convert(
        "here.pt", path, format="native", resume=True
    ),
    "convert, only explained": lambda path: holdfast.convert(
        "here.pt", path, format="native", dry_run=True
    ),
    "edit to": lambda path: holdfast.edit("here.pt", path, rename=[("w", "v")]),
    "prune": lambda path: prune("here.pt", path, ["*: 0.5"], format="native"),
    "reshard": lambda path: reshard("here.pt", path, mesh={"dp": 2}),
    "tie to": lambda path: holdfast.tie("here.pt", path, format="native"),
    "compact to": lambda path: holdfast.compact("here.pt", path, format="native"),
    "package": lambda path: holdfast.package({"m": STATE}, path),
}
VERBS = READERS | WRITERS


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current directory with one checkpoint, and an empty home."""
    folder, home = tmp_path / "here", tmp_path / "home"
    folder.mkdir()
    home.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(home))
    holdfast.save(STATE, "here.pt")
    return folder


@pytest.mark.parametrize("verb", VERBS)
def test_what_is_no_path_is_refused_by_every_verb(verb: str, here: Path):
    """An error of ours, for readers and for writers, and no folder called `s3:`."""
    for path in BAD:
        with pytest.raises(BadPath) as caught:
            VERBS[verb](path)
        assert isinstance(caught.value, StoreError)
        assert isinstance(caught.value, NotCommitted)
        assert os.listdir(here) == ["here.pt"]


@pytest.mark.parametrize("verb", VERBS)
def test_an_object_store_that_is_not_there_is_an_error_and_no_folder(
    verb: str, here: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
        monkeypatch.setenv(name, "none")
    monkeypatch.setattr("holdfast.stores.remote.client.MAX_RETRIES", 0)
    for path in OBJECTS:
        if "explained" in verb:
            VERBS[verb](path)
        else:
            with pytest.raises((StoreError, NotCommitted, Unsupported)):
                VERBS[verb](path)
        assert os.listdir(here) == ["here.pt"]


@pytest.mark.parametrize("verb", VERBS)
def test_what_is_no_text_is_a_type_error_of_ours(verb: str, here: Path):
    with pytest.raises(NotAPath, match="text") as caught:
        VERBS[verb](Bytes())
    assert isinstance(caught.value, TypeError)
    if verb in WRITERS and not verb.endswith(" to"):
        for path in WRONG:
            with pytest.raises(NotAPath):
                VERBS[verb](path)
    assert os.listdir(here) == ["here.pt"]


@pytest.mark.parametrize("path", BAD)
def test_reports_say_it_and_do_not_raise(path: str | Path):
    found = holdfast.verify(path)
    assert not found.ok
    assert [problem.kind for problem in found.problems] == ["BadPath"]
    assert holdfast.scan(path).verdict() == "error"


@pytest.mark.parametrize("path", URLS)
def test_the_sentence_about_a_url(path: str):
    with pytest.raises(BadPath) as caught:
        local_path(path)
    expected = "without file://" if path.startswith("file:") else "s3://, gs:// and az://"
    assert expected in str(caught.value)


COMMANDS = {
    "show": ["show", "{}"],
    "read": ["read", "{}", "w"],
    "read to": ["read", "here.pt", "w", "-o", "{}"],
    "scan": ["scan", "{}"],
    "verify": ["verify", "{}"],
    "diff": ["diff", "here.pt", "{}"],
    "convert": ["convert", "here.pt", "{}", "--format", "native"],
    "convert from": ["convert", "{}", "x.pt"],
    "edit": ["edit", "here.pt", "--rename", "w=v", "{}"],
    "reshard": ["reshard", "here.pt", "{}", "--mesh", "tp=2"],
    "prune": ["prune", "here.pt", "{}", "--rule", "*: 2:4"],
    "stats": ["stats", "{}"],
    "package": ["package", "m=here.pt", "{}"],
    "package of": ["package", "m={}", "made.pt2"],
    "tie": ["tie", "here.pt", "{}"],
    "compact": ["compact", "here.pt", "{}"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_the_command_line_refuses_the_same(
    command: str, here: Path, capsys: pytest.CaptureFixture[str]
):
    for path in ("hf://bucket/x", "C:\\x", "~no-such-user/x", ""):
        code = main([part.format(path) for part in COMMANDS[command]])
        told = capsys.readouterr()
        assert code == 2, path
        assert "internal error" not in told.err
        assert (
            told.err.startswith("holdfast: ") or "not verified" in told.out or "error" in told.out
        )
        assert os.listdir(here) == ["here.pt"]


@pytest.mark.parametrize("verb", WRITERS)
def test_home_is_home_for_every_writer(verb: str, here: Path):
    for path in ("~/x", Path("~/y")):
        if verb != "convert, only explained":
            WRITERS[verb](path)
            assert Path(path).expanduser().exists()
            assert not holdfast.verify(path).problems
    assert os.listdir(here) == ["here.pt"]


@pytest.mark.parametrize("verb", READERS)
def test_home_is_home_for_every_reader(verb: str, here: Path):
    """`~/x` is looked for at home: what is not there is missing there, and not in a folder called `~`."""
    with pytest.raises(HoldfastError) as caught:
        READERS[verb]("~/missing.pt")
    assert not isinstance(caught.value, BadPath)
    assert os.path.expanduser("~/missing.pt") in str(caught.value)


def test_home_on_the_command_line(here: Path):
    assert main(["convert", "here.pt", "~/there.pt", "--quiet"]) == 0
    assert (
        main(["show", "~/there.pt"])
        == main(["verify", "~/there.pt", "--quiet"])
        == main(["scan", "~/there.pt"])
        == 0
    )
    assert main(["read", "~/there.pt", "w", "-o", "~/w.npy"]) == 0
    assert sorted(os.listdir(os.path.expanduser("~"))) == ["there.pt", "w.npy"]
    assert os.listdir(here) == ["here.pt"]


ODD = ["~odd.pt", "s3:", "C:\\x.pt", "a:b.pt", "x ~.pt"]


def test_names_that_look_like_something_else_are_reached_by_their_absolute_path(here: Path):
    for name in ODD:
        for path in (here / name, f"./{name}", f"././{name}"):
            holdfast.save(STATE, path, format="torch")
            assert holdfast.verify(path).ok
            assert holdfast.scan(path).verdict() == "clean"
            with holdfast.open(path) as checkpoint:
                assert list(checkpoint) == ["w"]
    assert main(["show", "./~odd.pt"]) == 0
    assert sorted(os.listdir(here)) == sorted([*ODD, "here.pt"])


def test_what_is_found_in_a_folder_is_what_it_is(here: Path):
    """A scan of `.` comes upon `~odd.pt`, which is nobody's home."""
    for name in ODD:
        holdfast.save(STATE, here / name, format="torch")
    found = holdfast.scan(".")
    assert [file.error for file in found.reports] == [None] * len(found.reports)
    assert len(found.reports) == len(ODD) + 1 or found.skipped
    assert holdfast.verify(".").ok


def test_the_same_again(here: Path):
    """What comes out may be asked about again, also after `Path`."""
    for path in ("x", "./x", "./~x", "~/x", "/x", "a/~b", "./s3:/x", "..", ".", "a/b:/c"):
        once = local_path(path)
        assert local_path(once) == local_path(Path(once)) == once or Path(
            local_path(Path(once))
        ) == Path(once)
    assert disambiguate_path("~x") == f"{here}/~x"
    assert disambiguate_path("x") == "x"
    with pytest.raises(BadPath, match="Windows"):
        local_path(PureWindowsPath("C:/x"))


def test_names_that_are_too_long(here: Path):
    for verb in set(VERBS) - {"convert, only explained"}:
        for path in ("x" * 256, "d/" * 3000 + "x"):
            with pytest.raises(HoldfastError):
                VERBS[verb](path).wait()  # those that raise only when they are waited for
    assert os.listdir(here) == ["here.pt"]


def test_the_drop_in_takes_paths_as_torch_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """To torch a path is what the system makes of it: no home, no URLs, and no folder is made."""
    for number, path in enumerate(
        ("s3://bucket/x.pt", "~/x.pt", "~x.pt", "C:\\x.pt", "hf://x", "\\x.pt", "a:b.pt")
    ):
        outcomes = []
        for who, call in (("ours", save), ("torch's", torch.save)):
            place = tmp_path / f"{who}-{number}"
            place.mkdir()
            monkeypatch.chdir(place)
            try:
                call({"w": torch.ones(2)}, path)
                told = ""
            except RuntimeError as error:
                told = str(error).split(" (")[0]
            # Before it says that there is no folder, torch 2.6 makes an empty file of that name.
            outcomes.append(
                (
                    told,
                    {
                        found.name: content
                        for found in place.iterdir()
                        if (content := found.read_bytes())
                    },
                )
            )
        assert outcomes[0] == outcomes[1], path


def test_the_drop_in_refuses_without_a_folder(here: Path):
    for path in ("s3://bucket/x.pt", "~/x.pt"):
        with pytest.raises(Refused):
            save({"w": torch.ones(2)}, path)
        with pytest.raises(FileNotFoundError):
            load(path)
    assert os.listdir(here) == ["here.pt"]


def test_places_are_the_same_by_their_real_paths(tmp_path):
    one, link, hard, gone = (str(tmp_path / name) for name in ("one", "link", "hard", "gone"))
    Path(one).write_bytes(b"x")
    os.symlink(one, link)
    os.link(one, hard)
    assert is_same_place(one, link)
    assert is_same_place(one, f"{tmp_path}/./one")
    assert is_same_place(gone, f"{tmp_path}/./gone")
    assert not is_same_place(one, gone)
    assert not is_same_place(one, hard), "two names of one file are two places"
    assert not is_same_place(one, str(tmp_path))
