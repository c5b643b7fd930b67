"""Pure values and no I/O.

value                  what nearly every class is: fields that are checked and never change
box, chunk             where the elements of a tensor lie: a storage, a box of it
tensor                 a tensor that is described and not read, slices of it as arithmetic; one that is made of several
table                  all tensors of a checkpoint or of a state as columns: names, kinds, storages
match                  rows of a table for the tensors of a state, by name; where their boxes meet
sharing                which rows share memory: groups, ties, overlaps
tiling                 do boxes cover a tensor exactly once; how the boxes of one holder lie to each other
dtype, crc, digest     element types; checksums, and what a tensor holds in a few bytes
content_hash           what identifies the bytes of a chunk, so that they need not be written twice
leaves                 the tensors of a nested state and their names, found by one walk
tree, opaque           nested states, and what stands in them for values that are not built: globals, objects, sizes, devices
patterns, order        globs on dotted names: which are meant, what they become; the order in which people read them
placement_rules        which dimension of a tensor each axis of a mesh shards, by globs
checkpoint             what `open` returns
protocols, limits      the seams between layers: store, source, format; what a file may cost
keys                   names of files that stay inside
strict_json, documents JSON that every reader understands alike; the documents of ours, with their own checksum
arguments, quantities  what callers give to the verbs, understood in one place; sizes, counts and times as people write them
notebook               what a notebook shows of a result: facts, tables, bars
text, version          text for people: names made safe to look at, sizes and counts made short; the version of the package
arrays                 kinds of numpy arrays, a row of bytes
registry               finds hooks, extras and plugins by name: what lies above the kernel is reached here alone
runtime                the process: its collector, its locks, memory at an address
signals                a handler of signals that leaves what it found
"""
