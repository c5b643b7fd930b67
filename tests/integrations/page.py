"""The snippets of docs/integrations.md that need a framework: run here, where the frameworks are."""

from __future__ import annotations

from tests.pages import ROOT, blocks

PAGE = ROOT / "docs" / "integrations.md"


def run_page(reason: str) -> dict[str, object]:
    """Run the one block that the page does not run for a reason, and give what it has named."""
    (block,) = (block for block in blocks(PAGE.read_text()) if block.marks.get("not run") == reason)
    names: dict[str, object] = {"__name__": "page"}
    exec(compile("\n" * (block.line - 1) + block.text, str(PAGE), "exec"), names)
    return names
