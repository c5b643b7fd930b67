"""Values without I/O: the model of a checkpoint, on which all other rooms are built.

The model of a checkpoint:

| module | what is in it |
| --- | --- |
| `box`, `chunk` | rectangles of indices, and where their elements are in a storage |
| `tensor` | tensors that are described but not read, and arithmetic on their chunks for slices |
| `table` | all tensors of a checkpoint or a state, as columns |
| `dtype` | the table of element types |
| `tree`, `leaves`, `opaque` | nested states, their tensors and names, and objects that are not built |
| `checkpoint` | what `holdfast.open` returns |

What is computed from it:

| module | what is in it |
| --- | --- |
| `match` | which rows of a checkpoint fill which tensors of a model |
| `sharing` | which rows share memory: ties, groups, overlaps |
| `tiling` | whether boxes cover a tensor exactly once |
| `placement_rules` | which dimensions the axes of a device mesh shard |
| `crc`, `digest`, `content_hash` | checksums, and what identifies the content of a tensor |
| `patterns`, `order` | globs on names, and names in the order in which people read them |

Input and output for people and programs:

| module | what is in it |
| --- | --- |
| `options`, `arguments`, `quantities` | the options of verbs, and checks of what callers pass |
| `limits`, `keys` | how much a file may cost, and which names of files are safe |
| `strict_json`, `documents` | JSON that all programs understand alike, and Holdfast's documents |
| `text`, `notebook` | escaped names and short numbers, and what notebooks show |

Connections to the rest:

| module | what is in it |
| --- | --- |
| `protocols`, `registry` | interfaces between rooms, and lookup of formats, extras and plugins |
| `group` | how several ranks carry out an operation together |
| `runtime`, `signals` | threads, locks, memory and signal handlers of the process |
| `value`, `arrays`, `version` | the base of nearly all classes, types of arrays, the version |

Words that modules of this room share, beside those of `docs/design/048-words.md`:

- A **point** is an element of a box, given by its indices. An **axis** is a dimension of a tensor,
  or of a mesh of devices.
- Boxes **tile** a tensor if they cover each of its points exactly once.
- A **destination** is a tensor of a model that a row of a checkpoint fills.
- The **head** of some bytes is the CRC-32 of their first 64 KiB, and a **mark** is a short hash by
  which ranks compare what they opened.
- An **operation** is what the ranks of a group do together. It consists of **phases**: in each, all
  ranks send a message to the first rank, and receive an answer.
- An **option set** lists the options of a verb with their types. A **check** is a function that
  returns the value of an argument, or raises an error.
- A **seal** is the checksum at the end of a document of Holdfast.
- A **flaw** is a part of a JSON document that programs understand in different ways.
- The **load** of a rank is the number of bytes that it has to read or write.
"""
