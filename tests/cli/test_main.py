"""The command as people run it: exit codes, one line an error, plain text in pipes, no torch."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.processes import read_terminal

from holdfast.cli.main import GROUPS, find_commands

COMMAND = [sys.executable, "-c", "import sys; from holdfast.cli.main import main; sys.exit(main())"]


def command(*arguments, **options):
    return subprocess.run(
        [*COMMAND, *map(str, arguments)], capture_output=True, text=True, timeout=60, **options
    )


def test_help_version_and_no_arguments(run):
    code, out, _ = run()
    assert code == 0
    assert "examples:" in out
    assert run("--help")[1] == out
    assert run("--version")[1].startswith("holdfast 0.")
    for verb in ("show", "read", "scan"):
        code, out, _ = run(verb, "--help")
        assert code == 0
        assert f"holdfast {verb} " in out.split("examples:")[1]


def test_help_lists_every_command_once_under_the_title_of_a_group(run):
    out = run("--help")[1]
    listed = re.findall(r"^    (\w+) ", out.partition("commands:")[2], re.MULTILINE)
    assert sorted(listed) == sorted(find_commands())
    assert listed == [name for names in GROUPS.values() for name in names if name in listed]
    assert all(f"\n  {title}:\n" in out for title in GROUPS)


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["show"],
        ["show", "x", "--depth", "0"],
        ["read", "x"],
        ["scan"],
        ["show", "x\x1b[2J.pt"],
        ["--frob"],
    ],
)
def test_errors_are_one_printable_line(run, arguments):
    code, out, err = run(*arguments)
    assert code == 2
    assert not out
    assert err.startswith("holdfast: ")
    assert err.count("\n") == 1
    assert err.rstrip("\n").isprintable()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["shwo", "x"], "there is no command 'shwo'; did you mean 'show'?"),
        (["show", "x", "--deptj", "2"], "there is no option --deptj; did you mean '--depth'?"),
        (["convert", "a", "b", "--fromat=torch"], "did you mean '--format'?"),
        (["diff", "a", "b", "--sort", "chnge"], "did you mean 'change'?"),
        (["show", "x", "--qqq"], "there is no option --qqq (try: holdfast show --help)"),
        (["show", "x", "y"], "too many arguments: y"),
    ],
)
def test_a_misspelled_word_is_answered_with_the_closest_one(run, arguments, message):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert message in err


def test_golden_files_are_shown(run, golden):
    code, out, err = run("show", golden)
    assert (code, err) == (0, "")
    assert out.startswith(str(golden))
    assert all(line.isprintable() for line in out.splitlines())
    code, out, _ = run("show", golden, "--json")
    assert code == 0
    parsed = json.loads(out)
    assert run("show", golden, "--all")[0] == 0
    assert len(parsed["tensors"]) == int(run("show", golden)[1].split(" · ")[1].split()[0])


def test_golden_json_agrees_with_what_torch_found(run, golden, expected):
    parsed = json.loads(run("show", golden, "--json")[1])
    found = {t["name"]: (t["dtype"], t["shape"]) for t in parsed["tensors"]}
    # The parts of composites have names of ours, which the reader's own tests compare.
    for name, tensor in expected["tensors"].items():
        assert found[name] == (tensor["dtype"], tensor["shape"])


def test_hostile_files_are_shown_and_nothing_runs(run, hostile):
    code, out, err = run("show", hostile)
    assert code in (0, 2)
    assert (code == 2) == bool(err)
    assert "internal error" not in err
    assert "pwned\n" not in out.replace("'", "")


def test_read(run, golden_dir, tmp_path):
    path = golden_dir / "files" / "training.pt"
    code, out, _ = run("read", path, "model.embed.weight", "--slice", "-2:, 0")
    assert code == 0
    assert out.splitlines()[0] == "model.embed.weight  float32  [2]  8 B"
    code, out, err = run("read", path, "model.*", "-o", tmp_path / "x.npz")
    assert (code, out) == (0, "")
    assert "12 arrays" in err
    assert np.load(tmp_path / "x.npz")["model.embed.weight"].shape == (5, 4)
    code, _, err = run("read", path, "model.embed.weigth")
    assert code == 2
    assert "did you mean 'model.embed.weight'" in err
    code, _, err = run("read", path, "model.embed.weight", "-o", path)
    assert code == 2


def test_bugs_and_interruptions_are_one_line_too(run, monkeypatch, golden_dir):
    def raising(error):
        def run(*args, **kwargs):
            raise error

        return run

    path = golden_dir / "files" / "plain.pt"
    for error, code, text in (
        (
            RuntimeError("odd\nthing"),
            2,
            r"holdfast: internal error, please report it: RuntimeError: odd\nthing",
        ),
        (KeyboardInterrupt(), 130, "holdfast: interrupted"),
        (MemoryError(), 2, "holdfast: out of memory"),
        (
            PermissionError(13, "Permission denied", "x\n.npy"),
            2,
            r"holdfast: Permission denied: 'x\n.npy'",
        ),
    ):
        monkeypatch.setattr("holdfast.cli.show.run", raising(error))
        found, _, err = run("show", path)
        assert found == code
        assert err.startswith(text)
        assert err.count("\n") == 1
    monkeypatch.setattr("holdfast.cli.show.run", raising(RuntimeError("odd")))
    with pytest.raises(RuntimeError):
        run("--traceback", "show", path)


def test_a_closed_pipe_is_silent(golden_dir):
    script = f"{' '.join(map(repr, COMMAND))} show {golden_dir / 'files' / 'training.pt'} --json"
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        ["bash", "-c", script.replace("'-c'", "-c")],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def test_pipes_get_plain_text_and_terminals_get_colours(golden_dir):
    path = golden_dir / "files" / "training.pt"
    piped = command("show", path, env={**os.environ, "COLUMNS": "40", "TERM": "xterm-256color"})
    assert "\x1b" not in piped.stdout
    assert max(map(len, piped.stdout.splitlines())) > 80
    for environment, coloured in (
        ({"TERM": "xterm"}, True),
        ({"TERM": "xterm", "NO_COLOR": "1"}, False),
        ({"TERM": "dumb"}, False),
    ):
        parent, child = pty.openpty()
        clean = {k: v for k, v in os.environ.items() if k not in ("TERM", "NO_COLOR")}
        with subprocess.Popen(
            [*COMMAND, "show", path], stdout=child, env={**clean, **environment}
        ) as process:
            os.close(child)
            seen = read_terminal(parent)
        assert process.returncode == 0
        assert (b"\x1b[" in seen) == coloured


def test_an_output_without_unicode(golden_dir):
    path = golden_dir / "files" / "metadata.safetensors"
    done = command("show", path, env={**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"})
    assert done.returncode == 0
    assert done.stdout.isascii()
    assert "`- poids" in done.stdout


LIBRARIES = "isal.isal_zlib, ml_dtypes, msgspec, numpy, numpy.typing"
"""What a command may need besides Python itself, and not what these import in their turn."""

SLOW = {
    "asyncio", "concurrent", "dataclasses", "difflib", "email", "hashlib", "http", "logging", "multiprocessing", "shutil", "socket",
    "subprocess", "tempfile", "unittest", "xml", "zipfile",
}  # fmt: skip
"""Of Python's own library: each takes milliseconds."""

SHOWING = {"core", "engine", "errors", "extras", "formats", "numeric", "stores", "verbs"}
"""The packages that `show` imports."""

WRITING = {"compact", "convert", "copy", "reshard", "save", "seal", "shared"}
"""Modules of verbs that write, which `show` does not import."""


def imported(code: str, *arguments: object) -> set[str]:
    """The modules that are there when code has run in a new interpreter."""
    told = f"{code}\nimport sys; sys.stderr.write(' '.join(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", told, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return set(done.stderr.split())


def test_a_command_imports_what_it_needs_and_no_more(golden_dir):
    """A module costs time at every start; a list of them cannot be late, as a clock would be."""
    command = "import sys; from holdfast.cli.main import main; assert main(sys.argv[1:]) == 0"
    parsing = (
        "argparse, _colorize" if sys.version_info >= (3, 14) else "argparse"
    )  # argparse imports the second when it is used
    floor = imported(f"import {parsing}, {LIBRARIES}")
    libraries = {name.split(".")[0] for name in floor}
    for path in ("plain.pt", "metadata.safetensors"):
        new = imported(command, "show", golden_dir / "files" / path) - floor
        ours = {name for name in new if name.split(".")[0] == "holdfast"}
        others = {name.split(".")[0] for name in new - ours}
        assert others - libraries <= sys.stdlib_module_names
        assert not others & SLOW - libraries
        verbs = {"main", "outline", "parser", "ranks", "seal", "show", "text", "values"}
        assert {name.split(".")[2] for name in ours if name.startswith("holdfast.cli.")} <= verbs
        assert {name.split(".")[1] for name in ours if "." in name} - {"cli"} <= SHOWING
        verbs = {name.split(".")[2] for name in ours if name.startswith("holdfast.verbs.")}
        assert not verbs & WRITING
    # The version is known without any library; and so is what a wrong verb is told.
    for arguments in (["--version"], ["--help"]):
        asked = imported(
            "import sys; from holdfast.cli.main import main; main(sys.argv[1:])", *arguments
        )
        assert not {name.split(".")[0] for name in asked} & {
            "numpy",
            "ml_dtypes",
            "msgspec",
            "isal",
            "xxhash",
        }
        # The table of extras has their commands, and imports none of them.
        assert not {
            name
            for name in asked - {"holdfast.extras"}
            if name.startswith("holdfast.") and name.split(".")[1] not in ("cli", "core", "errors")
        }
    # An interpreter may import modules at its start, such as those of a sitecustomize.
    added = imported("import holdfast") - imported("pass")
    assert not {name.split(".")[0] for name in added} & {
        "argparse",
        "numpy",
        "msgspec",
        *SLOW,
    }


def test_children_of_tests_can_be_interrupted():
    """Also where the tests run behind `&`: a shell has what it starts so ignore SIGINT, and children inherit that."""
    child = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    code = (
        f"import subprocess, sys, tests.conftest; subprocess.run([sys.executable, '-c', {child!r}])"
    )
    command = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", sys.executable, "-c", code]
    done = subprocess.run(
        command,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == "True\n"
