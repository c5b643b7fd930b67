"""Arithmetic on elements that were read. Nothing here reads or writes files.

| module | what it computes |
| --- | --- |
| `cast` | floats as another float type, rounded as torch does, and what is lost |
| `dequantize` | the numbers of quantised blocks |
| `compare` | how the elements of two tensors differ |
| `statistics` | moments, histograms, and the distribution of a tensor's numbers |
| `zeros` | how zeros are arranged in groups, blocks, rows and columns |
| `threshold` | the order in which pruning removes elements, and the n-th lowest of them |

Words that all modules share:

- An **element** is one number of a tensor as it is stored, and a **number** its value.
- A **pattern** is the bits of an element as an unsigned integer. A **magnitude** is the pattern of
  an absolute value. Magnitudes are in the order of the numbers.
- A **block** is what is read at a time (`engine/scan.py`), and a **step** a part of it that stays
  in a core's cache. Blocks arrive in any order, on any thread. In `dequantize` a block is a group
  of elements that are quantised together, and in `zeros` a rectangle of a matrix.
- An **accumulator** has `add`, which receives a block, and `result`, which is called once, at the
  end.
"""
