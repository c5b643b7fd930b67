"""A report of `scan` as SARIF 2.1.0, which code hosts and editors show beside the files."""

from __future__ import annotations

from pathlib import PurePath
from urllib.parse import quote

from holdfast.cli.text import clip, escape
from holdfast.inspect.scan import FileReport, Finding, ScanReport

__all__ = ["sarif_document"]

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"

RULES = {
    "dangerous": ("error", "Loading this file runs commands or code, touches files or the network, or loads more code."),
    "suspicious": ("warning", "Loading this file calls something that Holdfast does not know with what the file gives it."),
    "unknown": ("note", "Loading this file imports a module that Holdfast does not know, or sets the state of its classes."),
    "unread": ("error", "This file could not be read to its end; what is said of it is not complete."),
}
"""Levels and descriptions. What is `known` is no result."""


def sarif_document(report: ScanReport, *, strict: bool = False) -> dict[str, object]:
    """One run with one result a finding."""
    from holdfast import __version__

    results = [result for file in report.reports for result in _results(file, strict=strict)]
    rules = [
        {"id": f"holdfast/{name}", "shortDescription": {"text": text}, "defaultConfiguration": {"level": level}}
        for name, (level, text) in RULES.items()
    ]
    failed = any(file.error is not None for file in report.reports)
    return {
        "$schema": SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {"driver": {"name": "holdfast", "semanticVersion": __version__, "rules": rules}},
                "invocations": [{"executionSuccessful": not failed}],
                "artifacts": [{"location": {"uri": _uri(file.path)}} for file in report.reports],
                "results": results,
                "properties": {"verdict": report.verdict(strict=strict), "skipped": report.skipped},
            }
        ],
    }


def _results(file: FileReport, *, strict: bool) -> list[dict[str, object]]:
    found = [_result(file, f, strict=strict) for f in file.findings if f.severity in RULES]
    if file.error is not None:
        text = f"not read to its end: {escape(clip(file.error, 1000))}"
        found.append({"ruleId": "holdfast/unread", "level": "error", "message": {"text": text}, "locations": [_place(file)]})
    return found


def _result(file: FileReport, finding: Finding, *, strict: bool) -> dict[str, object]:
    level = RULES[finding.severity][0]
    if strict and finding.severity == "unknown":
        level = "warning"
    what = finding.calls[0] if finding.calls else finding.what
    result: dict[str, object] = {
        "ruleId": f"holdfast/{finding.severity}",
        "level": level,
        "message": {"text": f"{escape(clip(what, 400))}: {finding.reason} ({escape(finding.stream)}, byte {finding.offset:,})"},
        "locations": [_place(file)],
        "properties": {"stream": finding.stream, "offset": finding.offset, "uses": list(finding.uses)},
    }
    if finding.allowed:
        result["suppressions"] = [{"kind": "external", "justification": "on the list of what is allowed"}]
    return result


def _place(file: FileReport) -> dict[str, object]:
    return {"physicalLocation": {"artifactLocation": {"uri": _uri(file.path)}}}


def _uri(path: str) -> str:
    pure = PurePath(path)
    text = quote(pure.as_posix().encode("utf-8", "surrogateescape"))
    return f"file://{text}" if pure.is_absolute() else text
