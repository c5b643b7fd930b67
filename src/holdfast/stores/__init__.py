"""Where bytes live. The only code that touches the file system.

local            a file, or a directory that stays the one that was opened; a file that is open already; many ranges by one call
short ranges by one system call memory           bytes of this process, and file objects
virtual          content that is made when it is read, alone or over another store
files            every file-system call of a save; `PathFiles`: where no directory can be opened, on Windows
platform         what this system has, and what stands in for what it has not
remote/          object stores: URLs, every request, objects as a store
paths            from what a user gives to a path on this machine, or a URL
place            a path or a URL as one thing: what differs between a disk and a bucket

What a store says of itself is in core/protocols: `Store`, with what one says that has nothing to say.
"""
