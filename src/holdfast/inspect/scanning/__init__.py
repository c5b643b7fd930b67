"""What `scan` is made of: a walk over everything in a file that some stock loader would carry out.

walk       from bytes to carriers, from carriers to pickles
archives   a range of bytes, unpacked within a budget; zip and tar as every reader sees them
payloads   pickles, one behind the other, each recorded; code and expressions that are no pickles
model_code code that comes with a model: what its configs name, Python files beside its weights
findings   what was found, and where in the tree; what a person said is known to them
"""
