"""`holdfast verify`: the report of `holdfast.verify`, as lines and as JSON."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from holdfast.cli import values
from holdfast.cli.progress import bar
from holdfast.cli.seal import seal_fields, sealed_words
from holdfast.cli.text import Line, fields_of, print_json, print_lines, shell_text
from holdfast.core.order import sort_naturally
from holdfast.core.text import clip, escape, format_nbytes, pluralize
from holdfast.verbs.seals.check import is_sealed
from holdfast.verbs.seals.recorded import is_recorded
from holdfast.verbs.verify import Damage, VerifyReport, verify

DESCRIPTION = """\
Read a checkpoint completely and compare it with the checksums that are stored in it. List the
damaged tensors with their file and position.
If there are checksums of whole files, the command compares these too: a seal (holdfast.seal.json,
written by 'holdfast seal'), *.sha256 and SHA256SUMS files, or the hashes in the Hugging Face cache.
Some files have no checksums, such as plain safetensors files. Their result is "readable, nothing to
compare". With --strict, this is a failure.
"""

EXAMPLES = """\
exit codes:
  0  no damage found
  1  damaged
  2  a file could not be opened or read
  3  with --strict: no damage found, but some tensors have no checksum

examples:
  holdfast verify model.pt
  holdfast verify checkpoints/step-*

  # Fail unless every tensor has a checksum and matches it.
  holdfast verify model/ --strict

  # Print the result for a script.
  holdfast verify model/ --json
"""

SHOWN, NAMES = 50, 4
"""Damages of one checkpoint that are shown unless `--all` is given, and names of one damaged storage."""

NOTHING_TO_COMPARE = 3
"""The exit code of `--strict` where nothing is wrong, and not all of it had a checksum."""

VERDICTS = {
    "ok": ("ok", "clean"),
    "partial": ("ok in part", "note"),
    "readable": ("readable, nothing to compare", "note"),
    "damaged": ("damaged", "error"),
    "unverified": ("not verified", "error"),
}


def add_arguments(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "paths",
        metavar="PATH",
        type=values.path,
        nargs="+",
        help=values.PATH_HELP,
    )
    verb.add_argument(
        "--strict",
        action="store_true",
        help="fail with exit code 3 if a tensor has no checksum",
    )
    verb.add_argument(
        "--map",
        metavar="MAP",
        help="first check that this layout map fits, such as qwen3:hf:megatron",
    )
    verb.add_argument(
        "-a", "--all", action="store_true", help="list all damaged tensors (default: 50)"
    )
    verb.add_argument("-q", "--quiet", action="store_true", help=values.QUIET_HELP)
    verb.add_argument("--json", action="store_true", help=values.JSON_HELP)


def run(options: argparse.Namespace) -> int:
    """The exit code: 0 sound, 1 damaged, 2 not all of it could be read, 3 nothing to compare it with."""
    # Files with digests of whole files are read once more for them.
    total = sum(
        size_of(path) * (1 + is_sealed(path) + is_recorded(str(path))) for path in options.paths
    )
    with bar("Verifying", total, quiet=options.quiet or options.json) as progress:
        reports = [
            verify(
                path,
                require=options.strict,
                progress=progress,
                group=options.group,
                map=options.map,
            )
            for path in options.paths
        ]
    if options.json:
        print_json(verify_document(reports))
    else:
        print_lines(
            line for report in reports for line in verify_lines(report, everything=options.all)
        )
    verdicts = {report.verdict for report in reports}
    if "unverified" in verdicts:
        return 2
    return (
        1
        if "damaged" in verdicts
        else 0
        if all(report.ok for report in reports)
        else NOTHING_TO_COMPARE
    )


def size_of(path: Path) -> int:
    """About how many bytes there are to read."""
    try:
        if path.is_dir():
            return sum(entry.stat().st_size for entry in os.scandir(path) if entry.is_file())
        return path.stat().st_size
    except OSError:
        return 0  # verifying it says what is wrong


def verify_lines(report: VerifyReport, *, everything: bool = False) -> Iterator[Line]:
    """The report for people: a verdict, every damage, and what could not be checked."""
    line: Line = [
        (escape(clip(report.path, 400)), "title"),
        (f"  {report.format}" if report.format else "", "dim"),
    ]
    word, style = VERDICTS[report.verdict]
    # With --strict, what is not all compared is a failure.
    line.append(
        (
            f"  {word}",
            style if report.ok or report.verdict in ("damaged", "unverified") else "error",
        )
    )
    if report.checked_nbytes:
        line.append((f"  {format_nbytes(report.checked_nbytes)} checked", "dim"))
    if report.seal is not None:
        line.append((f"  {sealed_words(report.seal)}", "dim"))
    yield line
    for problem in report.problems:
        where = "" if problem.file == report.path else f"{problem.file}: "
        yield [
            ("  damaged  " if problem.damaged else "  error    ", "error"),
            (shell_text(where + problem.message), ""),
        ]
        if problem.tensors:
            yield [("           ", ""), (_names(problem.tensors), "dim")]
    damaged = sort_naturally(report.damaged, lambda damage: (*damage.tensors, damage.label)[0])
    shown = damaged if everything else damaged[:SHOWN]
    for damage in shown:
        yield from _damage_lines(damage, report.path)
    if len(shown) < len(report.damaged):
        yield [(f"  … {len(report.damaged) - len(shown):,} more: use --all or --json", "dim")]
    for note in report.notes if report.seal is not None else ():
        yield [("  note     ", "note"), (shell_text(note), "")]
    if report.unchecked:
        whole = report.checked_nbytes + report.unchecked_nbytes
        of = f" of {pluralize(report.tensors, 'tensor')}" if report.compared else ""
        amount = (
            f"{len(report.unchecked):,}{of}" if of else pluralize(len(report.unchecked), "tensor")
        )
        size = format_nbytes(report.unchecked_nbytes) + (
            f" of {format_nbytes(whole)}" if report.checked_nbytes else ""
        )
        text = f"  no checksums for {amount}, {size}: readable, but the content cannot be verified"
        yield [(text, "note")]


def _damage_lines(damage: Damage, path: str) -> Iterator[Line]:
    found = "data that cannot be decompressed" if damage.found is None else f"{damage.found:08x}"
    where = (
        "" if damage.file == path else f"  {escape(clip(os.path.relpath(damage.file, path), 200))}"
    )
    yield [
        ("  damaged  ", "error"),
        (_names(damage.tensors) or escape(clip(damage.label)) or "the file", ""),
        (where, "dim"),
        (
            f"  {escape(clip(damage.label))}"
            if damage.tensors and damage.tensors != (damage.label,)
            else "",
            "dim",
        ),
        (
            f"  byte {damage.offset:,}, {format_nbytes(damage.nbytes)}" if damage.nbytes else "",
            "value",
        ),
        (f"  expected {damage.expected:08x}, found {found}", "dim"),
    ]
    if damage.message:
        yield [("           ", ""), (shell_text(damage.message), "dim")]


def _names(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMES:,} more" if len(names) > NAMES else ""
    return ", ".join(escape(clip(name, 120)) for name in names[:NAMES]) + more


def verify_document(reports: Sequence[VerifyReport]) -> dict[str, object]:
    return {
        "schema": 1,
        "ok": all(report.ok for report in reports),
        "checkpoints": [
            {
                **fields_of(report, "path format ok verdict tensors compared"),
                "files": len(report.files),
                **fields_of(report, "checked_nbytes unchecked unchecked_nbytes skipped notes"),
                "sealed": None if report.seal is None else seal_fields(report.seal),
                "damaged": [
                    fields_of(one, "file tensors label offset nbytes expected found message")
                    for one in report.damaged
                ],
                "problems": [
                    fields_of(one, "file message kind tensors damaged") for one in report.problems
                ],
            }
            for report in reports
        ],
    }
