"""The commands of the command line for packages."""
