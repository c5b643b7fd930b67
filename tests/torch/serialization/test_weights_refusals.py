"""What a refused `weights_only` load says: torch's fragments, which programs and torch's own tests look for, in the right form."""

from __future__ import annotations

import io
import pickle
import re
import warnings

import pytest
import torch

from holdfast.errors import (
    Corrupted,
    HoldfastError,
    LimitExceeded,
    MetadataError,
    PickleError,
    Refused,
    StoreError,
    Truncated,
)
from holdfast.torch import versions
from holdfast.torch.serialization.refusals import forbidden, refusal
from tests.hostile.craft_pickle import (
    APPEND,
    BUILD,
    EMPTY_DICT,
    EMPTY_LIST,
    EMPTY_TUPLE,
    NEWOBJ,
    PERSID,
    REDUCE,
    SETITEM,
    call,
    integer,
    named,
    stream,
    text,
    tuple_of,
)
from tests.hostile.craft_torch import storage, tensor, torch_zip
from tests.support import needs, until
from tests.torch.serialization.zip_storages import load

ISSUE = (
    "Please file an issue with the following so that we can make `weights_only=True` compatible with your use case: "
    "WeightsUnpickler error: "
)


def refused(pickled: bytes, kind: type[Exception] = pickle.UnpicklingError, limits=None) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(kind) as caught:
            load(torch_zip(pickled), limits=limits)
    assert isinstance(caught.value, HoldfastError)
    assert isinstance(caught.value, pickle.UnpicklingError)
    said = str(caught.value)
    assert said.startswith("Weights only load failed.")
    return said


def torch_says(pickled: bytes) -> str:
    with pytest.raises(pickle.UnpicklingError) as caught:
        torch.load(io.BytesIO(torch_zip(pickled)), weights_only=True)
    return str(caught.value)


# Names that are not allowed.


@pytest.mark.parametrize(
    ("module", "name", "shown"),
    [
        ("my.module", "Thing", "my.module.Thing"),
        ("__main__", "Point", "__main__.Point"),
        ("__builtin__", "print", "print"),
        ("builtins", "eval", "eval"),
        ("__builtin__", "xrange", "range"),
        ("copy_reg", "_reconstructor", "copyreg._reconstructor"),
        ("os.path", "join", "os.path.join"),
    ],
)
def test_how_to_allow(module, name, shown):
    pickled = stream(named(module, name))
    said = refused(pickled)
    assert f"Unsupported global: GLOBAL {shown} was not an allowed global by default." in said
    add, manager = (
        re.escape(f"`torch.serialization.{each}([{shown}])`")
        for each in ("add_safe_globals", "safe_globals")
    )
    advice = f"use {add} or the {manager} .* to allowlist"
    assert re.search(advice, said)
    assert "`weights_only=False`" in said
    assert "only if you trust the source" in said
    assert ISSUE not in said
    theirs = torch_says(pickled)
    assert re.search(advice, theirs)
    assert f"Unsupported global: GLOBAL {shown} was not an allowed global by default." in theirs


@pytest.mark.parametrize(
    ("module", "name", "full"),
    [
        ("os", "system", "os.system"),
        ("posix", "execv", "posix.execv"),
        ("nt", "system", "nt.system"),
        ("sys", "exit", "sys.exit"),
        ("__builtin__", "intern", "sys.intern"),
    ],
)
def test_blocked(module, name, full):
    pickled = stream(call(module, name))
    fragment = f"Trying to load unsupported GLOBAL {full} whose module {full.partition('.')[0]} is blocked."
    assert fragment in refused(pickled)
    assert fragment in torch_says(pickled)


@pytest.mark.parametrize(
    ("full", "fragment"),
    [
        pytest.param(
            "torch._dynamo.decorators._DimRange",
            "``torch.nested`` and ``torch._dynamo`` must be imported to load nested jagged tensors (NJTs)",
            marks=until(versions.NESTED_ASKED_FOR),
        ),
        (
            "torch.distributed.tensor.DTensor",
            "``torch.distributed.tensor`` must be imported to load DTensors",
        ),
        (
            "torch.distributed.tensor.placement_types.Shard",
            "``torch.distributed.tensor`` must be imported to load DTensors",
        ),
        (
            "torch.distributed.device_mesh.DeviceMesh",
            "``torch.distributed.tensor`` must be imported to load DTensors",
        ),
    ],
)
def test_must_be_imported(full, fragment):
    module, _, name = full.rpartition(".")
    said = str(refusal(forbidden(module, name, blocked=False), protocol=2))
    assert said.startswith(f"Weights only load failed. {fragment}")
    assert "add_safe_globals" not in said
    assert ISSUE + fragment in str(refusal(forbidden(module, name, blocked=False), protocol=4))


def test_names_are_escaped():
    said = refused(stream(named("a\x1b[31m", "b\u202e")))
    assert "\x1b" not in said
    assert "\u202e" not in said
    assert r"a\x1b[31m.b\u202e" in said


# What is wrong with the pickle itself.


@pytest.mark.parametrize(
    ("body", "fragment"),
    [
        (text("x") + tuple_of() + REDUCE, "Trying to call reduce for unrecognized function"),
        (
            named("torch", "float32") + tuple_of() + REDUCE,
            "Trying to call reduce for unrecognized function",
        ),
        (EMPTY_DICT + text("x") + APPEND, "Can only append to lists, but got"),
        pytest.param(
            EMPTY_LIST + text("x") + text("y") + SETITEM,
            "Can only SETITEM for dict, collections.OrderedDict, collections.Counter, but got",
            marks=needs(versions.SETITEM_REFUSED),
        ),
        (
            integer(1) + EMPTY_DICT + BUILD,
            "Can only build Tensor, Parameter, OrderedDict or types allowlisted via `add_safe_globals`, but got",
        ),
        (
            integer(1) + EMPTY_TUPLE + NEWOBJ,
            "Can only create new object for nn.Parameter or classes allowlisted via `add_safe_globals` but got",
        ),
    ],
    ids=["reduce", "reduce-dtype", "append", "setitem", "build", "newobj"],
)
def test_the_generic_form(body, fragment):
    said = refused(stream(body))
    assert ISSUE + fragment in said
    assert "add_safe_globals([" not in said
    if "float32" not in str(body):
        assert fragment in torch_says(stream(body))


@pytest.mark.parametrize("protocol", [3, 4, 5])
@pytest.mark.parametrize(
    "body",
    [
        named("my.module", "Thing"),
        call("os", "system"),
        tensor(storage(), (9, 9), (9, 1)),
        b"0",
        text("x") + PERSID,
        b"(" * 100,
    ],
    ids=["global", "blocked", "metadata", "stack", "pid", "marks"],
)
def test_another_protocol_always_gets_the_generic_form(protocol, body):
    assert ISSUE in refused(stream(body, protocol=protocol))


def test_the_generic_form_still_says_how_to_allow():
    said = refused(stream(named("my.module", "Thing"), protocol=4))
    assert re.search(
        r"use `torch.serialization.add_safe_globals\(\[my.module.Thing\]\)` or .* to allowlist",
        said,
    )


def test_a_protocol_that_does_not_exist():
    assert "protocol 9" in refused(b"\x80\x09}.")


# The kinds of error.


@pytest.mark.parametrize(
    ("pickled", "kinds"),
    [
        (stream(tensor(storage(), (9, 9), (9, 1))), (MetadataError, RuntimeError, ValueError)),
        (stream(b"(" * 100), (LimitExceeded, ValueError)),
        (b"\x80\x02}", (Truncated, EOFError)),
        (stream(named("a", "b")), (PickleError, ValueError)),
    ],
    ids=["metadata", "limit", "end", "name"],
)
def test_an_error_is_still_what_it_was(pickled, kinds):
    for kind in kinds:
        said = refused(pickled, kind)
    assert ISSUE not in said or kinds[0] is PickleError


def test_a_lie_comes_without_advice():
    said = refused(stream(tensor(storage(), (9, 9), (9, 1))))
    assert "weights_only" not in said
    assert "reaches element" in said


def test_where_it_was():
    with pytest.raises(PickleError) as caught:
        load(torch_zip(stream(b"N0", named("a", "b"))))
    assert caught.value.offset == 4


@pytest.mark.parametrize(
    "error",
    [
        StoreError("gone"),
        Corrupted("crc"),
        Refused("no such device"),
        KeyError("user"),
        OSError("disk"),
    ],
    ids=repr,
)
def test_what_the_stream_is_not_to_blame_for_stays(error):
    assert refusal(error, protocol=2) is error
    assert refusal(error, protocol=4) is error


def test_unpickling_errors_of_others():
    made = refusal(pickle.UnpicklingError("from the user"), protocol=2)
    assert isinstance(made, PickleError)
    assert ISSUE + "from the user" in str(made)
