"""Where a setting comes from, and what a wrong one gets told."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from selfvitmil.errors import ConfigError
from selfvitmil.settings import (
    StudySettings,
    TileSettings,
    all_keys,
    parse,
    resolve_settings,
    tiling_name,
    to_toml,
    without_removed,
)


def test_flags_outweigh_file_outweighs_preset_outweighs_default(tmp_path: Path):
    file = tmp_path / "study.toml"
    file.write_text('preset = "paper"\n[tile]\nsize_px = 256\nmpp = 1.0\n')
    settings = resolve_settings(file, {"tile": {"mpp": 0.25}})
    assert settings.tile.mpp == 0.25  # flag
    assert settings.tile.size_px == 256  # file
    assert settings.tile.min_tissue == 0.75  # preset
    assert settings.tile.overlap_px == 0  # default


def test_preset_paper_embeds_and_draws_as_the_text_says():
    paper = resolve_settings(flags={"preset": "paper"})
    assert paper.embed.layout == "cls4+clsmean"
    assert (paper.localize.score, paper.localize.scale) == ("attention", "zero-outliers")


@pytest.mark.parametrize("preset", ["paper", "authors-code"])
def test_presets_hold_the_published_tiling(preset: str):
    settings = resolve_settings(flags={"preset": preset})
    assert (settings.tile.size_px, settings.tile.mpp, settings.tile.min_tissue) == (224, 0.5, 0.75)
    assert (settings.tissue.fraction_from, settings.tissue.thumbnail_downsample) == ("pixels", 256)
    assert settings.stain.method == "tile"


@pytest.mark.parametrize(
    ("values", "nearest"),
    [
        ({"tile": {"mmp": 0.5}}, "tile.mpp"),
        ({"tiles": {"mpp": 0.5}}, "tile"),
        ({"tile": {"min_contrast": 5}}, "tissue.min_contrast"),
        ({"engine": {"batch": {"que": "gpu"}}}, "engine.batch.queue"),
    ],
)
def test_unknown_keys_name_the_nearest(values: dict[str, object], nearest: str):
    with pytest.raises(ConfigError, match=f"did you mean '{nearest}'"):
        parse(values, "study.toml")


@pytest.mark.parametrize(
    "values",
    [
        {"tile": {"mpp": -1}},
        {"tile": {"overlap_px": 224}},
        {"tile": {"parent_mpp": [0.25]}},
        {"tile": {"parent_mpp": [2.0], "overlap_px": 8}},
        {"tissue": {"method": "own"}},
        {"tissue": {"folder": "masks"}},
        {"tissue": {"fraction_from": "pixels", "method": "saturation"}},
        {"engine": {"workers": 2, "cluster": "tls://somewhere:8786"}},
    ],
)
def test_values_that_cannot_be_meant_are_refused(values: dict[str, object]):
    with pytest.raises(ConfigError):
        parse(values, "study.toml")


def test_toml_round_trip(tmp_path: Path):
    flags = {
        "tissue": {"method": "own", "folder": "my masks", "exclude": ['a "quoted" class', "µ"]},
        "tile": {"parent_mpp": 2, "mpp": 0.5},
        "engine": {"batch": {"kind": "slurm", "directives": ["--gres=gpu:1"]}},
    }
    settings = resolve_settings(flags=flags)
    file = tmp_path / "settings.toml"
    file.write_text(to_toml(settings), encoding="utf-8")
    assert resolve_settings(file) == settings


def test_broken_toml_is_a_clear_error(tmp_path: Path):
    file = tmp_path / "study.toml"
    file.write_text("[tile\nmpp = 0.5")
    with pytest.raises(ConfigError, match=r"study\.toml: cannot be read as TOML"):
        resolve_settings(file)


def test_settings_are_frozen():
    with pytest.raises(ValidationError):
        TileSettings().mpp = 1.0  # pyright: ignore[reportAttributeAccessIssue]


def test_every_setting_says_what_it_is():
    undocumented = [
        f"{section}.{name}"
        for section, field in StudySettings.model_fields.items()
        if hasattr(field.annotation, "model_fields")
        for name, inner in field.annotation.model_fields.items()  # pyright: ignore[reportOptionalMemberAccess]
        if not inner.description
    ]
    assert undocumented == []
    assert "tile.mpp" in all_keys()


def test_tiling_name():
    assert tiling_name(TileSettings()) == "0.5mpp_224px_0px"
    assert tiling_name(TileSettings(overlap_px=16), mpp=2.0) == "2mpp_224px_16px"


def test_defaults_of_the_method_are_no_changed_settings_of_an_encoder(tmp_path: Path):
    """An earlier version wrote them out, and had neither optimizer nor scale_lr."""
    from selfvitmil.stages.pretrain import changed_settings

    numbers = (
        "lr = 5e-4\nmin_lr = 1e-6\nwarmup_lr = 1e-6\nweight_decay = 0.04\nweight_decay_end = 0.4\nclip_grad = 3.0\n"
    )
    rest = '[tile]\nmpp = 0.5\nsize_px = 224\n[stain]\nmethod = "slide"\n'
    (tmp_path / "settings.toml").write_text(f'[pretrain]\nmethod = "dino"\n{numbers}{rest}')
    assert changed_settings(tmp_path, resolve_settings(flags={"pretrain": {"method": "dino"}})) == []
    assert changed_settings(tmp_path, resolve_settings(flags={"pretrain": {"method": "dino", "lr": 1e-3}})) == [
        "pretrain.lr 0.0005 -> 0.001"
    ]
    simclr = changed_settings(tmp_path, resolve_settings(flags={"pretrain": {"method": "simclr"}}))
    assert "pretrain.method dino -> simclr" in simclr


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"schedule": "constant", "weight_decay_end": 0.4}, "weight_decay_end is for the cosine"),
        ({"schedule": "constant", "min_lr": 1e-5}, "min_lr is never reached"),
        ({"method": "dino", "decay_share": 0.2}, "decay_share is for the constant"),
        ({"warmup_steps": 10, "warmup_epochs": 1}, "give one"),
    ],
)
def test_a_number_that_the_schedule_does_not_know_is_refused(given: dict[str, object], why: str):
    with pytest.raises(ConfigError, match=why):
        resolve_settings(flags={"pretrain": given})


def test_each_method_has_its_schedule_and_a_late_decay_is_allowed():
    chosen = {
        method: resolve_settings(flags={"pretrain": {"method": method}}).pretrain.chosen("schedule")
        for method in ("dino", "simdino", "simclr", "lejepa")
    }
    assert chosen == {"dino": "cosine", "simdino": "cosine", "simclr": "cosine", "lejepa": "constant"}
    assert resolve_settings().pretrain.method == resolve_settings(flags={"preset": "quick"}).pretrain.method == "lejepa"
    late = {"schedule": "constant", "decay_share": 0.2, "min_lr": 1e-5}
    assert resolve_settings(flags={"pretrain": late}).pretrain.decay_share == 0.2


@pytest.mark.parametrize("method", ["lejepa", "simdino", "simclr"])
def test_an_output_width_that_would_do_nothing_is_refused(method: str):
    with pytest.raises(ConfigError, match=r"out_dim is for dino.*bottleneck"):
        resolve_settings(flags={"pretrain": {"method": method, "out_dim": 128}})


@pytest.mark.parametrize("line", ["[tile]\npack = true\n", "[pretrain]\npacks = false\n"])
def test_a_removed_setting_is_named_with_what_to_do(tmp_path: Path, line: str):
    (tmp_path / "study.toml").write_text(line)
    with pytest.raises(ConfigError, match=r"(tile\.pack|pretrain\.packs)' was removed .*: delete its line"):
        resolve_settings(tmp_path / "study.toml")


def test_records_of_earlier_versions_are_read_without_removed_settings():
    record = {"preset": "quick", "tile": {"mpp": 1.0, "pack": False, "pack_quality": 95}, "pretrain": {"packs": True}}
    settings = parse(without_removed(record), "record")
    assert (settings.preset, settings.tile.mpp) == ("quick", 1.0)
