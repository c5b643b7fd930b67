"""Between files and GPUs: page-locked memory that is reused, readers on threads, copies on streams of their own.

host.py        memory that a GPU can copy from and to by itself, and the pool that keeps it from one call to the next
pipeline.py    readers on threads, one thread that copies, blocks that go round between them
streams.py     the side stream of a device, and what it waits for
plan.py        what goes through one block: byte ranges of files in columns, and what each becomes
load.py        make and fill tensors on GPUs
memory.py      tensors on GPUs as lazy tensors, for saving
gather.py      many small storages on GPUs, gathered there for a save
stage.py       copy what a save will write, so that training can go on
"""
