"""Verbs on the ranks of a group: any number of them writes and finds the same as one process."""
