"""Where a save goes until it is published. Readers find the old checkpoint or the new one.

    SavePlan ──► Target ──────────────► checkpoint
    (what)       hidden: written,       visible: one rename, or one put with a condition
                 checked, synced

    joint_save      the steps in which the ranks of a group write one checkpoint together
    plan_save       such a save if all ranks have the same plan: each writes a share of its bytes
    target          `Target`, the interface of all targets, and the choice of one for a path or URL
    folder          a file or a folder on a file system
    resume_folder   finished files of a conversion, which survive an interruption
    bucket          an object, or objects below a prefix, in an object store
    bucket_commit   the commit in an object store, and its exclusive claims
    bucket_claims   claims that protect objects which several checkpoints share

The steps of a save, and what protects them:

                    one file                  a folder                   a bucket
    hide            .name.<random>.tmp        .name.<random>.tmp/        names with the save's id
    write           all of it                 data files                 data objects
    make durable    fsync                     fsync each, and the folder (a put is durable)
    index           (none)                    written and synced last    checked, not put yet
    publish         rename                    rename or exchange         put of the index if the old
                                                                         one is still there
    clean up        (the rename did it)       remove the old folder      delete the old objects
    two saves at    the last rename wins      a lock on the old folder   the condition of the put
    the same time
    others that     a lock on the temporary   a lock on the temporary    claims, for objects that
    clean up                                                             checkpoints share

`engine/commit` has the details for file systems, with what a crash leaves at each step.

Words of this room:

    first rank      the rank that creates and publishes the target; also a process that is alone
    share           what one rank writes: whole files, and ranges of long ones
    shared file     a file that several ranks write, each a range of it
    delivered file  a file that another rank has written completely
    receipt         what a rank reports after writing: checksums, or that a file is finished
    index           the file or object, written last, that makes the others a checkpoint
    prefix          the common beginning of the keys of a checkpoint in a bucket
    sibling         another checkpoint below the same parent, whose objects this one may name
    claim           an object that reserves names or announces a deletion
"""
