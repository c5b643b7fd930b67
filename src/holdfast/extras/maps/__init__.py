"""Layouts of model weights as data: the same model under the names and in the boxes of another framework.

parts     the text of a part: a name with numbers, dimensions of named axes
family    a TOML file of a family: its arrays, and how each layout holds them
bind      the proof: a checkpoint's names and shapes against a layout
pieces    where the elements of a target lie in the sources: chunks
mapped    a checkpoint through a map: another table over the same files
find      maps by name, and the one that fits a checkpoint

families/ the files, one a family
"""
