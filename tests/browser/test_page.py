"""The page, as a reader uses it: looking, pointing, filtering, opening; with a mouse and without one."""

from __future__ import annotations

import ast

import pytest

from tests.browser import documents

LAYER = "model.layers.7.self_attn.q_proj.weight"


@pytest.fixture
def page(draw):
    return draw(documents.small())


def test_the_first_screen_says_what_it_is_and_what_is_wrong(page):
    assert page.text("h1") == "model.safetensors"
    assert "219 tensors" in page.text("#sentence")
    assert "clean" in page.text("#facts")
    found = page.text("#standouts-list")
    assert LAYER in found
    assert "model.layers.3.mlp.down_proj.weight" in found
    assert "model.layers.19.self_attn.o_proj.weight" in found
    assert "99× below" in found
    assert "model.layers.15.self_attn.v_proj.weight 6.25%, median 0%" in found.replace("\n", " "), (
        "a dead head"
    )
    assert "model.layers.12" not in found
    map_at = page.page.locator("#treemap canvas").bounding_box()
    assert map_at["y"] < 900, "the map begins on the first screen"
    assert page.violations() == []


def test_hovering_the_map_and_the_matrix(page):
    for selector in ("#treemap canvas", "#panels canvas"):
        canvas = page.page.locator(selector)
        canvas.scroll_into_view_if_needed()
        box = canvas.bounding_box()
        assert page.page.locator("#tip").is_hidden()
        tips = []
        for step in range(6):
            page.page.mouse.move(
                box["x"] + box["width"] * 0.3, box["y"] + box["height"] * (0.5 + step / 20)
            )
            tips.append(page.text("#tip"))
        assert any("model.layers." in tip and "rms: " in tip for tip in tips), tips
        page.page.mouse.move(5, 5)


def test_a_nan_is_said_and_not_only_coloured(page):
    canvas = page.page.locator("#panels canvas")
    canvas.focus()
    for key in ["ArrowDown"] * 8 + ["ArrowRight"]:
        page.page.keyboard.press(key)
    assert page.announced().startswith("layer 7, self_attn.q_proj")
    assert "has NaN or Inf" in page.announced()


def test_filtering_by_glob_filters_everything(page):
    before = [page.pixels("#treemap canvas"), page.pixels("#panels canvas")]
    page.filter("*.layers.1?.*mlp* !*down*")
    assert page.rows() == 20
    assert "20 of 219 tensors" in page.text("#filter-count")
    assert "model.layers.10.mlp.gate_proj.weight" in page.text("#table tbody")
    assert "down_proj" not in page.text("#table tbody")
    assert page.pixels("#treemap canvas") != before[0]
    assert page.pixels("#panels canvas") != before[1]
    assert page.text("#outside") == ""
    page.filter("nosuchthing")
    assert page.rows() == 0
    page.filter("")
    assert page.rows() == 219
    assert page.text("#filter-count") == ""


def test_switching_colours_changes_map_and_matrix_and_legend(page):
    before = [page.pixels("#treemap canvas"), page.pixels("#panels canvas"), page.text("#legend")]
    page.page.select_option("#measure", label="zeros")
    after = [page.pixels("#treemap canvas"), page.pixels("#panels canvas"), page.text("#legend")]
    assert all(one != other for one, other in zip(before, after, strict=True))
    assert "100%" in page.text("#legend")
    assert "NaN or Inf" in page.text("#legend"), "what is sick is sick in every colour"
    page.page.select_option("#measure", label="dtype")
    assert "bf16" in page.text("#legend")


def test_against_the_median_of_the_role(page):
    before = page.pixels("#panels canvas")
    page.page.check("#relative")
    assert page.pixels("#panels canvas") != before


def test_the_drawer_has_all_of_a_tensor(page):
    page.filter("*layers.15.self_attn.v_proj*")
    page.page.click("#table tbody tr")
    drawer = page.text("#drawer")
    for part in (
        "model.layers.15.self_attn.v_proj.weight",
        "[512, 2048]",
        "bf16",
        "layer",
        "models/model.safetensors",
        "6.25%",
        "median of its role",
    ):
        assert part in drawer
    titles = page.page.locator("#drawer h3").all_inner_texts()
    assert titles == [
        "Exponents",
        "Quantiles",
        "Norms of rows",
        "Norms of columns",
        "Singular values",
    ]
    assert "4 groups of rows are all zero" in drawer
    line = page.text("#drawer code")
    call = ast.parse(line, mode="eval").body
    assert (
        ast.unparse(call)
        == "holdfast.open('models/model.safetensors')['model.layers.15.self_attn.v_proj.weight']"
    )
    page.page.click("text=layer after")
    assert page.text("#drawer h2") == "model.layers.16.self_attn.v_proj.weight"
    page.page.keyboard.press("Enter")
    assert page.text("#drawer h2") == "model.layers.17.self_attn.v_proj.weight", (
        "the focus stays on the way"
    )
    page.page.keyboard.press("Escape")
    assert page.page.locator("#drawer").is_hidden()


def test_ties_are_links(page):
    page.filter("lm_head*")
    page.page.click("#table tbody tr")
    page.page.click("#drawer .ties button")
    assert page.text("#drawer h2") == "model.embed_tokens.weight"


def test_the_line_is_copied(page):
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.filter("model.norm*")
    page.page.click("#table tbody tr")
    page.page.click("#drawer .code button")
    page.until("document.querySelector('#drawer .code button').textContent === 'Copied'")
    assert page.page.evaluate("navigator.clipboard.readText()") == page.text("#drawer code")


def test_zooming_into_a_group_and_back(page):
    page.page.locator("#treemap canvas").focus()
    page.page.keyboard.press("ArrowRight")
    assert page.announced().startswith("model, 218 tensors")
    page.page.keyboard.press("Enter")
    page.page.keyboard.press("ArrowDown")
    page.page.keyboard.press("Enter")
    assert page.page.locator("#crumbs button").all_inner_texts() == ["all", "model"]
    assert "layers" in page.text("#crumbs .here-now")
    page.page.keyboard.press("Backspace")
    page.page.click("#crumbs >> text=all")
    assert page.page.locator("#crumbs button").count() == 0


def test_clicking_a_tensor_in_the_map_opens_it(page):
    box = page.page.locator("#treemap canvas").bounding_box()
    page.page.mouse.click(box["x"] + box["width"] - 20, box["y"] + box["height"] * 0.6)
    assert page.text("#drawer h2") == "model.embed_tokens.weight"


def test_keyboard_alone(page):
    press = page.page.keyboard.press
    press("Tab")
    assert page.focused() == "skip"
    press("/")
    assert page.focused() == "filter"
    page.page.keyboard.type("*.layers.3.*")
    page.until("document.documentElement.dataset.filter === '*.layers.3.*'")
    assert page.rows() == 9
    for _ in range(12):
        press("Tab")
        if page.focused() == "rows":
            break
    assert page.focused() == "rows"
    press("ArrowDown")
    assert "model.layers.3.self_attn.q_proj.weight" in page.announced()
    press("Enter")
    assert page.text("#drawer h2") == "model.layers.3.self_attn.q_proj.weight"
    assert "close" in page.focused()
    press("Escape")
    assert page.page.locator("#drawer").is_hidden()
    assert page.focused() == "rows"
    press("/")
    press("Escape")
    assert page.rows() == 219


def test_sorting(page):
    page.page.click("#table th >> text=zeros")
    assert page.page.get_attribute("#table th[aria-sort]", "aria-sort") == "descending"
    assert "model.layers.3.mlp.down_proj.weight" in page.text("#table tbody tr:first-child")
    page.page.click("#table th >> text=rms")
    page.page.click("#table th >> text=rms")
    first = page.text("#table tbody tr:first-child")
    assert "model.layers.3.mlp.down_proj.weight" in first, "zero is the least"


def test_experts_are_folded_and_open(draw):
    seen = draw(documents.experts(layers=4, count=16))
    panels = seen.page.locator("#panels canvas")
    assert panels.count() == 2, "one map of experts is open from the start"
    assert "each expert: mlp.experts.*.down_proj.weight" in seen.text("#panels"), (
        "where something stands out"
    )
    seen.page.click("#panels h3 button")
    assert panels.count() == 1
    panels.first.focus()
    for key in ["ArrowDown", *["ArrowRight"] * 8]:
        seen.page.keyboard.press(key)
    assert "the worst of 16: expert" in seen.announced()
    seen.page.keyboard.press("Enter")
    assert panels.count() == 2
    seen.page.keyboard.press("Escape")
    panels.nth(1).focus()
    for key in ["ArrowDown", *["ArrowRight"] * 3]:
        seen.page.keyboard.press(key)
    assert seen.announced().startswith("layer 0, expert 3")


def test_a_thousand_layers_scroll(draw):
    sheet = documents.Sheet()
    for layer in range(1_000):
        for part in ("exp_avg", "exp_avg_sq"):
            sheet.add(
                f"state.{layer}.{part}", [64], dtype="f32", layer=layer, role=f"state.*.{part}"
            )
    seen = draw(sheet.document())
    canvas = seen.page.locator("#panels canvas")
    assert canvas.bounding_box()["height"] < 1_000
    canvas.focus()
    seen.page.keyboard.press("ArrowDown")
    seen.page.keyboard.press("End")
    assert seen.announced().startswith("layer 999, exp_avg")
    assert seen.page.locator("#panels .here").is_visible()
    mark = seen.page.locator("#panels .here").bounding_box()
    box = canvas.bounding_box()
    assert box["y"] <= mark["y"] <= box["y"] + box["height"]


def test_a_role_for_each_tensor(draw):
    sheet = documents.Sheet()
    for at in range(3_000):
        sheet.add(f"h.{at % 3}.x{at}", [8, 8], layer=at % 3, role=f"h.*.x{at}")
    seen = draw(sheet.document())
    assert "and 2,820 more columns" in seen.text("#panels")
    assert seen.overflow() <= 0
    seen.filter("h.0.x123*")
    assert "more columns" not in seen.text("#panels")
