"""A small file whose tree would print without end opens, and every verb takes it in a bounded time."""

from __future__ import annotations

import numpy as np
import pytest
from tests.hostile.cases_resources import TENS
from tests.hostile.craft_torch import state, torch_zip

import holdfast

BOMB = torch_zip(state(TENS))


@pytest.mark.parametrize(
    "verb",
    [
        lambda path: holdfast.open(path).describe(),
        lambda path: repr(holdfast.open(path)),
        lambda path: holdfast.open(path)._repr_html_(),
        lambda path: holdfast.convert(path, "x.pt"),
        lambda path: holdfast.diff(path, path),
        lambda path: holdfast.verify(path).problems,
        lambda path: holdfast.stats(path),
        lambda path: holdfast.report(path),
        lambda path: holdfast.scan(path).verdict(),
    ],
    ids=["open", "repr", "notebook", "convert", "diff", "verify", "stats", "report", "scan"],
)
def test_every_verb_takes_it(verb, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bomb.pt").write_bytes(BOMB)
    verb("bomb.pt")


def test_what_is_saved_keeps_its_sharing(tmp_path):
    tree: object = [1.5]
    for _ in range(40):
        tree = [tree] * 2
    holdfast.save({"w": np.zeros(2), "more": tree}, tmp_path / "x.pt")
    with holdfast.open(tmp_path / "x.pt") as ckpt:
        inner = ckpt.tree["more"]
        assert inner[0] is inner[1]


def test_torch_reads_it_as_well(tmp_path):
    torch = pytest.importorskip("torch")
    tree: object = [0]
    for _ in range(40):
        tree = [tree] * 10
    torch.save({"w": torch.ones(2), "tree": tree}, tmp_path / "bomb.pt")
    loaded = holdfast.torch.load(tmp_path / "bomb.pt")
    assert torch.equal(loaded["w"], torch.ones(2))
    assert len(loaded["tree"][0][9]) == 10
