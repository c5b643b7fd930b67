"""What a person said is known to them: patterns for `module.name`, as in file names.

    # one a line; empty lines and what follows a # do not count
    mymodel.*
    transformers.training_args.TrainingArguments

What fits is marked, shown as allowed, and does not count. It never disappears, whatever its severity. Other code that a file
carries (Python source, native code, several formats in one) has no module and cannot be allowed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fnmatch import translate

from holdfast.errors import StoreError
from holdfast.inspect.scanning.findings import Finding
from holdfast.stores.paths import local_path

__all__ = ["Allowed"]

MOST_NBYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Allowed:
    """Patterns; none by default."""

    patterns: tuple[re.Pattern[str], ...] = ()

    @classmethod
    def given(cls, allow: str | os.PathLike[str] | Iterable[str] | None) -> Allowed:
        """From a file, or from patterns. Raises `StoreError` for a file that cannot be read as text."""
        if allow is None:
            return cls()
        lines = _lines(allow) if isinstance(allow, str | os.PathLike) else list(allow)
        texts = [line.partition("#")[0].strip() for line in lines]
        return cls(tuple(re.compile(translate(text)) for text in texts if text))

    def mark(self, findings: tuple[Finding, ...]) -> tuple[Finding, ...]:
        """The findings, those that fit marked as allowed."""
        if not self.patterns:
            return findings
        return tuple(replace(f, allowed=True) if f.uses and self._fits(f.what) else f for f in findings)

    def _fits(self, what: str) -> bool:
        return any(pattern.match(what) for pattern in self.patterns)


def _lines(given: str | os.PathLike[str]) -> list[str]:
    path = local_path(given)
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(MOST_NBYTES + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise StoreError(f"the list of what is allowed cannot be read: {error}", file=path) from None
    if len(text) > MOST_NBYTES:
        raise StoreError(f"a list of what is allowed of more than {MOST_NBYTES:,} characters", file=path)
    return text.splitlines()
