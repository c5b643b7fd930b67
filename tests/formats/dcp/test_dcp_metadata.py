"""The forms that `.metadata` has had, and everything else that a pickle of that name may hold."""

from __future__ import annotations

import pytest
from tests.formats.dcp.craft_dcp import (
    FILE,
    METADATA,
    SEVEN,
    SHARDED,
    W,
    chunk,
    fields,
    folder,
    honest,
    index,
    info,
    metadata,
    note,
    opened,
    paths,
    properties,
    record,
    tensor,
    value,
)
from tests.formats.dcp.vocabulary import to_metadata
from tests.hostile.craft_pickle import (
    BUILD,
    EMPTY_DICT,
    NONE,
    TRUE,
    call,
    dict_of,
    integer,
    list_of,
    named,
    stream,
    text,
    tuple_of,
)
from tests.hostile.craft_torch import torch_zip

import holdfast
from holdfast import Opaque, errors
from holdfast.core.limits import Limits
from holdfast.formats.dcp.index import read_metadata
from holdfast.formats.dcp.schema import PickledObject
from holdfast.formats.pickle.table import Spending

OLD = "torch.distributed._shard.checkpoint"
ONE = {"w": tensor([2, 2], [chunk([0, 0], [2, 2])])}
ITEM = [(index("w", [0, 0]), W)]


def values(ckpt: holdfast.Checkpoint) -> list[float]:
    return ckpt["w"].numpy().reshape(-1).tolist()


def test_honest():
    with opened(honest()) as ckpt:
        assert ckpt.format == "dcp"
        assert list(ckpt) == ["w"]
        assert values(ckpt) == [1, 2, 3, 4]
        assert ckpt.tree["step"] == 7
        assert ckpt.foreign == ()
        assert dict(ckpt.metadata) == {
            "version": "1.0.0",
            "save_id": "id-1",
            "checkpoint_id": "ckpt",
        }
        assert not ckpt.notes


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_every_protocol_is_declared_and_read(protocol):
    with opened(folder(ONE, ITEM, protocol=protocol)) as ckpt:
        assert values(ckpt) == [1, 2, 3, 4]


def test_objects_as_protocols_0_and_1_make_them():
    made = call(
        "copy_reg",
        "_reconstructor",
        named(METADATA, "BytesStorageMetadata"),
        named("__builtin__", "object"),
        NONE,
    )
    with opened(folder({"s": made}, [(index("s"), SEVEN)])) as ckpt:
        assert ckpt.tree == {"s": 7}


@pytest.mark.parametrize(
    ("module", "encoding"),
    [
        (SHARDED, "MEM_FORMAT_ENCODING"),
        (f"{OLD}.metadata", "_MEM_FORMAT_ENCODING"),
        (METADATA, "_MEM_FORMAT_ENCODING"),
    ],
)
def test_properties_of_every_time(module, encoding):
    props = properties(module=module, encoding=encoding, grad=TRUE)
    with opened(folder({"w": tensor([2, 2], [chunk([0, 0], [2, 2])], props)}, ITEM)) as ckpt:
        assert values(ckpt) == [1, 2, 3, 4]
        assert ckpt["w"].traits.requires_grad


@pytest.mark.parametrize(
    ("more", "strides"), [(tuple_of(integer(2), integer(1)), (2, 1)), (NONE, None), (b"", None)]
)
def test_properties_with_strides_as_torch_2_15_writes_them(more, strides):
    with opened(
        folder({"w": tensor([2, 2], [chunk([0, 0], [2, 2])], properties(more=more))}, ITEM)
    ) as ckpt:
        assert values(ckpt) == [1, 2, 3, 4]
        assert ckpt.describe().state_dict_metadata["w"].properties.strides == strides


@pytest.mark.parametrize(
    "more",
    [text("rows"), integer(2), tuple_of(integer(2), text("one")), tuple_of(*[integer(1)] * 65)],
)
def test_strides_that_are_none(more):
    with pytest.raises(errors.FormatError):
        opened(folder({"w": tensor([2, 2], [chunk([0, 0], [2, 2])], properties(more=more))}, ITEM))


def test_the_package_before_november_2022():
    old = f"{OLD}.metadata"
    tensors = {
        "w": tensor(
            [2, 2], [chunk([0, 0], [2, 2], module=old)], properties(module=old), module=old
        ),
        "s": value(old),
    }
    items = [
        (index("w", [0, 0], module=old), info(FILE, 0, len(W), module=f"{OLD}.filesystem")),
        (index("s", module=old), info(FILE, len(W), len(SEVEN), module=f"{OLD}.filesystem")),
    ]
    files = {
        ".metadata": metadata(tensors, items, module=old, meta=NONE, version=None, planner=None),
        FILE: W + SEVEN,
    }
    with opened(files) as ckpt:
        assert values(ckpt) == [1, 2, 3, 4]
        assert ckpt.tree["s"] == 7
        assert ckpt.foreign == ()
        assert dict(ckpt.metadata) == {}


@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"])
@pytest.mark.parametrize("kind", ["PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"])
def test_paths_of_every_system(module, kind):
    with opened(
        folder(ONE, ITEM, meta=note(call(module, kind, text("ckpt"), text("step"))))
    ) as ckpt:
        assert ckpt.metadata["checkpoint_id"] in ("ckpt/step", "ckpt\\step")
        assert ckpt.foreign == ()


def test_the_place_of_a_single_chunk_may_lack_its_offset():
    with opened(folder(ONE, [(index("w", None, None), W)])) as ckpt:
        assert values(ckpt) == [1, 2, 3, 4]


def test_storage_meta_of_a_class_of_somebody_else_is_refused_and_a_field_of_somebody_else_is_kept():
    with pytest.raises(errors.PickleError):
        opened(folder(ONE, ITEM, meta=record("their", "StorageMeta", EMPTY_DICT)))
    with opened(
        folder(ONE, ITEM, more={"mcore_data": record("megatron.core", "Data", EMPTY_DICT)})
    ) as ckpt:
        assert any("mcore_data" in line for line in ckpt.notes)
        assert [str(f.what) for f in ckpt.foreign] == ["megatron.core.Data"]


def test_a_kind_of_entry_that_nobody_knows_is_shown_and_not_called():
    entries = {**ONE, "x": call("os", "system", text("true"))}
    with opened(folder(entries, ITEM)) as ckpt:
        assert isinstance(ckpt.tree["x"], Opaque)
        assert [str(f.what) for f in ckpt.foreign] == ["os.system"]
        assert values(ckpt) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "content",
    [
        stream(dict_of()),
        stream(call("os", "system", text("true"))),
        stream(record(METADATA, "Metadata")),
        stream(record(METADATA, "Metadata", fields(state_dict_metadata=EMPTY_DICT)) + EMPTY_DICT + BUILD),
        stream(record(METADATA, "Metadata", list_of())),
        stream(record(METADATA, "Metadata", fields(state_dict_metadata=list_of()))),
        stream(record(METADATA, "MetadataIndex", fields(fqn=text("w")))),
        metadata({"w": integer(7)}, []),
        metadata({"w": record(METADATA, "TensorStorageMetadata")}, [(index("w", [0, 0]), info(FILE, 0, len(W)))]),
        metadata({"w": tensor([2, 2], list_of(integer(7)))}, [(index("w", [0, 0]), info(FILE, 0, len(W)))]),
        metadata({"w": tensor([2, 2], NONE)}, []),
        metadata({"w": tensor([2, 2], [], integer(7))}, []),
        metadata({"w": tensor([2, 2], [], record(METADATA, "TensorProperties"))}, []),
        metadata({"w": tensor([2, 2], [], record(METADATA, "TensorProperties", tuple_of(integer(1))))}, []),
        metadata(ONE, dict_of(text("w"), info())),
        metadata(ONE, dict_of(index("w", [0, 0]), text("here"))),
        metadata(ONE, [(record(METADATA, "MetadataIndex"), info())]),
        metadata(ONE, [(index("w", [0, 0]), info(integer(7)))]),
        metadata(ONE, [(index("w", [0, 0]), info(FILE, TRUE))]),
        metadata(ONE, [(index("w", [0, 0]), info(FILE, 0, 9, transforms=list_of(integer(1))))]),
        metadata(ONE, [(index("w", [0, 0]), info(FILE, 0, 9, transforms=list_of(*[text("x")] * 100)))]),
        metadata(dict_of(integer(1), value()), []),
        stream(record(METADATA, "BytesStorageMetadata", list_of())),
        stream(call(METADATA, "_MEM_FORMAT_ENCODING", integer(9))),
        b"",
        b"\x80\x04",
        honest()[".metadata"] + b"x",
        honest()[".metadata"][:-1],
    ],
    ids=range(28),
)  # fmt: skip
def test_other_forms_are_refused(content):
    with pytest.raises(errors.FormatError):
        opened({".metadata": content, FILE: W})


def test_a_directory_whose_save_did_not_finish():
    with pytest.raises(errors.HeaderError, match="did not finish"):
        opened({FILE: W, "__1_0.distcp": W})


def test_the_metadata_limit():
    with pytest.raises(errors.LimitExceeded, match="dcp_metadata_nbytes"):
        opened(honest(), limits=holdfast.Limits(dcp_metadata_nbytes=100))


def test_metadata_of_several_ranks_is_put_together():
    left, right = (
        {"w": tensor([4, 2], [chunk([row, 0], [2, 2])]), "step": value()} for row in (0, 2)
    )
    nine = torch_zip(stream(integer(9)), {})

    def share(file: str, row: int) -> list[tuple[bytes, bytes]]:
        return [
            (index("w", [row, 0]), info(file, 0, len(W))),
            (index("step"), info(file, len(W), len(SEVEN))),
        ]

    files = {
        "__0.metadata": metadata(left, share("__0_0.distcp", 0)),
        "__10.metadata": metadata(right, share("__10_0.distcp", 2)),
        "__0_0.distcp": W + SEVEN,
        "__10_0.distcp": W + nine,
    }
    with opened(files) as ckpt:
        assert ckpt["w"].numpy().reshape(-1).tolist() == [1, 2, 3, 4] * 2
        assert ckpt.tree["step"] == 7
        assert any("lowest rank" in line for line in ckpt.notes)
    with pytest.raises(errors.MetadataError, match="exactly once") as caught:
        opened({key: raw for key, raw in files.items() if "10" not in key})
    assert caught.value.tensor == "w"
    with opened({**files, ".metadata": honest()[".metadata"], FILE: honest()[FILE]}) as ckpt:
        assert ckpt["w"].shape == (2, 2), "where .metadata is there, the ranks' own are not read"


def test_ranks_that_do_not_agree():
    files = {
        "__0.metadata": metadata(ONE, [(index("w", [0, 0]), info(FILE, 0, len(W)))]),
        "__1.metadata": metadata(
            {"w": tensor([4, 2], [chunk([2, 0], [2, 2])])},
            [(index("w", [2, 0]), info(FILE, 0, len(W)))],
        ),
        FILE: W,
    }
    with pytest.raises(errors.MetadataError, match="different sizes"):
        opened(files)
    files["__1.metadata"] = metadata({"w": value()}, [(index("w"), info(FILE, 0, len(W)))])
    with pytest.raises(errors.MetadataError, match="none on another"):
        opened(files)


def test_the_public_vocabulary_says_what_the_file_says():
    ckpt = opened(honest())
    described = to_metadata(read_metadata(ckpt["w"].source)[0])
    assert described.version == "1.0.0"
    assert described.planner_data == {"w": ("w",), "step": ("step",)}
    assert str(described.storage_meta.checkpoint_id) == "ckpt"
    assert described.storage_meta.save_id == "id-1"
    w = described.state_dict_metadata["w"]
    assert (w.size, w.chunks[0].offsets, w.chunks[0].sizes) == ((2, 2), (0, 0), (2, 2))
    assert w.properties.dtype.name == "float32"
    places = {
        (place.fqn, place.offset): (at.relative_path, at.offset, at.length)
        for place, at in described.storage_data.items()
    }
    assert places == {
        ("step", None): (FILE, 0, len(SEVEN)),
        ("w", (0, 0)): (FILE, len(SEVEN), len(W)),
    }


def test_nested_names():
    tensors = {"model.w": ONE["w"], "opt.0.lr": value(), "opt.1.lr": value(), "ids.3": value()}
    contents = [
        (index("model.w", [0, 0]), W),
        *((index(name), SEVEN) for name in list(tensors)[1:]),
    ]
    planner = paths(
        model__w=["model", "w"],
        opt__0__lr=["opt", 0, "lr"],
        opt__1__lr=["opt", 1, "lr"],
        ids__3=["ids", "3"],
    )
    with opened(folder(tensors, contents, planner=planner)) as ckpt:
        assert ckpt.tree["opt"] == [{"lr": 7}, {"lr": 7}]
        assert ckpt.tree["ids"] == {"3": 7}
        assert list(ckpt) == ["model.w"]
        assert any("integer keys" in line for line in ckpt.notes)
    with opened(folder(tensors, contents)) as ckpt:
        assert list(ckpt.tree) == list(tensors), "without paths, names are names"


def test_a_folder_of_folders_is_none_itself(tmp_path):
    for step in ("step-1", "step-2"):
        (tmp_path / step).mkdir()
        for key, raw in honest().items():
            (tmp_path / step / key).write_bytes(raw)
    with pytest.raises(errors.UnknownFormat, match='"step-1", "step-2"; open one'):
        holdfast.open(tmp_path)
    assert list(holdfast.open(tmp_path / "step-2")) == ["w"]


def test_safetensors_beside_a_folder_with_a_distributed_checkpoint():
    files = {f"optimizer/{key}": raw for key, raw in honest().items()}
    empty = b"\x02" + bytes(7) + b"{}"
    with opened({**files, "a.safetensors": empty, "b.safetensors": empty}) as ckpt:
        assert ckpt.format == "safetensors-dir"


def test_nothing_was_saved():
    with opened({".metadata": metadata({}, [])}) as ckpt:
        assert ckpt.format == "dcp"
        assert ckpt.tree == {}


def test_the_metadata_alone(tmp_path):
    (tmp_path / ".metadata").write_bytes(honest()[".metadata"])
    with pytest.raises(errors.StoreError, match="opened by its folder"):
        holdfast.open(tmp_path / ".metadata")


@pytest.mark.parametrize("kind", PickledObject.__subclasses__())
def test_records_are_keys_by_identity(kind):
    # Any other hash makes each of 20,000 keys a step for every key before it, which the limits refuse.
    assert kind.__hash__ is object.__hash__
    assert kind() != kind()
    Spending(Limits(), 0).key(kind(), 10**9)
