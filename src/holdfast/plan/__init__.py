"""Pure functions from descriptions to lists of reads and writes; nothing here touches a file.

coalesce         which neighbouring ranges are read together: for everybody, by a policy for each medium
reads            the plan of a read
saves            the plan of a save: every file as segments
files            ranges of files as the storages of a table
stored           which ranges the rows of a table use, each once
table            the tensors of a state on their way to a file, as columns
"""
