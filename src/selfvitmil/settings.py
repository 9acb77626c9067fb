"""The settings of every stage, in the order of the data; frozen, checked, free of torch.

One definition serves the TOML file (`[tile] mpp = 0.5`), the flags (`--tile.mpp 0.5`), the docs and the hash that tells
whether an artefact is current. A setting is looked up in this order: flag, `study.toml`, preset, the default below.
"""

from __future__ import annotations

import difflib
import json
import os
import tomllib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, ValidationError, field_validator, model_validator

from selfvitmil.errors import ConfigError


class Settings(BaseModel):
    """Base of all settings: frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class SynthSettings(Settings):
    """A cohort of synthetic slides with annotated lesions."""

    slides: int = Field(default=12, gt=0)
    """How many slides."""
    positives: float = Field(default=0.5, ge=0, le=1)
    """Share of slides with lesions."""
    size_px: int = Field(default=4096, ge=1024)
    """Edge of a slide in level-0 pixels."""
    seed: int = Field(default=0, ge=0)
    """The same seed gives the same files, byte for byte."""
    layout: Literal["plain", "camelyon16"] = "plain"
    """`plain`: slides, annotations, labels.csv and cohort.csv; `camelyon16`: that challenge's folders and names."""
    outcomes: bool = False
    """Plant outcomes besides the label: patients differ in their amount of tumour, on which `time` and `event`,
    `tumor_percent` and `grade` depend, and slides in `metastasis` and `fibrosis`."""
    hostile: bool = False
    """Also write a folder of files that are broken in the ways real ones are."""


SMALLEST_MPP, LARGEST_SLIDE_MPP, LARGEST_TILE_MPP = 0.05, 10.0, 100.0
"""Microns per pixel: finer than any light microscope resolves; coarser than any slide scanner; coarser than any tile
that shows tissue. Beyond lie wrong units: magnifications (20, 40), nanometres (250), and the defaults of image software
(72, 96, 300 dpi, one pixel per inch)."""
UPSAMPLING_SLACK = 0.02
"""Share by which a slide may be coarser than its tiles: scanners' values differ by so much."""


def slide_mpp_problem(mpp: float) -> str:
    """Why a slide cannot have these microns per pixel; empty where it can."""
    if SMALLEST_MPP <= mpp <= LARGEST_SLIDE_MPP:
        return ""
    return f"slides have {SMALLEST_MPP:g} to {LARGEST_SLIDE_MPP:g} microns per pixel (0.25 at 40x, 0.5 at 20x)"


def upsampling_warning(slide_mpp: float, tile_mpp: float) -> str:
    """What to say where tiles are finer than the slide's own pixels; empty where they are not."""
    if slide_mpp <= tile_mpp * (1 + UPSAMPLING_SLACK):
        return ""
    return (
        f"scanned at {slide_mpp:.4g} um/px, coarser than the {tile_mpp:g} um/px of its tiles: they are upsampled, and "
        "detail is missing"
    )


class SlideSettings(Settings):
    """How slides are opened."""

    reader: Literal["auto", "openslide", "jpegtiff", "image"] = "auto"
    """`jpegtiff` decodes JPEG in TIFF and SVS directly, `openslide` reads the formats of scanners, `image` other TIFF,
    PNG and JPEG; `auto` chooses per slide."""
    mpp: float | None = None
    """Microns per level-0 pixel of slides whose files do not say it, 0.05 to 10; the cohort's column `mpp` wins over
    both."""
    force_mpp: bool = False
    """Take `mpp` also where files say otherwise."""

    @field_validator("mpp")
    @classmethod
    def _plausible(cls, value: float | None) -> float | None:
        if value is not None and (problem := slide_mpp_problem(value)):
            raise ValueError(f"{value:g} is no value of a slide: {problem}")
        return value


class TissueSettings(Settings):
    """How tissue is distinguished from glass, on a thumbnail of the slide."""

    method: Literal["otsu", "saturation", "own"] = "otsu"
    """`otsu`: darker than glass; `saturation`: more colourful than glass; `own`: masks or annotations from `folder`."""
    folder: Path | None = None
    """For `own`: a folder with <slide>.geojson (regions in, classes named in `exclude` out) or a mask <slide>.png."""
    exclude: tuple[str, ...] = ("Exclusion", "Ignore", "Ignore*", "_2", "None")
    """Classes of an own annotation that are cut out of the tissue."""
    mpp: float = Field(default=8.0, ge=SMALLEST_MPP, le=LARGEST_TILE_MPP)
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


QualityKind = Literal["pen", "blur", "fold", "bubble", "blood"]
QUALITY_KINDS: tuple[QualityKind, ...] = get_args(QualityKind)
"""What quality control recognizes in tiles; see `selfvitmil.quality`."""


class TileSettings(Settings):
    """How a slide is cut into tiles."""

    size_px: int = Field(default=224, gt=0)
    """Edge of a tile as the encoder sees it, in output pixels."""
    mpp: float = Field(default=0.5, ge=SMALLEST_MPP, le=LARGEST_TILE_MPP)
    """Microns per output pixel, 0.05 to 100; size_px * mpp is the field of view."""
    overlap_px: int = Field(default=0, ge=0)
    """Output pixels that neighbouring tiles share."""
    min_tissue: float = Field(default=0.5, ge=0, le=1)
    """Keep a tile when at least this fraction of it is tissue."""
    parent_mpp: tuple[Annotated[float, Field(ge=SMALLEST_MPP, le=LARGEST_TILE_MPP)], ...] = ()
    """Coarser resolutions cut beside it; every tile then knows the coarse tile around it (for multi-scale bags)."""
    quality: bool = False
    """Flag tiles with pen marks, blur, folds, bubbles or blood, in the tile table and on a page; none is dropped."""
    exclude: tuple[QualityKind, ...] = ()
    """Drop tiles flagged as these kinds (pen, blur, fold, bubble, blood), counted per slide; implies `quality`."""

    @property
    def with_quality(self) -> bool:
        """Whether the quality of tiles is measured."""
        return self.quality or bool(self.exclude)

    @field_validator("exclude", mode="before")
    @classmethod
    def _separated(cls, value: Any) -> Any:
        """Accept `pen,blur` for two kinds; their order does not count."""
        parts = cast(tuple[Any, ...], (value,) if isinstance(value, str) else tuple(value))
        kinds = {kind.strip() for part in parts for kind in str(part).split(",")}
        return tuple(sorted(kinds, key=lambda kind: QUALITY_KINDS.index(kind) if kind in QUALITY_KINDS else -1))

    @field_validator("parent_mpp", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return (value,) if isinstance(value, int | float) else value


def _from_text(text: str) -> Any:
    """The number or truth value that a text spells, else the text."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def tiling_name(tile: TileSettings, mpp: float | None = None) -> str:
    """Name of the folder that holds this tiling, for instance `0.5mpp_224px_0px`."""
    return f"{mpp or tile.mpp:g}mpp_{tile.size_px}px_{tile.overlap_px}px"


_DINO: dict[str, Any] = {
    "schedule": "cosine",
    "optimizer": "adamw",
    "lr": 5e-4,
    "scale_lr": True,
    "min_lr": 1e-6,
    "warmup_lr": 1e-6,
    "layer_decay": 1.0,
    "weight_decay": 0.04,
    "weight_decay_end": 0.4,
    "clip_grad": 3.0,
    "bottleneck": 256,
    "global_scale": (0.4, 1.0),
    "brightness": 0.4,
    "contrast": 0.4,
    "saturation": 0.2,
    "hue": 0.1,
}
METHOD_DEFAULTS: dict[str, dict[str, Any]] = {
    "dino": _DINO,
    "simdino": _DINO,
    "lejepa": {
        "schedule": "constant",
        "optimizer": "adamw",
        "lr": 5e-4,
        "scale_lr": True,
        "min_lr": 1e-6,
        "warmup_lr": 1e-6,
        "layer_decay": 1.0,
        "weight_decay": 0.05,
        "weight_decay_end": 0.05,
        "clip_grad": 3.0,
        "bottleneck": 64,
        "global_scale": (0.3, 1.0),
        "brightness": 0.4,
        "contrast": 0.4,
        "saturation": 0.2,
        "hue": 0.1,
    },
    "simclr": {
        "schedule": "cosine",
        "optimizer": "adam",
        "lr": 1e-5,
        "scale_lr": False,
        "min_lr": 2.4e-7,
        "warmup_lr": 1e-5,
        "layer_decay": 1.0,
        "weight_decay": 1e-5,
        "weight_decay_end": 1e-5,
        "clip_grad": 0.0,
        "bottleneck": 256,
        "global_scale": (0.08, 1.0),
        "brightness": 0.8,
        "contrast": 0.8,
        "saturation": 0.8,
        "hue": 0.2,
    },
}
"""Settings of pretraining whose default depends on `method`: the numbers of its paper, with `simclr` those of DSMIL."""
START_LR, START_LAYER_DECAY = 1e-4, 0.7
"""Learning rate (at most) and layer-wise decay of a run that starts from trained weights. A full 5e-4 in all layers
overwrites them within some hundred steps; nanopath continues DINOv2 with 1.25e-4 and 0.7 (0.8 was worse)."""
LORA_LR_FACTOR = 10
"""Adapters start at zero and have few weights: with the low rate of a continued run they hardly move."""
FROM_SCRATCH = ("architecture", "width", "depth", "heads", "patch_px", "lr", "mean", "std")
"""Settings of a preset that hold only for a network that starts from scratch: starting weights decide these."""


def pretrain_defaults(method: str, init: str = "scratch", lora: int = 0) -> dict[str, Any]:
    """Return the defaults of pretraining that depend on the method and on where the weights start."""
    found = dict(METHOD_DEFAULTS[method])
    if init != "scratch":
        found |= {"lr": min(found["lr"], START_LR), "layer_decay": START_LAYER_DECAY}
    if lora:
        found |= {"lr": found["lr"] * LORA_LR_FACTOR, "layer_decay": 1.0}
    return found


class PretrainSettings(Settings):
    """How an encoder learns from the tiles of the study, without labels."""

    method: Literal["dino", "simdino", "lejepa", "simclr"] = "lejepa"
    """What the encoder learns by: `lejepa` makes the views of a tile agree and their distribution Gaussian, `dino`
    predicts a teacher's distributions (the paper), `simdino` a teacher's directions, `simclr` contrasts tiles (the
    ResNet-18 of DSMIL)."""
    architecture: str | None = None
    """timm's name of the network; none means that of `init`, else vit_small_patch16_224 or resnet18_instancenorm.
    `vit_tiny_patch16_convstem_224`, `vit_small_...` and `vit_base_...` are timm's ViTs with a convolutional stem;
    `resnet18` and `resnet50` have batch norms, whose statistics are recomputed on plain tiles at the end."""
    width: int | None = Field(default=None, gt=0)
    """Width of the ViT's tokens, where it shall differ from the architecture's."""
    depth: int | None = Field(default=None, gt=0)
    """Blocks of the ViT, where they shall differ."""
    heads: int | None = Field(default=None, gt=0)
    """Attention heads of the ViT, where they shall differ; they must divide its width."""
    patch_px: int | None = Field(default=None, gt=0)
    """Edge of the ViT's patches, where it shall differ."""
    init: str = "scratch"
    """Where the weights start: `scratch`, or an encoder: a folder, a file, a timm or hub name. Its network, channel
    means and embedding layout are kept, and the defaults of `lr` and `layer_decay` are lower."""
    lora: int = Field(default=0, ge=0)
    """Rank of low-rank adapters (LoRA, Hu et al. 2021) on the attention layers of a ViT from `init`: its own weights
    stay fixed, adapters and head are trained, and the saved encoder has them merged in. 0 trains all weights."""
    transductive: bool = False
    """Train one encoder on all slides, test slides too (never on labels); all results are labelled transductive."""
    per_split: bool = False
    """Train an encoder for every split (train.split), on its training slides alone, so that no test slide is seen."""

    epochs: int = Field(default=100, gt=0)
    """How often the run goes through the slides, `tiles_per_slide` each."""
    steps: int | None = Field(default=None, gt=0)
    """Length of the run in steps, instead of `epochs`."""
    batch: int = Field(default=256, gt=0)
    """Tiles of one step, over all GPUs and all parts of `accumulate` together."""
    accumulate: int = Field(default=1, gt=0)
    """Parts in which a GPU works through its share of a batch, one after the other, to save memory; the result stays
    the same. Losses that compare tiles (all but plain `dino`) take one more forward pass of the views then. A CPU
    takes as many parts at a time as it has cores (with `drop_path = 0`), which is quicker for small networks."""
    sampler: Literal["mixed", "one-slide"] = "mixed"
    """`mixed`: batches of tiles of many slides; `one-slide`: each batch from one slide, slides in order (authors)."""
    tiles_per_slide: int | None = Field(default=None, gt=0)
    """Most tiles of a slide in an epoch; none means all. With `one-slide` exactly so many, drawn again if need be."""
    resample: bool = True
    """Draw those tiles anew in every epoch; off means the same ones in all epochs (authors)."""

    schedule: Literal["cosine", "constant"] | None = None
    """Course of learning rate, weight decay and momentum: `cosine` lays them out over the length of the run (DINO);
    `constant` keeps them after the warm-up, so that a longer run passes through the states of a shorter one. None means
    cosine, with `lejepa` constant."""
    decay_share: float = Field(default=0.0, ge=0, lt=1)
    """With the `constant` schedule, share of the run at its end over which the learning rate falls linearly to
    `min_lr`; 0 keeps it, since the average of the weights that becomes the encoder is steady without."""
    optimizer: Literal["adamw", "adam"] | None = None
    """AdamW, or Adam, whose weight decay is part of the gradient; none means adamw, with `simclr` adam."""
    lr: float | None = Field(default=None, gt=0)
    """Learning rate after the warm-up; none means 5e-4, with `init` 1e-4, with `lora` 1e-3 (with `simclr` 1e-5, with
    `lora` 1e-4)."""
    layer_decay: float | None = Field(default=None, gt=0, le=1)
    """Layer-wise learning-rate decay: block k of n learns with `lr` times this to the power n - k, patch and position
    embedding as block 0, the head with `lr`. None means 1 from scratch and with `lora`, 0.7 with `init`."""
    scale_lr: bool | None = None
    """Take `lr` for a batch of 256 and scale it in proportion to the batch; none means true, with `simclr` false."""
    min_lr: float | None = Field(default=None, ge=0)
    """Learning rate at the end of the `cosine` schedule and of `decay_share` (not scaled to the batch); none means
    1e-6, with `simclr` 2.4e-7."""
    warmup_lr: float | None = Field(default=None, ge=0)
    """Learning rate at the first step (not scaled to the batch); none means 1e-6, with `simclr` 1e-5."""
    warmup_epochs: int | None = Field(default=None, ge=0)
    """Epochs of learning-rate warm-up; none means a tenth of the run, with the `constant` schedule 150 steps."""
    warmup_steps: int | None = Field(default=None, gt=0)
    """Steps of learning-rate warm-up, instead of `warmup_epochs`."""
    weight_decay: float | None = Field(default=None, ge=0)
    """Weight decay at the first step; biases and norms have none. None means 0.04, with `simclr` 1e-5, with
    `lejepa` 0.05."""
    weight_decay_end: float | None = Field(default=None, ge=0)
    """Weight decay at the end of the `cosine` schedule; none means 0.4, with `simclr` 1e-5, with `lejepa` 0.05."""
    clip_grad: float | None = Field(default=None, ge=0)
    """Clip each parameter's gradient norm to this value, 0 disables clipping; none means 3, with `simclr` 0."""
    drop_path: float = Field(default=0.1, ge=0, lt=1)
    """Chance that the student's last block is left out for a view; earlier blocks have less, the teacher has none."""

    momentum: float | None = Field(default=None, ge=0, le=1)
    """Share that the teacher, or the average of the weights, keeps of itself at the first step; with the `cosine`
    schedule 1 at the end. None means one that fits batch and run, with the `constant` schedule 0.99."""
    student_temp: float = Field(default=0.1, gt=0)
    """Temperature of the student's softmax."""
    teacher_temp: float = Field(default=0.04, gt=0)
    """Temperature of the teacher's softmax after its warm-up."""
    warmup_teacher_temp: float = Field(default=0.01, gt=0)
    """Temperature of the teacher's softmax at the first step."""
    temp_ramp: Literal["linear", "step"] = "linear"
    """How the one becomes the other: climbing (authors' code), or at once when the warm-up is over (paper)."""
    warmup_temp_epochs: int | None = Field(default=None, ge=0)
    """Epochs of that warm-up; none means as long as that of the learning rate."""
    centering: Literal["mean", "sinkhorn"] = "mean"
    """What keeps the teacher from giving one answer for all: DINO's moving centre, or balancing each batch (DINOv2)."""
    center_momentum: float = Field(default=0.9, ge=0, lt=1)
    """Share that the centre of the teacher's outputs keeps of itself in a step."""

    koleo: float = Field(default=0.0, ge=0)
    """With `dino`, weight of a loss that pushes each embedding from its nearest neighbour in the batch (0.1 in DINOv2);
    0 leaves it out."""
    kde: float = Field(default=0.0, ge=0)
    """With `dino`, weight of a loss that pushes each embedding from all others of the batch (0.005 to 0.05 in
    Midnight); 0 leaves it out."""
    kde_concentration: float = Field(default=5.0, gt=0)
    """Concentration of that loss: the larger, the more the nearest ones count."""
    out_dim: int | None = Field(default=None, gt=1)
    """With `dino`, outputs of the head that student and teacher compare; none means as many as fit the number of
    tiles."""
    head_width: int = Field(default=2048, gt=0)
    """Width of the head's hidden layers."""
    head_layers: int = Field(default=3, gt=1)
    """Linear layers of the head; with `dino` another one follows."""
    bottleneck: int | None = Field(default=None, gt=0)
    """Width of what DINO's last layer sees, and of the outputs of other methods; none means 256, with `lejepa` 64."""
    norm_last_layer: bool = True
    """Keep the rows of the last layer at length one, which steadies large networks."""
    freeze_last_layer_epochs: int | None = Field(default=None, ge=0)
    """Epochs in which the last layer stays as it is; none means a hundredth of the run, with the `constant` schedule a
    tenth of the warm-up."""
    temperature: float = Field(default=0.5, gt=0)
    """Temperature of the contrastive loss of `simclr`."""
    sigreg: float = Field(default=0.05, ge=0, le=1)
    """With `lejepa`, weight of the loss that makes the outputs Gaussian; agreement of the views has 1 minus this."""
    directions: int = Field(default=256, gt=0)
    """With `lejepa`, random directions along which the outputs of a step are compared with a Gaussian."""
    coding_eps: float = Field(default=0.05, gt=0)
    """With `simdino`, squared precision of the coding rate: the smaller, the more outputs are spread."""

    global_px: int | None = Field(default=None, gt=0)
    """Edge of the two large views; none means the edge of the tiles."""
    local_px: int | None = Field(default=None, gt=0)
    """Edge of the small views; none means 3/7 of the large one in whole patches, 96 for 224."""
    num_local: int = Field(default=8, ge=0)
    """Small views of each tile."""
    global_scale: tuple[float, float] | None = None
    """Share of the tile's area that a large view shows, from and to; none means 0.4 and 1, with `simclr` 0.08 and 1,
    with `lejepa` 0.3 and 1."""
    local_scale: tuple[float, float] = (0.05, 0.4)
    """Share of the tile's area that a small view shows, from and to."""
    hflip: float = Field(default=0.5, ge=0, le=1)
    """Chance that left and right are swapped."""
    vflip: float = Field(default=0.5, ge=0, le=1)
    """Chance that top and bottom are swapped; tissue has no upside."""
    right_angles: bool = True
    """Turn views by 0, 90, 180 or 270 degrees, all equally likely."""
    stain_jitter: float = Field(default=0.5, ge=0, le=1)
    """Chance that the strengths of the two stains are varied."""
    stain_scale: float = Field(default=0.2, ge=0, lt=1)
    """Strength of each stain times 1 minus to 1 plus this."""
    stain_shift: float = Field(default=0.02, ge=0)
    """Then plus or minus up to this, in optical density."""
    jitter: float = Field(default=0.8, ge=0, le=1)
    """Chance of colour jitter by the next four."""
    brightness: float | None = Field(default=None, ge=0)
    """Brightness times 1 minus to 1 plus this; none means 0.4, with `simclr` 0.8."""
    contrast: float | None = Field(default=None, ge=0)
    """Contrast times 1 minus to 1 plus this; none means 0.4, with `simclr` 0.8."""
    saturation: float | None = Field(default=None, ge=0)
    """Saturation times 1 minus to 1 plus this; none means 0.2, with `simclr` 0.8."""
    hue: float | None = Field(default=None, ge=0, le=0.5)
    """Hue turned by up to this share of the colour circle; none means 0.1, with `simclr` 0.2."""
    grey: float = Field(default=0.2, ge=0, le=1)
    """Chance that a view loses its colours."""
    blur: tuple[float, float, float] = (1.0, 0.1, 0.5)
    """Chance of a blur in the first large view, the second one and the small ones; `simclr` takes the third for both of
    its views."""
    solarize: float = Field(default=0.2, ge=0, le=1)
    """Chance that bright pixels of the second large view are inverted."""
    mean: tuple[float, float, float] | None = None
    """Mean of the tiles' RGB channels, white = 1; none measures it (or takes that of `init`)."""
    std: tuple[float, float, float] | None = None
    """Standard deviation of the tiles' RGB channels; none measures it (or takes that of `init`)."""
    measure_tiles: int = Field(default=2048, gt=0)
    """Tiles on which mean and standard deviation are measured."""

    precision: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """`auto`: bf16 on GPUs that have it, fp16 with a loss scale on others, fp32 on CPUs."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Compile the networks: `auto` on GPUs for runs of 500 steps or more, and goes on without where that fails. On one
    GPU `auto` and `on` also record a step and repeat it, so that its thousands of kernels are started at once."""
    deterministic: bool = False
    """On a GPU, the same run gives the same bits, 12 % slower on an H200; on a CPU it does so anyway."""
    workers: int | None = Field(default=None, ge=0)
    """Processes that read tiles; none means one per core less one, 0 reads in the training process."""
    keep_gb: float = Field(default=4.0, ge=0)
    """Memory for tiles that were read: where all of them fit, each is read once. A GPU keeps them itself where they fit
    into a quarter of its free memory. 0 reads them again in every epoch."""
    shuffle_tiles: int = Field(default=2048, gt=0)
    """Tiles held in memory at once, from which batches are mixed."""
    checkpoint_minutes: float = Field(default=15.0, gt=0)
    """Time between checkpoints."""
    log_steps: int = Field(default=10, gt=0)
    """Steps between lines of metrics.jsonl."""
    tensorboard: bool = False
    """Also write the metrics for TensorBoard, to tensorboard/ in the encoder's folder."""
    keep: Literal["best", "last"] = "best"
    """Which weights become the encoder: `best` those with the best quality, measured without labels about 20 times in
    the run (later ones where the measure cannot tell them apart), `last` those of the last step. Runs too short to be
    measured keep the last ones."""
    stop_early: bool = True
    """End the run when its quality stays clearly below its best for a fifth of the run."""
    probe_table: Path | None = None
    """Labelled tiles on which the encoder is tried out now and then: a table with tile, label, split and patient."""
    probe_epochs: int | None = Field(default=None, gt=0)
    """Epochs between such trials; none means a tenth of the run."""
    seed: int = Field(default=0, ge=0)
    """Decides the starting weights, the order of the tiles and all that is random in their views."""

    def chosen(self, name: str) -> Any:
        """The value of a setting, or where it is none the default of the method and start, if there is one."""
        value = getattr(self, name)
        return pretrain_defaults(self.method, self.init, self.lora).get(name) if value is None else value


TokenLayout = Literal[
    "cls4+patchmean", "cls4+clsmean", "cls4", "cls4spread", "cls4spread+patchmean", "cls", "cls+patchmean"
]
"""Which tokens of a ViT make the embedding of a tile: see EmbedSettings.layout."""


class EmbedSettings(Settings):
    """How tiles become embeddings."""

    layout: TokenLayout | None = None
    """Tokens of a ViT that make a tile's embedding: class tokens of the last four blocks (`cls4`), of four blocks
    spread over the depth (`cls4spread`: 3, 6, 9, 12 of 12) or of the last (`cls`), then the mean of the last block's
    patch tokens (`patchmean`) or of those class tokens (`clsmean`, the paper's text). None means the encoder's own:
    that of its config.json, the customary one of known models, else cls4+patchmean."""
    batch: int = Field(default=256, gt=0)
    """Tiles that the encoder sees at once."""
    device: str = "auto"
    """`cpu`, `cuda`, `cuda:1`; `auto` takes a free GPU for every worker, or the CPU where there is none."""
    precision: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """Numbers that the encoder computes in; `auto` is bf16 on GPUs that have it and fp32 on CPUs."""
    compile: bool = False
    """Compile the encoder first: worth a minute where thousands of slides follow."""
    readers: int | None = Field(default=None, gt=0)
    """Threads (for a GPU: processes) that read ahead of the encoder; none means one per core of a worker's share."""


Option = int | float | bool | str | tuple[float, ...]
"""Value of a setting that a method has for itself."""


class TrainSettings(Settings):
    """How an aggregator learns from slide labels. None everywhere means: what the recipe of the method says."""

    aggregator: str = "self-vit-mil"
    """The method; `compare` trains several (compare.methods)."""
    recipe: Literal["default", "published", "paper", "authors-code"] = "default"
    """`default`: ours, for cohorts of any size; `published`: that of each method's own paper or code; `paper` and
    `authors-code` the same, with Self-ViT-MIL by the letter of its text or by its released code."""
    options: dict[str, Option | dict[str, Option]] = Field(default_factory=dict)
    """Settings of the aggregator named above, for instance `top = 3`, over those of its recipe. In a file also
    `[train.options.METHOD]` for any method, where numbers of its training may stand too, for instance `epochs = 20`."""
    positive: str | None = None
    """Positive class of two, whose probability scores are; none finds it by the meaning of the names (`normal`, `wt`,
    `MSS`, `0` ... are negative), else takes the later name and says so."""
    outcome: Literal[
        "auto", "binary", "multiclass", "ordinal", "multilabel", "continuous", "survival", "survival-discrete"
    ] = "auto"
    """What is predicted. `auto`: classes where slides have labels, else survival where the cohort has `time` and
    `event`; of a named target, classes or a continuous value by its cells. The choice is printed."""
    target: tuple[str, ...] = ()
    """Columns of the cohort to predict; none means `label`, or `time` and `event`. Several labels are `multilabel`."""
    levels: tuple[str, ...] = ()
    """Levels of an `ordinal` outcome from the lowest to the highest; none needed for numbers."""
    joint: tuple[str, ...] = ()
    """Targets to train jointly, in one network with outputs for each: a column, with its kind where the cells do not
    tell (`grade:ordinal`), or time and event of survival (`time+event`), or labels (`kras+braf:multilabel`). Each is
    evaluated by itself; `target` then names one of them, for a command on that one alone."""
    joint_weights: tuple[PositiveFloat, ...] = ()
    """Weights of the losses of these targets; none means 1 for each."""
    split: Literal["auto", "given", "k-fold", "monte-carlo", "leave-site-out", "site-k-fold", "files", "all"] = "auto"
    """`given`: the cohort's column; `files`: those of `split_folder`; `auto`: given where there is one, else k-fold.
    `leave-site-out`: every site is tested on models that never saw it; `site-k-fold`: folds of whole sites. `all`: a
    final fit on all labelled slides, which tests nothing (`train` and `package` only)."""
    site: str = "site"
    """Column of the cohort with the site (hospital, scanner) of a slide. Where labels go with it a warning says so."""
    split_folder: Path | None = None
    """For `files`: where the splits lie, in CLAM's form."""
    folds: int = Field(default=5, ge=2)
    """Parts of `k-fold` and `site-k-fold`, or repeats of `monte-carlo`."""
    validation: float = Field(default=0.2, gt=0, lt=1)
    """Share of the training patients that epoch and threshold are chosen on, where the split names none."""
    seeds: int = Field(default=5, gt=0)
    """Trainings that differ in nothing but their random numbers."""
    seed: int = Field(default=0, ge=0)
    """The first of them; also decides the splits."""

    tune: bool = False
    """Choose settings of each method by cross-validation on the training and validation slides of every split, before
    its models are trained; `plan` shows the cost. `--tune` for short."""
    tune_folds: int = Field(default=3, ge=2)
    """Folds of that cross-validation, by patient."""
    tune_space: dict[str, tuple[Option, ...] | dict[str, tuple[Option, ...]]] = Field(default_factory=dict)
    """Settings to choose among, all combinations: in a file `[train.tune_space]` with lists (`lr_factor = [1, 3]`,
    `weight_decay = [0.001, 1]`), `[train.tune_space.METHOD]` for one method. None means three learning rates with two
    weight decays."""

    optimizer: Literal["adamw", "adam", "sgd", "lookahead-radam"] | None = None
    """What moves the weights."""
    lr: float | None = Field(default=None, gt=0)
    """Learning rate after the warm-up."""
    lr_factor: float | None = Field(default=None, gt=0)
    """Multiplies the learning rate that a method has by its recipe, for its number of dimensions."""
    min_lr: float | None = Field(default=None, ge=0)
    """Learning rate at the end of its cosine."""
    betas: tuple[float, float] | None = None
    """Memory of Adam's two averages."""
    weight_decay: float | None = Field(default=None, ge=0)
    """Weight decay; with adamw and lookahead-radam biases and norms have none."""
    epochs: int | None = Field(default=None, gt=0)
    """Passes over the training bags, at most."""
    warmup_epochs: int | None = Field(default=None, ge=0)
    """Epochs in which the learning rate rises."""
    accumulate: int | None = Field(default=None, gt=0)
    """Bags whose gradients make one step."""
    clip_grad: float | None = Field(default=None, ge=0)
    """Longest gradient of all weights together; 0 means no limit."""
    min_epochs: int | None = Field(default=None, ge=0)
    """Epochs before which training does not end early."""
    patience: int | None = Field(default=None, ge=0)
    """Epochs without a better validation after which training ends; 0 means never."""
    average_epochs: int | None = Field(default=None, ge=0)
    """Validate, and keep, the running average of the weights over about this many epochs (an exponential average after
    as many, a plain mean before) instead of the weights of one epoch; 0 and none mean no average."""
    monitor: Literal["loss", "auc", "authors"] | None = None
    """What "better" means on validation; `authors`: (AUC + accuracy + 1 - loss) / 4, as in their code."""
    class_weights: Literal["none", "balanced"] | None = None
    """`balanced`: bags of rare classes count as much as those of frequent ones."""
    instance_dropout: float | None = Field(default=None, ge=0, lt=1)
    """Share of a bag's instances that a training step does not see."""
    max_instances: int | None = Field(default=None, gt=0)
    """Most instances of a bag in a training step, drawn anew each time; validation and test always see all."""
    standardize: bool | None = None
    """Bring every dimension to mean 0 and spread 1 over the training bags."""

    device: str = "auto"
    """`cpu`, `cuda`, `cuda:1`; `auto` takes a GPU where there is one."""
    cache_gb: float | None = Field(default=None, ge=0)
    """Memory of the device for bags; none means three quarters of what is free (on a CPU bags stay mapped files)."""

    @field_validator("options", mode="before")
    @classmethod
    def _typed_options(cls, value: Any) -> Any:
        """Flags come as text; a file's values have types already."""
        if not isinstance(value, dict):
            return value
        return {key: _from_text(each) if isinstance(each, str) else each for key, each in value.items()}  # pyright: ignore[reportUnknownVariableType]


class EvaluateSettings(Settings):
    """How trained aggregators are evaluated."""

    protocol: Literal["honest", "optimistic"] = "honest"
    """`honest`: all is chosen on validation; `optimistic`: epoch and threshold on the test set, as the authors did."""
    threshold: Literal["youden", "fixed"] = "youden"
    """Where a probability becomes a decision: Youden's point (of validation; of test when optimistic), or 0.5."""
    calibration: Literal["none", "platt", "temperature"] = "none"
    """Fitted on validation scores; ranks stay as they are."""
    bootstrap: int = Field(default=2000, ge=100)
    """Samples of bootstrap intervals."""
    confidence: float = Field(default=0.95, gt=0, lt=1)
    """Of all intervals."""
    coverage: float = Field(default=0.9, gt=0, lt=1)
    """Share of patients whose prediction set shall contain the true class (conformal prediction)."""
    seed: int = Field(default=0, ge=0)
    """Of the bootstrap."""


class CompareSettings(Settings):
    """Which rows a comparison has."""

    methods: tuple[str, ...] = ()
    """Aggregators; none means all that the features allow."""
    baseline: str = "mean"
    """The method that all others are tested against, pairwise on the same slides."""
    random_encoder: bool = False
    """Also embed with an untrained network of the encoder's kind, for the worth of its training."""
    mean_color: bool = False
    """Also classify by mean and spread of each tile's colours (row `mean colour`), for the worth of any network."""
    supervised: Literal["none", "probe", "resnet18"] = "none"
    """Also learn from annotated tiles: a linear probe on the encoder's embeddings, or a ResNet-18 on their pixels."""


class LocalizeSettings(Settings):
    """How scores of tiles become heatmaps, lesions and pictures."""

    score: Literal["auto", "attention", "instance", "product", "effect"] = "auto"
    """What heatmaps show; `auto`: of attention and the tile's own probability the one that is better on annotated
    validation slides, without such the tile's own probability, else attention, else the effect of leaving it out."""
    scale: Literal["winsor", "zero-outliers", "percentile", "none"] = "winsor"
    """Z-scores cut off at `z_limit`; with outliers set to 0, as the paper says; ranks; or from least to most."""
    z_limit: float = Field(default=3.0, gt=0)
    """Standard deviations from which on a score is an outlier."""
    gate: bool = False
    """Leave slides blank that were not found positive."""
    of_class: str | None = None
    """Class whose evidence is mapped, where there are more than two; none means the predicted one."""
    parts: tuple[Literal["test", "val", "train"], ...] = ("test",)
    """Slides that get a heatmap; those that the model was trained on only on request."""

    lesion_threshold: float = Field(default=0.5, ge=0, le=1)
    """Tiles from this score on make up lesions, on slides that are called positive."""
    staging: Literal["auto", "none", "lymph-node"] = "auto"
    """Terms for the sizes of lesions: `lymph-node` names the size class of metastases (isolated tumour cells,
    micrometastasis, macrometastasis), for studies of lymph nodes only; `auto` means Camelyon16, known by its slides'
    names, and `none` for all other cohorts."""
    min_lesion_mm2: float = Field(default=0.0, ge=0)
    """Smaller regions are no lesions."""
    point_radius_um: float = Field(default=200.0, gt=0)
    """Of several points within this distance only the highest stays."""
    point_min: float = Field(default=0.0, ge=0, le=1)
    """Least detection score of a point."""
    froc_frame: Literal["microns", "challenge"] = "microns"
    """Sizes in FROC: true microns, or level-0 pixels taken as 0.243 um whatever the slide, as the challenge does."""

    pictures: bool = True
    """Draw overlays."""
    picture_px: int = Field(default=2000, ge=200, le=8000)
    """Longer edge of an overlay."""
    colors: tuple[Literal["red", "inferno", "viridis"], ...] = ("red", "inferno")
    """Ways to draw: `red` as in the paper (dark tiles, the redder the more evidence), and perceptual colour maps."""
    geojson: Literal["none", "plain", "gzip"] = "plain"
    """Tiles and lesions for QuPath."""
    asap: bool = False
    """Lesions as XML for ASAP."""
    tiff: bool = False
    """The heatmap as a pyramidal TIFF, for any viewer."""


class SupervisedSettings(Settings):
    """How a classifier of tiles learns from annotated lesions."""

    min_overlap: float = Field(default=0.25, ge=0, le=1)
    """A tile is tumour when at least this share of it lies inside annotated tumour; 0 means any overlap."""
    use_unannotated: bool = False
    """Take tissue of positive slides outside all annotations as normal; right only where every lesion is annotated."""
    pool: Literal["max", "topk"] = "topk"
    """Score of a slide: the largest probability of its tiles, or the mean of the `k` largest."""
    k: int = Field(default=10, gt=0)
    """Tiles of that mean; all where a slide has fewer."""
    tiles_per_slide: int = Field(default=512, gt=0)
    """Most tiles of a slide and class: that the probe sees, in one pass of the network, and in validation."""

    l2: tuple[PositiveFloat, ...] = Field(default=(1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0), min_length=1)
    """Penalties of the probe to choose from: half of this times the squared weights is added to the mean loss."""

    architecture: str = "resnet18"
    """timm's name of the network, where it starts from scratch."""
    init: str = "scratch"
    """Where its weights start: `scratch`, or an encoder: a folder, a file, a timm or hub name."""
    epochs: int = Field(default=20, gt=0)
    """How often the network is validated; the best of these is kept."""
    steps_per_epoch: int | None = Field(default=None, gt=0)
    """Steps between; none means as many as show every tile of the rarer class once, and 50 at least."""
    batch: int = Field(default=128, gt=1)
    """Tiles of one step, half of them tumour."""
    lr: float = Field(default=1e-3, gt=0)
    """Learning rate after the warm-up, which takes a tenth of the run; half a cosine to nearly 0 follows."""
    weight_decay: float = Field(default=0.05, ge=0)
    """Weight decay of the network; biases and norms have none."""
    precision: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """`auto`: bf16 on GPUs that have it, fp16 with a loss scale on others, fp32 on CPUs."""
    workers: int | None = Field(default=None, ge=0)
    """Processes that read tiles; none means one per core less one, 0 reads in the training process."""
    device: str = "auto"
    """`cpu`, `cuda`, `cuda:1`; `auto` takes a GPU where there is one."""


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
    """Processes on this machine, for slides and for trainings of small bags; 0 works in the calling process, none means
    one per core."""
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
    """Further tries of a slide whose failure may pass, such as a network drive that hiccups."""
    batch: ClusterSettings = ClusterSettings()
    """A batch system to start workers on."""


STUDY_ENGINE = ("workers", "retries")
"""Keys of `engine` that a study.toml may set. A study may come from somebody else: addresses, certificates and shell
lines come from flags and from the user's own file alone (`user_engine`)."""
PLACES = ("workers", "cluster", "batch")
"""Keys of `engine` that say where work runs: one of them given makes the user's file silent."""


Preset = Literal["default", "quick", "demo", "paper", "authors-code", "dsmil-simclr"]
PRESET_METHODS = {"paper": "dino", "authors-code": "dino", "dsmil-simclr": "simclr"}
"""Method of pretraining that a published preset is about; its settings make no sense for another."""


class StudySettings(Settings):
    """All settings of a study."""

    preset: Preset = "default"
    """`quick` trains an encoder in minutes, `demo` a tiny one for synthetic slides on two cores; `paper` follows the
    text of Self-ViT-MIL, `authors-code` its code; `dsmil-simclr` trains the ResNet-18 of DSMIL's own features."""
    slide: SlideSettings = SlideSettings()
    tissue: TissueSettings = TissueSettings()
    stain: StainSettings = StainSettings()
    tile: TileSettings = TileSettings()
    pretrain: PretrainSettings = PretrainSettings()
    embed: EmbedSettings = EmbedSettings()
    train: TrainSettings = TrainSettings()
    evaluate: EvaluateSettings = EvaluateSettings()
    compare: CompareSettings = CompareSettings()
    supervised: SupervisedSettings = SupervisedSettings()
    localize: LocalizeSettings = LocalizeSettings()
    engine: EngineSettings = EngineSettings()

    @model_validator(mode="after")
    def _check_together(self) -> StudySettings:
        """What one field alone cannot tell. It sits here because a section may come in parts, from file and flags."""
        tissue, tile, engine = self.tissue, self.tile, self.engine
        if (tissue.method == "own") != (tissue.folder is not None):
            raise ValueError("tissue.method 'own' and tissue.folder go together: give both or neither")
        if tissue.fraction_from == "pixels" and tissue.method != "otsu":
            raise ValueError("tissue.fraction_from 'pixels' counts by the grey threshold: tissue.method must be 'otsu'")
        if self.pretrain.transductive and self.pretrain.per_split:
            raise ValueError(
                "pretrain.transductive (one encoder on all slides) and pretrain.per_split exclude each other"
            )
        if tile.overlap_px >= tile.size_px:
            raise ValueError(f"tile.overlap_px {tile.overlap_px} must be smaller than tile.size_px {tile.size_px}")
        if any(mpp <= tile.mpp for mpp in tile.parent_mpp):
            raise ValueError(f"tile.parent_mpp {tile.parent_mpp} must all be coarser than tile.mpp {tile.mpp}")
        if tile.parent_mpp and tile.overlap_px:
            raise ValueError("tile.parent_mpp needs tile.overlap_px 0: only then has a tile one parent")
        method = PRESET_METHODS.get(self.preset, self.pretrain.method)
        if self.pretrain.method != method:
            raise ValueError(
                f"preset {self.preset!r} has the published settings of {method}, which are wrong for pretrain.method "
                f"{self.pretrain.method!r}: use another preset ('dsmil-simclr' for simclr) or 'default' for it"
            )
        _check_pretrain(self.pretrain)
        if (self.train.split == "files") != (self.train.split_folder is not None):
            raise ValueError("train.split 'files' and train.split_folder go together: give both or neither")
        if self.train.tune and self.evaluate.protocol == "optimistic":
            raise ValueError("train.tune chooses without test labels, and evaluate.protocol 'optimistic' with them")
        if sum((engine.workers is not None, engine.cluster is not None, engine.batch.kind != "none")) > 1:
            raise ValueError("workers, cluster and batch.kind exclude each other: choose one place to work")
        return self


def _check_pretrain(pretrain: PretrainSettings) -> None:
    """What the fields of this section must agree on."""
    if pretrain.method != "dino" and pretrain.out_dim is not None:
        raise ValueError(
            f"pretrain.out_dim is for dino: with {pretrain.method} the output width is pretrain.bottleneck. Leave it "
            "out, or set pretrain.method to dino, the default before lejepa"
        )
    if pretrain.warmup_steps is not None and pretrain.warmup_epochs is not None:
        raise ValueError("pretrain.warmup_steps and pretrain.warmup_epochs both say how long the warm-up is: give one")
    is_constant = pretrain.chosen("schedule") == "constant"
    if is_constant and pretrain.weight_decay_end is not None:
        raise ValueError("pretrain.weight_decay_end is for the cosine schedule: the constant one keeps weight_decay")
    if is_constant and not pretrain.decay_share and pretrain.min_lr is not None:
        raise ValueError("pretrain.min_lr is never reached: the constant schedule keeps lr, unless decay_share is set")
    if pretrain.decay_share and not is_constant:
        raise ValueError("pretrain.decay_share is for the constant schedule: the cosine falls over the whole run")
    if pretrain.lora and pretrain.init == "scratch":
        raise ValueError(
            "pretrain.lora adapts trained weights, and pretrain.init is scratch: give --pretrain.init with an encoder, "
            "or leave pretrain.lora out"
        )
    if pretrain.batch % pretrain.accumulate:
        raise ValueError(f"pretrain.batch {pretrain.batch} does not divide into {pretrain.accumulate} equal parts")
    if pretrain.sampler == "one-slide" and (pretrain.tiles_per_slide or 1) % pretrain.batch:
        raise ValueError("pretrain.sampler 'one-slide' needs tiles_per_slide as a multiple of batch")
    if (pretrain.mean is None) != (pretrain.std is None):
        raise ValueError("pretrain.mean and pretrain.std go together: give both or neither")
    if pretrain.std is not None and min(pretrain.std) <= 0:
        raise ValueError("pretrain.std must be above 0 in all channels")
    for name in ("global_scale", "local_scale"):
        low, high = pretrain.chosen(name)
        if not 0 < low <= high <= 1:
            raise ValueError(f"pretrain.{name} must be two shares of the tile, the smaller first, above 0 and up to 1")


def resolve_settings(toml_file: Path | None = None, flags: Mapping[str, Any] | None = None) -> StudySettings:
    """Settings from, in rising order of weight: defaults, preset, `toml_file`, `flags` (a nested dict)."""
    from_file = read_toml(toml_file) if toml_file is not None else {}
    typed = dict(flags or {})
    preset = typed.get("preset", from_file.get("preset", "default"))
    merged: dict[str, Any] = {}
    if preset in get_args(Preset) and preset != "default":
        merged = overlay_settings(
            merged, read_toml(Path(str(resources.files("selfvitmil") / "presets" / f"{preset}.toml")))
        )
        if any(_section(info, "pretrain").get("init", "scratch") != "scratch" for info in (from_file, typed)):
            merged["pretrain"] = {k: v for k, v in _section(merged, "pretrain").items() if k not in FROM_SCRATCH}
    merged = overlay_settings(overlay_settings(merged, from_file), typed)
    return parse(merged, source=str(toml_file) if toml_file is not None else "the command line")


def user_engine_file() -> Path:
    """Where a user says once for all studies where work runs."""
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "selfvitmil" / "engine.toml"


def with_user_engine(flags: Mapping[str, Any], in_study: Any = None) -> dict[str, Any]:
    """The flags with the user's own engine settings below them, unless flags or study name a place to work.

    `in_study` is the section `engine` of study.toml.
    """
    path, places = user_engine_file(), (flags.get("engine"), in_study)
    if any(key in place for place in places if isinstance(place, dict) for key in PLACES) or not path.is_file():
        return dict(flags)
    info = read_toml(path)
    if other := [key for key in info if key != "engine"]:
        what = f"{path.name} in {path.parent}: it holds {', '.join(other)}"
        raise ConfigError(
            what,
            "this file is for the section [engine] alone",
            "Put other settings into study.toml",
            code="engine-file-sections",
        )
    parse(info, str(path))
    return overlay_settings({"engine": info.get("engine", {})}, flags)


def check_study_engine(info: Mapping[str, Any], source: str) -> None:
    """ConfigError where the section `engine` of a study's file says more than how many processes work here."""
    section = info.get("engine")  # of another type: parsing says so
    others = [key for key in EngineSettings.model_fields if key not in STUDY_ENGINE]
    forbidden = [f"engine.{key}" for key in others if isinstance(section, dict) and key in section]
    if forbidden:
        raise ConfigError(
            f"{source}: it sets {', '.join(forbidden)}",
            "a study may come from somebody else, and these settings start programs or connect to other machines",
            f"Give them as flags, or move them to {user_engine_file()}, which holds for all your studies",
            code="study-engine-forbidden",
        )


REMOVED = dict.fromkeys(
    ("tile.pack", "tile.pack_encoding", "tile.pack_quality", "pretrain.packs"),
    "tiles are no longer stored as images, and pretraining always reads them from the slides",
)
"""Settings of earlier versions, and why they were removed."""


def without_removed(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings stored with an artefact (a nested dict) without those that no longer exist."""
    kept = dict(record)
    for section in {name.split(".")[0] for name in REMOVED} & record.keys():
        values = _section(record, section)
        kept[section] = {key: value for key, value in values.items() if f"{section}.{key}" not in REMOVED}
    return kept


def parse(values: Mapping[str, Any], source: str) -> StudySettings:
    """Check a nested dict; `source` names in errors where it came from."""
    try:
        return StudySettings.model_validate(values)
    except ValidationError as error:
        raise ConfigError(
            f"{source}: {describe(error)}",
            how="`selfvitmil run --help-all` lists all settings",
            code="invalid-settings",
        ) from None


def describe(error: ValidationError) -> str:
    """The problems that pydantic found, in one line that a user can act on."""
    return "; ".join(_describe(problem) for problem in error.errors())


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file as a nested dict."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(
            f"{path.name}: cannot be read as TOML ({error})", how="Correct the file", code="unreadable-toml"
        ) from None


def to_toml(settings: Settings, sections: set[str] | dict[str, set[str]] | None = None) -> str:
    """The settings, or some sections, or some keys of these, as TOML that `resolve_settings` reads back.

    Unset optional ones are left out.
    """
    info = settings.model_dump_json(exclude_none=True, include=sections)
    return _to_toml(json.loads(info), prefix="").lstrip()


def flags_to_toml(flags: Mapping[str, Any]) -> str:
    """Return these settings, and no others, as TOML; ConfigError where they do not fit each other or their preset."""
    keys: dict[str, Any] = {key: set(_section(flags, key)) or True for key in flags}
    info = resolve_settings(None, flags).model_dump_json(exclude_none=True, include=keys)
    return _to_toml(json.loads(info), prefix="").lstrip()


def _to_toml(values: Mapping[str, Any], prefix: str) -> str:
    # JSON's strings, numbers, booleans and arrays of them are TOML's too.
    tables = [key for key in values if isinstance(values[key], dict)]
    text = "".join(f"{key} = {json.dumps(values[key], ensure_ascii=False)}\n" for key in values if key not in tables)
    for key in tables:
        text += f"\n[{prefix}{key}]\n" + _to_toml(values[key], prefix=f"{prefix}{key}.")
    return text


def _section(info: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = info.get(name)
    return cast(Mapping[str, Any], section) if isinstance(section, Mapping) else {}


def overlay_settings(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key in above:
        both = isinstance(above[key], Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = overlay_settings(merged[key], above[key]) if both else above[key]
    return merged


def _describe(problem: Any) -> str:
    location = [str(part) for part in problem["loc"]]
    name = ".".join(location)
    if problem["type"] != "extra_forbidden":
        message = str(problem["msg"]).removeprefix("Value error, ")
        return f"{name}: {message}" if name else message
    if name in REMOVED:
        return f"the setting {name!r} was removed ({REMOVED[name]}): delete its line"
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
