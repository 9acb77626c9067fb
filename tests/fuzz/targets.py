"""What is fuzzed: parsers of outside data, each with sound examples."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from selfvitmil.errors import SelfVitMilError


@dataclass(frozen=True)
class Target:
    """A parser, and files that it accepts."""

    name: str
    examples: tuple[Path, ...]
    parse: Callable[[Path], object]

    def try_bytes(self, content: bytes, example: Path, place: Path) -> str:
        """Parse content as if it were this example; return `ok` or the code of our error."""
        path = place / example.name
        path.write_bytes(content)
        try:
            self.parse(path)
        except SelfVitMilError as error:
            if "weights_only" in str(error):
                return f"BAD advice: {error}"
            return error.code or "error"
        return "ok"


def make_targets(place: Path) -> dict[str, Target]:
    """Make sound examples of everything in `place`."""
    makers = (_tables, _settings, _annotations, _slides, _hdf5, _torch_files, _encoder, _package, _viewer)
    found: dict[str, Target] = {}
    for maker in makers:
        for target in maker(place):
            found[target.name] = target
    return found


# ---------------------------------------------------------------------------------------------------- text


def _tables(place: Path) -> list[Target]:
    import openpyxl

    from selfvitmil.cohort import read_cohort

    folder = place / "tables"
    folder.mkdir()
    rows = [["slide", "path", "label", "patient", "split", "mpp", "time", "event"]]
    rows += [[f"s{k}", f"s{k}.svs", ("tumor", "normal")[k % 2], f"p{k}", "train", "0.5", str(k), "1"] for k in range(6)]
    (folder / "cohort.csv").write_text("\n".join(map(",".join, rows)) + "\n")
    (folder / "semicolons.csv").write_bytes("\ufeff".encode() + "\r\n".join(map(";".join, rows)).encode("utf-8"))
    book = openpyxl.Workbook()
    assert book.active is not None
    for row in rows:
        book.active.append(row)
    book.save(folder / "cohort.xlsx")
    csv = (folder / "cohort.csv", folder / "semicolons.csv")
    return [Target("cohort csv", csv, read_cohort), Target("cohort xlsx", (folder / "cohort.xlsx",), read_cohort)]


def _settings(place: Path) -> list[Target]:
    from helpers.studies import MICRO
    from selfvitmil.settings import resolve_settings

    folder = place / "settings"
    folder.mkdir()
    (folder / "study.toml").write_text(MICRO)
    return [Target("settings toml", (folder / "study.toml",), lambda path: resolve_settings(path, {}))]


def _annotations(place: Path) -> list[Target]:
    from selfvitmil.annotations import read_annotations
    from selfvitmil.slides import synthetic

    synthetic.make_cohort(place / "made", slides=4, seed=2, size=(1024, 1024), slides_per_patient=1)
    folder = place / "made" / "annotations"
    ncrf = folder / "ncrf.json"
    ring = [[10, 10], [90, 10], [90, 90], [10, 90]]
    ncrf.write_text(json.dumps({"positive": [{"name": "a", "vertices": ring}], "negative": []}))

    def read(path: Path) -> object:
        return read_annotations(path, repair=True)

    examples = {"asap xml": min(folder.glob("*.xml")), "geojson": min(folder.glob("*.geojson")), "ncrf json": ncrf}
    return [Target(name, (path,), read) for name, path in examples.items()]


# ---------------------------------------------------------------------------------------------------- slides


def _slides(place: Path) -> list[Target]:
    from selfvitmil.slides import open_slide

    files = sorted((place / "made" / "slides").iterdir())

    def read_with(reader: str) -> Callable[[Path], object]:
        def read(path: Path) -> object:
            with open_slide(path, reader=reader, mpp=0.5) as slide:
                slide.read_tile(300, 300, 64, 0.5)
                return slide.read_tile(0, 0, 64, 4.0)

        return read

    small: list[Path] = []
    for path in (files[0], files[-1]):
        small.append(place / f"small{len(small)}{path.suffix}")
        shutil.copy(path, small[-1])
    return [
        Target("tiff, own reader", tuple(small), read_with("jpegtiff")),
        Target("tiff, openslide", tuple(small), read_with("openslide")),
    ]


# ---------------------------------------------------------------------------------------------------- HDF5


def _hdf5(place: Path) -> list[Target]:
    import h5py
    import numpy as np

    from helpers.cli import selfvitmil
    from helpers.heatmaps import make_heatmap
    from helpers.studies import MICRO
    from selfvitmil.bags import check_bag, read_bag
    from selfvitmil.localize.heatmap import read_heatmap, write_heatmap
    from selfvitmil.tiles import read_tiles

    study = place / "study"
    study.mkdir()
    (study / "study.toml").write_text(MICRO.replace("mpp = 1.0\nsize_px = 32", "mpp = 0.5\nsize_px = 224"))
    assert selfvitmil("tile", study, "--cohort", place / "made" / "cohort.csv").returncode == 0
    assert selfvitmil("embed", study, "--encoder", "mean_color").returncode == 0
    tiles = sorted((study / "tiles").glob("*/*.h5"))[:2]
    bags = sorted((study / "bags").glob("*/features_mean_color/*.h5"))[:1]
    trident = place / "trident.h5"
    with h5py.File(trident, "w") as file:
        file.create_dataset("features", data=np.ones((1, 50, 32), np.float16), chunks=(1, 10, 32), compression="gzip")
        coords = file.create_dataset("coords", data=np.arange(100).reshape(50, 2), chunks=(10, 2), compression="gzip")
        coords.attrs["patch_size_level0"] = 448
    heatmap = place / "heatmap.h5"
    write_heatmap(heatmap, make_heatmap(), "made from")

    def read_features(path: Path) -> object:
        bag = read_bag(path)
        check_bag(bag)
        return float(np.asarray(bag.features_ND, np.float64).sum())

    return [
        Target("tile tables", tuple(tiles), read_tiles),
        Target("feature files", (*bags, trident), read_features),
        Target("heatmaps", (heatmap,), read_heatmap),
    ]


# ---------------------------------------------------------------------------------------------------- models


def _torch_files(place: Path) -> list[Target]:
    import torch

    from selfvitmil.bags import check_bag, read_bag
    from selfvitmil.runtime.training import CHECKPOINT_FILE, FORMAT_VERSION, read_checkpoint

    bag, folder = place / "clam.pt", place / "checkpoint"
    torch.save(torch.ones(20, 16), bag)
    folder.mkdir()
    state = {"format_version": FORMAT_VERSION, "step": 3, "weights": {"a": torch.ones(4, 4)}, "list": [1, 2.0, "x"]}
    torch.save(state, folder / CHECKPOINT_FILE)
    return [
        Target("feature files pt", (bag,), lambda path: check_bag(read_bag(path))),
        Target("checkpoints", (folder / CHECKPOINT_FILE,), lambda path: read_checkpoint(path.parent)),
    ]


def _encoder(place: Path) -> list[Target]:
    from helpers.tiny_package import SMALL
    from selfvitmil.encoder import build_encoder, load_encoder, save_encoder

    folder = place / "encoder"
    save_encoder(folder, build_encoder("vit_tiny_patch16_224", img_size=48, model_args=SMALL))

    def read_beside(path: Path) -> object:
        """Load a folder whose other files are sound."""
        for name in os.listdir(folder):
            if name != path.name:
                shutil.copy(folder / name, path.parent / name)
        return load_encoder(path.parent)

    return [
        Target("safetensors", (folder / "model.safetensors",), read_beside),
        Target("encoder config", (folder / "config.json",), read_beside),
    ]


def _package(place: Path) -> list[Target]:
    from helpers.tiny_package import make_package
    from selfvitmil.package import open_package

    model = make_package(place / "package")

    def read(path: Path) -> Any:
        folder = path.parent / "model"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(model, folder)
        shutil.move(path, folder / path.name)
        return open_package(folder)

    return [Target("package", (model / "package.json", model / "settings.toml"), read)]


# ---------------------------------------------------------------------------------------------------- viewer


def _viewer(place: Path) -> list[Target]:
    import asyncio

    from helpers.viewer import STATIC, make_slide_file, make_study, viewed
    from selfvitmil.view.guard import names_for
    from selfvitmil.view.server import make_app

    study = viewed(make_study(place / "viewed", make_slide_file(place / "viewed.svs")))
    slide = next(iter(study.slides))
    folder = place / "requests"
    folder.mkdir()
    of_slide = f"/api/slides/{slide}"
    paths = ["/", "/static/main.js", "/api/study.json", f"{of_slide}.json", f"{of_slide}/tiles/8/0_0.jpg"]
    paths += [
        f"{of_slide}/thumbnail.jpg",
        f"{of_slide}/annotation.json",
        f"{of_slide}/maps/{next(iter(study.models_of(study.slides[slide])))}.json",
    ]
    for k, path in enumerate(paths):
        head = f"GET {path}\nhost: 127.0.0.1:8000\nif-none-match: abc\naccept-encoding: gzip\ncookie: a=b\n"
        (folder / f"request{k}").write_text(head)
    app: Any = None

    def ask(path: Path) -> object:
        nonlocal app
        if app is None:  # its threads would not survive a fork
            app = make_app(study, STATIC, hosts=names_for("127.0.0.1"))
        first, *headers = path.read_bytes().split(b"\n")
        method, _, target = first.partition(b" ")
        raw, _, query = target.partition(b"?")
        pairs = [line.partition(b":") for line in headers if line]
        scope = {
            "type": "http", "http_version": "1.1", "method": method.decode("latin-1"), "scheme": "http",
            "path": raw.decode("latin-1"), "raw_path": raw, "query_string": query, "root_path": "",
            "headers": [(name.strip().lower(), value.strip()) for name, _, value in pairs],
            "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 8000), "state": {},
        }  # fmt: skip
        statuses: list[int] = []

        async def receive() -> dict[str, object]:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])

        asyncio.run(app(scope, receive, send))
        if statuses[0] >= 400:
            if statuses[0] == 500:
                raise RuntimeError(f"status {statuses[0]}")
            raise SelfVitMilError(f"status {statuses[0]}", code=f"http-{statuses[0]}")
        return statuses

    return [Target("viewer requests", tuple(sorted(folder.iterdir())), ask)]
