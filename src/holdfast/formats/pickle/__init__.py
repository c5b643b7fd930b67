"""A closed pickle interpreter: opcodes become inert data; nothing is imported and nothing is called.

machine     the loop over the opcodes
rare        what the loop works on: stack, marks, memo, position; the opcodes that are seldom met, and as a scan reads them
frames      the bytes that the C unpickler takes from a file with misleading frames, for a scan
text        numbers and strings written as text      recording   what a pickle would do, for a scan
table       what a global, a call, a BUILD becomes; Python 2 names; the limits on keys and copies that cost more than their bytes
plain       rows for plain Python                    arrays      rows for numpy
writer      plain values and numpy's to a pickle, byte for byte as CPython writes it
"""
