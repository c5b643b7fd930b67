"""Tensors of which every rank wants all elements: read once, by one rank each, and handed to the others.

    every rank   what it wants whole: name, dtype, shape, device                      ──► gather
    rank 0       what all of them want, spread over the ranks by bytes                ──► each knows who reads what
    every rank   reads its share (and whatever else it needs)                         ──► did all of it go well?
    every rank   takes part in a broadcast of each

On one machine the file is in the page cache, and reading it again is cheaper than sending it over a socket; between machines, and
between GPUs, it is the other way round. So "auto" hands on where the ranks are on several machines or the tensors on GPUs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec
import torch
import torch.distributed as dist

from holdfast.torch.tensors.scratch import Fill

__all__ = ["Replicated", "Share", "hand_on", "offers", "spread"]

Replicated = Literal["auto", "read", "broadcast"]

WORTH_NBYTES = 16 << 20
"""Bytes that must be saved, over all ranks, before "auto" hands anything on."""


class Offer(msgspec.Struct, frozen=True):
    """A tensor that a rank wants whole."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    device: str
    nbytes: int


class Share(msgspec.Struct):
    """A tensor that one rank reads for all."""

    name: str
    owner: int


def offers(whole: Mapping[str, Fill], group: dist.ProcessGroup | None) -> bytes:
    """What this rank wants whole and could get from another: dense tensors on devices that the group can send between."""
    devices = _devices(group)
    found = [
        Offer(name, str(fill.target.dtype), tuple(fill.target.shape), fill.target.device.type, fill.lazy.nbytes)
        for name, fill in whole.items()
        if fill.target.device.type in devices and fill.target.is_contiguous() and not fill.target.is_conj() and fill.lazy.nbytes
    ]
    return msgspec.msgpack.encode(found)


def spread(messages: Sequence[bytes], how: Replicated, *, machines: bool) -> bytes:
    """Who reads what for all; the largest first, each by the rank that has least to read. `machines`: whether there are several."""
    told = [msgspec.msgpack.decode(message, type=list[Offer]) for message in messages]
    common = set(told[0]).intersection(*told[1:]) if how != "read" and len(told) > 1 else set[Offer]()
    if how == "auto":
        common = {offer for offer in common if machines or offer.device != "cpu"}
        if sum(offer.nbytes for offer in common) * (len(told) - 1) < WORTH_NBYTES:
            common = set()
    load = [0] * len(told)
    shares = []
    for offer in sorted(common, key=lambda offer: (-offer.nbytes, offer.name)):
        owner = load.index(min(load))
        load[owner] += offer.nbytes
        shares.append(Share(offer.name, owner))
    return msgspec.msgpack.encode(shares)


def hand_on(shares: Sequence[Share], whole: Mapping[str, Fill], group: dist.ProcessGroup | None) -> None:
    """Broadcast every tensor from the rank that has read it. Every rank calls it, when all have read."""
    for share in shares:
        target = whole[share.name].target
        dist.broadcast(_octets(target), group=group, group_src=share.owner)
        torch.autograd.graph.increment_version(target)


def _octets(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a dense tensor: there are dtypes that no backend sends."""
    return tensor.view(-1).view(torch.uint8) if tensor.dtype != torch.uint8 else tensor.view(-1)


def _devices(group: dist.ProcessGroup | None) -> set[str]:
    if not dist.is_available() or not dist.is_initialized():
        return set()
    chosen = group if group is not None else dist.distributed_c10d._get_default_group()
    return {device.type for device in chosen._device_types}
