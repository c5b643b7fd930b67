"""The native directory: plain safetensors files, and a manifest that says everything about them. docs/formats/native.md

read, write    the format          schema    the manifest, its text and the way back
tensors        the tensors of a manifest, as columns
chunks         chunks in the manifest: the text of hashes, and the chunks of a tensor in columns
base           what a new directory takes over from an older one: which files are linked, which chunks move
"""
