"""At a shell, messages speak of flags. The library's speak of keywords; one table lies between them."""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
from pathlib import Path

import numpy as np
import pytest
from tests.support import flip_bit

import holdfast
from holdfast.cli.main import main, parser
from holdfast.cli.options import flags_of, in_flags
from holdfast.cli.parser import verbs_of

SOURCE = Path(holdfast.__file__).parent

NOT_OURS = {
    *(
        "exported_programs",
        "trust_remote_code",
        "from_tf",
        "from_flax",
    ),  # of torch, and of Transformers
    *("use_collectives", "weights_only", "unit", "unit_scale"),  # of torch's functions, and tqdm's
    *("per_rank", "values", "check_replicas"),  # of `holdfast.torch.save_sharded`
    *(
        "mmap",
        "verify",
        "out",
        "copy",
        "progress",
        "keep_tree",
        "find_renamed",
        "names",
    ),  # of no command
    *(
        "base",
        "hashes",
        "shardings",
        "store",
    ),  # of `save`, `holdfast.jax.load` and `open`, which no command is for
    *("last_save_in_hf", "initial_load_in_hf"),  # of TorchTitan's configuration
    *("token", "charset"),  # of an address that `view` prints, and of HTTP
    *("seed", "item", "nbytes"),  # of a rule; of a repr
    *("group", "prefix"),  # behind the name of a map
    *("hours", "days", "minutes", "mode"),  # of rules of a run, which are texts at a shell
    *(
        "step",
        "metrics",
        "mtbf",
        "grace",
        "signals",
        "export",
        "every",
        "deep",
    ),  # of `holdfast.Run`
}
LIMITS = set(holdfast.Limits.__struct_fields__)
"""They are said as `Limits(files=…)`, which is for programs."""


@functools.cache
def messages() -> list[tuple[str, str]]:
    """Every text in the library that names a keyword, but for docstrings."""
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        place = path.relative_to(SOURCE)
        if place == Path("core/notebook.py"):  # attributes of HTML
            continue
        if place.parts[0] in ("cli", "torch") or "commands" in place.parts:
            continue
        tree = ast.parse(path.read_text())
        told = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and id(node) not in told
            ):
                found += [
                    (f"{place}:{node.lineno}", word)
                    for word in re.findall(r"\b([a-z_]{3,})=", node.value)
                ]
    return found


def test_every_keyword_that_a_message_names_has_a_flag_or_is_for_programs():
    assert len(messages()) > 40
    known = {name for verb in verbs_of(parser()).values() for name in flags_of(verb)}
    strange = [(place, word) for place, word in messages() if word not in known | NOT_OURS | LIMITS]
    assert not strange, "give these a flag, or say in this test why a shell has no such word"


def test_no_message_of_the_library_names_a_flag():
    """It would be said twice at a shell, and to nobody in a program."""
    for path in sorted(SOURCE.rglob("*.py")):
        place = path.relative_to(SOURCE)
        # core/options.py is where the flags are.
        is_command = place.parts[0] == "cli" or "commands" in place.parts
        if is_command or place.parts[0] in ("torch", "integrations"):
            continue
        if place != Path("core/options.py"):
            assert not re.findall(r"[(\"' ]--[a-z][a-z-]+", path.read_text()), path


PAGE = Path(__file__).parents[2] / "docs" / "cli.md"


def test_the_page_of_the_command_line_has_a_section_for_every_command():
    """The reference, which is made from the parser, has every option: `tests/test_site.py`."""
    headings = re.findall(r"^## (.+)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    sections = {name for heading in headings for name in heading.split(", ")}
    in_other_sections = {"pin", "unpin"}
    assert {*verbs_of(parser())} <= sections | in_other_sections


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    holdfast.save({"w": np.ones((4, 4), np.float32), "f": {1, 2}}, "a.pt")
    holdfast.save({"w": np.ones((4, 4), np.float32)}, "b.safetensors")
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["convert", "b.safetensors", "a.pt"], "pass --overwrite to replace it"),
        (
            ["edit", "a.pt", "--drop", "w"],
            "or --in-place to replace the source; --dry-run only looks",
        ),
        (
            ["edit", "a.pt", "c.pt", "--in-place", "--drop", "w"],
            "a target and --in-place exclude each other",
        ),
        (["convert", "b.safetensors", "c.pt", "--max-memory", "1MB"], "--max-memory is too small"),
        (
            ["convert", "b.safetensors", "c.pt", "--max-memory", "1MB"],
            "bytes; pass at least that\n",
        ),
        (["convert", "b.safetensors", "c.onnx"], "or say --format"),
        (
            ["convert", "b.safetensors", "c.pt", "--model", "x"],
            "--keep and --rename choose by name",
        ),
        pytest.param(
            ["prune", "b.safetensors", "c.safetensors", "--rule", "w: 0.5", "--masks", "beside"],
            "--masks only",
            marks=pytest.mark.extras,
        ),
    ],
)
def test_what_is_said_at_a_shell(folder, capsys, arguments, said):
    assert main(arguments) == 2
    told = capsys.readouterr().err
    assert said in told
    assert not re.search(r"\b[a-z_]+=(True|False|…|[ )'])", told)


def test_seal_says_at_a_shell_which_flag_gives_the_step(folder, capsys):
    holdfast.save({"w": np.ones(2)}, "native")
    assert main(["seal", "native"]) == 0
    printed = capsys.readouterr().out
    assert "pass --step to give it one" in printed
    assert "step=" not in printed


def test_show_says_at_a_shell_that_limits_are_raised_in_python(folder, capsys):
    np.savez_compressed("zeros.npz", w=np.zeros(4_000_000))
    assert main(["show", "zeros.npz"]) == 2
    assert "to raise the limit, pass limits=" in capsys.readouterr().err


def test_read_says_at_a_shell_what_reads_a_damaged_tensor_in_python(folder, capsys):
    flip_bit(Path("b.safetensors"), -1)
    assert main(["read", "b.safetensors", "w"]) == 2
    assert "in Python with holdfast.open(path, verify=False)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("make numbers of them first (dequantize=True)", "(holdfast convert --dequantize)"),
        ("leave the tensor out (drop=), or take it", "(holdfast convert --drop), or take it"),
        ("rules=['*.x.weight: tp=0'] where", "holdfast convert --rule '*.x.weight: tp=0' where"),
        ("is right as it is (seal with overwrite=True)", "(seal with --overwrite)"),
        ("pass step= to give it one", "pass holdfast seal --step to give it one"),
        ("trust_remote_code=True would run it", "trust_remote_code=True would run it"),
    ],
)
def test_an_option_of_another_command_is_said_with_that_command(text, said):
    assert said in in_flags(text)


@pytest.mark.parametrize("verb", ["convert", "edit"])
def test_a_format_that_is_only_read_is_refused_as_such_at_a_shell(folder, capsys, verb):
    assert main([verb, "b.safetensors", "c", "--format", "gguf"]) == 2
    told = capsys.readouterr().err
    assert "gguf can be read and not written; use torch, safetensors, native or dcp" in told
    assert main([verb, "b.safetensors", "c", "--format", "guff"]) == 2
    assert "there is no format 'guff'; use torch" in capsys.readouterr().err


def test_what_is_quoted_stays():
    known = {"overwrite": "--overwrite", "keep": "--keep"}
    assert (
        in_flags("'keep=True' and \"overwrite=True\" are names", known)
        == "'keep=True' and \"overwrite=True\" are names"
    )
    assert in_flags("mmap=True only maps", known) == "mmap=True only maps"
    assert in_flags("it's keep= that isn't overwrite=True", known).count("--") >= 1


def test_a_number_is_no_value_of_a_keyword():
    """`model=2` is an axis of a mesh."""
    assert (
        in_flags(
            "1 tensor cut over model=2, dp=4 and step=100", {"model": "--model", "step": "--step"}
        )
        == "1 tensor cut over model=2, dp=4 and step=100"
    )


def test_a_note_on_a_mesh_names_its_axes(tmp_path, capsys):
    source = tmp_path / "llama.safetensors"
    holdfast.save({"layers.0.q_proj.weight": np.ones((4, 4), np.float32)}, source)
    for number, more in enumerate(([], ["--dry-run"])):
        assert (
            main(["reshard", str(source), str(tmp_path / f"{number}"), "--mesh", "model=2", *more])
            == 0
        )
        assert "1 tensor split along dimension 0 over model=2\n" in capsys.readouterr().out


def test_a_note_has_the_flags_of_its_own_verb(folder, capsys, monkeypatch):
    """The same words are a flag of the verb if it has one, else of the first verb that has it."""
    monkeypatch.setattr(
        "holdfast.verbs.shared.planned.Planned.preview",
        lambda planned, progress: dataclasses.replace(planned.report, notes=NOTES),
    )
    assert main(["convert", "b.safetensors", "c.pt", "--dry-run"]) == 0
    assert "note   --model chooses, holdfast reshard --mesh dp=2 cuts" in capsys.readouterr().out
    assert main(["reshard", "b.safetensors", "c", "--mesh", "dp=2", "--dry-run"]) == 0
    assert "note   holdfast convert --model chooses, --mesh dp=2 cuts" in capsys.readouterr().out


NOTES = ("model=… chooses, mesh='dp=2' cuts",)


@pytest.mark.extras
def test_a_sentence_that_names_another_verb_has_its_flags(folder, golden_dir, capsys):
    assert main(["show", str(golden_dir / "files" / "tiny.gguf")]) == 0
    assert "convert with --dequantize, or call" in capsys.readouterr().out
    holdfast.package({"x": "b.safetensors", "y": "b.safetensors"}, "both.pt2")
    assert main(["package", "x=both.pt2", "again.pt2"]) == 2
    assert "extract one first (convert with --model)" in capsys.readouterr().err
