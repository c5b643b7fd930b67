"""Python state as JSON that says its types: plain JSON where JSON has the type, an object with a `$` where it has not.

encode, decode    there and back          scalars    values without parts that JSON cannot say
rows              there, with very many tensors
"""

from __future__ import annotations

from holdfast.formats.tree_json.decode import DecodedTree, decode_tree, json_limits
from holdfast.formats.tree_json.encode import EncodedTree, encode_tree, flat_tree

__all__ = ["DecodedTree", "EncodedTree", "decode_tree", "encode_tree", "flat_tree", "json_limits"]
