"""The command line: the verbs, a module each. The only place that prints.

main, parser         the verbs, exit codes and errors; a verb is filled when it is asked for
values               paths, numbers and pairs, as argparse takes them
show, read, scan, verify, diff, stats, report, view       verbs that look
convert, edit, cp, prune, tie, compact, package, reshard  verbs that write, all by `planned`: bar, report, JSON
seal, runs, pin, unpin                                    seals, and the steps of a run
completion           scripts for shells, made of the parser by shtab
options              flags from the options of a verb, and back; the library's keywords in the words of the command line
text, progress       how things are drawn: text made safe, lines, bars
outline              a checkpoint as the tree that `show` prints
"""
