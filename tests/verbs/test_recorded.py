"""`verify` compares whole files with the digests that other programs record of them."""

import hashlib
import json

import numpy as np
import pytest
from safetensors.numpy import save_file

import holdfast
from holdfast.cli.main import main

STATE = {"a": np.arange(6, dtype=np.float32), "b": np.ones(3)}
CONFIG = b'{"model_type": "toy"}'


def sha256(content):
    return hashlib.sha256(content).hexdigest()


def git_id(content):
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def damage(path):
    """Change one byte of a tensor."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.resolve().write_bytes(content)


@pytest.fixture
def weights(tmp_path):
    """A safetensors file without checksums of its own."""
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(STATE, folder / "model.safetensors")
    return folder / "model.safetensors"


@pytest.fixture
def snapshot(tmp_path, weights):
    """A snapshot as huggingface_hub lays it out: links to blobs that are named by their digests."""
    cache = tmp_path / "models--org--name"
    snapshot = cache / "snapshots" / ("1" * 40)
    snapshot.mkdir(parents=True)
    (cache / "blobs").mkdir()
    files = {"model.safetensors": weights.read_bytes(), "config.json": CONFIG}
    for name, content in files.items():
        digest = sha256(content) if name.endswith(".safetensors") else git_id(content)
        (cache / "blobs" / digest).write_bytes(content)
        (snapshot / name).symlink_to(f"../../blobs/{digest}")
    return snapshot


def test_a_snapshot_of_the_hub_is_compared_with_the_names_of_its_blobs(snapshot, capsys):
    report = holdfast.verify(snapshot, require=True)
    assert (report.verdict, report.ok, report.unchecked, report.skipped) == ("ok", True, (), ())
    assert main(["verify", str(snapshot), "--strict"]) == 0
    assert "nothing to compare" not in capsys.readouterr().out


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_damaged_blob_is_found(name, snapshot, capsys):
    damage(snapshot / name)
    report = holdfast.verify(snapshot)
    assert report.verdict == "damaged"
    (problem,) = report.problems
    assert (problem.file, problem.damaged) == (str(snapshot / name), True)
    assert "the name of its blob" in problem.message
    assert main(["verify", str(snapshot)]) == 1


def test_one_file_of_a_snapshot_is_compared_too(snapshot):
    path = snapshot / "model.safetensors"
    assert holdfast.verify(path).verdict == "ok"
    assert holdfast.verify(path.resolve()).verdict == "ok"
    damage(path)
    assert holdfast.verify(path).verdict == "damaged"
    assert holdfast.verify(path.resolve()).verdict == "damaged"


def test_a_blob_of_ollama_is_compared(tmp_path, weights):
    content = weights.read_bytes()
    blob = tmp_path / "blobs" / f"sha256-{sha256(content)}"
    blob.parent.mkdir()
    blob.write_bytes(content)
    assert holdfast.verify(blob).verdict == "ok"
    damage(blob)
    assert holdfast.verify(blob).verdict == "damaged"


def test_a_name_of_hexadecimal_digits_elsewhere_is_no_digest(tmp_path, weights):
    path = tmp_path / ("0" * 64)
    path.write_bytes(weights.read_bytes())
    assert holdfast.verify(path).verdict == "readable"


LISTS = {
    "gnu": ("model.safetensors.sha256", "{digest}  model.safetensors\n"),
    "binary mode": ("model.safetensors.sha256", "{digest} *model.safetensors\n"),
    "digest alone": ("model.safetensors.sha256", "{digest}\n"),
    "capital letters": ("model.safetensors.sha256", "\ufeff{DIGEST}\r\n"),
    "without the suffix": ("model.sha256", "{digest}  ./model.safetensors\n"),
    "bsd": ("SHA256SUMS", "SHA256 (model.safetensors) = {digest}\n"),
    "several": ("SHA256SUMS", "# made by hand\n{zeros}  other.bin\n{digest}  model.safetensors\n"),
    "text suffix": ("sha256sums.txt", "{digest}  model.safetensors\n"),
}


@pytest.mark.parametrize(("name", "text"), LISTS.values(), ids=LISTS)
def test_a_list_of_digests_beside_a_file_is_compared(name, text, weights):
    digest = sha256(weights.read_bytes())
    content = text.format(digest=digest, DIGEST=digest.upper(), zeros="0" * 64)
    (weights.parent / name).write_text(content, newline="")
    for path in (weights, weights.parent):
        assert holdfast.verify(path, require=True).ok, path

    damage(weights)
    for path in (weights, weights.parent):
        report = holdfast.verify(path)
        (problem,) = report.problems
        assert (report.verdict, problem.file) == ("damaged", str(weights))
        assert name in problem.message
        assert digest in problem.message


def test_a_list_names_files_in_folders_below_it(weights):
    (weights.parent / "unet").mkdir()
    inner = weights.rename(weights.parent / "unet" / "model.safetensors")
    (weights.parent / "SHA256SUMS").write_text(f"{sha256(inner.read_bytes())}  unet/{inner.name}\n")
    assert holdfast.verify(weights.parent).verdict == "ok"
    damage(inner)
    assert holdfast.verify(weights.parent).verdict == "damaged"


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a\\b", "gone.safetensors", "\0"])
def test_names_of_files_that_are_not_here_are_passed_over(name, tmp_path, weights):
    (tmp_path / "secret").write_bytes(b"other content")
    digest = sha256(weights.read_bytes())
    lines = f"{'0' * 64}  {name}\n{digest}  model.safetensors\n"
    (weights.parent / "SHA256SUMS").write_text(lines)
    assert holdfast.verify(weights.parent).verdict == "ok"
    assert holdfast.verify(weights).verdict == "ok"


def test_every_record_of_a_file_must_agree(weights):
    digest = sha256(weights.read_bytes())
    (weights.parent / "SHA256SUMS").write_text(f"{digest}  model.safetensors\n")
    (weights.parent / "model.safetensors.sha256").write_text("0" * 64)
    report = holdfast.verify(weights.parent)
    assert report.verdict == "damaged"
    assert "model.safetensors.sha256" in report.problems[0].message


def test_a_list_without_a_digest_leaves_the_file_unverified(weights, capsys):
    (weights.parent / "model.safetensors.sha256").write_bytes(b"\xff\xfe nothing")
    for path in (weights, weights.parent):
        report = holdfast.verify(path)
        assert report.verdict == "unverified"
        assert "no SHA-256 digest" in report.problems[0].message
    assert main(["verify", str(weights)]) == 2


def test_a_list_that_is_too_long_is_not_read(weights):
    (weights.parent / "SHA256SUMS").write_text("x" * 100)
    report = holdfast.verify(weights.parent, limits=holdfast.Limits(index_nbytes=99))
    assert (report.verdict, len(report.problems)) == ("unverified", 1)
    assert "index_nbytes" in report.problems[0].message


def test_a_seal_does_not_hide_that_a_list_disagrees(weights):
    (weights.parent / "SHA256SUMS").write_text(f"{'0' * 64}  model.safetensors\n")
    holdfast.seal(weights.parent, step=1)
    assert holdfast.verify(weights.parent).verdict == "damaged"


def test_the_document_names_what_a_list_refuses(weights, capsys):
    (weights.parent / "SHA256SUMS").write_text(f"{'0' * 64}  model.safetensors\n")
    assert main(["verify", str(weights.parent), "--json"]) == 1
    (checkpoint,) = json.loads(capsys.readouterr().out)["checkpoints"]
    assert checkpoint["verdict"] == "damaged"
    assert checkpoint["problems"][0]["file"] == str(weights)
