"""Named attacks on the pickle interpreter, each with the outcome that it must have: inert data, or one kind of refusal.

Every case is measured: a small stream must cost little time and little memory.
"""

from __future__ import annotations

import struct
import time
import tracemalloc

import pytest

from holdfast.core.limits import Limits
from holdfast.core.opaque import Global, Opaque
from holdfast.errors import HoldfastError, LimitExceeded, PickleError, Truncated
from holdfast.formats.pickle.machine import interpret, interpret_whole
from holdfast.formats.pickle.plain import PlainTable
from holdfast.formats.pickle.recording import record

P2 = b"\x80\x02"
SYSTEM = b"cos\nsystem\n"
STR = lambda s: b"X" + struct.pack("<I", len(s)) + s  # noqa: E731
CMD = STR(b"id")
ORDERED = b"ccollections\nOrderedDict\n)R"


def long1(n: int) -> bytes:
    raw = n.to_bytes(16, "little", signed=True)
    return b"\x8a\x10" + raw


# Calls: nothing is refused for its name; it becomes an Opaque that says what was wanted.
CALLS = {
    "REDUCE": (P2 + SYSTEM + CMD + b"\x85R.", "os.system", ("call", "mention")),
    "INST": (b"(" + CMD + b"ios\nsystem\n.", "os.system", ("mention", "new")),
    "OBJ": (b"(" + SYSTEM + CMD + b"o.", "os.system", ("mention", "new")),
    "NEWOBJ": (P2 + SYSTEM + CMD + b"\x85\x81.", "os.system", ("mention", "new")),
    "NEWOBJ_EX": (P2 + SYSTEM + CMD + b"\x85}\x92.", "os.system", ("mention", "new")),
    "NEWOBJ_EX with keywords": (
        P2 + SYSTEM + b")}" + STR(b"a") + CMD + b"s\x92.",
        "os.system",
        ("mention", "new"),
    ),
    "BUILD on a module": (
        P2 + b"csys\nmodules\n}" + STR(b"a") + CMD + b"sb.",
        "sys.modules",
        ("build", "mention"),
    ),
    "BUILD on a class": (
        P2 + b"cbuiltins\ndict\n}" + STR(b"__setstate__") + SYSTEM + b"sb.",
        "os.system",
        ("mention",),
    ),
    "BUILD on an object": (
        P2 + b"ca\nB\n)\x81}" + STR(b"__class__") + SYSTEM + b"sb.",
        "os.system",
        ("mention",),
    ),
    "STACK_GLOBAL from the memo": (
        b"\x80\x04\x8c\x02os\x94\x8c\x06system\x94\x86h\x00h\x01\x93)R\x86.",
        "os.system",
        None,
    ),
    "dotted name": (
        b"\x80\x04\x8c\x08builtins\x8c\x0ddict.__init__\x93" + CMD + b"\x85R.",
        "builtins.dict.__init__",
        None,
    ),
    "homoglyph": ("cоs\nsystem\n".encode() + CMD + b"\x85R.", "оs.system", ("call", "mention")),
    "newline in a name": (b"\x80\x04\x8c\x03o\ns\x8c\x01x\x93)R.", "o\ns.x", None),
    "Python 2 name": (
        b"c__builtin__\neval\n" + CMD + b"\x85R.",
        "builtins.eval",
        ("call", "mention"),
    ),
    "popped again": (P2 + SYSTEM + CMD + b"\x85R0N.", "os.system", ("call", "mention")),
    "getattr of a global": (
        P2 + b"cbuiltins\ngetattr\ncos\nsystem\n" + CMD + b"\x86R" + CMD + b"\x85R.",
        "builtins.getattr",
        None,
    ),
    "inside a known call": (
        P2 + b"ccollections\nOrderedDict\n(](" + CMD + SYSTEM + CMD + b"\x85RtatR.",
        "os.system",
        None,
    ),
    "copyreg": (
        P2 + b"ccopy_reg\n_reconstructor\n(cposix\nsystem\nc__builtin__\nobject\nNtR.",
        "posix.system",
        ("mention", "new"),
    ),
    "copyreg.__newobj__": (
        P2 + b"ccopyreg\n__newobj__\ncposix\nsystem\n" + CMD + b"\x86R.",
        "posix.system",
        ("mention", "new"),
    ),
    "defaultdict with a foreign factory": (
        P2 + b"ccollections\ndefaultdict\n" + SYSTEM + b"\x85R.",
        "os.system",
        ("mention",),
    ),
    "codec with side effects": (
        P2 + b"c_codecs\nencode\n" + CMD + STR(b"zlib") + b"\x86R.",
        "_codecs.encode",
        ("call", "mention"),
    ),
    "numpy subclass": (
        P2 + b"cnumpy.core.multiarray\n_reconstruct\nca\nB\nK\x00\x85U\x01b\x87R.",
        "a.B",
        ("mention",),
    ),
}


def deep(op: bytes, count: int, bottom: bytes = b"N") -> bytes:
    return P2 + bottom + op * count + b"."


# Refusals.
BAD = {
    "empty": (b"", Truncated),
    "PROTO alone": (b"\x80", Truncated),
    "absurd PROTO": (b"\x80\x06N.", PickleError),
    "late PROTO": (b"N\x80\x02.", PickleError),
    "PROTO twice": (b"\x80\x02\x80\x02N.", PickleError),
    "missing STOP": (P2 + b"N", Truncated),
    "nothing to return": (P2 + b".", PickleError),
    "left-overs": (P2 + b"NN.", PickleError),
    "left-over MARK": (P2 + b"N(N.", PickleError),
    "payload before a broken tail": (P2 + SYSTEM + CMD + b"\x85R\xff", PickleError),
    "trailing bytes": (P2 + b"N.N.", PickleError),
    "unknown opcode": (b"\x00", PickleError),
    "EXT1": (P2 + b"\x82\x01.", PickleError),
    "EXT2": (P2 + b"\x83\x01\x00.", PickleError),
    "EXT4": (P2 + b"\x84\x01\x00\x00\x00.", PickleError),
    "NEXT_BUFFER": (b"\x80\x05\x97.", PickleError),
    "READONLY_BUFFER": (b"\x80\x05N\x98.", PickleError),
    "PERSID text": (b"Pabc\n.", PickleError),
    "BINPERSID": (P2 + b"NQ.", PickleError),
    "STACK_GLOBAL of bytes": (b"\x80\x04C\x02os\x8c\x06system\x93.", PickleError),
    "STACK_GLOBAL of a number": (b"\x80\x04K\x01\x8c\x06system\x93.", PickleError),
    "STACK_GLOBAL of one": (b"\x80\x04\x8c\x02os\x93.", PickleError),
    "GLOBAL of megabytes": (b"c" + b"a" * 5000 + b"\nb\n.", PickleError),
    "GLOBAL without an end": (b"cos", Truncated),
    "GLOBAL that is no UTF-8": (b"c\xff\nb\n.", PickleError),
    "call of text": (P2 + CMD + b")R.", PickleError),
    "call of a dict": (P2 + b"})R.", PickleError),
    "arguments that are a list": (P2 + SYSTEM + b"]R.", PickleError),
    "NEWOBJ arguments that are text": (P2 + SYSTEM + CMD + b"\x81.", PickleError),
    "NEWOBJ_EX keywords that are a list": (P2 + SYSTEM + b")]\x92.", PickleError),
    "NEWOBJ_EX keyword that is a number": (P2 + SYSTEM + b")}K\x01K\x01s\x92.", PickleError),
    "BUILD on text": (P2 + CMD + b"}b.", PickleError),
    "BUILD on a dict": (P2 + b"}}b.", PickleError),
    "BUILD on a list": (P2 + b"]}b.", PickleError),
    "BUILD twice": (P2 + b"ca\nB\n)\x81}b}b.", PickleError),
    "OrderedDict state that is a list": (P2 + ORDERED + b"]b.", PickleError),
    "OBJ of nothing": (b"(o.", PickleError),
    "stack underflow": (P2 + b"\x86.", PickleError),
    "underflow through a MARK": (P2 + b"N(\x85.", PickleError),
    "TUPLE without MARK": (P2 + b"Nt.", PickleError),
    "POP of nothing": (P2 + b"0N.", PickleError),
    "POP_MARK of nothing": (P2 + b"1N.", PickleError),
    "DUP of nothing": (P2 + b"2.", PickleError),
    "PUT of nothing": (P2 + b"q\x00.", PickleError),
    "MEMOIZE of nothing": (b"\x80\x04\x94.", PickleError),
    "GET before PUT": (P2 + b"h\x00.", PickleError),
    "GET of a negative index": (b"g-1\n.", PickleError),
    "sparse memo": (P2 + b"Nr\xff\xff\xff\x7f.", PickleError),
    "sparse memo as text": (b"Np99999999999\n.", PickleError),
    "sparse memo by one too many": (P2 + b"Nq\x05.", PickleError),
    "memo index of a thousand digits": (b"Np" + b"9" * 1000 + b"\n.", PickleError),
    "MEMOIZE after a gap": (P2 + b"Nq\x02\x94.", PickleError),
    # Frames
    "frame beyond the end": (b"\x80\x04\x95" + struct.pack("<Q", 100) + b"N.", Truncated),
    "frame of 2**63": (b"\x80\x04\x95" + struct.pack("<Q", 1 << 63) + b"N.", Truncated),
    "nested frame": (
        b"\x80\x04\x95" + struct.pack("<Q", 11) + b"\x95" + struct.pack("<Q", 2) + b"N.",
        PickleError,
    ),
    "opcode across a frame": (
        b"\x80\x04\x95" + struct.pack("<Q", 3) + b"J\x00\x00\x00\x00.",
        PickleError,
    ),
    "number across a frame": (
        b"\x80\x04\x95" + struct.pack("<Q", 3) + b"G" + bytes(8) + b".",
        PickleError,
    ),
    "number beyond the end": (b"\x80\x02G" + bytes(7), Truncated),
    "memo entry across a frame": (b"\x80\x04\x95" + struct.pack("<Q", 2) + b"Nq\0.", PickleError),
    "text across a frame": (
        b"\x80\x04\x95" + struct.pack("<Q", 3) + b"\x8c\x05hello.",
        PickleError,
    ),
    "line across a frame": (
        b"\x80\x04\x95" + struct.pack("<Q", 3) + b"cos\nsystem\n.",
        PickleError,
    ),
    "STOP before the end of a frame": (
        b"\x80\x04\x95" + struct.pack("<Q", 3) + b"N.N",
        PickleError,
    ),
    "empty frame": (b"\x80\x04\x95" + struct.pack("<Q", 0) + b"N.", PickleError),
    # Lengths
    "BINUNICODE of 2**31": (P2 + b"X\x00\x00\x00\x80abc.", Truncated),
    "BINUNICODE of 2**32 - 1": (P2 + b"X\xff\xff\xff\xffabc.", Truncated),
    "BINBYTES8 of 2**62": (b"\x80\x04\x8e" + struct.pack("<Q", 1 << 62) + b"abc.", Truncated),
    "BINBYTES8 of 2**64 - 1": (b"\x80\x04\x8e" + b"\xff" * 8 + b"abc.", Truncated),
    "BINUNICODE8 of 2**62": (b"\x80\x04\x8d" + struct.pack("<Q", 1 << 62) + b"abc.", Truncated),
    "BYTEARRAY8 of 2**62": (b"\x80\x05\x96" + struct.pack("<Q", 1 << 62) + b"abc.", Truncated),
    "negative BINSTRING": (b"T\xff\xff\xff\xffabc.", PickleError),
    "negative LONG4": (P2 + b"\x8b\xff\xff\xff\xff.", PickleError),
    "LONG4 of 2**31 - 1": (P2 + b"\x8b\xff\xff\xff\x7f.", LimitExceeded),
    "LONG1 of 17 bytes": (P2 + b"\x8a\x11" + b"\x01" * 17 + b".", LimitExceeded),
    "LONG1 cut": (P2 + b"\x8a\x0aabc", Truncated),
    "decimal bomb": (b"I" + b"9" * 1_000_000 + b"\n.", PickleError),
    "decimal LONG bomb": (b"L" + b"9" * 60 + b"L\n.", LimitExceeded),
    "decimal of 17 bytes": (b"L" + str(1 << 128).encode() + b"L\n.", LimitExceeded),
    "INT with an underscore": (b"I1_0\n.", PickleError),
    "INT in hexadecimal": (b"I0x10\n.", PickleError),
    "FLOAT with a megabyte": (b"F" + b"1" * 1_000_000 + b"\n.", PickleError),
    "FLOAT that is text": (b"Fabc\n.", PickleError),
    "STRING without quotes": (b"Sabc\n.", PickleError),
    "STRING with one quote": (b"S'\n.", PickleError),
    "STRING that is an expression": (b"S'a'+'b'*9\n.", PickleError),
    "STRING with a broken escape": (b"S'\\xzz'\n.", PickleError),
    "UNICODE with a broken escape": (b"V\\uzzzz\n.", PickleError),
    "BINUNICODE that is no UTF-8": (P2 + b"X\x01\x00\x00\x00\xff.", PickleError),
    # Containers
    "SETITEM on a list": (P2 + b"]K\x00K\x01s.", PickleError),
    "SETITEMS on text": (P2 + CMD + b"(K\x00K\x01u.", PickleError),
    "SETITEMS of an odd number": (P2 + b"}(K\x00u.", PickleError),
    "DICT of an odd number": (b"(K\x00d.", PickleError),
    "APPEND to a dict": (P2 + b"}K\x01a.", PickleError),
    "APPENDS to a tuple": (P2 + b")(K\x01e.", PickleError),
    "APPENDS to a set": (b"\x80\x04\x8f(K\x01e.", PickleError),
    "ADDITEMS to a list": (b"\x80\x04](K\x01\x90.", PickleError),
    "list as a key": (P2 + b"}]Ns.", PickleError),
    "dict in a key": (P2 + b"}}\x85Ns.", PickleError),
    "bytearray as a member": (b"\x80\x05\x8f(\x96" + b"\x00" * 8 + b"\x90.", PickleError),
    "set in a frozenset": (b"\x80\x04(\x8f\x91.", PickleError),
    "marks without end": (P2 + b"(" * 10_000 + b".", LimitExceeded),
    "key of 65 values": (P2 + b"}(" + b"N" * 65 + b"tNs.", LimitExceeded),
    "hash bomb by DUP": (P2 + b"}" + b"N\x85" + b"2\x86" * 100 + b"Ns.", LimitExceeded),
    "hash bomb in a set": (b"\x80\x04\x8f(N\x85" + b"2\x86" * 100 + b"\x90.", LimitExceeded),
    "hash bomb in a frozenset": (b"\x80\x04(N\x85" + b"2\x86" * 100 + b"\x91.", LimitExceeded),
    "hash bomb in an OrderedDict": (
        P2 + ORDERED + b"N\x85" + b"2\x86" * 100 + b"Ns.",
        LimitExceeded,
    ),
    "hash bomb in set()": (
        P2 + b"cbuiltins\nset\n]N\x85" + b"2\x86" * 100 + b"a\x85R.",
        LimitExceeded,
    ),
    "deep key": (P2 + b"}N" + b"\x85" * 100_000 + b"Ns.", LimitExceeded),
    "integers that collide": (
        P2 + b"}(" + b"".join(long1(i * (2**61 - 1)) + b"N" for i in range(1, 20_000)) + b"u.",
        LimitExceeded,
    ),
    "tuples that collide": (
        P2
        + b"}("
        + b"".join(long1(i * (2**61 - 1)) + b"K\x00\x86N" for i in range(1, 30_000))
        + b"u.",
        LimitExceeded,
    ),
    "long texts compared again and again": (
        P2
        + STR(b"a" * 100_000)
        + b"q\x000"
        + STR(b"a" * 100_000)
        + b"q\x010}("
        + b"h\x00Nh\x01N" * 20_000
        + b"u.",
        LimitExceeded,
    ),
    "a set copied again and again": (
        P2
        + b"]("
        + b"".join(b"M" + struct.pack("<H", i) for i in range(20_000))
        + b"eq\x000cbuiltins\nset\nq\x010("
        + b"h\x01h\x00\x85R" * 200
        + b"t.",
        PickleError,
    ),
    "bytes encoded again and again": (
        P2
        + STR(b"a" * 100_000)
        + b"q\x00"
        + STR(b"latin1")
        + b"\x86q\x010c_codecs\nencode\nq\x020("
        + b"h\x02h\x01R" * 200
        + b"t.",
        PickleError,
    ),
    "a million empty sets and more": (b"\x80\x04(" + b"\x8f" * 1_200_000 + b"l.", LimitExceeded),
    # Constructors
    "bytearray of a size": (P2 + b"cbuiltins\nbytearray\n" + long1(2**40) + b"\x85R.", PickleError),
    "bytes of a size": (P2 + b"cbuiltins\nbytes\n" + long1(2**40) + b"\x85R.", PickleError),
    "OrderedDict of a size": (P2 + b"ccollections\nOrderedDict\nK\x05\x85R.", PickleError),
    "Counter of text": (P2 + b"ccollections\nCounter\n" + CMD + b"\x85R.", PickleError),
    "set of text": (P2 + b"cbuiltins\nset\n" + CMD + b"\x85R.", PickleError),
    "range by 0": (P2 + b"cbuiltins\nrange\nK\x00K\x05K\x00\x87R.", PickleError),
    "complex of text": (P2 + b"cbuiltins\ncomplex\n" + CMD + CMD + b"\x86R.", PickleError),
    "path of a number": (P2 + b"cpathlib\nPosixPath\nK\x05\x85R.", PickleError),
    "path without end": (
        P2 + b"cpathlib\nPosixPath\n" + STR(b"a/" * 5000) + b"\x85R.",
        PickleError,
    ),
    "encode of bytes beyond Latin-1": (
        P2 + b"c_codecs\nencode\n" + STR("Ā".encode()) + STR(b"latin1") + b"\x86R.",
        PickleError,
    ),
    "a call computed by calls": (P2 + SYSTEM + b")R" * 1000 + b".", PickleError),
    "dtype of an array": (P2 + b"cnumpy\ndtype\n]\x85R.", PickleError),
    "dtype state that is short": (
        P2 + b"cnumpy\ndtype\n" + STR(b"f4") + b"\x85RK\x03\x85b.",
        PickleError,
    ),
}

# Odd, and harmless: these open.
FINE = {
    "expansion by DUP": deep(b"2\x86", 20_000),
    "expansion by memo": P2 + b"]q\x000" + b"h\x00h\x00\x86q\x000" * 10_000 + b"h\x00.",
    "deep tuples": deep(b"\x85", 200_000),
    "deep objects": P2 + b"ca\nB\nq\x000N" + b"q\x010h\x00h\x01\x85R" * 20_000 + b".",
    # Freed recursively by CPython unless they are a subclass.
    "deep default dicts": P2
    + b"ccollections\ndefaultdict\nq\x000)q\x020N"
    + b"q\x010h\x00h\x02RNh\x01s" * 100_000
    + b".",
    "slice of slices": P2
    + b"cbuiltins\nslice\nq\x000N"
    + b"q\x010h\x00h\x01NN\x87R" * 20_000
    + b".",
    "self-containing list": P2 + b"]q\x00h\x00a.",
    "object in its own state": P2 + b"ca\nB\n)\x81q\x00}" + STR(b"me") + b"h\x00sb.",
    "tuple in a list in it": P2 + b"]q\x00h\x00\x85a.",
    "the limit of 64 marks": P2 + b"(" * 64 + b"t" * 64 + b".",
    "16 byte integer": P2 + long1(2**127 - 1) + b".",
    "lone surrogate": P2 + STR(b"\xed\xa0\x80") + b".",
    "memo out of order": P2 + b"Nq\x020K\x01q\x000K\x02q\x010h\x02h\x00h\x01\x87.",
    "keys named like attributes": P2 + ORDERED + b"}" + STR(b"__class__") + SYSTEM + b"sb.",
    "10,000 scattered integers": P2
    + b"}("
    + b"".join(long1(i * 0x9E3779B97F4A7C1 % 2**60) + b"N" for i in range(10_000))
    + b"u.",
    "pairs of words": P2
    + b"}("
    + b"".join(STR(b"%d" % i) + STR(b"x") + b"\x86N" for i in range(40_000))
    + b"u.",
    "20,000 counting keys": P2
    + b"}("
    + b"".join(b"M" + struct.pack("<H", i) + b"N" for i in range(20_000))
    + b"u.",
}


def read(stream: bytes):
    return interpret_whole(stream, PlainTable(), limits=Limits())


def measured(stream: bytes) -> object:
    """The outcome, or the error that was raised; fails when it cost too much."""
    # Not for long streams, which tracemalloc makes many times slower; see test_memory_for_each_byte.
    traced = len(stream) < 2000
    if traced:
        tracemalloc.start()
    began = time.process_time()
    try:
        outcome: object = read(stream)
    except HoldfastError as error:
        outcome = error
    spent = time.process_time() - began
    if traced:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 1 << 20
    assert spent < 5
    return outcome


@pytest.mark.parametrize("name", CALLS)
def test_calls_become_data(name):
    stream, what, uses = CALLS[name]
    found = measured(stream)
    assert not isinstance(found, HoldfastError), found
    by_name = {str(f.what): f for f in found.foreign}
    assert what in by_name
    if uses is not None:
        assert by_name[what].uses == uses
    assert 0 <= by_name[what].offset < len(stream)


@pytest.mark.parametrize("name", BAD)
def test_refusals(name):
    stream, kind = BAD[name]
    outcome = measured(stream)
    assert type(outcome) is kind, outcome
    assert outcome.offset is not None
    assert 0 <= outcome.offset <= len(stream)


@pytest.mark.parametrize("name", FINE)
def test_odd_and_harmless(name):
    outcome = measured(FINE[name])
    assert not isinstance(outcome, HoldfastError), outcome
    del outcome  # freeing a deep value must not overflow the C stack


def test_names_from_the_file_never_become_attributes():
    found = read(FINE["keys named like attributes"]).value
    assert type(found).__name__ == "OrderedDict"
    assert vars(found) == {"_attributes": {"__class__": Global("os", "system")}}


def test_opaque_keeps_everything():
    stream = P2 + b"ca\nB\n" + CMD + b"\x85\x81(K\x01K\x02e(K\x03K\x04u}" + STR(b"s") + b"Nsb."
    found = read(stream).value
    assert isinstance(found, Opaque)
    assert (found.module, found.name, found.args) == ("a", "B", ("id",))
    assert (found.items, found.entries, found.state) == ([1, 2], [(3, 4)], {"s": None})


def test_opaque_keys_are_fine():
    found = read(P2 + b"}ca\nB\n)\x81Ns.").value
    assert isinstance(next(iter(found)), Opaque)


def test_stream_larger_than_allowed():
    stream = P2 + STR(b"a" * 100) + b"."
    limits = Limits(pickle_nbytes=50)
    with pytest.raises(LimitExceeded):
        interpret(stream, PlainTable(), limits=limits)
    with pytest.raises(LimitExceeded):
        interpret_whole(stream, PlainTable(), limits=limits)
    assert interpret_whole(stream, PlainTable(), limits=limits, max_nbytes=200).value == "a" * 100


def test_offsets_point_at_the_opcode():
    with pytest.raises(PickleError) as caught:
        interpret(b"....." + P2 + b"NNNs.", PlainTable(), limits=Limits(), start=5)
    assert caught.value.offset == 10


def test_the_collector_is_restored():
    import gc

    assert gc.isenabled()
    with pytest.raises(Truncated):
        read(b"")
    assert gc.isenabled()


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("sets", b"\x8f"),
        ("dicts", b"}"),
        ("tuples", b"N\x85"),
        ("objects", b"h\x00)R"),
        ("calls", b"h\x01)R"),
        ("frozensets", b"(N\x91"),
    ],
)
def test_memory_for_each_byte(name, unit):
    """What the densest streams take; beyond a million containers `Spending` stops them."""
    stream = (
        b"\x80\x04ca\nB\n\x940ccollections\nOrderedDict\n\x940("
        + unit * (20_000 // len(unit))
        + b"l."
    )
    table = PlainTable()
    tracemalloc.start()
    found = interpret_whole(stream, table, limits=Limits())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(found.value) == 20_000 // len(unit)
    assert peak < 300 * len(stream)


@pytest.mark.parametrize("number", [b"--1", b"-", b"+1", b"0x10", b"1_000", b"1" * 41])
@pytest.mark.parametrize("opcode", [b"I", b"L", b"F"])
def test_a_scan_goes_on_behind_numbers_that_no_writer_spells(opcode, number):
    found = record(opcode + number + b"\ncos\nsystem\n.", limits=Limits())
    assert ("os", "system") in found.table.seen
