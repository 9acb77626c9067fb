"""Encoders in files: our own folders, checkpoints of other trainers, models of timm and of the Hugging Face hub.

A folder of ours holds `model.safetensors` and a `config.json` that timm reads as well
(`timm.create_model("local-dir:FOLDER", pretrained=True)`, timm >= 1.0.16; for a ResNet with instance norm or a ViT with
a convolutional stem after importing selfvitmil.encoder). What timm has no field for is under the key `selfvitmil`.

The architecture of a bare ViT checkpoint is inferred from the shapes of its weights, all but the number of heads. Files
other than safetensors are unpickled without running anything they hold.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import huggingface_hub
import safetensors
import safetensors.torch
import timm
import torch
from huggingface_hub.errors import EntryNotFoundError
from torch import Tensor, nn

from selfvitmil.cohort.table import listing
from selfvitmil.encoder.network import (
    Encoder,
    build_backbone,
    build_encoder,
    check_model_args,
    describe_weights,
    make_config,
    network_explained,
)
from selfvitmil.encoder.weight_names import CONCH_ANCHOR, from_conch, from_transformers, is_transformers
from selfvitmil.errors import EncoderError
from selfvitmil.store.files import (
    DamagedFile,
    ForeignObject,
    UnsafeFile,
    load_torch,
    read_json,
    sha256,
    write_bytes,
    write_text,
)

if TYPE_CHECKING:
    from selfvitmil.encoder.registry import KnownEncoder

FORMAT_VERSION = 1
WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
STEM = "patch_embed.proj"
"""Where the layers of a convolutional stem are: a convolution, a norm and a ReLU for each halving of the image."""
PREPROCESSOR = "preprocessor_config.json"
"""Where folders of the transformers library have mean and std."""
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pth", ".pt", ".ckpt", ".tar")


def save_encoder(folder: str | Path, encoder: Encoder) -> None:
    """Write `model.safetensors` and `config.json`; the same encoder gives the same bytes.

    The config is written last and holds the checksum of the weights: files of two encoders never pass for one.
    """
    folder = Path(folder)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in encoder.backbone.state_dict().items()}
    # Not save_file, whose files only their owner may read.
    weights = safetensors.torch.save(tensors, metadata={"format": "pt"})
    write_bytes(folder / WEIGHT_FILES[0], weights)
    ours = {"format_version": FORMAT_VERSION, "weights_sha256": hashlib.sha256(weights).hexdigest()}
    ours |= encoder.config.model_dump(mode="json")
    size_px = encoder.config.size_px
    content = {
        "architecture": ours.pop("architecture"),
        "num_classes": 0,
        "num_features": encoder.backbone.num_features,
        "model_args": ours.pop("model_args"),
        "pretrained_cfg": {
            "tag": "selfvitmil",
            "input_size": [3, size_px, size_px],
            "num_classes": 0,
            "mean": ours.pop("mean"),
            "std": ours.pop("std"),
            "interpolation": "bicubic",
            "crop_pct": 1.0,
            "first_conv": encoder.backbone.pretrained_cfg["first_conv"],
            "classifier": encoder.backbone.pretrained_cfg["classifier"],
        },
        "selfvitmil": ours,
    }
    write_text(folder / "config.json", json.dumps(content, indent=2) + "\n")


# ---------------------------------------------------------------------------------------------------- load


def load_encoder(
    source: str | Path,
    *,
    checkpoint_key: str = "teacher",
    num_heads: int | None = None,
    layout: str | None = None,
    **config: Any,
) -> Encoder:
    """Load an encoder in evaluation mode from any of these; only names use the internet.

    - a folder of ours, or one downloaded from the Hugging Face hub
    - a checkpoint file of DINO, of a plain ViT or of DSMIL's ResNet-18
    - a timm name such as `vit_small_patch16_224.dino`
    - a hub name such as `MahmoodLab/UNI`, with or without `hf-hub:`

    `checkpoint_key` is the network taken from a checkpoint of several, `num_heads` the one number that weights do not
    reveal (width / 64 otherwise). `layout` is how tokens become the embedding of a tile; None means the encoder's own
    (from its config.json, or that of a known encoder). `config` replaces fields of the EncoderConfig: mean, std, mpp,
    ... Raises EncoderError.
    """
    config |= {} if layout is None else {"layout": layout}
    path = Path(source).absolute()  # so that "." has a name
    if path.is_dir():
        encoder = _load_folder(path, num_heads, config)
    elif path.is_file():
        encoder = _load_file(path, checkpoint_key, num_heads, config)
    elif isinstance(source, Path) or _looks_like_path(source):
        raise EncoderError(
            f"{path.name}: there is no such file or folder",
            how="Correct the path of the encoder",
            code="file-not-found",
        )
    else:
        encoder = _load_name(re.sub(r"^(hf[-_]hub:)?(timm/)?", "", source), num_heads, config)
    return encoder.eval()


def _looks_like_path(source: str) -> bool:
    """A mistyped path must not become a request to the hub, whose names have the form owner/name."""
    first, *rest = Path(source).parts or ("",)
    in_a_folder = bool(rest) and (first in ("/", "..", "~") or Path(first).is_dir())
    return in_a_folder or len(rest) > 1 or source.startswith(".") or Path(source).suffix in WEIGHT_SUFFIXES


def _load_folder(folder: Path, num_heads: int | None, config: dict[str, Any]) -> Encoder:
    weights = next((folder / name for name in WEIGHT_FILES if (folder / name).is_file()), None)
    if weights is not None and not (folder / "config.json").exists() and _is_conch(folder.name):
        return _load_file(weights, "teacher", num_heads, config)
    content = _read_config(folder / "config.json", folder.name)
    if weights is None:
        from selfvitmil.encoder.registry import by_folder

        known, missing = by_folder(folder.name), f"{' or '.join(WEIGHT_FILES)} is missing"
        how = "Copy the whole folder of the encoder" if known is None else known.where()
        raise EncoderError(f"{folder.name}: there are no weights", missing, how, code="no-weights")
    if "selfvitmil" not in content:
        if _is_conch(folder.name):
            return _load_file(weights, "teacher", num_heads, config)
        extra = folder / PREPROCESSOR
        return _load_published(folder.name, content, weights, num_heads, config, extra if extra.is_file() else None)
    fields = dict(content["selfvitmil"])
    version, digest = fields.pop("format_version", None), fields.pop("weights_sha256", None)
    if version != FORMAT_VERSION:
        raise EncoderError(
            f"{folder.name}: its config.json has format version {version}",
            f"this version of selfvitmil reads version {FORMAT_VERSION}",
            "Use the version of selfvitmil that wrote the encoder, or a newer one",
            code="other-format-version",
        )
    try:
        found = sha256(weights)
    except OSError as error:
        raise EncoderError(
            f"{folder.name}: {weights.name} cannot be read",
            str(error.strerror),
            "Check its permissions and its drive, then run the same command again",
            code="unreadable-weights",
        ) from None
    if found != digest:
        raise EncoderError(
            f"{folder.name}: {weights.name} is damaged, or not the one that config.json describes",
            "its checksum differs",
            "Copy the folder again, or train the encoder again",
            code="checksum-mismatch",
        )
    try:
        fields |= {key: content["pretrained_cfg"][key] for key in ("mean", "std")}
        fields |= {key: content[key] for key in ("architecture", "model_args")}
        described = make_config(**(fields | config))
    except (KeyError, TypeError) as error:
        raise EncoderError(
            f"{folder.name}: config.json cannot be read",
            f"a part is missing or of another kind ({error})",
            "Copy the folder again",
            code="unreadable-encoder-config",
        ) from None
    state = _read_weights(weights)
    check_model_args(folder.name, described.model_args)
    build = partial(build_backbone, described.architecture, described.model_args)
    return Encoder(_build_fitting(folder.name, build, state), described)


def _is_conch(name: str) -> bool:
    """Return whether a folder is named after CONCH, whose own files have no config.json."""
    from selfvitmil.encoder.registry import by_folder

    known = by_folder(name)
    return known is not None and known.form == "conch"


def _load_name(name: str, num_heads: int | None, config: dict[str, Any]) -> Encoder:
    if "/" not in name:
        described = timm.get_pretrained_cfg(name)
        native_px = described.input_size[-1] if described else 224
        return build_encoder(name, img_size=config.get("size_px", native_px), pretrained=True, **config)
    repository, _, revision = name.partition("@")
    fetch = partial(huggingface_hub.hf_hub_download, repository, revision=revision or None)
    from selfvitmil.encoder.registry import by_hub

    known = by_hub(repository)
    facts: dict[str, Any] = {}
    if known is not None:
        facts = _facts(known)
    if known is not None and known.form == "conch":
        with network_explained(name, known.where()):
            weights = Path(fetch(WEIGHT_FILES[1]))
        return _load_file(weights, "teacher", num_heads, {"provenance": {"source": name}, **facts, **config})
    extra: Path | None = None
    with network_explained(name, known and known.where()):
        content = _read_config(Path(fetch("config.json")), name)
        try:
            weights = Path(fetch(WEIGHT_FILES[0]))
        except EntryNotFoundError:
            weights = Path(fetch(WEIGHT_FILES[1]))
        if _is_transformers_config(content) and known is None:
            try:
                extra = Path(fetch(PREPROCESSOR))
            except EntryNotFoundError:
                extra = None
    if not _is_transformers_config(content) and known is not None:  # timm's form of it says how pixels are normalized
        facts = {"layout": known.layout, "size_px": known.size_px}
    encoder = _load_published(name, content, weights, num_heads, {**facts, **config}, extra)
    encoder.keeps_colours = encoder.keeps_colours or known is not None
    return encoder


def _load_published(
    name: str,
    content: Mapping[str, Any],
    weights: Path,
    num_heads: int | None,
    config: dict[str, Any],
    preprocessor: Path | None = None,
) -> Encoder:
    """A network with a config.json of timm or transformers, with the customary layout where it is a known one."""
    if _is_transformers_config(content):
        state = from_transformers(_read_weights(weights))
        described = {} if preprocessor is None else _read_preprocessor(preprocessor, name)
        facts = {**described, "provenance": {"source": name}, **config}
        return _from_weights(name, state, num_heads or int(content["num_attention_heads"]), facts)
    encoder = _build_published(name, content, weights, num_heads, config)
    return _as_known(name, encoder, content.get("pretrained_cfg", content), config)


def _as_known(name: str, encoder: Encoder, described: Mapping[str, Any], config: Mapping[str, Any]) -> Encoder:
    """The encoder with what is customary for it, where it is a known one, unless `config` or `described` say else."""
    from selfvitmil.encoder.registry import by_content

    known = by_content({**described, **config}, encoder.backbone, name)
    encoder.keeps_colours = known is not None
    if known is None or "layout" in config:
        return encoder
    update = {key: value for key, value in _facts(known).items() if key not in {**described, **config}}
    note = (
        f"{name} is recognised as {known.name}: the layout is {known.layout}, unless embed.layout names another, and "
        "colours stay as scanned, unless stain.method is set"
    )
    # What was assumed about the normalization is known now.
    warnings = tuple(text for text in encoder.warnings if "mean" not in update or text != _assumed_imagenet(name))
    recognised = Encoder(encoder.backbone, encoder.config.model_copy(update=update), (*warnings, note))
    recognised.keeps_colours = True
    return recognised


def _facts(known: KnownEncoder) -> dict[str, Any]:
    """Fields of the EncoderConfig of a known encoder."""
    mean, std = known.normalization
    return {"layout": known.layout, "mean": mean, "std": std, "size_px": known.size_px}


def _build_published(
    name: str, content: Mapping[str, Any], weights: Path, num_heads: int | None, config: dict[str, Any]
) -> Encoder:
    """Some config.json lack arguments that the network needs: then ask the weights."""
    described = content.get("pretrained_cfg", content)
    size_px = (described.get("input_size") or (3, 224, 224))[-1]
    facts = {"size_px": size_px, "provenance": {"source": name}, **describe_weights(described), **config}
    classifier = described.get("classifier") or "head"
    state = _without(_read_weights(weights), [classifier] if isinstance(classifier, str) else classifier)
    args = {key: value for key, value in (content.get("model_args") or {}).items() if key != "num_classes"}
    make_config(architecture=str(content["architecture"]), **facts)  # an implausible size is refused before it is built
    check_model_args(name, args)
    try:
        build = partial(build_encoder, content["architecture"], img_size=size_px, model_args=args, **facts)
        return _build_fitting(name, build, state)
    except EncoderError:
        if not _is_vit(state):
            raise
    architecture, args, notes = _read_off(name, state, num_heads)
    encoder = build_encoder(architecture, model_args=args, **facts)
    _load_strictly(name, encoder.backbone, state)
    surprise = f"{name}: config.json and weights describe different networks; the weights were believed"
    return Encoder(encoder.backbone, encoder.config, (surprise, *notes))


def _load_file(path: Path, checkpoint_key: str, num_heads: int | None, config: dict[str, Any]) -> Encoder:
    content = _read_weights(path)
    if CONCH_ANCHOR in content:
        return _load_conch(path.name, from_conch(content), num_heads, config)
    state = _find_backbone(path.name, content, checkpoint_key)
    return _from_weights(path.name, state, num_heads, {"provenance": {"source": path.name}, **config})


def _from_weights(name: str, state: Mapping[str, Tensor], num_heads: int | None, config: dict[str, Any]) -> Encoder:
    """The network that has these weights, under timm's names, with what is known of it."""
    architecture, args, notes = _read_off(name, state, num_heads)
    facts = {"size_px": args.get("img_size", 224), "trained_on": "unknown"}
    encoder = build_encoder(architecture, model_args=args, **(facts | config))
    _load_strictly(name, encoder.backbone, state)
    if "mean" not in config:
        notes += (_assumed_imagenet(name),)
    return _as_known(name, Encoder(encoder.backbone, encoder.config, notes), {}, config)


def _assumed_imagenet(name: str) -> str:
    return f"{name} does not say how pixels were normalized: ImageNet's mean and std are assumed"


def _load_conch(name: str, state: Mapping[str, Tensor], num_heads: int | None, config: dict[str, Any]) -> Encoder:
    """The vision tower of CONCH: a ViT whose tokens a learned query pools."""
    from selfvitmil.encoder.registry import by_hub

    known = by_hub("MahmoodLab/CONCH")
    assert known is not None
    trunk = {key.removeprefix("trunk."): value for key, value in state.items() if key.startswith("trunk.")}
    _, found, _ = _read_off(name, trunk, num_heads or known.shape[0] // 64)
    args = {key: found[key] for key in ("img_size", "patch_size", "embed_dim", "depth", "num_heads")}
    facts = {"trained_on": "unknown", "provenance": {"source": name}, **_facts(known), **config}
    encoder = _build_fitting(name, partial(build_encoder, known.architecture, model_args=args, **facts), state)
    encoder.keeps_colours = True
    return encoder


# ---------------------------------------------------------------------------------------------------- weights


def _find_backbone(name: str, checkpoint: Mapping[str, Any], key: str) -> dict[str, Tensor]:
    """The weights of one network under timm's names, whatever it was wrapped in for training, without its heads."""
    state = checkpoint
    for wrapper in (key, "state_dict", "model"):
        state = state[wrapper] if isinstance(state.get(wrapper), Mapping) else state
    state = from_transformers(state) if is_transformers(state) else state
    tensors = {k: value for k, value in state.items() if isinstance(value, Tensor)}
    anchors = ("patch_embed.proj.weight", f"{STEM}.0.weight", "layer1.0.conv1.weight", "features.4.0.conv1.weight")
    prefixes = {k.removesuffix(anchor) for anchor in anchors for k in tensors if f".{k}".endswith(f".{anchor}")}
    if len(prefixes) > 1:
        prefixes = {prefix for prefix in prefixes if key in prefix.split(".")}
    if len(prefixes) != 1:
        raise EncoderError(
            f"{name}: no ViT or ResNet-18 found under {key!r}",
            f"the file holds {_brief(state)}",
            "If one of these is the network, name it by checkpoint_key",
            code="no-known-network",
        )
    (prefix,) = prefixes
    own = {k.removeprefix(prefix): value for k, value in tensors.items() if k.startswith(prefix)}
    # SimCLR, as DSMIL uses it, puts the children of a ResNet into a list.
    children = {"0": "conv1", "1": "bn1", "4": "layer1", "5": "layer2", "6": "layer3", "7": "layer4"}
    own = {re.sub(r"^features\.([014567])\b", lambda m: children[m[1]], k): value for k, value in own.items()}
    return _without(own, ("head", "head_dist", "fc", "l1", "l2", "mask_token", "masked_embed"))


def _without(state: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
    """The weights but those of modules or parameters that no embedding depends on."""
    return {key: value for key, value in state.items() if not any(f"{key}.".startswith(f"{name}.") for name in names)}


def _is_vit(state: Mapping[str, Tensor]) -> bool:
    first = f"{STEM}.0.weight" if f"{STEM}.0.weight" in state else f"{STEM}.weight"
    ranks = {"cls_token": 3, "pos_embed": 3, first: 4}
    ranks |= {"blocks.0.mlp.fc1.weight": 2, "blocks.0.mlp.fc2.weight": 2}
    return all(key in state and state[key].ndim == rank for key, rank in ranks.items())


def _read_off(
    name: str, state: Mapping[str, Tensor], num_heads: int | None
) -> tuple[str, dict[str, Any], tuple[str, ...]]:
    """timm's name and arguments of the network that has these weights, and what had to be assumed."""
    if "layer1.0.conv1.weight" in state:
        return ("resnet18" if "bn1.weight" in state else "resnet18_instancenorm"), {}, ()
    if not _is_vit(state):
        raise EncoderError(
            f"{name}: these are no weights of a ViT with a class token",
            f"they are {_brief(state)}",
            "Use a ViT of DINO's or timm's form, a ResNet-18, or a timm or hub name",
            code="not-a-vit",
        )
    width = state["cls_token"].shape[2]
    has_stem = f"{STEM}.0.weight" in state
    convolutions = sum(key.startswith(f"{STEM}.") and value.ndim == 4 for key, value in state.items())
    patch = 2 ** (convolutions - 1) if has_stem else state[f"{STEM}.weight"].shape[2]
    registers = state["reg_token"].shape[1] if "reg_token" in state else 0
    positions = state["pos_embed"].shape[1]
    # The class token and registers have positions too, or none of them has.
    placed = math.isqrt(max(0, positions - 1 - registers)) ** 2 == positions - 1 - registers
    grid = math.isqrt(positions - 1 - registers if placed else positions)
    hidden, gated = state["blocks.0.mlp.fc1.weight"].shape[0], state["blocks.0.mlp.fc2.weight"].shape[1]
    args: dict[str, Any] = {
        "img_size": grid * patch,
        "patch_size": patch,
        "embed_dim": width,
        "depth": len({key.split(".")[1] for key in state if key.startswith("blocks.")}),
        "num_heads": num_heads or _usual_heads(name, width),
        "mlp_ratio": (hidden + 0.5) / width if hidden % width else hidden // width,  # timm rounds hidden down
        "qkv_bias": "blocks.0.attn.qkv.bias" in state,
        "reg_tokens": registers,
        "no_embed_class": not placed,
    }
    if "blocks.0.ls1.gamma" in state:
        args["init_values"] = 1e-5  # asks for layer scales; their values come with the weights
    notes = () if num_heads else (f"{name} does not state its number of attention heads: {args['num_heads']} assumed",)
    sizes = {192: "tiny", 384: "small"} if has_stem else {192: "tiny", 384: "small", 1024: "large"}
    # An MLP gated by SwiGLU has half as many inputs to its second layer; of timm's plain ViTs DINOv2's giant has such.
    plain = f"vit_{sizes.get(width, 'base')}_patch16_{'convstem_' if has_stem else ''}224"
    return (plain if hidden == gated else "vit_giant_patch14_reg4_dinov2"), args, notes


def _usual_heads(name: str, width: int) -> int:
    if width % 64:
        raise EncoderError(
            f"{name}: the number of attention heads is not known",
            "weights do not reveal it",
            "Give num_heads",
            code="unknown-num-heads",
        )
    return {1280: 16, 1408: 16}.get(width, width // 64)


Network = TypeVar("Network", bound=nn.Module)


def _build_fitting(name: str, build: Callable[[], Network], state: Mapping[str, Tensor]) -> Network:
    """Build a network and load its weights; EncoderError where they do not fit.

    It is built without memory first: a config can claim any size, the weights only what their file holds.
    """
    with torch.device("meta"):
        _check_fits(name, _backbone(build()).state_dict(), state)
    network = build()
    _load_strictly(name, _backbone(network), state)
    return network


def _backbone(network: nn.Module) -> nn.Module:
    return network.backbone if isinstance(network, Encoder) else network


def _load_strictly(name: str, backbone: nn.Module, state: Mapping[str, Tensor]) -> None:
    _check_fits(name, backbone.state_dict(), state)
    unknown = [key for key, value in state.items() if not value.isfinite().all()]
    if unknown:
        raise EncoderError(
            f"{name}: weights that are not finite: {_brief(unknown)}",
            how="Copy or train it again",
            code="non-finite-weights",
        )
    own = backbone.state_dict()
    backbone.load_state_dict({key: value for key, value in own.items() if key not in state} | dict(state))


def _check_fits(name: str, own: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    """EncoderError where weights are missing, too many or of other shapes than the network's own."""
    state = {key: value for key, value in own.items() if key.endswith("num_batches_tracked")} | dict(state)
    shapes = {key: (tuple(state[key].shape), tuple(own[key].shape)) for key in own if key in state}
    problems = {
        "missing": [key for key in own if key not in state],
        "unexpected": [key for key in state if key not in own],
        "of another shape": [f"{key} {has} for {needs}" for key, (has, needs) in shapes.items() if has != needs],
    }
    if any(problems.values()):
        raise EncoderError(
            f"{name}: the weights do not fit the network",
            "; ".join(f"{problem}: {_brief(keys)}" for problem, keys in problems.items() if keys),
            "Use weights of this very architecture",
            code="weights-mismatch",
        )


def _brief(names: Iterable[Any]) -> str:
    return listing(map(str, names), 3) or "nothing"


# ---------------------------------------------------------------------------------------------------- read


class _Shell:
    """Stands for what a training run saved beside the weights: it comes out of the file as nothing at all."""

    def __init__(self, *args: Any):
        pass

    def __setstate__(self, state: Any) -> None:
        pass


_NUMBERS = ("numpy.dtype", "numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar")
_SHELLS: list[Any] = [(_Shell, name) for name in ("argparse.Namespace", *_NUMBERS)]


def _read_weights(path: Path) -> dict[str, Any]:
    """The mapping that a file of weights holds. Nothing in it is run: code and foreign objects are refused."""
    try:
        if path.suffix == ".safetensors":
            return safetensors.torch.load_file(path)
        with torch.serialization.safe_globals(_SHELLS):
            content = load_torch(path)
    except ForeignObject as error:
        raise EncoderError(
            f"{path.name}: the file holds more than weights ({error.name})",
            "loading it could run code of its author; nothing was run",
            "Ask for the weights as safetensors, or as a plain state_dict",
            code="unsafe-weights",
        ) from None
    except UnsafeFile as error:
        if not isinstance(error, DamagedFile):
            how = "Do not use this file; ask for the weights as safetensors"
            raise EncoderError(
                f"{path.name}: cannot be read as weights", str(error), how, code="unreadable-weights"
            ) from None
        raise EncoderError(
            f"{path.name}: cannot be read as weights", str(error), "Copy it again", code="unreadable-weights"
        ) from error
    except Exception as error:  # bytes of any kind make the parser of safetensors fail in any way
        raise EncoderError(
            f"{path.name}: cannot be read as weights",
            "it is damaged, cut short or of another kind",
            "Copy it again",
            code="unreadable-weights",
        ) from error
    if not isinstance(content, Mapping):
        kind = type(content).__name__
        raise EncoderError(
            f"{path.name}: holds a {kind}",
            "a state_dict is expected",
            "Save the network's state_dict",
            code="not-a-state-dict",
        )
    return dict(content)


def _read_config(path: Path, name: str) -> dict[str, Any]:
    try:
        content = read_json(path)
    except FileNotFoundError:
        from selfvitmil.encoder.registry import by_folder

        known = by_folder(name)
        how = f"Pass a folder that holds config.json and {WEIGHT_FILES[0]}, or a checkpoint file"
        raise EncoderError(
            f"{name}: there is no config.json",
            "it is no folder of an encoder, or incomplete",
            how if known is None else f"{how}; {known.where()}",
            code="no-encoder-config",
        ) from None
    except (OSError, ValueError) as error:
        raise EncoderError(
            f"{name}: config.json cannot be read", str(error), "Copy the folder again", code="unreadable-encoder-config"
        ) from None
    parts = ("model_args", "pretrained_cfg", "selfvitmil")
    if not isinstance(content, dict) or not all(isinstance(content.get(part), dict | None) for part in parts):
        raise EncoderError(
            f"{name}: config.json cannot be read",
            "its parts are no tables",
            "Copy the folder again",
            code="unreadable-encoder-config",
        )
    if not isinstance(content.get("architecture"), str) and not _is_transformers_config(content):
        raise EncoderError(
            f"{name}: its config.json names no timm architecture",
            "it is of another library, or damaged",
            "Look for a version of the model for timm on the hub",
            code="no-architecture",
        )
    return content


def _is_transformers_config(content: Mapping[str, Any]) -> bool:
    return "architecture" not in content and type(content.get("num_attention_heads")) is int


def _read_preprocessor(path: Path, name: str) -> dict[str, Any]:
    """Mean and std that a folder of the transformers library states."""
    try:
        content = read_json(path)
        pairs = {"mean": content.get("image_mean"), "std": content.get("image_std")}
    except (OSError, ValueError, AttributeError) as error:
        raise EncoderError(
            f"{name}: {PREPROCESSOR} cannot be read",
            str(error),
            "Copy the folder again",
            code="unreadable-encoder-config",
        ) from None
    return {key: tuple(value) for key, value in pairs.items() if isinstance(value, list) and len(value) == 3}
