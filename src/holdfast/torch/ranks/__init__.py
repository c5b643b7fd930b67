"""State of many ranks: `save_sharded`, `load_sharded`, and what they are made of. The planning is in `holdfast.ranks`.

save_sharded     the call; `saving` describes, plans, writes and publishes; `files` lays out what each rank writes
load_sharded     the call; `wanted` is what one rank asks for; `replicas` reads once and hands on
background       saving while training goes on; `handles` see to it that the program waits
group            how ranks talk: through the store, never by a collective
shards           what part of a tensor this rank has; `pieces` of memory; `local_shards`, `shard_views`, `sharding_metadata`
flat_state       a nested state as DCP flattens it; `per_rank` what is each rank's own; `fresh_optimizer` room for its state
replica_sums, same_checkpoint, rehearse, unkept      what is compared and said before anything is published
"""
