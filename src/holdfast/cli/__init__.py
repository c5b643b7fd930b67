"""The command line: thirteen verbs, a module each. The only place that prints.

main, arguments      exit codes and errors; what is parsed
show, read, scan, verify, diff, stats      verbs that look; `show` has `--ranks` (`ranks`) and `--sparsity` (`sparsity`)
convert, edit, prune, tie, compact, package, reshard      verbs that write, all by `planned`: options, bar, report, JSON
places, values       paths, numbers and pairs as argparse takes them
lines, text, document, progress, outline, fold, survey, arrays, slices, sarif      how things are drawn
"""
