"""`folder=True`: a path says that it is a folder, also one of `pathlib`, which drops the slash."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast.cli.main import main
from holdfast.errors import BadArgument, NotCommitted, Unsupported

STATE = {"w": np.arange(64, dtype=np.float32).reshape(8, 8), "v": np.ones(3)}

VERBS: dict[str, Callable[..., holdfast.Saved]] = {
    "save": lambda src, dst, **options: holdfast.save(STATE, dst, **options),
    "convert": holdfast.convert,
    "edit": lambda src, dst, **options: holdfast.edit(src, dst, drop="v", **options),
    "prune": lambda src, dst, **options: holdfast.prune(src, dst, ["w: 0.5"], **options),
    "tie": holdfast.tie,
    "compact": holdfast.compact,
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    holdfast.save(STATE, tmp_path / "source.pt")
    return tmp_path / "source.pt"


@pytest.mark.parametrize("verb", VERBS)
def test_folder_makes_a_folder_of_a_path_without_a_slash(verb, source, tmp_path):
    target = Path(f"{tmp_path}/m/")
    saved = VERBS[verb](source, target, format="safetensors", folder=True)
    assert target.is_dir()
    assert (saved.format, saved.folder) == ("safetensors-dir", True)
    assert [name for name, _ in saved.files] == ["model.safetensors"]
    assert not any("folder=True" in note for note in saved.notes)
    assert "w" in holdfast.open(target)


@pytest.mark.parametrize("verb", ["save", "convert", "edit"])
def test_the_result_says_that_one_file_was_written(verb, source, tmp_path):
    saved = VERBS[verb](source, Path(f"{tmp_path}/m/"), format="safetensors")
    assert (tmp_path / "m").is_file()
    assert (saved.format, saved.folder) == ("safetensors", False)
    (note,) = [note for note in saved.notes if "folder=True makes it a folder" in note]
    assert note in saved.explain()


@pytest.mark.parametrize("name", ["a.safetensors", "a.pt", "a"])
def test_no_note_stands_where_the_name_says_what_is_written(name, source, tmp_path):
    saved = holdfast.convert(source, tmp_path / name)
    assert saved.folder == (tmp_path / name).is_dir()
    assert not any("folder=" in note for note in saved.notes)


def test_a_format_of_one_file_is_no_folder(source, tmp_path):
    for format in ("torch", "pt"):
        with pytest.raises(NotCommitted, match="ends like a folder"):
            holdfast.convert(source, tmp_path / "m", format=format, folder=True)
    with pytest.raises(BadArgument, match="a file object holds one file"):
        holdfast.save(STATE, io.BytesIO(), format="safetensors", folder=True)
    assert [path.name for path in tmp_path.iterdir()] == ["source.pt"]


@pytest.mark.parametrize("verb", ["edit", "tie", "compact"])
def test_folder_needs_a_target(verb, source):
    with pytest.raises(Unsupported, match="folder=True says what a target is"):
        VERBS[verb](source, None, in_place=True, folder=True)


def test_the_command_line_writes_a_folder_and_says_so(source, tmp_path, capsys):
    target = tmp_path / "m"
    arguments = ["convert", str(source), str(target), "--format", "safetensors"]
    assert main([*arguments, "--dry-run"]) == 0
    assert "--folder makes it a folder" in capsys.readouterr().out
    assert main([*arguments, "--folder", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["format"], document["folder"]) == ("safetensors-dir", True)
    assert target.is_dir()
