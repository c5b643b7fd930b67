"""The code that moves tensor bytes, by the direction in which they move.

source           `OpenSource`: a store, its limits, and the way of its bytes into memory
execute          run a read plan (`scatter`: a fetched tooth into its place)
bulk             whole records into memory of somebody else's: the storages of a torch file
blocks           a tensor as a row of bytes, a bounded number at a time
checksums        read for checksums alone; `checks` sums what passes by, `digest` is a tensor's own
compare, equal   two tensors side by side (`integers`: exactly)
arrays           memory as lazy tensors
computed         tensors that are made when they are read: `casting`, `assembled`, `packed` (`sparse_choice`: which)
write, stream    carry out a save plan, at offsets by threads or front to back; `readback` compares before publishing
planned_store    a save that is not written, as a store
commit/          the one visible step
threads          all threads that share out work
"""
