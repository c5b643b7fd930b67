"""The attack suite: hostile files made by hand, damaged golden files, and fuzzing, all through `holdfast.open`."""
