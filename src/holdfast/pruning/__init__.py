"""Pruning of files: weights set to zero by rules, streamed.

rules            what to prune, as text and as values
jobs             which rule applies to which tensor
order            what goes first: the rule, for files and for models
keys             the keys of elements and blocks, made in pieces
select           the n-th lowest key of many tensors, in passes
select_masks     which elements a rule keeps
masked           tensors that are pruned when they are read, and their masks
loss             what pruning takes away
prune            the verb
"""
