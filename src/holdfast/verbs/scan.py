"""`scan`: what would these files have done, had a trusting loader loaded them?

The rule: every byte that some stock loader (pickle, torch.load, torch.jit, torch.package, torch.export, DCP, joblib, numpy)
would carry out is read by the closed interpreter, and what could not be read is said. "Clean" means that all of it was read and
nothing was found.

1. Directories are searched, and content decides: a file that no loader would do anything with is skipped, and named. A distributed
   checkpoint and a native directory are one thing each, with all their files.
2. Each file is walked (`scanning/walk.py`): every container that it may be, every pickle in it, recorded, ranked (`severity.py`).
3. It is opened as well, by the parser of `open`, which knows its format and where in its tree things are. What `open` refuses is an
   error here, unless it is something that only other loaders read and that was walked to its end.
4. Code that comes with a model is a finding if a loader looks for it: what configs name, and the Python files beside (below).
5. An error never outweighs a finding, and neither is ever "nothing found".

Code that comes with a model: what its configs name, and Python files beside its weights. Python files beside weights that
no config names, such as a training script, are a finding only if the caller asks for all code (`code=True`).

    config.json            "auto_map": {"AutoModel": "modeling_x.XModel"}, "custom_pipelines": {"task": {"impl": "pipe.Pipe"}}
    tokenizer_config.json  "auto_map": {"AutoTokenizer": ["tokenization_x.XTokenizer", null]}; so do those of processors
    model_index.json       "_class_name": ["pipeline_x", "XPipeline"]                      diffusers
    modules.json           [{"type": "custom_st.Transformer", …}]                          sentence-transformers
    modeling_x.py          imported, and so run, by a loader that was told to trust it, and so is whatever it imports
    custom_generate/…      transformers looks for `custom_generate/generate.py` by itself, without a word in any config

`trust_remote_code=True` makes all of these run. "user/repo--modeling_x.XModel" names code in another repository, which is fetched.
A chat template is no code here: it is rendered in a sandbox.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar, cast

from holdfast.core.group import AnyGroup, Ranks, divide_work, joined_ranks
from holdfast.core.keys import check_key
from holdfast.core.limits import Limits
from holdfast.core.notebook import NotebookResult, render_card, render_table
from holdfast.core.options import validate_arguments
from holdfast.core.registry import FORMATS_GROUP, find_plugins
from holdfast.core.value import Value, replace
from holdfast.engine.source import OpenSource
from holdfast.errors import HoldfastError, UnknownFormat, Unsupported
from holdfast.formats import format_of
from holdfast.formats.dcp.index import is_index
from holdfast.formats.dcp.read import DATA_SUFFIX
from holdfast.formats.pickle.machine import interpret
from holdfast.formats.pickle.plain import PlainTable
from holdfast.formats.safetensors.schema import MANIFEST
from holdfast.stores.paths import describe_place, disambiguate_path, place_of
from holdfast.stores.place import join, place_at
from holdfast.verbs.locate import INDEX_ENDS
from holdfast.verbs.open import open_built_in, open_store
from holdfast.verbs.scanning.archives import Span
from holdfast.verbs.scanning.findings import (
    Allowlist,
    Finding,
    Findings,
    places_of,
)
from holdfast.verbs.scanning.walk import WHOLE, FileScan
from holdfast.verbs.severity import ORDER, Severity

CONFIG_NBYTES = 16 << 20

INDEX, MODULES, GENERATE = "model_index.json", "modules.json", "custom_generate"
OWN = "sentence_transformers."
"""The prefix of modules that sentence-transformers has itself."""

LOCAL = "a loader with trust_remote_code=True would import that file of this folder, and run it"
ELSEWHERE = "a loader with trust_remote_code=True would fetch this from the repository that is named before the --, and run it"

WHAT = "Python code beside weights"
NAMED = "a loader with trust_remote_code=True would run it, for a config beside it names it"
IMPORTED = (
    "a loader with trust_remote_code=True runs what a config here names, and that may import it"
)
ALONE = (
    "no config here names it: it would run where a loader is told to take code from this folder (trust_remote_code=True with "
    "another config, a custom pipeline of diffusers, torch.hub with a local source)"
)
GENERATES = "from_pretrained of the folder above with trust_remote_code=True would run generate.py, whatever the configs say"


class Pairs(list[tuple[str, object]]):
    """An object of JSON with every key that it has, also those that come again: which one counts is up to the reader."""


def is_config(name: str) -> bool:
    """Whether a name is that of a file in which loaders look for code to run."""
    return name in (INDEX, MODULES) or (name.endswith(".json") and "config" in name)


def look_at_config(span: Span, name: str, found: Findings) -> bool:
    """Report all code that a config names; True where there is any. Loaders read nothing that is no JSON."""
    if span.nbytes > CONFIG_NBYTES:
        if name.endswith("config.json"):
            found.error(
                f"a config of {span.nbytes:,} bytes, of which {CONFIG_NBYTES:,} may be read; not read"
            )
        return False
    try:
        document = json.loads(span.read(0, span.nbytes), object_pairs_hook=Pairs)
    except ValueError:
        return False
    named = list(_named(document, name))
    for key, class_name in named:
        reason = ELSEWHERE if "--" in class_name else LOCAL
        found.add_other("suspicious", class_name, reason, stream=key)
    return bool(named)


def _named(document: object, name: str) -> Iterator[tuple[str, str]]:
    """Classes that a config wants imported, each with the key that names it."""
    waiting: list[object] = [document]
    while waiting:
        value = waiting.pop()
        if isinstance(value, list) and not isinstance(value, Pairs):
            waiting += value
            continue
        for key, inner in value if isinstance(value, Pairs) else ():
            waiting.append(inner)
            match key, inner:
                case "auto_map" | "custom_pipelines", _:
                    yield from ((key, text) for text in _texts(inner) if "." in text)
                case "_class_name", [str(), *_] if type(inner) is list:
                    yield key, ".".join(part for part in inner if isinstance(part, str))
                case "type", str() if name == MODULES and not inner.startswith(OWN):
                    yield key, inner


def _texts(value: object) -> Iterator[str]:
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, Pairs):
            waiting += [inner for _, inner in reversed(one)]
        elif isinstance(one, list):
            waiting += reversed(one)


def model_code_findings(
    folder: str,
    names: Sequence[str],
    findings: Iterable[Finding],
    *,
    has_weights: bool,
    has_weights_above: bool,
    report_all: bool,
) -> dict[str, Finding]:
    """Return the findings about the Python files of a folder, by their names.

    Args:
        folder: The name of the folder.
        names: The names of all its files.
        findings: The findings about its other files, configs among them.
        has_weights: Whether a loader reads any file of the folder.
        has_weights_above: Whether a loader reads any file of the folder above.
        report_all: Whether code is a finding that no loader looks for by itself.
    """
    code_names = [name for name in names if name.endswith(".py")]
    is_generation = has_weights_above and folder == GENERATE
    if not (has_weights or is_generation or INDEX in names):
        return {}
    named_modules = {module_file(finding) for finding in findings if finding.reason == LOCAL}
    if is_generation:
        other_reason = GENERATES
    elif named_modules:
        other_reason = IMPORTED
    elif report_all:
        other_reason = ALONE
    else:
        return {}
    code_findings = {}
    for name in code_names:
        reason = NAMED if name in named_modules else other_reason
        code_findings[name] = Finding("suspicious", WHAT, reason, (), (), name, 0)
    return code_findings


def module_file(finding: Finding) -> str:
    """Return the name of the Python file that has the class which a config names."""
    return finding.what.partition(".")[0] + ".py"


Verdict = Literal["dangerous", "suspicious", "unknown", "error", "nothing scanned", "clean"]

T = TypeVar("T")

AnyPath = str | os.PathLike[str]

POINTER = b"version https://git-lfs"
"""The first bytes of a file that stands for another one, which is not here."""

HASHED_NBYTES = 1 << 20
"""Bytes of a file that are read at a time to hash it."""

GIT = ".git"
"""Folders in which git keeps compressed copies of all files, with a few bytes before each. No loader reads from there."""

SKIPPED = 10_000
"""Skipped files that are named; the others are counted."""

TITLES = "torchscript torch-zip torch-package npz legacy npy zip tar gzip bzip2 xz lzma zlib zstd pickle config"
"""The format of a file that `open` does not know: the first of these that fits."""


@dataclass(frozen=True, slots=True)
class FileReport:
    """What one file holds. With an `error`, it was not read to its end and the findings are not complete."""

    path: str
    format: str
    """As `Checkpoint.format`; `pickle`, `npz`, `torch-package`, … for what `open` does not know; empty where it is not known."""
    findings: tuple[Finding, ...] = ()
    error: str | None = None
    streams: int = 0
    """Pickles that were read in it."""

    def verdict(self, *, strict: bool = False) -> Verdict:
        """The worst finding of this file in a word; what is allowed does not count."""
        counted = {finding.severity for finding in self.findings if not finding.allowed}
        if "dangerous" in counted:
            return "dangerous"
        if "suspicious" in counted or (strict and "unknown" in counted):
            return "suspicious"
        if "unknown" in counted:
            return "unknown"
        return "clean" if self.error is None else "error"


@dataclass(frozen=True, slots=True)
class ScanReport(NotebookResult):
    """What all the files hold."""

    reports: tuple[FileReport, ...]
    skipped: int = 0
    """Files in directories that no loader would do anything with."""
    skipped_paths: tuple[str, ...] = ()
    """The first ten thousand of them."""

    def _repr_html_(self) -> str:
        """The card of a notebook: a table of files, and one of their findings, the worst first."""
        files = [
            (one.path, one.format, one.verdict(), f"{len(one.findings):,}", one.error or "")
            for one in self.reports
        ]
        found = sorted(
            ((f, one.path) for one in self.reports for f in one.findings),
            key=lambda pair: ORDER.index(pair[0].severity),
        )
        rows = [
            (f"{f.severity}{' (allowed)' * f.allowed}", f.what, f.reason, path, f.stream)
            for f, path in found
        ]
        tables = [
            render_table(("file", "format", "verdict", "findings", "error"), files, len(files))
            if files
            else "",
            render_table(("severity", "what", "reason", "file", "stream"), rows, len(rows))
            if rows
            else "",
        ]
        return render_card(
            "ScanReport",
            [("verdict", self.verdict()), ("skipped", f"{self.skipped:,}")],
            tables=tables,
        )

    def count(self, severity: Severity, *, allowed: bool = False) -> int:
        """Findings of one severity, without those that are allowed; or of those alone."""
        return sum(
            f.severity == severity and f.allowed == allowed
            for file in self.reports
            for f in file.findings
        )

    def verdict(self, *, strict: bool = False) -> Verdict:
        """The first word for any file: `dangerous`, `suspicious`, `unknown`, `error` (something could not be read), `clean`.

        `nothing scanned` where there was no file to say anything about. With `strict`, unknown globals are suspicious.
        """
        words = {file.verdict(strict=strict) for file in self.reports}
        order: tuple[Verdict, ...] = ("dangerous", "suspicious", "unknown", "error", "clean")
        return next((word for word in order if word in words), "nothing scanned")


@validate_arguments
def scan(
    *paths: AnyPath | Iterable[AnyPath], limits: Limits | None = None, allow: AnyPath | Iterable[str] | None = None,
    code: bool = False, group: AnyGroup | None = None,
) -> ScanReport:  # fmt: skip
    """Report on files and directories, on this machine or in object stores (URLs), or lists of them.

    Nothing in them is run, and nothing about them raises: errors are part of the report. Of the ranks of a `group` each reads
    some of the files, and all get one report.

    `allow` is a file with one entry on a line, or the entries themselves: a pattern for `module.name`, or a path with the SHA-256
    of that file (`modeling_x.py sha256:…`). A finding that an entry allows is shown and does not count.

    Python files beside weights are findings if a loader looks for them, because a config names them. With `code=True` all of
    them are.

    Raises `StoreError` for a list that cannot be read, and `BadArgument` for an entry that makes no sense.
    """
    allowed = Allowlist.read(allow)
    with joined_ranks(group, "scan") as ranks:
        found = _Looked(limits or Limits(), ranks, code=code)
        parts: list[Reports] = []
        for path in paths:
            if isinstance(path, Iterable) and not isinstance(path, str | bytes | os.PathLike):
                parts += map(found.given, path)
            else:
                parts.append(found.given(path))
        found.look()
        files, skipped = list[FileReport](), list[str]()
        for report in (report for part in parts for report in part()):
            if isinstance(report, FileReport):
                files.append(report)
            else:
                skipped.append(report)
    acceptance = _Acceptance(allowed, limits or Limits())
    marked = tuple(replace(file, findings=acceptance.mark(file)) for file in files)
    return ScanReport(marked, len(skipped), tuple(skipped[:SKIPPED]))


class _Acceptance:
    """The findings that a list allows, and the files that it accepts whole. A file is hashed once."""

    def __init__(self, allowed: Allowlist, limits: Limits) -> None:
        self._allowed, self._limits = allowed, limits
        self._is_accepted: dict[str, bool] = {}

    def mark(self, file: FileReport) -> tuple[Finding, ...]:
        """Return the findings of a file, those marked that are allowed."""
        findings = file.findings
        if findings and self._accepts(file.path):
            return tuple([replace(finding, allowed=True) for finding in findings])
        folder = place_at(file.path).parent
        marked = []
        for finding in findings:
            # A config names code of its folder. Who accepts that code by its content accepts its name.
            is_allowed = self._allowed.allows(finding) or (
                finding.reason == LOCAL and self._accepts(_below(folder, module_file(finding)))
            )
            marked.append(replace(finding, allowed=True) if is_allowed else finding)
        return tuple(marked)

    def _accepts(self, path: str) -> bool:
        """Whether the list has the path of a file, and the SHA-256 of its content."""
        digests = self._allowed.digests_of(path)
        if not digests:
            return False
        if path not in self._is_accepted:
            try:
                self._is_accepted[path] = _sha256(path, self._limits) in digests
            except HoldfastError:
                # It is no file that can be read, so nobody has read it.
                self._is_accepted[path] = False
        return self._is_accepted[path]


def _sha256(path: str, limits: Limits) -> str:
    store = open_store(disambiguate_path(path), limits)
    try:
        (key,) = store.list()
        span = Span(OpenSource(store, limits=limits, threads=1), key, 0, store.size(key))
        digest = hashlib.sha256()
        for start in range(0, span.nbytes, HASHED_NBYTES):
            digest.update(span.read(start, start + HASHED_NBYTES))
        return digest.hexdigest()
    finally:
        store.close()


Reports = Callable[[], Iterable[FileReport | str]]
"""The reports of what was given, when all files have been looked at; a path where no loader would do anything with it."""


class _Looked:
    """The files that are looked at, and what was found in each."""

    def __init__(self, limits: Limits, ranks: Ranks, *, code: bool) -> None:
        self._limits, self._ranks, self._code = limits, ranks, code
        self._todo: dict[tuple[str, bool], FileReport | None] = {}
        """By path, and whether it was named; then it must be something."""

    def given(self, given: AnyPath) -> Reports:
        try:
            path = place_at(place_of(given)).normalize(self._limits)
        except HoldfastError as error:
            refused = FileReport(describe_place(given), "", error=str(error))
            return lambda: [refused]
        if not place_at(path).is_folder and path.endswith(INDEX_ENDS):
            # What an index names is loaded, and not the index itself.
            path = place_at(path).parent
        elif not place_at(path).is_folder:
            self._todo[path, True] = None
            return lambda: [cast("FileReport", self._todo[path, True])]
        return self._below(path)

    def look(self) -> None:
        wanted = [*self._todo]
        listed = functools.cache(lambda folder: place_at(folder).files())
        nbytes = (
            [_nbytes(path, listed) for path, _ in wanted]
            if self._ranks.size > 1
            else [0] * len(wanted)
        )

        def look(numbers: list[int]) -> list[FileReport | None]:
            chosen = [wanted[number] for number in numbers]
            return [_scan_path(path, self._limits, is_named=is_named) for path, is_named in chosen]

        kind = cast("type[FileReport | None]", FileReport | None)
        names = repr([os.path.basename(path) for path, _ in wanted])
        reports = divide_work(
            self._ranks, nbytes, look, kind, common=names.encode("utf-8", "surrogatepass")
        )
        self._todo.update(zip(wanted, reports, strict=True))

    def _below(self, directory: str) -> Reports:
        """Every file below a directory. A distributed checkpoint has one report for all its files, and so has a native directory.
        Python code is judged by what lies beside it."""
        problems: list[FileReport] = []
        folders: list[tuple[str, Sequence[str], list[str]]] = []
        walk = place_at(directory).walk(
            self._limits.files, lambda place, why: problems.append(FileReport(place, "", error=why))
        )
        repositories: list[str] = []
        for folder, names in walk:
            inner_folders = Path(folder).parts[len(Path(directory).parts) :]
            if GIT in inner_folders:
                repositories += [folder] if inner_folders[-1] == GIT else []
                continue
            # The files of a native directory, and those of a distributed checkpoint, are one checkpoint together.
            native, distributed = MANIFEST in names, any(map(_belongs, names))
            alone = [
                name
                for name in sorted(names)
                if not native and not (distributed and _belongs(name))
            ]
            places = [
                *([folder] if native or distributed else []),
                *(_below(folder, name) for name in alone),
            ]
            folders.append((folder, names, places))
            self._todo.update(dict.fromkeys((place, False) for place in places))

        def reports() -> Iterator[FileReport | str]:
            reported: set[str] = set()
            """Folders with a report."""
            for folder, names, places in folders:
                found = {place: self._todo[place, False] for place in places}
                findings = [
                    finding
                    for report in found.values()
                    if report is not None
                    for finding in report.findings
                ]
                here = any(report is not None for report in found.values())
                at = place_at(folder)
                code = model_code_findings(
                    at.name,
                    names,
                    findings,
                    has_weights=here,
                    has_weights_above=at.parent.rstrip("/") in reported,
                    report_all=self._code,
                )
                reported |= {folder.rstrip("/")} if here else set()
                for name in code:
                    found.setdefault(_below(folder, name), None)
                for place, report in found.items():
                    name = place_at(place).name
                    if name in code and place != folder:
                        made = report or FileReport(place, "python")
                        report = replace(made, findings=(*made.findings, code[name]))
                    yield report or place
            yield from repositories
            yield from problems

        return reports


def _nbytes(path: str, listed: Callable[[str], Mapping[str, int]]) -> int:
    """About how many bytes a file, or a folder that is one checkpoint, has; 0 where nobody can say."""
    place = place_at(path)
    try:
        return (
            sum(listed(path).values())
            if place.is_folder
            else listed(place.parent).get(place.name, 0)
        )
    except OSError:
        return 0


def _below(folder: str, name: str) -> str:
    return name if folder == os.curdir else join(folder, name)


def _belongs(name: str) -> bool:
    return is_index(name) or name.endswith(DATA_SUFFIX)


def _scan_path(path: str, limits: Limits, *, is_named: bool) -> FileReport | None:
    """Return the report of a file, or of a folder that is one checkpoint.

    Return None for a file that no loader would do anything with, unless somebody named it: then it
    must be something.
    """
    place = place_at(path)
    if not is_named and place.is_folder:
        return _guarded(path, lambda: _scan_folder(path, limits))
    if not is_named and not place.may_be_file:
        return None
    report = _guarded(path, lambda: _scan_bytes(path, limits))
    if report.format or report.findings or report.error:
        return report
    if not is_named:
        return None
    try:
        with open_built_in(disambiguate_path(path), limits):
            return report
    except UnknownFormat as error:
        plugins = find_plugins(FORMATS_GROUP)
        if not plugins:
            return replace(report, error=str(error))
        names = ", ".join(f"{plugin.name} of {plugin.distribution}" for plugin in plugins)
        findings = Findings()
        findings.add_other("unknown", "the format", f"{PLUGIN_CODE}: {names}", stream=WHOLE)
        return replace(report, findings=findings.sorted({}))
    except HoldfastError as error:
        return replace(report, error=str(error))


def _guarded(path: str, look: Callable[[], FileReport]) -> FileReport:
    """A scan of a thousand files does not end at the first surprise; even a bug of ours is reported as an error of this file."""
    try:
        return look()
    except Exception as error:
        return FileReport(path, "", error=_error_text(error))


def _keeping(walk: FileScan, look: Callable[[], T]) -> T | None:
    """The result of `look`; None where something unforeseen stops it, which is an error of the file. Findings so far stay."""
    try:
        return look()
    except Exception as error:
        walk.found.error(_error_text(error))
        return None


def _error_text(error: Exception) -> str:
    return str(error) if isinstance(error, HoldfastError) else f"{type(error).__name__}: {error}"


def _scan_bytes(path: str, limits: Limits) -> FileReport:
    store = open_store(disambiguate_path(path), limits)
    try:
        source = OpenSource(store, limits=limits, threads=1, mapped=False)
        (key,) = store.list()
        span = Span(source, key, 0, store.size(key))
        name = place_at(path).name
        walk = FileScan(_for_index(limits) if is_index(name) else limits, span.nbytes)
        _keeping(walk, lambda: walk.look(span, WHOLE))
        if is_config(name) and _keeping(walk, lambda: look_at_config(span, name, walk.found)):
            walk.kinds.add("config")
        opened = _open(path, limits)
        if span.read(0, len(POINTER)) == POINTER:
            opened = replace(
                opened, refusal="a Git LFS pointer, not the file itself; run `git lfs pull`"
            )
        paths = opened.paths or {}
        if not paths and "pickle" in walk.kinds and span.nbytes <= walk.limits.pickle_nbytes:
            with suppress(HoldfastError):
                content = span.read(0, span.nbytes)
                pickled = interpret(content, PlainTable(), limits=walk.limits, stream="pickle")
                paths = places_of(pickled.value)
    finally:
        store.close()
    return _report(path, walk, opened, paths=paths)


def _for_index(limits: Limits) -> Limits:
    return replace(limits, pickle_nbytes=max(limits.pickle_nbytes, limits.dcp_metadata_nbytes))


class OpenOutcome(Value, frozen=True):
    format: str = ""
    refusal: str | None = None
    """The reason why `open` refused it; None where it did not, or where `open` does not know such files."""
    paths: dict[str, tuple[str, ...]] | None = None
    templates: tuple[str, ...] = ()
    """Names of metadata that is a template, which programs run when they load the file."""
    other: bool = False
    """Whether it was refused for what it is, and not for how it is written."""


TEMPLATE_REASON = (
    "a template that programs render with Jinja, which is a language: "
    "it is shown by `holdfast show`, and was not judged"
)


UNKNOWN_CODE = (
    "Holdfast reads the tensors of this format and does not know whether it can contain code"
)


PLUGIN_CODE = "it is none of Holdfast's formats, and scan calls no format of other packages"


def _report_unknown_format(format: str, findings: Findings) -> None:
    """Add a finding if the entry of a format does not say that `scan` knows all code in its files."""
    if format and format_of(format).code == "unknown":
        findings.add_other("unknown", f"the format {format}", UNKNOWN_CODE, stream=WHOLE)


def _open(path: str, limits: Limits) -> OpenOutcome:
    if path.endswith(INDEX_ENDS):
        # It would open its folder, whose files are scanned one by one.
        return OpenOutcome()
    try:
        with open_built_in(disambiguate_path(path), limits) as checkpoint:
            paths = places_of(checkpoint.tree) if checkpoint.foreign else {}
            paths |= {str(item.what): item.paths for item in checkpoint.foreign if item.paths}
            template = format_of(checkpoint.format).templates
            templates = (
                tuple(name for name in checkpoint.metadata if template in name) if template else ()
            )
            return OpenOutcome(checkpoint.format, None, paths, templates)
    except UnknownFormat:
        return OpenOutcome()
    except HoldfastError as error:
        return OpenOutcome("", str(error), other=isinstance(error, Unsupported))


def _report(
    path: str, walk: FileScan, opened: OpenOutcome, *, paths: dict[str, tuple[str, ...]]
) -> FileReport:
    for name in opened.templates:
        walk.found.add_other("unknown", name, TEMPLATE_REASON, stream=WHOLE)
    _report_unknown_format(opened.format, walk.found)
    findings = walk.found.sorted(paths)
    errors = list(walk.found.errors)
    other = walk.kinds & {"zip", "tar"} and not walk.torch_zip
    if (
        other
        and not opened.format
        and not walk.streams
        and not findings
        and not walk.kinds & {"npz", "torch-package"}
    ):
        # An archive in which there is nothing for any loader: a wheel, a document, pictures.
        ordinary = not errors or ("refused" in walk.kinds and len(errors) == 1)
        return FileReport(path, "", error=None if ordinary else _join_errors(errors))
    # An array of something that is no tensor, which was walked to its end.
    array = "npy" in walk.kinds and opened.other
    # A pickle and nothing else, which was walked to its end: `open` reads fewer of those than loaders do.
    bare_pickle = "pickle" in walk.kinds and len(walk.kinds) == 1
    if (
        opened.refusal is not None
        and not errors
        and not array
        and not bare_pickle
        and not (other and "refused" not in walk.kinds)
    ):
        errors.append(opened.refusal)
    if not opened.format and walk.trailing is not None:
        errors.append(walk.trailing)
    known = {"torch-zip" if kind == "zip" and walk.torch_zip else kind for kind in walk.kinds}
    title = opened.format or next((kind for kind in TITLES.split() if kind in known), "")
    return FileReport(path, title, findings, _join_errors(errors), walk.streams)


def _join_errors(errors: list[str]) -> str | None:
    return "; ".join(dict.fromkeys(errors)) or None


def _scan_folder(folder: str, limits: Limits) -> FileReport:
    found = place_at(folder).files()
    native = MANIFEST in found
    sizes = {name: nbytes for name, nbytes in found.items() if native or _belongs(name)}
    walk = FileScan(limits, sum(sizes.values()))
    stores = []
    spans: dict[str, Span] = {}
    try:
        for name in sizes:
            store = open_store(disambiguate_path(_below(folder, name)), limits)
            stores.append(store)
            (key,) = store.list()
            spans[name] = Span(OpenSource(store, limits=limits, threads=1), key, 0, store.size(key))
            walk.limits = _for_index(limits) if is_index(name) else limits
            kinds = _keeping(walk, functools.partial(walk.look, spans[name], name))
            if is_config(name):
                _keeping(walk, functools.partial(look_at_config, spans[name], name, walk.found))
            if not kinds and not native and spans[name].nbytes:
                walk.found.error(f"{name}: neither a pickle nor an archive; not read")
        walk.limits = limits
        _keeping(walk, lambda: _scan_items(walk, spans))
    finally:
        for store in stores:
            store.close()
    opened = _open(folder, limits)
    _report_unknown_format(opened.format, walk.found)
    findings = walk.found.sorted(opened.paths or {})
    errors = [*walk.found.errors, *([opened.refusal] if opened.refusal else [])]
    if not opened.format and opened.refusal is None:
        errors.append("the index of a distributed checkpoint, or its data, without the other")
    return FileReport(folder, opened.format, findings, _join_errors(errors), walk.streams)


def _scan_items(walk: FileScan, spans: dict[str, Span]) -> None:
    """Scan the items that the index names, but for the archives that were found in the data files."""
    budget = 2 * sum(span.nbytes for span in spans.values())
    done: set[tuple[object, object, object]] = set()
    for item in walk.items:
        name, offset, length = (item.get(field) for field in ("relative_path", "offset", "length"))
        if (
            type(name) is not str
            or type(offset) is not int
            or type(length) is not int
            or (name, offset, length) in done
        ):
            continue
        done.add((name, offset, length))
        try:
            check_key(name)
        except HoldfastError:
            walk.found.add_other(
                "suspicious",
                f"an item in the file {name[:200]!r}",
                "reads a file outside of the checkpoint",
                stream=".metadata",
            )
            continue
        span = spans.get(name)
        if span is None or (span.key, offset, offset + length) in walk.zips:
            continue
        budget -= max(length, 0)
        if budget < 0:
            walk.found.error("the items of the index overlap; not all of them were read")
            return
        part = span.part(offset, offset + length)
        if not walk.look(part, f"{name} at byte {offset:,}", 1) and part.nbytes:
            walk.found.error(
                f"{name}: the item at byte {offset:,} is neither a pickle nor an archive; not read"
            )
