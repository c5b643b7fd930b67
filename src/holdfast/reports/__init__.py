"""Pages to look at: a checkpoint, the difference of two, a run, as one HTML file that needs nothing else.

report      `report` and what it gives: the document, its JSON, its page
document    what the document is made of: front coding, labels, rounded numbers
structure   what a checkpoint says of itself: columns, facts, the sentence, what `scan` says. Reads no tensor
shards      files as strips of bytes, tensors as boxes, what the ranks of a mesh would read
measures    the streaming pass: what can colour a page, what a drawer shows; `spectrum`: singular values
change      two checkpoints beside each other; `history`: a run over time
live        the page served to this machine's browser, and what it asks for; `tiles`: pictures of elements
page        the HTML file, from the document and the assets in `page/` (plain JavaScript and CSS)
"""
