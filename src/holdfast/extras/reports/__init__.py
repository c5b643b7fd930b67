"""Pages to look at: a checkpoint, the difference of two, a run, as one HTML file that needs nothing else.

report      `report` and what it gives: the document, its JSON, its page
document    parts of the document: front coding, labels, rounded numbers
structure   the columns of a checkpoint, facts, the sentence, the findings of `scan`. Reads no tensor
shards      files as strips of bytes, tensors as boxes, what the ranks of a mesh would read
measures    the streaming pass: what can colour a page, what a drawer shows; singular values
change      two checkpoints beside each other; `history`: a run over time
live        the page served to this machine's browser, and what it asks for: details of a tensor, pictures of its elements
page        the HTML file, from the document and the assets in `page/` (plain JavaScript and CSS)
"""
