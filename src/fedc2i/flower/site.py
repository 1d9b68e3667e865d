"""A site: its Flower App, and its work in a round, which is that of the simulator's `LocalClient`."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedc2i.core.errors import UserError, one_line
from fedc2i.core.params import Params, row, stack
from fedc2i.core.seeding import repeatable
from fedc2i.core.settings import EngineSettings
from fedc2i.data import scaling
from fedc2i.data.federation import Client, InputSpec, Split
from fedc2i.data.schema import Schema, check_fit
from fedc2i.data.table import ENCODING, Rows
from fedc2i.engine.client import ClientData, LocalClient, RunContext
from fedc2i.engine.clip_noise import run_secret
from fedc2i.engine.records import Point
from fedc2i.engine.upload import process
from fedc2i.flower.message_format import GREETING, MOST_REASON, Answer, Introduction, Task, failure, masking_of
from fedc2i.flower.site_models import ContextMemory, FolderMemory, Memory, Predictor
from fedc2i.models.model import Model
from fedc2i.models.validation import validate

COMPLAINT = "fedc2i site: "  # starts a line that the people at the site should see


@dataclass(frozen=True)
class Assignment:
    """What all sites of a run do."""

    context: RunContext
    settings: EngineSettings
    schema: Schema | None = None  # on which sites with tables have agreed
    config: str = ""  # the run's settings as TOML, for the site's own folder


@dataclass(frozen=True)
class Home:
    """A site's data, and where it computes.

    Attributes:
        client: the data, under the site's name.
        classes: names of its labels.
        state: folder for its models; None keeps them in the node's state.
        device: None for a GPU if there is one.
        rows: of a table, as read; a run encodes them by its schema.
        encoding: how they were.
        noise_key: for the noise on a run's uploads, where the key in ``state`` is out of reach.
    """

    client: Client
    classes: tuple[str, ...]
    state: Path | None = None
    device: torch.device | None = None
    rows: Rows | None = None
    encoding: str = ""
    noise_key: bytes = b""

    @property
    def schema(self) -> Schema | None:
        """Of the site's own table, if its data is one."""
        return None if self.rows is None else self.rows.describe()[self.client.name]

    def introduction(self) -> Introduction:
        """What the coordinator learns about the site."""
        parts = {"train": self.client.train, "validation": self.client.validation, "test": self.client.test}
        sample = InputSpec.of(self.client.train.x)
        sizes = {name: len(own) for name, own in parts.items()}
        return Introduction(self.client.name, sizes, self.classes, sample, self.schema)

    def encoded(self, agreed: Schema | None) -> Home:
        """With inputs as all sites of a run have them, if their data are tables.

        Raises:
            UserError: if the site's table does not fit.
        """
        own = self.schema
        if own is None or self.rows is None or agreed is None:
            if own is not agreed:
                raise UserError(f"this site has {'no table' if own is None else 'a table'}, and the run is over others")
            return self
        check_fit(self.client.name, own, agreed)
        with private_reasons():
            found = self.rows.encode(agreed)
        return replace(self, client=found.clients[0], encoding=found.attachments[ENCODING])

    def memory(self, state: RecordDict | None, run: str, predictor: Predictor | None = None) -> Memory:
        """Where the site keeps its models of a run; ``state`` is the node's, for a site without a folder."""
        if self.state is None:
            return ContextMemory(RecordDict() if state is None else state, run)
        return FolderMemory(self.state, run, predictor)

    def predictor(self, assignment: Assignment, classes: tuple[str, ...]) -> Predictor:
        """What is stored beside the last models, so that `fedc2i export` reads them, and `predict` as well if the data
        is a table or images.
        """
        seed, told = assignment.context.seed, self.introduction()
        summary = {"classes": classes, "seeds": [seed], "input": told.input.to_json(), "samples": told.samples}
        texts = {"config.toml": assignment.config, "summary.json": json.dumps(summary)}
        texts |= {ENCODING: self.encoding} if self.encoding else scaling.attachment([self.client])
        return Predictor(self.client.name, seed, texts)

    def secret(self, run: str) -> bytes:
        """A real site's key for the noise on a run's uploads, which the coordinator does not know."""
        return self.noise_key or (b"" if self.state is None else run_secret(self.state, run))

    def data(self, classes: tuple[str, ...], model: Model | None = None) -> ClientData:
        """The data, with labels numbered as in the run; features of images, if only the head of the model trains."""
        client, best = self.client, torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if model is not None and model.has_constant_body:
            from fedc2i.models import features

            client = features.of_client(client, model, self.device or best, features.timed(complain))
        if classes != self.classes:
            unknown = [name for name in self.classes if name not in classes]
            if unknown:
                raise UserError(f"the run has no class {', '.join(unknown[:8])}; it has {', '.join(classes[:20])}")
            order = torch.tensor([classes.index(name) for name in self.classes])
            parts = (Split(own.x, order[own.y]) for own in (client.train, client.validation, client.test))
            client = Client(client.name, *parts)
        return ClientData.place(client, len(classes), self.device or best)


def make_app(
    find_home: Callable[[Context], Home], find_assignment: Callable[[Task], tuple[Assignment, tuple[str, ...]]]
) -> ClientApp:
    """The Flower App of a site: it introduces the site, and does its tasks.

    The coordinator gets one line for every error. ``find_assignment`` also gives the names of the run's classes.
    """
    app = ClientApp()

    def handle(message: Message, context: Context) -> Message:
        kind, content = message.metadata.message_type, message.content
        found = replying(lambda: answer(kind, content, find_home(context), find_assignment, context.state))
        return Message(found, reply_to=message)

    app.query()(handle)
    app.train()(handle)
    return app


def answer(
    kind: str,
    content: RecordDict,
    home: Home,
    find_assignment: Callable[[Task], tuple[Assignment, tuple[str, ...]]],
    state: RecordDict | None = None,
) -> RecordDict:
    """The content of the reply to a message; ``state`` holds the models of a site without a folder."""
    if kind == GREETING:
        if reason := str(content["greeting"].get("rejected", "")):
            complain(f"the coordinator rejects this site: {reason}")
        return home.introduction().to_record()
    task, received = Task.from_record(content)
    if masking_of(content):
        raise UserError("secure aggregation needs a site of `fedc2i site start`")
    assignment, classes = find_assignment(task)
    home = home.encoded(assignment.schema)
    model = assignment.context.model
    validate(model, home.client.train.x[:2], len(classes))
    own = home.data(classes, model)
    memory = home.memory(state, task.run, home.predictor(assignment, classes))
    if model.has_constant_body:
        assignment = replace(assignment, context=replace(assignment.context, model=model.on_features()))
    secret = home.secret(task.run) if assignment.settings.noise else b""
    return perform(task, received, assignment, own, memory, secret).to_record(task.half)


def replying(answer: Callable[[], RecordDict]) -> RecordDict:
    """The answer, or one line with the reason why there is none."""
    try:
        return answer()
    except UserError as error:
        complain(str(error))
        return failure(str(error))
    except Exception as error:  # one line for the coordinator, the traceback for the site's log
        traceback.print_exc()
        return failure(f"{type(error).__name__}: {error}")


def complain(reason: str) -> None:
    """One line in the site's log, which `fedc2i site start` shows."""
    print(f"{COMPLAINT}{one_line(reason, MOST_REASON)}", flush=True)


@contextmanager
def private_reasons() -> Iterator[None]:
    """What is wrong with a row may quote it, so the site's log has the reason, and the coordinator gets none."""
    try:
        yield
    except Exception as error:
        complain(str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}")
        raise UserError("its table cannot be read or encoded; the site's own log says why") from None


def perform(
    task: Task, received: Params, assignment: Assignment, data: ClientData, memory: Memory, secret: bytes
) -> Answer:
    """Does a task with the tensors received from the last exchange, and keeps the trained model.

    A round starts from the latest model before it. ``secret`` is the site's key for noise; if it is empty, noise
    follows from the run's seed.
    """
    context, settings, device = assignment.context, assignment.settings, data.counts.device
    client = LocalClient(context, data)
    received = {name: tensor.to(device) for name, tensor in received.items()}
    own = memory.load(task.round) or context.first_model(data.name, settings.init)
    own = {name: tensor.to(device) for name, tensor in own.items()}
    report: Params = {}
    metrics: dict[Point, dict[str, float]] = {}
    with repeatable(settings):
        start, upload = own, {}
        if task.exchange and (task.train or task.score_received):
            start, told = client.personalise(own, received, task.position, task.exchange)
            report = {name: tensor.detach() for name, tensor in told.items()}
            if task.score_received:
                metrics["received"] = client.evaluate(start, received, task.position, task.exchange)
        if task.train:
            own = client.train(start, received, task.position, task.round)
            upload = client.upload(own, start, received, task.position, task.round)
            run = task.round, context, settings
            as_sent = process(stack([upload]), stack([start]), [data.name], *run, lambda k: received, secret)
            upload = row(as_sent, 0)
            memory.save(task.round, own)
        if task.score_trained:
            metrics["trained"] = client.evaluate(own, received, task.position, task.round)
    if task.exchange and not task.train and not task.score_trained:  # the last exchange
        memory.finish({"received": start, "trained": own})
    # Noise does not protect what a client measured of others.
    return Answer(upload, {} if settings.noise else report, metrics)
