"""Your own data, from arrays and from a folder of images: `python examples/own_data.py`.

Three "clinics" read the same digits with different scanners. Replace `arrays_of_clinics` by your own
`(x_train, y_train, x_test, y_test)`: uint8 images of one size, and whole numbers from 0 as labels.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

import fedc2i

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def arrays_of_clinics() -> dict[str, Arrays]:
    """For each client: training images and labels, test images and labels."""
    digits = load_digits()
    x = (digits.images * (255 / 16)).astype(np.uint8)  # (1797, 8, 8), grey
    scanners = {"plain": x, "inverted": 255 - x, "dark": x // 3}
    parts = {}
    for k, (name, own) in enumerate(scanners.items()):
        mine = np.arange(k, len(x), 3)  # no image belongs to two clients
        train, test = mine[:300], mine[300:500]
        parts[name] = (own[train], digits.target[train], own[test], digits.target[test])
    return parts


def write_folder(root: Path, clinics: dict[str, Arrays]) -> None:
    """Writes them as ``root/<client>/{train,test}/<class>/<number>.png``, which `folder:DIR` reads."""
    for name, (x_train, y_train, x_test, y_test) in clinics.items():
        for part, images, labels in (("train", x_train, y_train), ("test", x_test, y_test)):
            for number, (image, label) in enumerate(zip(images, labels, strict=True)):
                folder = root / name / part / str(label)
                folder.mkdir(parents=True, exist_ok=True)
                Image.fromarray(image).save(folder / f"{number}.png")


def main() -> None:
    """Runs FedC²I on both, and splits one data set over clients."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    clinics = arrays_of_clinics()

    from_memory = fedc2i.from_arrays(clinics, name="clinics", image_size=16)
    print(*from_memory.describe(), sep="\n")
    result = fedc2i.run("fedc2i", from_memory, rounds=rounds)
    print(result)
    print(result.influence()[-1].round(2), "row: for whom; column: whose model")

    with tempfile.TemporaryDirectory() as name:
        write_folder(Path(name), clinics)
        from_files = fedc2i.load(f"folder:{name}", image_size=16)
    print(f"from files: {len(from_files.clients)} clients, {from_files.samples()}")

    split = fedc2i.load("digits:scans", partition="dirichlet:4:0.5", seed=1)
    print(f"one data set over four clients: {split.samples()}")


if __name__ == "__main__":
    main()
