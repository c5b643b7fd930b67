"""State of many ranks: `save_sharded`, `async_save_sharded`, `load_sharded`. What needs no torch of it is in `holdfast.ranks`.

save_sharded     the calls; `saving` is the chain behind them: describe, plan, write; `dcp_index` the one index that needs torch
background       the rest of the chain on a thread; `staging` copies what is saved; `handles` see to it that the program waits
load_sharded     the call; `wanted` is what one rank asks for; `replicas` reads once and hands on
group            how ranks talk: through the store, never by a collective
shards           what part of a tensor this rank has; `local_shards`, `shard_views`, `sharding_metadata`
flat_state       a nested state as DCP flattens it; `fresh_optimizer` room for the state of an optimizer without one
replica_sums     the sums by which replicas are compared
"""
