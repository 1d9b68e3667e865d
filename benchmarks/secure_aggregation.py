"""What secure aggregation costs in one round: CPU seconds of a site and the coordinator, bytes, and the mean's error.

Both are those of a real run, without network and training. Run ``python -m benchmarks.secure_aggregation``.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.supercore.task_identity import TaskIdentity

from fedc2i.deploy.partners import Partners
from fedc2i.deploy.site_folder import make_site
from fedc2i.flower.masking import LEAST, UPLOAD
from fedc2i.flower.message_format import Answer, Task
from fedc2i.flower.secure_round import SecureRound
from fedc2i.flower.secure_site import SecureSite

SITES, NUMBERS = (3, 5, 10, 30), 44_426  # those of LeNet-5 for ten classes
TASK = Task("run", 1, 0, 0, True, False, False, False, "{}")


def measure(folder: Path, count: int) -> str:
    """One round with this many sites, as a row of a table."""
    values = np.random.default_rng(0).standard_normal((count, NUMBERS)).astype(np.float32)
    sites = []
    for m in range(count):
        own, _ = make_site(folder / f"{m}", f"{m}", "digits", "h:1", check=False)
        sites.append(SecureSite(own.folder / "masks.bin", "run", Partners(own)))
    at_sites = 0.0

    def ask(number: int, tasks: Any, requests: Mapping[int, Mapping[str, Any]], needed: int) -> dict[int, Answer]:
        nonlocal at_sites
        began = time.process_time()
        answers = {
            m: sites[m].answer(1, asked, lambda m=m: Answer({"w": torch.from_numpy(values[m])}))  # type: ignore[misc]
            for m, asked in requests.items()
        }
        at_sites += time.process_time() - began
        return answers

    def weights(clients: Sequence[int]) -> list[float]:
        return [1.0] * len(clients)

    shapes = (("w", "torch.float32", (NUMBERS,)),)
    round = SecureRound("run", 1, [""] * count, ask, shapes, weights, LEAST, 64.0, print)
    began = time.process_time()
    answers = round.collect(range(count), lambda clients: dict.fromkeys(clients, TASK))
    total = time.process_time() - began
    error = np.abs(answers[0].upload["w"].double().numpy() - values.astype(np.float64).mean(0)).max()
    keys_up, keys_down = answers[0].bytes - 4 * (NUMBERS + 1), round.bytes_down // count
    return (
        f"| {count} | {at_sites / count:.3f} | {total - at_sites:.3f} | {4 * (NUMBERS + 1) / 1e3:.1f} | "
        f"{keys_up / 1e3:.1f} | {keys_down / 1e3:.1f} | {error:.1e} |"
    )


def main() -> None:
    """Prints the table."""
    for part in ("_task_id", "_run_id", "_node_id"):  # Flower's runtime fills this in
        setattr(TaskIdentity, part, 1)
    print(f"{NUMBERS:,} numbers; `{UPLOAD}` and keys in kB a site and round")
    print("| sites | CPU s a site | CPU s coordinator | upload | keys up | keys down | error of the mean |")
    print("|---|---|---|---|---|---|---|")
    for count in SITES:
        with tempfile.TemporaryDirectory() as folder:
            print(measure(Path(folder), count), flush=True)


if __name__ == "__main__":
    main()
