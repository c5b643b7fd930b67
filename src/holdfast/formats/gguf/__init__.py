"""GGUF, the format of llama.cpp and the programs around it. Holdfast reads it and does not write it.

A file has a header and the data of the tensors. All integers have the byte order of the writer,
which the reader recognizes by the version. The names below are those of the specification.

    magic              4 bytes   GGUF
    version            u32       2 or 3
    tensor_count       u64
    metadata_kv_count  u64
    metadata_kv        for each entry: key (string), value_type (u32), value
    tensor_infos       for each tensor: name (string), n_dimensions (u32), dimensions (u64 each,
                       the fastest first), ggml_type (u32), offset (u64, from tensor_data)
    padding            up to a multiple of general.alignment, by default 32
    tensor_data        each tensor starts at a multiple of the alignment

    string             length (u64), UTF-8
    array              value_type (u32), length (u64), values

llama.cpp splits a large model into files such as `model-00001-of-00003.gguf`. Each has a header with
`split.no` and `split.count`. A folder with all of them opens as one checkpoint.

This reader is stricter than llama.cpp: it refuses gaps that are larger than the padding, bytes after
the last tensor, and names that are empty or contain NUL, because two programs would read such a file
differently.

Modules:
    header: reads the header of a file and checks it.
    metadata: decodes the metadata when it is used.
    read: describes a file, or a folder of split files, as a checkpoint.
"""
