"""The command line: the verbs, a module each. The only place that prints.

main, parser         the verbs, exit codes and errors; a verb is filled when it is asked for
values               paths, numbers and pairs, as argparse takes them
show, read, scan, verify, diff, stats, report, view      verbs that look; `show` has `--ranks` (`ranks`) and `--sparsity` (`stats`)
convert, edit, prune, tie, compact, package, reshard      verbs that write, all by `planned`: options, bar, report, JSON
completion, flags    scripts for shells, made of the parser; the library's keywords in the words of the command line
text, progress       how things are drawn: text made safe, lines, bars
outline, document    what `show` says of a checkpoint, as a tree and as JSON
"""
