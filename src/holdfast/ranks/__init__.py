"""Many ranks, one checkpoint: who has what, who writes what, and how it becomes one. No torch: the adapter tells, and is told.

state       what one rank has, in columns, and the bytes in which that travels
merge       what all ranks have together: names, values, ties, trees; do replicas have the same elements?
survey      do the boxes of all ranks cover each tensor exactly once?
plan        which rank writes which box: dealt evenly among those that hold it
together    all of it for one save: what the checkpoint holds, and a task for each rank
files       what one rank writes in each format, and the index behind all of it
write       would it open? Then the files of a rank to a target (engine/targets); receipts, index, publish
per_rank    what is each rank's own
"""
