"""What `scan` is made of: a walk over everything in a file that some stock loader would carry out.

walk       from bytes to containers, from containers to pickles and other code, each recorded
archives   a range of bytes, unpacked within a budget; zip and tar as every reader sees them
findings   the findings, and where in the tree they are; the list of those that are allowed
"""
