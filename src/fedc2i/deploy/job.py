"""What to run over real sites, as the coordinator's commands ask for it and as its run folder keeps it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from fedc2i.core.errors import UserError, one_line
from fedc2i.core.files import plugin_checksums, plugin_file, write_atomically
from fedc2i.core.options import names
from fedc2i.flower.answer_collector import Policy
from fedc2i.methods.fedavg import FedAvg
from fedc2i.runs.settings import RunSettings, make

FILE = "job.json"
RUN_FILE = "run.json"  # who takes part, and how sites call the run


@dataclass(frozen=True)
class Job:
    """A run over real sites, as one flat record.

    Attributes:
        out: the run folder; an unfinished run in it is resumed.
        method: a method's name, with options after a colon, or ``FILE.py:CLASS``.
        settings: run settings and method options by name.
        sites: the sites' names in table order, where they are known.
        count: how many sites to wait for, where names are not known.
        keys: the sites' public keys by name, where nodes are authenticated.
        classes: the classes' names; if empty, those that the sites have.
        wait: seconds to wait for the sites at the start.
        policy: how long to wait for whom in a round, and how models travel.
        purpose: ``run``; ``survey``: only ask the sites who they are; ``contribution``: a run among a coalition of
            sites, which each of them must have agreed to.
        local: where the folders of all sites lie, seen from ``out``, if they are all on this machine; see
            `fedc2i.deploy.local_federation`.
    """

    out: Path
    method: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    sites: tuple[str, ...] = ()
    count: int = 0
    keys: Mapping[str, str] = field(default_factory=dict)
    classes: tuple[str, ...] = ()
    wait: float = 300.0
    policy: Policy = field(default_factory=Policy)
    purpose: Literal["run", "survey", "contribution"] = "run"
    local: str = ""

    @property
    def digest(self) -> str:
        """Changes with what decides the numbers."""
        decided = [self.method, dict(self.settings), self.sites, self.classes, self.policy.half]
        decided += [self.policy.secure_range] if self.policy.secure else []
        return hashlib.sha256(json.dumps(decided, sort_keys=True, default=str).encode()).hexdigest()[:12]

    @property
    def is_unfinished(self) -> bool:
        """Whether its folder holds this very run, unfinished."""
        try:
            return Job.read(self.out / FILE).digest == self.digest and not self.is_finished
        except (OSError, ValueError, KeyError, TypeError):
            return False

    @property
    def is_finished(self) -> bool:
        """Whether its folder holds a finished run, or a finished survey."""
        return (self.out / (RUN_FILE if self.purpose == "survey" else "summary.json")).is_file()

    def write(self) -> Path:
        """Writes it into its run folder; returns the file."""
        content = json.dumps({**asdict(self), "out": str(self.out)}, default=str)
        write_atomically(self.out / FILE, content.encode())
        return self.out / FILE

    @classmethod
    def read(cls, path: Path) -> Job:
        """Reads what `write` wrote; raises an `OSError`, `ValueError`, `KeyError` or `TypeError` for anything else."""
        values = json.loads(path.read_text(encoding="utf-8"))
        values |= {"out": Path(values["out"]), "policy": Policy(**values["policy"])}
        return cls(**values | {name: tuple(values[name]) for name in ("sites", "classes")})

    @classmethod
    def from_config(cls, values: Mapping[str, Any]) -> Job:
        """From the configuration of a Flower run: from the file ``job``, or from the keys that `flwr run -c` sets."""
        try:
            if values.get("job"):
                return cls.read(Path(str(values["job"])))
            settings = dict(part.partition("=")[::2] for part in str(values["set"]).split())
            for name in names(RunSettings, scope="run"):
                if name != "method" and values.get(name.replace("_", "-"), "") != "":
                    settings[name] = values[name.replace("_", "-")]
            policy, settings = split_policy(settings)
            out, method, wait = Path(str(values["out"])), str(values["method"]), float(values["wait"])
            return cls(out, method, settings, count=int(values["sites"]), wait=wait, policy=policy)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"the run's configuration cannot be read ({type(error).__name__}: {error})") from None

    def checksums(self) -> dict[str, str]:
        """SHA-256 of the files that its method and model come from."""
        return plugin_checksums(self.method, self.settings.get("model"))

    def refuse_changed_files(self) -> None:
        """Raises a `UserError` if its method or model comes from a file that has changed since the run started."""
        try:
            earlier = json.loads((self.out / RUN_FILE).read_text(encoding="utf-8"))["files"]
            now = self.checksums()
            others = [what for what, checksum in earlier.items() if now.get(what, checksum) != checksum]
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return  # not started, or whoever reads the rest says what is wrong
        for what in others:
            file = one_line(plugin_file({"method": self.method, **self.settings}[what]))
            raise UserError(
                f"{self.out}: {file}, where its {what} comes from, is not what it was when the run started; put it "
                "back, or run again with another --out"
            )


def split_policy(values: Mapping[str, Any], **defaults: Any) -> tuple[Policy, dict[str, Any]]:
    """How long to wait for whom and how models travel, and the other settings."""
    own = names(RunSettings, engine="flower", scope="run")
    chosen = {name: value for name, value in values.items() if name in own}
    config = make(FedAvg, {"engine": "flower", **defaults, **chosen})
    policy = Policy(
        config.deadline,
        config.min_sites,
        config.wire == "float16",
        secure=config.secure_aggregation,
        secure_range=config.secure_range,
    )
    return policy, {name: value for name, value in values.items() if name not in own}
