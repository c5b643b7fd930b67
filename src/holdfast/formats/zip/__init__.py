"""The strict zip: archives that every reader sees alike, and archives as torch writes them.

layout       where the fields lie; what is found: `Archive` and `Record`
directory    the end of an archive and its central directory, with names and sizes
reader       the reader: does every record say at its place what the directory says?
writer       a stored zip, exactly as torch's writer lays it out
"""
