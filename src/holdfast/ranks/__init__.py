"""Many ranks, one checkpoint: who has what, who writes what. No torch, no files: what `torch/ranks` tells is planned here.

state            what one rank has, in columns
wire             the bytes in which that travels
merge            what all ranks have together
survey, defects  do the boxes of all ranks cover each tensor exactly once?
balance          who of those that hold the same boxes writes which
plan             which rank writes which box into which file
trees            the trees of all ranks as one
"""
