"""Where bytes live. The only code that touches the file system.

local            a file, or a directory and what is in it; a file that is open already; many short ranges by one system call
folder           a directory that stays the one that was opened
memory           bytes of this process, and file objects
virtual          content that is made when it is read, alone or over another store
files            every file-system call of a save
paths            from what a user gives to a path on this machine

What a store says of itself is in core/protocols: `Store`, and `BaseStore` for one that has nothing to say.
"""
