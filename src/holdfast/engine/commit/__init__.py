"""The commit: before it nothing at the target has changed, after it everything is there.

transactions     `FileTransaction` and `DirectoryTransaction`: the steps, and what a failure of each means
target           the name that a save is for, its permissions, and the words why it could not be had; a file that is being written
temporaries      the hidden names beside it: whose they are, who cleans them, what a crash between two renames leaves
linked           a finished file of another directory, under a second name; a copy where that cannot be had
resumable        finished files of an interrupted conversion, kept for the next try
"""
