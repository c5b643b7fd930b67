"""An option stands in one record; the signature, `help()`, the flags and the reference have it from there."""

from __future__ import annotations

import importlib.util
import inspect
import pydoc
import traceback
from typing import Unpack

import pytest
from tests.pages import ROOT

import holdfast
from holdfast.cli.main import parser
from holdfast.cli.options import given
from holdfast.cli.parser import Parser, verbs_of
from holdfast.cli.planned import add_places
from holdfast.core import options
from holdfast.core.arguments import check_count
from holdfast.core.options import (
    ConvertOptions,
    Option,
    check_options,
    get_options,
    pick_fields,
    validate_arguments,
)
from holdfast.errors import CannotHold, RanksFailed
from holdfast.verbs.shared.transform import NO_EDITS, Edits


class ToyOptions(ConvertOptions, total=False):
    """What `convert` takes, and one more."""

    loudness: int


options.OPTIONS["loudness"] = Option(3, "how loud it is written", check_count, metavar="N")


@validate_arguments
def write_loudly(src: str, dst: str, **options: Unpack[ToyOptions]) -> ToyOptions:
    """Write it loudly."""
    return options


@pytest.mark.extras
def test_one_line_is_an_option_everywhere(capsys):
    parameters = inspect.signature(write_loudly).parameters
    assert parameters["loudness"].default == 3
    assert set(parameters) == {"src", "dst", *get_options(ToyOptions)}
    assert "loudness" in (said := pydoc.plain(pydoc.render_doc(write_loudly)))
    assert "how loud it is written" in said
    verb = Parser(prog="toy")
    add_places(verb, ToyOptions)
    assert "--loudness N" in verb.format_help()
    found = given(verb.parse_args(["a", "b", "--loudness", "7", "--keep", "w"]), ToyOptions)
    assert (found["loudness"], found["keep"], found["overwrite"]) == (7, ("w",), False)
    assert write_loudly("a", "b", loudness=4)["loudness"] == 4
    with pytest.raises(TypeError, match=r"loudness= takes a whole number, not 'x'"):
        write_loudly("a", "b", loudness="x")
    spec = importlib.util.spec_from_file_location(
        "site_options", ROOT / "tools" / "site" / "options.py"
    )
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert "| `loudness` | `3` | how loud it is written |" in tool.table(ToyOptions)
    assert tool.record_of("Unpack[ConvertOptions]") is ConvertOptions


RECORDS = {
    "convert": ConvertOptions, "edit": options.EditOptions, "cp": options.CopyOptions, "prune": options.PruneOptions,
    "tie": options.InPlaceOptions, "compact": options.InPlaceOptions, "package": options.PackageOptions,
    "reshard": options.ReshardOptions, "seal": options.SealOptions,
}  # fmt: skip


@pytest.mark.parametrize("verb", RECORDS)
def test_a_command_has_a_flag_for_every_option_of_its_verb(verb):
    function = getattr(holdfast, "copy" if verb == "cp" else verb)
    known = {action.dest: action for action in verbs_of(parser())[verb]._actions}
    for name, option in get_options(RECORDS[verb]).items():
        assert name in inspect.signature(function).parameters
        if option.get_flag(name):
            assert (
                option.get_flag(name) in known[name].option_strings
                or f"--no-{name.replace('_', '-')}" in known[name].option_strings
            )


def test_every_edit_counts():
    """None is forgotten: a record with one field that is set is not the empty one."""
    assert Edits() == NO_EDITS
    for name, default in zip(Edits.__struct_fields__, Edits.__struct_defaults__, strict=True):
        assert Edits(**{name: ("a",) if default == () else True}) != NO_EDITS, name


def test_a_record_is_filled_by_the_names_of_its_fields():
    found = check_options(ConvertOptions, {"keep": "w", "tensors_only": 1, "drop": None})
    assert pick_fields(Edits, found) == Edits(keep=("w",), tensors_only=True)
    assert pick_fields(Edits, found, casts=(("*", None),)).casts == (("*", None),)


def test_the_traceback_of_a_failed_rank_has_the_frames_of_the_caller_alone():
    @validate_arguments
    def fail(path: str) -> None:
        raise RanksFailed("rank 1 failed", causes={1: path}) from CannotHold("no", [])

    with pytest.raises(RanksFailed) as caught:
        fail("x")
    assert [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)] == [
        "test_the_traceback_of_a_failed_rank_has_the_frames_of_the_caller_alone"
    ]
    assert isinstance(caught.value.__cause__, CannotHold)
