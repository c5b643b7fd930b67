"""The strict zip: archives that every reader sees alike, and archives as torch writes them.

layout       where the fields lie; the end and the central directory, read; what is found: `Archive` and `ZipRecord`
reader       the reader: does every record say at its place what the directory says?
writer       a stored zip, exactly as torch's writer lays it out
"""
