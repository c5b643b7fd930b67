"""Other pages: a diff, a step in shards, a run, a checkpoint without measures, one without tensors."""

from __future__ import annotations

import numpy as np
import pytest

import holdfast
from tests.browser import documents
from tests.conftest import GOLDEN
from tests.sampling import sample


def test_a_diff(draw):
    seen = draw(documents.difference())
    assert "did not change, its siblings did" in seen.text("#standouts-list")
    assert "model.layers.21.self_attn.o_proj.weight" in seen.text("#standouts-list")
    assert seen.page.locator("#changes button.count-button").all_inner_texts() == [
        "36 same",
        "181 changed",
        "3 added",
        "1 removed",
        "1 renamed",
    ]
    assert "transformer.norm.weight → model.norm.weight" in seen.text("#changes")
    seen.page.click("#changes >> text=3 added")
    assert seen.rows() == 3
    seen.page.click("#changes >> text=3 added")
    assert seen.rows() == 222
    seen.page.click("#changes li >> text=score.weight")
    assert 'holdfast.open("models/chat.safetensors")' in seen.text("#drawer code"), (
        "what was added is in the other file"
    )
    seen.page.keyboard.press("Escape")
    seen.page.click("#changes li >> text=model.norm.weight")
    assert (
        seen.text("#drawer code") == 'holdfast.open("models/chat.safetensors")["model.norm.weight"]'
    ), "and so is a new name"


def test_what_became_nan_is_worth_a_look_before_all_else(draw, tmp_path):
    before = {f"layers.{n}.w": np.full((4, 4), n + 1, np.float32) for n in range(12)}
    after = {name: array * np.float32(1.01) for name, array in before.items()}
    after["layers.7.w"] = np.full((4, 4), np.nan, np.float32)
    after["layers.10.w"][0, 0] = np.inf
    for name, state in (("a", before), ("b", after)):
        holdfast.save(state, tmp_path / f"{name}.safetensors", durable=False)
    seen = draw(holdfast.report(tmp_path / "a.safetensors", tmp_path / "b.safetensors").html())
    first = seen.page.locator("#standouts-list li").first.inner_text()
    assert first.startswith("NaN or Inf appeared")
    assert first.index("layers.7.w") < first.index("layers.10.w")
    assert "16 elements, first NaN at [0, 0]" in first
    assert "did not change" not in seen.text("#standouts-list")
    assert "NaN or Inf" in seen.text("#legend")
    seen.page.click("#standouts-list >> text=layers.7.w")
    assert "first NaN at [0, 0]" in seen.text("#drawer .callout")


@pytest.fixture
def two_checkpoints(tmp_path):
    """Checkpoints that differ in every way a tensor can; the paths of both."""
    before = {f"h.{n}.w": np.full((8, 16), 2.0**n, np.float32) for n in range(4)}
    after = {name: array.copy() for name, array in before.items()}
    after["h.1.w"][:] = 2.0**9
    after["h.2.w"][2, 5] = np.nan
    after["renamed.w"] = after.pop("h.3.w")
    after["new.w"] = np.ones(3, np.float32)
    before["old.w"] = np.zeros(7, np.float32)
    paths = tmp_path / "first.safetensors", tmp_path / "second.pt"
    for path, state in zip(paths, (before, after), strict=True):
        holdfast.save(state, path, durable=False)
    return paths


def drawer_sides(seen, name):
    """The text of each side in the drawer of a tensor, by the label of the side."""
    seen.page.locator("#table tbody tr", has_text=name).first.evaluate("row => row.click()")
    parts = seen.page.locator("#drawer section.side").all_inner_texts()
    return {part.split(":")[0]: part for part in parts}


def test_the_drawer_of_a_difference_shows_both_sides(draw, two_checkpoints):
    first, second = two_checkpoints
    seen = draw(holdfast.report(first, second, stats=True).html())

    sides = drawer_sides(seen, "h.1.w")
    assert [*sides] == ["First", "Second"]
    with holdfast.open(first) as a, holdfast.open(second) as b:
        for side, path, checkpoint in (("First", first, a), ("Second", second, b)):
            _, start, nbytes, _ = checkpoint["h.1.w"].file_range()
            assert sides[side].startswith(f"{side}: {path}")
            assert f"byte range\n{start:,} to {start + nbytes:,}" in sides[side]
            assert f'holdfast.open("{path}")["h.1.w"]' in sides[side]
            assert "Quantiles" in sides[side]
    assert "largest\t2" in sides["First"]
    assert "largest\t512" in sides["Second"]
    table = seen.page.locator("#drawer table.plain").first.inner_text()
    assert "first\tsecond\tmedian" in table
    assert "largest value\t2\t512" in table

    sides = drawer_sides(seen, "h.2.w")
    assert "NaN at" not in sides["First"]
    assert "first NaN at [2, 5]" in sides["Second"]


def test_the_drawer_labels_what_only_one_side_has(draw, two_checkpoints):
    first, second = two_checkpoints
    seen = draw(holdfast.report(first, second, stats=True).html())
    assert [*drawer_sides(seen, "old.w")] == ["First"]
    assert [*drawer_sides(seen, "new.w")] == ["Second"]
    sides = drawer_sides(seen, "renamed.w")
    assert '["h.3.w"]' in sides["First"]
    assert '["renamed.w"]' in sides["Second"]


def test_the_drawer_shows_values_that_did_not_change_once(draw, two_checkpoints):
    seen = draw(holdfast.report(*two_checkpoints, stats=True).html())
    sides = drawer_sides(seen, "h.0.w")
    assert [*sides] == ["First", "Second"]
    assert all("Quantiles" not in side for side in sides.values())
    assert seen.text("#drawer").count("Quantiles") == 1
    assert "Both: the same values" in seen.text("#drawer")


def test_the_drawer_shows_both_byte_ranges_without_numbers(draw, two_checkpoints):
    seen = draw(holdfast.report(*two_checkpoints).html())
    sides = drawer_sides(seen, "h.1.w")
    assert all("byte range" in side and "--stats" in side for side in sides.values())
    assert len(sides) == 2


def test_a_step_in_shards(draw):
    seen = draw(documents.sharded())
    assert "8 files" in seen.text("#shards")
    assert "1 gap" in seen.text("#shards")
    before = seen.pixels("#shards .tall canvas")
    seen.page.select_option("#rank", index=2)
    assert seen.pixels("#shards .tall canvas") != before
    assert "rank 1 reads 4 files" in seen.announced()
    canvas = seen.page.locator("#shards .tall canvas")
    canvas.focus()
    seen.page.keyboard.press("ArrowRight")
    assert "header" in seen.announced()
    seen.page.keyboard.press("ArrowRight")
    assert "model.embed_tokens.weight" in seen.announced()
    seen.page.keyboard.press("Enter")
    assert "[0:4000, 0:1024]" in seen.text("#drawer")
    assert seen.page.locator("#drawer rect.box").count() == 8


def test_a_run(draw):
    seen = draw(documents.run())
    assert seen.page.locator("#run figure").count() == 3
    assert seen.page.get_attribute("#run-table table", "aria-rowcount") == "41"
    titles = seen.page.locator("#run svg > title").all_text_contents()
    assert titles[0] == "bytes of 40 steps"
    seen.page.click("#run-table th >> text=state")
    assert "torn" in seen.page.locator("#run-table tbody").inner_text()


def test_without_measures(draw):
    seen = draw(documents.llama().document(stats=False))
    assert seen.page.locator("#standouts").is_hidden()
    seen.page.click("#table tbody tr")
    assert "--stats" in seen.text("#drawer")


def test_sampled_is_said(draw):
    seen = draw(
        documents.small(
            sampled={"share": 0.01, "text": "1% of the blocks of each tensor were read"}
        )
    )
    assert "1% of the blocks" in seen.text("#sampled")


def test_no_tensors(draw):
    seen = draw(documents.Sheet().document())
    assert seen.page.locator("#treemap").is_hidden()
    assert seen.page.locator("#controls").is_hidden()


def test_what_cannot_be_drawn_says_so(draw):
    seen = draw(documents.small())
    broken = seen.file.read_text().replace('id="holdfast-data">', 'id="holdfast-data">!')
    seen.file.write_text(broken)
    seen.page.goto(seen.file.as_uri())
    seen.until("document.getElementById('sentence').textContent.includes('could not be drawn')")
    assert any("error" in line for line in seen.said)
    seen.said.clear()


FILES = sorted(path.name for path in (GOLDEN / "files").iterdir() if not path.name.startswith("."))


def test_real_files(draw):
    """Golden files of every format: their names are in the table, and their pages say nothing to the console."""
    seen = None
    for name in sample("pages of golden files", FILES, len(FILES) // 5):
        made = holdfast.report(GOLDEN / "files" / name)
        seen = seen.show(made.html()) if seen else draw(made.html())
        count = made.document["tensors"]["count"]
        assert not count or seen.rows() == count
        assert seen.violations() == []
        if count:
            seen.page.evaluate("document.querySelector('#table tbody tr').click()")
            assert seen.page.locator("#drawer").is_visible()


def layered(rng: np.random.Generator, layers: int = 6) -> dict[str, np.ndarray]:
    parts = ("attn.q", "attn.v", "mlp.up")
    return {
        f"h.{layer}.{part}.weight": rng.standard_normal((32, 16), np.float32)
        for layer in range(layers)
        for part in parts
    }


def test_a_real_report_finds_the_fault(draw, tmp_path):
    state = layered(np.random.default_rng(1))
    state["h.2.mlp.up.weight"][3, 4] = np.inf
    state["h.4.attn.v.weight"][:4] = 0
    state["h.5.attn.q.weight"] *= 0.001
    holdfast.save(state, tmp_path / "m.safetensors")
    seen = draw(holdfast.report(tmp_path / "m.safetensors", stats=True).html())
    found = seen.text("#standouts-list").splitlines()
    assert [line.split()[0] for line in found if line.startswith("h.")] == [
        "h.2.mlp.up.weight",
        "h.4.attn.v.weight",
        "h.5.attn.q.weight",
    ]
    seen.page.click("#standouts-list >> text=h.4.attn.v.weight")
    assert "4 rows are all zero" in seen.text("#drawer")
    line = seen.text("#drawer code")
    read = eval(line, {"holdfast": holdfast}).numpy()
    assert np.array_equal(read, state["h.4.attn.v.weight"])


def test_a_real_diff_finds_the_layer_that_did_not_train(draw, tmp_path):
    before = layered(np.random.default_rng(1))
    after = {
        name: value if name.startswith("h.3.") else value * np.float32(1.01)
        for name, value in before.items()
    }
    after["new.bias"] = np.ones(4, np.float32)
    holdfast.save(before, tmp_path / "a.safetensors")
    holdfast.save(after, tmp_path / "b.safetensors")
    seen = draw(holdfast.report(tmp_path / "a.safetensors", tmp_path / "b.safetensors").html())
    found = seen.text("#standouts-list")
    assert "did not change, its siblings did" in found
    assert {name for name in before if name in found} == {
        name for name in before if name.startswith("h.3.")
    }
    seen.page.click("#changes >> text=1 added")
    assert seen.rows() == 1


def test_a_real_diff_of_names_alone(draw, tmp_path):
    before = layered(np.random.default_rng(1))
    holdfast.save(before, tmp_path / "a.safetensors")
    holdfast.save(
        {f"model.{name}": value for name, value in before.items()}, tmp_path / "b.safetensors"
    )
    seen = draw(holdfast.report(tmp_path / "a.safetensors", tmp_path / "b.safetensors").html())
    assert seen.page.locator("#measure option:checked").inner_text() != "relative change", (
        "nothing changed: the colour is what became of it"
    )
    assert "no NaN" not in seen.text("#standouts"), "nothing was read that could say so"
    seen.page.click("#changes li button")
    line = seen.text("#drawer code")
    assert np.array_equal(
        eval(line, {"holdfast": holdfast}).numpy(),
        before[seen.text("#drawer h2").removeprefix("model.")],
    )


def test_a_real_run(draw, tmp_path):
    with holdfast.Run(tmp_path / "run", keep=[holdfast.Latest(3)]) as run:
        for step in range(1, 6):
            run.save(step, layered(np.random.default_rng(step)), metrics={"loss": 1 / step})
    seen = draw(holdfast.report(tmp_path / "run").html())
    assert seen.page.get_attribute("#run-table table", "aria-rowcount") == "4"
    assert "Loss" in seen.text("#run-charts")
    assert seen.rows() == 18


def test_real_shards(draw, tmp_path):
    holdfast.save(layered(np.random.default_rng(1)), tmp_path / "whole.safetensors")
    holdfast.reshard(
        tmp_path / "whole.safetensors", tmp_path / "cut", mesh={"tp": 4}, rules=["*: tp=0"]
    )
    seen = draw(holdfast.report(tmp_path / "cut", mesh="2").html())
    assert seen.page.locator("#rank option").count() == 3
    seen.page.select_option("#rank", index=1)
    assert "rank 0 reads" in seen.announced()
    seen.page.click("#table tbody tr")
    assert seen.page.locator("#drawer rect.box").count() == 4
