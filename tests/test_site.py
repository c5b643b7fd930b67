"""The site, as far as it can be known without its generator: what stands on which page, and the drawings."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest

import holdfast
from tests.pages import PAGES, ROOT, content_of
from tests.support import public_names

pytest.importorskip("torch")

MODULES = {
    "holdfast": {"errors", "metadata", *holdfast.errors.__all__},
    "holdfast.torch": {"sparsity"},
    "holdfast.torch.serialization": {"load", "save"},
}
"""Public modules, and names in them that stand elsewhere."""
MODULES |= {
    name: set()
    for name in (
        "holdfast.torch.sparsity",
        "holdfast.errors",
        "holdfast.metadata",
        "holdfast.testing",
        "holdfast.integrations.dcp",
    )
}
MARK = re.compile(r"^<!-- names: (\S+)(.*) -->$", re.MULTILINE)


def tool(name: str):
    spec = importlib.util.spec_from_file_location(
        f"site_{name}", ROOT / "tools" / "site" / f"{name}.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_stands_on_one_page(module: str):
    loaded = importlib.import_module(module)
    names = public_names() if module == "holdfast" else loaded.__all__
    public = [name for name in names if name not in MODULES[module]]
    placed = Counter()
    for page in (ROOT / "docs" / "reference").glob("*.md"):
        for where, names in MARK.findall(page.read_text(encoding="utf-8")):
            if where == module:
                placed.update(names.split() or public)
    assert set(public) <= set(placed)
    assert [name for name, count in placed.items() if count > 1] == []
    assert [name for name in placed if not hasattr(loaded, name)] == []


def test_every_page_is_in_the_navigation():
    known = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = [page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")]
    listed = set(re.findall(r"[\w/-]+\.md", known))
    assert [page for page in pages if page not in listed and not page.startswith("design/")] == []
    assert (
        sorted(
            listed
            - {"contributing.md", "changelog.md", "security.md", "design/README.md"}
            - set(pages)
        )
        == []
    )


def test_the_page_of_commands_has_every_command_and_flag():
    from holdfast.cli.main import GROUPS, parser
    from holdfast.cli.parser import verbs_of

    made = tool("commands").as_markdown()
    verbs = verbs_of(parser())
    names = re.findall(r"^## holdfast (\S+)$", made, re.MULTILINE)
    assert names == [name for group in GROUPS.values() for name in group]
    assert sorted(names) == sorted(verbs)

    sections = re.split(r"^## holdfast .+$", made, flags=re.MULTILINE)[1:]
    for name, section in zip(names, sections, strict=True):
        for action in verbs[name]._actions:
            # The page says once that every command has it.
            if action.dest == "help":
                continue
            for flag in action.option_strings:
                assert f"`{flag}" in section
    assert "`--help`" in content_of(ROOT / "docs/reference/commands.md")


def test_the_page_of_errors_lists_every_class_of_errors():
    page = (ROOT / "docs" / "reference" / "errors.md").read_text(encoding="utf-8")
    assert "<!-- errors -->" in page
    assert "<!-- names: holdfast.errors -->" in page

    table = tool("errors").as_markdown()
    listed_names = re.findall(r"^\| \[`(\w+)`\]", table, re.MULTILINE)
    classes = [value for value in vars(holdfast.errors).values() if is_error(value)]
    assert listed_names == [error_class.__name__ for error_class in classes]
    assert "(#holdfast.errors.Truncated) | `ValueError`, `EOFError` |" in table


def is_error(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, holdfast.HoldfastError | UserWarning)


@pytest.mark.parametrize("section", ["Cause:", "Example:", "What to do:"])
def test_the_docstring_of_every_error_has_all_sections(section: str):
    classes = tool("errors").list_classes()
    incomplete = [error.__name__ for error in classes if f"\n    {section}\n" not in error.__doc__]
    assert incomplete == []


PLOTS = [
    mark
    for page in PAGES
    for mark in re.findall(r"^<!-- plot: (.+) -->$", content_of(page), re.MULTILINE)
]


@pytest.mark.parametrize("mark", PLOTS)
def test_every_plot_of_a_page_is_drawn(mark: str):
    drawing = svg(tool("plots").drawn(ROOT / "docs" / "measured", mark))
    assert len(list(drawing.iter("rect"))) >= 2


def svg(made: str) -> ElementTree.Element:
    return ElementTree.fromstring(made.split("</svg>")[0] + "</svg>")


def test_bars_are_as_long_as_their_ratios_and_text_is_escaped(tmp_path: Path):
    machine = {"date": "d", "cores": 2, "memory_gib": 1, "system": "s"}
    memory = {"ours": {"peak_nbytes": 1 << 20}, "peer": {"peak_nbytes": 2 << 20}}

    def case(name: str, ratio: float | None) -> dict[str, object]:
        medians = {"ours": 1.0, "peer": ratio}
        return {
            "case": name,
            "title": "<b>&",
            "peer": "p",
            "ratio": ratio,
            "target": 2,
            "medians": medians,
            "quantities": memory,
        }

    cases = [case("b-fast", 4), case("a-slow", 0.5), case("a-none", None), case("other", 9)]
    (tmp_path / "x.json").write_text(json.dumps({"machine": machine, "rounds": 3, "cases": cases}))
    made = tool("plots").drawn(tmp_path, "x: b-* a-*: Title: more")
    fast, slow = svg(made).iter("rect")
    assert float(fast.get("width")) == pytest.approx(2 * float(slow.get("width")), rel=0.02)
    assert "plot-behind" in slow.get("class")
    assert "<b>" not in made.split("</svg>")[0]
    assert "1 MiB / 2 MiB" in made
    with pytest.raises(ValueError, match="no race"):
        tool("plots").drawn(tmp_path, "x: nothing*: Title")
