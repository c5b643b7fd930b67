"""Pruning of files: weights set to zero by rules, streamed.

rules            what to prune, as text and as values, and which tensors a rule applies to
select           the n-th lowest key of many tensors, in scans; what a key is stands in `numeric/threshold.py`
masks            which elements a rule keeps, and the rest set to zero
masked           tensors that are pruned when they are read, their masks, and what is lost
prune            the verb
"""
