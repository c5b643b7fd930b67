"""Pickles that would call something if they were loaded: they open as inert data that names what it is, or are refused."""

from __future__ import annotations

from holdfast.errors import FormatError, LimitExceeded, PickleError, Truncated

from .case import Case, foreign, opens, refused
from .craft_pickle import (
    APPEND,
    APPENDS,
    BUILD,
    DICT,
    DUP,
    EMPTY_DICT,
    EMPTY_LIST,
    EMPTY_TUPLE,
    LIST,
    MARK,
    MEMOIZE,
    NEWOBJ,
    NEWOBJ_EX,
    NONE,
    OBJ,
    PERSID,
    POP,
    POP_MARK,
    REDUCE,
    SETITEM,
    SETITEMS,
    STACK_GLOBAL,
    STOP,
    TRUE,
    TUPLE,
    TUPLE1,
    TUPLE2,
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
from .craft_torch import legacy, state, storage, tar, torch_zip, torchscript, weight

__all__ = ["CASES"]

SHELL = text("true")
SYSTEM = call("os", "system", SHELL)
"""Harmless if it ever ran, and caught by the audit hook."""

PAYLOADS: dict[str, tuple[bytes, str]] = {
    "reduce-os-system": (SYSTEM, "os.system"),
    "reduce-posix-system": (call("posix", "system", SHELL), "posix.system"),
    "reduce-builtins-eval": (call("builtins", "eval", text("1")), "builtins.eval"),
    "reduce-python2-eval": (call("__builtin__", "eval", text("1")), "builtins.eval"),
    "reduce-python2-execfile": (call("__builtin__", "execfile", text("x")), "builtins.execfile"),
    "reduce-builtins-exec": (call("builtins", "exec", text("1")), "builtins.exec"),
    "reduce-builtins-compile": (
        call("builtins", "compile", text("1"), text(""), text("exec")),
        "builtins.compile",
    ),
    "reduce-builtins-import": (
        call("builtins", "__import__", text("antigravity")),
        "builtins.__import__",
    ),
    "reduce-builtins-getattr": (
        call("builtins", "getattr", named("os", "path"), text("os")),
        "builtins.getattr",
    ),
    "reduce-builtins-open": (
        call("builtins", "open", text("/tmp/holdfast-was-here"), text("w")),
        "builtins.open",
    ),
    "reduce-builtins-map": (
        call("builtins", "map", named("os", "system"), list_of(SHELL)),
        "builtins.map",
    ),
    "reduce-subprocess-popen": (
        call("subprocess", "Popen", list_of(text("true"))),
        "subprocess.Popen",
    ),
    "reduce-python2-commands": (call("commands", "getoutput", SHELL), "subprocess.getoutput"),
    "reduce-importlib": (
        call("importlib", "import_module", text("antigravity")),
        "importlib.import_module",
    ),
    "reduce-runpy": (call("runpy", "run_path", text("/dev/null")), "runpy.run_path"),
    "reduce-ctypes": (call("ctypes", "CDLL", text("libc.so.6")), "ctypes.CDLL"),
    "reduce-socket": (
        call("socket", "create_connection", tuple_of(text("localhost"), integer(1))),
        "socket.create_connection",
    ),
    "reduce-pickle-loads": (call("pickle", "loads", binbytes(b"N.")), "pickle.loads"),
    "reduce-torch-load": (call("torch", "load", text("x")), "torch.load"),
    "reduce-torch-hub": (call("torch.hub", "load", text("a/b"), text("c")), "torch.hub.load"),
    "reduce-numpy-load": (call("numpy", "load", text("x.npy")), "numpy.load"),
    "reduce-numpy-runstring": (
        call("numpy.testing._private.utils", "runstring", text("1"), EMPTY_DICT),
        "numpy.testing._private.utils.runstring",
    ),
    "reduce-operator-attrgetter": (
        call("operator", "attrgetter", text("system")),
        "operator.attrgetter",
    ),
    "reduce-types-codetype": (call("types", "CodeType", integer(0)), "types.CodeType"),
    "reduce-functools-partial": (
        call("functools", "partial", named("os", "system"), SHELL),
        "functools.partial",
    ),
    "reduce-holdfast-itself": (
        call("holdfast.verbs.open", "open", text("/etc/passwd")),
        "holdfast.verbs.open.open",
    ),
    "dotted-name": (call("os", "path.os.system", SHELL), "os.path.os.system"),
    "dotted-allowed-prefix": (
        call("collections", "OrderedDict.fromkeys", EMPTY_LIST),
        "collections.OrderedDict.fromkeys",
    ),
    "dotted-torch": (
        call("torch", "serialization.os.system", SHELL),
        "torch.serialization.os.system",
    ),
    "homoglyph-cyrillic-o": (
        call("t\u043erch._utils", "_rebuild_tensor_v2", NONE),
        "t\u043erch._utils._rebuild_tensor_v2",
    ),
    "homoglyph-fullwidth": (call("\uff42uiltins", "eval", text("1")), "\uff42uiltins.eval"),
    "homoglyph-ligature": (call("o\u017f", "system", SHELL), "o\u017f.system"),
    "case-changed": (call("Collections", "orderedDict"), "Collections.orderedDict"),
    "module-with-spaces": (call(" os ", "system ", SHELL), " os .system "),
    "module-empty": (call("", "", SHELL), "."),
    "module-main": (call("__main__", "evil"), "__main__.evil"),
    "name-with-ansi-escape": (call("os\x1b[2J", "sys\u202etem"), "os\x1b[2J.sys\u202etem"),
    "name-lone-surrogate": (
        text("o\ud800s") + text("system") + STACK_GLOBAL + EMPTY_TUPLE + REDUCE,
        "o\ud800s.system",
    ),
    "newobj-class": (named("subprocess", "Popen") + tuple_of(SHELL) + NEWOBJ, "subprocess.Popen"),
    "newobj-ex-class": (
        named("subprocess", "Popen") + EMPTY_TUPLE + dict_of(text("args"), SHELL) + NEWOBJ_EX,
        "subprocess.Popen",
    ),
    "newobj-through-copyreg": (
        call("copyreg", "__newobj__", named("subprocess", "Popen"), SHELL),
        "subprocess.Popen",
    ),
    "reconstructor-through-copyreg": (
        call(
            "copy_reg", "_reconstructor", named("os", "Evil"), named("__builtin__", "object"), NONE
        ),
        "os.Evil",
    ),
    "obj": (MARK + named("os", "system") + SHELL + OBJ, "os.system"),
    "inst": (MARK + SHELL + inst("os", "system"), "os.system"),
    "inst-python2": (MARK + SHELL + inst("__builtin__", "eval"), "builtins.eval"),
    "build-on-module": (
        named("os", "environ") + dict_of(text("PATH"), text("/tmp")) + BUILD,
        "os.environ",
    ),
    "build-on-class": (
        named("torch.nn", "Module") + dict_of(text("__call__"), named("os", "system")) + BUILD,
        "torch.nn.Module",
    ),
    "build-dunder-class": (
        named("a", "B")
        + EMPTY_TUPLE
        + NEWOBJ
        + dict_of(text("__class__"), named("os", "system"))
        + BUILD,
        "os.system",
    ),
    "build-dunder-dict": (
        named("a", "B")
        + EMPTY_TUPLE
        + NEWOBJ
        + dict_of(text("__dict__"), dict_of(text("x"), SYSTEM))
        + BUILD,
        "os.system",
    ),
    "build-dunder-setstate": (
        named("a", "B")
        + EMPTY_TUPLE
        + NEWOBJ
        + dict_of(text("__setstate__"), named("os", "system"))
        + BUILD
        + POP
        + SYSTEM,
        "os.system",
    ),
    "build-slots-pair": (
        named("a", "B")
        + EMPTY_TUPLE
        + NEWOBJ
        + tuple_of(NONE, dict_of(text("x"), named("os", "system")))
        + BUILD,
        "a.B",
    ),
    "build-reduce-of-reduce": (SYSTEM + dict_of(text("x"), integer(1)) + BUILD, "os.system"),
    "call-of-a-call": (
        call("builtins", "getattr", named("os", "path"), text("system")) + tuple_of(SHELL) + REDUCE,
        "builtins.getattr",
    ),
    "append-to-a-foreign": (SYSTEM + integer(1) + APPEND, "os.system"),
    "appends-to-a-foreign": (SYSTEM + MARK + integer(1) + APPENDS, "os.system"),
    "setitem-on-a-foreign": (SYSTEM + text("a") + integer(1) + SETITEM, "os.system"),
    "setitems-on-a-foreign": (
        named("os", "environ") + EMPTY_TUPLE + REDUCE + MARK + text("A") + text("b") + SETITEMS,
        "os.environ",
    ),
    "popped-again": (SYSTEM + POP + integer(1), "os.system"),
    "popped-with-its-mark": (MARK + SYSTEM + POP_MARK + integer(1), "os.system"),
    "duplicated-and-popped": (SYSTEM + DUP + POP, "os.system"),
    "as-a-dict-key": (dict_of(SYSTEM, integer(1)), "os.system"),
    "as-a-default-factory": (
        call("collections", "defaultdict", named("os", "getcwd")),
        "os.getcwd",
    ),
    "in-subclass-rebuild": (
        call(
            "torch._tensor",
            "_rebuild_from_type_v2",
            named("os", "system"),
            named("torch", "Tensor"),
            tuple_of(SHELL),
            NONE,
        ),
        "os.system",
    ),
    "in-subclass-type": (
        call(
            "torch._tensor",
            "_rebuild_from_type_v2",
            named("torch._utils", "_rebuild_tensor_v2"),
            named("os", "system"),
            tuple_of(storage(), integer(0), EMPTY_TUPLE, EMPTY_TUPLE),
            NONE,
        ),
        "os.system",
    ),
    "in-backward-hooks": (
        call("torch._utils", "_rebuild_parameter", NONE, TRUE, SYSTEM),
        "os.system",
    ),
    "in-encode": (call("_codecs", "encode", text("x"), text("evil-codec")), "_codecs.encode"),
    "in-counter-subclass": (call("collections", "UserDict", SYSTEM), "os.system"),
}
"""What a payload is called: its bytes, and a global that must be listed."""

MEMO_STRINGS = (
    text("os")
    + put(0)
    + POP
    + text("system")
    + put(1)
    + POP
    + get(0)
    + get(1)
    + STACK_GLOBAL
    + tuple_of(SHELL)
    + REDUCE
)
STACK4 = (
    short_text("os")
    + MEMOIZE
    + short_text("system")
    + MEMOIZE
    + STACK_GLOBAL
    + MEMOIZE
    + short_text("true")
    + TUPLE1
    + REDUCE
)
SPLIT = call("builtins", "getattr", text("sys"), text("tem"))

OPENING = [
    *(
        opens(f"pickle-{name}", torch_zip(state(code)), foreign(what))
        for name, (code, what) in PAYLOADS.items()
    ),
    opens(
        "pickle-stack-global-from-memo",
        torch_zip(state(MEMO_STRINGS, protocol=4)),
        foreign("os.system"),
    ),
    opens(
        "pickle-stack-global-protocol4", torch_zip(state(STACK4, protocol=4)), foreign("os.system")
    ),
    opens("pickle-payload-protocol0", torch_zip(b"cos\nsystem\n(Vtrue\ntR."), foreign("os.system")),
    opens("pickle-payload-protocol5", torch_zip(state(SYSTEM, protocol=5)), foreign("os.system")),
    opens("pickle-payload-is-the-whole-file", torch_zip(stream(SYSTEM)), foreign("os.system")),
    opens(
        "pickle-payload-in-frames",
        torch_zip(proto(4) + frame(SYSTEM + POP) + frame(EMPTY_DICT + STOP)),
        foreign("os.system"),
    ),
    opens("pickle-stop-outside-of-its-frame", torch_zip(proto(4) + frame(b"}", 1) + STOP)),
    opens(
        "torchscript-call-in-data",
        torchscript(stream(SYSTEM), stream(EMPTY_TUPLE)),
        foreign("os.system"),
    ),
    opens(
        "torchscript-call-in-constants",
        torchscript(stream(EMPTY_DICT), stream(tuple_of(SYSTEM))),
        foreign("os.system"),
    ),
    opens(
        "pickle-dunder-keys-in-a-plain-dict",
        torch_zip(state(dict_of(text("__class__"), integer(1), text("__dict__"), NONE))),
    ),
    opens(
        "pickle-ordered-dict-attributes",
        torch_zip(
            state(
                call("collections", "OrderedDict")
                + dict_of(text("__class__"), SYSTEM, text("update"), NONE)
                + BUILD
            )
        ),
        foreign("os.system"),
    ),
    opens(
        "pickle-module-shadowing-methods",
        torch_zip(
            state(
                named("m", "M")
                + EMPTY_TUPLE
                + NEWOBJ
                + dict_of(
                    text("_parameters"),
                    dict_of(text("w"), weight()),
                    text("_buffers"),
                    EMPTY_DICT,
                    text("_modules"),
                    EMPTY_DICT,
                    text("state_dict"),
                    SYSTEM,
                    text("__getattr__"),
                    SYSTEM,
                )
                + BUILD
            )
        ),
        lambda ckpt: "extra0.w" in ckpt and foreign("os.system")(ckpt),
    ),
]

SIDE_DOORS = [
    "reduce-os-system",
    "inst",
    "obj",
    "newobj-class",
    "popped-again",
    "build-on-module",
    "call-of-a-call",
]
DOORS = [
    *(
        opens(
            f"legacy-{n}", legacy(state(PAYLOADS[n][0], legacy_ids=True)), foreign(PAYLOADS[n][1])
        )
        for n in SIDE_DOORS
    ),
    *(opens(f"tar-{n}", tar(stream(PAYLOADS[n][0])), foreign(PAYLOADS[n][1])) for n in SIDE_DOORS),
]


def _pickled(name: str, *parts: bytes, error: type[Exception] = PickleError) -> Case:
    """A pickle that breaks a rule, in a zip."""
    return refused(f"pickle-{name}", torch_zip(stream(*parts)), error)


REFUSED = [
    _pickled("stack-global-int-module", integer(1), text("system"), STACK_GLOBAL),
    _pickled("stack-global-bytes-name", text("os"), binbytes(b"system"), STACK_GLOBAL),
    _pickled("stack-global-tuple-name", text("os"), tuple_of(text("system")), STACK_GLOBAL),
    _pickled("stack-global-global-name", text("os"), named("os", "system"), STACK_GLOBAL),
    _pickled("stack-global-computed-name", text("os"), SPLIT, STACK_GLOBAL),
    _pickled("stack-global-underflow", text("os"), STACK_GLOBAL),
    _pickled("global-name-not-utf8", b"cos\n\xff\xfe\n"),
    _pickled("global-name-too-long", b"c" + b"a" * 5000 + b"\nb\n"),
    _pickled("global-without-newline", b"cos", error=FormatError),
    _pickled("reduce-of-an-int", integer(1), EMPTY_TUPLE, REDUCE),
    _pickled("reduce-of-text", text("os.system"), tuple_of(SHELL), REDUCE),
    _pickled("reduce-of-a-storage", storage(), EMPTY_TUPLE, REDUCE),
    _pickled("reduce-with-list-arguments", named("os", "system"), list_of(SHELL), REDUCE),
    _pickled("reduce-with-no-arguments", named("os", "system"), REDUCE),
    _pickled("newobj-with-dict-arguments", named("os", "system"), EMPTY_DICT, NEWOBJ),
    _pickled("newobj-of-an-int", integer(1), EMPTY_TUPLE, NEWOBJ),
    _pickled(
        "newobj-ex-int-keywords", named("a", "B"), EMPTY_TUPLE, dict_of(integer(1), NONE), NEWOBJ_EX
    ),
    _pickled("newobj-ex-list-keywords", named("a", "B"), EMPTY_TUPLE, EMPTY_LIST, NEWOBJ_EX),
    _pickled("obj-without-a-class", MARK, OBJ),
    _pickled("obj-without-a-mark", named("a", "B"), OBJ),
    _pickled("inst-without-a-mark", inst("os", "system")),
    _pickled(
        "calls-computed-by-calls",
        named("a", "b"),
        EMPTY_TUPLE,
        (REDUCE + EMPTY_TUPLE) * 200,
        REDUCE,
    ),
    _pickled("build-on-an-int", integer(1), EMPTY_DICT, BUILD),
    _pickled("build-on-a-list", EMPTY_LIST, EMPTY_DICT, BUILD),
    _pickled("build-on-a-tensor", weight(), dict_of(text("data"), SYSTEM), BUILD),
    _pickled("build-twice", SYSTEM, EMPTY_DICT, BUILD, EMPTY_DICT, BUILD),
    _pickled("ext1", b"\x82\x01"),
    _pickled("ext2", b"\x83\x01\x00"),
    _pickled("ext4", b"\x84\x01\x00\x00\x00"),
    _pickled("ext4-negative", b"\x84\xff\xff\xff\xff"),
    _pickled("next-buffer", b"\x97"),
    _pickled("readonly-buffer", b"\x97\x98"),
    _pickled("unknown-opcode-0xff", b"\xff"),
    _pickled("unknown-opcode-0x00", b"\x00"),
    _pickled("persid-text", b"Pos.system\n"),
    _pickled("persid-of-a-call", SYSTEM, PERSID),
    _pickled("persid-of-none", NONE, PERSID),
    _pickled("persid-of-a-list", list_of(text("storage")), PERSID),
    _pickled("persid-too-short", tuple_of(text("storage")), PERSID),
    _pickled("persid-empty-tuple", EMPTY_TUPLE, PERSID),
    _pickled("persid-too-long", tuple_of(text("storage"), *[NONE] * 40), PERSID),
    _pickled("persid-legacy-six-tuple", storage(view=NONE)),
    _pickled(
        "persid-module-source",
        tuple_of(text("module"), named("m", "M"), text("m.py"), text("import os")),
        PERSID,
    ),
    _pickled(
        "persid-of-an-array",
        tuple_of(
            call(
                "numpy.core.multiarray",
                "scalar",
                call("numpy", "dtype", text("i1"), integer(0), integer(1)),
                binbytes(b"\1"),
            ),
            NONE,
            NONE,
            NONE,
            NONE,
        ),
        PERSID,
    ),
    _pickled(
        "persid-tag-is-an-array",
        storage(
            tag=call(
                "numpy._core.numeric",
                "_frombuffer",
                binbytes(b"\1\2"),
                call("numpy", "dtype", text("u1"))
                + tuple_of(
                    integer(3), text("|"), NONE, NONE, NONE, integer(-1), integer(-1), integer(0)
                )
                + BUILD,
                tuple_of(integer(2)),
                text("C"),
            )
        ),
    ),
    _pickled("persid-storage-class-unknown", storage(kind="EvilStorage")),
    _pickled("persid-storage-class-foreign", storage(kind=named("os", "system"))),
    _pickled("persid-storage-class-called", storage(kind=SYSTEM)),
    _pickled("persid-key-is-int", storage(key=integer(0))),
    _pickled("persid-key-is-bytes", storage(key=binbytes(b"0"))),
    _pickled("persid-key-is-a-call", storage(key=SYSTEM)),
    _pickled("persid-location-is-int", storage(location=integer(0))),
    _pickled("missing-stop", b"", error=FormatError),
    refused("pickle-no-bytes", torch_zip(b""), Truncated),
    refused("pickle-only-proto", torch_zip(proto(2)), Truncated),
    refused("pickle-without-stop", torch_zip(proto(2) + SYSTEM), Truncated),
    refused("pickle-two-streams", torch_zip(stream(EMPTY_DICT) + stream(SYSTEM)), PickleError),
    refused("pickle-trailing-newline", torch_zip(stream(EMPTY_DICT) + b"\n"), PickleError),
    refused("pickle-payload-behind-stop", torch_zip(state() + SYSTEM + STOP), PickleError),
    refused(
        "pickle-payload-before-broken-tail", torch_zip(proto(2) + SYSTEM + b"X\xff"), FormatError
    ),
    refused(
        "pickle-payload-before-bad-opcode", torch_zip(proto(2) + SYSTEM + b"\xfe."), PickleError
    ),
    refused(
        "pickle-payload-before-underflow",
        torch_zip(proto(2) + SYSTEM + POP + POP + STOP),
        PickleError,
    ),
    refused("pickle-proto-6", torch_zip(stream(EMPTY_DICT, protocol=6)), PickleError),
    refused("pickle-proto-255", torch_zip(stream(EMPTY_DICT, protocol=255)), PickleError),
    refused("pickle-proto-late", torch_zip(b"}" + proto(2) + STOP), PickleError),
    refused("pickle-proto-twice", torch_zip(proto(2) + proto(2) + b"}."), PickleError),
    refused("pickle-stop-on-empty-stack", torch_zip(stream()), PickleError),
    refused("pickle-stop-with-two-values", torch_zip(stream(NONE, NONE)), PickleError),
    refused("pickle-stop-inside-a-mark", torch_zip(stream(MARK, NONE)), PickleError),
    refused("pickle-frame-past-the-end", torch_zip(proto(4) + frame(b"}.", 3)), FormatError),
    refused("pickle-frame-of-2^63", torch_zip(proto(4) + frame(b"}.", 1 << 63)), FormatError),
    refused(
        "pickle-frame-of-2^64-1", torch_zip(proto(4) + frame(b"}.", (1 << 64) - 1)), FormatError
    ),
    refused(
        "pickle-frame-straddled-by-text",
        torch_zip(proto(4) + frame(text("abcdef") + STOP, 7)),
        FormatError,
    ),
    refused(
        "pickle-frame-straddled-by-number",
        torch_zip(proto(4) + frame(b"K\x01" + STOP, 1)),
        FormatError,
    ),
    refused(
        "pickle-frame-straddled-by-line",
        torch_zip(proto(4) + frame(b"cos\nsystem\n" + STOP, 5)),
        FormatError,
    ),
    refused("pickle-frames-nested", torch_zip(proto(4) + frame(frame(b"}."))), PickleError),
    refused("pickle-frame-empty", torch_zip(proto(4) + frame(b"") + b"}."), PickleError),
    refused("pickle-frame-header-cut", torch_zip(proto(4) + b"\x95\x01\x00"), Truncated),
    refused("pickle-stop-before-frame-end", torch_zip(proto(4) + frame(b"}.}}}")), PickleError),
    _pickled("get-of-nothing", get(7)),
    _pickled("get-long-of-nothing", b"j\xff\xff\xff\xff"),
    _pickled("get-text-negative", b"g-1\n"),
    _pickled("put-on-empty-stack", put(0), NONE),
    _pickled("put-text-not-a-number", NONE, b"p1_0\n"),
    _pickled("put-text-unicode-digit", NONE, b"p\xd9\xa1\n"),
    _pickled("memoize-on-empty-stack", MEMOIZE, NONE),
    _pickled("pop-of-nothing", POP, NONE),
    _pickled("pop-mark-of-nothing", POP_MARK, NONE),
    _pickled("dup-of-nothing", DUP, NONE),
    _pickled("dup-across-a-mark", NONE, MARK, DUP),
    _pickled("tuple-without-a-mark", NONE, TUPLE),
    _pickled("tuple2-of-one", NONE, TUPLE2),
    _pickled("list-without-a-mark", LIST),
    _pickled("dict-with-odd-items", MARK, NONE, DICT),
    _pickled("setitems-odd", EMPTY_DICT, MARK, NONE, SETITEMS),
    _pickled("text-not-utf8", text(b"\xff\xfe")),
    _pickled("string-not-quoted", b"Sabc\n"),
    _pickled("string-bad-escape", b"S'\\q'\n"),
    _pickled("unicode-bad-escape", b"V\\u12\n"),
    _pickled("unicode-escape-beyond-unicode", b"V\\Uffffffff\n"),
    _pickled("int-not-decimal", b"I0x10\n"),
    _pickled("int-with-underscore", b"I1_0\n"),
    _pickled("int-arabic-digits", b"I\xd9\xa1\n"),
    _pickled("float-not-a-float", b"Feval(1)\n"),
    refused(
        "zip-text-record-holds-a-pickle", torch_zip(state(), version=stream(SYSTEM)), FormatError
    ),
    refused(
        "torchscript-broken-constants",
        torchscript(stream(EMPTY_DICT), stream(SYSTEM)[:-1]),
        Truncated,
    ),
    refused(
        "torchscript-without-data",
        torchscript(b"", stream(EMPTY_TUPLE)),
        FormatError,
        LimitExceeded,
    ),
]

CASES = [*OPENING, *DOORS, *REFUSED]
