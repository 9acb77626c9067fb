"""Model folders of the supervised baseline: `model.safetensors`, `config.json` and `metrics.jsonl`.

The config is written last and holds the checksum of the weights, so that files of two models cannot be mixed up.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from selfvitmil.errors import ArtefactError
from selfvitmil.store.files import write_bytes, write_text

FORMAT_VERSION = 1
WEIGHTS, CONFIG, METRICS = "model.safetensors", "config.json", "metrics.jsonl"


def write_model(
    folder: Path,
    kind: str,
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any],
    history: Iterable[Mapping[str, Any]],
) -> None:
    """Write a model folder; the same model gives byte-identical weights and config."""
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    weights = safetensors.torch.save(plain, metadata={"format": "pt"})
    write_bytes(folder / WEIGHTS, weights)
    write_text(folder / METRICS, "".join(json.dumps(line) + "\n" for line in history))
    head = {"kind": kind, "format_version": FORMAT_VERSION, "weights_sha256": hashlib.sha256(weights).hexdigest()}
    write_text(folder / CONFIG, json.dumps({**head, **config}, indent=2, sort_keys=True) + "\n")


def read_config(folder: Path, kind: str) -> dict[str, Any]:
    """Return the config of a model; raise ArtefactError where there is none of this kind."""
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        info = (config["kind"], config["format_version"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _unreadable(folder, f"{CONFIG} is missing or damaged ({type(error).__name__})") from None
    if info != (kind, FORMAT_VERSION):
        raise _unreadable(folder, f"it is a {info[0]} in format {info[1]}, expected a {kind} in {FORMAT_VERSION}")
    return config


def read_model(folder: Path, kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return weights and config of a model written by `write_model`; raise ArtefactError if invalid."""
    config = read_config(folder, kind)
    try:
        weights = (folder / WEIGHTS).read_bytes()
        if hashlib.sha256(weights).hexdigest() != config["weights_sha256"]:
            raise ValueError(f"{WEIGHTS} is damaged, or not the one that {CONFIG} describes")
        return safetensors.torch.load(weights), config
    except OSError:
        raise _unreadable(folder, f"{WEIGHTS} is missing") from None
    except (ValueError, KeyError, safetensors.SafetensorError) as error:
        raise _unreadable(folder, str(error)) from None


def read_history(folder: Path) -> tuple[dict[str, Any], ...]:
    """Return the lines of `metrics.jsonl`."""
    return tuple(json.loads(line) for line in (folder / METRICS).read_text(encoding="utf-8").splitlines())


def _unreadable(folder: Path, why: str) -> ArtefactError:
    return ArtefactError(
        f"{folder.name}: not a readable model", why, "Remove the folder and train it again", code="unreadable-model"
    )
