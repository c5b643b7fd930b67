"""The commit: before it nothing at the target has changed, after it everything is there. On a disk; of a bucket, targets/ tells.

transactions     `FileTransaction` and `DirectoryTransaction`: the steps, and what a failure of each means
target           the name that a save is for, its permissions, and the words why it could not be had
new_file         a file that is being written, and the disk that begins with it meanwhile; a finished file under a second name
temporaries      the hidden names beside it: whose they are, who cleans them, what a crash between two renames leaves;
                 `freed_in_background`: what a save replaced, freed on a thread of its own
"""
