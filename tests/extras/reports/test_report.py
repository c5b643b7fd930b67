"""`report`: the document, and the page of it."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import holdfast
from holdfast.cli.main import main
from holdfast.errors import NotCommitted
from holdfast.extras.reports.document import front_coded
from holdfast.numeric.dequantize import number_shape
from tests.conftest import GOLDEN
from tests.extras.reports.pages import data_of, names_of

FILES = sorted(path for path in (GOLDEN / "files").iterdir() if not path.name.startswith("."))


@pytest.fixture
def model(tmp_path) -> Path:
    rng = np.random.default_rng(1)
    state = {
        f"model.layers.{i}.mlp.up.weight": rng.standard_normal((8, 4), np.float32) for i in range(3)
    }
    holdfast.save({**state, "lm_head.weight": np.zeros(4, np.float16)}, tmp_path / "m.safetensors")
    return tmp_path / "m.safetensors"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_format(path):
    made = holdfast.report(path)
    with holdfast.open(path) as checkpoint:
        assert names_of(made.document) == list(checkpoint)
        tensors = made.document["tensors"]
        assert tensors["count"] == len(checkpoint)
        # Of quantised blocks, the shape that the header has.
        shapes = [number_shape(one.shape, one.traits.blocks) for one in checkpoint.values()]
        assert [tuple(tensors["shape"]["labels"][at]) for at in tensors["shape"]["at"]] == shapes
    lengths = {key: len(column["at"] if isinstance(column, dict) and "labels" in column else column)
               for key, column in tensors.items() if key not in ("count", "names", "strides")}  # fmt: skip
    assert set(lengths.values()) <= {tensors["count"]}, lengths
    assert data_of(made.html()) == made.document == json.loads(made.json())
    assert made.json().isascii()


def test_the_same_checkpoint_gives_the_same_bytes(model):
    assert holdfast.report(model).html() == holdfast.report(model).html()


def test_the_columns(model):
    document = holdfast.report(model).document
    tensors = document["tensors"]
    order = {name: at for at, name in enumerate(names_of(document))}
    at = order["model.layers.2.mlp.up.weight"]
    assert tensors["layer"][at] == 2
    assert tensors["role"]["labels"][tensors["role"]["at"][at]] == "model.layers.*.mlp.up.weight"
    raw = model.read_bytes()[tensors["start"][at] : tensors["end"][at]]
    with holdfast.open(model) as checkpoint:
        assert raw == checkpoint["model.layers.2.mlp.up.weight"].numpy().tobytes()


def test_ties_and_dead_bytes(tmp_path):
    torch = pytest.importorskip("torch")
    whole = torch.zeros(1000)
    torch.save({"a": whole[:10], "b": whole[:10], "c": torch.ones(3)}, tmp_path / "t.pt")
    document = holdfast.report(tmp_path / "t.pt").document
    assert document["tensors"]["tie"] == [0, 0, -1]
    assert dict(document["facts"])["dead bytes"] == "3.9 KiB"


def test_a_part_of_it(model):
    assert names_of(holdfast.report(model, filter="*layers.1.*").document) == [
        "model.layers.1.mlp.up.weight"
    ]
    with pytest.raises(holdfast.errors.NoSuchTensor):
        holdfast.report(model, filter="nothing")


def test_an_open_checkpoint_and_bytes(model):
    with holdfast.open(model) as checkpoint:
        assert holdfast.report(checkpoint).html() == holdfast.report(model).html()
    assert holdfast.report(model.read_bytes()).document["scan"]["verdict"] == "not scanned"


@given(st.lists(st.text(st.characters(codec=None), max_size=6), max_size=8))
def test_names_are_exact(names):
    assert names_of({"tensors": {"names": json.loads(json.dumps(front_coded(names)))}}) == [
        name.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
        for name in names
    ]


HOSTILE = (
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "{{script}}",
    "\u202eexe",
    "a\x1b[2J",
    "]]>",
    "\ud800",
)


def test_hostile_names_are_data(tmp_path):
    state = {name: np.ones(1, np.float32) for name in HOSTILE}
    path = tmp_path / "<b>.pt"
    holdfast.save(state, path)
    made = holdfast.report(path)
    page = made.html()
    assert sorted(names_of(data_of(page))) == sorted(HOSTILE)
    assert "alert(1)" not in page
    assert "<b>" not in page
    assert page.count("<script") == page.count("</script>") == 2


def test_the_policy_allows_this_script_and_this_style_alone(model):
    page = holdfast.report(model).html()
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    policy = policy.replace("&#x27;", "'")
    for tag in ("script", "style"):
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        assert (
            f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
            in policy
        )
    assert "default-src 'none'" in policy
    assert "connect-src 'none'" in policy
    assert "unsafe" not in policy
    assert not re.search(
        r"\son[a-z]+=|style=\"|https?://", re.sub(r"(?s)<script.*?</script>", "", page)
    )


@pytest.mark.parametrize("there", ["weights", "folder", "pipe", "html"])
def test_a_page_replaces_pages_and_nothing_else(there, model, tmp_path, capsys):
    out = tmp_path / "page.html"
    for _ in range(2):
        assert main(["report", str(model), "-o", str(out)]) == 0
    capsys.readouterr()
    out.unlink()
    if there == "folder":
        out.mkdir()
    elif there == "pipe":
        os.mkfifo(out)
    else:
        out.write_bytes(
            model.read_bytes()
            if there == "weights"
            else b"<!doctype html>\n<html><body>mine</body></html>"
        )
    before = os.lstat(out)
    assert main(["report", str(model), "-o", str(out)]) == 2
    told = "pass --overwrite" if there in ("weights", "html") else "write the page to a file"
    assert told in capsys.readouterr().err
    after = os.lstat(out)
    assert (after.st_ino, after.st_mtime_ns, after.st_mode) == (
        before.st_ino,
        before.st_mtime_ns,
        before.st_mode,
    )
    with pytest.raises(NotCommitted):
        holdfast.report(model).save(out)
    if there in ("weights", "html"):
        holdfast.report(model).save(out, overwrite=True)
        assert data_of(out.read_text()) == holdfast.report(model).document


def test_at_a_shell(model, tmp_path, capsys):
    out = tmp_path / "page.html"
    assert main(["report", str(model), "-o", str(out)]) == 0
    assert "wrote" in capsys.readouterr().out
    assert data_of(out.read_text()) == holdfast.report(model).document
    assert main(["report", str(model), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == holdfast.report(model).document
    assert main(["report", str(model)]) == 2
    assert "-o page.html" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "nowhere.pt"), "-o", str(out)]) == 2
