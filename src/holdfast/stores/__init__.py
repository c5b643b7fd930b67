"""Stores: where bytes are read from. Only this room and the commits of `engine` touch the file
system.

local       a file, a directory, or a file that is open already
memory      bytes in this process, and seekable file objects
virtual     content that is computed when it is read, alone or over another store
remote/     object stores: URLs, requests, and objects as a store
files       every file-system call of a save; `PathFiles` for Windows, which cannot open directories
platform    calls that only some systems have, and their replacements
paths       from what a user passes to a local path or a URL
place       a local path with the same members as a URL

Words of this room:

key         the name of a file in a store: a relative path
place       a path or a URL, as text
version     size and modification time of a file, or size and ETag of an object
stamp       the version of a file as plain values that JSON can hold

`core/protocols` has the base class `Store`, whose methods fit a store without special features.
"""
