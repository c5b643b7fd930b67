"""The verbs that write: from sources to a `State`, a change of it, a plan in a format, and one commit.

state, stateful  what a caller hands over, as a `State`
transform, cast  changes of a state: keep, drop, rename, other dtypes
formats          the format of a path, and the plan of a state in it
rehearse         the plan is opened by the reader before it is written
planned          what a verb is going to do: `Planned`, `Writing`, the result `Saved`; writes a plan and publishes it
save             a state; `convert`, `edit`: a checkpoint, with changes on the way
tie, compact     sharing found again, or bytes dropped (`places`, `rejoin`)
package          several models in one checkpoint (`models`, `alias_graph`, `replace_weights`)
reshard          cut for a mesh of ranks

Every verb is a `plan_…` that gives a `Planned`, and its `carry_out`; so is `pruning.prune`.
"""
