"""Runs: the steps of a training run in one directory or bucket, found again after anything, and kept from filling the disk.

run              `Run`: save, resume, prune; what a save does, in order
place            what a run needs of where it is: `directory` (with `steps`), which tells which one it is, or `bucket`
view             looking: latest, best, iteration, what the rules would do; pins
rules            which steps are kept: `Latest`, `Every`, `Best`, `Within`; pure
steps            which folders are steps, under which number, and whether each is whole
table            the whole of a run at a look, for people: why each step is kept, what it shares
retention        what goes and why the rest stays; letting it go
sweep            what dead savers left in a bucket
record           the rules and the pins that a run's directory keeps
lock             one writer a run, as long as its process lives
signals          a signal waits until the state is saved
export           published steps in another format, in the background: where they may go, and what they may replace
fill             a step into a state that is there
summary          what saves cost, and how often to save
"""
