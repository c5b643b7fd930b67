"""Boxes made of offsets and sizes."""

from __future__ import annotations

import pytest

from holdfast.core.box import Box


def test_a_box_has_as_many_offsets_as_sizes():
    assert Box.from_offsets((1, 2), (3, 4)) == Box((1, 2), (4, 6))
    with pytest.raises(ValueError, match="as many offsets as sizes"):
        Box.from_offsets((1, 2), (3,))
    with pytest.raises(ValueError, match="as many offsets as sizes"):
        Box.from_offsets((1,), (3, 4))
