"""Saves on a local file system. Readers see either the old checkpoint or the new one.

    model.pt                            model.pt                          model.pt
    (old)                  ──►          (old)                ──►          (new)
                                        .model.pt.<random>.tmp
                                        (new, locked, not complete)
            create, lock                        write, fsync              rename: the visible step

The modules:

    transactions    the steps of a save of one file or of a folder, and what a crash leaves at each
    target          the place that a save is for, its permissions, and why a save cannot have it
    new_file        a file that is being written; a file of a base that gets a second name
    temporaries     the hidden names: locks, cleaning, recovery, and freeing what was replaced

Two locks protect a save, both with flock(2), which the kernel releases if the process dies. The
lock of the temporary keeps other saves from removing it as abandoned. The lock of the old folder,
from just before the visible step on, keeps two saves from replacing the same folder at once. A save
of a single file needs no second lock: the last rename wins, and both files are complete.

Words of this room:

    target          the file or folder that a save creates or replaces
    temporary       the hidden file or folder beside the target into which a save writes
    visible step    the rename or exchange after which readers find the new checkpoint
    set aside       said of an old folder that was renamed to `.old`, on file systems that cannot
                    exchange two names
    abandoned       said of a temporary whose process died: nobody holds its lock
    durable         said of what survives a power cut, because it and its name were synced
    base            an older checkpoint whose unchanged files a save links instead of writing them
"""
