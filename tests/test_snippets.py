"""What README and docs show is what happens: each snippet and each command in them is run, and every link leads somewhere.

`tests/pages.py` says how a page is written, `tests/page_reader.py` runs it, and `make pages` rewrites what is printed. Each page
is run from its first snippet to its last in an empty folder. `torchrun` starts its ranks by a fork server that has imported torch;
with `--exhaustive` it is torchrun itself.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

from holdfast.cli.main import main
from tests.page_reader import NEEDS, is_shown, page_environment, ranks, read_page
from tests.page_rewriter import rewrite_page, update_shown
from tests.pages import (
    PAGES,
    ROOT,
    blocks,
    content_of,
    headings,
    indented,
    is_python,
    links,
    name_of,
)
from tests.support import needs

NOT_RUN = Counter(
    {
        ("PYPI.md", "installs packages"): 1,
        ("README.md", "installs packages"): 1,
        ("docs/benchmarks.md", "takes minutes"): 1,
        ("docs/beyond-one-machine.md", "needs Slurm"): 2,
        ("docs/beyond-one-machine.md", "needs the ranks of a process group"): 1,
        ("docs/beyond-one-machine.md", "starts processes"): 1,
        ("docs/beyond-one-machine.md", "starts processes on four machines"): 1,
        ("docs/maps.md", "needs a checkpoint of 16 GB"): 1,
        ("docs/maps.md", "needs a model and eight ranks"): 1,
        ("docs/coming-from.md", "needs Lightning"): 1,
        ("docs/integrations.md", "needs JAX"): 1,
        ("docs/integrations.md", "needs Lightning"): 1,
        ("docs/integrations.md", "needs TorchTitan"): 1,
        ("docs/integrations.md", "needs a GPU"): 1,
        ("docs/integrations.md", "needs accelerate"): 1,
        ("docs/integrations.md", "needs transformers"): 2,
        ("docs/object-storage.md", "installs a package"): 1,
        ("docs/object-storage.md", "needs a bucket and a profile"): 1,
        ("docs/object-storage.md", "needs a bucket"): 2,
        ("docs/sharded.md", "needs a bucket"): 1,
        ("docs/index.md", "installs packages"): 1,
        ("docs/start.md", "installs packages"): 1,
    }
)
"""Every block that is not run, by its page and the reason that stands there."""

REFERENCE = {"cli", "index"}
"""Pages of docs/ that may speak of files which they do not make: the commands one by one, and what README says for a clone."""

WITH_CODE = [page for page in PAGES if any(block.is_code for block in blocks(content_of(page)))]


@pytest.fixture
def typed(tmp_path: Path) -> Iterator[None]:
    with page_environment(tmp_path):
        yield


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=needs(NEEDS[name_of(page)]) if name_of(page) in NEEDS else ())
        for page in WITH_CODE
    ],
    ids=name_of,
)
def test_the_snippets(page: Path, typed: None, request: pytest.FixtureRequest):
    exhaustive = request.config.getoption("--exhaustive")
    read_page(name_of(page), content_of(page), exhaustive=exhaustive).check()


def test_what_is_not_run_is_listed():
    found = Counter(
        (name_of(page), block.marks["not run"])
        for page in PAGES
        for block in blocks(content_of(page))
        if "not run" in block.marks
    )
    assert found == NOT_RUN
    run = Counter(
        name_of(page)
        for page in PAGES
        for block in blocks(content_of(page))
        if block.is_code and "not run" not in block.marks
    )
    assert run.total() > 4 * found.total()


def test_a_guide_makes_its_files():
    guides = [page for page in PAGES if page.parent == ROOT / "docs" and page.stem not in REFERENCE]
    assert {"start", "training", "compare", "pruning", "packages"} <= {page.stem for page in guides}
    missing = [
        (name_of(page), each.marks["files"])
        for page in guides
        for each in blocks(content_of(page))
        if "files" in each.marks
    ]
    assert missing == []


def test_what_is_installed_from_the_folder_is_said_to_be_a_clone():
    """`pip install .` fails anywhere else. The sentence before it says so, for whoever begins with this page."""
    pages = {name_of(page): content_of(page) for page in PAGES}
    before = {
        name: content.partition("\npip install .")[0][-400:]
        for name, content in pages.items()
        if "\npip install ." in content
    }
    assert {"README.md", "docs/start.md"} <= set(before)
    assert [name for name, text in before.items() if not re.search(r"\bclone\b", text)] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_page_says_where_its_files_are_from(page: Path):
    content = content_of(page)
    for block in blocks(content):
        if "files" in block.marks:
            said = r"\bclone\b" if block.marks["files"].startswith("tests/") else r"\bstands? for\b"
            assert re.search(said, content), (
                f"{name_of(page)}:{block.line}: a reader does not have {block.marks['files']}"
            )


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_code_is_in_fences(page: Path):
    for line, text in indented(content_of(page)):
        assert not is_python(text), f"{name_of(page)}:{line}: Python outside of a fence"
        assert not re.search(r"^(\$|pip|make|python|torchrun) ", text, re.MULTILINE), (
            f"{name_of(page)}:{line}: a command outside of a fence"
        )
        if text.startswith("holdfast "):
            check_synopsis(text)


def check_synopsis(text: str) -> None:
    """Every flag that a synopsis shows is one of its command."""
    joined = re.sub(r"\n\s+", " ", text)
    for line in joined.splitlines():
        verb = line.split()[1]
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            assert main([verb, "--help"]) == 0
        flags = set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", line))
        assert flags <= set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", printed.getvalue())), line


LINKED = [
    *PAGES,
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    ROOT / "SECURITY.md",
    ROOT / "tests" / "golden" / "README.md",
]


@pytest.mark.parametrize("page", LINKED, ids=name_of)
def test_the_links(page: Path):
    lost = [link for link in links(content_of(page)) if not leads_somewhere(page, link)]
    assert lost == []


def leads_somewhere(page: Path, link: str) -> bool:
    path, _, place = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    return target.exists() and (not place or place in headings(content_of(target)))


def test_every_page_is_reached_from_the_readme():
    reached, waiting = set(), [PAGES[0]]
    while waiting:
        page = waiting.pop()
        if page not in reached and page.suffix == ".md":
            reached.add(page)
            waiting += [
                (page.parent / link.partition("#")[0]).resolve()
                for link in links(content_of(page))
                if link[0] != "#"
            ]
    assert [name_of(page) for page in PAGES if page not in reached] == []
    index = {(ROOT / link.partition("#")[0]).resolve() for link in links(content_of(PAGES[0]))}
    assert [
        name_of(page) for page in PAGES if page.parent == ROOT / "docs" and page not in index
    ] == []


# The checks themselves can fail:


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("```pyhton\n```\n", "a fence of"),
        ("```python\n", "never closed"),
        ("<!-- not ran: why -->\n```python\n```\n", "nobody understands"),
        ("<!-- skip -->\n", "nobody understands"),
        ("<!-- not run: why -->\ntext\n```python\n```\n", "stands above something"),
    ],
)
def test_a_page_is_read_strictly(content: str, problem: str):
    with pytest.raises(ValueError, match=problem):
        blocks(content)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("```python\nmodel.state_dict()\n```\n", "page.md:2: NameError"),
        ("```python\nprint(1)\n```\n\n```text\n2\n```\n", "page.md:6 shows"),
        ("```console\n$ holdfast show nowhere.pt\n```\n", "ended with 2"),
        (
            "<!-- files: a.pt -->\n```console\n$ holdfast verify a.pt\nwell\n```\n",
            "page.md:4 shows",
        ),
        ("```bash\npip install holdfast\n```\n", "pip is not run here"),
        ("```json\n{a: 1}\n```\n", "page.md:2: JSONDecodeError"),
    ],
)
def test_what_does_not_run_is_found(content: str, problem: str, typed: None):
    with pytest.raises(AssertionError, match=problem):
        read_page("page.md", content).check()


WRONG = """\
```python
print("one")
print("it took 3 s")
```

```text
two
it took … s
```

```python
nothing_of_this_name()
```

```json
{a: 1}
```

<!-- files: a.pt -->
```console
$ holdfast verify a.pt
a.pt  torch-zip  good  …

$ holdfast stats a.pt --quiet --filter none
$ holdfast verify a.pt
sound
```
"""


def test_all_problems_of_a_page_are_shown_at_once(typed: None):
    with pytest.raises(AssertionError) as caught:
        read_page("page.md", WRONG).check()
    places = re.findall(r"^page.md:(\d+)", str(caught.value), re.MULTILINE)
    assert places == ["12", "16", "24", "7", "22", "26"]


def test_rewriting_a_page_puts_in_what_is_printed_and_keeps_the_rest(typed: None):
    result = read_page("page.md", WRONG)
    rewritten = rewrite_page(WRONG, result.mismatches)
    wanted = (
        WRONG.replace("two\nit took … s", "one\nit took … s")
        .replace("a.pt  torch-zip  good  …", "a.pt  torch-zip  ok  …")
        .replace("\nsound\n", f"\n{result.mismatches[-1].printed}")
    )
    assert rewritten == wanted
    assert len(result.failures) == 3


def test_rewriting_a_page_that_is_right_changes_nothing(typed: None):
    content = "```python\nprint('it took 3 s')\n```\n\n```text\nit took … s\n```\n"
    assert rewrite_page(content, read_page("page.md", content).mismatches) == content


@pytest.mark.parametrize(
    ("shown", "printed", "updated"),
    [
        ("wrote x  … in 1 file", "wrote x  2 KiB in 2 files", "wrote x  … in 2 files"),
        ("read 3 in …\nall", "took 3 in 0.1 s\nall", "took 3 in …\nall"),
        ("a\nb …\nc", "b 1\nc\nd", "b …\nc\nd"),
        ("a …", "b", "b"),
        ("a", "", ""),
    ],
)
def test_rewriting_keeps_the_places_where_any_text_may_stand(
    shown: str, printed: str, updated: str
):
    assert update_shown(shown, printed) == updated
    assert is_shown(updated, printed)


def test_a_script_that_fails_on_one_rank_is_found(typed: None):
    Path("fails.py").write_text(
        "import os, sys; print(os.environ['RANK']); sys.exit(3 * (os.environ['RANK'] == '1'))"
    )
    assert ranks(2, ["fails.py"]) == (3, "0\n1\n")


def test_a_table_of_what_to_write_is_code():
    table = "| before | with Holdfast |\n| --- | --- |\n| `a()` | `b()` |\n| `c` in prose | `d()` |\n\n| `e()` | `f()` |\n"
    assert [block.text for block in blocks(table)] == ["a()\n", "b()\n", "d()\n"]


def test_python_is_told_from_prose():
    assert is_python("holdfast.save(state, path)")
    assert not is_python("holdfast show PATH [--all]")
    assert not is_python('{"file": 0, "bytes": [1, 2]}')
    assert [line for line, _ in indented("a\n\n    b\n    c\n\n- d\n  e\n\n    f\n")] == [3, 9]
    with pytest.raises(AssertionError):
        check_synopsis("holdfast show PATH [--no-such-flag]")
