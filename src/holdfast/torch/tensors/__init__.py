"""Between lazy tensors and torch's.

from_lazy        a lazy tensor as torch's, the same bits; `live_storages` gives a second name a view of the first
to_lazy          torch tensors as lazy ones over the memory that they have
allocate, fill   fresh tensors (`shared_regions`: those that share a storage), and their elements, through `scratch`
cast_losses      what casts lose on the way
tree             a checkpoint's tree with torch's tensors in it
open             `holdfast.torch.open`
memory           a storage's bytes as Python memory
"""
