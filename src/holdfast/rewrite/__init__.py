"""The verbs that write: from sources to a `State`, a change of it, a plan in a format, and one commit.

state            what a caller hands over, as a `State`; its tensors as a table
rows             states made of other states: other rows under their names, or their rows in another tree
transform        changes of a state: keep, drop, rename, other dtypes
rejoin           tensors that shared a storage before a format copied them share it again
formats          the format of a path, and the plan of a state in it, opened by the reader before it is written
companions       config and tokenizer files of a Hugging Face folder, which go where its weights go
planned          what a verb is going to do: `Planned`, the result `Saved`; writes a plan and publishes it
writing          how a plan is written: `Writing`
references       what the manifests of checkpoints beside each other in a bucket name, which nobody may delete; what a save replaces
base             the checkpoint before, of which a save takes over what did not change
save             a state: to a path, a file object, or as bytes (`to_bytes`)
step_seal        the seal of a step of a run, as one more file of its plan
renewal          the seals of what is rewritten in its own place, renewed with it
convert          a checkpoint in another format (`convert`), or with changes (`edit`)
share            which tensors are the same bytes (`alias_graph`)
tie              checkpoints in which equal tensors are one again (`tie`)
compact          a checkpoint without the bytes that no tensor reaches
package          several models in one checkpoint, or other weights in one (`replace_weights`); `models` says what is in it
reshard          cut for a mesh of ranks
seal             say of a folder of another trainer that it is whole; no `Planned`: it writes one small file and changes no other

Every verb is a `plan_…` that gives a `Planned`, and its `carry_out`; so is `pruning.prune`. Those that make a checkpoint of a
checkpoint are laid out by `planned.rewritten`.
"""
