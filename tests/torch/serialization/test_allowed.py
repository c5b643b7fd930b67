"""The user's allowlist, and what a checkpoint asks for beyond it; held against torch's answers."""

from __future__ import annotations

import _compat_pickle
import collections
import io
import os
import pickle
import pickletools
import sys
import threading
import zipfile

import pytest
import torch
import torch.serialization as theirs

from holdfast.errors import Corrupted, FormatError, PickleError, Truncated, ZipError
from holdfast.torch.serialization import allowed as ours
from holdfast.torch.serialization.allowed import python3_name
from tests.support import torch_bytes


class First:
    class Inner:
        pass


class Second:
    pass


def function():
    pass


@pytest.fixture(autouse=True)
def lists():
    """Ours empty, torch's as its import left it."""
    before = theirs.get_safe_globals()
    ours.clear_safe_globals()
    yield
    ours.clear_safe_globals()
    theirs.clear_safe_globals()
    theirs.add_safe_globals(before)


def mine() -> dict[str, object]:
    """The user's names without those that torch registers for itself."""
    return {
        name: found for name, found in ours.user_globals().items() if not name.startswith("torch.")
    }


# The list.


@pytest.mark.parametrize(
    "items",
    [
        [First],
        (First,),
        {First},
        [First, Second],
        [First.Inner],
        [len],
        [function],
        [(First, "other.name")],
        [(torch.float32, "a.b")],
    ],
)
def test_names_are_those_of_torch(items):
    theirs.clear_safe_globals()
    ours.add_safe_globals(items)
    found = ours.user_globals()
    ours.clear_safe_globals()
    assert ours.user_globals() == {}
    theirs.add_safe_globals(items)
    assert found == ours.user_globals() == torch._weights_only_unpickler._get_user_allowed_globals()


@pytest.mark.parametrize(
    ("item", "kind", "message"),
    [
        ((First,), ValueError, "Expected tuple of length 2.* but got tuple of length: 1"),
        (
            (First, "a.b", "c"),
            ValueError,
            "Expected tuple of length 2.* but got tuple of length: 3",
        ),
        ((First, 1), TypeError, "Expected second item in tuple to be str.* but got: <class 'int'>"),
        (
            ("a.b", First),
            TypeError,
            "Expected second item in tuple to be str.* but got: <class 'type'>",
        ),
        ("a.b", AttributeError, "has no attribute '__module__'"),
        (1, AttributeError, "has no attribute '__module__'"),
        (torch.float32, AttributeError, "'__qualname__'"),
        (First(), AttributeError, "'__qualname__'"),
    ],
)
def test_what_is_no_item(item, kind, message):
    with pytest.raises(kind, match=message):
        ours.add_safe_globals([Second, item])
    with pytest.raises(kind, match=message):
        ours.safe_globals([item])
    assert ours.get_safe_globals() == []
    theirs.clear_safe_globals()
    theirs.add_safe_globals([item])
    with pytest.raises(kind, match=message):
        torch._weights_only_unpickler._get_user_allowed_globals()


@pytest.mark.parametrize("items", [First, None, 3])
def test_what_is_no_list(items):
    for function in (ours.add_safe_globals, theirs.add_safe_globals):
        with pytest.raises(TypeError, match="not iterable"):
            function(items)


def test_get_gives_each_item_once_and_a_list_of_its_own():
    ours.add_safe_globals([Second, First])
    ours.add_safe_globals([First, (First, "other.name"), (First, "other.name")])
    assert ours.get_safe_globals() == [Second, First, (First, "other.name")]
    ours.get_safe_globals().append(function)
    assert ours.get_safe_globals() == [Second, First, (First, "other.name")]
    assert mine() == {f"{__name__}.First": First, f"{__name__}.Second": Second, "other.name": First}


def test_the_list_is_not_torchs():
    before = theirs.get_safe_globals()
    ours.add_safe_globals([First])
    assert theirs.get_safe_globals() == before
    theirs.add_safe_globals([Second])
    assert ours.get_safe_globals() == [First]
    assert mine() == {f"{__name__}.First": First, f"{__name__}.Second": Second}
    ours.clear_safe_globals()
    assert mine() == {f"{__name__}.Second": Second}


def test_ours_wins_over_torchs():
    theirs.add_safe_globals([(First, "some.name")])
    ours.add_safe_globals([(Second, "some.name")])
    assert mine() == {"some.name": Second}


def test_torchs_list_is_seen_after_its_function_was_replaced(monkeypatch):
    theirs.add_safe_globals([First])
    monkeypatch.setattr(theirs, "get_safe_globals", ours.get_safe_globals)
    assert mine() == {f"{__name__}.First": First}


def test_blocks_nest_and_restore():
    ours.add_safe_globals([First])
    block = ours.safe_globals([First, Second])
    with block:
        assert ours.get_safe_globals() == [First, Second]
        with ours.safe_globals([function]), block:
            ours.add_safe_globals([len])
            assert ours.get_safe_globals() == [First, Second, function, len]
        assert ours.get_safe_globals() == [First, Second, len]
    assert ours.get_safe_globals() == [First, len]  # torch: [len]
    with pytest.raises(KeyError), ours.safe_globals([Second]):
        raise KeyError
    assert ours.get_safe_globals() == [First, len]


def test_a_block_that_was_cleared_inside():
    with ours.safe_globals([First]):
        ours.clear_safe_globals()
        assert ours.get_safe_globals() == []
        ours.add_safe_globals([First])
    assert ours.get_safe_globals() == [First]


def test_blocks_overlap_in_threads():
    entered, leave = threading.Event(), threading.Event()

    def other():
        with ours.safe_globals([First]):
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with ours.safe_globals([First]):
        thread.start()
        assert entered.wait(10)
    assert ours.get_safe_globals() == [First]
    leave.set()
    thread.join()
    assert ours.get_safe_globals() == []


# What a file asks for.


def crafted(stream: bytes) -> io.BytesIO:
    """A checkpoint around a pickle."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", stream)
        archive.writestr("archive/version", "3\n")
    file.seek(0)
    return file


def named(*names: tuple[str, str], protocol: int = 2) -> io.BytesIO:
    """A checkpoint of a tuple of globals."""
    globals_ = b"".join(f"c{module}\n{name}\n".encode() for module, name in names)
    return crafted(b"\x80" + bytes([protocol]) + b"(" + globals_ + b"t.")


MIXED = {
    "weights": torch.ones(3),
    "parameter": torch.nn.Parameter(torch.ones(1)),
    "sparse": torch.eye(2).to_sparse(),
    "meta": torch.empty(2, device="meta"),
    "object": First(),
    "inner": First.Inner,
    "plain": [{1, 2}, frozenset([1]), range(3), 1j, 1 << 70, 1.5, None],
    "ordered": collections.OrderedDict(a=1),
    "factory": collections.defaultdict(list),
    "error": ValueError("x"),
    "function": print,
    "system": os.system,
    "text": ["ä", ""],
    "dtype": torch.float32,
    "module": torch.nn.Linear(1, 1),
}


@pytest.mark.parametrize("protocol", [2, 3])
def test_the_answer_is_torchs(protocol):
    # torch knows no opcode for bytes of protocol 3.
    file = io.BytesIO(
        torch_bytes(
            MIXED if protocol == 3 else {**MIXED, "bytes": [b"bytes", bytearray(b"x")]},
            pickle_protocol=protocol,
        )
    )
    found = ours.get_unsafe_globals_in_checkpoint(file)
    assert {
        f"{__name__}.First",
        "posix.system",
        "builtins.print",
        "torch.nn.modules.linear.Linear",
    } <= set(found)
    assert len(set(found)) == len(found)
    file.seek(0)
    assert sorted(found) == sorted(theirs.get_unsafe_globals_in_checkpoint(file))


@pytest.mark.parametrize("protocol", [4, 5])
def test_newer_protocols_are_read(protocol):
    file = io.BytesIO(
        torch_bytes({"a": First(), "b": os.system, "c": torch.ones(2)}, pickle_protocol=protocol)
    )
    assert ours.get_unsafe_globals_in_checkpoint(file) == [f"{__name__}.First", "posix.system"]
    file.seek(0)
    with pytest.raises(pickle.UnpicklingError):
        theirs.get_unsafe_globals_in_checkpoint(file)


def test_the_order_is_that_of_the_file():
    file = named(("zoo", "z"), ("bar", "b"), ("foo", "f"), ("bar", "b"))
    assert ours.get_unsafe_globals_in_checkpoint(file) == ["zoo.z", "bar.b", "foo.f"]


@pytest.mark.parametrize("protocol", [2, 3])
def test_old_names_are_renamed_as_in_torch(protocol):
    """All that Python itself would rename, and more."""
    names = [
        *_compat_pickle.NAME_MAPPING,
        *((module, "thing") for module in _compat_pickle.IMPORT_MAPPING),
    ]
    names += [
        ("__builtin__", "thing"),
        ("exceptions", "KeyError"),
        ("builtins", "xrange"),
        ("os.path", "join"),
    ]
    names += [("_pickle", "loads"), ("Foo", "bar")]
    file = named(*names, protocol=protocol)
    found = set(ours.get_unsafe_globals_in_checkpoint(file))
    file.seek(0)
    assert found == set(theirs.get_unsafe_globals_in_checkpoint(file))
    assert found <= {".".join(python3_name(*name)) for name in names}
    assert {"builtins.range", "builtins.thing", "exceptions.KeyError"} <= found


def test_what_the_user_allowed_is_left_out():
    file = io.BytesIO(torch_bytes([First(), Second(), function]))
    names = [f"{__name__}.First", f"{__name__}.Second", f"{__name__}.function"]
    assert ours.get_unsafe_globals_in_checkpoint(file) == names
    theirs.add_safe_globals([Second])
    with ours.safe_globals([First]):
        assert ours.get_unsafe_globals_in_checkpoint(file) == names[2:]
    assert ours.get_unsafe_globals_in_checkpoint(file) == [names[0], names[2]]


def test_a_blocked_module_is_never_allowed():
    ours.add_safe_globals(
        [(os.system, "os.system"), (os.system, "posix.system"), (sys.intern, "sys.intern")]
    )
    file = named(("os", "system"), ("posix", "system"), ("__builtin__", "intern"))
    assert ours.get_unsafe_globals_in_checkpoint(file) == [
        "os.system",
        "posix.system",
        "sys.intern",
    ]


def test_what_torch_does_not_allow_is_not_allowed(monkeypatch):
    file = io.BytesIO(torch_bytes(torch.ones(2)))
    assert ours.get_unsafe_globals_in_checkpoint(file) == []
    torchs = torch._weights_only_unpickler._get_allowed_globals()
    fewer = {
        name: found for name, found in torchs.items() if name != "torch._utils._rebuild_tensor_v2"
    }
    monkeypatch.setattr(torch._weights_only_unpickler, "_get_allowed_globals", lambda: fewer)
    assert ours.get_unsafe_globals_in_checkpoint(file) == ["torch._utils._rebuild_tensor_v2"]
    monkeypatch.delattr(torch._weights_only_unpickler, "_get_allowed_globals")
    assert ours.get_unsafe_globals_in_checkpoint(file) == []


def test_nothing_is_built():
    stream = pickle.dumps([Trap(), {Trap(): 1}], 2)
    assert any(op.name == "REDUCE" for op, _, _ in pickletools.genops(stream))
    Trap.sprung = False
    assert ours.get_unsafe_globals_in_checkpoint(crafted(stream)) == [f"{__name__}.spring"]
    assert not Trap.sprung
    pickle.loads(stream)
    assert Trap.sprung


class Trap:
    sprung = False

    def __reduce__(self):
        return spring, (1,)


def spring(number):
    Trap.sprung = True
    return number


@pytest.mark.parametrize(
    "stream",
    [
        b"\x80\x02cfoo\nbar\n(K\x01K\x02tR}X\x01\x00\x00\x00aK\x01sb.",  # a call, then its state
        b"\x80\x02cfoo\nbar\n)\x81(K\x01e.",  # an object, then its elements
        b"\x80\x02cfoo\nbar\n)R(K\x01K\x02uQ.",  # a call, its entries, and all of it as a persistent id
        b"\x80\x02cfoo\nbar\n)RK\x01a.",  # one element
        b"\x80\x02}cfoo\nbar\nK\x01s.",  # a key
        b"(ifoo\nbar\n.",  # INST
        b"(cfoo\nbar\nK\x01o.",  # OBJ
        b"\x80\x04\x8c\x03foo\x8c\x03bar\x93)}\x92.",  # NEWOBJ_EX
        b"\x80\x04\x8c\x03foo\x8c\x03bar\x93)R(K\x01\x90.",  # ADDITEMS
        b"\x80\x02cfoo\nbar\n0N.",  # thrown away
    ],
)
def test_whatever_is_done_with_a_global_it_is_found(stream):
    assert ours.get_unsafe_globals_in_checkpoint(crafted(stream)) == ["foo.bar"]


def test_an_inner_class_is_found_by_what_it_is_computed_with():
    # Protocol 2 writes getattr(First, 'Inner'), protocol 4 the dotted name.
    assert ours.get_unsafe_globals_in_checkpoint(io.BytesIO(torch_bytes(First.Inner))) == [
        "builtins.getattr",
        f"{__name__}.First",
    ]
    assert ours.get_unsafe_globals_in_checkpoint(
        io.BytesIO(torch_bytes(First.Inner, pickle_protocol=4))
    ) == [f"{__name__}.First.Inner"]


# Files.


def test_paths_and_file_objects(tmp_path):
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(torch_bytes(First()))
    expected = [f"{__name__}.First"]
    assert ours.get_unsafe_globals_in_checkpoint(path) == expected
    assert ours.get_unsafe_globals_in_checkpoint(str(path)) == expected
    with path.open("rb") as file:
        assert ours.get_unsafe_globals_in_checkpoint(file) == expected
        assert file.tell() == 0


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_file_object_is_read_from_where_it_stands_and_stays_there(wrapped):
    file = io.BytesIO(b"x" * 37 + torch_bytes(First()))
    if wrapped:
        file = io.BufferedReader(file)
    file.seek(37)
    assert ours.get_unsafe_globals_in_checkpoint(file) == [f"{__name__}.First"]
    assert file.tell() == 37  # torch leaves it somewhere inside
    assert theirs.get_unsafe_globals_in_checkpoint(file) == [f"{__name__}.First"]
    file.seek(0)
    for function in (
        ours.get_unsafe_globals_in_checkpoint,
        theirs.get_unsafe_globals_in_checkpoint,
    ):
        with pytest.raises(
            ValueError, match=r"Expected input to be a checkpoint returned by torch.save"
        ):
            function(file)
    assert file.tell() == 0


def test_what_is_no_zip_checkpoint(tmp_path):
    legacy = io.BytesIO(torch_bytes(First(), zipped=False))
    script = io.BytesIO()
    torch.jit.save(torch.jit.script(torch.nn.Linear(1, 1)), script)
    for content, message in [
        (legacy.getvalue(), "Expected input to be a checkpoint returned by torch.save"),
        (b"", "Expected input to be a checkpoint returned by torch.save"),
        (
            script.getvalue(),
            "Expected input to be a checkpoint returned by torch.save but got a torchscript checkpoint",
        ),
    ]:
        for function in (
            ours.get_unsafe_globals_in_checkpoint,
            theirs.get_unsafe_globals_in_checkpoint,
        ):
            with pytest.raises(ValueError, match=message):
                function(io.BytesIO(content))
        path = tmp_path / "file.pt"
        path.write_bytes(content)
        with pytest.raises(FormatError, match=message) as caught:
            ours.get_unsafe_globals_in_checkpoint(path)
        assert caught.value.file == str(path)


def test_another_zip():
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("folder/other", b"x")
    file.seek(0)
    with pytest.raises(FormatError, match="Expected input to be a checkpoint"):
        ours.get_unsafe_globals_in_checkpoint(file)


def test_damage_is_told():
    content = torch_bytes(First())
    with pytest.raises((Truncated, ZipError)):
        ours.get_unsafe_globals_in_checkpoint(io.BytesIO(content[:-40]))
    damaged = content.replace(b"test_allowed", b"test_allowem")
    assert damaged != content
    with pytest.raises(Corrupted):
        ours.get_unsafe_globals_in_checkpoint(io.BytesIO(damaged))
    for stream in (b"\x80\x02cfoo\nbar\n", b"not a pickle", b"\x80\x02cfoo\nbar\n.cfoo\nbaz\n."):
        with pytest.raises((PickleError, Truncated)):
            ours.get_unsafe_globals_in_checkpoint(crafted(stream))


@pytest.mark.parametrize("path", ["/nowhere/at.all", "/tmp"])
def test_a_path_that_cannot_be_opened(path):
    kinds = set()
    for function in (
        ours.get_unsafe_globals_in_checkpoint,
        theirs.get_unsafe_globals_in_checkpoint,
    ):
        with pytest.raises(OSError) as caught:
            function(path)
        kinds.add(type(caught.value))
    assert len(kinds) == 1


@pytest.mark.parametrize("what", [None, 3, b"PK\3\4"])
def test_what_is_no_file(what):
    for function in (
        ours.get_unsafe_globals_in_checkpoint,
        theirs.get_unsafe_globals_in_checkpoint,
    ):
        with pytest.raises(
            AttributeError, match=r"You can only torch.load from a file that is seekable"
        ):
            function(what)
