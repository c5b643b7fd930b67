"""What `scan` is made of: a walk over everything in a file that some stock loader would carry out.

spans      a range of bytes, in a file or in memory          walk       from bytes to carriers, from carriers to pickles
archives   zip and tar as every reader sees them             pickles    one pickle behind the other, each recorded
packed     compressed content, within a budget               texts      code and expressions that are no pickles
findings   what was found, and where                         allowed    what a person said is known to them
"""
