"""Directories that `torch.distributed.checkpoint` writes: an index (`.metadata`) and data files that are rows of torch zips.

records     what a `.metadata` pickle is made of        table       its globals, as constructors of those
index       the metadata of a directory, checked        tiling      do the chunks of a tensor cover it once?
item        one torch zip inside of a data file         frame       items that are alike are compared, not parsed
lazy        chunks that are found when they are read    inflate     items that were compressed
values      what is no tensor                           tree        names back to a nested state
directory   the format                                  vocabulary  the metadata as `holdfast.metadata` says it
"""
