"""Every lie that a `.pt2` can tell: refused with the model and the weight in the message, or opened as inert data. Nothing runs."""

from __future__ import annotations

import json
import time
import tracemalloc
import zipfile
from io import BytesIO
from random import Random

import pytest

import holdfast
from holdfast import errors
from holdfast.core.limits import Limits
from tests.extras.packages.pt2.craft_pt2 import (
    DATA,
    archive,
    config,
    entry,
    honest,
    meta,
    program,
    records,
)
from tests.hostile.cases_resources import TENS
from tests.hostile.craft_pickle import REDUCE, call, dict_of, named, stream, text, tuple_of
from tests.hostile.craft_torch import storage, tensor, torch_zip
from tests.hostile.harness import WATCH, survey, warm_up

W = "data/weights/model_weights_config.json"
C = "data/constants/model_constants_config.json"
INPUTS = "data/sample_inputs/model.pt"

CALL = named("os", "system") + tuple_of(text("touch /tmp/owned")) + REDUCE
HUGE = 1 << 62


@pytest.fixture(scope="module", autouse=True)
def _warm():
    warm_up([honest, lambda: pickled(torch_zip(stream(tensor(storage()))))])


def refusal(raw: bytes, **options: object) -> errors.HoldfastError:
    """The error of opening and looking at something, under watch."""
    with WATCH.watching():
        try:
            with holdfast.open(raw, **options) as ckpt:
                survey(ckpt)
        except errors.HoldfastError as error:
            return error
    raise AssertionError("it opened")


def weights(**changed: object) -> bytes:
    """An archive whose weight w is described by other words."""
    return honest({W: config({"w": entry(**changed), "v": entry(tensor_meta=meta((3,), (1,), 2))})})


def test_the_honest_one_opens():
    with holdfast.open(honest()) as ckpt:
        assert ckpt.format == "pt2"
        assert list(ckpt) == ["w", "v", "constants.c"]
        assert ckpt["w"].numpy().tobytes() == DATA
        assert ckpt["v"].numpy().tobytes() == DATA[8:20]
        assert [alias.names for alias in ckpt.aliases] == [("w", "v")]
        assert (ckpt["w"].traits.parameter, ckpt["v"].traits.parameter) == (True, False)


SHAPES = {
    "sizes past the record": meta((2, 4), (4, 1)),
    "an offset past the record": meta((1,), (1,), 6),
    "strides past the record": meta((2, 3), (4, 1)),
    "a huge size": meta((HUGE,), (1,)),
    "a product of sizes beyond 64 bits": meta((1 << 32, 1 << 32, 0), (0, 0, 0)),
    "a huge stride": meta((2,), (HUGE,)),
    "a huge offset": meta((1,), (1,), HUGE),
    "a negative size": meta((-2, 3), (3, 1)),
    "a negative stride": meta((2, 3), (-3, 1)),
    "a negative offset": meta((2, 3), (3, 1), -1),
    "more strides than sizes": meta((2, 3), (3, 1, 1)),
    "fewer strides than sizes": meta((2, 3), (1,)),
    "an unknown dtype": meta(dtype=99),
    "the dtype that torch has no number for": meta(dtype=0),
    "a sparse layout": meta(layout=1),
    "an unknown layout": meta(layout=70),
    "a dtype that the record is no multiple of": meta((1,), (1,), dtype=11),
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_tensor_that_cannot_be(name):
    error = refusal(weights(tensor_meta=SHAPES[name]))
    assert isinstance(error, errors.MetadataError)
    assert 'weight "w" of model "model"' in str(error)
    assert error.tensor == "w"


WORDS = {
    "a size as a float": {"tensor_meta": meta((2.0, 3))},
    "a size as a bool": {"tensor_meta": meta((True, 3), (3, 1))},
    "a dtype as text": {"tensor_meta": meta(dtype="7")},
    "a dtype as true": {"tensor_meta": meta(dtype=True)},
    "a symbolic size": {"tensor_meta": meta(({"as_expr": {"expr_str": "s0", "hint": None}}, 3))},
    "a symbolic stride": {
        "tensor_meta": meta(strides=({"as_expr": {"expr_str": "s0", "hint": None}}, 1))
    },
    "a bare size": {"tensor_meta": meta(sizes=([2], [3]))},
    "two words for a size": {
        "tensor_meta": meta(sizes=({"as_int": 2, "as_expr": {}}, {"as_int": 3}))
    },
    "no strides": {"tensor_meta": meta(strides=()) | {"strides": None}},
    "no offset": {"tensor_meta": meta() | {"storage_offset": None}},
    "a device as text": {"tensor_meta": meta(device="cpu")},
    "a gradient as a number": {"tensor_meta": meta(requires_grad=1)},
    "tensor_meta as a list": {"tensor_meta": [1]},
    "a record as a number": {"record": 0},
    "is_param as text": {"is_param": "no"},
    "use_pickle as a number": {"use_pickle": 0},
}


@pytest.mark.parametrize("name", WORDS)
def test_a_config_with_other_words(name):
    error = refusal(weights(**WORDS[name]))
    assert isinstance(error, errors.HeaderError)
    assert 'weight "w" of model "model"' in str(error)


@pytest.mark.parametrize(
    "path",
    [
        "../constants/tensor_0",
        "/etc/passwd",
        "..",
        ".",
        "",
        "a/b",
        "a\\b",
        "C:weight_0",
        "weight_0\0",
        "weight_0/../weight_0",
    ],
)
def test_a_path_that_leaves_its_folder(path):
    error = refusal(weights(record=path))
    assert isinstance(error, errors.UnsafePath)
    assert 'weight "w" of model "model"' in str(error)


@pytest.mark.parametrize("path", ["weight_1", "WEIGHT_0", "weight_00", "model.json", "tensor_0"])
def test_a_record_that_is_not_there(path):
    error = refusal(weights(record=path))
    assert isinstance(error, errors.MetadataError)
    assert "there is no record" in str(error)
    assert 'weight "w" of model "model"' in str(error)


DOCUMENTS = {
    "two equal names": b'{"config": {"w": %s, "w": %s}}'
    % (json.dumps(entry()).encode(), json.dumps(entry()).encode()),
    "two equal words": config({"w": entry()}).replace(
        b'"is_param": false', b'"is_param": false, "is_param": true'
    ),
    "two equal sizes": config({"w": entry()}).replace(b'"as_int": 2', b'"as_int": 2, "as_int": 2'),
    "two configs": b'{"config": {}, "config": {}}',
    "NaN": config({"w": entry()}).replace(b'"dtype": 7', b'"dtype": NaN'),
    "a huge number": config({"w": entry()}).replace(b'"dtype": 7', b'"dtype": ' + b"7" * 5000),
    "an exponent": config({"w": entry()}).replace(b'"as_int": 2', b'"as_int": 2e0'),
    "no config": b"{}",
    "a list": b"[]",
    "config as a list": b'{"config": []}',
    "an entry as a list": b'{"config": {"w": []}}',
    "no JSON": b"config",
    "nothing": b"",
    "not UTF-8": b'{"config": {"\xff": 1}}',
    "half a surrogate": config({"w": entry()}).replace(b'"w"', b'"\\ud800"'),
    "bytes behind it": config({"w": entry()}) + b"{}",
    "a raw tensor without sizes": config({"w": {**entry(), "tensor_meta": None}}),
}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_config_that_readers_could_take_for_another(name):
    error = refusal(honest({W: DOCUMENTS[name], "models/model.json": None}))
    assert isinstance(error, errors.HeaderError)
    assert 'model "model"' in str(error)


def test_a_config_that_nests():
    assert isinstance(
        refusal(honest({W: b'{"config": ' + b"[" * 100_000})),
        errors.LimitExceeded | errors.HeaderError,
    )


def test_a_config_of_empty_lists_costs_what_its_length_allows():
    raw = honest({W: b'{"config": {"w": [' + b"[]," * 700_000 + b"[]]}}"})
    tracemalloc.start()
    error = refusal(raw)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert isinstance(error, errors.HeaderError)
    assert peak < 20 * len(raw)


def test_one_record_under_two_dtypes():
    other = config({"w": entry(), "i": entry(tensor_meta=meta(dtype=4))})
    error = refusal(honest({W: other, "models/model.json": None}))
    assert isinstance(error, errors.MetadataError)
    assert 'weight "i" of model "model"' in str(error)
    assert "float32" in str(error)
    assert "int32" in str(error)


def test_models_that_disagree_about_a_record_they_share():
    error = refusal(
        honest(
            {
                "data/weights/other_weights_config.json": config(
                    {"x": entry(tensor_meta=meta(dtype=4))}
                )
            }
        )
    )
    assert isinstance(error, errors.MetadataError)
    assert 'weight "x" of model "other"' in str(error)
    assert '"model.w"' in str(error)


def test_weights_that_are_described_twice():
    error = refusal(
        honest({"data/weights/model.pt": torch_zip(stream(dict_of(text("w"), tensor(storage()))))})
    )
    assert isinstance(error, errors.HeaderError)
    assert 'model "model"' in str(error)


@pytest.mark.parametrize(
    ("lacking", "asked"), [("w", program(("w", "gone"))), ("c", program(("w", "v"), ("gone",)))]
)
def test_a_program_that_lacks_a_weight(lacking, asked):
    error = refusal(honest({"models/model.json": asked}))
    assert isinstance(error, errors.MetadataError)
    assert '"gone"' in str(error)
    assert 'model "model"' in str(error)


def test_a_program_without_its_weights():
    error = refusal(honest({W: None}))
    assert isinstance(error, errors.MetadataError)
    assert '"w"' in str(error)


def pickled(payload: bytes, **changed: object) -> bytes:
    """An archive with a pickled weight."""
    described = entry("weight_9", meta((2, 2), (2, 1)), use_pickle=True, **changed)
    return honest(
        {"data/weights/weight_9": payload, W: config({"w": described}), "models/model.json": None}
    )


def test_a_pickled_weight_is_data():
    with holdfast.open(pickled(torch_zip(stream(tensor(storage()))))) as ckpt:
        assert ckpt["w"].numpy().tolist() == [[1, 2], [3, 4]]


PAYLOADS = {
    "a zip that calls": torch_zip(stream(CALL)),
    "a zip that calls beside a tensor": torch_zip(
        stream(dict_of(text("w"), tensor(storage()), text("x"), CALL))
    ),
    "a pickle that calls": stream(CALL),
    "a class": torch_zip(stream(call("evil.module", "Class"))),
    "STACK_GLOBAL": stream(
        text("os"), text("system"), b"\x93", tuple_of(text("true")), REDUCE, protocol=4
    ),
}


@pytest.mark.parametrize("name", PAYLOADS)
@pytest.mark.parametrize(
    "place", ["weight", "custom object", "opaque object", "sample inputs", "legacy weights"]
)
def test_a_payload_that_calls_something_is_shown_and_not_called(name, place):
    payload = PAYLOADS[name]
    objects = {"custom object": "custom_obj_0", "opaque object": "opaque_obj_0"}
    match place:
        case "weight":
            raw = pickled(payload)
        case "sample inputs":
            raw = honest({INPUTS: payload})
        case "legacy weights":
            raw = honest({"data/weights/model.pt": payload, W: None, "models/model.json": None})
        case _:
            described = {"o": {**entry(objects[place], use_pickle=True), "tensor_meta": None}}
            raw = honest(
                {
                    f"data/constants/{objects[place]}": payload,
                    C: config(described),
                    "models/model.json": None,
                }
            )
    with WATCH.watching():
        if place == "legacy weights" and "beside" not in name:
            assert isinstance(refusal(raw), errors.MetadataError)  # no dict of names
            return
        with holdfast.open(raw) as ckpt:
            survey(ckpt)
            assert {str(f.what) for f in ckpt.foreign} & {"os.system", "evil.module.Class"}
            streams = {f.stream for f in ckpt.foreign}
            assert all(stream.startswith("m/data/") for stream in streams), streams


def test_sample_inputs_that_nobody_could_print_are_opened():
    with holdfast.open(honest({INPUTS: torch_zip(stream(TENS))})) as checkpoint:
        survey(checkpoint)


BROKEN = {
    "nothing": b"",
    "half a zip": torch_zip(stream(tensor(storage())))[:-30],
    "a zip with bytes behind": torch_zip(stream(tensor(storage()))) + b"x",
    "a zip without a pickle": archive({"version": b"3\n", "other": b"1"}),
    "a storage that is not there": torch_zip(stream(tensor(storage("7")))),
    "a storage of another size": torch_zip(stream(tensor(storage(count=5)))),
    "a tensor past its storage": torch_zip(stream(tensor(storage(), (3, 3), (3, 1)))),
    "a pickle with bytes behind": stream(text("x")) + b"x",
    "a pickle with a storage": stream(tensor(storage())),
    "a cut pickle": stream(text("x"))[:-3],
    "text": b"hello world",
    "a tensor of another shape": torch_zip(stream(tensor(storage(), (4,), (1,)))),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_pickled_weight_that_is_none(name):
    error = refusal(pickled(BROKEN[name]))
    assert isinstance(error, errors.FormatError)
    assert 'weight "w" of model "model"' in str(error)


def test_compiled_weights_that_lie():
    with holdfast.open(compiled(["weight_9", [2], [1], 1])) as ckpt:
        assert ckpt["aotinductor.a.w"].numpy().tolist() == [2, 3]
    past, negative, behind = (
        ["weight_0", [9], [1], 0],
        ["weight_9", [-1], [1], 0],
        ["weight_9", [2], [1], 3],
    )
    for row in (past, negative, behind, ["../x", [1], [1], 0], "x", [1, [], [], 0]):
        error = refusal(compiled(row))
        assert isinstance(error, errors.FormatError)
        assert 'compiled weight "a.w" of model "model"' in str(error)


def compiled(row: object) -> bytes:
    """An archive with a weight of compiled code."""
    return honest(
        {
            "data/aotinductor/model/weights_config.json": json.dumps({"a.w": row}).encode(),
            "data/weights/weight_9": torch_zip(stream(tensor(storage()))),
        }
    )


HEADERS = {
    "another format": {"archive_format": b"pt3"},
    "a format with a line end": {"archive_format": b"pt2\n"},
    "a long format": {"archive_format": b"pt2" + b" " * 1000},
    "another version": {"archive_version": b"1"},
    "no version of the archive": {"archive_version": None},
    "no version of the container": {".data/version": None},
    "an unknown byte order": {"byteorder": b"middle"},
}


@pytest.mark.parametrize("name", HEADERS)
def test_an_archive_that_is_another(name):
    assert isinstance(refusal(honest(HEADERS[name])), errors.HeaderError)


def test_an_archive_that_torch_load_would_read_as_something_else():
    hidden = stream(dict_of(text("w"), tensor(storage())))
    error = refusal(honest({"data.pkl": hidden, "data/0": DATA[:16]}))
    assert isinstance(error, errors.ZipError)


def test_records_without_a_folder():
    made = {
        name.partition("/")[2] if "/" in name else name: content
        for name, content in records().items()
    }
    buffer = BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for name, content in made.items():
            file.writestr(name, content)
    assert isinstance(refusal(buffer.getvalue()), errors.ZipError)


def test_a_compressed_storage():
    buffer = BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in records().items():
            file.writestr(f"m/{name}", content)
    assert isinstance(refusal(buffer.getvalue()), errors.ZipError)


def test_a_zip_that_is_nothing_keeps_its_message():
    assert "without data.pkl" in str(refusal(archive({"version": b"3\n", "other": b"1"})))


def test_a_program_that_is_no_program_is_a_note():
    odd = b'{"graph_module": {"graph": {}, "signature": {"input_specs": [7]}}}'
    for raw in (b"", b"{", b"[]", b'{"graph_module": 3}', b"[" * 100_000, odd):
        with WATCH.watching(), holdfast.open(honest({"models/model.json": raw})) as ckpt:
            survey(ckpt)
            assert any("cannot be read" in note for note in ckpt.notes)
            assert list(ckpt) == ["w", "v", "constants.c"]


def test_a_large_program_is_not_looked_at():
    large = program(("w", "v"), ("c",)) + b" " * 5000
    with holdfast.open(
        honest({"models/model.json": large}), limits=Limits(header_nbytes=4000)
    ) as ckpt:
        assert any("Limits(header_nbytes=4,000)" in note for note in ckpt.notes)


def test_a_large_config_is_refused():
    raw = honest({W: config({"w": entry()}) + b" " * 5000})
    assert isinstance(refusal(raw, limits=Limits(header_nbytes=4000)), errors.LimitExceeded)


def test_keys_that_a_weight_has_already():
    raw = honest({W: config({"w": entry(), "v": entry(), "constants.c": entry(), "sample_inputs": entry()}),
                  INPUTS: torch_zip(stream(tuple_of(tensor(storage()))))})  # fmt: skip
    with holdfast.open(raw) as ckpt:
        assert list(ckpt) == [
            "w",
            "v",
            "constants.c",
            "sample_inputs",
            "constants#2.c",
            "sample_inputs#2.0",
        ]


def test_an_expanded_view_of_a_few_bytes_is_not_read_without_asking():
    with holdfast.open(
        honest(
            {W: config({"w": entry(tensor_meta=meta((1 << 40,), (0,)))}), "models/model.json": None}
        )
    ) as ckpt:
        with pytest.raises(errors.LimitExceeded):
            ckpt["w"].numpy()
        assert ckpt["w"][:3].numpy().tolist() == [0, 0, 0]


def test_many_models_and_extra_files_cost_what_they_are():
    made = records()
    for i in range(2000):
        made[f"data/weights/n{i}_weights_config.json"] = config({"w": entry()})
        made[f"extra/{i}.txt"] = b"x" * 10
    raw = archive(made)
    before = time.process_time()
    with holdfast.open(raw) as ckpt:
        survey(ckpt)
        assert len(ckpt) == 2003
        assert sum(key.startswith("extra/") for key in ckpt.metadata) == 32
    assert time.process_time() - before < 5


def test_names_from_the_file_are_escaped_in_messages():
    raw = honest(
        {
            W: config({"w\x1b[2J\u202e": entry(tensor_meta=meta(dtype=99))}),
            "models/model.json": None,
        }
    )
    message = refusal(raw).message
    assert "\x1b" not in message
    assert "\u202e" not in message


def test_big_endian_records():
    swapped = b"".join(DATA[i : i + 4][::-1] for i in range(0, len(DATA), 4))
    raw = honest(
        {
            "data/weights/weight_0": swapped,
            "data/constants/tensor_0": swapped[:8],
            "byteorder": b"big",
        }
    )
    with holdfast.open(raw) as ckpt:
        assert ckpt["w"].numpy().tobytes() == DATA


def test_a_damaged_weight_is_found_when_it_is_read():
    raw = bytearray(honest())
    raw[bytes(raw).index(DATA)] ^= 1
    with holdfast.open(bytes(raw)) as ckpt, pytest.raises(errors.Corrupted):
        ckpt.read("w")


@pytest.mark.parametrize("seed", range(4))
def test_a_damaged_archive_is_packaged_and_extracted_or_refused(seed, tmp_path):
    random = Random(seed)
    whole = honest({INPUTS: torch_zip(stream(tensor(storage()))), "extra/note.txt": b"hello"})
    done = 0
    for _ in range(60):
        raw = bytearray(whole)
        for _ in range(random.choice((1, 1, 4))):
            raw[random.randrange(len(raw))] = random.randrange(256)
        try:
            with holdfast.open(bytes(raw)) as ckpt:
                holdfast.package({"a": ckpt, "b": ckpt}, tmp_path / "p.pt2", durable=False)
                holdfast.convert(
                    ckpt,
                    tmp_path / "s.pt",
                    model="model",
                    constants=True,
                    overwrite=True,
                    durable=False,
                )
            done += 1
        except errors.HoldfastError:
            pass
    assert 0 < done < 60


def test_a_compressed_program_is_not_copied(tmp_path):
    with zipfile.ZipFile(tmp_path / "m.pt2", "w") as made:
        for name, content in records().items():
            made.writestr(
                f"m/{name}",
                content,
                zipfile.ZIP_DEFLATED if name.startswith("models/") else zipfile.ZIP_STORED,
            )
    with pytest.raises(errors.Unsupported, match=r"models/model\.json.* is compressed"):
        holdfast.package({"a": tmp_path / "m.pt2"}, tmp_path / "p.pt2")
    assert not (tmp_path / "p.pt2").exists()
