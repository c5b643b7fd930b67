"""Directories that `torch.distributed.checkpoint` writes: an index (`.metadata`) and data files that are rows of torch zips.

read      the format: directories that are opened; values that are no tensors, and names back to a nested state
write     directories that are written
schema    what a `.metadata` pickle is made of, and its globals as constructors of that
index     the metadata of a directory, checked, and the checksum that Holdfast adds to it
item      one torch zip inside of a data file; items that are alike are compared, not parsed
lazy      chunks that are found when they are read, and items that were compressed
"""
