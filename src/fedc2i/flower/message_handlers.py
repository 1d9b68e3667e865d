"""A site's Flower App: introduces the site, and does its tasks on its data."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedc2i.core.errors import UserError
from fedc2i.data.federation import Client, Split
from fedc2i.engine.client import ClientData
from fedc2i.engine.clip_noise import secret_in
from fedc2i.flower.messages import Answer, Introduction, Task, failure
from fedc2i.flower.site import Assignment, perform
from fedc2i.flower.site_memory import ContextMemory, FolderMemory, Memory
from fedc2i.models.validation import validate


@dataclass(frozen=True)
class Home:
    """A site's data, and where it computes.

    Attributes:
        client: the data, under the site's name.
        classes: names of its labels.
        state: folder for its models; None keeps them in the node's state.
        device: None for a GPU if there is one.
    """

    client: Client
    classes: tuple[str, ...]
    state: Path | None = None
    device: torch.device | None = None

    def introduction(self) -> Introduction:
        """What the coordinator learns about the site."""
        parts = {"train": self.client.train, "validation": self.client.validation, "test": self.client.test}
        shape = tuple(self.client.train.x.shape[1:])
        return Introduction(self.client.name, {name: len(own) for name, own in parts.items()}, self.classes, shape)

    def memory(self, context: Context, run: str) -> Memory:
        """Where the site keeps its models of a run."""
        return ContextMemory(context.state, run) if self.state is None else FolderMemory(self.state, run)

    def secret(self) -> bytes:
        """A real site's key for the noise on its uploads, which the coordinator does not know."""
        return b"" if self.state is None else secret_in(self.state)

    def data(self, classes: tuple[str, ...]) -> ClientData:
        """The data, with labels numbered as in the run."""
        client = self.client
        if classes != self.classes:
            unknown = [name for name in self.classes if name not in classes]
            if unknown:
                raise UserError(f"the run has no class {', '.join(unknown[:8])}; it has {', '.join(classes[:20])}")
            order = torch.tensor([classes.index(name) for name in self.classes])
            train, validation, test = (
                Split(own.x, order[own.y]) for own in (client.train, client.validation, client.test)
            )
            client = Client(client.name, train, validation, test)
        best = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return ClientData.place(client, len(classes), self.device or best)


def make(
    find_home: Callable[[Context], Home], find_assignment: Callable[[Task], tuple[Assignment, tuple[str, ...]]]
) -> ClientApp:
    """The Flower App of a site; the coordinator gets one line for every error."""
    app = ClientApp()

    @app.query()
    def introduce(message: Message, context: Context) -> Message:
        return _reply(message, lambda: find_home(context).introduction().to_record())

    @app.train()
    def work(message: Message, context: Context) -> Message:
        def answer() -> RecordDict:
            task, received = Task.from_record(message.content)
            assignment, classes = find_assignment(task)
            home = find_home(context)
            validate(assignment.recipe.model, home.client.train.x[:2], len(classes))
            own, memory = home.data(classes), home.memory(context, task.run)
            secret = home.secret() if assignment.settings.noise else b""
            done: Answer = perform(task, received, assignment, own, memory, secret)
            return done.to_record(task.half)

        return _reply(message, answer)

    return app


def _reply(message: Message, answer: Callable[[], RecordDict]) -> Message:
    try:
        content = answer()
    except UserError as error:
        content = failure(str(error))
    except Exception as error:  # one line for the coordinator, the traceback for the site's log
        traceback.print_exc()
        content = failure(f"{type(error).__name__}: {error}")
    return Message(content, reply_to=message)
