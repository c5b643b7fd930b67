"""The verbs that look: nothing here writes.

open             from a path to a `Checkpoint`, from lazy tensors to arrays
verify           is every byte the one that was written?
trainers         what other trainers leave on disk: who wrote it, which step, which metrics, is it torn?
diff             what differs: tensors by digest, then by bytes; values by structure (`compare_values`)
side             what of two checkpoints is compared, and under which names
scan             what would the files have done? `scanning/` finds every stream and shows it, `severity` judges
stats, sparsity  what the numbers look like, and where the zeros are
survey           all tensors of a checkpoint at once: ties, bytes, elements by dtype
describe         any checkpoint in the vocabulary of a sharded one (`holdfast.metadata`)
brief            any value in a few characters
"""
