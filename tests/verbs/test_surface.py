"""One shape for every verb that writes: what it takes, what it refuses, what it gives back."""

from __future__ import annotations

import errno
import inspect
import os
import pickle
import pydoc
import traceback
import typing
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast.cli.main import parse
from holdfast.cli.options import given
from holdfast.core import options
from holdfast.engine.source import OpenSource
from holdfast.engine.targets import folder as folder_target
from holdfast.errors import CannotHold, LimitExceeded, NotCommitted, Unsupported
from holdfast.extras.packages import package, tie
from holdfast.extras.pruning import prune
from holdfast.stores import platform
from holdfast.stores.local import LocalStore
from holdfast.verbs.shared.planned import Planned, Writing
from tests.support import public_names

W = np.arange(4096, dtype=np.float32).reshape(64, 64)
STATE = {"w": W, "v": W.copy()}

Verb = Callable[..., holdfast.Saved]
VERBS: dict[str, Verb] = {
    "save": lambda src, dst, **options: holdfast.save(src, dst, **{"overwrite": False, **options}),
    "convert": holdfast.convert,
    "copy": holdfast.copy,
    "edit": lambda src, dst, **options: holdfast.edit(src, dst, rename=[("w", "x")], **options),
    "prune": lambda src, dst, **options: holdfast.prune(src, dst, ["w: 2:4"], **options),
    "tie": holdfast.tie,
    "compact": holdfast.compact,
    "package": lambda src, dst, **options: holdfast.package({"m": src}, dst, **options),
    "replace_weights": lambda src, dst, **options: holdfast.replace_weights(
        src, dst, weights={"w": W + 1, "v": W}, **options
    ),
    "reshard": lambda src, dst, **options: holdfast.reshard(
        src, dst, mesh="tp=2", rules=["w: tp=0"], **options
    ),
}
SUFFIX = {"copy": ".pt", "package": ".pt2", "replace_weights": ".pt2", "reshard": ""}
IN_PLACE = ("edit", "tie", "compact", "replace_weights")

RECORDS: dict[str, type] = {
    "convert": options.ConvertOptions, "cp": options.CopyOptions, "edit": options.EditOptions,
    "prune": options.PruneOptions, "tie": options.InPlaceOptions, "compact": options.InPlaceOptions,
    "package": options.PackageOptions, "reshard": options.ReshardOptions,
}  # fmt: skip

SHARED = (
    "format",
    "overwrite",
    "durable",
    "read_back",
    "max_memory",
    "dry_run",
    "limits",
    "threads",
    "progress",
)
"""The last parameters of every verb, in this order."""


@pytest.fixture(params=VERBS)
def verb(request) -> str:
    return request.param


@pytest.fixture
def source(tmp_path, verb) -> Path:
    if verb == "replace_weights":
        holdfast.package({"m": STATE}, tmp_path / "in.pt2")
        return tmp_path / "in.pt2"
    holdfast.save(STATE, tmp_path / "in.pt")
    return tmp_path / "in.pt"


@pytest.fixture
def target(tmp_path, verb) -> Path:
    return tmp_path / f"out{SUFFIX.get(verb, '.safetensors')}"


def test_the_parameters(verb):
    parameters = inspect.signature(getattr(holdfast, verb)).parameters
    names = list(parameters)
    assert names[1] == "dst"
    # A reshard is a native directory, and other weights stay in their archive.
    shared = [
        name
        for name in SHARED
        if name != "format" or verb not in ("reshard", "replace_weights", "copy")
    ]
    assert names[-len(shared) :] == shared
    assert all(parameters[name].kind is inspect.Parameter.KEYWORD_ONLY for name in shared)
    assert parameters["overwrite"].default is (None if verb == "save" else False)
    assert parameters["durable"].default is True
    # What makes a checkpoint of a checkpoint reads back and keeps to a budget; what saves states does not.
    states = verb in ("save", "package")
    assert parameters["read_back"].default is not states
    assert parameters["max_memory"].default == (None if states else options.MAX_MEMORY)
    assert parameters["dry_run"].default is False
    assert ("in_place" in names) == (verb in IN_PLACE)


def test_the_result_and_a_dry_run(verb, source, target):
    told = VERBS[verb](source if verb != "save" else STATE, target, dry_run=True)
    assert not told.done
    assert not target.exists()
    done = VERBS[verb](source if verb != "save" else STATE, target)
    assert done.done
    assert type(told) is type(done)
    for result in (told, done):
        assert isinstance(result, holdfast.Saved)
        assert (result.path, result.format) == (str(target), done.format)
        assert result.nbytes == sum(nbytes for _, nbytes in result.files) == done.nbytes
        assert isinstance(result.notes, tuple)
        assert f"{done.nbytes:,} bytes in {len(done.files):,} file" in result.explain()
    folder = target if target.is_dir() else target.parent
    assert [(name, (folder / name).stat().st_size) for name, _ in done.files] == list(done.files)
    with holdfast.open(target) as found:
        assert found.format == done.format


def test_what_is_there_is_refused(verb, source, target):
    VERBS[verb](source if verb != "save" else STATE, target)
    before = {
        path: path.read_bytes() for path in sorted(target.parent.rglob("*")) if path.is_file()
    }
    with pytest.raises(NotCommitted, match="exists"):
        VERBS[verb](source if verb != "save" else STATE, target)
    assert {
        path: path.read_bytes() for path in sorted(target.parent.rglob("*")) if path.is_file()
    } == before
    assert VERBS[verb](source if verb != "save" else STATE, target, overwrite=True).done


def test_what_is_there_is_refused_before_the_source_is_read(verb, source, target, monkeypatch):
    def read(*rest, **more):
        raise AssertionError("it was read")

    monkeypatch.setattr(tie, "tie_state", read)
    monkeypatch.setattr(package, "tie_state", read)
    monkeypatch.setattr(prune.Pruning, "measure", read)
    monkeypatch.setattr(OpenSource, "read", read)
    monkeypatch.setattr(OpenSource, "arrays", read)
    more = {"save": {"format": "native"}, "convert": {"format": "native"}}.get(verb, {})
    more |= {"deduplicate": "content"} if verb == "package" else {}
    target.mkdir() if "format" in more or verb == "reshard" else target.write_bytes(b"something")
    with pytest.raises(NotCommitted, match="exists; pass overwrite=True"):
        VERBS[verb](source if verb != "save" else STATE, target, **more)
    with pytest.raises(NotCommitted, match="folder to save into"):
        VERBS[verb](
            source if verb != "save" else STATE, target.parent / "none" / target.name, **more
        )


def test_the_command_line_has_the_same_defaults(verb):
    if verb in ("save", "replace_weights"):
        pytest.skip("no command of its own")
    words = {"package": ["m=a.pt", "b.pt2"], "reshard": ["a.pt", "b", "--mesh", "tp=2"]}.get(
        verb, ["a.pt", "b.pt"]
    )
    parameters = inspect.signature(getattr(holdfast, verb)).parameters
    verb = "cp" if verb == "copy" else verb
    record = RECORDS[verb]

    def writing(namespace):
        return options.pick_fields(Writing, given(namespace, record))

    told = writing(parse([verb, *words]))
    for name in ("overwrite", "durable", "read_back", "max_memory", "dry_run", "threads"):
        assert getattr(told, name) == parameters[name].default, name
    other = writing(parse([verb, *words, "--no-read-back", "--max-memory", "200MiB"]))
    assert (other.read_back, other.max_memory) == (False, 200 << 20)
    assert writing(parse([verb, *words, "--read-back"])).read_back


def test_a_source_may_be_open_and_stays_so(verb, source, target):
    with holdfast.open(source) as opened:
        VERBS[verb](opened, target)
        assert np.array_equal(opened["w"].numpy(), W)
        assert holdfast.verify(opened).ok
        assert np.array_equal(opened["w"].numpy(), W)


def test_a_source_may_be_bytes(verb, source, target):
    if verb == "save":
        pytest.skip("its source is a state")
    assert VERBS[verb](source.read_bytes(), target).done


def test_no_room_is_found_before_anything_is_written(verb, source, target, monkeypatch):
    monkeypatch.setattr(platform, "count_free_nbytes", lambda path: 100)
    assert (
        "NOT ENOUGH"
        in VERBS[verb](source if verb != "save" else STATE, target, dry_run=True).explain()
    )
    with pytest.raises(NotCommitted, match="100 are free") as caught:
        VERBS[verb](source if verb != "save" else STATE, target)
    assert caught.value.errno == errno.ENOSPC
    assert os.listdir(target.parent) == [source.name]


def test_a_source_that_changes_is_not_published(verb, source, target, monkeypatch):
    if verb == "save":
        pytest.skip("a state in memory is no file")
    monkeypatch.setattr(LocalStore, "find_changed", lambda self: ("in.pt",))
    with pytest.raises(NotCommitted, match="changed while it was read"):
        VERBS[verb](source, target)
    assert os.listdir(target.parent) == [source.name]


def test_what_was_written_is_read_back(verb, source, target, monkeypatch):
    read: list[str] = []
    monkeypatch.setattr(
        folder_target, "check_written", lambda file, *rest, **more: read.append(file.key)
    )
    VERBS[verb](source if verb != "save" else STATE, target, read_back=True)
    assert read
    read.clear()
    VERBS[verb](source if verb != "save" else STATE, target, read_back=False, overwrite=True)
    assert not read


def test_a_budget_that_cannot_be_kept(verb, source, target):
    with pytest.raises(LimitExceeded, match="max_memory is too small"):
        VERBS[verb](source if verb != "save" else STATE, target, max_memory="1MiB")
    assert not target.exists()
    assert VERBS[verb](source if verb != "save" else STATE, target, max_memory="200MiB").done


@pytest.mark.parametrize("verb", IN_PLACE)
def test_nothing_is_written_in_place_unless_it_is_said(verb, source):
    before = source.read_bytes()
    with pytest.raises(Unsupported, match="say where to write"):
        VERBS[verb](source, None)
    with pytest.raises(Unsupported, match="exclude each other"):
        VERBS[verb](source, source.with_name("other.pt"), in_place=True)
    told = VERBS[verb](source, None, dry_run=True)
    assert (told.path, told.done, source.read_bytes()) == (str(source), False, before)
    with pytest.raises(Unsupported, match="no place"):
        VERBS[verb](before, None, in_place=True)
    done = VERBS[verb](source, None, in_place=True)
    assert (done.path, done.done) == (str(source), True)
    assert source.read_bytes() != before or verb == "compact"


@pytest.mark.parametrize("verb", ["edit"])
def test_what_cannot_be_planned_leaves_nothing_open(verb, source, target):
    count = len(os.listdir("/proc/self/fd"))
    with pytest.raises(CannotHold):
        holdfast.edit(source, target, drop=["nothing"])
    with pytest.raises(CannotHold):
        holdfast.prune(source, target, ["nothing: 0.5"])
    assert len(os.listdir("/proc/self/fd")) == count


# What is public.


PUBLIC = {
    name: value
    for name in public_names()
    if inspect.isclass(value := getattr(holdfast, name)) or inspect.isfunction(value)
}


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_is_found_by_who_looks_for_it(name):
    value = PUBLIC[name]
    assert pickle.loads(pickle.dumps(value)) is value
    assert f"{'class' if inspect.isclass(value) else 'def'} {name}" in inspect.getsource(value)
    assert name in pydoc.render_doc(value)
    if inspect.isfunction(value):
        assert value.__module__ == "holdfast"


def test_the_module_of_a_class_has_its_annotations():
    for kind in (holdfast.Alias, holdfast.LazyTensor, holdfast.Saved, holdfast.Limits):
        assert typing.get_type_hints(kind)


def test_errors_say_the_module_that_programs_catch_them_by():
    assert traceback.format_exception_only(holdfast.HoldfastError("x"))[0].startswith(
        "holdfast.errors.HoldfastError"
    )
    assert holdfast.metadata.Metadata.__module__ == "holdfast.metadata"


def test_what_the_command_line_can_do(tmp_path):
    path = tmp_path / "a.pt"
    holdfast.save(STATE | {"z": np.zeros((4, 4), np.float32)}, path)
    with holdfast.open(path) as opened:
        for src in (path, opened, path.read_bytes()):
            assert {
                row.name: row.zeros for row in holdfast.sparsity(src, "[wz]", max_memory="200MiB")
            } == {"w": 1, "z": 16}
            assert [
                row.maximum for row in holdfast.stats(src, "w", max_memory="200MiB", threads=2)
            ] == [4095.0]
            for report in (holdfast.sparsity(src), holdfast.stats(src)):
                assert (report.format, len(report), report[0].name) == ("torch-zip", 3, "w")
                assert tuple(report) == report.tensors
            graph = holdfast.alias_graph(src, by="content", max_memory="200MiB")
            assert [[member.name for member in group.members] for group in graph.groups] == [
                ["w", "v"]
            ]
            assert holdfast.verify(src, max_memory="200MiB").ok
            assert holdfast.diff(src, path, exact=True, max_memory="200MiB", threads=2).equal
    several = holdfast.alias_graph({"a": path, "b": STATE}, by="content")
    assert [str(member) for member in several.groups[0].members] == ["a:w", "a:v", "b:w", "b:v"]
    with pytest.raises(LimitExceeded):
        holdfast.verify(path, max_memory="1MiB")


def test_what_verify_read(tmp_path):
    holdfast.save(STATE, tmp_path / "a", format="safetensors", max_shard_size=20_000)
    report = holdfast.verify(tmp_path / "a")
    assert report.ok
    assert report.nbytes == sum(nbytes for _, nbytes in report.files)
    assert all((tmp_path / "a" / name).stat().st_size == nbytes for name, nbytes in report.files)
    holdfast.save(STATE, tmp_path / "b.pt")
    assert holdfast.verify(tmp_path / "b.pt").files == (
        ("b.pt", (tmp_path / "b.pt").stat().st_size),
    )


def test_metadata_is_a_mapping_and_nothing_else(tmp_path):
    holdfast.save(STATE, tmp_path / "a.safetensors", metadata={"licence": "mit"})
    with holdfast.open(tmp_path / "a.safetensors") as opened:
        assert opened.metadata["licence"] == "mit"
        assert not callable(opened.metadata)


# Masks and weights.


@pytest.mark.parametrize("format", ["native", "safetensors"])
def test_masks_are_published_with_the_weights_or_not_at_all(tmp_path, monkeypatch, format):
    holdfast.save(STATE, tmp_path / "a.pt")

    def prune(rule: str) -> holdfast.Pruned:
        return holdfast.prune(
            tmp_path / "a.pt",
            f"{tmp_path}/b/",
            [f"w: {rule}"],
            masks="beside",
            format=format,
            overwrite=True,
        )

    def content() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in (tmp_path / "b").iterdir()}

    def refuse(plan, check_replaced):
        raise NotCommitted("at the last moment")

    monkeypatch.setattr(Planned, "_check_before_publish", refuse)
    with pytest.raises(NotCommitted, match="last moment"):
        prune("0.5")
    assert os.listdir(tmp_path) == ["a.pt"]
    monkeypatch.undo()
    done = prune("0.5")
    assert done.masks == str(tmp_path / "b" / "masks.safetensors")
    first = content()
    assert "masks.safetensors" in first
    monkeypatch.setattr(Planned, "_check_before_publish", refuse)
    with pytest.raises(NotCommitted, match="last moment"):
        prune("0.25")
    assert content() == first
    monkeypatch.undo()
    prune("0.25")
    assert content()["masks.safetensors"] != first["masks.safetensors"]
    with (
        holdfast.open(tmp_path / "b") as weights,
        holdfast.open(tmp_path / "b" / "masks.safetensors") as masks,
    ):
        assert set(weights) == {"w", "v"}
        kept = np.unpackbits(masks["w.mask"].numpy(), count=W.size, bitorder="little").reshape(
            W.shape
        )
        assert np.array_equal(weights["w"].numpy(), W * kept)
    assert holdfast.verify(tmp_path / "b").ok
    # Without masks, those of before go with what they belonged to.
    holdfast.prune(tmp_path / "a.pt", f"{tmp_path}/b/", ["w: 0.5"], format=format, overwrite=True)
    assert "masks.safetensors" not in content()


def test_masks_have_no_place_beside_a_file(tmp_path):
    holdfast.save(STATE, tmp_path / "a.pt")
    with pytest.raises(CannotHold, match="give a directory"):
        holdfast.prune(tmp_path / "a.pt", tmp_path / "b.pt", ["w: 0.5"], masks="beside")
    assert os.listdir(tmp_path) == ["a.pt"]
