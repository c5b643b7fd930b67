"""Distributed checkpoints: a `.metadata` that calls, lies or explodes, and items that are not what it says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from holdfast.errors import (
    FormatError,
    LimitExceeded,
    MetadataError,
    PickleError,
    StoreError,
    Truncated,
    UnsafePath,
)
from tests.formats.dcp.craft_dcp import (
    FILE,
    FILESYSTEM,
    METADATA,
    SEVEN,
    W,
    chunk,
    fields,
    index,
    info,
    metadata,
    note,
    properties,
    record,
    size,
    tensor,
    value,
)
from tests.formats.dcp.craft_dcp import folder as files_of
from tests.formats.zip.craft import Item, build

from .case import Case, either, foreign, opens, refused
from .cases_directories import fifo, folder, link
from .craft_pickle import (
    APPENDS,
    BUILD,
    DUP,
    EMPTY_DICT,
    EMPTY_LIST,
    EMPTY_TUPLE,
    FALSE,
    MARK,
    NEWOBJ,
    NONE,
    OBJ,
    POP,
    REDUCE,
    SETITEM,
    SETITEMS,
    STACK_GLOBAL,
    TUPLE,
    TUPLE1,
    TUPLE2,
    call,
    dict_of,
    doubled,
    get,
    inst,
    integer,
    list_of,
    named,
    nested,
    number,
    put,
    short_text,
    stream,
    text,
    tuple_of,
)
from .craft_torch import records, storage, torch_zip
from .craft_torch import tensor as rebuilt

__all__ = ["CASES"]

SYSTEM = call("os", "system", text("true"))
ONE = {"w": tensor([2, 2], [chunk([0, 0], [2, 2])])}
PLACE = (index("w", [0, 0]), info(FILE, 0, len(W)))
PLAIN = records(stream(rebuilt(storage())))
MANY = 20_000
"""Objects of a few bytes each that all name one large thing."""


def of(content: bytes, data: bytes = W) -> Callable[[Path], Path]:
    """A directory with this `.metadata`."""
    return folder({".metadata": content, FILE: data})


def with_item(content: bytes) -> Callable[[Path], Path]:
    """A directory whose tensor has this item."""
    return folder(files_of(ONE, [(index("w", [0, 0]), content)]))


def with_value(content: bytes) -> Callable[[Path], Path]:
    return folder(files_of({"x": value()}, [(index("x"), content)]))


def lying(name: str, where: bytes, *errors: type[Exception]) -> Case:
    return refused(f"dcp-{name}", of(metadata(ONE, [(index("w", [0, 0]), where)])), *errors)


def repeated(seed: bytes, one: bytes, times: int = MANY) -> bytes:
    """A `.metadata` with a list of many objects beside what it should have; `seed` is remembered as 0 first."""
    return stream(seed + put(0) + POP + EMPTY_LIST + MARK + one * times + APPENDS)


def shared(kind: tuple[str, str], seed: bytes, state: bytes) -> bytes:
    """Many records of one class, whose states name one large thing (memo entry 0)."""
    head = seed + put(0) + POP + named(*kind) + put(1) + POP
    return stream(
        head + EMPTY_LIST + MARK + (get(1) + EMPTY_TUPLE + NEWOBJ + state + BUILD) * MANY + APPENDS
    )


def long_list(element: bytes, count: int = MANY) -> bytes:
    return EMPTY_LIST + MARK + element * count + APPENDS


def many_tensors(count: int) -> bytes:
    pairs = b"".join(text(f"t{i}") + value() for i in range(count))
    return metadata(EMPTY_DICT + MARK + pairs + SETITEMS, [])


def many_ranks(count: int) -> dict[str, bytes]:
    """Each rank lists the same chunks."""
    listed = list_of(*(chunk([2 * i, 0], [2, 2]) for i in range(count)))
    return {
        f"__{i}.metadata": metadata({"w": tensor([2 * count, 2], listed)}, []) for i in range(count)
    } | {FILE: W}


def deep_paths(count: int) -> bytes:
    """Every path is 60 steps of one long text."""
    names = [f"t{i}" for i in range(count)]
    steps = text("x" * 100_000) + put(0) + POP
    planner = (
        EMPTY_DICT + MARK + b"".join(text(n) + MARK + get(0) * 60 + TUPLE for n in names) + SETITEMS
    )
    entries = (
        EMPTY_DICT
        + MARK
        + b"".join(text(n) + named("their", "Entry") + EMPTY_TUPLE + REDUCE for n in names)
        + SETITEMS
    )
    state = (
        EMPTY_DICT
        + MARK
        + text("state_dict_metadata")
        + entries
        + text("planner_data")
        + planner
        + SETITEMS
    )
    return stream(steps + named(METADATA, "Metadata") + EMPTY_TUPLE + NEWOBJ + state + BUILD)


def far_positions(count: int) -> bytes:
    """Every name is alone in a list of its own, at a far position."""
    names = [f"b{i}" for i in range(count)]
    planner = b"".join(text(f"{n}.{count}") + tuple_of(text(n), integer(count)) for n in names)
    entries = b"".join(
        text(f"{n}.{count}") + named("their", "Entry") + EMPTY_TUPLE + REDUCE for n in names
    )
    state = fields(
        state_dict_metadata=EMPTY_DICT + MARK + entries + SETITEMS,
        planner_data=EMPTY_DICT + MARK + planner + SETITEMS,
    )
    return stream(record(METADATA, "Metadata", state))


def deflated(name: str, content: bytes) -> bytes:
    """An honest item one record of which is deflated."""
    plain = records(stream(rebuilt(storage())), {"0": content} if name.endswith("data/0") else None)
    return build([Item(r.name, r.content, method=8 if r.name == name else 0) for r in plain])


def grid(side: int) -> bytes:
    """A tensor in side² chunks, of which the last is somewhere else."""
    corners = [(2 * i, 2 * j) for i in range(side) for j in range(side)]
    corners[-1] = (0, 0)
    chunks = [chunk(corner, [2, 2]) for corner in corners]
    items = [
        index("w", corner, i) + info(FILE, i * len(W), len(W)) for i, corner in enumerate(corners)
    ]
    whole = tensor([2 * side, 2 * side], list_of(*chunks))
    return metadata({"w": whole}, EMPTY_DICT + MARK + b"".join(items) + SETITEMS)


CALLS: Sequence[tuple[str, bytes]] = (
    ("reduce", SYSTEM),
    ("inst", MARK + text("true") + inst("os", "system")),
    ("obj", MARK + named("os", "system") + text("true") + OBJ),
    ("newobj", named("os", "system") + tuple_of(text("true")) + NEWOBJ),
    (
        "stack-global",
        short_text("os") + short_text("system") + STACK_GLOBAL + tuple_of(text("true")) + REDUCE,
    ),
    ("build", named("os", "environ") + dict_of(text("PATH"), text("/")) + BUILD),
    (
        "getattr",
        call("builtins", "getattr", named("os", "path"), text("os")) + EMPTY_TUPLE + REDUCE,
    ),
    ("of-a-torch-function", call("torch.hub", "load", text("evil/repo"))),
    (
        "of-a-near-name",
        call("torch.distributed.checkpoint.metadata", "Metadata.__init__", text("x")),
    ),
    (
        "reader-of-torch",
        call("torch.distributed.checkpoint.filesystem", "FileSystemReader", text("/")),
    ),
)

CASES: list[Case] = [
    opens("dcp-honest", with_item(W), lambda ckpt: ckpt["w"].numpy().tolist() == [[1, 2], [3, 4]]),
    *(refused(f"dcp-root-call-{name}", of(stream(payload)), PickleError) for name, payload in CALLS),
    *(
        opens(f"dcp-entry-call-{name}", of(metadata({**ONE, "x": payload}, [PLACE])), lambda ckpt: len(ckpt.foreign) > 0)
        for name, payload in CALLS
    ),
    opens("dcp-call-in-the-paths", of(metadata(ONE, [PLACE], planner=dict_of(text("w"), SYSTEM))), foreign("os.system")),
    opens("dcp-call-as-the-paths", of(metadata(ONE, [PLACE], planner=SYSTEM)), foreign("os.system")),
    opens("dcp-call-as-the-version", of(metadata(ONE, [PLACE], version=SYSTEM)), foreign("os.system")),
    opens("dcp-call-as-the-folder", of(metadata(ONE, [PLACE], meta=note(SYSTEM))), foreign("os.system")),
    opens("dcp-call-as-the-save-id", of(metadata(ONE, [PLACE], meta=note(save_id=SYSTEM))), foreign("os.system")),
    opens("dcp-call-beside", of(metadata(ONE, [PLACE], more={"evil": SYSTEM})), foreign("os.system")),
    opens("dcp-call-that-is-popped", of(stream(SYSTEM + POP + metadata(ONE, [PLACE])[2:-1])), foreign("os.system")),
    refused("dcp-call-as-the-items", of(metadata(ONE, SYSTEM)), PickleError),
    refused("dcp-call-as-an-item", of(metadata(ONE, [(index("w", [0, 0]), SYSTEM)])), PickleError),
    refused("dcp-call-as-a-place", of(metadata(ONE, [(SYSTEM, PLACE[1])])), PickleError),
    refused("dcp-call-as-a-file-name", of(metadata(ONE, [(PLACE[0], info(SYSTEM))])), PickleError),
    refused("dcp-call-as-a-size", of(metadata({"w": tensor(SYSTEM, [])}, []))),
    refused("dcp-call-as-the-chunks", of(metadata({"w": tensor([2, 2], SYSTEM)}, [PLACE])), PickleError),
    refused("dcp-call-as-a-chunk", of(metadata({"w": tensor([2, 2], [SYSTEM])}, [PLACE])), PickleError),
    refused("dcp-call-as-properties", of(metadata({"w": tensor([2, 2], [], SYSTEM)}, [PLACE])), PickleError),
    refused("dcp-call-before-a-broken-tail", of(stream(SYSTEM)[:-1])),
    refused("dcp-two-streams", of(metadata(ONE, [PLACE]) + stream(SYSTEM))),
    refused("dcp-persistent-id", of(stream(text("x") + b"Q"))),
    refused("dcp-rank-file-that-calls", folder({"__0.metadata": stream(SYSTEM), FILE: W}), PickleError),
    # Cost.
    refused("dcp-deep", of(stream(nested(EMPTY_LIST, b"a", 50_000))), FormatError, LimitExceeded),
    either("dcp-deep-paths", of(metadata(ONE, [PLACE], planner=dict_of(text("w"), nested(b"", TUPLE1, 50_000))))),
    refused("dcp-marks", of(stream(MARK * 100_000)), LimitExceeded),
    refused(
        "dcp-hash-bomb",
        of(metadata(ONE, EMPTY_DICT + doubled(60, EMPTY_TUPLE) + PLACE[1] + SETITEM)), LimitExceeded, PickleError,
    ),
    refused(
        "dcp-colliding-keys",
        of(metadata(dict_of(*(p for i in range(60_000) for p in (number(((1 << 61) - 1) * (i + 1), 16), NONE))), [])),
        LimitExceeded, PickleError,
    ),
    refused("dcp-expanding-root", of(stream(doubled(80, EMPTY_LIST, DUP + TUPLE2))), FormatError),
    refused("dcp-sparse-memo", of(stream(EMPTY_DICT + put(1 << 31)))),
    refused("dcp-memo-of-nothing", of(stream(get(200)))),
    refused(
        "dcp-one-long-size-in-many",
        of(repeated(MARK + integer(1) * 100_000 + TUPLE, named("torch", "Size") + get(0) + TUPLE1 + REDUCE)),
    ),
    refused(
        "dcp-one-long-list-of-chunks-in-many",
        of(shared(
            (METADATA, "TensorStorageMetadata"),
            properties() + put(2) + POP + size([2, 2]) + put(3) + POP + long_list(get(3)),
            dict_of(text("properties"), get(2), text("size"), get(3), text("chunks"), get(0)),
        )),
    ),
    refused(
        "dcp-one-long-offset-in-many",
        of(shared(
            (METADATA, "MetadataIndex"), MARK + integer(1) * 100_000 + TUPLE,
            dict_of(text("fqn"), text("w"), text("offset"), get(0)),
        )),
    ),
    refused(
        "dcp-one-long-list-of-transforms-in-many",
        of(shared(
            (FILESYSTEM, "_StorageInfo"), long_list(text("x"), 100_000),
            dict_of(text("relative_path"), text("x"), text("offset"), integer(0), text("length"), integer(0),
                    text("transform_descriptors"), get(0)),
        )),
    ),
    refused(
        "dcp-one-large-state-in-many",
        of(shared((METADATA, "Metadata"), dict_of(text("state_dict_metadata"), EMPTY_DICT,
                                                  *(p for i in range(20_000) for p in (text(f"k{i}"), NONE))), get(0))),
    ),
    refused("dcp-many-names-without-items", of(many_tensors(10_000)), MetadataError),
    refused("dcp-many-ranks-of-many-chunks", folder(many_ranks(60)), MetadataError),
    opens("dcp-long-texts-in-every-path", of(deep_paths(5_000))),
    opens("dcp-far-positions", of(far_positions(5_000))),
    refused("dcp-grid-of-chunks", of(grid(60), W * 3_600), MetadataError),
    refused("dcp-integer-of-1000-bytes", of(stream(b"\x8b" + (1000).to_bytes(4, "little") + bytes(1000))), LimitExceeded),
    # Places.
    lying("path-absolute", info("/etc/passwd", 0, 100), UnsafePath),
    lying("path-climbs", info("../secret.safetensors", 0, 100), UnsafePath),
    lying("path-climbs-inside", info(f"x/../{FILE}", 0, len(W)), UnsafePath),
    lying("path-backslash", info("..\\secret", 0, 100), UnsafePath),
    lying("path-nul", info(f"{FILE}\0", 0, len(W)), UnsafePath),
    lying("path-is-the-metadata", info(".metadata", 0, 300)),
    lying("path-missing", info("__7_7.distcp", 0, 100), StoreError),
    lying("path-of-10000-characters", info("x" * 10_000, 0, 100), StoreError),
    lying("path-ansi-escape", info("\x1b[2J", 0, 100), StoreError),
    lying("item-past-the-end", info(FILE, 10, len(W)), Truncated),
    lying("item-at-2^62", info(FILE, number(1 << 62, 9), len(W)), MetadataError),
    lying("item-negative", info(FILE, -100, len(W)), MetadataError),
    lying("item-of-no-bytes", info(FILE, 0, 0), MetadataError),
    lying("item-cut-short", info(FILE, 0, len(W) - 1)),
    lying("item-shifted", info(FILE, 1, len(W) - 1)),
    refused(
        "dcp-path-to-a-link-outside",
        folder({".metadata": metadata(ONE, [PLACE])}, link(FILE, "../secret.safetensors")), UnsafePath,
    ),
    refused(
        "dcp-path-to-a-device",
        folder({".metadata": metadata(ONE, [PLACE])}, link(FILE, "/dev/zero")), UnsafePath, StoreError,
    ),
    refused(
        "dcp-path-to-a-fifo",
        folder({".metadata": metadata(ONE, [(PLACE[0], info("x.safetensors", 0, len(W)))]), FILE: W}, fifo), UnsafePath, StoreError,
    ),
    refused(
        "dcp-metadata-is-a-link-outside",
        folder({FILE: W}, link(".metadata", "../secret.safetensors")), UnsafePath, FormatError,
    ),
    refused(
        "dcp-metadata-is-a-device",
        folder({FILE: W, "__1_0.distcp": W}, link(".metadata", "/dev/zero")), UnsafePath, StoreError, FormatError,
    ),
    refused("dcp-data-without-metadata", folder({FILE: W, "__1_0.distcp": W})),
    refused("dcp-data-file-cut-to-nothing", folder({".metadata": metadata(ONE, [PLACE]), FILE: b""}), Truncated),
    refused("dcp-data-file-of-zeros", folder({".metadata": metadata(ONE, [PLACE]), FILE: bytes(len(W))})),
    # Items.
    refused("dcp-item-calls", with_item(torch_zip(stream(SYSTEM))), PickleError),
    refused("dcp-item-calls-and-pops", with_item(torch_zip(stream(SYSTEM + POP + rebuilt(storage())))), PickleError),
    refused("dcp-item-mentions", with_item(torch_zip(stream(named("os", "system") + POP + rebuilt(storage())))), PickleError),
    opens("dcp-value-calls", with_value(torch_zip(stream(SYSTEM), {})), foreign("os.system")),
    opens("dcp-value-calls-and-pops", with_value(torch_zip(stream(SYSTEM + POP + NONE), {})), foreign("os.system")),
    refused("dcp-value-allocates", with_value(torch_zip(stream(call("builtins", "bytearray", integer(1 << 30))), {}))),
    either("dcp-value-deep", with_value(torch_zip(stream(nested(EMPTY_LIST, b"a", 30_000)), {}))),
    opens("dcp-value-expands", with_value(torch_zip(stream(doubled(60, EMPTY_LIST)), {}))),
    refused(
        "dcp-value-of-one-long-size-in-many",
        with_value(torch_zip(repeated(MARK + integer(1) * 100_000 + TUPLE, named("torch", "Size") + get(0) + TUPLE1 + REDUCE), {})),
    ),
    refused("dcp-item-bomb", with_item(deflated("archive/data/0", bytes(16 << 20)))),
    refused("dcp-item-with-a-deflated-pickle", with_item(deflated("archive/data.pkl", b""))),
    refused(
        "dcp-item-of-2^40-elements", with_item(torch_zip(stream(rebuilt(storage(count=1 << 40), (1 << 40,), (1,))))), MetadataError
    ),
    refused("dcp-item-expanded", with_item(torch_zip(stream(rebuilt(storage(), (1 << 20, 1 << 20), (0, 0))))), MetadataError),
    refused("dcp-item-is-torchscript", with_item(build([*PLAIN, Item("archive/constants.pkl", stream(b")"))]))),
    refused("dcp-item-in-two-folders", with_item(build([*PLAIN, Item("other/data.pkl", stream(SYSTEM))]))),
    refused("dcp-item-holds-a-second-zip", with_item(W + W)),
    refused(
        "dcp-items-overlap",
        of(metadata(dict.fromkeys("ab", ONE["w"]), [(index(n, [0, 0]), info(FILE, i, len(W) - i)) for i, n in enumerate("ab")])),
        MetadataError,
    ),
    refused(
        "dcp-sizes-that-multiply",
        of(metadata({"w": tensor([1 << 31, 1 << 31], [chunk([0, 0], [2, 2])])}, [PLACE])), MetadataError,
    ),
    refused("dcp-rank-of-10000", of(metadata({"w": tensor([1] * 10_000, [])}, []))),
    refused("dcp-float-size", of(metadata({"w": tensor(size(call("torch", "Size", tuple_of(b"G" + bytes(8)))), [])}, []))),
    refused(
        "dcp-properties-of-another-form",
        of(metadata({"w": tensor([2, 2], [], record(METADATA, "TensorProperties", fields(x=FALSE)))}, [])),
    ),
    opens("dcp-values-beside", folder(files_of({**ONE, "s": value()}, [(index("w", [0, 0]), W), (index("s"), SEVEN)]))),
]  # fmt: skip
