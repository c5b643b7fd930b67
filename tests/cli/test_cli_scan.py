"""What `holdfast scan` prints, and the codes that it exits with."""

from __future__ import annotations

import json
import os
import pickle
import re

from tests.pages import ROOT

from holdfast.cli.scan import scan_lines
from holdfast.cli.text import plain
from holdfast.formats import FORMATS, file_suffixes
from holdfast.verbs.scan import FileReport, ScanReport
from holdfast.verbs.scanning.findings import Finding


def test_clean_dangerous_and_error(run, golden_dir):
    clean, evil = golden_dir / "files" / "plain.pt", golden_dir / "hostile" / "os_system.pt"
    broken = golden_dir / "hostile" / "broken_tail.pt"
    code, out, _ = run("scan", clean)
    assert (code, out) == (0, f"{clean}  torch-zip  clean\n1 file scanned · clean\n")
    code, out, _ = run("scan", clean, evil)
    assert code == 1
    assert "dangerous  posix.system('echo you have been pwned')  call  data.pkl byte" in out
    code, out, err = run("scan", evil, broken)
    assert (code, err) == (1, "")  # an error takes no finding away
    assert "2 dangerous · 1 error" in out


def test_an_error_alone(run, tmp_path):
    (tmp_path / "x.pt").write_bytes(b"PK\3\4 and nothing else")
    assert run("scan", tmp_path)[0] == 2


def test_a_known_class_takes_one_line(run, golden_dir):
    code, out, _ = run("scan", golden_dir / "files" / "jagged.pt")
    assert code == 0
    assert out.splitlines()[0].endswith("jagged.pt  torch-zip  clean  (1 known)")
    assert len(out.splitlines()) == 2
    assert "_DimRange" in run("scan", golden_dir / "files" / "jagged.pt", "--all")[1]


def test_unknown_and_strict(run, golden_dir):
    path = golden_dir / "files" / "module.pt"
    assert run("scan", path)[0] == 3
    assert run("scan", path, "--strict")[0] == 1


def test_nothing_scanned(run, tmp_path):
    (tmp_path / "README.md").write_text("A text.")
    code, out, _ = run("scan", tmp_path)
    assert code == 4
    assert out.startswith("nothing scanned · 1 other file skipped")
    assert "README.md" in out


def test_allowed_ones_are_shown_and_do_not_count(run, golden_dir, tmp_path):
    allow = tmp_path / "allow.txt"
    allow.write_text("# ours\ntrainer.*\n")
    code, out, _ = run("scan", golden_dir / "files" / "module.pt", "--allow", allow)
    assert code == 0
    assert "unknown    allowed  trainer.Net" in out
    allow.write_text("posix.system\n")
    code, out, _ = run("scan", golden_dir / "hostile" / "os_system.pt", "--allow", allow)
    assert code == 0
    assert "dangerous  allowed  posix.system" in out
    code, _, err = run("scan", golden_dir / "files" / "plain.pt", "--allow", tmp_path / "nope")
    assert code == 2
    assert "allowed" in err


def test_json(run, golden_dir):
    code, out, _ = run("scan", golden_dir / "hostile", "--json")
    assert code == 1
    parsed = json.loads(out)
    assert (parsed["schema"], parsed["verdict"], parsed["exit_code"]) == (2, "dangerous", 1)
    assert set(parsed) == {"schema", "verdict", "exit_code", "skipped", "skipped_paths", "files"}
    assert [p.rpartition("/")[2] for p in parsed["skipped_paths"]] == ["expected.json"]
    assert set(parsed["files"][0]) == {"path", "format", "verdict", "error", "streams", "findings"}
    findings = [f for file in parsed["files"] for f in file["findings"]]
    assert {
        "severity",
        "what",
        "reason",
        "uses",
        "calls",
        "stream",
        "offset",
        "paths",
        "allowed",
    } == set(findings[0])


def test_sarif(run, golden_dir, tmp_path):
    broken = tmp_path / "a b.pkl"
    broken.write_bytes(pickle.dumps([os.getcwd])[:-3])
    code, out, _ = run("scan", golden_dir / "hostile" / "os_system.pt", broken, "--sarif")
    assert code == 1
    parsed = json.loads(out)
    assert parsed["version"] == "2.1.0"
    (ran,) = parsed["runs"]
    assert ran["invocations"] == [{"executionSuccessful": False}]
    assert {r["ruleId"] for r in ran["results"]} == {"holdfast/dangerous", "holdfast/unread"}
    assert {r["id"] for r in ran["tool"]["driver"]["rules"]} >= {
        r["ruleId"] for r in ran["results"]
    }
    uris = [
        r["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] for r in ran["results"]
    ]
    assert uris[-1] == f"file://{tmp_path}/a%20b.pkl"


def test_hostile_text_is_escaped():
    nasty = "x\x1b[2J\u202e\n"
    finding = Finding(
        "dangerous", nasty, "runs commands", ("call",), (nasty, nasty), nasty, 3, (nasty,)
    )
    report = ScanReport(
        (FileReport(nasty, "pickle", (finding,) * 60), FileReport(nasty, "", error=nasty)),
        1,
        (nasty,),
    )
    lines = [plain(line) for line in scan_lines(report)]
    assert all(line.isprintable() for line in lines)
    assert any("10 more" in line for line in lines)


def test_the_pre_commit_hook_scans_files_of_every_format_that_scan_judges(run, golden_dir):
    hook = (ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8")
    (pattern,) = re.findall(r"^  files: '(.*)'$", hook, re.MULTILINE)
    (entry,) = re.findall(r"^  entry: holdfast (.*)$", hook, re.MULTILINE)
    # A hook that calls every ONNX model unknown would stop every commit of one.
    unjudged = {suffix for entry in FORMATS if entry.code == "unknown" for suffix in entry.suffixes}
    for suffix in filter(None, file_suffixes()):
        assert bool(re.search(pattern, f"models/m{suffix}")) == (suffix not in unjudged), suffix
    for name in ("train.py", "README.md", "models/config.json", "pt", "a.pt.txt"):
        assert not re.search(pattern, name), name
    assert run(entry, golden_dir / "files" / "plain.pt")[0] == 0
    assert run(entry, golden_dir / "hostile" / "os_system.pt")[0] == 1
