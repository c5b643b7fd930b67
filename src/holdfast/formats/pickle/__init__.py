"""A closed pickle interpreter: opcodes become inert data; nothing is imported and nothing is called.

machine     the loop over the opcodes                state       what the loop works on: stack, marks, memo, place
rare        the opcodes that are seldom met, and as a scan reads them
frames      the bytes that the C unpickler takes from a file with misleading frames, for a scan
text        numbers and strings written as text      recording   what a pickle would do, for a scan
table       what a global, a call, a BUILD becomes; Python 2 names
plain       rows for plain Python                    arrays      rows for numpy
spending    keys and copies that would cost more than the bytes that ask for them
writer      plain values and numpy's to a pickle, byte for byte as CPython writes it
"""
