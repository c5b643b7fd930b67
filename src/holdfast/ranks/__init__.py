"""Many ranks, one checkpoint: who has what, who writes what, and how it becomes one. No torch: `torch/ranks` describes states.

What the first rank decides:

state       what one rank has, in columns, and the bytes in which that travels
merge       what all ranks have together: names, values, ties, trees; do replicas have the same elements?
survey      do the boxes of all ranks cover each tensor exactly once?
plan        which rank writes which box: dealt evenly among those that hold it
together    all of it for one save: what the checkpoint holds, and a task for each rank

What every rank does:

per_rank    names for what each rank keeps for itself
write       the files of a rank to a target (engine/targets), and receipts; then the index, and whether all of it opens

The files that one rank writes in each format, and the index behind all of them, are in `formats/sharded`.
"""
