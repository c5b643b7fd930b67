"""The commands of the command line for runs."""
