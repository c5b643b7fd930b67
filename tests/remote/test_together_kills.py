"""A rank of a command that writes to a bucket is killed: what is there is the old one or the new one, whole, and the same
command then succeeds."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast.errors import StoreError
from tests.remote.servers import Proxy
from tests.remote.test_verbs import names
from tests.sampling import count_rounds, random_for
from tests.together.launched import DEADLINE
from tests.together.test_processes import TOLERANCE, ran


@pytest.mark.slow("starts a server and ranks, and kills them again and again")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("verb", ["convert", "cp"])
def test_a_rank_that_uploads_is_killed(verb: str, proxy: Proxy, url: str, tmp_path: Path):
    name = f"kills of a rank that uploads: {verb}"
    rng = np.random.default_rng(random_for(name).getrandbits(32))
    kills = count_rounds(name, 4, total=24)
    for name in ("old", "new"):
        state = {
            f"layers.{i}.weight": rng.standard_normal((300, 256), np.float32) for i in range(12)
        }
        holdfast.save(
            state, tmp_path / name, format="safetensors", max_shard_size="600KB", durable=False
        )
    places = [f"{url}/{number}" for number in range(kills + 1)]
    for place in places:
        (holdfast.copy if verb == "cp" else holdfast.convert)(tmp_path / "old", place)

    def job(place: str) -> dict[str, object]:
        return {
            "argv": [verb, str(tmp_path / "new"), place, "--overwrite"],
            "size": 3,
            "room": str(tmp_path / "room"),
        }

    # The first command counts the calls of each rank, which include its requests.
    jobs = [job(places[0])]
    for place in places[1:]:
        jobs.append(
            job(place)
            | {
                "victim": int(rng.integers(3)),
                "share": float(rng.uniform(0.02, 0.9)),
                "agent": bool(rng.integers(2)),
            }
        )
    undisturbed, *rows = ran(jobs)
    assert [rank["status"] for rank in undisturbed["ranks"]] == [0, 0, 0], undisturbed
    died = sum(row["ranks"][row["victim"]]["status"] == -signal.SIGKILL for row in rows)
    assert 2 * died >= kills, "most of them, or the moments are badly chosen"
    clean = plain(places[0])
    for place, row in zip(places[1:], rows, strict=True):
        assert not row["stuck"], row
        assert all(late < DEADLINE + TOLERANCE for late in row["late"].values()), row
        if verb == "cp" and row["victim"] == 0 and not holdfast.verify(place).ok:
            # The documented moment of a copy over the same names, in which there is no checkpoint:
            # the old index is withdrawn, and the store copies the new files to their names.
            with pytest.raises(StoreError):
                holdfast.open(place)
            continue
        assert holdfast.verify(place).ok, row
        found = [
            name
            for name in ("old", "new")
            if holdfast.diff(place, tmp_path / name, tensors_only=True).equal
        ]
        assert len(found) == 1, row
        if row["victim"] and row["ranks"][0]["status"]:
            assert found == ["old"], row
            # One that never came is not named where the first rank hosts the store: torch counts, and says how many came.
            assert any(
                text in row["ranks"][0]["err"]
                for text in (f"rank {row['victim']}", "2/3 clients joined")
            ), row
    for place, row in zip(places[1:], ran([job(place) for place in places[1:]]), strict=True):
        assert [rank["status"] for rank in row["ranks"]] == [0, 0, 0], row
        assert holdfast.diff(place, tmp_path / "new", tensors_only=True).equal, row
        # A conversion that was killed leaves data under the id of its save, which nobody else may delete; a copy has a claim.
        left, meant = (
            sorted({*one}) if verb == "convert" else one for one in (plain(place), clean)
        )
        assert left == meant, "nothing else is left of what was given up"


def plain(place: str) -> list[str]:
    """The names of all objects, without the ids of saves."""
    return sorted(re.sub(r"[0-9a-f]{16}", "ID", name) for name in names(place))
