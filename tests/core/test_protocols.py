"""The classes with which the layers talk to each other."""

from __future__ import annotations

import inspect
import pydoc

import pytest

from holdfast.core import protocols

CLASSES = [
    value
    for value in vars(protocols).values()
    if inspect.isclass(value) and value.__module__ == protocols.__name__
]


@pytest.mark.parametrize("protocol", CLASSES, ids=lambda protocol: protocol.__name__)
def test_help_of_a_class_can_be_shown(protocol: type):
    """Some annotations are imported for type checkers only, and help evaluates them."""
    text = pydoc.plain(pydoc.render_doc(protocol))
    assert protocol.__name__ in text
