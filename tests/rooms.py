"""Tells which test files exercise a room of the source, for `make test ROOM=formats/dcp`.

    python -m tests.rooms formats/dcp

A room is a folder of `src/holdfast`. Its tests are those in the folder of the same name, those that
prove its guarantees (`PROOFS`), and those that `rooms.json` lists: they run lines of the room that no
test before them in the list runs.
`make costs` measures that and writes the list anew, and `tests/test_sampling.py` checks it.
"""

from __future__ import annotations

import difflib
import json
import sys
from pathlib import Path, PurePosixPath

TESTS = Path(__file__).resolve().parent
ROOMS_FILE = TESTS / "rooms.json"

PROOFS = {
    "engine/commit": ["tests/crash/test_commit.py", "tests/crash/test_crash_states.py"],
    "engine/targets": ["tests/crash/test_crash_states.py"],
    "extras/runs": ["tests/crash/test_runs.py"],
    "verbs/seals": ["tests/crash/test_seal.py"],
}
"""Tests that notice a lost fsync or a wrong order of calls. They run no line that others do not run."""


def room_of(module: str) -> str:
    """Return the room of a module: its folder, with the subfolder in engine, extras, formats, torch and verbs.

    >>> room_of("formats/dcp/read.py"), room_of("core/box.py"), room_of("errors.py")
    ('formats/dcp', 'core', '.')
    """
    folders = PurePosixPath(module).parts[:-1]
    if not folders:
        return "."
    if folders[0] in ("engine", "extras", "formats", "torch", "verbs"):
        return "/".join(folders[:2])
    return folders[0]


def own_files_of_room(room: str) -> list[str]:
    """Return the test files in the folder of the same name, and the proofs of the room."""
    if room == ".":
        return []
    files = {f"tests/{room}/{path.name}" for path in (TESTS / room).glob("test_*.py")}
    return sorted(files.union(PROOFS.get(room, ())))


def read_rooms() -> dict[str, list[str]]:
    """Return the test files of every room that are not in its own folder, the most useful first."""
    rooms: dict[str, list[str]] = json.loads(ROOMS_FILE.read_text())
    return rooms


def files_of_room(room: str) -> list[str]:
    """Return the test files of a room.

    Raises:
        SystemExit: There is no such room. The message names rooms with similar names.
    """
    rooms = read_rooms()
    name = room.strip("/").removeprefix("src/holdfast/")
    if name not in rooms:
        similar = ", ".join(difflib.get_close_matches(name, rooms) or sorted(rooms))
        raise SystemExit(f"there is no room {room!r} in src/holdfast; did you mean {similar}?")
    own_files = own_files_of_room(name)
    return own_files + [file for file in rooms[name] if file not in own_files]


if __name__ == "__main__":
    print(*files_of_room(sys.argv[1]))
