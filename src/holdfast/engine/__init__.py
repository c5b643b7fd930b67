"""Moves the bytes of tensors: plans that touch no file, and the code that carries them out.

Reading:

| module | what it does |
| --- | --- |
| `source` | `OpenSource`: a store that is open for reading, with its limits |
| `ranges` | reads contiguous ranges of files into memory; every read passes through it |
| `boxes` | reads tensors of any strides, byte order and packing, made of ranges |
| `coalesce` | decides which neighboring ranges one call reads |
| `blocks` | a tensor as bytes in C order, one block at a time |
| `scan` | the elements of tensors, block by block, for statistics, zeros and thresholds |
| `computed` | tensors that are computed when they are read: casts, decoded quantized blocks |
| `checksums` | the checksums of ranges of files, and of storages while they are read |
| `digest` | the checksums and content hashes of tensors |
| `equal` | whether two tensors have the same bytes |
| `stored_ranges` | which ranges of files the rows of a table use, each once |
| `file_digest` | the checksums of whole files, for seals |

Saving:

| module | what it does |
| --- | --- |
| `saves` | the plan of a save: every file as segments |
| `table` | prepares tables to be saved, and plans the segments of their rows |
| `files` | ranges of files as the storages of a table |
| `arrays` | numpy arrays as lazy tensors and as rows of a table |
| `write` | carries out a plan at offsets of a file, on several threads |
| `stream` | carries out a plan from front to back |
| `targets/` | where a save goes: a file, a folder, a bucket; for one process or for ranks |
| `commit/` | makes a save visible in one step |
| `threads` | runs the work on threads, and decides how many there are |

Words that all modules share, in addition to the list of the project (docs/design/048-words.md):

- A **piece** of a range lies in one block of its file. A **joined read** covers one piece or
  several, and the gaps between them.
- The **inner axes** of a chunk are part of each of its ranges. Every point of its **outer axes**
  has a range of its own.
- The **root** of an array is the array that owns its memory.
- A **member** is one of several storages or tables that are used as one.
- The **original** of a computed tensor is the tensor that it is computed from.
- A **label** names data in a plan. Its checksum is reported under this label.
- A **task** is a function without arguments that runs on any thread.
"""
