"""A hook of mkdocs: the version and the repository of the package, in the header and the footer."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from holdfast.core.version import VERSION

PROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"


def on_config(config: Any) -> Any:  # noqa: ANN401  # the type is mkdocs's own
    """Fill the fields that the theme shows."""
    urls = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]["urls"]
    config["repo_url"] = urls["Repository"]
    config["repo_name"] = f"Holdfast {VERSION}"
    config["site_url"] = f"{urls['Documentation']}/"
    config["copyright"] = f"Holdfast {VERSION} · Apache-2.0"
    return config
