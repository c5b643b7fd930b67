"""The commands of the command line for layout maps."""
