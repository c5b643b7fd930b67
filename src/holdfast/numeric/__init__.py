"""Numbers: what is computed of elements that were read. Nothing here reads or writes; `engine/scan.py` shows the elements.

cast             floats as other floats, as torch rounds them, and what is lost
dequantize       the numbers that quantised blocks stand for
compare          how the elements of two tensors differ
statistics       moments, counts of bit patterns, histograms; exponents, quantiles, tails, norms of rows and columns
zeros            where zeros are: groups, blocks, rows, columns
threshold        the order in which pruning takes elements, and the search for the n-th lowest of them
"""
