"""Names that want to be markup or script are text: not one script event in a browser."""

from __future__ import annotations

import ast
import json
import random

import holdfast
from holdfast import errors
from holdfast.core.patterns import compile_glob
from holdfast.core.text import escape
from tests.browser import documents
from tests.hostile.cases import CLASSES
from tests.sampling import every_nth

UNTOUCHED = (
    "!window.pwned && !({}).polluted && "
    "document.querySelectorAll('body script, body style, body iframe, body img').length === 2"
)


def calm(seen) -> None:
    assert seen.page.evaluate(UNTOUCHED)
    assert seen.page.title() != "pwned"
    assert seen.violations() == []


def test_a_document_that_is_hostile_everywhere(draw):
    seen = draw(documents.hostile())
    calm(seen)
    assert seen.rows() == len(documents.HOSTILE)
    # Every drawer, by the keyboard, and every picture under the pointer.
    seen.page.locator("#table .rows").focus()
    for _ in documents.HOSTILE:
        seen.page.keyboard.press("Enter")
        assert seen.page.locator("#drawer").is_visible()
        seen.page.keyboard.press("Escape")
        seen.page.keyboard.press("ArrowDown")
    for selector in ("#treemap canvas", "#panels canvas", "#shards .tall canvas"):
        canvas = seen.page.locator(selector).first
        canvas.scroll_into_view_if_needed()
        box = canvas.bounding_box()
        for step in range(6):
            seen.page.mouse.move(
                box["x"] + box["width"] * step / 6, box["y"] + min(box["height"], 500) * step / 6
            )
    for value in range(seen.page.locator("#measure option").count()):
        seen.page.select_option("#measure", index=value)
    calm(seen)


def test_nothing_invisible_is_shown(draw):
    seen = draw(documents.hostile())
    text = seen.page.evaluate("document.body.innerText + document.title")
    for char in "\u202e\u2066\u200b\ufeff\x1b\0\u2028":
        assert char not in text
    assert r"\u202eexe.tp\u2066" in text
    assert r"\ud800" in text


def test_the_policy_would_have_stopped_a_script(draw):
    """The test of the test: what a mistake in the page would do is seen here and goes nowhere."""
    seen = draw(documents.small())
    seen.page.evaluate("""() => {
        const place = document.createElement("div");
        document.body.append(place);
        place.innerHTML = "<img src=x onerror='window.pwned=1'><a id=trap href='javascript:window.pwned=1'>x</a>";
        const script = document.createElement("script");
        script.textContent = "window.pwned=1";
        document.body.append(script);
        document.getElementById("trap").click();
    }""")
    seen.until("window.watched.length >= 3")
    assert seen.page.evaluate("window.pwned") is None
    seen.said.clear()


OPENING = [
    case
    for cases in CLASSES.values()
    for case in cases
    if not case.refusals and "bomb" not in case.name
]


def test_the_hostile_corpus(draw, tmp_path):
    """Each attack that opens as data is drawn; by default those about names, and some of the others."""
    chosen = every_nth("pages of hostile files", len(OPENING), 24)
    seen = None
    drawn = 0
    for at, case in enumerate(OPENING):
        if at not in chosen and "name" not in case.name:
            continue
        place = tmp_path / case.name
        place.mkdir()
        try:
            report = holdfast.report(case.make(place))
        except errors.HoldfastError:
            continue
        if report.document["tensors"]["count"] > 2_000:
            continue
        seen = seen.show(report.html()) if seen else draw(report.html())
        calm(seen)
        drawn += 1
    assert drawn > 10


def test_text_is_written_as_the_command_line_does(draw):
    seen = draw(documents.small())
    names = [*documents.HOSTILE, *(chr(code) for code in range(0x20, 0x3000, 3))]
    # Marks that pile up are written out by the page alone: a terminal keeps lines apart.
    names = [name for name in names if "\u0301" * 5 not in name]
    found = json.loads(
        seen.page.evaluate(
            "(names) => JSON.stringify(JSON.parse(names).map(shown))", json.dumps(names)
        )
    )
    unlike = [
        (name, one, escape(name))
        for name, one in zip(names, found, strict=True)
        if one != escape(name)
    ]
    # Python and the browser know different versions of Unicode: letters that only one of them knows may differ.
    assert [pair for pair in unlike if len(pair[0]) > 1] == []
    assert len(unlike) < 20, unlike


def test_python_lines_are_python(draw):
    seen = draw(documents.small())
    texts = json.loads(
        seen.page.evaluate(
            "(names) => JSON.stringify(JSON.parse(names).map(pythonText))",
            json.dumps(documents.HOSTILE),
        )
    )
    assert [ast.literal_eval(text) for text in texts] == documents.HOSTILE


def test_globs_are_as_on_the_command_line(draw):
    chance = random.Random(1)
    seen = draw(documents.small())
    names = [
        "model.layers.3.mlp.up",
        "a",
        "",
        "a.b",
        "aab",
        "model",
        "x" * 300 + "b",
        "\U0001f4a9.a",
        "[a]",
        "a-b",
        "]",
    ]
    names += ["".join(chance.choices("ab-]!", k=chance.randrange(5))) for _ in range(60)]
    patterns = [
        "*",
        "?",
        "a*",
        "*b",
        "*layers.?.*",
        "model",
        "a?b",
        "**",
        "*a*a*b",
        "*" * 40 + "c",
        "*?*",
        "?.a",
        "*.[0-9].*",
        "[!a]*",
        "[[]a]",
    ]
    patterns += ["".join(chance.choices("ab*?[]!{},", k=chance.randrange(9))) for _ in range(600)]
    patterns += [
        "*.{0..9}.*",
        "*{3..1}*",
        "{00..12}",
        "{a,{aab,b}}",
        "*.{mlp,attn}.{u,d}*",
        "[{]a}",
        "{[a,b],x}",
        "{,a}b",
        "{0..99999999}",
    ]
    names += ["3", "03", "12", "{a}", "a,b", "{a,b}", "x", "b"]
    ask = "([patterns, names]) => patterns.map((one) => names.map(globTest(one)))"
    found = seen.page.evaluate(ask, [patterns, names])
    few = patterns.index("{0..99999999}")  # a page does not count so far
    assert found[:few] == [
        [compile_glob(pattern).matches(name) for name in names] for pattern in patterns[:few]
    ]
    assert not any(found[few])
