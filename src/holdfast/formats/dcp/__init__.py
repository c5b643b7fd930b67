"""Directories that `torch.distributed.checkpoint` writes: an index (`.metadata`) and data files that are rows of torch zips.

read        the format: directories that are opened     write       and those that are written
records     what a `.metadata` pickle is made of        table       its globals, as constructors of those
index       the metadata of a directory, checked        beside      the checksum that Holdfast adds to it
item        one torch zip inside of a data file         frame       items that are alike are compared, not parsed
lazy        chunks that are found when they are read    inflate     items that were compressed
values      what is no tensor                           tree        names back to a nested state
"""
