"""The verbs that write: from sources to a `State`, a change of it, a plan in a format, and one commit.

state, stateful  what a caller hands over, as a `State`
transform, cast  changes of a state: keep, drop, rename, other dtypes
formats          the format of a path, and the plan of a state in it
rehearse         the plan is opened by the reader before it is written
save             write a plan and publish it; `convert`, `edit` the same under a budget
tie, compact     sharing found again, or bytes dropped (`places`, `rejoin`)
package          several models in one checkpoint (`models`, `alias_graph`, `replace_weights`)
reshard          cut for a mesh of ranks
planned          a save that is laid out and not begun
"""
