"""How it looks: both themes, a phone, paper, contrast, names for a screen reader."""

from __future__ import annotations

import pytest

from holdfast.extras.reports.page import page as html_of
from tests.browser import documents

KINDS = {
    "small": documents.small,
    "diff": documents.difference,
    "sharded": documents.sharded,
    "run": documents.run,
    "hostile": documents.hostile,
}

CONTRAST = """() => {
  const channel = (part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
  const parts = (text) => text.match(/[\\d.]+/g).map(Number);
  const luminance = ([r, g, b]) => 0.2126 * channel(r / 255) + 0.7152 * channel(g / 255) + 0.0722 * channel(b / 255);
  const behind = (element) => {
    for (let step = element; step; step = step.parentElement) {
      const found = parts(getComputedStyle(step).backgroundColor);
      if (found.length < 4 || found[3] > 0) return found;
    }
    return [255, 255, 255];
  };
  const poor = [];
  for (const element of document.querySelectorAll("body *")) {
    const says = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    const box = element.getBoundingClientRect();
    if (!says || !box.width || !box.height || element.matches("script, noscript, option, .away, :disabled")) continue;
    const style = getComputedStyle(element);
    const [one, other] = [luminance(parts(style.color)), luminance(behind(element))];
    const ratio = (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
    if (ratio < 4.5) poor.push(`${element.tagName}.${element.className} ${element.textContent.slice(0, 30)}: ${ratio.toFixed(2)}`);
  }
  return poor;
}"""

NAMELESS = """() => [...document.querySelectorAll("button, input, select, canvas[tabindex], [role=dialog], [role=region]")]
  .filter((one) => one.getBoundingClientRect().width && !(one.getAttribute("aria-label") || one.getAttribute("aria-labelledby")
    || one.textContent.trim() || (one.labels && one.labels.length)))
  .map((one) => one.outerHTML.slice(0, 120))"""

INKS = """(theme) => {
  const channel = (part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
  const luminance = ([r, g, b]) => 0.2126 * channel(r / 255) + 0.7152 * channel(g / 255) + 0.0722 * channel(b / 255);
  const { ramp, diverging, categories, states } = paletteOf(theme);
  const hex = (text) => [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16));
  return [...ramp, ...diverging, ...categories, ...states].map(({ rgb, ink }) => {
    const [one, other] = [luminance(rgb), luminance(hex(ink))];
    return (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
  });
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast_and_names(draw, scheme):
    seen = None
    for kind in ("small", "diff", "sharded", "run"):
        html = html_of(KINDS[kind]())
        seen = seen.show(html) if seen else draw(html, scheme=scheme)
        seen.page.click("#table tbody tr")
        assert seen.page.evaluate(CONTRAST) == []
        assert seen.page.evaluate(NAMELESS) == []
    assert min(seen.page.evaluate(INKS, scheme)) > 4.4


def test_lightness_rises_along_the_map(draw):
    seen = draw(documents.small())
    for theme in ("light", "dark"):
        colours = seen.page.evaluate(
            "(theme) => paletteOf(theme).ramp.map(({ rgb }) => rgb)", theme
        )
        ramp = [
            0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2
            for red, green, blue in colours
        ]
        assert ramp == sorted(ramp), "in grey, more is lighter"


@pytest.mark.parametrize("kind", KINDS)
def test_a_phone(draw, kind):
    seen = draw(KINDS[kind](), width=360, height=740, has_touch=True)
    assert seen.overflow() <= 0
    seen.page.locator("#table tbody tr").first.tap()
    assert seen.page.locator("#drawer").is_visible()
    assert seen.overflow() <= 0
    assert seen.page.evaluate("byId('drawer').scrollWidth <= byId('drawer').clientWidth")


def test_the_theme_follows_the_system_and_the_switch(draw):
    seen = draw(documents.small(), scheme="dark")
    dark = seen.page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    picture = seen.pixels("#treemap canvas")
    assert seen.text("#theme") == "Light"
    seen.page.click("#theme")
    assert seen.page.evaluate("getComputedStyle(document.documentElement).backgroundColor") != dark
    assert seen.pixels("#treemap canvas") != picture
    seen.load()
    assert seen.text("#theme") == "Dark", "a choice is remembered"


def test_the_system_changes_while_the_page_is_open(draw):
    seen = draw(documents.small())
    picture = seen.pixels("#treemap canvas")
    seen.page.emulate_media(color_scheme="dark")
    seen.until("document.documentElement.dataset.theme === 'dark'")
    assert seen.pixels("#treemap canvas") != picture


def test_paper(draw):
    seen = draw(documents.small(), scheme="dark")
    seen.page.emulate_media(media="print", color_scheme="dark")
    seen.until("document.documentElement.dataset.theme === 'light'")
    assert seen.page.locator("#table tbody tr").count() == 219, "on paper there is no scrolling"
    assert seen.page.locator("#theme").is_hidden()
    assert len(seen.page.pdf(format="A4", print_background=True)) > 10_000
    seen.page.emulate_media(media="screen", color_scheme="dark")
    seen.until("document.documentElement.dataset.theme === 'dark'")
    assert seen.page.locator("#table tbody tr").count() < 100


def test_a_narrower_window_is_drawn_again(draw):
    seen = draw(documents.small())
    seen.page.set_viewport_size({"width": 700, "height": 800})
    seen.until("document.querySelector('#treemap canvas').clientWidth < 700")
    assert seen.overflow() <= 0
