"""The code that moves tensor bytes, by the direction in which they move.

source           `OpenSource`: a store, its limits, and the way of its bytes into memory; `Sourced`: a store that makes tensors
transfer         the one engine that reads: ranges of files, by threads, each to a sink. The sinks:
  strips           a read plan, to arrays of any strides (`checks` sums what passes by)
  memory_sink      ranges to memory that somebody else owns: the storages of a torch file, tensors that are filled
  checksums        sums alone; `digest` is a tensor's own
  equal            compared with the bytes of another tensor; `compare` counts what differs, element by element
numbers          what the elements of tensors are: moments, counts of bit patterns, histograms; `distribution`: exponents, quantiles
blocks           a tensor as a row of bytes, a bounded number at a time
arrays           memory as lazy tensors, and very many arrays as rows of a table
computed         tensors that are made when they are read: `casting`, `dequantize`, `sparse_choice` (what is packed)
write, stream    carry out a save plan, at offsets by threads or front to back; `readback` compares before publishing
planned_store    a save that is not written, as a store
file_digest      a whole file, read once and digested, for seals
targets/         where a save goes: a file, a folder, a bucket; for one process and for ranks
commit/          the one visible step
large_pages      memory that is about to be filled, in pages that cost few faults
threads, beside  all threads that share out work; one call beside what the caller does
"""
