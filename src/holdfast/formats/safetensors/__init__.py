"""safetensors: one file, or a directory of them with or without an index.

read         one file                          directory    several, and the index that says which tensor is where
write        one file or a directory           schema       the header: from bytes to entries, and what their numbers must satisfy
record       what is noted in `__metadata__`: checksums, and which piece of a tensor a file has
"""
