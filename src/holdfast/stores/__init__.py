"""Where bytes live. The only code that touches the file system."""
