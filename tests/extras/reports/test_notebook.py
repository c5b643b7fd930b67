"""What a notebook shows of results: small, escaped, and never an error."""

from __future__ import annotations

import doctest
import re
from html.parser import HTMLParser

import numpy as np
import pytest

import holdfast
from holdfast.core import notebook
from tests.conftest import GOLDEN
from tests.support import flip_bit

HOSTILE = "<img src=x onerror=alert(1)>\u202e"


class Tags(HTMLParser):
    """Which tags there are, whether they close, and what attributes they have."""

    def __init__(self, text):
        super().__init__()
        self.open, self.seen, self.attributes = [], set(), set()
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.seen.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_startendtag(self, tag, attrs):
        self.seen.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


KNOWN = {"div", "span", "strong", "table", "thead", "tbody", "tr", "th", "td", "svg", "rect"}


def checked(result) -> str:
    shown = result._repr_html_()
    tags = Tags(shown)
    assert tags.seen <= KNOWN
    assert not {
        name for name in tags.attributes if name.startswith("on") or name in ("href", "src")
    }
    assert "\u202e" not in shown
    assert len(shown) < 100_000
    return shown


def test_the_examples():
    assert doctest.testmod(notebook).failed == 0


@pytest.fixture
def files(tmp_path):
    a = {
        HOSTILE: np.arange(6.0).reshape(2, 3),
        "b.weight": np.ones((4, 4), np.float32),
        "c": np.zeros(3),
    }
    holdfast.save(a, tmp_path / "a.pt")
    holdfast.save({**a, "b.weight": a["b.weight"] + 1, "d": np.ones(2)}, tmp_path / "b.pt")
    return tmp_path


def test_every_result(files):
    a, b = files / "a.pt", files / "b.pt"
    with holdfast.open(a) as checkpoint:
        shown = checked(checkpoint)
        assert "b.weight" in shown
        assert "&lt;img" in shown
        assert "[2, 3]" in checked(checkpoint[HOSTILE])
    assert "b.weight" in checked(holdfast.diff(a, b))
    assert ">ok</span> yes" in checked(holdfast.verify(a))
    assert "<svg" in checked(holdfast.stats(a))
    assert "clean" in checked(holdfast.scan(a))
    checked(holdfast.sparsity(a))
    checked(holdfast.report(a))
    checked(holdfast.alias_graph({"x": a, "y": b}))
    for result in (
        holdfast.convert(a, files / "c.safetensors", rename={HOSTILE: "plain"}),
        holdfast.copy(a, files / "d.pt"),
        holdfast.tie(a, dry_run=True),
        holdfast.compact(a, files / "e.pt"),
        holdfast.prune(a, files / "f.pt", ["b.weight: 0.5"]),
        holdfast.save({"w": np.ones(2)}, files / "g.pt"),
    ):
        assert "pt" in checked(result)
    (files / "folder").mkdir()
    (files / "folder" / "x.pt").write_bytes(a.read_bytes())
    checked(holdfast.seal(files / "folder", step=3, metrics={"loss": float("nan")}))


def test_damage_is_shown(files):
    flip_bit(files / "a.pt", after=np.arange(6.0).tobytes())
    shown = checked(holdfast.verify(files / "a.pt"))
    assert ">ok</span> no" in shown
    assert "damaged" in shown


@pytest.mark.parametrize("path", sorted((GOLDEN / "files").iterdir()), ids=lambda path: path.name)
def test_every_format(path):
    with holdfast.open(path) as checkpoint:
        checked(checkpoint)
        for name in checkpoint:
            checked(checkpoint[name])


def test_many_rows_are_few(tmp_path):
    holdfast.save(
        {f"t{i}": np.ones(1, np.float32) for i in range(3000)}, tmp_path / "m.safetensors"
    )
    with holdfast.open(tmp_path / "m.safetensors") as checkpoint:
        shown = checked(checkpoint)
    assert len(re.findall("<tr>", shown)) == 51
    assert "2,950 more" in shown
    assert "2,950 more" in checked(holdfast.stats(tmp_path / "m.safetensors", bins=4))


def test_nothing_is_read_and_a_closed_checkpoint_is_shown(tmp_path):
    holdfast.save({"w": np.ones(10_000)}, tmp_path / "m.safetensors")
    checkpoint = holdfast.open(tmp_path / "m.safetensors")
    tensor = checkpoint["w"]
    checked(checkpoint)
    checked(tensor)
    assert checkpoint.source.read_nbytes == 0
    checkpoint.close()
    checked(checkpoint)
    checked(tensor)


def test_a_run_is_a_table_of_its_steps(tmp_path):
    with holdfast.Run(tmp_path / "run", keep=[holdfast.Latest(2)], durable=False) as run:
        assert "<table" not in checked(run)
        for step in (1, 2):
            run.save(step, {"w": np.ones(2)}, metrics={HOSTILE: step / 3, "loss": 0.5})
        shown = checked(run)
        assert re.findall(r"<td[^>]*>(\d+)</td>", shown) == ["2", "1"], "the newest comes first"
        assert {"0.5", "0.6667", "latest:2, the newest"} <= {
            *re.findall(r"<td[^>]*>([^<]*)</td>", shown)
        }
