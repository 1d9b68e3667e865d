"""One method, three ways to run it: a plain loop, all clients stacked, and sites that only exchange Flower messages.

In the third way nothing but bytes passes between the server and a client: every upload and every download becomes a
Flower message, is taken apart by Flower's own code, and put together again on the far side.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fedc2i.core.params import Params, stack
from fedc2i.data.federation import Federation
from fedc2i.engine.client import ClientData, LocalClient, RunContext
from fedc2i.engine.records import Outcome
from fedc2i.engine.server import Server
from fedc2i.engine.settings import EngineSettings
from fedc2i.engine.simulator import simulate
from fedc2i.methods.base import Method
from fedc2i.methods.fedavg import FedAvg
from fedc2i.methods.fedc2i import FedC2I
from fedc2i.methods.fedproto import FedProto
from fedc2i.models.model import Model
from fedc2i.training.settings import TrainingSettings
from oracles import assert_same_model

pytest.importorskip("flwr.app")
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity

ROUNDS, SEED = 2, 3
TRAINING = TrainingSettings(batch_size=5, lr=0.01)
METHODS = [
    FedAvg(),
    FedAvg(weighting="samples"),
    FedC2I(),
    FedProto(weighting="counts"),
]
Route = Callable[[Message], Message]


@pytest.fixture(autouse=True)
def identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message carries who made it; Flower's runtime fills this in."""
    for part in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, part, 1)


def as_protobuf(message: Message) -> Message:
    """One blob, as in a gRPC call."""
    return message_from_proto(ProtoMessage.FromString(message_to_proto(message).SerializeToString()))


def as_objects(message: Message) -> Message:
    """Many objects, each named by its hash, as SuperLink and SuperNode exchange them."""
    contents = {name: part.deflate() for name, part in get_all_nested_objects(message).items()}
    assert all(isinstance(content, bytes) for content in contents.values())
    return inflate_object_from_contents(message.object_id, contents)


def send(tensors: Params, position: int, route: Route) -> tuple[Params, int]:
    """Tensors and a number to a message, over the route, and back."""
    arrays = ArrayRecord({name: Array(tensor.numpy()) for name, tensor in tensors.items()})
    content = RecordDict({"arrays": arrays, "config": ConfigRecord({"position": position})})
    arrived = route(Message(content, dst_node_id=1, message_type="train"))
    assert arrived.content is not content
    received = {name: torch.from_numpy(array.numpy().copy()) for name, array in arrived.content["arrays"].items()}
    return received, int(arrived.content["config"]["position"])


def through_flower(method: Method, model: Model, federation: Federation, route: Route) -> tuple[Params, Params]:
    """The rounds of `simulate`, with a wire between server and clients."""
    recipe = RunContext(method, model, TRAINING, ROUNDS, SEED)
    data = [ClientData.place(client, len(federation.classes), torch.device("cpu")) for client in federation.clients]
    clients = [LocalClient(recipe, own) for own in data]
    everyone = range(len(clients))
    starts = [method.setup(model.init(SEED, "init"), model) for _ in everyone]
    server = Server(method, torch.tensor([own.samples for own in data]), stack(starts))
    mail: list[tuple[Params, int]] = [({}, -1) for _ in everyone]
    for number in range(1, ROUNDS + 1):
        trained = [clients[m].train(starts[m], *mail[m], number) for m in everyone]
        uploads = [send(clients[m].upload(trained[m], starts[m], *mail[m], number), 0, route)[0] for m in everyone]
        assert server.mailbox.receive(list(everyone), stack(uploads), number) == {}
        download = server.combine(number)
        mail = [send(download.to(m), download.position(m), route) for m in everyone]
        starts = [clients[m].personalise(trained[m], *mail[m], number)[0] for m in everyone]
    return stack(trained), stack(starts)


def in_process(method: Method, model: Model, federation: Federation, executor: str) -> Outcome:
    settings = EngineSettings(rounds=ROUNDS, executor=executor, **vars(TRAINING), threads=torch.get_num_threads())
    return simulate(method, model, federation, settings, [SEED])[SEED]


@pytest.mark.parametrize("method", METHODS, ids=["fedavg", "fedavg-samples", "fedc2i", "fedc2i-counts"])
def test_three_ways_one_result(method: Method, model: Model, federation: Federation) -> None:
    looped = in_process(method, model, federation, "looped")
    stacked = in_process(method, model, federation, "stacked")
    assert_same_model(stacked.trained, looped.trained, rtol=1e-4, atol=1e-5)
    assert_same_model(stacked.received, looped.received, rtol=1e-4, atol=1e-5)
    for route in (as_protobuf, as_objects):
        trained, received = through_flower(method, model, federation, route)
        assert_same_model(trained, looped.trained, rtol=0, atol=0)
        assert_same_model(received, looped.received, rtol=0, atol=0)


@pytest.mark.parametrize("route", [as_protobuf, as_objects])
def test_the_wire_keeps_every_bit_shape_and_type(route: Route) -> None:
    odd = {
        "weight": torch.tensor([[0.1, -0.0], [float("inf"), float("nan")]]),
        "double": torch.tensor([1 / 3], dtype=torch.float64),
        "count": torch.tensor([2**40, -1]),
        "scalar": torch.tensor(2.5),
        "nothing": torch.zeros(0, 3),
    }
    got, position = send(odd, -1, route)
    assert position == -1
    assert list(got) == list(odd)
    for name, tensor in odd.items():
        assert got[name].dtype == tensor.dtype
        assert got[name].shape == tensor.shape
        assert got[name].numpy().tobytes() == tensor.numpy().tobytes()
