"""From what a caller has to what is published: what all verbs that write share.

state            what a caller hands over, as a `State`; its tensors as a table; states made of other states
transform        changes of a state: keep, drop, rename, other dtypes
rejoin           tensors that shared a storage before a format copied them share it again
models           what is in a package, and a choice of it
formats          the format of a path, and the plan of a state in it
read_back        opens what was written, before it is published
side_files       config and tokenizer files of a Hugging Face folder, which go where its weights go
base             the checkpoint before, of which a save takes over what did not change
references       what the manifests of checkpoints beside each other in a bucket name, which nobody may delete
planned          what a verb is going to do: `Planned`, how (`Writing`), the result `Saved`; writes a plan and publishes it
"""
