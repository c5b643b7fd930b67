"""safetensors: one file, or a directory of them with or without an index.

read         one file
directory    several, and the index that says which tensor is where
write        one file or a directory
schema       the header: from bytes to entries, and the checks of their numbers
record       Holdfast's entry in `__metadata__`: checksums; and the piece of a tensor that a file has
"""
