"""State of many ranks: `save_sharded`, `async_save_sharded`, `load_sharded`. What needs no torch of it is in `holdfast.ranks`.

Saving:

save_sharded       the calls; `saving` is the side of one rank: describe, plan, write
dcp                a nested state as DCP flattens it, and the one index that needs torch
replica_sums       the sums by which replicas are compared
staging            copies of what is saved, so that the caller may go on
background         the rest of a save on a thread, and a program that waits for it at its end

Loading:

load_sharded       the call: one checkpoint for all
replicas           what several ranks want alike: read once, handed on
wanted             what one rank wants; tensors for an optimizer that has no state yet

Both:

run                `holdfast.torch.Run`: steps of a training run, saved and resumed by all ranks
group              how ranks exchange messages: through the store, never by a collective
shards             what part of a tensor this rank has

Torch's own classes:

local_shards       `LocalShardsWrapper`: several shards as one tensor
sharding_metadata  the description of a sharded checkpoint, to and from torch's own classes
"""
