"""Files from elsewhere that want more than to be read: each attack is refused, with an error that says what was found.

Models, encoders, feature files, annotations, tables and whole studies travel between hospitals. None may run a program,
contact another machine, read or write a file outside of its place, or claim memory that it does not fill.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from helpers.cli import selfvitmil
from helpers.error_codes import has_code
from helpers.tiny_package import SMALL, make_model, make_package
from selfvitmil.aggregate.train import load_model
from selfvitmil.annotations import read_annotations
from selfvitmil.bags import read_bag
from selfvitmil.cohort import read_cohort
from selfvitmil.encoder import build_encoder, load_encoder, save_encoder
from selfvitmil.errors import AnnotationError, ArtefactError, BagError, CohortError, ConfigError, EncoderError
from selfvitmil.package import SETTINGS, open_package
from selfvitmil.settings import StudySettings, all_keys, read_toml
from selfvitmil.slides import synthetic
from selfvitmil.store.files import file_problem, hash_of, open_hdf5, read_json, sha256
from selfvitmil.tiles import _relevant, read_tiles


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_package(tmp_path_factory.mktemp("received") / "model")


@pytest.fixture
def model(original: Path, tmp_path: Path) -> Path:
    """A copy of the package to poison."""
    return Path(shutil.copytree(original, tmp_path / "model"))


@pytest.fixture(scope="module")
def slide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("slide") / "a.svs"
    synthetic.make_slide(path, 3, size=(1024, 1024))
    return path


def seal(folder: Path, **changes: Any) -> None:
    """Make all checksums fit, as an attacker does."""
    told = json.loads((folder / "package.json").read_text()) | changes
    told["files"] = {name: sha256(folder / name) for name in told["files"] if (folder / name).is_file()} | {
        name: "0" for name in told["files"] if not (folder / name).is_file()
    }
    told["identity"] = hash_of({key: value for key, value in told.items() if key != "identity"})
    (folder / "package.json").write_text(json.dumps(told))


def test_the_package_itself_opens_and_answers(model: Path, slide: Path, tmp_path: Path):
    result = selfvitmil("predict", model, slide, "--out", tmp_path / "out", "--workers", 0, "--no-maps")
    assert result.returncode == 0, result.stderr


# ---------------------------------------------------------------------------------------------------- where work runs


@pytest.fixture
def scheduler() -> Iterator[tuple[int, list[Any]]]:
    """A port that an attacker listens on, and who has come."""
    came: list[Any] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.1)
        stop = threading.Event()

        def listen() -> None:
            while not stop.is_set():
                try:
                    connection, address = server.accept()
                except TimeoutError:
                    continue
                came.append(address)
                connection.close()

        thread = threading.Thread(target=listen)
        thread.start()
        yield server.getsockname()[1], came
        stop.set()
        thread.join()


@pytest.fixture
def sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A batch system that keeps the job it is given: the file that must never appear."""
    place, job = tmp_path / "bin", tmp_path / "job.sh"
    place.mkdir()
    (place / "sbatch").write_text(f'#!/bin/sh\ncp "$1" {job}\necho refused >&2\nexit 1\n')
    (place / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{place}:{os.environ['PATH']}")
    return job


def test_a_package_cannot_name_a_scheduler(model: Path, slide: Path, tmp_path: Path, scheduler: tuple[int, list[Any]]):
    port, came = scheduler
    with (model / "settings.toml").open("a") as file:
        file.write(f'\n[engine]\ncluster = "tcp://127.0.0.1:{port}"\ninsecure = true\n')
    seal(model)
    result = selfvitmil("predict", model, slide, "--out", tmp_path / "out", "--no-maps")
    assert result.returncode == 3
    assert "sets engine.cluster, engine.insecure" in result.stderr
    assert not came
    assert not (tmp_path / "out").exists()


def test_a_package_cannot_submit_jobs(model: Path, slide: Path, tmp_path: Path, sbatch: Path):
    with (model / "settings.toml").open("a") as file:
        file.write('\n[engine.batch]\nkind = "slurm"\nprologue = ["touch /tmp/mine"]\n')
    seal(model)
    result = selfvitmil("predict", model, slide, "--out", tmp_path / "out", "--no-maps")
    assert not sbatch.exists()
    assert result.returncode == 3
    assert "engine.batch" in result.stderr


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("engine = 3\n", "engine"),
        ("[engine]\nworkers = 4\n", "engine.workers"),
        ('[embed]\ndevice = "cuda:3"\n', "embed.device"),
        ("[embed]\ncompile = true\n", "embed.compile"),
        ("[embed]\nreaders = 500\n", "embed.readers"),
        ('[tissue]\nfolder = "/etc"\nmethod = "own"\n', "tissue.folder"),
        ('[train]\nsplit_folder = "/etc"\n', "train.split_folder"),
        ('[pretrain]\nprobe_table = "/etc/passwd"\n', "pretrain.probe_table"),
        ('[pretrain]\ninit = "evil/model"\n', "pretrain.init"),
        ("[slide]\nmpp = 0.5\nforce_mpp = true\n", "slide.mpp"),
        ('preset = "paper"\n', "preset"),
        ("[localize]\ntiff = true\n", "localize.tiff"),
        ("[nonsense]\nx = 1\n", "nonsense.x"),
    ],
)
def test_settings_that_inference_does_not_need_are_refused_by_name(model: Path, text: str, key: str):
    (model / "settings.toml").write_text(text)
    seal(model)
    with pytest.raises(ArtefactError, check=has_code("package-settings-forbidden")) as error:
        open_package(model)
    assert key in error.value.what
    assert error.value.how


def test_the_allowed_settings_exist_and_hold_all_that_changes_tiles():
    allowed = {f"{section}.{key}" for section, keys in SETTINGS.items() for key in keys}
    assert allowed <= set(all_keys())
    changing = {f"{section}.{key}" for section, keys in _relevant(StudySettings()).items() for key in keys}
    # The first two must not be inherited from another place's slides, the third is a path.
    assert changing - allowed == {"slide.mpp", "slide.force_mpp", "tissue.folder"}


def test_a_study_cannot_say_which_machines_work(
    tmp_path: Path, slide: Path, scheduler: tuple[int, list[Any]], sbatch: Path
):
    port, came = scheduler
    study = tmp_path / "study"
    study.mkdir()
    for text, key in (
        (f'[engine]\ncluster = "tcp://127.0.0.1:{port}"\ninsecure = true\n', "engine.cluster"),
        ('[engine.batch]\nkind = "slurm"\nprologue = ["touch /tmp/mine"]\n', "engine.batch"),
        ('[engine]\ntls_key = "/etc/passwd"\n', "engine.tls_key"),
    ):
        (study / "study.toml").write_text(text)
        result = selfvitmil("check", study, "--cohort", slide.parent)
        assert result.returncode == 2
        assert key in result.stderr
        assert "engine.toml" in result.stderr
    assert not came
    assert not sbatch.exists()
    (study / "study.toml").write_text("[engine]\nworkers = 0\nretries = 0\n")
    assert selfvitmil("check", study, "--cohort", slide.parent).returncode == 0


@pytest.mark.slow
def test_the_users_own_file_says_where_work_runs(
    tmp_path: Path, model: Path, slide: Path, sbatch: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    own = tmp_path / "config" / "selfvitmil" / "engine.toml"
    own.parent.mkdir(parents=True)
    own.write_text('[engine.batch]\nkind = "slurm"\nprologue = ["module load mine"]\n')
    pytest.importorskip("dask_jobqueue")
    result = selfvitmil("check", tmp_path / "study", "--cohort", slide.parent)
    assert "slurm rejects the job" in result.stderr
    assert "module load mine" in sbatch.read_text()
    sbatch.unlink()
    selfvitmil("predict", model, slide, "--out", tmp_path / "out", "--no-maps")
    assert "module load mine" in sbatch.read_text()
    sbatch.unlink()
    assert selfvitmil("check", tmp_path / "study", "--workers", 0).returncode == 0  # a flag wins
    assert not sbatch.exists()
    own.write_text("[tile]\nmpp = 3.0\n")
    assert selfvitmil("check", tmp_path / "study").code == "engine-file-sections"


# ---------------------------------------------------------------------------------------------------- packages


def link(folder: Path, name: str) -> None:
    target = folder.parent / "elsewhere"
    shutil.move(folder / name, target)
    (folder / name).symlink_to(target)


def pipe(folder: Path) -> None:
    (folder / "models" / "seed0" / "config.json").unlink()
    os.mkfifo(folder / "models" / "seed0" / "config.json")


def listed_outside(folder: Path) -> None:
    told = json.loads((folder / "package.json").read_text())
    (folder.parent / "secret").write_text("mine")
    (folder / "package.json").write_text(json.dumps(told | {"files": {**told["files"], "../secret": "0"}}))


def nested(folder: Path) -> None:
    (folder / "expected.json").write_text("[" * 100_000 + "]" * 100_000)


def other_encoder(**change: Any) -> Callable[[Path], None]:
    def poison(folder: Path) -> None:
        told = json.loads((folder / "package.json").read_text())
        told["encoders"][0] |= change
        (folder / "package.json").write_text(json.dumps(told))

    return poison


def told(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: seal(folder, **changes)


@pytest.mark.parametrize(
    ("poison", "code", "names"),
    [
        (lambda folder: link(folder, "encoder/model.safetensors"), "invalid-package-file", "it is a link"),
        (lambda folder: link(folder, "models"), "invalid-package-file", "it is a link"),
        (lambda folder: link(folder, "package.json"), "invalid-package-file", "it is a link"),
        (pipe, "invalid-package-file", "not a regular file"),
        (listed_outside, "invalid-package-file", "../secret"),
        (nested, "invalid-package", "nested too deeply"),
        (lambda folder: (folder / "expected.json").write_text('{"tile_mpp": NaN}'), "invalid-package", "NaN"),
        (other_encoder(name="../../../../evil"), "invalid-package-value", "../../../../evil"),
        (other_encoder(name="x/../../evil"), "invalid-package-value", "x/../../evil"),
        (other_encoder(folder="/usr/share"), "invalid-package-value", "/usr/share"),
        (other_encoder(folder="encoder/../../elsewhere"), "invalid-package-value", "encoder/../../elsewhere"),
        (told(seeds=["0/../../evil"]), "invalid-package-value", "0/../../evil"),
        (told(classes=["normal", "\x1b]0;mine\x07"]), "invalid-package-value", "no printable text"),
        (told(name="../evil"), "invalid-package-value", "../evil"),
        (told(split="x" * 5000), "invalid-package-value", "xxx"),
        (told(encoders="evil"), "invalid-package", ""),
    ],
)
def test_a_package_that_reaches_beyond_itself_is_refused(
    model: Path, tmp_path: Path, poison: Callable[[Path], None], code: str, names: str
):
    poison(model)
    if not (model / "package.json").is_symlink():
        seal(model)
    with pytest.raises(ArtefactError, check=has_code(code)) as error:
        open_package(model)
    assert names in error.value.reason
    assert str(tmp_path) not in str(error.value)


def test_file_names_of_packages_are_checked_part_by_part(tmp_path: Path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").touch()
    assert file_problem(tmp_path, "a/b") == ""
    assert file_problem(tmp_path, "a/missing") == ""
    for name in ("", "/etc/passwd", "../x", "a/../../x", "a//b", "./a/b", "a\\b", "a", "a/b\0"):
        assert file_problem(tmp_path, name), name


# ---------------------------------------------------------------------------------------------------- weights


def config_of(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    told = json.loads(path.read_text())
    for key, value in changes.items():
        told[key] = {**told[key], **value} if isinstance(value, dict) else value
    path.write_text(json.dumps(told))


@pytest.fixture
def encoder(tmp_path: Path) -> Path:
    save_encoder(tmp_path / "encoder", build_encoder("vit_tiny_patch16_224", img_size=48, model_args=SMALL))
    return tmp_path / "encoder"


def as_published(folder: Path) -> None:
    """A folder as the hub gives it."""
    told = json.loads((folder / "config.json").read_text())
    del told["selfvitmil"]
    (folder / "config.json").write_text(json.dumps(told))


@pytest.mark.parametrize("published", [False, True])
@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"checkpoint_path": "/etc/passwd"}, "checkpoint_path"),
        ({"pretrained": True}, "pretrained"),
        ({"pretrained_cfg": {"url": "http://127.0.0.1:9/x.pth", "custom_load": True}}, "pretrained_cfg"),
        ({"pretrained_cfg_overlay": {"file": "/etc/passwd"}}, "pretrained_cfg_overlay"),
        ({"cache_dir": "/tmp"}, "cache_dir"),
        ({"features_only": True}, "features_only"),
        ({"trust_remote_code": True}, "trust_remote_code"),
        ({"norm_layer": "os.system"}, "norm_layer"),
        ({"act_layer": "../../evil"}, "act_layer"),
        ({"embed_dim": 10**9}, "embed_dim"),
        ({"depth": 10**6}, "depth"),
        ({"mlp_ratio": [[4]]}, "mlp_ratio"),
    ],
)
def test_an_encoders_config_sets_layers_and_nothing_else(
    encoder: Path, args: dict[str, Any], says: str, published: bool
):
    config_of(encoder, model_args=args)
    if published:
        as_published(encoder)
    with pytest.raises(EncoderError, match=rf"model_args\.{says}") as error:
        load_encoder(encoder)
    assert error.value.code in ("forbidden-model-args", "invalid-model-args")
    assert error.value.how


@pytest.mark.parametrize("architecture", ["hf-hub:evil/model", "local-dir:/etc", "../../evil", 5, ["vit"]])
def test_an_encoders_config_cannot_name_weights_elsewhere(
    encoder: Path, architecture: Any, monkeypatch: pytest.MonkeyPatch
):
    def no_network(*_: Any, **__: Any) -> None:
        raise AssertionError("the network was asked for")

    monkeypatch.setattr(socket, "create_connection", no_network)
    for published in (False, True):
        config_of(encoder, architecture=architecture)
        if published:
            as_published(encoder)
        with pytest.raises(EncoderError):
            load_encoder(encoder)


@pytest.mark.slow
def test_a_network_larger_than_its_weights_takes_no_memory(encoder: Path):
    """40,000 wide and 500 deep: 38 TB, of which a file of kilobytes has nothing."""
    config_of(encoder, model_args={"embed_dim": 40_000, "depth": 500, "num_heads": 100})
    with pytest.raises(EncoderError, check=has_code("weights-mismatch")):
        load_encoder(encoder)
    config_of(encoder, selfvitmil={"size_px": 10**7})
    with pytest.raises(EncoderError, match="size_px", check=has_code("invalid-encoder-config")):
        load_encoder(encoder)


def test_an_aggregator_larger_than_its_weights_takes_no_memory(tmp_path: Path):
    folder = make_model(tmp_path / "model")
    told = json.loads((folder / "config.json").read_text())
    config_of(folder, aggregator={**told["aggregator"], "name": "abmil", "dim": 10**7, "hidden": 10**7})
    with pytest.raises(ArtefactError, check=has_code("unreadable-model")):
        load_model(folder)


def test_weights_that_claim_more_than_they_hold_are_refused(tmp_path: Path):
    torch.save({"features": torch.zeros(1).expand(10**6, 10**6)}, tmp_path / "wide.pt")
    with pytest.raises(BagError, match="stores fewer values", check=has_code("unreadable-bag")):
        read_bag(tmp_path / "wide.pt")
    with pytest.raises(EncoderError, check=has_code("unreadable-weights")):
        load_encoder(tmp_path / "wide.pt")
    sparse = torch.eye(3).to_sparse_csr()
    torch.save(sparse, tmp_path / "sparse.pt")
    with pytest.raises(BagError, match="sparse", check=has_code("unreadable-bag")):
        read_bag(tmp_path / "sparse.pt")


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("echo run > /tmp/selfvitmil-was-attacked",)


def test_pickles_that_run_code_are_refused(tmp_path: Path):
    torch.save({"state_dict": Evil()}, tmp_path / "evil.pth")
    with pytest.raises(EncoderError, check=has_code("unsafe-weights")):
        load_encoder(tmp_path / "evil.pth")
    torch.save(Evil(), tmp_path / "evil.pt")
    with pytest.raises(BagError):
        read_bag(tmp_path / "evil.pt")
    assert not Path("/tmp/selfvitmil-was-attacked").exists()


@pytest.mark.parametrize(
    "header",
    [
        (1 << 60).to_bytes(8, "little") + b"{}",
        b"\x40\0\0\0\0\0\0\0" + b'{"a":{"dtype":"F32","shape":[99999999],"data_offsets":[0,4]}}   ',
        b"\x02\0\0\0\0\0\0\0{}" + b"x" * 10,
    ],
)
def test_safetensors_with_false_headers_are_refused(encoder: Path, header: bytes):
    (encoder / "model.safetensors").write_bytes(header)
    config_of(encoder, selfvitmil={"weights_sha256": sha256(encoder / "model.safetensors")})
    with pytest.raises(EncoderError, check=has_code("unreadable-weights")):
        load_encoder(encoder)


# ---------------------------------------------------------------------------------------------------- HDF5


def secret_of(folder: Path) -> Path:
    """Something of ours that nobody may read through a file of theirs."""
    path = folder / "secret.h5"
    with h5py.File(path, "w") as file:
        file["features"] = np.ones((4, 3), np.float16)
    return path


def external_link(file: h5py.File, folder: Path) -> None:
    file["features"] = h5py.ExternalLink(secret_of(folder).name, "/features")


def external_group(file: h5py.File, folder: Path) -> None:
    file["there"] = h5py.ExternalLink(secret_of(folder).name, "/")
    file["features"] = h5py.SoftLink("/there/features")


def soft_link(file: h5py.File, folder: Path) -> None:
    file["own"] = np.ones((4, 3), np.float16)
    file["features"] = h5py.SoftLink("/own")


def external_storage(file: h5py.File, folder: Path) -> None:
    (folder / "secret.bin").write_bytes(b"mine" * 6)
    file.create_dataset("features", (4, 3), np.float16, external=[(str(folder / "secret.bin"), 0, 24)])


def virtual(file: h5py.File, folder: Path) -> None:
    layout = h5py.VirtualLayout((4, 3), np.float16)
    layout[:] = h5py.VirtualSource(str(secret_of(folder)), "features", (4, 3))
    file.create_virtual_dataset("features", layout)


def hidden(file: h5py.File, folder: Path) -> None:
    """Where no reader looks today."""
    file["features"] = np.ones((4, 3), np.float16)
    file.create_group("deep/deeper")["link"] = h5py.ExternalLink(secret_of(folder).name, "/features")


def never_written(file: h5py.File, folder: Path) -> None:
    file.create_dataset("features", (10**9, 1000), np.float16, chunks=(1000, 1000))


def bomb(file: h5py.File, folder: Path) -> None:
    features = file.create_dataset("features", (2**20, 1024), np.float16, chunks=(2**14, 1024), compression="gzip")
    features[: 2**14] = 0


def words(file: h5py.File, folder: Path) -> None:
    file["features"] = np.array([[b"a", b"b"]], dtype=h5py.string_dtype())


HDF5_ATTACKS = [
    (external_link, "features is a link to another file"),
    (external_group, "link"),
    (soft_link, "features is a soft link"),
    (external_storage, "the values of features are in another file"),
    (virtual, "features is a virtual dataset"),
    (hidden, "deep/deeper/link is a link to another file"),
    (never_written, "features claims 2,000,000,000,000 bytes"),
    (bomb, "features claims"),
]


@pytest.mark.parametrize(("attack", "says"), [*HDF5_ATTACKS, (words, "non-numeric")])
def test_feature_files_hold_their_own_data(attack: Callable[[h5py.File, Path], None], says: str, tmp_path: Path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        attack(file, tmp_path)
    with pytest.raises(BagError, match=says, check=has_code("unreadable-bag")):
        read_bag(tmp_path / "a.h5")


@pytest.mark.parametrize(("attack", "says"), HDF5_ATTACKS)
def test_tile_tables_and_maps_hold_their_own_data(attack: Callable[[h5py.File, Path], None], says: str, tmp_path: Path):
    from selfvitmil.localize.heatmap import read_heatmap

    with h5py.File(tmp_path / "a.h5", "w") as file:
        attack(file, tmp_path)
    for read, code in ((read_tiles, "unreadable-tiles"), (read_heatmap, "unreadable-heatmap")):
        with pytest.raises(ArtefactError, match=says, check=has_code(code)):
            read(tmp_path / "a.h5")


def test_groups_in_a_circle_and_without_end(tmp_path: Path):
    with h5py.File(tmp_path / "circle.h5", "w") as file:
        file["features"] = np.ones((4, 3), np.float16)
        file.create_group("a")["back"] = file["/"]
    assert len(read_bag(tmp_path / "circle.h5")) == 4
    with h5py.File(tmp_path / "many.h5", "w", libver="latest") as file:
        for number in range(10_001):
            file.create_group(str(number))
    with pytest.raises(ValueError, match="more than 10,000 objects"), open_hdf5(tmp_path / "many.h5"):
        pass


def test_no_other_code_opens_hdf5_files_for_reading():
    import selfvitmil

    root = Path(selfvitmil.__file__).parent
    found = [
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if 'File(path, "r")' in path.read_text(encoding="utf-8")
    ]
    assert sorted(found) == ["store/files.py", "store/guard.py"]
    loads = [
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if re.search(r"(?<!safetensors\.)torch\.load\(", path.read_text())
    ]
    assert loads == ["store/files.py"]


@pytest.mark.parametrize("name", ["../../evil", "/tmp/evil", "a/b", "", ".hidden", "a\nb"])
def test_a_tile_table_cannot_name_files_elsewhere(name: str, tmp_path: Path, slide: Path):
    study = tmp_path / "study"
    flags = ("--tile.mpp", 1.0, "--tile.size-px", 48, "--workers", 0)
    assert selfvitmil("tile", study, "--cohort", slide.parent, *flags).returncode == 0
    table = study / "tiles" / "1mpp_48px_0px" / "a.h5"
    with h5py.File(table, "r+") as file:
        file["coords"].attrs["name"] = name
    with pytest.raises(ArtefactError, check=has_code("unreadable-tiles")):
        read_tiles(table)


# ---------------------------------------------------------------------------------------------------- tables, outlines


@pytest.mark.parametrize("name", ["../evil", "/etc/evil", "a/../../b", ".evil", "a\x00b"])
def test_a_cohort_cannot_name_files_elsewhere(name: str, tmp_path: Path):
    (tmp_path / "cohort.csv").write_text(f"slide,path,label\n{name},a.svs,x\n")
    with pytest.raises(CohortError):
        read_cohort(tmp_path / "cohort.csv")


LAUGHS = (
    '<?xml version="1.0"?><!DOCTYPE x [<!ENTITY a "ha">'
    + "".join(f'<!ENTITY {"abcdefghijk"[k + 1]} "{f"&{chr(97 + k)};" * 10}">' for k in range(9))
    + "]>"
)


def workbook(path: Path, sheet: bytes) -> Path:
    """An .xlsx file with this sheet."""
    import openpyxl

    book = openpyxl.Workbook()
    assert book.active is not None
    book.active.append(["slide", "path"])
    book.save(path.with_suffix(".plain.xlsx"))
    with zipfile.ZipFile(path.with_suffix(".plain.xlsx")) as old, zipfile.ZipFile(path, "w", 8) as new:
        for entry in old.infolist():
            content = sheet if entry.filename == "xl/worksheets/sheet1.xml" else old.read(entry)
            new.writestr(entry.filename, content)
    return path


SHEET = 'worksheet xmlns="http://schemas.openxmlformats.org/spreadsheetml/2006/main"'


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (LAUGHS + "<ASAP_Annotations>&j;</ASAP_Annotations>", "document type"),
        (
            '<?xml version="1.0"?><!DOCTYPE x [<!ENTITY a SYSTEM "file:///etc/passwd">]>'
            "<ASAP_Annotations>&a;</ASAP_Annotations>",
            "document type",
        ),
        ("<a>" * 100_000, "XML"),
        ('{"type": "FeatureCollection", "features": ' + "[" * 100_000, "nested|JSON"),
    ],
)
def test_annotations_cannot_grow_or_read_other_files(text: str, says: str, tmp_path: Path):
    (tmp_path / "a.xml").write_text(text)
    with pytest.raises(AnnotationError, match=says):
        read_annotations(tmp_path / "a.xml")


def test_spreadsheets_cannot_grow(tmp_path: Path):
    row = "<sheetData><row><c t='inlineStr'><is><t>&j;</t></is></c></row></sheetData>"
    laughs = workbook(tmp_path / "laughs.xlsx", f"{LAUGHS}<{SHEET}>{row}</worksheet>".encode())
    with pytest.raises(CohortError, check=has_code("unreadable-table")):
        read_cohort(laughs)
    packed = workbook(tmp_path / "packed.xlsx", f"<{SHEET}>".encode() + b" " * (300 << 20))
    assert packed.stat().st_size < 2 << 20
    with pytest.raises(CohortError, match="claims", check=has_code("unreadable-table")):
        read_cohort(packed)


def test_json_that_is_too_large_is_not_read(tmp_path: Path):
    with (tmp_path / "a.json").open("wb") as file:
        file.truncate(100 << 20)
    with pytest.raises(ValueError, match="the limit"):
        read_json(tmp_path / "a.json")


def test_settings_nested_without_end_are_refused(tmp_path: Path):
    (tmp_path / "study.toml").write_text("a = " + "[" * 100_000)
    result = selfvitmil("status", tmp_path)
    assert "Traceback" not in result.stderr
    with pytest.raises(ConfigError):
        read_toml(tmp_path / "study.toml")
