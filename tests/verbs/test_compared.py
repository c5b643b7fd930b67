"""What `verify` says where there was nothing to compare, or not enough."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

import holdfast
from holdfast.cli.main import main
from holdfast.verbs.seals.document import Seal, SealedFile, encode_seal
from tests.support import flip_bit

STATE = {"a": np.arange(6, dtype=np.float32), "b": np.ones(3)}


@pytest.fixture
def plain(tmp_path):
    save_file(STATE, tmp_path / "plain.safetensors")
    return tmp_path / "plain.safetensors"


@pytest.fixture
def summed(tmp_path):
    holdfast.save(STATE, tmp_path / "summed.safetensors", durable=False)
    return tmp_path / "summed.safetensors"


@pytest.fixture
def mixed(tmp_path, plain, summed):
    """A folder of which one file records checksums."""
    folder = tmp_path / "mixed"
    folder.mkdir()
    (folder / "one.pt").write_bytes(summed.read_bytes())
    (folder / "two.pt").write_bytes(plain.read_bytes())
    return folder


def test_nothing_to_compare_has_a_word_of_its_own(plain, capsys):
    assert main(["verify", str(plain)]) == 0
    out = capsys.readouterr().out
    assert "readable, nothing to compare" in out
    assert "no checksums for 2 tensors, 48 B" in out
    report = holdfast.verify(plain)
    assert (report.ok, report.verdict, report.tensors, report.compared) == (True, "readable", 2, 0)
    assert "readable" in report._repr_html_()


def test_without_a_tensor_there_is_nothing_to_compare_either(tmp_path):
    save_file({}, tmp_path / "none.safetensors")
    save_file({"empty": np.zeros(0)}, tmp_path / "empty.safetensors")
    for name in ("none", "empty"):
        report = holdfast.verify(tmp_path / f"{name}.safetensors", require=True)
        assert (report.verdict, report.ok) == ("readable", False)
    holdfast.save({"step": 3}, tmp_path / "native", durable=False)
    assert holdfast.verify(tmp_path / "native", require=True).verdict == "ok", (
        "the manifest has a checksum of its own"
    )


def test_a_gate_takes_what_was_compared_alone(plain, summed, mixed, capsys):
    assert main(["verify", str(summed), "--strict"]) == 0
    assert main(["verify", str(plain), "--strict"]) == 3
    assert main(["verify", str(mixed), "--strict"]) == 3
    assert main(["verify", str(mixed)]) == 0
    assert [holdfast.verify(path, require=True).ok for path in (summed, plain, mixed)] == [
        True,
        False,
        False,
    ]
    flip_bit(summed, -1)
    assert main(["verify", str(summed), str(plain), "--strict"]) == 1, "damage is worse"
    assert main(["verify", str(summed), str(plain / "none"), "--strict"]) == 2
    capsys.readouterr()


def test_how_much_of_a_folder_was_compared(mixed, capsys):
    main(["verify", str(mixed)])
    out = capsys.readouterr().out
    assert "ok in part" in out
    assert "no checksums for 2 of 4 tensors, 48 B of 96 B" in out
    main(["verify", str(mixed), "--json"])
    (found,) = json.loads(capsys.readouterr().out)["checkpoints"]
    assert (found["verdict"], found["ok"], found["tensors"], found["compared"]) == (
        "partial",
        True,
        4,
        2,
    )
    main(["verify", str(mixed), "--json", "--strict"])
    assert json.loads(capsys.readouterr().out)["ok"] is False


def test_a_seal_is_something_to_compare_with(plain):
    holdfast.seal(plain, durable=False)
    assert holdfast.verify(plain, require=True).verdict == "ok"


def test_a_copy_says_that_nothing_was_compared(plain, summed, tmp_path):
    assert any(
        "nothing was compared" in note
        for note in holdfast.copy(plain, tmp_path / "x.safetensors", durable=False).notes
    )
    assert holdfast.copy(summed, tmp_path / "y.safetensors", durable=False).notes == ()


def test_a_step_is_deep_only_where_all_has_a_checksum(plain, tmp_path):
    run = holdfast.Run(tmp_path / "run")
    run.save(1, STATE)
    folder = tmp_path / "run" / run.latest().path.replace("000001", "000002")
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(plain.read_bytes())
    sized = SealedFile("model.safetensors", plain.stat().st_size, None)
    (folder / "holdfast.seal.json").write_bytes(encode_seal(Seal(2, 1e9, {}, (sized,))))
    assert run.latest().step == 2, "whole, by its sizes"
    assert run.latest(deep=True).step == 1
