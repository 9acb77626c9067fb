"""The settings of every stage, in the order of the data; frozen, checked, free of torch.

One definition serves the TOML file (`[tile] mpp = 0.5`), the flags (`--tile.mpp 0.5`), the docs and the hash that tells
whether an artefact is current. A setting is looked up in this order: flag, `study.toml`, preset, the default below.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from selfvitmil.errors import ConfigError


class Settings(BaseModel):
    """Base of all settings: frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class SynthSettings(Settings):
    """A cohort of made slides with known truth."""

    slides: int = Field(default=12, gt=0)
    """How many slides."""
    positives: float = Field(default=0.5, ge=0, le=1)
    """Share of slides with lesions."""
    size_px: int = Field(default=4096, ge=512)
    """Edge of a slide in level-0 pixels."""
    seed: int = Field(default=0, ge=0)
    """The same seed gives the same files, byte for byte."""
    layout: Literal["plain", "camelyon16"] = "plain"
    """`plain`: slides, annotations, labels.csv and cohort.csv; `camelyon16`: that challenge's folders and names."""
    hostile: bool = False
    """Also write a folder of files that are broken in the ways real ones are."""


class SlideSettings(Settings):
    """How slides are opened."""

    reader: Literal["auto", "openslide", "jpegtiff"] = "auto"
    """`jpegtiff` decodes JPEG in TIFF and SVS directly, `openslide` reads all formats; `auto` chooses per slide."""
    mpp: float | None = Field(default=None, gt=0)
    """Microns per level-0 pixel of slides that do not say it themselves; the cohort's `mpp` column wins over this."""


class TissueSettings(Settings):
    """How tissue is told from glass, on a thumbnail of the slide."""

    method: Literal["otsu", "saturation", "own"] = "otsu"
    """`otsu`: darker than glass; `saturation`: more colourful than glass; `own`: masks or outlines from `folder`."""
    folder: Path | None = None
    """For `own`: a folder with <slide>.geojson (regions in, classes named in `exclude` out) or a mask <slide>.png."""
    exclude: tuple[str, ...] = ("Exclusion", "Ignore", "Ignore*", "_2", "None")
    """Classes of an own outline that are cut out of the tissue."""
    mpp: float = Field(default=8.0, gt=0)
    """Microns per pixel of the thumbnail on which tissue is sought."""
    thumbnail_downsample: float | None = Field(default=None, gt=1)
    """Level-0 pixels per thumbnail pixel, instead of `mpp` (256 in the authors' code)."""
    min_contrast: float = Field(default=12.0, ge=0, le=255)
    """Grey (or saturation) levels by which tissue must differ from glass; below, the slide counts as empty."""
    min_area_um2: float = Field(default=10_000.0, ge=0)
    """Specks smaller than this are not tissue."""
    max_hole_um2: float = Field(default=10_000.0, ge=0)
    """Holes smaller than this belong to the tissue around them."""
    fraction_from: Literal["mask", "pixels"] = "mask"
    """Where a tile's tissue fraction comes from: the mask, or counting its own pixels below the threshold."""
    pen: Literal["flag", "exclude"] = "flag"
    """Pen marks are always measured and reported; `exclude` also cuts them out of the tissue."""


class StainSettings(Settings):
    """Macenko stain normalization."""

    method: Literal["slide", "tile", "none"] = "slide"
    """`slide`: one fit per slide for all its tiles; `tile`: every tile for itself; `none`: pixels as scanned."""
    sample_tiles: int = Field(default=32, gt=0)
    """Tiles of a slide whose tissue pixels the fit sees."""
    seed: int = 0
    """Which tiles those are."""


class TileSettings(Settings):
    """How a slide is cut into tiles."""

    size_px: int = Field(default=224, gt=0)
    """Edge of a tile as the encoder sees it, in output pixels."""
    mpp: float = Field(default=0.5, gt=0)
    """Microns per output pixel; size_px * mpp is the field of view."""
    overlap_px: int = Field(default=0, ge=0)
    """Output pixels that neighbouring tiles share."""
    min_tissue: float = Field(default=0.5, ge=0, le=1)
    """Keep a tile when at least this fraction of it is tissue."""
    parent_mpp: tuple[float, ...] = ()
    """Coarser resolutions cut beside it; every tile then knows the coarse tile around it (for multi-scale bags)."""

    @field_validator("parent_mpp", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return (value,) if isinstance(value, int | float) else value


def tiling_name(tile: TileSettings, mpp: float | None = None) -> str:
    """Name of the folder that holds this tiling, for instance `0.5mpp_224px_0px`."""
    return f"{mpp or tile.mpp:g}mpp_{tile.size_px}px_{tile.overlap_px}px"


class ClusterSettings(Settings):
    """A batch system that dask-jobqueue speaks to; asked for by `kind`."""

    kind: Literal["none", "slurm", "pbs", "lsf"] = "none"
    """`none` means processes of this machine."""
    queue: str | None = None
    """Partition or queue of the jobs."""
    account: str | None = None
    """Account or project that pays."""
    jobs: int = Field(default=4, gt=0)
    """Jobs to ask for; each runs one worker."""
    memory: str = "8GB"
    """Memory of a job."""
    walltime: str = "04:00:00"
    """Time limit of a job."""
    directives: tuple[str, ...] = ()
    """Further lines for the batch system, for instance `--gres=gpu:1`."""
    prologue: tuple[str, ...] = ()
    """Shell lines before the worker starts, for instance `module load python`."""


class EngineSettings(Settings):
    """Where the work on slides runs."""

    workers: int | None = Field(default=None, ge=0)
    """Processes on this machine; 0 works in the calling process, none means one per core."""
    cluster: str | None = None
    """Address of a running dask scheduler, tls://host:port."""
    tls_ca: Path | None = None
    """Certificate of the authority of that scheduler."""
    tls_cert: Path | None = None
    """Our certificate for it."""
    tls_key: Path | None = None
    """Our key for it."""
    insecure: bool = False
    """Allow a plain tcp:// address. Whoever reaches such a port can run any code as you."""
    retries: int = Field(default=1, ge=0)
    """Further tries of a slide whose failure may pass (a network drive that hiccups); never of a crash."""
    batch: ClusterSettings = ClusterSettings()
    """A batch system to start workers on."""


class StudySettings(Settings):
    """All settings of a study."""

    preset: Literal["default", "paper", "authors-code"] = "default"
    """`paper` follows the text of Self-ViT-MIL, `authors-code` its released code."""
    slide: SlideSettings = SlideSettings()
    tissue: TissueSettings = TissueSettings()
    stain: StainSettings = StainSettings()
    tile: TileSettings = TileSettings()
    engine: EngineSettings = EngineSettings()

    @model_validator(mode="after")
    def _check_together(self) -> StudySettings:
        """What one field alone cannot tell. It sits here because a section may come in parts, from file and flags."""
        tissue, tile, engine = self.tissue, self.tile, self.engine
        if (tissue.method == "own") != (tissue.folder is not None):
            raise ValueError("tissue.method 'own' and tissue.folder go together: give both or neither")
        if tissue.fraction_from == "pixels" and tissue.method != "otsu":
            raise ValueError("tissue.fraction_from 'pixels' counts by the grey threshold: tissue.method must be 'otsu'")
        if tile.overlap_px >= tile.size_px:
            raise ValueError(f"tile.overlap_px {tile.overlap_px} leaves no way forward in tiles of {tile.size_px} px")
        if any(mpp <= tile.mpp for mpp in tile.parent_mpp):
            raise ValueError(f"tile.parent_mpp {tile.parent_mpp} must all be coarser than tile.mpp {tile.mpp}")
        if tile.parent_mpp and tile.overlap_px:
            raise ValueError("tile.parent_mpp needs tile.overlap_px 0: only then has a tile one parent")
        if sum((engine.workers is not None, engine.cluster is not None, engine.batch.kind != "none")) > 1:
            raise ValueError("workers, cluster and batch.kind exclude each other: choose one place to work")
        return self


def resolve_settings(toml_file: Path | None = None, flags: Mapping[str, Any] | None = None) -> StudySettings:
    """Settings from, in rising order of weight: defaults, preset, `toml_file`, `flags` (a nested dict)."""
    from_file = read_toml(toml_file) if toml_file is not None else {}
    typed = dict(flags or {})
    preset = typed.get("preset", from_file.get("preset", "default"))
    merged: dict[str, Any] = {}
    if preset in ("paper", "authors-code"):
        merged = _overlay(merged, read_toml(Path(str(resources.files("selfvitmil") / "presets" / f"{preset}.toml"))))
    merged = _overlay(_overlay(merged, from_file), typed)
    return parse(merged, source=str(toml_file) if toml_file is not None else "the command line")


def parse(values: Mapping[str, Any], source: str) -> StudySettings:
    """Check a nested dict; `source` names in errors where it came from."""
    try:
        return StudySettings.model_validate(values)
    except ValidationError as error:
        problems = [_describe(problem) for problem in error.errors()]
        raise ConfigError(
            f"{source}: {'; '.join(problems)}", how="See `selfvitmil tile --help` for all settings"
        ) from None


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file as a nested dict."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path.name}: cannot be read as TOML ({error})", how="Correct the file") from None


def to_toml(settings: Settings) -> str:
    """The settings as TOML that `resolve_settings` reads back to the same values; unset optional ones are left out."""
    return _to_toml(json.loads(settings.model_dump_json(exclude_none=True)), prefix="").lstrip()


def _to_toml(values: Mapping[str, Any], prefix: str) -> str:
    # JSON's strings, numbers, booleans and arrays of them are TOML's too.
    tables = [key for key in values if isinstance(values[key], dict)]
    text = "".join(f"{key} = {json.dumps(values[key], ensure_ascii=False)}\n" for key in values if key not in tables)
    for key in tables:
        text += f"\n[{prefix}{key}]\n" + _to_toml(values[key], prefix=f"{prefix}{key}.")
    return text


def _overlay(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key in above:
        both = isinstance(above[key], Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = _overlay(merged[key], above[key]) if both else above[key]
    return merged


def _describe(problem: Any) -> str:
    location = [str(part) for part in problem["loc"]]
    name = ".".join(location)
    if problem["type"] != "extra_forbidden":
        message = str(problem["msg"]).removeprefix("Value error, ")
        return f"{name}: {message}" if name else message
    known = all_keys()
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if not nearest:  # the right key in the wrong section, or none at all
        nearest = [key for key in known if key.split(".")[-1] == location[-1]][:1]
    return f"unknown setting {name!r}" + (f", did you mean {nearest[0]!r}?" if nearest else "")


def all_keys(model: type[BaseModel] = StudySettings, prefix: str = "") -> list[str]:
    """Dotted names of all settings, for instance `tile.mpp`."""
    keys: list[str] = []
    for name, field in model.model_fields.items():
        keys.append(prefix + name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            keys += all_keys(field.annotation, f"{prefix}{name}.")
    return keys
