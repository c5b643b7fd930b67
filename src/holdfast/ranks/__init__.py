"""Many ranks, one checkpoint: who has what, who writes what, and how it becomes one. No torch: the adapter tells, and is told.

state            what one rank has, in columns
wire             the bytes in which that travels
merge            what all ranks have together
survey, defects  do the boxes of all ranks cover each tensor exactly once?
balance          who of those that hold the same boxes writes which
plan             which rank writes which box
trees            the trees of all ranks as one
sums             do replicas have the same elements?
together         all of it for one save: what the checkpoint holds, and a task for each rank
files            what one rank writes in each format, and the index behind all of it
rehearse         would it open? Asked before a folder is made
write            the files of a rank to disk; receipts, index, rename
per_rank         what is each rank's own; `pieces` of memory; `unkept` what a format does not keep
same_checkpoint  whether all ranks of a load have opened one checkpoint
"""
