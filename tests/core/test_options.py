"""An option is defined once. The signature, `help()`, the flags and the reference follow."""

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
    """The options of `convert`, and one more."""

    loudness: int


options.OPTIONS["loudness"] = Option(3, "how loud it is written", check_count, metavar="N")


@validate_arguments
def write_loudly(src: str, dst: str, **options: Unpack[ToyOptions]) -> ToyOptions:
    """Write it loudly."""
    return options


def test_an_option_is_in_the_signature_and_in_the_help():
    parameters = inspect.signature(write_loudly).parameters
    assert parameters["loudness"].default == 3
    assert set(parameters) == {"src", "dst", *get_options(ToyOptions)}
    text = pydoc.plain(pydoc.render_doc(write_loudly))
    assert "loudness" in text
    assert "how loud it is written" in text


@pytest.mark.extras
def test_an_option_has_a_flag():
    verb = Parser(prog="toy")
    add_places(verb, ToyOptions)
    assert "--loudness N" in verb.format_help()
    arguments = verb.parse_args(["a", "b", "--loudness", "7", "--keep", "w"])
    values = given(arguments, ToyOptions)
    assert (values["loudness"], values["keep"], values["overwrite"]) == (7, ("w",), False)


def test_the_value_of_an_option_is_checked():
    assert write_loudly("a", "b", loudness=4)["loudness"] == 4
    with pytest.raises(TypeError, match=r"loudness= takes a whole number, not 'x'"):
        write_loudly("a", "b", loudness="x")


@pytest.mark.extras
def test_an_option_is_in_the_table_of_the_reference():
    path = ROOT / "tools" / "site" / "options.py"
    spec = importlib.util.spec_from_file_location("site_options", path)
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert "| `loudness` | `3` | how loud it is written |" in tool.table(ToyOptions)
    assert tool.record_of("Unpack[ConvertOptions]") is ConvertOptions


def test_an_option_set_can_have_an_entry_of_its_own():
    assert get_options(options.SaveOptions)["read_back"].default is False
    assert get_options(ConvertOptions)["read_back"].default is True


OPTION_SETS = {
    "convert": ConvertOptions, "edit": options.EditOptions, "cp": options.CopyOptions, "prune": options.PruneOptions,
    "tie": options.InPlaceOptions, "compact": options.InPlaceOptions, "package": options.PackageOptions,
    "reshard": options.ReshardOptions, "seal": options.SealOptions,
}  # fmt: skip


@pytest.mark.parametrize("verb", OPTION_SETS)
def test_a_command_has_a_flag_for_every_option_of_its_verb(verb):
    function = getattr(holdfast, "copy" if verb == "cp" else verb)
    parameters = inspect.signature(function).parameters
    actions = {action.dest: action for action in verbs_of(parser())[verb]._actions}
    for name, option in get_options(OPTION_SETS[verb]).items():
        assert name in parameters
        flag = option.get_flag(name)
        if flag:
            # An option may have two actions, and the dictionary has the last one: `--no-…`.
            flags = {flag, f"--no-{flag.removeprefix('--')}"}
            assert flags.intersection(actions[name].option_strings)


def test_edits_with_one_field_are_not_empty():
    assert Edits() == NO_EDITS
    for name, default in zip(Edits.__struct_fields__, Edits.__struct_defaults__, strict=True):
        assert Edits(**{name: ("a",) if default == () else True}) != NO_EDITS, name


def test_fields_are_picked_by_their_names():
    values = check_options(ConvertOptions, {"keep": "w", "tensors_only": 1, "drop": None})
    assert pick_fields(Edits, values) == Edits(keep=("w",), tensors_only=True)
    assert pick_fields(Edits, values, casts=(("*", None),)).casts == (("*", None),)


def test_the_traceback_of_a_failed_rank_has_only_frames_of_the_caller():
    @validate_arguments
    def fail(path: str) -> None:
        raise RanksFailed("rank 1 failed", causes={1: path}) from CannotHold("no", [])

    with pytest.raises(RanksFailed) as caught:
        fail("x")
    assert [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)] == [
        "test_the_traceback_of_a_failed_rank_has_only_frames_of_the_caller"
    ]
    assert isinstance(caught.value.__cause__, CannotHold)
