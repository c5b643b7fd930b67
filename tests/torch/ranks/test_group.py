"""Which ranks save together, as `torch.distributed` describes them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from holdfast.torch.ranks import group
from tests.rank_folders import as_rank


@pytest.fixture
def forked_from_ranks(request, monkeypatch) -> Iterator[None]:
    """A process that was forked from a rank, of as many ranks as the test asks for."""
    with as_rank(0, request.param):
        inherited_groups = tuple(dist.distributed_c10d._world.pg_map)
        monkeypatch.setattr(group, "_inherited", inherited_groups)
        yield


@pytest.mark.parametrize("forked_from_ranks", [1], indirect=True)
def test_a_fork_of_a_lone_rank_saves_alone(forked_from_ranks):
    assert group.group_of(None).size == 1


@pytest.mark.parametrize("forked_from_ranks", [2], indirect=True)
def test_a_fork_of_one_of_several_ranks_is_refused(forked_from_ranks):
    with pytest.raises(ValueError, match="fork of a rank"):
        group.group_of(None)
