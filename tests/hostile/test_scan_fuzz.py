"""Damaged and spliced files: `scan` raises nothing, and is never clean where an unpickler would have called something.

The oracle is CPython's own unpickler, written in Python, with every class replaced by one that only notes what is done to it: an
implementation of the opcodes that owes nothing to ours.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import re
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.opaque import Global
from holdfast.formats.pickle.table import modern
from holdfast.verbs.scan import scan
from holdfast.verbs.severity import judge
from tests.sampling import examples

from .scan_attacks import ATTACKS
from .scan_attacks import FUNCTIONS as NAMED

OURS = re.compile(r"(?:^|; )(?:[A-Z]\w*(?:Error|Exception|Exit|Interrupt)): ")
"""How the report shows an exception that is not one of ours: a bug."""


class Oracle(pickle._Unpickler):  # type: ignore[name-defined,misc]
    """Notes each call of something that is not harmless; imports nothing."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self.called: list[str] = []

    def find_class(self, module: str, name: str) -> object:
        place = Global(*modern(str(module), str(name)))
        called = self.called
        harmless = judge(place, ("call", "new", "build", "append", "setitem", "additem"))[0] in (
            "safe",
            "known",
        )

        def note(*_: object, **__: object) -> None:
            if not harmless and len(called) < 10:
                called.append(str(place))

        class Stub:
            def __new__(cls, *args: object, **kwargs: object) -> Stub:
                note()
                return super().__new__(cls)

            def __init__(self, *args: object, **kwargs: object) -> None:
                pass

            append = extend = add = __setitem__ = __setstate__ = note

            def __call__(self, *args: object, **kwargs: object) -> Stub:
                note()
                return self

        return Stub

    def persistent_load(self, pid: object) -> object:
        return None


def oracle(data: bytes) -> list[str]:
    """What would have been called by the time that CPython is through with the pickles of some bytes."""
    unpickler = Oracle(data)
    with contextlib.suppress(Exception):
        unpickler.load()
    return unpickler.called


def scanned(data: bytes) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "x")
        path.write_bytes(data)
        report = scan(path)
    (file,) = report.reports
    assert not OURS.search(file.error or ""), file.error
    return report.verdict()


def contents() -> list[bytes]:
    made = [attack.make("/m") for attack in ATTACKS]
    benign = [
        pickle.dumps({"a": [1, 2.5, {"b": (None, True)}], "c": {1, 2}, "d": b"x", "e": 1 << 70}, p)
        for p in range(6)
    ]
    return [
        content for content in made if isinstance(content, bytes) and len(content) < 6000
    ] + benign


CONTENTS = contents()
PICKLES = [
    content for content in CONTENTS if content[:1] in b"\x80c(NI" and b"PK\3\4" not in content
]


@st.composite
def damaged(draw: st.DrawFn, made: list[bytes]) -> bytes:
    """One file, or a piece of one spliced into another, with a few bytes changed."""
    data = bytearray(draw(st.sampled_from(made)))
    if draw(st.booleans()):
        other = draw(st.sampled_from(made))
        start = draw(st.integers(0, len(other)))
        at = draw(st.integers(0, len(data)))
        data[at:at] = other[start : start + draw(st.integers(0, 200))]
    for _ in range(draw(st.integers(0, 4))):
        if data:
            at = draw(st.integers(0, len(data) - 1))
            match draw(st.integers(0, 3)):
                case 0:
                    data[at] = draw(st.integers(0, 255))
                case 1:
                    del data[at : at + draw(st.integers(1, 8))]
                case 2:
                    data[at:at] = draw(
                        st.sampled_from(
                            [
                                b"0",
                                b"2",
                                b"(",
                                b"t",
                                b"R",
                                b".",
                                b"\x94",
                                b"\x81",
                                b"b",
                                b"a",
                                b"e",
                                b"N",
                                b")",
                            ]
                        )
                    )
                case _:
                    del data[at:]
    return bytes(data)


@settings(max_examples=examples(200))
@given(damaged(PICKLES))
def test_never_clean_where_cpython_calls(data: bytes) -> None:
    called = oracle(data)
    verdict = scanned(data)
    if called:
        # An error where our machine stops earlier: Python's unpickler takes a line that has no end for a name.
        assert verdict in ("dangerous", "suspicious", "unknown", "error"), (verdict, called)


@settings(max_examples=examples(100))
@given(damaged(CONTENTS))
def test_damage_raises_nothing(data: bytes) -> None:
    scanned(data)


@settings(max_examples=examples(100))
@given(st.binary(max_size=300))
def test_random_bytes(data: bytes) -> None:
    called = oracle(data)
    verdict = scanned(data)
    assert not called or verdict != "clean"


def test_the_oracle_sees_calls() -> None:
    assert len(NAMED) > 50
    assert oracle(b"cos\nsystem\n(S'x'\ntR.") == ["os.system"]
    assert oracle(pickle.dumps([1, 2, 3])) == []
    assert not [c for c in PICKLES if not oracle(c) and c[:2] == b"cp" and b"tR" in c]


@pytest.mark.parametrize(
    "name",
    [
        b"LICENSE",
        b"csv,with,commas\nand,rows\n",
        b"import os\nos.system('x')\n",
        b"(c) 2020 Somebody\n",
        b"I am a text.\n",
        b"N.B. a note\n",
        b"Version 1.\n",
        b"]\n",
        b"{}\n",
        b"0.\n",
        b"\n",
        b"Some. text",
        b"cat\ndog\nbird\n",
    ],
)
def test_texts_are_no_pickles(name: bytes, tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(name)
    report = scan(tmp_path)
    assert (report.verdict(), report.skipped) == ("nothing scanned", 1), report
