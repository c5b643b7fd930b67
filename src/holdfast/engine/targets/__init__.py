"""Where a save goes: a target. Nobody finds anything there before it is published.

joint_save `JointSave`, the steps in which the ranks of a group write one checkpoint
parts      a save whose plan all ranks have: each writes a part of its bytes
target     `Target`, what is asked of each; `make_target` chooses one for a path or a URL, `join_target` for another rank
folder     a file, and a folder of files: hidden beside their name, published by a rename (engine/commit/transactions)
bucket     an object, and objects below a prefix: published by a put with a condition
           `bucket_commit`  data under names of their own, and that put
           `bucket_claims`  objects that several checkpoints name: a save that is about to, and a deletion, learn of each other
"""
