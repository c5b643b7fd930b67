"""Between files and GPUs: page-locked memory that is reused, readers on threads, copies on streams of their own.

host        memory that a GPU can copy from and to by itself, and the pool that keeps it from one call to the next
pipeline    readers on threads, one thread that copies, blocks that go round between them
streams     the side stream of a device, and what it waits for
plan        what goes through one block: byte ranges of files in columns, and what each becomes
load        make and fill tensors on GPUs
memory      tensors on GPUs as lazy tensors, for saving; many small ones are gathered there first
stage       copy what a save will write, so that training can go on
"""
