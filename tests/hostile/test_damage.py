"""Golden files that are cut off at every byte, and in which every header byte is flipped.

What must come out is a Holdfast error or the same tensors, never anything else.

Two things cannot be told from the truth, and the tests say what they ask instead:

- safetensors headers, legacy streams, tars and zips without checksums (`UNCHECKED`) carry nothing by which a flipped letter in
  a name, or a flipped digit that happens to fit, could be noticed: another valid file is what the flip made. There the tests
  ask only that nothing but Holdfast errors comes out, and that all that is found can be listed, walked and read.
- A flip in bytes that nobody reads (alignment padding, DOS times, the version that made a zip) changes nothing at all.
"""

from __future__ import annotations

import pytest

from .golden import FILES, FOLDERS, header_positions, look

UNCHECKED = {
    "no_crc.pt",
    "legacy.pt",
    "legacy_module.pt",
    "legacy_training.pth.tar",
    "legacy_untyped.pt",
    "tar.pt",
}
"""Golden files of torch without checksums over their headers; safetensors never has any."""

MASKS = (0x01, 0xFF, 0x80, 0x20)
"""Bits that are flipped: in turn, so that each byte is flipped once and neighbours differently."""

ALL = {**FILES, **FOLDERS}


def unchecked(name: str) -> bool:
    return name in UNCHECKED or not name.endswith((".pt", ".pth.tar"))


@pytest.mark.parametrize("name", FILES)
def test_truncated_everywhere(name):
    raw = FILES[name]
    whole = look(raw)
    assert whole is not None
    wrong = [
        stop
        for stop in range(len(raw))
        if (found := look(raw[:stop], whole)) is not None and found != whole
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("name", "part"), [(name, part) for name, files in FOLDERS.items() for part in files]
)
def test_truncated_everywhere_in_a_folder(name, part):
    files = FOLDERS[name]
    whole = look(files)
    assert whole is not None
    for stop in range(len(files[part])):
        found = look({**files, part: files[part][:stop]}, whole)
        assert found is None or found == whole, stop


@pytest.mark.parametrize("name", ALL)
def test_every_header_byte_flipped(name):
    content = ALL[name]
    whole = look(content)
    assert whole is not None
    wrong = []
    for key, position in header_positions(content):
        damaged = flipped(content, key, position, MASKS[position % len(MASKS)])
        found = look(damaged, whole)
        if found is not None and found != whole and not unchecked(name):
            wrong.append((key, position))
    assert wrong == []


def flipped(
    content: bytes | dict[str, bytes], key: str, position: int, mask: int
) -> bytes | dict[str, bytes]:
    if isinstance(content, dict):
        return {**content, key: flipped(content[key], key, position, mask)}
    return b"".join(
        (content[:position], bytes([content[position] ^ mask]), content[position + 1 :])
    )


def test_a_flip_in_a_checked_pickle_is_noticed():
    """The test above could fail: some flips would give another valid pickle, were it not for the checksum."""
    raw = FILES["plain.pt"]
    at = raw.index(b"embed.weight")
    assert look(flipped(raw, "", at, 0x01)) is None
