"""Steps of a run that may be damaged, and therefore may not be the base of a later step.

Steps share the files that did not change: as hard links in a directory, as objects that several
manifests name in a bucket. So they share damage, too. When a step does not read back, every step
that exists becomes doubtful. The next step is written whole and read back at once. If it is good,
later steps share files with it.

The doubts are stored in `holdfast.doubts.json`, for the next process.
"""

from __future__ import annotations

import threading
import warnings

from holdfast.core.runtime import make_fork_safe
from holdfast.errors import HeaderError, HoldfastWarning
from holdfast.extras.runs.place import RunPlace
from holdfast.extras.runs.record import DOUBTS, Doubt, Doubts
from holdfast.extras.runs.retention import read_back
from holdfast.extras.runs.steps import Step

StepKey = tuple[int, float]
"""A step number and the time of the save: another step may be saved under the same number."""


def key_of(step: Step) -> StepKey:
    """Return what identifies a step among all that were ever saved."""
    return step.step, step.saved


class DoubtfulSteps:
    """The steps of one run that may not be a base. Its methods may be called from any thread."""

    def __init__(self, place: RunPlace) -> None:
        self._place = place
        # A background save and a deep look of the main thread may meet here. A fork gets a new lock.
        self._lock = make_fork_safe(threading.RLock())
        self._reasons: dict[StepKey, str] | None = None  # None until the document has been read.
        self._is_changed = False
        self.damages: tuple[str, ...] = ()
        """Descriptions of all damage that was found, for the summary."""

    def is_doubted(self, step: Step) -> bool:
        """Return whether a step may not be a base."""
        with self._lock:
            return key_of(step) in self._read()

    def mark_damaged(self, step: Step, reason: str) -> None:
        """Record that a step did not read back. No existing step is a base until it reads back."""
        with self._lock:
            reasons = self._read()
            for other in self._place.steps():
                reasons[key_of(other)] = f"step {step.step} did not read back"
            reasons[key_of(step)] = reason
            self._is_changed = True
            self.damages = (*self.damages, f"step {step.step}: {reason}")

    def mark_good(self, step: Step) -> None:
        """Record that a step was read back without damage."""
        with self._lock:
            if self._read().pop(key_of(step), None) is not None:
                self._is_changed = True

    def check_saved(self, step: Step) -> None:
        """Read a newly saved step back if other steps are doubtful, and warn if it is damaged.

        After damage, the disk or the memory of this machine may go on to damage what it writes. So
        the first step after it is a base only if it reads back.
        """
        with self._lock:
            reasons = self._read()
            if not reasons or key_of(step) in reasons:
                return
        if read_back(step):
            self.mark_good(step)
            return
        self.mark_damaged(step, "its bytes do not have their checksums")
        message = f"step {step.step} was written and does not read back"
        warnings.warn(f"{step.path}: {message}", HoldfastWarning, stacklevel=5)

    def write(self) -> None:
        """Store the doubts for the next process. The caller has the run open for writing."""
        with self._lock:
            if not self._is_changed:
                return
            # The directory may belong to another run by now.
            self._place.check()
            reasons = self._read()
            existing = {key_of(step) for step in self._place.steps()} if reasons else set()
            self._reasons = {key: reason for key, reason in reasons.items() if key in existing}
            doubts = [Doubt(*key, why=reason) for key, reason in sorted(self._reasons.items())]
            document = Doubts(doubted=doubts)
            self._place.change_record(DOUBTS, lambda _: document, durable=False)
            self._is_changed = False

    def _read(self) -> dict[StepKey, str]:
        """Return the doubts, read from the document on the first call."""
        if self._reasons is None:
            try:
                document = self._place.read_record(DOUBTS) or Doubts()
                self._reasons = {(doubt.step, doubt.saved): doubt.why for doubt in document.doubted}
            except HeaderError as error:
                # Nobody can tell any more which steps were doubted: all of them are.
                self._reasons = {key_of(step): error.message for step in self._place.steps()}
        return self._reasons
