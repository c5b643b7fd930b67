"""A closed pickle interpreter: opcodes become inert data; nothing is imported and nothing is called.

machine     the loop over the opcodes                state       what the loop works on: stack, marks, memo, place
rare        the opcodes that are seldom met          text        numbers and strings written as text
table       what a global, a call, a BUILD becomes   names       Python 2 names
plain       rows for plain Python                    arrays      rows for numpy
spending    keys and copies that would cost more than the bytes that ask for them
"""

from __future__ import annotations

from holdfast.formats.pickle.machine import Interpreted, interpret, interpret_whole
from holdfast.formats.pickle.plain import PlainTable
from holdfast.formats.pickle.table import Pending, Table

__all__ = ["Interpreted", "Pending", "PlainTable", "Table", "interpret", "interpret_whole"]
