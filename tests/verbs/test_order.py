"""Names as people count, and changes by their size."""

import json
import re

import numpy as np
import pytest
from safetensors.numpy import save_file

import holdfast
from holdfast.cli.main import main
from holdfast.cli.text import plain
from holdfast.cli.verify import verify_lines
from holdfast.core.order import sort_naturally
from holdfast.verbs.verify import Damage, VerifyReport

LAYERS = [f"layers.{n}.w" for n in range(20)]


@pytest.fixture
def two(tmp_path):
    """Saved by the safetensors library, which sorts names as text."""
    rng = np.random.default_rng(1)
    a = {name: rng.standard_normal(64).astype(np.float32) for name in LAYERS}
    a |= {f"old.{n}.w": np.full(2, n, np.float32) for n in range(12)}
    b = {
        name: a[name] + np.float32(0.001 * (1 + int(name.split(".")[1]))) * np.abs(a[name])
        for name in LAYERS
    }
    b |= {f"new.{n}.w": np.full(3, n, np.float32) for n in range(12)}
    save_file(a, tmp_path / "a.safetensors")
    save_file(b, tmp_path / "b.safetensors")
    return tmp_path / "a.safetensors", tmp_path / "b.safetensors"


def _lines(capsys, *words):
    main([str(word) for word in words])
    return capsys.readouterr().out


def _numbers(text, before):
    return [int(n) for n in re.findall(rf"{before}\.(\d+)\.w", text)]


def test_show_folds_and_lists_layers_as_they_are_counted(two, capsys):
    assert "layers.[0-19].w" in _lines(capsys, "show", two[0])
    assert re.findall(r"─ (\d+) ", _lines(capsys, "show", two[0], "--all"))[:20] == [
        str(n) for n in range(20)
    ]
    assert _numbers(_lines(capsys, "show", two[0], "-f", "layers"), "layers") == list(range(20))


def test_stats_zeros_and_notebooks(two, capsys):
    for words in (("stats", "--bins", "0"), ("show", "--sparsity")):
        assert _numbers(_lines(capsys, *words, two[0]), "layers") == list(range(20)), words
    with holdfast.open(two[0]) as checkpoint:
        shown = checkpoint._repr_html_()
        assert list(checkpoint)[:3] == ["layers.0.w", "layers.1.w", "layers.10.w"], (
            "a program reads the file as it is"
        )
    for html in (shown, holdfast.stats(two[0])._repr_html_()):
        assert _numbers(html, "layers") == list(range(20))


def test_what_has_no_checksum_and_what_is_damaged(two):
    """In a notebook and as text; the reports have them as the files do."""
    report = holdfast.verify(two[0])
    assert report.unchecked[:3] == ("layers.0.w", "layers.1.w", "layers.10.w")
    assert _numbers(report._repr_html_(), "layers") == list(range(20))
    found = [
        Damage("a.pt", (name,), f"data/{at}", 64 * at, 64, 1, 2)
        for at, name in enumerate(sorted(LAYERS))
    ]
    damaged = VerifyReport("a.pt", "torch-zip", damaged=tuple(found), notes=("b 10", "b 2"))
    assert _numbers(damaged._repr_html_(), "layers") == list(range(20))
    assert damaged._repr_html_().index("b 10") < damaged._repr_html_().index("b 2")
    assert _numbers(
        "\n".join(plain(line) for line in verify_lines(damaged, everything=True)), "layers"
    ) == list(range(20))


def test_renamed_in_a_notebook(tmp_path):
    for name in ("old", "new"):
        save_file(
            {f"{name}.{n}.w": np.full(2, n, np.float32) for n in range(12)},
            tmp_path / f"{name}.safetensors",
        )
    shown = holdfast.diff(tmp_path / "old.safetensors", tmp_path / "new.safetensors")._repr_html_()
    assert _numbers(shown, "old") == list(range(12))


def test_json_is_in_the_order_of_the_file(two, capsys):
    saved = list(holdfast.open(two[0]))
    for words in (("show", "--json"), ("stats", "--json")):
        assert [
            tensor["name"] for tensor in json.loads(_lines(capsys, *words, two[0]))["tensors"]
        ] == saved


def test_changes_are_told_by_their_size(two, capsys):
    out = _lines(capsys, "diff", *two, "--all")
    assert _numbers(out, "layers") == list(range(19, -1, -1))
    assert _numbers(out, "old") == _numbers(out, "new") == list(range(12))
    line = next(line for line in out.splitlines() if "layers.19.w" in line)
    assert "relative 0.02 " in line
    assert " rel " not in line
    found = holdfast.diff(*two)
    assert [change.name for change in found.ranked()] == LAYERS[::-1]
    assert found.ranked()[0].size == pytest.approx(0.02, rel=1e-4)


def test_other_orders_and_the_first_few(two, capsys):
    assert _numbers(_lines(capsys, "diff", *two, "--sort", "name"), "layers") == list(range(20))
    assert _numbers(_lines(capsys, "diff", *two, "--sort", "file"), "layers")[:3] == [0, 1, 10]
    out = _lines(capsys, "diff", *two, "--top", "3")
    assert _numbers(out, "layers") == [19, 18, 17]
    assert "17 more that changed" in out
    found = json.loads(_lines(capsys, "diff", *two, "--top", "2", "--json"))
    assert [change["name"] for change in found["changed"]] == ["layers.19.w", "layers.18.w"]
    assert json.loads(_lines(capsys, "diff", *two, "--json"))["changed"][2]["name"] == "layers.10.w"
    with pytest.raises(holdfast.errors.BadArgument):
        holdfast.diff(*two).ranked("size")


def test_what_came_where_all_was_zero_is_large(tmp_path, capsys):
    holdfast.save({"a": np.zeros(3), "b": np.ones(3)}, tmp_path / "a.pt", durable=False)
    holdfast.save({"a": np.full(3, 1e-9), "b": np.full(3, 2.0)}, tmp_path / "b.pt", durable=False)
    assert [
        change.name for change in holdfast.diff(tmp_path / "a.pt", tmp_path / "b.pt").ranked()
    ] == ["a", "b"]


def test_what_is_no_series_stays_as_it_was_saved():
    names = ["embed", "h.0.attn", "h.0.mlp", "h.10.attn", "h.2.mlp", "h.2.attn", "norm", "head"]
    assert sort_naturally(names) == [
        "embed",
        "h.0.attn",
        "h.0.mlp",
        "h.2.attn",
        "h.2.mlp",
        "h.10.attn",
        "norm",
        "head",
    ]
