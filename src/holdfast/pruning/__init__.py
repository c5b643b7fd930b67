"""Pruning of files: weights set to zero by rules, streamed.

rules            what to prune, as text and as values, and which tensors a rule applies to
order            what goes first: the rule, for files and for models
keys             the keys of elements and blocks, made in pieces
select           the n-th lowest key of many tensors, in passes
masks            which elements a rule keeps, and the rest set to zero
masked           tensors that are pruned when they are read, their masks, and what is lost
prune            the verb
"""
