"""The only code that moves tensor bytes."""
