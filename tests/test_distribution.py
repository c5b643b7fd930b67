"""What a stranger is told to type: the name on the package index, the two commands of the README, and the page of the index."""

from __future__ import annotations

import re
import sys
import tomllib

import pytest

import holdfast
from holdfast.core.version import VERSION
from tests.pages import PAGES, ROOT, content_of, links

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
SOURCES = [
    *PAGES,
    *sorted((ROOT / "src").rglob("*.py")),
    *sorted((ROOT / "tools").rglob("*.*")),
    ROOT / "CHANGELOG.md",
]


def test_nobody_is_told_to_install_another_program():
    """`holdfast` on the package index is not this one."""
    wrong = re.compile(r"pip install[^\n`.]*?\bholdfast(?!-checkpoint)(\[|\b(?![-./\w]))")
    assert wrong.search("pip install 'holdfast[cloud]'")
    assert wrong.search("`pip install holdfast`")
    told = {
        str(path.relative_to(ROOT))
        for path in SOURCES
        if wrong.search(path.read_bytes().decode(errors="replace"))
    }
    assert told == set()


def test_a_missing_library_is_called_by_its_own_name(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(holdfast.errors.Unsupported, match=r"pip install obstore"):
        holdfast.open("s3://bucket/model.safetensors")


def test_the_distribution():
    assert PROJECT["name"] == "holdfast-checkpoint"
    assert {"torch", "cloud", "zstd"} <= set(PROJECT["optional-dependencies"])
    assert PROJECT["dynamic"] == ["version"]
    assert {f"Programming Language :: Python :: 3.{minor}" for minor in range(11, 15)} <= set(
        PROJECT["classifiers"]
    )
    assert {"Homepage", "Documentation", "Repository", "Issues", "Changelog"} <= set(
        PROJECT["urls"]
    )
    assert re.search(
        rf"^## \[{re.escape(VERSION)}\]",
        (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )


@pytest.mark.parametrize("page", ["README.md", "PYPI.md", "docs/index.md"])
def test_the_description_is_the_first_sentence_of_the_start_pages(page: str):
    assert f"\n**{PROJECT['description']}**\n" in (ROOT / page).read_text(encoding="utf-8")


def test_placeholders_are_replaced_together():
    """Addresses that nobody owns are on example.com, all of them or none, and marked in one file."""
    source = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    addresses = [*PROJECT["urls"].values(), PROJECT["authors"][0]["email"]]
    is_placeholder = {"example.com" in address for address in addresses}
    assert len(is_placeholder) == 1
    assert ("# PLACEHOLDERS" in source) == is_placeholder.pop()
    others = ["SECURITY.md", "CITATION.cff", "mkdocs.yml", "tools/site/release.py", "README.md"]
    for name in others:
        assert "example.com" not in (ROOT / name).read_text(encoding="utf-8"), name


def test_the_citation_has_this_version():
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {VERSION}\n" in citation


def test_the_page_of_the_index_needs_no_repository():
    page = content_of(ROOT / PROJECT["readme"])
    assert links(page) == []
    pictures = re.findall(r'<img [^>]*src="([^"]+)"', page)
    assert all(url.startswith(f"{PROJECT['urls']['Repository']}/") for url in pictures)
    assert "pip install holdfast-checkpoint" in "\n".join(page.splitlines()[:10])


def test_the_readme_begins_with_what_sets_itself_up():
    first_screen = "\n".join(content_of(ROOT / "README.md").splitlines()[:35])
    for command in ("make demo", "make test"):
        assert re.search(
            rf"^\| `{command}` \| .{{40,}} \| .*minute.* \|$", first_screen, re.MULTILINE
        ), command


SHARED = {
    "the sentence": r"^\*\*Holdfast .+\*\*$",
    "the three reasons": r"^We know of no other library .+:\n\n(?:\d\. .+\n){3}$",
    "the table": r"^\| instead of \|.+\|\n(?:\|.+\|\n)+$",
}
"""The parts that README, the page of the package index and the home page of the site share."""


@pytest.mark.parametrize("part", SHARED)
def test_every_front_page_says_the_same(part: str):
    pages = [content_of(ROOT / name) for name in ("README.md", "PYPI.md", "docs/index.md")]
    first, *others = [re.findall(SHARED[part], page, re.MULTILINE) for page in pages]
    assert len(first) == 1
    assert others == [first, first]


@pytest.mark.parametrize("name", ["overview", "overview-narrow"])
def test_the_picture_is_the_same_in_the_light_and_in_the_dark(name: str):
    light, dark = (
        (ROOT / f"docs/images/{name}-{palette}.svg").read_text(encoding="utf-8")
        for palette in ("light", "dark")
    )
    assert light != dark
    assert re.sub(r"#\w{6}", "", light) == re.sub(r"#\w{6}", "", dark), (
        "nothing but colours differs"
    )


def test_the_narrow_picture_has_the_words_of_the_wide_one():
    wide, narrow = (
        re.findall(
            r">([^<>\n]+)<", (ROOT / f"docs/images/{name}-light.svg").read_text(encoding="utf-8")
        )
        for name in ("overview", "overview-narrow")
    )
    assert sorted(" ".join(wide).split()) == sorted(" ".join(narrow).split())


def test_ci_runs_what_the_readme_says():
    lines = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    commands = [line for line in lines if not line.startswith(("#", "set "))]
    assert commands == ["make browser || true", "make test"]


def test_the_tests_install_no_system_packages():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    recipe = re.search(r"^test:.*\n((?:[\t@ie].*\n)+)", makefile, re.MULTILINE)
    assert recipe is not None
    assert "pytest" in recipe[0].lower()
    assert "apt-get" not in recipe[0]
    assert "browser" not in recipe[0]
