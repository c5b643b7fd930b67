"""Other pages: a diff, a step in shards, a run, a checkpoint without measures, one without tensors."""

from __future__ import annotations

import holdfast
from tests.browser import documents
from tests.conftest import GOLDEN


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
    assert 'holdfast.open("models/chat.safetensors")' in seen.text("#drawer code"), "what was added is in the other file"


def test_a_step_in_shards(draw):
    seen = draw(documents.sharded())
    assert "8 files" in seen.text("#shards")
    assert "1 gap" in seen.text("#shards")
    before = seen.pixels("#shards canvas")
    seen.page.select_option("#rank", index=2)
    assert seen.pixels("#shards canvas") != before
    assert "rank 1 reads 4 files" in seen.announced()
    canvas = seen.page.locator("#shards canvas")
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
    seen = draw(documents.small(sampled={"share": 0.01, "text": "1% of the blocks of each tensor were read"}))
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


def test_real_files(draw, request):
    """Golden files of every format: their names are in the table, and their pages say nothing to the console."""
    seen = None
    for name in FILES if request.config.getoption("--exhaustive") else FILES[::5]:
        made = holdfast.report(GOLDEN / "files" / name)
        seen = seen.show(made.html()) if seen else draw(made.html())
        count = made.document["tensors"]["count"]
        assert not count or seen.rows() == count
        assert seen.violations() == []
        if count:
            seen.page.evaluate("document.querySelector('#table tbody tr').click()")
            assert seen.page.locator("#drawer").is_visible()
