"""`holdfast scan`: the report of `holdfast.api.scan`, as lines and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from holdfast.api.scan import FileReport, Finding, ScanReport, scan
from holdfast.cli.lines import Line, print_lines
from holdfast.cli.text import clip, escape, plural

__all__ = ["run", "scan_document", "scan_lines"]

SCHEMA = 1
"""Raised when a field changes its meaning or goes away."""

SHOWN = 50
"""Findings of one file that are shown unless `--all` is given; the worst stand first."""


EXIT = {"clean": 0, "suspicious": 1, "error": 2}


def run(paths: Sequence[Path], *, strict: bool, everything: bool, as_json: bool) -> int:
    """The command; returns its exit code."""
    report = scan(*paths)
    if as_json:
        from holdfast.cli.document import print_json

        print_json(scan_document(report, strict=strict))
    else:
        print_lines(scan_lines(report, everything=everything, strict=strict))
    return EXIT[report.verdict(strict=strict)]


def scan_lines(report: ScanReport, *, everything: bool = False, strict: bool = False) -> Iterator[Line]:
    """The report for people: each file, its findings, and one line of totals."""
    for file in report.files:
        yield from _file_lines(file, everything)
    yield [(_totals(report), "title")]
    if report.count("unknown") and not strict:
        yield [
            (
                "unknown: classes and functions that nothing here knows; unsafe loading would import their modules ",
                "dim",
            ),
            ("(--strict makes them count)", "dim"),
        ]


def _file_lines(file: FileReport, everything: bool) -> Iterator[Line]:
    line: Line = [(escape(clip(file.path, 400)), "title"), (f"  {file.format}" if file.format else "", "dim")]
    if file.error is not None:
        yield line
        yield [("  error      ", "error"), (escape(clip(file.error, 600)), "")]
        return
    if not file.findings:
        line.append(("  clean", "clean"))
    yield line
    shown = file.findings if everything else file.findings[:SHOWN]
    for finding in shown:
        yield from _finding_lines(finding)
    if len(shown) < len(file.findings):
        yield [(f"  … {len(file.findings) - len(shown):,} more: use --all or --json", "dim")]


def _finding_lines(finding: Finding) -> Iterator[Line]:
    what = finding.calls[0] if finding.calls else finding.what
    where = f"{finding.stream} byte {finding.offset:,}"
    if finding.paths:
        where += f", at {', '.join(clip(p, 60) for p in finding.paths[:2])}"
    yield [
        (f"  {finding.severity:<10} ", finding.severity),
        (escape(clip(what, 160)), ""),
        (f"  {'+'.join(u for u in finding.uses if u != 'mention') or 'mention'}", "value"),
        (f"  {escape(where)}", "dim"),
    ]
    for call in finding.calls[1:]:
        yield [("             ", ""), (escape(clip(call, 160)), "")]
    if finding.severity in ("dangerous", "suspicious"):
        yield [(f"             {finding.reason}", "dim")]


def _totals(report: ScanReport) -> str:
    parts = [f"{plural(len(report.files), 'file')} scanned"]
    for severity in ("dangerous", "suspicious", "unknown", "known"):
        number = report.count(severity)
        if number:
            parts.append(f"{number:,} {severity}")
    errors = sum(f.error is not None for f in report.files)
    if errors:
        parts.append(plural(errors, "error"))
    if len(parts) == 1 and report.files:
        parts.append("clean")
    if report.skipped:
        parts.append(f"{plural(report.skipped, 'other file')} skipped")
    return " · ".join(parts)


def scan_document(report: ScanReport, *, strict: bool = False) -> dict[str, object]:
    """The report as values that JSON has."""
    return {
        "schema": SCHEMA,
        "verdict": report.verdict(strict=strict),
        "skipped": report.skipped,
        "files": [
            {
                "path": file.path,
                "format": file.format,
                "error": file.error,
                "findings": [
                    {
                        "severity": f.severity,
                        "what": f.what,
                        "reason": f.reason,
                        "uses": list(f.uses),
                        "calls": list(f.calls),
                        "stream": f.stream,
                        "offset": f.offset,
                        "paths": list(f.paths),
                    }
                    for f in file.findings
                ],
            }
            for file in report.files
        ],
    }
