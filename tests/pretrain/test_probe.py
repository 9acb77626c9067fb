"""Probes of an encoder on labelled tiles, and that they leave the training alone. Tiny networks on a CPU."""

from __future__ import annotations

import csv
import importlib.util
import json
import math
import os
import pickle
import socket
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from PIL import Image
from scipy.optimize import minimize
from torch import nn

from helpers.pretraining import TINY as TINY_RUN
from selfvitmil.data.loader import TileLoader, TileOrder
from selfvitmil.data.sources import ImageTiles, TensorTiles
from selfvitmil.encoder import build_encoder, load_encoder
from selfvitmil.errors import CohortError, ConfigError, EncoderError
from selfvitmil.pretrain import probe, train
from selfvitmil.pretrain.probe import (
    embed_tiles,
    fit_linear,
    hold_out,
    knn_accuracy,
    linear_accuracy,
    probe_embeddings,
    probe_encoder,
    read_probe_table,
)
from selfvitmil.pretrain.train import Origin, pretrain
from selfvitmil.runtime import training
from selfvitmil.runtime.training import read_metrics, scalars_of
from selfvitmil.settings import PretrainSettings

pytestmark = pytest.mark.usefixtures("one_thread")

TINY = TINY_RUN | {"steps": 6, "log_steps": 2}
ORIGIN = Origin(trained_on="train split of made tiles")


def tiny(**changes: Any) -> PretrainSettings:
    return PretrainSettings(**(TINY | changes))


def write_table(folder: Path, rows: Sequence[dict[str, str]], name: str = "probe.csv") -> Path:
    with (folder / name).open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return folder / name


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """48 tiles with waves in four directions, and a table of them: eight patients, each with tiles of one direction."""
    folder = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    y, x = np.mgrid[:32, :32]
    rows = []
    for k in range(48):
        kind, patient = k % 4, k % 8
        wave = np.sin((x * (1 + kind) + y * (4 - kind)) * 0.25 + rng.uniform(0, 6))
        pixels = 150 + 60 * wave[..., None] * rng.uniform(0.5, 1, 3) + rng.normal(0, 8, (32, 32, 3))
        (folder / "tiles").mkdir(exist_ok=True)
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / "tiles" / f"{k:02}.png")
        split = "test" if patient >= 4 else "train"
        rows.append({"tile": f"tiles/{k:02}.png", "label": f"kind{kind}", "split": split, "patient": f"p{patient}"})
    write_table(folder, rows)
    rng.shuffle(labels := [row["label"] for row in rows])
    write_table(folder, [row | {"label": label} for row, label in zip(rows, labels, strict=True)], "shuffled.csv")
    return folder


# ---------------------------------------------------------------------------------------------------- neighbours


def slow_knn(train: np.ndarray, labels: np.ndarray, test: np.ndarray, k: int) -> list[int]:
    """One tile at a time, neighbours by a stable sort."""
    guesses = []
    for vector in test:
        similar = train @ vector / np.linalg.norm(train, axis=1) / np.linalg.norm(vector)
        votes = np.zeros(labels.max() + 1)
        for place in np.argsort(-similar, kind="stable")[:k]:
            votes[labels[place]] += math.exp(similar[place] / 0.07)
        guesses.append(int(votes.argmax()))
    return guesses


@pytest.mark.parametrize("k", [1, 5, 20, 1000])
def test_neighbours_are_those_of_a_slow_loop(k: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(probe, "CHUNK", 700)  # several tiles at once, and a rest
    rng = np.random.default_rng(k)
    centres = rng.normal(size=(5, 12))
    labels, truth = rng.integers(5, size=90), rng.integers(5, size=33)
    train, test = (centres[y] + 1.5 * rng.normal(size=(len(y), 12)) for y in (labels, truth))
    wanted = np.array(slow_knn(train, labels, test, k)) == truth
    found = knn_accuracy(torch.from_numpy(train).float(), labels, torch.from_numpy(test).float(), truth, k)
    assert found.plain == pytest.approx(wanted.mean())
    assert found.balanced == pytest.approx(np.mean([wanted[truth == c].mean() for c in range(5)]))


def test_of_equally_similar_tiles_the_first_are_neighbours():
    # Axes are exact in float32: ten tiles along the first (three of class 1 come first), five along the second.
    train = torch.tensor([[1.0, 0.0]] * 10 + [[0.0, 1.0]] * 5)
    labels = np.array([1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 2, 2, 2, 2, 2])
    test = torch.tensor([[3.0, 0.0]])
    for k, winner in ((3, 1), (5, 1), (7, 0), (9, 0)):  # of k neighbours 3 are of class 1, the rest of class 0
        assert knn_accuracy(train, labels, test, np.array([winner]), k).plain == 1.0, k
    assert knn_accuracy(train, labels, test, np.array([0]), 6).plain == 1.0, "3 votes each: the lower class"


def test_a_nearer_neighbour_outweighs_several_farther_ones():
    angles = torch.tensor([0.0, 0.5, 0.5, 0.5])  # cosines 1 and 0.878: weights 5.7 to 1 at temperature 0.07
    train = torch.stack([angles.cos(), angles.sin()], dim=1)
    labels = np.array([1, 0, 0, 0])
    test, truth = torch.tensor([[1.0, 0.0]]), np.array([1])
    assert knn_accuracy(train, labels, test, truth, k=4).plain == 1.0
    assert knn_accuracy(train, labels, test, truth, k=4, temperature=1.0).plain == 0.0


# ---------------------------------------------------------------------------------------------------- linear


def slow_fit(x: np.ndarray, labels: np.ndarray, num_classes: int, strength: float) -> np.ndarray:
    """Logistic regression by another optimizer, in double precision; (D + 1, C) with the bias last."""
    rows = np.arange(len(x))

    def loss(flat: np.ndarray) -> float:
        weights = flat.reshape(-1, num_classes)
        logits = x @ weights[:-1] + weights[-1]
        logits -= logits.max(axis=1, keepdims=True)
        log = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        return -log[rows, labels].mean() + strength / 2 * (weights[:-1] ** 2).sum()

    return minimize(loss, np.zeros((x.shape[1] + 1) * num_classes), tol=1e-12).x.reshape(-1, num_classes)


@pytest.mark.parametrize("strength", [0.3, 0.01])
def test_several_fits_at_once_are_those_of_another_optimizer(strength: float):
    rng = np.random.default_rng(0)
    labels = rng.integers(3, size=60)
    x = rng.normal(size=(60, 4)) + np.eye(3, 4)[labels] * 2
    used = np.stack([np.arange(60) < 40, np.ones(60, dtype=bool)], axis=1)
    target = torch.nn.functional.one_hot(torch.from_numpy(labels)).float()
    found = fit_linear(torch.from_numpy(x).float(), target, torch.from_numpy(used), strength)
    for k, rows in enumerate(used.T):
        wanted = slow_fit(x[rows], labels[rows], 3, strength)
        np.testing.assert_allclose(found.weight_DFC[:, k], wanted[:-1], atol=2e-3)
        bias = found.bias_FC[k].numpy()  # free up to a constant
        np.testing.assert_allclose(bias - bias.mean(), wanted[-1] - wanted[-1].mean(), atol=2e-3)


def made_patients(rng: np.random.Generator, patients: int) -> tuple[torch.Tensor, np.ndarray, list[str]]:
    """Tiles whose first dimensions tell the class a little, and whose others tell their patient clearly."""
    owner = np.repeat(np.arange(patients), 12)
    labels = owner % 2
    own = rng.normal(size=(patients, 40)) * 3
    x = np.concatenate([labels[:, None] * 1.2 + rng.normal(size=(len(owner), 6)), own[owner]], axis=1)
    return torch.from_numpy(x + 0.3 * rng.normal(size=x.shape)).float(), labels, [f"p{k}" for k in owner]


def test_a_linear_probe_finds_what_is_planted_whatever_scale_and_offset():
    rng = np.random.default_rng(1)
    labels, truth = rng.integers(3, size=120), rng.integers(3, size=60)
    scale = 10.0 ** rng.uniform(-3, 3, size=8)
    train, test = (
        torch.from_numpy((np.eye(3, 8)[y] * 6 + rng.normal(size=(len(y), 8)) + 4) * scale) for y in (labels, truth)
    )
    constant = torch.full((120, 1), 7.0)
    found = linear_accuracy(
        torch.cat([train, constant], dim=1).float(), labels, torch.cat([test, constant[:60]], dim=1).float(), truth
    )
    assert found.plain > 0.95
    assert found.balanced > 0.95


def test_the_strength_is_chosen_by_patient_and_never_by_the_test_tiles():
    rng = np.random.default_rng(2)
    train, labels, patients = made_patients(rng, 16)
    test, truth, _ = made_patients(rng, 16)
    by_patient = linear_accuracy(train, labels, test, truth, patients)
    by_tile = linear_accuracy(train, labels, test, truth)
    assert by_patient.strength > by_tile.strength, "patients tell the class of their other tiles, not of new patients"
    again = linear_accuracy(train, labels, test, 1 - truth, patients)
    assert again.strength == by_patient.strength
    assert again.plain == pytest.approx(1 - by_patient.plain)
    assert linear_accuracy(train, labels, test, truth, patients) == by_patient


def test_one_tile_of_each_class_is_enough():
    vectors = torch.eye(3)
    found = linear_accuracy(vectors, np.arange(3), vectors, np.arange(3))
    assert found.plain == 1.0


@given(st.data())
@examples(max_examples=60)
def test_what_is_held_out_is_whole_groups_of_every_class(data: st.DataObject):
    num_groups = data.draw(st.integers(2, 12))
    kinds = data.draw(st.lists(st.integers(0, 2), min_size=num_groups, max_size=num_groups))
    owner = data.draw(st.lists(st.integers(0, num_groups - 1), min_size=num_groups, max_size=60))
    labels = np.array([kinds[k] for k in owner])
    groups = [f"p{k}" for k in owner]
    held = hold_out(labels, groups, 0.25, 3)
    np.testing.assert_array_equal(held, hold_out(labels, groups, 0.25, 3))
    out, stay = ({group for group, h in zip(groups, held, strict=True) if h == side} for side in (True, False))
    assert not out & stay
    for label in set(labels.tolist()):
        number = len({group for group, y in zip(groups, labels, strict=True) if y == label})
        gone = len({group for group, y, h in zip(groups, labels, held, strict=True) if y == label and h})
        assert gone == (0 if number == 1 else max(1, round(number / 4)))


# ---------------------------------------------------------------------------------------------------- tables


def test_a_table_as_it_should_be(images: Path):
    table = read_probe_table(images / "probe.csv")
    assert table.classes == ("kind0", "kind1", "kind2", "kind3")
    assert table.labels.tolist() == [k % 4 for k in range(48)]
    assert table.test.tolist() == [k % 8 >= 4 for k in range(48)]
    assert (table.shape_px, table.warnings) == ((32, 32), ())
    tiles = torch.cat(list(table.batches(10, threads=2)))
    wanted = np.stack([np.asarray(Image.open(images / "tiles" / f"{k:02}.png")) for k in range(48)])
    np.testing.assert_array_equal(tiles.permute(0, 2, 3, 1).numpy(), wanted)


def changed(images: Path, folder: Path, change: Any) -> Path:
    """The table in another folder, after `change` of its rows."""
    with (images / "probe.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    (folder / "tiles").symlink_to(images / "tiles")
    return write_table(folder, change(rows))


def without(rows: list[dict[str, str]], *columns: str) -> list[dict[str, str]]:
    return [{key: value for key, value in row.items() if key not in columns} for row in rows]


def test_without_a_split_one_is_drawn_by_patient(images: Path, tmp_path: Path):
    table = read_probe_table(changed(images, tmp_path, lambda rows: without(rows, "split")))
    assert table.patients is not None
    sides = {side: {p for p, t in zip(table.patients, table.test, strict=True) if t == side} for side in (True, False)}
    assert not sides[True] & sides[False]
    assert len(sides[True]) == 4, "one of the two patients of every class"
    assert table.warnings == ("probe.csv: has no split, so one was drawn by patient",)


def test_without_split_and_patient_tiles_are_drawn_and_that_is_said(images: Path, tmp_path: Path):
    table = read_probe_table(changed(images, tmp_path, lambda rows: without(rows, "split", "patient")))
    assert np.bincount(table.labels[table.test]).tolist() == [3, 3, 3, 3]
    (warning,) = table.warnings
    assert "tile by tile" in warning
    assert "too good" in warning


def test_patients_on_both_sides_are_named(images: Path, tmp_path: Path):
    table = read_probe_table(changed(images, tmp_path, lambda rows: [row | {"patient": "p1"} for row in rows]))
    assert table.warnings == ("probe.csv: patients with tiles in both splits make its numbers too good: p1",)


BAD = {
    "files": (lambda rows: [row | {"tile": "x" + row["tile"]} for row in rows], r"48 of 48 tiles are not there"),
    "twice": (lambda rows: [*rows, rows[0]], r"tiles that occur twice: tiles/00\.png"),
    "label": (lambda rows: [rows[0] | {"label": ""}, *rows[1:]], r"no label in line 2"),
    "one class": (lambda rows: [row | {"label": "a"} for row in rows], r"has one class only \(a\)"),
    "one side": (lambda rows: [row for row in rows if row["label"] != "kind1" or row["split"] == "train"],
                 r"no test tile of kind1"),
    "one patient": (lambda rows: [row | {"patient": row["label"]} for row in without(rows, "split")],
                    r"no test tile of kind0, kind1"),
    "split": (lambda rows: [rows[0] | {"split": "tset"}, *rows[1:]], r"neither train nor test: line 2 \(tset\)"),
    "columns": (lambda rows: without(rows, "label"), r"no column 'label'"),
}  # fmt: skip


@pytest.mark.parametrize("problem", BAD)
def test_tables_that_cannot_be_meant(images: Path, tmp_path: Path, problem: str):
    change, message = BAD[problem]
    with pytest.raises(CohortError, match=message) as caught:
        read_probe_table(changed(images, tmp_path, change))
    assert str(tmp_path) not in str(caught.value)


def test_tiles_of_two_sizes_and_broken_ones(images: Path, tmp_path: Path):
    def odd(rows: list[dict[str, str]]) -> list[dict[str, str]]:
        Image.new("RGB", (32, 40)).save(tmp_path / "tall.png")
        return [rows[0] | {"tile": "tall.png"}, *rows[1:]]

    path = changed(images, tmp_path, odd)
    with pytest.raises(CohortError, match=r"sizes?: tall\.png has 32 x 40 px, 01\.png has 32 x 32 px"):
        read_probe_table(path)
    (tmp_path / "tall.png").write_bytes(b"nothing")
    with pytest.raises(CohortError, match=r"tall\.png cannot be read as an image"):
        read_probe_table(path)
    with pytest.raises(CohortError, match=r"none\.csv: cannot be read"):
        read_probe_table(tmp_path / "none.csv")


# ---------------------------------------------------------------------------------------------------- encoders


def test_an_encoder_is_left_as_it_was(images: Path):
    table = read_probe_table(images / "probe.csv")
    args = {"embed_dim": 32, "depth": 4, "num_heads": 2, "patch_size": 8, "drop_path_rate": 0.5}
    torch.manual_seed(0)
    encoder = build_encoder("vit_tiny_patch16_224", img_size=32, model_args=args).train()
    encoder.backbone.blocks[1].eval()
    modes = [module.training for module in encoder.modules()]
    states = torch.get_rng_state(), np.random.get_state()[1].copy()
    vectors = embed_tiles(encoder, table.batches(20))
    found = probe_encoder(encoder, table, batch=7)
    assert torch.equal(torch.get_rng_state(), states[0])
    np.testing.assert_array_equal(np.random.get_state()[1], states[1])
    assert [module.training for module in encoder.modules()] == modes
    assert all(weight.grad is None for weight in encoder.parameters())
    encoder.eval()
    with torch.no_grad():
        alone = torch.cat([encoder.encode(tile[None]) for tile in torch.cat(list(table.batches(48)))])
    assert vectors is not None
    assert vectors.shape == (48, 160)
    torch.testing.assert_close(vectors, alone)
    assert found == probe_embeddings(alone, table.labels, table.test, table.patients)
    assert probe_encoder(encoder, table, stop=lambda: True) == {}
    nn.init.constant_(encoder.backbone.norm.bias, float("nan"))
    with pytest.raises(EncoderError, match="NaN or infinite embeddings"):
        probe_encoder(encoder, table)


# ---------------------------------------------------------------------------------------------------- training


def weights_of(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def test_probes_change_nothing_in_training(images: Path, tmp_path: Path):
    source = ImageTiles(images)
    lines: list[dict[str, Any]] = []
    table = images / "probe.csv"
    plain = pretrain(source, tmp_path / "plain", tiny(drop_path=0.3), ORIGIN, device="cpu")
    settings = tiny(drop_path=0.3, probe_table=table)
    probed = pretrain(source, tmp_path / "probed", settings, ORIGIN, device="cpu", report=lines.append)
    shuffled = tiny(drop_path=0.3, probe_table=images / "shuffled.csv", probe_epochs=1)
    pretrain(source, tmp_path / "shuffled", shuffled, ORIGIN, device="cpu")
    assert weights_of(tmp_path / "probed") == weights_of(tmp_path / "plain") == weights_of(tmp_path / "shuffled")
    states = [torch.load(tmp_path / name / "state.pt", weights_only=True) for name in ("plain", "probed")]
    for key, value in states[0]["learner"].items():
        assert torch.equal(value, states[1]["learner"][key])
    # Six steps are fewer than ten probes: one after each of them.
    assert [line["step"] for line in lines if "knn20" in line] == list(range(6))
    assert probed.metrics == lines[-1]
    assert "knn20" not in plain.metrics
    # An epoch has six steps, so the last one alone is the end of one.
    assert [line["step"] for line in read_metrics(tmp_path / "shuffled") if "linear" in line] == [5]
    again = pretrain(source, tmp_path / "plain", settings, ORIGIN, device="cpu")
    assert again.note == "up to date", "asking for probes makes no other encoder"
    assert any("probe.csv was not looked at" in warning for warning in again.warnings)
    finished = pretrain(source, tmp_path / "probed", settings, ORIGIN, device="cpu")
    assert not any("not looked at" in warning for warning in finished.warnings)


def test_what_is_reported_is_what_the_encoder_gives(images: Path, tmp_path: Path):
    path = images / "probe.csv"
    result = pretrain(ImageTiles(images), tmp_path / "run", tiny(probe_table=path), ORIGIN, device="cpu")
    table = read_probe_table(path)
    wanted = probe_encoder(load_encoder(result.folder), table)
    assert {key: result.metrics[key] for key in wanted} == pytest.approx(wanted)
    assert result.metrics["probe_s"] > 0


def test_a_resumed_run_probes_at_the_same_steps(images: Path, tmp_path: Path):
    settings = tiny(probe_table=images / "probe.csv", steps=12, checkpoint_minutes=1e-9)

    def die(line: dict[str, Any]) -> None:
        if line["step"] == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pretrain(ImageTiles(images), tmp_path / "run", settings, ORIGIN, device="cpu", report=die)
    pretrain(ImageTiles(images), tmp_path / "run", settings, ORIGIN, device="cpu")
    lines = read_metrics(tmp_path / "run")
    assert [line["step"] for line in lines if "knn20" in line] == [1, 3, 5, 7, 9, 11]
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]


def test_probes_leave_the_batch_statistics_of_simclr_alone(images: Path, tmp_path: Path):
    bare = dict.fromkeys(("width", "depth", "heads", "patch_px"))
    for name, table in (("plain", None), ("probed", images / "probe.csv")):
        settings = tiny(method="simclr", architecture="resnet10t", steps=3, probe_table=table, **bare)
        result = pretrain(ImageTiles(images), tmp_path / name, settings, ORIGIN, device="cpu")
    assert 0 <= result.metrics["knn20"] <= 1
    assert weights_of(tmp_path / "probed") == weights_of(tmp_path / "plain")


def test_time_of_probes_is_no_training_time(monkeypatch: pytest.MonkeyPatch):
    now = [100.0]
    monkeypatch.setattr(train.time, "perf_counter", lambda: now[0])
    pace = train._Throughput(0)
    now[0] += 12.0
    pace.leave_out(10.0)
    assert pace.lap(4, 0.5, batch=8) == (16.0, 0.25)
    now[0] += 1.0
    assert pace.lap(5, 0.5, batch=8)[0] == 8.0


def test_probe_tiles_must_fit_the_encoder(images: Path, tmp_path: Path):
    settings = tiny(probe_table=images / "probe.csv", global_px=16, local_px=8)
    with pytest.raises(ConfigError, match=r"probe\.csv: its tiles have 32 x 32 px.*tiles of 16 x 16 px"):
        pretrain(ImageTiles(images), tmp_path / "run", settings, ORIGIN, device="cpu")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_other_colours_than_in_training_are_told(images: Path, tmp_path: Path):
    source = ImageTiles(images)
    source.stain_method = "tile"
    result = pretrain(source, tmp_path / "run", tiny(steps=1, probe_table=images / "probe.csv"), ORIGIN, device="cpu")
    assert any("training tiles are stain-normalized" in warning for warning in result.warnings)


PROCESSES = """
    import os, sys
    from pathlib import Path
    import torch
    from selfvitmil.data.sources import ImageTiles
    from selfvitmil.pretrain.train import Origin, pretrain
    from selfvitmil.settings import PretrainSettings
    torch.set_num_threads(1)
    settings = PretrainSettings.model_validate_json(sys.argv[3])
    children = []
    for rank in ("0", "1"):
        children.append(os.fork())  # loading torch takes longest: once for both
        if children[-1] == 0:
            os.environ.update(RANK=rank, LOCAL_RANK=rank)
            pretrain(ImageTiles(Path(sys.argv[1])), Path(sys.argv[2]), settings, Origin("made"), device="cpu")
            sys.exit()
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
"""


@pytest.mark.slow
def test_with_two_processes_the_first_probes_and_the_other_waits(images: Path, tmp_path: Path):
    settings = tiny(steps=3, probe_table=images / "probe.csv")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", textwrap.dedent(PROCESSES), str(images), str(tmp_path / "run")]
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, settings.model_dump_json()], env=os.environ | world, timeout=120, check=True)
    lines = read_metrics(tmp_path / "run")
    assert [line["step"] for line in lines if "knn20" in line] == [0, 1, 2]
    wanted = probe_encoder(load_encoder(tmp_path / "run"), read_probe_table(images / "probe.csv"))
    assert {key: lines[-1][key] for key in wanted} == pytest.approx(wanted)


# ---------------------------------------------------------------------------------------------------- TensorBoard


def test_tensorboard_shows_the_numbers_of_metrics(images: Path, tmp_path: Path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    settings = tiny(log_steps=1, checkpoint_minutes=1e-9, tensorboard=True)

    def die(line: dict[str, Any]) -> None:
        if line["step"] == 3:
            raise KeyboardInterrupt  # after the events of step 3, before its checkpoint

    with pytest.raises(KeyboardInterrupt):
        pretrain(ImageTiles(images), tmp_path / "run", settings, ORIGIN, device="cpu", report=die)
    (first,) = (tmp_path / "run" / "tensorboard").iterdir()
    with first.open("ab") as file:
        file.write(first.read_bytes()[:20])  # half an event, as a kill leaves it
    pretrain(ImageTiles(images), tmp_path / "run", settings, ORIGIN, device="cpu")
    assert len(list((tmp_path / "run" / "tensorboard").iterdir())) == 2
    lines = read_metrics(tmp_path / "run")
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4, 5]
    events = accumulator.EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    names = {"loss", "lr", "tiles_per_s", "data_wait_share", "teacher_entropy", "epoch", "phase_s/views"}
    assert names <= set(events.Tags()["scalars"])
    assert "step" not in events.Tags()["scalars"]
    for name in events.Tags()["scalars"]:
        found = {event.step: event.value for event in events.Scalars(name)}
        wanted = {line["step"]: scalars_of(line)[name] for line in lines if name in scalars_of(line)}
        assert found == pytest.approx(wanted, rel=1e-6), name
        assert len(events.Scalars(name)) == len(wanted), f"{name}: no step twice"


def test_without_tensorboard_a_run_that_wants_it_does_not_start(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match=r'pip install "selfvitmil\[tensorboard\]"'):
        pretrain(ImageTiles(images), tmp_path / "run", tiny(tensorboard=True), ORIGIN, device="cpu")
    assert not (tmp_path / "run").exists()
    pretrain(ImageTiles(images), tmp_path / "run", tiny(steps=1), ORIGIN, device="cpu")
    assert not (tmp_path / "run" / training.TENSORBOARD_FOLDER).exists()


# ---------------------------------------------------------------------------------------------------- tiles in memory


def test_tiles_in_memory_come_as_they_are():
    tiles = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (40, 3, 8, 8), dtype=np.uint8))
    source = TensorTiles(tiles)
    order = TileOrder(source.counts, batch=8, seed=3, run=source.run, pool=16)
    with TileLoader(source, order, 0, 5) as feed:
        batches = list(feed)
    wanted = [pool.tiles[places] for pool in order.pools(0, 5) for places in pool.batches]
    for batch, numbers in zip(batches, wanted, strict=True):
        assert torch.equal(batch.tiles_B3HW, tiles[numbers])
        np.testing.assert_array_equal(batch.ids_B, source.ids[numbers])
    assert len(np.unique(source.ids)) == 40
    assert source.inputs() == TensorTiles(tiles.clone()).inputs() != TensorTiles(tiles + 1).inputs()
    with pytest.raises(ConfigError, match=r"--pretrain.workers 0"):
        pickle.dumps(source.reader)


# ---------------------------------------------------------------------------------------------------- benchmarks


def load_benchmark(name: str) -> Any:
    path = Path(__file__).parents[2] / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_breakhis_is_laid_out_by_patient(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    source = tmp_path / "breakhis"
    (source / "tiles").mkdir(parents=True)
    rows = []
    for k in range(60):
        patient, subtype = k // 3, "ABCD"[k // 3 % 4]
        letters = "" if patient % 2 else "EF"
        Image.new("RGB", (4, 4), (k, 0, 0)).save(source / "tiles" / f"{k:02}.jpg")
        label = "benign" if subtype in "AB" else "malignant"
        row = {"tile": f"{k:02}.jpg", "patient": f"14-{patient // 8}00{patient % 4}{letters}"}
        rows.append(row | {"label": label, "subtype": subtype})
    write_table(source, rows, "tiles.csv")
    layout = load_benchmark("breakhis_layout")
    layout.main([str(source), str(tmp_path / "out"), "--labels", "subtype", "--seed", "1"])
    assert "test:" in capsys.readouterr().out
    told = {row["tile"]: row for row in rows}
    sides = {}
    for side in ("train", "test"):
        files = list((tmp_path / "out" / side).glob("*/*.jpg"))
        assert {path.parent.name for path in files} == set("ABCD")
        assert all(told[path.name]["subtype"] == path.parent.name for path in files)
        sides[side] = {told[path.name]["patient"].rstrip("EF") for path in files}
    assert not sides["train"] & sides["test"]
    assert len(list((tmp_path / "out").rglob("*.jpg"))) == 60
    with pytest.raises(SystemExit, match="not empty"):
        layout.main([str(source), str(tmp_path / "out")])


@pytest.mark.slow
def test_quality_benchmark_ends_in_its_line(images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for k in range(48):
        place = tmp_path / ("test" if k % 8 >= 4 else "train") / f"kind{k % 4}" / f"{k:02}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(images / "tiles" / f"{k:02}.png")
    kept = {key: TINY[key] for key in ("width", "depth", "heads", "patch_px", "head_width", "num_local")}
    changes = [f"--set={key}={value}" for key, value in (kept | {"pretrain.log_steps": 2}).items()]
    arguments = ["--tiles", str(tmp_path), "--minutes", "0.02", "--batch", "8", "--tile-px", "32", "--device", "cpu"]
    arguments += ["--architecture", "vit_tiny_patch16_224", "--pace-seconds", "0.3", "--out", str(tmp_path / "kept")]
    load_benchmark("pretrain_quality").main([*arguments, *changes])
    *_, facts, last = capsys.readouterr().out.splitlines()
    found = json.loads(last)
    assert list(found) == ["knn20", "linear", "tiles_per_s"]
    assert found["tiles_per_s"] > 0
    facts = json.loads(facts)
    assert (facts["settings"]["method"], facts["settings"]["head_width"]) == ("lejepa", 32)
    assert 0 < facts["minutes"] < 0.2
    encoder = load_encoder(tmp_path / "kept")
    sides = [sorted((tmp_path / side).glob("*/*.png"), key=lambda path: path.name) for side in ("train", "test")]
    vectors = [
        torch.cat(
            [encoder.encode(torch.from_numpy(np.array(Image.open(path))).permute(2, 0, 1)[None]) for path in side]
        )
        for side in sides
    ]
    labels = [np.array([int(path.parent.name[-1]) for path in side]) for side in sides]
    knn = knn_accuracy(vectors[0].detach(), labels[0], vectors[1].detach(), labels[1])
    assert found["knn20"] == round(knn.plain, 4)
    with pytest.raises(ConfigError, match=r"unknown setting 'pretrain\.lrr', did you mean 'pretrain\.lr'"):
        load_benchmark("pretrain_quality").main([*arguments, "--set", "lrr=1"])
