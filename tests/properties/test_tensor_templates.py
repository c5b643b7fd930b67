"""Tensors that are taken by their bytes against the machine alone, its oracle: the same objects, counts and errors, always.

Many are taken at once, and one or two at a time. Writers number the first 256 entries of a memo in one byte: small pickles are
looked at as they are, and with every entry in the long form (`stretched`).
"""

import contextlib
import io
import pickletools
import re
import struct
import warnings
import zipfile
from collections import OrderedDict
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast
import holdfast.torch
from holdfast.core.limits import Limits
from holdfast.core.tensor import LazyTensor
from holdfast.errors import HoldfastError
from holdfast.formats.pickle import machine, tensor_templates
from tests.formats.zip.craft import Item, build
from tests.hostile import golden
from tests.hostile.cases import CLASSES
from tests.hostile.mutate import apply
from tests.hostile.test_fuzz import CHECKED, edits
from tests.sampling import examples

ATTACKS = ["pickle calls", "pickle resources", "tensor metadata"]
LONG = 64 << 10

ZIPS = [name for name in CHECKED if name.endswith(".pt")]


def alone():
    """The machine by itself."""
    return mock.patch.object(tensor_templates.TensorTemplates, "take", return_value=0)


@pytest.fixture(autouse=True, scope="module")
def from_the_first():
    """Kinds are learned from the first tensor on, however few there are."""
    with mock.patch.object(tensor_templates, "MACHINE_TENSORS", 0):
        yield


def at_most(count: int):
    """So many tensors at a time."""
    return mock.patch.object(tensor_templates, "MOST_TENSORS", count)


def stretched(pickled: bytes) -> bytes:
    """The same pickle with every memo entry in the long form; itself where it cannot be read or counts its bytes."""
    parts = []
    try:
        found = list(pickletools.genops(pickled))
    except Exception:  # whatever is wrong with it is for others to say
        return pickled
    ends = [at for _, _, at in found[1:]] + [len(pickled)]
    for (opcode, number, at), end in zip(found, ends, strict=True):
        if opcode.name == "FRAME":
            return pickled
        parts.append(
            b"r" + struct.pack("<I", number) if opcode.name == "BINPUT" else pickled[at:end]
        )
    return b"".join(parts)


def records(raw: bytes) -> list[Item]:
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        return [Item(info.filename, archive.read(info)) for info in archive.infolist()]


def with_pickle(raw: bytes, change) -> bytes:
    """A zip whose pickle was changed, with true checksums."""
    return build(
        [
            Item(one.name, change(one.content) if one.name.endswith("data.pkl") else one.content)
            for one in records(raw)
        ]
    )


def outcome(raw: bytes, limits: Limits | None = None):
    """All that an opening shows, or says; with the number of opcodes of each pickle."""
    counts = []
    interpret = machine.interpret

    def counted(*args, **kwargs):
        found = interpret(*args, **kwargs)
        counts.append((found.opcodes, found.stop, found.foreign))
        return found

    with mock.patch.object(machine, "interpret", counted):
        try:
            with holdfast.open(raw, limits=limits) as ckpt:
                aliases = [(alias.names, alias.storage.start) for alias in ckpt.aliases]
                traits = [repr(tensor.traits) for tensor in ckpt.values()]
                return counts, golden._found(ckpt), ckpt.notes, aliases, traits, _read(ckpt)
        except HoldfastError as error:
            return (
                counts,
                type(error),
                str(error),
                error.tensor,
                error.offset,
                error.expected,
                error.found,
            )


def _read(ckpt):
    try:
        return {
            name: (array.dtype, array.shape, array.tobytes()) for name, array in ckpt.read().items()
        }
    except HoldfastError as error:
        return type(error), str(error), error.tensor, error.offset


def loaded(raw: bytes, map_location: str | None = None):
    """The same of `holdfast.torch.load`."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            value = holdfast.torch.load(io.BytesIO(raw), map_location=map_location)
        except Exception as error:  # torch's, Holdfast's, Python's: the same one
            return type(error), str(error), _told(said)
    return _shown(value, {}, 0), _told(said)


def _told(said):
    """Warnings, but for those of torch itself, which come once a process."""
    return [text for one in said if "Triggered internally" not in (text := str(one.message))]


def _shown(value, seen, depth):
    """A loaded object as plain values: tensors by their bits, strides and storages, containers by their members and identity."""
    if (
        isinstance(value, torch.Tensor)
        and value.layout is torch.strided
        and not value.is_quantized
        and not value.is_nested
    ):
        storage = value.untyped_storage()
        place = seen.setdefault(("storage", storage._cdata), len(seen))
        flags = (
            value.requires_grad,
            value.is_conj(),
            value.is_neg(),
            type(value),
            value.is_leaf,
            storage.resizable(),
        )
        content = bytes(storage.tolist()) if value.device.type == "cpu" else b""
        number = seen.setdefault(id(value), len(seen))
        return (
            number,
            value.dtype,
            value.shape,
            value.stride(),
            value.storage_offset(),
            place,
            flags,
            content,
            storage.nbytes(),
        )
    if isinstance(value, torch.storage.TypedStorage):
        return type(value), value.dtype, value.nbytes()
    if not isinstance(value, dict | list | tuple):
        # torch counts the jagged dimensions of a process.
        return type(value), re.sub(r"\bj\d+", "j", repr(value)[:1000])
    if id(value) in seen or depth > 50:
        return seen.get(id(value))
    seen[id(value)] = len(seen)
    inner = [*value, *value.values()] if isinstance(value, dict) else value
    return type(value), [_shown(one, seen, depth + 1) for one in inner]


def assert_same(raw: bytes, limits: Limits | None = None):
    with alone():
        slow, slowly, to_cpu = outcome(raw, limits), loaded(raw), loaded(raw, "cpu")
    assert outcome(raw, limits) == slow
    assert loaded(raw) == slowly
    assert loaded(raw, "cpu") == to_cpu
    for count in (1, 2):
        with at_most(count):
            assert outcome(raw, limits) == slow
    return slow


def saved(state, on: str = "cpu") -> bytes:
    """As torch saves it. It says `cuda:0` anew for each storage, and `cpu` is always the same text."""
    buffer = io.BytesIO()

    def tag(storage: torch.UntypedStorage) -> str:
        return on if on == "cpu" else "".join([*on])

    with mock.patch.object(torch.serialization, "location_tag", tag):
        torch.save(state, buffer)
    return buffer.getvalue()


devices = st.sampled_from(["cpu", "cuda:0", "privateuseone:1"])


KINDS = [
    torch.float32,
    torch.float64,
    torch.int64,
    torch.bfloat16,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.uint16,
]


@st.composite
def tensors(draw):
    shape = draw(st.lists(st.integers(0, 3), max_size=5))
    made = torch.from_numpy(
        np.random.default_rng(draw(st.integers(0, 9))).integers(0, 2, shape)
    ).to(draw(st.sampled_from(KINDS)))
    odd = draw(st.sampled_from(["", "", "", "", "grad", "parameter", "view", "transposed", "conj"]))
    if odd == "grad" and made.dtype.is_floating_point:
        made.requires_grad_()
    elif odd == "parameter":
        return torch.nn.Parameter(made, requires_grad=made.dtype.is_floating_point)
    elif odd == "view":
        return made.flatten()[1:]
    elif odd == "transposed":
        return made.T if made.ndim == 2 else made
    elif odd == "conj":
        return made.conj()
    return made


@st.composite
def states(draw):
    """A few kinds of tensors, many times, in dicts and lists; some are there twice, or over one storage."""
    few = draw(st.lists(tensors(), min_size=1, max_size=4))
    state = draw(st.sampled_from([dict, OrderedDict]))()
    for number in range(draw(st.integers(4, 24))):
        one = few[draw(st.integers(0, len(few) - 1))]
        state[f"t.{number}"] = draw(
            st.sampled_from([one, one.detach().clone(), one.detach().clone(), one.detach().clone()])
        )
    if draw(st.booleans()):
        inner = [one.detach().clone() for one in few]
        tied = dict(state)
        state["more"] = draw(
            st.sampled_from(
                [inner, tuple(inner), {"a": inner, 1: inner[0]}, tied, [*tied.values(), *inner]]
            )
        )
    return state


@settings(max_examples=examples(60))
@given(states(), devices)
def test_templates_see_what_the_machine_sees(state, on):
    assert_same(with_pickle(saved(state, on), stretched))
    assert_same(saved(state, on))


def test_messages_call_a_tensor_the_same():
    def append_to_the_last(pickled: bytes) -> bytes:
        assert pickled.endswith(b"u.")
        return pickled[:-2] + b"K\x01a" + pickled[-2:]

    raw = with_pickle(saved({f"t{i}": torch.ones(3) for i in range(60)}), append_to_the_last)
    assert_same(raw)
    with pytest.raises(HoldfastError, match="an APPEND to a LazyTensor"):
        holdfast.open(io.BytesIO(raw))


@settings(max_examples=examples(100))
@given(states(), devices, edits)
def test_damage_means_the_same_by_templates(state, on, changes):
    assert_same(with_pickle(saved(state, on), lambda pickled: apply(stretched(pickled), changes)))


@settings(max_examples=examples(60))
@given(states(), devices, st.data())
def test_what_was_left_out_of_the_memo_is_there_when_it_is_asked_for(state, on, data):
    """Entries are got again, and some are written a second time, between tensors and behind them."""

    def change(pickled: bytes) -> bytes:
        pickled = stretched(pickled)
        found = list(pickletools.genops(pickled))
        entries = sum(opcode.name == "LONG_BINPUT" for opcode, _, _ in found)
        names = [
            at
            for opcode, text, at in found
            if opcode.name == "BINUNICODE" and text.startswith("t.")
        ]
        for at in sorted(data.draw(st.lists(st.sampled_from(names), max_size=3)), reverse=True):
            index = data.draw(st.integers(0, entries - 1))
            again = (
                b"r" + struct.pack("<I", data.draw(st.integers(0, entries)))
                if data.draw(st.booleans())
                else b""
            )
            pickled = (
                pickled[:at]
                + b"X\4\0\0\0late"
                + b"j"
                + struct.pack("<I", index)
                + again
                + pickled[at:]
            )
        return pickled

    assert_same(with_pickle(saved(state, on), change))


@pytest.mark.parametrize("name", ZIPS)
def test_golden_files(name):
    assert_same(with_pickle(golden.FILES[name], stretched))


@pytest.mark.parametrize("case", [case for kind in ATTACKS for case in CLASSES[kind]], ids=str)
def test_an_attack_means_the_same_by_templates(case, tmp_path):
    """As it is, and in the long form."""
    source = case.make(tmp_path)
    raw = source.read_bytes() if isinstance(source, Path) and source.is_file() else source
    if not isinstance(raw, bytes) or not raw.startswith(b"PK") or len(raw) > LONG:
        pytest.skip("no zip of torch's, or a long one that says what a short one says")
    assert_same(raw)
    with contextlib.suppress(Exception):  # no zip for Python: it was looked at as it is
        raw = with_pickle(raw, stretched)
    assert_same(raw)


@settings(max_examples=examples(40))
@given(st.integers(0, 80), st.integers(0, 4), st.integers(0, 3))
def test_limits_are_met_at_the_same_place(containers, marks, rank):
    state = {f"t.{number}": torch.zeros(2, 2) for number in range(20)}
    with mock.patch("holdfast.formats.pickle.spending.CONTAINER_FLOOR", containers - 400):
        assert_same(with_pickle(saved(state), stretched), Limits(marks=marks, rank=rank))


@pytest.mark.parametrize("on", ["cpu", "cuda:0"])
def test_most_tensors_are_taken_by_templates(on: str):
    """So that the comparisons above compare something, and no object is made that nobody asked for."""
    state = {f"t.{number}": torch.full((2, 3), number) for number in range(200)}
    state |= {f"cuda.{number}": torch.zeros(3) for number in range(3)}
    with counting(LazyTensor) as taken, holdfast.open(saved(state, on)) as ckpt:
        assert len(taken) == 201
        ckpt.read()
        assert not any(tensor.made for tensor in ckpt.values())


@contextlib.contextmanager
def counting(kind: type):
    """What templates take of this class."""
    taken = []
    take = tensor_templates.TensorTemplates.take

    def counted(self, *args):
        end = take(self, *args)
        taken.extend(one for one in self.made if end and isinstance(one, kind))
        return end

    with mock.patch.object(tensor_templates.TensorTemplates, "take", counted):
        yield taken


@pytest.mark.parametrize("on", ["cpu", "cuda:0"])
def test_most_tensors_are_loaded_by_templates(on: str):
    state = {f"t.{number}": torch.full((2, 3), number) for number in range(200)}
    with counting(torch.Tensor) as taken:
        found = holdfast.torch.load(io.BytesIO(saved(state, on)), map_location="cpu")
    assert len(taken) == 199
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())


def test_tied_tensors_are_taken_by_templates():
    """In the same dict, and in others, where no other tensor is: all but the first of each container."""
    state: dict[str, object] = {f"t.{number}": torch.full((2, 3), number) for number in range(1500)}
    state |= {
        "again": dict(state),
        "list": [*state.values()],
        "views": [*(one[:1] for one in [*state.values()][:9])],
    }
    with counting(LazyTensor) as taken, holdfast.open(saved(state)) as ckpt:
        assert len(ckpt) == 4509
        assert len(taken) > 4490
        assert [*{*ckpt.stored.storage}] == [*{*ckpt.stored.select(range(1500)).storage}]
        assert not ckpt.stored.odd


def lying(how: str) -> bytes:
    """A file of twelve tensors of 64 bytes, of which the eighth, in the middle of a run, is not as its pickle says."""
    out = io.BytesIO()
    torch.save(
        {
            f"t{i}": torch.full((4, 4), float(i), dtype=(torch.float32, torch.int32)[i % 2])
            for i in range(12)
        },
        out,
    )
    made = []
    for one in records(out.getvalue()):
        content = one.content
        if how in ("its key twice", "a known key") and one.name.endswith("data.pkl"):
            content = content.replace(
                b"X\x01\0\0\x007", b"X\x01\0\0\0" + (b"6" if how == "its key twice" else b"0")
            )
        if one.name.endswith("data/7"):
            if how == "no record":
                continue
            # 59 bytes that do not become shorter take 64.
            changed = {
                "shorter": content[:-4],
                "longer": content * 2,
                "compressed": bytes([151 * i % 256 for i in range(59)]),
            }
            content = changed.get(how, content)
        made.append(
            Item(
                one.name,
                content,
                method=8 if how == "compressed" and one.name.endswith("data/7") else 0,
            )
        )
    return build(made)


@pytest.mark.parametrize(
    "how", ["its key twice", "a known key", "no record", "shorter", "longer", "compressed"]
)
def test_a_lie_among_many_is_told_as_by_the_machine(how: str, tmp_path: Path):
    (tmp_path / "x.pt").write_bytes(lying(how))
    found = []
    for reading in (contextlib.nullcontext(), alone()):
        with reading, pytest.raises(HoldfastError) as caught:
            holdfast.open(tmp_path / "x.pt")
        found.append((type(caught.value), str(caught.value), caught.value.offset))
    assert found[0] == found[1]


@pytest.mark.parametrize("length", [5, 7, 1])
def test_a_location_of_another_length_is_read_as_by_the_machine(length: int):
    """The text of a location is as long as the stream says, whatever the bytes behind it look like."""
    raw = saved({f"t.{number}": torch.zeros(2, 3) for number in range(20)}, "cuda:0")
    there, wrong = b"X\6\0\0\0cuda:0", b"X" + bytes([length]) + b"\0\0\0cuda:0"

    def lie(pickled: bytes) -> bytes:
        assert pickled.count(there) == 20
        before, after = pickled.rsplit(there, 1)
        return before + wrong + after

    assert_same(with_pickle(raw, lie))


def test_records_are_called_as_in_the_archive_when_names_were_folded():
    state = {f"t.{number}": torch.full((2, 3), number) for number in range(30)}
    with holdfast.open(saved(state)) as ckpt:
        for number, tensor in enumerate(ckpt.values()):
            assert tensor.storages[0].label == f"data/{number}"
