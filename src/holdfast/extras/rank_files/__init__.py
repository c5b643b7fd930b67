"""Folders in which every rank left a file of its own: put together lazily, into the tensors that they are parts of.

recognise    which files of a folder belong together, by their names; missing and surplus files; the step to open
assemble     a rank's file, read by the closed interpreter; parts of several files as one tensor, one tree of all ranks
placements   the part of a tensor that a rank has, by its mesh and placements
megatron     Megatron's folders: tensor- and pipeline-parallel ranks, put together by rules
meta         `consolidated.00.pth`, … of Llama, as Meta gives it: put together by names
zero         DeepSpeed's folders, stages 1 to 3; zero_parts has the place of each parameter
dtensors     `model_world_size_N_rank_R.pt` of verl, SkyRL and oumi: pickled DTensors and their meshes

Why so: docs/design/020-rank-files.md.
"""
