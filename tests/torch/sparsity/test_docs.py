"""What `docs/sparsity.md` shows runs."""

from __future__ import annotations

import re
from pathlib import Path

import torch

DOCS = Path(__file__).resolve().parents[3] / "docs" / "sparsity.md"


def test_the_example(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for code in re.findall(r"^```python\n(.*?)^```$", DOCS.read_text(), re.MULTILINE | re.DOTALL):
        exec(compile(code, str(DOCS), "exec"), names)
    saved = torch.load(tmp_path / "run.pt", weights_only=True)
    assert set(saved) == {"model", "sparsifier"}
    zeros = (names["model"][0].weight == 0).double().mean()
    assert abs(zeros - 0.9) < 0.01
