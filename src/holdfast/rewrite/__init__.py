"""The verbs that write, a module each. What they share is in `holdfast.saving`.

save             a state: to a path, a file object, or as bytes (`to_bytes`)
convert          a checkpoint in another format (`convert`), or with changes (`edit`)
copy             a checkpoint as it is, to another place
tie              which tensors are the same bytes (`alias_graph`), and checkpoints in which equal tensors are one again
compact          a checkpoint without the bytes that no tensor reaches
package          several models in one checkpoint, or other weights in one (`replace_weights`)
reshard          cut for a mesh of ranks
seal             say of a folder of another trainer that it is whole; no `Planned`: it writes one small file and changes no other

Every verb is a `plan_…` that gives a `Planned`, and its `carry_out`; so is `pruning.prune`. Those that make a checkpoint of a
checkpoint are laid out by `saving.planned.rewritten`.
"""
