"""Flower's entry point at the coordinator: runs the job that the run's configuration describes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedc2i.core.errors import UserError
from fedc2i.deploy.lead import Job, lead
from fedc2i.flower import compat
from fedc2i.flower.answer_collector import Policy

compat.poll_objects(0.05)
app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Runs the job; an error that the user can correct becomes one line instead of a traceback."""
    try:
        lead(grid, job_of(dict(context.run_config)), lambda line: print(f"fedc2i: {line}", flush=True))
    except UserError as error:
        raise RuntimeError(str(error)) from None  # with other exceptions Flower takes a minute to notice the end


def job_of(values: dict[str, Any]) -> Job:
    """The job from a run's configuration: from the file ``job``, or from the keys that `flwr run -c` sets."""
    try:
        if values.get("job"):
            return Job.from_json(Path(str(values["job"])).read_text(encoding="utf-8"))
        pairs = [part.partition("=") for part in str(values["set"]).split()]
        settings = {name: value for name, _, value in pairs}
        settings |= {name: values[name] for name in ("model", "rounds") if values.get(name)}
        if values["wire"] not in ("float32", "float16"):
            raise ValueError(f"wire must be float32 or float16, got '{values['wire']}'")
        policy = Policy(float(values["deadline"]), int(values["min-sites"]), values["wire"] == "float16")
        return Job(
            Path(str(values["out"])),
            str(values["method"]),
            {**settings, "seeds": str(values["seeds"])},
            count=int(values["sites"]),
            wait=float(values["wait"]),
            policy=policy,
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"the run's configuration cannot be read ({type(error).__name__}: {error})") from None
