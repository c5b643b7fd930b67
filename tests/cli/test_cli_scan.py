"""What `holdfast scan` prints."""

from __future__ import annotations

import json

from holdfast.api.scan import FileReport, Finding, ScanReport
from holdfast.cli.lines import plain
from holdfast.cli.scan import scan_lines


def test_clean_suspicious_and_error(run, golden_dir):
    clean, evil = golden_dir / "files" / "plain.pt", golden_dir / "hostile" / "os_system.pt"
    broken = golden_dir / "hostile" / "broken_tail.pt"
    code, out, _ = run("scan", clean)
    assert (code, out) == (0, f"{clean}  torch-zip  clean\n1 file scanned · clean\n")
    code, out, _ = run("scan", clean, evil)
    assert code == 1
    assert "dangerous  posix.system('echo you have been pwned')  call  data.pkl byte" in out
    code, out, err = run("scan", evil, broken)
    assert (code, err) == (2, "")
    assert "1 dangerous · 1 error" in out


def test_strict(run, golden_dir):
    path = golden_dir / "files" / "module.pt"
    assert run("scan", path)[0] == 0
    assert run("scan", path, "--strict")[0] == 1


def test_json(run, golden_dir):
    code, out, _ = run("scan", golden_dir / "hostile", "--json")
    assert code == 2
    parsed = json.loads(out)
    assert parsed["verdict"] == "error"
    assert parsed["schema"] == 1
    findings = [f for file in parsed["files"] for f in file["findings"]]
    assert {"severity", "what", "reason", "uses", "calls", "stream", "offset", "paths"} == set(findings[0])


def test_hostile_text_is_escaped():
    nasty = "x\x1b[2J\u202e\n"
    finding = Finding("dangerous", nasty, "runs commands", ("call",), (nasty, nasty), nasty, 3, (nasty,))
    report = ScanReport((FileReport(nasty, "pickle", (finding,) * 60), FileReport(nasty, "", error=nasty)))
    lines = [plain(line) for line in scan_lines(report)]
    assert all(line.isprintable() for line in lines)
    assert any("10 more" in line for line in lines)
