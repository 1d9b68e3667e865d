"""What an interrupted run needs to resume, in its folder until it is finished.

checkpoints/fingerprint.json      what it was started with: settings, data, versions, device
checkpoints/round*          the state of all seeds after the last two rounds that were kept
rounds/seed*/round*.npz     the reports of finished rounds

A round's reports are written before its checkpoint. So a checkpoint's reports are always there, and what was written
after it is computed again.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from fedc2i.core.errors import UserError
from fedc2i.core.files import to_json, write_atomically, writing
from fedc2i.engine import checkpoint_file
from fedc2i.engine.records import Round
from fedc2i.engine.state import ResumePoint, State, last_rounds
from fedc2i.runs import journal
from fedc2i.runs.fingerprint import Fingerprint, fingerprint_path

SUMMARY = "summary.json"
MUCH = 10**9  # bytes of checkpoints for each round, that a user should know of


class Checkpoints:
    """Writes a run's checkpoints and reports, finds the one to resume from, and cleans up."""

    def __init__(self, folder: Path, every: int) -> None:
        """In a run folder, a checkpoint after every ``every`` rounds and after the last one; 0: none at all."""
        self._folder, self._every = folder, every
        self._states = folder / "checkpoints"

    def clean(self) -> None:
        """Removes what an interruption left half-written."""
        with writing(self._folder):
            for rest in self._folder.rglob(".*.part"):
                rest.unlink(missing_ok=True)

    def expect(self, size: int, say: Callable[[str], None]) -> None:
        """Says how many bytes a checkpoint will have, if that is much for a round."""
        if not self._every or size / self._every < MUCH:
            return
        often = "after every round" if self._every == 1 else f"after every {self._every} rounds"
        amount = f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
        say(
            f"checkpoints of about {amount} are written into {self._states} {often}; "
            "checkpoint_every=K (--set) writes them after every K rounds, 0 none"
        )

    def begin(self, fingerprint: Fingerprint) -> None:
        """Writes down what the run is started with."""
        write_atomically(fingerprint_path(self._folder), to_json(asdict(fingerprint)).encode(), durable=True)

    def record(self, report: Round) -> None:
        """Keeps a round's report."""
        if self._every:
            journal.write(self._reports(report.seed), report)

    def save(self, number: int, is_last: bool, state: Callable[[], State]) -> None:
        """Writes the state after a round, if that round has a checkpoint."""
        if self._every and (is_last or number % self._every == 0):
            checkpoint_file.save(self._states, number, *state())

    def latest(
        self, seeds: Sequence[int], require_fit: Callable[[State, int], None]
    ) -> tuple[ResumePoint, list[Round]] | None:
        """The state to resume from, with all reports up to there in order; none if the run has to start.

        Args:
            seeds: of the run.
            require_fit: raises a `UserError` for a state, and the round it is of, that the run cannot resume from.

        Raises:
            UserError: if there are checkpoints, and none can be used.
        """
        damaged: list[str] = []
        for saved in checkpoint_file.sound(self._states):
            try:
                require_fit((saved.tensors, saved.values), saved.round)
            except UserError as error:
                damaged.append(str(error))
                continue
            try:
                ends = last_rounds(saved.values, saved.round)
                by_seed = {seed: journal.read(self._reports(seed), ends[seed] + 1) for seed in seeds}
            except (UserError, KeyError, AttributeError, ValueError, TypeError) as error:
                damaged.append(f"round {saved.round}: {error}")
                continue
            reports = [own[number] for number in range(saved.round) for own in by_seed.values() if number < len(own)]
            return ResumePoint(*saved, {seed: own[-1] for seed, own in by_seed.items()}), reports
        if any(self._states.glob("round*.json")):
            why = "; ".join(damaged) or "all are damaged"
            raise UserError(
                f"{self._states}: no checkpoint can be used ({why}); "
                "remove the files round* there, and the run starts again"
            )
        return None

    def remove(self) -> None:
        """Removes what only an unfinished run needs."""
        for name in ("checkpoints", "rounds"):
            shutil.rmtree(self._folder / name, ignore_errors=True)

    def _reports(self, seed: int) -> Path:
        return self._folder / "rounds" / f"seed{seed}"
