"""`scan`: every foreign global is found and ranked, an error is never "nothing found", and nothing runs."""

from __future__ import annotations

import argparse
import collections
import functools
import io
import json
import os
import pickle
import struct
import sys
import uuid
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest

from holdfast.core.opaque import Global
from holdfast.errors import StoreError
from holdfast.stores.remote.url import Url
from holdfast.verbs.scan import ScanReport, scan
from holdfast.verbs.severity import judge
from tests.formats.dcp import craft_dcp
from tests.hostile.craft_pickle import NONE, call, stream, text
from tests.hostile.craft_torch import torch_zip
from tests.hostile.scan_attacks import ATTACKS, write


class Calls:
    """Pickles to a call of `function` with `arguments`."""

    def __init__(self, function, *arguments):
        self.function = function
        self.arguments = arguments

    def __reduce__(self):
        return self.function, self.arguments


def whats(report: ScanReport) -> list[tuple[str, str]]:
    return [(f.severity, f.what) for file in report.reports for f in file.findings]


@pytest.fixture
def bare(tmp_path):
    """Write one bare pickle and scan it."""

    def scan_bare(value, name="x.pkl", protocol=4):
        path = tmp_path / name
        path.write_bytes(value if isinstance(value, bytes) else pickle.dumps(value, protocol))
        return scan(path)

    return scan_bare


def safetensors_bytes() -> bytes:
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    return struct.pack("<Q", len(header)) + header + b"\0" * 4


@pytest.mark.parametrize("protocol", range(6))
def test_a_bare_pickle_that_calls(bare, protocol):
    report = bare({"hook": Calls(os.system, "echo hi")}, protocol=protocol)
    (file,) = report.reports
    assert file.format == "pickle"
    (finding,) = file.findings
    assert (finding.severity, finding.what) == ("dangerous", f"{os.system.__module__}.system")
    assert finding.calls == (f"{os.system.__module__}.system('echo hi')",)
    assert finding.paths == ("hook",)
    assert finding.reason == "runs commands"
    assert "call" in finding.uses
    assert report.verdict() == "dangerous"


def test_plain_data_is_clean(bare):
    report = bare(
        {"a": [1, 2.0, None], "b": collections.OrderedDict(x=(1,)), "c": np.arange(3), "d": {1, 2}}
    )
    assert whats(report) == []
    assert report.verdict() == report.verdict(strict=True) == "clean"


class Kept:
    """Pickled as most objects are: by its class and its state."""

    def __init__(self) -> None:
        self.rate = 1


class Made:
    """Pickled by its class and what `__new__` is given."""

    given: tuple[tuple[object, ...], dict[str, object]] = (), {}

    def __getnewargs_ex__(self) -> tuple[tuple[object, ...], dict[str, object]]:
        return self.given


def test_classes_are_information(bare):
    report = bare([argparse.Namespace(lr=1), Kept()])
    assert whats(report) == [("unknown", f"{__name__}.Kept"), ("known", "argparse.Namespace")]
    assert report.verdict() == "unknown"
    assert report.verdict(strict=True) == "suspicious"


@pytest.mark.parametrize(
    "args",
    [(), (1,), ("word",), (2.5,), (None,), ([1, "two words"],), ({"a": 1},), (Kept,)],
    ids=repr,
)
def test_a_class_that_is_called_is_suspicious_whatever_it_is_given(bare, args):
    report = bare(Calls(Kept, *args))
    assert whats(report)[0] == ("suspicious", f"{__name__}.Kept")
    assert report.verdict() == "suspicious"


@pytest.mark.parametrize(
    ("args", "named"), [((1,), {}), (((2.5, None),), {}), ((), {"rate": 1})], ids=repr
)
def test_and_so_is_one_that_is_made_with_arguments(bare, args, named):
    made = Made()
    made.given = args, named
    assert whats(bare(made))[0] == ("suspicious", f"{__name__}.Made")


def test_an_unknown_function_that_is_called_is_suspicious(bare):
    report = bare(Calls(safetensors_bytes))
    assert [s for s, _ in whats(report)] == ["suspicious"]
    assert report.verdict() == "suspicious"


def test_an_unknown_function_that_is_mentioned_is_unknown(bare):
    assert [s for s, _ in whats(bare(safetensors_bytes))] == ["unknown"]


def test_a_payload_that_is_popped_again_is_found(bare):
    report = bare(b"cposix\nsystem\n(S'echo hi'\ntR0N.")
    assert whats(report) == [("dangerous", "posix.system")]
    assert report.reports[0].findings[0].calls == ("posix.system('echo hi')",)


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"\x80\x04N.trailing", id="trailing bytes"),
        pytest.param(b"", id="empty"),
        pytest.param(b"no pickle at all", id="text"),
        pytest.param(b"\x80\x04" + b"]" * 500 + b".", id="deep"),
        pytest.param(b"PK\x03\x04 and nothing else", id="broken zip"),
        pytest.param(safetensors_bytes()[:-2], id="truncated safetensors"),
    ],
)
def test_what_cannot_be_parsed_is_an_error_and_never_clean(bare, content):
    report = bare(content)
    (file,) = report.reports
    assert file.error
    assert report.verdict() == "error"


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"cposix\nsystem\n(S'echo hi'\ntR", id="no stop"),
        pytest.param(b"\x80\x04cposix\nsystem\n(S'echo hi'\ntR\xff.", id="broken tail"),
        pytest.param(b"cposix\nsystem\n(S'echo hi'\ntR.garbage", id="bytes behind the end"),
        pytest.param(b"N.cposix\nsystem\n(S'echo hi'\ntR", id="a second pickle that breaks"),
    ],
)
def test_a_break_takes_no_finding_away(bare, content):
    report = bare(content)
    (file,) = report.reports
    assert file.error
    assert whats(report) == [("dangerous", "posix.system")]
    assert report.verdict() == "dangerous"


def test_missing_files_are_errors(tmp_path):
    report = scan(tmp_path / "nope.pt")
    assert report.reports[0].error
    assert report.verdict() == "error"


def test_an_oversized_pickle_is_an_error(bare, tmp_path):
    from holdfast import Limits

    bare(b"x" * 1000)
    path = tmp_path / "x.pkl"
    path.write_bytes(pickle.dumps(list(range(1000))))
    assert "pickle_nbytes" in (scan(path, limits=Limits(pickle_nbytes=100)).reports[0].error or "")


def test_directories(tmp_path):
    (tmp_path / "sub" / "deep").mkdir(parents=True)
    (tmp_path / "sub" / "evil.dat").write_bytes(pickle.dumps(Calls(os.system, "x")))
    (tmp_path / "sub" / "deep" / "old").write_bytes(pickle.dumps(Calls(os.system, "x"), 0) + b"\n")
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes())
    (tmp_path / "README.md").write_text("A text. It ends like a pickle.")
    (tmp_path / "labels.txt").write_text("cat\ndog\n")
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "broken.bin").write_text("version https://git-lfs.github.com/spec/v1\n")
    np.savez(tmp_path / "arrays.npz", a=np.arange(3))
    with zipfile.ZipFile(tmp_path / "package.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr("package/", "")  # which the strict reader refuses
        wheel.writestr("package/code.py", "x = 1\n" * 100)
    with zipfile.ZipFile(tmp_path / "odd.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr("package/", "")
        wheel.writestr("package/data.pkl", pickle.dumps(Calls(os.system, "x")))
    (tmp_path / "nowhere").symlink_to("gone")
    (tmp_path / "loop").symlink_to(".")
    os.mkfifo(tmp_path / "pipe")
    report = scan(tmp_path)
    found = {os.path.relpath(f.path, tmp_path): f for f in report.reports}
    assert sorted(found) == [
        "arrays.npz",
        "broken.bin",
        "model.safetensors",
        "odd.whl",
        "sub/deep/old",
        "sub/evil.dat",
    ]
    assert (found["arrays.npz"].format, found["arrays.npz"].error) == ("npz", None)
    assert [f.severity for f in found["sub/evil.dat"].findings] == ["dangerous"]
    assert [f.severity for f in found["sub/deep/old"].findings] == ["dangerous"]
    assert "LFS" in (found["broken.bin"].error or "")
    assert found["model.safetensors"].findings == ()
    assert found["odd.whl"].error
    assert [f.severity for f in found["odd.whl"].findings] == ["dangerous"]
    assert report.skipped == 6
    assert sorted(os.path.basename(p) for p in report.skipped_paths) == [
        "README.md", "empty", "labels.txt", "nowhere", "package.whl", "pipe",
    ]  # fmt: skip


def test_a_folder_that_cannot_be_listed_is_an_error(tmp_path, monkeypatch):
    def walk(top, onerror):
        onerror(PermissionError(13, "Permission denied", str(top)))
        return iter(())

    monkeypatch.setattr("os.walk", walk)
    assert scan(tmp_path).verdict() == "error"


def test_hostile_golden_files(hostile, golden_dir):
    wanted = json.loads((golden_dir / "hostile" / "expected.json").read_text())[hostile.name][
        "globals"
    ]
    (file,) = scan(hostile).reports
    modern = {w.replace(" ", ".").replace("__builtin__", "builtins") for w in wanted}
    found = {f.what for f in file.findings}
    assert any(f.severity == "dangerous" for f in file.findings)
    assert found & modern
    assert found <= modern
    assert scan(hostile).verdict() == "dangerous"


def test_golden_files_are_not_called_dangerous(golden):
    report = scan(golden)
    assert all(f.error is None for f in report.reports)
    # A member of an enumeration is pickled as a call of its class.
    assert {w for w in whats(report) if w[0] in ("dangerous", "suspicious")} <= {
        ("suspicious", "trainer.Phase")
    }


def test_a_tensor_pickled_without_torch_save_is_followed(tmp_path, golden_dir):
    inner = (golden_dir / "hostile" / "os_system.pt").read_bytes()
    stream = io.BytesIO()
    stream.write(b"\x80\x04ctorch.storage\n_load_from_bytes\n")
    stream.write(b"B" + struct.pack("<I", len(inner)) + inner + b"\x85R.")
    path = tmp_path / "x.pkl"
    path.write_bytes(stream.getvalue())
    (file,) = scan(path).reports
    assert [(f.severity, f.what) for f in file.findings] == [
        ("dangerous", "posix.system"),
        ("known", "torch.storage._load_from_bytes"),
    ]
    assert file.findings[0].stream == "pickle > byte 1,439 > data.pkl"


def test_a_native_directory_is_one_thing(tmp_path):
    import holdfast

    holdfast.save({"w": np.arange(6.0), "step": 3}, tmp_path / "native", format="native")
    report = scan(tmp_path)
    assert [(f.format, f.error, f.findings) for f in report.reports] == [("native", None, ())]
    assert report.verdict() == "clean"
    assert scan(tmp_path / "native").verdict() == "clean"


def test_lists_of_paths(tmp_path):
    for name in ("a.pkl", "b.pkl", "c.pkl"):
        (tmp_path / name).write_bytes(pickle.dumps(1))
    report = scan([tmp_path / "a.pkl", str(tmp_path / "b.pkl")], tmp_path / "c.pkl")
    assert [os.path.basename(f.path) for f in report.reports] == ["a.pkl", "b.pkl", "c.pkl"]


def test_an_item_inside_of_an_item(tmp_path):
    """The index of a distributed checkpoint may point anywhere: into the elements of a tensor, or out of the folder."""
    evil = torch_zip(stream(call("os", "system", text("true"))), {})
    outer = torch_zip(stream(NONE), {"0": b"\x00" * 64 + evil + b"\x00" * 64})
    place = craft_dcp.index("step", None, None)
    offset = outer.index(evil)
    for name, item in (
        ("inside", craft_dcp.info(craft_dcp.FILE, offset, len(evil))),
        ("outside", craft_dcp.info("../x", 0, 10)),
    ):
        folder = tmp_path / name
        folder.mkdir()
        (folder / ".metadata").write_bytes(
            craft_dcp.metadata({"step": craft_dcp.value()}, [(place, item)])
        )
        (folder / craft_dcp.FILE).write_bytes(outer)
    inside, outside = scan(tmp_path).reports
    assert [(f.severity, f.what) for f in inside.findings] == [("dangerous", "os.system")]
    assert inside.findings[0].stream == f"{craft_dcp.FILE} at byte {offset:,} > data.pkl"
    assert [f.severity for f in outside.findings] == ["suspicious"]


@pytest.mark.parametrize(
    "name", ["where tar that begins as a legacy stream", "where safetensors that is a pickle"]
)
def test_open_refuses_what_torch_would_read_otherwise(tmp_path, name):
    import holdfast
    from holdfast import errors

    (attack,) = [a for a in ATTACKS if a.name == name]
    path = write(attack, tmp_path, "/nowhere")
    with pytest.raises(errors.FormatError, match="at once"):
        holdfast.open(path)
    assert any(
        "several formats" in f.what or f.severity == "dangerous"
        for f in scan(path).reports[0].findings
    )


def test_a_legacy_stream_that_is_a_tar_is_both(tmp_path):
    (attack,) = [a for a in ATTACKS if a.name == "where tar that begins as a legacy stream"]
    report = scan(write(attack, tmp_path, "/nowhere"))
    assert {"one file, several formats: legacy, tar", "posix.system"} <= {
        f.what for f in report.reports[0].findings
    }


@pytest.mark.parametrize(
    "value",
    [
        np.random.default_rng(0),
        collections.defaultdict(collections.Counter),
        functools.partial(int, base=2),
        np.tanh,
        type(None),
        uuid.UUID(int=1),
    ],
)
@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_what_is_ordinary_is_clean(bare, value, protocol):
    assert bare(value, protocol=protocol).verdict(strict=True) == "clean"


def test_more_than_can_be_listed_is_said(bare, monkeypatch):
    monkeypatch.setattr("holdfast.verbs.scanning.findings.MOST_FINDINGS", 100)
    content = b"".join(b"cm%d\nf\n)R0" % i for i in range(150)) + b"N."
    report = bare(content)
    assert len(report.reports[0].findings) == 100
    assert "50 more findings" in report.reports[0].error
    assert bare(b"N." * 10_050).verdict() == "error"


def test_compressed_bombs_are_bounded(tmp_path):
    from holdfast import Limits

    (tmp_path / "x").write_bytes(
        zlib.compress(b"\x80\x04B" + struct.pack("<I", 50 << 20) + bytes(30 << 20), 9)
    )
    assert (
        "unpacks to more"
        in scan(tmp_path / "x", limits=Limits(pickle_nbytes=1 << 20)).reports[0].error
    )


def test_a_surprise_takes_no_finding_away(bare, monkeypatch):
    def surprise(*_, exact):
        raise RuntimeError("a bug")

    monkeypatch.setattr("holdfast.verbs.scanning.walk.last_zip", surprise)
    report = bare(Calls(os.system, "x"))
    assert report.verdict() == "dangerous"
    assert "a bug" in report.reports[0].error


def test_scanning_imports_nothing(bare):
    report = bare(b"\x80\x04cantigravity\nfly\n)R.")
    assert whats(report) == [("dangerous", "antigravity.fly")]
    assert "antigravity" not in sys.modules


@pytest.mark.parametrize(
    ("module", "name", "uses", "severity"),
    [
        ("os", "system", ("call",), "dangerous"),
        ("os.path", "join", ("call",), "dangerous"),
        ("__builtin__", "eval", ("call",), "dangerous"),
        ("builtins", "getattr", ("mention",), "dangerous"),
        ("torch.nn", "os.system", ("call",), "dangerous"),
        ("mymodule", "helpers.subprocess.run", ("call",), "dangerous"),
        ("mymodule", "__class__.__subclasses__", ("call",), "dangerous"),
        ("numpy.testing._private.utils", "runstring", ("call",), "dangerous"),
        ("torch.hub", "load", ("call",), "dangerous"),
        ("torch", "load", ("call",), "dangerous"),
        ("оs", "system", ("call",), "suspicious"),  # a Cyrillic o
        ("mymodule", "make", ("call", "mention"), "suspicious"),
        ("mymodule", "make", ("mention",), "unknown"),
        ("mymodule", "Net", ("build", "mention", "new"), "unknown"),
        ("transformers.training_args", "TrainingArguments", ("new",), "unknown"),
        ("osmium", "Reader", ("new",), "unknown"),
        ("torch.nn.modules.linear", "Linear", ("new",), "known"),
        ("torch.nn.functional", "relu", ("mention",), "known"),
        ("torch.optim.lr_scheduler", "LambdaLR", ("new",), "known"),
        ("torch._utils", "_rebuild_xla_tensor", ("call",), "known"),
        ("numpy.random._pickle", "__generator_ctor", ("call",), "known"),
        ("argparse", "Namespace", ("new",), "known"),
        ("__torch__.foo", "Net", ("new",), "known"),
    ],
)
def test_severity(module, name, uses, severity):
    assert judge(Global(module, name), uses)[0] == severity


def test_a_folder_that_is_called_like_a_url_is_a_folder(tmp_path, monkeypatch):
    """Nobody is sent to the network by the name of something in a folder."""

    def asked(*given, **more):
        raise AssertionError("an object store was asked")

    monkeypatch.setattr("holdfast.stores.remote.client.get_bucket", asked)
    monkeypatch.chdir(tmp_path)
    inside = tmp_path / "s3:" / "bucket"
    inside.mkdir(parents=True)
    np.save(inside / "weights.npy", np.ones(3))
    report = scan(tmp_path)
    assert report.verdict() == "clean"
    assert [os.path.relpath(one.path, tmp_path) for one in report.reports] == [
        "s3:/bucket/weights.npy"
    ]


@pytest.mark.parametrize("given", ["s3://bucket/", Path("s3://bucket/"), Path("s3://bucket/x.pt")])
def test_scan_reports_a_bucket_that_cannot_be_read_by_its_url(given, monkeypatch):
    def refuse(self, limits):
        raise StoreError("access denied")

    monkeypatch.setattr(Url, "normalize", refuse)
    (report,) = scan(given).reports
    assert report.path.startswith("s3://bucket")
