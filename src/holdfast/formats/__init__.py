"""On-disk layouts. Each describes a source without reading tensor data; detection is by content alone."""
