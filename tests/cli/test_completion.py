"""The completion scripts: bash's is run, the others hold every command and option."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from holdfast.cli.completion import SHELLS, script
from holdfast.cli.main import main, parser
from holdfast.cli.parser import verbs_of
from holdfast.formats import titles, written_formats


def completed(*words: str) -> set[str]:
    """What bash offers for the last of these words."""
    quoted = " ".join(f"'{word}'" for word in ("holdfast", *words))
    ask = f'COMP_WORDS=({quoted}); COMP_CWORD={len(words)}; COMP_LINE="${{COMP_WORDS[*]}}"; COMP_POINT=${{#COMP_LINE}}'
    code = f'{script("bash")}\n{ask}; _shtab_holdfast; printf "%s\\n" "${{COMPREPLY[@]}}"'
    done = subprocess.run(
        ["bash", "-c", code], capture_output=True, text=True, timeout=30, check=True
    )
    return set(done.stdout.split())


def test_bash_completes_commands_options_and_words():
    assert completed("co") == {"convert", "compact", "completion"}
    assert completed("--v") == {"--version"}
    assert completed("convert", "--dt") == {"--dtype"}
    assert completed("--traceback", "convert", "a.pt", "--max") == {
        "--max-memory",
        "--max-shard-size",
    }
    assert completed("convert", "--format", "") == {*titles(written_formats())}
    assert completed("completion", "") == set(SHELLS)


def test_bash_completes_dtypes():
    assert {"bf16", "f16", "f32", "float8_e4m3fn"} <= completed("convert", "--dtype", "")
    assert completed("convert", "--dtype", "bf") == {"bf16", "bfloat16"}


@pytest.mark.extras
def test_bash_completes_maps():
    names = completed("convert", "--map", "")
    assert {"auto", "qwen3:hf:megatron", "llama:meta:hf"} <= names
    assert names == completed("maps", "check", "")


def test_bash_completes_names_of_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.pt").touch()
    assert "model.pt" in completed("show", "mod")
    assert "model.pt" in completed("read", "a.pt", "-o", "mod")


@pytest.mark.parametrize("shell", SHELLS)
def test_every_command_and_option_is_there(shell, capsys):
    assert main(["completion", shell]) == 0
    text = capsys.readouterr().out
    assert text == script(shell)
    for name, verb in verbs_of(parser()).items():
        assert name in text
        # tcsh knows one list of words for each place.
        for flag in (
            [flag for action in verb._actions for flag in action.option_strings]
            if shell != "tcsh"
            else ()
        ):
            assert flag in text or (
                shell == "fish" and (f"-l {flag[2:]} " in text or f"-s {flag[1:]} " in text)
            ), flag


@pytest.mark.parametrize(
    ("shell", "check"), [("bash", ["-n"]), ("zsh", ["-n"]), ("fish", ["--no-execute"])]
)
def test_the_syntax_is_that_of_the_shell(shell, check, tmp_path):
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell} here")
    (tmp_path / "script").write_text(script(shell))
    assert (
        subprocess.run(
            [shell, *check, str(tmp_path / "script")], capture_output=True, timeout=30, check=True
        ).stderr
        == b""
    )
