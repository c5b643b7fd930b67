"""Pure values and no I/O.

chunk, box, index      where the elements of a tensor lie: a storage, a box of it, and slices of that as arithmetic
tensor, composite      a tensor that is described and not read; one that is made of several
sharing                which tensors share memory: groups, twins, islands, overlaps
tiling, arrangement    do boxes cover a tensor exactly once; how the boxes of one holder lie to each other
dtype, crc, digest     element types; checksums, and what a tensor holds in a few bytes
tree, opaque, values   nested states, what was not built in them, and plain values
checkpoint             what `open` returns
protocols, limits      the seams between layers: store, source, format; what a file may cost
sparse                 how tensors with many zeros are packed
arrays, memory         kinds of numpy arrays, a row of bytes; memory at an address
collector, forks       the garbage collector at rest, locks over a fork
"""
