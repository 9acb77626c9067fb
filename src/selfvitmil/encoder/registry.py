"""Published tile encoders of pathology: what each is, how it is used, where its files are and how a copy is recognised.

One entry per encoder. Networks, tokens, normalization and tile sizes are as CONCH's code, TRIDENT's and slide2vec's
loaders and eva's documentation have them, licences and access as LazySlide's registry of models lists them. Not checked
against such a source: resolutions of Virchow2, Kaiko and Lunit, and the arXiv numbers of Kaiko, Lunit and UNI. Licences
that no source stated are left to the encoder's page. Weights are not part of this package.

By its hub name an encoder is known at once. A folder that was copied to a machine without internet has lost that name:
there the tag in its config.json, the shape of its network, or the name of the folder together with the shape decide.
Gated MLPs (SwiGLU) distinguish networks from general ViTs of the same size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from selfvitmil.settings import TokenLayout

MEAN_TOLERANCE = 1e-3
"""Largest difference of channel means that counts as the same normalization."""
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
HALF = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
BIOPTIMUS = (0.707223, 0.578729, 0.703617), (0.211883, 0.230117, 0.177517)
HIBOU = (0.7068, 0.5755, 0.722), (0.195, 0.2316, 0.1816)
LUNIT = (0.70322989, 0.53606487, 0.66096631), (0.21716536, 0.26081574, 0.20723464)
GATED_GIANT = "vit_giant_patch14_reg4_dinov2"
"""timm's ViT with gated MLPs, of which those of other sizes are made by arguments."""
CC = "CC BY-NC-ND 4.0"
Channels = tuple[float, float, float]
Shape = tuple[int, int, int, int, bool]
"""Width, blocks, patch edge in pixels and registers of a ViT, and whether its MLPs are gated."""


@dataclass(frozen=True)
class KnownEncoder:
    """One published encoder."""

    name: str
    hub: tuple[str, ...]
    """Names on the Hugging Face hub, the owners' first."""
    architecture: str
    """timm's name of the network, or of one registered by `network`."""
    shape: Shape
    layout: TokenLayout | Literal["pooled"]
    """The customary embedding of a tile."""
    dim: int
    """Length of that embedding."""
    normalization: tuple[Channels, Channels]
    """Mean and standard deviation of the RGB channels, white = 1."""
    mpp: tuple[float, ...]
    """Microns per pixel of its training tiles."""
    licence: str
    reference: str
    model_args: Mapping[str, Any] = field(default_factory=dict)
    """Arguments beyond those of the architecture."""
    size_px: int = 224
    """Edge of a tile."""
    form: Literal["timm", "transformers", "conch"] = "timm"
    """How its weights are named."""
    tag: str | None = None
    """`pretrained_cfg.tag` of its config.json."""
    told_by: Literal["shape", "shape and mean", "name"] = "name"
    """What distinguishes a copy without a tag from other networks."""
    gated: bool = False
    """Whether the owners hand out the weights on request only."""

    @property
    def files(self) -> tuple[str, ...]:
        """Files that a folder of it needs."""
        weights = "pytorch_model.bin" if self.form == "conch" else "model.safetensors or pytorch_model.bin"
        return (weights,) if self.form == "conch" else ("config.json", weights)

    @property
    def page(self) -> str:
        """Where its weights are."""
        return f"https://huggingface.co/{self.hub[0]}"

    def where(self) -> str:
        """Return where its files are to be had, as one sentence without a full stop."""
        access = "ask for access on" if self.gated else "download them from"
        return f"{self.name} consists of {' and '.join(self.files)}: {access} {self.page}"


def _giant(depth: int, registers: int, **args: Any) -> dict[str, Any]:
    return {"img_size": 224, "depth": depth, "reg_tokens": registers, "no_embed_class": registers > 0, **args}


def _kaiko(size: str, patch: int, width: int) -> KnownEncoder:
    """Kaiko's ViTs of DINO in the form of timm."""
    depth = 12
    return KnownEncoder(
        f"Kaiko ViT-{size[0].upper()}/{patch}",
        (f"1aurent/vit_{size}_patch{patch}_224.kaiko_ai_towards_large_pathology_fms",),
        f"vit_{size}_patch{patch}_224", (width, depth, patch, 0, False), "cls", width, HALF, (0.25, 0.5, 1.0, 2.0),
        "see its page", "kaiko.ai 2024, arXiv 2404.15217", tag="kaiko_ai_towards_large_pathology_fms",
    )  # fmt: skip


def _lunit(patch: int) -> KnownEncoder:
    return KnownEncoder(
        f"Lunit ViT-S/{patch}", (f"1aurent/vit_small_patch{patch}_224.lunit_dino",), f"vit_small_patch{patch}_224",
        (384, 12, patch, 0, False), "cls", 384, LUNIT, (0.25, 0.5), "see its page",
        "Kang et al. 2023, arXiv 2212.04690", tag="lunit_dino",
    )  # fmt: skip


_VIRCHOW = {"embed_dim": 1280, "num_heads": 16, "mlp_ratio": 5.3375, "no_embed_class": False}

KNOWN = (
    KnownEncoder(
        "UNI", ("MahmoodLab/UNI",), "vit_large_patch16_224", (1024, 24, 16, 0, False), "cls", 1024, IMAGENET, (0.5,),
        CC, "Chen et al. 2024, arXiv 2308.15474", {"init_values": 1e-5}, tag="uni_mass100k", gated=True,
    ),
    KnownEncoder(
        "UNI2-h", ("MahmoodLab/UNI2-h",), GATED_GIANT, (1536, 24, 14, 8, True), "cls", 1536, IMAGENET, (0.5,),
        CC, "Chen et al. 2024, arXiv 2308.15474", _giant(24, 8), told_by="shape", gated=True,
    ),
    KnownEncoder(
        "Virchow", ("paige-ai/Virchow",), GATED_GIANT, (1280, 32, 14, 0, True), "cls+patchmean", 2560, IMAGENET, (0.5,),
        "Apache-2.0", "Vorontsov et al. 2024, arXiv 2309.07778", _giant(32, 0, **_VIRCHOW), told_by="shape", gated=True,
    ),
    KnownEncoder(
        "Virchow2", ("paige-ai/Virchow2",), GATED_GIANT, (1280, 32, 14, 4, True), "cls+patchmean", 2560, IMAGENET,
        (0.25, 0.5, 1.0, 2.0), CC, "Zimmermann et al. 2024, arXiv 2408.00738", _giant(32, 4, **_VIRCHOW),
        tag="virchow_v2", told_by="shape", gated=True,
    ),
    KnownEncoder(
        "H-optimus-0", ("bioptimus/H-optimus-0",), GATED_GIANT, (1536, 40, 14, 4, True), "cls", 1536, BIOPTIMUS, (0.5,),
        "Apache-2.0", "Saillard et al. 2024, github.com/bioptimus/releases", _giant(40, 4), told_by="shape and mean",
    ),
    KnownEncoder(
        "H-optimus-1", ("bioptimus/H-optimus-1",), GATED_GIANT, (1536, 40, 14, 4, True), "cls", 1536, BIOPTIMUS, (0.5,),
        CC, "Bioptimus 2025, huggingface.co/bioptimus/H-optimus-1", _giant(40, 4), told_by="shape and mean", gated=True,
    ),
    KnownEncoder(
        "Prov-GigaPath", ("prov-gigapath/prov-gigapath",), GATED_GIANT, (1536, 40, 16, 0, True), "cls", 1536, IMAGENET,
        (0.5,), "Apache-2.0 with conditions", "Xu et al. 2024, doi 10.1038/s41586-024-07441-w",
        _giant(40, 0, patch_size=16), told_by="shape", gated=True,
    ),
    KnownEncoder(
        "Phikon", ("owkin/phikon", "1aurent/vit_base_patch16_224.owkin_pancancer"), "vit_base_patch16_224",
        (768, 12, 16, 0, False), "cls", 768, IMAGENET, (0.5,), "Owkin non-commercial",
        "Filiot et al. 2023, doi 10.1101/2023.07.21.23292757", form="transformers", tag="owkin_pancancer",
    ),
    KnownEncoder(
        "Phikon-v2", ("owkin/phikon-v2",), "vit_large_patch16_224", (1024, 24, 16, 0, False), "cls", 1024, IMAGENET,
        (0.5,), "Owkin non-commercial", "Filiot et al. 2024, arXiv 2409.09173", {"init_values": 1e-5},
        form="transformers",
    ),
    KnownEncoder(
        "Hibou-B", ("histai/hibou-b",), "vit_base_patch14_reg4_dinov2", (768, 12, 14, 4, False), "cls", 768, HIBOU,
        (0.5,), "Apache-2.0", "Nechaev et al. 2024, arXiv 2406.05074", {"img_size": 224}, form="transformers",
        gated=True,
    ),
    KnownEncoder(
        "Hibou-L", ("histai/hibou-L",), "vit_large_patch14_reg4_dinov2", (1024, 24, 14, 4, False), "cls", 1024, HIBOU,
        (0.5,), "Apache-2.0", "Nechaev et al. 2024, arXiv 2406.05074", {"img_size": 224}, form="transformers",
        gated=True,
    ),
    _kaiko("small", 16, 384),
    _kaiko("small", 8, 384),
    _kaiko("base", 16, 768),
    _kaiko("base", 8, 768),
    KnownEncoder(
        "Kaiko ViT-L/14", ("1aurent/vit_large_patch14_reg4_dinov2.kaiko_ai_towards_large_pathology_fms",),
        "vit_large_patch14_reg4_dinov2", (1024, 24, 14, 4, False), "cls", 1024, HALF, (0.25, 0.5, 1.0, 2.0),
        "see its page", "kaiko.ai 2024, arXiv 2404.15217", tag="kaiko_ai_towards_large_pathology_fms",
    ),
    _lunit(16),
    _lunit(8),
    KnownEncoder(
        "Midnight-12k", ("kaiko-ai/midnight",), "vit_giant_patch14_dinov2", (1536, 40, 14, 0, True), "cls+patchmean",
        3072, HALF, (0.25, 0.5, 1.0, 2.0), "MIT", "Karasikov et al. 2025, arXiv 2504.05186", {"img_size": 224},
        form="transformers", told_by="shape and mean",
    ),
    KnownEncoder(
        "CONCH", ("MahmoodLab/CONCH",), "conch_vision", (768, 12, 16, 0, False), "pooled", 512, IMAGENET, (0.5,), CC,
        "Lu et al. 2024, doi 10.1038/s41591-024-02856-4", size_px=448, form="conch", gated=True,
    ),
)  # fmt: skip


def by_hub(repository: str) -> KnownEncoder | None:
    """Return the known encoder of that name on the hub, in whatever case."""
    return next((known for known in KNOWN if repository.lower() in map(str.lower, known.hub)), None)


def by_folder(name: str) -> KnownEncoder | None:
    """Return the known encoder that a file or folder is named after, such as `H-optimus-1` or `uni2-h.safetensors`."""
    stem = name.lower().removesuffix(".safetensors").removesuffix(".bin").removesuffix(".pth").removesuffix(".pt")
    names = {hub.split("/")[1].lower(): known for known in KNOWN for hub in known.hub}
    return ({known.name.lower(): known for known in KNOWN} | names).get(stem)


def by_content(described: Mapping[str, Any], backbone: Any, name: str = "") -> KnownEncoder | None:
    """Return the known encoder by timm's description of the weights (`pretrained_cfg`), by the network, by `name`.

    A name alone decides nothing: the network must have the size of the encoder that the folder is named after.
    """
    shape, mean, tag = vit_shape(backbone), described.get("mean"), described.get("tag")
    named = by_folder(name)
    if named is not None and shape is not None and named.shape[:4] == shape[:4]:
        return named
    tagged = [known for known in KNOWN if tag is not None and known.tag == tag]
    if tagged:
        return next((known for known in tagged if known.shape == shape), tagged[0])
    for known in KNOWN:
        fits = known.told_by != "name" and known.shape == shape
        if fits and (known.told_by == "shape" or _same_mean(known.normalization[0], mean)):
            return known
    return None


def vit_shape(backbone: Any) -> Shape | None:
    """Return width, blocks, patch edge, registers and whether MLPs are gated; None for networks other than ViTs."""
    vit = getattr(backbone, "trunk", backbone)
    try:
        mlp, patch = vit.blocks[0].mlp, vit.patch_embed.patch_size[0]
        gated = mlp.fc1.out_features == 2 * mlp.fc2.in_features
        return vit.embed_dim, len(vit.blocks), patch, vit.num_reg_tokens, gated
    except (AttributeError, IndexError, TypeError):
        return None


def _same_mean(known: Channels, found: Any) -> bool:
    return found is not None and max(abs(a - b) for a, b in zip(known, found, strict=True)) < MEAN_TOLERANCE
