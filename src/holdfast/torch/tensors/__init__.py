"""Between lazy tensors and torch's.

from_lazy        a lazy tensor as torch's, the same bits; a second name is a view of the first
to_lazy          torch tensors as lazy ones over the memory that they have, and that memory as Python's
composites       tensors that are made of others, taken apart and put together
allocate, fill   fresh tensors, also such that share a storage; and their elements, through `scratch` where they are cast
tree             a checkpoint's tree with torch's tensors in it
storages         very many tensors as columns; the bytes of many storages
open             `holdfast.torch.open`
slices           unread tensors for programs that load models piece by piece
"""
