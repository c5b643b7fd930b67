"""safetensors: one file, or a directory of files with or without an index.

    byte 0         8                                   8 + N                          end
         ├─────────┼───────────────────────────────────┼──────────────────────────────┤
         │ N, u64  │ {"__metadata__": {"format":"pt"}, │ the tensors, one after the   │
         │ little- │  "w": {"dtype":"F32",             │ other, in C order and        │
         │ endian  │        "shape":[2,3],             │ little-endian                │
         │         │        "data_offsets":[0,24]}}␠␠  │ byte 0 of `data_offsets`     │

The safetensors library of Hugging Face defines the format and writes most files. Its specification
has rules that keep two readers from seeing different tensors in one file:

- The header has at most 100,000,000 bytes, begins with `{`, and is filled up with spaces.
- No key occurs twice.
- The tensors fill the data exactly, without gaps, overlaps or bytes at the end.

This reader enforces all of them. Version 0.8.0 of the library does not, so these files open there
and are refused here: blanks in front of `{`, other blanks than spaces after the header, a name that
occurs twice (the last one counts), an entry that is a list, and `null` as metadata. Unknown fields
in an entry are ignored by both, because other writers add some (nntrainer).

Modules:

    read         one file
    directory    several files, and the index that tells which tensor is in which file
    write        one file or a directory
    schema       the header: parsing, and checking its numbers
    record       Holdfast's record in `__metadata__`: checksums, ties, and parts of tensors
"""
