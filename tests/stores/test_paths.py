"""Every verb accepts and refuses the same paths, and creates nothing if it refuses one."""

from __future__ import annotations

import contextlib
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

UNSUPPORTED_URLS = ["hf://org/model", "file:///tmp/x", "simplecache::s3://b/x", "a+b.c-1://x"]
OBJECT_URLS = ["s3://bucket/x", "S3://B/x", Path("s3://bucket/x"), "s3:/bucket/x", " s3://bucket/x"]
INVALID_PATHS = [
    *UNSUPPORTED_URLS,
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
    "",
    "a\0b",
]
NOT_TEXT = [b"x", 5, None]


class BytesPath:
    """A path object whose path is bytes."""

    def __fspath__(self) -> bytes:
        return b"x"


STATE = {"w": np.ones(2, np.float32)}

READERS = {
    "open": holdfast.open,
    "torch.open": open_torch,
    "load_into": lambda path: load_into({"w": torch.zeros(2)}, path),
    "load_sharded": lambda path: load_sharded(path, {"w": torch.zeros(2)}),
    "diff": lambda path: holdfast.diff("input.pt", path),
    "stats": lambda path: list(stats(path)),
    "convert from": lambda path: holdfast.convert(path, "new.pt"),
    "edit": lambda path: holdfast.edit(path, in_place=True, drop=["w"]),
    "prune from": lambda path: prune(path, "new.pt", ["*: 2:4"]),
    "reshard from": lambda path: reshard(path, "new", mesh={"dp": 2}),
    "tie": lambda path: holdfast.tie(path, dry_run=True),
    "compact": lambda path: holdfast.compact(path, "new.pt"),
    "replace_weights": lambda path: holdfast.replace_weights(path, weights=STATE, in_place=True),
    "package of": lambda path: holdfast.package({"m": path}, "new.pt2"),
}
WRITERS = {
    "save": lambda path: holdfast.save(STATE, path, format="native"),
    "save torch": lambda path: holdfast.save(STATE, path, format="torch"),
    "save_sharded": lambda path: save_sharded(path, {"w": torch.ones(2)}),
    "async_save_sharded": lambda path: async_save_sharded(path, {"w": torch.ones(2)}).wait(),
    "convert": lambda path: holdfast.convert("input.pt", path, format="native"),
    "convert with resume": lambda path: holdfast.convert(
        "input.pt", path, format="native", resume=True
    ),
    "convert dry run": lambda path: holdfast.convert(
        "input.pt", path, format="native", dry_run=True
    ),
    "edit to": lambda path: holdfast.edit("input.pt", path, rename=[("w", "v")]),
    "prune": lambda path: prune("input.pt", path, ["*: 0.5"], format="native"),
    "reshard": lambda path: reshard("input.pt", path, mesh={"dp": 2}),
    "tie to": lambda path: holdfast.tie("input.pt", path, format="native"),
    "compact to": lambda path: holdfast.compact("input.pt", path, format="native"),
    "package": lambda path: holdfast.package({"m": STATE}, path),
}
VERBS = READERS | WRITERS


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current directory with one checkpoint, and an empty home folder."""
    folder = tmp_path / "folder"
    folder.mkdir()
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(home))
    holdfast.save(STATE, "input.pt")
    return folder


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_refuses_an_invalid_path_and_creates_nothing(verb: str, folder: Path):
    for path in INVALID_PATHS:
        with pytest.raises(BadPath) as caught:
            VERBS[verb](path)
        # Those who read catch the first class, and those who write the second.
        assert isinstance(caught.value, StoreError)
        assert isinstance(caught.value, NotCommitted)
        assert os.listdir(folder) == ["input.pt"]


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_reports_an_unreachable_object_store_and_creates_nothing(
    verb: str, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
        monkeypatch.setenv(name, "none")
    monkeypatch.setattr("holdfast.stores.remote.client.MAX_RETRIES", 0)
    for path in OBJECT_URLS:
        if "dry run" in verb:
            VERBS[verb](path)
        else:
            with pytest.raises((StoreError, NotCommitted, Unsupported)):
                VERBS[verb](path)
        assert os.listdir(folder) == ["input.pt"]


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_refuses_a_path_that_is_not_text(verb: str, folder: Path):
    with pytest.raises(NotAPath, match="text") as caught:
        VERBS[verb](BytesPath())
    assert isinstance(caught.value, TypeError)
    # Readers also accept file objects, and the verbs that end with " to" accept None.
    if verb in WRITERS and not verb.endswith(" to"):
        for path in NOT_TEXT:
            with pytest.raises(NotAPath):
                VERBS[verb](path)
    assert os.listdir(folder) == ["input.pt"]


@pytest.mark.parametrize("path", INVALID_PATHS)
def test_reports_contain_an_invalid_path_and_do_not_raise(path: str | Path):
    report = holdfast.verify(path)
    assert not report.ok
    assert [problem.kind for problem in report.problems] == ["BadPath"]
    assert holdfast.scan(path).verdict() == "error"


@pytest.mark.parametrize("path", UNSUPPORTED_URLS)
def test_the_error_for_a_url_says_what_to_pass_instead(path: str):
    advice = "without file://" if path.startswith("file:") else "s3://, gs:// and az://"
    with pytest.raises(BadPath, match=advice):
        local_path(path)


COMMANDS = {
    "show": ["show", "{}"],
    "read": ["read", "{}", "w"],
    "read to": ["read", "input.pt", "w", "-o", "{}"],
    "scan": ["scan", "{}"],
    "verify": ["verify", "{}"],
    "diff": ["diff", "input.pt", "{}"],
    "convert": ["convert", "input.pt", "{}", "--format", "native"],
    "convert from": ["convert", "{}", "x.pt"],
    "edit": ["edit", "input.pt", "--rename", "w=v", "{}"],
    "reshard": ["reshard", "input.pt", "{}", "--mesh", "tp=2"],
    "prune": ["prune", "input.pt", "{}", "--rule", "*: 2:4"],
    "stats": ["stats", "{}"],
    "package": ["package", "m=input.pt", "{}"],
    "package of": ["package", "m={}", "new.pt2"],
    "tie": ["tie", "input.pt", "{}"],
    "compact": ["compact", "input.pt", "{}"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_refuses_an_invalid_path_and_creates_nothing(
    command: str, folder: Path, capsys: pytest.CaptureFixture[str]
):
    for path in ("hf://bucket/x", "C:\\x", "~no-such-user/x", ""):
        exit_status = main([argument.format(path) for argument in COMMANDS[command]])
        printed = capsys.readouterr()
        assert exit_status == 2, path
        assert "internal error" not in printed.err
        is_error = printed.err.startswith("holdfast: ")
        assert is_error or "not verified" in printed.out or "error" in printed.out
        assert os.listdir(folder) == ["input.pt"]


@pytest.mark.parametrize("verb", WRITERS)
def test_every_writer_expands_the_home_folder(verb: str, folder: Path):
    if verb == "convert dry run":
        pytest.skip("a dry run writes nothing")
    for path in ("~/x", Path("~/y")):
        WRITERS[verb](path)
        assert Path(path).expanduser().exists()
        assert not holdfast.verify(path).problems
    assert os.listdir(folder) == ["input.pt"]


@pytest.mark.parametrize("verb", READERS)
def test_every_reader_expands_the_home_folder(verb: str):
    with pytest.raises(HoldfastError) as caught:
        READERS[verb]("~/missing.pt")
    assert not isinstance(caught.value, BadPath)
    assert os.path.expanduser("~/missing.pt") in str(caught.value)


def test_commands_expand_the_home_folder(folder: Path):
    assert main(["convert", "input.pt", "~/copy.pt", "--quiet"]) == 0
    assert main(["show", "~/copy.pt"]) == 0
    assert main(["verify", "~/copy.pt", "--quiet"]) == 0
    assert main(["scan", "~/copy.pt"]) == 0
    assert main(["read", "~/copy.pt", "w", "-o", "~/w.npy"]) == 0
    assert sorted(os.listdir(os.path.expanduser("~"))) == ["copy.pt", "w.npy"]
    assert os.listdir(folder) == ["input.pt"]


UNUSUAL_NAMES = ["~odd.pt", "s3:", "C:\\x.pt", "a:b.pt", "x ~.pt"]
"""Names of files that look like a home folder, a URL or a drive."""


@pytest.mark.parametrize("name", UNUSUAL_NAMES)
def test_a_file_with_an_unusual_name_is_reached_by_an_absolute_path(name: str, folder: Path):
    for path in (folder / name, f"./{name}", f"././{name}"):
        holdfast.save(STATE, path, format="torch")
        assert holdfast.verify(path).ok
        assert holdfast.scan(path).verdict() == "clean"
        with holdfast.open(path) as checkpoint:
            assert list(checkpoint) == ["w"]
    assert main(["show", f"./{name}"]) == 0
    assert sorted(os.listdir(folder)) == sorted([name, "input.pt"])


def test_a_scan_of_a_folder_reads_files_with_unusual_names(folder: Path):
    for name in UNUSUAL_NAMES:
        holdfast.save(STATE, folder / name, format="torch")
    report = holdfast.scan(".")
    assert [file.error for file in report.reports] == [None] * len(report.reports)
    assert len(report.reports) == len(UNUSUAL_NAMES) + 1 or report.skipped
    assert holdfast.verify(".").ok


@pytest.mark.parametrize(
    "path", ["x", "./x", "./~x", "~/x", "/x", "a/~b", "./s3:/x", "..", ".", "a/b:/c"]
)
def test_a_local_path_can_be_checked_again(path: str):
    checked_path = local_path(path)
    assert local_path(checked_path) == checked_path
    # `Path` removes a `./`, which does not make it another path.
    assert Path(local_path(Path(checked_path))) == Path(checked_path)


def test_disambiguate_path_makes_unusual_paths_absolute(folder: Path):
    assert disambiguate_path("~x") == f"{folder}/~x"
    assert disambiguate_path("x") == "x"


def test_a_windows_path_is_refused_on_other_systems():
    with pytest.raises(BadPath, match="Windows"):
        local_path(PureWindowsPath("C:/x"))


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_refuses_a_path_that_is_too_long(verb: str, folder: Path):
    if verb == "convert dry run":
        pytest.skip("a dry run writes nothing")
    for path in ("x" * 256, "d/" * 3000 + "x"):
        with pytest.raises(HoldfastError):
            # Some verbs raise only when their result is waited for.
            VERBS[verb](path).wait()
    assert os.listdir(folder) == ["input.pt"]


def save_in_folder(save_function, folder: Path, path: str) -> tuple[str, dict[str, bytes]]:
    """Save with `folder` as the current directory. Returns the error and the files that exist then."""
    folder.mkdir()
    message = ""
    with contextlib.chdir(folder):
        try:
            save_function({"w": torch.ones(2)}, path)
        except RuntimeError as error:
            message = str(error).split(" (")[0]
    content = {file.name: file.read_bytes() for file in folder.iterdir()}
    # Before torch 2.6 reports a missing folder, it creates an empty file.
    return message, {name: data for name, data in content.items() if data}


@pytest.mark.parametrize(
    "path", ["s3://bucket/x.pt", "~/x.pt", "~x.pt", "C:\\x.pt", "hf://x", "\\x.pt", "a:b.pt"]
)
def test_torch_save_uses_a_path_as_torch_does(path: str, tmp_path: Path):
    ours = save_in_folder(save, tmp_path / "ours", path)
    theirs = save_in_folder(torch.save, tmp_path / "theirs", path)
    assert ours == theirs


@pytest.mark.parametrize("path", ["s3://bucket/x.pt", "~/x.pt"])
def test_torch_save_and_load_do_not_create_a_missing_folder(path: str, folder: Path):
    with pytest.raises(Refused):
        save({"w": torch.ones(2)}, path)
    with pytest.raises(FileNotFoundError):
        load(path)
    assert os.listdir(folder) == ["input.pt"]


def test_places_are_the_same_if_their_real_paths_are(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"x")
    link = tmp_path / "link"
    link.symlink_to(path)
    missing = tmp_path / "missing"
    assert is_same_place(str(path), str(link))
    assert is_same_place(str(path), f"{tmp_path}/./file")
    assert is_same_place(str(missing), f"{tmp_path}/./missing")
    assert not is_same_place(str(path), str(missing))
    assert not is_same_place(str(path), str(tmp_path))


def test_two_hard_links_of_a_file_are_two_places(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"x")
    hard_link = tmp_path / "hard_link"
    os.link(path, hard_link)
    assert not is_same_place(str(path), str(hard_link))
