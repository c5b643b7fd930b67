"""What several proofs ask for."""

from __future__ import annotations

import pytest

from holdfast.engine.commit import temporaries


@pytest.fixture
def everything_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is replaced is held open while it loses its name, however small, and closed by the thread that saves."""
    monkeypatch.setattr(temporaries, "LARGE_NBYTES", 0)
    monkeypatch.setattr(temporaries, "start_thread", lambda run, *, name, daemon: None)
