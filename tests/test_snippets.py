"""What README and docs show is what happens: each snippet and each command in them is run, and every link leads somewhere.

`tests/pages.py` says how a page is written. Each page is run from its first snippet to its last in an empty folder. `torchrun`
starts its ranks by a fork server that has imported torch; with `--exhaustive` it is torchrun itself.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import multiprocessing
import os
import re
import runpy
import shlex
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("torch")

import torch.distributed as dist

import holdfast.torch
from holdfast.cli.main import main
from holdfast.torch import versions
from tests.pages import (
    PAGES,
    ROOT,
    Block,
    blocks,
    commands,
    content_of,
    headings,
    indented,
    is_python,
    links,
    name_of,
)
from tests.ranks.pool import ENVIRONMENT, PRELOAD
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

ANSWERS = {"scan", "verify", "diff"}
"""Commands whose exit status is an answer: 1 where they found something."""

NEEDS = {
    "docs/packages.md": versions.PT2_ARCHIVE,
    "docs/training.md": versions.FSDP_ON_CPU,
}
"""What torch must have for pages that do more than every version can."""

WITH_CODE = [page for page in PAGES if any(block.is_code for block in blocks(content_of(page)))]


def tidy(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


def is_shown(shown: str, printed: str) -> bool:
    """Whether what is printed is what the page shows, where … is any text of a line.

    >>> is_shown("wrote x.pt  … in 1 file", "wrote x.pt  2 KiB in 1 file"), is_shown("a", "b")
    (True, False)
    """
    wanted, found = tidy(shown), tidy(printed)
    patterns = [".*".join(map(re.escape, line.split("…"))) for line in wanted]
    return len(wanted) == len(found) and all(map(re.fullmatch, patterns, found))


class Reader:
    """Somebody who types a page from its top to its end."""

    def __init__(self, page: str, content: str, *, exhaustive: bool) -> None:
        self.page = page
        self.content = content
        self.exhaustive = exhaustive
        self.module = ModuleType(f"page_{Path(page).stem.replace('-', '_')}")
        sys.modules[self.module.__name__] = self.module

    def read(self) -> None:
        printed: str | None = None
        for block in blocks(self.content):
            self.make_files(block)
            if block.language == "text":
                assert printed is None or is_shown(block.text, printed), self.unlike(block, printed)
            elif block.language == "json":
                json.loads(block.text)
            elif "file" in block.marks:
                Path(block.marks["file"]).write_text(block.text)
            elif "not run" in block.marks:
                pass
            elif block.language == "python":
                printed = self.execute(block)
                continue
            else:
                for command, shown in commands(block):
                    output = self.command(command, block)
                    assert shown is None or is_shown(shown, output), self.unlike(block, output)
            printed = None

    def make_files(self, block: Block) -> None:
        from tests.page_files import make

        for name in filter(None, block.marks.get("files", "").split(", ")):
            make(name)

    def unlike(self, block: Block, printed: str | None) -> str:
        return f"{self.page}:{block.line} shows\n{block.text}\nand this is printed:\n{printed}"

    def execute(self, block: Block) -> str:
        """Run Python; an error in it has the line of the page."""
        printed = io.StringIO()
        code = compile("\n" * (block.line - 1) + block.text, str(ROOT / self.page), "exec")
        with contextlib.redirect_stdout(printed):
            exec(code, vars(self.module))
        return printed.getvalue()

    def command(self, line: str, block: Block) -> str:
        """Run a command; it must not fail."""
        program, *arguments = shlex.split(line, comments=True)
        if program == "holdfast":
            printed = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
            with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
                status = main(arguments)
            output = printed.buffer.getvalue().decode()
            may = (0, 1) if arguments[0] in ANSWERS else (0,)
        else:
            status, output = self.programs(program, arguments)
            may = (0,)
        assert status in may, f"{self.page}:{block.line}: {line}\nended with {status}:\n{output}"
        return output

    def programs(self, program: str, arguments: list[str]) -> tuple[int, str]:
        if program == "torchrun" and self.exhaustive:
            return started(["-m", "torch.distributed.run", *arguments])
        if program == "torchrun":
            assert arguments[:2] == ["--standalone", "--nproc-per-node"], "how many ranks?"
            return ranks(int(arguments[2]), arguments[3:])
        if program == "python" and arguments[0].endswith(".py"):
            return ranks(0, arguments)
        assert program == "python", (
            f"{self.page}: {program} is not run here: say so above the block"
        )
        return started(arguments)


def started(arguments: list[str]) -> tuple[int, str]:
    """Run Python in a process of its own."""
    run = [sys.executable, *arguments]
    done = subprocess.run(
        run, capture_output=True, text=True, check=False, timeout=200, env=os.environ | ENVIRONMENT
    )
    return done.returncode, done.stdout if done.returncode == 0 else done.stdout + done.stderr


def ranks(size: int, arguments: list[str]) -> tuple[int, str]:
    """Run a script on so many ranks, or (0) without any; the worst exit status, and what all of them printed."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with pytest.MonkeyPatch.context() as patch, socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        told = {
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        each = [told | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)] or [{}]
        outputs = [Path(f".printed-{rank}").resolve() for rank in range(len(each))]
        processes = [
            context.Process(target=script, args=(arguments, environment, str(output), os.getcwd()))
            for environment, output in zip(each, outputs, strict=True)
        ]
        free.close()
        for process in processes:
            process.start()
    for process in processes:
        process.join(120)
        if process.exitcode is None:
            process.kill()
    printed = "".join(output.read_text() for output in outputs if output.exists())
    for output in outputs:
        output.unlink(missing_ok=True)
    return max(
        (process.exitcode if process.exitcode is not None else -1 for process in processes), key=abs
    ), printed


def script(arguments: list[str], environment: dict[str, str], output: str, folder: str) -> None:
    """What a rank does."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(folder)
    os.environ.update(environment)
    file = os.open(output, os.O_CREAT | os.O_WRONLY)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    sys.argv = arguments
    runpy.run_path(arguments[0], run_name="__main__")
    sys.stdout.flush()


@pytest.fixture
def typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty folder, a terminal of known width, and everything as before at the end."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "110")
    monkeypatch.setenv("NO_COLOR", "1")
    threshold, modules = gc.get_threshold(), set(sys.modules)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    gc.set_threshold(*threshold)
    holdfast.torch.uninstall()
    if dist.is_initialized():
        dist.destroy_process_group()
    for name in {name for name in sys.modules if name.startswith("page_")} - modules:
        del sys.modules[name]


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=needs(NEEDS[name_of(page)]) if name_of(page) in NEEDS else ())
        for page in WITH_CODE
    ],
    ids=name_of,
)
def test_the_snippets(page: Path, typed: None, request: pytest.FixtureRequest):
    Reader(
        name_of(page), content_of(page), exhaustive=request.config.getoption("--exhaustive")
    ).read()


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
    ("content", "error"),
    [
        ("```python\nmodel.state_dict()\n```\n", NameError),
        ("```python\nprint(1)\n```\n\n```text\n2\n```\n", AssertionError),
        ("```console\n$ holdfast show nowhere.pt\n```\n", AssertionError),
        ("<!-- files: a.pt -->\n```console\n$ holdfast verify a.pt\nwell\n```\n", AssertionError),
        ("```bash\npip install holdfast\n```\n", AssertionError),
        ("```json\n{a: 1}\n```\n", ValueError),
    ],
)
def test_what_does_not_run_is_found(content: str, error: type[Exception], typed: None):
    with pytest.raises(error):
        Reader("page.md", content, exhaustive=False).read()


def test_a_script_that_fails_on_one_rank_is_found(typed: None):
    Path("fails.py").write_text(
        "import os, sys; print(os.environ['RANK']); sys.exit(3 * (os.environ['RANK'] == '1'))"
    )
    assert ranks(2, ["fails.py"]) == (3, "0\n1\n")


def test_a_table_of_what_to_write_is_code():
    table = "| you write | you write now |\n| --- | --- |\n| `a()` | `b()` |\n| `c` in prose | `d()` |\n\n| `e()` | `f()` |\n"
    assert [block.text for block in blocks(table)] == ["a()\n", "b()\n", "d()\n"]


def test_python_is_told_from_prose():
    assert is_python("holdfast.save(state, path)")
    assert not is_python("holdfast show PATH [--all]")
    assert not is_python('{"file": 0, "bytes": [1, 2]}')
    assert [line for line, _ in indented("a\n\n    b\n    c\n\n- d\n  e\n\n    f\n")] == [3, 9]
    with pytest.raises(AssertionError):
        check_synopsis("holdfast show PATH [--no-such-flag]")
