"""Where bytes live. The only code that touches the file system.

base             what a store says of itself that has nothing to say
local            a file, or a directory and what is in it; a file that is open already
folder           a directory that stays the one that was opened
gather           many short ranges of a file by one system call
memory           bytes of this process, and file objects
virtual          content that is made when it is read, alone or over another store
files            every file-system call of a save
paths            from what a user gives to a path on this machine
"""
