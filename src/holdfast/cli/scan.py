"""`holdfast scan`: the report of `holdfast.scan`, as lines, as JSON and as SARIF.

SARIF 2.1.0 is what code hosts and editors show beside the files.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from holdfast.cli import values
from holdfast.cli.text import Line, fields_of, print_json, print_lines, shell_text
from holdfast.core.text import clip, escape, pluralize
from holdfast.verbs.scan import FileReport, ScanReport, Verdict, scan
from holdfast.verbs.scanning.findings import Finding

DESCRIPTION = """\
List the code that files would run when torch.load, or another loader, loads them. Holdfast parses
the pickles; it does not unpickle them, import modules or call functions. In a folder, it also
reports Python files that a config names, and skips files that no loader would open.
"""

EXAMPLES = """\
exit codes, the first one that applies:
  1  a dangerous or suspicious finding (with --strict, also an unknown one)
  3  an unknown class or function
  2  a file could not be read completely
  4  nothing scanned: there is no file that a loader would open
  0  clean: all files were read completely, and nothing was found

examples:
  holdfast scan model.pt

  # Search a folder, and fail on unknown classes as well.
  holdfast scan ~/.cache/huggingface --strict

  # Accept the findings listed in accepted.txt.
  holdfast scan downloads/ --allow accepted.txt

  # Write a report for a code-scanning service.
  holdfast scan downloads/ --sarif > scan.sarif
"""

SHOWN, SKIPPED = 50, 10
"""Findings of one file that are shown, the worst first, and skipped files that are named, unless `--all` is given."""

FINDING = "severity what reason uses calls stream offset paths allowed"
"""Fields of a finding in the document of `--json`."""

EXIT: dict[Verdict, int] = {
    "clean": 0,
    "dangerous": 1,
    "suspicious": 1,
    "error": 2,
    "unknown": 3,
    "nothing scanned": 4,
}
"""0 is for clean alone: a script that looks for nothing else must not let in what was not read, or is not known."""


def add_arguments(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "paths",
        metavar="PATH",
        type=values.path,
        nargs="+",
        help="file to scan, or folder to search",
    )
    verb.add_argument(
        "--strict",
        action="store_true",
        help="treat unknown classes and functions as suspicious (exit code 1)",
    )
    verb.add_argument(
        "-a", "--all", action="store_true", help="show all findings (default: 50 per file)"
    )
    verb.add_argument(
        "--allow",
        metavar="FILE",
        type=values.file,
        help="file of accepted findings, one per line: a glob for module.name, or 'PATH sha256:DIGEST'",
    )
    verb.add_argument(
        "--code",
        action="store_true",
        help="report all Python files in model folders (default: only files that a config refers to)",
    )
    form = verb.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help=values.JSON_HELP)
    form.add_argument("--sarif", action="store_true", help="print the result as SARIF 2.1.0")


def run(options: argparse.Namespace) -> int:
    strict = options.strict
    report = scan(*options.paths, allow=options.allow, code=options.code, group=options.group)
    if options.sarif:
        print_json(sarif_document(report, strict=strict))
    elif options.json:
        print_json(scan_document(report, strict=strict))
    else:
        print_lines(scan_lines(report, everything=options.all, strict=strict))
    return EXIT[report.verdict(strict=strict)]


def scan_lines(
    report: ScanReport, *, everything: bool = False, strict: bool = False
) -> Iterator[Line]:
    """The report for people: each file, its findings, and one line of totals."""
    for file in report.reports:
        yield from _file_lines(file, everything)
    yield [(_totals(report, strict=strict), "title")]
    if report.skipped:
        named = report.skipped_paths if everything else report.skipped_paths[:SKIPPED]
        more = f", and {report.skipped - len(named):,} more" if report.skipped > len(named) else ""
        yield [
            (
                f"skipped, because no loader would open them: {', '.join(escape(clip(p, 200)) for p in named)}{more}",
                "dim",
            )
        ]
    if report.count("unknown") and not strict:
        text = "unknown: classes and functions that Holdfast has no information about; an unsafe loader imports their modules"
        yield [
            (
                f"{text} (--strict treats them as suspicious, --allow FILE accepts them)",
                "dim",
            )
        ]


def _file_lines(file: FileReport, everything: bool) -> Iterator[Line]:
    word = file.verdict()
    known = sum(f.severity == "known" for f in file.findings)
    line: Line = [
        (escape(clip(file.path, 400)), "title"),
        (f"  {file.format}" if file.format else "", "dim"),
        (f"  {word}", word),
    ]
    if known and not everything:
        line.append((f"  ({known:,} known)", "dim"))
    yield line
    if file.error is not None:
        yield [("  error      ", "error"), (shell_text(file.error), "")]
    findings = [f for f in file.findings if everything or f.severity != "known"]
    shown = findings if everything else findings[:SHOWN]
    for finding in shown:
        yield from _finding_lines(finding)
    if len(shown) < len(findings):
        yield [(f"  … {len(findings) - len(shown):,} more: use --all or --json", "dim")]


def _finding_lines(finding: Finding) -> Iterator[Line]:
    what = finding.calls[0] if finding.calls else finding.what
    where = f"{finding.stream} byte {finding.offset:,}" if finding.uses else finding.stream
    if finding.paths:
        where += f", at {', '.join(clip(p, 60) for p in finding.paths[:2])}"
    uses = "+".join(u for u in finding.uses if u != "mention") or (
        "mention" if finding.uses else ""
    )
    yield [
        (f"  {finding.severity:<10} ", finding.severity),
        ("allowed  " if finding.allowed else "", "dim"),
        (escape(clip(what, 160)), ""),
        (f"  {uses}" if uses else "", "value"),
        (f"  {escape(where)}", "dim"),
    ]
    for call in finding.calls[1:]:
        yield [("             ", ""), (escape(clip(call, 160)), "")]
    if finding.severity in ("dangerous", "suspicious"):
        yield [(f"             {finding.reason}", "dim")]


def _totals(report: ScanReport, *, strict: bool) -> str:
    parts = (
        [f"{pluralize(len(report.reports), 'file')} scanned"]
        if report.reports
        else ["nothing scanned"]
    )
    counts = {
        severity: report.count(severity)
        for severity in ("dangerous", "suspicious", "unknown", "known")
    }
    counts["allowed"] = sum(f.allowed for file in report.reports for f in file.findings)
    parts += [f"{number:,} {word}" for word, number in counts.items() if number]
    errors = sum(f.error is not None for f in report.reports)
    if errors:
        parts.append(pluralize(errors, "error"))
    if report.verdict(strict=strict) == "clean":
        parts.append("clean")
    if report.skipped:
        parts.append(f"{pluralize(report.skipped, 'other file')} skipped")
    return " · ".join(parts)


def scan_document(report: ScanReport, *, strict: bool = False) -> dict[str, object]:
    return {
        "schema": 2,
        "verdict": report.verdict(strict=strict),
        "exit_code": EXIT[report.verdict(strict=strict)],
        **fields_of(report, "skipped skipped_paths"),
        "files": [
            fields_of(file, "path format")
            | {"verdict": file.verdict(strict=strict)}
            | fields_of(file, "error streams")
            | {"findings": [fields_of(f, FINDING) for f in file.findings]}
            for file in report.reports
        ],
    }


SARIF_SCHEMA = (
    "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
)

RULES = {
    "dangerous": (
        "error",
        "Loading this file runs commands or code, touches files or the network, or loads more code.",
    ),
    "suspicious": (
        "warning",
        "Loading this file calls an unknown function with arguments from the file, or the file comes with code.",
    ),
    "unknown": (
        "note",
        "Loading this file imports a module that Holdfast does not know, or sets the state of its classes.",
    ),
    "unread": (
        "error",
        "This file could not be read completely, so the findings may be incomplete.",
    ),
}
"""Levels and descriptions. A `known` finding is no result."""


def sarif_document(report: ScanReport, *, strict: bool = False) -> dict[str, object]:
    """One run with one result a finding."""
    from holdfast import __version__

    results = [result for file in report.reports for result in _results(file, strict=strict)]
    rules = [
        {
            "id": f"holdfast/{name}",
            "shortDescription": {"text": text},
            "defaultConfiguration": {"level": level},
        }
        for name, (level, text) in RULES.items()
    ]
    failed = any(file.error is not None for file in report.reports)
    return {
        "$schema": SARIF_SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {
                    "driver": {"name": "holdfast", "semanticVersion": __version__, "rules": rules}
                },
                "invocations": [{"executionSuccessful": not failed}],
                "artifacts": [{"location": _location(file)} for file in report.reports],
                "results": results,
                "properties": {"verdict": report.verdict(strict=strict), "skipped": report.skipped},
            }
        ],
    }


def _results(file: FileReport, *, strict: bool) -> list[dict[str, object]]:
    found = []
    for finding in file.findings:
        if finding.severity in RULES:
            what = escape(clip(finding.calls[0] if finding.calls else finding.what, 400))
            text = f"{what}: {finding.reason} ({escape(finding.stream)}, byte {finding.offset:,})"
            result = _result(file, finding.severity, text) | {
                "properties": fields_of(finding, "stream offset uses")
            }
            if strict and finding.severity == "unknown":
                result["level"] = "warning"
            if finding.allowed:
                result["suppressions"] = [
                    {"kind": "external", "justification": "accepted by the allow list"}
                ]
            found.append(result)
    if file.error is not None:
        found.append(
            _result(file, "unread", f"not read completely: {escape(clip(file.error, 1000))}")
        )
    return found


def _result(file: FileReport, rule: str, text: str) -> dict[str, object]:
    places = [{"physicalLocation": {"artifactLocation": _location(file)}}]
    return {
        "ruleId": f"holdfast/{rule}",
        "level": RULES[rule][0],
        "message": {"text": text},
        "locations": places,
    }


def _location(file: FileReport) -> dict[str, str]:
    from holdfast.stores.place import place_from_text

    return {"uri": place_from_text(file.path).uri}
