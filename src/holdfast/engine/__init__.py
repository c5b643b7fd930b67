"""The code that moves tensor bytes: first plans, which touch no file, then what carries them out, by direction.

coalesce         which neighbouring ranges are read together: for everybody, by a policy for each medium
saves            the plan of a save: every file as segments
files            ranges of files as the storages of a table
stored_ranges    which ranges of files the rows of a table use, each once
table            the tensors of a state on their way to a file, as columns

source           `OpenSource`: a store, its limits, and the way of its bytes into memory
ranges           contiguous ranges of files into memory: the path of every read
boxes            boxes of any strides, byte order and packing into arrays, made of ranges
checksums        sums of ranges; `digest`: a tensor's own checksum, and content hashes
equal            whether two tensors have the same bytes
scan             elements, a block at a time, to accumulators: statistics, zeros, thresholds (`numeric/`)
blocks           a tensor as a row of bytes, a bounded number at a time
arrays           memory as lazy tensors, and very many arrays as rows of a table
computed         tensors that are made when they are read: casts, quantised blocks decoded
write, stream    carry out a save plan, at offsets by threads or front to back, and compare before publishing
file_digest      a whole file, read once and digested, for seals
targets/         where a save goes: a file, a folder, a bucket; for one process and for ranks
commit/          the one visible step
threads          all threads that share out work; one call while the caller goes on
"""
