"""Type a page from its top to its end in the current folder, with the Holdfast that is installed. Nothing may fail.

    python -I tools/follow.py PYPI.md

It imports nothing of the repository, so that it can be run where only the package is. What a page prints is compared by
tests/test_snippets.py; here it is enough that nothing fails, and that torch is not there.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import holdfast

CODE = re.compile(r"^```(python|console)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def follow(content: str) -> int:
    """Run the blocks of a page; how many were run."""
    names: dict[str, object] = {}
    done = 0
    for language, text in CODE.findall(content):
        if language == "python":
            exec(compile(text, "<page>", "exec"), names)
        else:
            for command in re.findall(r"^\$ (.*)$", text, re.MULTILINE):
                subprocess.run(command, shell=True, check=True)
        done += 1
    return done


if __name__ == "__main__":
    installed = Path(holdfast.__file__).resolve().parent
    assert Path(sys.prefix).resolve() in installed.parents, (
        f"this is not the installed package: {installed}"
    )
    assert importlib.metadata.version("holdfast-checkpoint") == holdfast.__version__
    assert importlib.util.find_spec("torch") is None, "torch came along"
    assert (installed / "py.typed").exists()
    count = follow(Path(sys.argv[1]).read_text(encoding="utf-8"))
    assert count >= 2, "the page has nothing to run"
    subprocess.run("holdfast report step-1000 --stats -o page.html", shell=True, check=True)
    print(
        f"{importlib.metadata.version('holdfast-checkpoint')}: {count} blocks of the page work, and so does a report"
    )
