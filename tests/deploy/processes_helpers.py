"""A tiny Flower App, and keys and certificates for loopback, for the tests of real processes."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives import serialization as form
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from fedc2i.deploy.flower_processes import Tls

_FILES = {
    "pyproject.toml": """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "stub"
version = "1.0.0"
description = ""
license = "Apache-2.0"
dependencies = ["flwr"]
[tool.hatch.build.targets.wheel]
packages = ["."]
[tool.flwr.app]
publisher = "nobody"
[tool.flwr.app.components]
serverapp = "stub.server_app:app"
clientapp = "stub.client_app:app"
[tool.flwr.app.config]
rounds = 1
fail = false
seconds = 0.0
out = ""
""",
    "stub/__init__.py": "",
    "stub/server_app.py": """
import time
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import ServerApp

app = ServerApp()


@app.main()
def main(grid, context):
    if context.run_config["fail"]:
        raise RuntimeError("told to fail")
    for number in range(int(context.run_config["rounds"])):
        names = {node.node_id: (node.name, node.public_key) for node in grid.get_nodes()}
        began = time.time()
        config = {"sent": began, "seconds": float(context.run_config["seconds"])}
        out = [Message(RecordDict({"config": ConfigRecord(config)}), node, "train", ttl=120.0) for node in names]
        open_ids = set(grid.push_messages(out))
        while open_ids:
            for reply in grid.pull_messages(list(open_ids)):
                open_ids.discard(reply.metadata.reply_to_message_id)
                now = time.time() - began
                if reply.has_error():
                    line = f"error {reply.error.code} {reply.error.reason} from {reply.metadata.src_node_id} {now:.2f}"
                else:
                    told = dict(reply.content["told"])
                    name, key = names[reply.metadata.src_node_id]
                    line = f"reply of {name} site={told['site']} {told['began'] - began:.2f} {now:.2f} {key[:26]}"
                if context.run_config["out"]:
                    with open(context.run_config["out"], "a") as file:
                        print(line, file=file)
            time.sleep(0.1)
""",
    "stub/client_app.py": """
import time
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message, context):
    began = time.time()
    time.sleep(message.content["config"]["seconds"])
    told = ConfigRecord({"site": str(context.node_config.get("site", "")), "began": began})
    return Message(RecordDict({"told": told}), reply_to=message)
""",
}


def write_app(folder: Path) -> Path:
    for name, text in _FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text.lstrip(), encoding="utf-8")
    return folder


def write_key(folder: Path, name: str) -> tuple[Path, Path]:
    """A site's private key and its public one."""
    key = ec.generate_private_key(ec.SECP384R1())
    private, public = folder / name, folder / f"{name}.pub"
    private.write_bytes(key.private_bytes(form.Encoding.PEM, form.PrivateFormat.OpenSSH, form.NoEncryption()))
    public.write_bytes(key.public_key().public_bytes(form.Encoding.OpenSSH, form.PublicFormat.OpenSSH))
    private.chmod(0o600)
    return private, public


def write_tls(folder: Path) -> Tls:
    """An authority and a certificate for 127.0.0.1 and localhost."""
    folder.mkdir(parents=True, exist_ok=True)
    files = Tls(folder / "ca.crt", folder / "server.crt", folder / "server.key")
    now = datetime.datetime.now(datetime.UTC)
    ca_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    ca_name, name = (x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)]) for text in ("test ca", "localhost"))

    def certificate(subject: x509.Name, public: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        builder = x509.CertificateBuilder().subject_name(subject).issuer_name(ca_name).public_key(public)
        builder = builder.serial_number(x509.random_serial_number())
        return builder.not_valid_before(now - datetime.timedelta(hours=1)).not_valid_after(now + datetime.timedelta(1))

    ca = certificate(ca_name, ca_key.public_key()).add_extension(x509.BasicConstraints(True, None), True)
    names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    server = certificate(name, key.public_key()).add_extension(x509.SubjectAlternativeName(names), False)
    files.ca.write_bytes(ca.sign(ca_key, hashes.SHA256()).public_bytes(form.Encoding.PEM))
    files.certificate.write_bytes(server.sign(ca_key, hashes.SHA256()).public_bytes(form.Encoding.PEM))
    files.key.write_bytes(
        key.private_bytes(form.Encoding.PEM, form.PrivateFormat.TraditionalOpenSSL, form.NoEncryption())
    )
    return files
