"""On-disk layouts. Each describes a source without reading tensor data; detection is by content alone.

torch/           what `torch.save` writes: zip, legacy stream, tar; folders of them
safetensors/     one file, or a directory with an index
native/          Holdfast's own directory
dcp/             directories of `torch.distributed.checkpoint`
pt2/             exported programs
npy/             numpy's array files, and zips of them
gguf/            the files of llama.cpp
rank_files/      folders in which every rank left a `.pt` of its own
pickle/, zip/    the closed interpreter and the strict archive under them
tree_json/       nested states as typed JSON
detect           which of them is this?
index_file       the index of a Hugging Face folder: which file has which tensor
recorded         what is noted beside plain tensors: other names, shared storages, the tree
seal             the record that a directory is a whole step: `holdfast.seal.json`
strict_json      JSON that every reader understands alike, and documents that carry their own checksum
"""
