"""Pure functions from descriptions to lists of reads; nothing here touches a file."""
