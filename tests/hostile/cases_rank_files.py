"""Folders of rank files whose names, meshes and placements lie. The honest one is as torch 2.0 to 2.9 write a DTensor."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from pathlib import Path

from holdfast.errors import (
    FormatError,
    LimitExceeded,
    MetadataError,
    PickleError,
    ReplicasDiffer,
    UnknownFormat,
    Unsupported,
)
from tests.formats.zip.craft import Item, build

from .case import Case, Check, either, foreign, opens, refused
from .craft_pickle import (
    APPENDS,
    BUILD,
    EMPTY_DICT,
    EMPTY_LIST,
    EMPTY_TUPLE,
    FALSE,
    MARK,
    NEWOBJ,
    NONE,
    POP,
    SETITEMS,
    TUPLE,
    TUPLE2,
    call,
    dict_of,
    doubled,
    get,
    integer,
    named,
    put,
    stream,
    text,
    tuple_of,
)
from .craft_torch import records, storage, tensor, torch_zip

__all__ = ["CASES", "HONEST"]

TENSOR, PLACEMENTS = "torch.distributed.tensor", "torch.distributed.tensor.placement_types"
SPEC = "torch.distributed.tensor._dtensor_spec"

ROWS = struct.pack("<4f", 1, 2, 3, 4)
"""Two rows of two elements: what a rank has."""

SYSTEM = call("os", "system", text("true"))
MANY = 20_000


def made(module: str, name: str, *pairs: bytes) -> bytes:
    """NEWOBJ and BUILD."""
    return named(module, name) + EMPTY_TUPLE + NEWOBJ + dict_of(*pairs) + BUILD


def mesh(
    ranks: Sequence[int] = (0, 1), key: str = "m", count: int | None = None, *more: bytes
) -> bytes:
    n = len(ranks) if count is None else count
    row = tensor(storage(key, n, "IntStorage"), (n,), (1,))
    return made(
        "torch.distributed.device_mesh",
        "DeviceMesh",
        text("device_type"),
        text("cpu"),
        text("mesh"),
        row,
        *more,
    )


def shard(dim: bytes = integer(0), name: str = "Shard", *more: bytes) -> bytes:
    return made(PLACEMENTS, name, text("dim"), dim, *more)


def ints(*values: int) -> bytes:
    return tuple_of(*map(integer, values))


def dtensor(
    *,
    size: bytes = ints(4, 2),
    of: bytes | None = None,
    placements: bytes = tuple_of(shard()),
    local: bytes | None = None,
    meta: bytes | None = None,
    more: Sequence[bytes] = (),
) -> bytes:
    """What torch writes for a DTensor of 4 × 2 in two halves; each part may be something else."""
    said = (
        named(SPEC, "TensorMeta")
        + tuple_of(size if meta is None else meta, ints(2, 1), named("torch", "float32"))
        + NEWOBJ
    )
    spec = made(
        SPEC, "DTensorSpec", text("mesh"), mesh() if of is None else of, text("placements"), placements, text("tensor_meta"), said,
        *more,
    )  # fmt: skip
    slots = dict_of(
        text("_local_tensor"), tensor(storage()) if local is None else local, text("_spec"), spec
    )
    args = tuple_of(
        named(TENSOR, "DTensor"),
        named("torch", "float32"),
        size,
        ints(2, 1),
        integer(0),
        NONE,
        NONE,
        FALSE,
    )
    return call(
        "torch._tensor", "_rebuild_from_type_v2", named("torch._utils", "_rebuild_wrapper_subclass"), named(TENSOR, "DTensor"),
        args, tuple_of(NONE, slots),
    )  # fmt: skip


def archive(pickle: bytes, ranks: Sequence[int] = (0, 1), data: bytes = ROWS) -> bytes:
    return torch_zip(pickle, {"0": data, "m": struct.pack(f"<{len(ranks)}i", *ranks)})


def folder(files: dict[str, bytes]) -> Callable[[Path], Path]:
    def make(place: Path) -> Path:
        root = place / "actor"
        root.mkdir()
        for name, content in files.items():
            (root / name).write_bytes(content)
        return root

    return make


def name(rank: int, world: int = 2) -> str:
    return f"model_world_size_{world}_rank_{rank}.pt"


def two(first: bytes, second: bytes | None = None, **more: object) -> Callable[[Path], Path]:
    """Two ranks that say this of `w`; the second one the same."""
    states = [
        stream(dict_of(text("w"), one)) for one in (first, first if second is None else second)
    ]
    return folder({name(rank): archive(state, **more) for rank, state in enumerate(states)})  # type: ignore[arg-type]


def lying(label: str, *errors: type[Exception], **more: object) -> Case:
    return refused(f"ranks-{label}", two(dtensor(**more)), *(errors or (MetadataError,)))  # type: ignore[arg-type]


def shared(seed: bytes, one: bytes, times: int = MANY) -> bytes:
    """A list of many values that all name one large thing, which is remembered as 0."""
    return stream(seed + put(0) + POP + EMPTY_LIST + MARK + one * times + APPENDS)


def both(pickle: bytes) -> Callable[[Path], Path]:
    return folder({name(rank): archive(pickle) for rank in range(2)})


def long_tuple(count: int = MANY) -> bytes:
    return MARK + integer(1) * count + TUPLE


def no_sums(pickle: bytes, data: bytes) -> bytes:
    """A file whose storages have no checksum worth the name: the value is a view of a part of one."""
    return build(
        [*records(pickle, {"0": data + data}), Item("archive/data/m", struct.pack("<2i", 0, 1))]
    )


def four(*more: bytes) -> Callable[[Path], Path]:
    """Four ranks on a mesh of 2 × 2, a row each, in the order that the spec has; as torch 2.10 to 2.12 write the mesh."""
    layout = made("m", "_MeshLayout", text("shape"), ints(2, 2), text("stride"), ints(2, 1))
    ranks = tensor(storage("m", 4, "IntStorage"), (4,), (1,))
    square = made(
        "torch.distributed.device_mesh",
        "DeviceMesh",
        text("_layout"),
        layout,
        text("_rank_map"),
        ranks,
    )
    row = dtensor(
        of=square,
        placements=tuple_of(shard(), shard()),
        local=tensor(storage(), (1, 2), (2, 1)),
        more=more,
    )
    pickle = stream(dict_of(text("w"), row))
    return folder(
        {
            name(i, 4): archive(pickle, (0, 1, 2, 3), struct.pack("<4f", i, i, 9, 9))
            for i in range(4)
        }
    )


def rows(*values: int) -> Check:
    return lambda ckpt: ckpt["w"].numpy()[:, 0].tolist() == list(values)


HONEST = two(dtensor())

WHOLE = stream(dict_of(text("w"), tensor(storage("0", 8), offset=1)))

CASES: list[Case] = [
    opens("ranks-honest", HONEST, lambda ckpt: ckpt["w"].numpy().tolist() == [[1, 2], [3, 4], [1, 2], [3, 4]]),
    opens("ranks-nothing-foreign", HONEST, lambda ckpt: not ckpt.foreign and list(ckpt) == ["w"]),
    opens("ranks-honest-layout", four(), rows(0, 1, 2, 3)),
    opens("ranks-honest-order", four(text("shard_order"), tuple_of(tuple_of(integer(0), ints(1, 0)))), rows(0, 2, 1, 3)),
    refused("ranks-a-billion-in-a-name", folder({name(0, 10**9): archive(stream(EMPTY_DICT))}), FormatError),
    refused("ranks-a-number-beyond-all", folder({name(3, 10**17): archive(stream(EMPTY_DICT))}), FormatError),
    refused("ranks-none", folder({name(0, 0): archive(stream(EMPTY_DICT)), "x": b""}), FormatError),
    refused("ranks-no-torch", folder({name(rank): stream(SYSTEM) for rank in range(2)}), UnknownFormat),
    refused("ranks-a-mesh-of-others", two(dtensor(), ranks=(0, 7)), MetadataError),
    refused("ranks-a-mesh-without-oneself", two(dtensor(), ranks=(1, 5)), MetadataError),
    refused("ranks-a-mesh-of-twins", two(dtensor(), ranks=(0, 0)), MetadataError),
    refused("ranks-a-mesh-below-zero", two(dtensor(), ranks=(0, -1)), MetadataError),
    lying("a-mesh-larger-than-the-names", of=mesh((0, 1, 2), "0", 4)),
    lying("a-mesh-expanded-to-a-billion", of=made(
        "torch.distributed.device_mesh", "DeviceMesh", text("mesh"), tensor(storage("m", 2, "IntStorage"), (1 << 30,), (0,)))),
    lying("a-mesh-that-is-text", of=made("torch.distributed.device_mesh", "DeviceMesh", text("mesh"), text("0, 1"))),
    lying("a-mesh-with-a-layout-past-its-ranks", of=made(
        "torch.distributed.device_mesh", "DeviceMesh",
        text("_rank_map"), tensor(storage("m", 2, "IntStorage"), (2,), (1,)),
        text("_layout"), made("m", "_MeshLayout", text("shape"), ints(2), text("stride"), ints(1 << 40)))),
    lying("a-mesh-with-a-layout-of-a-billion", of=made(
        "torch.distributed.device_mesh", "DeviceMesh",
        text("_rank_map"), tensor(storage("m", 2, "IntStorage"), (2,), (1,)),
        text("_layout"), made("m", "_MeshLayout", text("shape"), ints(*[1 << 15] * 3), text("stride"), ints(1, 1, 1)))),
    lying("a-coordinate-of-another", of=mesh((0, 1), "m", None, text("_coordinate_on_dim"), ints(0))),
    lying("a-dimension-that-is-not-there", placements=tuple_of(shard(integer(2)))),
    lying("a-dimension-below-zero", placements=tuple_of(shard(integer(-1)))),
    lying("a-placement-too-few", placements=EMPTY_TUPLE),
    lying("a-placement-of-nobody", Unsupported, placements=tuple_of(made("evil", "Everything"))),
    lying("a-sum", Unsupported, placements=tuple_of(made(PLACEMENTS, "Partial", text("reduce_op"), text("sum")))),
    lying("a-split-of-a-billion", LimitExceeded, MetadataError, size=ints(1 << 40, 2), placements=tuple_of(
        shard(integer(0), "_StridedShard", text("split_factor"), integer(1 << 30)))),
    lying("a-split-of-nothing", placements=tuple_of(shard(integer(0), "_StridedShard", text("split_factor"), integer(0)))),
    lying("a-larger-whole", size=ints(6, 2)),
    lying("a-whole-of-exabytes", size=ints(1 << 61, 2)),
    lying("a-whole-that-overflows", size=ints(*[1 << 61] * 3)),
    lying("a-spec-of-another-shape", meta=ints(2, 4)),
    lying("an-order-of-others", more=(text("shard_order"), tuple_of(tuple_of(integer(1), ints(0))))),
    lying("an-order-that-repeats", more=(text("shard_order"), tuple_of(tuple_of(integer(0), ints(0, 0))))),
    lying("parts-that-overlap", of=mesh((0,), "m", 1)),
    lying("a-local-part-that-is-none", Unsupported, local=call("evil", "tensor")),
    lying("a-local-part-past-its-storage", MetadataError, PickleError, local=tensor(storage(), (2, 2), (2, 9))),
    refused("ranks-two-meshes-of-one-tensor", two(dtensor(), dtensor(of=mesh((1,), "m", 1))), MetadataError),
    refused("ranks-two-placements", two(dtensor(), dtensor(placements=tuple_of(shard(integer(1))))), MetadataError),
    refused("ranks-a-replica-that-is-none", folder({
        name(0): archive(stream(dict_of(text("w"), tensor(storage())))),
        name(1): archive(stream(dict_of(text("w"), tensor(storage()))), data=ROWS[::-1])}), ReplicasDiffer),
    refused("ranks-a-replica-that-differs-inside", folder({
        name(0): no_sums(WHOLE, ROWS), name(1): no_sums(WHOLE, ROWS[:12] + b"\0\0\0\1")}), ReplicasDiffer),
    refused("ranks-parts-of-something-else", two(made("evil", "ShardedTensor", text("shards"), tensor(storage()))), Unsupported),
    refused("ranks-parts-inside-of-others", two(call("evil", "outer", call("evil", "inner", tensor(storage())))), Unsupported),
    opens("ranks-an-object-that-holds-itself", both(stream(dict_of(
        text("w"), named("evil", "Ring") + EMPTY_TUPLE + NEWOBJ + put(0) + dict_of(text("self"), get(0)) + BUILD)))),
    either("ranks-one-dict-in-many-objects", both(shared(
        EMPTY_DICT + MARK + b"".join(integer(i) + NONE for i in range(5000)) + SETITEMS,
        made("evil", "Thing", text("all"), get(0))))),
    refused("ranks-a-dtensor-and-a-plain-one", two(dtensor(), tensor(storage())), MetadataError),
    opens("ranks-code-is-not-run", two(SYSTEM), foreign("os.system")),
    refused("ranks-doubled-containers", both(stream(doubled(40, EMPTY_DICT))), LimitExceeded),
    refused("ranks-doubled-lists", both(stream(doubled(40, EMPTY_LIST, b"2" + TUPLE2))), LimitExceeded),
    either("ranks-one-mesh-many-times", both(shared(
        long_tuple(), dtensor(of=mesh((0, 1), "m", None, text("_coordinate_on_dim"), get(0))), 400))),
    either("ranks-one-shape-many-times", both(shared(long_tuple(), dtensor(size=get(0)), 400))),
    either("ranks-one-order-many-times", both(shared(long_tuple(), dtensor(more=(text("shard_order"), get(0))), 400))),
    either("ranks-one-layout-many-times", both(shared(long_tuple(), dtensor(of=made(
        "torch.distributed.device_mesh", "DeviceMesh", text("_layout"), made("m", "_MeshLayout", text("axes"), get(0)))), 400))),
    either("ranks-many-cuts-of-one-tensor", both(shared(
        tuple_of(shard(integer(0), "_StridedShard", text("split_factor"), integer(1024))),
        dtensor(size=ints(2048, 0), placements=get(0), local=tensor(storage(), (1024, 0), (1, 1))), 400))),
    either("ranks-one-long-text-many-times", both(shared(text("x" * 1_000_000), get(0)))),
    either("ranks-long-names", both(stream(
        text("x" * 100_000) + put(0) + POP + (EMPTY_DICT + MARK + get(0)) * 50 + EMPTY_LIST + MARK + integer(1) * MANY + APPENDS
        + SETITEMS * 50))),
]  # fmt: skip
