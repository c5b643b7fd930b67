"""Folders in which every rank left a file of its own: put together lazily, into the tensors that they are parts of.

recognise    which files of a folder belong together, by their names; what is missing, or one too many
assemble     a rank's file, read by the closed interpreter; parts of several files as one tensor, one tree of all ranks
placements   which part of a tensor a rank has, by its mesh and placements
flat         rows of elements that are cut into tensors
steps        which of several steps in a folder is meant: the one that `latest` names
side_keys    what stands beside the model in the files, as it is
megatron     Megatron's folders: tensor- and pipeline-parallel ranks, put together by rules
zero         DeepSpeed's folders, stages 1 to 3; zero_parts has where each parameter lies
dtensors     `model_world_size_N_rank_R.pt` of verl, SkyRL and oumi: pickled DTensors and their meshes

A further kind is a `Format` (`matches`, `describe`) in a module of its own, and two lines in `formats/detect`. It goes

    recognise.rank_sets     the keys of the store, by a pattern
    assemble.read_rank      each file as a tree; nothing is executed, tensors are located and not read
    assemble.Assembly       parts (a box, and the lazy tensor that has it) become a tensor; all of them have one source
    assemble.described      the `Description` of a tree

Why so: docs/design/020-rank-files.md.
"""
